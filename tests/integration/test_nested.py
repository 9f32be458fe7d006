"""Work inside work: tasks that submit tasks, put values, and pass on references, on real processes."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import pytest

import gpumesh
from gpumesh import GPUMesh, accelerate, as_completed, current_mesh, errors, wait
from gpumesh.config import MAX_NESTING_DEPTH
from tests.support.processes import until

SOON = 20.0


@pytest.fixture(scope="module")
def mesh() -> Iterator[GPUMesh]:
    with GPUMesh.local(workers=1, slots=2) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_stays(mesh: GPUMesh) -> Iterator[None]:
    """After each test nothing of it runs or waits, and nobody refers to any object."""
    yield
    gc.collect()
    until(lambda: _load(mesh) == (0, 0), SOON, what=f"idle: {mesh.workers()} {mesh.waiting()}")
    until(lambda: not mesh.objects()["objects"], SOON, what=f"no objects: {mesh.objects()}")


def _load(mesh: GPUMesh) -> Tuple[int, int]:
    return sum(worker["running"] for worker in mesh.workers()), sum(each["count"] for each in mesh.waiting())


@accelerate
def add(one: int, other: int) -> int:
    return one + other


@accelerate
def add_inside(one: int, other: int) -> int:
    result: int = add.remote(one, other).result(SOON)
    return result


@accelerate
def add_deeper(one: int, other: int) -> int:
    result: int = add_inside.remote(one, other).result(SOON)
    return result


@accelerate
def size_of(value: Any) -> int:
    return len(value)


@accelerate
def put_array(count: int) -> gpumesh.ObjectRef:
    return gpumesh.put(np.arange(count))


@accelerate
def mark(folder: str, name: str, seconds: float = 60.0) -> str:
    Path(folder, name).write_text(str(os.getpid()))
    time.sleep(seconds)
    Path(folder, f"{name}.end").touch()
    return name


def until_marked(folder: Path, name: str) -> int:
    """Wait for the start of `mark`; its process."""
    return int(until(lambda: (folder / name).exists() and (folder / name).read_text(), SOON, what=name))


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- which mesh it is


def test_outside_of_tasks_it_is_the_installed_or_the_default_mesh(mesh: GPUMesh) -> None:
    accelerate.install(mesh)
    try:
        assert current_mesh() is mesh
    finally:
        accelerate.install(None)
    assert current_mesh() is current_mesh() is not mesh


def test_inside_a_task_it_is_the_mesh_that_runs_it(mesh: GPUMesh) -> None:
    def look() -> Dict[str, Any]:
        here = current_mesh()
        own = GPUMesh()
        own.close()
        named = GPUMesh(here.url)
        return {
            "shown": repr(here),
            "workers": [worker["id"] for worker in here.workers()],
            "sums": [here.distribute(add, [(1, 2)])[0], named.distribute(add, [(3, 4)])[0]],
            "token": [name for name, value in os.environ.items() if "token" in name.lower()],
            "files": [name for name in os.environ if name.startswith("GPUMESH_")],
        }

    found = accelerate(mesh)(look).remote().result(SOON)

    assert found["shown"] == f"<GPUMesh {mesh.url}, inside a task>"
    assert found["workers"] == [worker["id"] for worker in mesh.workers()]
    assert found["sums"] == [3, 7]
    assert found["token"] == []


def test_functions_use_the_mesh_of_the_task_whatever_they_were_bound_to(mesh: GPUMesh) -> None:
    elsewhere = GPUMesh("http://127.0.0.1:9", "another", connect_timeout=0.2, fallback=False)
    bound = accelerate(elsewhere)(lambda value: value * 2)

    def use() -> List[int]:
        made_here = accelerate(GPUMesh("http://127.0.0.1:9", "another"))(lambda value: value + 1)
        return [bound.remote(3).result(SOON), made_here.remote(3).result(SOON), add.remote(3, 4).result(SOON)]

    assert accelerate(mesh)(use).remote().result(SOON) == [6, 4, 7]
    elsewhere.close()


def test_an_installed_mesh_counts_less_than_the_one_of_the_task(mesh: GPUMesh) -> None:
    def use() -> int:
        accelerate.install(GPUMesh("http://127.0.0.1:9", "another"))
        try:
            return int(add.remote(3, 4).result(SOON))
        finally:
            accelerate.install(None)

    assert accelerate(mesh)(use).remote().result(SOON) == 7


# --- all of the API


def test_three_deep(mesh: GPUMesh) -> None:
    assert add_deeper.on(mesh).remote(1, 2).result(SOON) == 3


def test_one_slot_is_enough_for_what_is_three_deep() -> None:
    with GPUMesh.local(workers=1, slots=1) as narrow:
        assert add_deeper.on(narrow).remote(1, 2).result(SOON) == 3
        assert list(add_deeper.on(narrow).map([(number, 1) for number in range(4)])) == [1, 2, 3, 4]


def test_map_in_map(mesh: GPUMesh) -> None:
    def row(number: int) -> List[int]:
        return list(add.map([(number, column) for column in range(5)]))

    assert list(accelerate(mesh)(row).map(range(8))) == [[row + column for column in range(5)] for row in range(8)]


def test_all_ways_to_wait(mesh: GPUMesh) -> None:
    def use() -> List[Any]:
        from concurrent import futures

        first = [add.remote(number, 1) for number in range(3)]
        second = [add.remote(number, 2) for number in range(3)]
        third = [add.remote(number, 3) for number in range(3)]
        done = futures.wait(third, timeout=20).done
        return [
            sorted(future.result() for future in as_completed(first, timeout=20)),
            len(wait(second, timeout=20).done),
            sorted(future.result() for future in done),
            [future.result() for future in add.map([(1, 1)], return_exceptions=True).futures],
            add.remote("one", 1).exception(20).__class__.__name__,
            gpumesh.get([add.remote(1, 1), gpumesh.put(5)]),
            add.remote(add.remote(1, 1), add.remote(2, 2)).result(20),
        ]

    assert accelerate(mesh)(use).remote().result(SOON) == [[1, 2, 3], 3, [3, 4, 5], [2], "TypeError", [2, 5], 6]


def test_coroutines_await_what_they_submit(mesh: GPUMesh) -> None:
    async def use() -> List[int]:
        import asyncio

        return list(await asyncio.gather(*[_plus_one(number) for number in range(4)]))

    async def _plus_one(number: int) -> int:
        return int(await add.remote(number, 1))

    assert accelerate(mesh)(use).remote().result(SOON) == [1, 2, 3, 4]


def test_threads_of_a_task_submit_too(mesh: GPUMesh) -> None:
    def use() -> List[int]:
        found: List[int] = []
        threads = [
            threading.Thread(target=lambda number=number: found.append(add.remote(number, 1).result(20))) for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return sorted(found)

    assert accelerate(mesh)(use).remote().result(SOON) == [1, 2, 3, 4]


def test_errors_come_with_both_tracebacks(mesh: GPUMesh) -> None:
    def fail() -> None:
        raise LookupError("deep down")

    inner = accelerate(fail)

    def use() -> None:
        inner.remote().result(SOON)

    with pytest.raises(LookupError, match="deep down") as caught:
        accelerate(mesh)(use).remote().result(SOON)
    assert "in fail" in str(caught.value.__cause__)


def test_what_children_print_is_their_parents_output(mesh: GPUMesh) -> None:
    lines: List[Tuple[str, str]] = []
    mesh._open_session().on_output = lambda name, worker, stream, line: lines.append((name, line))
    speak = accelerate(lambda: print("from below"), name="speak")

    def use() -> None:
        print("from above")
        speak.remote().result(SOON)

    try:
        accelerate(mesh, name="use")(use).remote().result(SOON)
        until(lambda: len(lines) == 2, SOON, what=f"two lines: {lines}")
    finally:
        mesh._open_session().on_output = None
    assert lines[0] == ("use", "from above")
    assert lines[1][0] == "use"
    assert re.fullmatch(r"\(speak \S+\) from below", lines[1][1])


def test_the_session_of_a_process_serves_all_its_tasks(mesh: GPUMesh) -> None:
    def clients() -> Tuple[int, int, bool]:
        from gpumesh.client import nested

        add.remote(1, 1).result(SOON)
        channel = nested.task_session()._remote
        assert channel is not None
        return os.getpid(), channel.client, "gpumesh.runtime.coordinator" in sys.modules

    numbers: Dict[int, int] = {}
    for _ in range(6):
        pid, number, _ = accelerate(mesh)(clients).remote().result(SOON)
        assert numbers.setdefault(pid, number) == number


def test_a_forked_process_cannot_use_it_and_says_so(mesh: GPUMesh) -> None:
    def use() -> str:
        reader, writer = os.pipe()
        add.remote(1, 1).result(SOON)
        child = os.fork()
        if child == 0:
            try:
                add.remote(1, 1)
            except errors.MeshError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader) as said:
            return said.read()

    assert "forked" in accelerate(mesh)(use).remote().result(SOON)


# --- values and references


def test_references_go_everywhere(mesh: GPUMesh) -> None:
    def use(given: gpumesh.ObjectRef, box: List[gpumesh.ObjectRef]) -> Any:
        large, small = gpumesh.put(np.ones(100_000)), gpumesh.put([1, 2, 3])
        mine = current_mesh().put((1, 2))
        made = put_array.remote(200_000).result(SOON)
        little = put_array.remote(3).result(SOON)
        holder = gpumesh.put({"made": made, "small": small})
        sizes = [size_of.remote(value).result(SOON) for value in (large, small, mine, made, box[0], holder)]
        sizes.append(size_of.remote([made, small]).result(SOON))
        return sizes, [made, little, large], holder

    outer = mesh.put("four")
    sizes, returned, holder = accelerate(mesh)(use).remote(outer, [outer]).result(SOON)

    gc.collect()
    assert sizes == [100_000, 3, 2, 200_000, 4, 2, 2]
    assert [int(mesh.get(ref).sum()) for ref in returned] == [19_999_900_000, 3, 100_000]
    found = mesh.get(holder)
    assert int(mesh.get(found["made"]).sum()) == 19_999_900_000
    assert mesh.get(found["small"]) == [1, 2, 3]


def test_a_reference_that_a_child_has_made_lives_on_when_its_process_forgets_it(mesh: GPUMesh) -> None:
    def hand_on() -> gpumesh.ObjectRef:
        ref: gpumesh.ObjectRef = put_array.remote(50_000).result(SOON)
        return ref

    refs = [accelerate(mesh)(hand_on).remote() for _ in range(10)]

    for ref in refs:
        assert int(mesh.get(ref.result(SOON)).sum()) == 1_249_975_000


def test_large_arguments_and_results_pass_through(mesh: GPUMesh) -> None:
    def use(array: Any) -> Tuple[int, Any]:
        return size_of.remote(array + 1).result(SOON), accelerate(lambda value: value * 2).remote(array).result(SOON)

    size, doubled = accelerate(mesh)(use).remote(np.ones(300_000)).result(SOON)
    assert size == 300_000
    assert float(doubled.sum()) == 600_000


# --- how it ends


def test_what_a_task_leaves_behind_is_cancelled(mesh: GPUMesh, tmp_path: Path) -> None:
    def leave(folder: str) -> str:
        mark.remote(folder, "runs")
        until_marked(Path(folder), "runs")
        for number in range(20):
            mark.remote(folder, f"waits{number}")
        return "left"

    assert accelerate(mesh)(leave).remote(str(tmp_path)).result(SOON) == "left"
    assert accelerate(mesh)(lambda: 1).map([(), ()]) is not None
    until(lambda: _load(mesh) == (0, 0), SOON)
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".end")]


def test_what_a_task_that_raises_leaves_behind_is_cancelled(mesh: GPUMesh, tmp_path: Path) -> None:
    def leave(folder: str) -> None:
        mark.remote(folder, "runs")
        until_marked(Path(folder), "runs")
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        accelerate(mesh)(leave).remote(str(tmp_path)).result(SOON)
    until(lambda: _load(mesh) == (0, 0), SOON)
    assert not (tmp_path / "runs.end").exists()


def test_a_cancelled_task_takes_its_children_along_at_every_depth(mesh: GPUMesh, tmp_path: Path) -> None:
    def above(folder: str) -> str:
        return str(mark.remote(folder, "below").result())

    middle = accelerate(above)
    future = accelerate(mesh)(lambda folder: middle.remote(folder).result()).remote(str(tmp_path))
    until_marked(tmp_path, "below")

    started = time.monotonic()
    assert future.cancel()
    until(lambda: _load(mesh) == (0, 0), SOON)

    assert time.monotonic() - started < 5.0
    assert not (tmp_path / "below.end").exists()


def test_a_timeout_takes_the_children_along(mesh: GPUMesh, tmp_path: Path) -> None:
    def above(folder: str) -> str:
        return str(mark.remote(folder, "below").result())

    with pytest.raises(errors.TaskTimeoutError):
        accelerate(mesh, timeout=1.0, retries=0)(above).remote(str(tmp_path)).result(SOON)
    until(lambda: _load(mesh) == (0, 0), SOON)


def test_children_of_a_process_that_is_killed_die_soon_after_it(mesh: GPUMesh, tmp_path: Path) -> None:
    def above(folder: str) -> str:
        Path(folder, "above").write_text(str(os.getpid()))
        return str(mark.remote(folder, "below").result())

    future = accelerate(mesh, retries=0)(above).remote(str(tmp_path))
    until_marked(tmp_path, "below")

    os.kill(int((tmp_path / "above").read_text()), signal.SIGKILL)
    killed = time.monotonic()

    with pytest.raises(errors.WorkerCrashedError):
        future.result(SOON)
    until(lambda: _load(mesh) == (0, 0), SOON)
    assert time.monotonic() - killed < 5.0  # And not the ten seconds that a client with a broken connection has.
    assert not (tmp_path / "below.end").exists()


def test_recursion_without_an_end_is_told_to_end(mesh: GPUMesh) -> None:
    def descend(depth: int) -> int:
        return int(endless.remote(depth + 1).result(60))

    endless = accelerate(mesh, name="descend", retries=0)(descend)

    with pytest.raises(errors.NestingTooDeepError) as caught:
        endless.remote(0).result(60)
    assert "descend" in str(caught.value)
    assert str(MAX_NESTING_DEPTH) in str(caught.value)


def test_recursion_with_an_end_ends(mesh: GPUMesh) -> None:
    def fibonacci(number: int) -> int:
        if number < 2:
            return number
        one, other = again.remote(number - 1), again.remote(number - 2)
        return int(one.result(60) + other.result(60))

    again = accelerate(mesh)(fibonacci)
    assert again.remote(7).result(60) == 13


def test_a_stream_that_a_task_leaves_behind_is_not_fed_any_more(mesh: GPUMesh, tmp_path: Path) -> None:
    def leave(folder: str) -> str:
        sys.modules["__main__"].kept = mark.map((folder, f"m{number}") for number in range(1_000_000))  # type: ignore[attr-defined]
        until_marked(Path(folder), "m0")
        return "left"

    assert accelerate(mesh)(leave).remote(str(tmp_path)).result(SOON) == "left"
    until(lambda: _load(mesh) == (0, 0), SOON)
    assert add.on(mesh).remote(1, 2).result(SOON) == 3
    assert _load(mesh) == (0, 0)
