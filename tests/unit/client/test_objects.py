"""Objects over real sockets against a coordinator in miniature: on the client's host, and on another."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from gpumesh import GPUMesh
from gpumesh.client import objects as objects_module
from gpumesh.client.futures import MeshFuture
from gpumesh.client.session import Session
from gpumesh.errors import MeshClosedError, MeshUnavailableError, ObjectLostError, ObjectStoreFullError, SerializationError
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle, OutOfBand, Stored
from gpumesh.protocol.messages import (
    CancelFetch,
    DeleteObjects,
    FetchObject,
    HoldRefs,
    LocateObject,
    ObjectAt,
    PutObject,
    ReleaseRefs,
    UnpinObjects,
)
from gpumesh.serialization.exceptions import dump_exception
from gpumesh.serialization.refs import ObjectRef
from gpumesh.serialization.values import dumps
from tests.unit.client.fake_mesh import FakeMesh
from tests.unit.client.fake_session import until
from tests.unit.client.test_session import SPEC, connect, start

np = pytest.importorskip("numpy")

ELSEWHERE = 0x5555_00000000
"""Objects that others made have ids from here on."""


@pytest.fixture(params=["same host", "other host"])
def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeMesh]:
    with FakeMesh(folder=tmp_path if request.param == "same host" else None) as fake:
        yield fake


@pytest.fixture
def near(tmp_path: Path) -> Iterator[FakeMesh]:
    """A coordinator on this host."""
    with FakeMesh(folder=tmp_path) as fake:
        yield fake


@pytest.fixture
def far() -> Iterator[FakeMesh]:
    """A coordinator on another host."""
    with FakeMesh() as fake:
        yield fake


@pytest.fixture
def session(mesh: FakeMesh) -> Iterator[Session]:
    with _session(mesh) as opened:
        yield opened


class _session:
    def __init__(self, mesh: FakeMesh, **options: Any) -> None:
        self._session = connect(mesh, **options)

    def __enter__(self) -> Session:
        return self._session

    def __exit__(self, *_: Any) -> None:
        self._session.close()


def kinds(mesh: FakeMesh, *wanted: Any) -> List[Any]:
    found = [message for message in list(mesh.received) if type(message) in wanted]
    return [type(each)(*(list(field) if isinstance(field, tuple) else field for field in each)) for each in found]


def taken(mesh: FakeMesh, future: MeshFuture) -> None:
    """Wait until the coordinator has the task."""
    mesh.until(lambda: future.task_id in mesh.tasks)


# --- put and get


@pytest.mark.parametrize(
    "value",
    [5, "text", [1, {"a": (2, 3)}], b"x" * 1000, b"x" * 300_000, list(range(100_000)), np.arange(10), np.arange(100_000.0)],
    ids=["int", "text", "nested", "bytes", "large bytes", "large list", "small array", "large array"],
)
def test_what_was_put_is_got(session: Session, value: Any) -> None:
    space = session.objects()
    found = space.get(space.put(value))
    assert type(found) is type(value)
    assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value


def test_several_are_got_in_their_order(session: Session) -> None:
    space = session.objects()
    refs = [space.put(np.full(20_000, float(number))) for number in range(20)]
    found = space.get([*refs, refs[0]])
    assert [array[0] for array in found] == [*map(float, range(20)), 0.0]
    assert space.get([]) == []


def test_what_is_got_is_private_and_writable(session: Session, mesh: FakeMesh) -> None:
    space = session.objects()
    ref = space.put(np.zeros(100_000))
    first = space.get(ref)
    first += 1
    second = space.get(ref)
    second[0] = 5
    assert (first[0], second[0], second[1], space.get(ref)[0]) == (1.0, 5.0, 0.0, 0.0)


def test_what_was_put_may_be_changed_afterwards(session: Session) -> None:
    space = session.objects()
    array = np.zeros(100_000)
    ref = space.put(array)
    array += 1
    assert space.get(ref)[0] == 0.0


def test_read_only_stays_read_only(session: Session) -> None:
    array = np.zeros(100_000)
    array.flags.writeable = False
    space = session.objects()
    assert not space.get(space.put(array)).flags.writeable


def test_small_values_go_with_the_message(session: Session, mesh: FakeMesh) -> None:
    ref = session.objects().put("small")
    mesh.until(lambda: ref.oid in mesh.objects)
    assert mesh.objects[ref.oid] == dumps("small")
    assert kinds(mesh, PutObject) == [PutObject(ref.oid, ref.nbytes, "", None, [])]


def test_a_full_store_is_told(session: Session, mesh: FakeMesh) -> None:
    mesh.full = "the store in /somewhere holds 100 of 100 bytes"
    with pytest.raises(ObjectStoreFullError, match="the store in /somewhere holds 100 of 100 bytes"):
        session.objects().put(np.zeros(100_000))
    mesh.full = ""
    assert session.objects().get(session.objects().put(np.zeros(100_000))).sum() == 0


def test_what_is_gone_is_told(session: Session, mesh: FakeMesh) -> None:
    space = session.objects()
    ref = space.put(np.zeros(100_000))
    ref.delete()
    mesh.until(lambda: kinds(mesh, DeleteObjects) == [DeleteObjects([ref.oid])])
    del mesh.objects[ref.oid]
    with pytest.raises(ObjectLostError, match="it was deleted"):
        space.get(ref)


def test_what_cannot_be_pickled_is_named(session: Session) -> None:
    with pytest.raises(SerializationError, match=r"value\['lock'\]"):
        session.objects().put({"lock": threading.Lock()})


def test_a_closed_session_says_so(session: Session) -> None:
    space = session.objects()
    ref = space.put(1)
    session.close()
    with pytest.raises(MeshClosedError):
        space.get(ref)
    with pytest.raises(MeshClosedError):
        session.objects()
    ref.delete()


def test_arrays_live_on_after_the_end(session: Session) -> None:
    space = session.objects()
    array = space.get(space.put(np.arange(100_000)))
    session.close()
    array += 1
    assert array.sum() == sum(range(100_001))


# --- references


def test_the_last_reference_releases(session: Session, mesh: FakeMesh) -> None:
    space = session.objects()
    ref = space.put(np.zeros(100_000))
    oid = ref.oid
    other = copy.copy(ref)
    del ref
    space.get(other)
    assert kinds(mesh, ReleaseRefs) == []
    del other
    mesh.until(lambda: kinds(mesh, ReleaseRefs) == [ReleaseRefs([(oid, 1)])])


def test_many_releases_travel_together(session: Session, mesh: FakeMesh) -> None:
    space = session.objects()
    refs = [space.put(number) for number in range(1000)]
    mesh.until(lambda: len(mesh.objects) == 1000)
    refs.clear()
    mesh.until(lambda: sum(len(message.objects) for message in kinds(mesh, ReleaseRefs)) == 1000)
    assert len(kinds(mesh, ReleaseRefs)) < 100


def test_references_inside_a_value_are_told_and_held(session: Session, mesh: FakeMesh) -> None:
    space = session.objects()
    inner = space.put(np.zeros(100_000))
    outer = space.put({"inner": inner})
    mesh.until(lambda: outer.oid in mesh.refs)
    assert mesh.refs[outer.oid] == [inner.oid]

    found = space.get(outer)
    assert found == {"inner": inner}
    oid = inner.oid
    del inner
    assert space.get(found["inner"]).sum() == 0
    assert not any(oid in dict(message.objects) for message in kinds(mesh, ReleaseRefs))
    del found
    mesh.until(lambda: any(oid in dict(message.objects) for message in kinds(mesh, ReleaseRefs)))


def test_a_hold_leaves_before_the_release_of_what_it_came_in(session: Session, mesh: FakeMesh) -> None:
    space = session.objects()
    stranger = ObjectRef(ELSEWHERE, 100)
    outer = space.put([stranger])
    found = space.get(outer)
    del outer
    mesh.until(lambda: bool(kinds(mesh, ReleaseRefs)))
    assert [type(message) for message in kinds(mesh, HoldRefs, ReleaseRefs)] == [HoldRefs, ReleaseRefs]
    assert kinds(mesh, HoldRefs) == [HoldRefs([ELSEWHERE])]
    assert found[0].space is space


# --- mappings


def test_a_mapping_is_unpinned_with_the_last_array_on_it(near: FakeMesh) -> None:
    with _session(near) as session:
        space = session.objects()
        ref = space.put([np.zeros(100_000), np.ones(100_000)])
        first, second = space.get(ref)
        part = second[5:10]
        del first, second
        space.get(space.put(0))
        assert kinds(near, UnpinObjects) == []
        assert part.sum() == 5
        del part
        near.until(lambda: kinds(near, UnpinObjects) == [UnpinObjects([(ref.oid, 1)])])


def test_a_value_without_arrays_is_unpinned_at_once(near: FakeMesh) -> None:
    with _session(near) as session:
        space = session.objects()
        ref = space.put(list(range(300_000)))
        found = space.get(ref)
        near.until(lambda: kinds(near, UnpinObjects) == [UnpinObjects([(ref.oid, 1)])])
        assert len(found) == 300_000


def test_each_get_has_a_pin_of_its_own(near: FakeMesh) -> None:
    with _session(near) as session:
        space = session.objects()
        ref = space.put(np.zeros(100_000))
        found = space.get([ref] * 5)
        found.clear()
        near.until(lambda: sum(count for message in kinds(near, UnpinObjects) for _, count in message.objects) == 5)


def test_more_arrays_than_descriptors(near: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    with _session(near) as session:
        space = session.objects()
        ref = space.put(np.arange(100_000))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
        try:
            found = space.get([ref] * 50)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert all(array[-1] == 99_999 for array in found)


def test_a_segment_is_written_again(near: FakeMesh) -> None:
    with _session(near) as session:
        space = session.objects()
        for number in range(4):
            ref = space.put(np.full(100_000, number))
            assert space.get(ref)[0] == number
            near.freed.append(near.segments[0])
        assert len(near.segments) == 2, "the other is the one that is asked for ahead"


def test_shared_memory_can_be_switched_off(near: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(objects_module.NO_SHARED_MEMORY, "1")
    with _session(near) as session:
        ref = session.objects().put(np.arange(100_000))
        assert isinstance(near.objects[ref.oid], OutOfBand)
        assert session.objects().get(ref)[-1] == 99_999
        assert near.segments == []


def test_a_store_that_cannot_be_written_is_full(near: FakeMesh, tmp_path: Path) -> None:
    with _session(near) as session:
        space = session.objects()
        space.put(np.zeros(100_000))
        near.freed.append(str(tmp_path))  # A folder, which nobody can open for writing.
        with pytest.raises(ObjectStoreFullError, match="no room for 800"):
            space.put(np.zeros(100_000))
        near.until(lambda: bool(kinds(near, ReleaseRefs)))  # Given back.


# --- waiting


def test_get_gives_up_after_its_timeout(session: Session, mesh: FakeMesh) -> None:
    space = session.objects()
    ref = space.put(np.zeros(100_000))
    mesh.holds_fetches = True
    started = time.monotonic()
    with pytest.raises(concurrent.futures.TimeoutError):
        space.get(ref, 0.1)
    assert time.monotonic() - started < 5
    mesh.holds_fetches = False
    assert space.get(ref, 10).sum() == 0


def test_an_answer_that_comes_too_late_is_unpinned(near: FakeMesh) -> None:
    with _session(near) as session:
        space = session.objects()
        ref = space.put(np.zeros(100_000))
        near.holds_fetches = True
        with pytest.raises(concurrent.futures.TimeoutError):
            space.get(ref, 0.05)
        (asked,) = kinds(near, LocateObject)
        near.send(ObjectAt(asked.number, ref.oid, str(near.objects[ref.oid]), ref.nbytes, None, ""))
        near.until(lambda: kinds(near, UnpinObjects) == [UnpinObjects([(ref.oid, 1)])])


def test_a_fetch_that_is_given_up_is_cancelled(far: FakeMesh) -> None:
    with _session(far) as session:
        space = session.objects()
        ref = space.put(np.zeros(100_000))
        far.holds_fetches = True
        with pytest.raises(concurrent.futures.TimeoutError):
            space.get(ref, 0.05)
        far.until(lambda: bool(kinds(far, CancelFetch)))
        assert [message.number for message in kinds(far, CancelFetch)] == [
            message.number for message in kinds(far, FetchObject)
        ]


def test_a_connection_that_breaks_while_a_value_is_awaited(mesh: FakeMesh) -> None:
    with _session(mesh, reconnect_timeout=30.0) as session:
        space = session.objects()
        lost, kept = space.put(np.ones(100_000)), space.put(np.zeros(100_000))
        mesh.holds_fetches = True
        found: List[Any] = []
        thread = threading.Thread(target=lambda: found.append(space.get(kept)))
        thread.start()
        mesh.until(lambda: bool(kinds(mesh, FetchObject, LocateObject)))
        mesh.holds_fetches = False
        del mesh.objects[lost.oid]
        mesh.drop()
        thread.join(20)

        assert found[0].sum() == 0  # This coordinator still has it.
        with pytest.raises(ObjectLostError):
            space.get(lost)
        held = [oid for message in kinds(mesh, HoldRefs) for oid in message.oids]
        put_again = [message.oid for message in kinds(mesh, PutObject)[2:]]
        assert sorted([*held, *put_again]) == [lost.oid, kept.oid]


def test_a_put_survives_the_loss_of_the_connection(mesh: FakeMesh) -> None:
    with _session(mesh, reconnect_timeout=30.0) as session:
        space = session.objects()
        space.put(np.zeros(100_000))
        mesh.drop()
        ref = space.put(np.ones(100_000))
        assert space.get(ref).sum() == 100_000


def test_nobody_waits_for_ever_for_a_mesh_that_is_gone(mesh: FakeMesh) -> None:
    with _session(mesh, reconnect_timeout=0.3) as session:
        space = session.objects()
        ref = space.put(1)
        mesh.close()
        with pytest.raises(MeshUnavailableError):
            space.get(ref)


def test_threads_put_and_get_side_by_side(session: Session) -> None:
    space = session.objects()
    wrong: List[Any] = []

    def work(seed: int) -> None:
        for number in range(15):
            array = np.full(20_000 + number, seed * 100.0 + number)
            if not np.array_equal(space.get(space.put(array)), array):
                wrong.append((seed, number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_too_large_for_this_machine(far: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with _session(far) as session:
        space = session.objects()
        ref = ObjectRef(ELSEWHERE, 1 << 60, space, granted=1)
        with pytest.raises(MemoryError, match=f"a value of {1 << 60} bytes does not fit"):
            space.get(ref)
        assert space.get(space.put(5)) == 5


# --- results


def test_a_large_result_is_fetched_when_it_is_asked_for(mesh: FakeMesh, session: Session) -> None:
    mesh.answers = False
    future = start(session)
    nbytes = mesh.keep(ELSEWHERE, dumps(np.arange(100_000)))
    taken(mesh, future)
    mesh.finish(future.task_id, payload=Stored(ELSEWHERE, nbytes))

    assert until(future.done)
    assert not future.has_failed
    assert future.payload.nbytes == nbytes
    array = future.result(10)
    array[0] = 7
    assert future.result() is array
    mesh.until(lambda: kinds(mesh, ReleaseRefs) == [ReleaseRefs([(ELSEWHERE, 1)])])


def test_a_result_that_nobody_loads_is_released_with_its_future(mesh: FakeMesh, session: Session) -> None:
    mesh.answers = False
    future = start(session)
    taken(mesh, future)
    mesh.finish(future.task_id, payload=Stored(ELSEWHERE, mesh.keep(ELSEWHERE, dumps(np.arange(100_000)))))
    assert until(future.done)
    del future
    gc.collect()
    mesh.until(lambda: kinds(mesh, ReleaseRefs) == [ReleaseRefs([(ELSEWHERE, 1)])])


def test_a_result_for_nobody_is_released(mesh: FakeMesh, session: Session) -> None:
    future = start(session)
    assert future.result(10) == 0
    mesh.finish(future.task_id, payload=Stored(ELSEWHERE, 100))
    mesh.until(lambda: kinds(mesh, ReleaseRefs) == [ReleaseRefs([(ELSEWHERE, 1)])])


def test_a_result_with_references_inside_holds_them(mesh: FakeMesh, session: Session) -> None:
    mesh.answers = False
    future = start(session)
    taken(mesh, future)
    mesh.finish(future.task_id, payload=Bundle(dumps([ObjectRef(ELSEWHERE, 100)]), (), (ELSEWHERE,)))

    (ref,) = future.result(10)
    assert ref.space is session.objects()
    assert session.query("anything", timeout=10)
    assert kinds(mesh, HoldRefs, ReleaseRefs) == []
    del ref, future
    mesh.until(lambda: kinds(mesh, ReleaseRefs) == [ReleaseRefs([(ELSEWHERE, 1)])])


def test_a_lost_result_is_the_futures_error(mesh: FakeMesh, session: Session) -> None:
    mesh.answers = False
    future = start(session, spec=SPEC._replace(retries=0))
    taken(mesh, future)
    mesh.finish(future.task_id, payload=Stored(ELSEWHERE, 100_000))
    with pytest.raises(ObjectLostError):
        future.result(10)
    assert isinstance(future.exception(), ObjectLostError)


def test_a_lost_result_of_a_task_that_may_be_tried_again_is_made_again(mesh: FakeMesh, session: Session) -> None:
    mesh.answers = False
    future = start(session)
    taken(mesh, future)
    mesh.finish(future.task_id, payload=Stored(ELSEWHERE, 100_000))
    mesh.answers = True
    assert future.result(10) == 1


def test_a_second_run_that_fails_is_the_end_of_the_task_and_there_is_no_third(mesh: FakeMesh, session: Session) -> None:
    mesh.answers = False
    future = start(session)
    taken(mesh, future)
    mesh.finish(future.task_id, payload=Stored(ELSEWHERE, 100_000))
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.2)  # The second run has begun, and goes on.
    (second,) = set(mesh.tasks) - {future.task_id}
    mesh.finish(second, status=Status.RAISED, payload=dump_exception(ValueError("this time")))
    for _ in range(2):
        with pytest.raises(ValueError, match="this time"):
            future.result(10)
    assert set(mesh.tasks) == {future.task_id, second}


def test_a_result_larger_than_this_machine_is_its_error_alone(far: FakeMesh) -> None:
    with _session(far) as session:
        far.answers = False
        future = start(session)
        taken(far, future)
        far.finish(future.task_id, payload=Stored(ELSEWHERE, 1 << 60))
        with pytest.raises(MemoryError):
            future.result(10)
        far.answers = True
        assert start(session).result(10) == 1


def test_a_timeout_does_not_spoil_the_future(mesh: FakeMesh, session: Session) -> None:
    mesh.answers = False
    future = start(session)
    taken(mesh, future)
    mesh.finish(future.task_id, payload=Stored(ELSEWHERE, mesh.keep(ELSEWHERE, dumps(np.arange(100_000)))))
    assert until(future.done)
    mesh.holds_fetches = True
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.05)
    mesh.holds_fetches = False
    assert future.result(10)[5] == 5


def test_a_callback_may_load_a_large_result(mesh: FakeMesh, session: Session) -> None:
    mesh.answers = False
    future = start(session)
    taken(mesh, future)
    nbytes = mesh.keep(ELSEWHERE, dumps(np.arange(100_000)))
    loaded: List[Any] = []
    told = threading.Event()

    def load(done: Any) -> None:
        loaded.append(done.result(10)[3])
        loaded.append(session.objects().get(session.objects().put(np.full(100_000, 8)))[0])
        told.set()

    future.add_done_callback(load)
    mesh.finish(future.task_id, payload=Stored(ELSEWHERE, nbytes))
    assert told.wait(20)
    assert loaded == [3, 8]


def test_a_large_result_can_be_awaited(mesh: FakeMesh, session: Session) -> None:
    import asyncio

    mesh.on_submit = lambda task_id, _: (task_id, int(Status.OK), Stored(ELSEWHERE, nbytes), 0.1)
    nbytes = mesh.keep(ELSEWHERE, dumps(np.arange(100_000)))

    async def main() -> Any:
        return await start(session)

    assert asyncio.run(main())[4] == 4


# --- GPUMesh.put and get


def test_the_methods_of_a_mesh(near: FakeMesh) -> None:
    with GPUMesh(near.url, "secret") as mesh:
        ref = mesh.put(np.arange(100_000))
        other = mesh.put("small")
        assert [len(value) for value in mesh.get([ref, other])] == [100_000, 5]
        assert mesh.get((other,)) == ["small"]
        assert mesh.get(start(mesh._open_session())) == 0

        with pytest.raises(TypeError, match="in the store already; pass it on as it is"):
            mesh.put(ref)
        with pytest.raises(TypeError, match="is a future; pass it to"):
            mesh.put(start(mesh._open_session()))
        with pytest.raises(TypeError, match="get takes an ObjectRef, as put returns it, or a list of them, not int"):
            mesh.get(5)
        with pytest.raises(TypeError, match="not dict"):
            mesh.get([ref, {}])


def test_a_reference_is_read_where_it_belongs(near: FakeMesh) -> None:
    with FakeMesh() as other, GPUMesh(near.url, "secret") as here, GPUMesh(other.url, "secret") as there:
        refs = [here.put("here"), there.put("there"), here.put("again")]
        assert there.get(refs) == ["here", "there", "again"]
        assert here.get(refs) == ["here", "there", "again"]


def test_the_top_level_functions_use_the_default_mesh(near: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpumesh
    from gpumesh.client import mesh as mesh_module

    with GPUMesh(near.url, "secret") as mesh:
        monkeypatch.setattr(mesh_module, "default_mesh", lambda: mesh)
        ref = gpumesh.put([1, 2])
        assert gpumesh.get(ref) == [1, 2]
        assert gpumesh.get([ref], timeout=10) == [[1, 2]]
        assert ref.space is mesh._open_session().objects()
        stranger = ObjectRef(ref.oid, ref.nbytes)
        assert gpumesh.get(stranger) == [1, 2]


# --- interrupts


@pytest.mark.parametrize("when", ["before the segment comes", "as it comes"])
def test_a_put_that_is_interrupted_gives_its_segment_back(near: FakeMesh, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    with _session(near) as session:
        space = session.objects()
        space.put(np.zeros(100_000))
        drive_until = space._channel.drive_until

        def interrupted(*arguments: Any) -> bool:
            if when == "as it comes":
                assert drive_until(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(space._channel, "drive_until", interrupted)
        with pytest.raises(KeyboardInterrupt):
            space.put(np.ones(100_000))
        monkeypatch.undo()

        near.until(lambda: len(kinds(near, PutObject)) == 2)
        oid = kinds(near, PutObject)[1].oid
        near.until(lambda: (oid, 1) in [pair for message in kinds(near, ReleaseRefs) for pair in message.objects])
        assert space.get(space.put(np.ones(100_000))).sum() == 100_000


def test_a_put_to_another_host_that_is_interrupted_takes_back_what_was_sent(
    far: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _session(far) as session:
        space = session.objects()
        space.put(np.zeros(100_000))
        drive_until = space._channel.drive_until

        def interrupted(done: Any, *arguments: Any) -> bool:
            assert drive_until(lambda: bool(space._sending), *arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(space._channel, "drive_until", interrupted)
        with pytest.raises(KeyboardInterrupt):
            space.put(np.ones(5_000_000))  # 40 MB: far more than the credit that it begins with.
        monkeypatch.undo()

        far.until(lambda: any(message.error.startswith("lost: ") for message in kinds(far, ObjectAt)))
        assert space.get(space.put(np.ones(100_000))).sum() == 100_000


def test_those_that_are_not_lost_are_unpinned_with_the_error_of_the_other(near: FakeMesh) -> None:
    with _session(near) as session:
        space = session.objects()
        refs = [space.put(np.full(100_000, number)) for number in range(4)]
        near.until(lambda: len(near.objects) == 4)
        del near.objects[refs[1].oid]
        with pytest.raises(ObjectLostError):
            space.get(refs)
        near.until(lambda: sum(count for message in kinds(near, UnpinObjects) for _, count in message.objects) == 3)


def test_a_get_that_is_interrupted_unpins_what_has_come(near: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with _session(near) as session:
        space = session.objects()
        ref = space.put(np.zeros(100_000))
        drive_until = space._channel.drive_until

        def interrupted(*arguments: Any) -> bool:
            assert drive_until(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(space._channel, "drive_until", interrupted)
        with pytest.raises(KeyboardInterrupt):
            space.get([ref, ref])
        monkeypatch.undo()
        near.until(lambda: sum(count for message in kinds(near, UnpinObjects) for _, count in message.objects) == 2)
