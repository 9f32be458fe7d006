"""What was heard of one handshake opens no other: not again, not back to who said it, not cut differently, not through another channel."""

from __future__ import annotations

import os
import ssl
from typing import List, Tuple

import pytest

from gpumesh.errors import AuthenticationError
from gpumesh.network.tls import binding_of
from gpumesh.protocol import auth, codec, frames
from gpumesh.protocol.connection import Closed, Connection, Established
from gpumesh.protocol.messages import Challenge, Goodbye, Hello, Proof, RegisterClient, Welcome
from tests.support.guarded import TOKEN, Guarded, ask, tls_connect
from tests.support.peers import FACTS, connect, encoded


def recorded(port: int, *, tls: bool) -> Tuple[bytes, bytes]:
    """All that a real client and the coordinator have said to one another in a handshake and a goodbye."""
    with tls_connect(port) if tls else connect(port) as sock:
        binding = binding_of(sock) if isinstance(sock, ssl.SSLSocket) else b""
        dialer = Connection.dial(role="client", token=TOKEN, nonce=os.urandom(32), now=0.0, facts=FACTS, binding=binding)
        said, heard = b"", b""
        while not dialer.established:
            data = b"".join(bytes(part) for part in dialer.data_to_send())
            said += data
            sock.sendall(data)
            answer = sock.recv(65536)
            assert answer
            heard += answer
            dialer.receive_data(answer, 0.1)
        last = encoded(RegisterClient(99, "recorded")) + encoded(Goodbye("done"))
        sock.sendall(last)
        return said + last, heard


def proof_in(heard: bytes) -> bytes:
    """The listener's own proof among what it said."""
    decoder = frames.FrameDecoder(stepwise=True)
    view = decoder.get_buffer()
    view[: len(heard)] = heard
    decoder.buffer_updated(len(heard))
    decoder.take(frames.PREAMBLE_BYTES)
    while True:
        frame = decoder.next_frame()
        assert frame is not None
        message = codec.decode_handshake(frame)
        if type(message) is Welcome:
            return bytes(message.proof)


@pytest.mark.parametrize("first_tls", [False, True], ids=["heard plain", "heard in tls"])
@pytest.mark.parametrize("then_tls", [False, True], ids=["said plain", "said in tls"])
def test_a_recorded_handshake_opens_no_connection(guarded: Guarded, first_tls: bool, then_tls: bool) -> None:
    said, _ = recorded(guarded.port, tls=first_tls)
    for _ in range(3):
        answer = ask(guarded.port, said, tls=then_tls)
        assert b"the token was refused" in answer
        guarded.forgive()
    assert guarded.peers() == (0, 0)


def test_the_proof_of_a_listener_is_none_of_a_dialer(guarded: Guarded) -> None:
    _, heard = recorded(guarded.port, tls=False)
    hello = encoded(Hello("client", os.urandom(32), "0", "3.11", "test"))

    answer = ask(guarded.port, frames.PREAMBLE + hello + encoded(Proof(proof_in(heard))))

    assert b"the token was refused" in answer


@pytest.mark.parametrize("nonce", [b"\x07" * 32, b"\x09" * 32], ids=["its own nonce", "another"])
def test_a_false_coordinator_cannot_send_a_dialers_proof_back_to_it(nonce: bytes) -> None:
    dialer = Connection.dial(role="client", token=TOKEN, nonce=b"\x07" * 32, now=0.0, facts=FACTS)
    dialer.data_to_send()
    dialer.receive_data(frames.PREAMBLE + encoded(Challenge(nonce, "m", "0", "3.11")), 0.1)
    sent = b"".join(bytes(part) for part in dialer.data_to_send())
    proof = codec.decode_handshake(frame_of(sent)).proof

    events = dialer.receive_data(encoded(Welcome(proof, 1)), 0.2)

    assert [type(event) for event in events] == [Closed]
    assert isinstance(dialer.error, AuthenticationError)
    assert "could not prove" in str(dialer.error)


def frame_of(data: bytes) -> frames.Frame:
    frame = frames.FrameDecoder().feed(data)[0]
    assert isinstance(frame, frames.Frame)
    return frame


def test_two_dialers_do_not_let_each_other_in(guarded: Guarded) -> None:
    """Whoever has called both a coordinator and a client cannot pass the one's proof to the other once the channels differ."""
    with tls_connect(guarded.port) as sock:
        victim = Connection.dial(role="client", token=TOKEN, nonce=os.urandom(32), now=0.0, facts=FACTS, binding=b"other" * 6)
        events: List[object] = []
        while not events:
            for part in victim.data_to_send():
                sock.sendall(part)
            events = victim.receive_data(sock.recv(65536), 0.1)

    assert [type(event) for event in events] == [Closed]
    assert "the token was refused" in str(victim.error)


def test_the_same_bytes_cut_differently_are_another_proof() -> None:
    proofs = {
        auth.make_proof(label, TOKEN, hello, challenge, binding)
        for label, hello, challenge, binding in (
            (b"label", b"hello", b"challenge", b"binding"),
            (b"labelh", b"ello", b"challenge", b"binding"),
            (b"label", b"hellochal", b"lenge", b"binding"),
            (b"label", b"hello", b"challengebind", b"ing"),
            (b"label", b"hello", b"challenge", b""),
            (b"label", b"", b"hellochallenge", b"binding"),
            (auth.DIALER_LABEL, b"hello", b"challenge", b"binding"),
            (auth.LISTENER_LABEL, b"hello", b"challenge", b"binding"),
        )
    }
    assert len(proofs) == 8


def test_each_connection_is_challenged_anew(guarded: Guarded) -> None:
    hello = encoded(Hello("client", bytes(32), "0", "3.11", "test"))
    challenges: List[bytes] = [ask(guarded.port, frames.PREAMBLE + hello) for _ in range(8)]

    assert len({data[:80] for data in challenges}) == 8


def test_the_handshake_itself_works(guarded: Guarded) -> None:
    """So that what is refused above is refused for the reason that is meant."""
    for tls in (False, True):
        with tls_connect(guarded.port) if tls else connect(guarded.port) as sock:
            binding = binding_of(sock) if isinstance(sock, ssl.SSLSocket) else b""
            dialer = Connection.dial(role="client", token=TOKEN, nonce=os.urandom(32), now=0.0, facts=FACTS, binding=binding)
            events: List[object] = []
            while not events:
                for part in dialer.data_to_send():
                    sock.sendall(part)
                events = dialer.receive_data(sock.recv(65536), 0.1)
            assert [type(event) for event in events] == [Established]
