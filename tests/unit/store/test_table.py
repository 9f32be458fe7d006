"""store.table: who gets a segment, what is spilled, dropped, recycled and refused; exact actions, no files."""

from __future__ import annotations

from typing import List

import pytest

from gpumesh.config import MIB
from gpumesh.store.table import (
    Action,
    Dropped,
    ForgetFile,
    Give,
    MoveIn,
    MoveOut,
    PinFailed,
    Pinned,
    Refusal,
    Refuse,
    Table,
    Unlink,
    size_class,
)

KIB4 = 4096


def table(pages: int, *, free_fraction: float = 0.5) -> Table:
    """A table with room for so many segments of the smallest size."""
    return Table(pages * KIB4, wait_seconds=5.0, free_fraction=free_fraction)


def full_of(pages: int, *, free_fraction: float = 0.5) -> Table:
    """A table whose objects 1, 2, ... fill it, sealed in this order."""
    filled = table(pages, free_fraction=free_fraction)
    for oid in range(1, pages + 1):
        assert filled.create(oid, KIB4, writer="a", now=0.0) == [Give(oid, f"s{oid:x}", True)]
        assert filled.seal(oid, 0.0) == []
    return filled


def create(
    books: Table, oid: int, nbytes: int = KIB4, writer: str = "a", now: float = 0.0, is_copy: bool = False
) -> List[Action]:
    actions = books.create(oid, nbytes, writer=writer, now=now, is_copy=is_copy)
    books.check()
    return actions


@pytest.mark.parametrize(
    ("nbytes", "capacity"),
    [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (MIB, MIB), (MIB + 1, MIB + MIB // 8), (100_000_000, 100_663_296)],
)
def test_a_size_class_is_a_power_of_two_below_a_mebibyte_and_an_eighth_of_one_above(nbytes: int, capacity: int) -> None:
    assert size_class(nbytes) == capacity


def test_a_size_class_above_a_mebibyte_wastes_at_most_an_eighth_and_names_itself() -> None:
    for nbytes in [MIB + 1, 3 * MIB - 1, 100_000_001, 6 << 30, (6 << 30) + 1]:
        capacity = size_class(nbytes)
        assert nbytes <= capacity <= nbytes * 1.125 + 1
        assert size_class(capacity) == capacity


def test_an_object_larger_than_the_limit_is_refused_at_once() -> None:
    books = table(4)

    assert create(books, 1, 4 * KIB4 + 1) == [Refuse(1, Refusal.TOO_LARGE)]
    assert books.find(1) is None


def test_an_object_as_large_as_the_limit_fits_although_its_size_class_does_not() -> None:
    books = Table(5000, wait_seconds=5.0)

    assert create(books, 1, 5000) == [Give(1, "s1", True)]


def test_the_number_of_an_object_that_its_readers_still_have_is_refused_until_they_let_go() -> None:
    books = Table(100_000, wait_seconds=5.0)
    create(books, 1, 5000)
    books.seal(1, 0.0)
    books.pin(1, 0.0)
    books.discard(1, 0.0)
    assert create(books, 1, 5000) == [Refuse(1, Refusal.NO_ROOM)]
    books.check()

    books.unpin(1, 1, 0.0)
    assert create(books, 1, 5000) == [Give(1, "s1", False)]


def test_a_freed_segment_goes_to_who_wrote_it_last_and_else_to_anyone() -> None:
    books = full_of(4)
    books.discard(1, 1.0)
    books.discard(2, 1.0)
    assert create(books, 5, writer="b") == [Give(5, "s2", False)]
    books.seal(5, 1.0)
    books.discard(5, 1.0)

    assert create(books, 6, writer="a") == [Give(6, "s1", False)]
    assert create(books, 7, writer="a") == [Give(7, "s2", False)]


def test_a_free_segment_a_little_too_large_is_used_and_one_much_too_large_is_not() -> None:
    books = Table(64 * MIB, wait_seconds=5.0)
    create(books, 1, 9 * MIB)
    books.seal(1, 0.0)
    books.discard(1, 0.0)

    assert create(books, 2, 7 * MIB) == [Give(2, "s2", True)]
    assert create(books, 3, 8 * MIB) == [Give(3, "s1", False)]


def test_free_segments_go_before_any_object_is_moved() -> None:
    books = full_of(4)
    books.discard(2, 1.0)
    books.discard(4, 1.0)

    assert create(books, 5, 2 * KIB4) == [Unlink("s2", ("a",)), Unlink("s4", ("a",)), Give(5, "s5", True)]


def test_no_more_is_kept_free_than_the_part_of_the_limit_that_was_said() -> None:
    books = full_of(4, free_fraction=0.25)

    assert books.discard(1, 1.0) == []
    assert books.discard(2, 1.0) == [Unlink("s1", ("a",))]


def test_the_least_recently_used_object_is_moved_to_disk_and_its_segment_given_out() -> None:
    books = full_of(3)
    assert books.pin(1, 1.0) == [Pinned(1, "s1", 1)]
    assert books.unpin(1, 1, 1.0) == []

    assert create(books, 4, now=2.0) == [MoveOut(2, "s2", KIB4)]
    assert books.moved_out(2, 2.5) == [Give(4, "s2", False)]
    assert books.disk_bytes == KIB4
    books.check()


def test_an_object_on_disk_comes_back_for_whoever_pins_it() -> None:
    books = full_of(2)
    create(books, 3)
    books.moved_out(1, 0.0)
    books.seal(3, 0.0)

    assert books.pin(1, 1.0) == [MoveOut(2, "s2", KIB4)]
    assert books.pin(1, 1.0) == []
    assert books.moved_out(2, 1.1) == [MoveIn(1, "s2", KIB4, False)]
    assert books.moved_in(1, 1.2) == [Pinned(1, "s2", 2)]
    books.check()


def test_what_was_on_disk_before_leaves_memory_at_once() -> None:
    books = full_of(1, free_fraction=1.0)
    create(books, 2)
    books.moved_out(1, 0.0)
    books.seal(2, 0.0)
    books.pin(1, 0.0)
    books.moved_out(2, 0.0)
    books.moved_in(1, 0.0)
    books.unpin(1, 1, 0.0)

    assert create(books, 3) == [Give(3, "s1", False)]
    assert books.discard(1, 0.0) == [ForgetFile(1)]


def test_a_copy_is_dropped_rather_than_moved() -> None:
    books = full_of(2, free_fraction=1.0)
    books.make_copy(1)

    assert create(books, 3) == [Dropped(1), Give(3, "s1", False)]
    assert books.pin(1, 0.0) == [PinFailed(1, Refusal.GONE, 1)]


def test_pinned_and_unsealed_objects_stay_and_the_newcomer_waits_until_one_goes() -> None:
    books = table(2)
    create(books, 1)
    create(books, 2)
    books.seal(2, 0.0)
    books.pin(2, 0.0)

    assert create(books, 3, now=1.0) == []
    assert books.next_deadline() == 6.0
    assert books.unpin(2, 1, 2.0) == [MoveOut(2, "s2", KIB4)]
    assert books.moved_out(2, 2.0) == [Give(3, "s2", False)]


def test_whoever_waits_too_long_is_refused_and_the_next_is_served() -> None:
    books = full_of(2)
    books.pin(1, 0.0)
    assert create(books, 3, 2 * KIB4, now=1.0) == [MoveOut(2, "s2", KIB4)]
    assert create(books, 4, now=1.5) == []
    assert books.next_deadline() is None  # Something moves.
    assert books.moved_out(2, 3.0) == [Unlink("s2", ("a",))]
    assert books.next_deadline() == 8.0

    assert books.on_time(7.9) == []
    assert books.on_time(8.0) == [Refuse(3, Refusal.NO_ROOM), Give(4, "s3", True)]
    books.check()


def test_a_pin_that_finds_no_room_fails_and_the_object_stays_on_disk() -> None:
    books = full_of(1)
    create(books, 2)
    books.moved_out(1, 0.0)
    books.seal(2, 0.0)
    books.pin(2, 0.0)

    assert books.pin(1, 1.0) == []
    assert books.on_time(6.0) == [PinFailed(1, Refusal.NO_ROOM, 1)]
    assert books.unpin(2, 1, 7.0) == []
    assert books.pin(1, 7.0) == [MoveOut(2, "s1", KIB4)]


def test_a_pin_of_an_object_still_being_written_waits_for_its_seal() -> None:
    books = table(1)
    create(books, 1)

    assert books.pin(1, 0.0) == []
    assert books.seal(1, 0.0) == [Pinned(1, "s1", 1)]


def test_a_pinned_object_that_is_discarded_goes_with_its_last_pin() -> None:
    books = full_of(1, free_fraction=0.0)
    books.pin(1, 0.0)
    books.pin(1, 0.0)

    assert books.discard(1, 0.0) == []
    assert books.find(1) is None
    assert books.unpin(1, 1, 0.0) == []
    assert books.unpin(1, 1, 0.0) == [Unlink("s1", ("a",))]
    assert books.used == 0


@pytest.mark.parametrize("lost", ["pin", "writer"])
def test_a_segment_that_somebody_lost_may_still_map_is_not_given_out_again(lost: str) -> None:
    books = full_of(1, free_fraction=1.0)
    if lost == "pin":
        books.pin(1, 0.0)
        books.unpin(1, 1, 0.0, recycle=False)
        actions = books.discard(1, 0.0)
    else:
        actions = books.discard(1, 0.0, recycle=False)

    assert actions == [Unlink("s1", ("a",))]


def test_an_object_discarded_while_it_moves_is_forgotten_when_the_move_ends() -> None:
    books = full_of(1, free_fraction=1.0)
    create(books, 2)

    assert books.discard(1, 0.0) == []
    assert books.moved_out(1, 0.0) == [ForgetFile(1), Give(2, "s1", False)]
    books.check()


def test_an_object_pinned_while_it_moves_out_stays() -> None:
    books = full_of(1)
    create(books, 2, now=0.0)

    assert books.pin(1, 0.0) == [Pinned(1, "s1", 1)]
    assert books.moved_out(1, 1.0) == []
    assert books.on_time(6.0) == [Refuse(2, Refusal.NO_ROOM)]
    books.check()


def test_a_full_disk_is_tried_again_only_after_a_while() -> None:
    books = full_of(1)
    create(books, 2, now=0.0)

    assert books.move_out_failed(1, 1.0) == []
    assert create(books, 3, now=2.0) == []
    assert books.on_time(6.0) == [Refuse(2, Refusal.NO_ROOM), MoveOut(1, "s1", KIB4)]


def test_an_object_whose_file_is_damaged_is_lost() -> None:
    books = full_of(1)
    create(books, 2)
    books.moved_out(1, 0.0)
    books.seal(2, 0.0)
    books.pin(1, 0.0)
    books.moved_out(2, 0.0)

    assert books.move_in_failed(1, 0.0, why=Refusal.UNREADABLE) == [
        PinFailed(1, Refusal.UNREADABLE, 1),
        Unlink("s1", ("a",)),
        ForgetFile(1),
    ]
    assert books.find(1) is None
    books.check()


def test_a_waiting_object_that_is_discarded_is_refused_and_makes_way() -> None:
    books = full_of(1)
    books.pin(1, 0.0)
    create(books, 2, now=0.0)

    assert books.discard(2, 0.0) == [Refuse(2, Refusal.GONE)]
    assert not books.has_waiting


def test_a_file_system_with_less_room_than_the_limit_is_not_overrun() -> None:
    books = full_of(2)
    books.room = KIB4

    assert create(books, 3) == [MoveOut(1, "s1", KIB4), MoveOut(2, "s2", KIB4)]
    assert books.moved_out(1, 0.0) == [Give(3, "s1", False)]
    assert books.moved_out(2, 0.0) == []
    assert create(books, 4) == [Give(4, "s2", False)]  # Its memory is ours already.


def test_the_same_object_is_not_created_twice() -> None:
    books = full_of(1)

    with pytest.raises(ValueError, match="exists already"):
        create(books, 1)
