"""Whatever the variable holds and whatever cards there are: no card twice, none that is not there, and the list's own order."""

from __future__ import annotations

from typing import List, Optional

from hypothesis import given
from hypothesis import strategies as st

from gpumesh.devices.visible import WHOLE, VisibleCard, cuda_order, mask, parse_visible, select

NAMES = st.text("ab", min_size=1, max_size=3)
CARDS = st.lists(
    st.builds(
        VisibleCard, NAMES.map("GPU-{}".format), st.lists(NAMES.map("MIG-{}".format), unique=True, max_size=2).map(tuple)
    ),
    max_size=5,
)
ENTRIES = st.one_of(
    st.integers(-2, 6).map(str),
    st.builds("{}-{}".format, st.sampled_from(["GPU", "MIG"]), NAMES),
    st.sampled_from(["", " ", "0", "x", "1gpu", "-", "+1", "0;1"]),
)
LISTS = st.one_of(st.none(), st.text(max_size=20), st.lists(ENTRIES, max_size=5).map(",".join))


@given(LISTS, CARDS)
def test_no_place_comes_twice_and_each_is_there(value: Optional[str], cards: List[VisibleCard]) -> None:
    places = select(value, cards)

    assert len(set(places)) == len(places)
    for card, part in places:
        slices = cards[card].slices
        assert part in range(len(slices)) if slices else part == WHOLE


@given(st.lists(st.integers(0, 8), unique=True, max_size=6), CARDS)
def test_numbers_select_those_cards_up_to_the_first_that_is_not_there(numbers: List[int], cards: List[VisibleCard]) -> None:
    expected = []
    for number in numbers:
        if number >= len(cards):
            break
        expected.append(number)

    chosen = [card for card, _ in select(",".join(map(str, numbers)), cards)]

    assert list(dict.fromkeys(chosen)) == expected


@given(LISTS, CARDS)
def test_more_cards_never_void_what_numbers_select(value: Optional[str], cards: List[VisibleCard]) -> None:
    if value is None or parse_visible(value).names:
        return
    before = select(value, cards)

    assert select(value, [*cards, VisibleCard("GPU-more")])[: len(before)] == before


@given(st.lists(st.floats(0.5, 1000), max_size=8), st.sampled_from([None, "PCI_BUS_ID", "FASTEST_FIRST", ""]))
def test_the_order_is_an_order(speeds: List[float], order: Optional[str]) -> None:
    places = cuda_order(order, speeds)

    assert sorted(places) == list(range(len(speeds)))
    if order == "PCI_BUS_ID":
        assert places == sorted(places)
    else:
        assert [speeds[place] for place in places] == sorted(speeds, reverse=True)


@given(st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=5), st.data())
def test_a_mask_of_numbers_shows_what_the_parent_called_so(visible: List[int], data: st.DataObject) -> None:
    machine = [VisibleCard() for _ in range(10)]
    inherited = ",".join(map(str, visible))
    indices = data.draw(st.lists(st.integers(0, len(visible) - 1), unique=True, min_size=1))

    handed_out = mask([f"cuda:{index}" for index in indices], inherited)

    seen_by_parent = select(inherited, machine)
    assert select(handed_out, machine) == [seen_by_parent[index] for index in indices]
