"""The session over real sockets against a coordinator in miniature."""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import socket
import sys
import threading
import time
import weakref
from typing import Any, Iterator, List

import pytest

from gpumesh.client import session as session_module
from gpumesh.client.futures import MeshFuture, submit_one
from gpumesh.client.inputs import Call
from gpumesh.client.session import Session, SpecHandle
from gpumesh.client.waiting import as_completed, wait
from gpumesh.errors import (
    AuthenticationError,
    MeshClosedError,
    MeshUnavailableError,
    ProtocolError,
    TaskCancelledError,
    VersionMismatchError,
)
from gpumesh.model.ids import client_of
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import OutOfBand
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import (
    DefineFunction,
    DefineSpec,
    MeshChanged,
    RegisterClient,
    ResubmissionEnds,
    SubmitTasks,
    TaskNotice,
    TaskOutput,
    TaskResults,
)
from gpumesh.serialization.values import dumps
from tests.unit.client.fake_mesh import Exported, FakeMesh

SPEC = TaskSpec(b"d" * 16, "work")


@pytest.fixture
def mesh() -> Iterator[FakeMesh]:
    with FakeMesh() as fake:
        yield fake


def no_local_mesh() -> Any:
    raise AssertionError("no local mesh is wanted here")


def connect(mesh: FakeMesh, **options: Any) -> Session:
    return Session(**{"url": mesh.url, "token": "secret", "start_local": no_local_mesh, **options})


def start(session: Session, *, payload: Any = b"p", spec: TaskSpec = SPEC) -> MeshFuture:
    return submit_one(session, session.define(Exported, spec), payload)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class ManySink:
    """One sink for many tasks, as a stream is."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.ended: List[Any] = []

    def task_ended(self, task_id: int, status: int, payload: Any, seconds: float, worker: str) -> None:
        with self.condition:
            self.ended.append((task_id, status, payload, seconds, worker))
            self.condition.notify_all()


# --- tasks


def test_the_first_task_registers_defines_and_submits_in_that_order(mesh: FakeMesh) -> None:
    session = connect(mesh)
    assert mesh.received == []

    future = start(session)

    assert future.result(10) == 0
    assert [type(message) for message in mesh.received[1:]] == [RegisterClient, DefineFunction, DefineSpec, SubmitTasks]
    assert mesh.received[1].client == client_of(future.task_id)
    assert mesh.received[2] == DefineFunction(b"d" * 16, b"body")
    session.close()


def test_a_spec_is_defined_once_and_ids_count_up(mesh: FakeMesh) -> None:
    session = connect(mesh)
    futures = [start(session) for _ in range(2000)]
    assert [future.result(10) for future in futures] == list(range(2000))
    assert futures[0].worker == "w"
    assert futures[0].elapsed == 0.25
    assert session.define(Exported, SPEC) is session.define(Exported, SPEC)
    assert sum(type(message) is DefineSpec for message in mesh.received) == 1
    session.close()


def test_many_tasks_share_one_sink_and_have_consecutive_ids(mesh: FakeMesh) -> None:
    session, sink = connect(mesh), ManySink()
    handle = session.define(Exported, SPEC)

    first = session.submit_many(handle, [b"x"] * 1500, sink)

    assert session.drive_until(lambda: len(sink.ended) == 1500, sink.condition, 10)
    assert sorted(task_id for task_id, *_ in sink.ended) == list(range(first, first + 1500))
    assert session.submit(handle, b"x", sink) == first + 1500
    session.close()


def test_large_payloads_travel_beside_small_ones(mesh: FakeMesh) -> None:
    session = connect(mesh)
    big = OutOfBand([b"pickle", bytes(range(256)) * 40_000])
    futures = [start(session, payload=Call(big) if number % 5 == 0 else b"small") for number in range(20)]
    futures.append(start(session, payload=Call(b"z" * 3_000_000)))
    wait(futures, 30)
    assert all(future.done() for future in futures)
    assert mesh.parts_of(mesh.tasks[futures[0].task_id].oid) == big.parts
    assert mesh.parts_of(mesh.tasks[futures[-1].task_id].oid) == [b"z" * 3_000_000]
    session.close()


def test_a_slow_coordinator_holds_the_submitter_back() -> None:
    with FakeMesh(answers=False) as mesh:
        session = connect(mesh)
        futures = [start(session, payload=b"x" * 200_000)]
        mesh.until(lambda: len(mesh.tasks) == 1)
        mesh._lock.acquire()  # It reads no further.
        thread = threading.Thread(target=lambda: futures.extend(start(session, payload=b"x" * 200_000) for _ in range(300)))
        thread.start()
        held_at = -1
        while held_at != len(futures):  # Until what the system itself buffers is full.
            held_at = len(futures)
            thread.join(0.3)
        assert thread.is_alive()
        assert held_at < 250
        mesh._lock.release()
        thread.join(20)
        session.flush()
        mesh.until(lambda: len(mesh.tasks) == 301)
        session.close()


def test_many_threads_submit_and_wait_at_once(mesh: FakeMesh) -> None:
    session = connect(mesh)
    results: List[int] = []

    def work() -> None:
        for _ in range(200):
            results.append(start(session).result(20))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == list(range(1200))
    session.close()


def test_callbacks_come_without_anyone_waiting_and_may_wait_themselves(mesh: FakeMesh) -> None:
    session = connect(mesh)
    seen: List[int] = []
    arrived = threading.Event()

    def and_then(_: Any) -> None:
        seen.append(start(session).result(10))
        arrived.set()

    start(session).add_done_callback(and_then)
    assert arrived.wait(10)
    assert seen == [1]

    batch = [start(session) for _ in range(50)]
    batch[0].add_done_callback(lambda _: seen.append(batch[49].result(10)))
    wait(batch, 10)
    assert seen == [1, 51]
    session.close()


def test_as_completed_over_thousands_needs_no_help_of_the_io_thread(mesh: FakeMesh) -> None:
    session = connect(mesh)
    futures = [start(session) for _ in range(3000)]
    assert {future.result() for future in as_completed(futures, 20)} == set(range(3000))
    session.close()


def test_cancel_reaches_the_coordinator_and_the_task_ends_at_once() -> None:
    with FakeMesh(answers=False) as mesh:
        session = connect(mesh)
        future = start(session)
        mesh.until(lambda: len(mesh.tasks) == 1)
        assert future.cancel()
        mesh.until(lambda: mesh.cancelled == [future.task_id])
        mesh.finish(future.task_id, 5)
        with pytest.raises(TaskCancelledError):
            future.result()
        session.close()


def test_memory_of_finished_tasks_is_given_back(mesh: FakeMesh) -> None:
    session = connect(mesh)
    futures = [start(session) for _ in range(100)]
    watched = [weakref.ref(future) for future in futures]
    wait(futures, 10)
    del futures
    channel = session._remote
    assert channel is not None
    assert channel.pending_tasks == 0
    gc.collect()
    assert [ref() for ref in watched] == [None] * 100
    session.close()


# --- output, notices, questions


def test_output_of_tasks_is_printed_in_whole_lines(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh.answers = False
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    session = connect(mesh)
    future = start(session)
    mesh.until(lambda: len(mesh.tasks) == 1)
    task_id = future.task_id
    mesh.send(TaskOutput(task_id, 1, b"one\ntw", "pc1"), TaskOutput(task_id, 2, b"bad\n", "pc1"))
    mesh.send(TaskOutput(task_id, 1, b"o\nunfinished \xff", "pc1"))
    mesh.finish(task_id)
    future.result(10)
    assert out.getvalue() == "(work pc1) one\n(work pc1) two\n(work pc1) unfinished \N{REPLACEMENT CHARACTER}\n"
    assert err.getvalue() == "(work pc1) bad\n"
    session.close()


def test_output_may_go_to_a_hook_instead(mesh: FakeMesh) -> None:
    mesh.answers = False
    session = connect(mesh)
    lines: List[Any] = []
    session.on_output = lambda *line: lines.append(line)
    future = start(session)
    mesh.until(lambda: len(mesh.tasks) == 1)
    mesh.send(TaskOutput(future.task_id, 1, b"hello\n", "pc1"))
    mesh.finish(future.task_id)
    future.result(10)
    assert lines == [("work", "pc1", 1, "hello")]
    session.close()


def test_a_notice_becomes_a_warning(mesh: FakeMesh, caplog: pytest.LogCaptureFixture) -> None:
    mesh.answers = False
    session = connect(mesh)
    future = start(session)
    mesh.until(lambda: len(mesh.tasks) == 1)
    mesh.send(TaskNotice(future.task_id, "task t-1 needs 3 GPUs"))
    mesh.finish(future.task_id)
    future.result(10)
    assert ("gpumesh", logging.WARNING, "task t-1 needs 3 GPUs") in caplog.record_tuples
    session.close()


def test_a_question_is_answered(mesh: FakeMesh) -> None:
    session = connect(mesh)
    assert session.query("anything") == {"asked": "anything"}
    session.close()


# --- connecting


def test_a_refused_token_is_an_error_and_never_a_fallback(mesh: FakeMesh) -> None:
    session = connect(mesh, token="wrong")
    for _ in range(2):
        with pytest.raises(AuthenticationError, match="token"):
            start(session)
    session.close()


def test_another_kind_of_server_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(100)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        session = Session(url=f"127.0.0.1:{server.getsockname()[1]}", token="", start_local=no_local_mesh)
        with pytest.raises(ProtocolError, match="HTTP server"):
            start(session)
        thread.join(10)
        session.close()


def test_another_protocol_version_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(100)
                sock.sendall(b"\x89mesh\n\x63\x00")

        thread = threading.Thread(target=answer)
        thread.start()
        session = Session(url=f"127.0.0.1:{server.getsockname()[1]}", token="", start_local=no_local_mesh)
        with pytest.raises(VersionMismatchError, match="99"):
            start(session)
        thread.join(10)
        session.close()


def test_silence_behind_an_open_port_ends_after_the_connect_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        session = Session(
            url=f"127.0.0.1:{server.getsockname()[1]}",
            token="",
            connect_timeout=0.2,
            fallback=False,
            start_local=no_local_mesh,
        )
        began = time.monotonic()
        with pytest.raises(MeshUnavailableError, match="says nothing within 0.2 s"):
            start(session)
        assert time.monotonic() - began < 2
        session.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "no-such-host.invalid"])
def test_without_fallback_an_unreachable_mesh_is_an_error(host: str) -> None:
    session = Session(url=f"{host}:{free_port()}", token="", fallback=False, connect_timeout=3, start_local=no_local_mesh)
    with pytest.raises(MeshUnavailableError):
        start(session)
    with pytest.raises(MeshUnavailableError):
        session.query("anything")
    session.close()


def test_no_address_without_fallback_is_an_error() -> None:
    session = Session(url=None, token=None, fallback=False, start_local=no_local_mesh)
    with pytest.raises(MeshUnavailableError, match="no mesh is configured"):
        start(session)
    session.close()


def test_an_unreachable_mesh_is_replaced_by_this_machine_with_one_warning(
    mesh: FakeMesh, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(url=f"127.0.0.1:{free_port()}", token="", start_local=lambda: mesh)

    assert [start(session).result(10) for _ in range(3)] == [0, 1, 2]
    assert session.query("anything") == {"asked": "anything"}

    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert warnings[0].endswith("running on this machine instead")
    assert session.is_local_fallback
    session.close()


def test_a_mesh_without_workers_is_replaced_until_it_has_some(
    mesh: FakeMesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "JOINING_WORKER_SECONDS", 0.05)
    with FakeMesh(workers=0) as empty:
        session = Session(url=empty.url, token="secret", start_local=lambda: mesh)
        assert start(session).result(10) == 0
        assert len(mesh.tasks) == 1
        assert "has no workers; running on this machine instead" in caplog.text

        empty.send(MeshChanged(1))
        session.query("anything")  # The answer comes after what was sent before.
        assert start(session).result(10) == 0
        assert len(empty.tasks) == 1

        empty.send(MeshChanged(0))
        session.query("anything")
        start(session).result(10)
        assert len(mesh.tasks) == 2
        session.close()


def test_a_worker_that_is_just_joining_is_waited_for() -> None:
    with FakeMesh(workers=0) as mesh:
        session = connect(mesh)
        joining = threading.Thread(target=lambda: (mesh.until(lambda: len(mesh.received) > 1), mesh.send(MeshChanged(1))))
        joining.start()
        assert start(session).result(10) == 0
        joining.join(10)
        session.close()


def test_a_mesh_without_workers_is_an_error_without_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "JOINING_WORKER_SECONDS", 0.05)
    with FakeMesh(workers=0) as mesh:
        session = connect(mesh, fallback=False)
        with pytest.raises(MeshUnavailableError, match="has no workers"):
            start(session)
        session.close()


# --- losing the coordinator


def test_after_a_lost_connection_pending_tasks_are_submitted_again_under_their_ids() -> None:
    with FakeMesh(answers=False) as mesh:
        session, sink = connect(mesh), ManySink()
        futures = [start(session) for _ in range(10)]
        handle = session.define(Exported, SPEC)
        first = session.submit_many(handle, [b"a", b"b"], sink)
        session.flush()
        mesh.until(lambda: len(mesh.tasks) == 12)
        mesh.finish(futures[0].task_id, "early")
        mesh.finish(first, "early")
        assert futures[0].result(10) == "early"
        before = dict(mesh.tasks)
        mesh.received.clear()
        mesh.tasks.clear()

        mesh.answers = True
        mesh.drop()

        assert [future.result(10) for future in futures[1:]] == list(range(1, 10))
        assert session.drive_until(lambda: len(sink.ended) == 2, sink.condition, 10)
        assert sorted(mesh.tasks) == sorted(set(before) - {futures[0].task_id, first})
        assert {type(message) for message in mesh.received} >= {RegisterClient, DefineFunction, DefineSpec}
        assert start(session).result(10) == 12
        session.close()


def test_what_was_sent_before_is_marked_when_it_is_submitted_again_and_the_end_of_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with FakeMesh(answers=False) as mesh:
        session = connect(mesh)
        first = start(session, spec=SPEC._replace(retries=0))
        second = start(session)
        session.flush()
        mesh.until(lambda: len(mesh.tasks) == 2)
        assert not any(message.resumes for message in mesh.received if type(message) is RegisterClient)
        mesh.received.clear()
        mesh.answers = True
        mesh.drop()
        assert [first.result(10), second.result(10)] == [0, 1]

        mesh.until(lambda: ResubmissionEnds() in mesh.received)
        assert [message.resumes for message in mesh.received if type(message) is RegisterClient] == [True]
        sent = [message for message in mesh.received if type(message) is SubmitTasks]
        assert [(len(message.task_ids), message.again) for message in sent] == [(1, True), (1, True)]
        assert type(mesh.received[-1]) is ResubmissionEnds
        mesh.received.clear()
        assert start(session).result(10) == 2
        assert [message.again for message in mesh.received if type(message) is SubmitTasks] == [False]
        assert caplog.text.count("lost the coordinator") == 1
        session.close()


def test_tasks_submitted_while_the_coordinator_is_away_wait_for_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gpumesh")
    port = free_port()
    mesh = FakeMesh(port=port)
    session = connect(mesh)
    assert start(session).result(10) == 0
    mesh.close()
    assert session.drive_until(lambda: "lost the coordinator" in caplog.text, threading.Condition(), 10)
    lost = next(record for record in caplog.records if "lost the coordinator" in record.getMessage())
    assert lost.levelno == logging.INFO, "nobody waited for anything"
    futures = [start(session) for _ in range(5)]
    once = start(session, spec=SPEC._replace(retries=0))
    with FakeMesh(port=port):
        assert [future.result(20) for future in futures] == [1, 2, 3, 4, 5]
        assert once.result(10) == 6
    assert "is back" in caplog.text
    session.close()


def test_a_coordinator_that_stays_away_fails_what_is_pending() -> None:
    mesh = FakeMesh(answers=False)
    session = connect(mesh, reconnect_timeout=0.3)
    future = start(session)
    mesh.until(lambda: len(mesh.tasks) == 1)
    mesh.close()
    with pytest.raises(MeshUnavailableError, match=r"did not come back within 0.3 s"):
        future.result(10)
    session.close()


def test_an_interrupt_in_the_middle_of_receiving_loses_nothing() -> None:
    with FakeMesh(answers=False) as mesh:
        session = connect(mesh)
        futures = [start(session) for _ in range(4)]
        session.flush()
        mesh.until(lambda: len(mesh.tasks) == 4)

        def interrupt(_: Any) -> None:
            raise KeyboardInterrupt

        futures[1].add_done_callback(interrupt)
        results = [(future.task_id, 0, dumps("first"), 0.1) for future in futures]
        threading.Timer(0.1, lambda: mesh.send(TaskResults("w", results))).start()
        with pytest.raises(KeyboardInterrupt):
            futures[3].result(10)

        mesh.answers = True
        assert [future.result(10) for future in futures[:2]] == ["first", "first"]
        for number, future in enumerate(futures[2:], 2):
            assert future.result(10) in ("first", number)  # What had arrived still counts; the rest is submitted again.
        assert start(session).result(10) == 4
        session.close()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a signal at a given time")
def test_ctrl_c_in_a_waiting_thread_leaves_the_session_usable() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with FakeMesh(answers=False) as mesh:
        session = connect(mesh)
        future = start(session)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                future.result(10)
        finally:
            signal.signal(signal.SIGALRM, before)
        mesh.finish(future.task_id, 1)
        assert future.result(10) == 1
        assert len(mesh.connections) == 1
        session.close()


# --- the end


def test_close_ends_what_is_pending_and_what_comes_later() -> None:
    with FakeMesh(answers=False) as mesh:
        session = connect(mesh)
        future = start(session)
        waiting = [threading.Thread(target=lambda: future.exception(10)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        session.close()
        session.close()
        for thread in waiting:
            thread.join(5)
        with pytest.raises(MeshClosedError):
            future.result()
        with pytest.raises(MeshClosedError):
            start(session)


def test_a_session_that_was_never_used_closes() -> None:
    session = Session(url="127.0.0.1:1", token="", start_local=no_local_mesh)
    session.close()
    with pytest.raises(MeshClosedError):
        session.query("anything")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_connects_for_itself_and_leaves_its_parents_tasks_alone() -> None:
    with FakeMesh(answers=False) as mesh:
        session = connect(mesh)
        inherited = start(session)
        mesh.until(lambda: len(mesh.tasks) == 1)
        mesh.answers = True
        child = os.fork()
        if child == 0:
            code = 1
            try:
                try:
                    inherited.result(10)
                except MeshClosedError:
                    code = start(session).result(10)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        with mesh._lock:
            sock, connection = mesh.connections[0]
            connection.send(TaskResults("w", [(inherited.task_id, 0, dumps("parent"), 0.1)]))
            mesh._flush(sock, connection)
        assert inherited.result(10) == "parent"
        session.close()


def test_a_handle_belongs_to_its_session(mesh: FakeMesh) -> None:
    session = connect(mesh)
    handle = session.define(Exported, SPEC)
    assert isinstance(handle, SpecHandle)
    assert (handle.session, handle.name) == (session, "work")
    assert session.define(Exported, SPEC._replace(timeout=3.0)) is not handle
    session.close()


def test_statuses_pass_through_unchanged(mesh: FakeMesh) -> None:
    mesh.on_submit = lambda task_id, payload: (task_id, int(Status.REFUSED), {"reason": "too much"}, 0.0)
    session, sink = connect(mesh), ManySink()
    task_id = session.submit(session.define(Exported, SPEC), b"x", sink)
    assert session.drive_until(lambda: bool(sink.ended), sink.condition, 10)
    assert sink.ended == [(task_id, Status.REFUSED, {"reason": "too much"}, 0.0, "w")]
    session.close()
