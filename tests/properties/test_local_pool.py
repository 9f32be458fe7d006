"""The brain of one worker against model runners that behave as runner.py does, under any interleaving."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, Iterable, List, Optional, Set, Tuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpumesh.config import CANCEL_GRACE_SECONDS, REVOKE_SETTLE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.scheduler import local

FAILED = -2  # With its environment.
KINDS = {
    0: (2, 0),
    1: (2, 0),
    2: (4, 0),
    3: (2, 1),
    4: (2, 2),
    5: (4, 1),
    6: (2, 0),
}  # Spec: threads and environment of its process.


class ModelRunner:
    """A process: its inbox, its page, results it has not sent, results on the way."""

    def __init__(self, threads: int, environment: int) -> None:
        self.kind = (threads, environment)
        self.up = False
        self.inbox: Deque[Tuple[int, int, int]] = deque()
        self.started = self.finished = self.sent = 0
        self.since = 0.0
        self.revoked = 0
        self.interrupt = 0
        self.current: Optional[Tuple[int, int, int]] = None
        self.held: List[Tuple[int, int, int, Any, float]] = []
        self.wire: List[Any] = []
        self.doomed = False
        self.fed: Dict[int, int] = {}  # Tasks that it has and the pool has not heard the end of, and their specs.
        self.gave = False  # Its task waits for others.
        self.has_left = False
        self.asked = 0  # Times that a task wanted to go on after that, ...
        self.granted = 0  # ... and was answered.


class LocalPoolMachine(RuleBasedStateMachine):
    """Drives the pool; every arrived attempt must be reported exactly once and never execute twice here."""

    @initialize(slots=st.integers(1, 3), environments=st.booleans())
    def begin(self, slots: int, environments: bool) -> None:
        self.now = 100.0
        self.pool = local.LocalPool(slots=slots, threads=2)
        self.slots = slots
        self.runners: Dict[int, ModelRunner] = {}
        self.next_task = 1
        self.arrived: Dict[int, int] = {}
        self.executed: Dict[int, int] = {}
        self.reports: Dict[int, int] = {}
        self.draining = False
        self.withheld = False
        self.was_ended = False  # Running tasks were to be ended for the owner's sake at some time.
        self.allowed = slots
        self.pool.on_spec(0, timeout=0.0, width=1, threads=2)
        self.pool.on_spec(1, timeout=5.0, width=1, threads=2)
        self.pool.on_spec(2, timeout=0.0, width=slots, threads=4)
        self.pool.on_spec(6, timeout=5.0, width=1, threads=2, depth=1)
        self.lent: Set[int] = set()  # Tasks that take no slot, as the pool has said.
        self.in_line: Dict[int, None] = {}  # Those of them that want to go on.
        self.has_environments = environments
        if environments:
            self.pool.on_spec(3, timeout=0.0, width=1, threads=2, environment=1)
            self.pool.on_spec(4, timeout=5.0, width=1, threads=2, environment=2)
            self.pool.on_spec(5, timeout=0.0, width=slots, threads=4, environment=1)
        self.perform(self.pool.start(self.now))

    def perform(self, actions: List[Any]) -> None:
        for action in actions:
            if isinstance(action, local.StartRunner):
                assert action.runner not in self.runners
                self.runners[action.runner] = ModelRunner(action.threads, action.environment)
            elif isinstance(action, local.Feed):
                runner = self.runners[action.runner]
                assert runner.up
                assert action.tasks
                assert runner.kind == KINDS[action.spec]
                assert not self.withheld
                is_wide = KINDS[action.spec][0] == 4
                assert is_wide or runner.fed or self.in_use() < self.allowed
                assert not self.in_line, "who wants to go on is first"
                for task_id, attempt in action.tasks:
                    runner.fed[task_id] = action.spec
                    runner.inbox.append((task_id, attempt, action.spec))
            elif isinstance(action, local.Report):
                for task_id, attempt, status, _, _ in action.results:
                    assert self.arrived[task_id] == attempt
                    assert task_id not in self.reports, f"task {task_id} reported twice"
                    self.reports[task_id] = status
                    assert status != Status.HANDED_BACK or (self.was_ended and task_id in self.executed)
            elif isinstance(action, local.FailEnvironment):
                assert action.environment
                for task_id, attempt in action.tasks:
                    assert self.arrived[task_id] == attempt
                    assert task_id not in self.reports, f"task {task_id} reported twice"
                    self.reports[task_id] = FAILED
            elif isinstance(action, local.Waits):
                assert (action.task_id in self.lent) is not action.waits or action.task_id in self.in_line
                self.in_line.pop(action.task_id, None)
                if action.waits:
                    self.lent.add(action.task_id)
                else:
                    self.in_line[action.task_id] = None
            elif isinstance(action, local.Grant):
                self.grant(action)
            elif isinstance(action, local.Revoke):
                self.runners[action.runner].revoked = action.number
            elif isinstance(action, local.Interrupt):
                self.runners[action.runner].interrupt = action.number
            elif isinstance(action, local.AskResults):
                self.flush(self.runners[action.runner])
            elif isinstance(action, local.Kill):
                self.runners[action.runner].doomed = True
            elif isinstance(action, local.Inspect):
                runner = self.runners[action.runner]
                self.perform(
                    self.pool.on_progress(action.runner, runner.started, runner.finished, runner.sent, runner.since, self.now)
                )

    def in_use(self) -> int:
        """Slots in use, as far as the pool knows. What has been killed is at work for as long as that takes, and counts no more."""
        at_work = [one for one in self.runners.values() if one.fed and not one.doomed and self.lent.isdisjoint(one.fed)]
        return sum(self.slots if KINDS[next(iter(one.fed.values()))][0] == 4 else 1 for one in at_work)

    def grant(self, action: local.Grant) -> None:
        runner = self.runners[action.runner]
        if action.task_id in self.in_line:
            assert next(iter(self.in_line)) == action.task_id
            width = self.slots if KINDS[runner.fed[action.task_id]][0] == 4 else 1
            assert not self.in_use() or self.in_use() + width <= self.allowed
            self.forget_wait([action.task_id])
        if runner.current is not None and runner.current[0] == action.task_id:
            runner.granted += 1
            assert runner.granted <= runner.asked
            runner.gave = runner.granted < runner.asked or runner.has_left

    def forget_wait(self, tasks: Iterable[int]) -> None:
        for task_id in tasks:
            self.lent.discard(task_id)
            self.in_line.pop(task_id, None)

    def hear(self, ident: int) -> None:
        """The next that a runner has said arrives."""
        runner = self.runners[ident]
        said = runner.wire.pop(0)
        if len(said) == 2 and isinstance(said[1], bool):
            self.perform(self.pool.on_waits(ident, said[0], self.now, waits=said[1]))
            return
        if self.pool._runners[ident].state is not local.RunnerState.ENDING:
            self.forget_wait(result[0] for result in said)
        for result in said:
            del runner.fed[result[0]]
        self.perform(self.pool.on_results(ident, said, self.now))

    def flush(self, runner: ModelRunner) -> None:
        if runner.held:
            runner.sent += len(runner.held)
            runner.wire.append(tuple(runner.held))
            runner.held = []

    def alive(self) -> List[int]:
        return sorted(self.runners)

    @rule(spec=st.sampled_from([0, 0, 0, 1, 2, 3, 3, 4, 5, 6, 6]), count=st.integers(1, 5))
    def arrive(self, spec: int, count: int) -> None:
        tasks = []
        spec = spec if self.has_environments or spec == 6 else spec % 3
        for _ in range(count):
            self.arrived[self.next_task] = 1
            tasks.append((self.next_task, 1, b""))
            self.next_task += 1
        self.perform(self.pool.on_arrived(spec, tasks, self.now))

    @rule(data=st.data())
    def come_up(self, data: Any) -> None:
        starting = [ident for ident in self.alive() if not self.runners[ident].up and not self.runners[ident].doomed]
        if starting:
            ident = data.draw(st.sampled_from(starting))
            self.runners[ident].up = True
            self.perform(self.pool.on_ready(ident, self.now))

    @rule(data=st.data())
    def begin_task(self, data: Any) -> None:
        idle = [i for i in self.alive() if self.runners[i].inbox and self.runners[i].current is None]
        if not idle:
            return
        runner = self.runners[data.draw(st.sampled_from(idle))]
        task = runner.inbox.popleft()
        runner.started += 1
        runner.since = self.now
        if runner.revoked and runner.started >= runner.revoked:
            runner.finished = runner.started
            runner.held.append((task[0], task[1], int(Status.NOT_RUN), {}, 0.0))
            return
        runner.current = task
        runner.gave = runner.has_left = False
        runner.asked = runner.granted = 0
        self.executed[task[0]] = self.executed.get(task[0], 0) + 1
        assert task[0] not in self.reports or runner.doomed, "a task that was reported has started"

    @rule(data=st.data(), hold=st.booleans())
    def end_task(self, data: Any, hold: bool) -> None:
        busy = [i for i in self.alive() if self.runners[i].current is not None]
        if not busy:
            return
        runner = self.runners[data.draw(st.sampled_from(busy))]
        assert runner.current is not None
        task_id, attempt, _ = runner.current
        status = Status.CANCELLED if runner.interrupt == runner.started else Status.OK
        runner.current = None
        runner.finished = runner.started
        runner.held.append((task_id, attempt, int(status), b"", self.now - runner.since))
        if not hold or not runner.inbox:
            self.flush(runner)

    @rule(data=st.data())
    def results_come(self, data: Any) -> None:
        for ident in self.alive():
            if not self.runners[ident].inbox and self.runners[ident].current is None:
                self.flush(self.runners[ident])
        ready = [i for i in self.alive() if self.runners[i].wire]
        if ready:
            ident = data.draw(st.sampled_from(ready))
            self.hear(ident)

    @rule(data=st.data())
    def begin_to_wait(self, data: Any) -> None:
        at_work = [i for i in self.alive() if self.runners[i].current is not None and not self.runners[i].gave]
        if at_work:
            self.wait(self.runners[data.draw(st.sampled_from(at_work))], waits=True)

    @rule(data=st.data())
    def want_to_go_on(self, data: Any) -> None:
        waiting = [i for i in self.alive() if self.runners[i].current is not None and self.runners[i].gave]
        waiting = [i for i in waiting if self.runners[i].asked == self.runners[i].granted]
        if waiting:
            self.wait(self.runners[data.draw(st.sampled_from(waiting))], waits=False)

    @rule(data=st.data())
    def wait_again(self, data: Any) -> None:
        """It was interrupted before it could go on, and waits for something else."""
        asking = [i for i in self.alive() if self.runners[i].asked > self.runners[i].granted and self.runners[i].gave]
        asking = [i for i in asking if self.runners[i].current is not None]
        if asking:
            self.wait(self.runners[data.draw(st.sampled_from(asking))], waits=True)

    def wait(self, runner: ModelRunner, *, waits: bool) -> None:
        assert runner.current is not None
        runner.gave = True
        runner.has_left = waits  # Since it asked for the last time.
        runner.asked += not waits
        runner.wire.append((runner.current[0], waits))

    @rule(data=st.data())
    def die(self, data: Any) -> None:
        if self.alive():
            self.bury(data.draw(st.sampled_from(self.alive())))

    def bury(self, ident: int) -> None:
        runner = self.runners[ident]
        while runner.wire:
            self.hear(ident)
        self.forget_wait(runner.fed)
        del self.runners[ident]
        self.perform(self.pool.on_runner_down(ident, runner.started, runner.finished, {"exit": -9}, self.now))

    @rule()
    def doomed_die(self) -> None:
        for ident in self.alive():
            if ident in self.runners and self.runners[ident].doomed:
                self.bury(ident)

    @rule(data=st.data(), kill=st.booleans())
    def recall(self, data: Any, kill: bool) -> None:
        open_tasks = [task for task in self.arrived if task not in self.reports]
        if open_tasks:
            wanted = data.draw(st.lists(st.sampled_from(open_tasks), min_size=1, max_size=4, unique=True))
            self.perform(self.pool.on_recalled([(task, 1) for task in wanted], kill=kill, now=self.now))

    @rule(seconds=st.sampled_from([0.0005, 0.003, REVOKE_SETTLE_SECONDS, 0.03, 1.5, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(50):
            deadline = self.pool.next_deadline()
            if deadline is None or deadline > self.now:
                return
            self.perform(self.pool.on_time(self.now))
        raise AssertionError("the same deadline comes again and again")

    @rule(environment=st.integers(1, 2))
    def retire(self, environment: int) -> None:
        self.perform(self.pool.retire(environment))

    @rule(running=st.booleans())
    def hand_back(self, running: bool) -> None:
        self.withheld = True
        self.was_ended = self.was_ended or running
        self.perform(self.pool.hand_back(running=running, now=self.now))
        assert self.pool.queued == 0

    @rule()
    def accept(self) -> None:
        self.withheld = False
        self.pool.accept()

    @rule(slots=st.integers(1, 3))
    def allow(self, slots: int) -> None:
        self.allowed = min(slots, self.slots)
        self.perform(self.pool.allow(slots, self.now))

    @precondition(lambda self: len(getattr(self, "arrived", ())) > 12)
    @rule()
    def drain(self) -> None:
        self.draining = True
        self.perform(self.pool.drain())

    @invariant()
    def a_slot_is_never_lost(self) -> None:
        if hasattr(self, "pool") and not self.draining:
            serving = [one for one in self.runners.values() if self.lent.isdisjoint(one.fed)]
            assert len(serving) + len(self.pool._starts) >= self.slots
            assert self.pool._counts or len(self.runners) + len(self.pool._starts) == self.slots

    @invariant()
    def who_wants_to_go_on_does_so_when_a_slot_is_free(self) -> None:
        assert not getattr(self, "in_line", ()) or self.in_use()

    @invariant()
    def a_withheld_pool_keeps_nothing_that_could_start(self) -> None:
        assert not getattr(self, "withheld", False) or self.pool.queued == 0

    @invariant()
    def nothing_runs_twice(self) -> None:
        assert all(count == 1 for count in getattr(self, "executed", {}).values()) or self.has_lost_results()

    def has_lost_results(self) -> bool:
        # Tasks put back after a death had not started; only NOT_RUN after a finished, unsent result may run again elsewhere.
        return False

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for _ in range(5000):
            self.doomed_die()
            for ident in self.alive():
                runner = self.runners[ident]
                if not runner.up:
                    runner.up = True
                    self.perform(self.pool.on_ready(ident, self.now))
                if runner.current is not None and runner.gave and runner.interrupt != runner.started:
                    if runner.asked == runner.granted:
                        self.wait(runner, waits=False)
                elif runner.current is not None:
                    task_id, attempt, _ = runner.current
                    status = Status.CANCELLED if runner.interrupt == runner.started else Status.OK
                    runner.current = None
                    runner.finished = runner.started
                    runner.held.append((task_id, attempt, int(status), b"", 0.0))
                elif runner.inbox:
                    task = runner.inbox.popleft()
                    runner.started += 1
                    runner.since = self.now
                    if runner.revoked and runner.started >= runner.revoked:
                        runner.finished = runner.started
                        runner.held.append((task[0], task[1], int(Status.NOT_RUN), {}, 0.0))
                    else:
                        runner.current = task
                        runner.gave = runner.has_left = False
                        runner.asked = runner.granted = 0
                        self.executed[task[0]] = self.executed.get(task[0], 0) + 1
                self.flush(runner)
                while ident in self.runners and runner.wire:
                    self.hear(ident)
            self.now += CANCEL_GRACE_SECONDS / 4
            self.perform(self.pool.on_time(self.now))
            if set(self.reports) == set(self.arrived) and self.pool.is_idle:
                return
        missing = sorted(set(self.arrived) - set(self.reports))
        raise AssertionError(f"never reported: {missing}")


TestLocalPool = LocalPoolMachine.TestCase
TestLocalPool.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
