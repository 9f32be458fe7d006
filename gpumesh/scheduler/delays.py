"""Tasks that have failed and may be tried again only after a while. Knows when; what follows is the cluster's business."""

from __future__ import annotations

import heapq
from typing import Dict, Iterator, List, Optional, Tuple

from gpumesh.config import BACKOFF_CAP_SECONDS
from gpumesh.model.ids import WorkerId
from gpumesh.scheduler.states import Client, Spec

DOUBLINGS = 30  # From a second to the age of people; no more are worth computing.


class Delayed:
    """A task between two attempts, or one that has ended on a worker that was lost with the value of its result."""

    __slots__ = ("spec", "due", "lost")

    def __init__(self, spec: Spec, due: float, lost: Optional[Tuple[WorkerId, str]]) -> None:
        self.spec = spec
        self.due = due
        self.lost = lost  # The worker that may still come with it, and why it was lost; None: it has failed.


class Delays:
    """All of them. Taken in and given out in order of time: each costs the same however many wait, and one that ends meanwhile leaves an
    entry behind that is void."""

    __slots__ = ("_tasks", "_heap", "_count")

    def __init__(self) -> None:
        self._tasks: Dict[int, Delayed] = {}
        self._heap: List[Tuple[float, int, int]] = []  # When, the how-manieth, and which task.
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Tuple[int, Delayed]]:
        return iter(self._tasks.items())

    def add(self, task_id: int, spec: Spec, due: float, *, lost: Optional[Tuple[WorkerId, str]] = None) -> Delayed:
        """This task is to wait."""
        delayed = self._tasks[task_id] = Delayed(spec, due, lost)
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, task_id))
        return delayed

    def next_due(self) -> Optional[float]:
        """When the first of them may be tried again."""
        heap = self._heap
        while heap:
            due, _, task_id = heap[0]
            found = self._tasks.get(task_id)
            if found is not None and found.due == due:
                return due
            heapq.heappop(heap)
        return None

    def due(self, now: float) -> List[Tuple[Spec, int]]:
        """Those whose time has come, the earliest first; they are no longer here."""
        found: List[Tuple[Spec, int]] = []
        while True:
            when = self.next_due()
            if when is None or when > now:
                return found
            _, _, task_id = heapq.heappop(self._heap)
            found.append((self._tasks.pop(task_id).spec, task_id))

    def drop(self, task_id: int) -> None:
        """This one has ended."""
        del self._tasks[task_id]

    def drop_client(self, client: Client) -> List[int]:
        """The client is gone, with all its tasks: those that waited."""
        gone = [task_id for task_id, delayed in self._tasks.items() if delayed.spec.client is client]
        for task_id in gone:
            del self._tasks[task_id]
        return gone

    def check(self) -> None:
        """Raise AssertionError if the tables disagree; for tests."""
        entries = {(due, task_id) for due, _, task_id in self._heap}
        for task_id, delayed in self._tasks.items():
            assert (delayed.due, task_id) in entries, f"36: nobody will look at task {task_id} when its time has come"


def backoff_seconds(spec: Spec, strikes: int) -> float:
    """Seconds that a task waits after so many failed attempts: as its client said, doubled each time up to a cap.

    What is more than the cap from the start stays what it is.
    """
    first = spec.spec.backoff
    if not first or strikes < 1:
        return 0.0
    return min(first * 2.0 ** min(strikes - 1, DOUBLINGS), max(first, BACKOFF_CAP_SECONDS))
