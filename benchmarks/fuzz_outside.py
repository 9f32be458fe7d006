"""Sides that are reached from outside without the mesh's own frames, or before them: the real port, and what is announced on a network."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
from typing import Any, Dict, List, Sequence

from benchmarks.fuzz_engine import Case
from benchmarks.fuzz_memory import OBJECT_MEMORY, TOKEN, JumpingLoop
from gpumesh.network.announcement import MAX_ADDRESSES, MAX_ANNOUNCEMENTS, MAX_MESHES, MAX_NAME, Sightings, from_txt
from gpumesh.network.certificates import load_or_make_identity
from gpumesh.network.tls import client_context
from gpumesh.protocol.connection import Connection, Established, PeerFacts
from gpumesh.runtime.coordinator import Coordinator

CLOSED_WITHIN_SECONDS = 3.0  # Of saying that this was all.
WEBSOCKET = (
    b"GET /mesh HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
HTTP = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    b"HEAD /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n\r\n",
    b"GET /?login HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic eDp5\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    WEBSOCKET,
)


def _client_hello() -> bytes:
    """The first bytes of a TLS connection."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_context().wrap_bio(incoming, outgoing, server_hostname="gpumesh")
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


def _websocket(data: bytes, *, opcode: int = 2) -> bytes:
    """A masked frame; the mask is nothing."""
    return bytes((0x80 | opcode, 0x80 | len(data))) + bytes(4) + data


class Port:
    """A coordinator's port as the system has it: plain, TLS, HTTP and WebSocket; each case is a connection."""

    name = "port"
    kinds: Sequence[int] = (1, 2, 3, 4, 5)

    def __init__(self, loop: JumpingLoop) -> None:
        self._loop = loop
        self._folder = tempfile.TemporaryDirectory(prefix="gpumesh-fuzz-")
        identity = load_or_make_identity(self._folder.name)
        self._coordinator = Coordinator(token=TOKEN, object_memory=OBJECT_MEMORY, identity=identity)
        self._port = 0

    def seeds(self) -> List[Case]:
        from benchmarks.fuzz_sides import _strangers_seeds

        hello = _client_hello()
        seeds = _strangers_seeds() + [[request] for request in HTTP] + [[hello], [hello[:50], hello[50:]], [b"\x16\x03\x01"]]
        inside = [hello, b"GET / HTTP/1.1\r\n\r\n", *(frame for case in _strangers_seeds()[:3] for frame in case)]
        seeds += [[WEBSOCKET, *(_websocket(data[:125]) for data in inside[:place])] for place in range(1, len(inside))]
        seeds += [[WEBSOCKET, _websocket(b"x", opcode=opcode)] for opcode in (0, 1, 8, 9, 10, 3)]
        return seeds

    async def _start(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._port = listener.getsockname()[1]
        await self._coordinator.start(listener)

    async def run(self, case: Case) -> List[str]:
        if not self._port:
            await self._start()
        self._coordinator.door.admission._records.clear()  # What it does about wrong tokens is not what this looks for.
        problems: List[str] = []
        with socket.socket() as sock:
            sock.setblocking(False)
            await self._loop.sock_connect(sock, ("127.0.0.1", self._port))
            try:
                for data in case:
                    await self._loop.sock_sendall(sock, data)
                sock.shutdown(socket.SHUT_WR)
                await asyncio.wait_for(self._read(sock), CLOSED_WITHIN_SECONDS)
            except asyncio.TimeoutError:
                problems.append(f"not closed {CLOSED_WITHIN_SECONDS:g} s after the end of what was sent")
            except OSError:
                pass  # It was shown out in the midst of it.
        errors, self._loop.errors = self._loop.errors, []
        return problems + errors

    async def _read(self, sock: socket.socket) -> None:
        while await self._loop.sock_recv(sock, 65536):
            pass

    async def rest(self) -> str:
        """A real peer shakes hands, and nobody is left at the door."""
        with socket.socket() as sock:
            sock.setblocking(False)
            await self._loop.sock_connect(sock, ("127.0.0.1", self._port))
            facts = PeerFacts("0", "3.11", "test")
            peer = Connection.dial(role="client", token=TOKEN, nonce=os.urandom(32), now=0.0, facts=facts)
            events: List[Any] = []
            while not events:
                for part in peer.data_to_send():
                    await self._loop.sock_sendall(sock, bytes(part))
                events = peer.receive_data(await asyncio.wait_for(self._loop.sock_recv(sock, 65536), 5.0), 0.1)
        for _ in range(50):
            await asyncio.sleep(0.01)
            if not len(self._coordinator.door.admission) and not self._coordinator._links:
                break
        problems, self._loop.errors = self._loop.errors, []
        if type(events[0]) is not Established:
            problems.append(f"an honest peer is not let in: {events}")
        if len(self._coordinator.door.admission):
            problems.append(f"{len(self._coordinator.door.admission)} strangers are left behind")
        return "\n".join(problems)

    async def close(self) -> None:
        """End it."""
        await self._coordinator.stop()
        self._folder.cleanup()


FIELDS = (b"id", b"name", b"cert", b"tls", b"v", b"p", b"at", b"hosts", b"port")


def _is_the_readers_own(host: str) -> bool:
    """Whether the system takes this, in any of its forms (127.1, 0x7f.1), for the machine itself or nobody."""
    try:
        return socket.inet_aton(host)[0] in (0, 127)
    except (OSError, UnicodeError):
        return host in ("localhost", "::1", "::", "")


class Announced:
    """What somebody announces on the local network: the strings of a TXT record, addresses, a port."""

    name = "announced"
    kinds: Sequence[int] = tuple(range(8))

    def __init__(self, loop: JumpingLoop) -> None:
        self._sightings = Sightings(5.0)
        self._now = 0.0

    def seeds(self) -> List[Case]:
        whole = [
            b"9f8e7d6c5b4a3928",
            b"lab",
            b"ab" * 16,
            b"1",
            b"0.1.0",
            b"1",
            b"http://192.168.1.9:8000",
            b"192.168.1.5 fe80::1%eth0",
        ]
        return [[*whole, port] for port in (b"8000", b"0", b"70000")] + [
            whole[:6],
            [*whole[:7], b"127.0.0.1 :: localhost", b"80"],
        ]

    async def run(self, case: Case) -> List[str]:
        given: Dict[bytes, bytes] = dict(zip(FIELDS, case))
        hosts = given.pop(b"hosts", b"192.168.1.5").decode("latin-1").split(" ")
        digits = given.pop(b"port", b"8000")
        found = from_txt(given, hosts, int(digits) if digits.isdigit() and len(digits) < 30 else -1)
        if found is None:
            return []
        self._now += 0.1
        self._sightings.seen(case[0].hex(), found)
        problems = [f"{text!r} is not for a terminal" for text in (found.mesh, found.name, found.certificate, found.gpumesh) if not text.isprintable()]  # fmt: skip
        if len(found.name) > MAX_NAME or len(found.addresses) > MAX_ADDRESSES or len(found.mesh) > 64:
            problems.append(f"too long: {found}")
        for address in found.addresses:
            if _is_the_readers_own(address.host) or not 0 < address.port < 65536:
                problems.append(f"{address!r} is an address of nobody else")
            if not str(address).isprintable():
                problems.append(f"{address!r} is not for a terminal")
        return problems

    async def rest(self) -> str:
        meshes = self._sightings.meshes()
        due = self._sightings.due(self._now)
        if len(meshes) > MAX_MESHES or len(due) > MAX_ANNOUNCEMENTS * MAX_ADDRESSES:
            return f"{len(meshes)} meshes with {len(due)} addresses are kept"
        self._sightings = Sightings(5.0)
        return ""


def outside() -> Dict[str, Any]:
    """These sides by their names."""
    return {Port.name: Port, Announced.name: Announced}
