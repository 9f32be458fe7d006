"""The whole API on real processes: `GPUMesh.local()`, `start_coordinator`, `add_worker`, and this machine as a stand-in."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import as_completed as standard_as_completed
from pathlib import Path
from typing import Any, Iterator, List

import pytest

import gpumesh
from gpumesh import GPUMesh, accelerate, as_completed, errors, wait


def pid_of(_: int) -> int:
    return os.getpid()


def square(value: int) -> int:
    return value * value


def pause(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def fail(value: int) -> int:
    if value % 3 == 2:
        raise LookupError(value)
    return value


async def double_later(value: int) -> int:
    await asyncio.sleep(0.001)
    return 2 * value


def write_and_wait(path: str, value: int) -> int:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{value}\n")
    time.sleep(30)
    return value


class Scaler:
    """A class whose methods run anywhere."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @accelerate
    def apply(self, value: int) -> int:
        return self.factor * value


@pytest.fixture(scope="module")
def mesh() -> Iterator[GPUMesh]:
    with GPUMesh.local(workers=2) as mesh:
        accelerate.install(mesh)
        yield mesh
        accelerate.install(None)


def test_tasks_run_in_other_processes(mesh: GPUMesh) -> None:
    pids = set(accelerate(mesh)(pid_of).map(range(200)))

    assert os.getpid() not in pids
    assert len(pids) == 2


@pytest.mark.parametrize("count", [0, 1, 100, 3000, 20_000])
@pytest.mark.parametrize("kind", [list, iter])
def test_a_map_is_the_list_of_results(mesh: GPUMesh, count: int, kind: Any) -> None:
    assert list(accelerate(mesh)(square).map(kind(range(count)))) == [value * value for value in range(count)]


def test_every_way_to_take_results(mesh: GPUMesh) -> None:
    function = accelerate(mesh)(square)
    expected = [0, 1, 4, 9]
    futures = [function.remote(value) for value in range(4)]
    stream = function.map(range(4))

    assert [future.result(10) for future in futures] == expected
    assert stream == expected
    assert stream.result(timeout=10) == stream[:] == [future.result() for future in stream.futures] == expected
    assert sorted(future.result() for future in as_completed(futures)) == expected
    assert sorted(future.result() for future in standard_as_completed(futures, timeout=10)) == expected
    assert sorted(future.result() for future in as_completed(function.map(range(4)))) == expected
    assert len(wait(function.map(range(4))).done) == 4
    assert mesh.distribute(function=square, params=range(4)) == expected
    assert {future.worker for future in futures} <= {worker["id"] for worker in mesh.workers()} or all(
        future.worker for future in futures
    )


def test_asyncio_takes_all_of_them(mesh: GPUMesh) -> None:
    function = accelerate(mesh)(square)

    async def main() -> List[Any]:
        one = await function.remote(3)
        many = await asyncio.gather(*[function.remote(value) for value in range(20)])
        streamed = [value async for value in function.map(range(5000))]
        endless = []
        async for value in function.map(itertools.count()):
            endless.append(value)
            if len(endless) == 5:
                break
        return [one, many, streamed, await function.map([7, 8]), endless, function.remote(2).result(10)]

    assert asyncio.run(main()) == [
        9, [value * value for value in range(20)], [value * value for value in range(5000)], [49, 64], [0, 1, 4, 9, 16], 4,
    ]  # fmt: skip


def test_methods_closures_and_coroutines(mesh: GPUMesh) -> None:
    offset = 5

    assert list(Scaler(3).apply.map([1, 2])) == [3, 6]
    assert Scaler(3).apply(2) == Scaler(3).apply.remote(2).result(10) == 6
    assert list(accelerate(mesh)(lambda value: value + offset).map(range(3))) == [5, 6, 7]
    assert list(accelerate(mesh)(double_later).map(range(3))) == [0, 2, 4]


def test_a_failure_is_met_in_its_place(mesh: GPUMesh) -> None:
    function = accelerate(mesh)(fail)
    found = []

    with pytest.raises(LookupError) as caught:
        found.extend(function.map(range(5)))
    assert found == [0, 1]
    assert caught.value.__cause__ is not None
    assert [type(value) for value in function.map(range(4), return_exceptions=True)] == [int, int, LookupError, int]


def test_futures_feed_other_calls(mesh: GPUMesh) -> None:
    np = pytest.importorskip("numpy")
    function = accelerate(mesh)(square)
    array = accelerate(mesh)(np.arange).remote(200_000)
    chain = function.remote(2)
    for _ in range(3):
        chain = function.remote(chain)

    assert chain.result(10) == 2**16
    assert accelerate(mesh)(np.sum).remote(array).result(10) == np.arange(200_000).sum()
    assert list(function.map([function.remote(value) for value in range(5)])) == [0, 1, 16, 81, 256]


def test_results_stream_in_while_others_still_run(mesh: GPUMesh) -> None:
    started = time.monotonic()
    found = iter(accelerate(mesh)(pause).map([0.0, 1.5]))

    assert next(found) == 0.0
    assert time.monotonic() - started < 1.0
    assert next(found) == 1.5


def test_a_stopped_iteration_frees_the_mesh(mesh: GPUMesh, tmp_path: Path) -> None:
    path = tmp_path / "started"
    with accelerate(mesh)(write_and_wait).map([(str(path), value) for value in range(50)]):
        assert _until(path.exists)

    assert accelerate(mesh)(square).remote(3).result(10) == 9
    assert len(path.read_text().splitlines()) < 10


def test_many_threads_use_one_mesh(mesh: GPUMesh) -> None:
    function = accelerate(mesh)(square)
    wrong: List[Any] = []

    def work(number: int) -> None:
        for _ in range(5):
            base = number * 1000
            if list(function.map(range(base, base + 100))) != [value * value for value in range(base, base + 100)]:
                wrong.append(number)
            if function.remote(base).result(10) != base * base:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong


def test_the_pool_is_seen(mesh: GPUMesh) -> None:
    workers, devices = mesh.workers(), mesh.devices()

    assert len(workers) == 2
    assert {"id", "device", "device_name", "hostname", "score", "alive"} <= set(workers[0])
    assert [device["index"] for device in devices] == [0, 1]
    assert mesh.device_count() == 2
    assert mesh.total_score() == pytest.approx(sum(worker["score"] for worker in workers))
    assert mesh.auto_device() == "cpu"


def test_timeouts_end_tasks(mesh: GPUMesh) -> None:
    with pytest.raises(errors.TaskTimeoutError):
        accelerate(mesh, timeout=0.3)(pause).remote(30).result(15)


def test_a_coordinator_of_ones_own_and_workers_that_join() -> None:
    with GPUMesh.start_coordinator(port=0) as coordinator:
        with GPUMesh.add_worker(coordinator.url, token=coordinator.token, slots=1, tags={"room": "lab"}) as worker:
            with GPUMesh(coordinator.url, token=coordinator.token, fallback=False) as mesh:
                assert list(accelerate(mesh, tags={"room": "lab"})(square).map(range(5))) == [0, 1, 4, 9, 16]
                (seen,) = mesh.workers()
                assert seen["id"] == worker.info["id"]
                assert seen["tags"] == {"room": "lab"}


def _run(program: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GPUMESH_")}
    root = str(Path(gpumesh.__file__).parents[1])
    clean.update(environment, HOME=str(tmp_path), XDG_CONFIG_HOME=str(tmp_path), PYTHONPATH=root)
    script = tmp_path / "script.py"
    script.write_text(program)
    return subprocess.run([sys.executable, str(script)], env=clean, capture_output=True, text=True, timeout=50, check=False)


PROGRAM = """
from gpumesh import GPUMesh, accelerate

@accelerate({mesh})
def triple(value):
    if value == 3:
        raise KeyError(value)
    return 3 * value

print(triple.remote(5).result(), list(triple.map([1, 2, 3], return_exceptions=True)))
"""


@pytest.mark.parametrize(
    ("mesh", "environment", "words"),
    [
        ("", {}, "no mesh is configured"),
        ("GPUMesh('127.0.0.1:9', token='t')", {}, "127.0.0.1:9"),
        ("GPUMesh('127.0.0.1:9', token='t')", {"GPUMESH_LOCAL": "1"}, "GPUMESH_LOCAL is set"),
    ],
)
def test_without_a_mesh_a_program_runs_all_the_same(mesh: str, environment: Any, words: str, tmp_path: Path) -> None:
    ended = _run(PROGRAM.format(mesh=mesh), tmp_path, **environment)

    assert ended.stdout == "15 [3, 6, KeyError(3)]\n", ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert words in ended.stderr
    assert ended.returncode == 0


POOL = """
from gpumesh import GPUMesh
from gpumesh.client.local_device import best_device

with {mesh} as mesh:
    (worker,) = mesh.workers()
    devices = mesh.devices()
    usable = [each for each in devices if each["status"] == "idle"]
    print(len(usable) == mesh.device_count() > 0, worker["device"] == devices[0]["device"], worker["alive"])
    print(mesh.total_score() == sum(each["score"] for each in usable), worker["score"] == max(each["score"] for each in usable))
    print(mesh.auto_device() == best_device(), mesh.waiting())
"""


@pytest.mark.parametrize(
    ("mesh", "environment"), [("GPUMesh()", {}), ("GPUMesh('127.0.0.1:9', token='t', connect_timeout=0.5)", {}), ("GPUMesh()", {"GPUMESH_LOCAL": "1"})]
)  # fmt: skip
def test_without_a_mesh_the_pool_is_this_machine(mesh: str, environment: Any, tmp_path: Path) -> None:
    ended = _run(POOL.format(mesh=mesh), tmp_path, **environment)

    assert ended.stdout.split("\n") == ["True True True", "True True", "True []", ""], ended.stderr


def test_verbose_says_which_worker_ran_what(tmp_path: Path) -> None:
    program = PROGRAM.format(mesh="GPUMesh.local(1)")
    ended = _run(program, tmp_path, GPUMESH_VERBOSE="1")

    assert ended.stdout == "15 [3, 6, KeyError(3)]\n", ended.stderr
    assert "triple finished in" in ended.stderr
    assert "> (CPU)" in ended.stderr
    assert "triple: 3 tasks ended, 1 of them failed" in ended.stderr


def test_a_program_that_stops_half_way_ends(tmp_path: Path) -> None:
    program = """
import itertools, time
from gpumesh import GPUMesh, accelerate

mesh = GPUMesh.local(1)
function = accelerate(mesh)(lambda value: value)
endless, begun = function.map(itertools.count()), iter(function.map(range(100_000)))
print(next(begun), next(iter(endless)))
slow = accelerate(mesh)(time.sleep).map([60] * 10)
"""
    started = time.monotonic()
    ended = _run(program, tmp_path)

    assert (ended.stdout, ended.stderr, ended.returncode) == ("0 0\n", "", 0)
    assert time.monotonic() - started < 20


def _until(condition: Any, timeout: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
