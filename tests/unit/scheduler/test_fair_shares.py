"""Who is next where several clients, priorities or costs want the same slots."""

from __future__ import annotations

from typing import Callable, Dict, List

import pytest

from gpumesh.config import AGEING_SECONDS
from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import Requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler.actions import Assign
from gpumesh.scheduler.queues import Group, Queues
from gpumesh.scheduler.throughput import Function
from tests.support.scheduler_parts import make_spec, make_worker
from tests.unit.scheduler.conftest import PLAIN, ClusterUnderTest, task

OTHER = TaskSpec(b"g" * 16, "other")
A, B = 1, 2


def client_of(task_id: int) -> int:
    return task_id >> 32


def work_off(mesh: ClusterUnderTest, count: int, seconds: Callable[[int], float] = lambda task_id: 1.0) -> List[int]:
    """Let worker "w1" end its oldest task `count` times; what it ended, in order."""
    ended: List[int] = []
    while len(ended) < count:
        worker = mesh.cluster._workers[WorkerId("w1")]
        task_id, batch = next(iter(worker.assigned.items()))
        length = seconds(task_id)
        mesh.at(mesh.now + length / worker.slots).finish("w1", task_id, seconds=length, attempt=batch.attempt)
        ended.append(task_id)
    return ended


def shares(task_ids: List[int]) -> Dict[int, int]:
    found: Dict[int, int] = {}
    for task_id in task_ids:
        found[client_of(task_id)] = found.get(client_of(task_id), 0) + 1
    return found


def served(mesh: ClusterUnderTest, client: int) -> float:
    return mesh.cluster._clients[ClientNumber(client)].served


# --- clients


def test_two_clients_with_like_tasks_get_the_same(mesh: ClusterUnderTest) -> None:
    mesh.join_client(B)
    mesh.connect("w1")
    mesh.submit(100, client=A)
    mesh.submit(100, client=B)
    order = [client_of(task_id) for task_id in work_off(mesh, 20)]
    assert order == [A, B] * 10


def test_who_has_long_tasks_gets_fewer_of_them_and_as_many_seconds(mesh: ClusterUnderTest) -> None:
    mesh.join_client(B)
    mesh.connect("w1")
    mesh.submit(20, client=A)
    mesh.submit(70, OTHER, client=B)
    ended = work_off(mesh, 66, lambda task_id: 10.0 if client_of(task_id) == A else 1.0)
    assert shares(ended) == {A: pytest.approx(6, abs=1), B: pytest.approx(60, abs=1)}
    assert served(mesh, A) == pytest.approx(served(mesh, B), abs=11.0)


def test_who_asks_for_more_slots_gets_as_many_slot_seconds(mesh: ClusterUnderTest) -> None:
    wide = OTHER._replace(requirement=Requirement(cores=4))
    mesh.join_client(B)
    mesh.connect("w1", slots=4)
    mesh.submit(60, client=A)
    mesh.submit(20, wide, client=B)
    ended = work_off(mesh, 50)
    assert shares(ended) == {A: pytest.approx(40, abs=3), B: pytest.approx(10, abs=3)}


def test_who_comes_late_catches_up_with_what_is_under_way_but_not_with_what_ever_was(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", slots=4)
    mesh.submit(80, client=A)
    work_off(mesh, 40)
    mesh.join_client(B)
    mesh.submit(40, client=B)
    four = work_off(mesh, 4)
    assert shares(four) == {A: 4}, "they were running"
    assert shares(work_off(mesh, 4)) == {B: 4}, "as many as the other one had under way"
    assert shares(work_off(mesh, 30)) == {A: pytest.approx(15, abs=2), B: pytest.approx(15, abs=2)}


def test_five_tasks_behind_many_are_through_within_three_lengths(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", slots=4)
    mesh.submit(100, client=A)
    work_off(mesh, 40)
    mesh.join_client(B)
    mesh.submit(5, client=B)
    assert shares(work_off(mesh, 12))[B] == 5


def test_who_was_alone_is_not_made_to_wait_for_it(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1")
    mesh.submit(30, client=A)
    work_off(mesh, 30)
    mesh.join_client(B)
    mesh.submit(30, client=B)
    mesh.submit(30, client=A)
    assert shares(work_off(mesh, 20)) == {A: pytest.approx(10, abs=1), B: pytest.approx(10, abs=1)}


def test_who_had_nothing_to_do_for_a_while_has_saved_nothing_up(mesh: ClusterUnderTest) -> None:
    mesh.join_client(B)
    mesh.connect("w1")
    mesh.submit(2, client=B)
    mesh.submit(80, client=A)
    work_off(mesh, 40)
    mesh.submit(40, client=B)
    assert shares(work_off(mesh, 20)) == {A: pytest.approx(10, abs=1), B: pytest.approx(10, abs=1)}


@pytest.mark.parametrize("status", [Status.NOT_RUN, Status.CRASHED, Status.RETRYABLE, Status.HANDED_BACK])
def test_what_did_not_run_to_its_end_is_not_charged(mesh: ClusterUnderTest, status: Status) -> None:
    mesh.connect("w1")
    mesh.submit(1, client=A)
    before = served(mesh, A)
    mesh.finish("w1", task(0), status=status)
    assert served(mesh, A) == before, "only the attempt that is under way counts"


def test_what_was_charged_is_corrected_by_what_it_took(mesh: ClusterUnderTest) -> None:
    mesh.connect("w1", slots=2)
    mesh.submit(1, PLAIN._replace(requirement=Requirement(cores=2)), client=A)
    assert served(mesh, A) == 2.0, "two slots, a second each as long as nothing is known"
    mesh.finish("w1", task(0), seconds=30.0)
    assert served(mesh, A) == 60.0
    assert mesh.cluster._clients[ClientNumber(A)].holding == 0.0


def test_one_batch_does_not_take_all_the_room_where_another_client_waits(mesh: ClusterUnderTest) -> None:
    mesh.join_client(B)
    mesh.submit(100, client=A)
    mesh.submit(100, client=B)
    actions = [action for action in mesh.connect("w1", slots=8) if isinstance(action, Assign)]
    assert shares([task_id for action in actions for task_id, _ in action.tasks]) == {A: 4, B: 4}


# --- priorities


def urgent_ones(mesh: ClusterUnderTest, priority: int, horizon: float) -> float:
    """Tasks of this priority, 10 s each, never end; when the one of priority 0 that came first has started, at last."""
    urgent = PLAIN._replace(priority=priority)
    mesh.connect("w1")
    mesh.submit(2, urgent)
    mesh.submit_ids([task(7777)], OTHER)
    while mesh.now < horizon:
        [(task_id, batch)] = mesh.cluster._workers[WorkerId("w1")].assigned.items()
        if task_id == task(7777):
            return mesh.now
        mesh.submit(1, urgent)
        mesh.at(mesh.now + 10.0).finish("w1", task_id, seconds=10.0, attempt=batch.attempt)
    return horizon


@pytest.mark.parametrize("priority", [1, 2, 5])
def test_a_low_priority_gets_through_after_as_many_times_the_age_as_it_is_lower(mesh: ClusterUnderTest, priority: int) -> None:
    started = urgent_ones(mesh, priority, 1000.0)
    assert priority * AGEING_SECONDS <= started <= priority * AGEING_SECONDS + 10.0


def test_age_counts_from_the_last_turn() -> None:
    queues = Queues()
    spec = make_spec(Function(b"f" * 16))
    low, high = Group(Requirement(cores=1), 0), Group(Requirement(cores=1), 1)
    for group in (high, low):
        group.push(spec, [1, 2], 0.0)
        queues.note(group)
    now = AGEING_SECONDS * 1.5
    queues.served(high, now)
    assert queues.ready(now) == [low, high]
    queues.served(low, now)
    assert queues.ready(now + AGEING_SECONDS / 2) == [high, low]


def test_age_counts_from_when_something_waits_and_not_from_when_the_queue_was_made() -> None:
    queues = Queues()
    spec = make_spec(Function(b"f" * 16))
    low, high = Group(Requirement(cores=1), 0), Group(Requirement(cores=1), 1)
    now = 100 * AGEING_SECONDS
    for group in (low, high):
        group.push(spec, [1], now)
        queues.note(group)
    assert queues.ready(now + 1.0) == [high, low]


# --- costs


def test_what_costs_more_goes_first_in_its_lane_and_equals_keep_their_order() -> None:
    group = Group(Requirement(), 0)
    group.workers[make_worker()] = 1
    plain = make_spec(Function(b"f" * 16))

    def of_cost(cost: float) -> object:
        spec = make_spec(plain.function, cost=cost)
        spec.client = plain.client
        return spec

    one, nine, five = of_cost(1.0), of_cost(9.0), of_cost(5.0)
    for spec, ids in ((one, [1, 2]), (nine, [3]), (five, [4]), (nine, [5, 6]), (one, [7])):
        group.push(spec, ids, 0.0)  # type: ignore[arg-type]
    lane = group.next_lane()
    assert list(lane.living()) == [3, 5, 6, 4, 1, 2, 7]
    assert group.count == lane.count == 7


def test_the_longest_of_a_map_start_first(mesh: ClusterUnderTest) -> None:
    for index, cost in enumerate([1.0, 8.0, 3.0, 8.0]):
        mesh.submit_ids([task(index)], PLAIN._replace(cost=cost))
    mesh.connect("w1")
    assert work_off(mesh, 4) == [task(1), task(3), task(2), task(0)]


def test_costs_of_one_client_do_not_push_back_another(mesh: ClusterUnderTest) -> None:
    mesh.join_client(B)
    mesh.submit(4, PLAIN._replace(cost=1.0), client=A)
    mesh.submit(4, PLAIN._replace(cost=100.0), client=B)
    mesh.connect("w1")
    assert [client_of(task_id) for task_id in work_off(mesh, 8)].count(A) == 4
    assert mesh.cluster.pending_count() == 0
