"""Workers, specs and functions for tests that try one part of the scheduler alone."""

from __future__ import annotations

from typing import Any

from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.resources import ANYTHING, Requirement, WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler.idle import Idle
from gpumesh.scheduler.queues import Group
from gpumesh.scheduler.states import Batch, Client, Spec, Worker
from gpumesh.scheduler.throughput import Function


def make_worker(name: str = "w1", *, slots: int = 1, **facts: Any) -> Worker:
    return Worker(WorkerId(name), WorkerFacts(hostname=name, slots=slots, **{"cores": slots, **facts}))


def make_spec(function: Function, *, client: int = 1, need: Requirement = ANYTHING, **facts: Any) -> Spec:
    spec = TaskSpec(function.digest, "train", need, **{"retries": 3, **facts})
    return Spec(Client(ClientNumber(client), "someone"), spec, function, Group(need, 0))


def measured(seconds: float, *workers: Worker, count: int = 1) -> Function:
    """A function of which each of these workers has ended `count` tasks, one after the other, each in so many seconds."""
    function = Function(b"f" * 16)
    for worker in workers:
        for _ in range(count):
            function.observe(worker.id, worker.speed, seconds, 1)
    return function


def serve(spec: Spec, *workers: Worker) -> Spec:
    """These can run it, each of its tasks in one slot."""
    for worker in workers:
        spec.group.workers[worker] = 1
    return spec


def start(worker: Worker, spec: Spec, *task_ids: int, at: float = 0.0) -> Batch:
    """These are assigned to the worker."""
    batch = Batch(spec, 1, 1, at, -1)
    worker.assigned.update(dict.fromkeys(task_ids, batch))
    worker.add(batch, len(task_ids))
    return batch


def idle_of(*workers: Worker) -> Idle:
    idle = Idle()
    for worker in workers:
        idle.add(worker)
    return idle
