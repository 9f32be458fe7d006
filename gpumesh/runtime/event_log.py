"""What has happened to a mesh, for people: kept in memory, handed on to the journal, bounded in both. Decides nothing.

An event is a dict: `number` (1, 2, ...; after a restart they go on further up), `time` (the coordinator's wall clock, ISO 8601 in UTC;
nothing is decided by it), `kind`, `text`, and where they are known `worker`, `task`, `client` and `job`.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterable, List, Optional, Tuple

from gpumesh.config import EVENT_BURST, EVENT_TEXT_CHARACTERS, EVENTS_KEPT, EVENTS_PER_SECOND
from gpumesh.journal.base import EventRecord
from gpumesh.model.shown import clean_line

Event = Dict[str, Any]

KINDS = (
    "started",  # A coordinator.
    "joined",  # A worker.
    "returned",  # A worker whose connection was lost.
    "away",  # The connection to a worker.
    "left",  # A worker, on purpose.
    "died",  # A worker: it did not come back in time.
    "retry",  # A task runs again.
    "paused",  # A machine, by its owner; or its rules changed.
    "unwell",  # A machine or a GPU of it: it takes no tasks.
    "resumed",
    "spilled",  # Objects, to disk.
    "refused",  # A peer.
    "accepted",  # A job.
    "finished",  # A job.
    "cancelled",  # A job.
)

_COLUMNS = ("number", "time", "kind", "text")  # Of a journal; what else an event says goes into one more.


class EventLog:
    """The last events of a coordinator.

    Args:
        earlier: Those of before, oldest first, as a journal remembers them.
        keep: A journal's `note_event`; must not block.
        wall: Tells the time of day, for people.
        clock: Tells seconds, for the limit on how many of a kind there may be.
    """

    def __init__(
        self,
        earlier: Iterable[EventRecord] = (),
        *,
        keep: Optional[Callable[[EventRecord], None]] = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._events: Deque[Event] = deque(map(_as_event, earlier), maxlen=EVENTS_KEPT)
        # What came last before a restart may not have reached the journal, and somebody may have been told of it: no number twice.
        self._newest: int = self._events[-1]["number"] + EVENTS_KEPT if self._events else 0
        self._keep = keep
        self._wall = wall
        self._clock = clock
        self._budgets: Dict[str, Tuple[float, float]] = {}  # Kind -> (how many more may come, at this time).
        self._dropped: Dict[str, int] = {}  # Kind -> how many have been left out since the last that was not.

    def note(self, kind: str, text: str, **where: Any) -> None:
        """One event more. A flood of one kind is thinned out, and the next one that is kept says how many were left out.

        Args:
            kind: One of KINDS.
            text: What has happened, for people; one line.
            where: `worker`, `task`, `client`, `job`; those that are None or empty are left out.
        """
        if not self._may_come(kind):
            self._dropped[kind] = self._dropped.get(kind, 0) + 1
            return
        text = clean_line(text, EVENT_TEXT_CHARACTERS + len("..."))
        dropped = self._dropped.pop(kind, 0)
        if dropped:
            text += f" (and {dropped} more of this kind before, not listed)"
        self._newest += 1
        event: Event = {"number": self._newest, "time": time_of_day(self._wall()), "kind": kind, "text": text}
        event.update((name, value) for name, value in where.items() if value not in (None, ""))
        self._events.append(event)
        if self._keep is not None:
            self._keep(_as_record(event))

    def since(self, number: int, *, limit: int = EVENTS_KEPT) -> List[Event]:
        """The newest events after that number, at most `limit`, oldest first.

        A number that is not there yet is one of an earlier coordinator without a journal: all are told.
        """
        if number >= self._newest:
            if number == self._newest:
                return []
            number = 0
        found: List[Event] = []
        for event in reversed(self._events):
            if event["number"] <= number or len(found) >= limit:
                break
            found.append(event)
        return found[::-1]

    def _may_come(self, kind: str) -> bool:
        now = self._clock()
        left, before = self._budgets.get(kind, (float(EVENT_BURST), now))
        left = min(float(EVENT_BURST), left + (now - before) * EVENTS_PER_SECOND)
        self._budgets[kind] = (left - 1.0 if left >= 1.0 else left, now)
        return left >= 1.0


def _as_record(event: Event) -> EventRecord:
    import json

    rest = {name: value for name, value in event.items() if name not in _COLUMNS}
    return EventRecord(event["number"], event["time"], event["kind"], event["text"], json.dumps(rest) if rest else "")


def _as_event(record: EventRecord) -> Event:
    import json

    rest = json.loads(record.details) if record.details else {}
    return {"number": record.number, "time": record.time, "kind": record.kind, "text": record.text, **rest}


def time_of_day(wall: float) -> str:
    """Seconds since 1970 as `2026-01-31T12:34:56.789Z`."""
    whole = int(wall)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int((wall - whole) * 1000):03d}Z"
