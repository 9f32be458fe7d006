"""A worker whose tasks wait for other tasks: exact lists of actions."""

from __future__ import annotations

from typing import Any, List

from gpumesh.config import REVOKE_SETTLE_SECONDS, SPARE_RUNNER_SECONDS, SPARE_RUNNERS_LEAST
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.local import (
    AskResults,
    Feed,
    Grant,
    Inspect,
    Interrupt,
    Kill,
    LocalPool,
    Report,
    Revoke,
    StartRunner,
    Waits,
)

NOW = 100.0
OUTER, INNER, WIDE, QUICK = 0, 1, 2, 3


def pool_of(slots: int) -> LocalPool:
    pool = LocalPool(slots=slots, threads=1)
    pool.on_spec(OUTER, timeout=0.0, width=1, threads=1)
    pool.on_spec(INNER, timeout=0.0, width=1, threads=1, depth=1)
    pool.on_spec(WIDE, timeout=0.0, width=2, threads=1)
    pool.on_spec(QUICK, timeout=5.0, width=1, threads=1)
    for action in pool.start(NOW):
        pool.on_ready(action.runner, NOW)
    return pool


def arrive(pool: LocalPool, spec: int, *tasks: int) -> List[Any]:
    return pool.on_arrived(spec, [(task, 1, b"") for task in tasks], NOW)


def wait(pool: LocalPool, runner: int, task: int) -> List[Any]:
    return pool.on_waits(runner, task, NOW, waits=True)


def go_on(pool: LocalPool, runner: int, task: int) -> List[Any]:
    return pool.on_waits(runner, task, NOW, waits=False)


def finish(pool: LocalPool, runner: int, task: int, *, now: float = NOW, seconds: float = 0.5) -> List[Any]:
    return pool.on_results(runner, [(task, 1, int(Status.OK), b"", seconds)], now)


def ended(task: int, status: Status = Status.OK, payload: Any = b"", seconds: float = 0.5) -> Report:
    return Report([(task, 1, int(status), payload, seconds)])


def waiting_pool() -> LocalPool:
    """One slot: task 1 waits in process 1, and its child, task 2, runs in process 2."""
    pool = pool_of(1)
    assert arrive(pool, OUTER, 1) == [Feed(1, OUTER, [(1, 1)])]
    assert wait(pool, 1, 1) == [Waits(1, 1, True), StartRunner(2, 1, 0)]
    assert arrive(pool, INNER, 2) == []
    assert pool.on_ready(2, NOW) == [Feed(2, INNER, [(2, 1)])]
    return pool


def test_a_slot_is_given_away_and_taken_back_before_anything_new_begins() -> None:
    pool = waiting_pool()
    assert arrive(pool, OUTER, 3) == []

    assert go_on(pool, 1, 1) == [Waits(1, 1, False)]
    assert finish(pool, 2, 2) == [ended(2), Grant(1, 1)]
    assert finish(pool, 1, 1) == [ended(1), Feed(1, OUTER, [(3, 1)])]


def test_who_goes_on_while_a_slot_is_free_does_so_at_once() -> None:
    pool = waiting_pool()
    finish(pool, 2, 2)

    assert go_on(pool, 1, 1) == [Waits(1, 1, False), Grant(1, 1)]


def test_the_next_task_that_waits_finds_a_process_which_ends_when_nobody_has_used_it_for_long() -> None:
    pool = waiting_pool()
    finish(pool, 2, 2)
    go_on(pool, 1, 1)

    assert wait(pool, 1, 1) == [Waits(1, 1, True)]
    assert arrive(pool, INNER, 4) == [Feed(2, INNER, [(4, 1)])]

    finish(pool, 2, 4)
    go_on(pool, 1, 1)
    assert finish(pool, 1, 1) == [ended(1)]
    assert pool.next_deadline() == NOW + SPARE_RUNNER_SECONDS
    assert pool.on_time(NOW + SPARE_RUNNER_SECONDS) == [Kill(1)]
    assert pool.on_runner_down(1, 1, 1, {}, NOW + SPARE_RUNNER_SECONDS) == []
    assert arrive(pool, OUTER, 5) == [Feed(2, OUTER, [(5, 1)])]


def test_more_spare_processes_than_should_be_kept_end_at_once() -> None:
    pool = pool_of(1)
    pool.on_spec(4, timeout=0.0, width=1, threads=1, depth=9)
    arrive(pool, OUTER, 1)
    deep = SPARE_RUNNERS_LEAST + 2  # Tasks inside one another.
    for task in range(1, deep):
        assert StartRunner(task + 1, 1, 0) in wait(pool, task, task)
        pool.on_ready(task + 1, NOW)
        assert arrive(pool, 4, task + 1) == [Feed(task + 1, 4, [(task + 1, 1)])]

    kills: List[Any] = []
    for task in range(deep, 0, -1):
        kills += [action for action in finish(pool, task, task) if isinstance(action, Kill)]
        if task > 1:
            kills += [action for action in go_on(pool, task - 1, task - 1) if isinstance(action, Kill)]

    assert len(kills) == 1


def test_deeper_tasks_go_first() -> None:
    pool = pool_of(1)
    arrive(pool, OUTER, 1)
    arrive(pool, OUTER, 2)
    arrive(pool, INNER, 3)

    assert finish(pool, 1, 1) == [ended(1), Feed(1, INNER, [(3, 1)])]
    assert finish(pool, 1, 3) == [ended(3), Feed(1, OUTER, [(2, 1)])]


def test_one_that_will_have_tasks_inside_begins_before_those_have_run_dry() -> None:
    pool = waiting_pool()
    arrive(pool, OUTER, 3)
    arrive(pool, INNER, 4, 5)

    assert finish(pool, 2, 2) == [ended(2), Feed(2, INNER, [(4, 1)])]
    assert finish(pool, 2, 4) == [ended(4), Feed(2, INNER, [(5, 1)])]  # One is enough for one slot.
    arrive(pool, INNER, 6)
    assert wait(pool, 2, 5) == [Waits(5, 1, True), StartRunner(3, 1, 0)]
    assert pool.on_ready(3, NOW) == [Feed(3, INNER, [(6, 1)])]  # As many wait as should.


def test_with_several_slots_it_begins_sooner() -> None:
    pool = pool_of(2)
    arrive(pool, OUTER, 1, 2)
    wait(pool, 1, 1)
    pool.on_ready(3, NOW)
    arrive(pool, INNER, 4)
    arrive(pool, OUTER, 3)
    arrive(pool, INNER, 5)

    assert finish(pool, 2, 2) == [ended(2), Feed(2, OUTER, [(3, 1)])]
    assert finish(pool, 2, 3) == [ended(3), Feed(2, INNER, [(5, 1)])]


def test_what_was_fed_behind_a_task_that_waits_is_taken_back() -> None:
    pool = pool_of(1)
    arrive(pool, QUICK, 1)
    finish(pool, 1, 1, seconds=0.001)
    assert arrive(pool, QUICK, 2, 3) == [Feed(1, QUICK, [(2, 1), (3, 1)])]

    assert wait(pool, 1, 2) == [Revoke(1, 3), Waits(2, 1, True), StartRunner(2, 1, 0)]
    pool.on_ready(2, NOW)
    settled = NOW + REVOKE_SETTLE_SECONDS
    assert pool.on_time(settled) == [Inspect(1)]
    assert pool.on_progress(1, 2, 1, 1, NOW, settled) == [Feed(2, QUICK, [(3, 1)])]


def test_results_that_wait_for_company_before_it_are_asked_for() -> None:
    pool = pool_of(1)
    arrive(pool, QUICK, 1)
    finish(pool, 1, 1, seconds=0.001)
    arrive(pool, QUICK, 2, 3)

    assert wait(pool, 1, 3) == [AskResults(1), Waits(3, 1, True), StartRunner(2, 1, 0)]
    assert finish(pool, 1, 2, seconds=0.001) == [ended(2, seconds=0.001)]
    assert [task.task_id for task in pool.waiting()] == [3]


def test_a_task_that_waits_is_cancelled_without_a_slot() -> None:
    pool = waiting_pool()

    assert pool.on_recalled([(1, 1)], kill=True, now=NOW) == []
    assert pool.on_time(NOW) == [Inspect(1)]
    assert pool.on_progress(1, 1, 0, 0, NOW, NOW) == [Interrupt(1, 1)]
    assert go_on(pool, 1, 1) == [Waits(1, 1, False)]  # As its wait was interrupted.
    why = {"reason": "cancelled while it ran"}
    assert pool.on_results(1, [(1, 1, int(Status.CANCELLED), {}, 0.5)], NOW) == [ended(1, Status.CANCELLED, why)]
    assert finish(pool, 2, 2) == [ended(2)]
    assert arrive(pool, OUTER, 3, 4) == [Feed(1, OUTER, [(3, 1)])]  # One slot, whatever processes there are.


def test_a_task_that_waits_runs_out_of_time() -> None:
    pool = pool_of(1)
    arrive(pool, QUICK, 1)
    wait(pool, 1, 1)

    assert pool.on_time(NOW + 5.0) == [Inspect(1)]
    assert pool.on_progress(1, 1, 0, 0, NOW, NOW + 5.0) == [Interrupt(1, 1)]


def test_the_process_of_a_task_that_waits_dies() -> None:
    pool = waiting_pool()
    go_on(pool, 1, 1)

    assert pool.on_runner_down(1, 1, 0, {"exit": -9}, NOW) == [ended(1, Status.CRASHED, {"exit": -9}, 0.0)]
    assert finish(pool, 2, 2) == [ended(2)]
    assert arrive(pool, OUTER, 3) == [Feed(2, OUTER, [(3, 1)])]


def test_the_process_that_has_the_slot_of_another_dies() -> None:
    pool = waiting_pool()
    go_on(pool, 1, 1)

    assert pool.on_runner_down(2, 1, 0, {"exit": -9}, NOW) == [
        ended(2, Status.CRASHED, {"exit": -9}, 0.0),
        StartRunner(3, 1, 0),
        Grant(1, 1),
    ]


def test_a_wide_task_waits_and_gets_all_its_slots_back() -> None:
    pool = pool_of(2)
    assert arrive(pool, WIDE, 1) == [Feed(1, WIDE, [(1, 1)])]

    assert wait(pool, 1, 1) == [Waits(1, 1, True), StartRunner(3, 1, 0)]
    pool.on_ready(3, NOW)
    assert arrive(pool, INNER, 2, 3) == [Feed(2, INNER, [(2, 1)]), Feed(3, INNER, [(3, 1)])]
    assert go_on(pool, 1, 1) == [Waits(1, 1, False)]
    assert arrive(pool, OUTER, 4) == []
    assert finish(pool, 2, 2) == [ended(2)]
    assert finish(pool, 3, 3) == [ended(3), Grant(1, 1)]
    assert finish(pool, 1, 1) == [ended(1), Feed(1, OUTER, [(4, 1)])]


def test_who_waits_goes_on_where_the_owner_lends_fewer_slots_or_none() -> None:
    pool = pool_of(2)
    arrive(pool, OUTER, 1, 2)
    wait(pool, 1, 1)
    pool.on_ready(3, NOW)
    arrive(pool, INNER, 3)

    assert pool.allow(1, NOW) == []
    assert pool.hand_back(running=False, now=NOW) == []
    assert go_on(pool, 1, 1) == [Waits(1, 1, False)]
    assert finish(pool, 2, 2) == [ended(2)]
    assert finish(pool, 3, 3) == [ended(3), Grant(1, 1)]


def test_the_owner_ends_what_waits_as_well() -> None:
    pool = waiting_pool()

    assert pool.hand_back(running=True, now=NOW) == []
    assert pool.on_time(NOW) == [Inspect(1), Inspect(2)]
    assert pool.on_progress(1, 1, 0, 0, NOW, NOW) == [Interrupt(1, 1)]


def test_each_question_is_answered_once() -> None:
    pool = waiting_pool()
    assert go_on(pool, 1, 1) == [Waits(1, 1, False)]

    assert wait(pool, 1, 1) == [Waits(1, 1, True), Grant(1, 1)]  # Void: it waits again.
    assert go_on(pool, 1, 1) == [Waits(1, 1, False)]
    assert finish(pool, 2, 2) == [ended(2), Grant(1, 1)]
    assert go_on(pool, 1, 1) == [Grant(1, 1)]


def test_a_task_that_ends_without_a_slot_leaves_nothing_behind() -> None:
    pool = waiting_pool()
    go_on(pool, 1, 1)

    assert finish(pool, 1, 1) == [ended(1)]
    assert pool.waiting() == []
    assert finish(pool, 2, 2) == [ended(2)]
    assert arrive(pool, OUTER, 3, 4) == [Feed(1, OUTER, [(3, 1)])]
