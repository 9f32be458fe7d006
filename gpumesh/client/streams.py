"""ResultStream: many calls of one function, as the list of their results. Reading the input is `client.feeding`'s matter.

Promises:

1. Values come in input order, each as soon as it and all before it are there; `as_completed` gives finishing order.
2. A sized input makes a list: it can be iterated again, indexed, compared. Of any other input, results are given out once and
   then forgotten, and it is read no further than a window ahead of them.
3. The first failed item raises where the iteration meets it; so does an error of the input itself.
4. Once iteration has begun, dropping the stream cancels what has not ended. A stream that nobody looked at runs to its end.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import (
    TYPE_CHECKING,
    Any,
    AsyncIterator,
    Callable,
    Dict,
    Generator,
    Iterable,
    Iterator,
    List,
    Optional,
    Tuple,
    Union,
    overload,
)

from gpumesh.client.dropped import do_soon
from gpumesh.client.feeding import LOADED, Feed, Record
from gpumesh.client.futures import MeshFuture
from gpumesh.client.outcomes import SecondRunError
from gpumesh.errors import MeshError, ObjectLostError, SerializationError
from gpumesh.model.outcomes import Status
from gpumesh.serialization.values import loads

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Type

logger = logging.getLogger("gpumesh")

_OK = int(Status.OK)
_UNLOADABLE = (SerializationError, ObjectLostError, SecondRunError, MemoryError)
_NEVER: Dict[int, Any] = {}


def open_stream(
    items: Iterable[Any],
    *,
    session: Any,
    handle: Any,
    function: Callable[..., Any],
    bound: Tuple[Any, ...] = (),
    mesh: Any = None,
    window: Optional[int] = None,
    return_exceptions: bool = False,
    progress: bool = False,
    is_verbose: bool = False,
) -> ResultStream:
    """Start mapping; see `AcceleratedFunction.map`.

    Args:
        bound: Positional arguments before those of the item: `self` of a method.
        mesh: Kept alive as long as the stream.
        is_verbose: Log where the tasks ran, at the end.
    """
    feed = Feed(items, session=session, handle=handle, function=function, bound=bound, window=window)
    feed.start()
    stream = ResultStream(feed, mesh=mesh, return_exceptions=return_exceptions)
    stream._is_verbose = is_verbose
    if progress:
        from gpumesh.client.progress import show_progress

        stream._bar = show_progress(feed)
    return stream


class ResultStream:
    """The results of a `.map`, which run on the mesh already; see the module's promises.

    It may be used from several threads. For an input without a length, `len`, indexing and `futures` raise TypeError.
    """

    def __init__(self, feed: Feed, *, mesh: Any, return_exceptions: bool) -> None:
        self._feed = feed
        self._mesh = mesh
        self._return_exceptions = return_exceptions
        self._is_begun = False  # Somebody iterates: dropping it then means that the rest is not wanted.
        self._bar: Any = None
        self._is_verbose = False

    # --- in order

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(None)

    def result(self, timeout: Optional[float] = None) -> List[Any]:
        """The whole list; blocks until it is there.

        Args:
            timeout: Seconds for all of it. It ends the waiting, not the tasks.

        Raises:
            TimeoutError: Not all are there in time.
            BaseException: Whatever the first failed item raised, unless `return_exceptions` was given.
        """
        return list(self._iterate(timeout))

    def _iterate(self, timeout: Optional[float]) -> Generator[Any, None, None]:
        """Values in input order; the one loop through which each value of a large map goes."""
        self._is_begun = True
        feed = self._feed
        deadline = None if timeout is None else time.monotonic() + timeout
        slots = feed.slots
        futures = feed.futures
        keeps = feed.is_sized
        index = 0
        while True:
            if keeps:
                try:
                    record = slots[index]
                except IndexError:  # Past the end; for the length alone it is not worth asking each time.
                    record = None
            else:
                index = feed.next_index
                record = feed.take(index)
            if record is None:
                if feed.is_past_end(index):
                    break
                if not feed.wait(lambda: feed.has(index), deadline):  # noqa: B023 - the loop waits for this very index
                    raise FutureTimeoutError(
                        f"result {index} of {feed.title} is not there after {timeout:g} s; its tasks go on"
                    )
                continue
            status, outcome, seconds, worker, task_id = record
            if status == _OK:
                try:
                    if keeps and futures and index in futures:
                        value = futures[index].result(_left(deadline))
                    elif type(outcome) is bytes:
                        value = loads(outcome)
                    else:
                        value = outcome.load(_left(deadline) if keeps else None)  # Taken is taken.
                except _UNLOADABLE:
                    value = self._failed(index, record)
                else:
                    if keeps:
                        slots[index] = (LOADED, value, seconds, worker, task_id)
            elif status == LOADED:
                value = outcome
            else:
                value = self._failed(index, record)
            index += 1
            yield value
            value = record = outcome = None  # Nothing here keeps a consumed value alive while the next is waited for.
        self._end()

    def _failed(self, index: int, record: Record) -> Any:
        """A failed item's exception: raised, or as its value."""
        future = self._feed.future(index, record)
        if not self._return_exceptions:
            return future.result()
        return _exception_of(future)

    def _end(self) -> None:
        """The iteration has met the end of the input."""
        if self._bar is not None:
            self._bar.finish()
        if self._is_verbose:
            self._is_verbose = False
            _log_summary(self._feed)
        error = self._feed.input_error
        if error is not None:
            raise error

    # --- in finishing order

    def as_completed(self, timeout: Optional[float] = None) -> Iterator[MeshFuture]:
        """Futures in the order in which they end; `future.index` is the place in the input.

        Args:
            timeout: Seconds for the whole iteration.

        Raises:
            TimeoutError: Not all have ended in time.
            Exception: What reading the input raised, after all results.
        """
        self._is_begun = True
        feed = self._feed
        deadline = None if timeout is None else time.monotonic() + timeout
        place = 0
        feed.keep_order()
        while True:
            found = feed.completed(place)
            if found is None:
                if feed.is_completed(place):
                    break
                if not feed.wait(lambda: feed.has_completed(place), deadline):  # noqa: B023 - the loop waits for this very place
                    raise FutureTimeoutError(f"{feed.title} is not done after {timeout:g} s; its tasks go on")
                continue
            place += 1
            yield found
            del found
        self._end()

    # --- as a list

    @property
    def futures(self) -> List[MeshFuture]:
        """One future for each item of a sized input."""
        feed = self._feed
        self._need_size("futures")
        self._is_begun = False  # They live on without the stream.
        return [feed.future(index) for index in range(feed.length)]

    def __len__(self) -> int:
        self._need_size("len()")
        return self._feed.length

    def __bool__(self) -> bool:
        return not self._feed.is_sized or self._feed.length > 0

    @overload
    def __getitem__(self, place: int) -> Any: ...

    @overload
    def __getitem__(self, place: slice) -> List[Any]: ...

    def __getitem__(self, place: Union[int, slice]) -> Any:
        """The value at a place, waiting for it; of a slice, the list."""
        self._need_size("indexing")
        length = self._feed.length
        if isinstance(place, slice):
            return [self._value(index) for index in range(*place.indices(length))]
        index = place + length if place < 0 else place
        if not 0 <= index < length:
            raise IndexError(f"there are {length} results, none at {place}")
        return self._value(index)

    def _value(self, index: int) -> Any:
        feed = self._feed
        feed.wait(lambda: feed.has(index), None)
        record = feed.slots[index] if index < len(feed.slots) else None
        if record is None:  # The input was shorter than it said.
            self._end()
            raise IndexError(f"the input ended before item {index}")
        if record[0] == LOADED:
            return record[1]
        if record[0] != _OK:
            return self._failed(index, record)
        value = feed.future(index, record).result()
        feed.slots[index] = (LOADED, value, *record[2:])
        return value

    def _need_size(self, what: str) -> None:
        if not self._feed.is_sized:
            raise TypeError(
                f"{what} needs an input with a length; map over a list, or take the results with `for`, list() or as_completed()"
            )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ResultStream):
            return self is other or (self._feed.is_sized and other._feed.is_sized and list(self) == list(other))
        if isinstance(other, (list, tuple)) and self._feed.is_sized:
            return list(self) == list(other)
        return NotImplemented

    __hash__ = object.__hash__

    def __contains__(self, value: object) -> bool:
        return any(value is found or value == found for found in self)

    def __reversed__(self) -> Iterator[Any]:
        return (self._value(index) for index in range(len(self) - 1, -1, -1))

    # --- asyncio

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._iterate_async()

    async def _iterate_async(self) -> AsyncIterator[Any]:
        import asyncio

        loop = asyncio.get_running_loop()
        self._is_begun = True
        feed = self._feed
        index = 0
        while True:
            if not feed.is_sized:
                index = feed.next_index
            if not feed.has(index):
                arrival = loop.create_future()
                feed.call_at_news(lambda: _arrive(loop, arrival))  # noqa: B023 - called before the loop goes on
                if not feed.has(index):
                    await feed.arrive(arrival)
                continue
            if feed.is_past_end(index):
                break
            if feed.is_sized:
                record = feed.slots[index]
                if record[0] == _OK and type(record[1]) is not bytes:  # The same.
                    value = await loop.run_in_executor(None, self._value, index)
                else:
                    value = self._value(index)
            else:
                record = feed.take(index)
                if record is None:
                    continue
                if record[0] != _OK:
                    value = self._failed(index, record)
                elif type(record[1]) is bytes:
                    value = loads(record[1])
                else:  # It may have to be fetched: not on the loop's thread.
                    value = await loop.run_in_executor(None, record[1].load)
            index += 1
            yield value
        self._end()

    async def _gather(self) -> List[Any]:
        return [value async for value in self._iterate_async()]

    def __await__(self) -> Generator[Any, None, List[Any]]:
        return self._gather().__await__()

    # --- ending it

    def cancel(self) -> None:
        """Cancel what has not ended, running or not. Their items raise TaskCancelledError where they are met."""
        self._feed.cancel()

    def done(self) -> bool:
        """Whether every item has ended, in whatever way."""
        return self._feed.is_done

    def __enter__(self) -> ResultStream:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> None:
        if not self._feed.is_done:
            self._feed.cancel()
        if self._bar is not None:
            self._bar.finish()

    def __del__(self) -> None:
        feed = getattr(self, "_feed", None)
        if feed is not None and not feed.is_done and (self._is_begun or not feed.is_sized):
            do_soon(feed.cancel if self._is_begun else feed.stop_reading)

    # --- for people

    def __repr__(self) -> str:
        return f"<ResultStream of {self._feed.name}: {self._counts()}>"

    def _repr_html_(self) -> str:
        import html

        return f"<code>{html.escape(self._feed.name)}</code>: {self._counts()}"

    def _counts(self) -> str:
        feed = self._feed
        ended, failed = feed.ended_count, feed.failed
        parts = [f"{ended - failed} done"]
        if failed:
            parts.append(f"{failed} failed")
        if feed.is_sized:
            parts.append(f"{feed.length - ended} pending")
            return ", ".join(parts) + f" of {feed.length}"
        parts.append(f"{feed.submitted - ended} pending")
        return ", ".join(parts) + ("" if feed.is_exhausted else ", input not read to its end")

    def __reduce__(self) -> Any:
        raise SerializationError(f"{self!r} cannot travel inside a value; pass its results, list(stream)")


def _left(deadline: Optional[float]) -> Optional[float]:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _exception_of(future: MeshFuture) -> BaseException:
    try:
        error = future.exception()
    except MeshError as cancelled:
        return cancelled
    assert error is not None, future
    return error


def _arrive(loop: Any, arrival: Any) -> None:
    try:
        loop.call_soon_threadsafe(_set_arrived, arrival)
    except RuntimeError:
        pass  # The loop is closed: nobody waits any more.


def _set_arrived(arrival: Any) -> None:
    if not arrival.done():
        arrival.set_result(None)


def _log_summary(feed: Feed) -> None:
    by_worker: Dict[str, Tuple[int, float]] = {}
    for record in feed.ended_records():  # Of an unsized input they are gone by now.
        count, seconds = by_worker.get(record[3], (0, 0.0))
        by_worker[record[3]] = (count + 1, seconds + record[2])
    where = ", ".join(
        f"{worker or 'nowhere'} {count} in {seconds:.3g} s" for worker, (count, seconds) in sorted(by_worker.items())
    )
    logger.info(
        "%s: %d tasks ended, %d of them failed%s", feed.name, feed.ended_count, feed.failed, f"; {where}" if where else ""
    )
