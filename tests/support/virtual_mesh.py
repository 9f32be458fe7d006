"""Workers and clients around a real Cluster, played by a test, with books of their own: what the scheduler orders is checked against them."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, Iterable, List, Optional, Sequence, Set, Tuple

from gpumesh.config import MAX_COPIES
from gpumesh.model.ids import SEQUENCE_BITS, ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import CardReading, DeviceFacts, WorkerFacts, lacks
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import actions as act
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.cluster import Cluster
from gpumesh.scheduler.states import TaskState

STRIKES = (Status.CRASHED, Status.RETRYABLE)
ROUNDING = 1e-5  # Of a card, which the books of cards count in millionths.


class Life:
    """One task, from its submission to its end. An id may live again."""

    def __init__(self, task_id: int, spec: TaskSpec, producers: Sequence[int] = ()) -> None:
        self.task_id = task_id
        self.spec = spec
        self.producers = producers
        self.status: Optional[int] = None  # Of its end.
        self.strikes = 0  # Attempts that failed, at most: lost ones may not have started.
        self.has_started = False  # Some attempt may have.
        self.is_cancelled = False  # Its client has asked for that.
        self.failures = 0  # Attempts of which it was told that they failed.
        self.due = 0.0  # Before that it is not to be tried again.
        self.failed_on: List[str] = []  # Workers that it has failed on in a way that may be its own fault.
        self.stays_with: List[str] = []  # The first two of those that could take it when it failed, as long as one of them can.


class Attempt:
    """One attempt at a worker."""

    def __init__(self, life: Life, number: int, lease: Optional[Tuple[Tuple[str, ...], int]]) -> None:
        self.life = life
        self.number = number
        self.lease = lease
        self.is_running = False
        self.is_waiting = False  # For other tasks: it runs, and takes no slot.

    @property
    def key(self) -> Tuple[int, int]:
        return self.life.task_id, self.number


class VirtualWorker:
    """A worker that runs what it is told in order: as many as it has slots, and one under each lease."""

    def __init__(self, ident: str, facts: WorkerFacts) -> None:
        self.id = WorkerId(ident)
        self.facts = facts
        self.is_draining = False
        self.attempts: Dict[Tuple[int, int], Attempt] = {}
        self.recalls: Deque[Tuple[List[Attempt], bool]] = deque()  # On their way to it: what to give back, and whether to kill.
        self.others: Dict[str, int] = {}  # What other programs hold of its cards, as last told.

    @property
    def takes(self) -> bool:
        return not self.is_draining and not self.facts.problem

    def cards(self) -> Dict[str, DeviceFacts]:
        return {device.key: device for device in self.facts.devices if device.kind != "cpu"}

    def tell(self, facts: WorkerFacts) -> None:
        before = self.cards()
        self.facts = facts
        for key, card in self.cards().items():
            if key not in before or before[key].others != card.others:
                self.others[key] = card.others

    def start(self) -> None:
        """Start what can be started."""
        if self.facts.problem:
            return
        takes = [attempt for attempt in self.attempts.values() if attempt.is_running and not attempt.lease]
        free = self.facts.slots - sum(not attempt.is_waiting for attempt in takes)
        busy = {attempt.lease for attempt in self.attempts.values() if attempt.is_running and attempt.lease}
        for attempt in self.attempts.values():
            if attempt.is_running:
                continue
            if attempt.lease:
                if attempt.lease in busy:
                    continue
                busy.add(attempt.lease)
            elif free > 0:
                free -= 1
            else:
                continue
            attempt.is_running = True

    def running(self) -> List[Attempt]:
        return [attempt for attempt in self.attempts.values() if attempt.is_running]

    def waiting(self) -> List[Attempt]:
        return [attempt for attempt in self.attempts.values() if not attempt.is_running]


class VirtualMesh:
    """The shell of a cluster, in virtual time."""

    def __init__(self, specs: Sequence[TaskSpec]) -> None:
        self.specs = specs
        self.cluster = Cluster()
        self.now = 0.0
        self.workers: Dict[str, VirtualWorker] = {}
        self.clients: Dict[int, int] = {}  # Number -> next sequence.
        self.lives: Dict[int, Life] = {}  # By task id, of clients that are here.
        self.open: Dict[int, Life] = {}  # Those that have not ended.
        self.late: List[Tuple[str, int, int]] = []  # (worker, task id, attempt) reported or given up.
        self.told: Set[Tuple[str, int, int, bool]] = set()  # Recalls: (worker, task id, attempt, kill).
        self.is_sound = True  # Nothing that must not be has been seen.
        self.healthy = 0  # Workers, as last told.
        self.copies = self.leases = 0  # Second copies and tasks on cards, ever.

    # --- what happens

    def handle(self, event: ev.Event) -> List[act.Action]:
        self.is_sound = False
        actions = self.cluster.handle(event, self.now)
        for life in self.open.values():
            if life.stays_with and not self._able(life.stays_with, life.spec):
                life.stays_with = []
        self.perform(actions)
        self.is_sound = True
        return actions

    def _able(self, idents: Sequence[str], spec: TaskSpec) -> List[str]:
        found = [self.workers[ident] for ident in idents if ident in self.workers]
        return [
            worker.id
            for worker in found
            if worker.takes and not lacks(worker.facts, spec.requirement) and spec.packages not in worker.facts.installing
        ]

    def pass_time(self, seconds: float, *, looks: int = 100) -> None:
        """Time passes; the scheduler is called when it asked for it, the first `looks` times, and at the end."""
        until = self.now + seconds
        for _ in range(looks):
            deadline = self.cluster.next_deadline()
            if deadline is None or deadline > until:
                break
            self.now = max(self.now, deadline)
            self.look()
        self.now = until
        self.look()

    def look(self) -> None:
        self.is_sound = False
        self.perform(self.cluster.on_time(self.now))
        deadline = self.cluster.next_deadline()
        assert deadline is None or deadline > self.now, "time does not get on"
        self.is_sound = True

    def connect_client(self, number: int) -> None:
        self._drop_lives(number)
        self.clients[number] = 0  # Ids that this number had before are used again.
        self.handle(ev.ClientConnected(ClientNumber(number), f"client {number}"))
        for index, spec in enumerate(self.specs):
            self.handle(ev.SpecDefined(ClientNumber(number), index, spec))

    def lose_client(self, number: int) -> None:
        del self.clients[number]
        self.handle(ev.ClientLost(ClientNumber(number)))
        assert not [task_id for task_id in self.open if task_id >> SEQUENCE_BITS == number]
        self._drop_lives(number)

    def _drop_lives(self, number: int) -> None:
        for task_id in [task_id for task_id in self.lives if task_id >> SEQUENCE_BITS == number]:
            del self.lives[task_id]

    def connect_worker(self, ident: str, facts: WorkerFacts) -> None:
        """It joins, or is back and has nothing: what had started is lost, what had not it has never seen."""
        before = self.workers.get(ident)
        if before is not None and before.running():
            self.lose_worker(ident)
        elif before is not None:
            for attempt in before.attempts.values():
                attempt.life.has_started = False
                self._leave(ident, attempt)
        worker = self.workers[ident] = VirtualWorker(ident, facts)
        worker.others = {key: card.others for key, card in worker.cards().items()}
        self.handle(ev.WorkerConnected(worker.id, facts))

    def lose_worker(self, ident: str) -> None:
        self._give_up(ident)
        self.handle(ev.WorkerLost(WorkerId(ident), "the line went dead"))

    def _give_up(self, ident: str) -> None:
        worker = self.workers.pop(ident, None)
        for attempt in worker.attempts.values() if worker else ():
            attempt.life.strikes += 1
            self._leave(ident, attempt)

    def change_worker(self, ident: str, facts: WorkerFacts) -> None:
        worker = self.workers[ident]
        worker.tell(facts)
        self.handle(ev.WorkerChanged(worker.id, facts))
        worker.start()

    def measure(self, ident: str, key: str, others: int) -> None:
        worker = self.workers[ident]
        if others >= 0 and key in worker.cards():
            worker.others[key] = others
        self.handle(ev.CardsMeasured(worker.id, (CardReading(key, others),)))

    def submit(self, client: int, number: int, count: int, inputs: Sequence[ev.Input] = ()) -> None:
        first = (client << SEQUENCE_BITS) + self.clients[client]
        self.clients[client] += count
        ids = [task_id for task_id in range(first, first + count) if task_id not in self.lives]
        for task_id in ids:
            self.lives[task_id] = self.open[task_id] = Life(task_id, self.specs[number])
        needs = [(task_id, inputs) for task_id in ids] if inputs else []
        self.handle(ev.TasksSubmitted(ClientNumber(client), number, ids, needs))

    def cancel(self, task_ids: List[int]) -> None:
        number = task_ids[0] >> SEQUENCE_BITS
        for task_id in task_ids:
            self.open[task_id].is_cancelled |= task_id >> SEQUENCE_BITS == number  # Nobody cancels another's.
        self.handle(ev.CancelRequested(ClientNumber(number), task_ids))

    def report(self, worker: VirtualWorker, ends: Iterable[Tuple[Attempt, Status]], seconds: float, *, again: int = 0) -> None:
        """Attempts end at a worker; the last `again` that left it before are reported once more beside them."""
        results: List[Tuple[int, int, int, Any, float]] = []
        before = [entry[1:] for entry in self.late if entry[0] == worker.id and entry[1:] not in worker.attempts]
        for attempt, status in ends:
            del worker.attempts[attempt.key]
            self._leave(worker.id, attempt)
            if status in STRIKES:
                attempt.life.strikes += 1
            if status == Status.NOT_RUN:
                attempt.life.has_started = False  # As far as tasks are concerned that are in one place at a time.
            results.append((*attempt.key, int(status), ("payload", attempt.life.task_id), seconds))
        late = [key for key in before[len(before) - again :] if key not in worker.attempts] if again else []
        results += [(*key, int(Status.OK), "late", 0.1) for key in late]
        worker.start()
        if results:
            self.handle(ev.AttemptsFinished(worker.id, results))
            worker.start()

    def wait_or_go_on(self, worker: VirtualWorker, attempt: Attempt) -> None:
        """A task begins to wait for others, or goes on; what was sent behind one that has cards goes back."""
        attempt.is_waiting = not attempt.is_waiting
        worker.start()
        self.handle(ev.TasksWait(worker.id, [attempt.key], attempt.is_waiting))
        behind = [other for other in worker.waiting() if attempt.lease and other.lease == attempt.lease]
        if attempt.is_waiting and behind:
            self.report(worker, [(other, Status.NOT_RUN) for other in behind], 0.0)
        worker.start()

    def obey(self, worker: VirtualWorker) -> None:
        """The oldest recall has reached the worker."""
        attempts, kill = worker.recalls.popleft()
        ends: List[Tuple[Attempt, Status]] = []
        for attempt in attempts:
            if worker.attempts.get(attempt.key) is not attempt:
                continue
            if kill:
                ends.append((attempt, Status.CANCELLED))
            elif not attempt.is_running:
                ends.append((attempt, Status.NOT_RUN))
        self.report(worker, ends, 0.01)

    def hand_back(self, worker: VirtualWorker, *, ends_running: bool) -> None:
        """The owner wants the machine: what waits goes back, and what runs too, if asked for."""
        ends = [(attempt, Status.NOT_RUN) for attempt in worker.waiting()]
        if ends_running:
            ends += [(attempt, Status.HANDED_BACK) for attempt in worker.running()]
        self.report(worker, ends, 0.3)

    def _leave(self, ident: str, attempt: Attempt) -> None:
        self.late.append((ident, *attempt.key))
        del self.late[:-50]
        self.told -= {(ident, *attempt.key, False), (ident, *attempt.key, True)}

    # --- what is ordered

    def perform(self, actions: Iterable[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Assign):
                self._assign(action)
            elif isinstance(action, act.Deliver):
                for task_id, status, payload, _ in action.results:
                    assert payload == ("payload", task_id)
                    self._deliver(action.client, task_id, status)
            elif isinstance(action, act.Fail):
                self._fail(action)
            elif isinstance(action, act.Recall):
                self._recall(action)
            elif isinstance(action, act.Forget):
                for task_id in action.task_ids:
                    del self.open[task_id]
            elif isinstance(action, act.Retrying):
                self._retry(self.open[action.task_id], action)
            elif isinstance(action, act.Notice):
                self.assert_nobody_can(self.open[action.task_id].spec)
            else:
                assert isinstance(action, act.WorkersChanged)
                self.healthy = action.count

    def _assign(self, action: act.Assign) -> None:
        worker = self.workers[action.worker]
        spec = action.spec
        assert action.tasks
        assert worker.takes
        assert not lacks(worker.facts, spec.requirement)
        assert not spec.packages or spec.packages not in worker.facts.installing
        lease = self._check_lease(worker, action) if spec.requirement.needs_gpu else None
        assert lease or not action.cards
        for task_id, number in action.tasks:
            life = self.open[task_id]
            assert life.spec == spec
            assert all(self.lives[producer].status == Status.OK for producer in life.producers)
            places = [other for other in self.workers.values() for held in other.attempts.values() if held.life is life]
            if places:
                assert spec.idempotent, "in two places"
                assert spec.retries > 0, "what may start once has no copies"
                assert worker not in places, "a copy beside its original"
                assert len(places) <= MAX_COPIES
                self.copies += 1
            assert not (spec.retries == 0 and life.has_started), "at most once"
            assert self.now >= life.due, "tried again too early"
            assert not life.stays_with or worker.id in life.stays_with, "it tours the workers"
            assert not any((task_id, number) in other.attempts for other in self.workers.values()), (
                "an attempt number used twice"
            )
            life.has_started = True
            worker.attempts[task_id, number] = Attempt(life, number, lease)
        worker.start()

    def _retry(self, life: Life, action: act.Retrying) -> None:
        assert life.spec.retries > 0, "a task that may run once is not tried again"
        life.failures += 1
        if action.status != Status.RETRYABLE and action.worker not in life.failed_on:
            life.failed_on.append(action.worker)
        if len(life.failed_on) > 1 and not life.spec.requirement.needs_gpu:  # Who has a card may not have one that will do.
            life.stays_with = self._able(life.failed_on[:2], life.spec)
        assert 0 < life.failures <= life.strikes, "told of failures that were none"
        if any(held.life is life for worker in self.workers.values() for held in worker.attempts.values()):
            return  # Another attempt goes on.
        assert life.failures <= life.spec.retries, "tried too often"
        if life.spec.backoff:
            life.due = self.now + min(60.0, life.spec.backoff * 2 ** (life.failures - 1))
            assert self.cluster.state_of(life.task_id) in (TaskState.DELAYED, TaskState.GONE)

    def _check_lease(self, worker: VirtualWorker, action: act.Assign) -> Tuple[Tuple[str, ...], int]:
        """The sums on the cards of a lease, when its first task comes."""
        need = action.spec.requirement
        lease = (action.cards, action.ordinal)
        self.leases += 1
        needs = {held.lease: held.life.spec.requirement for held in worker.attempts.values() if held.lease}
        lent = {
            held.lease: held.life.spec.depth for held in worker.attempts.values() if held.lease and held.is_waiting
        }  # To deeper tasks.
        assert lease not in lent, "behind a task that may wait for just this one"
        if lease in needs:
            assert needs[lease] == need, "two needs under one lease"
            return lease
        cards = worker.cards()
        assert len(set(action.cards)) == len(action.cards) == max(1, -(-need.gpus // 1))
        for key in action.cards:
            card = cards[key]
            assert not card.problem
            assert need.model in card.name.lower()
            kind, _, index = need.device.partition(":")
            assert kind in ("", "gpu", card.kind)
            assert not index or card.index == int(index)
            beside = [
                other for own, other in needs.items() if key in own[0] and lent.get(own, action.spec.depth) >= action.spec.depth
            ]
            assert not (beside and need.gpus >= 1), "a whole card that others are on"
            assert all(other.gpus < 1 for other in beside), "a card that another has whole"
            everyone = [*beside, need]
            assert sum(other.gpus for other in everyone) <= 1 + ROUNDING or need.gpus > 1, "more fractions than a card"
            asked = sum(other.gpu_memory for other in everyone)
            assert not need.gpu_memory or asked <= card.memory - worker.others[key], "more memory than a card"
        return lease

    def _recall(self, action: act.Recall) -> None:
        worker = self.workers[action.worker]
        assert action.tasks
        for task_id, number in action.tasks:
            assert (task_id, number) in worker.attempts
            told = (worker.id, task_id, number, action.kill)
            assert told not in self.told, "recalled twice"
            self.told.add(told)
        worker.recalls.append(([worker.attempts[key] for key in action.tasks], action.kill))

    def _deliver(self, client: int, task_id: int, status: int) -> None:
        life = self.open[task_id]
        if status in STRIKES:
            assert life.strikes > life.spec.retries, "it could have been tried again"
        elif status == Status.HANDED_BACK:
            assert life.spec.retries == 0, "work handed back is done elsewhere"
        elif status == Status.CANCELLED:
            assert life.is_cancelled, "nobody has cancelled it"
        else:
            assert status in (Status.OK, Status.RAISED, Status.TIMED_OUT)
        self._end(client, task_id, status)

    def _fail(self, action: act.Fail) -> None:
        life = self.lives.get(action.task_id)
        if action.status == Status.REFUSED:
            return
        assert life is not None
        if action.status == Status.INPUT_FAILED:
            producer = action.details["input"]
            assert producer in life.producers
            assert self.lives[producer].status not in (None, int(Status.OK))
        elif action.status == Status.INPUT_MISSING:
            assert action.details["input"] not in self.open
        else:
            assert action.details["reason"]
            assert len(action.details["attempts"]) <= life.strikes, "a strike for nothing"
            if action.status == Status.INFEASIBLE:
                self.assert_nobody_can(life.spec)
            if action.status == Status.CANCELLED:
                assert life.is_cancelled, "nobody has cancelled it"
            if action.status == Status.LOST:
                assert len(action.details["attempts"]) > life.spec.retries
        self._end(action.client, action.task_id, action.status)

    def _end(self, client: int, task_id: int, status: int) -> None:
        assert task_id >> SEQUENCE_BITS == client
        assert client in self.clients
        life = self.open.pop(task_id)  # KeyError: a second end, or one of a task nobody has submitted.
        life.status = int(status)

    def assert_nobody_can(self, spec: TaskSpec) -> None:
        able = [worker.id for worker in self.workers.values() if worker.takes and not lacks(worker.facts, spec.requirement)]
        assert not able, f"{able} could run {spec.name}"

    # --- what always holds

    def check(self) -> None:
        assert self.healthy == sum(worker.takes for worker in self.workers.values())
        assert self.cluster.pending_count() == len(self.open)
        assert self.cluster.assigned_count() == sum(len(worker.attempts) for worker in self.workers.values())
        for worker in self.workers.values():
            for attempt in worker.attempts.values():
                if attempt.life.status is not None or self.open.get(attempt.life.task_id) is not attempt.life:
                    told = (worker.id, *attempt.key, True)
                    assert told in self.told, f"attempt {attempt.key} at {worker.id} is of no use and was not ended"
        shown = [view for view in self.cluster.snapshot(self.now) if view["alive"]]
        assert {view["id"] for view in shown} == set(self.workers)
        for view in shown:
            assert view["running"] + view["queued"] <= len(self.workers[view["id"]].attempts)
        for task_id in self.open:
            assert self.cluster.state_of(task_id) is not TaskState.GONE

    def run_dry(self, facts: WorkerFacts) -> None:
        """With workers of such facts that can run everything, every open task ends."""
        for worker in list(self.workers.values()):
            if worker.facts.installing:
                self.change_worker(worker.id, worker.facts._replace(installing=()))  # Each of these ends, in time.
        for ident in ("end1", "end2"):
            self.connect_worker(ident, facts._replace(hostname=ident))
        for _ in range(1000):
            if not self.open and not any(worker.attempts for worker in self.workers.values()):
                return
            for worker in list(self.workers.values()):
                while worker.recalls:
                    self.obey(worker)
                if worker.facts.problem and worker.attempts:
                    self.hand_back(worker, ends_running=True)
                worker.start()
                running = worker.running()
                if running:
                    self.now += 0.001
                    self.report(worker, [(attempt, Status.OK) for attempt in running], 0.001)
            deadline = self.cluster.next_deadline()
            if deadline is not None:
                self.now = max(self.now, deadline)
                self.look()
        left = [(life.spec.name, self.cluster.state_of(task_id).value) for task_id, life in self.open.items()]
        raise AssertionError(f"these do not end: {left}")
