"""One object as one run of bytes: the parts of a value behind a table of their sizes. In segments, in spill files and on the wire.

    u64 magic and version | u64 count | count * u64 size | part 0 | padding | part 1 | padding | part 2 ...

All numbers are little endian. Every part begins at a multiple of 64 bytes, so that arrays are aligned where the container is;
there is nothing behind the last part. Part 0 is the pickle, the others are the buffers it refers to.
"""

from __future__ import annotations

import struct
from typing import Any, Iterator, List, Sequence, Tuple

_MAGIC = 0x3130_6A62_4F6D_7067  # "gpmObj01", as it reads in memory.
_ALIGN = 64  # A cache line, and what vector instructions want.
_HEAD = struct.Struct("<QQ")
_PADDING = bytes(_ALIGN)
MAX_PARTS = 1 << 24  # Far above any value's buffers; what a damaged header can make us look at.
SLICE_BYTES = 16 << 20  # One copy that no other thread can interrupt: 2 to 20 ms.


def container_bytes(parts: Sequence[Any]) -> int:
    """Size of the container of these bytes-like parts: `nbytes` of the object, everywhere."""
    end = _HEAD.size + 8 * len(parts)
    for part in parts:
        end = -(-end // _ALIGN) * _ALIGN + (len(part) if type(part) is bytes else memoryview(part).nbytes)
    return end


def container_views(parts: Sequence[Any]) -> List[Any]:
    """The container as bytes-likes (itemsize 1) to be written or sent in this order. No part is copied."""
    flat = [part if type(part) is bytes else _flat(part) for part in parts]
    sizes = [len(part) for part in flat]
    views: List[Any] = [_HEAD.pack(_MAGIC, len(flat)) + struct.pack(f"<{len(sizes)}Q", *sizes)]
    end = len(views[0])
    for part, size in zip(flat, sizes):
        hole = -end % _ALIGN
        if hole:
            views.append(_PADDING[:hole])
        if size:
            views.append(part)
        end += hole + size
    return views


def open_container(view: memoryview) -> List[memoryview]:
    """The parts of the container at the start of `view`, as views of the same memory; what lies behind it is ignored.

    Raises:
        ValueError: This is not a container, or it does not end within `view`.
    """
    return [view[start:end] for start, end in _bounds(view)]


def write_container(target: memoryview, parts: Sequence[Any]) -> None:
    """Copy a container into writable memory of at least `container_bytes(parts)` bytes, in slices: other threads run in between.

    Raises:
        ValueError: `target` is too small; some of it may have been written.
    """
    at = 0
    for piece in container_views(parts):
        size = len(piece)
        if at + size > len(target):
            raise ValueError(f"a container of {container_bytes(parts)} bytes does not fit into {len(target)} bytes")
        if size <= SLICE_BYTES:
            target[at : at + size] = piece
        else:
            for start in range(0, size, SLICE_BYTES):
                end = min(start + SLICE_BYTES, size)
                target[at + start : at + end] = piece[start:end]
        at += size


def _bounds(view: memoryview) -> Iterator[Tuple[int, int]]:
    if len(view) < _HEAD.size:
        raise ValueError(f"{len(view)} bytes are too few for an object")
    magic, count = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise ValueError("these bytes are not an object, or one of another version")
    end = _HEAD.size + 8 * count
    if count > MAX_PARTS or end > len(view):
        raise ValueError(f"an object of {count} parts does not fit into {len(view)} bytes")
    for size in struct.unpack_from(f"<{count}Q", view, _HEAD.size):
        start = -(-end // _ALIGN) * _ALIGN
        end = start + size
        if end > len(view):
            raise ValueError(f"an object that ends at byte {end} or later does not fit into {len(view)} bytes")
        yield start, end


def _flat(part: Any) -> Any:
    view = memoryview(part)
    if view.nbytes == 0:
        return b""  # A shape with a zero in it cannot be cast.
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")
