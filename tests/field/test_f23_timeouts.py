"""F23: a task's timeout ends the running code; a result's timeout ends only the waiting."""

from __future__ import annotations

import concurrent.futures
import ctypes
import time
from typing import Any

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import TaskTimeoutError


def sleep_in_python() -> None:
    end = time.monotonic() + 1000
    while time.monotonic() < end:
        pass


def sleep_in_c() -> None:
    time.sleep(1000)


def sleep_with_the_gil() -> None:
    ctypes.PyDLL(None).sleep(1000)  # Holds the GIL all the while: no signal handler in Python runs.


def quick(n: int = 1) -> int:
    return n


@pytest.mark.parametrize("function", [sleep_in_python, sleep_in_c, sleep_with_the_gil])
def test_the_timeout_ends_the_code_and_frees_the_slot(mesh: GPUMesh, function: Any) -> None:
    started = time.monotonic()
    with pytest.raises(TaskTimeoutError, match=r"0\.5 s") as caught:
        accelerate(mesh, timeout=0.5)(function).remote().result(20)

    assert time.monotonic() - started < 5
    assert isinstance(caught.value, TimeoutError)
    assert list(accelerate(mesh)(quick).map(range(4))) == [0, 1, 2, 3]


def test_one_slow_item_of_a_map_times_out_alone(mesh: GPUMesh) -> None:
    def work(i: int) -> int:
        if i == 3:
            time.sleep(1000)
        return i

    results = list(accelerate(mesh, timeout=0.5)(work).map(range(8), return_exceptions=True))

    assert [r for r in results if not isinstance(r, BaseException)] == [0, 1, 2, 4, 5, 6, 7]
    assert isinstance(results[3], TaskTimeoutError)


def test_waiting_in_the_queue_does_not_count(mesh: GPUMesh) -> None:
    def work() -> int:
        time.sleep(0.3)
        return 1

    assert list(accelerate(mesh, timeout=1.0)(work).map([()] * 10)) == [1] * 10


def test_a_result_timeout_only_stops_waiting(mesh: GPUMesh) -> None:
    def work() -> str:
        time.sleep(1.0)
        return "finished"

    future = accelerate(mesh)(work).remote()
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(timeout=0.2)

    assert future.result(20) == "finished"


def test_cancel_reaches_running_code(mesh: GPUMesh) -> None:
    future = accelerate(mesh)(sleep_in_python).remote()
    time.sleep(0.2)

    assert future.cancel()
    assert future.cancelled()
    started = time.monotonic()
    blockers = [accelerate(mesh)(quick).remote(i) for i in range(10)]
    assert [blocker.result(20) for blocker in blockers] == list(range(10))
    assert time.monotonic() - started < 5
