"""Event loops: uvloop where it is installed, asyncio's own elsewhere; and a loop on a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any, Callable, Coroutine, Optional, TypeVar

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A fresh loop, the fastest that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def take_over(loop: asyncio.AbstractEventLoop, make: Callable[[], asyncio.BaseProtocol], sock: socket.socket) -> None:
    """Make a transport of a connected, non-blocking socket, of either side; it is the transport's from now on.

    Not by `create_connection`: where a protocol closes its transport in the first moment, uvloop's leaves the socket object in the belief
    that the descriptor is its own. It is closed once more when that object goes, whoever has got the number since.
    """
    await loop.connect_accepted_socket(make, sock)


class Alarm:
    """Calls `ring(now)` when the earliest time that it was set to has come. Never early, also where the loop's clock is coarse."""

    __slots__ = ("_loop", "_ring", "_timer", "_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[float], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._timer: Optional[asyncio.TimerHandle] = None
        self._at = 0.0

    def set(self, when: Optional[float]) -> None:
        """Ring at this time of the loop's clock, unless it will ring before anyway; None: there is no need."""
        if when is None:
            return
        if self._timer is not None:
            if self._at <= when:
                return
            self._timer.cancel()
        self._at = when
        self._timer = self._loop.call_at(when, self._go_off)

    def cancel(self) -> None:
        """Do not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_off(self) -> None:
        self._timer = None
        self._ring(max(self._loop.time(), self._at))


class LoopThread:
    """A loop that runs on a daemon thread until `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))

    def call(self, make: Callable[[], Coroutine[Any, Any, T]], *, timeout: float) -> T:
        """Run a coroutine on the loop and wait for its value.

        Raises:
            concurrent.futures.TimeoutError: It took longer than `timeout` seconds; it is cancelled then.
        """
        future = asyncio.run_coroutine_threadsafe(make(), self.loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what still runs on the loop, then end it and its thread. Idempotent."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5.0)
        if not self._thread.is_alive() and not self.loop.is_closed():
            self.loop.close()
