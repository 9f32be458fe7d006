"""Tasks that wait for tasks: on a card that both need, and at a worker whose coordinator is killed and started again."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import pytest

from gpumesh import accelerate
from gpumesh.errors import MeshUnavailableError
from tests.support import lent, site_of_hosts
from tests.support.hardware import card
from tests.support.hosts import kill
from tests.support.processes import until
from tests.support.site import Site

SOON = 40.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as ends:
        yield Site(tmp_path, ends)


def test_one_card_is_enough_for_tasks_inside_tasks(site: Site) -> None:
    site.join([card(0)])
    mesh = site.mesh

    def visible() -> Tuple[str, int]:
        return os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.getpid()

    def outer() -> List[Any]:
        inner = accelerate(gpu=1)(visible)
        return [visible(), inner.remote().result(), inner.remote().result()]

    futures = [accelerate(mesh, gpu=1)(outer).remote() for _ in range(2)]

    for future in futures:
        own, first, second = future.result(SOON)
        assert own[0] == first[0] == second[0] != "", "they see the same card"
        assert first[1] != own[1] != second[1]
    (worker,) = mesh.workers()
    assert (worker["running"], worker["waiting"], worker["queued"]) == (0, 0, 0)


def test_who_waits_is_told_to_the_coordinator_that_comes_next(tmp_path: Path) -> None:
    def parent(folder: str) -> str:
        return str(accelerate(lent.hold).remote(folder, "child").result()[0])

    with site_of_hosts.site_of_hosts(tmp_path) as site:
        site.join("one", slots=1)
        with site.client() as mesh:
            future = accelerate(mesh, retries=0)(parent).remote(str(site.marks))
            site.until_started("child")
            until(lambda: counts(mesh) == (1, 1), SOON, what="one that runs and one that waits")

            kill(site.coordinator)
            site.serve()

            until(lambda: counts(mesh) == (1, 1), SOON, what="the same at the next coordinator")
            site.go()
            assert future.result(SOON) == "child"
        assert len(site.starts()) == 1
        assert site.tracebacks() == []


def counts(mesh: Any) -> Tuple[int, int]:
    """Tasks that run, and that wait for others."""
    try:
        workers = mesh.workers()
    except MeshUnavailableError:
        return 0, 0
    return sum(view["running"] for view in workers), sum(view["waiting"] for view in workers)
