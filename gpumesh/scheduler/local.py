"""The brain of one worker: which runner runs what, how much it is fed ahead, what is taken back, interrupted, killed. Pure.

    arrived ──> queue ──feed──> fed to a runner ──results──> reported
                  ^                  |
                  └── not started ───┘  (its runner is stuck in an earlier task, or has died)

Promises:

1. A slot is never lost: each slot has a runner that is starting, idle, busy or being ended, or a start that is due.
2. Each arrived attempt is reported exactly once: with its result, as NOT_RUN, CRASHED, CANCELLED, TIMED_OUT or HANDED_BACK.
3. A task that may have started is not started again here. Its number on the runner's page decides, never timing.
4. A runner gets more than one task at once only while the tasks of that function have been short, and gives back what it has not
   started when one of them turns out long.
5. Only the task that was executing when a process died is CRASHED.
6. A task runs only in a process of its kind: so many threads, that environment. Runners of the wrong kind make way for it, at most
   one for each task that waits for its kind, and until they have, what fits them may overtake it for `KIND_PATIENCE_SECONDS` only.
7. While it is withheld nothing new starts, and whatever has not started goes back at once; what runs ends by itself, or is ended as
   HANDED_BACK when that was asked for.
8. An environment whose runners do not start fails its own tasks; only the worker's own runners decide whether it is healthy.
9. A slot whose processes die one after the other of the first task that each gets pauses before it starts another, longer each time.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import deque
from typing import Any, Deque, Dict, Iterable, Iterator, List, Optional, Tuple

from gpumesh.config import (
    CANCEL_GRACE_SECONDS,
    CRASH_RESTART_DELAYS_SECONDS,
    EARLY_DEATH_SECONDS,
    FEED_MAX_TASKS,
    FEED_ONE_AHEAD_SECONDS,
    FEED_SECONDS,
    FEED_STUCK_SECONDS,
    KIND_PATIENCE_SECONDS,
    RESULT_FLUSH_SECONDS,
    REVOKE_SETTLE_SECONDS,
    RUNNER_RESTART_DELAYS_SECONDS,
    RUNNER_START_SECONDS,
)
from gpumesh.model.outcomes import Status
from gpumesh.model.records import NamedTuple

_NOT_RUN = int(Status.NOT_RUN)
_CANCELLED = int(Status.CANCELLED)
_TIMED_OUT = int(Status.TIMED_OUT)
_CRASHED = int(Status.CRASHED)
_HANDED_BACK = int(Status.HANDED_BACK)

MEAN_WEIGHT = 0.3  # Of the newest batch in the decayed mean of run times.
LONG_FOR_ITS_KIND = 3.0  # Means: a task that runs longer is not like the others of its function.
LATE_RESULT_SECONDS = 4 * RESULT_FLUSH_SECONDS  # A finished result that has not come by then is asked for.
OWN_ENVIRONMENT = 0  # The worker's own interpreter and packages.
ENVIRONMENT_START_TRIES = 2  # Of runners in a row; one may be the victim of something else.


class Kind(NamedTuple):
    """What two runners must have in common to be interchangeable."""

    threads: int  # For numeric libraries.
    environment: int  # The shell's number of it.


# --- actions


class StartRunner(NamedTuple):
    """Start a process with this number of threads for numeric libraries, in this environment, that sees these cards and no others."""

    runner: int
    threads: int
    environment: int
    cards: Tuple[str, ...] = ()


class Feed(NamedTuple):
    """Send these to the runner, in order. Each is (task id, attempt)."""

    runner: int
    spec: int
    tasks: List[Tuple[int, int]]


class Report(NamedTuple):
    """Tell the coordinator; (task id, attempt, status, payload or dict, seconds)."""

    results: List[Tuple[int, int, int, Any, float]]


class Inspect(NamedTuple):
    """Read the runner's page and answer with `on_progress`."""

    runner: int


class Revoke(NamedTuple):
    """Raise the page's REVOKED mark."""

    runner: int
    number: int


class Interrupt(NamedTuple):
    """Write INTERRUPT and send SIGINT."""

    runner: int
    number: int


class AskResults(NamedTuple):
    """Raise FLUSH and send SIGINT."""

    runner: int


class Kill(NamedTuple):
    """Kill the process; `on_runner_down` follows."""

    runner: int


class Health(NamedTuple):
    """What keeps this worker from running tasks; "" when nothing does."""

    problem: str


class FailEnvironment(NamedTuple):
    """Processes of this environment do not start: its tasks, (task id, attempt), end with an error that says so."""

    environment: int
    tasks: List[Tuple[int, int]]
    details: Dict[str, Any]


class RunnerState(enum.Enum):
    """STARTING -> READY <-> BUSY -> (gone); ENDING: killed on purpose, gone soon; RESERVED: its slot serves a wide task."""

    STARTING = enum.auto()
    READY = enum.auto()
    BUSY = enum.auto()
    RESERVED = enum.auto()
    ENDING = enum.auto()


_COMING = (RunnerState.STARTING, RunnerState.ENDING)


class Task(NamedTuple):
    """One attempt on this worker."""

    task_id: int
    attempt: int
    spec: int


class SpecFacts:
    """What the brain knows of one spec."""

    __slots__ = ("timeout", "width", "kind", "mean")

    def __init__(self, timeout: float, width: int, kind: Kind) -> None:
        self.timeout = timeout
        self.width = width  # Slots that one task takes.
        self.kind = kind  # Of the process that it needs.
        self.mean: Optional[float] = None  # Seconds, decayed.


class Runner:
    """One process."""

    __slots__ = ("ident", "kind", "state", "fed", "first", "since", "revoked", "revoked_at", "interrupted", "kill_at", "reason",
                 "check_at", "reserved", "next_kind", "deaths")  # fmt: skip

    def __init__(self, ident: int, kind: Kind, now: float, deaths: int) -> None:
        self.ident = ident
        self.kind = kind
        self.state = RunnerState.STARTING
        self.fed: Deque[Optional[Task]] = (
            deque()
        )  # Not yet reported, in the runner's order; None: taken back, will come as NOT_RUN.
        self.first = 1  # Number (on the page) of fed[0].
        self.since = now  # Of the last feed into an idle runner, or the last results.
        self.revoked = 0  # Mark on the page; 0: none.
        self.revoked_at = 0.0
        self.interrupted = 0  # Number of the task being interrupted.
        self.kill_at = 0.0  # When the interrupt has not helped.
        self.reason = 0  # Status that the interrupted task ends with.
        self.check_at = now + RUNNER_START_SECONDS
        self.reserved: List[int] = []  # Runners whose slots this one's wide task uses.
        self.next_kind = kind  # Of the process that follows this one.
        self.deaths = deaths  # Of those in this place before, in a row: by the first task that each of them got.


class LocalPool:
    """The tables of one worker; see the module's promises.

    Args:
        slots: Runners.
        threads: Of each for numeric libraries, unless a task says otherwise.
        numbers: Of the runners; shared with whoever has runners of the same worker.
    """

    failures_to_tell = 1  # Starts in a row that came to nothing, before the worker counts as unable to run tasks.

    def __init__(self, *, slots: int, threads: int, numbers: Optional[Iterator[int]] = None) -> None:
        self.slots = slots
        self.plain = Kind(threads, OWN_ENVIRONMENT)  # What most tasks need; `threads` are per slot.
        self._specs: Dict[int, SpecFacts] = {}
        self._queue: Deque[Task] = deque()
        self._runners: Dict[int, Runner] = {}
        self._numbers = numbers or itertools.count(1)
        self._starts: List[
            Tuple[float, Kind, int]
        ] = []  # Heap of those that are due later: when, of what kind, and Runner.deaths.
        self._is_held = False  # What waits is not to be fed yet.
        self._failures = 0  # Starts in a row that came to nothing.
        self._environment_failures: Dict[int, int] = {}  # The same of each environment.
        self._has_environments = False  # Some spec has one.
        self._patient: Optional[Task] = None  # The head of the queue, while it waits for a process of its kind ...
        self._patient_since = 0.0  # ... from this moment on.
        self._problem = ""
        self._unwanted: Dict[
            int, int
        ] = {}  # task id -> attempt: to be ended, recalled while fed but not known to have started.
        self._forced: Dict[int, int] = {}  # The same of those that are to be killed at once.
        self._asked_back: Dict[int, int] = {}  # The same of those that another worker could run: void once they have started.
        self._draining = False
        self._withheld = False  # By the machine's owner: like draining, until `accept`.
        self._ends_running = False  # What runs is to be ended too, ...
        self._end_grace = CANCEL_GRACE_SECONDS  # ... so long after it was interrupted.
        self._allowed = slots  # Slots that may be in use at the same time.
        self._timers: List[Tuple[float, int]] = []  # Heap of (check_at, runner), lazily cleaned.

    # --- reading

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._queue and not any(runner.fed for runner in self._runners.values())

    @property
    def is_draining(self) -> bool:
        """Whether nothing new is taken."""
        return self._draining or self._withheld

    @property
    def queued(self) -> int:
        """Attempts waiting for a runner."""
        return len(self._queue)

    def tasks(self) -> List[Task]:
        """Every attempt that has not been reported: what runners have first, in their order, then what waits."""
        fed = [task for runner in self._runners.values() for task in runner.fed if task is not None]
        return [*fed, *self._queue]

    def spec(self, number: int) -> SpecFacts:
        """What is known of a spec."""
        return self._specs[number]

    def task_at(self, ident: int, number: int) -> int:
        """The task that has this number on a runner's page; 0 when there is none."""
        runner = self._runners.get(ident)
        if runner is None or not 0 <= number - runner.first < len(runner.fed):
            return 0
        task = runner.fed[number - runner.first]
        return task.task_id if task is not None else 0

    def next_deadline(self) -> Optional[float]:
        """When `on_time` is due."""
        due = self._starts[0][0] if self._starts else None
        while self._timers:
            when, ident = self._timers[0]
            runner = self._runners.get(ident)
            if runner is None or runner.check_at != when:
                heapq.heappop(self._timers)
                continue
            return when if due is None or when < due else due
        return due

    # --- events

    def start(self, now: float) -> List[Any]:
        """Bring up a runner for each slot."""
        return [self._new_runner(self.plain, now) for _ in range(self.slots)]

    def on_spec(self, number: int, *, timeout: float, width: int, threads: int, environment: int = OWN_ENVIRONMENT) -> None:
        """A spec's number is defined."""
        self._has_environments = self._has_environments or environment != OWN_ENVIRONMENT
        self._specs[number] = SpecFacts(timeout, max(1, min(width, self.slots)), Kind(threads, environment))

    def on_arrived(self, spec: int, tasks: Iterable[Tuple[int, int, Any]], now: float) -> List[Any]:
        """Attempts arrived, to be run in this order."""
        if self._draining or self._withheld:
            return [Report([(task[0], task[1], _NOT_RUN, {}, 0.0) for task in tasks])]
        self._queue.extend([Task(task[0], task[1], spec) for task in tasks])
        actions: List[Any] = []
        self._feed_all(actions, now)
        return actions

    def on_ready(self, ident: int, now: float) -> List[Any]:
        """A process is up."""
        actions: List[Any] = []
        runner = self._runners.get(ident)
        if runner is None or runner.state is not RunnerState.STARTING:
            return actions
        runner.state = RunnerState.READY
        runner.check_at = 0.0
        runner.since = now
        if runner.kind.environment != OWN_ENVIRONMENT:
            self._environment_failures.pop(runner.kind.environment, None)
            self._feed_all(actions, now)
            return actions
        self._failures = 0
        if self._problem:
            self._problem = ""
            actions.append(Health(""))
        self._feed_all(actions, now)
        return actions

    def on_results(self, ident: int, results: Any, now: float) -> List[Any]:
        """A runner sent results of the tasks at the head of its feed, in order."""
        runner = self._runners.get(ident)
        if runner is None or runner.state is RunnerState.ENDING:
            return []
        actions: List[Any] = []
        fed = runner.fed
        report: Any = results
        is_plain = not (runner.interrupted or runner.revoked or self._unwanted or self._asked_back)
        if is_plain:
            seconds, count, spec = 0.0, 0, -1
            for result in results:
                task = fed.popleft()
                assert task is not None
                if task.spec != spec:
                    self._observe(spec, seconds, count)
                    seconds, count, spec = 0.0, 0, task.spec
                seconds += result[4]
                count += 1
            self._observe(spec, seconds, count)
            runner.first += len(results)
        else:
            report = self._odd_results(runner, results)
        if report:
            actions.append(Report(report))
        self._after_progress(runner, actions, now)
        return actions

    def on_progress(self, ident: int, started: int, finished: int, sent: int, since: float, now: float) -> List[Any]:
        """What the runner's page says; the answer to Inspect."""
        actions: List[Any] = []
        runner = self._runners.get(ident)
        if runner is None or not runner.fed or runner.state is RunnerState.ENDING:
            return actions
        self._check(runner, started, finished, sent, since, actions, now)
        self._feed_all(actions, now)
        return actions

    def on_runner_down(self, ident: int, started: int, finished: int, details: Dict[str, Any], now: float) -> List[Any]:
        """A process is gone. `started`, `finished`: its page's last words; `details`: exit, stderr, for people."""
        runner = self._runners.pop(ident, None)
        actions: List[Any] = []
        if runner is None:
            return actions
        for other in runner.reserved:
            self._release(other)
        report: List[Tuple[int, int, int, Any, float]] = []
        back: List[Task] = []
        number = runner.first
        for task in runner.fed:
            if task is None:
                number += 1
                continue
            unwanted = self._unwanted.pop(task.task_id, None) is not None
            self._forced.pop(task.task_id, None)
            asked_back = self._asked_back.pop(task.task_id, None) is not None
            if number <= finished:
                # It had ended and its result died with the process; only tasks that may run again were held back.
                status = runner.reason if number == runner.interrupted else _NOT_RUN
                report.append((task.task_id, task.attempt, status, dict(details), 0.0))
            elif number == started:
                status = runner.reason if number == runner.interrupted else _CRASHED
                why = {**details, **self._why(status, task)} if status != _CRASHED else dict(details)
                report.append((task.task_id, task.attempt, status, why, max(0.0, now - runner.since)))
            elif unwanted:
                report.append((task.task_id, task.attempt, _CANCELLED, dict(details), 0.0))
            elif asked_back:
                report.append((task.task_id, task.attempt, _NOT_RUN, {}, 0.0))
            else:
                back.append(task)
            number += 1
        self._put_back(back, actions)
        if report:
            actions.append(Report(report))
        if runner.state is RunnerState.STARTING:
            self._start_failed(runner, details, actions, now)
        elif self._wants_runner():
            self._succeed(runner, started > finished, actions, now)
        self._feed_all(actions, now)
        return actions

    def on_recalled(self, tasks: Iterable[Tuple[int, int]], *, kill: bool, now: float, force: bool = False) -> List[Any]:
        """The coordinator wants these back; with `kill` also those that run, with `force` at once, and what was interrupted before."""
        wanted = dict(tasks)
        actions: List[Any] = []
        status = _CANCELLED if kill else _NOT_RUN
        if self._queue:
            keep: Deque[Task] = deque()
            report: List[Tuple[int, int, int, Any, float]] = []
            for task in self._queue:
                if wanted.get(task.task_id) == task.attempt:
                    del wanted[task.task_id]
                    report.append((task.task_id, task.attempt, status, {}, 0.0))
                else:
                    keep.append(task)
            self._queue = keep
            if report:
                actions.append(Report(report))
        if wanted:
            marked = self._unwanted if kill else self._asked_back
            for runner in self._runners.values():
                for number, fed in enumerate(runner.fed, runner.first):
                    if fed is not None and wanted.get(fed.task_id) == fed.attempt:
                        marked[fed.task_id] = fed.attempt
                        if force:
                            self._forced[fed.task_id] = fed.attempt
                            if number == runner.interrupted:
                                runner.kill_at = now
                        self._check_at(runner, now)
        return actions

    def retire(self, environment: int) -> List[Any]:
        """Nothing has run in this environment for long: its idle runners make way for plain ones."""
        actions: List[Any] = []
        for runner in self._runners.values():
            if runner.kind.environment == environment and runner.state is RunnerState.READY:
                self._replace(runner, self.plain, actions)
        return actions

    def drain(self) -> List[Any]:
        """Take nothing new, give back what has not been fed; what runs goes on."""
        self._draining = True
        report: List[Tuple[int, int, int, Any, float]]
        report = [(task.task_id, task.attempt, _NOT_RUN, {}, 0.0) for task in self._queue]
        self._queue.clear()
        self._starts.clear()
        return [Report(report)] if report else []

    def hand_back(self, *, running: bool, now: float, grace_seconds: float = CANCEL_GRACE_SECONDS) -> List[Any]:
        """The machine's owner wants it back: until `accept`, nothing new is taken and what has not started is given back as NOT_RUN.

        Args:
            running: End what runs too, as HANDED_BACK; else it goes on to its end.
            grace_seconds: From the interrupt to the kill.
        """
        self._withheld = True
        self._ends_running = running
        self._end_grace = grace_seconds
        actions: List[Any] = []
        if self._queue:
            actions.append(Report([(task.task_id, task.attempt, _NOT_RUN, {}, 0.0) for task in self._queue]))
            self._queue.clear()
        for runner in self._runners.values():
            if running and runner.interrupted:
                runner.kill_at = min(runner.kill_at, now + grace_seconds)
            if runner.fed and runner.state is RunnerState.BUSY and (running or len(runner.fed) > 1):
                self._check_at(runner, now)
        return actions

    def accept(self) -> None:
        """The owner lends it again. What is being ended still is."""
        self._withheld = False
        self._ends_running = False

    def allow(self, slots: int, now: float) -> List[Any]:
        """Use no more than so many slots at the same time from now on; what has not started is given back when they are fewer than before."""
        actions: List[Any] = []
        fewer = slots < self._allowed
        self._allowed = max(1, min(slots, self.slots))
        if fewer and self._queue:
            actions.append(Report([(task.task_id, task.attempt, _NOT_RUN, {}, 0.0) for task in self._queue]))
            self._queue.clear()
        self._feed_all(actions, now)
        return actions

    def on_time(self, now: float) -> List[Any]:
        """Starts that are due, runners to look at, interrupts that did not help."""
        actions: List[Any] = []
        while self._starts and self._starts[0][0] <= now:
            _, kind, deaths = heapq.heappop(self._starts)
            actions.append(self._new_runner(kind, now, deaths))
        while self._timers and self._timers[0][0] <= now:
            when, ident = heapq.heappop(self._timers)
            runner = self._runners.get(ident)
            if runner is None or runner.check_at != when:
                continue
            runner.check_at = 0.0
            if runner.state is RunnerState.STARTING:
                actions.append(Kill(ident))  # Stays STARTING: a failed start when it is gone.
            elif runner.fed:
                actions.append(Inspect(ident))
            else:
                self._feed_all(actions, now)
        return actions

    # --- feeding

    def _feed_all(self, actions: List[Any], now: float) -> None:
        queue = self._queue
        if not queue or self._is_held:
            return
        ready = [runner for runner in self._runners.values() if runner.state is RunnerState.READY]
        if ready:
            if self._has_environments:
                kind = self._specs[queue[0].spec].kind
                ready.sort(key=lambda runner: (runner.kind != kind, runner.since))  # Whoever is idle longest makes way.
            for runner in ready:
                if not queue:
                    break
                if runner.state is RunnerState.READY:  # Not reserved for a wide task meanwhile.
                    self._feed(runner, actions, now, share=len(ready))
        if queue:
            for runner in self._runners.values():
                if runner.state is RunnerState.BUSY and queue:
                    self._feed(runner, actions, now, share=len(self._runners))

    def _feed(self, runner: Runner, actions: List[Any], now: float, *, share: int) -> None:
        """Give a runner its next tasks, if it should have more."""
        if runner.revoked or runner.interrupted:
            return
        if self._allowed < self.slots and self._is_beyond(runner):
            return
        queue = self._queue
        spec = queue[0].spec
        facts = self._specs[spec]
        fed = runner.fed
        place = 0
        if facts.width > 1 or facts.kind != runner.kind:
            place = self._overtaker(runner, facts, now)
            if not place:
                self._feed_odd(runner, facts, actions, now)
                return
            spec = queue[place].spec
            facts = self._specs[spec]
        allowed = _allowance(facts)
        if fed and (len(fed) * 2 > allowed or allowed == 1):
            return
        if place:
            task = queue[place]
            del queue[place]
            queue.appendleft(task)
        count = min(allowed - len(fed), max(1, len(queue) // share))
        tasks: List[Tuple[int, int]] = []
        while queue and len(tasks) < count:
            task = queue[0]
            if task.spec != spec:
                break
            queue.popleft()
            fed.append(task)
            tasks.append((task.task_id, task.attempt))
        if runner.state is RunnerState.READY:
            runner.state = RunnerState.BUSY
            runner.since = now
        actions.append(Feed(runner.ident, spec, tasks))
        self._arm(runner, facts, now)

    def _is_beyond(self, runner: Runner) -> bool:
        """Whether the slots that may be in use are taken by other runners, those that have been at work for longer first."""
        others = 0
        for other in self._runners.values():
            if other is runner:
                if runner.state is RunnerState.BUSY:
                    break  # Those behind it are the ones to stop.
            elif other.state in (RunnerState.BUSY, RunnerState.RESERVED):
                others += 1
        return others >= self._allowed

    def _is_too_wide(self, width: int) -> bool:
        """Whether a task of several slots would take more than may be in use. Alone it may, or it would wait for ever."""
        taken = sum(runner.state in (RunnerState.BUSY, RunnerState.RESERVED) for runner in self._runners.values())
        return bool(taken) and taken + width > self._allowed

    def _overtaker(self, runner: Runner, facts: SpecFacts, now: float) -> int:
        """The next task needs a process of another kind than this one: place of the first that fits this one, 0 if there is none.

        Otherwise two kinds on few slots would have a process killed and started for nearly every task.
        """
        if facts.width > 1 or not self._has_environments:
            return 0
        if self._patient is not self._queue[0]:
            self._patient = self._queue[0]
            self._patient_since = now
        if self._is_late(now) and self._is_wanted(facts):
            return 0
        specs = self._specs
        for place, task in enumerate(self._queue):
            facts = specs[task.spec]
            if facts.kind == runner.kind and facts.width == 1:
                return place
        return 0

    def _is_late(self, now: float) -> bool:
        """Whether the next task has waited long enough for a process of its kind."""
        return self._patient is self._queue[0] and now >= self._patient_since + KIND_PATIENCE_SECONDS

    def _is_served_soon(self, facts: SpecFacts) -> bool:
        """Whether runners of the next task's kind will get to all that waits for them sooner than another could be started."""
        count = sum(other.kind == facts.kind and other.state is RunnerState.BUSY for other in self._runners.values())
        if not count or facts.mean is None:
            return False
        waiting = sum(self._specs[task.spec].kind == facts.kind for task in self._queue)
        return waiting * facts.mean < count * KIND_PATIENCE_SECONDS

    def _replace(self, runner: Runner, kind: Kind, actions: List[Any]) -> None:
        """An idle runner makes way for one of another kind."""
        runner.state = RunnerState.ENDING
        runner.next_kind = kind
        actions.append(Kill(runner.ident))

    def _is_wanted(self, facts: SpecFacts) -> bool:
        """Whether more runners of the next task's kind should come than are on their way."""
        coming = sum(other.next_kind == facts.kind and other.state in _COMING for other in self._runners.values())
        coming += sum(kind == facts.kind for _, kind, _ in self._starts)
        if not coming or facts.width > 1:
            return not coming
        for task in self._queue:
            coming -= self._specs[task.spec].kind == facts.kind
            if coming < 0:
                return True
        return False

    def _feed_odd(self, runner: Runner, facts: SpecFacts, actions: List[Any], now: float) -> None:
        """The next task takes several slots, or a process of another kind."""
        if runner.fed or not self._is_wanted(facts):
            return
        idle = [other for other in self._runners.values() if other.state is RunnerState.READY]
        if len(idle) < facts.width or (self._allowed < self.slots and self._is_too_wide(facts.width)):
            return  # The slots that are free wait for it: the queue keeps its order, so it cannot starve.
        if runner.kind != facts.kind:
            if facts.width == 1 and self._is_served_soon(facts) and not self._is_late(now):
                due = self._patient_since + KIND_PATIENCE_SECONDS
                if runner.check_at != due:
                    self._check_at(runner, due)
            else:
                self._replace(runner, facts.kind, actions)
            return
        for other in idle:
            if other is not runner and len(runner.reserved) < facts.width - 1:
                other.state = RunnerState.RESERVED
                runner.reserved.append(other.ident)
        task = self._queue.popleft()
        runner.fed.append(task)
        runner.state = RunnerState.BUSY
        runner.since = now
        actions.append(Feed(runner.ident, task.spec, [(task.task_id, task.attempt)]))
        self._arm(runner, facts, now)

    def _arm(self, runner: Runner, facts: SpecFacts, now: float) -> None:
        """Set the time of the next look at a runner that has been fed."""
        due = now + (_patience(facts) if len(runner.fed) > 1 else facts.timeout)
        if facts.timeout:
            due = min(due, now + facts.timeout)
        elif len(runner.fed) == 1:
            return
        if not runner.check_at or due < runner.check_at:
            self._check_at(runner, due)

    def _check_at(self, runner: Runner, when: float) -> None:
        # An earlier entry of the heap is void from now on; a look that comes too early only sets the next one.
        runner.check_at = when
        heapq.heappush(self._timers, (when, runner.ident))

    # --- results out of the straight line

    def _odd_results(self, runner: Runner, results: Any) -> List[Tuple[int, int, int, Any, float]]:
        """Results while something was revoked, interrupted or unwanted."""
        report: List[Tuple[int, int, int, Any, float]] = []
        back: List[Task] = []
        for task_id, attempt, status, payload, seconds in results:
            task = runner.fed.popleft()
            number = runner.first
            runner.first += 1
            if task is None:
                continue
            unwanted = self._unwanted.pop(task_id, None) is not None
            if self._forced:
                self._forced.pop(task_id, None)
            asked_back = self._asked_back.pop(task_id, None) is not None
            if number == runner.interrupted:
                # Code that was interrupted may return or raise whatever it likes: half of a value must not pass for the whole.
                if runner.reason in (_TIMED_OUT, _HANDED_BACK) or status == _CANCELLED:
                    status, payload = runner.reason, self._why(runner.reason, task)
                runner.interrupted = 0
            elif status == _NOT_RUN:
                if unwanted:
                    status = _CANCELLED
                elif not asked_back:
                    back.append(task)
                    continue
            report.append((task_id, attempt, status, payload, seconds))
        if self.is_draining:
            report.extend((task.task_id, task.attempt, _NOT_RUN, {}, 0.0) for task in back)
        else:
            self._queue.extendleft(reversed(back))
        return report

    def _why(self, status: int, task: Task) -> Dict[str, Any]:
        if status == _TIMED_OUT:
            limit = self._specs[task.spec].timeout
            return {"reason": f"it ran longer than its timeout of {limit:g} s", "seconds": limit}
        if status == _HANDED_BACK:
            return {"reason": "ended because the machine's owner wants it back"}
        return {"reason": "cancelled while it ran"}

    def _put_back(self, back: List[Task], actions: List[Any]) -> None:
        """To the front of the queue, or to the coordinator when this worker is leaving or withheld."""
        if self.is_draining and back:
            actions.append(Report([(task.task_id, task.attempt, _NOT_RUN, {}, 0.0) for task in back]))
        else:
            self._queue.extendleft(reversed(back))

    def _after_progress(self, runner: Runner, actions: List[Any], now: float) -> None:
        runner.since = now
        if runner.state is RunnerState.ENDING:
            return
        if not runner.fed:
            if runner.revoked:
                runner.revoked = 0
                actions.append(Revoke(runner.ident, 0))
            runner.state = RunnerState.READY
            for other in runner.reserved:
                self._release(other)
            runner.reserved = []
            if self._queue:
                self._feed_all(actions, now)
            else:
                self._look_at_hoarders(now)
            return
        if self._queue:
            self._feed(runner, actions, now, share=len(self._runners))

    def _look_at_hoarders(self, now: float) -> None:
        """A runner is idle and nothing waits: what waits behind a longer task elsewhere may come here."""
        for other in self._runners.values():
            if other.state is RunnerState.BUSY and len(other.fed) > 1 and self._is_worth_taking(other):
                self._check_at(other, now)

    def _is_worth_taking(self, runner: Runner) -> bool:
        last = runner.fed[-1]
        mean = self._specs[last.spec].mean if last is not None else None
        return mean is not None and (len(runner.fed) - 1) * mean > 2 * REVOKE_SETTLE_SECONDS

    def _has_idle_runner(self) -> bool:
        return any(runner.state is RunnerState.READY for runner in self._runners.values())

    def _observe(self, spec: int, seconds: float, count: int) -> None:
        facts = self._specs.get(spec)
        if facts is not None and count:
            mean = seconds / count
            facts.mean = mean if facts.mean is None else facts.mean + MEAN_WEIGHT * (mean - facts.mean)

    def _release(self, ident: int) -> None:
        runner = self._runners.get(ident)
        if runner is not None and runner.state is RunnerState.RESERVED:
            runner.state = RunnerState.READY

    # --- looking at a runner

    def _check(
        self, runner: Runner, started: int, finished: int, sent: int, since: float, actions: List[Any], now: float
    ) -> None:
        """Timeouts, cancelled tasks, and tasks stuck behind a long one. `started` is what runs or has just ended."""
        is_running = started > finished
        ran = now - since if is_running else 0.0
        due: List[float] = []
        if runner.interrupted:
            if runner.interrupted <= finished:
                pass  # It has ended; its result is on the way.
            elif now >= runner.kill_at:
                actions.append(Kill(runner.ident))
                return
            else:
                due.append(runner.kill_at)
        elif is_running and started >= runner.first:
            running = runner.fed[started - runner.first] if started - runner.first < len(runner.fed) else None
            if running is not None:
                timeout = self._specs[running.spec].timeout
                if self._unwanted.get(running.task_id) == running.attempt:
                    del self._unwanted[running.task_id]
                    if self._forced.pop(running.task_id, 0) == running.attempt:
                        runner.interrupted, runner.reason, runner.kill_at = started, _CANCELLED, now
                        actions.append(Kill(runner.ident))
                        return
                    due.append(self._interrupt(runner, started, _CANCELLED, actions, now))
                elif timeout and ran >= timeout:
                    due.append(self._interrupt(runner, started, _TIMED_OUT, actions, now))
                elif self._ends_running:
                    due.append(self._interrupt(runner, started, _HANDED_BACK, actions, now))
                elif timeout:
                    due.append(since + timeout)
        if finished > sent and (not is_running or ran > LATE_RESULT_SECONDS):
            actions.append(AskResults(runner.ident))
        self._take_back(runner, started, ran, due, actions, now)
        head = runner.fed[0]
        if not due and head is not None and self._specs[head.spec].timeout:
            due.append(now + self._specs[head.spec].timeout)  # Between two tasks: look again.
        if due:
            self._check_at(runner, max(now + 0.001, min(due)))

    def _interrupt(self, runner: Runner, number: int, reason: int, actions: List[Any], now: float) -> float:
        runner.interrupted = number
        runner.reason = reason
        runner.kill_at = now + (self._end_grace if reason == _HANDED_BACK else CANCEL_GRACE_SECONDS)
        actions.append(Interrupt(runner.ident, number))
        return runner.kill_at

    def _take_back(self, runner: Runner, started: int, ran: float, due: List[float], actions: List[Any], now: float) -> None:
        """Tasks wait behind the one that runs: raise the mark, and when it has settled, take them."""
        ahead = max(0, started - runner.first + 1)
        waiting = [task for task in list(runner.fed)[ahead:] if task is not None]
        if not waiting:
            return
        if not runner.revoked:
            head = runner.fed[0]
            patience = _patience(self._specs[head.spec]) if head is not None else FEED_STUCK_SECONDS
            if (
                ran >= patience
                or runner.interrupted
                or self._withheld
                or (self._has_idle_runner() and self._is_worth_taking(runner))
                or any(task.task_id in self._unwanted or task.task_id in self._asked_back for task in waiting)
            ):
                runner.revoked = started + 1
                runner.revoked_at = now
                actions.append(Revoke(runner.ident, runner.revoked))
                due.append(now + REVOKE_SETTLE_SECONDS)
            else:
                due.append(now + patience - min(ran, patience / 2))
            return
        if now - runner.revoked_at < REVOKE_SETTLE_SECONDS:
            due.append(runner.revoked_at + REVOKE_SETTLE_SECONDS)
            return
        back: List[Task] = []
        report: List[Tuple[int, int, int, Any, float]] = []
        for task in waiting:
            asked_back = self._asked_back.pop(task.task_id, None) is not None
            if self._unwanted.pop(task.task_id, None) is not None:
                self._forced.pop(task.task_id, None)
                report.append((task.task_id, task.attempt, _CANCELLED, {}, 0.0))
            elif asked_back:
                report.append((task.task_id, task.attempt, _NOT_RUN, {}, 0.0))
            else:
                back.append(task)
        behind = len(runner.fed) - ahead
        for _ in range(behind):
            runner.fed.pop()
        runner.fed.extend([None] * behind)
        self._put_back(back, actions)
        if report:
            actions.append(Report(report))

    def _wants_runner(self) -> bool:
        """Whether another takes the place of one that is gone."""
        return not (self._draining and self.is_idle)

    def _succeed(self, runner: Runner, was_running: bool, actions: List[Any], now: float) -> None:
        """A process takes the place of one that is gone, at once unless those before it have died of the first they got."""
        is_early = was_running and runner.first == 1 and now - runner.since < EARLY_DEATH_SECONDS
        deaths = runner.deaths + 1 if is_early and runner.state is RunnerState.BUSY and not runner.interrupted else 0
        delays = CRASH_RESTART_DELAYS_SECONDS
        delay = delays[min(deaths, len(delays) - 1)]
        if delay:
            heapq.heappush(self._starts, (now + delay, runner.next_kind, deaths))
        else:
            actions.append(self._new_runner(runner.next_kind, now, deaths))

    def _new_runner(self, kind: Kind, now: float, deaths: int = 0) -> StartRunner:
        runner = Runner(next(self._numbers), kind, now, deaths)
        self._runners[runner.ident] = runner
        self._check_at(runner, runner.check_at)
        return StartRunner(runner.ident, kind.threads, kind.environment)

    def _start_failed(self, runner: Runner, details: Dict[str, Any], actions: List[Any], now: float) -> None:
        delays = RUNNER_RESTART_DELAYS_SECONDS
        environment = runner.kind.environment
        if environment != OWN_ENVIRONMENT:
            failures = self._environment_failures[environment] = self._environment_failures.get(environment, 0) + 1
            if failures < ENVIRONMENT_START_TRIES:
                heapq.heappush(self._starts, (now + delays[failures], runner.kind, 0))
            else:
                self._fail_environment(environment, details, actions)
                if self._wants_runner():
                    actions.append(self._new_runner(self.plain, now))
            return
        self._failures += 1
        heapq.heappush(self._starts, (now + delays[min(self._failures, len(delays) - 1)], runner.kind, 0))
        if self._failures < self.failures_to_tell:
            return
        if not any(runner.state is not RunnerState.STARTING for runner in self._runners.values()):
            lines = str(details.get("stderr", "")).strip().splitlines()[-3:]
            why = " | ".join(lines) or str(details.get("reason", "")) or f"exit code {details.get('exit')}"
            problem = f"its runner processes fail to start: {why}"
            if problem != self._problem:
                self._problem = problem
                actions.append(Health(problem))

    def _fail_environment(self, environment: int, details: Dict[str, Any], actions: List[Any]) -> None:
        keep: Deque[Task] = deque()
        failed: List[Tuple[int, int]] = []
        for task in self._queue:
            if self._specs[task.spec].kind.environment == environment:
                failed.append((task.task_id, task.attempt))
            else:
                keep.append(task)
        self._queue = keep
        for index, (when, kind, _) in enumerate(self._starts):
            if kind.environment == environment:
                self._starts[index] = (when, self.plain, 0)
        heapq.heapify(self._starts)
        actions.append(FailEnvironment(environment, failed, dict(details)))


def _allowance(facts: SpecFacts) -> int:
    """Tasks of a spec that a runner holds at once, the running one included."""
    mean = facts.mean
    if mean is None or mean > FEED_ONE_AHEAD_SECONDS:
        return 1
    return max(2, min(FEED_MAX_TASKS, int(FEED_SECONDS / (mean + 1e-9))))


def _patience(facts: SpecFacts) -> float:
    """Seconds that a task may run before those fed behind it are taken back."""
    return max(FEED_STUCK_SECONDS, LONG_FOR_ITS_KIND * (facts.mean or 0.0))
