"""F65: nothing that comes from a peer who has not shown the token is ever unpickled, whoever listens and whoever dials."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
import socket
import struct
from pathlib import Path
from typing import Any, Iterator, List

import psutil
import pytest

from gpumesh.client.link import dial, local_facts
from gpumesh.errors import MeshError
from gpumesh.model.outcomes import Status
from gpumesh.network.address import Address
from gpumesh.protocol import frames
from gpumesh.protocol.messages import Challenge, Hello, Proof, RegisterClient, SubmitTasks, TaskResults, Welcome
from gpumesh.runtime.embedded import EmbeddedMesh
from gpumesh.runtime.relay_greeting import ASKED
from tests.support import tasks
from tests.support.client import Client
from tests.support.guarded import Guarded
from tests.support.peers import Server, connect, encoded, frame, read_to_end

KINDS = range(256)


class Canary:
    """Unpickling one leaves a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.fixture
def sung(tmp_path: Path) -> Path:
    return tmp_path / "unpickled"


@pytest.fixture
def canary(sung: Path) -> bytes:
    pickled = pickle.dumps(Canary(sung), protocol=2)
    pickle.loads(pickled)
    assert sung.exists(), "the canary sings when it is let out"
    sung.unlink()
    return pickled


def bodies(canary: bytes) -> List[bytes]:
    """The pickle as it is, and as a value inside what the codec takes apart."""
    import msgpack

    return [
        canary,
        msgpack.packb([canary] * 6),
        msgpack.packb([msgpack.ExtType(code, canary) for code in (1, 2, 42, 80, 127)]),
        msgpack.packb({"pickle": canary}),
    ]


@pytest.fixture(scope="module")
def mesh() -> Iterator[EmbeddedMesh]:
    with EmbeddedMesh(workers=1) as embedded:
        yield embedded


def send_to_coordinator(port: int, data: bytes) -> None:
    with connect(port) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        read_to_end(sock)


def test_a_coordinator_unpickles_nothing_of_a_stranger(mesh: EmbeddedMesh, canary: bytes, sung: Path) -> None:
    port = mesh.address.port
    hello = encoded(Hello("client", bytes(32), "0", "3.11", "test"))
    send_to_coordinator(port, canary)
    for kind in KINDS:
        send_to_coordinator(port, frames.PREAMBLE + b"".join(frame(kind, body) for body in bodies(canary)))
        send_to_coordinator(port, frames.PREAMBLE + hello + frame(kind, bodies(canary)[kind % 4]))
    for message in (
        Hello("client", canary[:32].ljust(32), canary.decode("latin-1"), "3.11", "test"),
        Hello(canary.decode("latin-1"), bytes(32), "0", "3.11", "test"),
        Proof(canary),
        RegisterClient(1, canary.decode("latin-1")),
        SubmitTasks(1, [1], [canary]),
    ):
        send_to_coordinator(port, frames.PREAMBLE + encoded(message))
        send_to_coordinator(port, frames.PREAMBLE + hello + encoded(message))

    with Client(mesh.url, mesh.token) as client:
        assert client.remote(tasks.noop, 1).result(20) == 1
    assert not sung.exists()


def rogue_answers(canary: bytes) -> List[bytes]:
    """What a false coordinator may send before it has proved anything."""
    challenge = encoded(Challenge(bytes(32), "m", "0", "3.11"))
    answers = [canary, frames.PREAMBLE + canary]
    answers += [frames.PREAMBLE + frame(kind, bodies(canary)[kind % 4]) for kind in KINDS[:64]]
    answers += [frames.PREAMBLE + challenge + frame(kind, bodies(canary)[kind % 4]) for kind in KINDS[:64]]
    answers += [frames.PREAMBLE + challenge + frame(kind, canary) for kind in (frames.CHUNK, 0x80, 0xFF)]
    answers += [
        frames.PREAMBLE + challenge + encoded(Welcome(canary, 1)),
        frames.PREAMBLE
        + challenge
        + encoded(Welcome(bytes(32), 1))
        + encoded(TaskResults("w", [(1, int(Status.OK), canary, 0.0)])),
        frames.PREAMBLE + encoded(Challenge(canary[:32].ljust(32), canary.decode("latin-1"), "0", "3.11")),
    ]
    return answers


def test_a_client_unpickles_nothing_of_a_false_coordinator(canary: bytes, sung: Path) -> None:
    answers = rogue_answers(canary)
    left = iter(answers)

    def serve(sock: socket.socket) -> None:
        sock.sendall(next(left))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass

    with Server(serve) as server:
        for _ in answers:
            with pytest.raises(MeshError):
                dial(Address("127.0.0.1", server.port), token="secret", timeout=5.0, facts=local_facts())
        assert server.accepted == len(answers)
    assert not sung.exists()


def test_a_worker_unpickles_nothing_of_a_false_coordinator(canary: bytes, sung: Path) -> None:
    from gpumesh.devices.detect import local_facts as worker_facts
    from gpumesh.runtime.worker import WorkerAgent

    answers = rogue_answers(canary)
    left = iter(answers)

    def serve(sock: socket.socket) -> None:
        sock.sendall(next(left))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass

    async def one(port: int) -> None:
        ours, theirs = socket.socketpair()  # Nobody starts runners: it is not about them.
        with theirs:
            agent = WorkerAgent(
                address=Address("127.0.0.1", port), token="secret", facts=worker_facts(slots=1), worker_id="w", spawner=ours
            )
            with pytest.raises(MeshError):
                await asyncio.wait_for(agent.run(), 10)

    async def main(port: int) -> None:
        for _ in answers:
            await one(port)

    with Server(serve) as server:
        asyncio.run(main(server.port))
    assert not sung.exists()


def relay_of(mesh: EmbeddedMesh) -> str:
    """The path of the socket on which a worker's agent lets its tasks use the mesh, which it opens when one does."""
    with Client(mesh.url, mesh.token) as client:
        assert client.remote(use_the_mesh).result(20) == 1
    connections = psutil.Process(mesh.processes["worker-1"]).net_connections(kind="unix")
    (path,) = {each.laddr for each in connections if each.laddr.endswith("/tasks") and each.status != "ESTABLISHED"}
    return str(path)


def use_the_mesh() -> int:
    import gpumesh

    return len(gpumesh.current_mesh().workers())


def test_a_worker_unpickles_nothing_of_who_calls_at_the_socket_for_its_tasks(
    mesh: EmbeddedMesh, canary: bytes, sung: Path
) -> None:
    path = relay_of(mesh)
    asked = ASKED.pack(1, 7)
    hello = frames.PREAMBLE + encoded(Hello("client", bytes(32), "0", "3.11", "test"))
    said = [canary, canary[: ASKED.size], asked[:3], hello, asked + canary, asked + frames.PREAMBLE + canary]
    said += [frames.PREAMBLE + frame(kind, bodies(canary)[kind % 4]) for kind in KINDS[:128]]
    for data in said:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(path)
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            read_to_end(sock)

    with Client(mesh.url, mesh.token) as client:
        assert client.remote(use_the_mesh).result(20) == 1
    assert not sung.exists()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A coordinator as `gpumesh serve` makes it: this one speaks HTTP."""
    with Guarded(Path(tmp_path_factory.mktemp("served"))) as site:
        yield site


def test_what_comes_by_http_is_not_unpickled(served: Guarded, canary: bytes, sung: Path) -> None:
    port = served.port
    text = base64.b64encode(canary)
    for verb in (b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"HEAD", b"PROPFIND"):
        for path in (b"/", b"/metrics", b"/mesh", b"/healthz", b"/" + text):
            head = b"%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n" % (verb, path)
            head += b"Authorization: Bearer %s\r\nCookie: session=%s\r\nContent-Type: application/octet-stream\r\n" % (
                text,
                text,
            )
            send_to_coordinator(port, b"%sContent-Length: %d\r\n\r\n%s" % (head, len(canary), canary))

    assert served.log.about("Traceback") == []
    with Client(served.url, served.token) as client:
        assert client.workers() == []
    assert not sung.exists()


def websocket_frame(data: bytes) -> bytes:
    """One binary message of a client (RFC 6455), masked with zeros."""
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack(">H", len(data))
    return b"\x82" + size + bytes(4) + data


def test_what_comes_by_websocket_is_not_unpickled(served: Guarded, canary: bytes, sung: Path) -> None:
    head = (
        b"GET /mesh HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    hello = frames.PREAMBLE + encoded(Hello("client", bytes(32), "0", "3.11", "test"))
    said = [canary, hello + canary, hello + frame(0x22, bodies(canary)[1]), hello + encoded(Proof(canary))]
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(served.port)) for _ in said]
        for sock, data in zip(socks, said):
            sock.sendall(head)
            assert sock.recv(65536).startswith(b"HTTP/1.1 101 ")
            sock.sendall(websocket_frame(data))
        for sock in socks:
            read_to_end(sock)

    assert served.log.about("Traceback") == []
    with Client(served.url, served.token) as client:
        assert client.workers() == []
    assert not sung.exists()


def test_a_coordinator_never_unpickles_what_a_client_sends_either(mesh: EmbeddedMesh, sung: Path) -> None:
    """The value is unpickled by the runner alone: nobody else has the file open, so only its process id is in it."""
    with Client(mesh.url, mesh.token) as client:
        assert client.remote(tasks.noop, Singer(sung)).result(20) == "sung"

    singers = set(sung.read_text().split())
    processes = mesh.processes
    assert singers
    assert str(processes["coordinator"]) not in singers
    assert str(processes["worker-1"]) not in singers


class Singer:
    """Arrives as the word "sung", having noted in which process."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return sing, (str(self.file),)


def sing(file: str) -> str:
    import os

    with open(file, "a") as out:
        out.write(f"{os.getpid()} ")
    return "sung"
