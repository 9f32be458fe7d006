"""When a worker looks for its lost coordinator, and what it keeps for it meanwhile. No sockets."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Iterator, List, Tuple

from gpumesh.config import RECONNECT_FIRST_DELAY_SECONDS, RECONNECT_MAX_DELAY_SECONDS, RECONNECTS_PER_SECOND
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import payload_bytes

_NOT_RUN = int(Status.NOT_RUN)
BATCH_RESULTS = 1024  # Kept results that are sent again in one message, ...
BATCH_BYTES = 1 << 20  # ... as far as they are small.

Result = Tuple[int, int, int, Any, float]


class Backoff:
    """Seconds between attempts to reach a coordinator.

    The first follows at once: most connections that break are only broken connections. Later ones are spread so widely that all
    workers of a mesh together make no more than `RECONNECTS_PER_SECOND`, were they lost together.
    """

    __slots__ = ("workers", "_failures")

    def __init__(self) -> None:
        self.workers = 1  # In the mesh, as far as is known.
        self._failures = -1

    def reset(self) -> None:
        """There was a connection."""
        self._failures = -1

    def next(self, draw: float) -> float:
        """How long to wait now; `draw` is 0 to 1, uniform."""
        self._failures += 1
        if not self._failures:
            return RECONNECT_FIRST_DELAY_SECONDS * draw / 2
        spread = self.workers / RECONNECTS_PER_SECOND
        most = min(RECONNECT_FIRST_DELAY_SECONDS * 2.0 ** min(self._failures, 16), RECONNECT_MAX_DELAY_SECONDS)
        return max(most, spread) * (0.2 + 0.8 * draw)


class KeptResults:
    """What has ended on this worker, until it is known where it is wanted."""

    __slots__ = ("_results",)

    def __init__(self) -> None:
        self._results: Dict[int, Result] = {}  # By task; a later attempt at one follows the end of an earlier one.

    def __len__(self) -> int:
        return len(self._results)

    def add(self, results: Iterable[Result]) -> None:
        """These have ended. Attempts that were never started are as good as never sent here, and are not kept."""
        kept = self._results
        for result in results:
            if result[2] != _NOT_RUN:
                kept[result[0]] = result

    def forget(self, task_ids: Iterable[int]) -> None:
        """Nobody will ask for these again."""
        pop = self._results.pop
        for task_id in task_ids:
            pop(task_id, None)

    def attempts(self) -> List[Tuple[int, int]]:
        """(task id, attempt) of each."""
        return [(result[0], result[1]) for result in self._results.values()]

    def batches(self) -> Iterator[List[Result]]:
        """All of them, in messages of bounded size."""
        batch: List[Result] = []
        size = 0
        for result in self._results.values():
            own = payload_bytes(result[3]) if type(result[3]) is not dict else 0
            if batch and (len(batch) >= BATCH_RESULTS or size + own > BATCH_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(result)
            size += own
        if batch:
            yield batch

    def values(self) -> List[Result]:
        """Each of them."""
        return list(self._results.values())
