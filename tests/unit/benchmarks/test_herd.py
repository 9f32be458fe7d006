"""Workers that lose their coordinator at once: real agents, a few of them."""

from __future__ import annotations

import sys

import pytest

from benchmarks.herd import BACK_SECONDS, measure, most_in_one_second

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="part of the harness")


def test_the_most_in_one_second() -> None:
    assert most_in_one_second([]) == 0
    assert most_in_one_second([0.0, 0.5, 0.9]) == 3
    assert most_in_one_second([0.0, 0.5, 1.0, 1.4]) == 3
    assert most_in_one_second([0.0, 2.0, 4.0]) == 1


def test_all_are_back_soon() -> None:
    found = measure(40, 1.0)

    assert found["missing"] == 0
    assert found["last_back_seconds"] <= BACK_SECONDS
