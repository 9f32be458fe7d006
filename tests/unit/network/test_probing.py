"""Who answers at an address: meshes, and what else may have the port."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Callable, Iterator

import pytest

from gpumesh import GPUMesh
from gpumesh.config import PROTOCOL_VERSION
from gpumesh.network import probing
from gpumesh.network.address import Address, parse_address
from gpumesh.protocol import frames
from gpumesh.version import __version__

SECONDS = 5.0


@pytest.fixture(scope="module")
def mesh() -> Iterator[object]:
    """A coordinator without workers."""
    handle = GPUMesh.start_coordinator(port=0)
    yield handle
    handle.stop()


@contextlib.contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[Address]:
    """Something on loopback that treats each connection so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def serve() -> None:
            listener.settimeout(0.05)
            while not over.is_set():
                with contextlib.suppress(OSError):
                    sock = listener.accept()[0]
                    with sock:
                        sock.settimeout(SECONDS)
                        answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Address("127.0.0.1", listener.getsockname()[1])
        finally:
            over.set()
            thread.join()


def test_a_mesh_tells_who_it_is_without_a_token(mesh: GPUMesh) -> None:
    found = probing.probe(parse_address(mesh.url), SECONDS)

    assert (found.kind, found.text, found.is_mesh) == (probing.MESH, "", True)
    assert len(found.mesh) == 16
    assert (found.gpumesh, found.protocol, found.ip) == (__version__, PROTOCOL_VERSION, "127.0.0.1")
    assert 0 < found.seconds < SECONDS


def test_who_only_looks_is_no_complaint(mesh: GPUMesh, caplog: pytest.LogCaptureFixture) -> None:
    address = parse_address(mesh.url)
    for _ in range(20):
        assert probing.probe(address, SECONDS).is_mesh
    with GPUMesh(mesh.url, token=mesh.token, fallback=False) as client:
        refused = [event for event in client.events() if event["kind"] == "refused"]

    assert refused == []
    assert caplog.records == []


def test_the_token_is_proved_without_joining(mesh: GPUMesh) -> None:
    address = parse_address(mesh.url)

    assert probing.prove(address, mesh.token, SECONDS) == ""
    assert "the token was refused" in probing.prove(address, "another token of some length", SECONDS)
    with GPUMesh(mesh.url, token=mesh.token, fallback=False) as client:
        assert client.workers() == []


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    found = probing.probe(Address("127.0.0.1", port), SECONDS)

    assert found.kind == probing.REFUSED
    assert "start a coordinator there with `gpumesh serve`" in found.text


@pytest.mark.parametrize(
    ("says", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "an HTTP server, not a gpumesh coordinator"),
        (b"SSH-2.0-OpenSSH_9.0\r\n", "an SSH server, not a gpumesh coordinator"),
        (b"\x1b]0;evil\x07 hello\r\n", "something that starts with"),
        (b"", "closed the connection"),
        (frames.PREAMBLE + b"\xff" * 64, "broke off"),
        (frames.PREAMBLE, "broke off"),
    ],
)
def test_something_else_has_the_port(says: bytes, text: str) -> None:
    def answer(sock: socket.socket) -> None:
        sock.recv(8)
        sock.sendall(says)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass

    with server(answer) as address:
        found = probing.probe(address, SECONDS)

    assert found.kind == probing.OTHER
    assert text in found.text
    assert found.text.isprintable()


def test_another_version_says_which() -> None:
    def answer(sock: socket.socket) -> None:
        sock.recv(4096)
        sock.sendall(frames.MAGIC + struct.pack("<H", 77))

    with server(answer) as address:
        found = probing.probe(address, SECONDS)

    assert (found.kind, found.protocol) == (probing.VERSION, 77)
    assert "install the same gpumesh version" in found.text


def test_silence_is_not_waited_for_longer_than_told() -> None:
    with server(lambda sock: sock.recv(4096) and sock.recv(4096)) as address:
        started = time.monotonic()
        found = probing.probe(address, 0.3)

    assert found.kind == probing.SILENT
    assert time.monotonic() - started < 2.0


def test_a_name_that_nobody_knows() -> None:
    found = probing.probe(Address("no-such-machine.invalid", 8000), SECONDS)

    assert found.kind == probing.NO_NAME
    assert "the machine's IP address" in found.text


def test_a_flood_is_not_read_to_its_end() -> None:
    sent = [0]

    def answer(sock: socket.socket) -> None:
        sock.recv(4096)
        with contextlib.suppress(OSError):
            sock.sendall(frames.PREAMBLE)
            for _ in range(10_000):
                sent[0] += sock.send(struct.pack("<IBBH", 4000, 2, 0, 0) + bytes(4000))

    with server(answer) as address:
        found = probing.probe(address, SECONDS)

    assert found.kind == probing.OTHER
