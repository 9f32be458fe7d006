"""Where ready tasks go: who has room, who finishes first, and what is asked back. Changes nothing.

Asked for a place, there are three answers: Placed, BUSY (somebody can, later) and INFEASIBLE (nobody who is here ever can).
How many tasks of a requirement's GPUs fit on a worker at once belongs here, beside `Worker.width_of`, which counts its slots.
"""

from __future__ import annotations

import enum
import heapq
import math
from itertools import islice
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from gpumesh.config import (
    AHEAD_NEGLIGIBLE,
    AHEAD_ROUND_TRIPS,
    LOOK_AGAIN_FRACTION,
    LOOK_AGAIN_MOST_SECONDS,
    MAX_AHEAD_TASKS,
    RECALL_AFTER_SECONDS,
    UNKNOWN_AHEAD_TASKS,
)
from gpumesh.model.records import NamedTuple
from gpumesh.scheduler.horizon import may_take
from gpumesh.scheduler.idle import Idle
from gpumesh.scheduler.queues import Group
from gpumesh.scheduler.states import Spec, Worker

STEPS_PER_WORKER = (
    8  # A batch is dealt out in about so many steps for each worker: even to an eighth of a share, cheap for any size.
)
UNCAPPED = 1 << 62  # More than any count.
REFUSALS = 32  # Workers in a row by speed that the tail rule refuses: the slower ones it would refuse as well.
LARGE_MESH = 64  # Workers, all of whom are looked at for each batch of tasks.
IDLE_PER_TASK = 4  # Idle workers that are looked at for each task in a larger one.
REFILL_FRACTION = 1 / AHEAD_ROUND_TRIPS  # Of the allowance: what is left lasts for the round trip that a refill takes.


class Nowhere(enum.Enum):
    """Why there is no place."""

    BUSY = "busy"
    HELD = "held"  # Who has room would end it too late; the others will get to it sooner.
    INFEASIBLE = "infeasible"


BUSY = Nowhere.BUSY
HELD = Nowhere.HELD
INFEASIBLE = Nowhere.INFEASIBLE


class Placed(NamedTuple):
    """So many tasks to each of these; `is_held`: somebody else had room, and was not allowed to use it."""

    shares: List[Tuple[Worker, int]]
    is_held: bool = False


Answer = Union[Placed, Nowhere]


def allowance(worker: Worker, spec: Spec, slots: int) -> int:
    """Tasks' worth of slots that should be at a worker's `slots`, running and waiting, if the next ones are of this spec.

    As many wait there as hide the round trip: `AHEAD_ROUND_TRIPS` times what the slots finish in one. A task that may start at
    most once never waits at a worker, where nobody could tell whether it had started when the worker is lost. None should be at a
    worker that still has to install what they need, or where too many tasks wait.
    """
    if worker.facts.installing and worker.is_installing(spec.group):
        return 0
    if worker.waits and worker.is_crowded(spec.group):
        return 0
    if spec.spec.retries == 0:
        return slots
    pace = _pace(worker, spec)
    if pace is None:
        return slots + UNKNOWN_AHEAD_TASKS
    if worker.round_trip < AHEAD_NEGLIGIBLE * pace:
        return slots
    return slots + min(MAX_AHEAD_TASKS, math.ceil(AHEAD_ROUND_TRIPS * worker.round_trip / pace) * slots)


def _pace(worker: Worker, spec: Spec) -> Optional[float]:
    """Seconds after which a slot comes free, by the longest of what is here and what is to come; None: not measured here."""
    if not spec.function.is_measured_on(worker.id):
        return None
    pace = worker.seconds(spec)
    for other in worker.specs:
        if other is not spec and other.group.depth >= spec.group.depth:  # What this one is inside of will wait soon.
            if not other.function.is_measured_on(worker.id):
                return None
            pace = max(pace, worker.seconds(other))
    return pace


def room(worker: Worker, group: Group, allowed: int, width: int) -> int:
    """Tasks of a group and width to send now, so that `allowed` slots' worth of its environment is at the worker.

    None as long as so much is there that a refill that leaves later still arrives in time: small refills make small messages.
    A wide task is sent to a worker with any free slot; the worker keeps its order, so the slots come free for it.
    """
    load = worker.load_of(group)
    if load >= worker.slots and load > allowed * REFILL_FRACTION:
        return 0
    return space(worker, group, allowed, width)


def space(worker: Worker, group: Group, allowed: int, width: int) -> int:
    """Tasks of a group and width until `allowed` slots' worth is at the worker; the last may need more than is free."""
    return -(-(allowed - worker.load_of(group)) // width)


def card_room(worker: Worker, group: Group, allowed: int) -> int:
    """Tasks to send now to a worker's cards: `allowed` for each lease of the group's need, of which one more may be opened."""
    need = group.need
    count = sum(
        allowed - load for lease, load in worker.leases.items() if lease.need == need and load < allowed and not lease.is_lent
    )
    if allowed and worker.cards is not None and worker.cards.can_open(need, group.depth):
        count += allowed
    return count


def place(group: Group, spec: Spec, ready: int, rivals: Sequence[Group], idle: Idle, now: float) -> Answer:
    """Deal out up to `ready` tasks of one spec, each to the worker with room where it is expected to end first.

    Where `rivals`, other groups with ready tasks, wait for the same worker, nothing is sent ahead; and when several clients wait
    in this group, one turn takes no more than its share of the room.
    """
    if not group.workers:
        return INFEASIBLE
    if len(group.workers) > LARGE_MESH and not group.need.needs_gpu:
        found = [worker for worker in islice(idle, LARGE_MESH + ready * IDLE_PER_TASK) if worker in group.workers]
        rooms, total, is_held = rooms_for(group, spec, found, rivals, now, refusals=REFUSALS)
        if total < ready and not is_held:
            rooms, total, is_held = rooms_for(group, spec, group.workers, rivals, now)
    else:
        rooms, total, is_held = rooms_for(group, spec, group.workers, rivals, now)
    if not rooms:
        return HELD if is_held else BUSY
    if len(group.lanes) > 1:
        ready = min(ready, max(1, total // len(group.lanes)))
    if ready >= total:
        return Placed(rooms, is_held)
    if len(rooms) == 1:
        return Placed([(rooms[0][0], ready)], is_held)
    return Placed(_deal(spec, ready, rooms, group, now), is_held)


def rooms_for(
    group: Group,
    spec: Spec,
    workers: Iterable[Worker],
    rivals: Sequence[Group],
    now: float,
    *,
    refusals: int = UNCAPPED,
    any_end: bool = False,
) -> Tuple[List[Tuple[Worker, int]], int, bool]:
    """Who of these has room for how many tasks, how many that is together, and whether somebody else must not use his.

    `workers` come the fastest first where `refusals` says after how many that must not, the rest need not be asked. With `any_end` none
    is refused: the tail rule is left to whoever asks.
    """
    rooms: List[Tuple[Worker, int]] = []
    total = 0
    is_held = False
    for worker in workers:
        width = group.workers[worker]
        slots = worker.slots if width else 1
        allowed = allowance(worker, spec, slots)
        if allowed > slots and rivals and any(worker in rival.workers and not worker.is_installing(rival) for rival in rivals):
            allowed = slots
        count = room(worker, group, allowed, width) if width else card_room(worker, group, allowed)
        if count <= 0:
            continue
        if not any_end and not may_take(worker, group, spec, now):
            is_held = True
            refusals -= 1
            if not refusals:
                break
            continue
        rooms.append((worker, count))
        total += count
    return rooms, total, is_held


def _deal(spec: Spec, ready: int, rooms: Sequence[Tuple[Worker, int]], group: Group, now: float) -> List[Tuple[Worker, int]]:
    """Fewer tasks than room: the next always goes where it would end first."""
    step = max(1, ready // (STEPS_PER_WORKER * len(rooms)))
    shares = [0] * len(rooms)
    heap: List[Tuple[float, float, int]] = []
    bids: List[Bid] = []
    for index, (worker, _) in enumerate(rooms):
        bid = Bid(worker, spec, group, now)
        bids.append(bid)
        heap.append((bid.ends(), -worker.facts.score, index))
    heapq.heapify(heap)
    while ready:
        _, tie, index = heap[0]
        left = rooms[index][1] - shares[index]
        count = min(step, left, ready)
        shares[index] += count
        ready -= count
        if left > count:
            bids[index].take(count)
            heapq.heapreplace(heap, (bids[index].ends(), tie, index))
        else:
            heapq.heappop(heap)
    return [(worker, share) for (worker, _), share in zip(rooms, shares) if share]


class Bid:
    """When one more task would end on a worker: lengths nobody has measured count as one unit of work each, queued or not."""

    __slots__ = ("slots", "load", "width", "work", "seconds")

    def __init__(self, worker: Worker, spec: Spec, group: Group, now: float) -> None:
        self.seconds = worker.seconds(spec)
        width = group.workers[worker]
        if width:
            self.slots = worker.slots
            self.load = worker.load
            self.width = width
            self.work = worker.busy_seconds(group, now) * worker.slots if worker.load else 0.0
        else:  # On cards, which are booked one by one: those that are here run already.
            self.slots = self.width = 1
            self.load = 0
            self.work = 0.0

    def ends(self) -> float:
        """Time from now."""
        if self.load + self.width <= self.slots:
            return self.seconds
        return max(self.seconds, (self.work + self.seconds * self.width) / self.slots)

    def take(self, count: int) -> None:
        """These are here too."""
        self.load += self.width * count
        self.work += self.seconds * self.width * count


def _work(worker: Worker) -> float:
    """Slot seconds of all that wants slots at a worker, as far as known."""
    return sum(count * worker.seconds(spec) for spec, count in worker.specs.items() if spec.function.is_known)


class Surplus(NamedTuple):
    """What to ask back from one worker: (task id, attempt); and when to look again, inf for not before something changes."""

    tasks: List[Tuple[int, int]]
    look_again: float


class Rescue:
    """The workers with free slots, and how much they can take over at once: what they do until the next look."""

    __slots__ = ("budget", "_workers", "_best", "_fetch")

    def __init__(self, workers: Iterable[Worker], fetch: Optional[Callable[[int, Worker], float]] = None) -> None:
        self._workers = list(workers)
        self._fetch = fetch  # Seconds until a task's inputs are at a worker; None: nowhere worth mentioning.
        self.budget = RECALL_AFTER_SECONDS * sum(worker.slots - worker.load for worker in self._workers)  # Slot seconds.
        self._best: Dict[Spec, Optional[float]] = {}

    def best_seconds(self, spec: Spec, now: float) -> Optional[float]:
        """Round trip and run time on the best of them; 0 if the length is unknown; inf if it would end it too late; None: none can."""
        if spec in self._best:
            return self._best[spec]
        best: Optional[float] = None
        group = spec.group
        for worker in self._workers:
            if group.workers.get(worker) and not worker.is_installing(group) and not worker.is_crowded(group):
                own = worker.seconds(spec) + worker.round_trip if spec.function.is_known else 0.0
                if (best is None or own < best) and may_take(worker, group, spec, now):
                    best = own
                elif best is None:
                    best = math.inf
        self._best[spec] = best
        return best

    def fetch_seconds(self, task_id: int, group: Group) -> float:
        """Until one of them has this task's inputs."""
        if self._fetch is None:
            return 0.0
        able = (worker for worker in islice(self._workers, LARGE_MESH) if worker in group.workers)
        return min((self._fetch(task_id, worker) for worker in able), default=0.0)

    def spend(self, worker: Worker, spec: Spec) -> None:
        """One of them takes over a task of this spec; a long or unknown one takes its slot until the next look."""
        is_known = spec.function.is_known
        self.budget -= min(RECALL_AFTER_SECONDS, worker.seconds(spec)) if is_known else RECALL_AFTER_SECONDS


def surplus(worker: Worker, idle: Rescue, now: float) -> Surplus:
    """Which of the tasks that wait at a worker should go back, because one of the `idle` would probably end them sooner.

    They must have waited for a while, and the longer they have, the longer they are expected to wait still: the task in front
    of them may be of a kind that was never measured, or far longer than its like. At most half of what waits is asked back.
    """
    waiting = worker.load - worker.slots
    limit = -(-waiting // 2)
    wait_seconds = _work(worker) / worker.slots
    tasks: List[Tuple[int, int]] = []
    look_again = math.inf
    for task_id in reversed(worker.assigned):
        batch = worker.assigned[task_id]
        if batch.lease is not None or batch.waiting >= 0:
            continue
        limit -= batch.width
        if limit < 0 and tasks:
            break
        waiting -= batch.width
        if waiting < 0:
            break  # From here on they may be running.
        if task_id in worker.recalled:
            continue
        if idle.budget <= 0:
            look_again = min(look_again, now + RECALL_AFTER_SECONDS)
            break
        own = idle.best_seconds(batch.spec, now)
        if own is None:
            continue
        if own == math.inf:  # As yet: what runs before it may go on for ever.
            waited = LOOK_AGAIN_FRACTION * (now - batch.assigned_at)
            look_again = min(look_again, now + min(LOOK_AGAIN_MOST_SECONDS, max(RECALL_AFTER_SECONDS, waited)))
            continue
        own += idle.fetch_seconds(task_id, batch.spec.group)
        due = batch.assigned_at + (RECALL_AFTER_SECONDS if own <= wait_seconds else max(RECALL_AFTER_SECONDS, own))
        if due <= now:
            tasks.append((task_id, batch.attempt))
            idle.spend(worker, batch.spec)
        else:
            look_again = min(look_again, due)
        if limit <= 0:
            break
    return Surplus(tasks, look_again)
