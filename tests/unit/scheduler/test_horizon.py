"""Who may take one of the last tasks of a function that must not run twice."""

from __future__ import annotations

from heapq import heapify, heapreplace
from math import inf
from typing import List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumesh.scheduler.horizon import EXACT_SERVERS, _dealt, _poured, fastest_first, horizon_of, may_take
from gpumesh.scheduler.states import Spec, Worker
from gpumesh.scheduler.throughput import Function
from tests.support.scheduler_parts import make_spec, make_worker, measured, serve, start


def ready(spec: Spec, count: int, now: float = 0.0) -> Spec:
    """So many tasks of it wait."""
    spec.group.push(spec, range(1000, 1000 + count), now)
    return spec


def well_known(*seconds: Tuple[Worker, float]) -> Function:
    """A function whose tasks all take these times: so often measured that no doubt is left."""
    function = Function(b"f" * 16)
    for worker, each in seconds:
        for _ in range(100):
            function.observe(worker.id, worker.speed, each, 1)
    return function


# --- the rule


def test_the_fastest_may_always_and_so_may_who_is_nearly_as_fast() -> None:
    fast, near, slow = make_worker("fast"), make_worker("near"), make_worker("slow")
    spec = ready(serve(make_spec(well_known((fast, 1.0), (near, 1.04), (slow, 10.0))), fast, near, slow), 1)
    assert [may_take(worker, spec.group, spec, 0.0) for worker in (fast, near, slow)] == [True, True, False]


def test_who_would_end_it_a_little_later_than_all_the_rest_stands_idle() -> None:
    fast, slow = make_worker("fast"), make_worker("slow")
    spec = ready(serve(make_spec(well_known((fast, 1.0), (slow, 1.2))), fast, slow), 1)
    assert not may_take(slow, spec.group, spec, 0.0)


def test_the_only_one_who_can_may_however_slow_it_is() -> None:
    slow = make_worker("slow", score=0.001)
    spec = ready(serve(make_spec(Function(b"f" * 16)), slow), 1)
    assert may_take(slow, spec.group, spec, 0.0)
    assert may_take(slow, spec.group, spec, 0.0, extra=1e6)


@pytest.mark.parametrize(("count", "may"), [(1, False), (5, False), (12, True), (100, True)])
def test_a_slow_worker_works_while_there_is_plenty_and_stands_idle_at_the_end(count: int, may: bool) -> None:
    fast, slow = make_worker("fast"), make_worker("slow")
    spec = ready(serve(make_spec(well_known((fast, 1.0), (slow, 8.0))), fast, slow), count)
    assert may_take(slow, spec.group, spec, 0.0) is may


def test_who_was_never_measured_needs_more_left_than_who_was() -> None:
    fast, known, unknown = make_worker("fast", score=4.0), make_worker("known"), make_worker("unknown")
    spec = serve(make_spec(well_known((fast, 1.0), (known, 4.0))), fast, known, unknown)
    may = []
    for count in range(1, 100):
        spec.group.drop(spec.client)
        ready(spec, count)
        may.append([may_take(worker, spec.group, spec, 0.0) for worker in (known, unknown)])
    first_known, first_unknown = (next(index for index, row in enumerate(may) if row[place]) for place in (0, 1))
    assert first_known >= 3
    assert first_known + 4 <= first_unknown < 60


def test_who_is_slower_than_one_that_is_busy_with_something_long_may_take_it() -> None:
    fast, slow = make_worker("fast"), make_worker("slow")
    function = well_known((fast, 1.0), (slow, 8.0))
    spec = ready(serve(make_spec(function), fast, slow), 1)
    start(fast, spec, 1)
    assert not may_take(slow, spec.group, spec, 0.9), "the fast one will be free at once"

    long_one = make_spec(well_known((fast, 100.0)))
    fast.assigned.clear()
    start(fast, long_one, 2)
    spec.group.horizon = None
    assert may_take(slow, spec.group, spec, 0.9)


def test_who_runs_longer_than_it_should_is_expected_to_run_as_long_again() -> None:
    fast, slow = make_worker("fast"), make_worker("slow")
    spec = ready(serve(make_spec(well_known((fast, 1.0), (slow, 8.0))), fast, slow), 1)
    start(fast, spec, 1)
    assert [may_take(slow, spec.group, spec, now) for now in (0.0, 2.0, 6.0, 30.0)] == [False, False, False, True]


def test_the_slow_one_may_if_it_ends_before_the_others_would_have_ended_without_it() -> None:
    """Two tasks and two workers: at the horizon with both 1.5 s is late, but the fast one alone would need 2 s."""
    fast, slow = make_worker("fast"), make_worker("slow")
    spec = ready(serve(make_spec(well_known((fast, 1.0), (slow, 1.6))), fast, slow), 2)
    assert horizon_of(spec.group, spec, 2, 0.0).ends_at == pytest.approx(1.6, rel=0.05)
    assert may_take(slow, spec.group, spec, 0.0)
    spec.group.take(spec.group.next_lane(), 1)
    spec.group.horizon = None
    assert not may_take(slow, spec.group, spec, 0.0)


def test_what_may_run_twice_anybody_may_take() -> None:
    fast, slow = make_worker("fast"), make_worker("slow")
    function = well_known((fast, 1.0), (slow, 50.0))
    twice = ready(serve(make_spec(function, idempotent=True), fast, slow), 1)
    assert may_take(slow, twice.group, twice, 0.0)
    once = ready(serve(make_spec(function, idempotent=True, retries=0), fast, slow), 1)
    assert not may_take(slow, once.group, once, 0.0), "nothing that must not be tried again is ever repeated"


def test_very_short_tasks_go_anywhere() -> None:
    fast, slow = make_worker("fast"), make_worker("slow")
    spec = ready(serve(make_spec(well_known((fast, 1e-4), (slow, 4e-3))), fast, slow), 1)
    assert may_take(slow, spec.group, spec, 0.0)
    longer = ready(serve(make_spec(well_known((fast, 1e-3), (slow, 4e-2))), fast, slow), 1)
    assert not may_take(slow, longer.group, longer, 0.0)


def test_inputs_that_have_to_be_fetched_first_count_as_time_of_the_task() -> None:
    fast, other = make_worker("fast"), make_worker("other")
    spec = ready(serve(make_spec(well_known((fast, 1.0), (other, 1.0))), fast, other), 1)
    assert may_take(other, spec.group, spec, 0.0)
    assert not may_take(other, spec.group, spec, 0.0, extra=5.0)


def test_the_length_that_the_user_gave_counts() -> None:
    fast, slow = make_worker("fast"), make_worker("slow")
    function = well_known((fast, 1.0), (slow, 8.0))
    spec = serve(make_spec(function, cost=10.0), fast, slow)
    assert horizon_of(spec.group, spec, 1, 0.0).ends_at == pytest.approx(10.0, rel=0.05)


def test_a_worker_that_still_installs_does_not_count() -> None:
    fast, slow = make_worker("fast", installing=(("numpy",),)), make_worker("slow")
    spec = make_spec(well_known((fast, 1.0), (slow, 8.0)))
    spec.group.packages = ("numpy",)
    ready(serve(spec, fast, slow), 1)
    assert may_take(slow, spec.group, spec, 0.0)


def test_the_idle_are_asked_in_the_order_of_what_they_were_measured_at_and_not_of_their_scores() -> None:
    praised, honest, unknown = make_worker("praised", score=9.0), make_worker("honest"), make_worker("unknown", score=3.0)
    function = well_known((praised, 5.0), (honest, 1.0))
    spec = make_spec(function)
    assert next(worker.id for worker in fastest_first([praised, honest, unknown], spec)) == "honest"


# --- the horizon


def test_the_horizon_is_when_the_last_task_would_end_if_each_went_where_it_ends_first() -> None:
    fast, slow = make_worker("fast"), make_worker("slow")
    spec = serve(make_spec(well_known((fast, 1.0), (slow, 3.0))), fast, slow)
    assert [horizon_of(spec.group, spec, count, 10.0).ends_at for count in (1, 2, 3, 4, 8)] == pytest.approx(
        [11.0, 12.0, 13.0, 13.0, 16.0], rel=0.01
    )


def test_what_runs_and_waits_already_is_before_it() -> None:
    fast = make_worker("fast")
    spec = serve(make_spec(well_known((fast, 1.0))), fast)
    start(fast, spec, 1, 2, 3)
    assert horizon_of(spec.group, spec, 1, 0.0).ends_at == pytest.approx(4.0, rel=0.05)


def test_a_horizon_serves_until_a_sixteenth_of_the_tasks_or_of_the_time_has_gone() -> None:
    fast = make_worker("fast")
    spec = serve(make_spec(well_known((fast, 1.0))), fast)
    horizon = horizon_of(spec.group, spec, 160, 0.0)
    assert not horizon.is_stale(spec.function, 151, 0.5)
    assert horizon.is_stale(spec.function, 150, 0.5)
    assert horizon.is_stale(spec.function, 171, 0.5)
    assert horizon.is_stale(spec.function, 160, 1.1)
    assert horizon.is_stale(Function(b"g" * 16), 160, 0.0)
    assert horizon_of(spec.group, spec, 1, 0.0).is_stale(spec.function, 1, 0.1)


def test_a_large_mesh_is_seen_as_a_fluid_and_the_rule_still_holds() -> None:
    workers = [make_worker(f"w{index}", score=10.0) for index in range(EXACT_SERVERS)]
    slow = make_worker("slow", score=1.0)
    function = well_known((workers[0], 1.0), (slow, 10.0))
    few = ready(serve(make_spec(function), *workers, slow), len(workers))
    many = ready(serve(make_spec(function), *workers, slow), 40 * len(workers))
    assert not may_take(slow, few.group, few, 0.0)
    assert may_take(slow, many.group, many, 0.0)


# --- dealing out


def brute_force(servers: List[Tuple[float, float]], count: int) -> float:
    """Each task goes where it ends first, one by one."""
    heap = [(free + seconds, seconds) for free, seconds in servers]
    heapify(heap)
    ends = 0.0
    for _ in range(count):
        ends, seconds = heap[0]
        heapreplace(heap, (ends + seconds, seconds))
    return ends


@given(
    servers=st.lists(
        st.tuples(st.floats(min_value=0.0, max_value=50.0), st.floats(min_value=0.1, max_value=20.0)), min_size=1, max_size=12
    ),
    count=st.integers(min_value=1, max_value=200),
)
def test_dealing_out_ends_when_it_would_one_by_one(servers: List[Tuple[float, float]], count: int) -> None:
    exact = brute_force(servers, count)
    assert exact * (1 - 1e-9) <= _dealt(servers, count) <= exact * 1.01


@given(
    servers=st.lists(
        st.tuples(
            st.floats(min_value=0.0, max_value=5.0),
            st.floats(min_value=0.5, max_value=5.0),
            st.integers(min_value=1, max_value=8),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_a_fluid_of_many_tasks_ends_about_when_they_would_one_by_one(servers: List[Tuple[float, float, int]]) -> None:
    count = 2000
    exact = brute_force([(free, seconds) for free, seconds, slots in servers for _ in range(slots)], count)
    assert _poured(servers, count) == pytest.approx(exact, rel=0.05)


def test_without_anybody_nothing_ends() -> None:
    fast = make_worker("fast")
    spec = serve(make_spec(measured(1.0, fast)), fast)
    assert horizon_of(spec.group, spec, 3, 0.0).ends_without(fast, spec.group) == inf
