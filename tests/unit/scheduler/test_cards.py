"""Which cards a task gets, and what is left of them: the books of one worker."""

from __future__ import annotations

from typing import Any, List, Optional

import pytest

from gpumesh.model.resources import CardReading, DeviceFacts, Requirement, make_requirement
from gpumesh.scheduler.cards import CONTEXT_BYTES, LEASES_PER_CARD, Cards, CardUsage, Lease

GB = 10**9
CPU = DeviceFacts("cpu", 0, "AMD Ryzen", 64 * GB, 0.5)


def card(number: int, memory: int = 24, score: float = 100.0, **more: Any) -> DeviceFacts:
    """A card of so many GB."""
    return DeviceFacts("cuda", number, f"card {number}", memory * GB, score, uuid=f"GPU-{number}", **more)


def worker(*cards: DeviceFacts, host_memory: int = 0) -> Cards:
    return Cards([CPU, *cards], host_memory)


def fill(cards: Cards, need: Requirement) -> List[Lease]:
    """As many as can be opened."""
    leases: List[Lease] = []
    lease = cards.open(need)
    while lease is not None:
        leases.append(lease)
        lease = cards.open(need)
    return leases


def keys(lease: Optional[Lease]) -> List[str]:
    assert lease is not None
    return list(lease.cards)


ONE, TWO, HALF = make_requirement(gpu=1), make_requirement(gpu=2), make_requirement(gpu=0.5)
TEN = make_requirement(gpu="gpu", memory="10GB")


# --- what fits


@pytest.mark.parametrize(("memory", "count"), [(8, 0), (10, 1), (20, 1), (24, 2), (80, 7)])
def test_tasks_share_a_card_by_the_memory_they_ask_for(memory: int, count: int) -> None:
    cards = worker(card(0, memory))

    leases = fill(cards, TEN)

    assert len(leases) == cards.capacity(TEN) == count
    assert [lease.ordinal for lease in leases] == list(range(count))


def test_each_process_beside_another_costs_its_context() -> None:
    need = make_requirement(gpu="gpu", memory=12 * GB)
    tight = make_requirement(gpu="gpu", memory=12 * GB - CONTEXT_BYTES)

    assert worker(card(0)).capacity(need) == 1
    assert worker(card(0)).capacity(tight) == 2


def test_a_task_alone_may_ask_for_all_of_a_card() -> None:
    cards = worker(card(0))

    assert cards.capacity(make_requirement(gpu="gpu", memory=24 * GB)) == 1
    assert cards.open(make_requirement(gpu="gpu", memory=24 * GB)) is not None
    assert cards.capacity(make_requirement(gpu="gpu", memory=24 * GB + 1)) == 0


def test_what_others_hold_is_not_given_away() -> None:
    cards = worker(card(0))
    cards.measure([CardReading("GPU-0", 4 * GB)])

    assert len(fill(cards, TEN)) == 1
    assert cards.capacity(TEN) == 2, "others may go"


def test_a_lease_stays_when_others_take_more_and_no_other_is_opened() -> None:
    cards = worker(card(0))
    first = cards.open(TEN)
    assert first is not None

    assert cards.measure([CardReading("GPU-0", 20 * GB)])

    assert cards.leases == (first,)
    assert not cards.can_open(TEN)
    cards.close(first)
    assert not cards.can_open(TEN), "4 GB are left"


def test_measuring_tells_whether_something_has_changed() -> None:
    cards = worker(card(0, others=GB))

    assert not cards.measure([CardReading("GPU-0", GB, used=2 * GB, temperature=70.0), CardReading("GPU-9", 5)])
    assert not cards.measure([CardReading("GPU-0", -1)])
    assert cards.measure([CardReading("GPU-0", 0)])


def test_a_whole_card_has_one_lease() -> None:
    cards = worker(card(0))
    whole = cards.open(ONE)
    assert whole is not None

    assert not any(cards.can_open(need) for need in (ONE, HALF, TEN))
    cards.close(whole)
    half = cards.open(HALF)
    assert half is not None
    assert not cards.can_open(ONE)
    assert cards.can_open(HALF)
    assert cards.can_open(TEN)


def test_a_whole_card_with_memory_needs_that_much_free() -> None:
    cards = worker(card(0, others=8 * GB))
    need = make_requirement(gpu=1, memory="20GB")

    assert cards.capacity(need) == 1
    assert cards.open(need) is None
    cards.measure([CardReading("GPU-0", 4 * GB)])
    assert cards.open(need) is not None


def test_a_card_without_room_for_a_process_is_not_opened() -> None:
    cards = worker(card(0, others=24 * GB - CONTEXT_BYTES + 1))

    assert cards.open(ONE) is None
    assert cards.measure([CardReading("GPU-0", 24 * GB - CONTEXT_BYTES)])
    assert cards.open(ONE) is not None


@pytest.mark.parametrize(("fraction", "count"), [(0.5, 2), (0.4, 2), (0.6, 1), (1 / 3, 3), (0.1, 10), (1 / 7, 7)])
def test_fractions_of_a_card_add_up_to_one(fraction: float, count: int) -> None:
    cards = worker(card(0))
    need = make_requirement(gpu=fraction)

    assert len(fill(cards, need)) == cards.capacity(need) == count


def test_unlike_fractions_share_a_card() -> None:
    cards = worker(card(0))

    assert cards.open(make_requirement(gpu=0.7)) is not None
    assert cards.open(make_requirement(gpu=0.3)) is not None
    assert cards.open(make_requirement(gpu=0.01)) is None


def test_a_fraction_takes_as_much_of_the_memory() -> None:
    cards = worker(card(0))
    assert cards.open(HALF) is not None

    assert cards.open(make_requirement(gpu="gpu", memory=12 * GB - CONTEXT_BYTES)) is not None
    assert not cards.can_open(make_requirement(gpu="gpu", memory=1))


def test_a_fraction_with_memory_takes_what_it_asks_for() -> None:
    cards = worker(card(0))
    need = make_requirement(gpu=0.25, memory="2GB")

    assert len(fill(cards, need)) == 4
    assert cards.open(TEN) is not None, "the bytes are there; shares of the card it needs none"


def test_what_a_display_holds_does_not_keep_halves_apart() -> None:
    cards = worker(card(0, others=GB))

    assert len(fill(cards, HALF)) == 2


def test_a_program_on_the_card_keeps_the_second_half_away() -> None:
    cards = worker(card(0, others=10 * GB))

    assert len(fill(cards, HALF)) == 1
    assert cards.capacity(HALF) == 2


def test_a_fraction_holds_at_least_a_context() -> None:
    cards = worker(card(0, 1))
    need = make_requirement(gpu=0.01)

    assert len(fill(cards, need)) == cards.capacity(need) == 2


def test_processes_on_one_card_are_limited() -> None:
    cards = worker(card(0, 800))
    need = make_requirement(gpu="gpu", memory=1)

    assert len(fill(cards, need)) == cards.capacity(need) == LEASES_PER_CARD


def test_a_card_of_unknown_memory_serves_who_does_not_ask_for_bytes() -> None:
    cards = worker(card(0, 0))

    assert cards.capacity(TEN) == 0
    assert len(fill(cards, HALF)) == cards.capacity(HALF) == 2


def test_several_whole_cards_are_all_of_one_kind() -> None:
    cards = worker(card(0), card(1), DeviceFacts("rocm", 0, "MI210", 64 * GB, 90.0))

    assert cards.capacity(TWO) == 1
    assert keys(cards.open(TWO)) == ["GPU-0", "GPU-1"]
    assert cards.capacity(make_requirement(gpu=3)) == 0
    assert cards.capacity(make_requirement(gpu=1.5)) == 1, "one and a half are two"


def test_a_process_has_at_most_one_slice_of_a_card() -> None:
    slices = [DeviceFacts("cuda", number, "MIG 1g.10gb", 10 * GB, 20.0, uuid=f"MIG-{number}") for number in range(2)]

    assert worker(*slices).capacity(ONE) == 2
    assert worker(*slices).capacity(TWO) == 0


def test_kind_number_and_model_are_filters() -> None:
    cards = worker(card(0), card(1), DeviceFacts("mps", 0, "Apple M3", 12 * GB, 10.0))

    assert keys(cards.open(make_requirement(gpu="cuda:1"))) == ["GPU-1"]
    assert keys(cards.open(make_requirement(gpu="mps"))) == ["mps:0"]
    assert keys(cards.open(make_requirement(gpu="Card 0"))) == ["GPU-0"]
    assert [cards.capacity(make_requirement(gpu=gpu)) for gpu in ("cuda", "cuda:2", "rocm", "A100", "gpu")] == [2, 0, 0, 0, 3]


def test_who_needs_no_card_gets_none() -> None:
    cards = worker(card(0))

    assert cards.capacity(Requirement(cores=2)) == 0
    assert cards.open(Requirement()) is None
    assert cards.score(Requirement()) == 0.0


# --- integrated cards


def test_integrated_cards_draw_on_one_memory() -> None:
    first, second = card(0, 12, is_integrated=True), card(1, 12, is_integrated=True)
    need = make_requirement(gpu="gpu", memory=5 * GB)

    assert worker(first, second).capacity(need) == 4
    assert len(fill(worker(first, second, host_memory=16 * GB), need)) == 2
    assert len(fill(worker(first, card(1, 12), host_memory=16 * GB), need)) == 4


# --- which card


def test_the_fastest_card_comes_first_and_is_filled_first() -> None:
    cards = worker(card(0, 24, 30.0), card(1, 24, 100.0))

    assert [lease.cards[0] for lease in fill(cards, TEN)] == ["GPU-1", "GPU-1", "GPU-0", "GPU-0"]


def test_of_like_cards_the_one_with_the_least_room_that_suffices() -> None:
    cards = worker(card(0, 80, 100.0), card(1, 24, 97.0))
    large = make_requirement(gpu="gpu", memory="60GB")

    assert keys(cards.open(TEN)) == ["GPU-1"]
    assert keys(cards.open(TEN)) == ["GPU-1"]
    assert keys(cards.open(large)) == ["GPU-0"]


def test_who_does_not_say_how_much_gets_a_card_that_others_are_not_on() -> None:
    cards = worker(card(0, others=20 * GB), card(1))

    assert keys(cards.open(ONE)) == ["GPU-1"]
    assert keys(cards.open(ONE)) == ["GPU-0"], "better than none"


def test_a_process_that_is_there_is_used_again() -> None:
    cards = worker(card(0), card(1))
    first, second = cards.open(ONE), cards.open(ONE)
    assert first is not None
    assert second is not None
    cards.close(second)
    cards.close(first)
    cards.update([CPU, card(0, 48), card(1)])

    assert keys(cards.open(ONE)) == ["GPU-1"], "the smaller one"
    third = cards.open(ONE)
    assert keys(third) == ["GPU-0"]
    assert third is not None
    cards.close(third)
    cards.update([CPU, card(0, 48), card(1), card(2, 24)])
    assert keys(cards.open(ONE)) == ["GPU-0"], "the smaller one has no process"


def test_a_set_that_has_a_process_is_used_again() -> None:
    cards = worker(card(0), card(1), card(2))
    one = cards.open(ONE)
    two = cards.open(TWO)
    assert one is not None
    assert two is not None
    assert keys(two) == ["GPU-1", "GPU-2"]
    cards.close(two)
    cards.close(one)

    assert keys(cards.open(TWO)) == ["GPU-1", "GPU-2"]


def test_several_cards_leave_those_with_a_process_of_their_own() -> None:
    cards = worker(card(0), card(1), card(2))
    one = cards.open(ONE)
    assert one is not None
    cards.close(one)

    assert keys(cards.open(TWO)) == ["GPU-1", "GPU-2"]


def test_several_cards_are_the_fastest_in_the_workers_order() -> None:
    cards = worker(card(0, 24, 40.0), card(1, 24, 60.0), card(2, 24, 100.0))

    assert keys(cards.open(TWO)) == ["GPU-1", "GPU-2"]


def test_ordinals_are_the_smallest_free_ones_of_the_same_cards() -> None:
    cards = worker(card(0), card(1))
    quarter = make_requirement(gpu=0.25)
    leases = [cards.open(quarter) for _ in range(5)]
    assert [(lease.cards, lease.ordinal) for lease in leases if lease is not None] == [
        (("GPU-0",), 0), (("GPU-0",), 1), (("GPU-0",), 2), (("GPU-0",), 3), (("GPU-1",), 0),
    ]  # fmt: skip

    for lease in (leases[1], leases[2]):
        assert lease is not None
        cards.close(lease)

    again = cards.open(quarter)
    assert again is not None
    assert (again.cards, again.ordinal) == (("GPU-0",), 1)


def test_the_score_is_the_mean_of_the_cards_that_can_serve() -> None:
    cards = worker(card(0, 8, 20.0), card(1, 24, 60.0), card(2, 24, 100.0))

    assert cards.score(ONE) == 60.0
    assert cards.score(TEN) == 80.0
    assert cards.score(make_requirement(gpu=4)) == 60.0
    assert cards.score(make_requirement(gpu="A100")) == 0.0


# --- changes


def test_a_card_that_is_not_offered_any_more_takes_nothing_new() -> None:
    cards = worker(card(0))
    lease = cards.open(HALF)
    assert lease is not None

    cards.update([CPU, card(0, problem="paused by its owner")])

    assert cards.leases == (lease,)
    assert cards.capacity(HALF) == 0
    assert not cards.can_open(HALF)
    cards.close(lease)
    cards.update([CPU, card(0)])
    assert cards.can_open(HALF)


def test_a_card_that_is_gone_is_in_the_books_until_its_leases_are_closed() -> None:
    cards = worker(card(0), card(1))
    lease = cards.open(TWO)
    assert lease is not None

    cards.update([CPU, card(1)])

    assert [(row.key, row.problem) for row in cards.usage()] == [("GPU-1", ""), ("GPU-0", "gone")]
    assert not cards.can_open(ONE)
    cards.close(lease)
    assert [row.key for row in cards.usage()] == ["GPU-1"]
    assert keys(cards.open(ONE)) == ["GPU-1"]


def test_facts_told_again_do_not_undo_what_was_measured_since() -> None:
    cards = worker(card(0, others=GB))
    cards.measure([CardReading("GPU-0", 20 * GB)])

    cards.update([CPU, card(0, others=GB, score=90.0)])
    assert cards.usage()[0].others == 20 * GB

    cards.update([CPU, card(0, others=2 * GB)])
    assert cards.usage()[0].others == 2 * GB


def test_usage_tells_each_cards_part() -> None:
    cards = worker(card(0), card(1, others=GB), card(2))
    whole = cards.open(make_requirement(gpu="cuda:1"))
    shared = cards.open(make_requirement(gpu="cuda:0", memory="4GB"))
    assert whole is not None
    assert shared is not None

    assert cards.usage() == [
        CardUsage("GPU-0", "card 0", 24 * GB, 0, 4 * GB + CONTEXT_BYTES, (shared,), ""),
        CardUsage("GPU-1", "card 1", 24 * GB, GB, 23 * GB, (whole,), ""),
        CardUsage("GPU-2", "card 2", 24 * GB, 0, 0, (), ""),
    ]
