"""Journals for tests, closed afterwards."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

from gpumesh.journal.base import Journal
from gpumesh.journal.memory import MemoryJournal
from gpumesh.journal.sqlite import SqliteJournal
from tests.support.journals import Answers, Turns


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


class SmallDisk:
    """A file system of its own, that can be filled up and made read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Take all the room that is left."""
        with open(self._ballast, "ab", buffering=0) as file:
            for size in (65536, 1024, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Give it back."""
        self._ballast.unlink()

    def mount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.folder)], check=True, timeout=20)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of 2 MB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "gpumesh-test", str(folder)], capture_output=True, timeout=20, check=False
        )
    except OSError as error:
        pytest.skip(f"no small disk can be mounted here: {error}")
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=20)
