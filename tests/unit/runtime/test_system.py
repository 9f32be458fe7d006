"""What a process does to itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

SHOW = """
import sys
from gpumesh.runtime.system import overwrite_start
overwrite_start(sys.argv[1])
for name in ("cmdline", "environ"):
    with open(f"/proc/self/{name}", "rb") as file:
        sys.stdout.buffer.write(file.read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_secret_is_overwritten_where_it_stands_for_itself_and_nowhere_else() -> None:
    secret = "söme-secret"

    shown = subprocess.run(
        [sys.executable, "-c", SHOW, secret, f"--token={secret}", f"--name={secret}", f"more-{secret}", "last"],
        env={"GPUMESH_TOKEN": secret, "OTHER": f"x{secret}", "LANG": "C.UTF-8"},
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")

    hidden = b"x" * len(secret.encode())
    assert shown[3:8] == [hidden, b"--token=" + hidden, f"--name={secret}".encode(), f"more-{secret}".encode(), b"last"]
    assert b"GPUMESH_TOKEN=" + hidden in shown
    assert f"OTHER=x{secret}".encode() in shown
