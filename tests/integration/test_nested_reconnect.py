"""Work inside work whose coordinator is killed and started again, whose worker's wire is cut, and whose worker dies."""

from __future__ import annotations

import select
import time
from collections import Counter
from pathlib import Path
from typing import Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate, current_mesh
from gpumesh.errors import WorkerCrashedError
from gpumesh.protocol import connection as protocol
from gpumesh.protocol.messages import Query
from tests.support import lent
from tests.support.hosts import kill
from tests.support.mesh_peer import MeshPeer
from tests.support.processes import until
from tests.support.site_of_hosts import Site, site_of_hosts

SOON = 30.0
DOWN_SECONDS = 0.5


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_of_hosts(tmp_path) as made:
        yield made


def parent(folder: str, name: str, names: List[str]) -> List[str]:
    """Leave a mark, submit tasks that wait for a word, and wait for them; then submit one more."""
    hold = accelerate(retries=0)(lent.hold)
    futures = [hold.remote(folder, each) for each in names]
    Path(folder, f"{name}..{time.monotonic_ns()}.started").touch()
    done = [future.result()[0] for future in futures]
    done.append(hold.remote(folder, f"{name}-last").result()[0])
    return done


def late(folder: str, name: str) -> int:
    """Use the mesh for the first time when the test says so."""
    lent.hold(folder, name)
    return int(current_mesh().distribute(abs, [-1])[0])


def test_nested_work_survives_a_restart_of_the_coordinator_and_nothing_runs_twice(site: Site) -> None:
    site.join_all("one", "two", slots=2)
    with site.client() as mesh:
        parents = [
            accelerate(mesh, retries=0)(parent).remote(str(site.marks), f"p{number}", [f"c{number}{each}" for each in range(2)])
            for number in range(2)
        ]
        until(lambda: len(site.starts()) == 6, SOON, what=f"two parents and four children: {site.starts()}")

        kill(site.coordinator)
        site.go("c00", "c10")  # These end while nobody is there to be told.
        time.sleep(DOWN_SECONDS)
        site.serve()
        site.go()

        for number, future in enumerate(parents):
            assert future.result(SOON) == [f"c{number}0", f"c{number}1", f"p{number}-last"]
    counted = Counter(name for name, _ in site.starts())
    assert set(counted.values()) == {1}, counted
    assert len(counted) == 8, counted
    assert site.tracebacks() == []


def test_the_first_use_while_the_coordinator_is_away_waits_for_it(site: Site) -> None:
    site.join("one", slots=1)
    with site.client() as mesh:
        future = accelerate(mesh, retries=0)(late).remote(str(site.marks), "late")
        site.until_started("late")
        kill(site.coordinator)
        site.go("late")
        time.sleep(DOWN_SECONDS)
        site.serve()
        assert future.result(SOON) == 1
    assert site.tracebacks() == []


def test_children_of_a_worker_that_leaves_are_not_left_running_elsewhere(site: Site) -> None:
    site.join("one", slots=1)
    with site.client() as mesh:
        future = accelerate(mesh, retries=0, tags={"place": "one"})(parent).remote(str(site.marks), "p", ["c"])
        site.join("two", slots=1)
        site.until_started("p")
        site.until_started("c")
        worker = site.workers["one"]
        worker.process.terminate()
        worker.wait_for("draining", SOON)
        stopped = time.monotonic()
        worker.process.terminate()

        with pytest.raises(Exception):  # noqa: B017  # Whatever its end was.
            future.result(SOON)
        until(lambda: not any(worker["running"] for worker in mesh.workers()), SOON, what=f"{mesh.workers()}")
        assert time.monotonic() - stopped < 8.0


def test_children_of_a_worker_that_is_killed_end_at_once(site: Site) -> None:
    site.join("one", slots=1)
    with site.client() as mesh:
        future = accelerate(mesh, retries=0, tags={"place": "one"})(parent).remote(str(site.marks), "p", ["c1", "c2"])
        site.join("two", slots=1)
        site.until_started("p")
        until(lambda: ("c1", "two") in site.starts() or ("c2", "two") in site.starts(), SOON, what="a child elsewhere")
        killed = time.monotonic()
        kill(site.workers["one"])

        with pytest.raises(WorkerCrashedError):
            future.result(SOON)
        until(lambda: not any(worker["running"] for worker in mesh.workers()), SOON, what=f"{mesh.workers()}")
        assert time.monotonic() - killed < 6.0  # And not the ten seconds that a client with a broken connection has.


def test_who_is_inside_a_task_may_be_silent_as_long_as_its_worker_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HEARTBEAT_SECONDS": 0.2, "SILENCE_SECONDS": 0.6, "HANDSHAKE_SECONDS": 0.8}.items():
        monkeypatch.setattr(protocol, name, value)
    coordinator = GPUMesh.start_coordinator(port=0, token="secret")
    port = int(coordinator.url.rpartition(":")[2])
    try:
        with MeshPeer(port, "secret", worker="w1") as worker, MeshPeer(port, "secret", client=7) as deaf:
            deaf.send(Query(-1, "inside", {"worker": "w1"}))
            with MeshPeer(port, "secret", client=8) as other:
                until(lambda: not worker.quiet(0.1) and is_cut(other), SOON, what="who is not inside is given up")
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                worker.quiet(0.1)
            assert not is_cut(deaf)
            worker.close()
            until(lambda: is_cut(deaf), SOON, what="it is gone with its worker")
    finally:
        coordinator.stop()


def is_cut(peer: MeshPeer) -> bool:
    """Whether the coordinator has hung up; what it has sent before is not looked at."""
    poll = select.poll()
    poll.register(peer.socket, select.POLLRDHUP)
    return bool(poll.poll(0))
