"""Classes of actors with `async def` methods, for tests: light, as the processes of actors import them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any, AsyncIterator, Iterator, List

from gpumesh.runtime.actor_exit import exit_actor
from tests.support.actor_classes import Counter


class Room:
    """Calls that wait for what others do."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.event = asyncio.Event()
        self.lock = asyncio.Lock()
        self.order: List[Any] = []
        self.ticks = 0
        self.ticker = asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        while True:
            self.ticks += 1
            await asyncio.sleep(0)

    async def wait(self, name: str = "") -> str:
        self.order.append(name)
        try:
            await self.event.wait()
            return name
        except asyncio.CancelledError:
            self.order.append("cancelled")
            raise

    async def open(self) -> None:
        async with self.lock:
            self.event.set()

    def is_same_loop(self) -> bool:
        return asyncio.get_running_loop() is self.loop and self.ticks > 0

    def seen(self) -> List[Any]:
        return self.order

    async def fail(self, error: BaseException) -> None:
        await asyncio.sleep(0)
        raise error

    async def leave(self) -> None:
        await asyncio.sleep(0)
        exit_actor()

    async def close(self) -> None:
        print("closing")
        await asyncio.sleep(0)
        print("closed", sorted(self.order))

    def __del__(self) -> None:
        print("deleted")


class Mixed(Counter):
    """Some of its methods are asynchronous."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    async def open(self) -> None:
        self.gate.set()

    def wait(self) -> str:
        self.gate.wait(20)
        return threading.current_thread().name

    def to(self, end: int) -> Iterator[int]:
        yield from range(end)

    async def slowly_to(self, end: int) -> AsyncIterator[int]:
        for number in range(end):
            await asyncio.sleep(0)
            yield number


class Blocking:
    """Its methods do not care for the loop."""

    def block(self, path: str = "") -> None:
        print("begun", flush=True)
        while not os.path.exists(path):
            time.sleep(0.005)

    async def block_inside(self) -> None:
        await asyncio.sleep(0)
        self.block()

    async def work(self) -> str:
        return "done"
