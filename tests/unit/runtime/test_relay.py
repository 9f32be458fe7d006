"""The way from tasks to the coordinator: who may use it, what passes, and what becomes of the ends."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import threading
from typing import Any, Iterator, List

import pytest

from gpumesh.client.nested import dial_relay
from gpumesh.errors import AuthenticationError, MeshUnavailableError
from gpumesh.protocol.messages import Answer, Query, RegisterClient
from gpumesh.runtime.relay import WRITE_HIGH_BYTES
from gpumesh.runtime.relay_greeting import ANSWERED, ASKED
from tests.support.processes import free_port, until
from tests.support.relay_way import TOKEN, way
from tests.unit.client.fake_mesh import FakeMesh

CLIENT = 77
BOTH_WAYS = pytest.mark.parametrize("hands_over", [True, False], ids=["socket", "bytes"])


def talk(path: str, client: int = CLIENT) -> Any:
    link, established, rest = dial_relay(path, client, 10.0)
    assert rest == []
    return link, established


def ask(link: Any, what: str) -> Any:
    link.send([Query(1, what, {})])
    while True:
        readable, _ = link.wait(10.0)
        assert readable, "no answer"
        for event in link.receive() or ():
            if type(event) is Answer:
                return event.value


def goodbyes(mesh: FakeMesh) -> List[int]:
    """Clients that came back only to leave."""
    return [message.client for message in mesh.received if type(message) is RegisterClient and message.resumes]


def test_only_this_user_reaches_it_and_nothing_is_left() -> None:
    with FakeMesh() as mesh:
        with way(mesh.port) as made:
            folder = os.path.dirname(made.path)
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
            assert os.stat(folder).st_uid == os.getuid()
            assert stat.S_ISSOCK(os.stat(made.path).st_mode)
        assert not os.path.exists(folder)


@BOTH_WAYS
def test_a_client_goes_on_where_the_handshake_ended(*, hands_over: bool) -> None:
    with FakeMesh(workers=5) as mesh, way(mesh.port, hands_over=hands_over) as made:
        link, established = talk(made.path)
        assert (established.workers, established.mesh) == (5, "m")
        link.send([RegisterClient(CLIENT, "me")])
        assert ask(link, "something") == {"asked": "something"}
        assert (link.sock.family == socket.AF_UNIX) is not hands_over
        assert RegisterClient(CLIENT, "me") in mesh.received
        link.close("done")
        link.release()


@BOTH_WAYS
def test_without_a_coordinator_it_says_so(*, hands_over: bool) -> None:
    with (
        way(free_port(), hands_over=hands_over) as made,
        pytest.raises(MeshUnavailableError, match="has no coordinator at the moment"),
    ):
        dial_relay(made.path, CLIENT, 10.0)


@BOTH_WAYS
def test_a_refused_token_is_told_as_such(*, hands_over: bool) -> None:
    with (
        FakeMesh() as mesh,
        way(mesh.port, "wrong", hands_over=hands_over) as made,
        pytest.raises(AuthenticationError, match="token"),
    ):
        dial_relay(made.path, CLIENT, 10.0)


def test_without_a_relay_the_agent_is_named() -> None:
    with pytest.raises(MeshUnavailableError, match="the agent of this worker does not answer"):
        dial_relay("/nonexistent/tasks", CLIENT, 1.0)


def test_who_says_more_than_he_should_is_cut_off() -> None:
    with FakeMesh() as mesh, way(mesh.port) as made, socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(made.path)
        sock.sendall(ASKED.pack(os.getpid(), CLIENT) + b"more")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""


@BOTH_WAYS
def test_the_end_of_the_coordinators_side_is_the_end_of_the_runners(*, hands_over: bool) -> None:
    with FakeMesh() as mesh, way(mesh.port, hands_over=hands_over) as made:
        link, _ = talk(made.path)
        link.send([RegisterClient(CLIENT, "me")])
        mesh.until(lambda: bool(mesh.received))
        mesh.drop()
        readable, _ = link.wait(10.0)
        assert readable
        (closed,) = link.receive()
        assert isinstance(closed.error, MeshUnavailableError)
        link.release()


class Sink:
    """A coordinator that shakes hands and then reads only what it is told to; what passes is no message."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.socket: Any = None
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        from gpumesh.protocol.connection import Connection
        from tests.support.peers import FACTS

        sock, _ = self._listener.accept()
        connection = Connection.listen(token=TOKEN, nonce=os.urandom(32), mesh="m", now=0.0, facts=FACTS)
        while not connection.established:
            connection.receive_data(sock.recv(65536), 0.0)
            for part in connection.data_to_send():
                sock.sendall(part)
        self.socket = sock

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self._listener.close()


@pytest.fixture
def sink() -> Iterator[Sink]:
    made = Sink()
    yield made
    made.close()


def test_neither_side_is_read_faster_than_the_other_reads_and_nothing_is_lost(sink: Sink) -> None:
    with way(sink.port, hands_over=False) as made, socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(made.path)
        sock.sendall(ASKED.pack(os.getpid(), CLIENT))
        status, _, size, rest = ANSWERED.unpack(sock.recv(ANSWERED.size))
        assert (status, sock.recv(size), rest) == (0, b"m", 0)
        until(lambda: sink.socket is not None)
        for sender, receiver in ((sock, sink.socket), (sink.socket, sock)):
            piece, digest, sent = os.urandom(1 << 20), hashlib.sha256(), 0
            sender.settimeout(0.3)
            with contextlib.suppress(socket.timeout):
                while sent < 64 << 20:
                    count = sender.send(piece)
                    digest.update(piece[:count])
                    sent += count
            assert WRITE_HIGH_BYTES < sent < 32 << 20, "it stops when nobody reads"
            received, got = hashlib.sha256(), 0
            receiver.settimeout(10)
            while got < sent:
                data = receiver.recv(1 << 20)
                assert data
                received.update(data)
                got += len(data)
            assert received.digest() == digest.digest()
        sock.settimeout(10)
        sock.sendall(b"last words")
        sock.close()
        sink.socket.settimeout(10)
        said = b""
        while not said.endswith(b"last words"):
            said += sink.socket.recv(100)
        assert sink.socket.recv(100) == b""


@BOTH_WAYS
def test_a_process_that_is_gone_says_goodbye_as_every_client_that_it_was(*, hands_over: bool) -> None:
    with FakeMesh() as mesh, way(mesh.port, hands_over=hands_over) as made:
        links = [talk(made.path, client)[0] for client in (CLIENT, CLIENT + 1)]
        for link, client in zip(links, (CLIENT, CLIENT + 1)):
            link.send([RegisterClient(client, "me")])
            link.cut()
            link.release()
        mesh.until(lambda: len(mesh.received) >= 2)
        assert goodbyes(mesh) == []

        made.call(lambda: made.relay.process_gone(os.getpid()))

        until(lambda: sorted(goodbyes(mesh)) == [CLIENT, CLIENT + 1])
        made.call(lambda: made.relay.process_gone(os.getpid()))  # Told once is enough.
        assert sorted(goodbyes(mesh)) == [CLIENT, CLIENT + 1]


def test_the_goodbye_waits_for_a_coordinator_that_is_away() -> None:
    mesh = FakeMesh()
    with way(mesh.port) as made:
        link, _ = talk(made.path)
        mesh.close()
        link.cut()
        link.release()
        made.call(lambda: made.relay.process_gone(os.getpid()))
        with FakeMesh(port=mesh.port) as again:
            until(lambda: goodbyes(again) == [CLIENT])


@BOTH_WAYS
def test_an_agent_that_leaves_says_goodbye_for_its_processes(*, hands_over: bool) -> None:
    with FakeMesh() as mesh:
        with way(mesh.port, hands_over=hands_over) as made:
            link, _ = talk(made.path)
            link.send([RegisterClient(CLIENT, "me")])
            mesh.until(lambda: bool(mesh.received))
        assert goodbyes(mesh) == [CLIENT]
        link.release()


def test_a_token_never_passes(sink: Sink) -> None:
    with way(sink.port, hands_over=False) as made, socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(made.path)
        sock.sendall(ASKED.pack(os.getpid(), CLIENT))
        assert TOKEN.encode() not in sock.recv(4096)
