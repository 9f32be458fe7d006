"""A worker whose owner wants it back, or a part of it: exact lists of actions."""

from __future__ import annotations

from typing import Any, List

import pytest

from gpumesh.config import CANCEL_GRACE_SECONDS, REVOKE_SETTLE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.local import Feed, Inspect, Interrupt, Kill, LocalPool, Report, Revoke, StartRunner

NOW = 100.0
REASON = {"reason": "ended because the machine's owner wants it back"}


def pool_with(*tasks: int, slots: int = 1) -> LocalPool:
    """All runners up, and these tasks arrived."""
    pool = LocalPool(slots=slots, threads=1)
    pool.on_spec(0, timeout=0.0, width=1, threads=1)
    for action in pool.start(NOW):
        assert pool.on_ready(action.runner, NOW) == []
    arrive(pool, *tasks)
    return pool


def arrive(pool: LocalPool, *tasks: int) -> List[Any]:
    return pool.on_arrived(0, [(task, 1, b"") for task in tasks], NOW)


def given_back(*tasks: int) -> Report:
    return Report([(task, 1, int(Status.NOT_RUN), {}, 0.0) for task in tasks])


def finish(pool: LocalPool, runner: int, task: int, status: Status = Status.OK, *, now: float = NOW) -> List[Any]:
    return pool.on_results(runner, [(task, 1, int(status), b"", 0.5)], now)


def interrupted() -> LocalPool:
    """Its one task runs, and is being ended for the owner's sake."""
    pool = pool_with(1)
    assert pool.hand_back(running=True, now=NOW) == []
    assert pool.on_time(NOW) == [Inspect(1)]
    assert pool.on_progress(1, 1, 0, 0, NOW, NOW) == [Interrupt(1, 1)]
    return pool


def test_what_waits_goes_back_at_once_what_runs_finishes_and_what_comes_goes_back() -> None:
    pool = pool_with(1, 2, 3)

    assert pool.hand_back(running=False, now=NOW) == [given_back(2, 3)]
    assert arrive(pool, 4) == [given_back(4)]
    assert pool.next_deadline() is None, "nothing to look at: the task takes what it takes"
    assert finish(pool, 1, 1) == [Report([(1, 1, int(Status.OK), b"", 0.5)])]
    pool.accept()
    assert arrive(pool, 5) == [Feed(1, 0, [(5, 1)])]


def test_what_waits_inside_a_runner_goes_back_too() -> None:
    pool = pool_with(1)
    pool.on_results(1, [(1, 1, int(Status.OK), b"", 0.0001)], NOW)
    assert arrive(pool, 2, 3) == [Feed(1, 0, [(2, 1), (3, 1)])]

    assert pool.hand_back(running=False, now=NOW) == []
    assert pool.on_time(NOW) == [Inspect(1)]
    assert pool.on_progress(1, 2, 1, 1, NOW, NOW) == [Revoke(1, 3)]
    settled = NOW + 2 * REVOKE_SETTLE_SECONDS
    assert pool.on_time(settled) == [Inspect(1)]
    assert pool.on_progress(1, 2, 1, 1, NOW, settled) == [given_back(3)]


@pytest.mark.parametrize("status", [Status.CANCELLED, Status.OK, Status.RAISED])
def test_what_runs_is_ended_when_that_was_asked_for_whatever_it_makes_of_the_interrupt(status: Status) -> None:
    pool = interrupted()

    assert finish(pool, 1, 1, status) == [Report([(1, 1, int(Status.HANDED_BACK), REASON, 0.5)])]
    pool.accept()
    assert arrive(pool, 2) == [Feed(1, 0, [(2, 1)])]


def test_code_that_does_not_listen_is_killed() -> None:
    pool = interrupted()
    late = NOW + CANCEL_GRACE_SECONDS

    assert pool.on_time(late) == [Inspect(1)]
    assert pool.on_progress(1, 1, 0, 0, NOW, late) == [Kill(1)]
    assert pool.on_runner_down(1, 1, 0, {"exit": -9}, late) == [
        Report([(1, 1, int(Status.HANDED_BACK), {"exit": -9, **REASON}, CANCEL_GRACE_SECONDS)]),
        StartRunner(2, 1, 0),
    ]


def test_an_owner_who_is_in_more_of_a_hurry_shortens_the_grace() -> None:
    pool = interrupted()

    assert pool.hand_back(running=True, now=NOW, grace_seconds=0.25) == []

    assert pool.on_time(NOW) == [Inspect(1)]
    assert pool.on_progress(1, 1, 0, 0, NOW, NOW) == []
    assert pool.next_deadline() == NOW + 0.25


def test_lent_again_it_does_not_end_what_was_let_finish() -> None:
    pool = pool_with(1)
    pool.hand_back(running=True, now=NOW)
    pool.accept()

    assert pool.on_time(NOW) == [Inspect(1)]
    assert pool.on_progress(1, 1, 0, 0, NOW, NOW) == []


def test_with_fewer_slots_it_ends_with_fewer_tasks_and_gives_the_rest_back() -> None:
    pool = pool_with(1, 2, 3, 4, slots=3)

    assert pool.allow(1, NOW) == [given_back(4)]
    assert arrive(pool, 5) == []
    assert finish(pool, 3, 3)[1:] == []
    assert finish(pool, 1, 1)[1:] == []
    assert finish(pool, 2, 2)[1:] == [Feed(1, 0, [(5, 1)])]


def test_with_more_slots_again_what_waits_starts_at_once() -> None:
    pool = pool_with(1, slots=2)
    pool.allow(1, NOW)
    assert arrive(pool, 2) == []

    assert pool.allow(2, NOW) == [Feed(2, 0, [(2, 1)])]


def test_a_task_of_all_slots_runs_alone_rather_than_never() -> None:
    pool = pool_with(slots=2)
    pool.on_spec(1, timeout=0.0, width=2, threads=1)
    pool.allow(1, NOW)
    assert arrive(pool, 1) == [Feed(1, 0, [(1, 1)])]

    assert pool.on_arrived(1, [(2, 1, b"")], NOW) == []
    assert finish(pool, 1, 1)[1:] == [Feed(1, 1, [(2, 1)])]
