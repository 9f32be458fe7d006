"""Whatever breaks, dies and is started again: every task ends once at its client, and what may run once is started once."""

from __future__ import annotations

import pytest

from tests.support.virtual_sessions import World

STEPS = 400
SEEDS = range(40)


@pytest.mark.parametrize("knows_workers", [True, False], ids=["a journal", "no journal"])
def test_every_task_ends_once_and_what_may_run_once_is_started_once(knows_workers: bool) -> None:
    for seed in SEEDS:
        world = World(seed, knows_workers=knows_workers)
        try:
            for _ in range(STEPS):
                world.step()
            world.settle()
            world.judge()
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"World({seed}, knows_workers={knows_workers}): {error!r}") from error
