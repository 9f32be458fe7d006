"""Tasks that wait for other tasks, as the coordinator sees it."""

from __future__ import annotations

from typing import Any, List

import pytest

from gpumesh.config import WAIT_SETTLE_SECONDS
from gpumesh.model.ids import WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import DeviceFacts, Requirement, WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import actions as act
from gpumesh.scheduler import events as ev
from gpumesh.scheduler import states
from tests.unit.scheduler.conftest import PLAIN, ClusterUnderTest, task

INNER = PLAIN._replace(name="inner", depth=1)
DEEPER = PLAIN._replace(name="deeper", depth=2)
ONCE = PLAIN._replace(name="once", retries=0)
PACKED = PLAIN._replace(name="packed", packages=("old",))
CARD = TaskSpec(b"c" * 16, "card", Requirement("gpu", gpus=1.0))
INNER_CARD = CARD._replace(name="inner card", depth=1)
GPU = DeviceFacts("cuda", 0, "A100", 80 << 30, 90.0, uuid="GPU-0")


def waits(mesh: ClusterUnderTest, worker: str, *ids: int, waits: bool = True, attempt: int = 1) -> List[act.Action]:
    return mesh.handle(ev.TasksWait(WorkerId(worker), [(task_id, attempt) for task_id in ids], waits))


def assigned(actions: List[act.Action]) -> List[int]:
    return [task_id for action in actions if isinstance(action, act.Assign) for task_id, _ in action.tasks]


def view(mesh: ClusterUnderTest, worker: str) -> Any:
    return next(each for each in mesh.cluster.snapshot(mesh.now) if each["id"] == worker)


def test_what_a_task_waits_for_has_its_slot(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    assert assigned(mesh.submit(2, ONCE)) == [task(0)]
    mesh.join_client(2)
    mesh.submit(2, INNER, client=2)

    assert assigned(waits(mesh, "w1", task(0))) == [task(0, 2)]
    assert (view(mesh, "w1")["running"], view(mesh, "w1")["queued"], view(mesh, "w1")["waiting"]) == (1, 0, 1)

    assert assigned(mesh.finish("w1", task(0, 2))) == [task(1, 2)]
    assert waits(mesh, "w1", task(0), waits=False) == []
    assert assigned(mesh.finish("w1", task(1, 2))) == []  # Two tasks and one slot: none is free.
    assert assigned(mesh.finish("w1", task(0))) == [task(1)]


def test_the_next_that_will_wait_is_sent_before_what_is_inside_has_run_dry(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(4)
    mesh.join_client(2)
    mesh.submit(6, INNER, client=2)
    assert assigned(waits(mesh, "w1", task(0))) == [task(0, 2)]

    assert assigned(mesh.finish("w1", task(0, 2))) == [task(1, 2)]
    assert assigned(mesh.finish("w1", task(1, 2))) == [task(2, 2)]
    assert assigned(mesh.finish("w1", task(2, 2))) == [task(3, 2), task(1)]  # Two are left, and only one more is sent ...
    waits(mesh, "w1", task(1))
    assert assigned(mesh.finish("w1", task(3, 2))) == [task(4, 2)]  # ... as long as so many wait.


def test_the_next_that_will_wait_is_not_sent_while_its_packages_are_installed_there(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(1)
    mesh.change("w1", installing=(("old",),))
    mesh.lose_client()
    mesh.join_client(2)
    mesh.submit(1, PACKED, client=2)
    assert assigned(waits(mesh, "w1", task(0))) == []  # Nobody wants it any more: no slot is spared for what is inside it.

    assert assigned(mesh.change("w1")) == [task(0, 2)]


def test_a_slot_waits_a_moment_for_what_is_on_its_way(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(2)
    mesh.join_client(2)

    assert assigned(waits(mesh, "w1", task(0))) == []
    assert assigned(mesh.submit(1, INNER, client=2)) == [task(0, 2)]
    assert assigned(mesh.until(1.0)) == []


def test_and_no_longer(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(2)
    waits(mesh, "w1", task(0))

    assert assigned(mesh.until(WAIT_SETTLE_SECONDS * 0.9)) == []
    assert assigned(mesh.until(WAIT_SETTLE_SECONDS * 1.1)) == [task(1)]


def test_a_slot_waits_a_moment_for_who_has_all_that_it_waited_for(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(2)
    mesh.join_client(2)
    mesh.submit(1, INNER, client=2)
    waits(mesh, "w1", task(0))

    assert assigned(mesh.finish("w1", task(0, 2))) == []
    waits(mesh, "w1", task(0), waits=False)
    assert assigned(mesh.until(1.0)) == []
    assert assigned(mesh.finish("w1", task(0))) == [task(1)]


def test_waiting_is_not_charged_to_the_client(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(1)
    waits(mesh, "w1", task(0))
    mesh.at(8.0)
    waits(mesh, "w1", task(0), waits=False)
    mesh.finish("w1", task(0), seconds=10.0)

    assert mesh.cluster._clients[1].served == pytest.approx(2.0)  # type: ignore[index]


def test_a_worker_that_is_lost_had_started_what_waits(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(1, ONCE)
    mesh.submit(1)
    waits(mesh, "w1", task(0))
    mesh.until(1.0)
    waits(mesh, "w1", task(1))

    actions = mesh.lose("w1")

    fails = [action for action in actions if isinstance(action, act.Fail)]
    assert [(fail.task_id, fail.status) for fail in fails] == [(task(0), int(Status.LOST))]
    retries = [action for action in actions if isinstance(action, act.Retrying)]
    assert [(retry.task_id, retry.status) for retry in retries] == [(task(1), int(Status.LOST))]


def test_a_worker_that_is_back_tells_anew_who_waits(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(2)
    waits(mesh, "w1", task(0))
    assert assigned(mesh.until(1.0)) == [task(1)]
    mesh.handle(ev.WorkerAway(WorkerId("w1"), "the line went dead"))

    facts = WorkerFacts("w1", slots=1, cores=1)
    mesh.handle(ev.WorkerConnected(WorkerId("w1"), facts, held=[ev.Held(PLAIN, [(task(0), 1), (task(1), 1)])]))
    assert view(mesh, "w1")["waiting"] == 0
    waits(mesh, "w1", task(1))
    assert view(mesh, "w1")["waiting"] == 1
    mesh.finish("w1", task(0), task(1))


def test_where_too_many_wait_only_deeper_ones_begin(mesh: ClusterUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MAX_WAITING_PER_SLOT", 2)
    mesh.connect("w1")
    mesh.submit(4)
    waits(mesh, "w1", task(0))
    assert assigned(mesh.until(1.0)) == [task(1)]
    waits(mesh, "w1", task(1))

    assert assigned(mesh.until(2.0)) == []
    mesh.join_client(2)
    assert assigned(mesh.submit(3, INNER, client=2)) == [task(0, 2)]
    waits(mesh, "w1", task(0, 2))
    assert assigned(mesh.until(3.0)) == []
    mesh.join_client(3)
    assert assigned(mesh.submit(1, DEEPER, client=3)) == [task(0, 3)]
    mesh.finish("w1", task(0, 3))
    waits(mesh, "w1", task(0, 2), waits=False)
    assert assigned(mesh.finish("w1", task(0, 2))) == [task(1, 2)]


def test_a_card_is_lent_to_what_is_deeper(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(GPU,))
    assert assigned(mesh.submit(2, CARD)) == [task(0)]
    mesh.join_client(2)
    assert assigned(mesh.submit(1, INNER_CARD, client=2)) == []

    (assign,) = waits(mesh, "w1", task(0))
    assert assign == act.Assign(WorkerId("w1"), INNER_CARD, [(task(0, 2), 1)], ("GPU-0",), 1)
    assert assigned(mesh.until(1.0)) == []  # Nobody who is no deeper.

    assert waits(mesh, "w1", task(0), waits=False) == []
    assert assigned(mesh.finish("w1", task(0, 2))) == []
    assert assigned(mesh.finish("w1", task(0))) == [task(1)]


def test_nothing_is_known_of_others(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(1)

    assert waits(mesh, "w1", task(7)) == []
    assert waits(mesh, "w1", task(0), attempt=2) == []
    assert waits(mesh, "nobody", task(0)) == []
    assert waits(mesh, "w1", task(0), waits=False) == []
    assert view(mesh, "w1")["running"] == 1
