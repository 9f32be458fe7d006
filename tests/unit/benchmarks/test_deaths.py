"""Who is killed, and what the tasks leave for whoever kills."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.deaths import KILL_INTO, MACHINES, Mark, choose_victim, read_marks
from benchmarks.functions import SPEED, recorded


def mark(index: int, at: float, *, pid: int = 7, is_second: bool = True) -> Mark:
    return Mark(index, pid, is_second, at)


def test_it_is_one_of_the_second_machine_that_has_run_for_a_while() -> None:
    marks = [mark(0, 1.0), mark(1, 8.99 - KILL_INTO), mark(2, 8.99 - KILL_INTO, pid=8, is_second=False)]

    assert choose_victim(marks, 9.0, 3) == marks[1]


@pytest.mark.parametrize("now", [8.98, 9.06])
def test_one_that_has_just_started_or_may_have_ended_is_not(now: float) -> None:
    assert choose_victim([mark(0, 8.99 - KILL_INTO)], now, 1) is None


def test_nobody_is_killed_before_enough_have_started() -> None:
    assert choose_victim([mark(0, 8.99 - KILL_INTO)], 9.0, 2) is None


def test_a_task_leaves_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, machine in enumerate(MACHINES):
        monkeypatch.setenv(SPEED, str(machine.speed))
        assert recorded((place, 0.0, str(tmp_path))) == place

    first, second = sorted(read_marks(str(tmp_path)))
    assert (first.index, first.pid, first.is_second) == (0, os.getpid(), False)
    assert (second.index, second.is_second) == (1, True)
    assert second.at >= first.at
