"""Which process a worker's task gets when its tasks want different environments: exact lists of actions."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from gpumesh.config import KIND_PATIENCE_SECONDS, RUNNER_RESTART_DELAYS_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.local import (
    ENVIRONMENT_START_TRIES,
    FailEnvironment,
    Feed,
    Health,
    Kill,
    LocalPool,
    Report,
    StartRunner,
)

PLAIN, RED, BLUE = 0, 1, 2  # Specs, and the environments of their tasks.


class PoolUnderTest:
    """A pool whose runners start, end and die at a word. Tasks are numbered from 1."""

    def __init__(self, slots: int) -> None:
        self.pool = LocalPool(slots=slots, threads=1)
        self.now = 100.0
        for spec in (PLAIN, RED, BLUE):
            self.pool.on_spec(spec, timeout=0.0, width=1, threads=1, environment=spec)
        self.fed: Dict[int, List[int]] = {}
        for action in self.pool.start(self.now):
            assert self.ready(action.runner) == []

    def at(self, now: float) -> PoolUnderTest:
        self.now = 100.0 + now
        return self

    def arrive(self, spec: int, *tasks: int) -> List[Any]:
        return self._note(self.pool.on_arrived(spec, [(task, 1, b"") for task in tasks], self.now))

    def ready(self, runner: int) -> List[Any]:
        return self._note(self.pool.on_ready(runner, self.now))

    def finish(self, runner: int, seconds: float = 0.001) -> List[Any]:
        """All that a runner has been fed."""
        results = [(task, 1, int(Status.OK), b"", seconds) for task in self.fed.pop(runner)]
        actions = self._note(self.pool.on_results(runner, results, self.now))
        assert actions[0] == Report(results)
        return actions[1:]

    def down(self, runner: int, **details: Any) -> List[Any]:
        return self._note(self.pool.on_runner_down(runner, 0, 0, details, self.now))

    def on_time(self) -> List[Any]:
        return self._note(self.pool.on_time(self.now))

    def _note(self, actions: List[Any]) -> List[Any]:
        for action in actions:
            if isinstance(action, Feed):
                self.fed.setdefault(action.runner, []).extend(task for task, _ in action.tasks)
        return actions


def feed(runner: int, spec: int, *tasks: int) -> Feed:
    return Feed(runner, spec, [(task, 1) for task in tasks])


@pytest.fixture
def one() -> PoolUnderTest:
    return PoolUnderTest(1)


@pytest.fixture
def two() -> PoolUnderTest:
    return PoolUnderTest(2)


def with_red(pool: PoolUnderTest) -> PoolUnderTest:
    """The first runner has made way for one of the red environment, number `slots` + 1, whose tasks are known to be short."""
    red = pool.pool.slots + 1
    assert pool.arrive(RED, 900) == [Kill(1)]
    assert pool.down(1) == [StartRunner(red, 1, RED)]
    assert pool.ready(red) == [feed(red, RED, 900)]
    assert pool.finish(red) == []
    return pool


def test_an_idle_runner_makes_way_for_the_first_task_of_an_environment(one: PoolUnderTest) -> None:
    assert one.arrive(RED, 1) == [Kill(1)]
    assert one.down(1) == [StartRunner(2, 1, RED)]
    assert one.ready(2) == [feed(2, RED, 1)]
    assert one.finish(2) == []
    assert one.arrive(RED, 2) == [feed(2, RED, 2)], "and the next one finds it there"


def test_a_runner_of_the_right_kind_goes_before_the_others(two: PoolUnderTest) -> None:
    with_red(two)

    assert two.arrive(RED, 1) == [feed(3, RED, 1)]
    assert two.arrive(PLAIN, 2) == [feed(2, PLAIN, 2)]


def test_only_as_many_runners_make_way_as_tasks_wait() -> None:
    pool = PoolUnderTest(4)

    assert pool.arrive(RED, 1, 2) == [Kill(1), Kill(2)]
    assert pool.down(1) == [StartRunner(5, 1, RED)]
    assert pool.down(2) == [StartRunner(6, 1, RED)]


def test_others_run_on_while_a_process_for_the_first_in_the_queue_starts(two: PoolUnderTest) -> None:
    assert two.arrive(RED, 1) == [Kill(1)]
    assert two.arrive(PLAIN, 2, 3) == [feed(2, PLAIN, 2)]

    assert two.at(10 * KIND_PATIENCE_SECONDS).finish(2) == [feed(2, PLAIN, 3)]
    two.down(1)
    assert two.ready(3) == [feed(3, RED, 1)]


def test_with_one_slot_tasks_of_the_kind_that_is_here_overtake_for_a_while(one: PoolUnderTest) -> None:
    one.arrive(PLAIN, 1)
    one.arrive(RED, 2)
    one.arrive(PLAIN, 3, 4)

    assert one.finish(1, seconds=0.5) == [feed(1, PLAIN, 3)]
    assert one.at(KIND_PATIENCE_SECONDS).finish(1, seconds=0.5) == [Kill(1)]
    assert one.down(1) == [StartRunner(2, 1, RED)]
    assert one.ready(2) == [feed(2, RED, 2)]
    assert one.finish(2) == [Kill(2)], "the plain one has waited behind it, and nothing red is left"


def test_short_tasks_of_an_environment_wait_for_its_runner_rather_than_for_a_second_one(two: PoolUnderTest) -> None:
    with_red(two)
    assert two.arrive(RED, *range(1, 300)) == [feed(3, RED, 1, 2)], "one runs, one waits there"

    assert Kill(2) not in two.at(KIND_PATIENCE_SECONDS / 2).on_time()
    assert Kill(2) in two.at(KIND_PATIENCE_SECONDS).on_time(), "they were not as short as thought"


def test_an_environment_whose_processes_do_not_start_fails_its_tasks_alone(two: PoolUnderTest) -> None:
    two.arrive(RED, 1, 2)
    two.arrive(PLAIN, 3)
    assert two.down(1) == [StartRunner(3, 1, RED)]
    assert two.down(2) == [StartRunner(4, 1, RED)]
    assert two.down(3, exit=1) == []
    two.at(RUNNER_RESTART_DELAYS_SECONDS[ENVIRONMENT_START_TRIES - 1])

    actions = two.down(4, exit=1)

    assert actions == [FailEnvironment(RED, [(1, 1), (2, 1)], {"exit": 1}), StartRunner(5, 1, PLAIN)]
    assert two.ready(5) == [feed(5, PLAIN, 3)]
    assert two.on_time() == [StartRunner(6, 1, PLAIN)]
    assert not any(isinstance(action, Health) for action in actions)


def test_the_idle_runners_of_an_environment_make_way_when_it_is_not_used_any_more(two: PoolUnderTest) -> None:
    with_red(two)

    assert two.pool.retire(BLUE) == []
    assert two.pool.retire(RED) == [Kill(3)]
    assert two.down(3) == [StartRunner(4, 1, PLAIN)]


def test_a_crashed_runner_of_an_environment_is_followed_by_another_of_it(one: PoolUnderTest) -> None:
    with_red(one)

    assert one.down(2) == [StartRunner(3, 1, RED)]
