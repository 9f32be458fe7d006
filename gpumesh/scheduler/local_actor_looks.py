"""Looks at the processes of actors: time limits, calls that are not wanted, results that are held up, ends that take their time."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from gpumesh.config import CANCEL_GRACE_SECONDS, REVOKE_SETTLE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.local import AskResults, Interrupt, Report
from gpumesh.scheduler.local_actor_ends import FOR_ACTOR, ActorEnds
from gpumesh.scheduler.local_actor_parts import Call, CancelSent, Drop, Key, Resident, Result, Stage
from gpumesh.scheduler.local_looks import LATE_RESULT_SECONDS

_NOT_RUN = int(Status.NOT_RUN)
_CANCELLED = int(Status.CANCELLED)
_TIMED_OUT = int(Status.TIMED_OUT)

LOOK_SECONDS = 1.0  # Between two looks at an actor that ends when its last call does.
BLOCKED_SECONDS = 0.1  # A process that has not told the end of a call by then may be blocked, and is interrupted.


class ActorLooks(ActorEnds):
    """What a look at a page comes to, and results that are out of the straight line."""

    def on_progress(self, runner: int, started: int, finished: int, sent: int, since: float, now: float) -> List[Any]:
        """What the page of a process says; the answer to Inspect."""
        actions: List[Any] = []
        resident = self._by_runner.get(runner)
        if resident is None or resident.stage is Stage.STARTING:
            return actions
        is_running = started > finished
        ran = now - since if is_running else 0.0
        due: List[float] = []
        if resident.interrupted > finished:
            if resident.kill_at and now >= resident.kill_at:
                self._kill(resident, actions)
                return actions
            due.append(resident.kill_at)
        elif resident.stage is Stage.ENDING and not (resident.is_gentle and is_running):
            self._look_at_ending(resident, started if is_running else 0, actions, due, now)
        elif resident.interrupted:
            due.append(now + REVOKE_SETTLE_SECONDS)  # It has ended; its result is on the way.
        elif is_running:
            call = resident.running(started)
            if call is not None and not self._look_at_call(resident, call, since, actions, due, now):
                return actions
        if resident.is_gentle:
            due.append(now + LOOK_SECONDS)
        if resident.reason:
            self._tell_dropped(resident, started, actions, due, now)
        if finished > sent and (not is_running or ran >= LATE_RESULT_SECONDS):
            actions.append(AskResults(runner))
        elif len(resident.sent) > 1 and ran < LATE_RESULT_SECONDS:
            due.append(now + max(LATE_RESULT_SECONDS, (now - resident.since) / 2))  # Its result may be held up behind the next.
        limits = [self._calls[call.spec].timeout for call in resident.sent.values() if call.number > started]
        limits = [limit for limit in limits if limit]
        if limits:
            due.append(now + min(limits))
        due = [when for when in due if when]
        if due:
            self._check_by(resident, max(now + 0.001, min(due)))
        return actions

    def _cancel(self, resident: Resident, call: Call, actions: List[Any], now: float, *, is_forced: bool) -> None:
        """A call that was sent is not wanted any more."""
        if call.is_told or (resident.stage is Stage.ENDING and not resident.is_gentle):
            return
        resident.reason = resident.reason or _CANCELLED
        if call.cancelled_at is None:
            call.cancelled_at = now
            actions.append(CancelSent(resident.runner, [call.task_id], _CANCELLED))
        call.is_forced = call.is_forced or is_forced
        self._check_by(resident, now + (0.0 if call.number == resident.interrupted and is_forced else REVOKE_SETTLE_SECONDS))
        if is_forced and call.number == resident.interrupted:
            resident.kill_at = now

    def _look_at_call(
        self, resident: Resident, call: Call, since: float, actions: List[Any], due: List[float], now: float
    ) -> bool:
        """At the one that executes; False when its process is killed for it."""
        timeout = self._calls[call.spec].timeout
        if call.cancelled_at is not None:
            if call.is_forced:
                resident.interrupted, resident.reason = call.number, _CANCELLED
                self._kill(resident, actions)
                return False
            self._interrupt(resident, call.number, _CANCELLED, actions, due, now)
        elif timeout and now - since >= timeout:
            self._interrupt(resident, call.number, _TIMED_OUT, actions, due, now)
        elif timeout:
            due.append(since + timeout)
        return True

    def _tell_dropped(self, resident: Resident, started: int, actions: List[Any], due: List[float], now: float) -> None:
        """Cancelled calls that had not started when the process was sure to see that they are not to: they never will."""
        report: List[Result] = []
        for call in resident.sent.values():
            if call.cancelled_at is None or call.is_told or call.number <= started:
                continue
            if now < call.cancelled_at + REVOKE_SETTLE_SECONDS:
                due.append(call.cancelled_at + REVOKE_SETTLE_SECONDS)
            else:
                call.is_told = True
                report.append((call.task_id, call.attempt, _CANCELLED, {}, 0.0))
        if report:
            actions.append(Report(report))

    def _interrupt(
        self, resident: Resident, number: int, reason: int, actions: List[Any], due: List[float], now: float
    ) -> None:
        resident.interrupted, resident.reason = number, reason
        resident.kill_at = now + CANCEL_GRACE_SECONDS
        due.append(resident.kill_at)
        actions.append(Interrupt(resident.runner, number))

    def _look_side_by_side(self, resident: Resident, actions: List[Any], now: float) -> None:
        """At calls that were to end: those of which the process does not tell are given up."""
        report: List[Result] = []
        for call in resident.sent.values():
            if call.cancelled_at is None or call.is_told:
                continue
            if call.is_forced or now >= call.cancelled_at + CANCEL_GRACE_SECONDS:
                call.is_told = True
                report.append((call.task_id, call.attempt, _CANCELLED, {"reason": "cancelled; its code may still run"}, 0.0))
                continue
            if now >= call.cancelled_at + BLOCKED_SECONDS:
                actions.append(Interrupt(resident.runner, call.number))
                self._check_by(resident, call.cancelled_at + CANCEL_GRACE_SECONDS)
            else:
                self._check_by(resident, call.cancelled_at + BLOCKED_SECONDS)
        if report:
            actions.append(Report(report))
        if resident.kill_at:
            self._check_by(resident, resident.kill_at)

    def _odd_results(self, resident: Resident, results: Sequence[Result], actions: List[Any]) -> List[Result]:
        """Results while something is cancelled or interrupted, or the actor ends."""
        report: List[Result] = []
        silent: List[Key] = []
        is_ending = resident.stage is Stage.ENDING
        for result in results:
            task_id, attempt, status, payload, seconds = result
            call = resident.sent.pop((task_id, attempt), None)
            if call is None or call.is_told:
                continue
            if call.number == resident.interrupted:
                # Code that was interrupted may return or raise whatever it likes: half of a value must not pass for the whole.
                if not is_ending or resident.is_gentle:
                    resident.interrupted, resident.kill_at = 0, 0.0
                if resident.reason == FOR_ACTOR:
                    silent.append((task_id, attempt))
                    continue
                if resident.reason == _TIMED_OUT or status == _CANCELLED:
                    status, payload = resident.reason, self._why(resident.reason, call)
            elif status in (_NOT_RUN, _CANCELLED) and call.cancelled_at is None:
                silent.append((task_id, attempt))  # The actor's end is theirs.
                continue
            elif status == _NOT_RUN:
                status = _CANCELLED
            report.append((task_id, attempt, status, payload, seconds))
        if not is_ending and not resident.interrupted and not any(call.cancelled_at for call in resident.sent.values()):
            resident.reason = 0
        if silent:
            actions.append(Drop(silent))
        return report

    def _why(self, status: int, call: Call) -> Dict[str, Any]:
        if status == _TIMED_OUT:
            limit = self._calls[call.spec].timeout
            return {"reason": f"it ran longer than its timeout of {limit:g} s", "seconds": limit}
        return {"reason": "cancelled while it ran"}
