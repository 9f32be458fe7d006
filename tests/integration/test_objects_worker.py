"""Large values at a worker, in both ways: in the memory it shares with the coordinator, and in a store of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import pytest

from gpumesh.errors import MeshError, ObjectLostError, ObjectStoreFullError
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle, Later, OutOfBand, Stored
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import (
    Answer,
    CancelTasks,
    CreateSegment,
    DefineFunction,
    DefineSpec,
    DeleteObjects,
    LocateObject,
    ObjectAt,
    PutObject,
    Query,
    ReleaseRefs,
    SegmentCreated,
    SubmitTasks,
    TaskResults,
    UnpinObjects,
)
from gpumesh.runtime.embedded import CoordinatorHandle, WorkerHandle, add_worker, start_coordinator
from gpumesh.serialization import functions, refs, values
from gpumesh.serialization.exceptions import load_exception
from gpumesh.store.container import container_bytes
from gpumesh.store.segments import Mapping, SegmentWriter
from tests.support import tasks
from tests.support.mesh_peer import MeshPeer
from tests.support.processes import named, session_of, until

MB = 1_000_000
CLIENT = 77
WAYS = ("shared", "own")


class Site:
    """A coordinator, one worker, and a client that speaks in messages."""

    def __init__(self, coordinator: CoordinatorHandle, worker: WorkerHandle, way: str) -> None:
        self.coordinator = coordinator
        self.peer = connect(coordinator)
        self.worker = worker
        self.way = way
        self._exporter = functions.Exporter()
        self._specs: Dict[Any, int] = {}
        self._task_ids = itertools.count(CLIENT << 32)
        self._oids = itertools.count((CLIENT << 32) + 1)
        self._outcomes: Dict[int, Tuple[int, Any]] = {}
        self._mappings: List[Mapping] = []

    def restart(self) -> None:
        """Another coordinator on the same port."""
        self.coordinator.stop()
        self.peer.close()  # Not before: the tasks of a client that leaves are cancelled.
        self.coordinator = start_coordinator(int(self.coordinator.url.rpartition(":")[2]), "secret")
        self.peer = connect(self.coordinator)
        self._specs.clear()

    def put(self, value: Any) -> Stored:
        """An object of this client."""
        payload = values.dumps(value)
        parts = payload.parts if isinstance(payload, OutOfBand) else [payload]
        nbytes = container_bytes(parts)
        oid = next(self._oids)
        self.peer.send(CreateSegment(oid, oid, nbytes))
        created = self.peer.expect(SegmentCreated)
        assert created.error == ""
        SegmentWriter().write(created.path, nbytes, parts)
        self.peer.send(PutObject(oid, nbytes, os.path.basename(created.path), None, []))
        return Stored(oid, nbytes)

    def call(self, function: Callable[..., Any], *args: Any, retries: int = 0, **options: Any) -> int:
        """Submit a task; `Stored` and `Later` among the arguments are inputs."""
        inputs = tuple((place, arg) for place, arg in enumerate(args) if type(arg) in (Stored, Later))
        plain = tuple(None if type(arg) in (Stored, Later) else arg for arg in args)
        with refs.collecting() as collected:
            payload: Any = values.dumps_call(plain, {})
        if inputs or collected:
            payload = Bundle(payload, inputs, tuple(collected))
        return self.submit(function, payload, retries=retries, **options)

    def submit(self, function: Callable[..., Any], payload: Any, *, retries: int = 0, **options: Any) -> int:
        exported = self._exporter.export(function)
        key = (exported.digest, retries, *options.items())
        if key not in self._specs:
            number = self._specs[key] = len(self._specs)
            spec = TaskSpec(exported.digest, exported.name, retries=retries, **options)
            self.peer.send(DefineFunction(exported.digest, exported.body), DefineSpec(number, spec))
        task_id = next(self._task_ids)
        self.peer.send(SubmitTasks(self._specs[key], [task_id], [payload]))
        return task_id

    def outcome(self, task_id: int, timeout: float = 20.0) -> Tuple[int, Any]:
        while task_id not in self._outcomes:
            for ended, status, payload, _ in self.peer.expect(TaskResults, timeout).results:
                self._outcomes[ended] = (status, payload)
        return self._outcomes.pop(task_id)

    def result(self, task_id: int, timeout: float = 20.0) -> Any:
        """Its value; of a large one, a private copy, and the object is let go."""
        status, payload = self.outcome(task_id, timeout)
        if status in (Status.RAISED, Status.RETRYABLE):
            raise load_exception(payload)
        assert status == Status.OK, (Status(status), payload)
        return self.value(payload)

    def value(self, payload: Any) -> Any:
        while isinstance(payload, tuple):
            payload = payload[0]
        if type(payload) is not Stored:
            return values.loads(payload)
        value = self.look(payload)
        self.peer.send(ReleaseRefs([(payload.oid, 1)]))
        return value

    def look(self, stored: Stored) -> Any:
        self.peer.send(LocateObject(1, stored.oid))
        found = self.peer.expect(ObjectAt)
        if found.error:
            raise MeshError(found.error)
        mapping = Mapping(found.path, found.nbytes)
        value = values.loads(OutOfBand([bytes(part) for part in mapping.parts]))
        assert mapping.try_close()
        self.peer.send(UnpinObjects([(stored.oid, 1)]))
        return value

    def release(self, *objects: Stored) -> None:
        self.peer.send(ReleaseRefs([(stored.oid, 1) for stored in objects]))

    def objects(self) -> Dict[str, Dict[str, Any]]:
        """What the coordinator knows, by id."""
        self.peer.send(Query(1, "objects", {}))
        return {row["id"]: row for row in self.peer.expect(Answer).value["objects"]}

    def row(self, stored: Stored) -> Optional[Dict[str, Any]]:
        return self.objects().get(f"{stored.oid:016x}")

    def nothing_left(self) -> None:
        """Every object is gone."""
        until(lambda: not self.objects(), what="no objects")

    def runner(self) -> int:
        return self.result(self.call(tasks.where))

    def runners(self) -> List[Any]:
        return named(session_of(self.worker.processes["spawner"]), "gpumesh-runner")

    def own_files(self) -> List[Path]:
        """Segments of the worker's own store."""
        folders = Path("/dev/shm", f"gpumesh-{os.getuid()}").glob(f"*-{self.worker.processes['worker']}")
        return [path for folder in folders for path in folder.iterdir() if path.name.startswith("s")]


@contextlib.contextmanager
def site(
    way: str, patch: pytest.MonkeyPatch, *, slots: int = 1, memory: str = "400MB", worker_memory: str = ""
) -> Iterator[Site]:
    patch.setenv("GPUMESH_OBJECT_MEMORY", memory)
    with start_coordinator(0, "secret") as coordinator:
        patch.setenv("GPUMESH_NO_SHARED_MEMORY", "1" if way == "own" else "0")
        patch.setenv("GPUMESH_OBJECT_MEMORY", worker_memory or memory)
        with add_worker(coordinator.url, "secret", slots=slots) as worker:
            made = Site(coordinator, worker, way)
            try:
                yield made
            finally:
                made.peer.close()
                worker.kill()
                made.coordinator.stop()


def connect(coordinator: CoordinatorHandle) -> MeshPeer:
    return MeshPeer(int(coordinator.url.rpartition(":")[2]), "secret", client=CLIENT)


@pytest.fixture(scope="module", params=WAYS)
def mesh(request: pytest.FixtureRequest) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch, site(request.param, patch, slots=2) as made:
        yield made


# --- functions that run on the worker


def first_and_size(array: Any) -> Tuple[float, int]:
    return float(array[0]), array.nbytes


def change_in_place(array: Any) -> float:
    array += 1
    return float(array[0])


def ones(count: int) -> Any:
    return np.ones(count)


def same_object(one: Any, other: Any) -> bool:
    return one is other


_kept: List[Any] = []


def keep(array: Any) -> int:
    _kept.append(array)
    return os.getpid()


def look_at_kept() -> Tuple[int, float]:
    return os.getpid(), float(_kept[-1].sum())


def forget_kept() -> int:
    _kept.clear()
    return os.getpid()


def fail_with(array: Any) -> None:
    held = array  # noqa: F841 - lives in the frame of the traceback
    raise ValueError("of no use")


def add(one: Any, other: Any) -> Any:
    return one + other


def put_and_get(count: int) -> Tuple[float, int]:
    space = refs.current_space()
    assert space is not None
    large, small = space.put(np.full(count, 3.0)), space.put({"n": 1})
    value, other = space.get([large, small])
    value += 1
    return float(space.get(large)[0] + value[0] + other["n"]), value.nbytes


def put_and_return(count: int) -> Any:
    space = refs.current_space()
    assert space is not None
    return {"ref": space.put(np.full(count, 4.0))}


def get_inside(box: Dict[str, Any]) -> float:
    space = refs.current_space()
    assert space is not None
    return float(space.get(box["ref"])[0])


def get_in_threads(box: Dict[str, Any], count: int) -> List[float]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(get_inside, box) for _ in range(count)]]


def die_holding(array: Any, mark: str) -> None:
    tasks.leave(mark)
    time.sleep(60)


def put_slowly(mark: str) -> None:
    """Ask for a segment, and be killed before it is handed over."""
    from gpumesh.store.segments import SegmentWriter

    space = refs.current_space()
    assert space is not None

    def stop(self: Any, path: str, nbytes: int, parts: Any) -> None:
        tasks.leave(mark)
        time.sleep(60)

    SegmentWriter.write = stop  # type: ignore[method-assign]
    space.put(np.ones(MB))


# --- arguments


def test_a_large_argument_arrives(mesh: Site) -> None:
    stored = mesh.put(np.arange(2.0 * MB))
    task = mesh.call(first_and_size, stored)
    assert mesh.result(task) == (0.0, 16 * MB)
    mesh.release(stored)
    mesh.nothing_left()


def test_a_whole_call_that_is_large_arrives(mesh: Site) -> None:
    stored = mesh.put(((np.arange(2.0 * MB),), {}))
    assert mesh.result(mesh.submit(first_and_size, stored)) == (0.0, 16 * MB)
    mesh.release(stored)
    mesh.nothing_left()


def test_a_change_in_place_is_seen_by_nobody_else(mesh: Site) -> None:
    stored = mesh.put(np.zeros(MB))
    assert [mesh.result(mesh.call(change_in_place, stored)) for _ in range(4)] == [1.0] * 4
    assert mesh.look(stored)[0] == 0.0
    mesh.release(stored)
    mesh.nothing_left()


def test_an_object_in_two_places_of_a_call_is_one_value(mesh: Site) -> None:
    stored = mesh.put(np.zeros(MB))
    assert mesh.result(mesh.call(same_object, stored, stored)) is True
    mesh.release(stored)
    mesh.nothing_left()


def test_many_tasks_use_one_object(mesh: Site) -> None:
    stored = mesh.put(np.arange(float(MB)))
    ended = [mesh.call(first_and_size, stored) for _ in range(50)]
    assert [mesh.result(task) for task in ended] == [(0.0, 8 * MB)] * 50
    until(lambda: (mesh.row(stored) or {})["pins"] == 0, what="no pins")
    mesh.release(stored)
    mesh.nothing_left()


def test_an_argument_is_let_go_when_the_task_fails(mesh: Site) -> None:
    stored = mesh.put(np.zeros(MB))
    with pytest.raises(ValueError, match="of no use"):
        mesh.result(mesh.call(fail_with, stored))
    mesh.release(stored)
    mesh.nothing_left()
    assert mesh.way == "shared" or not [row for row in mesh.objects().values() if row["pins"]]


def test_an_object_that_was_deleted_fails_the_task(mesh: Site) -> None:
    stored = mesh.put(np.zeros(MB))
    mesh.release(stored)
    mesh.nothing_left()
    with pytest.raises(ObjectLostError):
        mesh.result(mesh.call(first_and_size, stored))


# --- results


def test_a_large_result_comes_back(mesh: Site) -> None:
    value = mesh.result(mesh.call(ones, 2 * MB))
    assert value.nbytes == 16 * MB
    assert value.sum() == 2 * MB
    mesh.nothing_left()


def test_results_are_the_inputs_of_the_next_tasks(mesh: Site) -> None:
    chain = [mesh.call(slow_ones, MB, "")]
    for _ in range(5):
        chain.append(mesh.call(add, Later(chain[-1]), 1.0))
    assert [mesh.result(task)[0] for task in chain] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    mesh.nothing_left()


def test_a_result_too_large_for_the_store_is_an_error_of_its_task_alone(mesh: Site) -> None:
    before = mesh.runner()
    with pytest.raises(ObjectStoreFullError, match="larger than the object store"):
        mesh.result(mesh.call(ones, 60 * MB))
    assert mesh.result(mesh.call(ones, MB)).sum() == MB
    assert before in [process.pid for process in mesh.runners()], "no process died of it"
    mesh.nothing_left()


# --- what a task does itself


def test_put_and_get_in_a_task(mesh: Site) -> None:
    assert mesh.result(mesh.call(put_and_get, MB)) == (3.0 + 4.0 + 1, 8 * MB)
    mesh.nothing_left()


def test_a_reference_made_in_a_task_lives_in_its_result(mesh: Site) -> None:
    status, payload = mesh.outcome(mesh.call(put_and_return, MB))
    assert status == Status.OK
    (oid,) = payload[2]
    time.sleep(0.2)  # The runner has let go of its own long before.
    assert f"{oid:016x}" in mesh.objects()
    box = values.loads(payload[0])
    assert box["ref"].oid == oid
    stored = Stored(oid, box["ref"].nbytes)
    assert mesh.look(stored)[0] == 4.0
    assert mesh.result(mesh.call(get_inside, box)) == 4.0
    mesh.release(stored)
    mesh.nothing_left()


def test_threads_of_a_task_ask_at_the_same_time(mesh: Site) -> None:
    stored = mesh.put(np.full(MB, 4.0))
    box = {"ref": refs.ObjectRef(stored.oid, stored.nbytes)}
    assert mesh.result(mesh.call(get_in_threads, box, 8)) == [4.0] * 8
    assert mesh.result(mesh.call(tasks.noop, 1)) == 1
    mesh.release(stored)
    mesh.nothing_left()


# --- what is kept, and who is killed


@pytest.mark.parametrize("way", WAYS)
def test_an_array_kept_by_a_runner_stays_as_it_is(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with site(way, monkeypatch, memory="60MB") as mesh:
        stored = mesh.put(np.ones(MB))
        pid = mesh.result(mesh.call(keep, stored))
        mesh.release(stored)
        mesh.nothing_left()
        for number in range(8):  # Would take its segment, were it free.
            other = mesh.put(np.full(MB, 7.0))
            assert mesh.result(mesh.call(first_and_size, other))[0] == 7.0, number
            mesh.release(other)
        assert mesh.result(mesh.call(look_at_kept)) == (pid, MB)
        mesh.result(mesh.call(forget_kept))
        mesh.result(mesh.call(tasks.noop))
        big = mesh.put(np.ones(6 * MB))  # Needs the room that the kept one took.
        assert mesh.result(mesh.call(first_and_size, big)) == (1.0, 48 * MB)


def test_a_runner_killed_with_its_input_lets_go(mesh: Site, tmp_path: Path) -> None:
    stored = mesh.put(np.zeros(MB))
    mark = tmp_path / "started"
    task = mesh.call(die_holding, stored, str(mark))
    until(mark.exists, 20)
    os.kill(int(mark.read_text()), signal.SIGKILL)
    assert mesh.outcome(task)[0] == Status.CRASHED
    until(lambda: (mesh.row(stored) or {})["pins"] == 0, what="no pins")
    mesh.release(stored)
    mesh.nothing_left()


def test_a_runner_killed_while_it_writes_leaves_no_segment(mesh: Site, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    task = mesh.call(put_slowly, str(mark))
    until(mark.exists, 20)
    os.kill(int(mark.read_text()), signal.SIGKILL)
    assert mesh.outcome(task)[0] == Status.CRASHED
    mesh.nothing_left()
    stored = mesh.put(np.zeros(45 * MB))  # Nine tenths of the memory: what was being written does not count.
    assert mesh.result(mesh.call(first_and_size, stored)) == (0.0, 360 * MB)
    mesh.release(stored)
    mesh.nothing_left()


def test_a_task_that_waits_for_its_input_can_be_cancelled(mesh: Site) -> None:
    stored = mesh.put(np.zeros(MB))
    held = [mesh.call(tasks.sleep, 30.0) for _ in range(2)]
    waiting = mesh.call(first_and_size, stored)
    mesh.peer.send(CancelTasks([waiting, *held]))
    assert [mesh.outcome(task)[0] for task in (waiting, *held)] == [Status.CANCELLED] * 3
    mesh.release(stored)
    mesh.nothing_left()


def test_tasks_with_large_arguments_a_third_of_them_killed_leave_nothing(mesh: Site) -> None:
    for _ in range(2):
        mesh.result(mesh.call(ones, MB))
    agent = mesh.worker.processes["worker"]
    until(lambda: len(mesh.runners()) == 2)
    before = other_descriptors(agent)
    ended = []
    for number in range(24):
        stored = mesh.put(np.full(MB, float(number)))
        ended.append(mesh.call(tasks.die if number % 3 == 0 else first_and_size, *([] if number % 3 == 0 else [stored])))
        mesh.release(stored)
    for number, task in enumerate(ended):
        status, payload = mesh.outcome(task, 60)
        assert status == (Status.CRASHED if number % 3 == 0 else Status.OK), (number, payload)
    mesh.nothing_left()
    until(lambda: len(mesh.runners()) == 2)
    until(lambda: other_descriptors(agent) == before, what="as many descriptors as before")
    assert len(mesh.own_files()) <= 6, "inputs of two tasks, and of those that wait"


def other_descriptors(pid: int) -> int:
    """Open descriptors, but for those of segments: a store keeps free ones for use again."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += "/gpumesh-" not in os.readlink(descriptor)
    return count


# --- a store of its own


def test_an_object_is_fetched_once_and_dropped_when_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    with site("own", monkeypatch, slots=2) as mesh:
        stored = mesh.put(np.zeros(MB))
        for _ in range(3):
            ended = [mesh.call(first_and_size, stored) for _ in range(4)]
            assert [mesh.result(task) for task in ended] == [(0.0, 8 * MB)] * 4
        assert len(mesh.own_files()) == 1
        assert len((mesh.row(stored) or {})["copies"]) == 1
        mesh.release(stored)
        mesh.nothing_left()
        other = mesh.put(np.zeros(MB))
        assert mesh.result(mesh.call(first_and_size, other)) == (0.0, 8 * MB)
        assert len(mesh.own_files()) == 1, "the segment is used again"


def test_more_than_the_worker_can_hold_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with site("own", monkeypatch, memory="400MB", worker_memory="40MB") as mesh:
        stored = [mesh.put(np.full(MB, float(number))) for number in range(20)]
        ended = [mesh.call(first_and_size, each) for each in stored]
        assert [mesh.result(task)[0] for task in ended] == list(range(20))


def test_an_input_too_large_for_the_worker_is_an_error_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    with site("own", monkeypatch, memory="400MB", worker_memory="20MB") as mesh:
        stored = mesh.put(np.zeros(5 * MB))
        with pytest.raises(ObjectStoreFullError, match="20"):
            mesh.result(mesh.call(first_and_size, stored))
        assert mesh.result(mesh.call(ones, MB)).sum() == MB


def test_a_worker_that_leaves_hands_its_results_over_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with site("own", monkeypatch) as mesh:
        mark = tmp_path / "started"
        task = mesh.call(slow_ones, 5 * MB, str(mark))
        until(mark.exists, 20)
        mesh.worker.stop()
        assert mesh.result(task).sum() == 5 * MB


def slow_ones(count: int, mark: str) -> Any:
    tasks.leave(mark)
    time.sleep(0.3)
    return np.ones(count)


# --- interrupts, and a coordinator that comes back


def test_a_task_that_waits_for_an_object_for_ever_can_be_cancelled(mesh: Site, tmp_path: Path) -> None:
    oid = next(mesh._oids)
    mesh.peer.send(PutObject(oid, MB, "", None, []))  # Announced, and never sent.
    mark = tmp_path / "started"
    box = {"ref": refs.ObjectRef(oid, MB)}
    task = mesh.call(wait_for_it, box, str(mark))
    until(mark.exists, 20)
    pid = int(mark.read_text())
    mesh.peer.send(CancelTasks([task]))
    assert mesh.outcome(task)[0] == Status.CANCELLED
    assert pid in [process.pid for process in mesh.runners()], "the interrupt was enough"
    assert mesh.result(mesh.call(ones, MB)).sum() == MB
    mesh.peer.send(DeleteObjects([oid]))
    mesh.nothing_left()


def wait_for_it(box: Dict[str, Any], mark: str) -> None:
    tasks.leave(mark)
    get_inside(box)


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_starts_afresh_with_a_coordinator_that_comes_back(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with site(way, monkeypatch) as mesh:
        pid = mesh.result(mesh.call(keep, mesh.put(np.ones(MB))))
        mesh.restart()
        assert mesh.result(mesh.call(look_at_kept)) == (pid, MB), "an idle runner keeps what it has"
        large_values_work(mesh)
        mark = tmp_path / "started"
        mesh.call(die_holding, mesh.put(np.ones(MB)), str(mark))
        until(mark.exists, 20)
        mesh.restart()
        large_values_work(mesh)  # In the only slot: the task of a client that nobody knows there was ended.
        mesh.nothing_left()


def large_values_work(mesh: Site) -> None:
    again = mesh.put(np.full(MB, 2.0))
    assert mesh.result(mesh.call(first_and_size, again)) == (2.0, 8 * MB)
    assert mesh.result(mesh.call(ones, MB)).sum() == MB
    mesh.release(again)
