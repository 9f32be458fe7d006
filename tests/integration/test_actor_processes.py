"""Processes of actors in a real mesh, in each way that calls run: objects, limits, ends. Alone: tests/unit/runtime/test_actor_*.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator

import numpy as np
import psutil
import pytest

import gpumesh
from gpumesh import GPUMesh
from gpumesh.errors import ActorDiedError, TaskCancelledError, TaskTimeoutError
from tests.support.async_keeper import AsyncKeeper
from tests.support.keeper import Keeper
from tests.support.processes import until

WAYS: Dict[str, Dict[str, Any]] = {"serial": {}, "threads": {"max_concurrency": 3}, "async": {}}


@pytest.fixture(scope="module")
def mesh() -> Iterator[GPUMesh]:
    with GPUMesh.local(workers=1) as mesh:
        yield mesh


def make(mesh: GPUMesh, way: str, *args: Any, **options: Any) -> Any:
    actor = mesh.actor(AsyncKeeper if way == "async" else Keeper, **WAYS[way], **options).remote(*args)
    actor.ready(20)
    return actor


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_large_values_go_in_and_out(mesh: GPUMesh, way: str) -> None:
    keeper = make(mesh, way)
    ours = np.ones(100_000)
    assert keeper.total.remote(ours).result(20) == 200_000.0
    assert ours.sum() == 100_000.0
    assert keeper.last.remote().result(20).sum() == 200_000.0
    shared = mesh.put(ours)
    totals = [keeper.total.remote(shared) for _ in range(4)]
    assert [total.result(20) for total in totals] == [200_000.0] * 4
    assert keeper.total.remote(keeper.last.remote()).result(20) == 300_000.0


def test_methods_put_and_get(mesh: GPUMesh, way: str) -> None:
    keeper = make(mesh, way)
    ref = keeper.put.remote({"a": np.arange(50_000)}).result(20)
    assert mesh.get(ref)["a"][-1] == 49_999
    del ref
    assert keeper.get.remote().result(20)["a"][-1] == 49_999, "the actor's own reference keeps it"


def test_a_call_that_runs_too_long_or_is_cancelled_ends_alone(mesh: GPUMesh, way: str) -> None:
    keeper = make(mesh, way)
    assert keeper.add.remote(1).result(20) == 1
    with pytest.raises(TaskTimeoutError):
        keeper.sleep.options(timeout=0.1).remote(3).result(20)
    running = keeper.sleep.remote(3)
    running.cancel()
    with pytest.raises(TaskCancelledError):
        running.result(20)
    assert keeper.add.remote(2).result(20) == 2, "the state is there"


def test_a_quick_result_does_not_wait_for_the_slow_call_behind_it(mesh: GPUMesh, way: str) -> None:
    keeper = make(mesh, way)
    quick, slow = keeper.add.remote(1), keeper.sleep.remote(1.0)
    assert quick.result(20) == 1
    assert not slow.done()


def test_what_has_returned_before_a_crash_is_known(mesh: GPUMesh, way: str) -> None:
    keeper = make(mesh, way)
    added = [keeper.add.remote(number) for number in range(50)]
    if way != "serial":
        gpumesh.wait(added)
    crashed = keeper.crash.remote()
    assert [future.exception(20) for future in added] == [None] * 50
    with pytest.raises(ActorDiedError):
        crashed.result(20)


def test_an_actor_that_ends_itself_is_closed(mesh: GPUMesh, way: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    keeper = make(mesh, way, str(log))
    keeper.note.remote("worked ").result(20)
    assert keeper.leave.remote().result(20) is None
    with pytest.raises(ActorDiedError, match="ended itself"):
        keeper.add.remote(1).result(20)
    assert log.read_text() == "worked closed "


def test_an_actor_that_nobody_refers_to_is_closed(mesh: GPUMesh, way: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    keeper = make(mesh, way, str(log))
    pid = keeper.pid.remote().result(20)
    del keeper
    until(lambda: not psutil.pid_exists(pid), 10)
    assert log.read_text() == "closed "


def test_calls_that_raise_leave_no_memory_behind(mesh: GPUMesh, way: str) -> None:
    keeper = make(mesh, way)
    process = psutil.Process(keeper.pid.remote().result(20))

    def raise_often() -> int:
        gpumesh.wait([keeper.fail.remote() for _ in range(300)])
        return int(process.memory_info().rss)

    raise_often()
    before = raise_often()
    assert max(raise_often(), raise_often()) - before < 1_000_000
