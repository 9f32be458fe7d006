"""Which cards `CUDA_VISIBLE_DEVICES` leaves to this process, and in which order CUDA numbers them. Pure: the variables come in as text.

NVML knows nothing of these variables: it lists every card of the machine, in practice by PCI bus. CUDA numbers the fastest card first unless
`CUDA_DEVICE_ORDER=PCI_BUS_ID`. The rules for the list are those of the CUDA programming guide (section 5.2.1 on environment variables) as
torch implements them (`torch.cuda._parse_visible_devices`, 2.13): entries after the first that names nothing are not seen, an entry named
twice voids the list, forms do not mix.
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from gpumesh.model.records import NamedTuple

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"
WHOLE = -1  # The place of a card that is offered as it is, not a slice of it.
_DIGITS = frozenset("0123456789")


class VisibleCard(NamedTuple):
    """What can be named in the list."""

    uuid: str = ""  # "GPU-..."; "" where there is none: only its number names it then.
    slices: Tuple[str, ...] = ()  # UUIDs of its MIG slices; not empty: only these can be used, not the card.


class Selection(NamedTuple):
    """What the variable says, before it is compared with the cards there are.

    Exactly one of the three means something; all of them empty: no card is visible.
    """

    everything: bool = False
    numbers: Tuple[int, ...] = ()  # In CUDA's order of the cards.
    names: Tuple[str, ...] = ()  # UUIDs or beginnings of them, all of cards or all of slices.


def parse_visible(value: Optional[str]) -> Selection:
    """The list that the variable holds.

    Args:
        value: Of `CUDA_VISIBLE_DEVICES`; None if it is not set.
    """
    if value is None:
        return Selection(everything=True)
    for prefix in ("GPU-", "MIG-"):
        if value.startswith(prefix):
            return Selection(names=_names(value, prefix))
    numbers: List[int] = []
    for entry in value.split(","):
        number = _leading_number(entry)
        if number in numbers:
            return Selection()
        if number < 0:
            break
        numbers.append(number)
    return Selection(numbers=tuple(numbers))


def _names(value: str, prefix: str) -> Tuple[str, ...]:
    """Entries up to the first of another form; none if one comes twice."""
    names: List[str] = []
    for entry in value.split(","):
        if entry in names:
            return ()
        if not entry.startswith(prefix):
            break
        names.append(entry)
    return tuple(names)


def _leading_number(entry: str) -> int:
    """The number that the entry begins with, as C's strtoul reads it ("1gpu" is 1); -1 if there is none or it is negative."""
    text = entry.strip()
    sign, digits = (text[:1], text[1:]) if text[:1] in ("+", "-") else ("", text)
    length = 0
    while length < len(digits) and digits[length] in _DIGITS:
        length += 1
    if not length or length > 9:  # No machine has a billion cards, and Python refuses to read very long numbers.
        return -1
    number = int(digits[:length])
    return -1 if sign == "-" and number else number


def select(value: Optional[str], cards: Sequence[VisibleCard]) -> List[Tuple[int, int]]:
    """The cards and slices that may be used, in the order in which the list names them.

    A card that is divided stands for all of its slices: a process sees one at a time, and each task gets a process with its own.

    Args:
        value: Of `CUDA_VISIBLE_DEVICES`; None if it is not set.
        cards: All that CUDA can open, in CUDA's order.

    Returns:
        Pairs of (place in `cards`, place in its `slices` or WHOLE), without repetition.
    """
    selection = parse_visible(value)
    if selection.everything:
        return [place for card in range(len(cards)) for place in _places(cards, card)]
    chosen: List[int] = []
    for number in selection.numbers:
        if number >= len(cards):
            break
        chosen.append(number)
    if selection.names and selection.names[0].startswith("MIG-"):
        return _select_slices(selection.names, cards)
    for name in selection.names:
        matching = [place for place, card in enumerate(cards) if card.uuid.startswith(name)]
        if len(matching) != 1:
            break
        if matching[0] in chosen:
            return []
        chosen.append(matching[0])
    return [place for card in chosen for place in _places(cards, card)]


def _places(cards: Sequence[VisibleCard], card: int) -> List[Tuple[int, int]]:
    if not cards[card].slices:
        return [(card, WHOLE)]
    return [(card, part) for part in range(len(cards[card].slices))]


def _select_slices(names: Sequence[str], cards: Sequence[VisibleCard]) -> List[Tuple[int, int]]:
    there = [(uuid, (card, part)) for card, facts in enumerate(cards) for part, uuid in enumerate(facts.slices)]
    chosen: List[Tuple[int, int]] = []
    for name in names:
        matching = [place for uuid, place in there if uuid.startswith(name)]
        if len(matching) != 1:
            break
        if matching[0] in chosen:
            return []
        chosen.append(matching[0])
    return chosen


def cuda_order(order: Optional[str], speeds: Sequence[float]) -> List[int]:
    """Places of the cards in the order in which CUDA numbers them.

    CUDA's own "fastest first" is a guess that its makers do not explain; this is ours: by speed, equals by bus. It is right for equal cards,
    and good enough for unlike ones as long as nothing but the shown number depends on it: cards are handed out by UUID.

    Args:
        order: Of `CUDA_DEVICE_ORDER`; None if it is not set.
        speeds: Of the cards in NVML's order, which is that of the bus.
    """
    places = list(range(len(speeds)))
    if (order or "").strip() == BY_BUS:
        return places
    return sorted(places, key=lambda place: -speeds[place])


def mask(keys: Sequence[str], inherited: Optional[str]) -> str:
    """What `CUDA_VISIBLE_DEVICES` has to be for a process that may use just these cards, whatever this process inherited.

    UUIDs stand for themselves. A card without one is "cuda:1", numbered within what this process sees, so its number is looked up in the
    inherited list.

    Args:
        keys: `DeviceFacts.key` of each card.
        inherited: `CUDA_VISIBLE_DEVICES` of this process; None if it is not set.

    Raises:
        ValueError: The keys are of both forms, which CUDA does not accept, or one names nothing in the inherited list.
    """
    numbers = [key for key in keys if key.startswith("cuda:")]
    if not numbers:
        return ",".join(keys)
    if len(numbers) != len(keys):
        raise ValueError(f"cards with and without UUID cannot be used by one process: {', '.join(keys)}")
    selection = parse_visible(inherited)
    entries = []
    for key in numbers:
        index = key.partition(":")[2]
        listed: Sequence[object] = selection.numbers or selection.names
        if not index.isdecimal() or not (selection.everything or int(index) < len(listed)):
            raise ValueError(f"there is no card {key} with {VISIBLE}={inherited}")
        entries.append(index if selection.everything else str(listed[int(index)]))
    return ",".join(entries)
