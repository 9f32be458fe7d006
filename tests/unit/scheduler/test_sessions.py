"""Workers and clients that are away, come back, or were at work for a coordinator before this one."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import pytest

from gpumesh.config import (
    ABSENT_CLIENT_SECONDS,
    CLIENT_GRACE_SECONDS,
    DEATH_GRACE_ROUND_TRIPS,
    DEATH_GRACE_SECONDS,
    RECOVERY_SECONDS,
    RESULT_GRACE_SECONDS,
    WORKER_TTL_SECONDS,
)
from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import DeviceFacts, Requirement, WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.actions import (
    Assign,
    ClientGone,
    Deliver,
    Fail,
    Forget,
    Keep,
    Recall,
    Retrying,
    WorkerGone,
    WorkersChanged,
)
from gpumesh.scheduler.states import TaskState
from tests.unit.scheduler.conftest import PLAIN, ClusterUnderTest, task

W1, W2 = WorkerId("w1"), WorkerId("w2")
ME, OTHER = ClientNumber(1), ClientNumber(7)
ONCE = PLAIN._replace(name="once", function=b"o" * 16, retries=0)
GRACE = DEATH_GRACE_SECONDS + DEATH_GRACE_ROUND_TRIPS * 0.3  # The longest that a measured round trip counts for.
t = task


class Mesh(ClusterUnderTest):
    """With what can happen to connections."""

    def restart(self, workers: Optional[Sequence[str]], *, has_lost: bool = False) -> None:
        """The coordinator is a new one, which knows nobody."""
        now = self.now
        self.__init__()  # type: ignore[misc]
        self.now = now
        self.handle(ev.ClientLost(ME))
        self.cluster._expired.clear()
        ids = None if workers is None else [WorkerId(worker) for worker in workers]
        self.handle(ev.Started(ids, 1000, has_lost))

    def away(self, worker: str, *arriving: int) -> List[Any]:
        return self.handle(ev.WorkerAway(WorkerId(worker), "the connection was lost", arriving))

    def back(
        self,
        worker: str,
        *held: Tuple[int, int],
        finished: Sequence[Tuple[int, int]] = (),
        spec: TaskSpec = PLAIN,
        slots: int = 1,
        devices: Tuple[DeviceFacts, ...] = (),
        cards: Tuple[str, ...] = (),
    ) -> List[Any]:
        facts = WorkerFacts(slots=slots, hostname=worker, cores=slots, devices=devices)
        what = [ev.Held(spec, held, cards)] if held else []
        return self.handle(ev.WorkerConnected(WorkerId(worker), facts, False, what, finished))

    def leave_for_a_moment(self, client: int = 1) -> List[Any]:
        return self.handle(ev.ClientAway(ClientNumber(client)))

    def resume(self, client: int = 1) -> List[Any]:
        self.specs = {}
        return self.handle(ev.ClientConnected(ClientNumber(client), "someone", True))

    def again(self, ids: Sequence[int], spec: TaskSpec = PLAIN, client: int = 1) -> List[Any]:
        key: Any = (client, spec)
        if key not in self.specs:
            self.specs[key] = len(self.specs)
            self.handle(ev.SpecDefined(ClientNumber(client), self.specs[key], spec))
        return self.handle(ev.TasksSubmitted(ClientNumber(client), self.specs[key], ids, (), True))

    def that_was_all(self, client: int = 1) -> List[Any]:
        return self.handle(ev.ResubmissionEnded(ClientNumber(client)))


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


# --- a worker's connection breaks


@pytest.mark.parametrize("spec", [PLAIN, ONCE])
def test_a_result_that_was_half_way_here_is_waited_for(mesh: Mesh, spec: TaskSpec) -> None:
    mesh.connect("w1", slots=1)
    mesh.submit(1, spec)
    mesh.connect("w2", slots=1)
    mesh.away("w1", t(0))
    lost_at = mesh.now + GRACE
    assert [type(action) for action in mesh.until(lost_at)] == [WorkerGone, WorkersChanged]
    assert mesh.cluster.state_of(t(0)) is TaskState.DELAYED
    assert mesh.until(lost_at + RESULT_GRACE_SECONDS - 2) == []

    mesh.back("w1", finished=[(t(0), 1)], spec=spec)
    assert mesh.finish("w1", t(0)) == [Deliver(ME, W1, [(t(0), Status.OK, b"value", 1.0)])]


def test_a_result_that_was_half_way_here_is_not_waited_for_too_long(mesh: Mesh) -> None:
    mesh.connect("w1", slots=2)
    mesh.submit(1)
    mesh.submit(1, ONCE)
    mesh.connect("w2", slots=1)
    mesh.away("w1", t(0), t(1))
    actions = mesh.until(mesh.now + GRACE + RESULT_GRACE_SECONDS + 1)

    assert Retrying(t(0), 2, W1, Status.LOST) in actions
    assert [action.worker for action in actions if type(action) is Assign] == [W2]
    (failed,) = [action for action in actions if type(action) is Fail]
    assert (failed.task_id, failed.status) == (t(1), Status.LOST)
    assert "with the result" in failed.details["reason"]


def test_a_worker_that_is_back_in_time_goes_on(mesh: Mesh) -> None:
    mesh.connect("w1", slots=2)
    mesh.submit(2)
    assert mesh.away("w1") == []
    assert not mesh.cluster.snapshot(mesh.now)[0]["alive"]
    assert mesh.until(DEATH_GRACE_SECONDS / 2) == []

    assert mesh.back("w1", (t(0), 1), (t(1), 1), slots=2) == []
    assert mesh.finish("w1", t(0), t(1)) == [
        Deliver(ME, W1, [(t(0), Status.OK, b"value", 1.0), (t(1), Status.OK, b"value", 1.0)])
    ]


def test_a_worker_that_is_not_back_in_time_is_lost_and_still_shown_for_a_while(mesh: Mesh) -> None:
    mesh.connect("w1")
    mesh.submit()
    mesh.away("w1")
    assert mesh.until(GRACE) == [
        WorkerGone(W1, "the connection was lost"),
        Retrying(t(0), 2, W1, Status.LOST),
        WorkersChanged(0),
    ]
    (shown,) = mesh.cluster.snapshot(mesh.now)
    assert (shown["alive"], shown["lost"]) == (False, "the connection was lost")
    assert mesh.cluster.snapshot(mesh.now + WORKER_TTL_SECONDS) == []


def test_nothing_is_assigned_to_who_is_away(mesh: Mesh) -> None:
    mesh.connect("w1")
    mesh.away("w1")
    assert mesh.submit() == []
    assert mesh.back("w1") == [Assign(W1, PLAIN, [(t(0), 1)])]


def test_what_a_worker_never_saw_goes_to_the_front_again_without_a_strike(mesh: Mesh) -> None:
    mesh.connect("w1", slots=2)
    mesh.submit(2, ONCE)
    mesh.away("w1")
    assert mesh.back("w1", (t(0), 1), spec=ONCE, slots=2) == [Assign(W1, ONCE, [(t(1), 2)])]
    assert mesh.cluster.attempts_of(t(1)) == []


def test_a_result_that_a_worker_has_kept_counts_as_assigned_until_it_comes(mesh: Mesh) -> None:
    mesh.connect("w1")
    mesh.submit()
    mesh.away("w1")
    assert mesh.back("w1", finished=[(t(0), 1)]) == []
    assert mesh.finish("w1", t(0)) == [Deliver(ME, W1, [(t(0), Status.OK, b"value", 1.0)])]


def test_a_recall_that_was_lost_with_the_connection_is_said_again(mesh: Mesh) -> None:
    mesh.connect("w1")
    mesh.submit()
    mesh.away("w1")
    assert mesh.cancel(t(0)) == [Recall(W1, [(t(0), 1)], kill=True)]  # Which nobody hears.
    assert mesh.back("w1", (t(0), 1)) == [Recall(W1, [(t(0), 1)], kill=True)]
    mesh.lose_client()
    mesh.away("w1")
    assert Recall(W1, [(t(0), 1)], kill=True) in mesh.back("w1", (t(0), 1))


def test_an_attempt_goes_on_that_was_given_up_and_not_started_elsewhere(mesh: Mesh) -> None:
    mesh.connect("w1")
    mesh.submit()
    mesh.away("w1")
    mesh.until(GRACE)
    assert mesh.cluster.state_of(t(0)) is TaskState.READY

    assert mesh.back("w1", (t(0), 1)) == [WorkersChanged(1)]
    assert mesh.cluster.state_of(t(0)) is TaskState.ASSIGNED
    assert mesh.finish("w1", t(0)) == [Deliver(ME, W1, [(t(0), Status.OK, b"value", 1.0)])]


def test_an_attempt_that_was_given_up_and_started_elsewhere_is_ended(mesh: Mesh) -> None:
    mesh.connect("w1")
    mesh.submit()
    mesh.away("w1")
    mesh.until(GRACE)
    assert mesh.connect("w2") == [Assign(W2, PLAIN, [(t(0), 2)]), WorkersChanged(1)]

    assert mesh.back("w1", (t(0), 1)) == [Recall(W1, [(t(0), 1)], kill=True), WorkersChanged(2)]
    assert mesh.finish("w1", t(0), status=Status.CANCELLED) == []
    assert mesh.finish("w2", t(0), attempt=2) == [Deliver(ME, W2, [(t(0), Status.OK, b"value", 1.0)])]


def test_the_first_result_counts_also_if_it_is_of_an_attempt_that_was_given_up(mesh: Mesh) -> None:
    mesh.connect("w1")
    mesh.submit()
    mesh.away("w1")
    mesh.until(GRACE)
    mesh.connect("w2")

    assert mesh.back("w1", finished=[(t(0), 1)]) == [WorkersChanged(2)]
    assert mesh.finish("w1", t(0)) == [
        Recall(W2, [(t(0), 2)], kill=True),
        Deliver(ME, W1, [(t(0), Status.OK, b"value", 1.0)]),
    ]
    assert mesh.finish("w2", t(0), attempt=2) == []
    assert len(mesh.submit_ids([t(1), t(2)])) == 2  # One for each.


def test_a_lease_of_cards_goes_on_with_its_task(mesh: Mesh) -> None:
    card = DeviceFacts("cuda", 0, "RTX 3080", 10 << 30, 50.0, uuid="GPU-1")
    spec = PLAIN._replace(requirement=Requirement(device="gpu", gpus=1.0))
    mesh.connect("w1", devices=(card,))
    (assigned,) = mesh.submit(1, spec)
    assert assigned.cards == ("GPU-1",)
    mesh.away("w1")
    mesh.until(GRACE)

    mesh.back("w1", (t(0), 1), spec=spec, devices=(card,), cards=("GPU-1",))
    assert mesh.submit_ids([t(1)], spec) == []
    assert mesh.finish("w1", t(0))[-1] == Assign(W1, spec, [(t(1), 1)], ("GPU-1",), 0)


# --- a client's connection breaks


def test_a_client_that_is_back_finds_its_tasks_going_on(mesh: Mesh) -> None:
    mesh.connect("w1")
    mesh.submit(2)
    mesh.leave_for_a_moment()
    assert mesh.finish("w1", t(0)) == [
        Deliver(ME, W1, [(t(0), Status.OK, b"value", 1.0)]),
        Assign(W1, PLAIN, [(t(1), 1)]),
    ]
    mesh.resume()
    assert mesh.again([t(1)]) == []
    assert mesh.that_was_all() == []
    assert mesh.cluster.state_of(t(1)) is TaskState.ASSIGNED


def test_what_it_does_not_submit_again_is_dropped(mesh: Mesh) -> None:
    mesh.connect("w1")
    mesh.submit(3)
    mesh.leave_for_a_moment()
    mesh.resume()
    mesh.again([t(1)])
    assert mesh.that_was_all() == [Recall(W1, [(t(0), 1)], kill=True), Forget([t(0), t(2)])]
    assert [mesh.cluster.state_of(t(n)) for n in range(3)] == [TaskState.GONE, TaskState.READY, TaskState.GONE]


def test_what_never_arrived_is_new_also_if_it_may_run_once(mesh: Mesh) -> None:
    mesh.connect("w1")
    mesh.leave_for_a_moment()
    mesh.resume()
    assert mesh.again([t(0)], ONCE) == [Assign(W1, ONCE, [(t(0), 1)])]


def test_a_client_that_stays_away_is_gone_and_may_come_back_as_a_new_one(mesh: Mesh) -> None:
    mesh.connect("w1")
    mesh.submit(2)
    mesh.leave_for_a_moment()
    gone = mesh.until(CLIENT_GRACE_SECONDS)
    assert gone == [Recall(W1, [(t(0), 1)], kill=True), Forget([t(0), t(1)]), ClientGone(ME)]

    mesh.resume()
    assert [type(action) for action in mesh.again([t(0)], ONCE)] == [Fail]  # It may have been running.
    mesh.finish("w1", t(0), status=Status.CANCELLED)
    assert mesh.again([t(1)]) == [Assign(W1, PLAIN, [(t(1), 1)])]


# --- the coordinator is another one


def test_what_a_worker_runs_for_a_client_that_is_not_back_yet_goes_on(mesh: Mesh) -> None:
    mesh.restart(["w1"])
    assert mesh.back("w1", (t(0), 5)) == [WorkersChanged(1)]
    assert mesh.cluster.state_of(t(0)) is TaskState.ASSIGNED
    mesh.resume()
    assert mesh.again([t(0)]) == []
    assert mesh.that_was_all() == []
    assert mesh.finish("w1", t(0), attempt=5) == [Deliver(ME, W1, [(t(0), Status.OK, b"value", 1.0)])]


def test_a_result_that_comes_before_its_client_is_kept(mesh: Mesh) -> None:
    mesh.restart(["w1"])
    mesh.back("w1", finished=[(t(0), 1)])
    assert mesh.finish("w1", t(0)) == [Keep(ME, W1, (t(0), Status.OK, b"value", 1.0))]
    assert mesh.until(ABSENT_CLIENT_SECONDS) == [ClientGone(ME)]


def test_a_result_that_is_announced_belongs_to_the_task_that_its_client_submits_again(mesh: Mesh) -> None:
    mesh.restart(["w1"])
    mesh.back("w1", finished=[(t(0), 3)])
    mesh.resume()
    assert mesh.again([t(0)], ONCE) == []
    assert mesh.finish("w1", t(0), attempt=3) == [Deliver(ME, W1, [(t(0), Status.OK, b"value", 1.0)])]


def test_who_does_not_come_for_his_tasks_loses_them(mesh: Mesh) -> None:
    mesh.restart(["w1"])
    mesh.back("w1", (t(0, 7), 1))
    assert mesh.until(ABSENT_CLIENT_SECONDS) == [
        Recall(W1, [(t(0, 7), 1)], kill=True),
        Forget([t(0, 7)]),
        ClientGone(OTHER),
    ]


def test_a_task_without_arguments_here_is_dropped_when_its_worker_dies_and_run_again_when_its_client_comes(mesh: Mesh) -> None:
    mesh.restart(["w1"])
    mesh.back("w1", (t(0), 1))
    assert mesh.lose("w1") == [Retrying(t(0), 2, W1, Status.LOST), Forget([t(0)]), WorkersChanged(0)]
    mesh.connect("w2")
    mesh.resume()
    assert mesh.again([t(0)]) == [Assign(W2, PLAIN, [(t(0), 1)])]


def test_what_may_be_elsewhere_waits_until_all_are_back(mesh: Mesh) -> None:
    mesh.restart(["w1", "w2"])
    mesh.back("w1")
    mesh.resume()
    assert mesh.again([t(0)]) == []
    assert mesh.again([t(1)], ONCE) == []
    assert mesh.cluster.state_of(t(0)) is TaskState.RECOVERING
    assert mesh.that_was_all() == []

    assert mesh.back("w2", (t(1), 1), spec=ONCE) == [Assign(W1, PLAIN, [(t(0), 1)]), WorkersChanged(2)]
    assert mesh.cluster.state_of(t(1)) is TaskState.ASSIGNED


def test_who_is_not_back_in_time_is_not_waited_for_and_what_may_run_once_is_not_started(mesh: Mesh) -> None:
    mesh.restart(["w1", "w2"])
    mesh.back("w1")
    mesh.resume()
    mesh.again([t(0)])
    mesh.again([t(1)], ONCE)
    mesh.that_was_all()

    fail, assign = mesh.until(RECOVERY_SECONDS)
    assert type(fail) is Fail
    assert (fail.task_id, fail.status) == (t(1), Status.LOST)
    assert "at most once" in fail.details["reason"]
    assert assign == Assign(W1, PLAIN, [(t(0), 1000)])  # A number that nobody has used.


@pytest.mark.parametrize("workers", [["w1"], None])
def test_where_a_worker_died_or_nobody_knows_who_was_there_what_may_run_once_is_not_started(
    mesh: Mesh, workers: Optional[List[str]]
) -> None:
    mesh.restart(workers, has_lost=workers is not None)
    mesh.back("w1")
    mesh.resume()
    found = [*mesh.again([t(0)], ONCE), *mesh.until(RECOVERY_SECONDS)]
    assert [type(action) for action in found] == [Fail]


def test_where_all_are_back_and_nobody_has_it_it_was_never_started(mesh: Mesh) -> None:
    mesh.restart(["w1"])
    mesh.back("w1")
    mesh.resume()
    assert mesh.again([t(0)], ONCE) == [Assign(W1, ONCE, [(t(0), 1)])]


def test_what_is_held_back_can_be_cancelled_and_dropped(mesh: Mesh) -> None:
    mesh.restart(["w1"])
    mesh.resume()
    mesh.again([t(0), t(1), t(2)])
    assert [type(action) for action in mesh.cancel(t(0))] == [Fail]
    mesh.leave_for_a_moment()
    mesh.resume()
    mesh.again([t(1)])
    assert mesh.that_was_all() == [Forget([t(2)])]
    assert mesh.lose_client() == [Forget([t(1)])]
