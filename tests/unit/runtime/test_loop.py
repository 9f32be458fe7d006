"""The alarm: it rings once, at the earliest time it was set to, and never early."""

from __future__ import annotations

import asyncio
from typing import Any, Callable, List

import pytest

from gpumesh.runtime.loop import Alarm, new_event_loop


@pytest.fixture(params=[asyncio.new_event_loop, new_event_loop])
def loop(request: Any) -> Any:
    made = request.param()
    yield made
    made.close()


def rings_of(loop: asyncio.AbstractEventLoop, use: Callable[[Alarm, float], None]) -> List[float]:
    """When it rang, in seconds from the start, until 0.1 s after."""
    rung: List[float] = []
    start = loop.time()
    alarm = Alarm(loop, lambda now: rung.append(now - start))
    use(alarm, start)
    loop.call_at(start + 0.1, loop.stop)
    loop.run_forever()
    return rung


def test_it_rings_once_at_the_earliest_time(loop: asyncio.AbstractEventLoop) -> None:
    def use(alarm: Alarm, start: float) -> None:
        alarm.set(start + 0.05)
        alarm.set(start + 0.02)
        alarm.set(start + 0.04)
        alarm.set(None)

    rung = rings_of(loop, use)
    assert len(rung) == 1
    assert rung[0] >= 0.02


def test_it_can_be_set_again_after_it_rang_and_be_cancelled(loop: asyncio.AbstractEventLoop) -> None:
    def use(alarm: Alarm, start: float) -> None:
        alarm.set(start + 0.01)
        loop.call_at(start + 0.03, alarm.set, start + 0.05)
        loop.call_at(start + 0.07, alarm.set, start + 0.08)
        loop.call_at(start + 0.072, alarm.cancel)

    assert len(rings_of(loop, use)) == 2
