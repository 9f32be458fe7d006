"""Second copies of tasks that may run twice: who gets one, and what becomes of the others when the first has ended."""

from __future__ import annotations

from typing import Any, List, Tuple

import pytest

from gpumesh.config import COPY_GAIN, COPY_MARGIN, LOOK_AGAIN_MOST_SECONDS, MAX_COPIES
from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import DeviceFacts, Requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler.actions import Assign, Deliver, Forget, Recall, Retrying, WorkersChanged
from gpumesh.scheduler.copies import Copy, choose_copies
from gpumesh.scheduler.throughput import Function
from tests.support.scheduler_parts import make_spec, make_worker, measured, serve, start
from tests.unit.scheduler.conftest import ClusterUnderTest, task

TWICE = TaskSpec(b"f" * 16, "train", idempotent=True)
ONE = ClientNumber(1)
SLOW, FAST = WorkerId("slow"), WorkerId("fast")


# --- who gets one


def test_an_idle_worker_repeats_what_ends_last_if_it_ends_it_sooner() -> None:
    fast, slow, slower = make_worker("fast"), make_worker("slow", score=0.1), make_worker("slower", score=0.05)
    spec = serve(make_spec(measured(1.0, fast, count=4), idempotent=True), fast, slow, slower)
    start(slow, spec, 1)
    start(slower, spec, 2)
    found = choose_copies(spec.group, [fast, slow, slower], {}, 0.0)
    assert found.starts == [Copy(fast, spec, 2)]
    assert found.seen == 2


def test_what_is_gained_must_be_worth_the_work_done_twice() -> None:
    """The copy takes 1 s, and the pool of both ends a task in less than that: so many of its times have to be saved."""
    fast, slow = make_worker("fast"), make_worker("slow", score=0.125)
    spec = serve(make_spec(measured(1.0, fast, count=4), idempotent=True), fast, slow)
    start(slow, spec, 1)
    pace = 1 / (1 / 1.0 + 1 / 8.0)
    latest = 8.0 - (fast.round_trip + 1 + COPY_MARGIN + COPY_GAIN * pace)
    assert choose_copies(spec.group, [fast, slow], {}, latest - 0.05).starts == [Copy(fast, spec, 1)]
    assert choose_copies(spec.group, [fast, slow], {}, latest + 0.05).starts == []
    assert choose_copies(spec.group, [fast, slow], {}, 6.0).starts == [Copy(fast, spec, 1)], (
        "by now it is expected to end at 12 s"
    )


def test_who_runs_too_long_at_a_worker_of_unknown_speed_is_repeated() -> None:
    fast, praised = make_worker("fast"), make_worker("praised", score=10.0)
    spec = serve(make_spec(measured(1.0, fast, count=4), idempotent=True), fast, praised)
    start(praised, spec, 1)
    assert choose_copies(spec.group, [fast, praised], {}, 0.5).starts == []
    assert choose_copies(spec.group, [fast, praised], {}, 5.0).starts == [Copy(fast, spec, 1)]


def test_who_runs_too_long_where_the_speed_is_known_is_a_long_task_and_would_be_one_elsewhere() -> None:
    one, like = make_worker("one"), make_worker("like")
    spec = serve(make_spec(measured(1.0, one, like, count=8), idempotent=True), one, like)
    start(one, spec, 1)
    for now in (0.5, 2.0, 100.0, 10_000.0):
        assert choose_copies(spec.group, [one, like], {}, now).starts == []


def test_a_copy_never_goes_to_the_worker_that_has_the_original() -> None:
    """By its score it would end it in a tenth of a second; it has had it for a quarter of an hour."""
    teacher, praised, other = make_worker("teacher"), make_worker("praised", slots=2, score=20.0), make_worker("other")
    spec = serve(make_spec(measured(1.0, teacher, count=4), idempotent=True), praised)
    start(praised, spec, 1)
    assert choose_copies(spec.group, [praised], {}, 900.0).starts == []
    serve(spec, other)
    assert choose_copies(spec.group, [praised, other], {}, 900.0).starts == [Copy(other, spec, 1)]


def test_a_copy_that_will_end_soon_needs_no_other() -> None:
    slow, middle, fast = make_worker("slow", score=0.1), make_worker("middle", score=0.33), make_worker("fast")
    spec = serve(make_spec(measured(1.0, fast, count=4), idempotent=True), slow, middle, fast)
    start(slow, spec, 1)
    start(middle, spec, 1)
    assert choose_copies(spec.group, [slow, middle, fast], {}, 0.0).starts == []
    del middle.assigned[1]
    assert choose_copies(spec.group, [slow, middle, fast], {}, 0.0).starts == [Copy(fast, spec, 1)]


@pytest.mark.parametrize(
    "facts", [{"idempotent": False}, {"idempotent": True, "retries": 0}], ids=["not idempotent", "no retries"]
)
def test_what_must_not_run_twice_never_does(facts: Any) -> None:
    fast, slow = make_worker("fast"), make_worker("slow", score=0.001)
    spec = serve(make_spec(measured(1.0, fast, count=4), **facts), fast, slow)
    start(slow, spec, 1)
    assert choose_copies(spec.group, [fast, slow], {}, 1e6).starts == []


def test_nothing_is_repeated_before_its_length_is_known() -> None:
    fast, slow = make_worker("fast", score=100.0), make_worker("slow", score=0.01)
    spec = serve(make_spec(Function(b"f" * 16), idempotent=True), fast, slow)
    start(slow, spec, 1)
    assert choose_copies(spec.group, [fast, slow], {}, 1e6).starts == []


def test_nothing_that_is_being_cancelled_is_repeated() -> None:
    fast, slow = make_worker("fast"), make_worker("slow", score=0.01)
    spec = serve(make_spec(measured(1.0, fast, count=4), idempotent=True), fast, slow)
    start(slow, spec, 1)
    assert choose_copies(spec.group, [fast, slow], {1: None}, 0.0).starts == []


def test_what_a_leaving_worker_runs_is_repeated_but_not_by_one() -> None:
    fast, leaving = make_worker("fast"), make_worker("leaving", score=0.01)
    spec = serve(make_spec(measured(1.0, fast, count=4), idempotent=True), fast)
    start(leaving, spec, 1)
    assert choose_copies(spec.group, [fast, leaving], {}, 0.0).starts == [Copy(fast, spec, 1)]
    paused = make_worker("paused")
    start(fast, spec, 2)
    assert choose_copies(spec.group, [fast, leaving, paused], {}, 0.0).starts == []


def test_each_free_slot_repeats_another_task_and_the_fastest_take_those_that_end_last() -> None:
    fast = make_worker("fast", slots=2, score=2.0)
    slows = [make_worker(f"slow{index}", score=0.02 * (index + 1)) for index in range(3)]
    spec = serve(make_spec(measured(1.0, fast, count=4), idempotent=True), fast, *slows)
    for index, slow in enumerate(slows):
        start(slow, spec, index)
    assert choose_copies(spec.group, [fast, *slows], {}, 0.0).starts == [Copy(fast, spec, 0), Copy(fast, spec, 1)]


def test_what_waits_at_a_worker_behind_others_is_not_running_and_not_repeated() -> None:
    fast, slow = make_worker("fast"), make_worker("slow", score=0.01)
    spec = serve(make_spec(measured(1.0, fast, count=4), idempotent=True), fast, slow)
    start(slow, spec, 1, 2)
    assert choose_copies(spec.group, [fast, slow], {}, 0.0).starts == [Copy(fast, spec, 1)]


def test_fetching_the_inputs_counts() -> None:
    fast, slow = make_worker("fast"), make_worker("slow", score=0.1)
    spec = serve(make_spec(measured(1.0, fast, count=4), idempotent=True), fast, slow)
    start(slow, spec, 1)
    assert choose_copies(spec.group, [fast, slow], {}, 0.0, lambda task_id, worker: 2.0).starts == [Copy(fast, spec, 1)]
    assert choose_copies(spec.group, [fast, slow], {}, 0.0, lambda task_id, worker: 20.0).starts == []


def test_it_looks_again_while_somebody_could_help() -> None:
    fast, slow = make_worker("fast"), make_worker("slow", score=0.5)
    spec = serve(make_spec(measured(1.0, fast, count=4), idempotent=True), fast, slow)
    assert choose_copies(spec.group, [fast, slow], {}, 0.0).look_again_seconds is None, "nothing runs"
    start(slow, spec, 1)
    wait = choose_copies(spec.group, [fast, slow], {}, 0.0).look_again_seconds
    assert wait is not None
    assert 0.0 < wait <= LOOK_AGAIN_MOST_SECONDS
    start(fast, spec, 2)
    assert choose_copies(spec.group, [fast, slow], {}, 0.0).look_again_seconds is None, "nobody is idle"


# --- what becomes of them


def copied(mesh: ClusterUnderTest, spec: TaskSpec = TWICE) -> None:
    """Task 0 runs at a slow worker, and as attempt 2 at a fast one."""
    mesh.learn(1.0)
    mesh.connect("slow", score=0.1)
    assert mesh.submit(1, spec) == [Assign(SLOW, spec, [(task(0), 1)])]
    assert mesh.connect("fast") == [Assign(FAST, spec, [(task(0), 2)]), WorkersChanged(2)]


def delivered(worker: str, status: int = Status.OK, seconds: float = 1.0) -> Deliver:
    return Deliver(ONE, WorkerId(worker), [(task(0), status, b"value", seconds)])


@pytest.mark.parametrize(("winner", "attempt", "loser", "other"), [("fast", 2, SLOW, 1), ("slow", 1, FAST, 2)])
def test_the_first_result_counts_and_ends_the_others(
    mesh: ClusterUnderTest, winner: str, attempt: int, loser: WorkerId, other: int
) -> None:
    copied(mesh)
    assert mesh.at(1.0).finish(winner, task(0), attempt=attempt) == [
        Recall(loser, [(task(0), other)], kill=True),
        delivered(winner),
    ]
    assert mesh.cluster.pending_count() == 0
    assert mesh.cluster.assigned_count() == 1, "it holds its slot until the worker has reported it"
    assert mesh.finish(loser, task(0), attempt=other, status=Status.CANCELLED) == []
    assert mesh.cluster.assigned_count() == 0


def test_of_two_results_the_second_is_ignored(mesh: ClusterUnderTest) -> None:
    copied(mesh)
    mesh.at(1.0).finish("fast", task(0), attempt=2)
    assert mesh.finish("slow", task(0), attempt=1) == []


def test_an_exception_of_the_user_is_a_result_and_ends_the_others(mesh: ClusterUnderTest) -> None:
    copied(mesh)
    assert mesh.at(1.0).finish("fast", task(0), attempt=2, status=Status.RAISED) == [
        Recall(SLOW, [(task(0), 1)], kill=True),
        delivered("fast", Status.RAISED),
    ]


def test_while_the_loser_is_being_ended_its_slot_is_not_free(mesh: ClusterUnderTest) -> None:
    copied(mesh)
    mesh.at(1.0).finish("fast", task(0), attempt=2)
    assert mesh.submit(2, TWICE) == [Assign(FAST, TWICE, [(task(1), 1)])]
    assert mesh.finish("slow", task(0), attempt=1, status=Status.CANCELLED) == [Assign(SLOW, TWICE, [(task(2), 1)])]


def test_a_worker_whose_attempt_was_overtaken_is_known_to_be_slow(mesh: ClusterUnderTest) -> None:
    mesh.learn(1.0)
    mesh.connect("slow", score=100.0)
    mesh.submit(1, TWICE)
    mesh.connect("fast")
    assert mesh.until(20.0) == [Assign(FAST, TWICE, [(task(0), 2)])], "it was expected to end in a hundredth of a second"
    mesh.finish("fast", task(0), attempt=2)
    function = mesh.cluster._throughput.function(TWICE.function)
    assert function.is_measured_on(SLOW)
    assert function.seconds_on(SLOW, 100.0) > 5.0


def test_there_are_never_more_copies_than_are_worth_it(mesh: ClusterUnderTest) -> None:
    mesh.learn(1.0)
    scores = [0.001, 0.01, 0.1, 1.0]
    starts: List[Any] = []
    mesh.connect("w0", score=scores[0])
    starts += mesh.submit(1, TWICE)
    for index, score in enumerate(scores[1:], 1):
        starts += [action for action in mesh.connect(f"w{index}", score=score) if isinstance(action, Assign)]
        starts += mesh.until(mesh.now + 0.1)
    assert [(action.worker, action.tasks) for action in starts] == [
        (f"w{n}", [(task(0), n + 1)]) for n in range(1 + MAX_COPIES)
    ]
    assert mesh.until(1e4) == []


def test_nothing_is_repeated_while_something_waits(mesh: ClusterUnderTest) -> None:
    mesh.learn(1.0)
    mesh.connect("slow", score=0.1)
    mesh.submit(2, TWICE)
    assert mesh.connect("fast") == [Assign(FAST, TWICE, [(task(1), 1)]), WorkersChanged(2)]
    assert mesh.at(1.0).finish("fast", task(1)) == [
        Deliver(ONE, FAST, [(task(1), Status.OK, b"value", 1.0)]),
        Assign(FAST, TWICE, [(task(0), 2)]),
    ]


def test_a_client_that_leaves_with_copies_under_way_ends_them_all(mesh: ClusterUnderTest) -> None:
    copied(mesh)
    assert mesh.lose_client() == [
        Recall(SLOW, [(task(0), 1)], kill=True),
        Recall(FAST, [(task(0), 2)], kill=True),
        Forget([task(0)]),
    ]
    assert mesh.cluster.assigned_count() == 2
    mesh.join_client(1)
    assert mesh.submit_ids([task(0)], TWICE) == []
    assert mesh.finish("slow", task(0), attempt=1, status=Status.CANCELLED) == [Assign(SLOW, TWICE, [(task(0), 3)])]
    assert mesh.finish("fast", task(0), attempt=2) == []
    assert mesh.until(0.1) == [Assign(FAST, TWICE, [(task(0), 4)])], "a number of its own"
    assert mesh.finish("fast", task(0), attempt=2) == [], "a result of the former life"


def test_cancelling_ends_all_copies_once(mesh: ClusterUnderTest) -> None:
    copied(mesh)
    assert mesh.cancel(task(0)) == [Recall(SLOW, [(task(0), 1)], kill=True), Recall(FAST, [(task(0), 2)], kill=True)]
    assert mesh.cancel(task(0)) == []
    assert mesh.finish("fast", task(0), attempt=2, status=Status.CANCELLED) == [delivered("fast", Status.CANCELLED)]
    assert mesh.finish("slow", task(0), attempt=1, status=Status.CANCELLED) == []
    assert mesh.cluster.assigned_count() == 0


@pytest.mark.parametrize(("gone", "left", "attempt"), [("slow", "fast", 2), ("fast", "slow", 1)])
def test_when_one_of_the_workers_is_lost_the_other_attempt_goes_on(
    mesh: ClusterUnderTest, gone: str, left: str, attempt: int
) -> None:
    copied(mesh, TWICE._replace(retries=1))
    assert mesh.lose(gone) == [Retrying(task(0), attempt, WorkerId(gone), Status.LOST), WorkersChanged(1)]
    assert mesh.finish(left, task(0), attempt=attempt) == [delivered(left)]


def test_when_both_are_lost_the_task_is_tried_again_as_long_as_it_may(mesh: ClusterUnderTest) -> None:
    spec = TWICE._replace(retries=2)
    copied(mesh, spec)
    mesh.lose("slow")
    assert mesh.lose("fast") == [Retrying(task(0), 3, FAST, Status.LOST), WorkersChanged(0)]
    assert mesh.connect("w3") == [Assign(WorkerId("w3"), spec, [(task(0), 3)]), WorkersChanged(1)]


def test_an_attempt_that_fails_beside_another_is_a_strike_that_counts_when_that_fails_too(mesh: ClusterUnderTest) -> None:
    spec = TWICE._replace(retries=1)
    copied(mesh, spec)
    assert mesh.finish("fast", task(0), attempt=2, status=Status.CRASHED) == [Retrying(task(0), 1, FAST, Status.CRASHED)]
    assert mesh.finish("slow", task(0), attempt=1, status=Status.CRASHED) == [delivered("slow", Status.CRASHED)]


def test_what_fails_wherever_it_is_repeated_is_not_repeated_for_ever(mesh: ClusterUnderTest) -> None:
    spec = TWICE._replace(retries=2)
    mesh.learn(1.0)
    mesh.connect("slow", score=0.001)
    mesh.submit(1, spec)
    mesh.connect("fast")
    attempts = []
    while mesh.now < 100.0:
        batch = mesh.cluster._workers[FAST].assigned.get(task(0))
        if batch is not None:
            attempts.append(batch.attempt)
            mesh.finish("fast", task(0), attempt=batch.attempt, status=Status.CRASHED)
        mesh.until(mesh.now + 1.0)
    assert attempts == [2]
    assert mesh.finish("slow", task(0)) == [delivered("slow")]


def test_what_runs_on_cards_is_repeated_on_cards() -> None:
    mesh = ClusterUnderTest()
    need = Requirement("gpu", gpus=1.0)
    spec = TWICE._replace(requirement=need)

    def card(number: int, score: float) -> Tuple[DeviceFacts, ...]:
        return (DeviceFacts("cuda", 0, "RTX", 24 * 10**9, score, uuid=f"GPU-{number}"),)

    mesh.connect("fast", devices=card(2, 100.0))
    mesh.submit(1, spec)
    mesh.finish("fast", task(0))
    mesh.change("fast", devices=card(2, 100.0), problem="paused by its owner")
    mesh.connect("slow", devices=card(1, 1.0))
    assert mesh.submit(1, spec) == [Assign(SLOW, spec, [(task(1), 1)], ("GPU-1",))]
    assert mesh.change("fast", devices=card(2, 100.0)) == [
        Assign(FAST, spec, [(task(1), 2)], ("GPU-2",)),
        WorkersChanged(2),
    ]
    assert mesh.at(1.0).finish("fast", task(1), attempt=2) == [
        Recall(SLOW, [(task(1), 1)], kill=True),
        Deliver(ONE, FAST, [(task(1), Status.OK, b"value", 1.0)]),
    ]
