"""Somebody between a dialer and the coordinator who ends the TLS of both: he has another certificate, and is refused by both.

The same with the coordinator's certificate cannot be: showing it takes its private key.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import warnings
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from gpumesh.errors import AuthenticationError, MeshError
from gpumesh.network.address import HTTPS, Address
from gpumesh.network.certificates import Identity, load_or_make_identity
from gpumesh.network.tls import client_context, server_context
from gpumesh.protocol import frames
from gpumesh.protocol.connection import Closed, Established
from gpumesh.protocol.messages import Challenge, Hello, Welcome
from tests.support.guarded import TOKEN, Guarded, shake, tls_connect
from tests.support.peers import Server, connect, encoded


class Between:
    """Takes connections, and passes what it reads to the coordinator and back: inside TLS of its own, or as it is."""

    def __init__(self, port: int, identity: Identity, *, opens_tls: bool) -> None:
        self.read: List[bytes] = []  # What it has seen.
        self._port = port
        self._context = server_context(identity)
        self._opens_tls = opens_tls
        self._server = Server(self._serve)
        self.port = self._server.port

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            there: Any = stack.enter_context(connect(self._port))
            here: Any = sock
            if self._opens_tls:
                here = stack.enter_context(self._context.wrap_socket(sock, server_side=True))
                there = stack.enter_context(client_context().wrap_socket(there))
            back = threading.Thread(target=self._pass, args=(there, here), daemon=True)
            back.start()
            self._pass(here, there)
            back.join(10)

    def _pass(self, source: Any, target: Any) -> None:
        with contextlib.suppress(OSError):
            while True:
                data = source.recv(65536)
                if not data:
                    break
                self.read.append(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def other_identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_make_identity(str(tmp_path_factory.mktemp("other")))


@pytest.fixture
def between(guarded: Guarded, other_identity: Identity) -> Iterator[Between]:
    relay = Between(guarded.port, other_identity, opens_tls=True)
    yield relay
    relay.close()


@pytest.mark.parametrize("role", ["client", "worker"])
def test_with_another_certificate_he_is_refused_on_both_sides(guarded: Guarded, between: Between, role: str) -> None:
    logged = len(guarded.log.about("the token was refused"))
    for _ in range(3):
        with tls_connect(between.port) as sock:
            connection, events = shake(sock, TOKEN, role=role)
        assert [type(event) for event in events] == [Closed]
        assert isinstance(connection.error, AuthenticationError)

    assert len(guarded.log.about("the token was refused")) - logged <= 1
    assert guarded.peers() == (0, 0)
    seen = b"".join(between.read)
    assert encoded(Hello(role, b"\0" * 32, "0", "3.11", "test"))[:10] in seen, "he has read all of it"
    assert TOKEN.encode() not in seen


def test_a_real_client_is_told(guarded: Guarded, between: Between) -> None:
    from gpumesh.client.link import dial, local_facts

    with pytest.raises(AuthenticationError, match="token was refused|somebody"):
        dial(Address("127.0.0.1", between.port, HTTPS), token=TOKEN, timeout=5.0, facts=local_facts())
    assert guarded.peers() == (0, 0)


def test_a_real_worker_is_told_and_does_not_come_back(guarded: Guarded, between: Between) -> None:
    from gpumesh.devices.detect import local_facts
    from gpumesh.runtime.worker import WorkerAgent

    async def run() -> None:
        ours, theirs = socket.socketpair()  # Nobody starts runners: it is not about them.
        with theirs:
            address = Address("127.0.0.1", between.port, HTTPS)
            agent = WorkerAgent(address=address, token=TOKEN, facts=local_facts(slots=1), worker_id="w", spawner=ours)
            await asyncio.wait_for(agent.run(), 10)

    with pytest.raises(AuthenticationError):
        asyncio.run(run())
    assert guarded.peers() == (0, 0)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 200 OK\r\n\r\n", frames.PREAMBLE], ids=["nothing", "http", "the mesh, plain"])
def test_who_asks_for_tls_is_not_talked_out_of_it(says: bytes) -> None:
    """Somebody in between who breaks every TLS handshake gets no other."""
    from gpumesh.client.link import dial, local_facts

    heard: List[bytes] = []

    def serve(sock: socket.socket) -> None:
        heard.append(sock.recv(65536))
        sock.sendall(says)
        if heard[-1][:1] == b"\x89":  # He goes on as a coordinator would.
            sock.sendall(encoded(Challenge(bytes(32), "m", "0", "3.11")))
            heard[-1] += sock.recv(65536)

    with Server(serve) as server, pytest.raises(MeshError):
        dial(Address("127.0.0.1", server.port, HTTPS), token=TOKEN, timeout=1.0, facts=local_facts())
    assert heard[0][:1] == b"\x16", "a TLS hello"
    plain = [data for data in heard if data[:1] not in (b"\x16", b"\x15")]  # A look at who is there instead, for the error.
    for data in plain:
        kinds = [frame.kind for frame in frames.FrameDecoder().feed(data[frames.PREAMBLE_BYTES :])]
        assert 0x03 not in kinds, f"a proof, which somebody could guess at: {data!r}"


def test_the_real_ones_come_through_where_nobody_opens_anything(guarded: Guarded, other_identity: Identity) -> None:
    """So that what is refused above is refused for the reason that is meant."""
    from gpumesh.client.link import dial, local_facts

    relay = Between(guarded.port, other_identity, opens_tls=False)
    try:
        link, established, _ = dial(Address("127.0.0.1", relay.port, HTTPS), token=TOKEN, timeout=5.0, facts=local_facts())
        assert established.mesh == guarded.coordinator.mesh
        link.close("done")
        link.release()
    finally:
        relay.close()


def test_one_who_pretends_to_accept_is_refused_by_the_dialer(guarded: Guarded, other_identity: Identity) -> None:
    """He answers instead of passing the refusal on: he has no proof to show."""

    context = server_context(other_identity)

    def serve(sock: socket.socket) -> None:
        with context.wrap_socket(sock, server_side=True) as inside:
            inside.sendall(frames.PREAMBLE + encoded(Challenge(bytes(32), guarded.coordinator.mesh, "0", "3.11")))
            inside.recv(65536)
            inside.sendall(encoded(Welcome(bytes(32), 1)))
            with contextlib.suppress(OSError):
                while inside.recv(65536):
                    pass

    with Server(serve) as server, tls_connect(server.port) as sock:
        connection, events = shake(sock, TOKEN)

    assert [type(event) for event in events] == [Closed]
    assert "could not prove that it knows the token" in str(connection.error)


@pytest.mark.parametrize("role", ["client", "worker"])
def test_a_relay_that_opens_nothing_is_no_hindrance(guarded: Guarded, other_identity: Identity, role: str) -> None:
    """A port forwarder, a TCP tunnel: the TLS goes through it whole."""
    relay = Between(guarded.port, other_identity, opens_tls=False)
    try:
        with tls_connect(relay.port) as sock:
            _, events = shake(sock, TOKEN, role=role)
            assert [type(event) for event in events] == [Established]
    finally:
        relay.close()
    seen = b"".join(relay.read)
    assert b"client" not in seen
    assert guarded.coordinator.mesh.encode() not in seen, "he sees nothing of what is inside"


def test_the_certificate_is_worth_nothing_without_its_key(guarded: Guarded, other_identity: Identity, tmp_path: Path) -> None:
    """It is no secret, and anybody may have it; but nobody else can show it in a handshake."""
    from gpumesh.network.certificates import read_identity

    pem = Path(guarded.identity.certificate).read_text()
    begin = pem.index("-----BEGIN CERTIFICATE-----")
    stolen = tmp_path / "stolen.pem"
    stolen.write_text(pem[begin:])
    with pytest.raises(OSError, match="cannot be used with the certificate"):
        read_identity(str(stolen), other_identity.key)


def test_an_older_tls_is_refused(guarded: Guarded) -> None:
    context = client_context()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Newer Pythons warn of these.
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)), connect(guarded.port) as sock:
        context.wrap_socket(sock)


def test_no_session_is_resumed(guarded: Guarded) -> None:
    """Each connection is a handshake of its own, with the key behind it."""
    context = client_context()
    with context.wrap_socket(connect(guarded.port)) as first:
        shake(first, TOKEN)
        session = first.session
    with context.wrap_socket(connect(guarded.port), session=session) as second:
        shake(second, TOKEN)
        assert not second.session_reused
