"""Actors and work inside work: methods that submit, and actors that tasks create."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest

import gpumesh
from gpumesh import GPUMesh, accelerate, current_mesh, errors
from tests.support.processes import until

SOON = 20.0


@pytest.fixture(scope="module")
def mesh() -> Iterator[GPUMesh]:
    with GPUMesh.local(workers=1, slots=2) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_stays(mesh: GPUMesh) -> Iterator[None]:
    """After each test nothing of it runs or waits, no actor lives, and nobody refers to any object."""
    yield
    gc.collect()
    until(lambda: not mesh.actors(), SOON, what=f"no actors: {mesh.actors()}")
    until(lambda: _load(mesh) == (0, 0), SOON, what=f"idle: {mesh.workers()} {mesh.waiting()}")
    until(lambda: not mesh.objects()["objects"], SOON, what=f"no objects: {mesh.objects()}")


def _load(mesh: GPUMesh) -> Tuple[int, int]:
    return sum(worker["running"] for worker in mesh.workers()), sum(each["count"] for each in mesh.waiting())


@accelerate
def add(one: int, other: int) -> int:
    return one + other


@accelerate
def mark(folder: str, name: str) -> str:
    Path(folder, name).touch()
    time.sleep(60)
    Path(folder, f"{name}.end").touch()
    return name


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, step: int = 1) -> int:
        self.count += step
        return self.count

    def pid(self) -> int:
        return os.getpid()


class Boss:
    """An actor that has others work."""

    def __init__(self, folder: str = "") -> None:
        self.first = add.remote(1, 1).result(SOON)
        self.folder = folder
        if folder:
            self.kept = mark.remote(folder, "kept")

    def sum(self, one: int, other: int) -> int:
        return self.first + int(add.remote(one, other).result(SOON))

    def leave(self, name: str) -> str:
        mark.remote(self.folder, name)
        until(lambda: Path(self.folder, name).exists(), SOON)
        return name

    def wait_for(self, name: str) -> str:
        return str(mark.remote(self.folder, name).result())

    def make(self) -> Any:
        return current_mesh().actor(Counter).remote(5)

    def use(self, other: Any) -> int:
        return int(other.add.remote(2).result(SOON))


class AsyncBoss:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    async def sums(self, count: int) -> List[int]:
        return list(await asyncio.gather(*[self._one(number) for number in range(count)]))

    async def _one(self, number: int) -> int:
        return int(await add.remote(number, 1))

    async def wait_for(self, name: str) -> str:
        return str(await mark.remote(self.folder, name))


def test_methods_submit_and_wait(mesh: GPUMesh) -> None:
    boss = mesh.actor(Boss).remote()
    assert boss.sum.remote(2, 3).result(SOON) == 7
    assert [future.result(SOON) for future in [boss.sum.remote(number, 0) for number in range(5)]] == [2, 3, 4, 5, 6]


def test_coroutines_of_an_actor_submit_side_by_side(mesh: GPUMesh, tmp_path: Path) -> None:
    boss = mesh.actor(AsyncBoss).remote(str(tmp_path))
    assert boss.sums.remote(5).result(SOON) == [1, 2, 3, 4, 5]


def test_the_children_of_a_call_end_with_it_and_those_of_the_actor_with_the_actor(mesh: GPUMesh, tmp_path: Path) -> None:
    boss = mesh.actor(Boss).remote(str(tmp_path))
    assert boss.leave.remote("left").result(SOON) == "left"

    until(lambda: _load(mesh)[0] == 1, SOON, what=f"only the constructor's child: {mesh.workers()}")
    assert (tmp_path / "kept").exists()

    boss.kill()
    until(lambda: _load(mesh) == (0, 0), SOON)
    assert not list(tmp_path.glob("*.end"))


def test_a_cancelled_call_of_several_at_a_time_takes_only_its_own_children_along(mesh: GPUMesh, tmp_path: Path) -> None:
    boss = mesh.actor(AsyncBoss).remote(str(tmp_path))
    one, other = boss.wait_for.remote("one"), boss.wait_for.remote("other")
    until(lambda: (tmp_path / "one").exists() and (tmp_path / "other").exists(), SOON)

    one.cancel()

    until(lambda: _load(mesh)[0] == 1, SOON, what=f"only the other's child: {mesh.workers()}")
    assert not other.done()
    other.cancel()
    until(lambda: _load(mesh) == (0, 0), SOON)


def test_children_of_an_actor_that_is_killed_die_soon(mesh: GPUMesh, tmp_path: Path) -> None:
    boss = mesh.actor(Boss).remote(str(tmp_path))
    future = boss.wait_for.remote("below")
    until(lambda: (tmp_path / "below").exists() and (tmp_path / "kept").exists(), SOON)
    killed = time.monotonic()
    boss.kill(force=True)
    with pytest.raises(errors.ActorDiedError):
        future.result(SOON)
    until(lambda: _load(mesh) == (0, 0), SOON)
    assert time.monotonic() - killed < 5.0


def test_an_actor_that_a_task_has_created_lives_by_its_handles(mesh: GPUMesh) -> None:
    def create() -> Tuple[Any, int]:
        counter = current_mesh().actor(Counter).remote(10)
        return counter, counter.add.remote(1).result(SOON)

    counter, first = accelerate(mesh)(create).remote().result(SOON)
    gc.collect()
    assert first == 11
    assert [counter.add.remote(1).result(SOON) for _ in range(3)] == [12, 13, 14]


def test_an_actor_that_nobody_has_taken_from_its_task_ends(mesh: GPUMesh) -> None:
    def create() -> int:
        counter = current_mesh().actor(Counter).remote(10)
        return int(counter.pid.remote().result(SOON))

    pid = accelerate(mesh)(create).remote().result(SOON)
    until(lambda: not Path(f"/proc/{pid}").exists(), SOON, what="its process has ended")


def test_the_process_of_the_creator_may_end_before_the_actor(mesh: GPUMesh) -> None:
    def create() -> Tuple[Any, int]:
        return current_mesh().actor(Counter).remote(10), os.getpid()

    def die(pid: int) -> None:
        os.kill(pid, 9)

    counter, pid = accelerate(mesh)(create).remote().result(SOON)
    accelerate(mesh)(die).remote(pid).exception(SOON)
    until(lambda: not Path(f"/proc/{pid}").exists(), SOON)
    assert counter.add.remote(1).result(SOON) == 11


def test_handles_go_up_and_down(mesh: GPUMesh) -> None:
    def use(given: Any, box: Dict[str, Any]) -> Tuple[int, int, Any]:
        made = current_mesh().actor(Counter).remote(100)
        child = accelerate(lambda one, other: one.add.remote(1).result(SOON) + other.add.remote(1).result(SOON))
        total = child.remote(given, made).result(SOON)
        holder = gpumesh.put([made])
        return total, box["boss"].use.remote(made).result(SOON), holder

    counter, boss = mesh.actor(Counter).remote(), mesh.actor(Boss).remote()
    total, used, holder = accelerate(mesh)(use).remote(counter, {"boss": boss}).result(SOON)
    assert (total, used) == (1 + 101, 103)
    gc.collect()
    (made,) = mesh.get(holder)
    assert made.add.remote(0).result(SOON) == 103
    assert counter.add.remote(0).result(SOON) == 1


def test_an_actor_creates_another_and_hands_it_on(mesh: GPUMesh) -> None:
    boss = mesh.actor(Boss).remote()
    counter = boss.make.remote().result(SOON)
    assert boss.use.remote(counter).result(SOON) == 7
    boss.kill()
    assert counter.add.remote(0).result(SOON) == 7


def test_background_threads_of_an_actor_submit_for_the_actor(mesh: GPUMesh) -> None:
    class Background:
        def __init__(self) -> None:
            self.found: List[int] = []
            threading.Thread(target=self._work, daemon=True).start()

        def _work(self) -> None:
            for number in range(3):
                self.found.append(add.remote(number, 1).result(SOON))

        def look(self) -> List[int]:
            return self.found

    actor = mesh.actor(Background).remote()
    until(lambda: actor.look.remote().result(SOON) == [1, 2, 3], SOON)
