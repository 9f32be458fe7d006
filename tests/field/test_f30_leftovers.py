"""F30: shared memory, files and descriptors are where they were, however tasks and processes ended."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any, Iterable, List, Set

import numpy as np
import psutil
import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import WorkerCrashedError
from gpumesh.runtime.embedded import EmbeddedMesh
from tests.support.client import Client
from tests.support.processes import descriptors, session_of, until, until_gone

MB = 1_000_000
TASKS = 1_000 if os.environ.get("GPUMESH_TEST_LARGE") else 100


def use(array: Any, number: int) -> float:
    if number % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return float(array.sum())


def ones(count: int) -> Any:
    return np.ones(count)


def leftovers(pids: Iterable[int]) -> Set[str]:
    """What stores of these processes have in shared memory and on disk: others use both while a test runs."""
    found: Set[str] = set()
    for root in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        for pid in pids:
            found |= {str(path) for path in root.glob(f"gpumesh-*/*-{pid}*/*")}
    return found


@pytest.mark.timeout(180)
def test_tasks_a_third_of_which_is_killed_leave_no_object_and_no_descriptor() -> None:
    own = descriptors()
    with GPUMesh.local(workers=1, slots=2) as mesh:
        remote = accelerate(mesh, retries=0)(use).remote
        for first in range(0, TASKS, 50):
            futures = [remote(np.full(10 * MB // 8, 1.0), number) for number in range(first, first + 50)]
            for number, future in enumerate(futures, first):
                if number % 3 == 0:
                    with pytest.raises(WorkerCrashedError):
                        future.result(120)
                else:
                    assert future.result(120) == 10 * MB // 8
        del futures, future, remote
        until(lambda: not mesh.objects()["objects"], 10, what="no object")
        until(lambda: mesh.objects()["memory"] == 0, 10, what="no memory")
        pids = [process.pid for process in psutil.Process().children(recursive=True)]
        assert leftovers(pids), "free segments, for use again"
    until(lambda: not leftovers(pids), 10, what="no file")
    until(lambda: descriptors() <= own + 2, 10, what="no descriptor")


def test_meshes_that_are_killed_are_swept_by_the_next() -> None:
    dead: List[int] = []
    for _ in range(3):
        dead += start_and_kill()
    with EmbeddedMesh(workers=1) as mesh, Client(mesh.url, mesh.token) as client:
        assert client.remote(ones, MB).result(30).sum() == MB
        assert not leftovers(dead)


def start_and_kill() -> List[int]:
    """A mesh whose processes are all killed at once; their ids."""
    with EmbeddedMesh(workers=1) as mesh, Client(mesh.url, mesh.token) as client:
        assert client.remote(ones, MB).result(30).sum() == MB
        spawner = mesh.processes["spawner"]
        processes = session_of(spawner)
        pids = [process.pid for process in processes]
        assert leftovers(pids)
        for process in processes:
            process.kill()
        until_gone(lambda: [process for process in session_of(spawner) if process.pid != spawner])
    return pids
