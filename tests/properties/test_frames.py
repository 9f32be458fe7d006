"""FrameDecoder under any bytes in any pieces."""

from __future__ import annotations

from typing import Any, List, Tuple

from hypothesis import given, settings
from hypothesis import strategies as st

from gpumesh.protocol import frames
from gpumesh.protocol.frames import FrameDecoder

LIMIT = 400

ordinary = st.tuples(
    st.integers(0, 255).filter(lambda kind: kind != frames.CHUNK),
    st.integers(0, 255),
    st.integers(0, 0xFFFF),
    st.binary(min_size=1, max_size=LIMIT),
)
chunks = st.tuples(
    st.just(frames.CHUNK),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
    st.binary(max_size=LIMIT - frames.CHUNK_HEADER.size),
)
cuts = st.lists(st.integers(1, 60), max_size=40)


class Reader:
    """A decoder and what came out of it."""

    def __init__(self) -> None:
        self.decoder = FrameDecoder(limit=LIMIT, chunk_target=self._place)
        self.frames: List[Tuple[int, int, int, bytes]] = []
        self.chunks: List[Tuple[Any, ...]] = []
        self.most_held = 0

    def _place(self, transfer: int, index: int, offset: int, total: int, size: int) -> memoryview:
        place = bytearray(size)
        self.chunks.append((transfer, index, offset, total, place))
        return memoryview(place)

    def read(self, data: bytes, lengths: List[int]) -> None:
        """Hand the bytes over in pieces of these lengths, the rest at once, until the decoder has had enough."""
        position = 0
        for length in [*lengths, len(data)]:
            if self.decoder.failure is not None:
                return
            for frame in self.decoder.feed(data[position : position + length]):
                self.frames.append((frame.kind, frame.flags, frame.buffers, bytes(frame.data)))
            self.most_held = max(self.most_held, self.decoder.buffered)
            position += length


def write(item: Tuple[Any, ...]) -> bytes:
    if item[0] == frames.CHUNK:
        return b"".join(bytes(part) for part in frames.encode_chunk(*item[1:5], [memoryview(item[5])]))
    kind, flags, buffers, data = item
    return frames.HEADER.pack(len(data), kind, flags, buffers) + data


@settings(deadline=None)
@given(st.lists(ordinary | chunks, max_size=12), cuts)
def test_every_cut_of_a_valid_stream_gives_the_same_frames(items: List[Tuple[Any, ...]], lengths: List[int]) -> None:
    reader = Reader()

    reader.read(b"".join(write(item) for item in items), lengths)

    assert reader.decoder.failure is None
    assert reader.frames == [item for item in items if item[0] != frames.CHUNK]
    assert reader.chunks == [item[1:] for item in items if item[0] == frames.CHUNK]
    assert reader.decoder.buffered == 0


@settings(deadline=None)
@given(st.lists(ordinary | chunks, max_size=4), st.binary(max_size=600), cuts)
def test_any_bytes_give_the_same_frames_and_the_same_failure_however_they_are_cut(
    items: List[Tuple[Any, ...]], rubbish: bytes, lengths: List[int]
) -> None:
    data = b"".join(write(item) for item in items) + rubbish
    whole, pieces = Reader(), Reader()

    whole.read(data, [])
    pieces.read(data, lengths)

    assert pieces.frames == whole.frames
    assert pieces.chunks == whole.chunks
    assert str(pieces.decoder.failure) == str(whole.decoder.failure)
    assert whole.most_held <= len(data)
    if whole.decoder.failure is None:
        assert pieces.most_held <= frames.HEADER.size + LIMIT


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=4000), max_size=8), st.lists(st.integers(1, 9000), max_size=20))
def test_a_decoder_for_strangers_never_grows(bodies: List[bytes], lengths: List[int]) -> None:
    decoder = FrameDecoder()
    data = b"".join(write((6, 0, 0, body)) for body in bodies)
    position, got = 0, []
    for length in [*lengths, len(data)]:
        for frame in decoder.feed(data[position : position + length]):
            got.append(bytes(frame.data))
        position += length
        assert len(decoder.get_buffer()) <= frames.PREAUTH_SCRATCH_BYTES

    assert got == bodies
