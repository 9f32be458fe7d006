"""Calls with large arguments, references and futures, against a coordinator in miniature."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from gpumesh.client.futures import MeshFuture
from gpumesh.client.inputs import MAX_INLINE_INPUTS_BYTES, Call, pack_call
from gpumesh.client.session import Session
from gpumesh.errors import MeshClosedError, MeshUnavailableError, ObjectLostError, ObjectStoreFullError, TaskCancelledError
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle, Later, OutOfBand, Stored
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import PutObject, ReleaseRefs, SubmitTasks
from gpumesh.serialization.exceptions import dump_exception
from gpumesh.serialization.late import complete_call
from gpumesh.serialization.refs import ObjectRef
from gpumesh.serialization.values import dumps, loads, loads_call
from tests.unit.client.fake_mesh import Exported, FakeMesh
from tests.unit.client.fake_session import until
from tests.unit.client.test_objects import ELSEWHERE, kinds, taken
from tests.unit.client.test_session import SPEC, ManySink, connect, start

np = pytest.importorskip("numpy")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[FakeMesh]:
    """On this host; the test sends the results."""
    with FakeMesh(folder=tmp_path, answers=False) as fake:
        yield fake


@pytest.fixture
def session(mesh: FakeMesh) -> Iterator[Session]:
    opened = connect(mesh)
    yield opened
    opened.close()


def call(*args: Any, **kwargs: Any) -> Any:
    return pack_call(args, kwargs, what="work", function=None)


def arrived(mesh: FakeMesh, future: MeshFuture, count: int = 1) -> Any:
    """The payload of a task once the coordinator has it, for the `count`-th time."""
    mesh.until(lambda: sum(future.task_id in message.task_ids for message in kinds(mesh, SubmitTasks)) >= count)
    return mesh.tasks[future.task_id]


# --- what a call becomes


@pytest.mark.parametrize(
    "arguments",
    [((), {}), ((1, "a"), {}), ((), {"x": [1, 2]}), ((b"x" * 60_000,), {}), ((np.arange(10),), {"k": None})],
    ids=["none", "positional", "keyword", "nearly large", "array"],
)
def test_small_calls_are_bytes(arguments: Any) -> None:
    args, kwargs = arguments
    packed = call(*args, **kwargs)
    assert type(packed) is bytes
    assert repr(loads_call(packed)) == repr((args, kwargs))


def test_large_arguments_become_an_object(mesh: FakeMesh, session: Session) -> None:
    array = np.arange(100_000)
    future = start(session, payload=call(array, scale=2))
    payload = arrived(mesh, future)

    (put,) = kinds(mesh, PutObject)
    assert payload == Stored(put.oid, put.nbytes)
    (found,), kwargs = loads(OutOfBand(mesh.parts_of(put.oid)))
    assert np.array_equal(found, array)
    assert kwargs == {"scale": 2}


def test_large_arguments_are_taken_as_they_are_at_the_call(mesh: FakeMesh, session: Session) -> None:
    array = np.zeros(100_000)
    future = start(session, payload=call(array))
    array += 1
    payload = arrived(mesh, future)
    assert loads(OutOfBand(mesh.parts_of(payload.oid)))[0][0].sum() == 0


def test_many_small_parts_are_large_together(mesh: FakeMesh, session: Session) -> None:
    future = start(session, payload=call(list(range(50_000))))
    assert type(arrived(mesh, future)) is Stored


def test_the_arguments_are_released_when_the_task_has_ended(mesh: FakeMesh, session: Session) -> None:
    future = start(session, payload=call(np.zeros(100_000)))
    payload = arrived(mesh, future)
    assert session.query("anything", timeout=10)
    assert kinds(mesh, ReleaseRefs) == []
    mesh.finish(future.task_id, 5)
    assert future.result(10) == 5
    mesh.until(lambda: kinds(mesh, ReleaseRefs) == [ReleaseRefs([(payload.oid, 1)])])


def test_a_reference_as_argument_is_an_input(mesh: FakeMesh, session: Session) -> None:
    space = session.objects()
    ref = space.put(np.arange(100_000))
    future = start(session, payload=call(1, ref, other=ref))
    value, inputs, refs = arrived(mesh, future)
    stored = Stored(ref.oid, ref.nbytes)
    assert inputs == ((1, stored), ("other", stored))
    assert refs == ()
    assert complete_call(value, [(1, dumps("a")), ("other", dumps("b"))]) == ((1, "a"), {"other": "b"})


def test_references_inside_arguments_are_mentioned(mesh: FakeMesh, session: Session) -> None:
    ref = session.objects().put(np.arange(100_000))
    future = start(session, payload=call([ref], {"again": ref}))
    value, inputs, refs = arrived(mesh, future)
    assert (inputs, refs) == ((), (ref.oid,))
    assert loads_call(value)[0] == ([ref], {"again": ref})


def test_references_inside_large_arguments_are_mentioned_by_the_object(mesh: FakeMesh, session: Session) -> None:
    ref = session.objects().put(np.arange(100_000))
    future = start(session, payload=call([ref, np.zeros(100_000)]))
    payload = arrived(mesh, future)
    assert type(payload) is Stored
    assert mesh.refs[payload.oid] == [ref.oid]


def test_a_pending_task_keeps_its_references(mesh: FakeMesh, session: Session) -> None:
    ref = session.objects().put(np.arange(100_000))
    oid = ref.oid
    future = start(session, payload=call(ref))
    arrived(mesh, future)
    del ref
    assert session.query("anything", timeout=10)
    assert kinds(mesh, ReleaseRefs) == []
    mesh.finish(future.task_id, 1)
    mesh.until(lambda: kinds(mesh, ReleaseRefs) == [ReleaseRefs([(oid, 1)])])


def test_a_reference_of_another_mesh_is_moved(mesh: FakeMesh, session: Session) -> None:
    with FakeMesh() as other:
        elsewhere = connect(other)
        ref = elsewhere.objects().put(np.arange(100_000))
        future = start(session, payload=call(ref))
        ((_, stored),) = arrived(mesh, future)[1]
        assert stored.oid != ref.oid
        assert loads(OutOfBand(mesh.parts_of(stored.oid)))[7] == 7
        elsewhere.close()


def test_a_full_store_refuses_the_call(mesh: FakeMesh, session: Session) -> None:
    mesh.full = "nothing left"
    with pytest.raises(ObjectStoreFullError, match="nothing left"):
        start(session, payload=call(np.zeros(100_000)))
    assert start(session, payload=call(1)).task_id != 0


def test_a_full_store_is_the_error_of_that_item_alone(mesh: FakeMesh, session: Session) -> None:
    sink = ManySink()
    mesh.full = "nothing left"
    first = session.submit_many(session.define(Exported, SPEC), [call(1), call(np.zeros(100_000)), call(3)], sink)
    mesh.until(lambda: {first, first + 2} <= set(mesh.tasks))
    mesh.finish(first, 1)
    mesh.finish(first + 2, 3)
    assert session.drive_until(lambda: len(sink.ended) == 3, sink.condition, 10)
    ((_, status, error, *_),) = [told for told in sink.ended if told[0] == first + 1]
    assert status == Status.REFUSED
    assert isinstance(error, ObjectStoreFullError)
    assert first + 1 not in mesh.tasks


# --- futures as arguments


def test_a_future_that_is_pending_is_named(mesh: FakeMesh, session: Session) -> None:
    first = start(session)
    second = start(session, payload=call(first, 2))
    value, inputs, _ = arrived(mesh, second)
    assert inputs == ((0, Later(first.task_id)),)
    assert complete_call(value, [(0, dumps("there"))]) == (("there", 2), {})


def test_what_it_waits_for_arrives_before_it(mesh: FakeMesh, session: Session) -> None:
    """Tasks of two functions lie in two lanes; the second of one is not to overtake the first of the other."""
    other = TaskSpec(b"d" * 16, "other")
    start(session)
    with session._channel._lock:  # type: ignore[union-attr]
        pass
    for _ in range(20):
        start(session)
        producer = start(session, spec=other)
        start(session, payload=call(producer))
    session.flush()
    mesh.until(lambda: len(mesh.tasks) == 61)
    seen: List[int] = []
    for message in kinds(mesh, SubmitTasks):
        for task_id, payload in zip(message.task_ids, message.payloads):
            if isinstance(payload, tuple):
                assert payload[1][0][1].task_id in seen
            seen.append(task_id)


def test_a_future_that_is_done_gives_its_value(mesh: FakeMesh, session: Session) -> None:
    first = start(session)
    taken(mesh, first)
    mesh.finish(first.task_id, payload=dumps("value"))
    assert until(first.done)
    second = start(session, payload=call(first))
    assert arrived(mesh, second)[1] == ((0, dumps("value")),)
    assert first.result() == "value"
    third = start(session, payload=call(first))
    assert arrived(mesh, third)[1] == ((0, dumps("value")),)


def test_a_large_result_is_passed_on_by_name(mesh: FakeMesh, session: Session) -> None:
    nbytes = mesh.keep(ELSEWHERE, dumps(np.arange(100_000)))
    first = start(session)
    taken(mesh, first)
    mesh.finish(first.task_id, payload=Stored(ELSEWHERE, nbytes))
    assert until(first.done)
    second = start(session, payload=call(first))
    assert arrived(mesh, second)[1] == ((0, Stored(ELSEWHERE, nbytes)),)
    del first
    assert session.query("anything", timeout=10)
    assert kinds(mesh, ReleaseRefs) == []  # The call keeps it.


def test_a_large_result_that_was_loaded_is_stored_again(mesh: FakeMesh, session: Session) -> None:
    first = start(session)
    taken(mesh, first)
    mesh.finish(first.task_id, payload=Stored(ELSEWHERE, mesh.keep(ELSEWHERE, dumps(np.arange(100_000)))))
    first.result(10)[0] = 9
    second = start(session, payload=call(first))
    ((_, stored),) = arrived(mesh, second)[1]
    assert loads(OutOfBand(mesh.parts_of(stored.oid)))[0] == 9


def test_a_result_with_references_mentions_them(mesh: FakeMesh, session: Session) -> None:
    first = start(session)
    taken(mesh, first)
    mesh.finish(first.task_id, payload=Bundle(dumps([ObjectRef(ELSEWHERE, 1)]), (), (ELSEWHERE,)))
    assert until(first.done)
    second = start(session, payload=call(first))
    assert arrived(mesh, second)[1:] == (((0, dumps([ObjectRef(ELSEWHERE, 1)])),), (ELSEWHERE,))


def test_many_inline_results_go_through_the_store(mesh: FakeMesh, session: Session) -> None:
    mesh.on_submit = lambda task_id, _: (task_id, 0, dumps(b"x" * 60_000), 0.1)
    firsts = [start(session) for _ in range(20)]
    assert all(until(first.done) for first in firsts)
    mesh.on_submit = None
    last = start(session, payload=call(*firsts))
    inputs = arrived(mesh, last)[1]
    assert sum(len(value) for _, value in inputs if type(value) is bytes) <= MAX_INLINE_INPUTS_BYTES
    assert sum(type(value) is Stored for _, value in inputs) >= 15


def test_a_future_that_has_failed_fails_the_call(mesh: FakeMesh, session: Session) -> None:
    first, cancelled = start(session), start(session)
    mesh.until(lambda: len(mesh.tasks) == 2)
    mesh.finish(first.task_id, status=Status.RAISED, payload=dump_exception(KeyError("no")))
    assert until(first.done)
    cancelled.cancel()
    second = start(session, payload=call(first))
    third = start(session, payload=call(1, x=cancelled))
    with pytest.raises(KeyError, match="no"):
        second.result(10)
    with pytest.raises(TaskCancelledError):
        third.result(10)
    assert not {second.task_id, third.task_id} & set(mesh.tasks)


def test_an_input_that_failed_at_the_coordinator_is_that_error(mesh: FakeMesh, session: Session) -> None:
    first = start(session)
    second = start(session, payload=call(first))
    third = start(session, payload=call(second))
    arrived(mesh, third)
    # In this order they tell nothing until the first is known.
    for task, culprit in ((third, second), (second, first)):
        mesh.finish(task.task_id, status=Status.INPUT_FAILED, payload={"input": culprit.task_id}, worker="")
    assert session.query("anything", timeout=10)
    assert not second.done()
    mesh.finish(first.task_id, status=Status.RAISED, payload=dump_exception(KeyError("no")))
    for future in (first, second, third):
        with pytest.raises(KeyError, match="no"):
            future.result(10)


def test_an_input_that_the_coordinator_has_forgotten_is_sent(mesh: FakeMesh, session: Session) -> None:
    first = start(session)
    second = start(session, payload=call(first))
    arrived(mesh, second)
    mesh.finish(first.task_id, payload=dumps("value"))
    mesh.finish(second.task_id, status=Status.INPUT_MISSING, payload={"input": first.task_id}, worker="")
    assert arrived(mesh, second, 2)[1] == ((0, dumps("value")),)
    mesh.finish(second.task_id, "end")
    assert second.result(10) == "end"


def test_one_that_is_told_before_its_input_waits_for_it(mesh: FakeMesh, session: Session) -> None:
    first = start(session)
    second = start(session, payload=call(first))
    arrived(mesh, second)
    mesh.finish(second.task_id, status=Status.INPUT_MISSING, payload={"input": first.task_id}, worker="")
    assert session.query("anything", timeout=10)
    assert sum(second.task_id in message.task_ids for message in kinds(mesh, SubmitTasks)) == 1
    mesh.finish(first.task_id, payload=dumps("value"))
    assert arrived(mesh, second, 2)[1] == ((0, dumps("value")),)


def test_those_behind_one_that_is_sent_again_follow_it_at_once(mesh: FakeMesh, session: Session) -> None:
    chain = [start(session)]
    for _ in range(5):
        chain.append(start(session, payload=call(chain[-1])))
    arrived(mesh, chain[-1])
    mesh.finish(chain[0].task_id, payload=dumps(0))
    for before, after in zip(chain, chain[1:]):
        mesh.finish(after.task_id, status=Status.INPUT_MISSING, payload={"input": before.task_id}, worker="")
    assert arrived(mesh, chain[1], 2)[1] == ((0, dumps(0)),)
    for before, after in zip(chain[1:], chain[2:]):
        assert arrived(mesh, after, 2)[1] == ((0, Later(before.task_id)),)


def test_a_future_of_another_mesh_is_waited_for_here(mesh: FakeMesh, session: Session) -> None:
    with FakeMesh(answers=False) as other:
        elsewhere = connect(other)
        first, failing = start(elsewhere), start(elsewhere)
        second = start(session, payload=call(first, np.zeros(100_000)))
        third = start(session, payload=call(failing))
        assert session.query("anything", timeout=10)
        assert mesh.tasks == {}
        assert not second.done()

        other.until(lambda: len(other.tasks) == 2)
        other.finish(first.task_id, payload=Stored(ELSEWHERE, other.keep(ELSEWHERE, dumps(np.arange(100_000)))))
        other.finish(failing.task_id, status=Status.RAISED, payload=dump_exception(KeyError("no")))
        call_, ((place, stored),), _ = arrived(mesh, second)
        assert type(call_) is Stored
        assert (place, loads(OutOfBand(mesh.parts_of(stored.oid)))[5]) == (0, 5)
        with pytest.raises(KeyError):
            third.result(10)
        elsewhere.close()


def test_a_call_that_is_held_back_can_be_cancelled(mesh: FakeMesh, session: Session) -> None:
    with FakeMesh(answers=False) as other:
        elsewhere = connect(other)
        first = start(elsewhere)
        sink = ManySink()
        task_id = session.submit(session.define(Exported, SPEC), call(first), sink)
        session.cancel([task_id])
        assert session.drive_until(lambda: bool(sink.ended), sink.condition, 10)
        assert sink.ended[0][:2] == (task_id, Status.CANCELLED)
        elsewhere.close()


def test_one_that_is_cancelled_is_not_sent_again(mesh: FakeMesh, session: Session) -> None:
    first = start(session)
    sink = ManySink()
    task_id = session.submit(session.define(Exported, SPEC), call(first), sink)
    mesh.until(lambda: task_id in mesh.tasks)
    session.cancel([task_id])
    mesh.until(lambda: mesh.cancelled == [task_id])
    mesh.finish(task_id, status=Status.INPUT_MISSING, payload={"input": first.task_id}, worker="")
    assert session.drive_until(lambda: bool(sink.ended), sink.condition, 10)
    assert sink.ended[0][:2] == (task_id, Status.CANCELLED)


def test_calls_end_with_the_session(mesh: FakeMesh, session: Session) -> None:
    with FakeMesh(answers=False) as other:
        elsewhere = connect(other)
        held = start(session, payload=call(start(elsewhere)))
        waiting = start(session, payload=call(start(session)))
        session.close()
        for future in (held, waiting):
            with pytest.raises(MeshClosedError):
                future.result(10)
        elsewhere.close()


# --- a lost coordinator


def test_after_a_reconnect_everything_is_stored_and_sent_again(mesh: FakeMesh) -> None:
    session = connect(mesh, reconnect_timeout=30.0)
    first = start(session)
    array = np.arange(100_000)
    large = start(session, payload=call(array))
    second = start(session, payload=call(first, array))
    before = {future: arrived(mesh, future) for future in (large, second)}
    array += 1
    oids = [before[large].oid, before[second][0].oid]
    for oid in oids:
        del mesh.objects[oid]
    mesh.drop()

    after: Dict[Any, Any] = {future: arrived(mesh, future, 2) for future in (large, second)}
    assert after[second][1] == ((0, Later(first.task_id)),)
    for payload in (after[large], after[second][0]):
        assert payload.oid not in oids
        args, _ = loads(OutOfBand(mesh.parts_of(payload.oid)))
        assert args[-1][5] == 5  # As it was at the call.
    mesh.finish(large.task_id, "end")
    assert large.result(10) == "end"
    session.close()


def test_tasks_that_need_what_is_lost_say_so(mesh: FakeMesh, session: Session) -> None:
    future = start(session)
    taken(mesh, future)
    mesh.finish(future.task_id, status=Status.REFUSED, payload={"reason": "lost: object 5 was deleted"}, worker="")
    with pytest.raises(ObjectLostError, match="object 5 was deleted"):
        future.result(10)


def test_a_task_without_room_for_its_result_says_so(mesh: FakeMesh, session: Session) -> None:
    future = start(session)
    taken(mesh, future)
    mesh.finish(future.task_id, status=Status.REFUSED, payload={"reason": "full: 5 of 5 bytes"}, worker="")
    with pytest.raises(ObjectStoreFullError, match="5 of 5 bytes"):
        future.result(10)


def test_arguments_that_were_not_kept_cannot_be_stored_again(mesh: FakeMesh, session: Session) -> None:
    packed = call(np.zeros(100_000))
    packed.settle(session.objects(), keep=False)
    assert packed.value is None
    with pytest.raises(MeshUnavailableError, match="submit it again"):
        packed.unsettle()


def test_many_threads_chain_calls(mesh: FakeMesh, session: Session) -> None:
    def answer(task_id: int, payload: Any) -> Any:
        return (task_id, 0, dumps(task_id), 0.0)

    mesh.on_submit = answer
    wrong: List[Any] = []

    def work() -> None:
        for _ in range(50):
            first = start(session)
            second = start(session, payload=call(first, np.zeros(10_000)))
            if second.result(30) != second.task_id:
                wrong.append(second)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_size_of_a_call_counts_its_arguments() -> None:
    assert call(np.zeros(1_000_000)).nbytes > 8_000_000
    assert isinstance(call(np.zeros(1_000_000)), Call)


def test_a_coordinator_lost_between_storing_and_sending_is_asked_to_store_again(mesh: FakeMesh) -> None:
    session = connect(mesh, reconnect_timeout=30.0)
    packed = call(np.arange(100_000))

    class Slow(Call):
        __slots__ = ()

        def settle(self, space: Any, *, keep: bool) -> None:
            super().settle(space, keep=keep)
            if len(lost) == 0:
                lost.append(self.stored.oid)  # type: ignore[union-attr]
                mesh.until(lambda: mesh.objects.pop(lost[0], None) is not None)
                mesh.drop()
                assert until(lambda: space.renewals == 1)

    lost: List[int] = []
    packed.__class__ = Slow
    future = start(session, payload=packed)
    payload = arrived(mesh, future)
    assert payload.oid not in lost
    assert loads(OutOfBand(mesh.parts_of(payload.oid)))[0][0][5] == 5
    session.close()
