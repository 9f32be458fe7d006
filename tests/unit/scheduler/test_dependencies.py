"""Tasks with the results of others among their arguments: exact lists of actions."""

from __future__ import annotations

from typing import Any, List

from gpumesh.model.ids import ClientNumber, WorkerId, make_task_id
from gpumesh.model.outcomes import Status
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.actions import Assign, Deliver, Fail, Forget
from gpumesh.scheduler.states import TaskState

PLAIN = TaskSpec(b"f" * 16, "train")
W1, W2 = WorkerId("w1"), WorkerId("w2")
ONE = ClientNumber(1)


def t(index: int, client: int = 1) -> int:
    return make_task_id(ClientNumber(client), index)


def submit_with(mesh: Any, task: int, *producers: int, client: int = 1) -> List[Any]:
    """Submit one task that wants the results of others."""
    spec = mesh.specs[client, PLAIN]
    return list(mesh.handle(ev.DependentSubmitted(ClientNumber(client), spec, t(task, client), list(producers))))


def test_a_task_waits_for_its_inputs_and_goes_where_the_last_of_them_was_made(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit(1)
    assert submit_with(mesh, 10, t(0)) == []
    assert mesh.cluster.state_of(t(10)) is TaskState.WAITING
    mesh.connect("w2", slots=4)
    assert mesh.finish("w1", t(0)) == [
        Deliver(ONE, W1, [(t(0), Status.OK, b"value", 1.0)]),
        Assign(W1, PLAIN, [(t(10), 1)]),
    ]


def test_of_two_inputs_the_last_one_counts(mesh: Any) -> None:
    mesh.connect("w1", slots=2)
    mesh.submit(2)
    submit_with(mesh, 10, t(0), t(1), t(0))
    assert mesh.finish("w1", t(1)) == [Deliver(ONE, W1, [(t(1), Status.OK, b"value", 1.0)])]
    assert mesh.finish("w1", t(0))[1:] == [Assign(W1, PLAIN, [(t(10), 1)])]


def test_an_input_that_nobody_knows_ends_the_task_at_once(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit(1)
    mesh.finish("w1", t(0))
    assert submit_with(mesh, 10, t(0)) == [Fail(ONE, t(10), Status.INPUT_MISSING, {"input": t(0)})]
    assert mesh.cluster.pending_count() == 0


def test_a_task_of_another_client_is_no_input(mesh: Any) -> None:
    mesh.join_client(2)
    mesh.connect("w1")
    mesh.submit(1)
    mesh.submit(1, client=2)
    assert submit_with(mesh, 10, t(0, 2)) == [Fail(ONE, t(10), Status.INPUT_MISSING, {"input": t(0, 2)})]


def test_a_failed_input_fails_all_that_follows_from_it(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit(1)
    submit_with(mesh, 10, t(0))
    submit_with(mesh, 11, t(10))
    assert mesh.finish("w1", t(0), status=Status.RAISED) == [
        Deliver(ONE, W1, [(t(0), Status.RAISED, b"value", 1.0)]),
        Fail(ONE, t(10), Status.INPUT_FAILED, {"input": t(0)}),
        Fail(ONE, t(11), Status.INPUT_FAILED, {"input": t(10)}),
    ]
    assert mesh.cluster.pending_count() == 0


def test_a_waiting_task_can_be_cancelled_and_what_waits_for_it_fails(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit(1)
    submit_with(mesh, 10, t(0))
    submit_with(mesh, 11, t(10))
    actions = mesh.handle(ev.CancelRequested(ONE, [t(10)]))
    assert [(action.task_id, action.status) for action in actions] == [
        (t(10), Status.CANCELLED),
        (t(11), Status.INPUT_FAILED),
    ]
    assert mesh.finish("w1", t(0)) == [Deliver(ONE, W1, [(t(0), Status.OK, b"value", 1.0)])]


def test_what_waits_is_forgotten_with_its_client(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit(1)
    submit_with(mesh, 10, t(0))
    actions = mesh.handle(ev.ClientLost(ONE))
    assert [action.task_ids for action in actions if type(action) is Forget] == [[t(0), t(10)]]
    assert mesh.cluster.pending_count() == 0


def test_an_input_that_is_tried_again_is_waited_for(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit(1)
    submit_with(mesh, 10, t(0))
    mesh.finish("w1", t(0), status=Status.CRASHED)
    assert mesh.cluster.state_of(t(10)) is TaskState.WAITING
