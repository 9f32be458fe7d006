"""F38: work that was sent to one worker moves to those that join later, or that are faster."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Iterator, List, Tuple

import pytest

from gpumesh import accelerate
from tests.support.machines import Machines, Span, machines, starts, work
from tests.support.processes import until

SHORT_SECONDS = 0.002  # Short beside the time in which a result is back, so that tasks are sent ahead.


@pytest.fixture
def site() -> Iterator[Machines]:
    with machines() as site:
        yield site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "starts"
    path.mkdir()
    return path


def learn(site: Machines, folder: Path, *, seconds: float, count: int) -> None:
    """Have the mesh see how long the function takes."""
    list(accelerate(site.mesh)(work).map([(str(folder), "learnt", seconds)] * count))
    for path in folder.iterdir():
        path.unlink()


def test_a_worker_that_joins_later_gets_work_at_once_and_shares_what_is_left(site: Machines, folder: Path) -> None:
    gate = folder.parent / "gate"
    first = site.join()
    names = [*(f"long{n}" for n in range(4)), *(f"short{n}" for n in range(4))]
    calls = [(str(folder), name, 0.4 if name.startswith("long") else 0.02, str(gate)) for name in names]
    futures = [accelerate(site.mesh)(work).remote(*call) for call in calls]
    until(lambda: len(starts(folder)) == 1, 20)

    second = site.join()
    until(lambda: len(starts(folder)) == 2, 20, what="a task on the second worker, while the first is still at its own")
    gate.touch()

    assert [future.result(30).name for future in futures] == names
    assert Counter(starts(folder)) == Counter(names), "what moved had not been started"
    assert {future.worker for future in futures} == {first, second}


def test_what_was_sent_ahead_behind_a_long_task_moves_to_a_worker_that_joins(site: Machines, folder: Path) -> None:
    gate = folder.parent / "gate"
    first = site.join()
    learn(site, folder, seconds=0.0001, count=50)
    long = accelerate(site.mesh)(work).remote(str(folder), "long", 0, str(gate))
    until(lambda: starts(folder) == ["long"], 20)
    short = [accelerate(site.mesh)(work).remote(str(folder), f"short{n}", 0) for n in range(20)]
    until(lambda: site.view(first)["queued"], 20, what="short tasks that were sent ahead")

    second = site.join()

    assert sorted(future.result(20).name for future in short) == sorted(f"short{n}" for n in range(20))
    assert {future.worker for future in short} == {second}
    assert not long.done()
    gate.touch()
    assert long.result(20).name == "long"
    assert long.worker == first
    assert max(Counter(starts(folder)).values()) == 1


# A few of the short ones may have been on their way: one that starts, one ahead of it.
@pytest.mark.parametrize(("seconds", "count", "late"), [(0.05, 60, 0), (SHORT_SECONDS, 600, 2)])
def test_a_slow_worker_is_not_left_with_the_last_tasks_while_the_fast_one_idles(
    site: Machines, folder: Path, seconds: float, count: int, late: int
) -> None:
    fast, slow = site.join(speed=1.0), site.join(speed=0.1)
    learn(site, folder, seconds=seconds, count=count // 4)

    done: List[Tuple[str, Span]] = []
    for future in accelerate(site.mesh)(work).map([(str(folder), f"t{n}", seconds) for n in range(count)]).as_completed():
        done.append((future.worker, future.result()))

    idle_from = max(span.end for worker, span in done if worker == fast)
    assert len([span for worker, span in done if worker == slow and span.start > idle_from]) <= late
    shares = Counter(worker for worker, _ in done)
    assert shares[fast] > 3 * shares[slow]
    assert max(Counter(starts(folder)).values()) == 1


def test_a_slow_worker_works_too_as_long_as_it_helps(site: Machines, folder: Path) -> None:
    fast, slow = site.join(speed=1.0), site.join(speed=0.1)
    learn(site, folder, seconds=0.05, count=20)

    stream = accelerate(site.mesh)(work).map([(str(folder), f"t{n}", 0.05) for n in range(60)])
    workers = Counter(future.worker for future in stream.as_completed())

    assert set(workers) == {fast, slow}


def test_near_the_end_a_slow_worker_gets_nothing_that_the_fast_one_would_finish_first(site: Machines, folder: Path) -> None:
    fast, slow = site.join(speed=1.0), site.join(speed=0.1)
    learn(site, folder, seconds=0.05, count=30)

    stream = accelerate(site.mesh)(work).map([(str(folder), f"t{n}", 0.05) for n in range(60)])
    done = [(future.worker, future.result()) for future in stream.as_completed()]

    last_start = max(span.start for worker, span in done if worker == slow)
    # One task there takes as long as ten here; half of them allow for a machine that is busy with other things.
    assert sum(worker == fast and span.end > last_start for worker, span in done) >= 5
