"""One generator's values on their way out of its process, and the thread that sends those that wait for company in vain."""

from __future__ import annotations

import threading
import time
from collections import deque
from time import monotonic
from typing import Any, Callable, Deque, Dict, List, Optional

from gpumesh.config import GENERATOR_GATHER_SECONDS, GENERATOR_WINDOW_BYTES, GENERATOR_WINDOW_ITEMS
from gpumesh.model.payloads import Stored, payload_bytes

LEAST_UNDER_WAY = 2  # Of values of any size: one is made while the other is taken.
PARKED_SECONDS = 0.05  # Without anything to send, until the thread that sends what is late sleeps.


def item_bytes(payload: Any) -> int:
    """What a value counts against the window."""
    value = payload[0] if isinstance(payload, tuple) else payload
    return value.nbytes if type(value) is Stored else payload_bytes(payload)


class OutStream:
    """One generator's values, as far as they have not been taken."""

    __slots__ = (
        "task_id",
        "attempt",
        "lock",
        "batch",
        "batch_bytes",
        "count",
        "limit",
        "sizes",
        "under_way",
        "sent_at",
        "on_credit",
        "is_cancelled",
        "waited",
        "waits_since",
    )

    def __init__(self, task_id: int, attempt: int) -> None:
        self.task_id = task_id
        self.attempt = attempt
        self.lock = threading.Lock()  # For the batch and the order of what is sent.
        self.batch: List[Any] = []
        self.batch_bytes = 0
        self.count = 0  # Values so far, the batch included.
        self.limit = GENERATOR_WINDOW_ITEMS
        self.sizes: Deque[int] = deque()  # Of those under way.
        self.under_way = 0  # Bytes.
        self.sent_at = 0.0
        self.on_credit: Optional[Callable[[], None]] = None
        self.is_cancelled = False
        self.waited = 0.0  # Seconds for its consumer, that `take_waited` has not told.
        self.waits_since = 0.0  # 0.0: it does not wait now.

    def may_go_on(self) -> bool:
        """Whether another value may follow, or must not any more."""
        return self.is_cancelled or self.has_room()

    def has_room(self) -> bool:
        """Whether another value is within the window."""
        return self.count < self.limit and (self.under_way < GENERATOR_WINDOW_BYTES or len(self.sizes) < LEAST_UNDER_WAY)

    def begin_wait(self) -> None:
        """It waits for its consumer."""
        self.waits_since = monotonic()

    def end_wait(self) -> None:
        """It does not any more, or `waited` is wanted."""
        if self.waits_since:
            self.waited += monotonic() - self.waits_since
            self.waits_since = 0.0

    def credit(self, limit: int) -> None:
        """So many may have been sent."""
        if limit > self.limit:
            with self.lock:
                self.limit = limit
                while self.sizes and self.count - len(self.sizes) < limit - GENERATOR_WINDOW_ITEMS:
                    self.under_way -= self.sizes.popleft()
        tell = self.on_credit
        if tell is not None:
            tell()


class LateValues:
    """A thread that sends what has waited for company in vain: the generator may take its time for the next."""

    def __init__(self, streams: Dict[int, OutStream], send: Callable[[OutStream], None]) -> None:
        self._streams = streams
        self._send = send
        self._is_parked = False
        self._event = threading.Event()
        threading.Thread(target=self._run, name="gpumesh-streams", daemon=True).start()

    def wake(self) -> None:
        """Something waits for company."""
        if self._is_parked:
            self._event.set()

    def _run(self) -> None:
        idle_since = monotonic()
        while True:
            time.sleep(GENERATOR_GATHER_SECONDS)
            now = monotonic()
            if self._send_late(now):
                idle_since = now
            elif now - idle_since > PARKED_SECONDS:
                self._is_parked = True  # First: what comes from now on sets the event.
                if not any(stream.batch for stream in list(self._streams.values())):
                    self._event.wait()
                self._event.clear()
                self._is_parked = False
                idle_since = monotonic()

    def _send_late(self, now: float) -> bool:
        """Whether anything waited."""
        has_some = False
        for stream in list(self._streams.values()):
            if stream.batch:
                has_some = True
                if now - stream.sent_at >= GENERATOR_GATHER_SECONDS and stream.lock.acquire(blocking=False):
                    try:
                        if stream.batch:
                            self._send(stream)
                    finally:
                        stream.lock.release()
        return has_some
