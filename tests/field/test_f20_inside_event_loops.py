"""F20: the same API inside running event loops, from threads, under uvloop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, List

import pytest

from gpumesh import GPUMesh, accelerate


def double(n: int) -> int:
    return 2 * n


async def use(mesh: GPUMesh) -> List[Any]:
    function = accelerate(mesh)(double)
    future = function.remote(1)
    seen: List[Any] = [await future, future.result()]
    seen.extend(await asyncio.gather(*[function.remote(i) for i in range(20)]))
    seen.append(function.remote(4).result())  # Blocks inside a running loop, and still works.
    seen.append([value async for value in function.map(range(5))])
    seen.append(await function.map(range(3)))
    return seen


EXPECTED = [2, 2, *[2 * i for i in range(20)], 8, [0, 2, 4, 6, 8], [0, 2, 4]]


def test_under_asyncio_run(mesh: GPUMesh) -> None:
    assert asyncio.run(use(mesh)) == EXPECTED


def test_under_uvloop(mesh: GPUMesh) -> None:
    uvloop = pytest.importorskip("uvloop")
    loop = uvloop.new_event_loop()
    try:
        assert loop.run_until_complete(use(mesh)) == EXPECTED
    finally:
        loop.close()


def test_from_two_threads_with_loops_of_their_own_at_once(mesh: GPUMesh) -> None:
    answers: List[Any] = []

    def run() -> None:
        answers.append(asyncio.run(use(mesh)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert answers == [EXPECTED, EXPECTED]
