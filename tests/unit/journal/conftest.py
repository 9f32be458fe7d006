"""Journals for tests, closed afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

from gpumesh.journal.base import Journal
from gpumesh.journal.memory import MemoryJournal
from gpumesh.journal.sqlite import SqliteJournal
from tests.support.journals import Answers, Turns
from tests.support.small_disk import SmallDisk, mounted_disk


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def opened(tmp_path: Path, turns: Turns) -> Iterator[Callable[..., Answers]]:
    """Opens the database of this test, once more after the last one was closed."""
    journals: List[Journal] = []

    def make(path: Any = tmp_path / "jobs.db", **options: Any) -> Answers:
        journal = SqliteJournal(str(path), call_soon=turns.call_soon, **options)
        journals.append(journal)
        return Answers(journal, turns)

    yield make
    for journal in journals:
        journal.close()


@pytest.fixture(params=["memory", "sqlite"])
def answers(request: pytest.FixtureRequest, tmp_path: Path, turns: Turns) -> Iterator[Answers]:
    """One journal of each kind."""
    journal: Journal
    if request.param == "memory":
        journal = MemoryJournal(call_soon=turns.call_soon, wall=lambda: 1234.0)
    else:
        journal = SqliteJournal(str(tmp_path / "jobs.db"), call_soon=turns.call_soon, wall=lambda: 1234.0)
    yield Answers(journal, turns)
    journal.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of 2 MB, where this user may mount one."""
    with mounted_disk(tmp_path / "disk", megabytes=2) as disk:
        yield disk
