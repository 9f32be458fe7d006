"""Frames: what is returned, what is refused, and how much is held."""

from __future__ import annotations

from typing import List, Tuple

import pytest

from gpumesh.config import CHUNK_BYTES, CONTROL_FRAME_BYTES, PREAUTH_FRAME_BYTES
from gpumesh.errors import ProtocolError
from gpumesh.protocol import frames
from gpumesh.protocol.frames import Frame, FrameDecoder
from tests.unit.protocol.talk import chunk, raw_frame


class Places:
    """A chunk target that keeps what comes."""

    def __init__(self) -> None:
        self.chunks: List[Tuple[int, int, int, int, bytearray]] = []

    def __call__(self, transfer: int, index: int, offset: int, total: int, size: int) -> memoryview:
        self.chunks.append((transfer, index, offset, total, bytearray(size)))
        return memoryview(self.chunks[-1][4])


def shown(received: List[Frame]) -> List[Tuple[int, int, int, bytes]]:
    return [(frame.kind, frame.flags, frame.buffers, bytes(frame.data)) for frame in received]


def join(parts: List[object]) -> bytes:
    return b"".join(bytes(part) for part in parts)  # type: ignore[call-overload]


def test_a_whole_frame_is_returned_with_its_header() -> None:
    decoder = FrameDecoder()

    assert shown(decoder.feed(raw_frame(6, b"abc", flags=1, buffers=2))) == [(6, 1, 2, b"abc")]
    assert decoder.buffered == 0


def test_frames_in_one_read_come_in_order() -> None:
    data = raw_frame(1, b"a") + raw_frame(2, b"bb") + raw_frame(3, b"ccc")

    assert shown(FrameDecoder().feed(data)) == [(1, 0, 0, b"a"), (2, 0, 0, b"bb"), (3, 0, 0, b"ccc")]


def test_a_frame_that_comes_byte_by_byte_is_returned_with_its_last_byte() -> None:
    decoder = FrameDecoder()
    data = raw_frame(6, b"abc")

    assert [shown(decoder.feed(data[i : i + 1])) for i in range(len(data))] == [[]] * 10 + [[(6, 0, 0, b"abc")]]


def test_a_frame_of_exactly_the_limit_is_taken() -> None:
    decoder = FrameDecoder(limit=5)

    assert shown(decoder.feed(raw_frame(6, b"12345"))) == [(6, 0, 0, b"12345")]


@pytest.mark.parametrize("length", [0, 6, 0xFFFFFFFF])
def test_a_length_that_is_not_allowed_is_refused_with_the_header(length: int) -> None:
    decoder = FrameDecoder(limit=5)
    header = frames.HEADER.pack(length, 6, 0, 0)

    assert decoder.feed(header[:7]) == []
    assert decoder.failure is None
    assert decoder.feed(header[7:]) == []
    assert str(decoder.failure) == f"the peer announced a frame of {length} bytes; 1 to 5 are allowed"


def test_the_frames_before_a_broken_one_are_still_returned() -> None:
    decoder = FrameDecoder()

    assert shown(decoder.feed(raw_frame(6, b"good") + raw_frame(6, b"") + raw_frame(6, b"late"))) == [(6, 0, 0, b"good")]
    assert isinstance(decoder.failure, ProtocolError)


def test_a_stranger_makes_the_decoder_hold_one_frame_and_no_more() -> None:
    decoder = FrameDecoder()
    start = len(decoder.get_buffer())
    for size in (PREAUTH_FRAME_BYTES, PREAUTH_FRAME_BYTES - 1, 1, PREAUTH_FRAME_BYTES):
        for byte in raw_frame(6, bytes(size)):
            target = decoder.get_buffer()
            assert 1 <= len(target) <= start
            target[0] = byte
            decoder.buffer_updated(1)
    assert start == frames.PREAUTH_SCRATCH_BYTES


def test_memory_follows_what_arrived_not_what_was_announced() -> None:
    decoder = FrameDecoder(limit=CONTROL_FRAME_BYTES)
    decoder.feed(frames.HEADER.pack(CONTROL_FRAME_BYTES, 6, 0, 0))

    assert len(decoder.get_buffer()) <= frames.SCRATCH_BYTES

    decoder.feed(bytes(1024 * 1024))
    assert len(decoder.get_buffer()) <= 2 * 1024 * 1024


def test_the_memory_of_a_huge_frame_is_given_back() -> None:
    decoder = FrameDecoder(limit=CONTROL_FRAME_BYTES)

    (frame,) = decoder.feed(raw_frame(6, bytes(CONTROL_FRAME_BYTES)))

    assert len(frame.data) == CONTROL_FRAME_BYTES
    assert len(decoder.get_buffer()) == frames.SCRATCH_BYTES


def test_a_frame_stays_valid_until_the_next_get_buffer_also_when_the_scratch_grows() -> None:
    decoder = FrameDecoder(limit=CONTROL_FRAME_BYTES)
    target = decoder.get_buffer()
    data = raw_frame(6, b"abc") + frames.HEADER.pack(1_000_000, 6, 0, 0)
    target[: len(data)] = data
    (frame,) = decoder.buffer_updated(len(data))
    decoder.feed(bytes(500_000))

    assert bytes(frame.data) == b"abc"


def test_chunks_go_straight_to_their_place() -> None:
    places = Places()
    decoder = FrameDecoder(limit=CHUNK_BYTES + 24, chunk_target=places)
    data = chunk(7, 2, 0, 10, b"first") + chunk(7, 2, 5, 10, b"again") + raw_frame(6, b"x")

    assert shown(decoder.feed(data)) == [(6, 0, 0, b"x")]
    assert places.chunks == [(7, 2, 0, 10, bytearray(b"first")), (7, 2, 5, 10, bytearray(b"again"))]


def test_the_rest_of_a_chunk_is_received_in_place() -> None:
    places = Places()
    decoder = FrameDecoder(limit=CHUNK_BYTES + 24, chunk_target=places)
    decoder.feed(chunk(7, 0, 0, 5, b"12345")[:-3])

    target = decoder.get_buffer()
    assert len(target) == 3
    target[:] = b"345"
    assert decoder.buffer_updated(3) == []
    assert bytes(places.chunks[0][4]) == b"12345"
    assert shown(decoder.feed(raw_frame(6, b"x"))) == [(6, 0, 0, b"x")]


def test_an_empty_chunk_is_over_with_its_header() -> None:
    places = Places()
    decoder = FrameDecoder(limit=CHUNK_BYTES + 24, chunk_target=places)

    assert shown(decoder.feed(chunk(7, 0, 0, 0, b"") + raw_frame(6, b"x"))) == [(6, 0, 0, b"x")]
    assert places.chunks == [(7, 0, 0, 0, bytearray())]


@pytest.mark.parametrize("size", [-24, -1, CHUNK_BYTES + 1])
def test_a_chunk_of_an_impossible_size_is_refused_with_the_frame_header(size: int) -> None:
    decoder = FrameDecoder(limit=2 * CHUNK_BYTES, chunk_target=Places())
    decoder.feed(frames.HEADER.pack(24 + size, frames.CHUNK, 0, 0)) if size > -24 else decoder.feed(
        frames.HEADER.pack(1, frames.CHUNK, 0, 0)
    )

    assert "the peer announced a chunk of" in str(decoder.failure)


def test_a_chunk_before_the_handshake_is_refused() -> None:
    decoder = FrameDecoder()
    decoder.feed(chunk(0, 0, 0, 1, b"x"))

    assert str(decoder.failure) == "the peer sent a chunk before the handshake was over"


def test_stepwise_bytes_only_gather_until_they_are_asked_for() -> None:
    decoder = FrameDecoder(stepwise=True)

    assert decoder.feed(b"magic!") == []
    assert decoder.peek() == b"magic!"
    assert decoder.take(8) is None
    assert decoder.feed(b"01" + raw_frame(1, b"a") + raw_frame(2, b"b") + raw_frame(3, b"c")) == []
    assert decoder.take(8) == b"magic!01"
    frame = decoder.next_frame()
    assert frame is not None
    assert shown([frame]) == [(1, 0, 0, b"a")]
    assert shown(decoder.parse_rest()) == [(2, 0, 0, b"b"), (3, 0, 0, b"c")]
    assert shown(decoder.feed(raw_frame(4, b"d"))) == [(4, 0, 0, b"d")]


def test_stepwise_the_limit_may_rise_between_two_frames() -> None:
    decoder = FrameDecoder(limit=1, stepwise=True)
    decoder.feed(raw_frame(1, b"a") + raw_frame(2, b"bb"))

    assert decoder.next_frame() is not None
    decoder.limit = 2
    assert shown(decoder.parse_rest()) == [(2, 0, 0, b"bb")]
    assert decoder.failure is None


def test_a_frame_is_header_table_body_buffers() -> None:
    assert join(frames.encode_frame(6, b"body", [b"one", b""])).hex(" ") == (
        "0f 00 00 00 06 00 02 00 03 00 00 00 00 00 00 00 62 6f 64 79 6f 6e 65"
    )


def test_small_buffers_are_copied_into_the_frame_and_large_ones_are_not() -> None:
    large = bytearray(frames.SEPARATE_BUFFER_BYTES + 1)
    parts = frames.encode_frame(6, b"body", [b"small", large, b"tail"])

    assert len(parts) == 3
    assert parts[1].obj is large
    assert join(parts)[8 + 12 :] == b"bodysmall" + bytes(large) + b"tail"


def test_buffers_may_be_arrays_of_any_item_size() -> None:
    assert join(frames.encode_frame(6, b"b", [memoryview(b"12345678").cast("I")])).endswith(b"b12345678")
