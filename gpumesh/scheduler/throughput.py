"""How long a task of a function takes on a worker: measured where it ran, else scaled by score from where it did. No decisions."""

from __future__ import annotations

from typing import Dict, List, Optional

from gpumesh.config import FUNCTION_CACHE_ENTRIES
from gpumesh.model.ids import WorkerId

MEMORY_TASKS = 16  # Observations that a mean remembers: few enough to follow a machine that gets busy.
SHORTEST_SECONDS = 1e-6  # A mean is never taken for less: clocks are not finer, and a division by it stays tame.


class _Mean:
    """A mean that forgets: the plain one over the first observations, decayed from then on."""

    __slots__ = ("value", "seen")

    def __init__(self) -> None:
        self.value = 0.0
        self.seen = 0

    def add(self, mean: float, count: int) -> None:
        self.seen += count
        self.value += (mean - self.value) * count / max(count, min(self.seen, MEMORY_TASKS))


class Function:
    """What is known about the run time of one function's tasks."""

    __slots__ = ("digest", "_work", "_on")

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self._work = _Mean()  # Seconds times score: a length that no machine owns.
        self._on: Dict[WorkerId, _Mean] = {}

    def observe(self, worker: WorkerId, score: float, seconds: float, count: int) -> None:
        """`count` tasks ended on a worker after `seconds` of run time in all."""
        mean = max(seconds / count, SHORTEST_SECONDS)
        self._work.add(mean * score, count)
        on_worker = self._on.get(worker)
        if on_worker is None:
            on_worker = self._on[worker] = _Mean()
        on_worker.add(mean, count)

    def seconds_on(self, worker: WorkerId, score: float) -> Optional[float]:
        """Expected run time of one task, None if the function was never seen to end anywhere."""
        on_worker = self._on.get(worker)
        if on_worker is not None:
            return on_worker.value
        if self._work.seen:
            return max(self._work.value / score, SHORTEST_SECONDS)
        return None

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone; its like comes back under another id."""
        self._on.pop(worker, None)


class Throughput:
    """One Function per digest; the least recently defined go when there are too many."""

    __slots__ = ("_functions",)

    def __init__(self) -> None:
        self._functions: Dict[bytes, Function] = {}

    def function(self, digest: bytes) -> Function:
        """The record of a function, which is the newest from now on."""
        function = self._functions.pop(digest, None) or Function(digest)
        self._functions[digest] = function
        if len(self._functions) > FUNCTION_CACHE_ENTRIES:
            del self._functions[next(iter(self._functions))]
        return function

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        for function in self._functions.values():
            function.forget(worker)

    def known(self) -> List[bytes]:
        """Digests, the least recently defined first."""
        return list(self._functions)
