"""Event loops: uvloop where it is installed, asyncio's own elsewhere; and a loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Callable, Coroutine, TypeVar

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A fresh loop, the fastest that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class LoopThread:
    """A loop that runs on a daemon thread until `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

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
        """End the loop and its thread. Idempotent."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5.0)
        if not self._thread.is_alive() and not self.loop.is_closed():
            self.loop.close()
