"""Several clients and priorities on one busy mesh of real processes: who gets on, counted in tasks, never in seconds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from gpumesh import accelerate
from gpumesh.scheduler import queues
from tests.support.machines import Machines, Span, machines, starts, work
from tests.support.processes import until

SLOTS = 2
LONG_SECONDS = 0.25  # A task of the client that has many: long beside the way to a worker and back on a busy machine.
FEW = 5


@pytest.fixture
def site() -> Iterator[Machines]:
    """A mesh of one worker with two slots."""
    with machines() as site:
        site.join(slots=SLOTS)
        yield site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "starts"
    path.mkdir()
    return path


def calls(folder: Path, name: str, count: int, seconds: float) -> List[Any]:
    return [(str(folder), f"{name}{n}", seconds) for n in range(count)]


def started_since(folder: Path, moment_ns: int, name: str) -> int:
    """How many tasks of this name have started after a moment."""
    marks = [path.name.split(".") for path in folder.iterdir()]
    return sum(mark[0].startswith(name) and int(mark[2]) > moment_ns for mark in marks)


# Others than those of the many: tasks that ask for something wait in a queue of their own.
@pytest.mark.parametrize("options", [{}, {"cores": 1}, {"memory": "1MiB"}], ids=str)
def test_five_short_tasks_do_not_wait_behind_a_thousand_of_another_client(
    site: Machines, folder: Path, options: Dict[str, Any]
) -> None:
    with accelerate(site.mesh)(work).map(calls(folder, "many", 1000, LONG_SECONDS)):
        until(lambda: len(starts(folder)) > 4 * SLOTS, 20)
        other = site.client()
        accelerate(other)(len).remote(()).result(20)  # It has connected.

        before = time.monotonic_ns()
        few = list(accelerate(other, **options)(work).map(calls(folder, "few", FEW, LONG_SECONDS / 50)))

        overtaken_by = started_since(folder, before, "many")
    assert [span.name for span in few] == [f"few{n}" for n in range(FEW)]
    assert overtaken_by <= 3 * SLOTS, "more than three task lengths"


def test_short_tasks_that_are_sent_ahead_do_not_keep_others_out(site: Machines, folder: Path) -> None:
    with accelerate(site.mesh)(work).map(calls(folder, "many", 5000, 0.0005)) as stream:
        until(lambda: len(starts(folder)) > 500, 20)
        other = site.client()
        accelerate(other)(len).remote(()).result(20)

        few = list(accelerate(other)(work).map(calls(folder, "few", FEW, 0.0005)))

        assert len(few) == FEW
        assert not stream.futures[-1].done()
        assert len(starts(folder)) < 4000


def test_two_busy_clients_get_on_alike(site: Machines, folder: Path) -> None:
    other = site.client()
    with accelerate(site.mesh)(work).map(calls(folder, "a", 300, 0.01)) as first:
        until(lambda: len(starts(folder)) > 40, 20)
        with accelerate(other)(work).map(calls(folder, "b", 300, 0.01)) as second:
            # It catches up with what the other had under way when it came.
            until(lambda: sum(name.startswith("b") for name in starts(folder)) > 40, 20)
            both_from = len(starts(folder))
            until(lambda: len(starts(folder)) >= both_from + 100, 30)
            shared = starts(folder)[both_from : both_from + 100]
            assert not first.futures[-1].done()
            assert not second.futures[-1].done()
    of_first = sum(name.startswith("a") for name in shared)
    assert 35 <= of_first <= 65


def test_a_higher_priority_goes_first(site: Machines, folder: Path) -> None:
    with accelerate(site.mesh)(work).map(calls(folder, "low", 300, LONG_SECONDS)):
        until(lambda: len(starts(folder)) > 2 * SLOTS, 20)

        before = time.monotonic_ns()
        spans: List[Span] = list(accelerate(site.mesh, priority=1)(work).map(calls(folder, "high", 10, LONG_SECONDS / 5)))

        overtaken_by = started_since(folder, before, "low")
    assert len(spans) == 10
    # What had been sent already, what started before these had arrived, and the slot beside the last of them.
    assert overtaken_by <= 3 * SLOTS


def test_a_low_priority_gets_through_in_the_end(site: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "AGEING_SECONDS", 0.2)  # A minute is too long for a test.
    with accelerate(site.mesh, priority=3)(work).map(calls(folder, "high", 500, 0.02)) as high:
        until(lambda: len(starts(folder)) > 2 * SLOTS, 20)

        low = accelerate(site.mesh)(work).remote(str(folder), "low", 0.02)

        assert low.result(20).name == "low"
        assert not high.futures[-1].done()
