"""The parts of the scheduler, each alone: throughput, placement, queues, supervision, snapshot."""

from __future__ import annotations

from typing import List, Optional, Tuple

import pytest

from gpumesh.config import FUNCTION_CACHE_ENTRIES, MAX_AHEAD_TASKS, ROUND_TRIP_CAP_SECONDS, ROUND_TRIP_FLOOR_SECONDS
from gpumesh.model.ids import WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import ANYTHING, DeviceFacts, Requirement
from gpumesh.scheduler.explanation import explain
from gpumesh.scheduler.idle import Idle
from gpumesh.scheduler.placement import BUSY, HELD, INFEASIBLE, Placed, allowance, place, room
from gpumesh.scheduler.queues import Group, Queues
from gpumesh.scheduler.snapshot import worker_views
from gpumesh.scheduler.states import Batch, Spec, Worker
from gpumesh.scheduler.supervision import Supervision
from gpumesh.scheduler.throughput import Function, Throughput
from tests.support.scheduler_parts import idle_of, make_spec, make_worker, measured, start

# --- throughput


def test_lengths_of_an_unmeasured_function_have_no_unit_but_go_by_score() -> None:
    function = Function(b"f" * 16)
    assert not function.is_known
    assert function.seconds_on(WorkerId("slow"), 1.0) == 4 * function.seconds_on(WorkerId("fast"), 4.0)


def test_a_length_is_scaled_by_score_until_it_is_measured() -> None:
    function = Function(b"f" * 16)
    function.observe(WorkerId("fast"), 100.0, 20.0, 10)
    assert function.is_known
    assert function.seconds_on(WorkerId("fast"), 100.0) == pytest.approx(2.0)
    assert function.seconds_on(WorkerId("slow"), 10.0) == pytest.approx(20.0)
    assert not function.is_measured_on(WorkerId("slow"))
    function.observe(WorkerId("slow"), 10.0, 3.0, 1)
    assert function.is_measured_on(WorkerId("slow"))
    for _ in range(15):
        function.observe(WorkerId("slow"), 10.0, 3.0, 1)
    assert function.seconds_on(WorkerId("slow"), 10.0) == pytest.approx(3.0, rel=0.05)


def test_a_mean_follows_a_worker_that_has_become_slow() -> None:
    function = Function(b"f" * 16)
    function.observe(WorkerId("w1"), 1.0, 1000.0, 1000)
    function.observe(WorkerId("w1"), 1.0, 32.0, 16)
    assert function.seconds_on(WorkerId("w1"), 1.0) == pytest.approx(2.0)


def test_measurements_leave_with_their_worker_and_the_oldest_functions_when_there_are_too_many() -> None:
    throughput = Throughput()
    function = throughput.function(b"first")
    function.observe(WorkerId("w1"), 1.0, 5.0, 1)
    function.observe(WorkerId("w2"), 1.0, 1.0, 1)
    throughput.forget(WorkerId("w1"))
    assert not function.is_measured_on(WorkerId("w1"))
    assert function.seconds_on(WorkerId("w1"), 1.0) == function.unit
    assert function.seconds_on(WorkerId("w2"), 1.0) == pytest.approx(1.0, rel=0.3)
    for index in range(FUNCTION_CACHE_ENTRIES):
        throughput.function(b"%d" % index)
    assert len(throughput.known()) == FUNCTION_CACHE_ENTRIES
    assert b"first" not in throughput.known()


# --- placement


@pytest.mark.parametrize(
    ("seconds", "round_trip", "slots", "allowed"),
    [
        (60.0, 0.001, 2, 2),  # Nothing to hide.
        (0.02, 0.001, 2, 4),
        (0.02, 0.05, 2, 10),  # 1.5 round trips are 3.75 tasks in each slot.
        (0.0001, 0.001, 4, 4 + 60),
        (1e-6, 0.05, 2, 2 + MAX_AHEAD_TASKS),
    ],
)
def test_as_many_tasks_are_sent_ahead_as_hide_the_round_trip(
    seconds: float, round_trip: float, slots: int, allowed: int
) -> None:
    worker = make_worker(slots=slots)
    worker.round_trip = round_trip
    assert allowance(worker, make_spec(measured(seconds, worker)), slots) == allowed


def test_short_tasks_are_not_sent_ahead_to_a_worker_that_is_busy_with_long_ones() -> None:
    worker = make_worker()
    worker.add(Batch(make_spec(measured(60.0, worker)), 1, 1, 0.0, -1), 1)
    assert allowance(worker, make_spec(measured(0.0001, worker)), 1) == 1


def test_nothing_is_sent_ahead_of_what_was_not_measured_on_this_worker() -> None:
    worker, other = make_worker(slots=2), make_worker("other")
    assert allowance(worker, make_spec(Function(b"f" * 16)), 2) == 2
    assert allowance(worker, make_spec(measured(0.0001, other)), 2) == 2
    assert allowance(worker, make_spec(measured(0.0001, worker), retries=0), 2) == 2


def test_nothing_is_sent_ahead_behind_what_was_not_measured_on_this_worker() -> None:
    worker = make_worker()
    worker.add(Batch(make_spec(Function(b"g" * 16)), 1, 1, 0.0, -1), 1)
    assert allowance(worker, make_spec(measured(0.0001, worker)), 1) == 1


def test_a_worker_is_refilled_when_a_third_is_gone_or_a_slot_is_free() -> None:
    worker = make_worker(slots=2)
    for load, expected in ((10, 0), (7, 0), (6, 4), (2, 8), (1, 9), (0, 10)):
        worker.load = load
        assert room(worker, Group(ANYTHING, 0), 10, 1) == expected
    worker.load = 1
    assert room(worker, Group(ANYTHING, 0), 2, 2) == 1, "a wide task is sent to a worker with any free slot"


@pytest.mark.parametrize(("cores", "width"), [(0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (16, 4), (17, None)])
def test_a_task_takes_as_many_slots_as_its_cores_need(cores: int, width: Optional[int]) -> None:
    assert make_worker(slots=4, cores=16).width_of(Requirement(cores=cores)) == width


def test_a_task_on_cards_takes_no_slot_and_is_impossible_where_there_is_none() -> None:
    card = DeviceFacts("cuda", 0, "NVIDIA A100", 40 * 10**9, 70.0)
    assert make_worker(devices=(card,)).width_of(Requirement("gpu", gpus=1.0)) == 0
    assert make_worker(devices=(card,)).width_of(Requirement("gpu", gpus=2.0)) is None
    assert make_worker().width_of(Requirement("gpu", gpus=1.0)) is None


def test_the_four_answers() -> None:
    worker, slow = make_worker(score=10.0), make_worker("slow", score=0.1)
    spec = make_spec(measured(60.0, worker))
    group = spec.group
    group.push(spec, [1, 2, 3], 0.0)
    assert place(group, spec, 3, [], Idle(), 0.0) is INFEASIBLE
    group.workers[worker] = 1
    assert place(group, spec, 3, [], idle_of(worker), 0.0) == Placed([(worker, 1)])
    start(worker, spec, 9)
    assert place(group, spec, 3, [], Idle(), 0.0) is BUSY
    group.workers[slow] = 1
    assert place(group, spec, 3, [], idle_of(slow), 0.0) is HELD


def _shares(workers: List[Worker], spec: Spec, ready: int) -> List[Tuple[str, int]]:
    for worker in workers:
        spec.group.workers[worker] = 1
    spec.group.push(spec, range(ready), 0.0)
    answer = place(spec.group, spec, ready, [], idle_of(*workers), 0.0)
    assert isinstance(answer, Placed)
    return [(worker.id, count) for worker, count in answer.shares]


@pytest.mark.parametrize(
    ("ready", "shares"),
    [
        (1, [("fast", 1)]),
        (2, [("fast", 1), ("middle", 1)]),
        (3, [("slow", 1), ("fast", 1), ("middle", 1)]),
        (4, [("slow", 1), ("fast", 1), ("middle", 1)]),
    ],
)
def test_tasks_of_unknown_length_take_free_slots_and_the_fastest_of_them_first(
    ready: int, shares: List[Tuple[str, int]]
) -> None:
    workers = [make_worker("slow", score=1.0), make_worker("fast", score=4.0), make_worker("middle", score=2.0)]
    assert _shares(workers, make_spec(Function(b"f" * 16), idempotent=True), ready) == shares


def test_a_task_of_unknown_length_that_must_not_run_twice_is_not_left_to_a_slow_worker() -> None:
    fast, slow = make_worker("fast", score=100.0), make_worker("slow", score=1.0)
    spec = make_spec(Function(b"f" * 16))
    spec.group.workers.update({slow: 1, fast: 1})
    spec.group.push(spec, [1, 2], 0.0)
    assert place(spec.group, spec, 2, [], idle_of(slow, fast), 0.0) == Placed([(fast, 1)], is_held=True)


def test_tasks_go_where_they_end_first() -> None:
    slow, fast = make_worker("slow", score=1.0), make_worker("fast", score=4.0)
    fast.round_trip = slow.round_trip = ROUND_TRIP_CAP_SECONDS
    function = measured(0.01, fast)
    function.observe(slow.id, slow.facts.score, 0.04, 1)
    assert _shares([slow, fast], make_spec(function, idempotent=True), 5) == [("slow", 1), ("fast", 4)]


def test_a_large_batch_is_dealt_out_evenly_over_equal_workers() -> None:
    workers = [make_worker(f"w{index}") for index in range(3)]
    function = measured(1e-6, workers[0])
    for worker in workers[1:]:
        function.observe(worker.id, 1.0, 1e-6, 1)
    counts = [count for _, count in _shares(workers, make_spec(function), 1000)]
    assert sum(counts) == 1000
    assert max(counts) - min(counts) <= 1000 // 20


def test_nothing_is_sent_ahead_where_another_requirement_waits_too() -> None:
    worker = make_worker()
    spec, rival = make_spec(measured(1e-6, worker)), Group(Requirement(cores=1), 0)
    spec.group.workers[worker] = 1
    spec.group.push(spec, range(100), 0.0)
    assert place(spec.group, spec, 100, [rival], idle_of(worker), 0.0) == Placed([(worker, 100)]), "it cannot run here"
    rival.workers[worker] = 1
    assert place(spec.group, spec, 100, [rival], idle_of(worker), 0.0) == Placed([(worker, 1)])


def test_a_text_names_no_more_than_a_handful_of_workers() -> None:
    workers = [make_worker(f"w{index}") for index in range(20)]
    text = explain("train", Requirement(cores=64), workers)
    assert text.startswith(
        "task 'train' needs 64 cores, but none of 20 connected workers can run it: w0 has 1 cores, not 64; w1 "
    )
    assert "; and 12 more; ask for less with options(...)" in text


def test_the_round_trip_falls_at_once_and_rises_slowly() -> None:
    worker = make_worker()
    worker.observe_round_trip(10.0)
    assert worker.round_trip == pytest.approx((ROUND_TRIP_FLOOR_SECONDS + ROUND_TRIP_CAP_SECONDS) / 2)
    worker.observe_round_trip(0.0)
    assert worker.round_trip == pytest.approx(ROUND_TRIP_FLOOR_SECONDS)


# --- queues


def test_a_lane_gives_runs_of_one_spec_in_order() -> None:
    spec, group = make_spec(Function(b"f" * 16)), Group(ANYTHING, 0)
    other = Spec(spec.client, spec.spec._replace(name="other"), spec.function, group)
    group.workers[make_worker()] = 1
    group.push(spec, [1, 2], 0.0)
    group.push(spec, [3], 1.0)
    group.push(other, [4, 5], 1.0)
    group.push_front(other, 6, 1.0)
    lane = group.next_lane()
    assert [(lane.head.spec.name, group.take(lane, 2)) for _ in range(4)] == [
        ("other", [6]),
        ("train", [1, 2]),
        ("train", [3]),
        ("other", [4, 5]),
    ]
    assert group.count == 0
    assert group.lanes == {}


def test_a_cancelled_task_is_skipped() -> None:
    spec, group = make_spec(Function(b"f" * 16)), Group(ANYTHING, 0)
    group.push(spec, [1, 2, 3], 0.0)
    group.kill(spec.client, 2)
    assert group.count == 2
    assert group.take(group.next_lane(), 3) == [1, 3]


def test_groups_go_by_priority_then_by_what_their_clients_have_had_then_in_turns() -> None:
    queues = Queues()
    function = Function(b"f" * 16)
    spec, poor = make_spec(function), make_spec(function, client=2)
    spec.client.served = 1.0
    low, a, b, c = Group(ANYTHING, 0), Group(Requirement(cores=1), 1), Group(Requirement(cores=2), 1), Group(ANYTHING, 1)
    for group in (low, a, b, c):
        group.push(poor if group is c else spec, [1], 0.0)
        queues.note(group)
    assert queues.ready(0.0) == [c, a, b, low]
    queues.served(a, 0.0)
    assert queues.ready(0.0) == [c, b, a, low]
    poor.client.served = 2.0
    assert queues.ready(0.0) == [b, a, c, low]
    b.take(b.next_lane(), 1)
    queues.note(b)
    assert queues.ready(0.0) == [a, c, low]


# --- supervision


def test_retries_count_strikes_and_attempts_count_everything() -> None:
    supervision = Supervision()
    supervision.give_back(1)
    assert supervision.strike(1, WorkerId("w1"), Status.CRASHED, retries=1)
    assert supervision.attempt_of(1) == 3
    assert not supervision.strike(1, WorkerId("w2"), Status.LOST, retries=1)
    assert supervision.attempts(1) == [{"worker": "w1", "status": "CRASHED"}, {"worker": "w2", "status": "LOST"}]
    supervision.forget(1)
    assert supervision.attempt_of(1) == 1
    assert len(supervision) == 0


# --- snapshot


def test_a_snapshot_is_plain_data_with_what_people_ask_for() -> None:
    card = DeviceFacts("cuda", 1, "NVIDIA RTX 3080", 10 * 10**9, 52.0)
    cpu = DeviceFacts("cpu", 0, "Ryzen", 64 * 10**9, 0.5)
    worker = make_worker("w1", slots=2, devices=(cpu, card), score=52.0, problem="paused", tags=(("room", "lab"),))
    (view,) = worker_views([worker])
    assert {key: view[key] for key in ("id", "hostname", "device", "device_name", "score", "alive", "slots", "problem")} == {
        "id": "w1",
        "hostname": "w1",
        "device": "cuda:1",
        "device_name": "NVIDIA RTX 3080",
        "score": 52.0,
        "alive": True,
        "slots": 2,
        "problem": "paused",
    }
    assert (view["running"], view["queued"], view["done"], view["draining"]) == (0, 0, 0, False)
    assert view["tags"] == {"room": "lab"}


def test_a_worker_without_devices_is_shown_as_a_cpu() -> None:
    (view,) = worker_views([make_worker()])
    assert (view["device"], view["device_name"]) == ("cpu", "")
