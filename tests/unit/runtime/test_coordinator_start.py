"""What a coordinator takes for known when it starts."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import List

from gpumesh.config import RECOVERY_SECONDS
from gpumesh.journal.base import WorkerRecord
from gpumesh.journal.sqlite import SqliteJournal
from gpumesh.model.ids import ClientNumber
from gpumesh.model.tasks import TaskSpec
from gpumesh.runtime.coordinator import Coordinator
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.states import TaskState

TASK = 1 << 32


def state_of_a_task_submitted_again(path: Path, workers: List[WorkerRecord]) -> TaskState:
    """Where it is a moment after the start. `workers` are noted before the next start."""

    async def start() -> TaskState:
        loop = asyncio.get_running_loop()
        journal = SqliteJournal(str(path), call_soon=loop.call_soon_threadsafe)
        coordinator = Coordinator(token="secret", journal=journal)
        await coordinator.start(socket.create_server(("127.0.0.1", 0)))
        cluster, now = coordinator._cluster, loop.time()
        spec = TaskSpec(b"f" * 16, "train")
        cluster.handle(ev.ClientConnected(ClientNumber(1), "someone", True), now)
        cluster.handle(ev.SpecDefined(ClientNumber(1), 0, spec), now)
        cluster.handle(ev.TasksSubmitted(ClientNumber(1), 0, [TASK], (), True), now)
        state = cluster.state_of(TASK)
        assert state is not TaskState.RECOVERING or (cluster.next_deadline() or 0) <= now + RECOVERY_SECONDS
        for worker in workers:
            journal.worker_joined(worker)
        await coordinator.stop()
        return state

    return asyncio.run(start())


def test_what_workers_of_before_may_have_is_held_back_and_a_new_journal_does_not_know_them(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    there = WorkerRecord("0123456789abcdef", "box", time.time())

    assert state_of_a_task_submitted_again(path, []) is TaskState.RECOVERING  # It is the first start on this journal.
    assert state_of_a_task_submitted_again(path, [there]) is TaskState.READY  # Nobody was there.
    assert state_of_a_task_submitted_again(path, []) is TaskState.RECOVERING
