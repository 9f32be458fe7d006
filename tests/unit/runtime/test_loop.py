"""The alarm rings once, at the earliest time it was set to, and never early; a loop's thread ends with all that runs on it."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, Callable, List

import pytest

from gpumesh.runtime.loop import Alarm, LoopThread, new_event_loop, take_over


@pytest.fixture(params=[asyncio.new_event_loop, new_event_loop])
def loop(request: Any) -> Any:
    made = request.param()
    yield made
    made.close()


def rings_of(loop: asyncio.AbstractEventLoop, use: Callable[[Alarm, float], None]) -> List[float]:
    """When it rang, on the loop's clock, until 0.1 s after the start."""
    rung: List[float] = []
    alarm = Alarm(loop, rung.append)
    start = loop.time()
    use(alarm, start)
    loop.call_at(start + 0.1, loop.stop)
    loop.run_forever()
    return rung


def test_it_rings_once_at_the_earliest_time(loop: asyncio.AbstractEventLoop) -> None:
    set_to: List[float] = []

    def use(alarm: Alarm, start: float) -> None:
        set_to.extend([start + 0.05, start + 0.02, start + 0.04])
        for when in set_to:
            alarm.set(when)
        alarm.set(None)

    (rung,) = rings_of(loop, use)

    assert min(set_to) <= rung <= loop.time()


def test_it_can_be_set_again_after_it_rang_and_be_cancelled(loop: asyncio.AbstractEventLoop) -> None:
    def use(alarm: Alarm, start: float) -> None:
        alarm.set(start + 0.01)
        loop.call_at(start + 0.03, alarm.set, start + 0.05)
        loop.call_at(start + 0.07, alarm.set, start + 0.08)
        loop.call_at(start + 0.072, alarm.cancel)

    assert len(rings_of(loop, use)) == 2


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_a_descriptor_is_closed_once_whenever_the_protocol_closes(loop: asyncio.AbstractEventLoop, family: int) -> None:
    """A second time it would be somebody else's."""

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.abort()

        def connection_lost(self, error: Any) -> None:
            over.set_result(None)

    over: asyncio.Future[None] = loop.create_future()

    async def use() -> None:
        with socket.socket(family) as listener:
            if family == socket.AF_INET:
                listener.bind(("127.0.0.1", 0))
                listener.listen()
                ours, theirs = socket.create_connection(listener.getsockname()), listener.accept()[0]
            else:
                ours, theirs = socket.socketpair()
            with theirs:
                ours.setblocking(False)
                descriptor = ours.fileno()
                await take_over(loop, Protocol, ours)
                await over
                assert ours.fileno() == -1
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.fstat(descriptor)

    loop.run_until_complete(use())


def test_a_thread_that_is_stopped_lets_its_tasks_clean_up() -> None:
    thread = LoopThread("test-loop")
    ended: List[str] = []

    async def wait_for_ever() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    async def start() -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(wait_for_ever())
        await asyncio.sleep(0)
        return task

    task = thread.call(start, timeout=5.0)
    thread.stop()
    thread.stop()

    assert ended == ["cleaned up"]
    assert task.cancelled()
    assert thread.loop.is_closed()
