"""F15: every kind of callable works, or is refused with what to write instead."""

from __future__ import annotations

import functools
from typing import Any, AsyncIterator, Iterator

import pytest

from gpumesh import GPUMesh, accelerate


def add(a: int, b: int = 0) -> int:
    return a + b


def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)


@functools.cache
def cached(n: int) -> int:
    return n * 2


async def asynchronous(n: int) -> int:
    import asyncio

    await asyncio.sleep(0.001)
    return n + 1


def generate() -> Iterator[int]:
    yield from range(3)


async def generate_asynchronously() -> AsyncIterator[int]:
    yield 1


class Multiplier:
    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, n: int) -> int:
        return n * self.by

    def times(self, n: int) -> int:
        return n * self.by


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (functools.partial(add, b=5), (1,), 6),
        (Multiplier(3), (4,), 12),
        (Multiplier(3).times, (5,), 15),
        (cached, (4,), 8),
        (factorial, (5,), 120),
        (asynchronous, (1,), 2),
        (lambda n: n - 1, (1,), 0),
        (len, ("four",), 4),
    ],
)
def test_these_run(mesh: GPUMesh, function: Any, arguments: Any, expected: Any) -> None:
    assert accelerate(mesh)(function).remote(*arguments).result(20) == expected


def test_methods_of_a_class_body_run(mesh: GPUMesh) -> None:
    class Model:
        def __init__(self, weight: int) -> None:
            self.weight = weight

        @accelerate(mesh)
        def predict(self, x: int) -> int:
            return self.weight * x

        @accelerate(mesh)
        @staticmethod
        def helper(x: int) -> int:
            return x + 1

        @staticmethod
        @accelerate(mesh)
        def other(x: int) -> int:
            return x + 2

    model = Model(7)
    assert model.predict(2) == 14
    assert model.predict.remote(3).result(20) == 21
    assert model.helper.remote(1).result(20) == 2
    assert model.other.remote(1).result(20) == 3


@pytest.mark.parametrize("function", [generate, generate_asynchronously])
def test_generators_give_their_values_one_by_one_or_as_a_list(mesh: GPUMesh, function: Any) -> None:
    produce = accelerate(mesh)(function)
    values = list(produce.remote())
    assert values
    assert produce.map([(), ()]).result(20) == [values, values]


def test_returning_a_generator_object_fails_with_what_to_write(mesh: GPUMesh) -> None:
    def lazy() -> Any:
        return (i for i in range(3))

    with pytest.raises(TypeError, match="list"):
        accelerate(mesh)(lazy).remote().result(20)
