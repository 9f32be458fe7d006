"""store.container: one object as one run of bytes."""

from __future__ import annotations

import pickle
import struct
from typing import Any, List

import pytest

from gpumesh.store.container import MAX_PARTS, SLICE_BYTES, container_bytes, container_views, open_container, write_container


def packed(parts: List[Any]) -> bytearray:
    target = bytearray(container_bytes(parts))
    write_container(memoryview(target), parts)
    return target


def test_a_container_is_a_table_of_sizes_and_parts_at_multiples_of_64_bytes() -> None:
    assert bytes(packed([b"pickle", b"buffer"])) == (
        b"gpmObj01" + struct.pack("<QQQ", 2, 6, 6) + bytes(32) + b"pickle" + bytes(58) + b"buffer"
    )


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b""],
        [b"a"],
        [b"a" * 64, b"", b"b" * 65],
        [bytearray(b"abc"), memoryview(b"defg"), pickle.PickleBuffer(bytearray(b"hi")).raw()],
    ],
)
def test_parts_come_back_as_they_went_in_and_the_views_are_the_same_bytes(parts: List[Any]) -> None:
    target = packed(parts)

    assert [bytes(part) for part in open_container(memoryview(target))] == [bytes(part) for part in parts]
    assert b"".join(bytes(view) for view in container_views(parts)) == bytes(target)


def test_wide_items_and_empty_shapes_are_taken_by_their_bytes() -> None:
    wide = memoryview(bytearray(struct.pack("<3d", 1, 2, 3))).cast("d")
    empty = memoryview(bytearray()).cast("d")

    assert [bytes(part) for part in open_container(memoryview(packed([wide, empty])))] == [struct.pack("<3d", 1, 2, 3), b""]


def test_the_parts_are_the_memory_of_the_container_and_no_part_is_copied_into_the_views() -> None:
    target = packed([b"head", b"body"])
    open_container(memoryview(target))[1][0] = ord("B")
    body = bytearray(b"body")
    view = container_views([b"head", body])[-1]
    body[0] = ord("B")

    assert target.endswith(b"Body")
    assert bytes(view) == b"Body"


def test_what_lies_behind_a_container_is_ignored() -> None:
    assert [bytes(part) for part in open_container(memoryview(bytes(packed([b"a", b"b"])) + b"old bytes"))] == [b"a", b"b"]


def test_a_part_longer_than_a_slice_is_whole() -> None:
    part = bytes(range(256)) * (SLICE_BYTES // 256) + b"and the rest"

    assert bytes(open_container(memoryview(packed([b"", part])))[1]) == part


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"gpmObj01",
        b"gpmObj02" + struct.pack("<QQ", 1, 0),
        b"gpmObj01" + struct.pack("<Q", 1),
        b"gpmObj01" + struct.pack("<Q", 1 << 63),
        b"gpmObj01" + struct.pack("<Q", MAX_PARTS + 1),
        b"gpmObj01" + struct.pack("<QQ", 1, 1),
        b"gpmObj01" + struct.pack("<QQ", 1, (1 << 64) - 64),
        b"gpmObj01" + struct.pack("<QQ", 1, 8) + bytes(40) + b"1234567",
    ],
)
def test_what_is_no_whole_container_is_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match=r"object"):
        open_container(memoryview(damaged))


def test_a_target_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit into 64 bytes"):
        write_container(memoryview(bytearray(64)), [b"a"])
