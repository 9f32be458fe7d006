"""The tables of one worker's actors: what there is, how processes are started and calls are sent. What ends them is elsewhere."""

from __future__ import annotations

import heapq
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from gpumesh.config import ACTOR_WINDOW_CALLS, RUNNER_RESTART_DELAYS_SECONDS, RUNNER_START_SECONDS
from gpumesh.scheduler.local import ENVIRONMENT_START_TRIES, OWN_ENVIRONMENT, FailEnvironment, Feed, StartRunner
from gpumesh.scheduler.local_actor_parts import CallFacts, CreationFacts, Drop, Key, Resident, SlotsTaken, Stage
from gpumesh.scheduler.local_looks import LATE_RESULT_SECONDS

START_TRIES = 3  # Of processes of one actor in a row; what keeps them from coming up may pass.


class ActorTables:
    """What LocalActors knows, and the ways in.

    Args:
        numbers: Of the processes.
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

    # --- ways in

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

    def _forget_waiting(self, resident: Resident, actions: List[Any]) -> None:
        if resident.mailbox:
            actions.append(Drop(list(resident.mailbox)))
            resident.mailbox.clear()
