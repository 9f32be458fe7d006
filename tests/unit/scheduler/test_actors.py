"""Where actors live, how their calls get there, and what becomes of both when something dies."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from gpumesh.model.actors import ActorPlan, show_actor
from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import DeviceFacts, Requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.actions import Action, Assign, Deliver, Fail, Forget, Notice, Recall, Retrying
from tests.unit.scheduler.conftest import PLAIN, ClusterUnderTest, task

COUNTER = TaskSpec(b"A" * 16, "Counter", retries=0, plan=ActorPlan(token=77))
TWICE = COUNTER._replace(retries=2)
ACTOR = task(0)
CARD = DeviceFacts("cuda", 0, "RTX 3080", 10 << 30, 50.0, uuid="GPU-1")
ON_CARD = COUNTER._replace(requirement=Requirement(device="cuda", gpus=1.0))


def call(actor: int = ACTOR, **fields: Any) -> TaskSpec:
    return TaskSpec(b"m" * 16, "Counter.add", actor=actor, method="add", retries=fields.pop("retries", 0), **fields)


CALL = call()
AGAIN = call(retries=3)


def create(mesh: ClusterUnderTest, spec: TaskSpec = COUNTER) -> List[Action]:
    return mesh.submit(spec=spec)


def fails(actions: List[Action]) -> Dict[int, Dict[str, Any]]:
    return {action.task_id: action.details for action in actions if isinstance(action, Fail)}


def crash(mesh: ClusterUnderTest, worker: str = "w1", actor: int = ACTOR, attempt: int = 1) -> List[Action]:
    return mesh.finish_all(worker, [(actor, attempt, int(Status.CRASHED), {"reason": "killed by SIGKILL"}, 1.0)])


def kill(mesh: ClusterUnderTest, *, force: bool = False) -> List[Action]:
    return mesh.handle(ev.ActorKilled(ACTOR, "killed by someone", force))


def test_an_actor_takes_no_slot(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    assert create(mesh) == [Assign("w1", COUNTER, [(ACTOR, 1)])]

    assert mesh.submit() == [Assign("w1", PLAIN, [(task(1), 1)])]


def test_calls_are_sent_at_once_and_in_order(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh)

    assert mesh.submit(2, CALL) == [Assign("w1", CALL, [(task(1), 1), (task(2), 1)])]
    assert mesh.submit(1, AGAIN) == [Assign("w1", AGAIN, [(task(3), 1)])]


def test_calls_wait_for_an_actor_that_has_no_worker_yet(mesh: ClusterUnderTest) -> None:
    create(mesh)
    mesh.submit(2, CALL)
    mesh.submit(1, AGAIN)

    assert [action for action in mesh.connect("w1") if isinstance(action, Assign)] == [
        Assign("w1", COUNTER, [(ACTOR, 1)]),
        Assign("w1", CALL, [(task(1), 1), (task(2), 1)]),
        Assign("w1", AGAIN, [(task(3), 1)]),
    ]


def test_a_result_of_a_call_is_delivered(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh)
    mesh.submit(1, CALL)

    assert mesh.finish("w1", task(1)) == [Deliver(ClientNumber(1), "w1", [(task(1), Status.OK, b"value", 1.0)])]


def test_with_cores_it_holds_slots_for_its_life(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", slots=2)
    create(mesh, COUNTER._replace(requirement=Requirement(cores=1)))

    assert mesh.submit(3, PLAIN._replace(retries=0)) == [Assign("w1", PLAIN._replace(retries=0), [(task(1), 1)])]


def test_actors_are_spread_over_workers_by_their_speed(mesh: ClusterUnderTest) -> None:
    mesh.connect("slow", score=1.0)
    mesh.connect("fast", score=2.0)

    homes = [create(mesh)[0] for _ in range(6)]

    assert [home.worker for home in homes if isinstance(home, Assign)].count("fast") == 4


@pytest.mark.parametrize(("placement", "places"), [("spread", ["w1", "w2", "w1", "w2"]), ("pack", ["w1"] * 4)])
def test_members_of_a_group_are_placed_with_regard_to_each_other(
    mesh: ClusterUnderTest, placement: str, places: List[str]
) -> None:
    mesh.connect("w1", score=10.0)
    mesh.connect("w2", score=1.0)
    spec = COUNTER._replace(plan=ActorPlan(group="shards", placement=placement))

    homes = [create(mesh, spec)[0] for _ in range(4)]

    assert [home.worker for home in homes if isinstance(home, Assign)] == places


def test_a_card_is_its_own_until_it_ends(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(CARD,))
    assert create(mesh, ON_CARD) == [Assign("w1", ON_CARD, [(ACTOR, 1)], ("GPU-1",), 0)]
    on_card = PLAIN._replace(requirement=ON_CARD.requirement)
    assert mesh.submit(1, on_card) == []

    assert mesh.finish("w1", ACTOR, status=Status.CANCELLED)[-1] == Assign("w1", on_card, [(task(1), 1)], ("GPU-1",), 0)


def test_a_waiting_actor_gets_a_card_before_the_tasks_do(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(CARD,))
    on_card = PLAIN._replace(requirement=ON_CARD.requirement, retries=0)
    mesh.submit(2, on_card)
    actor = task(2)
    assert create(mesh, ON_CARD) == []

    assert mesh.finish("w1", task(0))[-1] == Assign("w1", ON_CARD, [(actor, 1)], ("GPU-1",), 0)


def test_one_that_nobody_can_run_is_told_and_fails_with_its_calls(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh, ON_CARD)
    mesh.submit(1, CALL)

    (notice,) = mesh.until(5.0)
    assert isinstance(notice, Notice)
    assert "has no GPU" in notice.text
    ends = mesh.until(61.0)

    assert [(action.task_id, action.status) for action in ends if isinstance(action, Fail)] == [
        (ACTOR, Status.INFEASIBLE),
        (task(1), Status.ACTOR_DIED),
    ]


def test_a_crash_ends_an_actor_that_may_not_restart_and_all_its_calls(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh)
    mesh.submit(2, CALL)

    ends = crash(mesh)

    assert isinstance(ends[0], Deliver)
    details = fails(ends)
    assert list(details) == [task(1), task(2)]
    assert details[task(1)]["is_gone"]
    assert details[task(1)]["actor"] == ACTOR
    for word in (show_actor(ACTOR), "Counter", "SIGKILL", "w1", "state is lost", "max_restarts=0"):
        assert word in details[task(1)]["reason"]


def test_later_calls_end_at_once_with_the_same_reason(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh)
    crash(mesh)

    details = fails(mesh.submit(1, CALL))

    assert "SIGKILL" in details[task(1)]["reason"]


def test_a_restart_ends_calls_that_were_sent_and_keeps_those_that_come(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh, TWICE)
    mesh.submit(1, CALL)
    actions = crash(mesh)

    details = fails(actions)[task(1)]
    assert not details["is_gone"]
    assert "state was lost" in details["reason"]
    assert actions[-1] == Assign("w1", TWICE, [(ACTOR, 2)])
    assert mesh.submit(1, CALL) == [Assign("w1", CALL, [(task(2), 1)])]


def test_calls_that_may_be_repeated_go_to_the_next_life_before_later_ones(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh, TWICE)
    mesh.submit(2, AGAIN)
    mesh.now = 5.0

    actions = mesh.lose("w1")
    assert [type(action) for action in actions if isinstance(action, (Retrying, Fail))] == [Retrying] * 3
    mesh.submit(1, CALL)

    assert [action for action in mesh.connect("w2") if isinstance(action, Assign)] == [
        Assign("w2", TWICE, [(ACTOR, 2)]),
        Assign("w2", AGAIN, [(task(1), 2), (task(2), 2)]),
        Assign("w2", CALL, [(task(3), 1)]),
    ]


def test_it_is_started_again_only_so_often(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh, TWICE)
    for attempt in (1, 2):
        mesh.now += 10.0
        assert crash(mesh, attempt=attempt)[-1] == Assign("w1", TWICE, [(ACTOR, attempt + 1)])
    mesh.now += 10.0

    assert isinstance(crash(mesh, attempt=3)[0], Deliver)
    assert "2 times" in fails(mesh.submit(1, CALL))[task(1)]["reason"]


def test_restarts_count_within_a_period(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    spec = COUNTER._replace(retries=1, plan=ActorPlan(restart_seconds=60.0))
    create(mesh, spec)
    for attempt in (1, 2, 3):
        mesh.now += 100.0
        assert crash(mesh, attempt=attempt)[-1] == Assign("w1", spec, [(ACTOR, attempt + 1)])
    mesh.now += 10.0

    assert isinstance(crash(mesh, attempt=4)[0], Deliver)


def test_one_that_dies_again_and_again_pauses_before_it_is_started(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh, COUNTER._replace(retries=10))
    crash(mesh)
    assert not any(isinstance(action, Assign) for action in crash(mesh, attempt=2))

    (assigned,) = mesh.until(0.2)

    assert assigned == Assign("w1", COUNTER._replace(retries=10), [(ACTOR, 3)])


def test_a_constructor_that_fails_is_not_tried_again_and_says_why(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh, TWICE)
    mesh.submit(1, CALL)

    actions = mesh.finish_all("w1", [(ACTOR, 1, int(Status.RAISED), b"the exception", 0.1)])

    assert actions[0] == Deliver(ClientNumber(1), "w1", [(ACTOR, Status.RAISED, b"the exception", 0.1)])
    assert fails(actions)[task(1)]["cause"] == b"the exception"


def test_results_before_the_end_count(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh)
    mesh.submit(2, CALL)

    actions = mesh.finish_all("w1", [(task(1), 1, 0, b"value", 1.0), (ACTOR, 1, int(Status.CRASHED), {}, 1.0)])

    assert Deliver(ClientNumber(1), "w1", [(task(1), 0, b"value", 1.0)]) in actions
    assert list(fails(actions)) == [task(2)]


def test_a_kill_reaches_its_worker_and_its_end_is_no_failure(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh, TWICE)
    assert kill(mesh) == [Recall("w1", [(ACTOR, 1)], kill=True)]
    assert kill(mesh) == []
    assert kill(mesh, force=True) == [Recall("w1", [(ACTOR, 1)], kill=True, force=True)]
    mesh.submit(1, CALL)

    actions = crash(mesh)

    assert [(action.task_id, action.status) for action in actions if isinstance(action, Fail)][-1] == (
        task(1),
        Status.ACTOR_DIED,
    )
    assert "killed by someone" in fails(actions)[task(1)]["reason"]


def test_a_kill_of_one_without_a_worker_ends_it_at_once(mesh: ClusterUnderTest) -> None:
    create(mesh)
    mesh.submit(1, CALL)

    assert list(fails(kill(mesh))) == [ACTOR, task(1)]


def test_it_goes_with_its_client_and_ends_the_calls_of_others(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", devices=(CARD,))
    create(mesh, ON_CARD)
    mesh.join_client(2)
    mesh.submit(1, CALL, client=2)

    actions = mesh.lose_client(1)

    assert Recall("w1", [(ACTOR, 1)], kill=True) in actions
    assert list(fails(actions)) == [task(0, 2)]
    assert mesh.finish("w1", ACTOR, status=Status.CANCELLED) == []


def test_a_client_that_leaves_takes_only_its_own_calls_along(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh)
    mesh.join_client(2)
    mesh.submit(1, CALL, client=2)
    mesh.submit(1, CALL)

    assert Recall("w1", [(task(0, 2), 1)], kill=True) in mesh.lose_client(2)
    assert mesh.finish("w1", task(1)) == [Deliver(ClientNumber(1), "w1", [(task(1), 0, b"value", 1.0)])]


def test_calls_that_are_cancelled_end_now_or_are_asked_back(mesh: ClusterUnderTest) -> None:
    create(mesh)
    mesh.submit(1, CALL)
    assert list(fails(mesh.cancel(task(1)))) == [task(1)]
    mesh.connect("w1")
    mesh.submit(1, CALL)

    assert mesh.cancel(task(2)) == [Recall("w1", [(task(2), 1)], kill=True)]


def test_a_call_with_a_future_keeps_its_place_before_later_ones(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh)
    mesh.submit()
    mesh.submit(1, CALL)
    number = mesh.specs[(1, CALL)]  # type: ignore[index]
    late = task(3)
    assert mesh.handle(ev.DependentSubmitted(ClientNumber(1), number, late, (task(1),))) == []
    mesh._submitted[1] = 4
    assert mesh.submit(1, CALL) == []

    assert [action for action in mesh.finish("w1", task(1)) if isinstance(action, Assign)] == [
        Assign("w1", CALL, [(late, 1)]),
        Assign("w1", CALL, [(task(4), 1)]),
    ]


def test_a_call_whose_input_is_not_known_keeps_its_place_until_it_comes_again(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh)
    mesh.submit(1, CALL)
    number = mesh.specs[(1, CALL)]  # type: ignore[index]
    late = task(2)
    (failed,) = mesh.handle(ev.DependentSubmitted(ClientNumber(1), number, late, (task(99),)))
    assert isinstance(failed, Fail)
    assert failed.status == Status.INPUT_MISSING
    mesh._submitted[1] = 3
    assert mesh.submit(1, CALL) == []

    assert mesh.submit_ids([late], CALL) == [Assign("w1", CALL, [(late, 1)]), Assign("w1", CALL, [(task(3), 1)])]


def test_a_call_that_will_not_come_again_gives_up_its_place(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh)
    mesh.submit(1, CALL)
    number = mesh.specs[(1, CALL)]  # type: ignore[index]
    mesh.handle(ev.DependentSubmitted(ClientNumber(1), number, task(2), (task(99),)))
    mesh._submitted[1] = 3
    mesh.submit(1, CALL)

    assert mesh.cancel(task(2)) == [Assign("w1", CALL, [(task(3), 1)])]


def test_calls_of_an_actor_that_was_not_heard_of_wait_for_a_while(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    unknown = call(task(500))
    assert mesh.submit(1, unknown) == []

    assert list(fails(mesh.until(11.0))) == [task(0)]


def test_calls_that_came_before_the_creation_follow_it(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.join_client(2)
    mesh.submit(1, CALL, client=2)

    assert create(mesh) == [Assign("w1", COUNTER, [(ACTOR, 1)]), Assign("w1", CALL, [(task(0, 2), 1)])]


def test_a_name_belongs_to_one_actor_at_a_time(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    named = COUNTER._replace(plan=ActorPlan(name="c"))
    create(mesh, named)
    (failed,) = create(mesh, named)
    assert isinstance(failed, Fail)
    assert failed.status == Status.REFUSED
    assert "'c'" in failed.details["reason"]
    found = mesh.cluster.find_actor(name="c")
    assert found is not None
    assert found.id == ACTOR

    crash(mesh)

    assert mesh.cluster.find_actor(name="c") is None
    assert isinstance(create(mesh, named)[0], Assign)


def test_a_worker_that_is_back_goes_on_with_its_actor_and_gets_what_came_meanwhile(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh)
    mesh.submit(2, CALL)
    mesh.handle(ev.WorkerAway(WorkerId("w1"), "the cable"))
    assert mesh.submit(1, CALL) == []
    facts = mesh.cluster._workers[WorkerId("w1")].facts
    held = [ev.Held(COUNTER, [(ACTOR, 1)]), ev.Held(CALL, [(task(1), 1)])]

    actions = mesh.handle(ev.WorkerConnected(WorkerId("w1"), facts, False, held))

    assert actions == [Assign("w1", CALL, [(task(2), 2), (task(3), 1)])]


def test_calls_wait_while_their_worker_leaves_and_go_where_the_actor_goes(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    create(mesh, TWICE)
    mesh.connect("w2")
    mesh.drain("w1")
    assert mesh.submit(1, CALL) == []

    actions = mesh.finish_all("w1", [(ACTOR, 1, int(Status.HANDED_BACK), {"reason": "the worker leaves"}, 1.0)])

    assert [action for action in actions if isinstance(action, Assign)] == [
        Assign("w2", TWICE, [(ACTOR, 2)]),
        Assign("w2", CALL, [(task(1), 1)]),
    ]


def test_a_call_whose_arguments_are_not_here_does_not_go_to_the_next_life(mesh: ClusterUnderTest) -> None:
    cluster = mesh.cluster
    cluster.handle(ev.Started(None, 1000), 0.0)
    mesh.connect("w1")
    create(mesh, TWICE)
    facts = cluster._workers[WorkerId("w1")].facts
    strange = task(0, 2)  # Of a client that is not back yet.
    held = [ev.Held(TWICE, [(ACTOR, 1)]), ev.Held(AGAIN, [(strange, 1)])]
    mesh.handle(ev.WorkerAway(WorkerId("w1"), "the cable"))
    mesh.handle(ev.WorkerConnected(WorkerId("w1"), facts, False, held))
    mesh.connect("w2")
    mesh.drain("w1")

    actions = mesh.finish_all("w1", [(ACTOR, 1, int(Status.NOT_RUN), {}, 0.0)])

    assert [action for action in actions if isinstance(action, Assign)] == [Assign("w2", TWICE, [(ACTOR, 2)])]
    assert Forget([strange]) in actions


def test_views_tell_what_people_want_to_know(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", hostname="box")
    create(mesh, COUNTER._replace(plan=ActorPlan(name="c", group="shards")))
    mesh.submit(2, CALL)

    (view,) = mesh.cluster.actor_views()
    assert view == {
        "id": show_actor(ACTOR), "number": ACTOR, "name": "c", "class_name": "Counter", "state": "starting", "worker": "w1",
        "hostname": "box", "cards": [], "restarts": 0, "max_restarts": 0, "calls": 2, "detached": False, "group": "shards",
        "owner": "someone",
    }  # fmt: skip
    mesh.handle(ev.ActorStarted(WorkerId("w1"), ACTOR, 1))

    assert mesh.cluster.actor_views()[0]["state"] == "alive"
