"""`gpumesh join` at a terminal, while there is no coordinator."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect")


def test_it_says_once_what_it_waits_for_and_how_to_end_it(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUMESH_")}
    process = pexpect.spawn(
        sys.executable,
        ["-m", "gpumesh.cli.main", "join", "127.0.0.1:1", "--token", "a token for nobody", "--slots", "1", "--score", "1"],
        env={**kept, "XDG_CONFIG_HOME": str(tmp_path), "TERM": "dumb"},
        encoding="utf-8",
        timeout=20,
        dimensions=(24, 250),
    )
    process.expect(r"cannot reach the coordinator at 127\.0\.0\.1:1 \(nothing listens .*\); trying again, Ctrl-C ends this\r\n")
    process.send("\x03")
    process.expect(pexpect.EOF)
    process.close()

    assert "cannot reach" not in process.before
    assert process.exitstatus == 0
