"""Large results that have arrived, and are lost with all that had them before anybody read them: their tasks run again, where they may."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest

import gpumesh
from gpumesh import GPUMesh, accelerate
from gpumesh.errors import MeshUnavailableError, ObjectLostError
from tests.support.hosts import kill
from tests.support.processes import until
from tests.support.wired_site import WiredSite, wired_site

COUNT = 20_000  # Of 8 bytes: far above what travels in a message.


@pytest.fixture
def made(tmp_path: Path) -> Iterator[WiredSite]:
    with wired_site(tmp_path, times={"RECOVERY_SECONDS": 1.0}) as made:
        yield made


def fill(folder: str, number: float) -> Any:
    """An array, and one more byte in a file for each start."""
    with open(Path(folder, f"starts-{number:g}"), "ab") as file:
        file.write(b".")
    return np.full(COUNT, number)


def lose_everything(made: WiredSite, mesh: GPUMesh) -> None:
    """Worker and coordinator are killed at the same time; others take their places."""
    kill(made.workers["one"])
    made.kill_coordinator()
    made.serve()
    made.join("two")
    until(lambda: _sees_a_worker(mesh), 20, what="the client sees the new worker")


def _sees_a_worker(mesh: GPUMesh) -> bool:
    try:
        return any(worker["alive"] for worker in mesh.workers())
    except MeshUnavailableError:  # It is just looking for the coordinator.
        return False


def test_what_may_be_tried_again_is_and_the_other_is_said_to_be_lost(made: WiredSite, tmp_path: Path) -> None:
    made.join("one")
    with made.client() as mesh:
        again = accelerate(mesh)(fill).remote(str(tmp_path), 1.0)
        stream = accelerate(mesh)(fill).map([(str(tmp_path), 2.0), (str(tmp_path), 3.0)])
        once = accelerate(mesh, retries=0)(fill).remote(str(tmp_path), 4.0)
        gpumesh.wait([again, once, *stream.futures], timeout=20)
        lose_everything(made, mesh)

        assert again.result(30)[-1] == 1.0
        assert [value[-1] for value in stream] == [2.0, 3.0]
        with pytest.raises(ObjectLostError):
            once.result(30)

    assert [len(Path(tmp_path, f"starts-{number}").read_bytes()) for number in (1, 2, 3, 4)] == [2, 2, 2, 1]
