"""F26: a runner killed from outside hits only the task it was running; its agent lives on. (Over a limit of memory: test_crash_reports.py.)"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import WorkerCrashedError
from tests.support.processes import until


def pid() -> int:
    time.sleep(0.02)
    return os.getpid()


def slow(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def runner_pids(mesh: GPUMesh) -> List[int]:
    return sorted(set(accelerate(mesh)(pid).map([()] * 12)))


def test_an_idle_runner_that_is_killed_is_replaced(mesh: GPUMesh) -> None:
    victims = runner_pids(mesh)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)

    survivors = runner_pids(mesh)

    assert len(victims) == 2
    assert not set(victims) & set(survivors)


def test_a_running_task_is_tried_again_and_the_others_are_untouched(mesh: GPUMesh) -> None:
    victims = runner_pids(mesh)
    futures = [accelerate(mesh)(slow).remote(0.3) for _ in range(6)]
    time.sleep(0.1)
    os.kill(victims[0], signal.SIGKILL)

    assert len([future.result(20) for future in futures]) == 6


def test_killing_again_and_again_while_submitting_loses_nothing(mesh: GPUMesh) -> None:
    function = accelerate(mesh, retries=50)(slow)
    futures = [function.remote(0.01) for _ in range(200)]
    for _ in range(8):
        time.sleep(0.05)
        for victim in {future.result(20) for future in futures if future.done()}:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                pass

    assert all(future.result(30) > 0 for future in futures)


@pytest.fixture
def mesh_of_four() -> Iterator[GPUMesh]:
    """One worker with four slots."""
    with GPUMesh.local(workers=1, slots=4) as mesh:
        yield mesh


def test_all_four_at_once_in_the_middle_of_their_tasks(mesh_of_four: GPUMesh) -> None:
    mesh = mesh_of_four
    agent = mesh.workers()[0]["pid"]
    futures = [accelerate(mesh)(slow).remote(0.2) for _ in range(24)]
    first = until(lambda: [future for future in futures if future.done()], 20)[0]
    until(lambda: mesh.workers()[0]["running"] == 4, 20, what="four busy processes")
    victims = {future.result() for future in futures if future.done()} or {first.result()}
    for victim in victims:
        os.kill(victim, signal.SIGKILL)

    assert len([future.result(20) for future in futures]) == 24
    again = [accelerate(mesh)(slow).remote(0.1) for _ in range(8)]
    assert len({future.result(20) for future in again} - victims) == 4
    (worker,) = mesh.workers()
    assert (worker["pid"], worker["problem"]) == (agent, "")


class Late:
    """An argument that says when it begins to arrive, and then takes its time."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Tuple[Any, ...]:
        return _arrive, (self.mark,)


def _arrive(mark: str) -> str:
    with open(mark, "a") as file:
        file.write(f"{os.getpid()}\n")
    if len(Path(mark).read_text().splitlines()) == 1:
        time.sleep(60)
    return mark


def received(mark: str) -> str:
    return "received"


def test_one_that_is_receiving_its_task_fails_only_that(mesh: GPUMesh, tmp_path: Path) -> None:
    marks = [tmp_path / "again", tmp_path / "once"]
    again = accelerate(mesh)(received).remote(Late(str(marks[0])))
    once = accelerate(mesh, retries=0)(received).remote(Late(str(marks[1])))
    waiting = [accelerate(mesh)(slow).remote(0.01) for _ in range(4)]
    for mark in marks:
        until(lambda mark=mark: mark.exists() and mark.read_text().endswith("\n"), 20, what="a task on its way in")  # type: ignore[misc]
        os.kill(int(mark.read_text()), signal.SIGKILL)

    assert again.result(20) == "received"
    with pytest.raises(WorkerCrashedError, match="SIGKILL") as caught:
        once.result(20)
    assert [attempt["exit"] for attempt in caught.value.attempts] == [-signal.SIGKILL]
    assert all(future.result(20) > 0 for future in waiting)
