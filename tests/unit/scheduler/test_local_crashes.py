"""Processes that die of their tasks, one after the other: their slot pauses before the next start, and only then."""

from __future__ import annotations

from typing import Any, List

import pytest

from gpumesh.config import CRASH_RESTART_DELAYS_SECONDS, EARLY_DEATH_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.local import Feed, LocalPool, Report, StartRunner

SPEC = 0
DETAILS = {"exit": -11}


class Slot:
    """A pool of one slot, and the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pool = LocalPool(slots=1, threads=1)
        self.pool.on_spec(SPEC, timeout=0.0, width=1, threads=1, environment=0)
        self.runner = self.pool.start(self.now)[0].runner
        self.pool.on_ready(self.runner, self.now)
        self.tasks = 0

    def feed(self) -> None:
        """One more task for the runner that is up."""
        self.tasks += 1
        assert self.pool.on_arrived(SPEC, [(self.tasks, 1, b"")], self.now) == [Feed(self.runner, SPEC, [(self.tasks, 1)])]

    def succeed(self) -> None:
        self.pool.on_results(self.runner, [(self.tasks, 1, int(Status.OK), b"", 0.0001)], self.now)

    def die(self, *, after: float = 0.01, number: int = 1) -> List[Any]:
        self.now += after
        return self.pool.on_runner_down(self.runner, number, number - 1, DETAILS, self.now)

    def bring_up(self, actions: List[Any]) -> float:
        """Wait for the next start, if it is not among these actions; seconds waited."""
        began = self.now
        while not any(isinstance(action, StartRunner) for action in actions):
            due = self.pool.next_deadline()
            assert due is not None
            self.now = due
            actions = self.pool.on_time(due)
        (start,) = [action for action in actions if isinstance(action, StartRunner)]
        self.runner = start.runner
        self.pool.on_ready(self.runner, self.now)
        return self.now - began


@pytest.fixture
def slot() -> Slot:
    return Slot()


def crash_at_once(slot: Slot) -> float:
    slot.feed()
    actions = slot.die()
    assert isinstance(actions[0], Report)
    assert actions[0].results[0][2] == Status.CRASHED
    return slot.bring_up(actions)


def test_the_pauses_grow_with_each_process_that_dies_of_its_first_task(slot: Slot) -> None:
    pauses = [crash_at_once(slot) for _ in range(7)]

    longest = CRASH_RESTART_DELAYS_SECONDS[-1]
    assert pauses == pytest.approx([*CRASH_RESTART_DELAYS_SECONDS[1:], longest, longest, longest])


def test_a_task_that_ends_well_ends_the_pauses(slot: Slot) -> None:
    for _ in range(4):
        crash_at_once(slot)
    slot.feed()
    slot.succeed()
    slot.feed()

    assert slot.bring_up(slot.die(number=2)) == 0.0
    assert [crash_at_once(slot), crash_at_once(slot)] == pytest.approx(list(CRASH_RESTART_DELAYS_SECONDS[1:3]))


def test_a_process_that_worked_for_a_while_is_replaced_at_once(slot: Slot) -> None:
    for _ in range(4):
        crash_at_once(slot)
    slot.feed()

    assert slot.bring_up(slot.die(after=EARLY_DEATH_SECONDS)) == 0.0


def test_an_idle_one_that_is_killed_is_replaced_at_once(slot: Slot) -> None:
    for _ in range(4):
        crash_at_once(slot)

    assert slot.bring_up(slot.die(number=0)) == 0.0


def test_what_arrives_in_a_pause_runs_after_it(slot: Slot) -> None:
    for _ in range(2):
        crash_at_once(slot)
    slot.feed()
    slot.die()

    assert slot.pool.on_arrived(SPEC, [(9, 1, b"")], slot.now) == []
    slot.now = slot.pool.next_deadline() or 0.0
    (start,) = slot.pool.on_time(slot.now)
    assert slot.pool.on_ready(start.runner, slot.now) == [Feed(start.runner, SPEC, [(9, 1)])]
