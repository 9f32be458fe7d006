"""Objects between two connections: who asks, who answers, how much is under way, and every way to be wrong."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, List, Tuple

import pytest

from gpumesh.config import CHUNK_BYTES, FETCH_WINDOW_BYTES, MIB
from gpumesh.errors import ProtocolError
from gpumesh.model.payloads import Bundle, OutOfBand, Stored
from gpumesh.protocol import connection as module
from gpumesh.protocol import frames
from gpumesh.protocol.connection import OBJECT_CHUNK_BYTES, OBJECT_TRANSFER, Closed, Connection, ObjectDelivered, State
from gpumesh.protocol.messages import (
    CancelFetch,
    DefineCode,
    DefineFunction,
    DefineSpec,
    DeleteObjects,
    FetchObject,
    FreeObjects,
    HoldRefs,
    MeshChanged,
    ObjectAt,
    ObjectSent,
    PutObject,
    ReleaseRefs,
    RunTasks,
    SegmentsGone,
    SubmitTasks,
    TransferCredit,
    UnpinObjects,
)
from tests.unit.protocol.talk import Fetch, chunk, drain, frame_of, open_pair, pump, take

ONE = OBJECT_TRANSFER | 1
TWO = OBJECT_TRANSFER | 2
OID = (7 << 32) | 1
WIDE = 16 * MIB  # A window that no value here fills.
VALUE = bytes(range(251)) * (6 * OBJECT_CHUNK_BYTES // 251) + bytes(6 * OBJECT_CHUNK_BYTES % 251 + 3)


def only_error(events: List[Any]) -> str:
    (closed,) = events
    assert type(closed) is Closed
    assert type(closed.error) is ProtocolError
    return str(closed.error)


def fetching(size: int, *, number: int = ONE, window: int = WIDE) -> Tuple[Connection, Connection, bytearray]:
    """A receiver that has asked for `size` bytes, the sender that has read so, and where they go."""
    receiver, sender = open_pair()
    target = bytearray(size)
    receiver.receive_into(number, target, window)
    receiver.send(FetchObject(number, OID, window))
    assert pump(receiver, sender) == ([], [FetchObject(number, OID, window)])
    return receiver, sender, target


# --- one object


@pytest.mark.parametrize("size", [0, 1, OBJECT_CHUNK_BYTES, OBJECT_CHUNK_BYTES + 1, len(VALUE)])
def test_an_object_arrives_in_the_memory_made_ready_for_it_and_the_sender_hears_of_it(size: int) -> None:
    receiver, sender, target = fetching(size)
    sender.send_object(ONE, [VALUE[:size]], WIDE)

    assert pump(receiver, sender) == ([ObjectSent(ONE)], [ObjectDelivered(ONE)])
    assert target == VALUE[:size]
    assert not receiver.has_object_transfers
    assert not sender.has_object_transfers
    target.append(0)  # Nothing holds on to it.


def test_pieces_of_an_object_are_sent_as_they_are_without_a_copy() -> None:
    pieces = [b"", bytearray(b"head"), memoryview(VALUE), b"", memoryview(b"tail-tail-tail").cast("H"), b""]
    whole = b"".join(bytes(piece) for piece in pieces)
    receiver, sender, target = fetching(len(whole))
    sender.send_object(ONE, pieces, WIDE)

    written: List[Any] = []
    while sender.has_bulk:
        written.extend(sender.data_to_send())
    for part in written:
        receiver.receive_data(part, 0.0)

    owners = [part.obj for part in written if isinstance(part, memoryview)]
    assert {id(owner) for owner in owners} == {id(pieces[1]), id(VALUE), id(pieces[4].obj)}
    assert target == whole


def test_a_chunk_is_never_larger_than_the_limit_and_ends_with_the_answer() -> None:
    _, sender, _ = fetching(len(VALUE))
    sender.send_object(ONE, [VALUE], WIDE)
    sizes = []
    while sender.has_bulk:
        data = take(sender)
        sizes.append(len(data))

    assert len(sizes) == 7
    assert max(sizes) <= OBJECT_CHUNK_BYTES + frames.HEADER.size + frames.CHUNK_HEADER.size <= CHUNK_BYTES
    assert data.endswith(frame_of(ObjectSent(ONE)))


def test_the_memory_of_an_object_counts_as_free_only_when_the_receiver_has_all_of_it() -> None:
    receiver, sender, _ = fetching(len(VALUE))
    sender.send_object(ONE, [VALUE], WIDE)
    wire = drain(sender)
    assert not sender.has_bulk
    assert sender.sending == 1

    last = len(frame_of(ObjectSent(ONE)))
    assert receiver.receive_data(wire[:-last], 0.0) == []
    assert sender.receive_data(drain(receiver), 0.0) == []
    assert receiver.receive_data(wire[-last:], 0.0) == [ObjectSent(ONE)]
    assert sender.receive_data(drain(receiver), 0.0) == [ObjectDelivered(ONE)]
    assert sender.sending == 0


def test_the_last_bytes_are_not_confirmed_before_they_are_there() -> None:
    receiver, sender, _ = fetching(100, window=100)
    sender.send_object(ONE, [VALUE[:100]], 100)
    wire = drain(sender)
    last = len(frame_of(ObjectSent(ONE)))

    receiver.receive_data(wire[: -last - 1], 0.0)
    assert not receiver.has_data
    receiver.receive_data(wire[-last - 1 :], 0.0)
    assert drain(receiver) == frame_of(TransferCredit(ONE, 100))


def test_an_answer_may_come_long_after_the_question() -> None:
    receiver, sender, target = fetching(3)
    sender.send(MeshChanged(1))
    assert pump(receiver, sender) == ([MeshChanged(1)], [])

    sender.send_object(ONE, [b"abc"], WIDE)
    assert pump(receiver, sender) == ([ObjectSent(ONE)], [ObjectDelivered(ONE)])
    assert target == b"abc"


@pytest.mark.parametrize(
    "answer",
    [ObjectAt(ONE, OID, "", 5, b"small", ""), ObjectAt(ONE, OID, "", 0, None, "lost: gone")],
)
def test_the_answer_may_be_something_else_than_a_transfer(answer: ObjectAt) -> None:
    receiver, sender, target = fetching(10)
    sender.send(answer)
    sender.send_object(ONE, [bytes(10)], WIDE)  # Answered already.

    assert pump(receiver, sender) == ([answer], [])
    target.append(0)
    assert not receiver.has_object_transfers


# --- credit


def test_no_more_leaves_than_the_receiver_has_given_credit_for() -> None:
    window = 2 * OBJECT_CHUNK_BYTES
    receiver, sender, target = fetching(len(VALUE), window=window)
    sender.send_object(ONE, [VALUE], window)

    first = drain(sender)
    assert len(first) < window + 200
    assert not sender.has_bulk
    assert not sender.has_data
    assert sender.has_object_transfers

    assert receiver.receive_data(first, 0.0) == []
    credit = drain(receiver)
    assert credit == frame_of(TransferCredit(ONE, OBJECT_CHUNK_BYTES)) * 2
    assert sender.receive_data(credit, 0.0) == []
    assert sender.has_bulk
    assert pump(receiver, sender) == ([ObjectSent(ONE)], [ObjectDelivered(ONE)])
    assert target == VALUE


@pytest.mark.parametrize("window", [1, 2, 3, OBJECT_CHUNK_BYTES - 1])
def test_a_window_smaller_than_a_chunk_is_slow_and_right(window: int) -> None:
    size = 5 * window + 1
    receiver, sender, target = fetching(size, window=window)
    sender.send_object(ONE, [VALUE[:size]], window)

    assert pump(receiver, sender) == ([ObjectSent(ONE)], [ObjectDelivered(ONE)])
    assert target == VALUE[:size]


def test_a_window_of_nothing_moves_nothing() -> None:
    receiver, sender, _ = fetching(len(VALUE), window=0)
    sender.send_object(ONE, [VALUE], 0)

    assert not sender.has_data
    assert pump(receiver, sender) == ([], [])


def test_credit_is_given_at_half_of_the_window_and_the_last_of_it_after_the_end() -> None:
    window = 4 * OBJECT_CHUNK_BYTES
    receiver, sender, _ = fetching(len(VALUE), window=window)
    sender.send_object(ONE, [VALUE], window)
    credits: List[int] = []
    while sender.has_data:
        receiver.receive_data(take(sender), 0.0)
        back = drain(receiver)
        for frame in frames.FrameDecoder(limit=100).feed(back):
            credits.append(module.codec.decode(frame, lambda transfer, count: []).nbytes)
        sender.receive_data(back, 0.0)

    assert credits == [window // 2, len(VALUE) - window - window // 2, window]
    assert sum(credits) == len(VALUE)


def test_what_shares_a_link_shares_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORT_WINDOW_BYTES", OBJECT_CHUNK_BYTES)
    receiver, sender = open_pair()
    window = 3 * OBJECT_CHUNK_BYTES
    fetches = [Fetch(receiver, sender, OBJECT_TRANSFER | number, VALUE, window) for number in range(3)]
    for fetch in fetches:
        fetch.answer()
    most = 0
    while sender.has_data:
        receiver.receive_data(drain(sender), 0.0)
        sender.receive_data(drain(receiver), 0.0)
        most = max(most, sum(min(sent.credit, sent.total - sent.offset) for sent in sender._outgoing.values()))

    assert all(fetch.target == VALUE for fetch in fetches)
    assert most <= window


PACKET = 64 * 1024


class Distant:
    """A receiver and a sender that hear of each other `delay` seconds later, over a link of `rate` bytes a second."""

    def __init__(self, *, delay: float, rate: float) -> None:
        self.receiver, self.sender = open_pair()
        self._delay = delay
        self._rate = rate
        self._free = 0.0  # When the link has sent all it was given.
        self._now = 0.0
        self._there: Deque[Tuple[float, bytes]] = deque()
        self._back: Deque[Tuple[float, bytes]] = deque()

    def fetch(self, number: int, value: memoryview) -> float:
        """How long an object takes."""
        target = bytearray(len(value))
        self.receiver.receive_into(number, target)
        self.receiver.send(FetchObject(number, OID, FETCH_WINDOW_BYTES))
        begin = self._now
        while self.receiver.has_object_transfers or self.receiver.has_data:
            if self.receiver.has_data:
                self._back.append((self._now + self._delay, drain(self.receiver)))
            while self.sender.has_data:
                data = take(self.sender)
                for start in range(0, len(data), PACKET):
                    piece = data[start : start + PACKET]
                    self._free = max(self._free, self._now) + len(piece) / self._rate
                    self._there.append((self._free + self._delay, piece))
            if self._back and (not self._there or self._back[0][0] <= self._there[0][0]):
                self._now, data = self._back.popleft()
                if FetchObject(number, OID, FETCH_WINDOW_BYTES) in self.sender.receive_data(data, self._now):
                    self.sender.send_object(number, [value], FETCH_WINDOW_BYTES)
            elif self._there:
                self._now, data = self._there.popleft()
                self.receiver.receive_data(data, self._now)
        assert target == value
        return self._now - begin


def test_the_window_grows_on_a_long_way_and_is_remembered() -> None:
    value = memoryview(VALUE * 30)  # 94 MB: 0.75 s at 1 Gbit/s.
    distant = Distant(delay=0.05, rate=125e6)

    first = distant.fetch(ONE, value)
    second = distant.fetch(TWO, value)

    at_best = len(value) / 125e6 + 0.1
    assert len(value) / FETCH_WINDOW_BYTES * 0.1 > 4 * at_best  # What it would take with the window as it is at first.
    assert first < 2.5 * at_best
    assert second < 1.5 * at_best


def test_the_window_stays_small_on_a_short_way() -> None:
    distant = Distant(delay=0.0001, rate=1e9)

    distant.fetch(ONE, memoryview(VALUE * 30))

    assert distant.receiver._window_bytes == 0


# --- several, and other messages


def test_control_messages_leave_before_the_next_chunk_of_an_object() -> None:
    receiver, sender, _ = fetching(len(VALUE))
    sender.send_object(ONE, [VALUE], WIDE)
    assert receiver.receive_data(take(sender), 0.0) == []
    sender.send(MeshChanged(1))

    assert receiver.receive_data(take(sender), 0.0) == [MeshChanged(1)]
    assert take(sender, bulk=False) == b""
    assert sender.has_bulk


def test_objects_take_turns() -> None:
    receiver, sender = open_pair()
    fetches = [Fetch(receiver, sender, OBJECT_TRANSFER | number, VALUE) for number in range(3)]
    for fetch in fetches:
        fetch.answer()
    numbers = []
    while sender.has_bulk:
        data = take(sender)
        numbers.append(frames.CHUNK_HEADER.unpack_from(data, frames.HEADER.size)[0] - OBJECT_TRANSFER)
        receiver.receive_data(data, 0.0)

    assert numbers == [0, 1, 2] * 7
    assert all(fetch.target == VALUE for fetch in fetches)


def test_a_large_message_shares_the_lane_with_objects() -> None:
    receiver, sender = open_pair()
    fetches = [Fetch(receiver, sender, number, VALUE * 3) for number in (ONE, TWO)]
    for fetch in fetches:
        fetch.answer()
    message = RunTasks(1, ((1, 1, OutOfBand([b"p", VALUE])),))
    sender.send(message)
    turns = 0
    events: List[Any] = []
    while message not in events:
        turns += 1
        events += receiver.receive_data(take(sender), 0.0)

    assert turns <= 10  # Five chunks of its own, every other turn.
    assert [event for event in pump(receiver, sender)[0] if type(event) is ObjectSent] == [ObjectSent(ONE), ObjectSent(TWO)]
    assert all(fetch.target == VALUE * 3 for fetch in fetches)


def test_objects_do_not_count_as_messages_that_wait() -> None:
    _, sender, _ = fetching(len(VALUE))
    sender.send_object(ONE, [VALUE], WIDE)

    assert sender.has_bulk
    assert not sender.has_bulk_messages
    assert (sender.bytes_waiting, sender.bulk_bytes_waiting) == (0, 0)
    sender.send(RunTasks(1, ((1, 1, OutOfBand([VALUE])),)))
    assert sender.has_bulk_messages


def test_both_sides_may_send_at_once_under_the_same_number() -> None:
    one, other = open_pair()
    there, back = Fetch(one, other, ONE, VALUE), Fetch(other, one, ONE, VALUE[::-1])
    there.answer()
    back.answer()

    expected = [ObjectDelivered(ONE), ObjectSent(ONE)]
    assert [sorted(map(repr, events)) for events in pump(one, other)] == [sorted(map(repr, expected))] * 2
    assert (there.target, back.target) == (VALUE, VALUE[::-1])


# --- giving up


def test_a_cancelled_transfer_stops_and_nothing_more_of_it_reaches_its_memory() -> None:
    receiver, sender, target = fetching(len(VALUE))
    sender.send_object(ONE, [VALUE], WIDE)
    on_its_way = take(sender)
    middle = len(on_its_way) // 2
    receiver.receive_data(on_its_way[:middle], 0.0)
    before = bytes(target)

    receiver.forget_transfer(ONE)
    receiver.send(CancelFetch(ONE))
    receiver.receive_data(on_its_way[middle:] + take(sender), 0.0)
    assert pump(receiver, sender) == ([], [CancelFetch(ONE)])

    assert target == before
    target.append(0)
    for side in (receiver, sender):
        assert side.established
        assert not side.has_object_transfers
        assert side._scratch == b""
    again = Fetch(receiver, sender, ONE, VALUE)
    again.answer()
    assert pump(receiver, sender) == ([ObjectSent(ONE)], [ObjectDelivered(ONE)])
    assert again.target == VALUE


def test_a_transfer_that_is_cancelled_before_its_answer_is_not_begun() -> None:
    receiver, sender, _ = fetching(len(VALUE))
    receiver.forget_transfer(ONE)
    receiver.send(CancelFetch(ONE))
    assert pump(receiver, sender) == ([], [CancelFetch(ONE)])

    sender.send_object(ONE, [VALUE], WIDE)
    assert not sender.has_data
    assert not receiver.has_object_transfers


@pytest.mark.parametrize("answer_leaves_first", [True, False])
def test_a_cancellation_may_cross_the_end_of_its_transfer(answer_leaves_first: bool) -> None:
    receiver, sender, _ = fetching(3)
    sender.send_object(ONE, [b"abc"], WIDE)
    if answer_leaves_first:
        answer = drain(sender)
    receiver.forget_transfer(ONE)
    receiver.send(CancelFetch(ONE))
    assert sender.receive_data(drain(receiver), 0.0) == [CancelFetch(ONE)]
    if not answer_leaves_first:
        answer = drain(sender)
        assert answer == frame_of(ObjectSent(ONE))

    assert receiver.receive_data(answer, 0.0) == []
    assert not sender.has_object_transfers
    assert not receiver.has_object_transfers
    assert not receiver.has_data


def test_a_cancellation_may_cross_an_answer_without_transfer() -> None:
    receiver, sender, _ = fetching(3)
    sender.send(ObjectAt(ONE, OID, "", 0, None, "lost: gone"))
    receiver.forget_transfer(ONE)
    receiver.send(CancelFetch(ONE))

    assert pump(receiver, sender) == ([], [CancelFetch(ONE)])
    assert not receiver.has_object_transfers


def test_forgetting_twice_or_too_late_changes_nothing() -> None:
    receiver, sender, target = fetching(3)
    sender.send_object(ONE, [b"abc"], WIDE)
    pump(receiver, sender)

    receiver.forget_transfer(ONE)
    receiver.send(CancelFetch(ONE))
    assert pump(receiver, sender) == ([], [CancelFetch(ONE)])
    receiver.receive_into(TWO, target)
    receiver.forget_transfer(TWO)
    receiver.forget_transfer(TWO)
    assert receiver.has_object_transfers  # Until its answer comes.


def test_what_is_dropped_of_one_transfer_leaves_the_others_alone() -> None:
    receiver, sender = open_pair()
    kept, dropped = Fetch(receiver, sender, ONE, VALUE), Fetch(receiver, sender, TWO, VALUE[::-1])
    kept.answer()
    dropped.answer()
    receiver.receive_data(take(sender), 0.0)
    half = take(sender)
    receiver.receive_data(half[:1000], 0.0)
    receiver.forget_transfer(TWO)
    receiver.forget_transfer(ONE | 0x40)  # There is none.
    receiver.send(CancelFetch(TWO))
    receiver.receive_data(half[1000:], 0.0)

    at_receiver, at_sender = pump(receiver, sender)
    assert at_receiver == [ObjectSent(ONE)]
    assert at_sender == [CancelFetch(TWO), ObjectDelivered(ONE)]
    assert kept.target == VALUE
    assert dropped.target[1000:] == bytes(len(VALUE) - 1000)


def test_an_object_that_is_lost_in_the_middle_is_answered_by_why() -> None:
    receiver, sender, target = fetching(len(VALUE))
    sender.send_object(ONE, [VALUE], WIDE)
    receiver.receive_data(take(sender), 0.0)
    lost = ObjectAt(ONE, OID, "", 0, None, "lost: it was deleted")
    sender.stop_sending(ONE)
    sender.send(lost)

    assert pump(receiver, sender) == ([lost], [])
    assert not sender.has_object_transfers
    assert not receiver.has_object_transfers
    target.append(0)


def test_stopping_what_waits_for_credit_or_is_unknown_is_quiet() -> None:
    receiver, sender, _ = fetching(len(VALUE), window=1)
    sender.send_object(ONE, [VALUE], 1)
    sender.send_object(ONE, [VALUE], 1)
    wire = drain(sender)
    sender.stop_sending(ONE)
    sender.stop_sending(TWO)

    receiver.receive_data(wire, 0.0)
    assert pump(receiver, sender) == ([], [])  # Its credit comes too late and is ignored.
    assert sender.sending == 0


@pytest.mark.parametrize("end", ["close", "eof", "fail"])
def test_the_end_of_a_connection_lets_go_of_all_memory(end: str) -> None:
    source, target = bytearray(VALUE), bytearray(VALUE)
    one, other = open_pair()
    one.receive_into(ONE, target)
    one.send(FetchObject(ONE, OID, WIDE))
    pump(one, other)
    other.send_object(ONE, [source], WIDE)
    data = take(other)
    one.receive_data(data[:-100], 0.0)
    del data
    for side in (one, other):
        if end == "close":
            side.close("enough")
        elif end == "eof":
            side.receive_eof(0.0)
        else:
            side.receive_data(b"\0" * 100, 0.0)
            side.receive_data(b"\0" * 30, 0.0)
            side.close("")
        side.data_to_send()
        assert not side.has_object_transfers
        assert not side.has_data
        assert side.state is State.CLOSED
        side.receive_into(TWO, target)
        side.send_object(TWO, [source], 5)
        side.forget_transfer(TWO)
        side.stop_sending(TWO)
        assert not side.has_object_transfers
    source.append(0)
    target.append(0)


# --- peers that break the rules


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (chunk(TWO, 0, 0, 10, b"x"), "it was not asked for"),
        (chunk(ONE, 0, 0, 11, b"x"), "an object of 11 bytes where 10 were expected"),
        (chunk(ONE, 0, 0, 1 << 60, b"x"), "where 10 were expected"),
        (chunk(ONE, 0, 1, 10, b"x"), "do not follow one another"),
        (chunk(ONE, 1, 0, 10, b"x"), "do not follow one another"),
        (chunk(ONE, 0, 0, 10, b""), "do not follow one another"),
        (chunk(ONE, 0, 0, 10, b"x") + chunk(ONE, 0, 0, 10, b"x"), "do not follow one another"),
        (chunk(ONE, 0, 0, 10, b"x") + chunk(ONE, 0, 2, 10, b"x"), "do not follow one another"),
        (chunk(ONE, 0, 0, 10, bytes(11)), "do not follow one another"),
        (chunk(ONE, 0, 0, 10, bytes(10)) + chunk(ONE, 0, 10, 10, b""), "it was not asked for"),
        (chunk(ONE, 0, 0, 10, b"x") + frame_of(ObjectSent(ONE)), "sent 1 of 10 bytes of an object and said that was all"),
        (frame_of(ObjectSent(ONE)), "sent 0 of 10 bytes"),
        (frames.encode_transferred(0x30, ONE, b"\x92\x01\x90", 1), "before all of its chunks had come"),
        (frame_of(FetchObject(5, OID, 1)), "as transfer 0x5, which is taken or out of range"),
        (frame_of(FetchObject(ONE | 1 << 32, OID, 1)), "taken or out of range"),
        (frame_of(FetchObject(-1, OID, 1)), "taken or out of range"),
        (frame_of(FetchObject(ONE, OID, 1)) * 2, "taken or out of range"),
    ],
)
def test_a_peer_that_breaks_the_rules_of_objects_is_left(data: bytes, text: str) -> None:
    receiver, _, target = fetching(10)

    events = receiver.receive_data(data + frame_of(MeshChanged(1)), 0.0)

    assert text in only_error([event for event in events if type(event) is not FetchObject])
    target.append(0)


@pytest.mark.parametrize("nbytes", [-1, 0, len(VALUE), len(VALUE) + 1, 1 << 63])
def test_credit_that_says_all_has_come_before_all_has_left_is_refused(nbytes: int) -> None:
    _, sender, _ = fetching(len(VALUE))
    sender.send_object(ONE, [VALUE], WIDE)
    take(sender)

    assert "confirms more of an object than it was sent" in only_error(
        sender.receive_data(frame_of(TransferCredit(ONE, nbytes)), 0.0)
    )


def test_an_empty_object_needs_its_chunk() -> None:
    receiver, _, _ = fetching(0)

    assert "sent 0 of 0 bytes" in only_error(receiver.receive_data(frame_of(ObjectSent(ONE)), 0.0))


def test_answers_to_nothing_are_ignored_or_left_to_the_owner() -> None:
    side, _ = open_pair()
    at = ObjectAt(ONE, OID, "/dev/shm/x", 5, None, "")

    assert side.receive_data(frame_of(ObjectSent(TWO)) + frame_of(TransferCredit(TWO, 5)) + frame_of(at), 0.0) == [at]
    assert side.established


def test_a_forgotten_transfer_is_still_held_to_the_rules() -> None:
    receiver, _, _ = fetching(10)
    receiver.forget_transfer(ONE)

    assert "do not follow" in only_error(receiver.receive_data(chunk(ONE, 0, 3, 10, b"x"), 0.0))


def test_a_wrong_number_is_a_defect_of_this_side() -> None:
    side, _ = open_pair()
    side.receive_into(ONE, bytearray(1))

    with pytest.raises(AssertionError):
        side.receive_into(ONE, bytearray(1))
    with pytest.raises(AssertionError):
        side.receive_into(1, bytearray(1))


# --- the order of messages about objects

LARGE_TASKS = SubmitTasks(1, (1,), (OutOfBand([b"p", VALUE]),))


@pytest.mark.parametrize(
    "message", [UnpinObjects(((OID, 1),)), ReleaseRefs(((OID, 1),)), DeleteObjects((OID,))], ids=lambda m: type(m).__name__
)
def test_what_lets_go_of_an_object_never_overtakes(message: Any) -> None:
    one, other = open_pair()
    one.send(message)
    assert not one.has_bulk
    pump(one, other)

    one.send(LARGE_TASKS)
    one.send(message)
    one.send(message)
    assert pump(one, other) == ([], [LARGE_TASKS, message, message])


def test_a_hold_never_waits_so_that_what_ends_a_task_cannot_overtake_it() -> None:
    one, other = open_pair()
    one.send(LARGE_TASKS)
    one.send(HoldRefs((OID,)))
    one.send(MeshChanged(1))

    assert pump(one, other) == ([], [HoldRefs((OID,)), MeshChanged(1), LARGE_TASKS])


def test_letting_go_does_not_wait_for_objects_on_their_way() -> None:
    _, sender, _ = fetching(len(VALUE))
    sender.send_object(ONE, [VALUE], WIDE)
    take(sender)
    sender.send(ReleaseRefs(((OID, 1),)))

    assert take(sender, bulk=False) == frame_of(ReleaseRefs(((OID, 1),)))


def test_shipped_code_precedes_what_is_defined_and_run_with_it() -> None:
    one, other = open_pair()
    archive = DefineCode(b"c" * 16, VALUE)
    sent = [DefineFunction(b"d" * 16, b"body"), DefineSpec(1, (b"d" * 16, "f")), SubmitTasks(1, (1,), (b"x",))]
    for message in [archive, *sent]:
        one.send(message)
    one.send(MeshChanged(1))

    received = pump(one, other)[1]
    assert received == [MeshChanged(1), archive._replace(archive=OutOfBand([VALUE])), *sent]


# --- messages that are too large for one frame


def test_long_lists_of_objects_leave_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONTROL_FRAME_BYTES", 1000)
    monkeypatch.setattr(module, "BULK_MESSAGE_BYTES", 500)
    oids = tuple(range(OID, OID + 400))
    pairs = tuple((oid, 1) for oid in oids)
    names = tuple(f"s{number}" for number in range(400))
    for message, field in [
        (HoldRefs(oids), "oids"),
        (DeleteObjects(oids), "oids"),
        (FreeObjects(oids), "oids"),
        (ReleaseRefs(pairs), "objects"),
        (UnpinObjects(pairs), "objects"),
        (SegmentsGone(names), "names"),
    ]:
        one, other = open_pair()
        one.send(message)
        events = pump(one, other)[1]
        assert len(events) > 1
        assert {type(event) for event in events} == {type(message)}
        assert [item for event in events for item in getattr(event, field)] == list(getattr(message, field))


def test_a_call_with_many_small_inputs_is_not_too_large() -> None:
    one, other = open_pair()
    inputs = tuple((place, bytes([place % 256]) * 60_000) for place in range(400)) + (("stored", Stored(OID, 5)),)
    bundle = Bundle(b"call", inputs, (OID,))
    one.send(RunTasks(1, ((1, 1, bundle),)))

    ((_, [message]),) = [pump(one, other)]
    value, received, refs = message.tasks[0][2]
    assert (value, refs) == (b"call", (OID,))
    assert received[-1] == ("stored", Stored(OID, 5))
    assert [(place, bytes(part.parts[0])) for place, part in received[:-1]] == list(inputs[:-1])


def test_a_small_bundle_is_left_as_it_is_in_a_large_message() -> None:
    one, other = open_pair()
    bundle = Bundle(Stored(OID, 5), ((0, b"x" * 5000),))
    sent = SubmitTasks(1, (1, 2, 3), (bundle, Stored(OID, 6), b"x" * (2 * CHUNK_BYTES)))
    one.send(sent)

    (received,) = pump(one, other)[1]
    assert received.payloads == (tuple(bundle), Stored(OID, 6), OutOfBand([b"x" * (2 * CHUNK_BYTES)]))


def test_a_put_of_a_small_value_travels_with_its_payload() -> None:
    one, other = open_pair()
    sent = PutObject(OID, 60_000, "", OutOfBand([b"p", bytes(60_000)]), (OID + 1,))
    one.send(sent)

    assert pump(one, other) == ([], [sent])
