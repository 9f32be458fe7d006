"""Tasks on GPUs as the cluster places them: which cards, under which lease, and what is never possible."""

from __future__ import annotations

from typing import Any, List, Tuple

import pytest

from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import CardReading, DeviceFacts, Requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.actions import Action, Assign, Deliver, Notice, Recall, Retrying, WorkersChanged
from gpumesh.scheduler.placement import BUSY, INFEASIBLE, Placed, place
from gpumesh.scheduler.states import TaskState
from gpumesh.scheduler.throughput import Function
from tests.support.scheduler_parts import idle_of, make_spec, make_worker
from tests.unit.scheduler.conftest import PLAIN, ClusterUnderTest, task

GB = 10**9
ONE = ClientNumber(1)
W1, W2 = WorkerId("w1"), WorkerId("w2")


def card(number: int, memory: int = 24, score: float = 100.0, **more: Any) -> DeviceFacts:
    """A card of so many GB."""
    return DeviceFacts("cuda", number, f"RTX {number}", memory * GB, score, uuid=f"GPU-{number}", **more)


def on_gpus(**need: Any) -> TaskSpec:
    return TaskSpec(b"g" * 16, "train", Requirement("gpu", **need))


WHOLE, TWO, HALF = on_gpus(gpus=1.0), on_gpus(gpus=2.0), on_gpus(gpus=0.5)
TEN_GB = on_gpus(gpu_memory=10 * GB)


def measure(mesh: ClusterUnderTest, worker: str, *others: int) -> List[Action]:
    """What other programs hold of each card, in GB."""
    readings = tuple(CardReading(f"GPU-{number}", held * GB) for number, held in enumerate(others))
    return mesh.handle(ev.CardsMeasured(WorkerId(worker), readings))


def leases(actions: List[Action]) -> List[Tuple[str, List[int], Tuple[str, ...], int]]:
    """(worker, task numbers, cards, ordinal) of what was assigned; nothing else was done."""
    found = []
    for action in actions:
        assert isinstance(action, Assign), actions
        found.append((action.worker, [task_id & 0xFFFFFFFF for task_id, _ in action.tasks], action.cards, action.ordinal))
    return found


# --- whole cards


def test_each_whole_card_is_one_lease_and_runs_one_task(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0), card(1)))
    assert leases(mesh.submit(3, WHOLE)) == [("w1", [0], ("GPU-0",), 0), ("w1", [1], ("GPU-1",), 0)]
    assert mesh.finish("w1", task(1)) == [
        Deliver(ONE, W1, [(task(1), Status.OK, b"value", 1.0)]),
        Assign(W1, WHOLE, [(task(2), 1)], ("GPU-1",), 0),
    ]


def test_a_task_on_a_card_takes_no_slot_and_one_in_a_slot_takes_no_card(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", slots=1, devices=(card(0),))
    assert leases(mesh.submit(1)) == [("w1", [0], (), 0)]
    assert leases(mesh.submit(1, WHOLE)) == [("w1", [1], ("GPU-0",), 0)]
    assert mesh.submit(1) == []
    assert mesh.submit(1, WHOLE) == []


def test_the_fastest_card_in_the_mesh_comes_first(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0, score=50.0),))
    mesh.connect("w2", devices=(card(1, score=100.0),))
    assert leases(mesh.submit(1, WHOLE)) == [("w2", [0], ("GPU-1",), 0)]


def test_several_cards_are_one_lease(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0), card(1), card(2)))
    assert leases(mesh.submit(2, TWO)) == [("w1", [0], ("GPU-0", "GPU-1"), 0)]
    assert leases(mesh.submit(1, WHOLE)) == [("w1", [2], ("GPU-2",), 0)]
    assert mesh.finish("w1", task(2))[1:] == [], "one card is not enough for the other"
    assert leases(mesh.finish("w1", task(0))[1:]) == [("w1", [1], ("GPU-0", "GPU-1"), 0)]


# --- shared cards


def test_two_halves_share_a_card_under_different_ordinals(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0),))
    assert leases(mesh.submit(3, HALF)) == [("w1", [0], ("GPU-0",), 0), ("w1", [1], ("GPU-0",), 1)]
    assert leases(mesh.finish("w1", task(0))[1:]) == [("w1", [2], ("GPU-0",), 0)]


def test_a_whole_card_waits_for_both_halves(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0),))
    mesh.submit(2, HALF)
    assert mesh.submit(1, WHOLE) == []
    assert mesh.finish("w1", task(0))[1:] == []
    assert leases(mesh.finish("w1", task(1))[1:]) == [("w1", [2], ("GPU-0",), 0)]


def test_tasks_share_a_card_as_far_as_their_memory_goes(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0, memory=24),))
    assert leases(mesh.submit(3, TEN_GB)) == [("w1", [0], ("GPU-0",), 0), ("w1", [1], ("GPU-0",), 1)]


def test_short_tasks_are_sent_ahead_under_the_lease_that_runs_their_like(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0),))
    mesh.submit(1, WHOLE)
    mesh.finish("w1", task(0), seconds=0.0005)
    assert leases(mesh.submit(10, WHOLE)) == [("w1", [1], ("GPU-0",), 0), ("w1", [2, 3, 4], ("GPU-0",), 0)]


# --- what others hold


def test_what_other_programs_hold_makes_a_task_wait_until_they_let_go(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0),))
    assert measure(mesh, "w1", 20) == []
    assert mesh.submit(1, TEN_GB) == []
    assert mesh.until(1e4) == [], "it is possible here, only not now"
    assert measure(mesh, "w1", 15) == []
    assert leases(measure(mesh, "w1", 1)) == [("w1", [0], ("GPU-0",), 0)]


def test_a_reading_that_could_not_be_had_changes_nothing(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0),))
    measure(mesh, "w1", 20)
    mesh.submit(1, TEN_GB)
    assert mesh.handle(ev.CardsMeasured(W1, (CardReading("GPU-0", -1), CardReading("GPU-9", 0)))) == []
    assert mesh.handle(ev.CardsMeasured(WorkerId("w9"), (CardReading("GPU-0", 0),))) == []


def test_a_task_that_runs_stays_when_others_take_memory(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0),))
    mesh.submit(1, TEN_GB)
    assert measure(mesh, "w1", 24) == []
    assert mesh.finish("w1", task(0)) == [Deliver(ONE, W1, [(task(0), Status.OK, b"value", 1.0)])]


# --- cards that are paused or gone


def test_a_paused_card_takes_nothing_and_the_other_goes_on(mesh: ClusterUnderTest) -> None:
    paused = card(0, problem="paused by its owner")
    mesh.connect("w1", devices=(card(0), card(1)))
    mesh.submit(2, WHOLE)
    assert mesh.change("w1", devices=(paused, card(1))) == []
    mesh.submit(2, WHOLE)
    assert mesh.finish("w1", task(0))[1:] == []
    assert leases(mesh.finish("w1", task(1))[1:]) == [("w1", [2], ("GPU-1",), 0)]
    assert leases(mesh.change("w1", devices=(card(0), card(1)))) == [("w1", [3], ("GPU-0",), 0)]


def test_a_card_that_comes_is_used_at_once(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    assert mesh.submit(1, WHOLE) == []
    assert leases(mesh.change("w1", devices=(card(0),))) == [("w1", [0], ("GPU-0",), 0)]


def test_with_all_cards_paused_the_task_is_told_of_and_its_worker_goes_on_with_others(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0, problem="paused by its owner until 22:00"),))
    assert mesh.submit(1, WHOLE) == []
    [notice] = mesh.until(2.0)
    assert isinstance(notice, Notice)
    assert "paused by its owner until 22:00" in notice.text
    assert leases(mesh.submit(1)) == [("w1", [1], (), 0)]


def test_a_card_that_is_pulled_out_under_a_task_keeps_its_books_until_that_has_ended(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0), card(1)))
    mesh.submit(1, WHOLE)
    assert mesh.change("w1", devices=(card(1),)) == []
    assert mesh.finish("w1", task(0), status=Status.CRASHED) == [
        Retrying(task(0), 2, W1, Status.CRASHED),
        Assign(W1, WHOLE, [(task(0), 2)], ("GPU-1",), 0),
    ]


# --- three answers


def test_placed_busy_and_never_possible_are_three_answers() -> None:
    worker = make_worker(devices=(card(0),))
    assert worker.cards is not None
    spec = make_spec(Function(b"g" * 16), need=WHOLE.requirement)
    group = spec.group
    group.push(spec, [1, 2, 3], 0.0)
    assert place(group, spec, 3, [], idle_of(worker), 0.0) is INFEASIBLE
    width = worker.width_of(group.need)
    assert width == 0
    group.workers[worker] = width
    assert place(group, spec, 3, [], idle_of(worker), 0.0) == Placed([(worker, 1)])
    lease = worker.cards.open(group.need)
    assert lease is not None
    assert place(group, spec, 3, [], idle_of(worker), 0.0) is BUSY
    worker.cards.close(lease)
    assert place(group, spec, 3, [], idle_of(worker), 0.0) == Placed([(worker, 1)])


@pytest.mark.parametrize(
    "spec",
    [on_gpus(gpus=3.0), on_gpus(gpu_memory=25 * GB), on_gpus(gpus=1.0, model="h100"), TaskSpec(b"g" * 16, "t", Requirement("mps", gpus=1.0))],
    ids=["more cards", "more memory", "another model", "another kind"],
)  # fmt: skip
def test_what_no_card_can_ever_serve_is_told_and_what_only_waits_is_not(mesh: ClusterUnderTest, spec: TaskSpec) -> None:
    mesh.connect("w1", devices=(card(0), card(1)))
    mesh.submit(2, WHOLE)
    assert mesh.submit(1, WHOLE) == []
    assert mesh.until(1.0) == []
    assert mesh.submit(1, spec) == []
    [notice] = mesh.until(50.0)
    assert isinstance(notice, Notice)
    assert notice.task_id == task(3)
    assert mesh.cluster.state_of(task(2)) is TaskState.READY


# --- leases end


@pytest.mark.parametrize("status", [Status.OK, Status.RAISED, Status.CRASHED, Status.TIMED_OUT, Status.CANCELLED])
def test_however_a_task_ends_its_card_is_free_for_the_next(mesh: ClusterUnderTest, status: Status) -> None:
    mesh.connect("w1", devices=(card(0),))
    spec = WHOLE._replace(retries=0)
    mesh.submit(2, spec)
    assert mesh.finish("w1", task(0), status=status)[1:] == [Assign(W1, spec, [(task(1), 1)], ("GPU-0",), 0)]


def test_a_client_that_leaves_gives_its_cards_back_when_its_tasks_have_been_ended(mesh: ClusterUnderTest) -> None:
    mesh.join_client(2)
    mesh.connect("w1", devices=(card(0),))
    mesh.submit(1, WHOLE)
    assert mesh.submit(1, WHOLE, client=2) == []
    assert mesh.lose_client(1)[0] == Recall(W1, [(task(0), 1)], kill=True)
    assert mesh.finish("w1", task(0), status=Status.CANCELLED) == [Assign(W1, WHOLE, [(task(0, 2), 1)], ("GPU-0",), 0)]


def test_the_cards_of_a_lost_worker_are_forgotten_with_it(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0),))
    mesh.submit(1, WHOLE)
    assert mesh.lose("w1") == [Retrying(task(0), 2, W1, Status.LOST), WorkersChanged(0)]
    assert mesh.connect("w1", devices=(card(0),)) == [
        Assign(W1, WHOLE, [(task(0), 2)], ("GPU-0",), 0),
        WorkersChanged(1),
    ]


def test_of_a_lost_worker_only_the_first_task_of_each_lease_may_have_run(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0),))
    mesh.submit(1, WHOLE)
    mesh.finish("w1", task(0), seconds=0.0005)
    mesh.submit(3, WHOLE)
    assert mesh.lose("w1") == [Retrying(task(1), 2, W1, Status.LOST), WorkersChanged(0)]


# --- speeds


def test_the_same_function_is_learned_apart_on_cards_and_in_slots(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0),))
    in_a_slot = WHOLE._replace(requirement=PLAIN.requirement)
    mesh.submit(1, WHOLE)
    mesh.finish("w1", task(0), seconds=0.5)
    mesh.submit(1, in_a_slot)
    mesh.finish("w1", task(1), seconds=80.0)
    throughput = mesh.cluster._throughput
    assert throughput.function(WHOLE.function, "gpu").seconds_on(W1, 100.0) == pytest.approx(0.5)
    assert throughput.function(WHOLE.function).seconds_on(W1, 1.0) == pytest.approx(80.0)


def test_the_last_task_is_not_given_to_a_slow_card_while_a_fast_one_will_be_free_sooner(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0, score=100.0),))
    mesh.submit(1, WHOLE)
    mesh.finish("w1", task(0), seconds=1.0)
    mesh.connect("w2", devices=(card(1, score=2.0),))
    assert leases(mesh.submit(2, WHOLE)) == [("w1", [1], ("GPU-0",), 0)]
    assert leases(mesh.at(1.0).finish("w1", task(1))[1:]) == [("w1", [2], ("GPU-0",), 0)]
    assert mesh.until(1.9) == []


def test_a_slow_card_does_not_wait_for_a_fast_one_that_other_programs_hold(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0, score=100.0),))
    mesh.submit(1, WHOLE)
    mesh.finish("w1", task(0), seconds=1.0)
    measure(mesh, "w1", 24)
    mesh.connect("w2", devices=(card(1, score=2.0),))
    assert leases(mesh.submit(1, WHOLE)) == [("w2", [1], ("GPU-1",), 0)]


def test_nor_for_the_second_card_of_a_worker_that_is_busy_with_its_first(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0, score=100.0), card(1, score=100.0)))
    mesh.submit(1, WHOLE)
    mesh.finish("w1", task(0), seconds=1.0)
    measure(mesh, "w1", 0, 24)
    mesh.connect("w2", devices=(card(2, score=20.0),))
    assert leases(mesh.submit(1, WHOLE)) == [("w1", [1], ("GPU-0",), 0)]
    mesh.at(60.0)
    assert leases(mesh.submit(1, WHOLE)) == [("w2", [2], ("GPU-2",), 0)], "the first has run for a minute, and may for another"


def test_inputs_at_a_worker_whose_cards_other_programs_hold_are_fetched_from_there(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(card(0),))
    mesh.submit(1, WHOLE)
    mesh.finish("w1", task(0), seconds=1.0)
    measure(mesh, "w1", 24)
    mesh.connect("w2", devices=(card(1),))
    inputs = [(task(1), [(5, 100 * GB, [W1])])]
    assert leases(mesh.handle(ev.TasksSubmitted(ONE, mesh.specs[1, WHOLE], [task(1)], inputs))) == [  # type: ignore[index]
        ("w2", [1], ("GPU-1",), 0)
    ]
