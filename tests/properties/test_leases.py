"""The leases of one worker under any interleaving, led by the coordinator's own books, against model processes that keep what they got."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Set, Tuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpumesh.config import CANCEL_GRACE_SECONDS, REVOKE_SETTLE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import DeviceFacts, Requirement
from gpumesh.scheduler import local
from gpumesh.scheduler.cards import CONTEXT_BYTES, Cards, Lease
from gpumesh.scheduler.leases import EXCESS_BYTES, LEASE_IDLE_SECONDS, LeaseHealth, Leases

GB = 10**9
DEVICES = [DeviceFacts("cuda", number, "RTX", 24 * GB, 100.0, uuid=f"GPU-{number}") for number in range(2)]
NEEDS = [
    Requirement("gpu", gpus=1.0),
    Requirement("gpu", gpus=2.0),
    Requirement("gpu", gpus=0.5),
    Requirement("gpu", gpus=0.25),
    Requirement("gpu", gpu_memory=8 * GB),
    Requirement("gpu", gpu_memory=14 * GB),
    Requirement("cuda:1", gpus=1.0, gpu_memory=20 * GB),
]
TIMEOUTS = {2: 5.0, 5: 5.0}  # Specs are numbered as NEEDS; the others have none.
OTHER_ENVIRONMENT = {4: 1}


def given(need: Requirement) -> int:
    """Bytes of each of its cards that a task of this need may use."""
    if need.gpus >= 1:
        return 24 * GB
    return min(24 * GB, need.gpu_memory + CONTEXT_BYTES) if need.gpu_memory else int(24 * GB * need.gpus)


class Process:
    """A model of a runner: its inbox, its page, and what it holds of its cards until it ends."""

    def __init__(self, cards: Tuple[str, ...], environment: int) -> None:
        self.cards = cards
        self.environment = environment
        self.up = False
        self.inbox: Deque[Tuple[int, int, int]] = deque()
        self.started = self.finished = self.sent = 0
        self.since = 0.0
        self.revoked = 0
        self.interrupt = 0
        self.current: Optional[Tuple[int, int, int]] = None
        self.held: List[Any] = []
        self.wire: List[Any] = []
        self.doomed = False
        self.waits = False  # Its task waits for others.
        self.bytes = 0  # Of each of its cards.
        self.kept = -1  # What it says that tasks before this one have left there, without its context; -1: nothing.


class LeasesMachine(RuleBasedStateMachine):
    """Every attempt is reported exactly once, never starts twice, and no card is ever fuller than it is large."""

    @initialize()
    def begin(self) -> None:
        self.now = 100.0
        self.leases = Leases(threads=2, numbers=itertools.count(1))
        self.leases.on_devices(DEVICES)
        for number, need in enumerate(NEEDS):
            kind = local.Kind(2, OTHER_ENVIRONMENT.get(number, 0))
            self.leases.on_spec(number, timeout=TIMEOUTS.get(number, 0.0), kind=kind, need=need)
        self.books = Cards(DEVICES)
        self.processes: Dict[int, Process] = {}
        self.open: Dict[Lease, Set[int]] = {}  # With the tasks that have not been reported.
        self.lease_of: Dict[int, Lease] = {}
        self.reports: Dict[int, int] = {}
        self.executed: Set[int] = set()
        self.next_task = 1
        self.draining = False
        self.withheld: Set[str] = set()
        self.problem = ""

    # --- what the brain orders

    def perform(self, actions: List[Any]) -> None:
        for action in actions:
            if isinstance(action, local.StartRunner):
                assert action.runner not in self.processes
                assert action.cards
                self.processes[action.runner] = Process(action.cards, action.environment)
            elif isinstance(action, local.Feed):
                process = self.processes[action.runner]
                assert process.up
                assert not process.doomed
                assert not process.waits, "behind a task that may wait for just this one"
                assert process.environment == OTHER_ENVIRONMENT.get(action.spec, 0)
                for task_id, attempt in action.tasks:
                    assert process.cards == self.lease_of[task_id].cards
                    process.inbox.append((task_id, attempt, action.spec))
            elif isinstance(action, local.Report):
                for task_id, _, status, _, _ in action.results:
                    self.report(task_id, status)
            elif isinstance(action, local.FailEnvironment):
                for task_id, _ in action.tasks:
                    self.report(task_id, -1)
            elif isinstance(action, local.Revoke):
                self.processes[action.runner].revoked = action.number
            elif isinstance(action, local.Interrupt):
                self.processes[action.runner].interrupt = action.number
            elif isinstance(action, local.AskResults):
                self.flush(self.processes[action.runner])
            elif isinstance(action, local.Kill):
                process = self.processes[action.runner]
                is_busy = bool(process.inbox) or process.current is not None
                assert not is_busy or process.interrupt, "a busy process was ended for another's sake"
                process.doomed = True
            elif isinstance(action, local.Inspect):
                process = self.processes[action.runner]
                page = (process.started, process.finished, process.sent, process.since)
                self.perform(self.leases.on_progress(action.runner, *page, self.now))
            elif isinstance(action, local.Grant):
                self.processes[action.runner].waits = False
            elif isinstance(action, local.Waits):
                assert action.task_id not in self.reports
            elif isinstance(action, LeaseHealth):
                self.problem = action.problem
            else:
                raise AssertionError(f"not an order: {action}")

    def report(self, task_id: int, status: int) -> None:
        assert task_id not in self.reports, f"task {task_id} reported twice"
        self.reports[task_id] = status
        lease = self.lease_of[task_id]
        self.open[lease].remove(task_id)
        if not self.open[lease]:
            del self.open[lease]
            self.books.close(lease)

    def hear(self, ident: int) -> None:
        """Results of a process reach the brain, and what its page says at that moment."""
        self.leases.on_kept(ident, self.processes[ident].kept)
        self.perform(self.leases.on_results(ident, self.processes[ident].wire.pop(0), self.now))

    def flush(self, process: Process) -> None:
        if process.held:
            process.sent += len(process.held)
            process.wire.append(tuple(process.held))
            process.held = []

    # --- what the coordinator does

    @rule(spec=st.integers(0, len(NEEDS) - 1), count=st.integers(1, 3))
    def arrive(self, spec: int, count: int) -> None:
        lease = self.books.open(NEEDS[spec])
        if lease is None:
            return
        self.open[lease] = set()
        self.send(lease, spec, count)

    @rule(data=st.data(), count=st.integers(1, 2))
    def arrive_behind(self, data: Any, count: int) -> None:
        if self.open:
            lease = data.draw(st.sampled_from(list(self.open)))
            self.send(lease, NEEDS.index(lease.need), count)

    def send(self, lease: Lease, spec: int, count: int) -> None:
        tasks = [(self.next_task + number, 1, b"") for number in range(count)]
        self.next_task += count
        for task_id, _, _ in tasks:
            self.lease_of[task_id] = lease
            self.open[lease].add(task_id)
        self.perform(self.leases.on_arrived(lease.cards, lease.ordinal, spec, tasks, self.now))
        if self.draining or self.withheld.intersection(lease.cards):
            assert all(self.reports[task_id] == Status.NOT_RUN for task_id, _, _ in tasks)

    @rule(data=st.data(), kill=st.booleans())
    def recall(self, data: Any, kill: bool) -> None:
        waiting = [task for task in self.lease_of if task not in self.reports]
        if waiting:
            wanted = data.draw(st.lists(st.sampled_from(waiting), min_size=1, max_size=4, unique=True))
            self.perform(self.leases.on_recalled([(task, 1) for task in wanted], kill=kill, now=self.now))

    # --- what the owner does

    @rule(
        cards=st.sampled_from([None, frozenset(["GPU-0"]), frozenset(["GPU-1"])]),
        running=st.booleans(),
        stays=st.integers(0, 3),
    )
    def hand_back(self, cards: Any, running: bool, stays: int) -> None:
        self.withheld |= {"all", "GPU-0", "GPU-1"} if cards is None else cards
        self.perform(self.leases.hand_back(cards, running=running, now=self.now))
        if not stays:
            self.accept()

    @precondition(lambda self: getattr(self, "withheld", None))
    @rule()
    def accept(self) -> None:
        for cards in (None, frozenset(["GPU-0", "GPU-1"])):
            self.leases.accept(cards)
        self.withheld = set()

    @rule(environment=st.integers(0, 1))
    def retire(self, environment: int) -> None:
        if environment:
            self.perform(self.leases.retire(environment, self.now))

    # --- what processes do

    def alive(self) -> List[int]:
        return sorted(self.processes)

    @rule(data=st.data())
    def come_up(self, data: Any) -> None:
        starting = [ident for ident in self.alive() if not self.processes[ident].up and not self.processes[ident].doomed]
        if starting:
            ident = data.draw(st.sampled_from(starting))
            self.processes[ident].up = True
            self.perform(self.leases.on_ready(ident, self.now))

    @rule(data=st.data())
    def begin_task(self, data: Any) -> None:
        ready = [ident for ident in self.alive() if self.processes[ident].inbox and self.processes[ident].current is None]
        if ready:
            self.start_next(self.processes[data.draw(st.sampled_from(ready))])

    def start_next(self, process: Process) -> None:
        task_id, attempt, spec = process.inbox.popleft()
        process.started += 1
        process.since = self.now
        if process.revoked and process.started >= process.revoked:
            process.finished = process.started
            process.held.append((task_id, attempt, int(Status.NOT_RUN), {}, 0.0))
            return
        process.current = (task_id, attempt, spec)
        assert task_id not in self.executed, "a task ran twice"
        self.executed.add(task_id)
        process.bytes = max(process.bytes, given(NEEDS[spec]))
        for device in DEVICES:
            there = [other.bytes for other in self.processes.values() if device.key in other.cards]
            held = sum(there) - EXCESS_BYTES * (len(there) - 1)
            assert held <= device.memory, f"{sum(there) / GB:.3g} GB held of {device.key}"

    @rule(data=st.data(), hold=st.booleans())
    def end_task(self, data: Any, hold: bool) -> None:
        busy = [ident for ident in self.alive() if self.processes[ident].current is not None]
        if busy:
            self.end_current(self.processes[data.draw(st.sampled_from(busy))], 0.0 if hold else None)

    def end_current(self, process: Process, seconds: Optional[float]) -> None:
        assert process.current is not None
        task_id, attempt, _ = process.current
        status = Status.CANCELLED if process.interrupt == process.started else Status.OK
        process.current = None
        process.waits = False
        process.finished = process.started
        process.kept = -1 if task_id % 3 else process.bytes // (1 + task_id % 4)
        if process.kept >= 0:
            process.bytes = min(process.bytes, process.kept + CONTEXT_BYTES)
        process.held.append((task_id, attempt, int(status), b"", self.now - process.since if seconds is None else seconds))
        if seconds is None or not process.inbox:
            self.flush(process)

    @rule(data=st.data(), goes_on=st.booleans())
    def wait_or_go_on(self, data: Any, goes_on: bool) -> None:
        """Its task waits for others, or has waited: then it goes on at once, since it has its cards."""
        busy = [i for i in self.alive() if self.processes[i].current is not None and not self.processes[i].doomed]
        if not busy:
            return
        ident = data.draw(st.sampled_from(busy))
        process = self.processes[ident]
        assert process.current is not None
        task_id = process.current[0]
        self.flush(process)
        while process.wire:
            self.hear(ident)
        if not process.waits:
            process.waits = True
            self.perform(self.leases.on_waits(ident, task_id, self.now, waits=True))
        if goes_on:
            self.perform(self.leases.on_waits(ident, task_id, self.now, waits=False))
            assert not process.waits

    @rule(data=st.data())
    def results_come(self, data: Any) -> None:
        for process in self.processes.values():
            if not process.inbox and process.current is None:
                self.flush(process)
        ready = [ident for ident in self.alive() if self.processes[ident].wire]
        if ready:
            ident = data.draw(st.sampled_from(ready))
            self.hear(ident)

    @rule(data=st.data(), tasks=st.integers(1, 2))
    def work(self, data: Any, tasks: int) -> None:
        """A process does what it has to do, without a pause."""
        if not self.processes:
            return
        ident = data.draw(st.sampled_from(self.alive()))
        process = self.processes[ident]
        if process.doomed:
            return
        if not process.up:
            process.up = True
            self.perform(self.leases.on_ready(ident, self.now))
        for _ in range(tasks):
            if process.current is None and process.inbox:
                self.start_next(process)
            if process.current is not None:
                self.end_current(process, None)
        self.flush(process)
        while process.wire:
            self.hear(ident)

    @rule(data=st.data())
    def die(self, data: Any) -> None:
        if self.processes:
            self.bury(data.draw(st.sampled_from(self.alive())))

    @rule()
    def doomed_die(self) -> None:
        for ident in self.alive():
            if ident in self.processes and self.processes[ident].doomed:
                self.bury(ident)

    def bury(self, ident: int) -> None:
        process = self.processes[ident]
        while process.wire:
            self.hear(ident)
        del self.processes[ident]
        self.perform(self.leases.on_runner_down(ident, process.started, process.finished, {"exit": -9}, self.now))

    @rule(seconds=st.sampled_from([0.0005, REVOKE_SETTLE_SECONDS, 0.03, 1.5, 6.0, LEASE_IDLE_SECONDS + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(50):
            deadline = self.leases.next_deadline()
            if deadline is None or deadline > self.now:
                return
            self.perform(self.leases.on_time(self.now))
        raise AssertionError("the same deadline comes again and again")

    @invariant()
    def every_process_belongs_to_a_lease(self) -> None:
        for ident, process in getattr(self, "processes", {}).items():
            assert ident in self.leases
            assert self.leases.cards_of(ident) == process.cards

    def teardown(self) -> None:
        if not hasattr(self, "leases"):
            return
        for _ in range(2000):
            self.doomed_die()
            for ident in self.alive():
                process = self.processes[ident]
                if not process.up:
                    process.up = True
                    self.perform(self.leases.on_ready(ident, self.now))
                if process.current is not None:
                    self.end_current(process, None)
                elif process.inbox:
                    self.start_next(process)
                self.flush(process)
                while ident in self.processes and process.wire:
                    self.hear(ident)
            self.now += CANCEL_GRACE_SECONDS / 4
            self.perform(self.leases.on_time(self.now))
            if set(self.reports) == set(self.lease_of) and self.leases.is_idle:
                break
        else:
            raise AssertionError(f"never reported: {sorted(set(self.lease_of) - set(self.reports))}")
        self.now += 2 * LEASE_IDLE_SECONDS
        for _ in range(3):
            self.perform(self.leases.on_time(self.now))
            for ident in self.alive():
                if not self.processes[ident].up:
                    self.processes[ident].up = True
                    self.perform(self.leases.on_ready(ident, self.now))
            self.doomed_die()
            self.now += 2 * LEASE_IDLE_SECONDS
        assert not self.processes, "idle processes end"
        assert self.leases.next_deadline() is None
        assert not self.problem


TestLeases = LeasesMachine.TestCase
TestLeases.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
