"""The tables of one worker's brain, and what can be read from them. No decisions."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import Any, Deque, Dict, Iterator, List, Optional, Tuple

from gpumesh.config import CANCEL_GRACE_SECONDS, REVOKE_SETTLE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.local_parts import OWN_ENVIRONMENT, Kind, Report, Runner, RunnerState, SpecFacts, StartRunner, Task

_NOT_RUN = int(Status.NOT_RUN)


class PoolTables:
    """What is known of runners and tasks."""

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
        self._has_depths = False  # Some spec is of tasks inside others.
        self._counts = False  # Some task has waited: there may be more processes than slots.
        self._resuming: Deque[int] = deque()  # Runners whose tasks have waited and want to go on, in that order.
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

    # --- small changes

    def _check_at(self, runner: Runner, when: float) -> None:
        # An earlier entry of the heap is void from now on; a look that comes too early only sets the next one.
        runner.check_at = when
        heapq.heappush(self._timers, (when, runner.ident))

    def _put_back(self, back: List[Task], actions: List[Any]) -> None:
        """To the front of the queue, or to the coordinator when this worker is leaving or withheld."""
        if self.is_draining and back:
            actions.append(Report([(task.task_id, task.attempt, _NOT_RUN, {}, 0.0) for task in back]))
        else:
            self._queue.extendleft(reversed(back))
            if self._has_depths:
                self._sort()

    def _is_worth_taking(self, runner: Runner) -> bool:
        last = runner.fed[-1]
        mean = self._specs[last.spec].mean if last is not None else None
        return mean is not None and (len(runner.fed) - 1) * mean > 2 * REVOKE_SETTLE_SECONDS

    def _has_idle_runner(self) -> bool:
        """Whether one is up and may begin something."""
        if self._counts and self._in_use() >= self._allowed:
            return False
        return any(runner.state is RunnerState.READY for runner in self._runners.values())

    def _release(self, ident: int) -> None:
        runner = self._runners.get(ident)
        if runner is not None and runner.state is RunnerState.RESERVED:
            runner.state = RunnerState.READY

    def _in_use(self) -> int:
        """Slots of the tasks that execute."""
        return sum(runner.width for runner in self._runners.values() if runner.state is RunnerState.BUSY)

    def _is_too_wide(self, width: int) -> bool:
        """Whether a task of several slots would take more than may be in use. Alone it may, or it would wait for ever."""
        taken = self._in_use()
        return bool(taken) and taken + width > self._allowed

    # --- what the classes below do

    def _feed_all(self, actions: List[Any], now: float) -> None:
        raise AssertionError("overridden by PoolFeeding")

    def _new_runner(self, kind: Kind, now: float, deaths: int = 0) -> StartRunner:
        raise AssertionError("overridden by LocalPool")

    def _bring_forward(self) -> None:
        raise AssertionError("overridden by PoolWaits")

    def _sort(self) -> None:
        raise AssertionError("overridden by PoolWaits")
