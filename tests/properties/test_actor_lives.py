"""Whatever breaks, dies and is started again: calls of actors end once, in order, and run in one life at most unless they may be repeated."""

from __future__ import annotations

import pytest

from tests.support.virtual_actors import ActorWorld

STEPS = 400
SEEDS = range(30)


@pytest.mark.parametrize("knows_workers", [True, False], ids=["a journal", "no journal"])
def test_every_call_ends_once_in_order_and_in_one_life(knows_workers: bool) -> None:
    for seed in SEEDS:
        world = ActorWorld(seed, knows_workers=knows_workers)
        try:
            for _ in range(STEPS):
                world.step()
            world.settle()
            world.judge()
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"ActorWorld({seed}, knows_workers={knows_workers}): {error!r}") from error


def test_the_worlds_have_lives_and_deaths_in_them() -> None:
    calls = restarts = 0
    for seed in range(40):
        world = ActorWorld(seed)
        for _ in range(STEPS):
            world.step()
        calls += sum(map(len, world.orders.values()))
        restarts += len({(actor, life) for actor, life, _ in world.orders}) - len({actor for actor, _, _ in world.orders})

    assert calls > 80
    assert restarts > 2
