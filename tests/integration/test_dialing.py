"""Dialing as the client does it and as agents do, on both kinds of event loop: the way to a coordinator, and who may be there instead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

from gpumesh.client.link import dial, local_facts
from gpumesh.errors import AuthenticationError, MeshError, MeshUnavailableError, ProtocolError, VersionMismatchError
from gpumesh.network import connecting
from gpumesh.network.address import INSECURE, Address, parse_address
from gpumesh.network.certificates import Identity, load_or_make_identity
from gpumesh.network.tls import server_context
from gpumesh.protocol import frames
from gpumesh.protocol.connection import LATER, Closed, Connection, Established
from gpumesh.protocol.messages import Refused
from gpumesh.runtime import dialing, doorway
from gpumesh.runtime.coordinator import Coordinator
from gpumesh.runtime.dialing import Dialer
from gpumesh.runtime.link import PeerLink, Turn
from gpumesh.runtime.loop import new_event_loop
from tests.support.guarded import TOKEN, Guarded
from tests.support.peers import FACTS, Server, encoded, say, stay_silent
from tests.unit.client.fake_mesh import FakeMesh

Dial = Callable[..., bytes]  # (address, token, timeout) -> the hash that the proofs were bound to; raises as `dial`.


def by_client(address: Address, token: str = TOKEN, timeout: float = 5.0) -> bytes:
    """As GPUMesh(...) does."""
    link, _, _ = dial(address, token=token, timeout=timeout, facts=local_facts())
    link.close("seen")
    link.release()
    return link.connection.binding


def by_agent(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> Dial:
    """As `gpumesh join` does."""

    def dial_there(address: Address, token: str = TOKEN, timeout: float = 5.0) -> bytes:
        loop = new_loop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dialing, "CONNECT_SECONDS", timeout)
            try:
                return loop.run_until_complete(_dial_on(loop, address, token))
            finally:
                loop.close()

    return dial_there


async def _dial_on(loop: asyncio.AbstractEventLoop, address: Address, token: str) -> bytes:
    dialer = Dialer(loop, address)
    turn = Turn()
    while True:
        over: asyncio.Future[Any] = loop.create_future()
        bound: List[bytes] = []

        def on_events(link: PeerLink, events: List[Any], over: asyncio.Future[Any] = over) -> None:
            for event in events:
                if type(event) in (Established, Closed) and not over.done():
                    over.set_result(event)

        links: List[PeerLink] = []

        def make(binding: bytes, bound: List[bytes] = bound, links: List[PeerLink] = links, told: Any = on_events) -> PeerLink:
            bound.append(binding)
            connection = Connection.dial(
                role="worker", token=token, nonce=os.urandom(32), now=loop.time(), facts=FACTS, binding=binding
            )
            links.append(PeerLink(loop, connection, told, turn))
            return links[-1]

        await dialer.dial(make)
        event = await asyncio.wait_for(over, 10)
        if type(event) is Established:
            links[0].close("seen")
            await turn.all_gone(links)
            return bound[0]
        await turn.all_gone(links)
        if not dialer.wants_tls(event.error):
            raise connecting.at(address, event.error, event.reason, bound[0])


@pytest.fixture(params=["client", "asyncio", "uvloop"])
def dials(request: pytest.FixtureRequest) -> Dial:
    if request.param == "client":
        return by_client
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    return by_agent(new_event_loop if request.param == "uvloop" else asyncio.new_event_loop)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback is treated as another machine."""
    monkeypatch.setattr(connecting, "is_plain", lambda address, sock: address.way == INSECURE)


@pytest.fixture(scope="module")
def other_identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_make_identity(str(tmp_path_factory.mktemp("other")))


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Guarded]:
    with Guarded(tmp_path) as guarded:
        yield guarded


class Plain(Guarded):
    """A coordinator that was started without TLS."""

    async def _start(self, listener: socket.socket) -> Coordinator:
        coordinator = Coordinator(token=self.token)
        await coordinator.start(listener)
        return coordinator


def at(port: int, scheme: str = "") -> Address:
    return parse_address(f"{scheme}127.0.0.1:{port}")


def inside_tls(identity: Identity, serve: Callable[[Any], None], *protocols: str) -> Callable[[socket.socket], None]:
    """A server of TLS that is no coordinator."""

    def accept(sock: socket.socket) -> None:
        context = server_context(identity)
        context.set_alpn_protocols(list(protocols))
        with context.wrap_socket(sock, server_side=True) as tls:
            serve(tls)

    return accept


# --- the way


@pytest.mark.parametrize("scheme", ["", "insecure://"])
def test_this_very_machine_is_spoken_to_plainly(dials: Dial, mesh: Guarded, scheme: str) -> None:
    assert dials(at(mesh.port, scheme)) == b""


@pytest.mark.usefixtures("elsewhere")
def test_another_machine_is_spoken_to_inside_tls(dials: Dial, mesh: Guarded) -> None:
    assert dials(at(mesh.port)) == mesh.identity.fingerprint


@pytest.mark.parametrize("scheme", ["https://", "wss://"])
def test_https_finds_the_coordinator_itself(dials: Dial, mesh: Guarded, scheme: str) -> None:
    assert dials(at(mesh.port, scheme)) == mesh.identity.fingerprint


def test_a_coordinator_that_takes_this_machine_for_another_is_spoken_to_inside_tls(
    dials: Dial, mesh: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two is what changes addresses: a container's port, a tunnel of ssh."""
    monkeypatch.setattr(doorway, "is_loopback", lambda host: False)
    assert dials(at(mesh.port)) == mesh.identity.fingerprint
    with pytest.raises(MeshUnavailableError, match="speaks TLS"):
        dials(at(mesh.port, "insecure://"))


def test_a_name_with_a_dead_address_first_costs_no_timeout(mesh: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first does not answer: its queue of connections is full."""
    with socket.socket() as dead, contextlib.ExitStack() as ends:
        dead.bind(("127.0.0.1", 0))
        dead.listen(0)
        for _ in range(8):
            filler = ends.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(dead.getsockname())
        targets = [dead.getsockname(), ("127.0.0.1", mesh.port)]
        found = [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", target) for target in targets]
        monkeypatch.setattr(connecting, "resolve", lambda address, timeout: list(found))
        began = time.monotonic()
        sock = connecting.connect(Address("two.example", mesh.port), 10.0)
        assert time.monotonic() - began < 3.0
        assert sock.getpeername()[1] == mesh.port
        sock.close()


def test_a_refused_first_address_costs_nothing(mesh: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        targets = [closed.getsockname(), ("127.0.0.1", mesh.port)]
        found = [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", target) for target in targets]
        monkeypatch.setattr(connecting, "resolve", lambda address, timeout: list(found))
        monkeypatch.setattr(connecting, "CONNECT_STAGGER_SECONDS", 60.0)
        connecting.connect(Address("two.example", mesh.port), 10.0).close()


def test_a_client_waits_where_somebody_else_has_tried_wrong_tokens() -> None:
    """The coordinator says "later" to all of this machine for a second."""
    refusals = 2
    with FakeMesh(token=TOKEN) as behind:

        def serve(sock: socket.socket) -> None:
            if server.accepted < refusals:
                sock.sendall(frames.PREAMBLE + encoded(Refused(LATER, "too many wrong tokens from your address")))
                stay_silent(sock)
                return
            forward(sock, behind.port)

        with Server(serve) as server, pytest.MonkeyPatch.context() as patch:
            patch.setattr("gpumesh.client.link._LATER_SECONDS", 0.05)
            assert by_client(at(server.port)) == b""


def forward(sock: socket.socket, port: int) -> None:
    """Bytes both ways, until one side ends."""
    with socket.create_connection(("127.0.0.1", port)) as other:

        def carry(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while True:
                    data = source.recv(65536)
                    if not data:
                        break
                    target.sendall(data)
                target.shutdown(socket.SHUT_RDWR)

        back = threading.Thread(target=carry, args=(other, sock), daemon=True)
        back.start()
        carry(sock, other)
        back.join(10)


# --- who is there instead


@pytest.mark.usefixtures("elsewhere")
def test_a_coordinator_without_tls_is_not_spoken_to_unless_the_address_says_so(dials: Dial, tmp_path: Path) -> None:
    with Plain(tmp_path) as plain:
        with pytest.raises(MeshUnavailableError, match=rf"^127\.0\.0\.1:{plain.port} .* without TLS.* insecure://") as caught:
            dials(at(plain.port))
        assert f"insecure://127.0.0.1:{plain.port}" in str(caught.value)
        assert dials(at(plain.port, "insecure://")) == b""


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("serve", "error", "who"),
    [
        (say(b"HTTP/1.1 400 Bad Request\r\n\r\n", close=True), ProtocolError, "an HTTP server, not a gpumesh coordinator"),
        (say(b"SSH-2.0-OpenSSH_9.6\r\n"), ProtocolError, "an SSH server, not a gpumesh coordinator"),
        (say(b"220 mail.example ESMTP\r\n"), ProtocolError, "something that starts with b'220 mail"),
        (say(frames.MAGIC + b"\x63\x00"), VersionMismatchError, "speaks mesh protocol 99"),
        (lambda sock: sock.close(), MeshUnavailableError, "broke the TLS handshake off"),
    ],
)
def test_others_without_tls_are_named(dials: Dial, serve: Any, error: Any, who: str) -> None:
    with Server(serve) as server:
        with pytest.raises(error, match=who) as caught:
            dials(at(server.port))
    assert str(caught.value).startswith(f"127.0.0.1:{server.port}")
    assert type(caught.value) is error


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("protocols", [(), ("http/1.1",)])
def test_another_server_of_tls_is_named(dials: Dial, other_identity: Identity, protocols: Any) -> None:
    with Server(inside_tls(other_identity, stay_silent, *protocols)) as server:
        with pytest.raises(ProtocolError, match=r"other TLS server, not a gpumesh coordinator.* https://") as caught:
            dials(at(server.port))
    assert str(caught.value).startswith(f"127.0.0.1:{server.port}: ")


@pytest.mark.usefixtures("elsewhere")
def test_another_version_inside_tls_is_named(dials: Dial, other_identity: Identity) -> None:
    with Server(inside_tls(other_identity, say(frames.MAGIC + b"\x63\x00"), "gpumesh/1")) as server:
        with pytest.raises(VersionMismatchError, match=rf"^127\.0\.0\.1:{server.port}: .*speaks mesh protocol 99"):
            dials(at(server.port))


@pytest.mark.usefixtures("elsewhere")
def test_who_takes_the_connection_and_says_nothing_is_given_up_in_time(dials: Dial) -> None:
    with Server(stay_silent) as server:
        began = time.monotonic()
        with pytest.raises(MeshUnavailableError, match=r"takes the connection and says nothing within 0\.5 s"):
            dials(at(server.port), timeout=0.5)
        assert time.monotonic() - began < 5.0


def test_nobody_there(dials: Dial) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(MeshUnavailableError, match=f"nothing listens at 127.0.0.1:{port}"):
            dials(at(port))


def test_an_unknown_name(dials: Dial) -> None:
    with pytest.raises(MeshUnavailableError, match="host name 'no-such-host.invalid' cannot be resolved"):
        dials(parse_address("no-such-host.invalid:8000"))


@pytest.mark.usefixtures("elsewhere")
def test_another_mesh_refuses_the_token_and_the_certificate_is_told(dials: Dial, mesh: Guarded) -> None:
    with pytest.raises(AuthenticationError, match="token was refused.* somebody stands between") as caught:
        dials(at(mesh.port), token="that of another mesh")
    assert ":".join(f"{byte:02x}" for byte in mesh.identity.fingerprint[:16]) in str(caught.value)


@pytest.mark.usefixtures("elsewhere")
def test_who_stands_between_with_a_certificate_of_his_own_gets_nothing(
    dials: Dial, mesh: Guarded, other_identity: Identity
) -> None:
    """He passes on every byte, inside TLS on both sides."""
    from tests.support.guarded import tls_connect

    def between(sock: Any) -> None:
        with tls_connect(mesh.port) as there:
            there.settimeout(0.05)
            sock.settimeout(0.05)
            end = time.monotonic() + 5
            while time.monotonic() < end:
                for source, target in ((sock, there), (there, sock)):
                    with contextlib.suppress(socket.timeout, ssl.SSLWantReadError):
                        data = source.recv(65536)
                        if not data:
                            return
                        target.sendall(data)

    with Server(inside_tls(other_identity, between, "gpumesh/1")) as server:
        with pytest.raises(AuthenticationError, match="somebody stands between"):
            dials(at(server.port))
    assert mesh.peers() == (0, 0)


@pytest.mark.usefixtures("elsewhere")
def test_who_pretends_to_be_the_coordinator_cannot_prove_it(dials: Dial, tmp_path: Path) -> None:
    """Whoever listens there takes any proof for right, and knows no token himself."""
    with Guarded(tmp_path, token="guessed, and wrong, of sufficient length") as pretender:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Connection, "_why_not", lambda self, proof: _accept_with(self))
            with pytest.raises(AuthenticationError, match="could not prove that it knows the token"):
                dials(at(pretender.port))


def _accept_with(connection: Any) -> str:
    connection._token, connection.grant = connection._tokens[0][0], "full"
    return ""


def test_https_to_a_server_of_plain_http_says_what_to_write(dials: Dial) -> None:
    with Server(say(b"HTTP/1.1 400 Bad Request\r\n\r\n", close=True)) as server:
        with pytest.raises(ProtocolError, match=rf"plain HTTP, not HTTPS; .*ws://127\.0\.0\.1:{server.port}"):
            dials(at(server.port, "https://"))


def test_errors_are_of_the_mesh_and_hold_no_token(dials: Dial, mesh: Guarded) -> None:
    secret = "a wrong token that is told nobody"
    with pytest.raises(MeshError) as caught:
        dials(at(mesh.port, "https://"), token=secret)
    assert secret not in str(caught.value) + repr(caught.value)
