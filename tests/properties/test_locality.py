"""Tasks with large inputs under anything that can happen: the tables agree after each event, and every task ends."""

from __future__ import annotations

from typing import Dict, List, Set, Tuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpumesh.model.ids import ClientNumber, WorkerId, make_task_id
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import actions as act
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.cluster import Cluster
from gpumesh.scheduler.invariants import check

CLIENT = ClientNumber(1)
MB = 1_000_000
SPECS = [
    TaskSpec(b"a" * 16, "once", retries=0),
    TaskSpec(b"b" * 16, "again"),
    TaskSpec(b"c" * 16, "twice", idempotent=True),
    TaskSpec(b"d" * 16, "urgent", priority=1),
]
WORKERS = [WorkerId(name) for name in ("one", "two", "three")]
SIZES = {oid: size * MB for oid, size in enumerate((0.2, 0.7, 5, 50, 500, 5_000))}

workers = st.sampled_from(WORKERS)
oids = st.sampled_from(sorted(SIZES))
seconds = st.sampled_from([0.0001, 0.1, 1.0, 20.0])
inputs = st.lists(st.tuples(oids, st.sets(workers)), max_size=3, unique_by=lambda given: given[0])


class LocalityMachine(RuleBasedStateMachine):
    """The shell of a cluster, in virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.now = 0.0
        self.here: Set[WorkerId] = set()
        self.assigned: Dict[Tuple[WorkerId, int, int], None] = {}
        self.open: Set[int] = set()
        self.next = 0
        self.handle(ev.ClientConnected(CLIENT, "someone"))
        for number, spec in enumerate(SPECS):
            self.handle(ev.SpecDefined(CLIENT, number, spec))

    def handle(self, event: ev.Event) -> None:
        self.perform(self.cluster.handle(event, self.now))

    def perform(self, actions: List[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Assign):
                self.assigned.update(dict.fromkeys((action.worker, task_id, attempt) for task_id, attempt in action.tasks))
            elif isinstance(action, act.Deliver):
                self.open -= {result[0] for result in action.results}
            elif isinstance(action, act.Fail):
                self.open.remove(action.task_id)

    def told(self, given: List[Tuple[int, Set[WorkerId]]]) -> List[ev.Input]:
        return [(oid, int(SIZES[oid]), sorted(holders & self.here)) for oid, holders in given]

    @rule(worker=workers, slots=st.integers(1, 3), score=st.sampled_from([0.2, 1.0, 1.04, 5.0]), is_near=st.booleans())
    def connect(self, worker: WorkerId, slots: int, score: float, is_near: bool) -> None:
        self.lose(worker)
        self.here.add(worker)
        facts = WorkerFacts(slots=slots, cores=slots, score=score * slots, hostname=worker)
        self.handle(ev.WorkerConnected(worker, facts, is_near))

    @rule(worker=workers)
    def lose(self, worker: WorkerId) -> None:
        self.here.discard(worker)
        self.assigned = {key: None for key in self.assigned if key[0] != worker}
        self.handle(ev.WorkerLost(worker, "it was unplugged"))

    @rule(number=st.integers(0, len(SPECS) - 1), given=st.lists(inputs, min_size=1, max_size=40))
    def submit(self, number: int, given: List[List[Tuple[int, Set[WorkerId]]]]) -> None:
        ids = [make_task_id(CLIENT, self.next + index) for index in range(len(given))]
        self.next += len(ids)
        self.open.update(ids)
        large = [(task_id, self.told(each)) for task_id, each in zip(ids, given) if each]
        self.handle(ev.TasksSubmitted(CLIENT, number, ids, large))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), number=st.integers(0, len(SPECS) - 1), given=inputs)
    def depend(self, data: st.DataObject, number: int, given: List[Tuple[int, Set[WorkerId]]]) -> None:
        producers = data.draw(st.lists(st.sampled_from(sorted(self.open)), min_size=1, max_size=3, unique=True))
        task_id = make_task_id(CLIENT, self.next)
        self.next += 1
        self.open.add(task_id)
        self.handle(ev.DependentSubmitted(CLIENT, number, task_id, producers, self.told(given)))

    @precondition(lambda self: self.assigned)
    @rule(data=st.data(), given=st.none() | oids, ran=seconds, status=st.sampled_from([*[Status.OK] * 6, *Status]))
    def finish(self, data: st.DataObject, given: object, ran: float, status: Status) -> None:
        keys = sorted(self.assigned)
        worker, task_id, attempt = data.draw(st.sampled_from(keys[:8]))
        self.end(worker, task_id, attempt, given, ran, status)

    def end(self, worker: WorkerId, task_id: int, attempt: int, given: object, ran: float, status: Status) -> None:
        del self.assigned[worker, task_id, attempt]
        if isinstance(given, int) and status is Status.OK:
            self.handle(ev.ResultStored(task_id, self.told([(given, {worker})])))
        payload = b"value" if status is Status.OK else {}
        self.handle(ev.AttemptsFinished(worker, [(task_id, attempt, int(status), payload, ran)]))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.handle(ev.CancelRequested(CLIENT, [data.draw(st.sampled_from(sorted(self.open)))]))

    @rule(worker=workers, shares=st.booleans())
    def find_out(self, worker: WorkerId, shares: bool) -> None:
        self.handle(ev.StoreShared(worker, shares))

    @rule(worker=workers, oid=oids)
    def copy(self, worker: WorkerId, oid: int) -> None:
        self.handle(ev.CopyMade(worker, oid))

    @rule(worker=workers, gone=st.lists(oids))
    def drop(self, worker: WorkerId, gone: List[int]) -> None:
        self.handle(ev.CopiesGone(worker, gone))

    @rule(worker=workers, nbytes=st.sampled_from([0, 1, MB, 1000 * MB]), took=seconds)
    def measure(self, worker: WorkerId, nbytes: int, took: float) -> None:
        self.handle(ev.BytesMoved(worker, nbytes, took))

    @rule(passed=st.sampled_from([0.001, 0.3, 5.0, 30.0]))
    def wait(self, passed: float) -> None:
        end = self.now + passed
        for _ in range(50):
            deadline = self.cluster.next_deadline()
            if deadline is None or deadline > end:
                break
            self.now = max(self.now, deadline)
            self.perform(self.cluster.on_time(self.now))
        self.now = end
        self.perform(self.cluster.on_time(self.now))

    @rule()
    def client_comes_back(self) -> None:
        self.open.clear()
        self.handle(ev.ClientConnected(CLIENT, "someone"))
        for number, spec in enumerate(SPECS):
            self.handle(ev.SpecDefined(CLIENT, number, spec))
        assert not self.cluster._locality

    @invariant()
    def the_tables_agree(self) -> None:
        check(self.cluster)

    def teardown(self) -> None:
        """Whatever has happened: with a worker that goes on ending what it has, everything ends."""
        self.connect(WORKERS[0], 2, 1.0, False)
        for _ in range(20_000):
            if not self.open:
                break
            if self.assigned:
                self.end(*next(iter(self.assigned)), None, 0.1, Status.OK)
            self.wait(0.3)
        assert not self.open
        assert not self.cluster._locality
        assert not self.cluster._locality._objects
        check(self.cluster)


TestLocality = LocalityMachine.TestCase
TestLocality.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
