"""Tasks that wait for other tasks: their slots are used meanwhile, and they get one back before anything new begins.

    BUSY ──waits──> WAITING ──wants to go on──> in line ──a slot is free──> BUSY
                       └── cancelled, handed back, crashed ──> ended, without a slot

While a task waits, its process stays, and another serves its slot. So there are more processes than slots, and which of them may be busy
at once is counted. When the task goes on there is one too many, which is kept for the next task that waits, as starting it took longer
than many a task; what nobody has used for `SPARE_RUNNER_SECONDS` ends.

Its timeout goes on counting while it waits, or who waits for ever would never end.

Whoever wants to go on is first in line, before all that is queued. Slots in use are those of tasks that execute; each of them ends or waits
some time, so whoever is in line gets one. That what a waiting task waits for is not stuck behind others that wait is up to the order in
which tasks come: deeper ones, those inside of others, go first here as at the coordinator.
"""

from __future__ import annotations

from collections import deque
from typing import Any, List

from gpumesh.config import REVOKE_SETTLE_SECONDS, SPARE_RUNNER_SECONDS, SPARE_RUNNERS_LEAST, SPARE_RUNNERS_PER_SLOT
from gpumesh.scheduler.local_looks import PoolLooks
from gpumesh.scheduler.local_parts import AskResults, Grant, Kill, Kind, Revoke, Runner, RunnerState, Task, Waits


class PoolWaits(PoolLooks):
    """See the module."""

    # --- events

    def on_waits(self, ident: int, task_id: int, now: float, *, waits: bool) -> List[Any]:
        """The task that runs in this process waits for others, or, after that, wants to go on."""
        actions: List[Any] = []
        runner = self._runners.get(ident)
        if runner is None or runner.state is RunnerState.ENDING:
            return actions
        if not waits:
            if self._waiting_task(runner) == task_id and ident not in self._resuming:
                self._ask_slot(runner, actions, now)
            else:
                actions.append(Grant(ident, task_id))  # It has not given any away.
        elif runner.state is RunnerState.BUSY:
            for place, task in enumerate(runner.fed):
                if task is not None and task.task_id == task_id:
                    self._give_away(runner, task, place, actions, now)
                    break
        elif ident in self._resuming and self._waiting_task(runner) == task_id:
            self._resuming.remove(ident)
            actions.append(Waits(task_id, self._attempt_of(runner), True))
            actions.append(Grant(ident, task_id))  # Each question is answered; this one is void.
            self._feed_all(actions, now)
        return actions

    def waiting(self) -> List[Task]:
        """Attempts that have given their slots away, and do not want to go on yet."""
        return [
            task
            for runner in self._runners.values()
            if runner.state is RunnerState.WAITING and runner.ident not in self._resuming
            for task in [runner.fed[runner.waiting - runner.first]]
            if task is not None
        ]

    # --- giving and taking

    def _give_away(self, runner: Runner, task: Task, place: int, actions: List[Any], now: float) -> None:
        self._counts = True
        runner.state = RunnerState.WAITING
        runner.waiting = runner.first + place
        for other in runner.reserved:
            self._release(other)
        runner.reserved = []
        if place:
            actions.append(AskResults(runner.ident))  # Those before it have ended, and their results wait for company.
        if len(runner.fed) > place + 1 and not runner.revoked:
            # It may end without going on: only the mark on the page says what has started behind it.
            runner.revoked = runner.waiting + 1
            runner.revoked_at = now
            actions.append(Revoke(runner.ident, runner.revoked))
            self._check_at(runner, now + REVOKE_SETTLE_SECONDS)
        actions.append(Waits(task.task_id, task.attempt, True))
        self._grant(actions, now)
        self._fill_up(runner.kind, actions, now)
        self._feed_all(actions, now)

    def _ask_slot(self, runner: Runner, actions: List[Any], now: float) -> None:
        task_id = self._waiting_task(runner)
        actions.append(Waits(task_id, self._attempt_of(runner), False))
        self._resuming.append(runner.ident)
        self._grant(actions, now)
        if self._resuming:
            for other in self._runners.values():
                if other.state is RunnerState.BUSY and len(other.fed) > 1 and self._is_worth_taking(other):
                    self._check_at(other, now)

    def _grant(self, actions: List[Any], now: float) -> None:
        """Slots that are free go to those who want to go on, in the order in which they have asked."""
        while self._resuming:
            runner = self._runners[self._resuming[0]]
            task = runner.fed[runner.waiting - runner.first]
            assert task is not None, runner.ident
            facts = self._specs[task.spec]
            if self._is_too_wide(facts.width):
                return
            self._resuming.popleft()
            self._end_wait(runner)
            runner.width = facts.width
            for other in self._runners.values():
                if other.state is RunnerState.READY and len(runner.reserved) < facts.width - 1:
                    other.state = RunnerState.RESERVED
                    runner.reserved.append(other.ident)
            actions.append(Grant(runner.ident, task.task_id))
            self._end_spares(actions, now)

    def _end_wait(self, runner: Runner) -> None:
        runner.state = RunnerState.BUSY
        runner.waiting = 0
        runner.width = 1

    def _forget_wait(self, runner: Runner) -> None:
        """The task that has waited has ended."""
        if runner.ident in self._resuming:
            self._resuming.remove(runner.ident)
        self._end_wait(runner)

    def _waiting_task(self, runner: Runner) -> int:
        """The task that has given its slot away; 0: none."""
        return self.task_at(runner.ident, runner.waiting) if runner.state is RunnerState.WAITING else 0

    def _attempt_of(self, runner: Runner) -> int:
        task = runner.fed[runner.waiting - runner.first]
        assert task is not None, runner.ident
        return task.attempt

    # --- processes beyond the slots

    def _serving(self) -> int:
        """Processes that slots are served by, now or soon."""
        return len(self._starts) + sum(
            runner.state is not RunnerState.WAITING and not runner.is_spare for runner in self._runners.values()
        )

    def _fill_up(self, kind: Kind, actions: List[Any], now: float) -> None:
        """Another process for each slot that was given away, unless there is one to spare."""
        if self._draining:
            return
        kind = self._specs[self._queue[0].spec].kind if self._queue else kind
        while self._serving() < self.slots:
            actions.append(self._new_runner(kind, now))

    def _end_spares(self, actions: List[Any], now: float) -> None:
        """End processes that slots do not need and nobody has used for long, or that are more than should be kept."""
        surplus = self._serving() - self.slots
        if surplus <= 0:
            return
        idle = [runner for runner in self._runners.values() if runner.state is RunnerState.READY]
        idle.sort(key=lambda runner: runner.since)
        most = max(SPARE_RUNNERS_LEAST, SPARE_RUNNERS_PER_SLOT * self.slots)
        for runner in idle[:surplus]:
            due = runner.since + SPARE_RUNNER_SECONDS
            if surplus > most or due <= now:
                runner.state = RunnerState.ENDING
                runner.is_spare = True
                actions.append(Kill(runner.ident))
                surplus -= 1
            elif not runner.check_at or runner.check_at > due:
                self._check_at(runner, due)

    # --- order

    def _bring_forward(self) -> None:
        """With few tasks left inside of others, one that will have some begins first: they are here before the slots have run dry."""
        queue = self._queue
        specs = self._specs
        outer = specs[queue[-1].spec].depth
        if specs[queue[0].spec].depth <= outer:
            return
        if len(queue) > self.slots and specs[queue[self.slots - 1].spec].depth > outer:
            return
        if sum(runner.state is RunnerState.WAITING for runner in self._runners.values()) >= 2 * self.slots:
            return
        place = next(place for place, task in enumerate(queue) if specs[task.spec].depth == outer)
        task = queue[place]
        del queue[place]
        queue.appendleft(task)

    def _sort(self) -> None:
        """Deeper tasks first, else in their order."""
        specs = self._specs
        self._queue = deque(sorted(self._queue, key=lambda task: -specs[task.spec].depth))
