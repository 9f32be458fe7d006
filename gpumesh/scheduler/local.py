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
10. A task that waits for others takes no slot, and gets one again before anything new begins (local_waits.py).
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any, Deque, Dict, Iterable, List, Tuple

from gpumesh.config import (
    CANCEL_GRACE_SECONDS,
    CRASH_RESTART_DELAYS_SECONDS,
    EARLY_DEATH_SECONDS,
    RUNNER_RESTART_DELAYS_SECONDS,
)
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.local_feeding import PoolFeeding
from gpumesh.scheduler.local_looks import LATE_RESULT_SECONDS
from gpumesh.scheduler.local_parts import (
    OWN_ENVIRONMENT,
    AskResults,
    FailEnvironment,
    Feed,
    Grant,
    Health,
    Inspect,
    Interrupt,
    Kill,
    Kind,
    Report,
    Revoke,
    Runner,
    RunnerState,
    SpecFacts,
    StartRunner,
    Task,
    Waits,
)

__all__ = [
    "LATE_RESULT_SECONDS",
    "OWN_ENVIRONMENT",
    "AskResults",
    "FailEnvironment",
    "Feed",
    "Grant",
    "Health",
    "Inspect",
    "Interrupt",
    "Kill",
    "Kind",
    "LocalPool",
    "Report",
    "Revoke",
    "Runner",
    "RunnerState",
    "SpecFacts",
    "StartRunner",
    "Task",
    "Waits",
]

_NOT_RUN = int(Status.NOT_RUN)
_CANCELLED = int(Status.CANCELLED)
_CRASHED = int(Status.CRASHED)

MEAN_WEIGHT = 0.3  # Of the newest batch in the decayed mean of run times.
ENVIRONMENT_START_TRIES = 2  # Of runners in a row; one may be the victim of something else.


class LocalPool(PoolFeeding):
    """The tables of one worker; see the module's promises.

    Args:
        slots: Runners.
        threads: Of each for numeric libraries, unless a task says otherwise.
        numbers: Of the runners; shared with whoever has runners of the same worker.
    """

    failures_to_tell = 1  # Starts in a row that came to nothing, before the worker counts as unable to run tasks.

    # --- events

    def start(self, now: float) -> List[Any]:
        """Bring up a runner for each slot."""
        return [self._new_runner(self.plain, now) for _ in range(self.slots)]

    def on_spec(
        self, number: int, *, timeout: float, width: int, threads: int, environment: int = OWN_ENVIRONMENT, depth: int = 0
    ) -> None:
        """A spec's number is defined."""
        self._has_environments = self._has_environments or environment != OWN_ENVIRONMENT
        self._has_depths = self._has_depths or depth > 0
        self._specs[number] = SpecFacts(timeout, max(1, min(width, self.slots)), Kind(threads, environment), depth)

    def on_arrived(self, spec: int, tasks: Iterable[Tuple[int, int, Any]], now: float) -> List[Any]:
        """Attempts arrived, to be run in this order."""
        if self._draining or self._withheld:
            return [Report([(task[0], task[1], _NOT_RUN, {}, 0.0) for task in tasks])]
        is_deeper = bool(self._has_depths and self._queue) and self._specs[spec].depth > self._specs[self._queue[-1].spec].depth
        self._queue.extend([Task(task[0], task[1], spec) for task in tasks])
        if is_deeper:
            self._sort()
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
        if runner.state is RunnerState.WAITING:
            self._forget_wait(runner)
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
            is_at_work = runner.state in (RunnerState.BUSY, RunnerState.WAITING)
            if runner.fed and is_at_work and (running or len(runner.fed) > 1):
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
                if self._counts:
                    self._end_spares(actions, now)
        return actions

    def _after_progress(self, runner: Runner, actions: List[Any], now: float) -> None:
        runner.since = now
        if runner.state is RunnerState.ENDING:
            return
        if runner.state is RunnerState.WAITING:
            if runner.first <= runner.waiting:
                return  # These were before it.
            self._forget_wait(runner)
        if not runner.fed:
            if runner.revoked:
                runner.revoked = 0
                actions.append(Revoke(runner.ident, 0))
            runner.state = RunnerState.READY
            for other in runner.reserved:
                self._release(other)
            runner.reserved = []
            if self._queue or self._resuming:
                self._feed_all(actions, now)
            else:
                self._look_at_hoarders(now)
            if self._counts:
                self._end_spares(actions, now)
            return
        if self._queue:
            self._feed(runner, actions, now, share=len(self._runners))

    def _wants_runner(self) -> bool:
        """Whether another takes the place of one that is gone."""
        return not (self._draining and self.is_idle) and self._serving() < self.slots

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
            if failures < ENVIRONMENT_START_TRIES and self._serving() < self.slots:
                heapq.heappush(self._starts, (now + delays[failures], runner.kind, 0))
            else:
                self._fail_environment(environment, details, actions)
                if self._wants_runner():
                    actions.append(self._new_runner(self.plain, now))
            return
        self._failures += 1
        if self._serving() < self.slots:
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

    def _observe(self, spec: int, seconds: float, count: int) -> None:
        facts = self._specs.get(spec)
        if facts is not None and count:
            mean = seconds / count
            facts.mean = mean if facts.mean is None else facts.mean + MEAN_WEIGHT * (mean - facts.mean)
