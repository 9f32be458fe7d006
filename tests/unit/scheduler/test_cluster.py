"""What the cluster does about each event: exact lists of actions."""

from __future__ import annotations

from typing import Any, List, Tuple

import pytest

from gpumesh.config import MAX_PENDING_TASKS_PER_CLIENT, RECALL_AFTER_SECONDS, ROUND_TRIP_CAP_SECONDS
from gpumesh.model.ids import ClientNumber, WorkerId, make_task_id
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import DeviceFacts, Requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import events as ev
from gpumesh.scheduler import flow as flow_module
from gpumesh.scheduler.actions import Assign, Deliver, Fail, Forget, Notice, Recall, Retrying, WorkersChanged
from gpumesh.scheduler.actor_states import ACTOR_MOVES, ActorState
from gpumesh.scheduler.states import TASK_MOVES, WORKER_MOVES, TaskState, WorkerState

PLAIN = TaskSpec(b"f" * 16, "train")
ONCE = PLAIN._replace(retries=0, name="pay")
W1, W2 = WorkerId("w1"), WorkerId("w2")
ONE, TWO = ClientNumber(1), ClientNumber(2)


def t(index: int, client: int = 1) -> int:
    return make_task_id(ClientNumber(client), index)


def first(*indexes: int) -> List[Any]:
    return [(t(index), 1) for index in indexes]


# --- the straight way


def test_a_task_goes_to_the_only_worker_and_its_result_to_its_client(mesh: Any) -> None:
    assert mesh.connect("w1") == [WorkersChanged(1)]
    assert mesh.submit() == [Assign(W1, PLAIN, first(0))]
    assert mesh.finish("w1", t(0)) == [Deliver(ONE, W1, [(t(0), Status.OK, b"value", 1.0)])]
    assert mesh.cluster.pending_count() == 0
    assert mesh.cluster.next_deadline() is None


def test_tasks_submitted_before_any_worker_run_when_one_joins(mesh: Any) -> None:
    assert mesh.submit(2) == []
    assert mesh.connect("w1", slots=2) == [Assign(W1, PLAIN, first(0, 1)), WorkersChanged(1)]


def test_of_a_function_nobody_has_measured_nothing_is_sent_ahead(mesh: Any) -> None:
    mesh.connect("w1", slots=2)
    assert mesh.submit(10) == [Assign(W1, PLAIN, first(0, 1))]


def test_short_tasks_are_sent_ahead_of_need_only_to_who_was_measured(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.learn(0.001, worker="w1")
    mesh.connect("w2")
    assert mesh.submit(10) == [Assign(W1, PLAIN, first(0, 1, 2)), Assign(W2, PLAIN, first(3))]


def test_a_worker_that_finishes_gets_the_next_tasks_in_the_same_turn(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit(5)
    assert mesh.finish("w1", t(0), seconds=60.0) == [
        Deliver(ONE, W1, [(t(0), Status.OK, b"value", 60.0)]),
        Assign(W1, PLAIN, first(1)),
    ]
    assert mesh.finish("w1", t(1), seconds=60.0) == [
        Deliver(ONE, W1, [(t(1), Status.OK, b"value", 60.0)]),
        Assign(W1, PLAIN, first(2)),
    ]


def test_results_of_several_clients_in_one_message_go_to_each(mesh: Any) -> None:
    mesh.join_client(2)
    mesh.connect("w1", slots=3)
    mesh.submit(2)
    mesh.submit(1, client=2)
    assert mesh.finish("w1", t(0), t(0, 2), t(1)) == [
        Deliver(ONE, W1, [(t(0), Status.OK, b"value", 1.0), (t(1), Status.OK, b"value", 1.0)]),
        Deliver(TWO, W1, [(t(0, 2), Status.OK, b"value", 1.0)]),
    ]


def test_higher_priority_goes_first_and_then_the_client_that_has_had_least(mesh: Any) -> None:
    mesh.join_client(2)
    urgent = PLAIN._replace(priority=1, name="urgent")
    mesh.submit(4)
    mesh.submit(2, client=2)
    mesh.submit(1, urgent)
    mesh.connect("w1", slots=1)
    order = []
    while mesh.cluster.pending_count():
        task_id = next(iter(mesh.cluster._workers["w1"].assigned))
        order.append(task_id)
        mesh.finish("w1", task_id, seconds=100.0)
    assert order == [t(4), t(0, 2), t(0), t(1, 2), t(1), t(2), t(3)]


# --- results that are not successes


@pytest.mark.parametrize("status", [Status.RAISED, Status.TIMED_OUT, Status.CANCELLED])
def test_an_end_is_an_end(mesh: Any, status: Status) -> None:
    mesh.connect("w1")
    mesh.submit()
    assert mesh.finish("w1", t(0), status=status) == [Deliver(ONE, W1, [(t(0), status, b"value", 1.0)])]


@pytest.mark.parametrize("status", [Status.CRASHED, Status.RETRYABLE])
def test_a_failed_attempt_is_tried_again_at_once_until_the_retries_are_used_up(mesh: Any, status: Status) -> None:
    twice = PLAIN._replace(retries=1)
    mesh.connect("w1")
    mesh.submit(1, twice)
    assert mesh.finish("w1", t(0), status=status) == [Retrying(t(0), 2, W1, status), Assign(W1, twice, [(t(0), 2)])]
    assert mesh.finish("w1", t(0), status=status, attempt=2) == [Deliver(ONE, W1, [(t(0), status, b"value", 1.0)])]


def test_a_task_given_back_goes_first_and_has_no_strike(mesh: Any) -> None:
    once_more = PLAIN._replace(retries=1)
    mesh.connect("w1")
    mesh.learn(0.001, worker="w1")
    assert mesh.submit(3, once_more) == [Assign(W1, once_more, first(0, 1, 2))]
    assert mesh.finish("w1", t(1), status=Status.NOT_RUN) == [Assign(W1, once_more, [(t(1), 2)])]
    assert mesh.finish("w1", t(1), status=Status.CRASHED, attempt=2) == [
        Retrying(t(1), 3, W1, Status.CRASHED),
        Assign(W1, once_more, [(t(1), 3)]),
    ]


@pytest.mark.parametrize("worker", ["w1", "w2", "never seen"])
def test_a_result_of_an_attempt_that_has_been_overtaken_is_ignored(mesh: Any, worker: str) -> None:
    mesh.connect("w1")
    mesh.submit()
    mesh.finish("w1", t(0), status=Status.CRASHED)
    mesh.connect("w2")
    assert mesh.finish(worker, t(0), attempt=1) == []
    assert mesh.finish(worker, t(7), attempt=1) == []
    assert mesh.cluster.state_of(t(0)) is TaskState.ASSIGNED


def test_stale_results_among_good_ones_are_passed_over(mesh: Any) -> None:
    mesh.connect("w1", slots=3)
    mesh.submit(3)
    results = [(t(0), 1, Status.OK, b"a", 60.0), (t(9), 1, Status.OK, b"stale", 1.0), (t(1), 2, Status.OK, b"stale", 1.0)]
    results += [(t(0), 1, Status.OK, b"twice", 60.0), (t(2), 1, Status.OK, b"c", 60.0)]
    assert mesh.finish_all("w1", results) == [Deliver(ONE, W1, [(t(0), Status.OK, b"a", 60.0), (t(2), Status.OK, b"c", 60.0)])]
    assert mesh.cluster.state_of(t(1)) is TaskState.ASSIGNED


# --- workers that leave


def test_of_a_lost_worker_only_what_may_have_run_gets_a_strike(mesh: Any) -> None:
    last_try = PLAIN._replace(retries=1)
    mesh.connect("w1")
    mesh.learn(0.001, worker="w1")
    assert mesh.submit(2, last_try) == [Assign(W1, last_try, first(0, 1))]
    assert mesh.lose("w1") == [Retrying(t(0), 2, W1, Status.LOST), WorkersChanged(0)]
    assert mesh.connect("w2") == [Assign(W2, last_try, [(t(0), 2)]), WorkersChanged(1)]
    assert mesh.lose("w2", "silent for 30 s") == [
        Fail(
            ONE,
            t(0),
            Status.LOST,
            {
                "reason": "worker w2 was lost while it had the task: silent for 30 s",
                "attempts": [{"worker": "w1", "status": "LOST"}, {"worker": "w2", "status": "LOST"}],
                "worker": "w2",
            },
        ),
        WorkersChanged(0),
    ]
    assert mesh.connect("w1") == [Assign(W1, last_try, [(t(1), 2)]), WorkersChanged(1)]
    assert mesh.finish("w1", t(1), status=Status.CRASHED, attempt=2) == [
        Retrying(t(1), 3, W1, Status.CRASHED),
        Assign(W1, last_try, [(t(1), 3)]),
    ]


def test_a_task_that_may_run_once_is_never_sent_ahead_and_fails_with_its_worker(mesh: Any) -> None:
    mesh.connect("w1", slots=2)
    mesh.learn(0.001, worker="w1")
    assert mesh.submit(3, ONCE) == [Assign(W1, ONCE, first(0, 1))]
    actions = mesh.lose("w1")
    assert [(type(action), getattr(action, "task_id", None)) for action in actions] == [
        (Fail, t(0)),
        (Fail, t(1)),
        (WorkersChanged, None),
    ]
    assert mesh.connect("w2") == [Assign(W2, ONCE, first(2)), WorkersChanged(1)]


def test_a_worker_that_connects_again_with_nothing_has_not_seen_what_it_was_sent(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit()
    assert mesh.connect("w1") == [Assign(W1, PLAIN, [(t(0), 2)])]


def test_a_draining_worker_takes_nothing_and_finishes_what_it_has(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit()
    assert mesh.drain("w1") == [WorkersChanged(0)]
    assert mesh.submit() == []
    assert mesh.finish("w1", t(0)) == [Deliver(ONE, W1, [(t(0), Status.OK, b"value", 1.0)])]


def test_a_worker_with_a_problem_takes_nothing_until_it_is_well(mesh: Any) -> None:
    assert mesh.connect("w1", problem="paused by its owner") == []
    assert mesh.submit() == []
    assert mesh.change("w1") == [Assign(W1, PLAIN, first(0)), WorkersChanged(1)]
    assert mesh.change("w1", problem="too hot") == [WorkersChanged(0)]


def test_a_worker_that_gets_more_slots_gets_more_tasks(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit(8, ONCE)
    assert mesh.change("w1", slots=3) == [Assign(W1, ONCE, first(1, 2))]


def test_events_of_strangers_change_nothing(mesh: Any) -> None:
    assert mesh.lose("w9") == []
    assert mesh.drain("w9") == []
    assert mesh.change("w9") == []
    assert mesh.lose_client(9) == []
    assert mesh.cancel(t(0, 9), client=9) == []
    assert mesh.submit(0) == []
    assert mesh.handle(ev.SpecDefined(ClientNumber(9), 0, PLAIN)) == []


# --- clients


def test_what_cannot_be_taken_is_refused_and_the_rest_is_taken(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "MAX_PENDING_TASKS_PER_CLIENT", 3)
    assert MAX_PENDING_TASKS_PER_CLIENT > 3
    mesh.submit(1)

    actions = mesh.submit_ids([t(0), t(1), t(1), t(5, 2), t(2), t(3)])

    assert [(action.task_id, action.status, action.details["reason"]) for action in actions] == [
        (t(5, 2), Status.REFUSED, "its id belongs to another client"),
        (t(0), Status.REFUSED, "a task with this id is pending already"),
        (t(1), Status.REFUSED, "a task with this id is pending already"),
        (t(3), Status.REFUSED, "this client has 3 tasks pending already; wait for some results first"),
    ]
    assert mesh.cluster.pending_count() == 3


def test_tasks_of_a_spec_or_client_that_nobody_defined_are_refused(mesh: Any) -> None:
    refused = {"reason": "spec 77 was never defined", "attempts": []}
    assert mesh.handle(ev.TasksSubmitted(ONE, 77, [t(0)])) == [Fail(ONE, t(0), Status.REFUSED, refused)]
    assert mesh.handle(ev.TasksSubmitted(TWO, 77, [t(0, 2)])) == [Fail(TWO, t(0, 2), Status.REFUSED, refused)]


def test_a_number_that_is_given_to_another_spec_changes_only_later_tasks(mesh: Any) -> None:
    other = PLAIN._replace(name="other", requirement=Requirement(tags=(("room", "lab"),)))
    mesh.submit(1)
    mesh.handle(ev.SpecDefined(ONE, mesh.specs[1, PLAIN], other))
    mesh.handle(ev.TasksSubmitted(ONE, mesh.specs[1, PLAIN], [t(9)]))
    assert mesh.connect("w1", slots=2, tags=(("room", "lab"),)) == [
        Assign(W1, PLAIN, first(0)),
        Assign(W1, other, first(9)),
        WorkersChanged(1),
    ]


def test_when_a_client_leaves_its_tasks_are_forgotten_and_its_running_ones_killed(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.learn(0.001, worker="w1")
    mesh.submit(4)
    assert mesh.lose_client() == [Recall(W1, first(0, 1, 2), kill=True), Forget([t(0), t(1), t(2), t(3)])]
    assert mesh.cluster.assigned_count() == 3, "they hold their slots until the worker has reported them"
    mesh.join_client(2)
    assert mesh.submit(1, client=2) == []
    assert mesh.finish("w1", t(0), t(1), t(2), status=Status.CANCELLED) == [Assign(W1, PLAIN, [(t(0, 2), 1)])]


def test_a_client_that_comes_back_with_the_same_ids_does_not_get_results_of_its_former_life(mesh: Any) -> None:
    mesh.connect("w1", slots=2)
    mesh.submit_ids([t(0)])
    mesh.lose_client()
    mesh.join_client(1)
    assert mesh.submit_ids([t(0)]) == [Assign(W1, PLAIN, [(t(0), 2)])]
    assert mesh.finish("w1", t(0), attempt=1) == []
    assert mesh.finish("w1", t(0), attempt=2) == [Deliver(ONE, W1, [(t(0), Status.OK, b"value", 1.0)])]


# --- cancelling


def test_a_waiting_task_is_cancelled_at_once_and_a_running_one_by_its_worker(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit(3)
    assert mesh.cancel(t(2), t(0), t(99)) == [
        Fail(ONE, t(2), Status.CANCELLED, {"reason": "cancelled before it started", "attempts": []}),
        Recall(W1, first(0), kill=True),
    ]
    assert mesh.cancel(t(0), t(2)) == []
    assert mesh.finish("w1", t(0), status=Status.CANCELLED) == [
        Deliver(ONE, W1, [(t(0), Status.CANCELLED, b"value", 1.0)]),
        Assign(W1, PLAIN, first(1)),
    ]


def test_what_is_being_cancelled_can_be_ended_at_once(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit()
    assert mesh.cancel(t(0)) == [Recall(W1, first(0), kill=True)]
    assert mesh.cancel(t(0)) == []

    assert mesh.handle(ev.CancelRequested(ONE, [t(0)], force=True)) == [Recall(W1, first(0), kill=True, force=True)]


def test_a_result_that_is_faster_than_the_cancellation_counts(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit()
    mesh.cancel(t(0))
    assert mesh.finish("w1", t(0)) == [Deliver(ONE, W1, [(t(0), Status.OK, b"value", 1.0)])]


@pytest.mark.parametrize("status", [Status.NOT_RUN, Status.CRASHED, Status.RETRYABLE])
def test_a_cancelled_task_is_not_tried_again(mesh: Any, status: Status) -> None:
    mesh.connect("w1")
    mesh.submit()
    mesh.cancel(t(0))
    cancelled = {"reason": "cancelled", "attempts": [], "worker": "w1"}
    assert mesh.finish("w1", t(0), status=status) == [Fail(ONE, t(0), Status.CANCELLED, cancelled)]


def test_a_cancelled_task_ends_as_cancelled_when_its_worker_is_lost(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit()
    mesh.cancel(t(0))
    cancelled = {"reason": "cancelled", "attempts": [], "worker": "w1"}
    assert mesh.lose("w1") == [Fail(ONE, t(0), Status.CANCELLED, cancelled), WorkersChanged(0)]


def test_nobody_cancels_the_tasks_of_another(mesh: Any) -> None:
    mesh.join_client(2)
    mesh.submit()
    assert mesh.cancel(t(0), client=2) == []


def test_an_id_may_be_used_again_after_it_was_cancelled_in_the_queue(mesh: Any) -> None:
    mesh.submit_ids([t(0), t(1), t(2)])
    mesh.cancel(t(1))
    mesh.submit_ids([t(1)])
    assert mesh.connect("w1", slots=4) == [Assign(W1, PLAIN, first(0, 2, 1)), WorkersChanged(1)]


def test_many_cancelled_tasks_leave_no_ids_behind(mesh: Any) -> None:
    mesh.submit(300)
    mesh.cancel(*(t(index) for index in range(1, 300)))
    (group,) = mesh.cluster._queues.ready(0.0)
    assert sum(len(run.ids) for run in group.next_lane().runs) < 100
    assert mesh.connect("w1", slots=4) == [Assign(W1, PLAIN, first(0)), WorkersChanged(1)]


# --- what nobody can run

BIG = TaskSpec(b"g" * 16, "train", Requirement("gpu", "a100", 1.0), placement_timeout=60.0)
BIG_TEXT = (
    "task 'train' needs 1 GPU 'a100', but none of 2 connected workers can run it: w1 has no GPU;"
    " w2 takes no tasks (its driver is gone); ask for less with options(...), or join a machine that has it with `gpumesh join`"
)


def test_what_nobody_can_run_is_told_after_two_seconds_and_fails_after_its_timeout(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.connect("w2", problem="its driver is gone")
    assert mesh.submit(2, BIG) == []
    assert mesh.until(1.9) == []
    assert mesh.until(2.0) == [Notice(ONE, t(0), BIG_TEXT)]
    mesh.at(30.0).submit(1, BIG)
    assert mesh.until(59.9) == []
    details = {"reason": BIG_TEXT, "attempts": []}
    assert mesh.until(60.0) == [
        Fail(ONE, t(0), Status.INFEASIBLE, details),
        Fail(ONE, t(1), Status.INFEASIBLE, details),
    ]
    assert mesh.until(90.0) == [Fail(ONE, t(2), Status.INFEASIBLE, details)]
    assert mesh.cluster.next_deadline() is None


def test_a_worker_that_joins_in_time_runs_what_nobody_could(mesh: Any) -> None:
    mesh.submit(1, BIG)
    card = DeviceFacts("cuda", 0, "NVIDIA A100-SXM4-40GB", 40 * 10**9, 70.0)
    assert mesh.at(59.0).connect("w1", devices=(card,)) == [Assign(W1, BIG, first(0), ("cuda:0",)), WorkersChanged(1)]
    assert mesh.until(100.0) == []


def test_the_time_to_give_up_counts_from_when_the_last_fitting_worker_left(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.submit(3, ONCE)
    mesh.at(100.0).drain("w1")
    text = "task 'pay' needs nothing special, but the only connected worker cannot run it: w1 is leaving"
    (notice,) = mesh.until(150.0)
    assert notice.text.startswith(text)
    assert [action.task_id for action in mesh.until(160.0)] == [t(1), t(2)]


def test_without_any_worker_the_text_says_so(mesh: Any) -> None:
    mesh.submit()
    (notice,) = mesh.until(5.0)
    assert notice.text == "task 'train' needs nothing special, but no worker is connected; join a machine with `gpumesh join`"


def test_a_task_may_wait_for_ever(mesh: Any) -> None:
    mesh.submit(1, BIG._replace(placement_timeout=-1.0))
    assert [type(action) for action in mesh.until(1e6)] == [Notice]
    assert mesh.cluster.next_deadline() is None


def test_who_asks_is_told_of_all_that_nobody_can_run_as_often_as_that_is_so(mesh: Any) -> None:
    def unable(client: ClientNumber = ONE) -> List[Any]:
        return [(ids, text.split(",")[0]) for ids, text in mesh.cluster.unable(client, mesh.now)]

    train, tune = (f"task '{name}' needs 1 GPU 'a100'" for name in ("train", "tune"))
    card = DeviceFacts("cuda", 0, "NVIDIA A100-SXM4-40GB", 40 * 10**9, 70.0)
    mesh.connect("w1")
    mesh.submit(2, BIG)
    mesh.until(1.9)
    assert unable() == [], "somebody may be about to join"
    mesh.until(2.0)
    assert unable() == [([t(0), t(1)], train)]
    assert unable(TWO) == []

    mesh.submit(1, BIG._replace(name="tune"))
    mesh.cancel(t(0))
    assert unable() == [([t(1)], train), ([t(2)], tune)]

    mesh.connect("w2", devices=(card,))
    assert unable() == []
    mesh.lose("w2")
    assert unable() == [([t(1)], train), ([t(2)], tune)]


def test_cancelling_ends_the_wait_for_a_worker(mesh: Any) -> None:
    mesh.submit(1, BIG)
    mesh.cancel(t(0))
    assert mesh.cluster.next_deadline() is None


# --- balance


def test_a_task_that_waits_behind_another_is_asked_back_when_a_worker_idles(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.learn(0.001, worker="w1")
    assert mesh.submit(2) == [Assign(W1, PLAIN, first(0, 1))]
    mesh.at(1.0).connect("w2")
    assert mesh.cluster.next_deadline() == 1.0 + RECALL_AFTER_SECONDS
    assert mesh.until(1.1) == [Recall(W1, first(1), kill=False)]
    assert mesh.until(10.0) == [], "the same attempt is never asked back twice"
    assert mesh.finish("w1", t(1), status=Status.NOT_RUN) == [Assign(W2, PLAIN, [(t(1), 2)])]


def test_a_recalled_task_that_started_all_the_same_ends_where_it_is(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.learn(0.001, worker="w1")
    mesh.submit(2)
    mesh.connect("w2")
    assert mesh.until(0.1) == [Recall(W1, first(1), kill=False)]
    mesh.finish("w1", t(0))
    assert mesh.finish("w1", t(1)) == [Deliver(ONE, W1, [(t(1), Status.OK, b"value", 1.0)])]


def test_half_of_a_queue_of_short_tasks_is_asked_back(mesh: Any) -> None:
    mesh.connect("w1")
    mesh.learn(0.001, worker="w1")
    mesh.submit(3)
    assert len(mesh.cluster._workers["w1"].assigned) == 3
    mesh.connect("w2")
    assert mesh.until(0.1) == [Recall(W1, [(t(2), 1)], kill=False)]


def test_no_more_is_asked_back_at_once_than_the_idle_can_take(mesh: Any) -> None:
    for worker in ("w1", "w2", "w3"):
        mesh.connect(worker)
    mesh.submit(3)
    for index, worker in enumerate(("w1", "w2", "w3")):
        mesh.finish(worker, t(index), seconds=0.1)
        mesh.cluster._workers[worker].round_trip = ROUND_TRIP_CAP_SECONDS
    assert [len(action.tasks) for action in mesh.submit(6)] == [2, 2, 2]
    mesh.connect("w4")
    deadline = mesh.cluster.next_deadline()
    assert deadline is not None
    (recall,) = mesh.at(deadline).cluster.on_time(deadline)
    assert (recall.worker, len(recall.tasks)) == ("w1", 1)
    assert mesh.cluster.next_deadline() == deadline + RECALL_AFTER_SECONDS


def test_clients_share_the_room_when_their_tasks_are_placed_together(mesh: Any) -> None:
    mesh.join_client(2)
    mesh.connect("w2", slots=4)
    mesh.learn(1e-4, worker="w2")
    mesh.change("w2", slots=4, problem="paused by its owner")
    mesh.submit(100)
    mesh.submit(100, client=2)
    mesh.change("w2", slots=4)
    counts = [0, 0]
    for task_id in mesh.cluster._workers["w2"].assigned:
        counts[(task_id >> 32) - 1] += 1
    assert counts == [32, 32]


def test_nothing_is_asked_back_for_a_worker_that_cannot_run_it(mesh: Any) -> None:
    lab = PLAIN._replace(requirement=Requirement(tags=(("room", "lab"),)))
    mesh.connect("w1", tags=(("room", "lab"),))
    mesh.learn(0.001, worker="w1")
    assert mesh.submit(2, lab) == [Assign(W1, lab, first(0, 1))]
    mesh.connect("w2")
    assert mesh.until(10.0) == []


def test_a_much_slower_worker_takes_over_only_what_has_waited_longer_than_it_would_take(mesh: Any) -> None:
    mesh.connect("w1", score=10.0)
    mesh.learn(0.03, worker="w1")
    mesh.submit(2)
    assert len(mesh.cluster._workers["w1"].assigned) == 2
    mesh.connect("w2", score=0.1)
    assert mesh.until(2.9) == []
    assert mesh.until(60.0) == [Recall(W1, first(1), kill=False)], "what runs before it may go on for ever"
    assert mesh.finish("w1", t(1), status=Status.NOT_RUN) == [Assign(W2, PLAIN, [(t(1), 2)])]


# --- the tables of moves


def test_each_state_can_be_reached_and_left() -> None:
    for moves, states in ((TASK_MOVES, TaskState), (WORKER_MOVES, WorkerState), (ACTOR_MOVES, ActorState)):
        assert {before for before, _ in moves} == set(states)  # type: ignore[attr-defined]
        assert {after for _, after in moves} == set(states)  # type: ignore[attr-defined]


# --- environments

PACKED = TaskSpec(b"p" * 16, "packed", packages=("old",))
PACKED_TOO = TaskSpec(b"q" * 16, "packed too", packages=("new",))


def test_tasks_wait_in_their_queue_while_a_worker_installs_their_packages(mesh: Any) -> None:
    mesh.connect("w1", slots=1)
    assert assigned(mesh.submit(1, PACKED)) == [("w1", PACKED, [0])]
    mesh.change("w1", slots=1, installing=(("old",),))
    assert mesh.finish("w1", t(0), status=Status.NOT_RUN) == []
    assert mesh.submit(2, PACKED) == []

    assert assigned(mesh.submit(1)) == [("w1", PLAIN, [3])], "what needs none of it takes the free slot"
    assert assigned(mesh.submit(1, PACKED_TOO)) == [("w1", PACKED_TOO, [4])]
    mesh.finish("w1", t(3), t(4))
    assert mesh.until(100.0) == [], "waiting for an installer is no lack of workers"

    assert assigned(mesh.change("w1", slots=1)) == [("w1", PACKED, [0])]


def test_another_worker_takes_what_waits_for_an_installer(mesh: Any) -> None:
    mesh.connect("w1", slots=1, installing=(("old",),))
    assert mesh.submit(1, PACKED) == []

    assert assigned(mesh.connect("w2", slots=1)[:1]) == [("w2", PACKED, [0])]


def test_what_waits_elsewhere_is_not_asked_back_for_a_worker_that_still_installs(mesh: Any) -> None:
    mesh.connect("w1", slots=1)
    mesh.learn(0.001, PACKED, worker="w1")
    assert assigned(mesh.submit(2, PACKED)) == [("w1", PACKED, [0, 1])]

    mesh.connect("w2", slots=1, installing=(("old",),))

    assert mesh.until(10.0) == []


def test_a_worker_has_some_tasks_of_each_environment_to_choose_from(mesh: Any) -> None:
    mesh.connect("w1", slots=2)

    sent = [assigned(mesh.submit(4, spec)) for spec in (PLAIN, PACKED, PACKED_TOO)]

    assert sent == [[("w1", PLAIN, [0, 1])], [("w1", PACKED, [4, 5])], [("w1", PACKED_TOO, [8, 9])]]


# --- versions


def test_bytecode_of_another_python_is_told_with_both_versions_and_machines(mesh: Any) -> None:
    mesh.connect("old", python="3.9")
    mesh.connect("new", python="3.13", cores=1)
    by_value = TaskSpec(b"v" * 16, "train", Requirement(python="3.11"), placement_timeout=10.0)
    mesh.submit(1, by_value)

    (notice,) = mesh.until(5.0)
    (failure,) = mesh.until(10.0)

    assert isinstance(notice, Notice)
    assert isinstance(failure, Fail)
    assert notice.text == failure.details["reason"]
    assert failure.details["cause"] == "version"
    for words in (
        "Python 3.11",
        "sent by someone",
        "old runs Python 3.9",
        "new runs Python 3.13",
        "module that the workers can import",
    ):
        assert words in notice.text


def test_a_worker_that_lacks_more_than_a_python_version_is_no_version_mismatch(mesh: Any) -> None:
    mesh.connect("old", python="3.9")
    by_value = TaskSpec(b"v" * 16, "train", Requirement(python="3.11", cores=64), placement_timeout=1.0)
    mesh.submit(1, by_value)

    (failure,) = mesh.until(1.0)

    assert isinstance(failure, Fail)
    assert "cause" not in failure.details


def assigned(actions: List[Any]) -> List[Tuple[str, TaskSpec, List[int]]]:
    """(worker, spec, sequence numbers) of what was assigned; nothing else was done."""
    assert all(isinstance(action, Assign) for action in actions), actions
    return [(a.worker, a.spec, [t & 0xFFFFFFFF for t, _ in a.tasks]) for a in actions if isinstance(a, Assign)]


def test_what_nobody_can_run_fails_in_time_also_before_something_that_was_cancelled(mesh: Any) -> None:
    other = PLAIN._replace(name="other")
    mesh.submit(1)
    mesh.submit(1, other)
    mesh.cancel(t(1))

    failed = [action for action in mesh.until(60.0) if isinstance(action, Fail)]

    assert [(action.task_id, action.status) for action in failed] == [(t(0), Status.INFEASIBLE)]
