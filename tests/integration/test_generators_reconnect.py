"""Values of generators across connections that break, a coordinator that is killed, and a client that was away at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any, Dict, Iterator

import numpy as np
import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import WorkerCrashedError
from tests.support.processes import until
from tests.support.site_of_hosts import TOKEN
from tests.support.wired_site import CLIENT, WiredSite, wired_site

SOON = 30.0
WORKER = 1  # Its wire.
TIMES = {"CLIENT_GRACE_SECONDS": 1.0, "RECOVERY_SECONDS": 3.0}
LARGE = 12_000  # Of 8 bytes: goes through the store.


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dict[str, WiredSite]]:
    """A mesh whose worker shares the coordinator's memory, and one whose worker has its own."""
    with contextlib.ExitStack() as ends:
        made: Dict[str, WiredSite] = {}
        for way in ("shared", "own"):
            made[way] = ends.enter_context(wired_site(tmp_path_factory.mktemp(way), times=TIMES))
            made[way].join("one", environment={"GPUMESH_NO_SHARED_MEMORY": "1" if way == "own" else "0"})
        yield made


@pytest.fixture(params=["shared", "own"])
def made(request: pytest.FixtureRequest, sites: Dict[str, WiredSite]) -> Iterator[WiredSite]:
    yield sites[request.param]
    assert sites[request.param].tracebacks() == []


def mixed(folder: str, count: int) -> Any:
    """Small values and large ones, and how often it was started; it goes on past the middle, and ends, when told to."""
    Path(folder, f"{time.monotonic_ns()}.started").touch()
    for value in range(count):
        if value == count // 2:
            while not Path(folder, "middle.go").exists():
                time.sleep(0.005)
        Path(folder, "made").write_text(str(value + 1))
        yield np.full(LARGE, value) if value % 3 == 2 else value
    while not Path(folder, "end.go").exists():
        time.sleep(0.005)
    Path(folder, "ended").touch()
    return count


def number_of(value: Any) -> int:
    return int(value[0]) if isinstance(value, np.ndarray) else int(value)


def starts(folder: Path) -> int:
    return len(list(folder.glob("*.started")))


def test_connections_that_break_cost_no_value_and_no_run(made: WiredSite, tmp_path: Path) -> None:
    (tmp_path / "middle.go").touch()
    (tmp_path / "end.go").touch()
    with made.client() as mesh:
        stream = accelerate(mesh)(mixed).remote(str(tmp_path), 400)
        for place, value in enumerate(stream):
            assert number_of(value) == place
            if place % 50 == 25:
                made.reset(CLIENT if place % 100 == 25 else WORKER)
        assert place == 399
        assert starts(tmp_path) == 1
        del stream, value
        made.until_no_objects(mesh)


def test_a_client_that_was_away_at_the_end_misses_nothing(made: WiredSite, tmp_path: Path) -> None:
    (tmp_path / "end.go").touch()
    with made.client() as mesh:
        stream = accelerate(mesh)(mixed).remote(str(tmp_path), 40)
        assert [number_of(next(stream)) for _ in range(20)] == list(range(20))
        made.stall(CLIENT)
        made.reset(CLIENT)
        (tmp_path / "middle.go").touch()
        until((tmp_path / "ended").exists, SOON, what="the generator has ended")
        made.flow(CLIENT)

        assert [number_of(value) for value in stream] == list(range(20, 40))
        assert stream.result() == 40
        assert starts(tmp_path) == 1
        del stream
        made.until_no_objects(mesh)


def test_a_generator_outlives_the_coordinator(made: WiredSite, tmp_path: Path) -> None:
    with made.client() as mesh:
        stream = accelerate(mesh)(mixed).remote(str(tmp_path), 60)
        assert [number_of(next(stream)) for _ in range(25)] == list(range(25))
        made.kill_coordinator()
        (tmp_path / "middle.go").touch()
        (tmp_path / "end.go").touch()
        made.serve()

        assert [number_of(value) for value in stream] == list(range(25, 60))
        assert stream.result() == 60
        assert starts(tmp_path) == 1
        del stream
        made.until_no_objects(mesh)


def test_an_end_without_its_values_is_no_end(sites: Dict[str, WiredSite], tmp_path: Path) -> None:
    made = sites["shared"]
    made.join("two")
    (tmp_path / "end.go").touch()
    with made.client() as mesh:
        stream = accelerate(mesh, tags={"place": "two"})(mixed).remote(str(tmp_path), 40)
        assert [number_of(next(stream)) for _ in range(20)] == list(range(20))
        made.stall(CLIENT)
        made.reset(CLIENT)
        (tmp_path / "middle.go").touch()
        until((tmp_path / "ended").exists, SOON, what="the generator has ended")
        worker = made.workers.pop("two")
        with GPUMesh(made.url, token=TOKEN, fallback=False) as other:
            ident = made.ident(other, "two")
            until(
                lambda: any(view["id"] == ident and not view["running"] for view in other.workers()), SOON, what="it is told of"
            )
            os.kill(worker.process.pid, signal.SIGINT)
            until(lambda: not made.alive(other, "two"), SOON, what="it has left")
        made.flow(CLIENT)

        with pytest.raises(WorkerCrashedError, match="values of .* were lost with the worker"):
            for _ in stream:
                pass
