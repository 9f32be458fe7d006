"""F16: tasks that submit tasks and wait for them never fill all slots: whoever waits gives its slot to what it waits for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate, errors
from tests.support.processes import until

SOON = 30.0  # Seconds; without an answer by then nobody would have one ever.


@pytest.fixture(scope="module")
def lone() -> Iterator[GPUMesh]:
    """One worker with one slot."""
    with GPUMesh.local(workers=1, slots=1) as mesh:
        yield mesh


@accelerate
def child(number: int) -> int:
    return number + 1


@accelerate
def parent(number: int) -> int:
    return int(child.remote(number).result()) + 10


@accelerate
def grandparent(number: int) -> int:
    return int(parent.remote(number).result()) + 100


@accelerate
def mapper(count: int) -> int:
    return sum(child.map(range(count)))


@accelerate
def mapper_of_mappers(count: int) -> int:
    return sum(mapper.map([count] * count))


def idle(mesh: GPUMesh) -> bool:
    return all(view["running"] == 0 and view["queued"] == 0 for view in mesh.workers()) and not mesh.waiting()


def test_twice_as_many_parents_as_slots(mesh: GPUMesh) -> None:
    futures = [parent.on(mesh).remote(number) for number in range(4)]

    assert [future.result(SOON) for future in futures] == [11, 12, 13, 14]


def test_three_deep_with_one_slot(lone: GPUMesh) -> None:
    futures = [grandparent.on(lone).remote(number) for number in range(6)]

    assert [future.result(SOON) for future in futures] == [111 + number for number in range(6)]
    until(lambda: idle(lone), SOON, what="an idle worker")


def test_maps_in_maps(lone: GPUMesh) -> None:
    stream = mapper_of_mappers.on(lone).map([3, 4])

    assert list(stream) == [3 * 6, 4 * 10]


def in_a_thread() -> int:
    found: List[int] = []
    thread = threading.Thread(target=lambda: found.append(child.remote(1).result()))
    thread.start()
    thread.join()  # Nobody sees that this waits for the mesh.
    return found[0]


def by_the_standard_library() -> int:
    futures = [child.remote(number) for number in range(3)]
    done, _ = concurrent.futures.wait(futures)
    return sum(future.result() for future in concurrent.futures.as_completed(done))


def one_by_one() -> int:
    futures = [child.remote(number) for number in range(3)]
    return sum(future.result() for future in concurrent.futures.as_completed(futures))


def by_coroutines() -> int:
    async def gather() -> List[int]:
        return list(await asyncio.gather(*(child.remote(number) for number in range(3))))

    return sum(asyncio.run(gather()))


async def as_a_coroutine() -> int:
    return int(await child.remote(1)) + int(await child.remote(2))


def with_patience() -> int:
    future = child.remote(1)
    while True:
        try:
            return int(future.result(0.001))
        except concurrent.futures.TimeoutError:
            pass


@pytest.mark.parametrize(
    ("way", "answer"),
    [(in_a_thread, 2), (by_the_standard_library, 6), (one_by_one, 6), (by_coroutines, 6), (as_a_coroutine, 5), (with_patience, 2)],
    ids=lambda each: getattr(each, "__name__", ""),
)  # fmt: skip
def test_however_it_waits(lone: GPUMesh, way: Callable[[], Any], answer: int) -> None:
    futures = [accelerate(lone)(way).remote() for _ in range(2)]

    assert [future.result(SOON) for future in futures] == [answer, answer]


@accelerate
def held_up(folder: str) -> None:
    """Ends when somebody says so."""
    (Path(folder) / "begun").touch()
    until((Path(folder) / "go").exists, SOON, what="a word")


@accelerate(retries=1)
def waits_for_that(folder: str) -> int:
    (Path(folder) / f"parent.{os.getpid()}").touch()
    held_up.remote(folder).result()
    return os.getpid()


def test_a_parent_that_waits_is_cancelled(lone: GPUMesh, tmp_path: Path) -> None:
    waiting = waits_for_that.on(lone).remote(str(tmp_path))
    until((tmp_path / "begun").exists, SOON, what="a child")
    behind = parent.on(lone).remote(1)

    assert waiting.cancel()

    assert behind.result(SOON) == 12  # The child, which had the slot, has gone with it.
    until(lambda: idle(lone), SOON, what="an idle worker")


def test_a_parent_that_waits_is_killed(lone: GPUMesh, tmp_path: Path) -> None:
    waiting = waits_for_that.on(lone).remote(str(tmp_path))
    until((tmp_path / "begun").exists, SOON, what="a child")
    (before,) = (int(path.suffix[1:]) for path in tmp_path.glob("parent.*"))

    os.kill(before, signal.SIGKILL)
    (tmp_path / "go").touch()

    assert waiting.result(SOON) != before
    assert parent.on(lone).remote(1).result(SOON) == 12
    until(lambda: idle(lone), SOON, what="an idle worker")


def test_a_parent_that_may_run_once_is_killed(lone: GPUMesh, tmp_path: Path) -> None:
    waiting = waits_for_that.options(retries=0).on(lone).remote(str(tmp_path))
    until((tmp_path / "begun").exists, SOON, what="a child")
    (before,) = (int(path.suffix[1:]) for path in tmp_path.glob("parent.*"))

    os.kill(before, signal.SIGKILL)

    with pytest.raises(errors.WorkerCrashedError):
        waiting.result(SOON)
    assert parent.on(lone).remote(1).result(SOON) == 12


def test_a_parent_that_waits_for_too_long_is_ended(lone: GPUMesh, tmp_path: Path) -> None:
    started = time.monotonic()

    with pytest.raises(errors.TaskTimeoutError):
        waits_for_that.options(timeout=0.5, retries=0).on(lone).remote(str(tmp_path)).result(SOON)

    assert 0.5 <= time.monotonic() - started < 8.0
    assert parent.on(lone).remote(1).result(SOON) == 12  # What it waited for has gone with it.
