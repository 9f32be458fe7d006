"""Why a task failed, for people."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from gpumesh.model.outcomes import failure_text


@pytest.mark.parametrize(
    ("details", "text"),
    [
        ({"reason": "a.py printed nothing", "exit": 0, "stderr": ""}, "a.py printed nothing"),
        (
            {"reason": "a.py exited with code 1", "stderr": "x\ny\n"},
            "a.py exited with code 1; its last lines on stderr:\n  x\n  y",
        ),
        (
            {"reason": "killed by SIGKILL", "memory_bytes": 3 * 10**9, "memory_limit_bytes": 4 * 10**9, "out_of_memory": True},
            "killed by SIGKILL, by the system for lack of memory; it had reached 3 GB of 4 GB",
        ),
        ({"reason": "killed by SIGSEGV", "memory_bytes": 3 * 10**9}, "killed by SIGSEGV; it had reached 3 GB of memory"),
        ({}, "it failed for a reason that is not known"),
    ],
)
def test_a_failure_reads_as_a_sentence_and_the_last_lines(details: Dict[str, Any], text: str) -> None:
    assert failure_text(details) == text
