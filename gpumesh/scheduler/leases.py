"""The brain of one worker's card tasks: one process for each lease, beside the slots, one task at a time. Pure.

    arrived ──> its lease's pool ──fed──> results
                     │    ^
                     │    └─ released: what had to end on its cards is gone
                     └─ held while idle processes of other leases on the same cards are being ended

Which cards a task uses has been decided by the coordinator, whose books know nothing of idle processes. So there is one rule here, for what
an idle process may still hold: a context, and what its globals refer to as far as torch tells, or all that its tasks were given where it
does not. Where that, together with what the other leases on a card have, leaves no room for a newcomer's task, idle processes are
ended, those that have been idle for longest first, and the task is fed when they are gone. Two halves of a card thus keep their processes while they take
turns, and a task that is given the whole card has it to itself. A process that holds more than the next task of its lease is given is replaced, because
others may come beside that task.

Processes of actors are guests here: they have their share of their cards for life, and are let in when it is free.

Promises, beside those of `local` for each lease:

1. A process sees the cards of its lease and no others, from its start to its end.
2. A process that is busy, or that tasks wait for, is never ended for another lease's sake.
3. A task is not fed while a process that is being ended for it is still there.
4. What a process may hold beyond what its task is given is less than `EXCESS_BYTES`.
5. A task that waits for others keeps its process; what waits behind it goes back to the coordinator.
6. A process that has been idle for `LEASE_IDLE_SECONDS`, or whose cards the owner wants back, is ended; the next task starts another.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, FrozenSet, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from gpumesh.config import CANCEL_GRACE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import DeviceFacts, Requirement
from gpumesh.scheduler.cards import CONTEXT_BYTES
from gpumesh.scheduler.local import Health, Kill, Kind, LocalPool, Report, RunnerState, SpecFacts, StartRunner, Task

# A new process pays seconds for torch and its context; an idle one keeps half a gigabyte, or all its globals hold, from the card's owner.
LEASE_IDLE_SECONDS = 60.0
EXCESS_BYTES = CONTEXT_BYTES  # Differences below the size of a context are not worth a new one.
UNKNOWN_BYTES = 1 << 40  # Of a card whose memory nobody knows: only fractions of it are compared with each other.
_NOT_RUN = int(Status.NOT_RUN)

Key = Tuple[Tuple[str, ...], int]


class LeaseHealth(NamedTuple):
    """What keeps the leases of this worker from running tasks; "" when nothing does. Beside what `Health` says of the slots."""

    problem: str


class GuestAdmitted(NamedTuple):
    """There is room now for a process that is no lease's; see `Leases.admit`."""

    guest: int


class LeasePool(LocalPool):
    """One runner, started when there is a task for it."""

    failures_to_tell = 2  # One alone may be the victim of something else, and the slots may be well.

    def __init__(self, cards: Tuple[str, ...], threads: int, numbers: Iterator[int], specs: Dict[int, SpecFacts]) -> None:
        super().__init__(slots=1, threads=threads, numbers=numbers)
        self.cards = cards
        self._specs = specs  # All leases share them: what a function's tasks take is the same in each.
        self._has_environments = True  # Some spec may have one.

    @property
    def has_process(self) -> bool:
        """Whether there is one, or a start is due."""
        return bool(self._runners or self._starts)

    def on_arrived(self, spec: int, tasks: Iterable[Tuple[int, int, Any]], now: float) -> List[Any]:
        """Attempts arrived, to be run in this order."""
        actions = super().on_arrived(spec, tasks, now)
        self._turn_away(actions)
        if self._queue and not self.has_process:
            actions.append(self._new_runner(self._specs[self._queue[0].spec].kind, now))
        return actions

    def hold(self) -> None:
        """Feed nothing until `release`."""
        self._is_held = True

    def release(self, now: float) -> List[Any]:
        """What waits may be fed."""
        actions: List[Any] = []
        self._is_held = False
        self._feed_all(actions, now)
        return actions

    def idle_runner(self) -> int:
        """The runner that is up and has nothing to do; 0 if there is none."""
        if self._queue:
            return 0
        return next((ident for ident, runner in self._runners.items() if runner.state is RunnerState.READY), 0)

    def going(self) -> List[int]:
        """Runners that are being ended though nothing is wrong with them."""
        return [ident for ident, runner in self._runners.items() if runner.state is RunnerState.ENDING]

    def waiting_specs(self) -> Set[int]:
        """Of the tasks that wait for a runner."""
        return {task.spec for task in self._queue}

    def end_idle(self) -> List[Any]:
        """End the runner that has nothing to do, if there is one."""
        ident = self.idle_runner()
        if not ident:
            return []
        self._runners[ident].state = RunnerState.ENDING
        return [Kill(ident)]

    def _wants_runner(self) -> bool:
        return bool(self._queue)

    def _fill_up(self, kind: Kind, actions: List[Any], now: float) -> None:
        """Its task waits, and keeps its process and what that has on the cards; deeper tasks come under leases of their own."""
        self._turn_away(actions)

    def _put_back(self, back: List[Task], actions: List[Any]) -> None:
        super()._put_back(back, actions)
        self._turn_away(actions)

    def _turn_away(self, actions: List[Any]) -> None:
        """Nothing can run here before the task that waits has ended, and it may wait for just that."""
        if self._queue and any(runner.state is RunnerState.WAITING for runner in self._runners.values()):
            actions.append(Report([(task.task_id, task.attempt, _NOT_RUN, {}, 0.0) for task in self._queue]))
            self._queue.clear()

    def _new_runner(self, kind: Kind, now: float, deaths: int = 0) -> StartRunner:
        return super()._new_runner(kind, now, deaths)._replace(cards=self.cards)


class _Guest(LeasePool):
    """Stands for a process that is no lease's, and has its share of its cards as long as it lives."""

    @property
    def is_idle(self) -> bool:
        return False


class _Lease:
    __slots__ = ("key", "pool", "blockers", "given", "kept", "measured", "idle_since", "problem")

    def __init__(self, key: Key, pool: LeasePool) -> None:
        self.key = key
        self.pool = pool
        self.blockers: Set[int] = set()  # Runners that have to be gone before it is fed.
        self.given: Dict[str, int] = {}  # Card -> the most bytes that one of the tasks here has been given; empty when idle.
        self.kept: Dict[str, int] = {}  # Card -> bytes that its process may hold from tasks before these.
        self.measured = (
            -1
        )  # Bytes that the process says it holds since its last task, without its context; -1: it does not say.
        self.idle_since: Optional[float] = None  # None: it has something to do.
        self.problem = ""

    def has(self, card: str) -> int:
        """Bytes of a card that it may hold, or come to hold with the tasks that are here."""
        return max(self.given.get(card, 0), self.kept.get(card, 0))


class Leases:
    """All leases that have a process or tasks on this worker.

    Args:
        threads: Of each runner for numeric libraries, unless a task says otherwise.
        numbers: Of the runners; shared with the pool of the slots.
    """

    def __init__(self, *, threads: int, numbers: Iterator[int]) -> None:
        self._threads = threads
        self._numbers = numbers
        self._specs: Dict[int, SpecFacts] = {}
        self._needs: Dict[int, Requirement] = {}
        self._memory: Dict[str, int] = {}  # Card -> bytes that tasks can have.
        self._leases: Dict[Key, _Lease] = {}
        self._by_runner: Dict[int, _Lease] = {}
        self._guests: Dict[int, _Lease] = {}  # Processes of others.
        self._problem = ""
        self._draining = False
        self._all_withheld = False  # By the machine's owner ...
        self._withheld: Set[str] = set()  # ... who may also take back single cards.

    # --- reading

    def __contains__(self, runner: int) -> bool:
        """Whether a runner belongs to a lease."""
        return runner in self._by_runner

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return all(lease.pool.is_idle for lease in self._leases.values())

    def tasks(self) -> List[Tuple[Key, List[Task]]]:
        """Every attempt that has not been reported, by (cards, ordinal)."""
        return [(key, lease.pool.tasks()) for key, lease in self._leases.items()]

    def knows(self, spec: int) -> bool:
        """Whether `on_spec` has been told of it."""
        return spec in self._specs

    def cards_of(self, runner: int) -> Tuple[str, ...]:
        """The cards that a runner sees; () if it belongs to no lease."""
        lease = self._by_runner.get(runner)
        return lease.key[0] if lease is not None else ()

    def task_at(self, runner: int, number: int) -> int:
        """The task that has this number on a runner's page; 0 when there is none."""
        lease = self._by_runner.get(runner)
        return lease.pool.task_at(runner, number) if lease is not None else 0

    def next_deadline(self) -> Optional[float]:
        """When `on_time` is due."""
        due: Optional[float] = None
        for lease in self._leases.values():
            when = lease.pool.next_deadline()
            if when is not None and (due is None or when < due):
                due = when
            if lease.idle_since is not None and lease.pool.idle_runner():
                when = lease.idle_since + LEASE_IDLE_SECONDS
                if due is None or when < due:
                    due = when
        return due

    # --- events

    def on_devices(self, devices: Sequence[DeviceFacts]) -> None:
        """What the worker knows of its devices."""
        self._memory = {facts.key: max(0, facts.memory - facts.others) for facts in devices if facts.kind != "cpu"}

    def on_spec(self, number: int, *, timeout: float, kind: Kind, need: Requirement, depth: int = 0) -> None:
        """A spec's number is defined."""
        self._specs[number] = SpecFacts(timeout, 1, kind, depth)
        self._needs[number] = need

    def on_arrived(
        self, cards: Tuple[str, ...], ordinal: int, spec: int, tasks: Iterable[Tuple[int, int, Any]], now: float
    ) -> List[Any]:
        """Attempts arrived for a lease, to be run in this order."""
        if self._draining or self._is_withheld(cards):
            return [Report([(task[0], task[1], _NOT_RUN, {}, 0.0) for task in tasks])]
        key = (cards, ordinal)
        lease = self._leases.get(key)
        if lease is None:
            lease = self._leases[key] = _Lease(key, LeasePool(cards, self._threads, self._numbers, self._specs))
        actions: List[Any] = []
        self._note_given(lease, spec)
        if lease.pool.is_idle:
            if any(lease.kept.get(card, 0) > lease.given[card] + EXCESS_BYTES for card in cards):
                actions.extend(lease.pool.end_idle())
            self._make_room(lease, actions)
        actions.extend(lease.pool.on_arrived(spec, tasks, now))
        self._settle(lease, actions, now)
        return actions

    def on_ready(self, runner: int, now: float) -> List[Any]:
        """A process is up."""
        lease = self._by_runner[runner]
        actions = lease.pool.on_ready(runner, now)
        self._settle(lease, actions, now)
        return actions

    def on_kept(self, runner: int, nbytes: int) -> None:
        """What a runner says it holds of the fullest of its cards since its last task, without its context; -1: it cannot say."""
        self._by_runner[runner].measured = nbytes

    def on_results(self, runner: int, results: Any, now: float) -> List[Any]:
        """A runner sent results of the tasks at the head of its feed, in order."""
        lease = self._by_runner[runner]
        actions = lease.pool.on_results(runner, results, now)
        self._settle(lease, actions, now)
        return actions

    def on_progress(self, runner: int, started: int, finished: int, sent: int, since: float, now: float) -> List[Any]:
        """What the runner's page says; the answer to Inspect."""
        lease = self._by_runner[runner]
        actions = lease.pool.on_progress(runner, started, finished, sent, since, now)
        self._settle(lease, actions, now)
        return actions

    def on_waits(self, runner: int, task_id: int, now: float, *, waits: bool) -> List[Any]:
        """The task that runs in this process waits for others, or, after that, wants to go on."""
        lease = self._by_runner[runner]
        actions = lease.pool.on_waits(runner, task_id, now, waits=waits)
        self._settle(lease, actions, now)
        return actions

    def waiting(self) -> List[Task]:
        """Attempts that wait for other tasks."""
        return [task for lease in self._leases.values() for task in lease.pool.waiting()]

    def on_runner_down(self, runner: int, started: int, finished: int, details: Dict[str, Any], now: float) -> List[Any]:
        """A process is gone, and what it held of its cards is free."""
        lease = self._by_runner.pop(runner)
        lease.given, lease.kept, lease.measured = {}, {}, -1
        actions = lease.pool.on_runner_down(runner, started, finished, details, now)
        for spec in lease.pool.waiting_specs():
            self._note_given(lease, spec)
        self._settle(lease, actions, now)
        for other in list(self._leases.values()):
            if runner in other.blockers:
                other.blockers.discard(runner)
                if not other.blockers:
                    released = other.pool.release(now)
                    self._settle(other, released, now)
                    actions.extend(released)
        for guest, waiting in self._guests.items():
            if runner in waiting.blockers:
                waiting.blockers.discard(runner)
                if not waiting.blockers:
                    actions.append(GuestAdmitted(guest))
        return actions

    def admit(self, guest: int, cards: Tuple[str, ...], need: Requirement) -> List[Any]:
        """A process that is none of ours is to have its share of these cards until `leave`: idle processes make way.

        Args:
            guest: Its number.
            cards: That it sees.
            need: What it was given them for.

        Returns:
            What is to be done. It may use its cards when GuestAdmitted is told, here or later.
        """
        key = (cards, guest)
        lease = self._guests[guest] = _Lease(key, _Guest(cards, self._threads, self._numbers, self._specs))
        lease.given = {card: self._given(card, need) for card in cards}
        actions: List[Any] = []
        self._make_room(lease, actions)
        if not lease.blockers:
            actions.append(GuestAdmitted(guest))
        return actions

    def leave(self, guest: int) -> None:
        """It is gone."""
        self._guests.pop(guest, None)

    def on_recalled(self, tasks: Sequence[Tuple[int, int]], *, kill: bool, now: float, force: bool = False) -> List[Any]:
        """The coordinator wants these back; with `kill` also those that run, with `force` at once."""
        return self._each(lambda pool: pool.on_recalled(tasks, kill=kill, now=now, force=force), now)

    def retire(self, environment: int, now: float) -> List[Any]:
        """Nothing has run in this environment for long: its idle runners end."""
        return self._each(lambda pool: pool.retire(environment), now)

    def drain(self, now: float) -> List[Any]:
        """Take nothing new, give back what has not been fed; what runs goes on."""
        self._draining = True
        return self._each(lambda pool: pool.drain(), now)

    def hand_back(
        self, cards: Optional[FrozenSet[str]], *, running: bool, now: float, grace_seconds: float = CANCEL_GRACE_SECONDS
    ) -> List[Any]:
        """The owner wants these cards back (None: all): nothing new is taken there, what has not started is given back, idle processes end.

        Args:
            cards: Leases that have one of these are meant.
            running: End what runs too, as HANDED_BACK; else it goes on to its end.
            now: This moment.
            grace_seconds: From the interrupt to the kill.
        """
        if cards is None:
            self._all_withheld = True
        else:
            self._withheld |= cards
        return self._each(
            lambda pool: pool.hand_back(running=running, now=now, grace_seconds=grace_seconds),
            now,
            only=lambda lease: cards is None or not cards.isdisjoint(lease.key[0]),
        )

    def accept(self, cards: Optional[FrozenSet[str]]) -> None:
        """The owner lends these again. None: all, but cards that were asked back by name stay so until they are named here."""
        if cards is None:
            self._all_withheld = False
        else:
            self._withheld -= cards
        for lease in self._leases.values():
            if not self._is_withheld(lease.key[0]):
                lease.pool.accept()

    def on_time(self, now: float) -> List[Any]:
        """Starts that are due, runners to look at, processes that have been idle for long."""
        return self._each(lambda pool: pool.on_time(now), now)

    # --- acting

    def _each(
        self, act: Callable[[LeasePool], List[Any]], now: float, *, only: Optional[Callable[[_Lease], bool]] = None
    ) -> List[Any]:
        actions: List[Any] = []
        for lease in list(self._leases.values()):
            if only is None or only(lease):
                own = act(lease.pool)
                self._settle(lease, own, now)
                actions.extend(own)
        return actions

    def _settle(self, lease: _Lease, actions: List[Any], now: float) -> None:
        """After anything has happened to a lease: who owns new runners, whether it is idle, whether it is still needed."""
        for place, action in enumerate(actions):
            kind = type(action)
            if kind is StartRunner:
                self._by_runner[action.runner] = lease
            elif kind is Health:
                lease.problem = action.problem
                self._problem = next((other.problem for other in self._leases.values() if other.problem), "")
                actions[place] = LeaseHealth(self._problem)
        pool = lease.pool
        if not pool.is_idle:
            lease.idle_since = None
            return
        if lease.idle_since is None:
            lease.idle_since = now
        if lease.given:
            for card, given in lease.given.items():
                most = max(given, lease.kept.get(card, 0))
                lease.kept[card] = most if lease.measured < 0 else min(most, lease.measured + CONTEXT_BYTES)
            lease.given = {}
        if now >= lease.idle_since + LEASE_IDLE_SECONDS or self._is_withheld(lease.key[0]):
            actions.extend(pool.end_idle())
        if not pool.has_process and self._leases.get(lease.key) is lease:
            del self._leases[lease.key]

    def _is_withheld(self, cards: Tuple[str, ...]) -> bool:
        return self._all_withheld or not self._withheld.isdisjoint(cards)

    # --- room on the cards

    def _make_room(self, lease: _Lease, actions: List[Any]) -> None:
        """Before a task is fed into an idle lease: end idle processes of others that may hold what it is given."""
        for card in lease.key[0]:
            self._make_room_on(card, lease, actions)
        if lease.blockers:
            lease.pool.hold()

    def _make_room_on(self, card: str, lease: _Lease, actions: List[Any]) -> None:
        own = lease.given[card] if lease.pool.going() else lease.has(card)
        everyone = [*self._leases.values(), *self._guests.values()]
        others = [other for other in everyone if other is not lease and other.has(card)]
        room = self._memory_of(card) - own - sum(other.has(card) for other in others)
        others.sort(
            key=lambda other: (not other.pool.going(), other.idle_since or 0.0)
        )  # What ends anyway, then the longest idle.
        for other in others:
            if room >= 0:
                return
            if other.pool.is_idle:
                actions.extend(other.pool.end_idle())
            going = other.pool.going()
            if going:
                lease.blockers.update(going)
                room += other.has(card) - other.given.get(card, 0)

    def _note_given(self, lease: _Lease, spec: int) -> None:
        need = self._needs[spec]
        for card in lease.key[0]:
            lease.given[card] = max(self._given(card, need), lease.given.get(card, 0))

    def _given(self, card: str, need: Requirement) -> int:
        """Bytes of a card that the books give to a task of this need."""
        memory = self._memory_of(card)
        if need.gpus >= 1:
            return memory
        if need.gpu_memory:
            return min(memory, need.gpu_memory + CONTEXT_BYTES)
        return max(int(memory * need.gpus), min(memory, CONTEXT_BYTES))

    def _memory_of(self, card: str) -> int:
        return self._memory.get(card) or UNKNOWN_BYTES
