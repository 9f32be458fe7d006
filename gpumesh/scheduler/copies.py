"""Second copies of tasks that may run twice: which running attempt an idle worker should repeat. Changes nothing.

When nothing waits any more, the fastest idle worker repeats the attempt that is expected to end last, if it would end it sooner itself; the
first result counts. What it gains must be worth the work done twice. How long an attempt still takes is judged by how long it has run, not
by the mean alone: lengths have long tails, and speeds may be wrong.
"""

from __future__ import annotations

from typing import Callable, Dict, Iterable, List, Mapping, Optional

from gpumesh.config import (
    COPY_GAIN,
    COPY_MARGIN,
    LOOK_AGAIN_FRACTION,
    LOOK_AGAIN_GROWTH,
    LOOK_AGAIN_LEAST_SECONDS,
    LOOK_AGAIN_MOST_SECONDS,
    MAX_COPIES,
)
from gpumesh.model.records import NamedTuple
from gpumesh.scheduler.horizon import fastest_first
from gpumesh.scheduler.queues import Group
from gpumesh.scheduler.states import Spec, Worker

SCANNED_ATTEMPTS = 16  # Of those that are expected to end last: what an idle worker compares itself with.


Fetch = Callable[[int, Worker], float]
"""Seconds until a task's inputs are at a worker."""


def _at_hand(task_id: int, worker: Worker) -> float:
    return 0.0


class Copy(NamedTuple):
    """Start a further attempt at a task on this worker."""

    worker: Worker
    spec: Spec
    task_id: int


class _Candidate:
    __slots__ = ("task_id", "spec", "remaining", "places", "shown", "ran")

    def __init__(self, task_id: int, spec: Spec, remaining: float, worker: Worker) -> None:
        self.task_id = task_id
        self.spec = spec
        self.ran = 0.0  # Seconds, the longest of its attempts.
        self.shown = 0.0  # Its length is at least so many mean ones: so long it has run where the speed is known.
        self.remaining = remaining  # Until the first of its attempts is expected to end.
        self.places: List[Worker] = [worker]


class Copies(NamedTuple):
    """What to start now; when to look again, None for not before something changes; and how many attempts were looked at."""

    starts: List[Copy]
    look_again_seconds: Optional[float]
    seen: int


def choose_copies(
    group: Group, workers: Iterable[Worker], unwanted: Mapping[int, None], now: float, fetch: Fetch = _at_hand
) -> Copies:
    """The copies that idle workers should take of a group's running idempotent attempts.

    Args:
        group: Whose tasks.
        workers: All that are connected: those that are paused or leave run attempts as well.
        unwanted: Tasks being cancelled, and those of which an attempt has failed.
        now: The time.
        fetch: Seconds until a task's inputs are at a worker.
    """
    candidates: Dict[int, _Candidate] = {}
    idle: Dict[Worker, int] = {}
    waiting: List[int] = []
    seen = 0
    for worker in workers:
        if worker in group.workers and worker.has_room(group) and not worker.is_installing(group):
            idle[worker] = 1 if not group.workers[worker] else worker.slots - worker.load
        for task_id, batch in worker.running():
            seen += 1
            spec = batch.spec
            if spec.group is not group or not spec.is_repeatable or not spec.function.is_known or task_id in unwanted:
                continue
            if batch.waiting >= 0:
                waiting.append(task_id)
                continue
            remaining = worker.remaining(batch, now)
            found = candidates.get(task_id)
            if found is None:
                found = candidates[task_id] = _Candidate(task_id, spec, remaining, worker)
            else:
                found.remaining = min(found.remaining, remaining)
                found.places.append(worker)
            ran = worker.ran(batch, now)
            found.ran = max(found.ran, ran)
            if spec.function.is_measured_on(worker.id):
                found.shown = max(found.shown, ran / worker.seconds(spec))
    for task_id in waiting:
        candidates.pop(task_id, None)  # It waits for others, and another attempt would wait for the same.
    if not idle or not candidates:
        return Copies([], None, seen)
    order = sorted(candidates.values(), key=lambda candidate: -candidate.remaining)
    pace = 1.0 / sum(worker.servers(group) / worker.seconds(order[0].spec) for worker in group.workers)
    starts: List[Copy] = []
    soonest = LOOK_AGAIN_MOST_SECONDS
    first, *_ = asked = fastest_first(idle, order[0].spec)
    for worker in asked:
        for _ in range(idle[worker]):
            best = _best_for(worker, order, pace, fetch)
            if best is None:
                break
            best.places.append(worker)
            best.remaining = fetch(best.task_id, worker) + worker.seconds(best.spec) * max(1.0, best.shown)
            starts.append(Copy(worker, best.spec, best.task_id))
            order.sort(key=lambda candidate: -candidate.remaining)
    for candidate in order:
        soonest = min(soonest, max(LOOK_AGAIN_FRACTION * first.seconds(candidate.spec), LOOK_AGAIN_GROWTH * candidate.ran))
    return Copies(starts, max(LOOK_AGAIN_LEAST_SECONDS, soonest), seen)


def _best_for(worker: Worker, order: List[_Candidate], pace: float, fetch: Fetch) -> Optional[_Candidate]:
    """The one that would end last of those that this worker would end sooner."""
    for candidate in order[:SCANNED_ATTEMPTS]:
        length = max(1.0, candidate.shown)
        own = worker.round_trip + (1 + COPY_MARGIN) * worker.seconds(candidate.spec) * length
        if (
            own + COPY_GAIN * pace * length < candidate.remaining
            and len(candidate.places) <= MAX_COPIES
            and worker not in candidate.places
            and own + COPY_GAIN * pace * length + fetch(candidate.task_id, worker) < candidate.remaining
        ):
            return candidate
    return None
