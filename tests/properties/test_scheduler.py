"""The cluster under anything that can happen: its tables agree after each event, and each task has exactly one end."""

from __future__ import annotations

from typing import Any, Dict, List, Set, Tuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpumesh.model.ids import ClientNumber, WorkerId, make_task_id
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import Requirement, WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import actions as act
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.cluster import Cluster
from gpumesh.scheduler.invariants import check
from gpumesh.scheduler.states import TaskState

SPECS = [
    TaskSpec(b"a" * 16, "plain"),
    TaskSpec(b"a" * 16, "once", retries=0),
    TaskSpec(b"b" * 16, "urgent", priority=5, retries=1),
    TaskSpec(b"c" * 16, "wide", Requirement(cores=3)),
    TaskSpec(b"d" * 16, "tagged", Requirement(tags=(("room", "lab"),)), placement_timeout=7.0),
    TaskSpec(b"e" * 16, "patient", Requirement(tags=(("room", "attic"),)), placement_timeout=-1.0, retries=0),
    TaskSpec(b"f" * 16, "packed", packages=("old",)),
    TaskSpec(b"a" * 16, "packed too", packages=("new", "newer")),
]
STATUSES = [Status.OK, Status.OK, Status.OK, Status.RAISED, Status.RETRYABLE, Status.CRASHED, Status.TIMED_OUT, Status.NOT_RUN]


def _facts(
    slots: int,
    cores: int,
    score: float,
    tags: Tuple[Tuple[str, str], ...],
    problem: str,
    installing: Tuple[Tuple[str, ...], ...],
) -> WorkerFacts:
    return WorkerFacts("host", slots=slots, cores=cores, score=score, tags=tags, problem=problem, installing=installing)


FACTS = st.builds(
    _facts,
    slots=st.integers(1, 4),
    cores=st.integers(1, 8),
    score=st.sampled_from([0.5, 1.0, 90.0]),
    tags=st.sampled_from([(), (("room", "lab"),), (("room", "attic"),)]),
    problem=st.sampled_from(["", "", "", "paused"]),
    installing=st.sampled_from([(), (), (), (("old",),), (("old",), ("new", "newer"))]),
)


class ClusterMachine(RuleBasedStateMachine):
    """Plays the workers and the clients, and keeps its own books of who has what."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.now = 0.0
        self.at: Dict[str, Dict[Tuple[int, int], int]] = {}  # worker -> (task id, attempt) -> spec number, in order.
        self.facts: Dict[str, WorkerFacts] = {}
        self.draining: Set[str] = set()
        self.born = 0
        self.clients: Dict[int, int] = {}  # number -> next sequence.
        self.open: Dict[int, int] = {}  # task id -> spec number.
        self.ended: Dict[int, int] = {}  # task id -> status.
        self.old: List[Tuple[str, int, int]] = []  # Attempts that were reported or given up.
        self.started: Dict[int, Set[int]] = {}  # task id -> attempts that may have started.
        self.recalled: Set[Tuple[int, int, bool]] = set()
        self.needs: Dict[int, List[int]] = {}  # task id -> tasks whose results it was submitted with.

    # --- the shell

    def handle(self, event: ev.Event) -> None:
        self.perform(self.cluster.handle(event, self.now))

    def perform(self, actions: List[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Assign):
                self.assign(action)
            elif isinstance(action, act.Deliver):
                for task_id, status, payload, _ in action.results:
                    assert payload == ("payload", task_id)
                    self.end(action.client, task_id, status)
            elif isinstance(action, act.Fail):
                if action.status == Status.INPUT_FAILED:
                    producer = action.details["input"]
                    assert producer in self.needs[action.task_id]
                    assert self.ended[producer] != Status.OK
                elif action.status == Status.INPUT_MISSING:
                    assert action.details["input"] not in self.open
                else:
                    assert action.details["reason"]
                if action.status != Status.REFUSED:
                    self.end(action.client, action.task_id, action.status)
            elif isinstance(action, act.Recall):
                for task in action.tasks:
                    assert task in self.at[action.worker]
                    assert (*task, action.kill) not in self.recalled, "never twice"
                    self.recalled.add((*task, action.kill))
            elif isinstance(action, act.Forget):
                for task_id in action.task_ids:
                    assert task_id in self.open
                    del self.open[task_id]
            elif isinstance(action, act.Retrying):
                assert action.task_id in self.open
                assert self.open[action.task_id] not in (1, 5), "a task that may run once is not tried again"
            elif isinstance(action, act.Notice):
                assert self.open[action.task_id] in (3, 4, 5) or not self.facts or self.nobody_healthy()

    def nobody_healthy(self) -> bool:
        return all(facts.problem or worker in self.draining for worker, facts in self.facts.items())

    def assign(self, action: act.Assign) -> None:
        worker = action.worker
        assert worker not in self.draining
        assert not self.facts[worker].problem
        assert not action.spec.packages or action.spec.packages not in self.facts[worker].installing
        here = self.at[worker]
        assert action.tasks
        for task_id, attempt in action.tasks:
            number = self.open[task_id]
            assert SPECS[number] == action.spec
            assert all(self.ended[producer] == Status.OK for producer in self.needs.get(task_id, ()))
            assert (task_id, attempt) not in here
            assert all((task_id, attempt) not in others for others in self.at.values())
            if action.spec.retries == 0:
                assert not self.started.get(task_id), "at most once"
                self.started.setdefault(task_id, set()).add(attempt)
            here[task_id, attempt] = number

    def end(self, client: int, task_id: int, status: int) -> None:
        assert task_id >> 32 == client
        assert client in self.clients
        assert task_id not in self.ended
        del self.open[task_id]
        self.ended[task_id] = status
        assert self.cluster.state_of(task_id) in (TaskState.GONE, TaskState.READY)

    def leave(self, worker: str, task_id: int, attempt: int) -> None:
        self.old.append((worker, task_id, attempt))
        self.recalled -= {(task_id, attempt, False), (task_id, attempt, True)}

    # --- what happens

    @initialize()
    def begin(self) -> None:
        self.connect_client()
        self.connect_worker(_facts(2, 4, 1.0, (("room", "lab"),), "", ()))

    def connect_worker(self, facts: WorkerFacts) -> None:
        worker = f"w{self.born}"
        self.born += 1
        self.at[worker] = {}
        self.facts[worker] = facts
        self.handle(ev.WorkerConnected(WorkerId(worker), facts))

    @rule(facts=FACTS)
    def join_worker(self, facts: WorkerFacts) -> None:
        self.connect_worker(facts)

    @rule(facts=FACTS)
    def join_worker_and_wait(self, facts: WorkerFacts) -> None:
        self.connect_worker(facts)
        self.wait(0.06)

    @precondition(lambda self: self.at)
    @rule(data=st.data(), facts=FACTS)
    def change_worker(self, data: st.DataObject, facts: WorkerFacts) -> None:
        worker = data.draw(st.sampled_from(sorted(self.at)))
        self.facts[worker] = facts
        self.handle(ev.WorkerChanged(WorkerId(worker), facts))

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def drain_worker(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.at)))
        self.draining.add(worker)
        self.handle(ev.WorkerDraining(WorkerId(worker)))

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def lose_worker(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.at)))
        for task_id, attempt in self.at.pop(worker):
            self.leave(worker, task_id, attempt)
        del self.facts[worker]
        self.draining.discard(worker)
        self.handle(ev.WorkerLost(WorkerId(worker), "the line went dead"))

    @precondition(lambda self: len(self.clients) < 3)
    @rule()
    def connect_client(self) -> None:
        number = next(number for number in range(1, 5) if number not in self.clients)
        self.clients[number] = 0  # The ids that this number had before are used again.
        self.handle(ev.ClientConnected(ClientNumber(number), f"client {number}"))
        for index, spec in enumerate(SPECS):
            self.handle(ev.SpecDefined(ClientNumber(number), index, spec))

    @precondition(lambda self: len(self.clients) > 1)
    @rule(data=st.data())
    def lose_client(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.clients)))
        del self.clients[number]
        self.handle(ev.ClientLost(ClientNumber(number)))
        assert not [task_id for task_id in self.open if task_id >> 32 == number]
        for task_id in [task_id for task_id in self.ended if task_id >> 32 == number]:
            del self.ended[task_id]  # The number may come back, and its ids too.
        for task_id in [task_id for task_id in self.started if task_id >> 32 == number]:
            del self.started[task_id]
        for task_id in [task_id for task_id in self.needs if task_id >> 32 == number]:
            del self.needs[task_id]

    @rule(data=st.data(), number=st.integers(0, len(SPECS) - 1), count=st.integers(1, 12))
    def submit(self, data: st.DataObject, number: int, count: int) -> None:
        client = data.draw(st.sampled_from(sorted(self.clients)))
        first = self.clients[client]
        self.clients[client] += count
        ids = [make_task_id(ClientNumber(client), first + index) for index in range(count)]
        ids = [task_id for task_id in ids if task_id not in self.ended and task_id not in self.open]
        self.open.update(dict.fromkeys(ids, number))
        self.handle(ev.TasksSubmitted(ClientNumber(client), number, ids))

    @rule(data=st.data(), number=st.integers(0, len(SPECS) - 1))
    def submit_dependent(self, data: st.DataObject, number: int) -> None:
        client = data.draw(st.sampled_from(sorted(self.clients)))
        mine = [task_id for task_id in [*self.open, *self.ended] if task_id >> 32 == client]
        if not mine:
            return
        producers = data.draw(st.lists(st.sampled_from(sorted(mine)), min_size=1, max_size=3))
        task_id = make_task_id(ClientNumber(client), self.clients[client])
        self.clients[client] += 1
        if task_id in self.ended or task_id in self.open:
            return
        is_known = all(producer in self.open for producer in producers)
        self.open[task_id] = number
        self.needs[task_id] = producers
        self.handle(ev.DependentSubmitted(ClientNumber(client), number, task_id, producers))
        expected = TaskState.WAITING if is_known else TaskState.GONE
        assert self.cluster.state_of(task_id) is expected

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.open)))
        actions = self.cluster.handle(ev.TasksSubmitted(ClientNumber(task_id >> 32), 0, [task_id]), self.now)
        assert [type(action) for action in actions] == [act.Fail]
        assert actions[0].status == Status.REFUSED

    @precondition(lambda self: any(status == Status.CANCELLED for status in self.ended.values()))
    @rule(data=st.data(), number=st.integers(0, len(SPECS) - 1))
    def use_a_cancelled_id_again(self, data: st.DataObject, number: int) -> None:
        ids = sorted(task_id for task_id, status in self.ended.items() if status == Status.CANCELLED)
        task_id = data.draw(st.sampled_from(ids))
        del self.ended[task_id]
        self.started.pop(task_id, None)
        self.needs.pop(task_id, None)
        self.open[task_id] = number
        self.handle(ev.TasksSubmitted(ClientNumber(task_id >> 32), number, [task_id]))

    @precondition(lambda self: any(self.at.values()))
    @rule(
        data=st.data(),
        statuses=st.lists(st.sampled_from(STATUSES), min_size=1, max_size=8),
        seconds=st.sampled_from([1e-6, 0.01, 3.0]),
    )
    def finish(self, data: st.DataObject, statuses: List[Status], seconds: float) -> None:
        worker = data.draw(st.sampled_from(sorted(worker for worker, tasks in self.at.items() if tasks)))
        here = self.at[worker]
        results: List[Tuple[int, int, int, Any, float]] = []
        for status, (task_id, attempt) in zip(statuses, list(here)):
            if (task_id, attempt, True) in self.recalled and status != Status.OK:
                status = Status.CANCELLED
            if status == Status.NOT_RUN:
                self.started.get(task_id, set()).discard(attempt)
            del here[task_id, attempt]
            self.leave(worker, task_id, attempt)
            results.append((task_id, attempt, int(status), ("payload", task_id), seconds))
        late = [key for key in self.old[-2:] if key[0] == worker and (key[1], key[2]) not in here]
        results += [(task_id, attempt, int(Status.OK), "late", 0.1) for _, task_id, attempt in late]
        self.now += 0.001
        self.handle(ev.AttemptsFinished(WorkerId(worker), results))

    @precondition(lambda self: self.old)
    @rule(data=st.data(), status=st.sampled_from(STATUSES))
    def finish_late(self, data: st.DataObject, status: Status) -> None:
        worker, task_id, attempt = data.draw(st.sampled_from(self.old))
        worker = data.draw(st.sampled_from([worker, *sorted(self.at)]))
        if (task_id, attempt) in self.at.get(worker, {}):
            return
        self.handle(ev.AttemptsFinished(WorkerId(worker), [(task_id, attempt, int(status), ("payload", task_id), 0.1)]))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.open)), min_size=1, max_size=4))
        client = ids[0] >> 32
        self.handle(ev.CancelRequested(ClientNumber(client), ids))

    @rule(seconds=st.sampled_from([0.01, 0.06, 1.0, 2.5, 60.0]))
    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        for _ in range(1000):
            deadline = self.cluster.next_deadline()
            if deadline is None or deadline > until:
                break
            self.now = max(self.now, deadline)
            self.perform(self.cluster.on_time(self.now))
            check(self.cluster)
        else:
            raise AssertionError("time does not get on")
        self.now = until
        assert self.cluster.on_time(self.now) == [] or deadline is None

    # --- what always holds

    @invariant()
    def the_tables_agree(self) -> None:
        check(self.cluster)
        assert self.cluster.pending_count() == len(self.open)
        assert self.cluster.assigned_count() == sum(map(len, self.at.values()))
        for view in self.cluster.snapshot(self.now):
            assert not view["alive"] or view["running"] + view["queued"] <= len(self.at[view["id"]])

    def teardown(self) -> None:
        """Everything that is open ends once there is a worker that can run all, and each time exactly once."""
        tags = (("room", "attic"), ("room", "lab"))
        for slots in (1, 3):
            worker = f"end{slots}"
            self.at[worker] = {}
            self.facts[worker] = WorkerFacts(hostname=worker, slots=slots, cores=8, tags=tags)
            self.handle(ev.WorkerConnected(WorkerId(worker), self.facts[worker]))
        while any(self.at.values()) or self.open:
            if not any(self.at.values()):  # What is left is held back from whoever has room: it is offered again in time.
                deadline = self.cluster.next_deadline()
                assert deadline is not None, f"nobody will look at {sorted(self.open)} again"
                self.wait(max(0.0, deadline - self.now))
            for worker in [worker for worker, tasks in self.at.items() if tasks]:
                results = [(task_id, attempt, 0, ("payload", task_id), 0.1) for task_id, attempt in self.at[worker]]
                self.at[worker].clear()
                self.now += 0.001
                self.handle(ev.AttemptsFinished(WorkerId(worker), results))
                check(self.cluster)
        assert self.open == {}
        assert self.cluster.pending_count() == 0


ClusterMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCluster = ClusterMachine.TestCase
