"""Where ready tasks go: who has room, who finishes first, and what is asked back. Changes nothing.

Asked for a place, there are three answers: Placed, BUSY (somebody can, later) and INFEASIBLE (nobody who is here ever can).
How many tasks of a requirement's GPUs fit on a worker at once belongs here, beside `Worker.width_of`, which counts its slots.
"""

from __future__ import annotations

import enum
import heapq
import math
from typing import Dict, Iterable, List, Optional, Sequence, Tuple, Union

from gpumesh.config import (
    AHEAD_NEGLIGIBLE,
    AHEAD_ROUND_TRIPS,
    MAX_AHEAD_TASKS,
    RECALL_AFTER_SECONDS,
    UNKNOWN_AHEAD_TASKS,
)
from gpumesh.model.records import NamedTuple
from gpumesh.scheduler.queues import Group
from gpumesh.scheduler.states import Spec, Worker
from gpumesh.scheduler.throughput import Function

STEPS_PER_WORKER = (
    8  # A batch is dealt out in about so many steps for each worker: even to an eighth of a share, cheap for any size.
)
REFILL_FRACTION = 1 / AHEAD_ROUND_TRIPS  # Of the allowance: what is left lasts for the round trip that a refill takes.


class Nowhere(enum.Enum):
    """Why there is no place."""

    BUSY = "busy"
    INFEASIBLE = "infeasible"


BUSY = Nowhere.BUSY
INFEASIBLE = Nowhere.INFEASIBLE


class Placed(NamedTuple):
    """So many tasks to each of these."""

    shares: List[Tuple[Worker, int]]


Answer = Union[Placed, Nowhere]


def allowance(worker: Worker, spec: Spec) -> int:
    """Slots' worth of tasks that should be at a worker, running and waiting, if the next ones are of this spec.

    As many wait there as hide the round trip: `AHEAD_ROUND_TRIPS` times what the slots finish in one. A task that may start at
    most once never waits at a worker, where nobody could tell whether it had started when the worker is lost. None should be at a
    worker that still has to install what they need.
    """
    if worker.facts.installing and worker.is_installing(spec.group):
        return 0
    slots = worker.slots
    if spec.spec.retries == 0:
        return slots
    pace = _pace(worker, spec.function)
    if pace is None:
        return slots + UNKNOWN_AHEAD_TASKS
    if worker.round_trip < AHEAD_NEGLIGIBLE * pace:
        return slots
    return slots + min(MAX_AHEAD_TASKS, math.ceil(AHEAD_ROUND_TRIPS * worker.round_trip / pace) * slots)


def _pace(worker: Worker, function: Function) -> Optional[float]:
    """Seconds after which a slot comes free, by the longest of what is here and what is to come; None: unknown."""
    pace = worker.seconds(function)
    for other in worker.functions:
        if pace is None:
            return None
        if other is not function:
            seconds = worker.seconds(other)
            pace = None if seconds is None else max(pace, seconds)
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


def place(group: Group, spec: Spec, ready: int, rivals: Sequence[Group]) -> Answer:
    """Deal out up to `ready` tasks of one spec, each to the worker with room where it is expected to end first.

    Where `rivals`, other groups with ready tasks, wait for the same worker, nothing is sent ahead; and when several clients wait
    in this group, one turn takes no more than its share of the room.
    """
    if not group.workers:
        return INFEASIBLE
    rooms: List[Tuple[Worker, int]] = []
    total = 0
    for worker, width in group.workers.items():
        allowed = allowance(worker, spec)
        if allowed and rivals and any(worker in rival.workers and not worker.is_installing(rival) for rival in rivals):
            allowed = worker.slots
        count = room(worker, group, allowed, width)
        if count > 0:
            rooms.append((worker, count))
            total += count
    if not rooms:
        return BUSY
    if len(group.lanes) > 1:
        ready = min(ready, max(1, total // len(group.lanes)))
    if ready >= total:
        return Placed(rooms)
    if len(rooms) == 1:
        return Placed([(rooms[0][0], ready)])
    return Placed(_deal(spec.function, ready, rooms, group))


def _deal(function: Function, ready: int, rooms: Sequence[Tuple[Worker, int]], group: Group) -> List[Tuple[Worker, int]]:
    """Fewer tasks than room: the next always goes where it would end first."""
    step = max(1, ready // (STEPS_PER_WORKER * len(rooms)))
    shares = [0] * len(rooms)
    heap: List[Tuple[float, float, int]] = []
    bids: List[_Bid] = []
    for index, (worker, _) in enumerate(rooms):
        bid = _Bid(worker, function, group.workers[worker])
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


class _Bid:
    """When one more task would end on a worker. Lengths nobody has measured count as 1 second each, queued or not."""

    __slots__ = ("slots", "load", "width", "work", "seconds", "is_known")

    def __init__(self, worker: Worker, function: Function, width: int) -> None:
        self.slots = worker.slots
        self.load = worker.load
        self.width = width
        seconds = worker.seconds(function)
        self.is_known = seconds is not None
        self.seconds = 1.0 if seconds is None else seconds
        self.work = _work(worker, self.seconds) if self.is_known else 0.0

    def ends(self) -> float:
        """Seconds from now; with an unknown length the depth of the queue, so that free slots come first."""
        if not self.is_known:
            return max(0.0, (self.load + self.width - self.slots) / self.slots)
        if self.load + self.width <= self.slots:
            return self.seconds
        return max(self.seconds, (self.work + self.seconds * self.width) / self.slots)

    def take(self, count: int) -> None:
        """These are here too."""
        self.load += self.width * count
        self.work += self.seconds * self.width * count


def _work(worker: Worker, unknown: float) -> float:
    """Slot seconds of all that is at a worker."""
    work = 0.0
    for function, count in worker.functions.items():
        seconds = worker.seconds(function)
        work += count * (unknown if seconds is None else seconds)
    return work


class Surplus(NamedTuple):
    """What to ask back from one worker: (task id, attempt); and when to look again, inf for not before something changes."""

    tasks: List[Tuple[int, int]]
    look_again: float


class Idle:
    """The workers with free slots, and how much they can take over at once: what they do until the next look."""

    __slots__ = ("budget", "_workers", "_best")

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers = list(workers)
        self.budget = RECALL_AFTER_SECONDS * sum(worker.slots - worker.load for worker in self._workers)  # Slot seconds.
        self._best: Dict[Spec, Optional[float]] = {}

    def best_seconds(self, spec: Spec) -> Optional[float]:
        """Round trip and run time on the best of them; 0 if the length is unknown; None if none of them can run it."""
        if spec in self._best:
            return self._best[spec]
        best: Optional[float] = None
        for worker in self._workers:
            if worker in spec.group.workers and not worker.is_installing(spec.group):
                seconds = worker.seconds(spec.function)
                own = 0.0 if seconds is None else seconds + worker.round_trip
                if best is None or own < best:
                    best = own
        self._best[spec] = best
        return best

    def spend(self, worker: Worker, spec: Spec) -> None:
        """One of them takes over a task of this spec; a long or unknown one takes its slot until the next look."""
        seconds = worker.seconds(spec.function)
        self.budget -= RECALL_AFTER_SECONDS if seconds is None else min(RECALL_AFTER_SECONDS, seconds)


def surplus(worker: Worker, idle: Idle, now: float) -> Surplus:
    """Which of the tasks that wait at a worker should go back, because one of the `idle` would probably end them sooner.

    They must have waited for a while, and the longer they have, the longer they are expected to wait still: the task in front
    of them may be of a kind that was never measured, or far longer than its like. At most half of what waits is asked back.
    """
    waiting = worker.load - worker.slots
    limit = -(-waiting // 2)
    wait_seconds = _work(worker, 0.0) / worker.slots
    tasks: List[Tuple[int, int]] = []
    look_again = math.inf
    for task_id in reversed(worker.assigned):
        batch = worker.assigned[task_id]
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
        own = idle.best_seconds(batch.spec)
        if own is None:
            continue
        due = batch.assigned_at + (RECALL_AFTER_SECONDS if own <= wait_seconds else max(RECALL_AFTER_SECONDS, own))
        if due <= now:
            tasks.append((task_id, batch.attempt))
            idle.spend(worker, batch.spec)
        else:
            look_again = min(look_again, due)
        if limit <= 0:
            break
    return Surplus(tasks, look_again)
