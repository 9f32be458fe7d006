"""The brain of one worker's actors: each has a process of its own, which is sent its calls in the order they came. Pure.

    created ──> process starts ──> constructor ──alive──> calls ──> ... ending ──> process gone: the creation's end is told
    called ───> mailbox (until it is alive, and the inputs of this call and of those before it are here) ──sent──> result

An actor's creation is a task that ends when the actor does. Numbers on the page of its process: the creation is 1, its calls are 2, 3, ...

Promises:

1. Calls are sent in the order in which they came, whenever their inputs come; `ACTOR_WINDOW_CALLS` at most without a result.
2. The end of a creation is told once, when its process is gone, after all that the process told of its calls; it ends the calls of which
   nothing was told, so nothing is told of those.
3. An actor that ends on purpose may close itself: it is killed `ACTOR_CLOSE_SECONDS` (or what its owner grants) after it was asked, or at
   once if that is the wish or it has not begun.
4. A call that is not wanted is dropped where it waits. One that executes is interrupted, and if that does not help within
   `CANCEL_GRACE_SECONDS`, its process is killed; where calls run side by side it is given up instead, as that would hit the others.
5. A time limit counts from the start of the call in the process. It ends the call like a wish.
6. Of an actor that the worker's owner wants gone, or whose worker leaves, the creation is HANDED_BACK, or NOT_RUN if it has not begun.
7. What is here when a coordinator is lost can be told to the next: `held`. Calls that cannot go on are forgotten with all those
   behind them, so that they come again in order.
"""

from __future__ import annotations

import heapq
from typing import Any, Dict, FrozenSet, Iterable, List, Optional, Sequence, Tuple

from gpumesh.config import ACTOR_CLOSE_SECONDS, CANCEL_GRACE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.local import Inspect, Kill, Report
from gpumesh.scheduler.local_actor_looks import ActorLooks
from gpumesh.scheduler.local_actor_parts import Alive, Call, CallFacts, CreationFacts, Drop, Key, Resident, Result, Stage

_NOT_RUN = int(Status.NOT_RUN)
_CANCELLED = int(Status.CANCELLED)
_TIMED_OUT = int(Status.TIMED_OUT)


class LocalActors(ActorLooks):
    """The tables of one worker's actors; see the module's promises.

    Args:
        numbers: Of their processes; shared with whoever has processes of the same worker.
    """

    # --- they come

    def on_creation_spec(self, number: int, facts: CreationFacts) -> None:
        """A spec's number is defined; its tasks are creations."""
        self._creations[number] = facts

    def on_call_spec(self, number: int, facts: CallFacts) -> None:
        """A spec's number is defined; its tasks are calls."""
        self._calls[number] = facts

    def on_created(
        self, spec: int, actor: int, attempt: int, *, cards: Tuple[str, ...], ordinal: int, is_here: bool, now: float
    ) -> List[Any]:
        """An actor is to live here. `is_here`: so are the inputs of its constructor; else `on_inputs` follows."""
        actions: List[Any] = []
        before = self._residents.get(actor)
        if before is not None and before.attempt == attempt:
            return actions
        if self._is_draining or self._keeps_from(cards):
            return [Report([(actor, attempt, _NOT_RUN, {}, 0.0)]), Drop([(actor, attempt)])]
        if before is not None:  # A coordinator that does not know of it has started it anew.
            self._end(before, _CANCELLED, actions, now, is_forced=True)
        resident = Resident(actor, attempt, spec, self._creations[spec], cards, ordinal, is_here)
        self._residents[actor] = resident
        if resident.slots:
            self._take_slots(resident.slots, actions)
        self._start(resident, actions, now)
        return actions

    def on_called(self, spec: int, tasks: Iterable[Tuple[int, int, Any]], *, is_here: bool, now: float) -> List[Any]:
        """Calls arrived, in order. `is_here`: so are all their inputs; else `on_inputs` follows for each."""
        actions: List[Any] = []
        resident = self._residents.get(self._calls[spec].actor)
        if resident is None or resident.stage is Stage.ENDING:
            return [Drop([(task[0], task[1]) for task in tasks])]
        mailbox = resident.mailbox
        for task in tasks:
            key = (task[0], task[1])
            mailbox[key] = Call(key[0], key[1], spec, is_here)
        if resident.stage is Stage.ALIVE:
            self._feed(resident, actions, now)
        return actions

    def on_inputs(self, spec: int, task_id: int, attempt: int, now: float) -> List[Any]:
        """The inputs of a creation or of a call are here."""
        actions: List[Any] = []
        key = (task_id, attempt)
        if spec in self._creations:
            resident = self._residents.get(task_id)
            if resident is None or resident.key != key:
                return [Drop([key])]
            resident.is_here = True
            self._construct(resident, actions)
            return actions
        resident = self._residents.get(self._calls[spec].actor)
        call = resident.mailbox.get(key) if resident is not None else None
        if resident is None or call is None:
            return [Drop([key])]
        call.is_here = True
        if resident.stage is Stage.ALIVE:
            self._feed(resident, actions, now)
        return actions

    def on_inputs_lost(self, spec: int, task_id: int, attempt: int, now: float) -> List[Any]:
        """The inputs of a creation or of a call will not come; its end has been told."""
        actions: List[Any] = []
        key = (task_id, attempt)
        if spec in self._creations:
            resident = self._residents.get(task_id)
            if resident is not None and resident.key == key:
                resident.is_silent = True
                self._end(resident, _NOT_RUN, actions, now, is_forced=True)
            return actions
        resident = self._residents.get(self._calls[spec].actor)
        if resident is not None and resident.mailbox.pop(key, None) is not None and resident.stage is Stage.ALIVE:
            self._feed(resident, actions, now)
        return actions

    # --- from their processes

    def on_ready(self, runner: int, now: float) -> List[Any]:
        """A process is up."""
        actions: List[Any] = []
        resident = self._by_runner.get(runner)
        if resident is not None and resident.stage is Stage.STARTING:
            resident.stage = Stage.UP
            resident.starts = 0
            resident.check_at = 0.0
            self._construct(resident, actions)
        return actions

    def on_admitted(self, runner: int, now: float) -> List[Any]:
        """There is room on its cards."""
        actions: List[Any] = []
        resident = self._by_runner.get(runner)
        if resident is not None:
            resident.is_admitted = True
            self._construct(resident, actions)
        return actions

    def on_alive(self, runner: int, now: float, *, is_side_by_side: bool) -> List[Any]:
        """The constructor has returned. `is_side_by_side`: the process runs several calls at a time."""
        actions: List[Any] = []
        resident = self._by_runner.get(runner)
        if resident is None or not resident.is_fed:
            return actions
        resident.is_side_by_side = is_side_by_side
        if resident.stage is Stage.UP:
            resident.stage = Stage.ALIVE
            actions.append(Alive(resident.actor, resident.attempt))
            self._feed(resident, actions, now)
        return actions

    def on_results(self, runner: int, results: Sequence[Result], now: float) -> List[Any]:
        """A process told ends of calls, in any order, or, at last, its own."""
        actions: List[Any] = []
        resident = self._by_runner.get(runner)
        if resident is None or not results:
            return actions
        told = results[-1] if results[-1][0] == resident.actor else None
        if told is not None:
            results = results[:-1]
        report: Sequence[Result] = results
        if resident.stage is Stage.ALIVE and not resident.reason:
            sent = resident.sent
            for result in results:
                sent.pop((result[0], result[1]), None)
        else:
            report = self._odd_results(resident, results, actions)
        if report:
            actions.append(Report(list(report)))
        if told is not None:
            resident.result = told
            if resident.stage is not Stage.ENDING:
                resident.stage = Stage.ENDING
                self._forget_waiting(resident, actions)
            actions.append(Kill(runner))
        elif resident.stage is Stage.ALIVE:
            if resident.mailbox:
                self._feed(resident, actions, now)
            if resident.sent:
                self._look_out(resident, now)
        elif resident.is_gentle and not resident.is_asked and not resident.sent:
            self._ask_to_end(resident, actions)
            self._let_close(resident, now)
        return actions

    def on_runner_down(self, runner: int, started: int, finished: int, details: Dict[str, Any], now: float) -> List[Any]:
        """A process is gone, and all it said has been heard."""
        actions: List[Any] = []
        resident = self._by_runner.pop(runner, None)
        if resident is None:
            return actions
        if resident.stage is Stage.STARTING and self._start_again(resident, details, actions, now):
            return actions
        report: List[Result] = []
        silent: List[Key] = []
        for key, call in resident.sent.items():
            if call.number == resident.interrupted and resident.reason in (_TIMED_OUT, _CANCELLED):
                why = {**details, **self._why(resident.reason, call)}
                report.append((call.task_id, call.attempt, resident.reason, why, 0.0))
            elif not call.is_told:
                silent.append(key)
        resident.sent.clear()
        self._forget_waiting(resident, actions)
        if silent:
            actions.append(Drop(silent))
        self._gone(resident, report, details, actions)
        return actions

    # --- wishes

    def on_recalled(self, tasks: Sequence[Key], *, kill: bool, now: float, force: bool = False) -> List[Any]:
        """The coordinator wants these back: creations and calls, and what is none of ours. With `kill` also those that run."""
        actions: List[Any] = []
        report: List[Result] = []
        for key in tasks:
            key = (key[0], key[1])
            resident = self._residents.get(key[0])
            if resident is not None:
                if resident.key == key and kill:
                    self._end(resident, _CANCELLED, actions, now, is_forced=force, grace=ACTOR_CLOSE_SECONDS)
                elif resident.key == key and not resident.is_fed:
                    self._end(resident, _NOT_RUN, actions, now, is_forced=True)
                continue
            for resident in self._residents.values():
                call = resident.mailbox.pop(key, None)
                if call is not None:
                    report.append((call.task_id, call.attempt, _CANCELLED if kill else _NOT_RUN, {}, 0.0))
                    if resident.stage is Stage.ALIVE:
                        self._feed(resident, actions, now)
                    break
                call = resident.sent.get(key)
                if call is not None:
                    if kill:
                        self._cancel(resident, call, actions, now, is_forced=force)
                    break
        if report:
            actions.append(Report(report))
        return actions

    def drain(self, now: float) -> List[Any]:
        """The worker leaves: take nothing new, end all actors; calls that they have been sent end first."""
        self._is_draining = True
        return self._give_back(None, running=False, now=now, grace_seconds=ACTOR_CLOSE_SECONDS)

    def hand_back(
        self, cards: Optional[FrozenSet[str]], *, running: bool, now: float, grace_seconds: float = CANCEL_GRACE_SECONDS
    ) -> List[Any]:
        """The machine's owner wants it back, or these cards (None: all of it): actors there end, and until `accept` there are no new ones.

        Args:
            cards: Those that have one of these are meant.
            running: Interrupt their calls; else those that they have been sent end first.
            now: This moment.
            grace_seconds: From the interrupt to the kill.
        """
        if cards is None:
            self._is_withheld = True
        else:
            self._withheld_cards |= cards
        grace = min(grace_seconds, ACTOR_CLOSE_SECONDS) if running else ACTOR_CLOSE_SECONDS
        return self._give_back(cards, running=running, now=now, grace_seconds=grace)

    def accept(self, cards: Optional[FrozenSet[str]]) -> None:
        """The owner lends these again; None: all, but for cards that were asked back by name. What is being ended still is."""
        if cards is None:
            self._is_withheld = False
        else:
            self._withheld_cards -= cards

    def abandon(self, lost: FrozenSet[Key], now: float) -> List[Any]:
        """The coordinator is lost, and with it the inputs of what is not here yet, and of these: they are forgotten, and what is behind them."""
        actions: List[Any] = []
        for resident in list(self._residents.values()):
            if not resident.is_fed and (not resident.is_here or resident.key in lost):
                resident.is_silent = True
                self._end(resident, _NOT_RUN, actions, now, is_forced=True)
                continue
            dropped: List[Key] = []
            for key, call in resident.mailbox.items():
                if dropped or not call.is_here or key in lost:
                    dropped.append(key)
            for key in dropped:
                del resident.mailbox[key]
            if dropped:
                actions.append(Drop(dropped))
        return actions

    def on_time(self, now: float) -> List[Any]:
        """Processes to start, to look at, to kill."""
        actions: List[Any] = []
        while self._starts and self._starts[0][0] <= now:
            when, actor = heapq.heappop(self._starts)
            resident = self._residents.get(actor)
            if resident is not None and resident.start_at == when:
                self._start(resident, actions, now)
        while self._timers and self._timers[0][0] <= now:
            when, runner = heapq.heappop(self._timers)
            resident = self._by_runner.get(runner)
            if resident is None or resident.check_at != when:
                continue
            resident.check_at = 0.0
            is_late = resident.stage is Stage.ENDING and not resident.is_gentle and 0 < resident.kill_at <= now
            if resident.stage is Stage.STARTING or is_late:
                actions.append(Kill(runner))
            elif resident.is_side_by_side:
                self._look_side_by_side(resident, actions, now)
            else:
                actions.append(Inspect(runner))
        return actions
