"""Tasks that the coordinator asks back for another worker, after they were sent to a runner behind one that turns out long."""

from __future__ import annotations

from typing import Any, List

import pytest

from gpumesh.config import CANCEL_GRACE_SECONDS, REVOKE_SETTLE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.local import Feed, Inspect, Interrupt, Kill, LocalPool, Report, Revoke

SPEC = 0
NOT_RUN = int(Status.NOT_RUN)
CANCELLED = int(Status.CANCELLED)


class Stuck:
    """A pool of one slot whose runner has been fed tasks 2, 3 and 4 because task 1 was short, and is busy with task 2."""

    def __init__(self) -> None:
        self.pool = LocalPool(slots=1, threads=1)
        self.pool.on_spec(SPEC, timeout=0.0, width=1, threads=1, environment=0)
        self.runner = self.pool.start(100.0)[0].runner
        self.pool.on_ready(self.runner, 100.0)
        self.pool.on_arrived(SPEC, [(1, 1, b"")], 100.0)
        self.pool.on_results(self.runner, [(1, 1, int(Status.OK), b"", 0.0001)], 100.0)
        fed = self.pool.on_arrived(SPEC, [(2, 1, b""), (3, 1, b""), (4, 1, b"")], 100.0)
        assert fed == [Feed(self.runner, SPEC, [(2, 1), (3, 1), (4, 1)])]

    def recall(self, *tasks: int, kill: bool = False, now: float = 100.001) -> List[Any]:
        return self.pool.on_recalled([(task, 1) for task in tasks], kill=kill, now=now)

    def look(self, now: float) -> List[Any]:
        """The runner's page is read when the pool wants it: task 2 is number 2, and runs."""
        assert self.pool.on_time(now) == [Inspect(self.runner)]
        return self.pool.on_progress(self.runner, started=2, finished=1, sent=1, since=100.0, now=now)


@pytest.fixture
def stuck() -> Stuck:
    return Stuck()


def test_it_goes_back_although_it_was_sent_to_the_runner_already(stuck: Stuck) -> None:
    assert stuck.recall(4) == []

    assert stuck.look(100.001) == [Revoke(stuck.runner, 3)]
    assert stuck.look(100.002 + REVOKE_SETTLE_SECONDS) == [Report([(4, 1, NOT_RUN, {}, 0.0)])]
    assert stuck.pool.queued == 1, "task 3 stays here"


def test_it_goes_back_when_the_runner_hands_it_over_by_itself(stuck: Stuck) -> None:
    stuck.recall(4)
    stuck.look(100.001)

    results = [(2, 1, int(Status.OK), b"", 0.01), (3, 1, NOT_RUN, {}, 0.0), (4, 1, NOT_RUN, {}, 0.0)]
    actions = stuck.pool.on_results(stuck.runner, results, 100.003)

    assert actions[0] == Report([(2, 1, int(Status.OK), b"", 0.01), (4, 1, NOT_RUN, {}, 0.0)])
    assert Feed(stuck.runner, SPEC, [(3, 1)]) in actions


def test_it_goes_back_when_the_runner_dies_in_the_task_before(stuck: Stuck) -> None:
    stuck.recall(4)

    actions = stuck.pool.on_runner_down(stuck.runner, 2, 1, {"exit": 3}, 100.003)

    (report,) = [action for action in actions if isinstance(action, Report)]
    assert [(task, status) for task, _, status, _, _ in report.results] == [(2, int(Status.CRASHED)), (4, NOT_RUN)]


def test_a_task_that_has_started_meanwhile_stays_and_is_not_disturbed(stuck: Stuck) -> None:
    stuck.recall(2)

    assert stuck.look(100.001) == []
    results = [(task, 1, int(Status.OK), b"", 0.001) for task in (2, 3, 4)]
    assert stuck.pool.on_results(stuck.runner, results, 100.004) == [Report(results)]


def test_one_that_is_cancelled_after_it_was_asked_back_is_cancelled(stuck: Stuck) -> None:
    stuck.recall(4)
    stuck.recall(4, kill=True)

    assert stuck.look(100.001) == [Revoke(stuck.runner, 3)]
    assert stuck.look(100.002 + REVOKE_SETTLE_SECONDS) == [Report([(4, 1, CANCELLED, {}, 0.0)])]


def test_one_that_is_to_end_at_once_is_killed_at_the_next_look(stuck: Stuck) -> None:
    assert stuck.pool.on_recalled([(2, 1)], kill=True, force=True, now=100.001) == []

    assert stuck.look(100.001) == [Kill(stuck.runner)], "without an interrupt, which would give it time"


def test_one_that_was_interrupted_and_takes_its_time_can_be_killed_at_once(stuck: Stuck) -> None:
    stuck.recall(2, kill=True)
    assert stuck.look(100.001)[0] == Interrupt(stuck.runner, 2)

    stuck.pool.on_recalled([(2, 1)], kill=True, force=True, now=100.1)

    assert stuck.look(100.1) == [Kill(stuck.runner)]


def test_force_concerns_the_task_that_it_was_meant_for_alone(stuck: Stuck) -> None:
    stuck.pool.on_recalled([(2, 1)], kill=True, force=True, now=100.001)
    stuck.pool.on_results(stuck.runner, [(2, 1, int(Status.OK), b"", 0.01)], 100.002)
    stuck.recall(3, kill=True, now=100.003)

    assert stuck.pool.on_time(100.003) == [Inspect(stuck.runner)]
    assert Interrupt(stuck.runner, 3) in stuck.pool.on_progress(
        stuck.runner, started=3, finished=2, sent=2, since=100.002, now=100.003
    )
    due = stuck.pool.next_deadline()
    assert due is not None
    assert due <= 100.003 + CANCEL_GRACE_SECONDS
    late = stuck.pool.on_progress(stuck.runner, started=3, finished=2, sent=2, since=100.002, now=100.1)
    assert Kill(stuck.runner) not in late, "this one has its time"
