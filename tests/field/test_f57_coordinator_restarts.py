"""F57: the coordinator is killed and started again at the same port while tasks run and wait; every future gets its one result.

Three workers of two slots, three drivers with 20 tasks in all, each waiting in another way; `retries=0`, so that nothing may run twice.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.client.waiting import as_completed
from tests.support import lent
from tests.support.hosts import kill
from tests.support.processes import until
from tests.support.site_of_hosts import Site, notice_silence_quickly, site_of_hosts

WORKERS = ("one", "two", "three")
RUNNING = 6
DOWN_SECONDS = 2.0
DELAY_SECONDS = 6.0  # Beyond the coordinator's return, on a busy machine; `python -m benchmarks restart` measures it.


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    notice_silence_quickly(monkeypatch)
    with site_of_hosts(tmp_path) as made:
        made.join_all(*WORKERS, slots=2)
        yield made


def in_result(mesh: GPUMesh, folder: str, names: List[str]) -> List[str]:
    hold = accelerate(mesh, retries=0)(lent.hold)
    futures = [hold.remote(folder, name) for name in names]
    return [future.result(60)[0] for future in futures]


def in_as_completed(mesh: GPUMesh, folder: str, names: List[str]) -> List[str]:
    hold = accelerate(mesh, retries=0)(lent.hold)
    futures = [hold.remote(folder, name) for name in names]
    return [future.result()[0] for future in as_completed(futures, timeout=60)]


def in_map(mesh: GPUMesh, folder: str, names: List[str]) -> List[str]:
    hold = accelerate(mesh, retries=0)(lent.hold)
    return [name for name, _ in hold.map([(folder, name) for name in names])]


class Driver:
    """A program of a user, on a thread of its own with a client of its own."""

    def __init__(self, site: Site, wait: Callable[[GPUMesh, str, List[str]], List[str]], names: List[str]) -> None:
        self.names = names
        self.outcome: Dict[str, Any] = {}
        self._site = site
        self._wait = wait
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._site.client() as mesh:
                self.outcome["got"] = self._wait(mesh, str(self._site.marks), self.names)
        except Exception as error:
            self.outcome["error"] = error
        self.outcome["at"] = time.monotonic()

    def answer(self) -> List[str]:
        """What it got, which is there by now or soon."""
        self._thread.join(30)
        assert "error" not in self.outcome, self.outcome
        assert not self._thread.is_alive(), "it hangs"
        return list(self.outcome["got"])


def test_every_driver_gets_every_result_and_nothing_is_run_twice(site: Site) -> None:
    with site.client() as observer:
        idents = {place: site.ident(observer, place) for place in WORKERS}
    drivers = [
        Driver(site, in_result, [f"r{number}" for number in range(7)]),
        Driver(site, in_as_completed, [f"c{number}" for number in range(7)]),
        Driver(site, in_map, [f"m{number}" for number in range(6)]),
    ]
    until(lambda: len(site.starts()) == RUNNING, 20, what=f"six run: {site.starts()}")
    running = [name for name, _ in site.starts()]

    kill(site.coordinator)
    site.go(*running[:2])  # These end while nobody is there to be told.
    time.sleep(DOWN_SECONDS)
    site.serve()
    back = time.monotonic()
    site.go()

    for driver in drivers:
        assert sorted(driver.answer()) == driver.names
    assert max(driver.outcome["at"] for driver in drivers) - back < DELAY_SECONDS
    counted = Counter(name for name, _ in site.starts())
    assert counted == Counter(name for driver in drivers for name in driver.names)
    with site.client() as observer:
        assert {place: site.ident(observer, place) for place in WORKERS} == idents
    assert site.tracebacks() == []


def test_a_coordinator_that_is_killed_again_and_again_loses_nothing(site: Site) -> None:
    with site.client() as mesh:
        futures = site.hold(mesh, *[f"t{number}" for number in range(12)], retries=0)
        for started in (6, 8, 10):
            until(lambda started=started: len(site.starts()) == started, 20, what=f"{started} have started")
            kill(site.coordinator)
            site.serve()
            site.go(*[name for name, _ in site.starts()][: started - 4])  # Two more than before: two more begin.
        site.go()

        assert [future.result(30)[0] for future in futures] == [f"t{number}" for number in range(12)]
        assert Counter(name for name, _ in site.starts()) == Counter(f"t{number}" for number in range(12))
    assert site.tracebacks() == []
