"""How values leave the process of their generator, and how it waits: against the other end of its socket."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import socket
import threading
import time
from typing import Any, Callable, Iterator, List

import pytest

from gpumesh.config import GENERATOR_WINDOW_BYTES, GENERATOR_WINDOW_ITEMS
from gpumesh.errors import TaskCancelledError
from gpumesh.model.payloads import Bundle, Stored
from gpumesh.protocol.connection import Connection
from gpumesh.protocol.messages import StreamCredit, StreamItems
from gpumesh.runtime.out_streams import item_bytes
from gpumesh.runtime.page import SINCE
from gpumesh.runtime.runner_channel import RunnerChannel
from gpumesh.runtime.runner_streams import BATCH_ITEMS, RunnerStreams
from tests.support.processes import until

TASK, ATTEMPT = 7, 2
SOON = 10.0


class Process:
    """A runner's side of a channel, and the agent at the other end of it."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(SOON)
        self.clock = [0.0] * (SINCE + 1)
        self.channel = RunnerChannel(theirs, self._on_message, lambda answer: None)
        self.streams = RunnerStreams(self.channel, self.clock)
        self.messages: List[StreamItems] = []
        self._theirs = theirs
        self._agent = Connection.trusted()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _on_message(self, kind: Any, message: Any) -> None:
        assert kind is StreamCredit
        self.streams.on_credit(message)

    def _read(self) -> None:
        while True:
            try:
                count = self.ours.recv_into(self._agent.get_buffer())
            except OSError:
                return
            if not count:
                return
            self.messages.extend(self._agent.buffer_updated(count, 0.0))

    def credit(self, limit: int) -> None:
        """From the agent."""
        self._agent.send(StreamCredit(TASK, limit))
        for part in self._agent.data_to_send():
            self.ours.sendall(part)

    @property
    def values(self) -> List[Any]:
        """What has come, which must be in order."""
        found: List[Any] = []
        for message in self.messages:
            assert (message.task_id, message.attempt, message.first) == (TASK, ATTEMPT, len(found))
            found.extend(pickle.loads(item) if type(item) is bytes else item for item in message.items)
        return found

    def close(self) -> None:
        self._theirs.close()
        self.ours.close()


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.close()


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


async def ticks(count: int) -> Any:
    for value in range(count):
        await asyncio.sleep(0)
        yield value


def taken(process: Process, count: int) -> Callable[[], None]:
    """A consumer that takes all, in a thread."""

    def take() -> None:
        limit = GENERATOR_WINDOW_ITEMS
        while limit < count:
            until(lambda: len(process.values) >= limit, SOON)  # noqa: B023
            limit += GENERATOR_WINDOW_ITEMS
            process.credit(limit)

    thread = threading.Thread(target=take)
    thread.start()
    return functools.partial(thread.join, SOON)


@pytest.mark.parametrize("make", [numbers, ticks])
def test_all_values_leave_before_the_end_is_known(process: Process, make: Any) -> None:
    join = taken(process, 1000)
    assert process.streams.run(TASK, ATTEMPT, make(1000), pickle.dumps) is None
    join()

    until(lambda: process.messages and not process.messages[-1].items, SOON)
    assert process.values == list(range(1000))
    assert [bool(message.items) for message in process.messages].count(False) == 1
    assert max(len(message.items) for message in process.messages) <= BATCH_ITEMS
    assert list(process.messages[0].items) == [pickle.dumps(0)]  # At once.


def test_a_value_does_not_wait_for_the_next_one(process: Process) -> None:
    is_seen = threading.Event()

    def slow() -> Any:
        yield from range(5)
        assert is_seen.wait(SOON)
        yield 5
        return "end"

    results: List[Any] = []
    thread = threading.Thread(target=lambda: results.append(process.streams.run(TASK, ATTEMPT, slow(), pickle.dumps)))
    thread.start()
    until(lambda: process.values == [0, 1, 2, 3, 4], SOON)
    is_seen.set()
    thread.join(SOON)
    assert results == ["end"]
    until(lambda: process.values == [0, 1, 2, 3, 4, 5], SOON)


def test_it_waits_when_a_window_is_under_way(process: Process) -> None:
    count = 0

    def endless() -> Iterator[int]:
        nonlocal count
        while True:
            count += 1
            yield count

    def run() -> None:
        with contextlib.suppress(TaskCancelledError):
            process.streams.run(TASK, ATTEMPT, endless(), pickle.dumps)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: len(process.values) == GENERATOR_WINDOW_ITEMS, SOON)
    process.credit(GENERATOR_WINDOW_ITEMS + 10)
    until(lambda: len(process.values) == GENERATOR_WINDOW_ITEMS + 10, SOON)
    assert count == GENERATOR_WINDOW_ITEMS + 10
    process.streams.cancel(TASK)
    process.credit(GENERATOR_WINDOW_ITEMS + 10)  # In a process that does such things another thread receives.
    thread.join(SOON)
    assert not thread.is_alive()


def test_of_large_values_two_are_under_way(process: Process) -> None:
    whole = GENERATOR_WINDOW_BYTES
    sizes = iter([whole, 2 * whole, whole])
    thread = threading.Thread(
        target=lambda: process.streams.run(TASK, ATTEMPT, numbers(3), lambda value: Stored(value, next(sizes))), daemon=True
    )
    thread.start()
    until(lambda: len(process.values) == 2, SOON)
    process.credit(GENERATOR_WINDOW_ITEMS + 1)
    until(lambda: len(process.values) == 3, SOON)
    process.credit(GENERATOR_WINDOW_ITEMS + 2)
    thread.join(SOON)
    assert not thread.is_alive()
    assert [item_bytes(Bundle(Stored(1, 500), (), (7,))), item_bytes(b"abc")] == [500, 3]


def test_a_generator_is_closed_however_its_stream_ends(process: Process) -> None:
    closed: List[str] = []

    def careful(name: str, error: Any = None) -> Iterator[Any]:
        try:
            yield 1
            if error is not None:
                raise error
            yield threading.Lock()
        finally:
            closed.append(name)

    with pytest.raises(TypeError, match="pickle"):
        process.streams.run(TASK, ATTEMPT, careful("cannot travel"), pickle.dumps)
    with pytest.raises(LookupError):
        process.streams.run(TASK, ATTEMPT, careful("raises", LookupError()), pickle.dumps)
    assert closed == ["cannot travel", "raises"]
    with pytest.raises(TypeError, match="returned 'int' instead of a generator"):
        process.streams.run(TASK, ATTEMPT, 3, pickle.dumps)


def test_one_that_nobody_wants_ends_at_its_next_value(process: Process) -> None:
    closed = threading.Event()
    begun = threading.Event()
    caught: List[BaseException] = []

    def endless() -> Iterator[int]:
        try:
            while True:
                begun.set()
                yield 1
        finally:
            closed.set()

    def run() -> None:
        try:
            process.streams.run(TASK, ATTEMPT, endless(), pickle.dumps)
        except TaskCancelledError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(SOON)
    process.streams.cancel(TASK)
    process.credit(10_000_000)
    thread.join(SOON)
    assert closed.is_set()
    assert len(caught) == 1


@pytest.mark.parametrize("make", [numbers, ticks])
def test_time_spent_waiting_is_taken_off_the_clock(process: Process, make: Any) -> None:
    """On the main thread, where nothing else runs."""
    process.clock[SINCE] = began = time.monotonic()
    waits: List[float] = []

    def take() -> None:
        until(lambda: len(process.values) == GENERATOR_WINDOW_ITEMS, SOON)
        time.sleep(0.5)
        waits.append(time.monotonic() - began)
        process.credit(1000)

    thread = threading.Thread(target=take)
    thread.start()
    process.streams.run(TASK, ATTEMPT, make(GENERATOR_WINDOW_ITEMS + 9), pickle.dumps)
    total = time.monotonic() - began
    thread.join(SOON)

    counted = time.monotonic() - process.clock[SINCE]
    assert counted <= total - 0.4


def test_on_a_running_loop_others_go_on_meanwhile(process: Process) -> None:
    async def main() -> int:
        stream = asyncio.ensure_future(process.streams.run_async(TASK, ATTEMPT, ticks(300), pickle.dumps))
        count = 0
        while len(process.values) < GENERATOR_WINDOW_ITEMS:
            count += 1
            await asyncio.sleep(0.001)
        process.credit(1000)
        await stream
        return count

    is_over = False
    receiver = threading.Thread(target=lambda: process.channel.wait_until(lambda: is_over), daemon=True)
    receiver.start()
    try:
        assert asyncio.run(asyncio.wait_for(main(), SOON)) > 0
        until(lambda: process.values == list(range(300)), SOON)
    finally:
        is_over = True
        process.credit(1001)  # It looks up.
        receiver.join(SOON)
