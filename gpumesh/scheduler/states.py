"""The entities of the mesh, their states, and the legal moves as tables. No decisions.

A task has no object of its own while it waits: 100,000 pending tasks are ids in a queue, and one entry each in the table of tasks.

    (submitted) ──> READY ──assign──> ASSIGNED ──ended──> (gone)
         │            ^ │                │ │ └──failed──> DELAYED ──later──> READY
         ├─> RECOVERING (after a restart) ──> READY, or ASSIGNED where it still is
         └─> WAITING ─┤ (its inputs exist)
                      │ └──cancelled, infeasible, client gone──> (gone)
                      └──given back, failed but may be retried──┘
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Dict, FrozenSet, List, Optional, Sequence, Tuple

from gpumesh.config import MAX_WAITING_PER_SLOT, ROUND_TRIP_CAP_SECONDS, ROUND_TRIP_FLOOR_SECONDS
from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.resources import CardReading, Requirement, WorkerFacts, lacks
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler.cards import Cards, Lease
from gpumesh.scheduler.throughput import Function

if TYPE_CHECKING:
    from gpumesh.scheduler.actor_states import Call
    from gpumesh.scheduler.queues import Group

ROUND_TRIP_RISE = 0.2  # Least weight of a sample above the estimate. One below replaces it: delay only adds to the wire's own.


class TaskState(enum.Enum):
    """Where a task is; a task that has ended is in no table any more."""

    WAITING = "waiting"
    READY = "ready"
    DELAYED = "delayed"  # Failed, to be tried again later.
    ASSIGNED = "assigned"
    RECOVERING = "recovering"
    GONE = "gone"


TASK_MOVES: Dict[Tuple[TaskState, TaskState], str] = {
    (TaskState.GONE, TaskState.READY): "submitted",
    (TaskState.GONE, TaskState.WAITING): "submitted with results of other tasks among its arguments",
    (TaskState.GONE, TaskState.RECOVERING): "submitted again after a restart, and perhaps still at a worker that is not back",
    (TaskState.RECOVERING, TaskState.READY): "no worker that was there before has it",
    (TaskState.RECOVERING, TaskState.ASSIGNED): "a worker is back and has it",
    (TaskState.RECOVERING, TaskState.GONE): "cancelled, may have run and must not run twice, or its client left",
    (TaskState.GONE, TaskState.ASSIGNED): "a worker is back and has it; its client is not back yet",
    (TaskState.WAITING, TaskState.READY): "the last of these results is there",
    (TaskState.WAITING, TaskState.GONE): "cancelled, one of these results will never be there, or its client left",
    (TaskState.READY, TaskState.ASSIGNED): "placed on a worker",
    (TaskState.READY, TaskState.GONE): "cancelled, infeasible for too long, or its client left",
    (TaskState.ASSIGNED, TaskState.DELAYED): "failed, and may be retried after a while",
    (TaskState.DELAYED, TaskState.READY): "the while is over",
    (TaskState.DELAYED, TaskState.GONE): "cancelled, or its client left",
    (TaskState.ASSIGNED, TaskState.READY): "given back without having started, or failed and may be retried",
    (TaskState.ASSIGNED, TaskState.GONE): "ended, or its client left",
}


class WorkerState(enum.Enum):
    """Whether a worker takes tasks."""

    HEALTHY = "healthy"
    PROBLEM = "problem"  # Its facts say what; it may get well.
    DRAINING = "draining"  # For good.
    AWAY = "away"  # Its connection is broken; it may be back in a moment.
    LOST = "lost"  # In no table any more.


WORKER_MOVES: Dict[Tuple[WorkerState, WorkerState], str] = {
    (WorkerState.LOST, WorkerState.HEALTHY): "connected",
    (WorkerState.LOST, WorkerState.PROBLEM): "connected, but cannot run tasks",
    (WorkerState.HEALTHY, WorkerState.PROBLEM): "told of a problem, or paused by its owner",
    (WorkerState.PROBLEM, WorkerState.HEALTHY): "the problem is solved",
    (WorkerState.HEALTHY, WorkerState.DRAINING): "leaves when it has finished",
    (WorkerState.PROBLEM, WorkerState.DRAINING): "leaves when it has finished",
    (WorkerState.HEALTHY, WorkerState.AWAY): "its connection broke",
    (WorkerState.PROBLEM, WorkerState.AWAY): "its connection broke",
    (WorkerState.DRAINING, WorkerState.AWAY): "its connection broke",
    (WorkerState.AWAY, WorkerState.HEALTHY): "back",
    (WorkerState.AWAY, WorkerState.PROBLEM): "back, but cannot run tasks",
    (WorkerState.AWAY, WorkerState.LOST): "not back in time",
    (WorkerState.HEALTHY, WorkerState.LOST): "said goodbye",
    (WorkerState.PROBLEM, WorkerState.LOST): "said goodbye",
    (WorkerState.DRAINING, WorkerState.LOST): "said goodbye",
}


class Client:
    """Someone who submits tasks and waits for their ends."""

    __slots__ = ("number", "name", "specs", "replaced", "confined", "pending", "noticed", "served", "holding", "is_known", "confirmed",
                 "away_until", "actors")  # fmt: skip

    def __init__(self, number: ClientNumber, name: str) -> None:
        self.number = number
        self.name = name
        self.specs: Dict[int, Spec] = {}  # By the client's own numbers.
        self.replaced: List[Spec] = []  # Their number means another by now; tasks of them may still be here.
        self.confined: Dict[
            Tuple[Spec, Tuple[object, ...]], Spec
        ] = {}  # Those that may not run everywhere: of which spec, and how.
        self.pending = 0  # Tasks of this client in the table of tasks.
        self.served = 0.0  # Slot seconds given to it, on the clock that all clients share: who has least is next.
        self.holding = 0.0  # The part of it charged for what workers have now.
        self.noticed: Dict[Requirement, None] = {}  # Told once that nobody can run this.
        self.is_known = (
            True  # To this coordinator from the start of its session; if not, some of its tasks may be at workers of before.
        )
        self.confirmed: Optional[Dict[int, None]] = None  # While it submits its tasks again: those that have come.
        self.away_until: Optional[float] = None  # It is not connected; given up then.
        self.actors = 0  # Of the pending: those that are actors' lives.


class Spec:
    """One TaskSpec of one client, with what the scheduler looks up for it."""

    __slots__ = ("client", "spec", "function", "group", "plain", "scale", "is_repeatable", "is_of_actor")

    def __init__(self, client: Client, spec: TaskSpec, function: Function, group: Group, plain: Optional[Spec] = None) -> None:
        self.client = client
        self.spec = spec
        self.function = function
        self.group = group
        self.plain = plain or self  # The same without a confinement.
        self.is_repeatable = spec.idempotent and spec.retries != 0  # Its tasks may run twice at the same time.
        self.is_of_actor = bool(spec.actor) or spec.plan is not None  # Creations and calls, which are in no queue.
        self.scale = spec.cost or 1.0  # Length of its tasks over that of others of the function, as the user sees it.


class Recovering:
    """Tasks of one spec that were submitted again after a restart, and that a worker which is not back yet may have."""

    __slots__ = ("spec", "ids")

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.ids: Dict[int, None] = {}


class Batch:
    """Tasks of one spec that went to a worker together, all at the same attempt: what an assigned task knows about itself."""

    __slots__ = ("spec", "attempt", "width", "assigned_at", "probe", "charge", "lease", "waiting", "waits_since", "waited")

    def __init__(
        self,
        spec: Spec,
        attempt: int,
        width: int,
        assigned_at: float,
        probe: int,
        charge: float = 0.0,
        lease: Optional[Lease] = None,
    ) -> None:
        self.spec = spec
        self.attempt = attempt
        self.width = width  # Slots that each of them takes; 0 under a lease of cards, and of an actor beside the slots.
        self.charge = charge  # Slot seconds that its client was charged for each of them, to be corrected by what they took.
        self.lease = lease
        self.assigned_at = assigned_at
        self.probe = (
            probe  # Id of the task that did not queue behind another, -1 if none: its time away measures the round trip.
        )
        self.waiting = -1  # While its one task waits for other tasks: slots that it takes when it goes on.
        self.waits_since = 0.0
        self.waited = 0.0  # Seconds for which it has done so before.

    def paused(self, now: float) -> Batch:
        """The same for one task of it that waits for others from now on, and takes no slot."""
        batch = Batch(self.spec, self.attempt, 0, self.assigned_at, -1, self.charge, self.lease)
        batch.waiting = self.width
        batch.waits_since = now
        batch.waited = self.waited
        return batch

    def resumed(self, now: float) -> Batch:
        """The same for when it goes on."""
        batch = Batch(self.spec, self.attempt, self.waiting, self.assigned_at, -1, self.charge, self.lease)
        batch.waited = self.waited + now - self.waits_since
        return batch


class Worker:
    """A connected worker."""

    __slots__ = ("id", "facts", "slots", "speed", "is_draining", "assigned", "orphans", "recalled", "load", "foreign", "specs",
                 "cards", "leases", "readings", "round_trip", "trips", "done", "crashed", "ended_at", "is_counted", "away_until", "away_reason", "arriving",
                 "actors", "calls", "waits")  # fmt: skip

    def __init__(self, ident: WorkerId, facts: WorkerFacts) -> None:
        self.id = ident
        self.facts = facts
        self.slots = facts.slots
        self.speed = facts.score / facts.slots  # Of one slot, by the score.
        self.is_draining = False
        self.assigned: Dict[int, Batch] = {}  # In the order of assignment, which is the order in which the worker starts them.
        self.orphans: Dict[
            Tuple[int, int], Batch
        ] = {}  # (task id, attempt) that nobody waits for any more: they hold their slots until reported.
        self.recalled: Dict[int, None] = {}  # Assigned and asked back for another worker; once per attempt.
        self.load = 0  # Slots wanted by all that is assigned here, orphans included; more than `slots` means a queue.
        self.foreign: Dict[Tuple[str, ...], int] = {}  # The part of `load` in environments, by packages; never 0.
        self.specs: Dict[Spec, int] = {}  # How many of those that want slots are of each; never 0.
        self.cards: Optional[Cards] = Cards(facts.devices, facts.memory) if has_cards(facts) else None
        self.leases: Dict[Lease, int] = {}  # Of its cards, and how many tasks are assigned to each; never 0.
        self.readings: Dict[str, CardReading] = {}  # The newest of each card.
        self.round_trip = ROUND_TRIP_FLOOR_SECONDS
        self.trips = 0  # How often it was measured.
        self.done = 0  # Tasks delivered from here.
        self.crashed = 0  # Attempts that have ended their process here.
        self.ended_at = 0.0  # When results came from here last.
        self.is_counted = False  # Among the healthy ones that clients are told of.
        self.away_until: Optional[float] = None  # It is not connected; given up then.
        self.away_reason = ""
        self.arriving: FrozenSet[int] = frozenset()  # Tasks whose results' values were on their way when it went away.
        self.waits: Dict[int, int] = {}  # How many tasks here wait for others, by depth; never 0.
        self.actors: Dict[int, Batch] = {}  # Lives of actors here, by actor.
        self.calls: Dict[int, Call] = {}  # Calls that were sent here and have not ended, in that order.

    def change(self, facts: WorkerFacts) -> None:
        """It has told new facts."""
        self.facts = facts
        self.slots = facts.slots
        self.speed = facts.score / facts.slots
        if self.cards is not None:
            self.cards.update(facts.devices)
        elif has_cards(facts):
            self.cards = Cards(facts.devices, facts.memory)

    @property
    def state(self) -> WorkerState:
        """Whether it takes tasks."""
        if self.away_until is not None:
            return WorkerState.AWAY
        if self.is_draining:
            return WorkerState.DRAINING
        return WorkerState.PROBLEM if self.facts.problem else WorkerState.HEALTHY

    def width_of(self, need: Requirement) -> Optional[int]:
        """Slots that a task with this requirement takes here, 0 if it runs on cards; None: it can never run here."""
        if lacks(self.facts, need):
            return None
        if need.needs_gpu:
            return 0 if self.cards is not None and self.cards.capacity(need) else None
        if not need.cores:
            return 1
        return min(self.slots, max(1, math.ceil(need.cores * self.slots / self.facts.cores)))

    def servers(self, group: Group) -> int:
        """Tasks of this group that can run here at once."""
        width = group.workers[self]
        if width:
            return max(1, self.slots // width)
        return self.cards.capacity(group.need) if self.cards is not None else 0

    def has_room(self, group: Group) -> bool:
        """Whether one more task of this group would start here at once."""
        if self.waits and self.is_crowded(group):
            return False
        if group.workers[self]:
            return self.load < self.slots
        return self.cards is not None and self.cards.can_open(group.need, group.depth)

    def is_crowded(self, group: Group) -> bool:
        """Whether so many tasks wait here that only what is deeper than all of them may begin.

        Each keeps a process. What they wait for is deeper than they are, and the deepest of all on the mesh wait for what may begin everywhere:
        so nobody waits for ever.
        """
        waits = self.waits
        return bool(waits) and group.depth <= max(waits) and sum(waits.values()) >= MAX_WAITING_PER_SLOT * self.slots

    def is_blocked(self, group: Group) -> bool:
        """Whether other programs have the cards that this group's tasks need: nothing that ends here makes room, nobody knows when."""
        has_leases = self.leases or any(batch.lease is not None for batch in self.actors.values())
        return not group.workers[self] and not has_leases and not self.has_room(group)

    def load_of(self, group: Group) -> int:
        """Slots wanted here by tasks of this group's environment.

        A process of one environment runs no task of another, and takes long to make way: where several are in use, a worker has
        some tasks of each to choose from.
        """
        if group.packages:
            return self.foreign.get(group.packages, 0)
        return self.load - sum(self.foreign.values()) if self.foreign else self.load

    def is_short_of(self, group: Group, ready: Sequence[Group]) -> bool:
        """Whether one more of those who wait here should come now, so that the next tasks inside are there before the last of these end."""
        if self.is_installing(group) or sum(other.count for other in ready if other.depth > group.depth) > 2 * self.slots:
            return False
        if group.depth not in self.waits or sum(self.waits.values()) >= 2 * self.slots or self.load >= 4 * self.slots:
            return False
        return all(spec.group.depth != group.depth for spec in self.specs)

    def is_installing(self, group: Group) -> bool:
        """Whether this group's tasks must wait until their packages are installed here."""
        return bool(group.packages) and group.packages in self.facts.installing

    # --- speed

    def prior(self, need: Requirement) -> float:
        """Speed of one task here, by score."""
        if need.needs_gpu and self.cards is not None:
            return self.cards.score(need) or self.speed
        return self.speed

    def seconds(self, spec: Spec) -> float:
        """Expected run time of a task of this spec here; in no particular unit while its function is not known."""
        seconds = spec.function.measured_on(self.id)
        if seconds is None:
            seconds = spec.function.seconds_on(self.id, self.prior(spec.group.need))
        return spec.scale * seconds

    def remaining(self, batch: Batch, now: float) -> float:
        """Seconds until a running task of this batch ends: the rest of the mean, or as long again as it has run."""
        seconds = self.seconds(batch.spec)
        if not batch.spec.function.is_known:
            return seconds
        ran = self.ran(batch, now)
        return max(seconds - ran, ran)

    def ran(self, batch: Batch, now: float) -> float:
        """Seconds since a running task of this batch was started, as far as can be told from here."""
        return now - (max(batch.assigned_at, self.ended_at) if self.slots == 1 and batch.lease is None else batch.assigned_at)

    def running(self) -> List[Tuple[int, Batch]]:
        """What may be executing: the first in order of assignment, as many as the slots can hold, and the first of each lease."""
        free = self.slots - sum(batch.width for batch in self.orphans.values())
        if self.actors:
            free -= sum(batch.width for batch in self.actors.values())
        if not self.leases and free <= 0 and not self.waits:
            return []
        found: List[Tuple[int, Batch]] = []
        used: Dict[Lease, None] = {}
        for task_id, batch in self.assigned.items():
            if batch.waiting > 0:
                found.append((task_id, batch))
            elif batch.lease is not None:
                if batch.lease not in used:
                    used[batch.lease] = None
                    found.append((task_id, batch))
            elif free > 0:
                free -= batch.width
                found.append((task_id, batch))
            elif not self.leases and not self.waits:
                break
        return found

    def executing(self) -> List[int]:
        """Ids of what may be executing."""
        return [task_id for task_id, _ in self.running()]

    def free_in(self, group: Group, now: float, count: int) -> List[float]:
        """In how many seconds each of `count` servers for this group is free."""
        is_leased = not group.workers[self]
        free: List[float] = []
        queued = 0.0
        taken = 0
        running = dict(self.running())
        for task_id, batch in self.assigned.items():
            if (batch.lease is not None) is not is_leased or batch.waiting > 0:
                continue
            taken += 1
            if task_id in running:
                if len(free) < count:
                    free.append(self.remaining(batch, now))
            elif taken <= 4 * count:
                queued += self.seconds(batch.spec)
            else:
                queued *= len(self.assigned) / taken  # The rest is like those.
                break
        free.extend([0.0] * (count - len(free)))
        if queued:
            free = [seconds + queued / count for seconds in free]
        return free

    def busy_seconds(self, group: Group, now: float) -> float:
        """The same for all its servers on average."""
        count = min(self.servers(group), 8)
        return sum(self.free_in(group, now, count)) / count if self.assigned else 0.0

    # --- what is here

    def add(self, batch: Batch, count: int) -> None:
        """`count` tasks of a batch are here now."""
        if batch.spec.is_of_actor:
            self.load += batch.width  # Its lease is its own: no task is sent there.
            return
        if batch.waiting >= 0:
            self._count_wait(batch, count)
        if batch.lease is not None:
            self.leases[batch.lease] = self.leases.get(batch.lease, 0) + count
            return
        if batch.waiting >= 0:
            return
        self.load += batch.width * count
        packages = batch.spec.group.packages
        if packages:
            self.foreign[packages] = self.foreign.get(packages, 0) + batch.width * count
        spec = batch.spec
        self.specs[spec] = self.specs.get(spec, 0) + count

    def remove(self, batch: Batch, count: int) -> None:
        """`count` tasks of a batch are no longer here."""
        if batch.spec.is_of_actor:
            self.load -= batch.width
            if batch.lease is not None and self.cards is not None:
                self.cards.close(batch.lease)
            return
        if batch.waiting >= 0:
            self._count_wait(batch, -count)
        if batch.lease is not None:
            left = self.leases[batch.lease] - count
            if left:
                self.leases[batch.lease] = left
            else:
                del self.leases[batch.lease]
                if self.cards is not None:
                    self.cards.close(batch.lease)
            return
        if batch.waiting >= 0:
            return
        self.load -= batch.width * count
        packages = batch.spec.group.packages
        if packages:
            self.foreign[packages] -= batch.width * count
            if not self.foreign[packages]:
                del self.foreign[packages]
        spec = batch.spec
        left = self.specs[spec] - count
        if left:
            self.specs[spec] = left
        else:
            del self.specs[spec]

    def _count_wait(self, batch: Batch, count: int) -> None:
        """Tasks wait for others, or no longer: the cards of such a one are lent to deeper tasks."""
        depth = batch.spec.spec.depth
        left = self.waits[depth] = self.waits.get(depth, 0) + count
        if not left:
            del self.waits[depth]
        if batch.lease is not None and self.cards is not None:
            if count > 0:
                self.cards.lend(batch.lease, depth)
            else:
                self.cards.take_back(batch.lease)

    def observe_round_trip(self, seconds: float) -> None:
        """A task that did not queue was away for its run time and this much more."""
        sample = min(max(seconds, ROUND_TRIP_FLOOR_SECONDS), ROUND_TRIP_CAP_SECONDS)
        self.trips += 1
        rise = sample - self.round_trip
        self.round_trip += rise * max(ROUND_TRIP_RISE, 1 / (1 + self.trips)) if rise > 0 else rise


def has_cards(facts: WorkerFacts) -> bool:
    """Whether it has devices that are booked one by one."""
    return any(device.kind != "cpu" for device in facts.devices)
