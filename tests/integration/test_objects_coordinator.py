"""The coordinator's objects, asked message by message over real connections, with real files."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Iterator, List, Tuple

import pytest

from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle, Later, Stored
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.connection import OBJECT_TRANSFER, Closed, ObjectDelivered
from gpumesh.protocol.messages import (
    Answer,
    CancelFetch,
    CreateSegment,
    DefineFunction,
    DefineSpec,
    DeleteObjects,
    FetchObject,
    FreeObjects,
    HoldRefs,
    LocateObject,
    ObjectAt,
    ObjectSent,
    ObjectStored,
    OpenStore,
    PutObject,
    Query,
    ReleaseRefs,
    RunTasks,
    SegmentCreated,
    StoreOffer,
    SubmitTasks,
    TaskResults,
    TasksFinished,
    UnpinObjects,
)
from gpumesh.runtime.embedded import CoordinatorHandle, start_coordinator
from gpumesh.store.container import container_bytes, container_views, open_container
from gpumesh.store.segments import Mapping, SegmentWriter, shares_host
from tests.support.mesh_peer import MeshPeer

MB = 1_000_000
SPEC = TaskSpec(b"f" * 16, "train")

Join = Callable[..., MeshPeer]


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[CoordinatorHandle]:
    monkeypatch.setenv("GPUMESH_OBJECT_MEMORY", "20MB")
    monkeypatch.setenv("GPUMESH_SPILL_DIR", str(tmp_path))
    with start_coordinator(0, "secret") as handle:
        yield handle


@pytest.fixture
def join(coordinator: CoordinatorHandle) -> Iterator[Join]:
    peers: List[MeshPeer] = []

    def connect(**who: Any) -> MeshPeer:
        peers.append(MeshPeer(int(coordinator.url.rpartition(":")[2]), "secret", **who))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.close()


def parts_of(number: int, size: int = MB) -> List[bytes]:
    return [b"pickle", bytes([number]) * size]


def put(peer: MeshPeer, oid: int, number: int = 1, *, size: int = MB, refs: Tuple[int, ...] = ()) -> str:
    """Put an object through a segment; its path."""
    parts = parts_of(number, size)
    nbytes = container_bytes(parts)
    peer.send(CreateSegment(oid, oid, nbytes))
    created = peer.expect(SegmentCreated)
    assert created.error == ""
    SegmentWriter().write(created.path, nbytes, parts)
    peer.send(PutObject(oid, nbytes, os.path.basename(created.path), None, list(refs)))
    return str(created.path)


def locate(peer: MeshPeer, oid: int) -> ObjectAt:
    peer.send(LocateObject(7, oid))
    answer: ObjectAt = peer.expect(ObjectAt)
    assert (answer.number, answer.oid) == (7, oid)
    return answer


def content(path: str, nbytes: int) -> int:
    """Which number fills the object in a file."""
    mapping = Mapping(path, nbytes)
    number = mapping.parts[1][0]
    assert bytes(mapping.parts[1][-3:]) == bytes([number]) * 3
    assert mapping.try_close()
    return int(number)


def objects(peer: MeshPeer) -> Any:
    peer.send(Query(1, "objects", {}))
    found = dict(peer.expect(Answer).value)
    found["objects"] = list(found["objects"])
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_peer_on_the_same_host_finds_the_secret(join: Join) -> None:
    client = join(client=1)
    client.send(OpenStore())
    offer = client.expect(StoreOffer)
    assert shares_host(offer.probe, offer.secret)
    assert not shares_host(offer.probe, b"x" * 32)


def test_what_one_peer_has_written_another_maps(join: Join) -> None:
    one, two = join(client=1), join(client=2)
    put(one, 5, 42)
    answer = locate(two, 5)
    assert content(answer.path, answer.nbytes) == 42


def test_a_small_object_travels_in_messages(join: Join) -> None:
    one, two = join(client=1), join(client=2)
    one.send(PutObject(5, 6, "", b"pickle", []))
    assert objects(one)["objects"][0]["where"] == "coordinator"
    assert locate(two, 5).data == b"pickle"
    two.send(FetchObject(OBJECT_TRANSFER, 5, MB))
    assert two.expect(ObjectAt).data == b"pickle"


def test_an_object_nobody_refers_to_is_gone_with_its_file(join: Join) -> None:
    client = join(client=1)
    path = put(client, 5)
    client.send(ReleaseRefs([(5, 1)]))
    assert locate(client, 5).error.startswith("lost: ")
    assert objects(client)["objects"] == []
    assert put(client, 6) == path  # The same pages, used again.


def test_a_segment_that_someone_maps_is_not_used_again(join: Join) -> None:
    one, two = join(client=1), join(client=2)
    path = put(one, 5, 42)
    answer = locate(two, 5)
    mapping = Mapping(answer.path, answer.nbytes)
    one.send(ReleaseRefs([(5, 1)]))
    assert put(one, 6, 43) != path
    assert bytes(mapping.parts[1][:2]) == b"**"
    assert mapping.try_close()
    two.send(UnpinObjects([(5, 1)]))
    two.quiet()
    assert put(one, 7, 44) == path


def test_what_a_peer_that_left_still_maps_is_never_used_again(join: Join) -> None:
    one, two = join(client=1), join(client=2)
    path = put(one, 5, 42)
    answer = locate(two, 5)
    mapping = Mapping(answer.path, answer.nbytes)
    two.close()
    one.send(ReleaseRefs([(5, 1)]))
    one.quiet()
    wait_for(lambda: not os.path.exists(path))
    for oid in range(10, 15):
        assert put(one, oid, oid) != path
    assert bytes(mapping.parts[1][:2]) == b"**"


def test_references_inside_an_object_keep_the_others_alive(join: Join) -> None:
    client = join(client=1)
    put(client, 5)
    put(client, 6, refs=(5,))
    client.send(ReleaseRefs([(5, 1)]))
    assert locate(client, 5).error == ""
    client.send(UnpinObjects([(5, 1)]), ReleaseRefs([(6, 1)]))
    assert locate(client, 5).error.startswith("lost: ")


def test_grants_are_counted(join: Join) -> None:
    one, two = join(client=1), join(client=2)
    put(one, 5)
    two.send(HoldRefs([5, 5]))
    two.quiet()
    one.send(ReleaseRefs([(5, 1)]))
    two.send(ReleaseRefs([(5, 1)]))
    assert locate(one, 5).error == ""
    one.send(UnpinObjects([(5, 1)]))
    two.send(ReleaseRefs([(5, 1)]))
    assert locate(two, 5).error.startswith("lost: ")


def test_deleting_ends_an_object_whoever_refers_to_it(join: Join) -> None:
    one, two = join(client=1), join(client=2)
    put(one, 5)
    two.send(HoldRefs([5]), DeleteObjects([5]))
    assert locate(two, 5).error.startswith("lost: ")


def test_a_client_that_leaves_gives_everything_back(join: Join) -> None:
    one, two = join(client=1), join(client=2)
    put(one, 5)
    one.send(CreateSegment(1, 6, MB))
    unfinished = one.expect(SegmentCreated).path
    one.connection.close("done")
    one.flush()
    one.close()
    wait_for(lambda: objects(two)["objects"] == [])
    wait_for(lambda: not os.path.exists(unfinished))


def test_an_object_from_another_host_is_fetched_and_confirmed(join: Join) -> None:
    there, here = join(worker="far"), join(client=2)
    parts = parts_of(9, 3 * MB)
    there.send(PutObject(5, container_bytes(parts), "", None, []))
    fetch = there.expect(FetchObject)
    here.send(LocateObject(7, 5))
    assert here.quiet() == []  # It waits until all of it is here.
    there.connection.send_object(fetch.number, container_views(parts), fetch.window)
    there.flush()
    assert there.expect(ObjectStored) == ObjectStored(5, "")
    answer = here.expect(ObjectAt)
    assert content(answer.path, answer.nbytes) == 9
    there.expect(ObjectDelivered)


def test_an_object_goes_to_another_host_in_chunks(join: Join) -> None:
    here, there = join(client=1), join(worker="far")
    put(here, 5, 9, size=5 * MB)
    nbytes = container_bytes(parts_of(9, 5 * MB))
    target = bytearray(nbytes)
    there.connection.receive_into(OBJECT_TRANSFER, memoryview(target), 2 * MB)
    there.send(FetchObject(OBJECT_TRANSFER, 5, 2 * MB))
    there.expect(ObjectSent)
    assert bytes(open_container(memoryview(target))[1]) == bytes([9]) * 5 * MB
    assert objects(here)["objects"][0]["copies"] == ("far",)
    here.send(ReleaseRefs([(5, 1)]))
    assert there.expect(FreeObjects) == FreeObjects((5,))


def test_a_fetch_that_is_cancelled_frees_what_it_pinned(join: Join) -> None:
    here, there = join(client=1), join(worker="far")
    path = put(here, 5, 9, size=5 * MB)
    target = bytearray(container_bytes(parts_of(9, 5 * MB)))
    there.connection.receive_into(OBJECT_TRANSFER, memoryview(target), MB)
    there.send(FetchObject(OBJECT_TRANSFER, 5, MB))
    there.connection.forget_transfer(OBJECT_TRANSFER)
    there.send(CancelFetch(OBJECT_TRANSFER))
    there.quiet()
    here.send(ReleaseRefs([(5, 1)]))
    here.quiet()
    assert put(here, 6, 1, size=5 * MB) == path


def test_an_object_whose_maker_leaves_too_early_is_lost_to_all_who_wait(join: Join) -> None:
    there, here = join(worker="far"), join(client=2)
    there.send(PutObject(5, 3 * MB, "", None, []))
    there.expect(FetchObject)
    here.send(LocateObject(7, 5))
    assert here.quiet() == []
    there.close()
    assert here.expect(ObjectAt).error.startswith("lost: ")


def test_more_than_the_memory_goes_to_disk_and_comes_back(join: Join, tmp_path: Any) -> None:
    client = join(client=1)
    for number in range(1, 41):
        put(client, number, number)
    found = objects(client)
    assert {row["where"] for row in found["objects"]} == {"memory", "disk"}
    assert found["memory"] <= found["limit"]
    for number in range(1, 41):
        answer = locate(client, number)
        assert content(answer.path, answer.nbytes) == number
        client.send(UnpinObjects([(number, 1)]))
    client.send(ReleaseRefs([(number, 1) for number in range(1, 41)]))
    assert objects(client)["objects"] == []
    wait_for(lambda: not [name for _, _, files in os.walk(tmp_path) for name in files if name not in ("owner", "probe")])


def test_an_object_above_the_limit_is_refused_with_both_numbers(join: Join) -> None:
    client = join(client=1)
    client.send(CreateSegment(1, 5, 21 * MB))
    error = client.expect(SegmentCreated).error
    assert error.startswith("full: ")
    assert "21" in error
    assert "20" in error


def test_pinned_objects_stay_and_then_the_store_is_full(join: Join) -> None:
    client = join(client=1)
    paths = []
    for number in range(1, 10):
        put(client, number, number, size=2 * MB)
        paths.append(locate(client, number).path)
    client.send(CreateSegment(1, 99, 5 * MB))
    error = client.expect(SegmentCreated).error
    assert error.startswith("full: ")
    assert "client 1" in error
    client.send(UnpinObjects([(number, 1) for number in range(1, 10)]))
    put(client, 100, 1, size=5 * MB)  # And it goes on.


@pytest.mark.parametrize(
    "message",
    [
        PutObject(5, MB, "s1", None, []),
        PutObject(5, MB, "../probe", None, []),
        PutObject(-1, MB, "", None, []),
        PutObject(5, 100 * MB, "", bytes(MB), []),
        CreateSegment(1, 5, -1),
        CreateSegment(1, 1 << 63, 10),
        UnpinObjects([5]),
        ReleaseRefs([(5, -1)]),
        HoldRefs(["5"]),
        DeleteObjects([None]),
        SubmitTasks(1, [1 << 32], [((b"call",), (), ())]),
        SubmitTasks(1, [1 << 32], [(b"call", ((0,),), ())]),
        SubmitTasks(1, [1 << 32], [(b"call", (), ("ref",))]),
        SubmitTasks(1, [1 << 32], [()]),
        ObjectSent(OBJECT_TRANSFER),
    ],
)
def test_peers_that_talk_nonsense_are_refused(join: Join, message: Any) -> None:
    client = join(client=1)
    client.send(message)
    told = client.quiet(0.3)
    assert type(message) is ObjectSent or (told and type(told[-1]) is Closed), told


# --- tasks


def submit(client: MeshPeer, number: int, *tasks: Tuple[int, Any]) -> None:
    first = number << 32
    client.send(
        DefineFunction(SPEC.function, b"body"),
        DefineSpec(1, tuple(SPEC)),
        SubmitTasks(1, [first + index for index, _ in tasks], [payload for _, payload in tasks]),
    )


def test_a_task_keeps_its_arguments_alive_until_it_has_ended(join: Join) -> None:
    client, worker = join(client=1), join(worker="w1")
    put(client, 5)
    submit(client, 1, (0, Stored(5, MB)))
    client.send(ReleaseRefs([(5, 1)]))
    task_id, attempt, payload = worker.expect(RunTasks).tasks[0]
    assert payload == Stored(5, MB)
    assert locate(worker, 5).error == ""
    worker.send(UnpinObjects([(5, 1)]))
    worker.send(TasksFinished([(task_id, attempt, int(Status.OK), b"value", 0.1)]))
    client.expect(TaskResults)
    assert objects(client)["objects"] == []


def test_a_small_object_among_the_arguments_goes_with_the_task(join: Join) -> None:
    client, worker = join(client=1), join(worker="w1")
    client.send(PutObject(5, 6, "", b"pickle", []))
    submit(client, 1, (0, Bundle(b"call", ((0, Stored(5, 6)),), ())))
    assert worker.expect(RunTasks).tasks[0][2] == Bundle(b"call", ((0, b"pickle"),), ())


def test_a_result_takes_its_place_among_the_arguments_of_the_next_task(join: Join) -> None:
    client, worker = join(client=1), join(worker="w1")
    producer = 1 << 32
    submit(client, 1, (0, b"call"), (1, Bundle(b"then", (("x", Later(producer)),), ())))
    worker.send(TasksFinished([(producer, worker.expect(RunTasks).tasks[0][1], int(Status.OK), b"value", 0.1)]))
    assert worker.expect(RunTasks).tasks == ((producer + 1, 1, Bundle(b"then", (("x", b"value"),), ())),)


def test_a_stored_result_is_the_clients_and_the_next_tasks(join: Join) -> None:
    client, worker = join(client=1), join(worker="w1")
    producer = 1 << 32
    submit(client, 1, (0, b"call"), (1, Bundle(b"then", ((0, Later(producer)),), ())))
    worker.expect(RunTasks)
    put(worker, 77, 3)
    worker.send(TasksFinished([(producer, 1, int(Status.OK), Stored(77, MB), 0.1)]))
    result = client.expect(TaskResults).results[0]
    assert result[2] == Stored(77, MB)
    assert worker.expect(RunTasks).tasks[0][2] == Bundle(b"then", ((0, Stored(77, MB)),), ())
    client.send(ReleaseRefs([(77, 1)]))
    assert locate(worker, 77).error == ""
    worker.send(UnpinObjects([(77, 1)]), TasksFinished([(producer + 1, 1, int(Status.OK), b"done", 0.1)]))
    client.expect(TaskResults)
    assert objects(client)["objects"] == []


def test_a_result_that_is_still_on_its_way_does_not_count_yet(join: Join) -> None:
    client, worker = join(client=1), join(worker="far")
    submit(client, 1, (0, b"call"))
    worker.expect(RunTasks)
    parts = parts_of(4, 3 * MB)
    nbytes = container_bytes(parts)
    worker.send(PutObject(77, nbytes, "", None, []), TasksFinished([(1 << 32, 1, int(Status.OK), Stored(77, nbytes), 0.1)]))
    fetch = worker.expect(FetchObject)
    assert [type(message) for message in client.quiet() if type(message) is TaskResults] == []
    worker.connection.send_object(fetch.number, container_views(parts), fetch.window)
    worker.flush()
    worker.expect(ObjectStored)
    assert client.expect(TaskResults).results[0][2] == Stored(77, nbytes)


def test_a_worker_that_dies_with_its_result_has_not_run_the_task(join: Join) -> None:
    client, worker = join(client=1), join(worker="far")
    submit(client, 1, (0, b"call"))
    worker.expect(RunTasks)
    worker.send(PutObject(77, MB, "", None, []), TasksFinished([(1 << 32, 1, int(Status.OK), Stored(77, MB), 0.1)]))
    worker.expect(FetchObject)
    worker.close()
    other = join(worker="w2")
    assert other.expect(RunTasks).tasks[0][:2] == (1 << 32, 2)


def test_a_result_larger_than_the_store_is_an_error_of_its_task(join: Join) -> None:
    client, worker = join(client=1), join(worker="far")
    submit(client, 1, (0, b"call"))
    worker.expect(RunTasks)
    worker.send(PutObject(77, 30 * MB, "", None, []), TasksFinished([(1 << 32, 1, int(Status.OK), Stored(77, 30 * MB), 0.1)]))
    assert worker.expect(ObjectStored).error.startswith("full: ")
    result = client.expect(TaskResults).results[0]
    assert result[1] == Status.REFUSED
    assert result[2]["reason"].startswith("full: ")


@pytest.mark.parametrize("payload", [(), (b"value", (), ("ref",)), ((), (), ()), 7])
def test_a_worker_whose_results_are_nonsense_is_refused_and_its_task_runs_elsewhere(join: Join, payload: Any) -> None:
    client, worker = join(client=1), join(worker="w1")
    submit(client, 1, (0, b"call"))
    worker.expect(RunTasks)
    worker.send(TasksFinished([(1 << 32, 1, int(Status.OK), payload, 0.1)]))
    assert type(worker.quiet(0.3)[-1]) is Closed
    assert join(worker="w2").expect(RunTasks).tasks[0][:2] == (1 << 32, 2)


def test_an_input_whose_task_is_over_is_asked_for_again(join: Join) -> None:
    client, worker = join(client=1), join(worker="w1")
    submit(client, 1, (0, b"call"))
    worker.expect(RunTasks)
    worker.send(TasksFinished([(1 << 32, 1, int(Status.OK), b"value", 0.1)]))
    client.expect(TaskResults)
    submit(client, 1, (1, Bundle(b"then", ((0, Later(1 << 32)),), ())))
    result = client.expect(TaskResults).results[0]
    assert (result[1], result[2]) == (Status.INPUT_MISSING, {"input": 1 << 32})
    submit(client, 1, (1, Bundle(b"then", ((0, b"value"),), ())))
    assert worker.expect(RunTasks).tasks[0][0] == (1 << 32) + 1


def test_small_objects_count_too(join: Join) -> None:
    client = join(client=1)
    data = bytes(60_000)
    for oid in range(400):
        client.send(PutObject(oid, len(data), "", data, []))
    assert locate(client, 0).data == data
    assert locate(client, 399).error.startswith("full: small objects")
    client.send(ReleaseRefs([(oid, 1) for oid in range(400)]), PutObject(400, len(data), "", data, []))
    assert locate(client, 400).data == data


def test_room_is_made_for_objects_from_elsewhere(join: Join) -> None:
    there = join(worker="far")
    parts = parts_of(9, 6 * MB)
    nbytes = container_bytes(parts)
    for oid in range(5, 15):
        there.send(PutObject(oid, nbytes, "", None, []))
        fetch = there.expect(FetchObject)
        there.connection.send_object(fetch.number, container_views(parts), fetch.window)
        there.flush()
        assert there.expect(ObjectStored) == ObjectStored(oid, "")
