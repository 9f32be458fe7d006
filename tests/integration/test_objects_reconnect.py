"""Large values and references across connections that break and a coordinator that is killed, in both ways that a worker has.

A worker of its own memory stands for one on another host. Every task runs once; every value is what it was.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import numpy as np
import pytest

import gpumesh
from gpumesh import GPUMesh, accelerate
from gpumesh.errors import ObjectLostError
from gpumesh.serialization import refs
from tests.support import tasks
from tests.support.lent import hold
from tests.support.processes import until
from tests.support.wired_site import CLIENT, WiredSite, wired_site

WAYS = ("shared", "own")
WORKER = 1  # Its wire.
TIMES = {"CLIENT_GRACE_SECONDS": 1.0, "RECOVERY_SECONDS": 3.0}
OUTAGE_SECONDS = 1.0  # Beyond the moment for which a worker may be away.
COUNT = 6_000_000  # Of 8 bytes: what is in a wire and in sockets is a fraction of it.


class Sites:
    """One mesh for each way, made at its first use."""

    def __init__(self, folder: Path, ends: contextlib.ExitStack) -> None:
        self._folder = folder
        self._ends = ends
        self._made: Dict[str, WiredSite] = {}

    def of(self, way: str) -> WiredSite:
        if way not in self._made:
            folder = self._folder / way
            folder.mkdir()
            made = self._made[way] = self._ends.enter_context(wired_site(folder, times=TIMES))
            made.join("one", environment={"GPUMESH_NO_SHARED_MEMORY": "1" if way == "own" else "0"})
        return self._made[way]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with contextlib.ExitStack() as ends:
        yield Sites(tmp_path_factory.mktemp("sites"), ends)


@contextlib.contextmanager
def site(sites: Sites, way: str) -> Iterator[WiredSite]:
    """The mesh of that way, with all that must hold afterwards."""
    made = sites.of(way)
    yield made
    assert made.tracebacks() == []


def starts(folder: Path) -> int:
    """How often tasks have been started."""
    return len(list(folder.glob("*.started")))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    folder = tmp_path / "starts"
    folder.mkdir()
    return folder


@pytest.fixture(params=["near", "far"])
def near_or_far(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the client shares the coordinator's memory."""
    monkeypatch.setenv("GPUMESH_NO_SHARED_MEMORY", "1" if request.param == "far" else "0")
    return str(request.param)


# --- functions that run on the worker


def make(folder: str, count: int, number: float) -> Any:
    """A large value, once told to."""
    hold(folder, "make")
    return np.full(count, number)


def make_and_write_slowly(folder: str, count: int, number: float, is_open: bool) -> Any:
    """A large value whose segment is there, or open, and not written before that is told."""
    from gpumesh.store.container import container_views
    from gpumesh.store.segments import SegmentWriter

    write = SegmentWriter.write

    def slowly(self: Any, path: str, nbytes: int, parts: Any) -> None:
        SegmentWriter.write = write  # type: ignore[method-assign]
        if is_open:
            with open(path, "r+b") as segment:
                Path(folder, "writing").touch()
                hold(folder, "write")
                segment.writelines(container_views(parts))
        else:
            Path(folder, "writing").touch()
            hold(folder, "write")
            write(self, path, nbytes, parts)

    SegmentWriter.write = slowly  # type: ignore[method-assign]
    return np.full(count, number)


def hold_and_fill(folder: str, name: str, count: int) -> Any:
    hold(folder, name)
    return np.ones(count)


def add_up(folder: str, array: Any) -> float:
    hold(folder, "make")
    return float(array.sum())


def get_later(folder: str, box: Dict[str, Any]) -> float:
    """Take a value in a task, once told to."""
    hold(folder, "make")
    return float(gpumesh.get(box["ref"]).sum())


def put_and_hold(folder: str, count: int) -> Any:
    """References to a large object and to a small one that are handed over later."""
    space = refs.current_space()
    assert space is not None
    found = [space.put(np.full(count, 7.0)), space.put({"n": 7})]
    Path(folder, "put").touch()
    hold(folder, "make")
    return found


def go(folder: Path, name: str = "make") -> None:
    (folder / f"{name}.go").touch()


def until_held(folder: Path, count: int = 1) -> None:
    until(lambda: len(list(folder.glob("make.*.started"))) >= count, 20, what="the task runs")


def joined(made: WiredSite) -> int:
    """How often the worker has joined."""
    return made.workers["one"].output.count("joined the mesh")


def reset_worker(made: WiredSite) -> None:
    """Its connection breaks, and there is another."""
    count = joined(made)
    made.reset(WORKER)
    until(lambda: joined(made) > count, 20, what="joined again")


# --- a worker's connection breaks


@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_a_result_that_is_cut_off_half_way_costs_no_run(way: str, sites: Sites, marks: Path, seconds: float) -> None:
    with site(sites, way) as made, made.client() as mesh:
        future = accelerate(mesh)(make).remote(str(marks), COUNT, 3.0)
        until_held(marks)
        before = made.descriptors("one")
        made.stall(WORKER, "up")
        go(marks)
        until(lambda: way == "shared" or made.own_segments("one"), 10, what="a result")
        time.sleep(0.3)  # Some of it is in the wire, and stays there.

        made.stall(WORKER)
        made.reset(WORKER)
        time.sleep(seconds)
        made.flow(WORKER)

        assert float(future.result(40).sum()) == 3.0 * COUNT
        assert starts(marks) == 1
        del future
        made.until_no_objects(mesh)
        assert made.descriptors("one") <= before + 2


def is_result_known(made: WiredSite, mesh: Any) -> bool:
    """Whether a value is on its way, and the end of its task has been told, which refers to it as well."""
    return any(row["state"] == "arriving" and row["references"] > 1 for row in made.objects(mesh))


def test_a_result_that_is_half_way_here_is_not_made_again_by_another_worker(sites: Sites, marks: Path) -> None:
    with site(sites, "own") as made, made.client() as mesh:
        future = accelerate(mesh)(make).remote(str(marks), COUNT, 3.0)
        until_held(marks)
        made.join("two")
        try:
            made.stall(WORKER, "down")  # Nobody fetches it.
            go(marks)
            until(lambda: is_result_known(made, mesh), 10, what="a result is told of")
            made.stall(WORKER)
            made.reset(WORKER)
            until(lambda: not made.alive(mesh, "one"), 10, what="it is given up")
            time.sleep(OUTAGE_SECONDS)
            made.flow(WORKER)
            assert float(future.result(40).sum()) == 3.0 * COUNT
            assert starts(marks) == 1
        finally:
            made.workers.pop("two").kill()
        del future
        made.until_no_objects(mesh)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_result_whose_segment_was_given_out_over_a_broken_connection_arrives(
    sites: Sites, marks: Path, is_open: bool
) -> None:
    with site(sites, "shared") as made, made.client() as mesh:
        future = accelerate(mesh, retries=0)(make_and_write_slowly).remote(str(marks), COUNT, 3.0, is_open)
        until((marks / "writing").exists, 20)
        reset_worker(made)
        go(marks, "write")
        assert float(future.result(40).sum()) == 3.0 * COUNT
        assert starts(marks) == 1
        del future
        made.until_no_objects(mesh)


def test_a_task_that_runs_keeps_its_arguments_when_the_connection_breaks(way: str, sites: Sites, marks: Path) -> None:
    with site(sites, way) as made, made.client() as mesh:
        table = mesh.put(np.full(COUNT, 2.0))
        futures = [accelerate(mesh, retries=0)(add_up).remote(str(marks), table) for _ in range(3)]
        until_held(marks)
        made.reset(WORKER)
        go(marks)
        assert [future.result(40) for future in futures] == [2.0 * COUNT] * 3
        assert starts(marks) == 3
        del table, futures
        made.until_no_objects(mesh)


def test_arguments_that_are_on_their_way_come_again(sites: Sites, marks: Path) -> None:
    with site(sites, "own") as made, made.client() as mesh:
        go(marks)
        assert accelerate(mesh)(tasks.noop).remote(1).result(20) == 1
        table = mesh.put(np.full(COUNT, 2.0))
        made.stall(WORKER, "down")
        future = accelerate(mesh, retries=0)(add_up).remote(str(marks), table)
        time.sleep(0.3)
        made.reset(WORKER)
        made.flow(WORKER)
        assert future.result(40) == 2.0 * COUNT
        assert starts(marks) == 1


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_task_takes_a_value_across_a_broken_connection(way: str, sites: Sites, marks: Path, when: str) -> None:
    with site(sites, way) as made, made.client() as mesh:
        table = mesh.put(np.full(COUNT, 2.0))
        future = accelerate(mesh, retries=0)(get_later).remote(str(marks), {"ref": table})
        until_held(marks)
        made.stall(WORKER, "down")
        if when == "before":
            go(marks)
            time.sleep(0.3)  # It asks, and the answer is stuck.
        made.stall(WORKER)
        made.reset(WORKER)
        go(marks)
        time.sleep(0.1)
        made.flow(WORKER)
        assert future.result(40) == 2.0 * COUNT
        assert starts(marks) == 1
        del table
        made.until_no_objects(mesh)


def test_what_a_task_has_put_outlives_its_connection(way: str, sites: Sites, marks: Path) -> None:
    with site(sites, way) as made, made.client() as mesh:
        future = accelerate(mesh, retries=0)(put_and_hold).remote(str(marks), COUNT)
        until((marks / "put").exists, 20)
        reset_worker(made)
        until(lambda: len(made.objects(mesh)) == 2, 10, what="what it has told of again")
        go(marks)
        large, small = future.result(40)
        assert (float(mesh.get(large).sum()), mesh.get(small)) == (7.0 * COUNT, {"n": 7})
        del large, small, future
        made.until_no_objects(mesh)


# --- the coordinator is killed


def test_a_result_made_while_there_is_no_coordinator_is_the_next_ones(way: str, sites: Sites, marks: Path) -> None:
    with site(sites, way) as made, made.client() as mesh:
        future = accelerate(mesh)(make).remote(str(marks), COUNT, 3.0)
        until_held(marks)
        made.kill_coordinator()
        go(marks)
        made.serve()
        assert float(future.result(40).sum()) == 3.0 * COUNT
        assert starts(marks) == 1
        del future
        made.until_no_objects(mesh)


def test_a_result_in_the_memory_of_a_coordinator_that_was_killed_is_not_made_again(way: str, sites: Sites, marks: Path) -> None:
    with site(sites, way) as made, made.client() as mesh:
        future = accelerate(mesh)(make).remote(str(marks), COUNT, 3.0)
        until_held(marks)
        made.stall(CLIENT)
        go(marks)
        with GPUMesh(made.url, token="between hosts", fallback=False) as other:
            until(lambda: [row for row in made.objects(other) if row["state"] == "stored"], 20, what="the result")
        before = made.descriptors("one")
        made.kill_coordinator()
        made.reset(CLIENT)
        made.flow(CLIENT)
        made.serve()
        assert float(future.result(40).sum()) == 3.0 * COUNT
        assert starts(marks) == 1
        del future
        made.until_no_objects(mesh)
        assert accelerate(mesh)(tasks.noop).remote(1).result(20) == 1
        until(lambda: made.descriptors("one") <= before + 2, 10, what=f"{before} descriptors again")


@pytest.mark.parametrize("is_open", [True, False])
def test_a_segment_of_a_coordinator_that_was_killed_is_not_written_in_vain(sites: Sites, marks: Path, is_open: bool) -> None:
    with site(sites, "shared") as made, made.client() as mesh:
        future = accelerate(mesh, retries=0)(make_and_write_slowly).remote(str(marks), COUNT, 3.0, is_open)
        until((marks / "writing").exists, 20)
        count = joined(made)
        made.kill_coordinator()
        made.serve()
        until(lambda: joined(made) > count, 20, what="joined again")
        mesh.put(np.zeros(COUNT))  # Makes the new store, and sweeps the old one.
        go(marks, "write")
        assert float(future.result(40).sum()) == 3.0 * COUNT
        assert starts(marks) == 1
        del future
        made.until_no_objects(mesh)


def test_results_that_have_arrived_and_are_read_later_outlive_the_coordinator(
    way: str, near_or_far: str, sites: Sites, marks: Path
) -> None:
    go(marks)
    with site(sites, way) as made, made.client() as mesh:
        futures = [accelerate(mesh, retries=0)(make).remote(str(marks), 20_000, float(number)) for number in range(4)]
        gpumesh.wait(futures, timeout=20)
        for _ in range(2):
            count = joined(made)
            made.kill_coordinator()
            made.serve()
            until(lambda count=count: joined(made) > count, 20, what="joined again")
            until(lambda: _is_back(mesh), 20, what="the client is back")
        assert [float(future.result(20)[-1]) for future in futures] == [0.0, 1.0, 2.0, 3.0]
        assert starts(marks) == 4
        del futures
        made.until_no_objects(mesh)


def test_what_went_with_the_coordinator_is_said_to_be_lost(way: str, sites: Sites, marks: Path) -> None:
    with site(sites, way) as made, made.client() as mesh:
        table = mesh.put(np.ones(COUNT))
        large = accelerate(mesh, retries=0)(add_up)
        future = large.remote(str(marks), np.full(COUNT, 4.0))
        until_held(marks)
        made.kill_coordinator()
        made.serve()
        go(marks)
        assert future.result(40) == 4.0 * COUNT
        with pytest.raises(ObjectLostError):
            mesh.get(table)
        with pytest.raises(ObjectLostError):
            large.remote(str(marks), table).result(40)
        assert large.remote(str(marks), np.full(COUNT, 5.0)).result(40) == 5.0 * COUNT
        del table, future
        made.until_no_objects(mesh)


# --- a client's connection breaks


def reset_and_wait(made: WiredSite, mesh: GPUMesh) -> None:
    """The client's connection breaks, and there is another."""
    made.reset(CLIENT)
    time.sleep(0.05)
    until(lambda: _is_back(mesh), 20, what="the client is back")


def _is_back(mesh: GPUMesh) -> bool:
    try:
        return bool(mesh.workers())
    except gpumesh.errors.MeshUnavailableError:
        return False


def test_what_a_client_has_put_outlives_its_connection(near_or_far: str, sites: Sites, marks: Path) -> None:
    go(marks)
    with site(sites, "own") as made, made.client() as mesh:
        table, small = mesh.put(np.full(COUNT, 2.0)), mesh.put({"n": 2})
        held: List[Any] = [mesh.get(table)]
        future = accelerate(mesh)(make).remote(str(marks), COUNT, 3.0)
        gpumesh.wait([future], timeout=20)
        for _ in range(3):
            reset_and_wait(made, mesh)
            assert float(mesh.get(table)[5]) == 2.0
            assert mesh.get(small) == {"n": 2}
        assert accelerate(mesh)(add_up).remote(str(marks), table).result(40) == 2.0 * COUNT
        assert float(future.result(20).sum()) == 3.0 * COUNT
        assert float(held[0].sum()) == 2.0 * COUNT
        del table, small, future
        held.clear()
        made.until_no_objects(mesh)


def test_what_is_put_while_the_connection_breaks_arrives(near_or_far: str, sites: Sites) -> None:
    with site(sites, "own") as made, made.client() as mesh:
        first = mesh.put(np.zeros(COUNT))
        made.stall(CLIENT, "up")
        small = [mesh.put(number) for number in range(100)]
        made.reset(CLIENT)
        made.flow(CLIENT)
        large = mesh.put(np.ones(COUNT))
        assert mesh.get(small) == list(range(100))
        assert (float(mesh.get(large).sum()), float(mesh.get(first).sum())) == (COUNT, 0.0)
        del first, small, large
        made.until_no_objects(mesh)


def test_results_that_were_on_their_way_to_a_client_arrive(near_or_far: str, sites: Sites, marks: Path) -> None:
    with site(sites, "own") as made, made.client() as mesh:
        futures = [accelerate(mesh, retries=0)(make).remote(str(marks), COUNT, float(number)) for number in range(2)]
        until_held(marks)
        made.stall(CLIENT, "down")
        go(marks)
        with GPUMesh(made.url, token="between hosts", fallback=False) as other:
            until(lambda: len([row for row in made.objects(other) if row["state"] == "stored"]) == 2, 20, what="results")
        made.reset(CLIENT)
        made.flow(CLIENT)
        assert [float(future.result(40)[-1]) for future in futures] == [0.0, 1.0]
        assert starts(marks) == 2
        del futures
        made.until_no_objects(mesh)


def test_a_large_argument_of_a_task_that_waits_is_not_stored_again(sites: Sites, marks: Path) -> None:
    with site(sites, "own") as made, made.client() as mesh:
        future = accelerate(mesh)(add_up).remote(str(marks), np.full(COUNT, 1.0))
        later = accelerate(mesh)(add_up).remote(str(marks), np.full(COUNT, 2.0))
        until_held(marks)
        before = [row["id"] for row in made.objects(mesh)]
        reset_and_wait(made, mesh)
        assert [row["id"] for row in made.objects(mesh)] == before
        go(marks)
        assert (future.result(40), later.result(40)) == (1.0 * COUNT, 2.0 * COUNT)
        del future, later
        made.until_no_objects(mesh)


def test_a_client_that_is_away_for_too_long_leaves_nothing_and_stores_its_arguments_again(
    near_or_far: str, sites: Sites, marks: Path
) -> None:
    with site(sites, "own") as made, made.client() as mesh:
        table = mesh.put(np.full(COUNT, 2.0))
        future = accelerate(mesh)(add_up).remote(str(marks), np.full(COUNT, 4.0))
        until_held(marks)
        made.stall(CLIENT)
        made.reset(CLIENT)
        with GPUMesh(made.url, token="between hosts", fallback=False) as other:
            made.until_no_objects(other)
        made.flow(CLIENT)
        go(marks)
        assert future.result(40) == 4.0 * COUNT
        with pytest.raises(ObjectLostError):
            mesh.get(table)
        del table, future
        made.until_no_objects(mesh)


def test_a_callback_that_loads_a_value_waits_for_the_connection(near_or_far: str, sites: Sites, marks: Path) -> None:
    """Whether the thread that calls it is the one that does the I/O, or one that waits for a result."""
    with site(sites, "own") as made, made.client() as mesh:
        found: List[Any] = []
        futures = [accelerate(mesh, retries=0)(hold_and_fill).remote(str(marks), name, COUNT) for name in ("one", "two")]

        def load(future: Any) -> None:
            made.reset(CLIENT)
            time.sleep(0.1)
            found.append(float(future.result()[-1]))

        for future in futures:
            future.add_done_callback(load)
        go(marks, "one")
        until(lambda: len(found) == 1, 20, what="the first")
        go(marks, "two")
        assert float(futures[1].result(20)[-1]) == 1.0
        until(lambda: found == [1.0, 1.0], 20, what=f"{found}")
        del futures, future
        made.until_no_objects(mesh)
