"""The question for a token, at a terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect")


@pytest.mark.parametrize("key", ["\x03", "\x04"], ids=["ctrl-c", "ctrl-d"])
def test_it_ends_the_program_as_anywhere_else(key: str, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUMESH_")}
    process = pexpect.spawn(
        sys.executable,
        ["-m", "gpumesh.cli.main", "join", "127.0.0.1:1"],
        env={**kept, "XDG_CONFIG_HOME": str(tmp_path), "TERM": "dumb"},
        encoding="utf-8",
        timeout=20,
    )
    process.expect("Token of the mesh: ")
    process.send(key)
    process.expect(pexpect.EOF)
    process.close()

    assert process.exitstatus == 130
    assert "Aborted" not in process.before
    assert "Traceback" not in process.before
