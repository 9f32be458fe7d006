"""F22: an input is read no further than a bounded window ahead of what is taken."""

from __future__ import annotations

import itertools
import resource
import time
from typing import Iterator

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.config import STREAM_WINDOW_ITEMS


def double(n: int) -> int:
    return 2 * n


def size(data: bytes) -> int:
    return len(data)


def test_an_endless_generator_gives_its_first_results(mesh: GPUMesh) -> None:
    read = 0

    def count() -> Iterator[int]:
        nonlocal read
        for number in itertools.count():
            read = number
            yield number

    assert list(itertools.islice(accelerate(mesh)(double).map(count()), 5)) == [0, 2, 4, 6, 8]
    assert read <= STREAM_WINDOW_ITEMS + 10


def test_leaving_the_iteration_stops_the_reading(mesh: GPUMesh) -> None:
    read = 0

    def count() -> Iterator[int]:
        nonlocal read
        for number in itertools.count():
            read = number
            yield number

    stream = accelerate(mesh)(double).map(count(), window=50)
    iterator = iter(stream)
    assert next(iterator) == 0
    stream.cancel()
    time.sleep(0.2)
    seen = read
    time.sleep(0.2)

    assert read == seen
    assert seen < 1000


@pytest.mark.timeout(120)
def test_many_items_of_ten_kilobytes_take_bounded_memory(mesh: GPUMesh) -> None:
    def items() -> Iterator[bytes]:
        for _ in range(20_000):
            yield bytes(10_000)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = sum(accelerate(mesh)(size).map(items()))
    grown_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    assert total == 200_000_000
    assert grown_kilobytes < 150_000, "200 MB went through; the window holds 64 MB"
