"""Two connections mouth to mouth, and one against anything."""

from __future__ import annotations

import re
from typing import Any, List, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumesh.errors import MeshError, ProtocolError
from gpumesh.model.payloads import Later, OutOfBand, Stored
from gpumesh.protocol import connection as module
from gpumesh.protocol import frames, messages
from gpumesh.protocol.connection import OBJECT_TRANSFER, Closed, Connection, Established, State
from tests.unit.protocol.talk import chunk, dial, drain, frame_of, listen, open_pair, raw_frame, take

SMALL_CHUNK = 64


@pytest.fixture(autouse=True, scope="module")
def _small_limits() -> Any:
    """Small chunks, so that short examples have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", SMALL_CHUNK)
        patch.setattr(module, "BULK_MESSAGE_BYTES", 2 * SMALL_CHUNK)
        patch.setattr(module, "UNFILLED_BYTES", 3 * SMALL_CHUNK)
        yield


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ids = st.integers(0, (1 << 63) - 1)
plain_payloads = st.binary(max_size=40) | st.lists(st.binary(max_size=300), min_size=1, max_size=4).map(OutOfBand)
stored = st.builds(Stored, ids, st.integers(0, 1 << 40))
bundles = st.tuples(
    plain_payloads | stored,
    st.lists(
        st.tuples(st.integers(0, 9) | st.text(max_size=3), plain_payloads | stored | st.builds(Later, ids)), max_size=3
    ).map(tuple),
    st.lists(ids, max_size=3).map(tuple),
)
payloads = plain_payloads | stored | bundles
sent_messages = st.one_of(
    st.builds(messages.MeshChanged, st.integers(0, 1000)),
    st.builds(messages.Answer, st.integers(0, 9), plain, st.text(max_size=9)),
    st.builds(messages.TaskOutput, ids, st.sampled_from([1, 2]), st.binary(max_size=99), st.text(max_size=5)),
    st.builds(messages.DefineFunction, st.binary(min_size=16, max_size=16), plain_payloads),
    st.builds(messages.DefineCode, st.binary(min_size=16, max_size=16), plain_payloads),
    st.builds(messages.HoldRefs, st.lists(ids, max_size=3).map(tuple)),
    st.builds(messages.ReleaseRefs, st.lists(st.tuples(ids, st.integers(1, 9)), max_size=3).map(tuple)),
    st.builds(messages.PutObject, ids, ids, st.text(max_size=5), plain_payloads, st.lists(ids, max_size=2).map(tuple)),
    st.builds(messages.DefineSpec, st.integers(0, 9), st.tuples(st.binary(max_size=16), st.text(max_size=5))),
    st.lists(st.tuples(ids, payloads), max_size=4).map(
        lambda pairs: messages.SubmitTasks(1, tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
    ),
    st.builds(
        messages.RunTasks,
        st.integers(0, 9),
        st.lists(st.tuples(ids, st.integers(1, 9), payloads), max_size=3).map(tuple),
        st.lists(st.text(max_size=9), max_size=2).map(tuple),
        st.integers(0, 9),
    ),
    st.builds(
        messages.TaskResults,
        st.text(max_size=5),
        st.lists(st.tuples(ids, st.integers(0, 9), payloads, st.floats(0, 9)), max_size=3).map(tuple),
    ),
)
cut_lengths = st.lists(st.integers(1, 400), max_size=30)


def deliver(receiver: Connection, data: bytes, lengths: List[int], now: float = 0.0) -> List[Any]:
    events: List[Any] = []
    position = 0
    for length in [*lengths, len(data)]:
        events.extend(receiver.receive_data(data[position : position + length], now))
        position += length
    return events


def is_definition(message: Any) -> bool:
    return type(message) in (messages.DefineFunction, messages.DefineCode, messages.DefineSpec)


def is_ordered(sent: List[Any], received: List[Any]) -> bool:
    """Whether each task batch still stands behind all definitions that were sent before it, and these in order.

    And whether nothing that was sent before a release has come after it.
    """
    if [m for m in sent if is_definition(m)] != [m for m in received if is_definition(m)]:
        return False
    for message in sent:
        if type(message) in (messages.SubmitTasks, messages.RunTasks):
            behind = received.index(message)
            needed = sum(is_definition(other) for other in sent[: sent.index(message)])
            if sum(is_definition(other) for other in received[: behind + 1]) < needed:
                return False
    for position, message in enumerate(sent):
        if type(message) is messages.ReleaseRefs:
            before = received[: len(received) - received[::-1].index(message)]
            if any(before.count(other) < sent[:position].count(other) for other in sent[:position]):
                return False
    return True


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(sent_messages, max_size=4), max_size=6), st.lists(st.booleans(), max_size=20), cut_lengths)
def test_what_is_sent_arrives_once_and_in_order_on_each_lane(
    bursts: List[List[Any]], uses_bulk: List[bool], lengths: List[int]
) -> None:
    dialer, listener = open_pair()
    expected_control: List[Any] = []
    expected_bulk: List[Any] = []
    wire = b""
    choices = iter(uses_bulk)
    for burst in bursts:
        for message in burst:
            before = len(dialer._bulk)
            dialer.send(message)
            (expected_bulk if len(dialer._bulk) > before else expected_control).append(message)
        wire += take(dialer, bulk=next(choices, True))
    wire += drain(dialer)

    received = deliver(listener, wire, lengths)

    remaining = list(received)
    for message in expected_control:
        remaining.remove(message)
    assert len(remaining) == len(expected_bulk)
    assert all(message in received for message in expected_bulk)
    assert subsequence(expected_control, received)
    assert subsequence(expected_bulk, received)
    assert is_ordered([message for burst in bursts for message in burst], received)
    assert listener._incoming == {}
    assert (listener._incoming_bytes, listener._unfilled_bytes) == (0, 0)
    assert listener.established


def subsequence(short: List[Any], long: List[Any]) -> bool:
    rest = iter(long)
    return all(any(message == other for other in rest) for message in short)


@settings(max_examples=60, deadline=None)
@given(cut_lengths, cut_lengths, st.booleans())
def test_a_handshake_succeeds_however_it_is_cut(there: List[int], back: List[int], same_token: bool) -> None:
    dialer, listener = dial(token="mysecret" if same_token else "other"), listen()
    at_dialer: List[Any] = []
    at_listener: List[Any] = []
    while dialer.has_data or listener.has_data:
        at_listener += deliver(listener, take(dialer), there)
        at_dialer += deliver(dialer, take(listener), back)

    expected = Established if same_token else Closed
    assert [type(event) for event in at_dialer] == [expected]
    assert [type(event) for event in at_listener] == [expected]


def check_end(side: Connection, events: List[Any]) -> None:
    """At most one Closed, as the last event, with an error of the mesh; then silence."""
    closed = [event for event in events if type(event) is Closed]
    assert closed == events[-1:] or not closed
    if closed:
        assert side.state is State.CLOSED
        assert closed[0].error is side.error
        assert side.receive_data(b"more", 0.0) == []
        drain(side)
        assert not side.has_data
    else:
        assert side.state is not State.CLOSED


pieces_of_wire = st.lists(
    st.binary(max_size=60)
    | sent_messages.map(frame_of)
    | st.builds(
        chunk,
        st.sampled_from([OBJECT_TRANSFER, OBJECT_TRANSFER | 1]),
        st.sampled_from([0, 0, 0, 1]),
        st.sampled_from([0, 0, 20, 30, 40]),
        st.sampled_from([40, 40, 40, 41]),
        st.sampled_from([0, 10, 20, 40]).map(bytes),
    )
    | st.sampled_from(
        [
            messages.ObjectSent(OBJECT_TRANSFER),
            messages.ObjectAt(OBJECT_TRANSFER, 1, "", 0, None, "lost: gone"),
            messages.FetchObject(OBJECT_TRANSFER, 1, 99),
            messages.CancelFetch(OBJECT_TRANSFER),
            messages.TransferCredit(OBJECT_TRANSFER, 20),
        ]
    ).map(frame_of)
    | st.builds(raw_frame, st.integers(0, 255), st.binary(max_size=30), flags=st.integers(0, 2), buffers=st.integers(0, 3))
    | st.builds(
        chunk, st.integers(0, 2), st.integers(0, 2), st.integers(0, 40), st.integers(0, 80), st.binary(max_size=SMALL_CHUNK)
    ),
    max_size=8,
).map(b"".join)


def without_progress(error: Optional[Exception]) -> str:
    """An error's text; how much of an object had come by then depends on how the bytes were cut."""
    return re.sub(r"sent \d+ of", "sent some of", str(error))


@settings(max_examples=60, deadline=None)
@given(pieces_of_wire, cut_lengths)
def test_any_bytes_after_authentication_give_messages_or_a_protocol_error(data: bytes, lengths: List[int]) -> None:
    _, one = open_pair()
    _, other = open_pair()
    for side in (one, other):
        side.receive_into(OBJECT_TRANSFER, bytearray(40))

    events = deliver(one, data, lengths)

    assert events[:-1] == deliver(other, data, [])[:-1]
    assert without_progress(one.error) == without_progress(other.error)
    assert one.error is None or isinstance(one.error, MeshError)
    check_end(one, events)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["dialer", "listener"]), pieces_of_wire, cut_lengths, st.booleans())
def test_any_bytes_before_authentication_give_nothing_but_an_error(
    role: str, data: bytes, lengths: List[int], with_preamble: bool
) -> None:
    side = dial() if role == "dialer" else listen()

    events = deliver(side, frames.PREAMBLE * with_preamble + data, lengths)

    assert [event for event in events if type(event) is not Closed] == []
    check_end(side, events)
    assert side._incoming == {}
    assert len(side.get_buffer()) <= frames.PREAUTH_SCRATCH_BYTES


@settings(max_examples=150, deadline=None)
@given(st.lists(sent_messages, min_size=1, max_size=4), st.data(), cut_lengths)
def test_a_valid_stream_with_one_changed_byte_never_does_worse_than_close(
    sent: List[Any], data: st.DataObject, lengths: List[int]
) -> None:
    dialer, listener = open_pair()
    for message in sent:
        dialer.send(message)
    wire = bytearray(drain(dialer))
    position = data.draw(st.integers(0, len(wire) - 1))
    wire[position] ^= data.draw(st.integers(1, 255))

    events = deliver(listener, bytes(wire), lengths)

    check_end(listener, events)
    assert isinstance(listener.error, (ProtocolError, type(None)))
    events += listener.receive_eof(0.0)
    assert type(events[-1]) is Closed


@settings(max_examples=150, deadline=None)
@given(st.data(), cut_lengths)
def test_a_handshake_with_one_changed_byte_never_opens_both_sides(data: st.DataObject, lengths: List[int]) -> None:
    dialer, listener = dial(), listen()
    flip = data.draw(st.integers(0, 260))
    passed = 0

    def carry(wire: bytes) -> bytes:
        nonlocal passed
        changed = bytearray(wire)
        if passed <= flip < passed + len(wire):
            changed[flip - passed] ^= data.draw(st.integers(1, 255))
        passed += len(wire)
        return bytes(changed)

    at_dialer: List[Any] = []
    at_listener: List[Any] = []
    while dialer.has_data or listener.has_data:
        at_listener += deliver(listener, carry(take(dialer)), lengths)
        at_dialer += deliver(dialer, carry(take(listener)), lengths)

    check_end(dialer, at_dialer)
    check_end(listener, at_listener)
    if dialer.established and listener.established:
        # Only the number of workers in Welcome is not covered by a proof.
        assert flip >= passed or at_dialer[0].workers != 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.booleans()), max_size=40))
def test_time_alone_ends_a_connection_after_silence_and_not_before(steps: List[Any]) -> None:
    side, other = open_pair()
    now = heard = 0.0
    for passed, hears in steps:
        due = side.next_deadline()
        assert due is not None
        assert now < due <= now + module.HEARTBEAT_SECONDS
        now += min(passed, due - now)
        if hears:
            other.send(messages.MeshChanged(1))
            assert side.receive_data(take(other), now) == [messages.MeshChanged(1)]
            heard = now
        events = side.on_time(now)
        if events:
            assert now - heard >= module.SILENCE_SECONDS
            return
        assert now - heard < module.SILENCE_SECONDS
        take(side)
