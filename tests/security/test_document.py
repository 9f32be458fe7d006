"""docs/security.md names a test for each threat, and each is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from gpumesh import config
from gpumesh.protocol import admission

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT[TEXT.index("## Threats") :].splitlines() if line.startswith("| ")][2:]
NAMED = sorted(set(re.findall(r"`(tests/[\w/.]+)::(\w+)`", TEXT)))


def test_each_threat_has_a_test() -> None:
    assert len(ROWS) >= 20
    for row in ROWS:
        assert re.search(r"`tests/[\w/.]+::\w+`", row), row


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_it_is_there(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_numbers_are_those_in_force() -> None:
    assert f"{config.FAILED_PROOFS} wrong tokens within {config.FAILED_PROOFS_SECONDS:g} s" in " ".join(TEXT.split())
    assert config.FAILED_PROOFS_MAX_SECONDS == 60
    assert f"At most {admission.PENDING_HANDSHAKES} connections" in TEXT
    assert f"{config.HANDSHAKE_SECONDS:g} s each" in TEXT
    assert f"at most {config.REFUSALS_LOGGED} lines an address and minute" in " ".join(TEXT.split())
    assert config.REFUSALS_LOGGED_SECONDS == 60
    assert f"at most {config.PREAUTH_FRAME_BYTES // 1024} KiB" in " ".join(TEXT.split())
