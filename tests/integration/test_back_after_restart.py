"""A coordinator that has just started, and peers of before that come back to it in any order: driven message by message."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import pytest

from gpumesh import GPUMesh
from gpumesh.journal.sqlite import SqliteJournal, open_reader
from gpumesh.model.ids import SEQUENCE_BITS
from gpumesh.model.outcomes import Status
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import (
    DefineFunction,
    DefineSpec,
    ForgetResults,
    ResubmissionEnds,
    ResultsReceived,
    RunTasks,
    SubmitTasks,
    TaskResults,
    TasksFinished,
    WorkerDraining,
)
from gpumesh.runtime.coordinator import DIED, Coordinator
from tests.support.mesh_peer import MeshPeer

CLIENT = 7
TASK = CLIENT << SEQUENCE_BITS
SPEC = TaskSpec(b"f" * 16, "train", retries=0)
TOKEN = "secret"


@pytest.fixture
def port() -> Iterator[int]:
    handle = GPUMesh.start_coordinator(port=0, token=TOKEN)
    yield int(handle.url.rpartition(":")[2])
    handle.stop()


def submit_again(client: MeshPeer) -> None:
    client.send(
        DefineFunction(SPEC.function, b"body"),
        DefineSpec(1, SPEC),
        SubmitTasks(1, [TASK], [b"arguments"], True),
        ResubmissionEnds(),
    )


@pytest.mark.parametrize(
    "end",
    [(Status.OK, b"value"), (Status.RAISED, b"exception"), (Status.CRASHED, {"reason": "killed", "exit": -9})],
    ids=lambda end: end[0].name.lower(),
)
def test_what_ends_before_its_client_is_back_is_not_run_again(port: int, end: Tuple[Status, Any]) -> None:
    status, payload = end
    with MeshPeer(port, TOKEN, worker="w1", held=[(tuple(SPEC), (), 0, ((TASK, 1),))]) as worker:
        worker.send(TasksFinished([(TASK, 1, int(status), payload, 0.1)]))
        assert worker.quiet(0.3) is not None  # The coordinator has read it; whatever it said, it is no task.

        with MeshPeer(port, TOKEN, client=CLIENT, resumes=True) as client:
            submit_again(client)

            results = client.expect(TaskResults).results
            assert [(result[0], result[1]) for result in results] == [(TASK, int(status))]
            if status is not Status.CRASHED:
                assert results[0][2] == payload
            client.send(ResultsReceived(1))
            assert list(worker.expect(ForgetResults).task_ids) == [TASK]
            assert not [message for message in worker.quiet() if type(message) is RunTasks]


def test_what_goes_on_is_not_started_again_and_its_result_is_delivered_once(port: int) -> None:
    with MeshPeer(port, TOKEN, worker="w1", held=[(tuple(SPEC), (), 0, ((TASK, 1),))]) as worker:
        with MeshPeer(port, TOKEN, client=CLIENT, resumes=True) as client:
            submit_again(client)
            assert not [message for message in worker.quiet(0.3) if type(message) is RunTasks]

            worker.send(TasksFinished([(TASK, 1, int(Status.OK), b"value", 0.1)]))

            assert [tuple(result[:3]) for result in client.expect(TaskResults).results] == [(TASK, 0, b"value")]
            assert not [message for message in client.quiet(0.2) if type(message) is TaskResults]


def test_what_a_worker_took_along_is_known_to_have_been_lost_also_if_it_was_about_to_leave(tmp_path: Path) -> None:
    path = str(tmp_path / "jobs.db")

    def play(port: int) -> None:
        with MeshPeer(port, TOKEN, client=CLIENT) as client:
            with MeshPeer(port, TOKEN, worker="w1") as worker:
                client.send(DefineFunction(SPEC.function, b"body"), DefineSpec(1, SPEC), SubmitTasks(1, [TASK], [b"call"]))
                worker.expect(RunTasks)
                worker.send(WorkerDraining("its owner ended it"))
            assert client.expect(TaskResults).results[0][1] == Status.LOST

    async def serve() -> List[str]:
        loop = asyncio.get_running_loop()
        journal = SqliteJournal(path, call_soon=loop.call_soon_threadsafe)
        coordinator = Coordinator(token=TOKEN, journal=journal)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        await coordinator.start(listener)
        await loop.run_in_executor(None, play, port)
        await coordinator.stop()
        reader = open_reader(path)
        try:
            return [record.id for record in reader.workers()]
        finally:
            reader.close()

    assert asyncio.run(serve()) == [DIED]
