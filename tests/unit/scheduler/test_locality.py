"""Tasks go where their large inputs are, when that is sooner."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import pytest

from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import actions as act
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.confinement import ANYWHERE
from gpumesh.scheduler.locality import PRIOR_BYTES_PER_SECOND, TRACKED_BYTES
from gpumesh.scheduler.nearest import OVERTAKEN_MOST
from gpumesh.scheduler.states import TaskState
from tests.unit.scheduler.conftest import ClusterUnderTest, task

GB = 10**9
MB = 10**6
TRAIN = TaskSpec(b"f" * 16, "train", idempotent=True)
OTHER = TaskSpec(b"o" * 16, "other", idempotent=True)
LONG = TaskSpec(b"l" * 16, "long", idempotent=True)

Input = Tuple[int, int, Tuple[str, ...]]


def submit(
    mesh: ClusterUnderTest, inputs: Dict[int, Sequence[Input]], spec: TaskSpec = TRAIN, *, client: int = 1
) -> List[act.Action]:
    """Tasks by number, and their inputs: object, size, workers that have a copy."""
    number = define(mesh, spec, client)
    told = [(task(index, client), given) for index, given in inputs.items() if given]
    return mesh.handle(ev.TasksSubmitted(ClientNumber(client), number, [task(index, client) for index in inputs], told))  # type: ignore[arg-type]


def define(mesh: ClusterUnderTest, spec: TaskSpec, client: int = 1) -> int:
    key: Any = (client, spec)
    if key not in mesh.specs:
        mesh.specs[key] = len(mesh.specs)
        mesh.handle(ev.SpecDefined(ClientNumber(client), mesh.specs[key], spec))
    return mesh.specs[key]


def depend(mesh: ClusterUnderTest, index: int, producers: Sequence[int], spec: TaskSpec = TRAIN, inputs: Any = ()) -> None:
    number = define(mesh, spec)
    event = ev.DependentSubmitted(ClientNumber(1), number, task(index), [task(each) for each in producers], inputs)
    assert mesh.handle(event) == []


def stored(mesh: ClusterUnderTest, worker: str, index: int, oid: int, nbytes: int, seconds: float = 1.0) -> Dict[int, str]:
    """A worker has ended a task with a large result, of which it keeps a copy; what is assigned then."""
    mesh.handle(ev.ResultStored(task(index), [(oid, nbytes, (WorkerId(worker),))]))
    return placed(mesh.finish(worker, task(index), seconds=seconds))


def placed(actions: List[act.Action]) -> Dict[int, str]:
    """Task number -> worker."""
    return {
        task_id & 0xFFFFFFFF: action.worker
        for action in actions
        if isinstance(action, act.Assign)
        for task_id, _ in action.tasks
    }


@pytest.fixture
def pair(mesh: ClusterUnderTest) -> ClusterUnderTest:
    """`near` and `far`, which is twice as fast, neither in the coordinator's memory; a task of `train` takes 1 s on `near`."""
    for spec, seconds in ((TRAIN, 1.0), (OTHER, 1.0), (LONG, 100.0)):
        mesh.learn(seconds, spec)
    mesh.connect("near", score=1.0)
    mesh.connect("far", score=2.0)
    return mesh


def test_a_task_goes_to_the_worker_that_has_its_input_though_another_is_faster(pair: ClusterUnderTest) -> None:
    assert placed(submit(pair, {0: [(1, 2 * GB, ("near",))]})) == {0: "near"}


def test_an_input_that_is_there_sooner_than_the_slower_worker_would_end_is_brought_to_the_faster(
    pair: ClusterUnderTest,
) -> None:
    assert placed(submit(pair, {0: [(1, 20 * MB, ("near",))]})) == {0: "far"}


def test_small_inputs_do_not_count(pair: ClusterUnderTest) -> None:
    assert placed(submit(pair, {0: [(1, TRACKED_BYTES - 1, ("near",))]})) == {0: "far"}
    assert not pair.cluster._locality


def test_together_inputs_may_be_large(pair: ClusterUnderTest) -> None:
    submit(pair, {0: [(1, TRACKED_BYTES // 2, ()), (2, TRACKED_BYTES // 2, ())]})
    assert pair.cluster._locality.concerns(pair.cluster._queues.groups[TRAIN.requirement, 0, (), ANYWHERE])


def test_a_task_waits_for_the_busy_worker_that_has_its_input_if_that_is_shorter_than_the_transfer(
    pair: ClusterUnderTest,
) -> None:
    assert placed(submit(pair, {0: [(1, 2 * GB, ("near",))]})) == {0: "near"}
    assert placed(submit(pair, {1: [(1, 2 * GB, ("near",))]})) == {}
    assert placed(pair.at(1.0).finish("near", task(0))) == {1: "near"}


def test_and_goes_elsewhere_if_it_is_longer(pair: ClusterUnderTest) -> None:
    assert placed(submit(pair, {0: [(1, 20 * GB, ("near",))]}, LONG)) == {0: "near"}
    assert placed(submit(pair, {1: [(2, 2 * GB, ("near",))]})) == {1: "far"}


def test_who_waits_for_a_worker_that_takes_far_longer_than_expected_goes_elsewhere_in_the_end(pair: ClusterUnderTest) -> None:
    submit(pair, {0: [(1, 2 * GB, ("near",))]})
    submit(pair, {1: [(1, 2 * GB, ("near",))]})
    assert placed(pair.until(15.0)) == {}
    assert placed(pair.until(60.0)).get(1) == "far"


def test_what_waits_for_a_busy_worker_stops_nobody_else(pair: ClusterUnderTest) -> None:
    submit(pair, {0: [(1, 2 * GB, ("near",))]})
    assert placed(submit(pair, {1: [(1, 2 * GB, ("near",))]})) == {}
    assert placed(submit(pair, {2: []}, OTHER)) == {2: "far"}
    assert placed(pair.finish("far", task(2), seconds=0.5)) == {}
    pair.join_client(2)
    assert placed(submit(pair, {0: []}, client=2)) == {0: "far"}
    assert pair.cluster.state_of(task(1)) is TaskState.READY


def test_a_worker_takes_first_what_it_has_the_inputs_of(pair: ClusterUnderTest) -> None:
    submit(pair, {0: [], 1: []})
    assert placed(submit(pair, {2: [(1, GB, ("far",))], 3: [(2, GB, ("far",))], 4: [(3, GB, ("near",))]})) == {}
    assert placed(pair.at(1.0).finish("near", task(0))) == {4: "near"}


def test_inputs_far_behind_in_the_queue_are_found_when_all_in_front_are_for_others(pair: ClusterUnderTest) -> None:
    submit(pair, {0: [], 1: []})
    submit(pair, {2 + index: [(index, 10 * GB, ("far",) if index < 80 else ("near",))] for index in range(81)})
    assert placed(pair.at(1.0).finish("near", task(0))) == {82: "near"}


def test_nobody_is_overtaken_for_ever(pair: ClusterUnderTest) -> None:
    submit(pair, {0: []}, LONG)
    assert placed_at(pair, 0) == "far"
    submit(pair, {1: []})
    submit(pair, {2: [(1, GB, ())]})
    submit(pair, {3 + index: [(2, GB, ("near",))] for index in range(3 * OVERTAKEN_MOST)})
    order = [1]
    while 2 not in order:
        [(index, worker)] = placed(pair.at(pair.now + 1.0).finish("near", task(order[-1]))).items()
        assert worker == "near"
        order.append(index)
    assert order == [1, *range(3, 3 + OVERTAKEN_MOST), 2]


def placed_at(mesh: ClusterUnderTest, index: int) -> str:
    where: Any = mesh.cluster._tasks[task(index)]
    return str(where.id)


def test_an_input_that_nobody_has_makes_no_difference(pair: ClusterUnderTest) -> None:
    assert placed(submit(pair, {0: [(1, 2 * GB, ())]})) == {0: "far"}


def test_the_second_task_with_an_input_follows_the_first(mesh: ClusterUnderTest) -> None:
    mesh.learn(1.0, TRAIN)
    for name in ("one", "two"):
        mesh.connect(name, slots=2)
    [first] = placed(submit(mesh, {0: [(1, 2 * GB, ())]})).values()
    assert placed(submit(mesh, {1: [(1, 2 * GB, ())], 2: [(2, 2 * GB, ())]}))[1] == first


def test_what_shares_the_coordinators_memory_has_everything(pair: ClusterUnderTest) -> None:
    facts = WorkerFacts(slots=1, hostname="here", cores=1, score=0.5)
    pair.handle(ev.WorkerConnected(WorkerId("here"), facts, True))
    assert placed(submit(pair, {0: [(1, 2 * GB, ())]})) == {0: "here"}


def test_a_wrong_guess_about_memory_is_corrected(pair: ClusterUnderTest) -> None:
    pair.handle(ev.StoreShared(WorkerId("far"), True))
    assert placed(submit(pair, {0: [(1, 2 * GB, ("near",))]})) == {0: "far"}
    pair.finish("far", task(0))
    pair.handle(ev.StoreShared(WorkerId("far"), False))
    assert placed(submit(pair, {1: [(1, 2 * GB, ("near",))]})) == {1: "near"}


def test_where_everybody_has_everything_nothing_is_asked(mesh: ClusterUnderTest) -> None:
    mesh.handle(ev.WorkerConnected(WorkerId("here"), WorkerFacts(slots=1, hostname="here", cores=1), True))
    submit(mesh, {0: [(1, 2 * GB, ())]})
    assert mesh.cluster._locality
    assert not mesh.cluster._locality.matters


def test_a_measured_connection_counts(pair: ClusterUnderTest) -> None:
    worker = pair.cluster._workers[WorkerId("far")]
    assert pair.cluster._locality.rate(worker) == pytest.approx(PRIOR_BYTES_PER_SECOND)
    for _ in range(10):
        pair.handle(ev.BytesMoved(WorkerId("far"), GB, 0.1))
    assert pair.cluster._locality.rate(worker) == pytest.approx(1e10, rel=0.1)
    assert placed(submit(pair, {0: [(1, 2 * GB, ("near",))]})) == {0: "far"}


def test_copies_come_and_go(pair: ClusterUnderTest) -> None:
    submit(pair, {0: [], 1: []})
    submit(pair, {2: [(1, 2 * GB, ())]})
    pair.handle(ev.CopyMade(WorkerId("near"), 1))
    assert placed(pair.finish("far", task(0), task(1), seconds=0.5)) == {}
    pair.handle(ev.CopiesGone(WorkerId("near"), [1]))
    assert placed(pair.until(2.0)) == {2: "far"}


def test_a_lost_worker_has_nothing(pair: ClusterUnderTest) -> None:
    submit(pair, {0: [], 1: [], 2: [(1, 2 * GB, ("near",))]})
    assert placed(pair.finish("far", task(0), seconds=0.5)) in ({}, {1: "far"})
    assert 2 in placed(pair.lose("near")) or pair.cluster.state_of(task(2)) is not TaskState.GONE
    assert placed(pair.until(10.0)).keys() <= {0, 1, 2}


def test_a_chain_stays_on_the_worker_that_has_the_intermediate_value(pair: ClusterUnderTest) -> None:
    submit(pair, {0: []}, OTHER)  # Keeps the faster busy.
    submit(pair, {1: []})
    assert placed_at(pair, 1) == "near"
    depend(pair, 2, [1])
    depend(pair, 3, [2])
    submit(pair, {4: []})  # Has waited longer than what follows.
    assert placed(pair.finish("far", task(0), seconds=0.5)) == {4: "far"}
    pair.finish("far", task(4), seconds=0.5)
    assert stored(pair, "near", 1, 11, 500 * MB) == {2: "near"}
    assert stored(pair, "near", 2, 12, 500 * MB) == {3: "near"}
    pair.finish("near", task(3))
    assert not pair.cluster._locality


def test_a_chain_leaves_when_its_value_is_small(pair: ClusterUnderTest) -> None:
    submit(pair, {0: []}, OTHER)
    submit(pair, {1: []})
    assert placed_at(pair, 1) == "near"
    depend(pair, 2, [1])
    pair.finish("far", task(0), seconds=0.5)
    stored(pair, "near", 1, 11, MB // 10)
    assert not pair.cluster._locality


def test_results_of_several_tasks_count_together(pair: ClusterUnderTest) -> None:
    submit(pair, {0: [], 1: []})
    depend(pair, 2, [0, 1], inputs=[(9, GB, (WorkerId("near"),))])
    where = {placed_at(pair, 0): 0, placed_at(pair, 1): 1}
    assert stored(pair, "far", where["far"], 10, 100 * MB, seconds=0.5) == {}
    assert stored(pair, "near", where["near"], 11, 100 * MB) == {2: "near"}


def test_failed_cancelled_and_abandoned_tasks_leave_nothing_behind(pair: ClusterUnderTest) -> None:
    submit(pair, {index: [(index, GB, ("near",))] for index in range(4)})
    depend(pair, 5, [0], inputs=[(7, GB, ())])
    depend(pair, 6, [1], inputs=[(8, GB, ())])
    pair.cancel(task(3), task(6))
    pair.finish(placed_at(pair, 0), task(0), status=Status.RAISED)
    assert task(5) not in pair.cluster._locality
    pair.lose_client()
    assert not pair.cluster._locality


def test_the_tail_rule_counts_the_time_for_inputs(mesh: ClusterUnderTest) -> None:
    once = TaskSpec(b"n" * 16, "once")  # Must not run twice.
    mesh.learn(10.0, once)
    mesh.connect("near", slots=2, score=2.0)
    mesh.connect("far", slots=1, score=0.9)
    inputs: List[Input] = [(1, 4 * GB, ("near",))]
    submit(mesh, {0: inputs, 1: inputs}, once)
    assert placed_at(mesh, 0) == placed_at(mesh, 1) == "near"
    assert placed(submit(mesh, {2: inputs}, once)) == {}


def test_a_wait_for_inputs_is_no_round_trip(pair: ClusterUnderTest) -> None:
    worker = pair.cluster._workers[WorkerId("near")]
    before = worker.trips
    submit(pair, {0: [(1, 2 * GB, ("near",))]})
    pair.at(30.0).finish("near", task(0))
    assert worker.trips == before


def test_a_task_that_waits_where_its_input_is_is_not_asked_back_before_another_could_have_fetched_it(
    pair: ClusterUnderTest,
) -> None:
    submit(pair, {9: [(1, 2 * GB, ("near",))]})
    pair.finish("near", task(9))
    pair.cluster._workers[WorkerId("near")].round_trip = 1.0  # So one more waits there.
    pair.submit(1, LONG)
    assert placed_at(pair, 0) == "far"
    submit(pair, {1: [(1, 2 * GB, ("near",))], 2: [(1, 2 * GB, ("near",))]})
    assert placed_at(pair, 1) == placed_at(pair, 2) == "near"
    pair.at(0.1).finish("far", task(0))
    assert recalled(pair.until(19.0)) == []
    assert recalled(pair.until(25.0)) == [2]


def recalled(actions: List[act.Action]) -> List[int]:
    return [task_id & 0xFFFFFFFF for action in actions if isinstance(action, act.Recall) for task_id, _ in action.tasks]


def test_nobody_repeats_a_task_whose_inputs_would_come_later_than_its_end(mesh: ClusterUnderTest) -> None:
    mesh.learn(10.0, TRAIN)
    mesh.connect("near", score=1.0)
    submit(mesh, {0: [(1, 2 * GB, ("near",))]})
    mesh.at(5.0).connect("far", score=8.0)
    assert placed(mesh.until(9.0)) == {}
    assert placed(mesh.until(60.0)) == {0: "far"}  # It takes far longer than expected.


def test_at_the_end_who_has_the_input_is_the_fastest(pair: ClusterUnderTest) -> None:
    once = TaskSpec(b"f" * 16, "train")  # Must not run twice: the tail rule gives the last one to the faster.
    assert placed(submit(pair, {0: []}, once)) == {0: "far"}
    pair.finish("far", task(0), seconds=0.5)
    assert placed(submit(pair, {1: [(1, 2 * GB, ("near",))]}, once)) == {1: "near"}
    pair.finish("near", task(1))
    assert placed(submit(pair, {2: [(2, 20 * MB, ("near",))]}, once)) == {2: "far"}


def test_a_wait_for_a_copy_ends_when_a_transfer_would_have(pair: ClusterUnderTest) -> None:
    submit(pair, {0: []}, LONG)
    assert placed_at(pair, 0) == "far"
    assert placed(submit(pair, {1: [(1, 12 * GB, ("far",))]})) == {}  # 50 s there, 120 s to bring it here.
    assert placed(pair.until(119.0)) == {}
    assert placed(pair.until(122.0)) == {1: "near"}
