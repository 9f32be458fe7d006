"""Work inside work whose coordinator is killed and started again, whose worker's wire is cut, and whose worker dies."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Iterator, List

import pytest

from gpumesh import accelerate, current_mesh
from tests.support import lent
from tests.support.hosts import kill
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
    return len(current_mesh().workers())


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
