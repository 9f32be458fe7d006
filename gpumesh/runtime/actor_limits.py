"""Time limits of an actor's calls, watched by a thread of their own: it has its turn also while an event loop is blocked."""

from __future__ import annotations

import heapq
import threading
from itertools import count
from time import monotonic
from typing import Any, Callable, List, Tuple

KEPT = 1000  # Limits of calls that may be over, before a search for those that are.


class TimeLimits:
    """Tells of each call when its time is up, unless it `is_reported` by then.

    Args:
        tell: Gets the call, on the thread that watches; must not block.
    """

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self._heap: List[Tuple[float, int, Any]] = []
        self._numbers = count()
        self._most = KEPT
        self._news = threading.Condition()
        threading.Thread(target=self._run, name="gpumesh-limits", daemon=True).start()

    def add(self, when: float, call: Any) -> None:
        """Tell of this one then (monotonic time)."""
        with self._news:
            if len(self._heap) >= self._most:
                self._heap = [entry for entry in self._heap if not entry[2].is_reported]
                heapq.heapify(self._heap)
                self._most = 2 * len(self._heap) + KEPT
            heapq.heappush(self._heap, (when, next(self._numbers), call))
            if self._heap[0][2] is call:
                self._news.notify()

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._heap or self._heap[0][0] > monotonic():
                    self._news.wait(self._heap[0][0] - monotonic() if self._heap else None)
                call = heapq.heappop(self._heap)[2]
            if not call.is_reported:
                self._tell(call)
            del call
