"""ItemStream: the values of a generator that runs on the mesh, one by one, and its end as a future.

    StreamItems ──> Arrivals (the sink: keeps order, counts what may be sent) ──> ItemStream (next, async next) ──> the user
         ^── StreamCredit ── as values are taken, a quarter of the window at a time <──┘

Promises:

1. Values come in the generator's order, each once, as soon as it is here; what the generator raised is raised after them.
2. No more than a window is ahead of what was taken, unless somebody waits for the end alone.
3. A place that was received is not received again: not after a reconnect, nor from a second run on another worker.
4. Dropping the stream, or closing it, ends the generator.
"""

from __future__ import annotations

import functools
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, Optional

from gpumesh.client.arrivals import Arrivals
from gpumesh.client.dropped import do_soon
from gpumesh.client.futures import MeshFuture
from gpumesh.errors import MeshUnavailableError, SerializationError, WorkerCrashedError
from gpumesh.model.outcomes import Status
from gpumesh.serialization.values import loads

if TYPE_CHECKING:
    from types import TracebackType
    from typing import AsyncIterator, Iterator, Type

    from gpumesh.client.channel import SpecHandle

_NOTHING = object()
_OK = int(Status.OK)


class ItemStream(MeshFuture):
    """The values of a generator that runs on the mesh, and the future of its end.

    It is iterated once, with `for`, `async for` or `next`, by one thread or several: each value goes to one of them. A generator is
    never more than 256 values or about a megabyte ahead of who takes them, so that one without an end, or of a slow consumer, costs
    no memory; `result()`, `exception()` and `await` wait for its end and keep what comes meanwhile.

    Dropping the last reference to it, `close()` and `cancel()` end the generator where it is.
    """

    __slots__ = ("sink", "_is_over")

    def __init__(self, handle: SpecHandle, index: int = 0) -> None:
        super().__init__(handle, index)
        self.sink = Arrivals(self)
        """What the channel is to tell of its task."""
        self._is_over = False  # The iteration has met the end.

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next value; blocks until it is there.

        Raises:
            StopIteration: The generator has ended; its `value` is what the generator returned.
            TaskCancelledError, WorkerCrashedError, ...: It could not be run to its end.
            BaseException: Whatever the generator raised, once, after the values before that.
        """
        return self.next()

    def next(self, timeout: Optional[float] = None) -> Any:
        """The next value, for which is waited no longer than `timeout` seconds. Else as `next(stream)`.

        Raises:
            TimeoutError: It is not there in time; ask again.
        """
        sink = self.sink
        while True:
            item = self._take()
            if item is not _NOTHING:
                return self._loaded(item, timeout)
            if self.done():
                if sink.items:
                    continue  # They came in between.
                return self._finish()
            if not self._handle.session.drive_until(self._has_news, sink.condition, timeout):
                raise FutureTimeoutError(f"the next value of {self._title()} is not there after {timeout:g} s; ask again")

    def _has_news(self) -> bool:
        return bool(self.sink.items) or self.done()

    def _take(self) -> Any:
        if self._is_over:
            raise StopIteration
        try:
            return self.sink.items.popleft()
        except IndexError:
            return _NOTHING

    def _loaded(self, item: Any, timeout: Optional[float] = None) -> Any:
        try:
            value = loads(item) if type(item) is bytes else item.load(timeout)
        except (FutureTimeoutError, MeshUnavailableError):  # It may come yet.
            self.sink.items.appendleft(item)
            raise
        except MemoryError:
            self.sink.taken(item)
            raise
        except Exception as error:  # Unpickling runs user code.
            self.sink.taken(item)
            why = self._why_not(error, item)
            if why is error:
                raise
            raise why from error
        self.sink.taken(item)
        return value

    def _finish(self) -> Any:
        """The generator has ended, and nothing is left of its values."""
        self._is_over = True
        if self.cancelled():
            return super().result()
        value = super().result()
        self.sink.confirm()
        if not self.sink.is_complete:
            raise WorkerCrashedError(f"values of {self._title()} were lost with the worker that made them; run it again")
        raise StopIteration(value)

    # --- the end alone

    def _wait(self, timeout: Optional[float]) -> None:
        self.sink.lift()
        super()._wait(timeout)

    def __await__(self) -> Any:
        self.sink.lift()
        return super().__await__()

    def submitted(self, task_id: int) -> ItemStream:
        """Its task has this id; the stream itself."""
        self.task_id = task_id
        return self

    # --- asyncio

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        """The next value; see `__next__`. Cancelling the waiting asyncio task does not end the generator.

        Raises:
            StopAsyncIteration: The generator has ended.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        while True:
            try:
                item = self._take()
            except StopIteration:
                raise StopAsyncIteration from None
            if item is not _NOTHING:
                if type(item) is bytes:
                    return self._loaded(item)
                return await loop.run_in_executor(None, self._loaded, item)  # It may have to be fetched.
            if self.done():
                if self.sink.items:
                    continue
                if self._status == _OK and type(self._outcome) is not bytes:
                    await loop.run_in_executor(None, self._load)
                try:
                    self._finish()
                except StopIteration as end:
                    raise StopAsyncIteration(end.value) from None
            arrival = loop.create_future()
            self.sink.call_at_news(lambda: _arrive(loop, arrival))  # noqa: B023 - called before the loop goes on
            if not self._has_news():
                session = self._handle.session
                if session.slot is None:
                    await arrival
                else:
                    from gpumesh.client.slots import arrive

                    await arrive(session, arrival)

    async def __aenter__(self) -> ItemStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    # --- ending it

    def cancel(self) -> bool:
        """End the generator; what has come and was not taken is dropped. Whoever waits gets TaskCancelledError.

        Returns:
            False if it had ended.
        """
        is_cancelled = super().cancel()
        if is_cancelled:
            self.sink.close()
            self.sink.tell_news()
        return is_cancelled

    def close(self) -> None:
        """End the generator, if it has not ended, and the iteration: nothing comes any more. Idempotent."""
        self._is_over = True
        self.sink.close()
        self.cancel()
        self.sink.tell_news()

    def __enter__(self) -> ItemStream:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "task_id", 0) and not self.done():
            do_soon(functools.partial(self._handle.session.cancel, [self.task_id]))

    def __reduce__(self) -> Any:
        raise SerializationError(
            f"{self!r} cannot travel; pass its values, list(stream), or let the task run the generator itself"
        )

    def __repr__(self) -> str:
        return super().__repr__().replace("MeshFuture", "ItemStream", 1)


def _arrive(loop: Any, arrival: Any) -> None:
    try:
        loop.call_soon_threadsafe(_set_arrived, arrival)
    except RuntimeError:
        pass  # The loop is closed: nobody waits any more.


def _set_arrived(arrival: Any) -> None:
    if not arrival.done():
        arrival.set_result(None)
