"""Pauses between attempts: how long, in what order, and what happens to those that wait meanwhile."""

from __future__ import annotations

from typing import List

import pytest

from gpumesh.config import ATTEMPTS_KEPT
from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler.actions import Assign, Deliver, Fail, Forget, Retrying, WorkersChanged
from gpumesh.scheduler.delays import Delays, backoff_seconds
from gpumesh.scheduler.states import TaskState
from tests.support.scheduler_parts import make_spec, measured
from tests.unit.scheduler.conftest import ClusterUnderTest, task

ONE = ClientNumber(1)
W1, W2 = WorkerId("w1"), WorkerId("w2")
SPEC = TaskSpec(b"f" * 16, "train", backoff=2.0)


@pytest.fixture
def mesh() -> ClusterUnderTest:
    mesh = ClusterUnderTest()
    mesh.join_client(1)
    return mesh


def waits(backoff: float, strikes: int) -> List[float]:
    spec = make_spec(measured(1.0), backoff=backoff)
    return [backoff_seconds(spec, count) for count in range(strikes + 1)]


def test_the_pause_doubles_up_to_a_minute() -> None:
    assert waits(1.0, 8) == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert waits(0.0, 2) == [0.0, 0.0, 0.0]
    assert waits(90.0, 3) == [0.0, 90.0, 90.0, 90.0], "what is longer stays as it is"
    assert waits(1e-9, 10**6)[-1] == 1e-9 * 2**30, "nor does a number overflow"


def test_they_come_out_in_order_of_time_and_those_that_have_ended_do_not() -> None:
    delays = Delays()
    spec = make_spec(measured(1.0))
    for task_id, due in ((1, 5.0), (2, 3.0), (3, 5.0), (4, 4.0)):
        delays.add(task_id, spec, due)
    delays.drop(2)
    delays.check()

    assert delays.next_due() == 4.0
    assert delays.due(3.9) == []
    assert delays.due(5.0) == [(spec, 4), (spec, 1), (spec, 3)]
    assert (len(delays), delays.next_due()) == (0, None)


def test_one_that_ended_and_waits_again_waits_until_its_new_time() -> None:
    delays = Delays()
    spec = make_spec(measured(1.0))
    delays.add(1, spec, 3.0)
    delays.drop(1)
    delays.add(1, spec, 8.0)

    assert delays.next_due() == 8.0
    assert delays.due(7.0) == []


@pytest.mark.parametrize("status", [Status.CRASHED, Status.RETRYABLE])
def test_a_task_that_failed_is_tried_again_when_its_pause_is_over(mesh: ClusterUnderTest, status: Status) -> None:
    mesh.connect("w1")
    mesh.submit(1, SPEC)

    assert mesh.at(1.0).finish("w1", task(0), status=status) == [Retrying(task(0), 2, W1, status)]
    assert mesh.cluster.state_of(task(0)) is TaskState.DELAYED
    assert mesh.cluster.next_deadline() == 3.0
    assert mesh.until(2.9) == []
    assert mesh.until(3.0) == [Assign(W1, SPEC, [(task(0), 2)])]
    assert mesh.at(4.0).finish("w1", task(0), attempt=2, status=status) == [Retrying(task(0), 3, W1, status)]
    assert mesh.until(7.9) == []
    assert mesh.until(8.0) == [Assign(W1, SPEC, [(task(0), 3)])]
    assert mesh.finish("w1", task(0), attempt=3) == [Deliver(ONE, W1, [(task(0), Status.OK, b"value", 1.0)])]


def test_only_the_one_that_failed_waits(mesh: ClusterUnderTest) -> None:
    mesh.learn(0.001, spec=SPEC, worker="w1")
    assert mesh.submit(3, SPEC) == [Assign(W1, SPEC, [(task(0), 1), (task(1), 1), (task(2), 1)])]

    actions = mesh.at(1.0).lose("w1")

    assert actions == [Retrying(task(0), 2, W1, Status.LOST), WorkersChanged(0)]
    assert [mesh.cluster.state_of(task(index)) for index in range(3)] == [
        TaskState.DELAYED,
        TaskState.READY,
        TaskState.READY,
    ]
    assert mesh.connect("w2") == [Assign(W2, SPEC, [(task(1), 2)]), WorkersChanged(1)]
    assert Assign(W2, SPEC, [(task(2), 2)]) in mesh.finish("w2", task(1), attempt=2)
    mesh.finish("w2", task(2), attempt=2)
    assert mesh.until(3.0) == [Assign(W2, SPEC, [(task(0), 2)])]


def test_work_given_back_does_not_wait(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(1, SPEC)

    assert mesh.finish("w1", task(0), status=Status.HANDED_BACK) == [Assign(W1, SPEC, [(task(0), 2)])]


def test_a_pause_is_cut_short_by_cancelling_and_by_the_client_leaving(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", slots=2)
    mesh.submit(2, SPEC)
    mesh.finish("w1", task(0), status=Status.CRASHED)
    mesh.finish("w1", task(1), status=Status.CRASHED)

    attempts = [{"worker": "w1", "status": "CRASHED"}]
    details = {"reason": "cancelled before it was tried again", "attempts": attempts}
    assert mesh.cancel(task(0)) == [Fail(ONE, task(0), Status.CANCELLED, details)]
    assert mesh.lose_client() == [Forget([task(1)])]
    assert mesh.cluster.next_deadline() is None
    assert mesh.until(100.0) == []


def test_who_comes_out_of_a_pause_when_nobody_can_run_it_waits_like_any_other(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(1, SPEC._replace(placement_timeout=10.0))
    mesh.finish("w1", task(0), status=Status.CRASHED)
    mesh.lose("w1")

    assert mesh.cluster.waiting(1.0)[0]["state"] == "delayed"
    told = mesh.until(2.0 + 9.9)
    assert [type(action).__name__ for action in told] == ["Notice"], "counted from the end of the pause"
    (failed,) = mesh.until(12.0)
    assert isinstance(failed, Fail)
    assert failed.status == Status.INFEASIBLE


def test_what_waits_for_another_try_is_shown_with_when_and_why(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", slots=2)
    mesh.submit(2, SPEC)
    mesh.at(1.0).finish("w1", task(0), status=Status.CRASHED)
    mesh.at(1.5).finish("w1", task(1), status=Status.CRASHED)

    (view,) = mesh.cluster.waiting(2.0)

    assert (view["functions"], view["count"], view["state"]) == (["train"], 2, "delayed")
    assert view["reason"] == "failed before; the next is tried again in 1.0 s"
    assert mesh.cluster.attempts_of(task(0)) == [{"worker": "w1", "status": "CRASHED"}]
    assert mesh.cluster.attempts_of(task(7)) == []


def test_of_very_many_attempts_the_first_and_the_newest_are_told(mesh: ClusterUnderTest) -> None:
    mesh.connect("first")
    mesh.submit(1, SPEC._replace(backoff=0.0, retries=10**6))
    mesh.finish("first", task(0), status=Status.CRASHED)
    mesh.connect("w1")
    mesh.lose("first")
    for attempt in range(3, 203):
        mesh.finish("w1", task(0), attempt=attempt, status=Status.CRASHED)

    told = mesh.cluster.attempts_of(task(0))

    assert len(told) == ATTEMPTS_KEPT
    assert told[0]["worker"] == "first"
    assert {attempt["worker"] for attempt in told[1:]} == {"w1"}
