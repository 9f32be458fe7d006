"""Generators that run on the mesh: values as they are made, never far ahead of who takes them, and their end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, Iterator, List

import numpy as np
import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.config import GENERATOR_WINDOW_BYTES, GENERATOR_WINDOW_ITEMS
from gpumesh.errors import ActorDiedError, MeshError, TaskCancelledError, TaskTimeoutError, WorkerCrashedError
from tests.support.processes import until

SOON = 20.0


@pytest.fixture(scope="module")
def mesh() -> Iterator[GPUMesh]:
    with GPUMesh.local(workers=2, slots=1) as made:
        yield made


# --- generators


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


def numbers_and_end(count: int) -> Any:
    yield from range(count)
    return f"{count} in all"


def step_by_step(folder: str, count: int) -> Iterator[int]:
    """Each value once its file is there."""
    for value in range(count):
        while not Path(folder, f"{value}.go").exists():
            time.sleep(0.005)
        yield value


def endless(made: str, nbytes: int = 0) -> Iterator[Any]:
    """Values without end; how many were made stands in a file, and `closed` beside it at the end."""
    try:
        value = 0
        while True:
            value += 1
            Path(made).write_text(str(value))
            yield np.full(nbytes // 8, value) if nbytes else value
    finally:
        Path(f"{made}.closed").touch()


async def ticks(made: str) -> Any:
    """The same, asynchronous."""
    value = 0
    try:
        while True:
            await asyncio.sleep(0)
            value += 1
            Path(made).write_text(str(value))  # noqa: ASYNC240 - nothing else runs there
            yield value
    finally:
        Path(f"{made}.closed").touch()  # noqa: ASYNC240


def fails_at(count: int) -> Iterator[int]:
    yield from range(count)
    raise LookupError(count)


def dies_once_at(count: int, mark: str) -> Iterator[int]:
    """The first run kills its process in the middle."""
    for value in range(2 * count):
        if value == count and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield value


def made(path: Path) -> int:
    """How many values a generator has made."""
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return 0


def until_closed(path: Path) -> None:
    until(Path(f"{path}.closed").exists, SOON, what="the generator was closed")


# --- values


def test_each_value_is_here_as_soon_as_it_is_made(mesh: GPUMesh, tmp_path: Path) -> None:
    stream = accelerate(mesh)(step_by_step).remote(str(tmp_path), 3)

    for value in range(3):
        with pytest.raises(FutureTimeoutError, match="is not there after 0.05 s"):
            stream.next(0.05)
        (tmp_path / f"{value}.go").touch()
        assert stream.next(SOON) == value
    assert list(stream) == []


def test_many_values_come_in_order_and_the_return_value_ends_them(mesh: GPUMesh) -> None:
    stream = accelerate(mesh)(numbers_and_end).remote(5000)

    assert iter(stream) is stream
    for expected in range(5000):
        assert next(stream) == expected
    with pytest.raises(StopIteration) as end:
        next(stream)
    assert end.value.value == "5000 in all"
    assert stream.done()
    assert stream.result() == "5000 in all"
    assert list(stream) == []


def test_result_waits_for_the_end_and_keeps_what_nobody_took(mesh: GPUMesh) -> None:
    count = 10 * GENERATOR_WINDOW_ITEMS
    stream = accelerate(mesh)(numbers_and_end).remote(count)

    assert next(stream) == 0
    assert stream.result(SOON) == f"{count} in all"
    assert stream.exception() is None
    assert list(stream) == list(range(1, count))


def test_what_the_generator_raised_comes_after_its_values_and_once(mesh: GPUMesh) -> None:
    stream = accelerate(mesh)(fails_at).remote(3)

    assert [next(stream), next(stream), next(stream)] == [0, 1, 2]
    with pytest.raises(LookupError, match="3") as caught:
        next(stream)
    assert "in fails_at" in str(caught.value.__cause__)
    with pytest.raises(StopIteration):
        next(stream)
    with pytest.raises(LookupError):
        stream.result()


def test_what_is_no_generator_cannot_pass_for_one(mesh: GPUMesh) -> None:
    def wants_to_be_one(flag: bool) -> Any:
        return (value for value in range(3)) if flag else 3

    with pytest.raises(TypeError, match=r"a generator cannot be pickled; return list.* or yield in the task's own function"):
        accelerate(mesh)(wants_to_be_one).remote(True).result(SOON)


def test_a_value_that_cannot_travel_ends_the_generator(mesh: GPUMesh) -> None:
    def locks() -> Any:
        yield 1
        yield threading.Lock()

    stream = accelerate(mesh)(locks).remote()
    assert next(stream) == 1
    with pytest.raises(TypeError, match="a value of the generator"):
        next(stream)


def test_large_values_and_references_outlive_the_generator(mesh: GPUMesh) -> None:
    def arrays(count: int) -> Any:
        import gpumesh

        for value in range(count):
            yield {"whole": np.full(50_000, value), "ref": gpumesh.put(np.full(20_000, value)), "small": gpumesh.put(value)}

    stream = accelerate(mesh)(arrays).remote(12)
    found = list(stream)
    for value, each in enumerate(found):
        assert each["whole"].sum() == 50_000 * value
        assert mesh.get(each["ref"]).sum() == 20_000 * value
        assert mesh.get(each["small"]) == value
    del found, each, stream
    until(lambda: not mesh.objects()["objects"], SOON, what="nobody refers to anything any more")


# --- how far ahead


@pytest.mark.parametrize("function", [endless, ticks])
def test_a_generator_without_end_stays_within_the_window(mesh: GPUMesh, tmp_path: Path, function: Any) -> None:
    path = tmp_path / "made"
    stream = accelerate(mesh)(function).remote(str(path))

    for taken in range(1, 3 * GENERATOR_WINDOW_ITEMS):
        assert next(stream) == taken
        assert made(path) <= taken + GENERATOR_WINDOW_ITEMS
    until(lambda: made(path) >= taken + GENERATOR_WINDOW_ITEMS * 3 // 4, SOON, what="it goes on within the window")
    assert made(path) <= taken + GENERATOR_WINDOW_ITEMS
    stream.close()
    until_closed(path)


def test_of_large_values_fewer_are_under_way(mesh: GPUMesh, tmp_path: Path) -> None:
    path = tmp_path / "made"
    stream = accelerate(mesh)(endless).remote(str(path), GENERATOR_WINDOW_BYTES // 4)

    for taken in range(1, 30):
        assert next(stream)[0] == taken
        assert made(path) <= taken + 5
    stream.close()
    until_closed(path)


def test_two_generators_are_taken_in_turns(mesh: GPUMesh, tmp_path: Path) -> None:
    streams = [accelerate(mesh)(endless).remote(str(tmp_path / f"made{number}")) for number in range(2)]

    for taken in range(1, 600):
        assert [next(stream) for stream in streams] == [taken, taken]
    for stream in streams:
        stream.close()


def test_several_threads_share_the_values(mesh: GPUMesh) -> None:
    stream = accelerate(mesh)(numbers).remote(2000)
    shares: List[List[int]] = [[], [], []]
    threads = [threading.Thread(target=share.extend, args=(stream,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)

    assert sorted(value for share in shares for value in share) == list(range(2000))
    assert all(share == sorted(share) for share in shares)


# --- asyncio


def test_async_for_and_await(mesh: GPUMesh, tmp_path: Path) -> None:
    async def main() -> None:
        count = 0
        async with accelerate(mesh)(ticks).remote(str(tmp_path / "made")) as stream:
            async for value in stream:
                count += 1
                assert value == count
                if count == 200:
                    break
        assert stream.cancelled()
        large = [int(value[0]) async for value in accelerate(mesh)(large_values).remote(5)]
        assert large == [0, 1, 2, 3, 4]
        assert await accelerate(mesh)(numbers_and_end).remote(500) == "500 in all"
        failing = accelerate(mesh)(fails_at).remote(1)
        assert await failing.__anext__() == 0
        with pytest.raises(LookupError):
            await failing.__anext__()
        with pytest.raises(StopAsyncIteration):
            await failing.__anext__()

    def large_values(count: int) -> Any:
        for value in range(count):
            yield np.full(20_000, value)

    asyncio.run(asyncio.wait_for(main(), SOON))
    until_closed(tmp_path / "made")


# --- the end before the end


def test_dropping_a_stream_ends_its_generator(mesh: GPUMesh, tmp_path: Path) -> None:
    path = tmp_path / "made"
    stream = accelerate(mesh)(endless).remote(str(path))
    assert next(stream) == 1
    until(lambda: made(path) == GENERATOR_WINDOW_ITEMS, SOON, what="it waits for its consumer")

    del stream

    until_closed(path)


def test_a_cancelled_stream_says_so_and_a_closed_one_is_over(mesh: GPUMesh, tmp_path: Path) -> None:
    path, other = tmp_path / "made", tmp_path / "other"
    stream = accelerate(mesh)(endless).remote(str(path))
    assert next(stream) == 1
    assert stream.cancel()
    with pytest.raises(TaskCancelledError):
        next(stream)
    with accelerate(mesh)(endless).remote(str(other)) as closed:
        assert next(closed) == 1
    assert list(closed) == []
    assert closed.cancelled()
    until_closed(path)
    until_closed(other)


def test_a_waiting_consumer_hears_of_the_cancellation(mesh: GPUMesh, tmp_path: Path) -> None:
    stream = accelerate(mesh)(step_by_step).remote(str(tmp_path), 1)
    caught: List[BaseException] = []

    def wait() -> None:
        try:
            next(stream)
        except MeshError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(thread.is_alive, SOON)
    stream.cancel()
    thread.join(SOON)
    assert isinstance(caught[0], TaskCancelledError)


def test_a_generator_that_runs_too_long_is_timed_out(mesh: GPUMesh, tmp_path: Path) -> None:
    stream = accelerate(mesh, timeout=0.5, retries=0)(step_by_step).remote(str(tmp_path), 2)
    (tmp_path / "0.go").touch()

    assert next(stream) == 0
    with pytest.raises(TaskTimeoutError):
        next(stream)


def test_the_timeout_does_not_count_what_the_generator_waits_for_its_consumer(mesh: GPUMesh, tmp_path: Path) -> None:
    for function in (endless, ticks):
        path = tmp_path / function.__name__
        stream = accelerate(mesh, timeout=1.0, retries=0)(function).remote(str(path))
        assert next(stream) == 1
        until(lambda: made(path) == GENERATOR_WINDOW_ITEMS, SOON, what="it waits")  # noqa: B023
        time.sleep(1.3)
        assert [next(stream) for _ in range(400)] == list(range(2, 402))
        stream.close()


# --- inside tasks


def test_a_task_takes_values_of_another_with_one_slot_for_both() -> None:
    with GPUMesh.local(workers=1, slots=1) as one:

        @accelerate(one)
        def doubled(count: int) -> Any:
            for value in accelerate(numbers).remote(count):
                yield 2 * value

        @accelerate(one)
        def total(count: int) -> int:
            return sum(accelerate(numbers).remote(count))

        assert total.remote(1000).result(SOON) == 499_500
        assert list(doubled.remote(300)) == list(range(0, 600, 2))


# --- methods of actors


class Speaker:
    """Methods that are generators, one call at a time or in threads."""

    def tokens(self, count: int) -> Iterator[str]:
        for value in range(count):
            yield f"token {value}"

    def endless(self, made: str) -> Iterator[Any]:
        return (yield from endless(made))

    def large(self, count: int) -> Iterator[Any]:
        for value in range(count):
            yield np.full(20_000, value)

    def die(self, count: int) -> Iterator[int]:
        yield from range(count)
        os.kill(os.getpid(), signal.SIGKILL)

    def ping(self) -> str:
        return "pong"


class Ticker:
    """The same on an event loop."""

    async def tokens(self, count: int) -> Any:
        for value in range(count):
            await asyncio.sleep(0)
            yield f"token {value}"

    async def endless(self, made: str) -> Any:
        async for value in ticks(made):
            yield value

    async def ping(self) -> str:
        return "pong"


@pytest.mark.parametrize(("kind", "options"), [(Speaker, {}), (Speaker, {"max_concurrency": 3}), (Ticker, {})])
def test_methods_that_are_generators(mesh: GPUMesh, tmp_path: Path, kind: type, options: Any) -> None:
    path = tmp_path / "made"
    actor: Any = mesh.actor(kind, **options).remote()
    streams = [actor.tokens.remote(300), actor.tokens.stream(300)]
    for stream in streams:
        assert list(stream) == [f"token {value}" for value in range(300)]
    stream = actor.endless.stream(str(path))
    for taken in range(1, 2 * GENERATOR_WINDOW_ITEMS):
        assert next(stream) == taken
        assert made(path) <= taken + GENERATOR_WINDOW_ITEMS
    if options or kind is Ticker:
        assert actor.ping.remote().result(SOON) == "pong"  # Meanwhile.
    stream.close()
    until_closed(path)
    assert actor.ping.remote().result(SOON) == "pong"


@pytest.mark.parametrize(("kind", "options"), [(Speaker, {}), (Speaker, {"max_concurrency": 3}), (Ticker, {})])
def test_the_timeout_of_such_a_call_counts_its_own_time_alone(mesh: GPUMesh, tmp_path: Path, kind: type, options: Any) -> None:
    path = tmp_path / "made"
    actor: Any = mesh.actor(kind, **options).remote()
    stream = actor.endless.options(timeout=1.0).stream(str(path))
    assert next(stream) == 1
    until(lambda: made(path) == GENERATOR_WINDOW_ITEMS, SOON, what="it waits")
    time.sleep(1.2)
    assert [next(stream) for _ in range(400)] == list(range(2, 402))
    stream.close()
    until_closed(path)


def test_an_actor_that_dies_ends_its_streams(mesh: GPUMesh) -> None:
    actor: Any = mesh.actor(Speaker).remote()
    assert [int(value[0]) for value in actor.large.stream(10)] == list(range(10))
    stream = actor.die.stream(3)
    found: List[int] = []
    with pytest.raises(ActorDiedError):
        found.extend(iter(lambda: next(stream), None))
    assert found == list(range(len(found)))


# --- processes that die


def test_a_second_run_goes_on_where_the_first_has_ended(mesh: GPUMesh, tmp_path: Path) -> None:
    stream = accelerate(mesh)(dies_once_at).remote(500, str(tmp_path / "died"))

    assert list(stream) == list(range(1000))
    assert (tmp_path / "died").exists()


def test_without_retries_what_came_before_the_death_is_given(mesh: GPUMesh, tmp_path: Path) -> None:
    stream = accelerate(mesh, retries=0)(dies_once_at).remote(20, str(tmp_path / "died"))
    found: List[int] = []

    with pytest.raises(WorkerCrashedError):
        found.extend(iter(lambda: next(stream), None))
    found.extend(stream)
    assert found == list(range(len(found)))


def test_map_gives_lists(mesh: GPUMesh) -> None:
    assert accelerate(mesh)(numbers).map(range(4)).result(SOON) == [[], [0], [0, 1], [0, 1, 2]]


def test_a_stream_cannot_travel(mesh: GPUMesh) -> None:
    stream = accelerate(mesh)(numbers).remote(1)
    with pytest.raises(TypeError, match=r"cannot travel; pass its values, list\(stream\)"):
        accelerate(mesh)(len).remote([stream])
    assert list(stream) == [0]
