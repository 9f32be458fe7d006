"""xoscar: a main pool in a process of its own, as on a cluster, and two sub pools, processes that hold the actors. It has no tasks.

The driver calls from within an event loop, as its users do: there is no other way into it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any, Awaitable, Iterable, Iterator, List, Optional, Sequence

import xoscar

from benchmarks.functions import Performer
from benchmarks.systems import SLOTS, Timed

HOST = "127.0.0.1"


class Actor(Performer, xoscar.Actor):  # type: ignore[misc]
    """Lives in a sub pool, beside others."""


class Xoscar:
    """`await` of one call after the other, `asyncio.gather` of many."""

    def open(self, *, object_bytes: Optional[int] = None) -> None:
        self._pool = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._pool.stdout is not None
        self._address = self._pool.stdout.readline().strip()
        self._loop = _new_loop()
        self._created = 0

    def close(self) -> None:
        self._loop.close()
        self._pool.communicate("\n")

    def _run(self, awaitable: Awaitable[Any]) -> Any:
        return self._loop.run_until_complete(awaitable)

    def create_actors(self, count: int) -> List[Any]:
        places = range(self._created, self._created + count)
        self._created += count

        async def create() -> List[Any]:
            return await asyncio.gather(*(self._create(place) for place in places))

        actors: List[Any] = self._run(create())
        return actors

    def _create(self, place: int) -> Awaitable[Any]:
        strategy = xoscar.allocate_strategy.ProcessIndex(1 + place % SLOTS)  # 0 is the main pool.
        created: Awaitable[Any] = xoscar.create_actor(Actor, address=self._address, uid=str(place), allocate_strategy=strategy)
        return created

    def end_actors(self, actors: List[Any]) -> None:
        for actor in actors:
            self._run(xoscar.destroy_actor(actor))

    def timed_calls(self, actor: Any, method: str, items: Iterable[Any], *, seconds: float) -> Timed:
        async def calls() -> Timed:
            timed = Timed([], [])
            call = getattr(actor, method)
            clock = time.perf_counter
            end = clock() + seconds
            for item in items:
                before = clock()
                result = await call(item)
                after = clock()
                timed.seconds.append(after - before)
                timed.results.append(result)
                if after > end:
                    break
            return timed

        timed: Timed = self._run(calls())
        return timed

    def call_all(self, actor: Any, method: str, items: Sequence[Any]) -> List[Any]:
        async def calls() -> List[Any]:
            call = getattr(actor, method)
            return await asyncio.gather(*(call(item) for item in items))

        results: List[Any] = self._run(calls())
        return results

    def call_each(self, actors: Sequence[Any], method: str, item: Any) -> List[Any]:
        async def calls() -> List[Any]:
            return await asyncio.gather(*(getattr(actor, method)(item) for actor in actors))

        results: List[Any] = self._run(calls())
        return results

    def stream_of_actor(self, actor: Any, count: int) -> Iterator[int]:
        raise NotImplementedError("it asks for each item in a call of its own")


def _new_loop() -> asyncio.AbstractEventLoop:
    """As xoscar chooses its own: uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve() -> None:
    pool = await xoscar.create_actor_pool(HOST, n_process=SLOTS)
    print(pool.external_address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await pool.stop()


SYSTEM = Xoscar

if __name__ == "__main__":
    asyncio.run(_serve())
