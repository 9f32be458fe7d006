"""A cluster with a clock that a test moves, and workers and clients named in one word."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import pytest

from gpumesh.model.ids import ClientNumber, WorkerId, make_task_id
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import actions as act
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.cluster import Cluster
from gpumesh.scheduler.invariants import check

PLAIN = TaskSpec(b"f" * 16, "train")


class ClusterUnderTest:
    """Checks every promise after every event. Task ids are those of client 1 unless said otherwise."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.now = 0.0
        self.specs: Dict[TaskSpec, int] = {}
        self._submitted: Dict[int, int] = {}
        self.handle(ev.ClientConnected(ClientNumber(1), "someone"))

    def handle(self, event: ev.Event) -> List[act.Action]:
        actions = self.cluster.handle(event, self.now)
        check(self.cluster)
        return actions

    def at(self, now: float) -> ClusterUnderTest:
        self.now = now
        return self

    def until(self, now: float) -> List[act.Action]:
        """All that is done because time passes."""
        actions: List[act.Action] = []
        while True:
            deadline = self.cluster.next_deadline()
            if deadline is None or deadline > now:
                break
            actions += self.cluster.on_time(deadline)
            check(self.cluster)
        self.now = now
        return actions

    def connect(self, worker: str, slots: int = 1, **facts: Any) -> List[act.Action]:
        facts = {"hostname": worker, "cores": slots, **facts}
        return self.handle(ev.WorkerConnected(WorkerId(worker), WorkerFacts(slots=slots, **facts)))

    def change(self, worker: str, slots: int = 1, **facts: Any) -> List[act.Action]:
        facts = {"hostname": worker, "cores": slots, **facts}
        return self.handle(ev.WorkerChanged(WorkerId(worker), WorkerFacts(slots=slots, **facts)))

    def drain(self, worker: str) -> List[act.Action]:
        return self.handle(ev.WorkerDraining(WorkerId(worker)))

    def lose(self, worker: str, reason: str = "it was unplugged") -> List[act.Action]:
        return self.handle(ev.WorkerLost(WorkerId(worker), reason))

    def join_client(self, client: int) -> List[act.Action]:
        for key in [key for key in self.specs if key[0] == client]:
            del self.specs[key]
        return self.handle(ev.ClientConnected(ClientNumber(client), "another"))

    def lose_client(self, client: int = 1) -> List[act.Action]:
        return self.handle(ev.ClientLost(ClientNumber(client)))

    def submit_ids(self, ids: Sequence[int], spec: TaskSpec = PLAIN, *, client: int = 1) -> List[act.Action]:
        key: Any = (client, spec)
        if key not in self.specs:
            self.specs[key] = len(self.specs)
            assert self.handle(ev.SpecDefined(ClientNumber(client), self.specs[key], spec)) == []
        return self.handle(ev.TasksSubmitted(ClientNumber(client), self.specs[key], ids))

    def submit(self, count: int = 1, spec: TaskSpec = PLAIN, *, client: int = 1) -> List[act.Action]:
        """The next `count` tasks of a client, counted from 0 for each client."""
        first = self._submitted.get(client, 0)
        self._submitted[client] = first + count
        return self.submit_ids([task(first + index, client) for index in range(count)], spec, client=client)

    def finish(
        self, worker: str, *ids: int, status: int = Status.OK, seconds: float = 1.0, attempt: int = 1
    ) -> List[act.Action]:
        return self.finish_all(worker, [(task_id, attempt, int(status), b"value", seconds) for task_id in ids])

    def finish_all(self, worker: str, results: List[Tuple[int, int, int, Any, float]]) -> List[act.Action]:
        return self.handle(ev.AttemptsFinished(WorkerId(worker), results))

    def cancel(self, *ids: int, client: int = 1) -> List[act.Action]:
        return self.handle(ev.CancelRequested(ClientNumber(client), ids))

    def learn(self, seconds: float, spec: TaskSpec = PLAIN, *, worker: Optional[str] = None) -> None:
        """Let one worker measure a function, and leave the cluster without tasks and, unless `worker` stays, without it."""
        name = worker or "teacher"
        if name not in self.cluster._workers:
            self.connect(name)
        self.submit_ids([task(1 << 20)], spec)
        self.finish(name, task(1 << 20), seconds=seconds)
        if worker is None:
            self.lose(name)


def task(index: int, client: int = 1) -> int:
    return make_task_id(ClientNumber(client), index)


@pytest.fixture
def mesh() -> ClusterUnderTest:
    return ClusterUnderTest()
