"""When a worker looks for its lost coordinator, what it says of that, and what it keeps for it meanwhile. No sockets."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Iterator, List, Optional, Set, Tuple

from gpumesh.config import (
    OUTAGE_LINE_MAX_SECONDS,
    OUTAGE_LINE_SECONDS,
    OUTAGE_REASONS,
    RECONNECT_FIRST_DELAY_SECONDS,
    RECONNECT_MAX_DELAY_SECONDS,
    RECONNECTS_PER_SECOND,
)
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import payload_bytes
from gpumesh.model.shown import span

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


class Outage:
    """What is worth a line of a log while there is no coordinator: each reason once, then now and then that it is still so."""

    __slots__ = ("_since", "_tries", "_reasons", "_pause", "_next_at")

    def __init__(self) -> None:
        self._tries = 0  # That have failed; 0: there is no outage.
        self._since = self._next_at = 0.0
        self._pause = OUTAGE_LINE_SECONDS
        self._reasons: Set[str] = set()

    def failed(self, reason: str, now: float) -> Optional[str]:
        """An attempt has failed: what to add to the line about it, "" the first time; None: no line, that was told before."""
        if not self._tries:
            self._since, self._pause, self._next_at = now, OUTAGE_LINE_SECONDS, now + OUTAGE_LINE_SECONDS
            self._reasons.clear()
        self._tries += 1
        kind = "".join(letter for letter in reason if not letter.isdigit())  # Seconds that are left make no new reason.
        is_new = kind not in self._reasons and len(self._reasons) < OUTAGE_REASONS
        if is_new:
            self._reasons.add(kind)
        if now >= self._next_at:
            self._pause = min(2 * self._pause, OUTAGE_LINE_MAX_SECONDS)
            self._next_at = now + self._pause
        elif not is_new:
            return None
        return f", for {span(now - self._since)} now" if self._tries > 1 else ""

    def end(self, now: float) -> str:
        """It is there: how long it was not, to add to the line about that; "" if no attempt had failed."""
        tries, self._tries = self._tries, 0
        return f", {span(now - self._since)} after the first of {tries} attempts" if tries else ""


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
