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
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from gpumesh.config import (
    ACTOR_CLOSE_SECONDS,
    ACTOR_WINDOW_CALLS,
    CANCEL_GRACE_SECONDS,
    REVOKE_SETTLE_SECONDS,
    RUNNER_RESTART_DELAYS_SECONDS,
    RUNNER_START_SECONDS,
)
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.local import (
    ENVIRONMENT_START_TRIES,
    OWN_ENVIRONMENT,
    AskResults,
    FailEnvironment,
    Feed,
    Inspect,
    Interrupt,
    Kill,
    Report,
    StartRunner,
)
from gpumesh.scheduler.local_actor_parts import (
    Alive,
    Call,
    CallFacts,
    CancelSent,
    CreationFacts,
    Drop,
    EndProcess,
    Key,
    Resident,
    Result,
    SlotsTaken,
    Stage,
)
from gpumesh.scheduler.local_looks import LATE_RESULT_SECONDS

_OK = int(Status.OK)
_RAISED = int(Status.RAISED)
_NOT_RUN = int(Status.NOT_RUN)
_CANCELLED = int(Status.CANCELLED)
_TIMED_OUT = int(Status.TIMED_OUT)
_CRASHED = int(Status.CRASHED)
_HANDED_BACK = int(Status.HANDED_BACK)

START_TRIES = 3  # Of processes of one actor in a row; what keeps them from coming up may pass.
LOOK_SECONDS = 1.0  # Between two looks at an actor that ends when its last call does.
BLOCKED_SECONDS = 0.1  # A process that has not told the end of a call by then may be blocked, and is interrupted.
_FOR_ACTOR = -1  # Reason of an interrupt that is not about the call: what ends is the actor.
_WHY = {
    _CANCELLED: "it was ended",
    _HANDED_BACK: "ended because its worker leaves, or the machine's owner wants it back",
    _NOT_RUN: "it had not begun",
}


class LocalActors:
    """The tables of one worker's actors; see the module's promises.

    Args:
        numbers: Of their processes; shared with whoever has processes of the same worker.
    """

    def __init__(self, *, numbers: Iterator[int]) -> None:
        self.slots_taken = 0  # That belong to actors.
        self._numbers = numbers
        self._creations: Dict[int, CreationFacts] = {}
        self._calls: Dict[int, CallFacts] = {}
        self._residents: Dict[int, Resident] = {}  # Actor -> its life here, the newest.
        self._by_runner: Dict[int, Resident] = {}
        self._timers: List[Tuple[float, int]] = []  # Heap of (check_at, runner), lazily cleaned.
        self._starts: List[Tuple[float, int]] = []  # Heap of (start_at, actor), likewise.
        self._is_draining = False
        self._is_withheld = False  # All of it, by the machine's owner; ...
        self._withheld_cards: Set[str] = set()  # ... or these cards.

    # --- reading

    def __contains__(self, runner: int) -> bool:
        """Whether a process is that of an actor."""
        return runner in self._by_runner

    @property
    def is_idle(self) -> bool:
        """Whether no actor is here."""
        return not self._residents and not self._by_runner

    def held(self) -> List[Tuple[int, Tuple[str, ...], int, List[Key]]]:
        """Every attempt that is here: (spec, cards, ordinal, [(task id, attempt), ...]); each creation before its calls, in order."""
        found: List[Tuple[int, Tuple[str, ...], int, List[Key]]] = []
        for resident in self._residents.values():
            if resident.is_silent:
                continue
            found.append((resident.spec, resident.cards, resident.ordinal, [resident.key]))
            for call in [*resident.sent.values(), *resident.mailbox.values()]:
                if call.is_told:
                    continue
                if found[-1][0] != call.spec:
                    found.append((call.spec, (), 0, []))
                found[-1][3].append((call.task_id, call.attempt))
        return found

    def alive(self) -> List[Key]:
        """(actor, attempt) of those that have been constructed, and are not ending."""
        return [resident.key for resident in self._residents.values() if resident.stage is Stage.ALIVE]

    def spec_of(self, runner: int) -> int:
        """Of the creation of the actor whose process this is."""
        return self._by_runner[runner].spec

    def task_at(self, runner: int, number: int) -> int:
        """The task that has this number on a process's page: what is written while no call runs is the actor's."""
        resident = self._by_runner.get(runner)
        if resident is None:
            return 0
        call = None if resident.is_side_by_side else resident.running(number)
        return call.task_id if call is not None else resident.actor

    def next_deadline(self) -> Optional[float]:
        """When `on_time` is due."""
        due: Optional[float] = None
        while self._timers:
            when, runner = self._timers[0]
            resident = self._by_runner.get(runner)
            if resident is not None and resident.check_at == when:
                due = when
                break
            heapq.heappop(self._timers)
        while self._starts:
            when, actor = self._starts[0]
            resident = self._residents.get(actor)
            if resident is not None and resident.start_at == when:
                return when if due is None or when < due else due
            heapq.heappop(self._starts)
        return due

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

    # --- beginning

    def _keeps_from(self, cards: Tuple[str, ...]) -> bool:
        return self._is_withheld or not self._withheld_cards.isdisjoint(cards)

    def _take_slots(self, slots: int, actions: List[Any]) -> None:
        self.slots_taken += slots
        actions.append(SlotsTaken(self.slots_taken))

    def _start(self, resident: Resident, actions: List[Any], now: float) -> None:
        resident.start_at = 0.0
        resident.runner = next(self._numbers)
        self._by_runner[resident.runner] = resident
        self._check_by(resident, now + RUNNER_START_SECONDS)
        actions.append(StartRunner(resident.runner, resident.kind.threads, resident.kind.environment, resident.cards))

    def _start_again(self, resident: Resident, details: Dict[str, Any], actions: List[Any], now: float) -> bool:
        """A process has not come up: whether another is to be started, or that was told."""
        resident.starts += 1
        resident.runner = 0
        environment = resident.kind.environment
        if resident.starts < (START_TRIES if environment == OWN_ENVIRONMENT else ENVIRONMENT_START_TRIES):
            resident.check_at = 0.0
            resident.start_at = now + RUNNER_RESTART_DELAYS_SECONDS[resident.starts]
            heapq.heappush(self._starts, (resident.start_at, resident.actor))
            return True
        if environment != OWN_ENVIRONMENT and not resident.is_silent:
            resident.is_silent = True
            actions.append(FailEnvironment(environment, [resident.key], dict(details)))
        return False

    def _construct(self, resident: Resident, actions: List[Any]) -> None:
        if resident.stage is Stage.UP and resident.is_here and resident.is_admitted and not resident.is_fed:
            resident.is_fed = True
            actions.append(Feed(resident.runner, resident.spec, [resident.key]))

    def _feed(self, resident: Resident, actions: List[Any], now: float) -> None:
        """Send the calls that are next, as far as they are here and the window has room."""
        mailbox, sent = resident.mailbox, resident.sent
        room = ACTOR_WINDOW_CALLS - len(sent)
        spec = -1
        tasks: List[Key] = []
        while mailbox and room > 0:
            key = next(iter(mailbox))
            call = mailbox[key]
            if not call.is_here:
                break
            del mailbox[key]
            if call.spec != spec:
                spec = call.spec
                tasks = []
                actions.append(Feed(resident.runner, spec, tasks))
                timeout = self._calls[spec].timeout
                if timeout and not resident.is_side_by_side:
                    self._check_by(resident, now + timeout)
            resident.last += 1
            call.number = resident.last
            sent[key] = call
            tasks.append(key)
            room -= 1
        if tasks:
            self._look_out(resident, now)

    def _look_out(self, resident: Resident, now: float) -> None:
        """Results wait in the process for company, and may be held up there behind a long call."""
        if len(resident.sent) > 1 and not resident.is_side_by_side:
            resident.since = now
            self._check_by(resident, now + 1.5 * LATE_RESULT_SECONDS)

    def _check_by(self, resident: Resident, when: float) -> None:
        if not resident.check_at or when < resident.check_at:
            resident.check_at = when
            heapq.heappush(self._timers, (when, resident.runner))

    # --- calls out of the straight line

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
                if resident.reason == _FOR_ACTOR:
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

    # --- ending

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
            resident.interrupted, resident.reason = running, _FOR_ACTOR
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

    def _forget_waiting(self, resident: Resident, actions: List[Any]) -> None:
        if resident.mailbox:
            actions.append(Drop(list(resident.mailbox)))
            resident.mailbox.clear()

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
