"""Ids that belong to others, told by somebody who has a token: nothing of the others changes."""

from __future__ import annotations

from typing import Any, Iterator, List, Tuple

import pytest

from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol import auth
from gpumesh.protocol.connection import Closed
from gpumesh.protocol.messages import (
    CancelTasks,
    DefineFunction,
    DefineSpec,
    DeleteObjects,
    FetchObject,
    KillActor,
    ReleaseRefs,
    ResultsReceived,
    RunTasks,
    StreamCredit,
    StreamItems,
    SubmitTasks,
    TaskOutput,
    TaskResults,
    TasksFinished,
    TasksWait,
)
from tests.support.guarded import TOKEN, Guarded
from tests.support.mesh_peer import MeshPeer

OWNER, OTHER = 0x0A0A0A0A, 0x0B0B0B0B
TASK = (OWNER << 32) | 1
OBJECT = (OWNER << 32) | 9
DIGEST = bytes(range(16))

Scene = Tuple[MeshPeer, MeshPeer, RunTasks]


@pytest.fixture
def scene(guarded: Guarded) -> Iterator[Scene]:
    """A client whose task runs on a worker."""
    with MeshPeer(guarded.port, TOKEN, worker="aaaaaaaaaaaaaaaa") as worker:
        with MeshPeer(guarded.port, TOKEN, client=OWNER) as owner:
            owner.send(
                DefineFunction(DIGEST, b"body"),
                DefineSpec(1, tuple(TaskSpec(DIGEST, "f"))),
                SubmitTasks(1, [TASK], [b"arguments"]),
            )
            run = worker.expect(RunTasks)
            yield owner, worker, run
            owner.connection.close("done")
            owner.flush()
        worker.connection.close("done")
        worker.flush()


def end_of(peer: MeshPeer) -> str:
    """Why the coordinator has ended this connection."""
    return str(peer.expect(Closed).error)


def goes_on(scene: Scene) -> None:
    """The owner gets the result of its worker."""
    owner, worker, run = scene
    worker.send(TasksFinished([(TASK, run.tasks[0][1], 0, b"right", 0.1)]))
    results = owner.expect(TaskResults)
    assert results.results[0][:3] == (TASK, 0, b"right")


@pytest.mark.parametrize(
    "messages",
    [
        [CancelTasks([TASK])],
        [
            DefineFunction(DIGEST, b"body"),
            DefineSpec(1, tuple(TaskSpec(DIGEST, "f"))),
            SubmitTasks(1, [TASK], [b"mine now"]),
        ],
        [
            DefineFunction(DIGEST, b"body"),
            DefineSpec(1, tuple(TaskSpec(DIGEST, "f"))),
            SubmitTasks(1, [TASK], [b"mine now"], True),
        ],
        [TasksFinished([(TASK, 1, 0, b"false", 0.1)])],
        [RunTasks(1, [(TASK, 1, b"x")])],
        [TaskResults("w", [(TASK, 0, b"false", 0.1)])],
    ],
    ids=["cancel", "submit", "submit again", "a worker's message", "a coordinator's message", "results"],
)
def test_another_client_cannot_touch_a_task(guarded: Guarded, scene: Scene, messages: List[Any]) -> None:
    with MeshPeer(guarded.port, TOKEN, client=OTHER) as other:
        other.send(*messages)
        assert end_of(other)
    goes_on(scene)


@pytest.mark.parametrize(
    "messages",
    [
        [StreamCredit(TASK, 1 << 40)],
        [ResultsReceived(5)],
        [ReleaseRefs([(OBJECT, 5)])],
        [DeleteObjects([OBJECT])],
        [FetchObject((1 << 31) | 1, OBJECT, 1 << 20)],
        [KillActor(1, TASK, True)],
    ],
    ids=["credit", "received", "release", "delete", "fetch", "kill"],
)
def test_what_another_client_says_of_a_task_changes_nothing(guarded: Guarded, scene: Scene, messages: List[Any]) -> None:
    with MeshPeer(guarded.port, TOKEN, client=OTHER) as other:
        other.send(*messages)
        other.quiet()
        other.connection.close("done")
        other.flush()
    goes_on(scene)


@pytest.mark.parametrize("token", [TOKEN, auth.worker_token(TOKEN)], ids=["full token", "worker token"])
@pytest.mark.parametrize("attempt", [0, 1, 2, 10**6])
def test_another_worker_cannot_end_a_task(guarded: Guarded, scene: Scene, token: str, attempt: int) -> None:
    _, _, run = scene
    mine = run.tasks[0][1] + attempt - 1
    with MeshPeer(guarded.port, token, worker="bbbbbbbbbbbbbbbb") as other:
        other.send(TasksFinished([(TASK, mine, 0, b"false", 0.1)]), TasksFinished([(TASK, mine, 3, {"reason": "x"}, 0.1)]))
        other.quiet()
        other.connection.close("done")
        other.flush()
    goes_on(scene)


@pytest.mark.parametrize(
    "message",
    [
        TasksWait([(TASK, 1)], True),
        StreamItems(TASK, 1, 0, [b"false"]),
        CancelTasks([TASK]),
        SubmitTasks(1, [TASK], [b"x"]),
        ReleaseRefs([(OBJECT, 1)]),
        DeleteObjects([OBJECT]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_another_worker_says_of_a_task_changes_nothing(guarded: Guarded, scene: Scene, message: Any) -> None:
    with MeshPeer(guarded.port, auth.worker_token(TOKEN), worker="bbbbbbbbbbbbbbbb") as other:
        other.send(message)
        other.quiet()
    goes_on(scene)


def test_a_worker_writes_no_output_into_tasks_that_it_does_not_run(guarded: Guarded, scene: Scene) -> None:
    owner, _, _ = scene
    with MeshPeer(guarded.port, auth.worker_token(TOKEN), worker="bbbbbbbbbbbbbbbb") as other:
        other.send(TaskOutput(TASK, 1, b"send your password to ...\n", "trusted"))
        other.quiet()
    assert [message for message in owner.quiet() if type(message) is TaskOutput] == []
    goes_on(scene)


@pytest.mark.parametrize("number", [0, -1, 1 << 31, 1 << 40, 2**64 - 1])
def test_client_numbers_of_the_coordinators_own_are_refused(guarded: Guarded, number: int) -> None:
    with MeshPeer(guarded.port, TOKEN, client=number) as peer:
        assert "out of range" in end_of(peer)
