"""Cables that are cut, in one direction or both, with and without a word; addresses that change; names that are the same.

Every task runs once and every result comes once, whatever became of the connection meanwhile. Where a test needs silence to be
noticed it takes two seconds, elsewhere the usual half minute is never reached.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

from gpumesh import accelerate
from tests.support import tasks
from tests.support.hosts import Hosts, kill
from tests.support.processes import until
from tests.support.site_of_hosts import PORT, USUAL, Site, notice_silence_quickly, site_of_hosts

RATE = "40mbit"  # 5 MB/s
BYTES = 5_000_000  # 1 s


@pytest.fixture
def patient(hosts: Hosts, tmp_path: Path) -> Iterator[Site]:
    """A worker on the second host; silence is noticed after half a minute."""
    with site_of_hosts(tmp_path, hosts, times=USUAL) as made:
        made.join("one", hosts.two)
        yield made


@pytest.fixture
def quick(make_hosts: Callable[..., Hosts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Workers on the second and the third host; silence is noticed after two seconds."""
    notice_silence_quickly(monkeypatch)
    hosts = make_hosts(4)
    with site_of_hosts(tmp_path, hosts) as made:
        made.join_all(one=hosts[1], two=hosts[2])
        yield made


def make(size: int, folder: str) -> bytes:
    """A large value; leaves a mark."""
    tasks.count_then_sleep(folder, "make", 0.0)
    return b"\x5a" * size


def test_a_link_that_breaks_in_the_middle_of_a_large_result_costs_no_run(patient: Site, hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "starts"
    folder.mkdir()
    with patient.client(hosts.one) as mesh:
        ident = patient.ident(mesh, "one")
        accelerate(mesh)(tasks.noop).remote(0).result(20)
        hosts.limit(hosts.two, RATE)
        for turn, how in enumerate(("cut", "cut_what_it_sends", "cut_what_it_is_sent", "unplug", "reset"), 1):
            ends: List[Any] = []
            future = accelerate(mesh, retries=0)(make).remote(BYTES, str(folder))
            future.add_done_callback(ends.append)
            until(lambda turn=turn: len(list(folder.iterdir())) == turn, 20, what=f"{how}: the task has run")
            time.sleep(0.4)  # A part of the result is on its way.

            if how == "reset":
                hosts.reset(hosts.two, PORT)
            else:
                getattr(hosts, how)(hosts.two)
                time.sleep(0.5)
                hosts.plug(hosts.two) if how == "unplug" else hosts.mend(hosts.two)

            assert len(future.result(40)) == BYTES, how
            assert len(list(folder.iterdir())) == turn, f"{how}: run twice"
            until(lambda: patient.alive(mesh, "one") == [ident], 10, what=f"{how}: {ident} is alive")
            assert ends == [future]
    assert patient.tracebacks() == []


@pytest.mark.parametrize("who", ["worker", "client"])
def test_connections_that_are_reset_cost_no_run(quick: Site, who: str) -> None:
    hosts = quick.hosts
    assert hosts is not None
    with quick.client(hosts[3]) as mesh:
        ident = quick.ident(mesh, "one")
        quick.ident(mesh, "two")
        futures = quick.hold(mesh, "a", "b", "c", retries=0)
        quick.until_started("a")
        quick.until_started("b")

        for turn in range(3):
            hosts.reset(hosts[1] if who == "worker" else hosts[3], PORT)
            if turn == 1:
                quick.go("a", "b")
            until(lambda: quick.alive(mesh, "one") == [ident], 10, what=f"{ident} is alive")
        quick.go()

        assert [future.result(30)[0] for future in futures] == ["a", "b", "c"]
        assert sorted(name for name, _ in quick.starts()) == ["a", "b", "c"]
    assert quick.tracebacks() == []


def test_a_worker_that_is_back_while_its_old_connection_looks_alive_takes_over(patient: Site, hosts: Hosts) -> None:
    with patient.client(hosts.one) as mesh:
        ident = patient.ident(mesh, "one")
        futures = patient.hold(mesh, "task", "next", retries=0)
        patient.until_started("task")

        hosts.cut_what_it_sends(hosts.two)
        hosts.reset(hosts.two, PORT)  # The worker's end is gone; the coordinator's is not told.
        hosts.mend(hosts.two)

        until(lambda: patient.workers["one"].output.count("joined the mesh") >= 2, 20, what="joined again")
        until(lambda: len(patient.views(mesh, "one")) == 1 and patient.alive(mesh, "one") == [ident], 5)
        patient.go()
        assert [future.result(20) for future in futures] == [("task", "one"), ("next", "one")]
        assert patient.starts() == [("task", "one"), ("next", "one")]
    assert patient.tracebacks() == []


def test_a_worker_whose_address_changes_comes_back_and_every_task_ends_once(quick: Site) -> None:
    hosts = quick.hosts
    assert hosts is not None
    with quick.client(hosts[3]) as mesh:
        idents = [quick.ident(mesh, place) for place in ("one", "two")]
        futures = quick.hold(mesh, "a", "b", "c")
        ends: List[Any] = []
        for future in futures:
            future.add_done_callback(ends.append)
        quick.until_started("a")
        quick.until_started("b")

        hosts.change_address(hosts[1])

        until(lambda: quick.workers["one"].output.count("joined the mesh") >= 2, 20, what="joined again")
        until(lambda: [quick.ident(mesh, place) for place in ("one", "two")] == idents, 10, what=f"{idents} are alive")
        quick.go()
        assert [future.result(30)[0] for future in futures] == ["a", "b", "c"]
        assert sorted(ends, key=futures.index) == futures
        assert f"is back from {hosts[1].address}:" in quick.coordinator.output
    assert quick.tracebacks() == []


def test_a_worker_that_is_cut_off_is_given_up_and_is_welcome_afterwards(quick: Site) -> None:
    hosts = quick.hosts
    assert hosts is not None
    with quick.client(hosts[3]) as mesh:
        for place in ("one", "two"):
            quick.ident(mesh, place)
        futures = quick.hold(mesh, "a", "b")
        quick.until_started("a")
        quick.until_started("b")

        hosts.cut(hosts[1])
        quick.until_alive(mesh, "one", is_it=False, timeout=10)
        quick.go()

        assert sorted(future.result(20) for future in futures) == [("a", "two"), ("b", "two")]
        hosts.mend(hosts[1])
        quick.until_alive(mesh, "one")
        assert len(quick.alive(mesh, "one")) == 1
        small = accelerate(mesh, tags={"place": "one"})(tasks.noop)
        assert small.remote(5).result(20) == 5
    assert quick.tracebacks() == []


def test_two_machines_of_one_name_are_two(quick: Site) -> None:
    hosts = quick.hosts
    assert hosts is not None
    with quick.client(hosts[3]) as mesh:
        for place in ("one", "two"):
            quick.ident(mesh, place)
        names = {view["hostname"] for view in mesh.workers()}
        assert len(names) == 1  # They share that much of this machine.

        kill(quick.workers["one"])
        quick.until_alive(mesh, "one", is_it=False)

        assert len(quick.alive(mesh, "two")) == 1
        (future,) = quick.hold(mesh, "task")
        quick.go()
        assert future.result(20) == ("task", "two")
