"""What `CUDA_VISIBLE_DEVICES` leaves of the cards: the table of what torch makes of it, and the rules for slices, order and masks."""

from __future__ import annotations

from typing import List, Optional

import pytest

from gpumesh.devices.visible import WHOLE, Selection, VisibleCard, cuda_order, mask, parse_visible, select

FOUR = [VisibleCard(f"GPU-{letter}000") for letter in "abcd"]
ALIKE = [VisibleCard("GPU-ab00"), VisibleCard("GPU-ab11"), VisibleCard("GPU-cd00")]
DIVIDED = [VisibleCard("GPU-a000", ("MIG-a1", "MIG-a2")), VisibleCard("GPU-b000"), VisibleCard("GPU-c000", ("MIG-c1",))]


def whole(places: List[int]) -> List[object]:
    """Cards as they are."""
    return [(place, WHOLE) for place in places]


@pytest.mark.parametrize(
    ("value", "places"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("1,0", [1, 0]),
        ("0,0", []),
        ("0,2,-1,1", [0, 2]),
        ("99", []),
        ("0,99,1", [0]),
        ("abc", []),
        ("none", []),
        ("all", []),
        ("void", []),
        ("NoDevFiles", []),
        ("1gpu2,2ampere", [1, 2]),
        ("0;1", [0]),
        ("GPU-a", [0]),
        ("GPU-c000,GPU-b000", [2, 1]),
        ("GPU-a,1", [0]),
        ("GPU-a,GPU-a", []),
        ("GPU-a,GPU-a0", []),  # Two beginnings of one name: a duplicate all the same.
        ("GPU-x,GPU-a", []),
        ("GPU-a,GPU-x,GPU-b", [0]),
        ("0,GPU-b", [0]),
        (" 2 , 3 ", [2, 3]),
        ("+1", [1]),
        ("+", []),
        ("2,", [2]),
        (",2", []),
        ("00,0", []),
        ("9" * 5000, []),
        ("\u0661", []),  # A digit, but not one of C's.
        ("MIG-a1", []),
    ],
)
def test_whole_cards(value: Optional[str], places: List[int]) -> None:
    assert select(value, FOUR) == whole(places)


def test_with_one_card_numbers_beyond_it_end_the_list() -> None:
    assert select("0,1", FOUR[:1]) == whole([0])
    assert select("1,0", FOUR[:1]) == []


def test_a_beginning_that_fits_two_cards_names_none() -> None:
    assert select("GPU-cd,GPU-ab,GPU-ab00", ALIKE) == whole([2])


def test_a_divided_card_stands_for_its_slices() -> None:
    assert select(None, DIVIDED) == [(0, 0), (0, 1), (1, WHOLE), (2, 0)]
    assert select("2,1", DIVIDED) == [(2, 0), (1, WHOLE)]
    assert select("GPU-a", DIVIDED) == [(0, 0), (0, 1)]


def test_slices_are_named_by_their_own_uuids() -> None:
    assert select("MIG-c1,MIG-a2", DIVIDED) == [(2, 0), (0, 1)]
    assert select("MIG-a", DIVIDED) == []
    assert select("MIG-a1,0", DIVIDED) == [(0, 0)]
    assert select("MIG-a1,MIG-a1", DIVIDED) == []


def test_what_the_variable_says_is_told_apart() -> None:
    assert parse_visible(None) == Selection(everything=True)
    assert parse_visible("3,1x") == Selection(numbers=(3, 1))
    assert parse_visible("GPU-a,MIG-b") == Selection(names=("GPU-a",))
    assert parse_visible("") == Selection()


def test_cuda_numbers_by_bus_when_told_to_and_else_the_fastest_first() -> None:
    assert cuda_order("PCI_BUS_ID", [1.0, 3.0, 2.0]) == [0, 1, 2]
    assert cuda_order(None, [1.0, 3.0, 2.0]) == [1, 2, 0]
    assert cuda_order("FASTEST_FIRST", [2.0, 3.0, 2.0, 3.0]) == [1, 3, 0, 2]


def test_a_mask_holds_uuids_whatever_was_inherited() -> None:
    assert mask(["GPU-b000", "GPU-a000"], "2,3") == "GPU-b000,GPU-a000"
    assert mask(["MIG-a1"], None) == "MIG-a1"
    assert mask([], "0") == ""


def test_a_mask_of_cards_without_uuid_goes_through_the_inherited_list() -> None:
    assert mask(["cuda:0"], None) == "0"
    assert mask(["cuda:1", "cuda:0"], "2,3") == "3,2"
    assert mask(["cuda:0"], "GPU-a") == "GPU-a"


@pytest.mark.parametrize(
    ("keys", "inherited", "message"),
    [
        (["cuda:2"], "2,3", "there is no card cuda:2"),
        (["cuda:0"], "", "there is no card cuda:0"),
        (["cuda:x"], None, "there is no card cuda:x"),
        (["cuda:0", "GPU-a000"], None, "with and without UUID"),
    ],
)
def test_a_mask_that_cannot_be_is_refused(keys: List[str], inherited: Optional[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask(keys, inherited)
