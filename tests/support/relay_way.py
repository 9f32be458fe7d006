"""A relay as a worker's agent has one, without a worker."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, Callable, Iterator

from gpumesh.network.address import parse_address
from gpumesh.runtime.relay import Relay

TOKEN = "secret"


class Way:
    """A relay on a loop of its own thread."""

    def __init__(self, port: int, token: str = TOKEN, *, hands_over: bool = True) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.relay = self.call(lambda: Relay(self.loop, parse_address(f"127.0.0.1:{port}"), token, hands_over=hands_over))
        self.path: str = self.call(lambda: self.relay.path)

    def call(self, act: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return act()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.relay.close(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@contextlib.contextmanager
def way(port: int, token: str = TOKEN, *, hands_over: bool = True) -> Iterator[Way]:
    made = Way(port, token, hands_over=hands_over)
    try:
        yield made
    finally:
        made.close()
