"""Messages and their bodies: what travels, what cannot, what is refused."""

from __future__ import annotations

import tracemalloc
from typing import Any, List, NamedTuple

import msgpack
import pytest

from gpumesh.errors import ProtocolError
from gpumesh.model.payloads import Bundle, Later, OutOfBand, Stored
from gpumesh.protocol import codec, frames
from gpumesh.protocol.frames import Frame
from gpumesh.protocol.messages import (
    MESSAGE_TYPES,
    Answer,
    Hello,
    Ping,
    Proof,
    RecallTasks,
    RunTasks,
    SubmitTasks,
    message,
)


def frame(kind: int, fields: Any, *, flags: int = 0, buffers: int = 0) -> Frame:
    return Frame(kind, flags, buffers, memoryview(fields if isinstance(fields, bytes) else msgpack.packb(fields)))


def nothing(transfer: int, count: int) -> List[Any]:
    raise AssertionError((transfer, count))


def decode(data: Frame) -> Any:
    return codec.decode(data, nothing)


def roundtrip(sent: Any) -> Any:
    tag, body, buffers = codec.Encoder().encode(sent)
    data = b"".join(bytes(part) for part in frames.encode_frame(tag, body, buffers))
    (received,) = frames.FrameDecoder(limit=1 << 24).feed(data)
    return decode(received)


def test_plain_data_comes_back_with_lists_as_tuples() -> None:
    sent = Answer(1, {"a": [1, 2.5, None, True, b"\x00", "é"], 3: {}}, "")

    assert roundtrip(sent) == Answer(1, {"a": (1, 2.5, None, True, b"\x00", "é"), 3: {}}, "")


def test_a_payload_with_buffers_travels_beside_the_body() -> None:
    tag, body, buffers = codec.Encoder().encode(SubmitTasks(1, [5, 6], [OutOfBand([b"p", b"array"]), b"small"]))

    assert tag == 0x22
    assert buffers == [b"p", b"array"]
    assert b"array" not in body


def test_several_payloads_find_their_own_buffers_again() -> None:
    sent = RunTasks(1, ((1, 1, OutOfBand([b"p1", b"a", b""])), (2, 1, b"plain"), (3, 1, OutOfBand([b"p2"]))))

    assert roundtrip(sent) == sent


@pytest.mark.parametrize("beside", [b"plain", OutOfBand([b"p", b"array"])])
def test_values_that_are_elsewhere_are_named_with_and_without_buffers_in_the_frame(beside: Any) -> None:
    bundle = Bundle(beside, ((0, Later(1 << 62)), ("key", Stored((1 << 63) - 1, 1 << 40)), (1, beside)), (5, 1 << 62))
    received = roundtrip(RunTasks(1, ((1, 1, bundle), (2, 1, Stored(0, 0)), (3, 1, beside))))

    assert received == RunTasks(1, ((1, 1, tuple(bundle)), (2, 1, Stored(0, 0)), (3, 1, beside)))
    assert received.tasks[0][2][1][1][1].nbytes == 1 << 40
    assert type(received.tasks[0][2]) is tuple
    assert Bundle(*received.tasks[0][2]) == bundle


def test_received_buffers_are_private_and_writable() -> None:
    received = roundtrip(RunTasks(1, ((1, 1, OutOfBand([b"p", b"array"])),)))

    parts = received.tasks[0][2].parts
    assert [type(part) for part in parts] == [bytearray, bytearray]


def test_an_encoder_forgets_the_buffers_of_the_message_before() -> None:
    encoder = codec.Encoder()
    encoder.encode(SubmitTasks(1, [5], [OutOfBand([b"p"])]))

    assert encoder.encode(Ping(1)) == (0x06, b"\x91\x01", [])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "object is not plain data"),
        (1 << 64, "Answer cannot be sent"),
        ("\ud800", "surrogates not allowed"),
        (OutOfBand([]), "a value without parts"),
        (Stored(-1, 5), "Stored(-0x1, 5 bytes) is out of range"),
        (Stored(5, 1 << 64), "bytes) is out of range"),
        (Later(1 << 64), "is out of range"),
        (OutOfBand([b""] * 65536), "more than 65535 large buffers in one message; put them into fewer arrays"),
    ],
)
def test_what_cannot_travel_is_refused_at_the_sender(value: Any, text: str) -> None:
    encoder = codec.Encoder()

    with pytest.raises(ProtocolError, match="Answer cannot be sent") as caught:
        encoder.encode(Answer(1, [OutOfBand([b"p"]), value], ""))
    assert text in str(caught.value)
    assert encoder.encode(Ping(1)) == (0x06, b"\x91\x01", [])  # Nothing of the failed message is left behind.


def test_a_value_nested_too_deeply_is_refused_at_the_sender() -> None:
    value: Any = []
    for _ in range(5000):
        value = [value]

    with pytest.raises(ProtocolError):
        codec.Encoder().encode(Answer(1, value, ""))


def test_an_unknown_tag_is_told_apart_from_an_error() -> None:
    with pytest.raises(codec.UnknownTag) as caught:
        decode(frame(0x7E, [1]))
    assert caught.value.tag == 0x7E


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (frame(0x06, b"\xc1"), "is not msgpack"),
        (frame(0x06, b"\x91\x01\x01"), "is not msgpack"),
        (frame(0x06, b"\xdd\xff\xff\xff\xff\x01"), "is not msgpack"),
        (frame(0x06, b"\x91" * 3000 + b"\x01"), "is not msgpack"),
        (frame(0x51, b"\x93\x01\x81\x81\x01\x01\x01\xa0"), "is not msgpack"),
        (frame(0x06, 7), "the body of Ping is not an array"),
        (frame(0x06, {"number": 7}), "the body of Ping is not an array"),
        (frame(0x06, []), "Ping has 1 fields, not 0"),
        (frame(0x06, ["7"]), "Ping holds a str where int belongs"),
        (frame(0x06, [None]), "Ping holds a NoneType where int belongs"),
        (frame(0x31, [[], 1]), "RecallTasks holds a int where bool belongs"),
        (frame(0x28, ["w", "results"]), "TaskResults holds a str where tuple belongs"),
        (frame(0x50, [1, "workers", []]), "Query holds a tuple where dict belongs"),
        (frame(0x21, [1, 2]), "DefineSpec holds a int where tuple belongs"),
        (frame(0x20, [1, msgpack.ExtType(1, b"\x01\x00")]), "a frame refers to buffers that it does not have"),
        (frame(0x20, [b"", msgpack.ExtType(9, b"\x01\x00")]), "a frame holds an unknown extension 9"),
        (frame(0x20, [b"", msgpack.ExtType(2, b"\x01" * 15)]), "a frame holds an unknown extension 2"),
        (frame(0x20, [b"", msgpack.ExtType(3, b"\x01" * 16)]), "a frame holds an unknown extension 3"),
        (frame(0x20, b"\0\0\0\0\x92\xc4\0\xd5\x02\x01\0", buffers=1), "a frame holds an unknown extension 2"),
        (frame(0x06, [1], flags=0x80), "a frame has the unknown flags 0x80"),
        (frame(0x06, [1], flags=0x01), "the end of a transfer has no buffers"),
        (frame(0x06, b"\x00\x00\x00", flags=0x01, buffers=1), "the end of a transfer has no transfer id"),
        (frame(0x06, b"\x00\x00\x00", buffers=1), "a frame is shorter than its buffer table"),
        (frame(0x06, b"\x01\x00\x00\x00", buffers=1), "the buffers of a frame are larger than the frame"),
        (frame(0x06, b"\xff\xff\xff\xff\x91\x01", buffers=1), "the buffers of a frame are larger than the frame"),
        (frame(0x06, b"\x00\x00\x00\x00", buffers=1), "is not msgpack"),
        (frame(0x06, b"\x00\x00\x00\x00\x91\x01", buffers=1), "a frame has buffers that its body does not refer to"),
        (frame(0x20, b"\0\0\0\0\x92\xc4\0\xd5\x01\0\0", buffers=1), "a frame refers to buffers that it does not have"),
        (frame(0x20, b"\0\0\0\0\x92\xc4\0\xd5\x01\x02\0", buffers=1), "a frame refers to buffers that it does not have"),
        (frame(0x20, b"\0\0\0\0\x92\xc4\0\xd4\x01\x01", buffers=1), "a frame holds an unknown extension 1"),
        (frame(0x20, b"\0\0\0\0\x92\xc4\0\xd5\x09\x01\0", buffers=1), "a frame holds an unknown extension 9"),
    ],
)
def test_what_is_not_a_message_is_a_protocol_error(data: Frame, text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(data)
    assert text in str(caught.value)


def test_true_and_false_are_read_where_a_claim_belongs() -> None:
    assert roundtrip(RecallTasks(((1, 2),), False)) == RecallTasks(((1, 2),), False)


def test_whole_seconds_are_read_where_a_fraction_belongs() -> None:
    assert codec.build(Timed, (1,)) == Timed(1)


class Timed(NamedTuple):
    """A message with a duration."""

    seconds: float


class Grown(NamedTuple):
    """A message that got a field after its first version."""

    number: int
    text: str = "none"


def test_an_older_peer_may_leave_out_fields_that_have_a_default() -> None:
    assert codec.build(Grown, (1,)) == Grown(1, "none")
    with pytest.raises(ProtocolError, match="Grown has 2 fields, not 0"):
        codec.build(Grown, ())


def test_each_tag_is_claimed_once() -> None:
    with pytest.raises(AssertionError, match="belongs to Ping"):
        message(0x06)(Ping)


def test_every_message_can_be_built_from_its_fields() -> None:
    examples = {"str": "", "bytes": b"", "bool": True, "int": 0, "float": 0.5, "Any": None, "List": (), "Tuple": (), "Dict": {}}
    for cls in MESSAGE_TYPES.values():
        fields = tuple(examples[hint.partition("[")[0]] for hint in codec._hints(cls))
        assert codec.build(cls, fields) == cls(*fields)


def test_a_handshake_message_is_decoded_without_buffers_and_with_later_fields() -> None:
    assert codec.decode_handshake(frame(0x03, [b"p", "later", 1])) == Proof(b"p")


@pytest.mark.parametrize(
    "data",
    [
        frame(0x03, [b"p"], flags=0x01, buffers=1),
        frame(0x03, b"\x00\x00\x00\x00\x91\xc4\x00", buffers=1),
        frame(0x03, [b"p", {"a": 1}]),
        frame(0x03, [b"p", list(range(17))]),
        frame(0x03, [b"p", msgpack.ExtType(1, b"\x01\x00")]),
        frame(0x01, ["client"]),
    ],
)
def test_a_stranger_can_name_no_containers_and_no_buffers(data: Frame) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_handshake(data)


def test_fields_are_checked_however_many_right_ones_came_before() -> None:
    for _ in range(3):
        assert decode(frame(0x31, [[], True])) == RecallTasks((), True)
        assert type(decode(frame(0x31, [[], True]))) is RecallTasks
        assert decode(frame(0x31, [[], False, True])).force is True
        for wrong in ([[], 1], [[], True, 1], [True, []], [[]], [[], True, None]):
            with pytest.raises(ProtocolError, match="RecallTasks h"):
                decode(frame(0x31, wrong))
        assert decode(frame(0x31, [[], True, False, "of a newer version"])) == RecallTasks((), True, False)


@pytest.mark.parametrize("piece", [b"\xdc\x0f\xff", b"\xdd\x00\x00\x0f\xff", b"\xdc\x00\x10", b"\x9f", b"\xde\x07\xff"])
def test_a_bomb_from_a_stranger_costs_next_to_nothing(piece: bytes) -> None:
    bomb = frame(0x01, (piece * 4096)[:4096])
    codec.build(Hello, ("client", b"", "", "", ""))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            codec.decode_handshake(bomb)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()
