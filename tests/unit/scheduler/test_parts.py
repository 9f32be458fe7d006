"""The parts of the scheduler, each alone: throughput, placement, queues, supervision, snapshot."""

from __future__ import annotations

from typing import Any, List, Tuple

import pytest

from gpumesh.config import FUNCTION_CACHE_ENTRIES, MAX_AHEAD_TASKS, ROUND_TRIP_CAP_SECONDS, ROUND_TRIP_FLOOR_SECONDS
from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import ANYTHING, DeviceFacts, Requirement, WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler.explanation import explain
from gpumesh.scheduler.placement import BUSY, INFEASIBLE, Placed, allowance, place, room
from gpumesh.scheduler.queues import Group, Queues
from gpumesh.scheduler.snapshot import worker_views
from gpumesh.scheduler.states import Batch, Client, Spec, Worker
from gpumesh.scheduler.supervision import Supervision
from gpumesh.scheduler.throughput import Function, Throughput


def make_worker(name: str = "w1", *, slots: int = 1, **facts: Any) -> Worker:
    return Worker(WorkerId(name), WorkerFacts(hostname=name, slots=slots, **{"cores": slots, **facts}))


def make_spec(function: Function, *, client: int = 1, need: Requirement = ANYTHING, retries: int = 3) -> Spec:
    spec = TaskSpec(function.digest, "train", need, retries=retries)
    return Spec(Client(ClientNumber(client), "someone"), spec, function, Group(need, 0))


def measured(seconds: float, worker: Worker) -> Function:
    function = Function(b"f" * 16)
    function.observe(worker.id, worker.facts.score, seconds, 1)
    return function


# --- throughput


def test_an_unmeasured_function_has_no_length() -> None:
    assert Function(b"f" * 16).seconds_on(WorkerId("w1"), 1.0) is None


def test_a_length_is_scaled_by_score_until_it_is_measured() -> None:
    function = Function(b"f" * 16)
    function.observe(WorkerId("fast"), 100.0, 20.0, 10)
    assert function.seconds_on(WorkerId("fast"), 100.0) == pytest.approx(2.0)
    assert function.seconds_on(WorkerId("slow"), 10.0) == pytest.approx(20.0)
    function.observe(WorkerId("slow"), 10.0, 3.0, 1)
    assert function.seconds_on(WorkerId("slow"), 10.0) == pytest.approx(3.0)


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
    assert function.seconds_on(WorkerId("w1"), 1.0) == pytest.approx(3.0)
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
    assert allowance(worker, make_spec(measured(seconds, worker))) == allowed


def test_short_tasks_are_not_sent_ahead_to_a_worker_that_is_busy_with_long_ones() -> None:
    worker = make_worker()
    worker.add(Batch(make_spec(measured(60.0, worker)), 1, 1, 0.0, -1), 1)
    assert allowance(worker, make_spec(measured(0.0001, worker))) == 1


def test_a_worker_is_refilled_when_a_third_is_gone_or_a_slot_is_free() -> None:
    worker = make_worker(slots=2)
    for load, expected in ((10, 0), (7, 0), (6, 4), (2, 8), (1, 9), (0, 10)):
        worker.load = load
        assert room(worker, Group(ANYTHING, 0), 10, 1) == expected
    worker.load = 1
    assert room(worker, Group(ANYTHING, 0), 2, 2) == 1, "a wide task is sent to a worker with any free slot"


@pytest.mark.parametrize(("cores", "width"), [(0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (16, 4), (17, 0)])
def test_a_task_takes_as_many_slots_as_its_cores_need(cores: int, width: int) -> None:
    assert make_worker(slots=4, cores=16).width_of(Requirement(cores=cores)) == width


def test_the_three_answers() -> None:
    worker = make_worker()
    spec = make_spec(measured(60.0, worker))
    group = spec.group
    assert place(group, spec, 3, []) is INFEASIBLE
    group.workers[worker] = 1
    assert place(group, spec, 3, []) == Placed([(worker, 1)])
    worker.load = 1
    assert place(group, spec, 3, []) is BUSY


def _shares(workers: List[Worker], spec: Spec, ready: int) -> List[Tuple[str, int]]:
    for worker in workers:
        spec.group.workers[worker] = 1
    answer = place(spec.group, spec, ready, [])
    assert isinstance(answer, Placed)
    return [(worker.id, count) for worker, count in answer.shares]


def test_tasks_of_unknown_length_take_free_slots_first_and_the_fastest_of_them() -> None:
    workers = [make_worker("slow", score=1.0), make_worker("fast", score=100.0), make_worker("middle", score=10.0)]
    spec = make_spec(Function(b"f" * 16))
    assert _shares(workers, spec, 1) == [("fast", 1)]
    assert _shares(workers, spec, 3) == [("slow", 1), ("fast", 1), ("middle", 1)]
    assert _shares(workers, spec, 4) == [("slow", 1), ("fast", 2), ("middle", 1)]


def test_tasks_go_where_they_end_first() -> None:
    slow, fast = make_worker("slow", score=1.0), make_worker("fast", score=4.0)
    fast.round_trip = slow.round_trip = ROUND_TRIP_CAP_SECONDS
    assert _shares([slow, fast], make_spec(measured(0.01, fast)), 5) == [("slow", 1), ("fast", 4)]


def test_a_large_batch_is_dealt_out_evenly_over_equal_workers() -> None:
    workers = [make_worker(f"w{index}") for index in range(3)]
    counts = [count for _, count in _shares(workers, make_spec(measured(1e-6, workers[0])), 1000)]
    assert sum(counts) == 1000
    assert max(counts) - min(counts) <= 1000 // 20


def test_nothing_is_sent_ahead_where_another_requirement_waits_too() -> None:
    worker = make_worker()
    spec, rival = make_spec(measured(1e-6, worker)), Group(Requirement(cores=1), 0)
    spec.group.workers[worker] = rival.workers[worker] = 1
    assert place(spec.group, spec, 100, [rival]) == Placed([(worker, 1)])


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


def test_groups_of_equal_priority_take_turns() -> None:
    queues = Queues()
    spec = make_spec(Function(b"f" * 16))
    low, a, b = Group(ANYTHING, 0), Group(Requirement(cores=1), 1), Group(Requirement(cores=2), 1)
    for group in (low, a, b):
        group.push(spec, [1], 0.0)
        queues.note(group)
    assert queues.ready() == [a, b, low]
    queues.served(a)
    assert queues.ready() == [b, a, low]
    b.take(b.next_lane(), 1)
    queues.note(b)
    assert queues.ready() == [a, low]


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
