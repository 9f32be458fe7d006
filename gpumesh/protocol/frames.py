"""Length-prefixed frames: bytes to frames and frames to bytes, nothing about what is in them.

    preamble   6 bytes magic, u16 protocol version            once, each way, before the first frame
    frame      u32 length · u8 kind · u8 flags · u16 buffers  then `length` bytes:
                 table   `buffers` times u32 size             (absent with TRANSFERRED)
                 body    msgpack                              (with TRANSFERRED: u32 transfer id first)
                 raw     the buffers, one after another       (absent with TRANSFERRED: they came as chunks)
    chunk      a frame of kind CHUNK: u32 transfer · u32 buffer index · u64 offset · u64 total, then raw bytes

All numbers are little-endian. Promises:

1. Nothing is allocated from an announced length: memory grows with what has really arrived (where chunks go is the owner's
   business, and only an authenticated peer can send any).
2. A frame longer than the limit in force is an error as soon as its header is there.
3. A chunk's bytes are received straight into their final place.
4. What is returned does not depend on how the bytes were cut: the frames before a broken one come first, then `failure` is set.
"""

from __future__ import annotations

import struct
from typing import Any, Callable, List, Optional, Sequence

from gpumesh.config import CHUNK_BYTES, PREAUTH_FRAME_BYTES, PROTOCOL_VERSION
from gpumesh.errors import ProtocolError
from gpumesh.model.records import NamedTuple

MAGIC = b"\x89mesh\n"  # With a line end: a server of lines, such as a web server, answers at once instead of waiting for one.
PREAMBLE = MAGIC + struct.pack("<H", PROTOCOL_VERSION)
PREAMBLE_BYTES = 8

HEADER = struct.Struct("<IBBH")
CHUNK_HEADER = struct.Struct("<IIQQ")
TRANSFER_ID = struct.Struct("<I")

CHUNK = 0x7F  # Kind of a chunk frame; every other kind is a message's tag.
TRANSFERRED = 0x01  # Flag: the buffers came before, as chunks.

MAX_BUFFERS = 0xFFFF
PREAUTH_SCRATCH_BYTES = 2 * (8 + PREAUTH_FRAME_BYTES)  # An unfinished frame fills less than half, so it never grows.
SCRATCH_BYTES = 256 * 1024  # One read of a busy socket; the smaller it is, the less of a chunk is copied twice.
AFTER_CHUNK_BYTES = 4096  # The read after a chunk: most often the header of the next one, whose data is then not copied twice.
KEPT_SCRATCH_BYTES = 4 * 1024 * 1024  # What one huge frame needed beyond this is given back.
SEPARATE_BUFFER_BYTES = (
    16 * 1024
)  # A larger raw buffer is handed to the socket as it is instead of being copied into the frame.


class Frame(NamedTuple):
    """One received frame. `data` is valid only until the decoder's next `get_buffer`."""

    kind: int
    flags: int
    buffers: int
    data: memoryview


_new = tuple.__new__  # Of frames; their own is one call more.

ChunkTarget = Callable[[int, int, int, int, int], memoryview]
"""(transfer, buffer index, offset, total, size) -> where these `size` bytes belong."""


def refuse_chunks(transfer: int, index: int, offset: int, total: int, size: int) -> memoryview:
    """The chunk target before authentication."""
    raise ProtocolError("the peer sent a chunk before the handshake was over")


class FrameDecoder:
    """Turns received bytes into frames.

    Receive into `get_buffer()`, then call `buffer_updated(n)`; or hand over bytes with `feed`. With `stepwise`, bytes only
    gather: `take` and `next_frame` pull out one thing at a time, until `parse_rest` ends that.
    """

    __slots__ = (
        "limit",
        "chunk_target",
        "failure",
        "_stepwise",
        "_scratch",
        "_view",
        "_start",
        "_end",
        "_chunk",
        "_chunk_filled",
        "_chunk_transfer",
        "_is_after_chunk",
    )

    def __init__(
        self, *, limit: int = PREAUTH_FRAME_BYTES, chunk_target: ChunkTarget = refuse_chunks, stepwise: bool = False
    ) -> None:
        self.limit = limit  # Bytes after the header; raised after authentication.
        self.chunk_target = chunk_target
        self.failure: Optional[ProtocolError] = None  # What is wrong after the frames returned last; nothing follows.
        self._stepwise = stepwise
        self._scratch = bytearray(PREAUTH_SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = 0
        self._end = 0
        self._chunk: Optional[memoryview] = None  # Where the rest of the current chunk goes.
        self._chunk_filled = 0
        self._chunk_transfer = 0
        self._is_after_chunk = False

    @property
    def buffered(self) -> int:
        """Bytes received that are not yet part of a whole frame."""
        return self._end - self._start

    def get_buffer(self) -> memoryview:
        """Where to receive next; at least one byte. What earlier frames' `data` pointed to is now void."""
        if self._chunk is not None:
            return self._chunk[self._chunk_filled :]
        size = len(self._scratch)
        if self._start == self._end:
            self._start = self._end = 0
            if size == SCRATCH_BYTES and not self._is_after_chunk:
                return self._view  # The usual case, at once.
            if self._is_after_chunk:
                self._is_after_chunk = False
                return self._view[:AFTER_CHUNK_BYTES]
            if size > KEPT_SCRATCH_BYTES:
                self._replace_scratch(SCRATCH_BYTES)
                size = SCRATCH_BYTES
        wanted = SCRATCH_BYTES if self.limit > PREAUTH_FRAME_BYTES else size
        if size < wanted or self._end == size:
            pending = self._end - self._start
            if size < wanted:
                size = wanted
            elif pending * 2 > size:
                size *= 2
            self._replace_scratch(size)
        return self._view[self._end :]

    def _replace_scratch(self, size: int) -> None:
        # A new object each time: views into the old one may still be alive.
        pending = self._view[self._start : self._end]
        self._scratch = bytearray(size)
        self._view = memoryview(self._scratch)
        self._end -= self._start
        self._view[: self._end] = pending
        self._start = 0

    def buffer_updated(self, count: int) -> List[Frame]:
        """`count` bytes were received into the last `get_buffer()`.

        After a zero-length or oversized frame or a broken chunk `failure` is set; do not come back then.
        """
        if self._chunk is not None:
            self._chunk_filled += count
            if self._chunk_filled == len(self._chunk):
                self._chunk = None
                self._is_after_chunk = True
            return []
        self._end += count
        return [] if self._stepwise else self._parse()

    def divert(self, transfer: int, target: Callable[[int], memoryview]) -> None:
        """The rest of a chunk of this transfer that is coming in now, if one is, goes into as many other bytes."""
        if self._chunk is not None and self._chunk_transfer == transfer:
            self._chunk = target(len(self._chunk))

    def feed(self, data: Any) -> List[Frame]:
        """The same for bytes at hand; frames are returned with their own copy of the data."""
        frames: List[Frame] = []
        view = memoryview(data)
        while len(view) and self.failure is None:
            target = self.get_buffer()
            count = min(len(target), len(view))
            target[:count] = view[:count]
            view = view[count:]
            frames.extend(frame._replace(data=memoryview(bytes(frame.data))) for frame in self.buffer_updated(count))
        return frames

    def take(self, count: int) -> Optional[bytes]:
        """The next `count` raw bytes (the preamble), or None when fewer have arrived."""
        if self._end - self._start < count:
            return None
        taken = bytes(self._view[self._start : self._start + count])
        self._start += count
        return taken

    def peek(self) -> bytes:
        """A copy of what waits, to explain to a person who is talking."""
        return bytes(self._view[self._start : self._end])

    def next_frame(self) -> Optional[Frame]:
        """One frame among the bytes already here, or None when it is not whole yet (or `failure` is set)."""
        frames = self._parse(most=1)
        return frames[0] if frames else None

    def parse_rest(self) -> List[Frame]:
        """All frames among the bytes already here; from now on `buffer_updated` returns them."""
        self._stepwise = False
        return self._parse()

    def _parse(self, most: int = -1) -> List[Frame]:
        frames: List[Frame] = []
        view, start, end = self._view, self._start, self._end
        while end - start >= 8 and len(frames) != most:
            length, kind, flags, buffers = HEADER.unpack_from(view, start)
            if length == 0 or length > self.limit:
                self.failure = ProtocolError(f"the peer announced a frame of {length} bytes; 1 to {self.limit} are allowed")
                break
            body = start + 8
            if kind == CHUNK:
                try:
                    position = self._open_chunk(view, body, length, end)
                except ProtocolError as error:
                    self.failure = error
                    break
                if position < 0:
                    break
                start = position
                if self._chunk is not None:
                    break
                continue
            if end - body < length:
                break
            start = body + length
            frames.append(_new(Frame, (kind, flags, buffers, view[body:start])))
        self._start = start
        return frames

    def _open_chunk(self, view: memoryview, body: int, length: int, end: int) -> int:
        """Start on a chunk; returns where the next frame begins, -1 while the chunk's header is not whole."""
        size = length - CHUNK_HEADER.size
        if size < 0 or size > CHUNK_BYTES:
            raise ProtocolError(f"the peer announced a chunk of {size} bytes; 0 to {CHUNK_BYTES} are allowed")
        if end - body < CHUNK_HEADER.size:
            return -1
        transfer, index, offset, total = CHUNK_HEADER.unpack_from(view, body)
        target = self.chunk_target(transfer, index, offset, total, size)
        data = body + CHUNK_HEADER.size
        here = min(size, end - data)
        target[:here] = view[data : data + here]
        if here < size:
            self._chunk = target
            self._chunk_filled = here
            self._chunk_transfer = transfer
        return data + here


def encode_frame(kind: int, body: bytes, buffers: Sequence[Any] = ()) -> List[Any]:
    """One frame as the buffers to write, in order; large raw buffers are not copied."""
    if not buffers:
        return [HEADER.pack(len(body), kind, 0, 0) + body]
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    sizes = [len(view) for view in views]
    table = struct.pack(f"<{len(sizes)}I", *sizes)
    parts: List[Any] = [HEADER.pack(len(table) + len(body) + sum(sizes), kind, 0, len(sizes)) + table + body]
    for view in views:
        if len(view) <= SEPARATE_BUFFER_BYTES and isinstance(parts[-1], bytes):
            parts[-1] += bytes(view)
        else:
            parts.append(view)
    return parts


def encode_transferred(kind: int, transfer: int, body: bytes, buffers: int) -> bytes:
    """The frame that ends a transfer: its message, whose `buffers` went before as chunks."""
    return HEADER.pack(TRANSFER_ID.size + len(body), kind, TRANSFERRED, buffers) + TRANSFER_ID.pack(transfer) + body


def encode_chunk(transfer: int, index: int, offset: int, total: int, data: Sequence[memoryview]) -> List[Any]:
    """One chunk as the buffers to write; its data lies in several pieces, none of them empty."""
    head = HEADER.pack(CHUNK_HEADER.size + sum(map(len, data)), CHUNK, 0, 0) + CHUNK_HEADER.pack(transfer, index, offset, total)
    return [head, *data]
