"""Wrong addresses, foreign servers, broken and hostile peers: a clear error where somebody can act on it, and nobody else notices."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from typing import Any, Callable, Iterator, List

import pytest

from gpumesh.config import CONTROL_FRAME_BYTES
from gpumesh.errors import AuthenticationError, MeshError, MeshUnavailableError, ProtocolError, VersionMismatchError
from gpumesh.protocol import frames
from gpumesh.protocol.connection import Connection
from gpumesh.protocol.messages import Hello, Proof, Query, RegisterClient, RegisterWorker, SubmitTasks
from gpumesh.runtime.embedded import EmbeddedMesh
from tests.integration.programs import Programs, started_programs
from tests.support import peers, tasks, through_proxy
from tests.support.client import Client
from tests.support.peers import Server, connect, encoded, frame, handshake, read_to_end
from tests.support.processes import free_port, resident_bytes, until

HELLO = encoded(Hello("client", bytes(32), "0", "3.11", "test"))
OTHER_VERSION = frames.MAGIC + struct.pack("<H", 99)


@pytest.fixture(scope="module")
def mesh() -> Iterator[EmbeddedMesh]:
    with EmbeddedMesh(workers=1, slots=1) as embedded:
        with Client(embedded.url, embedded.token) as client:
            client.remote(tasks.noop).result(20)
        yield embedded


@pytest.fixture(autouse=True)
def others_are_unaffected(mesh: EmbeddedMesh) -> Iterator[None]:
    """A client that was there before goes on, and a new one is served at once."""
    with Client(mesh.url, mesh.token) as client:
        assert client.remote(tasks.noop, 1).result(20) == 1
        yield
        assert client.remote(tasks.noop, 2).result(5) == 2
        with Client(mesh.url, mesh.token) as another:
            assert another.remote(tasks.noop, 3).result(5) == 3


def failure(url: str, token: str = "secret", *, within: float, connect_timeout: float = 1.0) -> MeshError:
    """How a client that is pointed there fails."""
    started = time.monotonic()
    with Client(url, token, connect_timeout=connect_timeout) as client:
        with pytest.raises(MeshError) as caught:
            client.remote(tasks.noop)
    assert time.monotonic() - started < within
    return caught.value


# --- a client at the wrong address


def test_nobody_listens_there() -> None:
    error = failure(f"127.0.0.1:{free_port()}", within=1)

    assert type(error) is MeshUnavailableError
    assert "nothing listens" in str(error)
    assert "gpumesh serve" in str(error)


def test_the_host_does_not_answer() -> None:
    error = failure("192.0.2.1:8000", within=3)  # Reserved for documentation: routed nowhere.

    assert type(error) is MeshUnavailableError
    assert "192.0.2.1:8000" in str(error)


def test_the_host_name_does_not_exist() -> None:
    error = failure("no-such-host.invalid:8000", within=3)

    assert type(error) is MeshUnavailableError
    assert "no-such-host.invalid" in str(error)


def test_the_token_is_wrong(mesh: EmbeddedMesh) -> None:
    error = failure(mesh.url, "guess", within=2)

    assert type(error) is AuthenticationError
    assert "token" in str(error)
    assert mesh.token not in str(error)
    assert "guess" not in str(error)


def test_a_web_server_is_there() -> None:
    with peers.http_server() as port:
        error = failure(f"127.0.0.1:{port}", within=3)

    assert type(error) is ProtocolError
    assert "HTTP server" in str(error)


@pytest.mark.parametrize(
    ("serve", "kind", "text"),
    [
        (peers.say(b"SSH-2.0-OpenSSH_9.6\r\n"), ProtocolError, "SSH server"),
        (peers.say(b"220 mail.example ESMTP\r\n"), ProtocolError, "not a gpumesh coordinator"),
        (peers.say(b"\x15\x03\x01\x00\x02\x02\x46"), ProtocolError, "TLS"),
        (peers.say(b"-ERR unknown command\r\n", close=True), ProtocolError, "not a gpumesh coordinator"),
        (peers.say(b"", close=True), ProtocolError, "closed the connection"),
        (peers.say(OTHER_VERSION), VersionMismatchError, "99"),
        (peers.say(frames.PREAMBLE + frame(0x05, b"\x90" * 3000)), ProtocolError, ""),
        (peers.say(frames.PREAMBLE + frame(1, b"", length=0xFFFFFFFF)), ProtocolError, "4294967295"),
        (peers.say(frames.PREAMBLE + frame(1, b"", length=0)), ProtocolError, "0 bytes"),
        (peers.stay_silent, MeshUnavailableError, "says nothing within 1 s"),
        (peers.trickle(frames.PREAMBLE + frame(1, b"x" * 100), 0.1), MeshUnavailableError, "says nothing within 1 s"),
        (peers.trickle(b"220 mail.example ESMTP\r\n", 0.02), ProtocolError, "not a gpumesh coordinator"),
    ],
    ids=[
        "ssh",
        "mail",
        "tls",
        "closes after a word",
        "closes",
        "version",
        "wrong frame",
        "huge",
        "zero",
        "silent",
        "slow",
        "slow mail",
    ],
)
def test_something_else_is_there(serve: Callable[[socket.socket], None], kind: type, text: str) -> None:
    with Server(serve) as server:
        error = failure(server.url, within=3)

    assert type(error) is kind
    assert text in str(error)
    assert str(server.port) in str(error)


def test_random_bytes_are_there() -> None:
    seed = random.Random(7)
    for _ in range(30):
        with Server(peers.say(seed.randbytes(seed.randrange(1, 5000)), close=True)) as server:
            assert isinstance(failure(server.url, within=3), MeshError)


# --- a worker at the wrong address


JOIN = ("join", "--token", "guess", "--slots", "1", "--score", "1")


def test_join_says_what_is_wrong_and_leaves(mesh: EmbeddedMesh, tmp_path: Any) -> None:
    with started_programs(tmp_path) as programs, peers.http_server() as web, Server(peers.say(OTHER_VERSION)) as other:
        started = {
            "token was refused": join(programs, mesh.url),
            "HTTP server": join(programs, f"127.0.0.1:{web}"),
            "mesh protocol 99": join(programs, other.url),
        }
        for text, program in started.items():
            assert program.wait() != 0
            assert text in program.output
            assert "Traceback" not in program.output


def test_join_waits_for_a_coordinator_that_is_not_there_yet(tmp_path: Any) -> None:
    port = free_port()
    with started_programs(tmp_path) as programs:
        # A line every half second, which usually is one a minute.
        words = (
            "tests.support.other_times",
            "OUTAGE_LINE_SECONDS=0.5",
            "OUTAGE_LINE_MAX_SECONDS=0.5",
            "RECONNECT_MAX_DELAY_SECONDS=0.05",
        )
        worker = programs.python("-m", *words, "--", *JOIN, f"127.0.0.1:{port}")
        worker.wait_for(r"cannot reach the coordinator at [0-9.:]+ \(nothing listens.*\); trying again$")
        worker.wait_for(r"cannot reach the coordinator at [0-9.:]+, for \d s now \(nothing listens.*\); trying again$")

        programs.gpumesh("serve", "--host", "127.0.0.1", "--no-self-worker", "--port", str(port), "--token", "guess")

        tries = int(worker.wait_for(r"joined the mesh at .*, \d s after the first of (\d+) attempts")[1])
        worker.wait_for("works for")
        assert 2 < worker.output.count("cannot reach") + 1 < tries, "not a line for each"


def join(programs: Programs, url: str) -> Any:
    return programs.gpumesh(*JOIN, url)


def test_a_pair_that_cannot_agree_meets_ever_more_rarely_and_says_little(tmp_path: Any) -> None:
    def take_in_and_leave(sock: socket.socket) -> None:
        now = time.monotonic()
        connection = Connection.listen(token="guess", nonce=os.urandom(32), mesh="m", now=now, facts=peers.FACTS)
        while not connection.established:
            connection.receive_data(sock.recv(65536), time.monotonic())
            for part in connection.data_to_send():
                sock.sendall(part)
        sock.sendall(frame(1, b"", length=0))
        peers.read_to_end(sock)

    with started_programs(tmp_path) as programs, Server(take_in_and_leave) as server:
        worker = join(programs, server.url)
        worker.wait_for("lost the coordinator")
        until(lambda: server.accepted >= 4, 20)
        began = time.monotonic()
        until(lambda: server.accepted >= 5, 20)
        assert time.monotonic() - began > 0.05, "with pauses: here 0.16 to 0.8 s"
        assert worker.output.count("joined the mesh") <= 1  # None, where the end comes with the beginning.
        assert worker.output.count("lost the coordinator") == 1
        assert worker.output.count("cannot reach the coordinator") == 1


# --- a coordinator and its strangers


@pytest.mark.skipif(through_proxy.is_wanted(), reason="coordinators that a proxy stands before speak HTTP")
def test_a_web_browser_is_told_what_this_is(mesh: EmbeddedMesh) -> None:
    with connect(mesh.address.port) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = read_to_end(sock)

    assert answer.startswith(b"HTTP/1.1 426 ")
    assert b"gpumesh coordinator" in answer


def test_a_peer_of_another_version_is_told_ours(mesh: EmbeddedMesh) -> None:
    with connect(mesh.address.port) as sock:
        sock.sendall(OTHER_VERSION)

        assert read_to_end(sock).startswith(frames.PREAMBLE)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 100,
        b"\xff" * 5000,
        b"SSH-2.0-OpenSSH_9.6\r\n",
        frames.PREAMBLE + frame(1, b"", length=0),
        frames.PREAMBLE + frame(1, b"", length=0xFFFFFFFF),
        frames.PREAMBLE + frame(1, b"\xc1" * 100),
        frames.PREAMBLE + frame(0x7F, bytes(24)),
        frames.PREAMBLE + frame(0xEE, b"\x90"),
        frames.PREAMBLE + HELLO + HELLO,
        frames.PREAMBLE + HELLO + encoded(Proof(bytes(32))),
        frames.PREAMBLE + HELLO + encoded(RegisterClient(1, "no proof")),
        frames.PREAMBLE + encoded(Proof(bytes(32))),
    ],
    ids=[
        "zeros",
        "ones",
        "ssh",
        "zero",
        "huge",
        "not msgpack",
        "chunk",
        "unknown",
        "twice",
        "wrong proof",
        "no proof",
        "no hello",
    ],
)
def test_a_stranger_who_breaks_the_rules_is_shown_out(mesh: EmbeddedMesh, sent: bytes) -> None:
    if through_proxy.is_wanted() and sent[:1].isalpha():
        pytest.skip("coordinators that a proxy stands before wait for the rest of what may be HTTP")
    with connect(mesh.address.port) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(sent)
        started = time.monotonic()
        read_to_end(sock)

    assert time.monotonic() - started < 2


def test_random_bytes_at_any_stage_end_only_that_connection(mesh: EmbeddedMesh) -> None:
    seed = random.Random(11)
    for round_ in range(60):
        sock = handshake(mesh.address.port, mesh.token)[0] if round_ % 3 == 0 else connect(mesh.address.port)
        with sock:
            start = b"" if round_ % 3 != 1 else frames.PREAMBLE + HELLO
            with contextlib.suppress(ConnectionError):
                sock.sendall(start + seed.randbytes(seed.randrange(8, 3000)))
                sock.shutdown(socket.SHUT_WR)
            read_to_end(sock)


# --- a peer who knows the token


@pytest.mark.parametrize(
    "sent",
    [
        frame(0x20, b"", length=0),
        frame(0x20, b"", length=0xFFFFFFFF),
        frame(0x20, b"", length=4 * CONTROL_FRAME_BYTES),
        frame(0x20, b"\xc1\xc1"),
        frame(0x7F, struct.pack("<IIQQ", 1, 0, 5, 10) + b"x"),
        frame(0x7F, struct.pack("<IIQQ", 1, 0, 0, 1 << 62) + b"x"),
        HELLO,
        encoded(SubmitTasks(1, [1], [b""])),
        encoded(Query(1, "workers", {})),
        encoded(RegisterWorker("w", ())),
    ],
    ids=["zero", "huge", "over the limit", "not msgpack", "chunk out of order", "chunk of a giant", "hello again", "unregistered submit",
         "unregistered query", "client as worker"],
)  # fmt: skip
def test_a_known_peer_who_breaks_the_rules_is_told_and_shown_out(mesh: EmbeddedMesh, sent: bytes) -> None:
    sock, connection = handshake(mesh.address.port, mesh.token)
    with sock:
        sock.sendall(sent)
        events = connection.receive_data(read_to_end(sock), time.monotonic())

    assert connection.error is not None, events
    assert type(connection.error) is ProtocolError


def test_a_message_kind_from_the_future_is_answered_not_punished(mesh: EmbeddedMesh) -> None:
    sock, connection = handshake(mesh.address.port, mesh.token)
    with sock:
        sock.sendall(encoded(RegisterClient(77, "future")) + frame(0x7E, b"\x90") + encoded(Query(1, "workers", {})))
        events: List[Any] = []
        sock.settimeout(5)
        while not any(type(event).__name__ == "Answer" for event in events):
            events.extend(connection.receive_data(sock.recv(65536), time.monotonic()))

    assert connection.error is None


@pytest.mark.parametrize("role", ["client", "worker"])
def test_a_peer_whose_facts_make_no_sense_is_told(mesh: EmbeddedMesh, role: str) -> None:
    message = RegisterClient(1 << 40, "x") if role == "client" else RegisterWorker("w", ("host", -1, "many"))
    sock, connection = handshake(mesh.address.port, mesh.token, role=role)
    with sock:
        sock.sendall(encoded(message))
        connection.receive_data(read_to_end(sock), time.monotonic())

    assert type(connection.error) is ProtocolError


def test_half_open_connections_do_not_pile_up(mesh: EmbeddedMesh) -> None:
    coordinator = mesh.processes["coordinator"]
    before = len(os.listdir(f"/proc/{coordinator}/fd"))
    for _ in range(100):
        sock = connect(mesh.address.port)
        sock.sendall(frames.PREAMBLE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # Closed by a reset, not by goodbye.
        sock.close()
    deadline = time.monotonic() + 5
    while len(os.listdir(f"/proc/{coordinator}/fd")) > before + 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_authenticated_peer_who_announces_gigabytes_and_sends_little_costs_little(mesh: EmbeddedMesh) -> None:
    coordinator = mesh.processes["coordinator"]
    before = resident_bytes(coordinator)
    with contextlib.ExitStack() as stack:
        for number in range(4):
            sock, _ = handshake(mesh.address.port, mesh.token)
            stack.enter_context(sock)
            sock.sendall(encoded(RegisterClient(1000 + number, "greedy")))
            for transfer in range(8):
                sock.sendall(frame(0x7F, struct.pack("<IIQQ", transfer, 0, 0, 4 << 30) + bytes(1000)))
        with Client(mesh.url, mesh.token) as client:
            assert client.remote(tasks.noop, 5).result(5) == 5
        grown = resident_bytes(coordinator) - before
    assert grown < 200 << 20  # 32 MiB for each connection at most.
