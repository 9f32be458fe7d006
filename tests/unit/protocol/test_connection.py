"""One side of a connection: every state, every deadline, every way to be wrong."""

from __future__ import annotations

from typing import Any, List

import pytest

from gpumesh.config import (
    BULK_MESSAGE_BYTES,
    CHUNK_BYTES,
    CONTROL_FRAME_BYTES,
    HANDSHAKE_SECONDS,
    HEARTBEAT_SECONDS,
    PREAUTH_FRAME_BYTES,
    SILENCE_SECONDS,
    TRANSFER_BYTES,
)
from gpumesh.errors import AuthenticationError, MeshUnavailableError, ProtocolError, VersionMismatchError
from gpumesh.model.payloads import OutOfBand
from gpumesh.protocol import connection as module
from gpumesh.protocol import frames
from gpumesh.protocol.connection import Closed, Connection, Established, State
from gpumesh.protocol.messages import (
    Answer,
    CancelTasks,
    Challenge,
    DefineFunction,
    DefineSpec,
    Goodbye,
    Hello,
    MeshChanged,
    Ping,
    Pong,
    Proof,
    RecallTasks,
    Refused,
    RunTasks,
    SubmitTasks,
    TaskResults,
    TasksFinished,
    UnknownMessage,
    Welcome,
)
from tests.unit.protocol.talk import (
    DIALER_FACTS,
    DIALER_NONCE,
    LISTENER_FACTS,
    LISTENER_NONCE,
    MESH,
    TOKEN,
    bytewise,
    chunk,
    dial,
    drain,
    frame_of,
    listen,
    open_pair,
    pump,
    raw_frame,
    take,
    whole,
)

HELLO = Hello("client", DIALER_NONCE, "0.1.0", "3.11", "linux")
CHALLENGE = Challenge(LISTENER_NONCE, MESH, "0.1.0", "3.12")
LARGE = bytes(range(256)) * 4096 * 3 + b"end"  # Three chunks and a bit.


def only_error(events: List[Any], kind: type) -> str:
    """The text of the one event, which must be Closed with that error."""
    (closed,) = events
    assert type(closed) is Closed
    assert type(closed.error) is kind
    assert closed.reason == str(closed.error)
    return str(closed.error)


def at(state: State) -> Connection:
    """A side that has got as far as `state`, with nothing left to send."""
    dialer, listener = dial(), listen()
    if state is State.PREAMBLE:
        return listener
    if state is State.HELLO:
        listener.receive_data(frames.PREAMBLE, 0.0)
        take(listener)
        return listener
    listener.receive_data(take(dialer), 0.0)
    answer = take(listener)
    if state is State.PROOF:
        return listener
    if state is State.CHALLENGE:
        dialer.receive_data(frames.PREAMBLE, 0.0)
        return dialer
    dialer.receive_data(answer, 0.0)
    proof = take(dialer)
    if state is State.WELCOME:
        return dialer
    listener.receive_data(proof, 0.0)
    dialer.receive_data(take(listener), 0.0)
    return dialer


BEFORE_OPEN = [State.PREAMBLE, State.HELLO, State.CHALLENGE, State.PROOF, State.WELCOME]

# --- handshake


@pytest.mark.parametrize("state", [*BEFORE_OPEN, State.OPEN])
def test_each_state_is_reached(state: State) -> None:
    assert at(state).state is state
    assert at(state).established is (state is State.OPEN)


@pytest.mark.parametrize("cut", [whole, bytewise])
def test_both_sides_prove_the_token_and_tell_of_each_other(cut: Any) -> None:
    dialer, listener = dial(role="worker"), listen()
    listener.workers = 3

    at_dialer, at_listener = pump(dialer, listener, cut=cut)

    assert at_listener == [Established("worker", MESH, 3, DIALER_FACTS)]
    assert at_dialer == [Established("worker", MESH, 3, LISTENER_FACTS._replace(platform=""))]
    assert (dialer.mesh, listener.role, dialer.workers) == (MESH, "worker", 3)


def test_the_listener_says_nothing_before_the_preamble() -> None:
    listener = listen()

    assert not listener.has_data
    assert listener.receive_data(frames.PREAMBLE[:7], 0.0) == []
    assert take(listener) == b""
    assert listener.receive_data(frames.PREAMBLE[7:], 0.0) == []
    assert take(listener) == frames.PREAMBLE


def test_the_token_is_never_on_the_wire_and_is_forgotten_once_proved() -> None:
    dialer, listener = dial(), listen()
    said = take(dialer)
    listener.receive_data(said, 0.0)
    said += take(listener)
    dialer.receive_data(said[-len(frame_of(CHALLENGE)) - 8 :], 0.0)
    said += take(dialer)

    assert TOKEN.encode() not in said
    assert all(TOKEN not in str(getattr(side, "_token", "")) for side in open_pair())


def test_a_wrong_token_is_refused_at_both_sides() -> None:
    dialer, listener = dial(token="wrong"), listen()

    at_dialer, at_listener = pump(dialer, listener)

    text = "the token was refused; `gpumesh token` on the machine that serves shows the right one"
    assert only_error(at_listener, AuthenticationError) == text
    assert only_error(at_dialer, AuthenticationError) == text
    assert isinstance(dialer.error, AuthenticationError)


def test_a_channel_of_someone_else_in_between_is_refused() -> None:
    at_dialer, at_listener = pump(dial(binding=b"certificate of the middle"), listen(binding=b"own certificate"))

    assert type(at_listener[0].error) is AuthenticationError
    assert type(at_dialer[0].error) is AuthenticationError


def test_a_listener_that_does_not_know_the_token_is_left() -> None:
    dialer = at(State.WELCOME)

    events = dialer.receive_data(frame_of(Welcome(b"\0" * 32, 1)), 0.0)

    assert "could not prove that it knows the token" in only_error(events, AuthenticationError)
    assert b"authentication" in take(dialer)


def test_a_listener_that_sends_the_dialers_own_proof_back_is_left() -> None:
    dialer = dial()
    take(dialer)
    dialer.receive_data(frames.PREAMBLE + frame_of(CHALLENGE), 0.0)
    proof = take(dialer)[frames.HEADER.size + 3 :]
    assert len(proof) == 32

    only_error(dialer.receive_data(frame_of(Welcome(proof, 1)), 0.0), AuthenticationError)


def test_a_proof_seen_before_is_worth_nothing_under_a_new_nonce() -> None:
    dialer, listener = dial(), listen()
    hello = take(dialer)
    listener.receive_data(hello, 0.0)
    dialer.receive_data(take(listener), 0.0)
    proof = take(dialer)
    again = Connection.listen(token=TOKEN, nonce=b"\x99" * 32, mesh=MESH, now=0.0, facts=LISTENER_FACTS)

    only_error(again.receive_data(hello + proof, 0.0), AuthenticationError)


@pytest.mark.parametrize("cut", [whole, bytewise])
def test_what_follows_welcome_in_the_same_read_is_held_to_the_larger_limits(cut: Any) -> None:
    dialer, listener = dial(), listen()
    listener.receive_data(take(dialer), 0.0)
    dialer.receive_data(take(listener), 0.0)
    (established,) = listener.receive_data(take(dialer), 0.0)
    assert type(established) is Established
    small = RunTasks(1, ((1, 1, b"x" * PREAUTH_FRAME_BYTES),))
    large = RunTasks(1, ((2, 1, OutOfBand([b"p", b"x" * (BULK_MESSAGE_BYTES + 1)])),))
    listener.send(small)
    listener.send(large)
    data = drain(listener)
    pieces = [data] if cut is whole else [data[:100], *bytewise(data[100:200]), data[200:]]

    events = [event for piece in pieces for event in dialer.receive_data(piece, 0.0)]

    assert [type(event) for event in events] == [Established, RunTasks, RunTasks]
    assert events[1:] == [small, large]


def test_a_refusal_before_rubbish_is_what_counts() -> None:
    dialer = at(State.CHALLENGE)

    events = dialer.receive_data(frame_of(Refused("busy", "full")) + b"\0" * 100, 0.0)

    assert only_error(events, MeshUnavailableError) == "full"


@pytest.mark.parametrize(
    ("reason", "kind", "text"),
    [
        ("authentication", AuthenticationError, "why"),
        ("version", VersionMismatchError, "why"),
        ("busy", MeshUnavailableError, "why"),
        ("protocol", ProtocolError, "the peer refused the connection: why"),
        ("identity", ProtocolError, "the peer refused the connection: why"),
        ("of a later version", ProtocolError, "the peer refused the connection: why"),
    ],
)
@pytest.mark.parametrize("state", [State.CHALLENGE, State.PROOF, State.WELCOME, State.OPEN])
def test_a_refusal_becomes_its_own_error_in_every_state(state: State, reason: str, kind: type, text: str) -> None:
    side = at(state)

    assert only_error(side.receive_data(frame_of(Refused(reason, "why")), 0.0), kind) == text
    assert not side.has_data  # A refusal is not answered.


def test_what_a_stranger_writes_cannot_reach_into_a_terminal_or_a_log() -> None:
    text = only_error(
        at(State.HELLO).receive_data(frame_of(Refused("version", "\x1b[2Jx\ny" * 300)), 0.0), VersionMismatchError
    )

    assert text.startswith("?[2Jx?y?")
    assert text.isprintable()
    assert len(text) == 1000


@pytest.mark.parametrize("version", [0, 2, 0xFFFF])
def test_other_versions_are_told_and_both_sides_know(version: int) -> None:
    preamble = frames.MAGIC + version.to_bytes(2, "little")
    listener, dialer = listen(), dial()

    at_listener = only_error(listener.receive_data(preamble, 0.0), VersionMismatchError)
    at_dialer = only_error(dialer.receive_data(preamble, 0.0), VersionMismatchError)

    assert at_listener == at_dialer
    assert at_dialer == (
        f"the peer speaks mesh protocol {version}, this side (gpumesh 0.1.0) speaks 1; "
        "install the same gpumesh version on both machines"
    )
    assert take(listener) == frames.PREAMBLE


@pytest.mark.parametrize(
    ("said", "who"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "an HTTP server"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "an SSH server"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "an HTTPS or other TLS server"),
        (b"220 mail ESMTP", "something that starts with b'220 mail ESMTP'"),
        (b"\x89PNG\r\n\x1a\n", "something that starts with b'\\x89PNG\\r\\n\\x1a\\n'"),
    ],
)
@pytest.mark.parametrize("cut", [whole, bytewise])
def test_the_dialer_says_who_answers_instead(said: bytes, who: str, cut: Any) -> None:
    dialer = dial()
    take(dialer)

    events = [event for piece in cut(said) for event in dialer.receive_data(piece, 0.0)]
    (closed,) = events
    shown = who if cut is whole or "something" not in who else f"something that starts with {said[:4]!r}"
    assert str(closed.error) == f"the other side is {shown}, not a gpumesh coordinator; check host and port"
    assert not dialer.has_data


@pytest.mark.parametrize("verb", [b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"])
@pytest.mark.parametrize("cut", [whole, bytewise])
def test_a_browser_gets_an_answer_that_it_can_show(verb: bytes, cut: Any) -> None:
    listener = listen()

    events = [event for piece in cut(verb) for event in listener.receive_data(piece, 0.0)]

    assert "an HTTP client" in only_error(events, ProtocolError)
    assert take(listener).startswith(b"HTTP/1.1 426 Upgrade Required\r\n")


@pytest.mark.parametrize("said", [b"\x16\x03\x01\x02\x00\x01", b"SSH-2.0-client\r\n", b"\0\0\0\0", b"\x89gme\0\0\0\0"])
def test_a_stranger_at_the_listener_gets_no_answer(said: bytes) -> None:
    listener = listen()

    only_error(listener.receive_data(said, 0.0), ProtocolError)
    assert take(listener) == b""


@pytest.mark.parametrize("state", BEFORE_OPEN)
def test_an_end_of_stream_in_the_handshake_is_an_error(state: State) -> None:
    side = at(state)

    text = only_error(side.receive_eof(1.0), ProtocolError)

    assert text == "the peer closed the connection during the handshake; is it a gpumesh coordinator?"
    assert side.receive_eof(1.0) == []


def test_an_end_of_stream_after_a_few_strange_bytes_says_what_they_were() -> None:
    dialer = dial()
    dialer.receive_data(b"no", 0.0)

    assert "something that starts with b'no'" in only_error(dialer.receive_eof(0.0), ProtocolError)


def test_an_end_of_stream_on_an_open_connection_is_a_loss() -> None:
    assert only_error(at(State.OPEN).receive_eof(1.0), MeshUnavailableError) == "the connection was lost"


@pytest.mark.parametrize(
    ("state", "allowed"),
    [
        (State.HELLO, Hello),
        (State.CHALLENGE, Challenge),
        (State.PROOF, Proof),
        (State.WELCOME, Welcome),
    ],
)
def test_each_state_of_the_handshake_takes_one_message_and_a_refusal(state: State, allowed: type) -> None:
    for message in (HELLO, CHALLENGE, Proof(b"\0" * 32), Welcome(b"\0" * 32, 1)):
        if type(message) is not allowed:
            side = at(state)
            text = only_error(side.receive_data(frame_of(message), 0.0), ProtocolError)
            assert text == f"{type(message).__name__} has no place in this state of the handshake"
            assert take(side) == frame_of(Refused("protocol", text))


@pytest.mark.parametrize("state", [State.HELLO, State.CHALLENGE, State.PROOF, State.WELCOME])
@pytest.mark.parametrize(
    "data",
    [
        frame_of(Ping(1)),
        frame_of(SubmitTasks(1, [1], [b"evil"])),
        raw_frame(0x7E, b"\x90"),
        raw_frame(0x01, b"\xc1"),
        raw_frame(0x02, b""),
        raw_frame(0x03, bytes(PREAUTH_FRAME_BYTES + 1))[:8],
        raw_frame(0x04, b"\x91\x01", flags=1, buffers=1),
        raw_frame(0x05, b"\0\0\0\0\x92\xa1x\xa1y", buffers=1),
        chunk(0, 0, 0, 1 << 40, b"x"),
    ],
)
def test_nothing_else_is_understood_before_authentication(state: State, data: bytes) -> None:
    side = at(state)

    text = only_error(side.receive_data(data, 0.0), ProtocolError)
    assert side.state is State.CLOSED
    assert take(side) == frame_of(Refused("protocol", text))
    assert side.receive_data(b"more", 0.0) == []


@pytest.mark.parametrize(
    "hello", [HELLO._replace(role="admin"), HELLO._replace(nonce=b"short"), HELLO._replace(role="x" * 3000)]
)
def test_a_hello_that_makes_no_sense_is_refused(hello: Hello) -> None:
    text = only_error(at(State.HELLO).receive_data(frame_of(hello), 0.0), ProtocolError)

    assert text.startswith("Hello has the role ")
    assert len(text) < 100


# --- time


@pytest.mark.parametrize("state", BEFORE_OPEN)
def test_a_handshake_that_takes_too_long_is_given_up(state: State) -> None:
    side = at(state)
    assert side.next_deadline() == HANDSHAKE_SECONDS
    assert side.on_time(HANDSHAKE_SECONDS - 0.001) == []

    text = only_error(side.on_time(HANDSHAKE_SECONDS), ProtocolError)

    assert text == "no mesh handshake within 5 s; is it a gpumesh coordinator?"
    assert side.next_deadline() is None
    assert side.on_time(99.0) == []
    assert side.has_data is (state is not State.PREAMBLE)


def test_bytes_that_trickle_in_do_not_prolong_the_handshake() -> None:
    listener = listen()
    for second in range(4):
        listener.receive_data(frames.PREAMBLE[second : second + 1], float(second))

    only_error(listener.on_time(HANDSHAKE_SECONDS), ProtocolError)


def test_a_dialer_that_got_a_few_strange_bytes_says_so_at_the_deadline() -> None:
    dialer = dial()
    dialer.receive_data(b"+OK", 0.0)

    assert "something that starts with b'+OK'" in only_error(dialer.on_time(HANDSHAKE_SECONDS), ProtocolError)


def test_heartbeats_are_sent_every_five_seconds_and_answered() -> None:
    dialer, listener = open_pair(now=100.0)
    assert dialer.next_deadline() == 100.0 + HEARTBEAT_SECONDS
    assert dialer.on_time(104.9) == []
    assert not dialer.has_data

    assert dialer.on_time(105.0) == []
    assert dialer.next_deadline() == 110.0
    ping = take(dialer)
    assert ping == frame_of(Ping(1))
    assert listener.receive_data(ping, 105.0) == []
    pong = take(listener)
    assert pong == frame_of(Pong(1))
    assert dialer.receive_data(pong, 105.0) == []
    assert not dialer.has_data

    assert dialer.on_time(110.0) == []
    assert take(dialer) == frame_of(Ping(2))


def silence(side: Connection, *, start: float, step: float = 0.01) -> tuple[float, str]:
    """Call `on_time` exactly when it is due until the side gives up; when, and why."""
    while True:
        due = side.next_deadline()
        assert due is not None
        assert due > start
        start = due
        events = side.on_time(due + step)
        if events:
            return due, only_error(events, MeshUnavailableError)


def test_a_silent_peer_is_given_up_after_thirty_seconds() -> None:
    dialer, _ = open_pair(now=100.0)

    assert silence(dialer, start=100.0) == (100.0 + SILENCE_SECONDS, "no sign of life for 30 s")


def test_silence_is_counted_from_the_last_byte_not_from_a_heartbeat() -> None:
    dialer, listener = open_pair(now=100.0)
    listener.send(MeshChanged(1))
    dialer.receive_data(take(listener)[:1], 102.5)

    when, _ = silence(dialer, start=100.0)
    assert 102.5 + SILENCE_SECONDS <= when <= 102.6 + SILENCE_SECONDS


def test_any_byte_is_a_sign_of_life() -> None:
    dialer, listener = open_pair()
    listener.send(MeshChanged(1))
    now = 0.0
    for byte in bytewise(take(listener)):
        now += 20.0
        for due in (now - 15, now - 10, now - 5):
            assert dialer.on_time(due) == []
        dialer.receive_data(byte, now)
        assert dialer.on_time(now) == []


def test_a_side_that_was_stopped_itself_does_not_blame_the_other() -> None:
    dialer, _ = open_pair()

    assert dialer.on_time(1000.0) == []
    assert take(dialer) == frame_of(Ping(1))
    when, _ = silence(dialer, start=1000.0)
    assert when >= 1000.0 + SILENCE_SECONDS


def test_a_side_that_is_only_a_little_late_still_gives_up() -> None:
    dialer, _ = open_pair()

    when, _ = silence(dialer, start=0.0, step=HEARTBEAT_SECONDS - 0.1)
    assert when <= SILENCE_SECONDS + 2 * HEARTBEAT_SECONDS


def test_a_trusted_connection_is_open_and_has_no_clock() -> None:
    agent, runner = Connection.trusted(), Connection.trusted()
    agent.send(RunTasks(1, ((1, 1, b"x"),)))

    assert agent.next_deadline() is None
    assert agent.on_time(1e9) == []
    assert runner.receive_data(take(agent), 0.0) == [RunTasks(1, ((1, 1, b"x"),))]


# --- messages


def test_messages_come_in_order_also_byte_by_byte() -> None:
    dialer, listener = open_pair()
    sent = [MeshChanged(number) for number in range(5)]
    for message in sent:
        dialer.send(message)

    assert pump(dialer, listener, cut=bytewise) == ([], sent)


def test_an_unknown_tag_is_answered_and_the_connection_goes_on() -> None:
    dialer, listener = open_pair()

    assert listener.receive_data(raw_frame(0x7E, b"\xc1anything") + frame_of(MeshChanged(1)), 0.0) == [MeshChanged(1)]
    assert pump(listener, dialer) == ([], [UnknownMessage(0x7E)])


def test_the_buffers_of_an_unknown_message_are_forgotten() -> None:
    _, listener = open_pair()
    for transfer in range(module.MAX_OPEN_TRANSFERS + 10):
        data = chunk(transfer, 0, 0, 3, b"abc") + frames.encode_transferred(0x7E, transfer, b"\xc1", 1)
        assert listener.receive_data(data, 0.0) == []

    assert listener._incoming == {}
    assert (listener._incoming_bytes, listener._unfilled_bytes) == (0, 0)


@pytest.mark.parametrize("message", [HELLO, CHALLENGE, Proof(b"x"), Welcome(b"x", 1)])
def test_the_handshake_is_not_repeated_on_an_open_connection(message: Any) -> None:
    side = at(State.OPEN)

    text = only_error(side.receive_data(frame_of(message), 0.0), ProtocolError)
    assert text == f"{type(message).__name__} has no place after the handshake"
    assert take(side) == frame_of(Refused("protocol", text))


def test_good_messages_before_a_broken_frame_are_delivered_first() -> None:
    for broken in (raw_frame(6, b""), raw_frame(6, b"\xc1"), chunk(0, 0, 5, 9, b"x"), raw_frame(1, b"\x90")):
        side = at(State.OPEN)
        events = side.receive_data(frame_of(MeshChanged(1)) + broken + frame_of(MeshChanged(2)), 0.0)
        assert events[:-1] == [MeshChanged(1)]
        only_error(events[-1:], ProtocolError)


@pytest.mark.parametrize("length", [0, CONTROL_FRAME_BYTES + BULK_MESSAGE_BYTES + CHUNK_BYTES + 1, 0xFFFFFFFF])
def test_a_frame_that_is_too_long_ends_an_open_connection(length: int) -> None:
    side = at(State.OPEN)

    assert f"a frame of {length} bytes" in only_error(
        side.receive_data(frames.HEADER.pack(length, 6, 0, 0), 0.0), ProtocolError
    )
    assert take(side)[4] == 0x05


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of 1,000 bytes; what is over 500 bytes is looked at twice."""
    monkeypatch.setattr(module, "CONTROL_FRAME_BYTES", 1000)
    monkeypatch.setattr(module, "BULK_MESSAGE_BYTES", 500)


@pytest.mark.usefixtures("small_frames")
def test_a_batch_too_large_for_one_frame_leaves_as_several() -> None:
    dialer, listener = open_pair()
    third = b"x" * 330
    ids = tuple(range(5))
    dialer.send(SubmitTasks(1, list(ids), [third] * 5))
    dialer.send(RunTasks(1, [(i, 1, third) for i in ids]))
    dialer.send(TaskResults("w", [(i, 0, third, 0.0) for i in ids]))
    dialer.send(TasksFinished([(i, 1, 0, third, 0.0) for i in ids]))
    dialer.send(CancelTasks(tuple(range(1 << 40, (1 << 40) + 500))))
    dialer.send(RecallTasks(tuple((i, 1) for i in range(500)), True))

    _, events = pump(dialer, listener)

    def all_of(kind: type, field: str) -> List[Any]:
        several = [getattr(event, field) for event in events if type(event) is kind]
        assert len(several) > 1
        return [item for items in several for item in items]

    assert all_of(SubmitTasks, "task_ids") == list(ids)
    assert all_of(RunTasks, "tasks") == [(i, 1, third) for i in ids]
    assert all_of(TaskResults, "results") == [(i, 0, third, 0.0) for i in ids]
    assert all_of(TasksFinished, "results") == [(i, 1, 0, third, 0.0) for i in ids]
    assert all_of(CancelTasks, "task_ids") == list(range(1 << 40, (1 << 40) + 500))
    assert all_of(RecallTasks, "tasks") == [(i, 1) for i in range(500)]


@pytest.mark.parametrize("size", [BULK_MESSAGE_BYTES, CONTROL_FRAME_BYTES + 1])
def test_a_large_plain_payload_travels_in_chunks_too(size: int) -> None:
    large = b"x" * size
    beside = OutOfBand([large])
    cases = [
        (SubmitTasks(1, (1, 2), (b"small", large)), SubmitTasks(1, (1, 2), (b"small", beside))),
        (RunTasks(1, ((1, 1, large), (2, 1, b"s"))), RunTasks(1, ((1, 1, beside), (2, 1, b"s")))),
        (TaskResults("w", ((1, 0, large, 0.5),)), TaskResults("w", ((1, 0, beside, 0.5),))),
        (TasksFinished(((1, 1, 0, large, 0.5),)), TasksFinished(((1, 1, 0, beside, 0.5),))),
        (DefineFunction(b"d" * 16, large), DefineFunction(b"d" * 16, beside)),
    ]
    for sent, received in cases:
        dialer, listener = open_pair()
        dialer.send(sent)
        assert dialer.has_bulk is (size > BULK_MESSAGE_BYTES)
        assert pump(dialer, listener) == ([], [received])


@pytest.mark.usefixtures("small_frames")
@pytest.mark.parametrize(
    "message",
    [
        Answer(1, "x" * 1001, ""),
        TaskResults("w", [(1, 5, {"reason": "small"}, 0.0), (2, 5, {"reason": "x" * 1001}, 0.0)]),
        RunTasks(1, [(1, 1, b"small"), (2, 1, b"x" * 1001)]),
    ],
)
def test_an_item_too_large_for_a_frame_is_refused_and_nothing_of_its_batch_leaves(message: Any) -> None:
    side = at(State.OPEN)

    with pytest.raises(ProtocolError, match=r"over the 1000 bytes of a frame; its large parts must be buffers"):
        side.send(message)
    assert not side.has_data
    assert side.established


def test_a_message_that_cannot_be_encoded_leaves_the_connection_as_it_was() -> None:
    dialer, listener = open_pair()
    with pytest.raises(ProtocolError, match="TaskResults cannot be sent"):
        dialer.send(TaskResults("w", [(1, 0, OutOfBand([b"p"]), 0.0), (2, 0, object(), 0.0)]))
    dialer.send(MeshChanged(1))

    assert pump(dialer, listener) == ([], [MeshChanged(1)])


def test_bytes_waiting_is_what_the_control_lane_holds() -> None:
    dialer = dial()
    assert dialer.bytes_waiting == len(frames.PREAMBLE + frame_of(HELLO))
    assert len(take(dialer)) == len(frames.PREAMBLE + frame_of(HELLO))
    assert dialer.bytes_waiting == 0

    side = at(State.OPEN)
    side.send(RunTasks(1, [(1, 1, OutOfBand([b"p", b"x" * 100_000]))]))
    assert side.bytes_waiting == len(b"".join(bytes(part) for part in side._control)) > 100_000


# --- two lanes


def large(task: int = 1, data: bytes = LARGE) -> RunTasks:
    return RunTasks(1, ((task, 1, OutOfBand([b"p", data])),))


def test_a_large_message_leaves_in_chunks_one_for_each_call() -> None:
    dialer, listener = open_pair()
    dialer.send(large())
    sizes = []
    events: List[Any] = []
    while dialer.has_bulk:
        data = take(dialer)
        sizes.append(len(data))
        events += listener.receive_data(data, 0.0)

    assert events == [large()]
    assert max(sizes) <= CHUNK_BYTES + 200
    assert len(sizes) == 5  # The pickle, three full chunks, the rest with the message behind it.
    parts = events[0].tasks[0][2].parts
    assert all(type(part) is bytearray for part in parts)


def test_control_messages_overtake_chunks() -> None:
    dialer, listener = open_pair()
    dialer.send(large())
    first = listener.receive_data(take(dialer), 0.0)
    dialer.send(MeshChanged(1))

    assert first == []
    assert listener.receive_data(take(dialer), 0.0) == [MeshChanged(1)]
    assert pump(dialer, listener) == ([], [large()])


def test_without_bulk_only_control_messages_leave() -> None:
    dialer, _ = open_pair()
    dialer.send(large())
    dialer.send(MeshChanged(1))

    assert take(dialer, bulk=False) == frame_of(MeshChanged(1))
    assert take(dialer, bulk=False) == b""
    assert dialer.has_bulk
    assert dialer.has_data


def test_a_message_of_exactly_the_bulk_limit_stays_on_the_control_lane() -> None:
    dialer, listener = open_pair()
    dialer.send(RunTasks(1, ((1, 1, OutOfBand([bytes(BULK_MESSAGE_BYTES)])),)))
    assert not dialer.has_bulk
    dialer.send(RunTasks(1, ((1, 1, OutOfBand([bytes(BULK_MESSAGE_BYTES + 1)])),)))
    assert dialer.has_bulk
    assert len(pump(dialer, listener)[1]) == 2


@pytest.mark.parametrize(
    "sizes",
    [
        (0, BULK_MESSAGE_BYTES + 1, 0),
        (BULK_MESSAGE_BYTES + 1,),
        (CHUNK_BYTES, CHUNK_BYTES),
        (1, CHUNK_BYTES - 1, CHUNK_BYTES + 1, 0, 5),
        (0, 0, 2 * CHUNK_BYTES),
    ],
)
def test_several_buffers_and_empty_ones_come_whole(sizes: tuple[int, ...]) -> None:
    dialer, listener = open_pair()
    parts = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    sent = RunTasks(1, ((1, 1, OutOfBand(parts)),))
    dialer.send(sent)
    assert dialer.has_bulk

    assert pump(dialer, listener) == ([], [sent])
    assert listener._incoming == {}
    assert (listener._incoming_bytes, listener._unfilled_bytes) == (0, 0)


def test_a_value_larger_than_what_is_allocated_ahead_grows_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNFILLED_BYTES", CHUNK_BYTES // 2)
    dialer, listener = open_pair()
    dialer.send(large())
    held = []
    while dialer.has_bulk:
        events = listener.receive_data(take(dialer), 0.0)
        held.append(max((len(b.data) for bs in listener._incoming.values() for b in bs.values()), default=0))

    assert events == [large()]
    assert held == [1, CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES, 0]


def test_an_announced_size_is_not_allocated() -> None:
    side = at(State.OPEN)
    for transfer in range(module.MAX_OPEN_TRANSFERS):
        total = TRANSFER_BYTES // module.MAX_OPEN_TRANSFERS
        assert side.receive_data(chunk(transfer, 0, 0, total, b"x"), 0.0) == []

    held = sum(len(b.data) for buffers in side._incoming.values() for b in buffers.values())
    assert held <= module.UNFILLED_BYTES + module.MAX_OPEN_TRANSFERS


def test_definitions_precede_what_refers_to_them_whichever_lane_they_take() -> None:
    dialer, listener = open_pair()
    sent = [
        DefineFunction(b"d" * 16, OutOfBand([LARGE])),
        DefineSpec(1, (b"d" * 16, "f")),
        SubmitTasks(1, (1,), (b"x",)),
        DefineSpec(2, (b"d" * 16, "f")),
        SubmitTasks(2, (2,), (b"y",)),
    ]
    for message in sent:
        dialer.send(message)
    dialer.send(MeshChanged(1))  # This refers to nothing and does not wait.

    assert pump(dialer, listener) == ([], [MeshChanged(1), *sent])


def test_tasks_take_the_short_way_again_once_the_definitions_are_out() -> None:
    dialer, listener = open_pair()
    dialer.send(DefineFunction(b"d" * 16, OutOfBand([LARGE])))
    pump(dialer, listener)
    dialer.send(RunTasks(1, ((1, 1, b"x"),)))

    assert not dialer.has_bulk


@pytest.mark.usefixtures("small_frames")
def test_a_batch_too_large_for_a_frame_also_waits_for_its_definitions() -> None:
    dialer, listener = open_pair()
    definition = DefineFunction(b"d" * 16, OutOfBand([LARGE]))
    dialer.send(definition)
    dialer.send(SubmitTasks(1, [1, 2, 3], [b"x" * 500] * 3))

    _, events = pump(dialer, listener)

    assert events[0] == definition
    assert [i for event in events[1:] for i in event.task_ids] == [1, 2, 3]


def test_a_value_over_the_limit_is_refused_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRANSFER_BYTES", len(LARGE))
    side = at(State.OPEN)

    with pytest.raises(ProtocolError, match="over the limit"):
        side.send(large())
    assert not side.has_data


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (chunk(0, 0, 1, 10, b"x"), "do not follow one another"),
        (chunk(0, 0, 0, 10, b"x") + chunk(0, 0, 0, 10, b"x"), "do not follow one another"),
        (chunk(0, 0, 0, 10, b"x") + chunk(0, 0, 2, 10, b"x"), "do not follow one another"),
        (chunk(0, 0, 0, 10, b"x") + chunk(0, 0, 1, 11, b"x"), "do not follow one another"),
        (chunk(0, 0, 0, 1, b"xy"), "do not follow one another"),
        (chunk(0, 0, 0, 5, b""), "do not follow one another"),
        (chunk(0, 0, 0, 0, b"") + chunk(0, 0, 0, 0, b"x"), "do not follow one another"),
        (chunk(0, 0, 0, TRANSFER_BYTES + 1, b"x"), f"{TRANSFER_BYTES} are allowed"),
        (chunk(0, 0, 0, (1 << 64) - 1, b"x"), f"{TRANSFER_BYTES} are allowed"),
        (chunk(0, 0, 0, TRANSFER_BYTES, b"x") + chunk(1, 0, 0, 1, b"x"), f"{TRANSFER_BYTES} are allowed"),
        (chunk(0, 0xFFFF, 0, 1, b"x"), f"{TRANSFER_BYTES} are allowed"),
        (raw_frame(frames.CHUNK, b"short"), "a chunk of -19 bytes"),
        (raw_frame(frames.CHUNK, bytes(24 + CHUNK_BYTES + 1))[:8], "a chunk of 1048577 bytes"),
        (b"".join(chunk(i, 0, 0, 1, b"x") for i in range(module.MAX_OPEN_TRANSFERS + 1)), "more than 64 transfers"),
        (frames.encode_transferred(0x30, 9, b"\x92\x01\x90", 1), "before all of its chunks had come"),
        (chunk(9, 0, 0, 2, b"x") + frames.encode_transferred(0x30, 9, b"\x92\x01\x90", 1), "before all of its chunks"),
        (chunk(9, 1, 0, 1, b"x") + frames.encode_transferred(0x30, 9, b"\x92\x01\x90", 1), "before all of its chunks"),
        (chunk(9, 0, 0, 1, b"x") + frames.encode_transferred(0x30, 9, b"\x92\x01\x90", 2), "before all of its chunks"),
        (chunk(9, 0, 0, 1, b"x") + frames.encode_transferred(0x30, 9, b"\x92\x01\x90", 1), "does not refer to"),
    ],
)
def test_broken_transfers_end_the_connection(data: bytes, text: str) -> None:
    side = at(State.OPEN)

    assert text in only_error(side.receive_data(data, 0.0), ProtocolError)
    assert side.receive_data(frame_of(MeshChanged(1)), 0.0) == []


def test_transfers_may_be_interleaved_by_another_implementation() -> None:
    side = at(State.OPEN)
    data = chunk(1, 0, 0, 4, b"ab") + chunk(2, 0, 0, 2, b"XY") + chunk(1, 0, 2, 4, b"cd")
    data += frames.encode_transferred(0x20, 2, b"\x92\xc4\x00\xd5\x01\x01\x00", 1)
    data += frames.encode_transferred(0x20, 1, b"\x92\xc4\x00\xd5\x01\x01\x00", 1)

    assert side.receive_data(data, 0.0) == [DefineFunction(b"", OutOfBand([b"XY"])), DefineFunction(b"", OutOfBand([b"abcd"]))]


# --- ends


def test_goodbye_ends_both_sides_without_an_error() -> None:
    dialer, listener = open_pair()
    listener.send(MeshChanged(1))
    listener.send(large())
    listener.close("shutting down")

    assert not listener.has_bulk
    assert dialer.receive_data(take(listener) + b"rubbish", 0.0) == [MeshChanged(1), Closed(None, "shutting down")]
    assert dialer.error is None
    assert dialer.state is listener.state is State.CLOSED
    assert dialer.receive_eof(0.0) == listener.receive_eof(0.0) == []


@pytest.mark.parametrize("state", BEFORE_OPEN)
def test_closing_during_the_handshake_says_nothing_more(state: State) -> None:
    side = at(state)
    side.close("changed my mind")

    assert side.state is State.CLOSED
    assert take(side) == b""


def test_a_refusal_can_be_sent_in_the_handshake_and_after_it() -> None:
    for state in (State.HELLO, State.PROOF, State.OPEN):
        side = at(state)
        side.refuse("busy", "x" * 2000)
        assert take(side) == frame_of(Refused("busy", "x" * 1000))
        side.refuse("busy", "again")
        side.close("again")
        assert take(side) == b""


def test_the_longest_refusal_fits_into_a_frame_before_authentication() -> None:
    side = at(State.PROOF)
    side.refuse("authentication", "\U0001f600" * 2000)

    assert len(take(side)) <= PREAUTH_FRAME_BYTES + frames.HEADER.size


def test_a_closed_connection_is_silent_and_deaf_and_holds_nothing() -> None:
    dialer, listener = open_pair()
    dialer.send(large())
    listener.receive_data(take(dialer) + take(dialer)[:5000], 0.0)
    assert listener._incoming
    listener.receive_eof(0.0)

    listener.send(MeshChanged(1))
    assert take(listener) == b""
    assert not listener.has_data
    assert listener.next_deadline() is None
    assert listener._incoming == {}
    assert len(listener.get_buffer()) == frames.PREAUTH_SCRATCH_BYTES  # Not the half received chunk.
    assert listener.buffer_updated(10, 0.0) == []


def test_sending_before_the_connection_is_open_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="MeshChanged sent in state PREAMBLE"):
        dial().send(MeshChanged(1))


def test_an_error_is_the_last_thing_said() -> None:
    side = at(State.OPEN)
    side.send(MeshChanged(1))
    side.receive_data(raw_frame(6, b"\xc1"), 0.0)

    said = take(side)
    assert said.startswith(frame_of(MeshChanged(1)))
    assert said[len(frame_of(MeshChanged(1))) + 4] == 0x05
    assert take(side) == b""


def test_a_goodbye_can_be_received_in_any_pieces() -> None:
    side = at(State.OPEN)

    events = [event for piece in bytewise(frame_of(Goodbye("bye"))) for event in side.receive_data(piece, 0.0)]
    assert events == [Closed(None, "bye")]
