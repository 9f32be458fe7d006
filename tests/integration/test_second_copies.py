"""A straggler's task that may run twice is started elsewhere as well: real processes, one machine a hundred times slower than the other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import pytest

from gpumesh import accelerate
from tests.support.machines import Machines, machines, starts, work
from tests.support.processes import until

TASKS = 8
SECONDS = 0.1


@pytest.fixture
def site() -> Iterator[Machines]:
    with machines() as site:
        yield site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "starts"
    path.mkdir()
    return path


def run(site: Machines, folder: Path, **options: Any) -> List[Tuple[str, str]]:
    """Which task ended on which worker, in finishing order; every result is there once."""
    stream = accelerate(site.mesh, **options)(work).map([(str(folder), f"t{n}", SECONDS) for n in range(TASKS)])
    done = [(future.result().name, future.worker) for future in stream.as_completed()]
    assert sorted(name for name, _ in done) == sorted(f"t{n}" for n in range(TASKS))
    return done


def test_a_task_on_a_very_slow_machine_ends_first_elsewhere_and_frees_its_slot(site: Machines, folder: Path) -> None:
    fast, slow = site.join(speed=1.0), site.join(speed=0.01)

    done = run(site, folder, idempotent=True)

    assert {worker for _, worker in done} == {fast}
    assert sorted(Counter(starts(folder)).values()) == [*[1] * (TASKS - 1), 2]
    until(
        lambda: not site.view(slow)["running"], 9, what="the slow machine's attempt has been ended, which takes 10 s otherwise"
    )


def hold(folder: str, name: str, gate: str) -> str:
    """Another function, of which the mesh knows nothing yet."""
    return work(folder, name, 0, gate).name


def test_the_slow_machine_works_on_after_its_attempt_was_ended(site: Machines, folder: Path) -> None:
    gate = folder.parent / "gate"
    fast, slow = site.join(speed=1.0), site.join(speed=0.01)
    run(site, folder, idempotent=True)

    held = [accelerate(site.mesh)(hold).remote(str(folder), f"held{n}", str(gate)) for n in range(2)]
    until(lambda: {"held0", "held1"} <= set(starts(folder)), 20, what="a task on each machine")
    gate.touch()

    assert {future.result(20) for future in held} == {"held0", "held1"}
    assert {future.worker for future in held} == {fast, slow}


def test_without_leave_no_task_runs_in_two_places(site: Machines, folder: Path) -> None:
    site.join(speed=1.0)
    site.join(speed=0.1)

    run(site, folder)

    assert set(Counter(starts(folder)).values()) == {1}
