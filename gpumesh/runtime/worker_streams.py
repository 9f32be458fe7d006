"""Values of generators that run on one worker, from their processes to the coordinator, until their consumers have taken them.

    process ── StreamItems ──> kept ──> coordinator ──> client
       ^────── StreamCredit ── (taken ones are forgotten) <──────┘

Promises:

1. What has not been taken is kept, and sent again when the connection was lost, or when it is asked for; then, once the generator has
   come to its end, its last word as well.
2. A result follows the values before it.
3. What kept values refer to lives as long as they are kept.
4. Nothing is kept of a stream whose task has ended, once its result need not be kept, and of one whose process is gone before that.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, Iterable, Iterator, List, Tuple

from gpumesh.config import GENERATOR_WINDOW_BYTES, GENERATOR_WINDOW_ITEMS
from gpumesh.model.payloads import payload_bytes
from gpumesh.protocol.messages import StreamCredit, StreamItems

if TYPE_CHECKING:
    from gpumesh.runtime.worker_objects import WorkerObjects

NOTHING_KEPT = -1  # Instead of an attempt: there is nothing here of a stream that was asked for.
BATCH_BYTES = GENERATOR_WINDOW_BYTES // 4  # Of values that are sent again in one message.


class _Stream:
    """One attempt at a generator."""

    __slots__ = ("attempt", "runner", "first", "items", "taken", "is_complete", "has_ended")

    def __init__(self, attempt: int, runner: int) -> None:
        self.attempt = attempt
        self.runner = runner  # The process that runs it.
        self.first = 0  # Place of the first that is kept.
        self.items: Deque[Any] = deque()
        self.taken = 0  # By the consumer, as far as is known: perhaps in an earlier attempt, and more than there are here.
        self.is_complete = False  # The generator has said its last word.
        self.has_ended = False  # Its task's result has been reported.


class WorkerStreams:
    """See the module's promises. Every method runs on the loop's thread.

    Args:
        tell: Sends to the coordinator, if there is one.
        send: Sends to a process; False if it is gone.
        objects: The objects of this worker, made at their first use.
    """

    def __init__(
        self, tell: Callable[[Any], None], send: Callable[[int, Any], bool], objects: Callable[[], WorkerObjects]
    ) -> None:
        self._tell = tell
        self._send = send
        self._objects = objects
        self._streams: Dict[int, _Stream] = {}

    def on_items(self, runner: int, message: StreamItems) -> None:
        """Values have come from a process."""
        stream = self._streams.get(message.task_id)
        if stream is not None and stream.attempt > message.attempt:
            self._objects_of(runner, message.items)
            self._release(message.items)
            return  # Of an attempt that is being ended, and was followed by another.
        if stream is None or stream.attempt != message.attempt:
            if stream is not None:
                self._release(stream.items)
            stream = self._streams[message.task_id] = _Stream(message.attempt, runner)
        if message.items:
            self._objects_of(runner, message.items)
            stream.items.extend(message.items)
        else:
            stream.is_complete = True
        self._tell(message)
        if stream.taken > stream.first:
            self._trim(stream)

    def on_credit(self, message: StreamCredit) -> None:
        """The consumer has taken some, or wants what he has not taken to be sent again."""
        stream = self._streams.get(message.task_id)
        if stream is None:
            if not message.limit:
                self._tell(StreamItems(message.task_id, NOTHING_KEPT, 0, []))
            return
        if not message.limit:
            self._send_again(message.task_id, stream)
            return
        stream.taken = max(stream.taken, message.limit - GENERATOR_WINDOW_ITEMS)
        self._trim(stream)
        self._send(stream.runner, message)

    def on_results(self, results: Iterable[Tuple[int, int, int, Any, float]]) -> None:
        """Attempts have ended."""
        for task_id, attempt, *_ in results:
            stream = self._streams.get(task_id)
            if stream is not None and stream.attempt == attempt:
                stream.has_ended = True

    def forget(self, task_ids: Iterable[int]) -> None:
        """The results of these have arrived, and so have the values before them."""
        for task_id in task_ids:
            stream = self._streams.get(task_id)
            if stream is not None and stream.has_ended:
                self._drop(task_id)

    def runner_gone(self, runner: int) -> None:
        """A process has ended, and all it said has been heard."""
        for task_id in [task_id for task_id, stream in self._streams.items() if stream.runner == runner]:
            if not self._streams[task_id].has_ended:
                self._drop(task_id)

    def connected(self) -> None:
        """There is a coordinator again: everything that is kept, before kept results are sent."""
        for task_id, stream in self._streams.items():
            self._send_again(task_id, stream)

    def kept(self) -> Iterator[Any]:
        """Values that are kept and may refer to objects."""
        for stream in self._streams.values():
            for payload in stream.items:
                if type(payload) is not bytes:
                    yield payload

    # --- inside

    def _send_again(self, task_id: int, stream: _Stream) -> None:
        place = stream.first
        batch: List[Any] = []
        size = 0
        for payload in stream.items:
            batch.append(payload)
            size += payload_bytes(payload)
            if size >= BATCH_BYTES:
                self._tell(StreamItems(task_id, stream.attempt, place, batch))
                place += len(batch)
                batch, size = [], 0
        if batch:
            self._tell(StreamItems(task_id, stream.attempt, place, batch))
            place += len(batch)
        if stream.is_complete or stream.has_ended:
            self._tell(StreamItems(task_id, stream.attempt, place, []))

    def _trim(self, stream: _Stream) -> None:
        count = min(stream.taken - stream.first, len(stream.items))
        if count <= 0:
            return
        taken = list(islice(stream.items, count))
        for _ in range(count):
            stream.items.popleft()
        stream.first += count
        self._release(taken)

    def _drop(self, task_id: int) -> None:
        self._release(self._streams.pop(task_id).items)

    def _objects_of(self, runner: int, items: Iterable[Any]) -> None:
        for payload in items:
            if type(payload) is not bytes:
                self._objects().keep_item(runner, payload)

    def _release(self, items: Iterable[Any]) -> None:
        others = [payload for payload in items if type(payload) is not bytes]
        if others:
            self._objects().drop_items(others)
