"""Who is fed what next: tasks of the process's kind, as many as hide the way to it, wide ones when enough slots are free."""

from __future__ import annotations

from typing import Any, List, Tuple

from gpumesh.config import KIND_PATIENCE_SECONDS
from gpumesh.scheduler.local_parts import COMING, Feed, Kill, Kind, Runner, RunnerState, SpecFacts, allowance, patience_seconds
from gpumesh.scheduler.local_waits import PoolWaits


class PoolFeeding(PoolWaits):
    """See the module."""

    def _feed_all(self, actions: List[Any], now: float) -> None:
        if self._resuming:
            self._grant(actions, now)
        queue = self._queue
        if not queue or self._is_held or self._resuming:
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
        if runner.revoked or runner.interrupted or self._resuming:
            return
        if (self._counts or self._allowed < self.slots) and self._is_beyond(runner):
            return
        queue = self._queue
        if self._counts and self._has_depths:
            self._bring_forward()
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
        allowed = allowance(facts)
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
            runner.width = 1
        actions.append(Feed(runner.ident, spec, tasks))
        self._arm(runner, facts, now)

    def _is_beyond(self, runner: Runner) -> bool:
        """Whether the slots that may be in use are taken by other runners, those that have been at work for longer first."""
        others = 0
        for other in self._runners.values():
            if other is runner:
                if runner.state is RunnerState.BUSY:
                    break  # Those behind it are the ones to stop.
            elif other.state is RunnerState.BUSY:
                others += other.width
        return others >= self._allowed

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
        coming = sum(other.next_kind == facts.kind and other.state in COMING for other in self._runners.values())
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
        if len(idle) < facts.width or ((self._counts or self._allowed < self.slots) and self._is_too_wide(facts.width)):
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
        runner.width = facts.width
        actions.append(Feed(runner.ident, task.spec, [(task.task_id, task.attempt)]))
        self._arm(runner, facts, now)

    def _arm(self, runner: Runner, facts: SpecFacts, now: float) -> None:
        """Set the time of the next look at a runner that has been fed."""
        due = now + (patience_seconds(facts) if len(runner.fed) > 1 else facts.timeout)
        if facts.timeout:
            due = min(due, now + facts.timeout)
        elif len(runner.fed) == 1:
            return
        if not runner.check_at or due < runner.check_at:
            self._check_at(runner, due)
