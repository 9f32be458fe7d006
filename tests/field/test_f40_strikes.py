"""F40: only the task that was executing when its process or machine died gets a strike; those that merely waited there get none."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from gpumesh import accelerate
from gpumesh.client.futures import MeshFuture
from gpumesh.errors import WorkerCrashedError
from tests.support.machines import GATE_SECONDS, Machines, machines, starts
from tests.support.processes import until

POISON = "poison"
INNOCENTS = [f"innocent{n}" for n in range(19)]


@pytest.fixture
def site() -> Iterator[Machines]:
    with machines() as site:
        yield site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "starts"
    path.mkdir()
    return path


def start(folder: str, name: str) -> str:
    """Leave a mark; the poison then ends its process, or waits for its whole machine to be killed."""
    Path(folder, f"{name}.{os.getpid()}.{time.monotonic_ns()}").touch()
    if name == POISON:
        os._exit(3)
    if name.startswith(POISON):
        time.sleep(GATE_SECONDS)
    return name


def submit(site: Machines, folder: Path, poison: str, **options: Any) -> List[MeshFuture]:
    """The poison first, then the others; the mesh has seen before that such tasks are short, so they are sent ahead."""
    call = accelerate(site.mesh, **options)(start)
    list(call.map([(str(folder), "learnt")] * 50))
    for path in folder.iterdir():
        path.unlink()
    return [call.remote(str(folder), name) for name in [poison, *INNOCENTS]]


def where(error: WorkerCrashedError) -> List[str]:
    """The ids of the workers of all attempts; their names are before them."""
    return [attempt["worker"].partition("(")[2].rstrip(")") for attempt in error.attempts]


def test_a_task_that_kills_its_process_fails_after_its_limit_and_the_others_behind_it_finish(
    site: Machines, folder: Path
) -> None:
    worker = site.join()

    poison, *others = submit(site, folder, POISON, retries=3)

    with pytest.raises(WorkerCrashedError, match="code 3") as caught:
        poison.result(30)
    assert [attempt["exit"] for attempt in caught.value.attempts] == [3] * 4
    assert where(caught.value) == [worker] * 4
    assert [future.result(30) for future in others] == INNOCENTS
    assert starts(folder).count(POISON) == 4  # Of the others one may run again: its result was on its way out of the process.


def test_a_task_that_kills_processes_does_not_tour_the_workers(site: Machines, folder: Path) -> None:
    workers = [site.join() for _ in range(4)]

    poison, *others = submit(site, folder, POISON, retries=5)

    with pytest.raises(WorkerCrashedError, match="6 attempts failed") as caught:
        poison.result(30)
    assert len(set(where(caught.value))) == 2, "one that it may have been, and one more"
    assert {attempt["exit"] for attempt in caught.value.attempts} == {3}
    assert [future.result(30) for future in others] == INNOCENTS
    assert [worker["id"] for worker in site.mesh.workers() if not worker["problem"]] == workers


@pytest.mark.parametrize("retries", [0, 2])
def test_the_limit_is_that_of_the_task(site: Machines, folder: Path, retries: int) -> None:
    site.join()

    poison, *others = submit(site, folder, POISON, retries=retries)

    with pytest.raises(WorkerCrashedError) as caught:
        poison.result(30)
    assert len(caught.value.attempts) == retries + 1
    assert [future.result(30) for future in others] == INNOCENTS


def test_machines_that_die_one_after_the_other_cost_those_that_waited_there_no_strike(site: Machines, folder: Path) -> None:
    victims = [site.join()]
    poison, *others = submit(site, folder, POISON + "ous", retries=1)
    until(lambda: starts(folder), 20)
    until(lambda: site.view(victims[0])["queued"], 20, what="others that wait behind it on the same machine")

    site.kill(victims[0])
    victims.append(site.join())
    until(lambda: starts(folder).count(POISON + "ous") == 2, 20, what="its second attempt")
    site.kill(victims[1])
    site.join()

    with pytest.raises(WorkerCrashedError, match="lost its worker") as caught:
        poison.result(30)
    assert where(caught.value) == victims
    assert [attempt["reason"] for attempt in caught.value.attempts] == ["the connection was lost"] * 2
    assert [future.result(30) for future in others] == INNOCENTS
    assert starts(folder).count(POISON + "ous") == 2


def test_a_task_that_costs_machines_does_not_tour_them_all(site: Machines, folder: Path) -> None:
    workers = [site.join() for _ in range(4)]
    poison, *others = submit(site, folder, POISON + "ous", retries=1)

    killed: List[str] = []
    for count in (1, 2):
        until(lambda count=count: starts(folder).count(POISON + "ous") == count, 20, what=f"attempt {count}")  # type: ignore[misc]
        killed.append(until(lambda: busy_with_it(site, workers, killed), 20))
        site.kill(killed[-1])

    with pytest.raises(WorkerCrashedError) as caught:
        poison.result(30)
    assert where(caught.value) == killed
    assert [future.result(30) for future in others] == INNOCENTS
    alive = [str(worker["id"]) for worker in site.mesh.workers() if worker["alive"]]
    assert alive == [worker for worker in workers if worker not in killed]


def busy_with_it(site: Machines, workers: List[str], killed: List[str]) -> str:
    """The worker whose one task will not end; "" as long as several are busy."""
    busy = [worker for worker in workers if worker not in killed and site.view(worker)["running"]]
    return busy[0] if len(busy) == 1 else ""
