"""The machine under a ResultStream: reads the input, submits its items, keeps what came back. Knows nothing of iteration or asyncio.

Promises:

1. Item i of the input is index i, and gets exactly one record, whatever happens to its task.
2. A sized input is read at most a window ahead of the results that have *ended*, any other ahead of those that were *taken*.
   Windows are in items, and in bytes as the items and results so far have been.
3. Whoever waits reads on: a thread that waits for a result of a sized input submits more of it itself. The feeder thread does
   so where nobody waits, and alone where reading might block (an input without a length).
4. `task_ended` is called under a session's receive lock: it stores a record and tells those who sleep, nothing more.

    .map ── first items, in the calling thread ──┬── that was all ──> no thread
                                                 └── feeder thread ──> exhausted | stopped | input failed
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections import deque
from itertools import chain, islice, repeat
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Set, Tuple

from gpumesh.client.futures import MeshFuture
from gpumesh.config import INLINE_VALUE_BYTES, MIB, STREAM_WINDOW_BYTES, STREAM_WINDOW_ITEMS
from gpumesh.errors import MeshClosedError, SerializationError, TaskCancelledError
from gpumesh.model.outcomes import Status
from gpumesh.serialization import refs
from gpumesh.serialization.values import dumps_call

Record = Tuple[int, Any, float, str, int]
"""How an item ended: Status (or LOADED), payload (or value), run seconds, worker, task id."""

LOADED = -1  # In place of a status: the payload has been unpickled. The same number as in `client.futures`.
ENDED_ERROR = int(Status.REFUSED)  # Of an item that failed on this side.

FIRST_ITEMS = 2048  # Submitted before `.map` returns: about a millisecond.
FIRST_BATCHES = (
    8,
    64,
)  # Small, so that the workers start while the rest is pickled, and so that the size of items is known early.
BATCH_ITEMS = 512
BATCH_BYTES = 1 * MIB
MIN_WINDOW_ITEMS = 8  # However large the items are: the workers need something to do.
_SIZE_WEIGHT = 1 / 64  # Of a new size in the running mean.

_PLAIN = frozenset({int, str, float, bytes, bool})  # One argument that pickles without ado.
_NO_KEYWORDS: Dict[str, Any] = {}
_OK = int(Status.OK)
_CANCELLED = int(Status.CANCELLED)


class _Batch:
    """Tasks that were submitted together; their sink. Ids and indices both count up by one."""

    __slots__ = ("feed", "offset", "early")

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.offset: Optional[int] = None  # index - task id; None until `submit_many` has returned.
        self.early: List[Tuple[int, int, Any, float, str]] = []  # Ended before that.

    def task_ended(self, task_id: int, status: int, payload: Any, seconds: float, worker: str) -> None:
        """See `client.channel.Sink`."""
        feed = self.feed
        offset = self.offset
        if offset is None:
            with feed.condition:
                if self.offset is None:
                    self.early.append((task_id, status, payload, seconds, worker))
                    return
                offset = self.offset
        index = task_id + offset
        slots = feed.slots
        if slots[index] is not None:
            return
        if status != _OK:
            feed.settle(index, (status, payload, seconds, worker, task_id))
            return
        slots[index] = (status, payload, seconds, worker, task_id)
        order = feed.order
        order.append(index)
        if feed.is_watched or len(order) >= feed.alarm:  # Looked at last: who sleeps looked at the slot after setting it.
            feed.tell_of(index)

    def place(self, offset: int) -> None:
        """The ids are known now."""
        with self.feed.condition:
            self.offset = offset
            early, self.early = self.early, []
        for told in early:
            self.task_ended(*told)


class _Item:
    """One task of an input without a length; its sink."""

    __slots__ = ("feed", "index")

    def __init__(self, feed: Feed, index: int) -> None:
        self.feed: Optional[Feed] = feed
        self.index = index

    def task_ended(self, task_id: int, status: int, payload: Any, seconds: float, worker: str) -> None:
        """See `client.channel.Sink`."""
        feed = self.feed
        if feed is None:
            return
        self.feed = None
        if status != _OK:
            feed.settle(self.index, (status, payload, seconds, worker, task_id))
            return
        feed.slots[self.index] = (status, payload, seconds, worker, task_id)
        if feed.is_watched:
            feed.tell_of(self.index)


class Feed:
    """See the module's promises. Fields without underscore are read by ResultStream, too.

    Args:
        items: The input.
        handle: The function as the session knows it.
        bound: Positional arguments before those of the item.
        window: Items; None for the usual window.
    """

    def __init__(
        self,
        items: Iterable[Any],
        *,
        session: Any,
        handle: Any,
        function: Callable[..., Any],
        bound: Tuple[Any, ...] = (),
        window: Optional[int] = None,
    ) -> None:
        if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
            raise TypeError(f"window={window!r} must be a whole number of items")
        if window is not None and window < 1:
            raise ValueError(f"window={window!r} must be at least 1 item")
        self.name: str = handle.name
        self.is_sized = hasattr(items, "__len__")
        self.length = len(items) if self.is_sized else 0  # type: ignore[arg-type]
        self.slots: Any = [None] * self.length if self.is_sized else {}  # Records by index; of a list None where pending.
        self.order: Any = [] if self.is_sized else deque()  # Indices in finishing order; of an unsized input only if asked for.
        self.futures: Dict[int, MeshFuture] = {}  # Those that were asked for; all of a sized input are kept.
        self.submitted = 0  # Items read from the input.
        self.taken = 0  # Results given out; of an unsized input.
        self.next_index = 0  # The next in input order; of an unsized input.
        self.failed = 0
        self.is_exhausted = False  # Nothing more will be read.
        self.input_error: Optional[BaseException] = None
        self.condition = threading.Condition()
        self.is_watched = False  # `task_ended` must go the long way: somebody sleeps, or futures were handed out.
        self.alarm: float = math.inf  # `tell` when so many items have ended.
        self._is_ordered = self.is_sized
        self._out_of_order: Set[int] = set()  # Taken by `completed` ahead of `next_index`.
        self._session = session
        self._handle = handle
        self._function = function
        self._bound = bound
        # A list may change while it is read; a range cannot, and tuples are cheap to share.
        if type(items) is list:
            items = items[:]
        self._items = items if type(items) in (list, tuple, range) else None
        self._iterator: Optional[Iterator[Any]] = iter(items)
        self._window_items = window or STREAM_WINDOW_ITEMS
        self._window_bytes = STREAM_WINDOW_BYTES if window is None else math.inf
        self._call_bytes = 0.0  # Running means.
        self._result_bytes = 0.0
        self._runs: List[List[int]] = []  # [first index, first task id, count] of tasks submitted one after the other.
        self._is_stopped = False  # Nothing more is to be read.
        self._is_cancelled = False  # And what was submitted is not wanted.
        self._feeding = threading.Lock()  # Held by the thread that reads a sized input.
        self._feeder = threading.Condition()  # Where the feeder thread sleeps.
        self._feeder_wakes_at: float = math.inf  # Results ended, of a sized input, or taken, of another.
        self._has_idler = False  # Somebody sleeps because nothing is under way.
        self._news: List[Callable[[], None]] = []

    @property
    def title(self) -> str:
        """What it is, for messages."""
        return f"the map of {self.name}"

    # --- counting

    @property
    def ended_count(self) -> int:
        """Items that have ended."""
        return len(self.order) if self.is_sized else self.taken + len(self.slots)

    @property
    def is_done(self) -> bool:
        """Whether all have ended and the input is read."""
        return self.is_exhausted and self.ended_count >= self.submitted

    def has(self, index: int) -> bool:
        """Whether there is nothing to wait for at this index: it has ended, or the input ended before it."""
        if self.is_sized:
            slots = self.slots
            if index < len(slots) and slots[index] is not None:
                return True
        elif index in self.slots or self.next_index != index:
            return True
        return self.is_past_end(index)

    def is_past_end(self, index: int) -> bool:
        """Whether the input is known to have no such item."""
        return self.is_exhausted and index >= self.submitted

    def ended_records(self) -> List[Record]:
        """Records at hand; of an unsized input those not taken."""
        return [record for record in list(self.slots if self.is_sized else self.slots.values()) if record is not None]

    # --- reading the input

    def start(self) -> None:
        """Submit the first items in the calling thread, and see to the rest.

        Raises:
            MeshError: The mesh does not take the first tasks.
        """
        if self.is_sized:
            limit = min(FIRST_ITEMS, self._window_items)
            sizes = chain(FIRST_BATCHES, repeat(BATCH_ITEMS))
            try:
                with self._feeding:
                    while not self.is_exhausted and self.submitted < limit and self._room() > 0:
                        self._pump(min(next(sizes), limit - self.submitted))
            except BaseException:
                self.cancel()  # Nobody will get a stream to take results from.
                raise
            if self.is_exhausted:
                return
            self._set_alarm()
        read_on = self._feed_on if self.is_sized else self._feed_unsized
        if self._session.is_nested:
            read_on = self._session.feeder(self, read_on)
        threading.Thread(target=read_on, name="gpumesh-feeder", daemon=True).start()

    def _room(self) -> int:
        """Items that may be submitted now; negative when too many are under way."""
        return self._allowed() - (self.submitted - (len(self.order) if self.is_sized else self.taken))

    def _allowed(self) -> int:
        size = self._call_bytes + (0.0 if self.is_sized else self._result_bytes)
        if size * self._window_items <= self._window_bytes:
            return self._window_items
        return max(MIN_WINDOW_ITEMS, int(self._window_bytes / size))

    def _set_alarm(self) -> None:
        """When the feeder thread of a sized input is to wake: nobody else has read on for most of a window."""
        self._feeder_wakes_at = self.alarm = self.submitted - self._allowed() // 4

    def _can_read_on(self) -> bool:
        if not self.is_sized or self.is_exhausted or self._is_stopped:
            return False
        allowed = self._allowed()
        return self.submitted - len(self.order) <= allowed - min(BATCH_ITEMS, (allowed + 1) // 2)

    def _feed_on(self) -> None:
        """The feeder thread of a sized input."""
        while not self.is_exhausted:
            with self._feeder:
                while not (self.is_exhausted or self._is_stopped or len(self.order) >= self._feeder_wakes_at):
                    self._feeder.wait()
            with self._feeding:
                while self._can_read_on() and self._pump_safely():
                    pass
            if self._is_stopped:
                self._finish_stop()
                return

    def _pump_safely(self) -> bool:
        """`_pump`, with errors told to whoever iterates, not here; false after one."""
        try:
            self._pump(BATCH_ITEMS)
        except Exception:  # noqa: BLE001 - recorded by `_pump`
            return False
        return True

    def _pump(self, limit: int) -> None:
        """Read, pickle and submit up to `limit` items of a sized input. `_feeding` is held."""
        items, error, is_last = self._read(limit)
        first = self.submitted
        end = first + len(items)
        if end > self.length:
            self._lengthen(end)
        self.submitted = end  # First of all: results may come before the rest is sent.
        unsent = first
        payloads: List[Any] = []
        append = payloads.append
        size = 0
        pickle = self._pickle
        try:
            for index, item in enumerate(items, first):
                payload = pickle(index, item)
                if payload is not None:
                    append(payload)
                    size += len(payload) if type(payload) is bytes else payload.nbytes
                    if size < BATCH_BYTES:
                        continue
                    index += 1
                self._submit(payloads, unsent, size)
                unsent = index if payload is not None else index + 1
                payloads, size = [], 0
                append = payloads.append
            self._submit(payloads, unsent, size)
        except BaseException as failure:
            self._fail_rest(failure, unsent)
            raise
        if is_last:
            self._finish_reading(error)
        else:
            self._set_alarm()

    def _read(self, limit: int) -> Tuple[List[Any], Optional[BaseException], bool]:
        """The next items; what the input raised, if it did; whether these were the last."""
        first = self.submitted
        size = self._call_bytes
        if size * limit > BATCH_BYTES:
            limit = max(1, int(BATCH_BYTES / size))
        if self._items is not None:
            chunk = list(self._items[first : first + limit])  # type: ignore[index]
            return chunk, None, first + len(chunk) >= self.length
        chunk = []
        iterator = self._iterator
        assert iterator is not None
        try:
            for item in islice(iterator, limit):
                chunk.append(item)
        except Exception as error:  # noqa: BLE001 - the input's own error, raised where the iteration meets it
            return chunk, error, True
        return chunk, None, len(chunk) < limit

    def _pickle(self, index: int, item: Any) -> Any:
        """The payload of one item's call, bytes or a Call; None if the item is dealt with already."""
        futures = self.futures
        bound = self._bound
        kind = type(item)
        if kind in _PLAIN and not bound and not futures:
            payload = dumps_call((item,), _NO_KEYWORDS, what=self.name, function=self._function)
            return payload if len(payload) < INLINE_VALUE_BYTES else _as_call(payload)  # type: ignore[arg-type]
        args, kwargs = bound, _NO_KEYWORDS
        if isinstance(item, dict):
            kwargs = item if kind is dict else dict(item)
        elif isinstance(item, tuple):
            args += tuple(item)
        else:
            args += (item,)
        if futures:
            future = futures.get(index)
            if future is not None and future.done():
                self.settle(index, (_CANCELLED, {}, 0.0, "", 0))
                return None
        try:
            if refs.are_used or MeshFuture in map(type, args) or (kwargs and MeshFuture in map(type, kwargs.values())):
                from gpumesh.client.inputs import pack_call

                return pack_call(args, kwargs, what=self.name, function=self._function)
            payload = dumps_call(args, kwargs, what=self.name, function=self._function, snapshot=False)
            return payload if type(payload) is bytes and len(payload) < INLINE_VALUE_BYTES else _as_call(payload)
        except SerializationError as error:
            self.settle(index, (ENDED_ERROR, error, 0.0, "", 0))
            return None

    def _submit(self, payloads: List[Any], first: int, size: int) -> None:
        count = len(payloads)
        if not count:
            return
        mean, known = size / count, self._call_bytes
        self._call_bytes = mean if not known else known + (mean - known) * min(1.0, count * _SIZE_WEIGHT)
        batch = _Batch(self)
        first_id = self._session.submit_many(self._handle, payloads, batch)
        self._note_ids(first, first_id, count)
        batch.place(first - first_id)

    def _note_ids(self, first: int, first_id: int, count: int) -> None:
        """Remember which task an item is; tell futures that wait for it."""
        runs = self._runs
        if runs and first - runs[-1][0] == first_id - runs[-1][1] == runs[-1][2]:
            runs[-1][2] += count
        else:
            runs.append([first, first_id, count])
        if self.futures:
            self._tell_ids(first, first_id, count)
        if self._has_idler:  # There is work for it: the socket's.
            self._has_idler = False
            with self.condition:
                self.condition.notify_all()

    def _tell_ids(self, first: int, first_id: int, count: int) -> None:
        for index in range(first, first + count):
            future = self.futures.get(index)
            if future is not None:
                future.task_id = first_id + index - first
                if future.cancelled():  # Meanwhile: whoever cancelled it did not know the id.
                    self._session.cancel([future.task_id])

    def _id_of(self, index: int) -> int:
        """The task's id; 0 if it was not submitted."""
        place = bisect_right(self._runs, [index, math.inf]) - 1
        if place >= 0:
            first, first_id, count = self._runs[place]
            if index < first + count:
                return first_id + index - first
        return 0

    def _has_ended(self, index: int) -> bool:
        return self.slots[index] is not None if self.is_sized else index in self.slots

    def _lengthen(self, length: int) -> None:
        """The input has more items than it said."""
        self.slots.extend([None] * (length - len(self.slots)))
        self.length = length

    def _finish_reading(self, error: Optional[BaseException] = None) -> None:
        """Nothing more is read. `error`, if any, is raised where the iteration comes to what is missing."""
        self._iterator = self._items = None
        with self.condition:
            if error is not None and self.input_error is None:
                self.input_error = error
            if self.is_sized:
                self.length = self.submitted  # The input may have had fewer items than it said.
            self.is_exhausted = True
            self._feeder_wakes_at = self.alarm = math.inf
        for index, future in list(self.futures.items()):
            if index >= self.submitted:
                reason = self.input_error or IndexError(f"the input ended before item {index}")
                future.task_ended(0, ENDED_ERROR, reason, 0.0, "")
        with self._feeder:
            self._feeder.notify_all()
        self.tell()

    def _fail_rest(self, failure: BaseException, unsent: int) -> None:
        """The mesh took no more: items that were read but not sent end with that error, and reading is over."""
        error = failure
        if not isinstance(failure, Exception):
            error = TaskCancelledError(f"reading the input of {self.title} was interrupted ({type(failure).__name__})")
        for index in range(unsent, self.submitted):
            if not self._has_ended(index):
                self.settle(index, (ENDED_ERROR, error, 0.0, "", 0))
        self._finish_reading(error)

    # --- an input without a length

    def _feed_unsized(self) -> None:
        """The feeder thread: one item at a time, each sent at once, because reading the next may take for ever."""
        iterator = self._iterator
        self._iterator = None
        assert iterator is not None
        error: Optional[BaseException] = None
        try:
            while not self._is_stopped:
                if self._room() <= 0 and not self._sleep_until_taken():
                    break
                try:
                    item = next(iterator)
                except StopIteration:
                    break
                if self._is_stopped:
                    break
                index = self.submitted
                payload = self._pickle(index, item)
                del item
                if payload is not None:
                    size = len(payload) if type(payload) is bytes else payload.nbytes
                    self._call_bytes += (size - self._call_bytes) * (_SIZE_WEIGHT if self._call_bytes else 1.0)
                    task_id = self._session.submit(self._handle, payload, _Item(self, index))
                    self.submitted = index + 1
                    self._note_ids(index, task_id, 1)
                else:
                    self.submitted = index + 1
                if self._is_cancelled:
                    self._cancel_submitted()
        except BaseException as failure:  # noqa: BLE001 - the input's or the session's; raised where the iteration meets it
            error = failure
        del iterator  # A generator is closed by its last reference.
        self._finish_reading(error)

    def _sleep_until_taken(self) -> bool:
        """Wait until half of the window is free; False if reading was stopped."""
        with self._feeder:
            self._feeder_wakes_at = self.submitted - self._allowed() // 2
            while self.taken < self._feeder_wakes_at and not self._is_stopped:
                self._feeder.wait()
            self._feeder_wakes_at = math.inf
        return not self._is_stopped

    def take(self, index: int) -> Optional[Record]:
        """Give out the record at `index`, the next in order, of an unsized input; None if it has not ended."""
        record: Optional[Record] = self.slots.pop(index, None)
        if record is None:
            return None
        self._step(index)
        self._was_taken(record)
        return record

    def _step(self, index: int) -> None:
        """`index` is given out in order; skip those given out already."""
        index += 1
        while self._out_of_order and index in self._out_of_order:
            self._out_of_order.discard(index)
            index += 1
        self.next_index = index

    def _was_taken(self, record: Record) -> None:
        payload = record[1]
        size = len(payload) if type(payload) is bytes else 0 if record[0] != _OK else payload.nbytes
        self._result_bytes += (size - self._result_bytes) * (_SIZE_WEIGHT if self._result_bytes else 1.0)
        self.taken += 1
        if self.taken >= self._feeder_wakes_at:
            with self._feeder:
                self._feeder.notify_all()
        runs = self._runs
        if len(runs) > 1 and runs[0][0] + runs[0][2] <= self.next_index:
            del runs[0]

    # --- what has ended

    def settle(self, index: int, record: Record) -> None:
        """An item has ended: the long way of `task_ended`, and the only one for what fails on this side."""
        if self._has_ended(index):
            return
        if record[0] != _OK:
            with self.condition:
                self.failed += 1
            if isinstance(record[1], MeshClosedError):
                self._is_stopped = True
                with self._feeder:
                    self._feeder.notify_all()
        self.slots[index] = record
        if self.is_sized:
            self.order.append(index)
        self.tell_of(index)

    def tell_of(self, index: int) -> None:
        """An item has ended that somebody may wait for."""
        if not self.is_sized and self._is_ordered:
            self.order.append(index)
        if self.futures:
            future = self.futures.get(index)
            if future is not None:
                _hand_on(future, self.slots[index])
        self.tell()

    def tell(self) -> None:
        """Wake those who sleep; once, until they have looked again."""
        with self.condition:
            self.is_watched = bool(self.futures) or (self._is_ordered and not self.is_sized)
            self.condition.notify_all()
            news, self._news = self._news, []
        if len(self.order) >= self.alarm:
            self.alarm = math.inf
            with self._feeder:
                self._feeder.notify_all()
        for call in news:
            call()

    def call_at_news(self, call: Callable[[], None]) -> None:
        """Call it once, when the next item ends or the input does; on whichever thread learns of it."""
        with self.condition:
            self._news.append(call)
            self.is_watched = True

    async def arrive(self, arrival: Any) -> None:
        """Await an asyncio future that `call_at_news` leads to."""
        if self._session.slot is None:
            await arrival
        else:
            from gpumesh.client.slots import arrive

            await arrive(self._session, arrival)

    def wait(self, ready: Callable[[], bool], deadline: Optional[float]) -> bool:
        """Wait until `ready()`, doing meanwhile whatever brings that about; false when the deadline passes.

        Args:
            deadline: On the monotonic clock; None for ever.
        """
        while not ready():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            is_mine = False
            if self._can_read_on():
                is_mine = self._feeding.acquire(blocking=False)
                if is_mine:
                    try:
                        if self._can_read_on():
                            self._pump_safely()
                    finally:
                        self._feeding.release()
                    if self._is_stopped:
                        self._finish_stop()
                    continue
                goal = self._watching(ready)  # Another thread reads on.
            else:
                goal = self._watching(lambda: ready() or self._can_read_on())
            if self.submitted > self.ended_count:
                self._session.drive_until(lambda: goal() or self.submitted <= self.ended_count, self.condition, left)  # noqa: B023
            else:
                with self.condition:
                    self._has_idler = True
                    self.condition.wait_for(lambda: goal() or self.submitted > self.ended_count, left)  # noqa: B023
        return True

    def _watching(self, ready: Callable[[], bool]) -> Callable[[], bool]:
        """`ready`, with the flag set first that makes whoever ends an item tell us."""

        def look() -> bool:
            self.is_watched = True
            return ready()

        return look

    # --- futures

    def future(self, index: int, record: Optional[Record] = None) -> MeshFuture:
        """The future of an item; one that has ended if its record is given."""
        found = self.futures.get(index)
        if found is not None:
            return found
        future = MeshFuture(self._handle, index)
        if record is None:
            future = self.futures.setdefault(index, future)
            future.task_id = self._id_of(index)
            with self.condition:
                self.is_watched = True
            record = self.slots[index] if self.is_sized and index < len(self.slots) else None
            if record is None and self.is_past_end(index):
                record = (ENDED_ERROR, self.input_error or IndexError(f"the input ended before item {index}"), 0.0, "", 0)
        if record is not None:
            _hand_on(future, record)
        return future

    def keep_order(self) -> None:
        """From now on know in which order items end."""
        if self._is_ordered:
            return
        with self.condition:
            self._is_ordered = self.is_watched = True
        for index in list(self.slots):  # Some may be told twice: `completed` does not mind.
            self.order.append(index)

    def completed(self, place: int) -> Optional[MeshFuture]:
        """The future of the item that ended as number `place`; of an unsized input the next that was not given out."""
        if self.is_sized:
            if place >= len(self.order):
                return None
            index = self.order[place]
            return self.future(index, self.slots[index])
        while self.order:
            index = self.order.popleft()
            record: Optional[Record] = self.slots.pop(index, None)
            if record is None:
                continue
            if index == self.next_index:
                self._step(index)
            else:
                self._out_of_order.add(index)
            self._was_taken(record)
            return self.future(index, record)
        return None

    def has_completed(self, place: int) -> bool:
        """Whether `completed` has one, or never will."""
        return (len(self.order) > place if self.is_sized else bool(self.order)) or self.is_completed(place)

    def is_completed(self, place: int) -> bool:
        """Whether there is none left that `completed` could give."""
        if not self.is_exhausted:
            return False
        return place >= self.submitted if self.is_sized else self.taken >= self.submitted

    # --- ending early

    def cancel(self) -> None:
        """Read no more, and cancel what has not ended."""
        self._is_stopped = self._is_cancelled = True
        if self.is_sized:
            self._finish_stop()
        else:
            self.stop_reading()
            self._cancel_submitted()

    def stop_reading(self) -> None:
        """Read no more; what was submitted goes on. For an input without a length."""
        self._is_stopped = True
        with self._feeder:
            self._feeder.notify_all()
        if not self.is_exhausted:
            self._finish_reading()

    def _finish_stop(self) -> None:
        """Items of a sized input that were not read are cancelled. Whoever reads at this moment does it afterwards."""
        if self._is_cancelled:
            self._cancel_submitted()
        if not self._feeding.acquire(blocking=False):
            return
        try:
            if self.is_exhausted:
                return
            first, length = self.submitted, self.length
            record: Record = (_CANCELLED, {}, 0.0, "", 0)
            self.slots[first:length] = [record] * (length - first)
            with self.condition:
                self.failed += length - first
                self.order.extend(range(first, length))
                self.submitted = length
            for index, future in list(self.futures.items()):
                if index >= first:
                    _hand_on(future, record)
            self._finish_reading()
        finally:
            self._feeding.release()

    def _cancel_submitted(self) -> None:
        ids: List[int] = []
        for first, first_id, count in list(self._runs):
            start = first if self.is_sized else max(first, self.next_index)
            ids.extend(first_id + index - first for index in range(start, first + count) if not self._has_ended(index))
        if ids:
            self._session.cancel(ids)


def _as_call(payload: Any) -> Any:
    from gpumesh.client.inputs import Call

    return Call(payload)


def _hand_on(future: MeshFuture, record: Record) -> None:
    status, outcome, seconds, worker, task_id = record
    future.task_ended(task_id, status, outcome, seconds, worker)
