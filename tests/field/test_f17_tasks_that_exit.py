"""F17: a task that exits, aborts or crashes ends as that task's error; the slot and the others live on."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any, NoReturn

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import WorkerCrashedError


class Unusual(BaseException):
    pass


def exit_quietly() -> NoReturn:
    sys.exit(0)


def exit_with_words() -> NoReturn:
    sys.exit("msg")


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def raise_unusual() -> NoReturn:
    raise Unusual("odd")


def exit_hard() -> NoReturn:
    os._exit(3)


def abort() -> NoReturn:
    os.abort()


def read_null() -> Any:
    return ctypes.string_at(0)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pid() -> int:
    return os.getpid()


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (exit_quietly, SystemExit),
        (exit_with_words, SystemExit),
        (interrupt, KeyboardInterrupt),
        (raise_unusual, Unusual),
    ],
)
def test_python_exits_are_errors_of_that_task_and_cost_no_process(mesh: GPUMesh, function: Any, kind: Any) -> None:
    before = set(accelerate(mesh)(pid).map([()] * 20))

    with pytest.raises(kind):
        accelerate(mesh)(function).remote().result(20)

    after = set(accelerate(mesh)(pid).map([()] * 20))
    assert after <= before or before <= after


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (exit_hard, "code 3"),
        (abort, "SIGABRT"),
        (read_null, "SIGSEGV"),
        (kill_self, "SIGKILL"),
    ],
)
def test_crashes_name_the_cause_and_the_slot_comes_back(mesh: GPUMesh, function: Any, words: str) -> None:
    with pytest.raises(WorkerCrashedError, match=words) as caught:
        accelerate(mesh, retries=0)(function).remote().result(20)

    assert len(caught.value.attempts) == 1
    assert accelerate(mesh)(pid).remote().result(20) > 0
    assert mesh.workers()[0]["slots"] == 2


def test_a_task_that_always_crashes_ends_after_its_retries_with_every_attempt(mesh: GPUMesh) -> None:
    with pytest.raises(WorkerCrashedError) as caught:
        accelerate(mesh, retries=2)(exit_hard).remote().result(30)

    assert len(caught.value.attempts) == 3


def test_the_others_finish_beside_a_crash(mesh: GPUMesh) -> None:
    def sometimes(i: int) -> int:
        if i == 7:
            os._exit(9)
        return i

    results = list(accelerate(mesh, retries=0)(sometimes).map(range(30), return_exceptions=True))

    assert [result for i, result in enumerate(results) if i != 7] == [i for i in range(30) if i != 7]
    assert isinstance(results[7], WorkerCrashedError)
