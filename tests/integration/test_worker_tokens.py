"""A worker-only token lends a machine: its tasks have all that they were given, and whoever has it gets nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator, List

import numpy as np
import pytest

import gpumesh
from gpumesh import GPUMesh, accelerate
from gpumesh.client.link import dial, local_facts
from gpumesh.errors import AuthenticationError
from gpumesh.model.ids import SEQUENCE_BITS
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle, Stored
from gpumesh.model.resources import Requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.network.address import parse_address
from gpumesh.protocol import messages as msg
from gpumesh.protocol.auth import metrics_token, worker_token
from gpumesh.protocol.connection import NOT_A_CLIENT, Closed
from gpumesh.runtime.embedded import CoordinatorHandle, add_worker, start_coordinator
from gpumesh.runtime.relay import LENDS_ONLY
from tests.integration.programs import started_programs
from tests.support import tasks
from tests.support.client import Client
from tests.support.mesh_peer import MeshPeer
from tests.support.processes import free_port, until

TOKEN = "the full token of the mesh"
LENT = worker_token(TOKEN)
CLIENT = 7
TASK = CLIENT << SEQUENCE_BITS
OID = TASK + 1000  # Objects of a client are named after it.
OK = int(Status.OK)


# --- what tasks there can do


@pytest.fixture(scope="module")
def lent() -> Iterator[GPUMesh]:
    """A mesh whose only worker joined with the worker-only token."""
    with start_coordinator(0, TOKEN) as coordinator, add_worker(coordinator.url, LENT, slots=2, score=1.0):
        with GPUMesh(coordinator.url, token=TOKEN, fallback=False) as mesh:
            yield mesh


def total(array: Any) -> int:
    return int(array.sum())


def total_within(found: Any) -> int:
    return int(gpumesh.get(found["deep"][0]).sum())


def ones(n: int) -> Any:
    return np.ones(n)


def put_ones(n: int) -> Any:
    return gpumesh.put(np.ones(n))


def count(n: int) -> Iterator[Any]:
    for i in range(n):
        yield np.full(20_000, i)


def submit() -> Any:
    return gpumesh.current_mesh().workers()


class Keeper:
    """Keeps what it is given beyond the call that brought it."""

    def __init__(self, first: Any) -> None:
        self.kept = first

    def keep(self, found: Any) -> None:
        self.kept = found

    def total(self) -> int:
        return int(gpumesh.get(self.kept["deep"][0]).sum())


def test_arguments_results_refs_and_streams_are_as_on_any_worker(lent: GPUMesh) -> None:
    large = np.arange(200_000)
    ref = lent.put(large)

    def captured() -> int:
        return int(gpumesh.get(ref).sum())

    add, make = accelerate(lent)(total), accelerate(lent)(ones)
    assert add.remote(large).result(20) == large.sum()
    assert add.remote(ref).result(20) == large.sum()
    assert accelerate(lent)(total_within).remote({"deep": [ref]}).result(20) == large.sum()
    assert accelerate(lent)(captured).remote().result(20) == large.sum()
    assert add.remote(make.remote(100_000)).result(20) == 100_000
    inner = accelerate(lent)(put_ones).remote(100_000).result(20)
    assert lent.get(inner).sum() == 100_000
    assert accelerate(lent)(total_within).remote({"deep": [inner]}).result(20) == 100_000
    assert [int(each[0]) for each in accelerate(lent)(count).remote(5)] == [0, 1, 2, 3, 4]


def test_an_actor_keeps_what_it_was_given(lent: GPUMesh) -> None:
    keeper = lent.actor(Keeper).remote({"deep": [lent.put(np.ones(100_000))]})
    assert keeper.total.remote().result(20) == 100_000

    keeper.keep.remote({"deep": [lent.put(np.ones(50_000))]}).result(20)

    assert keeper.total.remote().result(20) == 50_000


def test_tasks_there_cannot_use_the_mesh_and_are_told_why(lent: GPUMesh) -> None:
    with pytest.raises(AuthenticationError) as caught:
        accelerate(lent)(submit).remote().result(20)

    assert str(caught.value) == LENDS_ONLY


def test_people_see_which_machines_are_trusted_with_what(lent: GPUMesh) -> None:
    until(lambda: [worker["trust"] for worker in lent.workers()] == ["worker"])
    with add_worker(lent.url, TOKEN, slots=1, score=1.0) as trusted:
        until(lambda: {worker["id"]: worker["trust"] for worker in lent.workers()}.get(trusted["id"]) == "full")


@pytest.mark.parametrize("token", [LENT, metrics_token(TOKEN)])
def test_it_is_no_token_for_a_client_and_nothing_runs_here_instead(lent: GPUMesh, token: str) -> None:
    with GPUMesh(lent.url, token=token) as mesh:
        for use in (mesh.workers, lambda: accelerate(mesh)(ones).remote(1).result(20)):
            with pytest.raises(AuthenticationError):
                use()


def test_a_restart_of_the_coordinator_costs_its_tasks_nothing(tmp_path: Path) -> None:
    """It was there before, and brings back what it had."""
    port = free_port()
    words = (
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-self-worker",
        "--no-discovery",
        "--db",
        str(tmp_path / "jobs.db"),
    )
    with started_programs(tmp_path) as programs:
        first = programs.gpumesh("serve", *words, GPUMESH_TOKEN=TOKEN)
        first.wait_for("serving at")
        worker = programs.gpumesh("join", f"127.0.0.1:{port}", "--slots", "2", "--score", "1", GPUMESH_TOKEN=LENT)
        worker.wait_for("works for")
        with Client(f"127.0.0.1:{port}", TOKEN) as client:
            running = [client.remote(tasks.count_then_sleep, str(tmp_path), f"run{n}", 1.5) for n in range(2)]
            until(lambda: len(list(tmp_path.glob("run?.*"))) == 2, 20)
            first.kill()
            programs.gpumesh("serve", *words, GPUMESH_TOKEN=TOKEN).wait_for("serving at")
            assert [future.result(30) for future in running] == ["run0", "run1"]
        assert len(list(tmp_path.glob("run?.*"))) == 2, "each has begun once"


# --- what whoever has it can do without tasks


@pytest.fixture
def mesh() -> Iterator[CoordinatorHandle]:
    with start_coordinator(0, TOKEN) as coordinator:
        yield coordinator


def port_of(mesh: CoordinatorHandle) -> int:
    return int(mesh.url.rpartition(":")[2])


class Site:
    """A client with a secret object, a worker that it trusts, and somebody who has only the worker token."""

    def __init__(self, mesh: CoordinatorHandle) -> None:
        self.port = port_of(mesh)
        self.client = MeshPeer(self.port, TOKEN, client=CLIENT)
        self.client.send(msg.PutObject(OID, 6, "", b"secret", ()))
        self.settle()
        self.trusted = MeshPeer(self.port, TOKEN, worker="trusted")
        self.thief: Any = None

    def settle(self) -> Any:
        """All that the client has said has been heard."""
        self.client.send(msg.Query(1, "objects", {}))
        return self.client.expect(msg.Answer).value

    def send_in(self) -> MeshPeer:
        """The one with the worker token, when all other work has gone to others."""
        self.thief = MeshPeer(self.port, LENT, worker="thief")
        return self.thief

    def submit(self, *payloads: Any, first: int = 0) -> None:
        self.client.send(
            msg.DefineFunction(b"f" * 16, b"code"),
            msg.DefineSpec(0, TaskSpec(b"f" * 16, "task", Requirement())),
            msg.SubmitTasks(0, [TASK + first + place for place in range(len(payloads))], list(payloads)),
        )

    def close(self) -> None:
        for peer in (self.client, self.trusted, self.thief):
            if peer is not None:
                peer.close()


@pytest.fixture
def site(mesh: CoordinatorHandle) -> Iterator[Site]:
    site = Site(mesh)
    yield site
    site.close()


FOREIGN: List[Any] = [
    msg.Query(1, "workers", {}),
    msg.Query(1, "objects", {}),
    msg.Query(1, "events", {}),
    msg.Query(1, "jobs", {}),
    msg.Query(1, "actors", {}),
    msg.DefineFunction(b"f" * 16, b"code"),
    msg.SubmitTasks(0, [TASK + 1], [b""]),
    msg.CancelTasks([TASK]),
    msg.ResultsReceived(1),
    msg.ResubmissionEnds(),
    msg.StreamCredit(TASK, 10),
    msg.SubmitJob(1, ()),
    msg.ChangeJob(1, "j-1", "kill"),
    msg.KillActor(1, TASK, True),
    msg.CreateDetached(1, bytes(16), (), b""),
    msg.RotateToken(1, bytes(16), 0.0),
    msg.RegisterClient(CLIENT, "as somebody else", True),
    msg.RegisterWorker("trusted", ()),
]


@pytest.mark.parametrize("message", FOREIGN, ids=lambda message: type(message).__name__)
def test_what_only_a_client_may_say_ends_the_connection(site: Site, message: Any) -> None:
    thief = site.send_in()

    thief.send(message)

    assert "a worker does not send" in thief.expect(Closed).reason
    assert not any(type(seen) in (msg.Answer, msg.TaskResults, msg.TokenRotated) for seen in thief.seen)


def test_it_does_not_open_a_connection_of_a_client(mesh: CoordinatorHandle) -> None:
    with pytest.raises(AuthenticationError, match=NOT_A_CLIENT):
        dial(parse_address(mesh.url), token=LENT, timeout=10, facts=local_facts())


@pytest.mark.parametrize("ask", [msg.FetchObject(1 << 31, OID, 1 << 20), msg.LocateObject(3, OID)])
def test_objects_of_others_are_not_for_it(site: Site, ask: Any) -> None:
    thief = site.send_in()
    thief.send(msg.HoldRefs([OID]), msg.PutObject(OID, 4, "", b"mine", ()), ask)

    answer = thief.expect(msg.ObjectAt)

    assert answer.data is None
    assert answer.path == ""
    assert "is not for this worker" in answer.error
    (shown,) = site.settle()["objects"]
    assert (shown["references"], shown["copies"]) == (1, ())


def test_what_its_task_mentions_it_may_read_and_nothing_that_it_says_of_others(site: Site) -> None:
    """It names an object of others inside its own, and in its result: neither makes that readable there."""
    inner = OID + 1
    site.client.send(msg.PutObject(inner, 5, "", b"given", ()))
    site.settle()
    thief = site.send_in()
    site.submit(*[Bundle(b"call", (), (inner,))] * 2)
    task_id, attempt, _ = thief.expect(msg.RunTasks).tasks[0]
    mine = 99 << SEQUENCE_BITS
    thief.send(
        msg.FetchObject(1 << 31, inner, 1 << 20),
        msg.PutObject(mine, 4, "", b"mine", (OID,)),
        msg.TasksFinished([(task_id, attempt, OK, Bundle(b"result", (), (OID, mine)), 0.1)]),
    )
    assert thief.expect(msg.ObjectAt).data == b"given"
    ((done, _, result, _),) = site.client.expect(msg.TaskResults).results
    assert done == task_id
    assert list(result[2]) == [mine]

    site.submit(*[Bundle(b"call", (), (mine,))] * 2, first=10)  # Both workers get one.
    thief.expect(msg.RunTasks)
    thief.send(msg.FetchObject((1 << 31) + 1, OID, 1 << 20))
    assert "is not for this worker" in thief.expect(msg.ObjectAt).error


def test_a_result_that_is_an_object_of_others_is_refused(site: Site) -> None:
    thief = site.send_in()
    site.submit(b"a", b"b")
    task_id, attempt, _ = thief.expect(msg.RunTasks).tasks[0]

    thief.send(msg.TasksFinished([(task_id, attempt, OK, Stored(OID, 6), 0.1)]))

    ((done, status, details, _),) = site.client.expect(msg.TaskResults).results
    assert (done, status) == (task_id, int(Status.REFUSED))
    assert "may not read" in details["reason"]


def test_it_neither_ends_nor_speaks_for_tasks_of_others(site: Site) -> None:
    site.submit(b"arguments")
    task_id, attempt, _ = site.trusted.expect(msg.RunTasks).tasks[0]
    thief = site.send_in()

    thief.send(
        msg.TaskOutput(task_id, 1, b"forged\n", "thief"),
        msg.StreamItems(task_id, attempt, 0, [b"forged"]),
        msg.TasksFinished([(task_id, attempt, OK, b"forged", 0.1), (TASK + 5, 1001, OK, b"forged", 0.1)]),
        msg.DeleteObjects([OID]),
        msg.FetchObject(1 << 31, OID, 1),  # Answered behind all of these.
    )
    thief.expect(msg.ObjectAt)
    site.trusted.send(msg.TasksFinished([(task_id, attempt, OK, b"true", 0.1)]))

    ((done, _, result, _),) = site.client.expect(msg.TaskResults).results
    assert (done, result) == (task_id, b"true")
    assert not any(type(seen) in (msg.TaskOutput, msg.StreamItems, msg.TaskResults) for seen in site.client.quiet())
    assert len(site.settle()["objects"]) == 1


def test_it_brings_back_nothing_that_it_was_not_given(site: Site) -> None:
    """As after a restart of a coordinator that it never worked for."""
    site.submit(b"arguments")
    task_id, attempt, _ = site.trusted.expect(msg.RunTasks).tasks[0]
    spec = TaskSpec(b"f" * 16, "task", Requirement())
    absent = 8 << SEQUENCE_BITS  # Of a client that is not here at the moment.

    site.thief = MeshPeer(site.port, LENT, worker="thief", held=[(spec, (), 0, ((task_id, attempt), (absent, 1)))])
    recalled = site.thief.expect(msg.RecallTasks)
    site.thief.send(msg.TasksFinished([(absent, 1, OK, b"forged", 0.1)]), msg.FetchObject(1 << 31, OID, 1))
    site.thief.expect(msg.ObjectAt)

    assert sorted(recalled.tasks) == [(task_id, attempt), (absent, 1)]
    with MeshPeer(site.port, TOKEN, client=8, resumes=True) as client:
        assert not any(type(seen) is msg.TaskResults for seen in client.quiet())


def test_after_a_broken_connection_it_has_what_it_was_given_before(site: Site) -> None:
    thief = site.send_in()
    site.submit(Bundle(b"call", (), (OID,)), b"other")
    given = {task[0]: task[1] for peer in (thief, site.trusted) for task in peer.expect(msg.RunTasks).tasks}
    thief.close()
    spec = TaskSpec(b"f" * 16, "task", Requirement())

    site.thief = MeshPeer(site.port, LENT, worker="thief", held=[(spec, (), 0, tuple(given.items()))])
    recalled = site.thief.expect(msg.RecallTasks)

    (other,) = recalled.tasks
    (kept,) = set(given.items()) - {tuple(other)}
    site.thief.send(msg.TasksFinished([(*kept, OK, b"done", 0.1)]))
    assert site.client.expect(msg.TaskResults).results[0][0] == kept[0]


def test_the_name_of_a_worker_is_taken_by_nobody_of_another_kind(site: Site) -> None:
    with MeshPeer(site.port, LENT, worker="trusted") as thief:
        assert "is here already" in thief.expect(Closed).reason

    site.submit(b"arguments")
    assert site.trusted.expect(msg.RunTasks).tasks


@pytest.mark.parametrize("name", ["before 7", "kept for 7", "died", "x" * 65, "new\nline"])
def test_a_worker_is_not_called_like_something_else(site: Site, name: str) -> None:
    with MeshPeer(site.port, LENT, worker=name) as peer:
        assert "a worker's id is" in peer.expect(Closed).reason
