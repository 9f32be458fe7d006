"""F26: a runner killed from outside hits only the task it was running."""

from __future__ import annotations

import os
import signal
import time
from typing import List

from gpumesh import GPUMesh, accelerate


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
