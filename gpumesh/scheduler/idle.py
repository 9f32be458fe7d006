"""The workers with free slots, the fastest first. No decisions."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Dict, Iterator, List, Tuple

from gpumesh.model.ids import WorkerId
from gpumesh.scheduler.states import Worker


class Idle:
    """An ordered set: looking for the fastest few costs the same however many there are."""

    __slots__ = ("_keys", "_workers")

    def __init__(self) -> None:
        self._keys: List[Tuple[float, WorkerId]] = []
        self._workers: Dict[WorkerId, Tuple[Worker, Tuple[float, WorkerId]]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, worker: Worker) -> bool:
        return worker.id in self._workers

    def __iter__(self) -> Iterator[Worker]:
        workers = self._workers
        return (workers[ident][0] for _, ident in self._keys)

    def add(self, worker: Worker) -> None:
        """It has a free slot."""
        if worker.id not in self._workers:
            key = (-worker.speed, worker.id)
            insort(self._keys, key)
            self._workers[worker.id] = (worker, key)

    def discard(self, worker: Worker) -> None:
        """It has none, or takes nothing."""
        found = self._workers.pop(worker.id, None)
        if found is not None:
            del self._keys[bisect_left(self._keys, found[1])]
