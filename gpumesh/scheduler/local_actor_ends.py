"""How actors of one worker end: gently, interrupted, killed; and what is told of it."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, Optional

from gpumesh.config import REVOKE_SETTLE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.local import Interrupt, Kill, Report
from gpumesh.scheduler.local_actor_parts import Drop, EndProcess, Resident, Result, Stage
from gpumesh.scheduler.local_actor_tables import ActorTables

_OK = int(Status.OK)
_RAISED = int(Status.RAISED)
_NOT_RUN = int(Status.NOT_RUN)
_CANCELLED = int(Status.CANCELLED)
_TIMED_OUT = int(Status.TIMED_OUT)
_CRASHED = int(Status.CRASHED)
_HANDED_BACK = int(Status.HANDED_BACK)

FOR_ACTOR = -1  # Reason of an interrupt that is not about the call: what ends is the actor.
_WHY = {
    _CANCELLED: "it was ended",
    _HANDED_BACK: "ended because its worker leaves, or the machine's owner wants it back",
    _NOT_RUN: "it had not begun",
}


class ActorEnds(ActorTables):
    """The ways out."""

    def _give_back(self, cards: Optional[FrozenSet[str]], *, running: bool, now: float, grace_seconds: float) -> List[Any]:
        actions: List[Any] = []
        for resident in list(self._residents.values()):
            if cards is not None and cards.isdisjoint(resident.cards):
                continue
            if resident.is_fed:
                self._end(resident, _HANDED_BACK, actions, now, is_gentle=not running, grace=grace_seconds)
            else:
                self._end(resident, _NOT_RUN, actions, now, is_forced=True)
        return actions

    def _end(
        self,
        resident: Resident,
        status: int,
        actions: List[Any],
        now: float,
        *,
        is_forced: bool = False,
        is_gentle: bool = False,
        grace: float = 0.0,
    ) -> None:
        """This life is to end.

        Args:
            is_forced: At once.
            is_gentle: What runs goes on to its end first.
            grace: Seconds from the interrupt, or from the last call, to the kill.
        """
        if resident.stage is not Stage.ENDING:
            is_gentle = is_gentle and resident.stage is Stage.ALIVE
            is_forced = is_forced or not resident.is_fed
            resident.is_gentle = is_gentle
            resident.stage = Stage.ENDING
            resident.end = status
            self._forget_waiting(resident, actions)
        elif status == _CANCELLED:
            resident.end = status
        if is_forced:
            self._kill(resident, actions)
            return
        if not (is_gentle and resident.is_side_by_side and resident.sent):
            self._ask_to_end(resident, actions)
        resident.grace = grace
        if not is_gentle:
            self._let_close(resident, now)
        self._check_by(resident, now + REVOKE_SETTLE_SECONDS)

    def _ask_to_end(self, resident: Resident, actions: List[Any]) -> None:
        if not resident.is_asked:
            resident.is_asked = True
            actions.append(EndProcess(resident.runner))

    def _let_close(self, resident: Resident, now: float) -> None:
        """Nothing is waited for any more but its end."""
        resident.is_gentle = False
        kill_at = now + resident.grace
        resident.kill_at = min(resident.kill_at, kill_at) if resident.kill_at else kill_at
        self._check_by(resident, resident.kill_at)

    def _look_at_ending(self, resident: Resident, running: int, actions: List[Any], due: List[float], now: float) -> None:
        """At an actor that was asked to end; `running`: the number of what executes, 0 if nothing does."""
        resident.is_gentle = False
        if not resident.kill_at:
            resident.kill_at = now + resident.grace
        if running and running != resident.interrupted:
            resident.interrupted, resident.reason = running, FOR_ACTOR
            actions.append(Interrupt(resident.runner, running))
        due.append(resident.kill_at)

    def _kill(self, resident: Resident, actions: List[Any]) -> None:
        if resident.stage is not Stage.ENDING:
            resident.stage = Stage.ENDING
            self._forget_waiting(resident, actions)
        if resident.runner:
            actions.append(Kill(resident.runner))
        else:
            self._gone(resident, [], {}, actions)

    def _gone(self, resident: Resident, report: List[Result], details: Dict[str, Any], actions: List[Any]) -> None:
        """The end of a life: no process is left of it."""
        if self._residents.get(resident.actor) is resident:
            del self._residents[resident.actor]
        resident.runner = 0
        if not resident.is_silent:
            report.append(self._last_word(resident, details))
        if report:
            actions.append(Report(report))
        actions.append(Drop([resident.key]))
        if resident.slots:
            self._take_slots(-resident.slots, actions)

    def _last_word(self, resident: Resident, details: Dict[str, Any]) -> Result:
        told = resident.result
        is_own = told is not None and told[2] in (_OK, _RAISED) and resident.end != _CANCELLED and not resident.interrupted
        if told is not None and (is_own or resident.end < 0):
            return told
        actor, attempt = resident.key
        if resident.end >= 0:
            return actor, attempt, resident.end, {"reason": _WHY[resident.end]}, 0.0
        if resident.interrupted and resident.reason in (_TIMED_OUT, _CANCELLED):
            what = "ran longer than its timeout" if resident.reason == _TIMED_OUT else "was cancelled"
            details = {**details, "reason": f"killed because a call that {what} did not end"}
        return actor, attempt, _CRASHED, dict(details), 0.0
