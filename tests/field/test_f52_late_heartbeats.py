"""F52: signs of life are late, and yet nobody is dead: the task holds the GIL, the coordinator or the driver stands still.

A result that fills a slow link is in tests/hosts/test_slow_link.py. Silence counts after two seconds here, as everywhere in these tests.
"""

from __future__ import annotations

import ctypes
import signal
import time
from pathlib import Path
from typing import Iterator

import pytest

from gpumesh import accelerate
from tests.support import tasks
from tests.support.processes import until
from tests.support.site_of_hosts import QUICK, Site, notice_silence_quickly, site_of_hosts

SILENCE = QUICK["SILENCE_SECONDS"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    notice_silence_quickly(monkeypatch)
    with site_of_hosts(tmp_path) as made:
        made.join("one", slots=2)
        yield made


def test_a_task_that_holds_the_gil_for_longer_than_that_does_not_end_its_worker(site: Site) -> None:
    with site.client() as mesh:
        before = site.ident(mesh, "one")
        started = time.monotonic()

        answer = accelerate(mesh)(tasks.hold_the_gil).remote(int(2 * SILENCE)).result(30)

        assert answer == "slept"
        assert time.monotonic() - started < 2 * SILENCE + 2.0
        assert site.alive(mesh, "one") == [before]
    assert site.complaints() == []


@pytest.mark.parametrize("times", [0.5, 3.0], ids=["shorter", "three times longer"])
def test_a_coordinator_that_stands_still_takes_nobody_for_dead_afterwards(site: Site, times: float) -> None:
    with site.client() as mesh:
        before = site.ident(mesh, "one")
        site.hold(mesh, "warm")
        site.until_started("warm")
        site.go("warm")
        futures = site.hold(mesh, "a", "b", "c", "d", retries=0)
        site.until_started("a")
        site.until_started("b")

        site.coordinator.process.send_signal(signal.SIGSTOP)
        site.go("a")
        time.sleep(times * SILENCE)
        site.coordinator.process.send_signal(signal.SIGCONT)
        site.go()

        assert [future.result(30) for future in futures] == [(name, "one") for name in "abcd"]
        assert sorted(site.starts()) == [(name, "one") for name in ("a", "b", "c", "d", "warm")]
        until(lambda: site.alive(mesh, "one") == [before], 10, what=f"{before} is alive")
    assert site.tracebacks() == []


def test_a_driver_that_stands_still_with_the_gil_gets_its_results_afterwards(site: Site) -> None:
    with site.client() as mesh:
        before = site.ident(mesh, "one")
        futures = site.hold(mesh, "a", "b", "c", retries=0)
        site.until_started("b")
        site.go()

        ctypes.PyDLL(None).usleep(int(2 * SILENCE * 1e6))

        assert [future.result(30) for future in futures] == [(name, "one") for name in "abc"]
        assert sorted(site.starts()) == [(name, "one") for name in "abc"]
        until(lambda: site.alive(mesh, "one") == [before], 10, what=f"{before} is alive")
    assert site.tracebacks() == []
