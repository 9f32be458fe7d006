"""Where tasks are tried again that end processes: elsewhere first, then only where they have failed, and anywhere if nobody of those is left."""

from __future__ import annotations

from typing import List

import pytest

from gpumesh.config import ELSEWHERE_LEAST_SECONDS, ELSEWHERE_UNKNOWN_SECONDS
from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler.actions import Action, Assign, Deliver, Retrying
from gpumesh.scheduler.confinement import ANYWHERE, Confinement, confinement, patience_seconds
from gpumesh.scheduler.flow import CONFINED_SPECS
from tests.support.scheduler_parts import make_spec, make_worker, measured
from tests.unit.scheduler.conftest import PLAIN, ClusterUnderTest, task

STUBBORN = TaskSpec(b"p" * 16, "poison", retries=9)
A, B = WorkerId("a"), WorkerId("b")


def places(actions: List[Action]) -> List[str]:
    """To whom tasks go."""
    return [action.worker for action in actions if isinstance(action, Assign)]


def tour(mesh: ClusterUnderTest, spec: TaskSpec, status: Status = Status.CRASHED) -> List[str]:
    """All workers on which a task is tried that never ends well."""
    (where,) = places(mesh.submit(1, spec))
    seen = [where]
    for attempt in range(1, spec.retries + 1):
        (where,) = places(mesh.finish(where, task(0), attempt=attempt, status=status))
        seen.append(where)
    (end,) = mesh.finish(where, task(0), attempt=spec.retries + 1, status=status)
    assert isinstance(end, Deliver)
    return seen


@pytest.mark.parametrize(
    ("failed_on", "expected"),
    [
        ([], ANYWHERE),
        (["a"], Confinement(avoid=(A,))),
        (["b", "a"], Confinement(only=(A, B))),
        (["gone", "b"], Confinement(only=(B,))),
        (["gone"], ANYWHERE),
        (["gone", "lost"], ANYWHERE),
    ],
)
def test_the_rules(failed_on: List[str], expected: Confinement) -> None:
    able = [make_worker(name) for name in "abc"]

    assert confinement([WorkerId(name) for name in failed_on], able) == expected


def test_where_there_is_nobody_else_it_may_come_back_at_once() -> None:
    assert confinement([A], [make_worker("a")]) == ANYWHERE
    assert confinement([A, B], [make_worker("b")]) == Confinement(only=(B,)), "and nobody who joins later is tried"


def test_patience_grows_with_the_length_of_the_task_and_with_each_failure() -> None:
    worker = make_worker("a")
    unknown, short, long = (
        make_spec(measured(seconds, *workers)) for seconds, workers in ((1.0, ()), (0.01, [worker]), (30.0, [worker]))
    )

    assert [patience_seconds(unknown, worker, strikes) for strikes in (1, 2)] == [
        ELSEWHERE_UNKNOWN_SECONDS,
        2 * ELSEWHERE_UNKNOWN_SECONDS,
    ]
    assert patience_seconds(short, worker, 1) == ELSEWHERE_LEAST_SECONDS
    assert patience_seconds(long, worker, 1) == pytest.approx(60.0)


def test_a_task_that_ends_processes_never_tours_the_workers(mesh: ClusterUnderTest) -> None:
    for index in range(6):
        mesh.connect(f"w{index}", slots=2)

    seen = tour(mesh, STUBBORN)

    assert len(set(seen)) == 2
    crashed = {view["id"]: view["crashed"] for view in mesh.cluster.snapshot(0.0)}
    assert {place: seen.count(place) for place in crashed} == crashed
    assert seen[0] != seen[1], "first it was tried elsewhere"


def test_one_that_raises_what_it_may_raise_goes_anywhere(mesh: ClusterUnderTest) -> None:
    mesh.connect("a")
    mesh.connect("b")

    assert set(tour(mesh, STUBBORN, Status.RETRYABLE)) == {"a"}, "the first that has room"


def test_a_machine_that_ends_every_process_fails_no_task_that_others_can_run(mesh: ClusterUnderTest) -> None:
    mesh.connect("broken", score=9.0)
    mesh.connect("sound")
    sent = mesh.submit(8)
    ended: List[int] = []
    while sent:
        action = sent.pop(0)
        if isinstance(action, Deliver):
            ended += [task_id for task_id, status, _, _ in action.results if status == Status.OK]
        if not isinstance(action, Assign):
            continue
        for task_id, attempt in action.tasks:
            mesh.now += 0.01
            status = Status.CRASHED if action.worker == "broken" else Status.OK
            sent += mesh.finish(action.worker, task_id, attempt=attempt, status=status, seconds=0.01)

    assert sorted(ended) == [task(index) for index in range(8)]


def test_one_that_waits_for_busy_others_comes_back_when_it_has_waited_long_enough(mesh: ClusterUnderTest) -> None:
    mesh.connect("b")
    assert places(mesh.submit(1)) == ["b"]
    mesh.connect("a")
    assert places(mesh.submit(1, STUBBORN)) == ["a"]

    assert mesh.finish("a", task(1), status=Status.CRASHED) == [Retrying(task(1), 2, A, Status.CRASHED)]
    assert places(mesh.until(ELSEWHERE_UNKNOWN_SECONDS - 0.1)) == []
    assert places(mesh.until(ELSEWHERE_UNKNOWN_SECONDS)) == ["a"]


def test_one_that_has_been_placed_meanwhile_stays_there(mesh: ClusterUnderTest) -> None:
    mesh.connect("b")
    mesh.submit(1)
    mesh.connect("a")
    mesh.submit(1, STUBBORN)
    mesh.finish("a", task(1), status=Status.CRASHED)

    assert places(mesh.finish("b", task(0))) == ["b"]
    assert places(mesh.until(10 * ELSEWHERE_UNKNOWN_SECONDS)) == []


def test_when_those_it_waits_for_leave_it_waits_for_them_no_longer(mesh: ClusterUnderTest) -> None:
    for name in "ba":
        mesh.connect(name)
        mesh.submit(1, STUBBORN)
    mesh.finish("a", task(1), status=Status.CRASHED)

    assert places(mesh.change("b", problem="paused by its owner")) == ["a"]


def test_where_both_on_which_it_failed_are_gone_it_is_tried_by_others(mesh: ClusterUnderTest) -> None:
    mesh.connect("a")
    mesh.connect("b")
    mesh.submit(1, STUBBORN)
    (second,) = places(mesh.finish("a", task(0), status=Status.CRASHED))
    mesh.connect("c")
    (third,) = places(mesh.finish(second, task(0), attempt=2, status=Status.CRASHED))
    assert {second, third} <= {"a", "b"}

    assert places(mesh.lose("b" if third == "a" else "a")) == []
    assert places(mesh.lose(third)) == ["c"]


def test_what_is_kept_of_confined_tasks_does_not_grow_for_ever(mesh: ClusterUnderTest) -> None:
    for index in range(40):
        mesh.connect(f"w{index:02}", slots=1)
    for number in range(4 * CONFINED_SPECS):
        spec = PLAIN._replace(name=f"f{number}")
        (where,) = places(mesh.submit(1, spec))
        (other,) = places(mesh.finish(where, task(number), status=Status.CRASHED))
        mesh.finish(other, task(number), attempt=2)

    assert len(mesh.cluster._clients[ClientNumber(1)].confined) <= CONFINED_SPECS


def test_why_they_wait_is_shown(mesh: ClusterUnderTest) -> None:
    for name in "ba":
        mesh.connect(name)
        mesh.submit(1, STUBBORN)
    mesh.finish("a", task(1), status=Status.CRASHED)

    (view,) = mesh.cluster.waiting(mesh.now)

    assert (view["state"], view["reason"]) == ("queued", "failed on a, and waits for another worker")
