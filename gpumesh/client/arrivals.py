"""What has come of one generator's values and has not been taken, and what the generator is told of that. The sink of its task.

StreamItems ── places that are new ──> items ──> whoever takes them
    ^── StreamCredit ── a quarter of the window at a time ──┘
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, List, Optional

from gpumesh.config import GENERATOR_WINDOW_BYTES, GENERATOR_WINDOW_ITEMS
from gpumesh.protocol.messages import StreamCredit

if TYPE_CHECKING:
    from gpumesh.client.channel import Channel
    from gpumesh.client.futures import MeshFuture
    from gpumesh.protocol.messages import StreamItems

CREDIT_ITEMS = GENERATOR_WINDOW_ITEMS // 4  # Taken since the generator was told last: now it is told.
CREDIT_BYTES = GENERATOR_WINDOW_BYTES // 4


class Arrivals:
    """What has come of one stream, and has not been taken. The sink of its task; see `client.channel.Sink`."""

    __slots__ = (
        "items",
        "condition",
        "received",
        "_stream",
        "_lock",
        "_attempt",
        "_next",
        "_end",
        "_limit",
        "_fresh",
        "_fresh_bytes",
        "_is_lifted",
        "_is_closed",
        "_has_objects",
        "_channel",
        "_task_id",
        "_callbacks",
    )

    def __init__(self, stream: MeshFuture) -> None:
        self.items: Deque[Any] = deque()  # bytes or StoredValue.
        self.condition = threading.Condition()  # Notified of each news.
        self.received = 0  # Values, ever.
        self._stream = weakref.ref(stream)
        self._lock = threading.Lock()
        self._attempt = -1  # The newest that has sent something.
        self._next = 0  # Place that follows what it sent last.
        self._end: Optional[int] = None  # How many values there are, once that is known.
        self._limit = GENERATOR_WINDOW_ITEMS
        self._fresh = 0  # Taken since the generator was told last.
        self._fresh_bytes = 0
        self._is_lifted = False  # What has arrived counts as taken.
        self._is_closed = False
        self._has_objects = False  # Some values lie in the store, or refer to what lies there.
        self._channel: Optional[Channel] = None  # That brought the last values.
        self._task_id = 0
        self._callbacks: List[Callable[[], None]] = []

    # --- from the channel, under its receive lock

    def stream_items(self, channel: Channel, message: StreamItems, items: List[Any]) -> None:
        """Values have come: bytes, or StoredValues."""
        credit = None
        with self._lock:
            if message.attempt < self._attempt or self._is_closed:
                return
            self._channel, self._task_id = channel, message.task_id
            is_again = message.attempt != self._attempt or message.first != self._next
            self._attempt = message.attempt
            self._next = message.first + len(items)
            if not items:
                self._end = message.first
                return
            known = self.received - message.first
            if is_again and self._limit > GENERATOR_WINDOW_ITEMS:
                credit = StreamCredit(message.task_id, self._limit)  # It may not know, or not know any more.
            if 0 <= known < len(items):
                new = items[known:]
                self._has_objects = self._has_objects or any(type(item) is not bytes for item in new)
                self.items.extend(new)
                self.received += len(new)
                if self._is_lifted:
                    credit = self._count(len(new), sum(map(_size_of, new))) or credit
        if credit is not None:
            channel.tell([credit])
        self.tell_news()

    def task_ended(self, task_id: int, status: int, payload: Any, seconds: float, worker: str) -> None:
        """The generator has ended, and what it sent before is here."""
        stream = self._stream()
        if stream is not None:
            stream.task_ended(task_id, status, payload, seconds, worker)
        self.tell_news()

    def tell_news(self) -> None:
        """Whoever waits is to look."""
        with self.condition:
            self.condition.notify_all()
        if self._callbacks:
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()

    # --- for the stream

    @property
    def is_complete(self) -> bool:
        """Whether all values have come that the generator has made; once its task has ended well."""
        return self._end is not None and self.received >= self._end

    def confirm(self) -> None:
        """All has been taken: objects that are kept in case that something was not need be kept no longer."""
        channel = self._channel
        if channel is not None and self._has_objects:
            channel.confirm()

    def call_at_news(self, callback: Callable[[], None]) -> None:
        """Once, soon, on any thread."""
        self._callbacks.append(callback)

    def taken(self, item: Any) -> None:
        """The user has this one."""
        with self._lock:
            credit = None if self._is_lifted else self._count(1, _size_of(item))
            channel = self._channel
        if credit is not None and channel is not None:
            channel.tell([credit])

    def lift(self) -> None:
        """Nobody takes values for now, and the generator is to go on: they are kept here, as many as come."""
        with self._lock:
            if self._is_lifted:
                return
            self._is_lifted = True
            credit = self._count(len(self.items), GENERATOR_WINDOW_BYTES)
            channel = self._channel
        if credit is not None and channel is not None:
            channel.tell([credit])

    def close(self) -> None:
        """Nobody wants values any more."""
        with self._lock:
            self._is_closed = True
            self.items.clear()

    def _count(self, count: int, nbytes: int) -> Optional[StreamCredit]:
        self._fresh += count
        self._fresh_bytes += nbytes
        if not count or (self._fresh < CREDIT_ITEMS and self._fresh_bytes < CREDIT_BYTES):
            return None
        self._limit += self._fresh
        self._fresh = self._fresh_bytes = 0
        return StreamCredit(self._task_id, self._limit)


def _size_of(item: Any) -> int:
    size: int = len(item) if type(item) is bytes else item.nbytes
    return size
