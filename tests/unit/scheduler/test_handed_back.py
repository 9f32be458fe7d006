"""What the machine's owner takes back: tasks that had started and were ended for the owner's sake."""

from __future__ import annotations

import pytest

from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import DeviceFacts, Requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler.actions import Assign, Deliver, Fail, Recall, Retrying, WorkersChanged
from tests.unit.scheduler.conftest import PLAIN, ClusterUnderTest, task

ONCE = PLAIN._replace(retries=0, name="pay")
ONE = ClientNumber(1)
W1, W2 = WorkerId("w1"), WorkerId("w2")
CARD = DeviceFacts("cuda", 0, "RTX", 24 * 10**9, 100.0, uuid="GPU-a")
ON_A_CARD = TaskSpec(b"g" * 16, "train", Requirement("gpu", gpus=1.0))


def test_a_task_handed_back_goes_elsewhere_at_once_and_has_no_strike(mesh: ClusterUnderTest) -> None:
    spec = PLAIN._replace(retries=1)
    mesh.connect("w1")
    mesh.submit(1, spec)
    mesh.connect("w2")
    assert mesh.change("w1", problem="paused by its owner") == [WorkersChanged(1)]
    assert mesh.finish("w1", task(0), status=Status.HANDED_BACK) == [Assign(W2, spec, [(task(0), 2)])]
    assert mesh.finish("w2", task(0), status=Status.CRASHED, attempt=2) == [
        Retrying(task(0), 3, W2, Status.CRASHED),
        Assign(W2, spec, [(task(0), 3)]),
    ], "that was the first strike"


def test_it_goes_before_what_waits_already(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(3)
    mesh.change("w1", problem="paused by its owner")
    assert mesh.finish("w1", task(0), status=Status.HANDED_BACK) == []
    assert mesh.change("w1") == [Assign(W1, PLAIN, [(task(0), 2)]), WorkersChanged(1)]


def test_it_is_handed_back_as_often_as_the_owner_likes(mesh: ClusterUnderTest) -> None:
    spec = PLAIN._replace(retries=1)
    mesh.connect("w1")
    mesh.submit(1, spec)
    for attempt in range(1, 6):
        assert mesh.finish("w1", task(0), status=Status.HANDED_BACK, attempt=attempt) == [
            Assign(W1, spec, [(task(0), attempt + 1)])
        ]
    assert mesh.finish("w1", task(0), attempt=6) == [Deliver(ONE, W1, [(task(0), Status.OK, b"value", 1.0)])]


def test_what_may_start_at_most_once_ends_so(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(1, ONCE)
    assert mesh.finish("w1", task(0), status=Status.HANDED_BACK) == [
        Deliver(ONE, W1, [(task(0), Status.HANDED_BACK, b"value", 1.0)])
    ]
    assert mesh.cluster.pending_count() == 0


def test_what_had_not_started_runs_elsewhere_even_if_it_may_start_at_most_once(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(1, ONCE)
    mesh.connect("w2")
    mesh.change("w1", problem="paused by its owner")
    assert mesh.finish("w1", task(0), status=Status.NOT_RUN) == [Assign(W2, ONCE, [(task(0), 2)])]


def test_a_cancelled_task_that_is_handed_back_is_cancelled(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit()
    mesh.cancel(task(0))
    assert mesh.finish("w1", task(0), status=Status.HANDED_BACK) == [
        Fail(ONE, task(0), Status.CANCELLED, {"reason": "cancelled", "attempts": [], "worker": "w1"})
    ]


def test_the_time_that_was_spent_teaches_nothing(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit()
    mesh.finish("w1", task(0), status=Status.HANDED_BACK, seconds=1000.0)
    assert not mesh.cluster._throughput.function(PLAIN.function).is_known


@pytest.mark.parametrize(("gone", "left", "attempt"), [("slow", "fast", 2), ("fast", "slow", 1)])
def test_of_two_attempts_the_other_goes_on(mesh: ClusterUnderTest, gone: str, left: str, attempt: int) -> None:
    twice = PLAIN._replace(idempotent=True)
    mesh.learn(1.0)
    mesh.connect("slow", score=0.1)
    mesh.submit(1, twice)
    mesh.connect("fast")
    mesh.change(gone, score={"slow": 0.1, "fast": 1.0}[gone], problem="paused by its owner")
    assert mesh.finish(gone, task(0), status=Status.HANDED_BACK, attempt=3 - attempt) == []
    assert mesh.finish(left, task(0), attempt=attempt) == [Deliver(ONE, WorkerId(left), [(task(0), Status.OK, b"value", 1.0)])]


def test_a_task_on_a_card_gives_its_card_back(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(CARD,))
    assert mesh.submit(2, ON_A_CARD) == [Assign(W1, ON_A_CARD, [(task(0), 1)], ("GPU-a",))]
    mesh.change("w1", devices=(CARD._replace(problem="paused by its owner"),))
    assert mesh.finish("w1", task(0), status=Status.HANDED_BACK) == []
    assert mesh.cluster._workers[W1].leases == {}
    assert mesh.change("w1", devices=(CARD,)) == [Assign(W1, ON_A_CARD, [(task(0), 2)], ("GPU-a",))]


def test_a_worker_lost_while_it_was_being_handed_back_counts_as_lost(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit()
    mesh.change("w1", problem="paused by its owner")
    assert mesh.lose("w1") == [Retrying(task(0), 2, W1, Status.LOST)]
    assert mesh.finish("w1", task(0), status=Status.HANDED_BACK) == [], "too late"


def test_a_recall_that_comes_too_late_for_the_owner_changes_nothing(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.learn(0.001, worker="w1")
    mesh.submit(2)
    mesh.connect("w2")
    assert mesh.until(0.1) == [Recall(W1, [(task(1), 1)], kill=False)]
    mesh.finish("w1", task(0), seconds=0.001)
    assert mesh.finish("w1", task(1), status=Status.HANDED_BACK) == [Assign(W1, PLAIN, [(task(1), 2)])]
