"""What tasks ask the coordinator about their objects."""

from __future__ import annotations

from typing import Any

import pytest

from gpumesh.runtime.nested_service import QUESTIONS, answer
from gpumesh.scheduler.directory import Directory

TASK = 7 << 32


@pytest.fixture
def directory() -> Directory:
    made = Directory()
    for oid in (1, 2):
        made.declare(oid, 10, peer=3, owner="me", refs=())
    return made


def test_unknown_are_those_that_do_not_exist(directory: Directory) -> None:
    assert answer("unknown-objects", {"oids": [1, 2, 5, 9]}, directory, {TASK}) == [5, 9]


def test_what_is_held_for_a_task_lives_until_it_has_ended(directory: Directory) -> None:
    assert answer("hold-for-task", {"task": TASK, "oids": [1, 5]}, directory, {TASK}) is True
    assert [entry.oid for entry in directory.release(3, [(1, 1), (2, 1)])] == [2]
    directory.check()
    assert [entry.oid for entry in directory.task_ended(TASK)] == [1]
    directory.check()


def test_nothing_is_held_for_a_task_that_has_ended(directory: Directory) -> None:
    assert answer("hold-for-task", {"task": TASK, "oids": [1]}, directory, set()) is False
    assert [entry.oid for entry in directory.release(3, [(1, 1)])] == [1]


@pytest.mark.parametrize("arguments", [{}, {"oids": 5}, {"oids": ["1"], "task": "x"}, {"task": None, "oids": None}])
@pytest.mark.parametrize("what", sorted(QUESTIONS))
def test_nonsense_changes_nothing(what: str, arguments: Any, directory: Directory) -> None:
    assert not answer(what, arguments, directory, {TASK})
    directory.check()
