"""A runner is looked at: tasks that are to end, or have run too long, and tasks that are stuck behind another."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from gpumesh.config import CANCEL_GRACE_SECONDS, FEED_STUCK_SECONDS, RESULT_FLUSH_SECONDS, REVOKE_SETTLE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.local_parts import (
    AskResults,
    Interrupt,
    Kill,
    Report,
    Revoke,
    Runner,
    RunnerState,
    Task,
    patience_seconds,
)
from gpumesh.scheduler.local_tables import PoolTables

_NOT_RUN = int(Status.NOT_RUN)
_CANCELLED = int(Status.CANCELLED)
_TIMED_OUT = int(Status.TIMED_OUT)
_HANDED_BACK = int(Status.HANDED_BACK)

LATE_RESULT_SECONDS = 4 * RESULT_FLUSH_SECONDS  # A finished result that has not come by then is asked for.


class PoolLooks(PoolTables):
    """See the module."""

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
            patience = patience_seconds(self._specs[head.spec]) if head is not None else FEED_STUCK_SECONDS
            if (
                ran >= patience
                or runner.interrupted
                or self._withheld
                or ((self._resuming or self._has_idle_runner()) and self._is_worth_taking(runner))
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
            if self._has_depths:
                self._sort()
        return report

    def _why(self, status: int, task: Task) -> Dict[str, Any]:
        if status == _TIMED_OUT:
            limit = self._specs[task.spec].timeout
            return {"reason": f"it ran longer than its timeout of {limit:g} s", "seconds": limit}
        if status == _HANDED_BACK:
            return {"reason": "ended because the machine's owner wants it back"}
        return {"reason": "cancelled while it ran"}

    def _look_at_hoarders(self, now: float) -> None:
        """A runner is idle and nothing waits: what waits behind a longer task elsewhere may come here."""
        for other in self._runners.values():
            if other.state is RunnerState.BUSY and len(other.fed) > 1 and self._is_worth_taking(other):
                self._check_at(other, now)
