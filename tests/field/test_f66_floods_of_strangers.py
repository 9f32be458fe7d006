"""F66: strangers who announce gigabytes, send half a header, trickle or never read: memory stays flat and real clients do not notice."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Iterator, List

import pytest

from gpumesh import config
from gpumesh.protocol import connection as protocol
from gpumesh.protocol import frames
from gpumesh.protocol.messages import Hello
from gpumesh.runtime import doorway
from gpumesh.runtime.embedded import EmbeddedMesh, start_coordinator
from tests.support import tasks
from tests.support.client import Client
from tests.support.peers import connect, encoded, frame, read_to_end
from tests.support.processes import descriptors, resident_bytes, until

MEBIBYTE = 1 << 20
CONNECTIONS = 200
HELLO = encoded(Hello("client", bytes(32), "0", "3.11", "test"))


class Site:
    """A mesh in processes of its own, its coordinator's memory, and a real client."""

    def __init__(self, mesh: EmbeddedMesh) -> None:
        self.mesh = mesh
        self.port = mesh.address.port
        self.coordinator = mesh.processes["coordinator"]
        self.serve_one()
        self.before = resident_bytes(self.coordinator)

    def serve_one(self) -> float:
        """Seconds that a new client takes from connecting to a result."""
        started = time.monotonic()
        with Client(self.mesh.url, self.mesh.token) as client:
            assert client.remote(tasks.noop, 1).result(20) == 1
        return time.monotonic() - started

    def grown(self) -> int:
        return resident_bytes(self.coordinator) - self.before


@pytest.fixture
def site() -> Iterator[Site]:
    with EmbeddedMesh(workers=1, slots=1) as mesh:
        yield Site(mesh)


def crowd(port: int, first: bytes, count: int = CONNECTIONS) -> List[socket.socket]:
    """Connections that have all sent the same and stay open."""
    socks = []
    for _ in range(count):
        sock = connect(port)
        with contextlib.suppress(ConnectionError):
            sock.sendall(first)
        socks.append(sock)
    return socks


@pytest.mark.parametrize(
    "first",
    [
        frames.PREAMBLE + struct.pack("<IBBH", 0xFFFFFFFF, 1, 0, 0),
        frames.PREAMBLE + struct.pack("<IBBH", 4000, 1, 0, 0),
        frames.PREAMBLE + b"\x10\x00",
        frames.PREAMBLE[:3],
        b"",
        frames.PREAMBLE + HELLO,
        b"GET / HTTP/1.1\r\n",
    ],
    ids=["4 GiB announced", "the largest frame announced", "half a header", "half a preamble", "nothing", "no proof", "web"],
)
def test_two_hundred_strangers_cost_little_and_hold_up_nobody(site: Site, first: bytes) -> None:
    socks = crowd(site.port, first)
    try:
        for _ in range(20):
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.send(b"\0" * 100)
        assert site.serve_one() < 1.0
        assert site.grown() < 20 * MEBIBYTE
        assert descriptors(site.coordinator) < config.PENDING_HANDSHAKES + 40
    finally:
        for sock in socks:
            sock.close()


def test_a_stranger_who_sends_without_end_is_cut_off(site: Site) -> None:
    for start in (b"", frames.PREAMBLE, frames.PREAMBLE + HELLO, frames.PREAMBLE + frame(1, b"", length=0xFFFFFFFF)):
        with connect(site.port) as sock:
            with pytest.raises(OSError):
                sock.sendall(start + bytes(64 * MEBIBYTE))
    assert site.grown() < 20 * MEBIBYTE
    assert site.serve_one() < 1.0


def test_strangers_who_never_read_are_not_written_to_without_end(site: Site) -> None:
    socks = crowd(site.port, (frames.PREAMBLE + HELLO) * 100)
    assert site.serve_one() < 1.0
    assert site.grown() < 20 * MEBIBYTE
    for sock in socks:
        sock.close()


def test_a_stranger_who_trickles_is_dropped_when_the_handshake_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HANDSHAKE_SECONDS", 0.5)
    with start_coordinator(port=0, token="secret") as coordinator:
        port = int(coordinator.url.rpartition(":")[2])
        open_before = descriptors()
        started = time.monotonic()
        slow = [connect(port) for _ in range(20)]
        alive = list(slow)
        position = 0
        data = frames.PREAMBLE + HELLO
        while alive and time.monotonic() - started < 3:
            for sock in list(alive):
                try:
                    sock.sendall(data[position : position + 1])
                    sock.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        if not sock.recv(4096):
                            alive.remove(sock)
                    sock.setblocking(True)
                except OSError:
                    alive.remove(sock)
            position = min(position + 1, len(data) - 2)
            time.sleep(0.05)

        assert alive == []
        assert 0.4 < time.monotonic() - started < 1.5
        for sock in slow:
            sock.close()
        until(lambda: descriptors() <= open_before + 1)  # The event loop keeps one more from its first connection on.


def test_a_stranger_who_says_nothing_is_dropped_when_the_handshake_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorway, "HANDSHAKE_SECONDS", 0.3)
    with start_coordinator(port=0, token="secret") as coordinator:
        started = time.monotonic()
        with connect(int(coordinator.url.rpartition(":")[2])) as sock:
            read_to_end(sock)
        assert 0.2 < time.monotonic() - started < 1.5
