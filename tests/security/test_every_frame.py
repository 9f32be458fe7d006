"""Every kind of frame at every moment at which it has no place: refused, logged once, and whoever is honest is served."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List

import msgpack
import pytest

from gpumesh.protocol import auth, frames
from gpumesh.protocol.connection import Closed, Connection, Established
from gpumesh.protocol.messages import MESSAGE_TYPES, Goodbye, Hello, Proof, Query, RegisterClient
from tests.support.guarded import TOKEN, Guarded, ask, shake, tls_connect
from tests.support.mesh_peer import MeshPeer
from tests.support.peers import FACTS, connect, encoded, frame, handshake, read_to_end

KINDS = sorted({*MESSAGE_TYPES, 0x00, 0x0A, 0x7E, frames.CHUNK, 0x80, 0xFF})  # All there are, and some there are not.
HELLO = encoded(Hello("client", bytes(32), "0", "3.11", "test"))
WORKER = encoded(Hello("worker", bytes(32), "0", "3.11", "test"))
WRONG = encoded(Proof(b"\x00" * 32))

BEFORE: Dict[str, bytes] = {
    "before the preamble": b"",
    "before Hello": frames.PREAMBLE,
    "before Proof": frames.PREAMBLE + HELLO,
    "before Proof, as a worker": frames.PREAMBLE + WORKER,
    "with a wrong token": frames.PREAMBLE + HELLO + WRONG,
    "with a wrong token, as a worker": frames.PREAMBLE + WORKER + WRONG,
    "with an empty proof": frames.PREAMBLE + HELLO + encoded(Proof(b"")),
}


def bodies(canary: bytes) -> List[bytes]:
    """A pickle as it is, and wherever a body can hold one."""
    return [
        canary,
        msgpack.packb([canary] * 5),
        msgpack.packb([msgpack.ExtType(1, canary)]),
        msgpack.packb({"pickle": canary}),
        msgpack.packb([1, [[1, 1, 0, canary, 0.0]], [canary]]),
    ]


def listener() -> Connection:
    return Connection.listen(
        tokens=auth.mesh_grants(TOKEN), nonce=b"\x01" * 32, mesh="m", now=0.0, facts=FACTS, binding=b"b" * 32
    )


@pytest.mark.parametrize("moment", BEFORE)
def test_no_frame_gets_past_the_handshake(moment: str) -> None:
    """All kinds with all bodies: none opens the connection, none is an event, and all that follows is ignored."""
    for kind in range(256):
        for body in bodies(b"\x80\x02cposix\nsystem\n."):
            connection = listener()
            events = connection.receive_data(BEFORE[moment] + frame(kind, body) + encoded(RegisterClient(1, "x")), 0.1)
            events += connection.receive_eof(0.2)
            assert [type(event) for event in events] == [Closed], (kind, events)
            assert connection.error is not None
            assert connection.grant == ""
            answered = b"".join(bytes(part) for part in connection.data_to_send())
            assert len(answered) < 300, "a stranger learns little"


@pytest.mark.parametrize("moment", BEFORE)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_coordinator_shows_each_of_them_out(guarded: Guarded, moment: str, tls: bool) -> None:
    logged = len(guarded.log.about("refused"))
    kinds = KINDS if not tls else KINDS[::7]
    for kind in kinds:
        guarded.forgive()
        answer = ask(guarded.port, BEFORE[moment] + frame(kind, bodies(guarded.canary)[kind % 5]), tls=tls)
        assert len(answer) < 600
        assert TOKEN.encode() not in answer

    assert guarded.peers() == (0, 0)
    assert len(guarded.log.about("refused")) - logged <= 20, "the same reason is told once, not for each of them"
    serve_one(guarded)


def serve_one(guarded: Guarded) -> None:
    """An honest client is answered."""
    guarded.forgive()
    with MeshPeer(guarded.port, guarded.token, client=4242) as peer:
        from gpumesh.protocol.messages import Answer

        peer.send(Query(1, "workers", {}))
        assert peer.expect(Answer).error == ""
        peer.send(Goodbye("done"))
        read_to_end(peer.socket)


@pytest.mark.parametrize("kind", KINDS)
def test_after_goodbye_nothing_counts(guarded: Guarded, kind: int) -> None:
    sock, connection = handshake(guarded.port, guarded.token)
    with sock:
        connection.send(RegisterClient(77, "leaving"))
        connection.close("bye")
        data = b"".join(bytes(part) for part in connection.data_to_send())
        sock.sendall(data + frame(kind, bodies(guarded.canary)[kind % 5]))
        read_to_end(sock)

    assert guarded.peers() == (0, 0)


def test_the_handshake_messages_have_no_place_after_it(guarded: Guarded) -> None:
    for message in (Hello("worker", bytes(32), "0", "3", "x"), Proof(bytes(32))):
        sock, _ = handshake(guarded.port, guarded.token)
        with sock:
            sock.sendall(encoded(message))
            assert b"no place after the handshake" in read_to_end(sock)


@pytest.mark.parametrize(
    ("role", "token"),
    [
        ("client", auth.worker_token(TOKEN)),
        ("client", auth.metrics_token(TOKEN)),
        ("worker", auth.metrics_token(TOKEN)),
        ("client", ""),
        ("worker", TOKEN + " "),
        ("client", TOKEN[:-1]),
        ("client", auth.worker_token(auth.worker_token(TOKEN))),
    ],
    ids=[
        "worker token, client",
        "metrics token, client",
        "metrics token, worker",
        "empty",
        "a space more",
        "cut",
        "twice derived",
    ],
)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_what_a_token_does_not_grant_is_refused(guarded: Guarded, role: str, token: str, tls: bool) -> None:
    with tls_connect(guarded.port) if tls else connect(guarded.port) as sock:
        connection, events = shake(sock, token, role=role)

    assert [type(event) for event in events] == [Closed]
    assert "token" in str(connection.error)
    assert guarded.peers() == (0, 0)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_worker_token_lets_a_worker_in(guarded: Guarded, tls: bool) -> None:
    """So that the refusals above are not refusals of everything."""
    with tls_connect(guarded.port) if tls else connect(guarded.port) as sock:
        connection, events = shake(sock, auth.worker_token(TOKEN), role="worker")
        assert [type(event) for event in events] == [Established]
        connection.close("done")
        for part in connection.data_to_send():
            sock.sendall(part)


def test_a_hundred_refusals_of_one_address_are_few_lines(guarded: Guarded) -> None:
    """Also when each says something else: what a stranger sends is no reason for a line of its own."""
    logged = len(guarded.log.lines)
    for number in range(100):
        guarded.forgive()
        hello = Hello(f"role {number}", bytes(32), "0", "3.11", "test")
        ask(guarded.port, frames.PREAMBLE + encoded(hello))
    assert len(guarded.log.lines) - logged <= 10


def test_wrong_tokens_are_refused_at_the_door_after_a_few(tmp_path: Path) -> None:
    with Guarded(tmp_path) as guarded:
        refused: List[str] = []
        for _ in range(12):
            with connect(guarded.port) as sock:
                connection, _ = shake(sock, "a wrong token")
                refused.append(str(connection.error))
        assert sum("the token was refused" in text for text in refused) < 8, refused
        assert len(guarded.log.about("too many wrong tokens")) == 1
        assert len(guarded.log.about("the token was refused")) == 1
        guarded.forgive()
        serve_one(guarded)
