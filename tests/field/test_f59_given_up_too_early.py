"""F59: a worker is given up while it only stands still; its task is run elsewhere; then it goes on, and reports what it has.

The first result counts, the late one is ignored, and the worker that was given up is as good as any other.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import pytest

from gpumesh import GPUMesh, accelerate
from tests.support import tasks
from tests.support.hosts import freeze, thaw
from tests.support.processes import until
from tests.support.site_of_hosts import Site, notice_silence_quickly, site_of_hosts


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    notice_silence_quickly(monkeypatch)
    with site_of_hosts(tmp_path) as made:
        made.join_all("one", "two")
        yield made


def given_up(site: Site, mesh: GPUMesh, ends: List[Any]) -> Tuple[Any, str, str]:
    """A task whose worker was frozen for too long, so that it runs at the other; (future, first place, second place)."""
    for place in ("one", "two"):
        site.ident(mesh, place)
    (future,) = site.hold(mesh, "task")
    future.add_done_callback(lambda done: ends.append(done.result()))
    first = site.until_started("task")

    freeze(site.workers[first])

    second = site.until_started("task", times=2)
    assert {first, second} == {"one", "two"}
    site.until_alive(mesh, first, is_it=False)
    return future, first, second


def healthy(site: Site, mesh: GPUMesh) -> None:
    """Both workers are alive, once each, and each runs a task at this moment."""
    for place in ("one", "two"):
        until(lambda place=place: len(site.alive(mesh, place)) == 1, 20, what=f"{place}: {site.views(mesh, place)}")
    both = site.hold(mesh, "after-1", "after-2")
    places = {site.until_started("after-1"), site.until_started("after-2")}
    site.go("after-1", "after-2")
    assert {future.result(20)[1] for future in both} == places == {"one", "two"}


def test_the_late_result_of_a_task_that_has_ended_elsewhere_is_ignored(site: Site) -> None:
    with site.client() as mesh:
        ends: List[Any] = []
        future, first, second = given_up(site, mesh, ends)
        site.go("task")
        assert future.result(20) == ("task", second)

        thaw(site.workers[first])  # The old copy sees that it may end, and reports.

        healthy(site, mesh)
        assert future.result(0) == ("task", second)
        assert ends == [("task", second)]
        assert Counter(name for name, _ in site.starts()) == {"task": 2, "after-1": 1, "after-2": 1}
    assert site.tracebacks() == []


def test_a_worker_that_comes_back_while_its_task_runs_elsewhere_drops_it(site: Site) -> None:
    with site.client() as mesh:
        ends: List[Any] = []
        future, first, second = given_up(site, mesh, ends)

        thaw(site.workers[first])
        site.until_alive(mesh, first)

        # The old copy is ended although nothing lets it end by itself: its slot is free for another task.
        (other,) = site.hold(mesh, "other")
        assert site.until_started("other") == first
        site.go("task", "other")
        assert future.result(20) == ("task", second)
        assert other.result(20) == ("other", first)
        assert ends == [("task", second)]
        healthy(site, mesh)
    assert site.tracebacks() == []


def test_a_worker_that_stands_still_for_a_shorter_time_keeps_its_task(site: Site) -> None:
    with site.client() as mesh:
        ident = site.ident(mesh, "one")
        site.ident(mesh, "two")
        futures = site.hold(mesh, "a", "b")
        places = {site.until_started("a"), site.until_started("b")}
        assert places == {"one", "two"}

        freeze(site.workers["one"])
        site.go()
        small = accelerate(mesh)(tasks.noop)
        for number in range(20):  # The other one goes on meanwhile.
            assert small.remote(number).result(20) == number
        thaw(site.workers["one"])

        assert sorted(future.result(20)[0] for future in futures) == ["a", "b"]
        assert len(site.starts()) == 2
        assert site.alive(mesh, "one") == [ident]
    assert site.complaints() == []
