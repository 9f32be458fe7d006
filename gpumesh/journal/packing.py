"""Many payloads in one blob: one insert, and one hand-over of the interpreter's lock, for hundreds of tasks. Pure.

A pack is the lengths (unsigned, 32 bits, little-endian), one for each task, and behind them the payloads in the same order. Variants
are kept apart (unsigned, 16 bits, little-endian), so that a list of tasks does not read the payloads.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import Iterator, List, Sequence, Tuple

from gpumesh.model.records import NamedTuple

PACK_BYTES = 64 * 1024  # Reading one task's payload reads its pack.
PACK_TASKS = 1024
VARIANT_LIMIT = 1 << 16


class Pack(NamedTuple):
    """Payloads of tasks with consecutive rows."""

    first: int  # Place of the first.
    tasks: int
    variants: bytes
    data: bytes


def packs(payloads: Sequence[Tuple[int, bytes]]) -> Iterator[Pack]:
    """Packs of all these (variant, payload); a large payload is alone in its pack.

    Raises:
        ValueError: A variant is out of range.
    """
    start, size = 0, 0
    for place, (_, payload) in enumerate(payloads):
        if place > start and (size + len(payload) > PACK_BYTES or place - start >= PACK_TASKS):
            yield _pack(start, payloads[start:place])
            start, size = place, 0
        size += len(payload)
    if start < len(payloads):
        yield _pack(start, payloads[start:])


def _pack(first: int, payloads: Sequence[Tuple[int, bytes]]) -> Pack:
    variants, values = zip(*payloads)
    count = len(values)
    try:
        packed = struct.pack(f"<{count}H", *variants)
    except struct.error:
        raise ValueError(f"a variant is a number from 0 to {VARIANT_LIMIT - 1}") from None
    return Pack(first, count, packed, struct.pack(f"<{count}I", *map(len, values)) + b"".join(values))


def unpack_variants(packed: bytes, tasks: int) -> Sequence[int]:
    """The variants of a pack.

    Raises:
        ValueError: They are not so many.
    """
    if len(packed) != 2 * tasks:
        raise ValueError(f"the variants of {tasks} tasks have {len(packed)} bytes, not {2 * tasks}")
    return struct.unpack(f"<{tasks}H", packed)


def unpack_payloads(data: bytes, tasks: int) -> List[bytes]:
    """The payloads of a pack.

    Raises:
        ValueError: That is no pack of so many.
    """
    begin = 4 * tasks
    if len(data) < begin:
        raise ValueError(f"a pack of {tasks} payloads has {len(data)} bytes only")
    ends = list(accumulate(struct.unpack_from(f"<{tasks}I", data), initial=begin))
    if ends[-1] != len(data):
        raise ValueError(f"a pack of {tasks} payloads has {len(data)} bytes, not {ends[-1]}")
    return [data[start:end] for start, end in zip(ends, ends[1:])]
