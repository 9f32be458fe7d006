"""Values of generators on their way out of a process that runs user code.

    generator ── value ──> dump ──> batch ── StreamItems ──> agent
        ^── waits while as many values are under way as StreamCredit allows ──┘

Promises:

1. Values leave in their order, and all of them before `run` returns or raises; the last word is an empty batch.
2. A value leaves at once, unless another has left less than `GENERATOR_GATHER_SECONDS` before: then it waits for company, at most
   about so long.
3. No more than `GENERATOR_WINDOW_ITEMS` values are under way, and of large ones no more than `GENERATOR_WINDOW_BYTES` or two;
   who waits for his consumer hears interrupts, holds up no loop, and lets others have the slot.
4. The generator is closed when its stream ends, however it does.
"""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any, Callable, Dict

from gpumesh.config import GENERATOR_GATHER_SECONDS, GENERATOR_WINDOW_BYTES, GENERATOR_WINDOW_ITEMS
from gpumesh.errors import TaskCancelledError
from gpumesh.model.payloads import payload_bytes
from gpumesh.protocol.messages import StreamCredit, StreamItems
from gpumesh.runtime import runner_slots
from gpumesh.runtime.out_streams import LateValues, OutStream, item_bytes
from gpumesh.runtime.page import SINCE
from gpumesh.runtime.runner_channel import RunnerChannel

BATCH_ITEMS = GENERATOR_WINDOW_ITEMS // 4
BATCH_BYTES = GENERATOR_WINDOW_BYTES // 4
SLOT_KEPT_SECONDS = 0.002  # Of waiting for a consumer, before others may have the slot: most are back at once.
TIMEOUT_STOPS_SECONDS = 0.2  # The timeout is put off by so much at a time, while its generator waits for its consumer.
LEAST_WAIT_SECONDS = 0.001  # A timeout that is over is put off for no less.

Dump = Callable[[Any], Any]
"""A value as a payload, in the store if it is large. What it returns does not change when the value does."""


class RunnerStreams:
    """All streams of one process. `on_credit` may come on any thread.

    Args:
        channel: To the agent.
        clock: The page's: when the task that runs has begun. Its timeout does not count what it waits for its consumer, where it is
            the only one that runs.
    """

    def __init__(self, channel: RunnerChannel, clock: Any) -> None:
        self._channel = channel
        self._clock = clock
        self._streams: Dict[int, OutStream] = {}
        self._late = LateValues(self._streams, self._send)

    def on_credit(self, message: StreamCredit) -> None:
        """More may be sent."""
        stream = self._streams.get(message.task_id)
        if stream is not None:
            stream.credit(message.limit)

    def cancel(self, task_id: int) -> None:
        """Nobody wants its values any more: a generator in a thread is closed when it yields the next, or waits with it."""
        stream = self._streams.get(task_id)
        if stream is not None:
            stream.is_cancelled = True
            self._channel.look_again()

    def take_waited(self, task_id: int) -> float:
        """Seconds that a generator has waited for its consumer, since this was asked last: they count for no timeout."""
        stream = self._streams.get(task_id)
        if stream is None:
            return 0.0
        is_waiting = stream.waits_since > 0.0
        stream.end_wait()
        if is_waiting:
            stream.begin_wait()
        waited, stream.waited = stream.waited, 0.0
        return waited if waited > LEAST_WAIT_SECONDS else 0.0

    # --- on a thread of its own

    def run(self, task_id: int, attempt: int, source: Any, dump: Dump) -> Any:
        """Send all values of a generator, and return what it returns. Blocks; an asynchronous one gets an event loop of its own.

        Raises:
            TypeError: It is nothing that can be iterated.
            BaseException: What the generator raises.
        """
        if hasattr(source, "__anext__"):
            import asyncio

            is_main = threading.current_thread() is threading.main_thread()
            return asyncio.run(self.run_async(task_id, attempt, source, dump, reads=is_main))
        iterator = _iterator(source)
        stream = self._open(task_id, attempt)
        try:
            try:
                while True:
                    try:
                        value = next(iterator)
                    except StopIteration as end:
                        return end.value
                    self._add(stream, dump(value))
                    value = None  # It may be large, and the next is being made.
                    if not stream.may_go_on():
                        stream.begin_wait()
                        self._wait(stream)
                        stream.end_wait()
            finally:
                _close(iterator)
        finally:
            self._end(stream)

    def _wait(self, stream: OutStream) -> None:
        slot = runner_slots.current
        if not self._channel.wait_until(stream.may_go_on, monotonic() + SLOT_KEPT_SECONDS):
            number = slot.begin() if slot is not None else 0
            goes_on = False
            try:
                is_alone = threading.current_thread() is threading.main_thread()
                while not self._wait_a_moment(stream, is_alone):
                    pass
                goes_on = True
            finally:
                if slot is not None:
                    slot.end(number, goes_on=goes_on)

    def _wait_a_moment(self, stream: OutStream, is_alone: bool) -> bool:
        if not is_alone:
            return self._channel.wait_until(stream.may_go_on)
        began = monotonic()
        self._clock[SINCE] += TIMEOUT_STOPS_SECONDS  # Beforehand: the agent may look at any moment.
        try:
            return self._channel.wait_until(stream.may_go_on, began + TIMEOUT_STOPS_SECONDS)
        finally:
            self._clock[SINCE] += monotonic() - began - TIMEOUT_STOPS_SECONDS

    # --- on an event loop

    async def run_async(self, task_id: int, attempt: int, source: Any, dump: Dump, *, reads: bool = False) -> Any:
        """The same on the running loop; None is returned for an asynchronous generator.

        Args:
            reads: Nobody else receives what the agent sends; only on the main thread.
        """
        stream = self._open(task_id, attempt)
        try:
            if not hasattr(source, "__anext__"):
                iterator = _iterator(source)
                try:
                    while True:
                        try:
                            value = next(iterator)
                        except StopIteration as end:
                            return end.value
                        self._add(stream, dump(value))
                        value = None
                        if not stream.may_go_on():
                            await self._wait_async(stream, reads)
                finally:
                    _close(iterator)
            try:
                async for value in source:
                    self._add(stream, dump(value))
                    value = None
                    if not stream.may_go_on():
                        await self._wait_async(stream, reads)
            finally:
                close = getattr(source, "aclose", None)
                if close is not None:
                    await close()
            return None
        finally:
            self._end(stream)

    async def _wait_async(self, stream: OutStream, reads: bool) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        arrival = loop.create_future()

        def look() -> None:
            if not arrival.done() and stream.may_go_on():
                arrival.set_result(None)

        def tell() -> None:
            loop.call_soon_threadsafe(look)

        stream.on_credit = tell
        stream.begin_wait()
        if reads:
            loop.add_reader(self._channel.fileno(), self._channel.receive_now)
        try:
            look()
            if not reads:
                await arrival
                return
            slot = runner_slots.current
            await asyncio.wait([arrival], timeout=SLOT_KEPT_SECONDS)
            if not arrival.done():
                number = slot.begin() if slot is not None else 0
                goes_on = False
                try:
                    while not arrival.done():
                        await self._wait_a_moment_async(arrival)
                    goes_on = True
                finally:
                    if slot is not None:
                        slot.end(number, goes_on=goes_on)
        finally:
            stream.end_wait()
            stream.on_credit = None
            if reads:
                loop.remove_reader(self._channel.fileno())

    async def _wait_a_moment_async(self, arrival: Any) -> None:
        import asyncio

        began = monotonic()
        self._clock[SINCE] += TIMEOUT_STOPS_SECONDS
        try:
            await asyncio.wait([arrival], timeout=TIMEOUT_STOPS_SECONDS)
        finally:
            self._clock[SINCE] += monotonic() - began - TIMEOUT_STOPS_SECONDS

    # --- sending

    def _open(self, task_id: int, attempt: int) -> OutStream:
        stream = self._streams[task_id] = OutStream(task_id, attempt)
        return stream

    def _add(self, stream: OutStream, payload: Any) -> None:
        if stream.is_cancelled:
            raise TaskCancelledError("nobody wants its values any more")
        size = item_bytes(payload)
        with stream.lock:
            stream.batch.append(payload)
            stream.batch_bytes += payload_bytes(payload)
            stream.count += 1
            stream.sizes.append(size)
            stream.under_way += size
            if (
                type(payload) is not bytes  # What it refers to is let go of after it was told.
                or len(stream.batch) >= BATCH_ITEMS
                or stream.batch_bytes >= BATCH_BYTES
                or not stream.has_room()
                or monotonic() - stream.sent_at >= GENERATOR_GATHER_SECONDS
            ):
                self._send(stream)
                return
        self._late.wake()

    def _send(self, stream: OutStream) -> None:
        """Send what waits for company. Under its lock."""
        batch, stream.batch, stream.batch_bytes = stream.batch, [], 0
        self._channel.send(StreamItems(stream.task_id, stream.attempt, stream.count - len(batch), batch))
        stream.sent_at = monotonic()

    def _end(self, stream: OutStream) -> None:
        if self._streams.get(stream.task_id) is stream:
            del self._streams[stream.task_id]
        with stream.lock:
            if stream.batch:
                self._send(stream)
            self._send(stream)


def _iterator(source: Any) -> Any:
    try:
        return iter(source)
    except TypeError:
        raise TypeError(
            f"its values were to be streamed, and it returned {type(source).__name__!r} instead of a generator"
        ) from None


def _close(iterator: Any) -> None:
    close = getattr(iterator, "close", None)
    if close is not None:
        close()
