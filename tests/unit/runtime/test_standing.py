"""What a worker tells of itself: whatever comes in whichever order, nothing hides or outlives another."""

from __future__ import annotations

from typing import List

from gpumesh.model.resources import CardReading, DeviceFacts, WorkerFacts
from gpumesh.runtime.standing import Standing
from gpumesh.scheduler.ownership import EVERYTHING, GPUS, Amount, CardPause, Offer

CPU = DeviceFacts("cpu", 0, "CPU", 10**10, 1.0)
CARD = DeviceFacts("cuda", 0, "RTX 3080", 10 * 10**9, 60.0, uuid="GPU-aaaa1111")
FACTS = WorkerFacts(hostname="den", slots=4, cores=4, memory=10**10, devices=(CPU,))
PAUSED = Offer("paused by its owner")


class StandingUnderTest(Standing):
    """Keeps what it tells."""

    def __init__(self) -> None:
        self.heard: List[WorkerFacts] = []
        super().__init__(FACTS, self.heard.append)


def test_a_pause_outlives_news_of_the_pool_and_the_other_way_round() -> None:
    standing = StandingUnderTest()

    standing.change_pool(problem="no processes")
    standing.change_offer(PAUSED)
    standing.change_pool(problem="")
    standing.change_pool(installing=(("numpy",),))
    standing.change_offer(EVERYTHING)
    standing.change_pool(installing=())

    assert [(told.problem, told.installing) for told in standing.heard] == [
        ("no processes", ()),
        ("paused by its owner; no processes", ()),
        ("paused by its owner", ()),
        ("paused by its owner", (("numpy",),)),
        ("", (("numpy",),)),
        ("", ()),
    ]
    assert standing.told == FACTS == standing.machine


def test_a_score_measured_under_a_limit_is_that_of_the_machine() -> None:
    standing = StandingUnderTest()
    standing.change_offer(Offer(slots=Amount(0.5, is_share=True)))

    standing.change_cpu_score(3.0, (("float32", 1e12),))

    assert (standing.told.slots, standing.told.score) == (2, 1.5)
    assert standing.machine.score == 3.0
    standing.change_offer(EVERYTHING)
    assert (standing.told.slots, standing.told.score) == (4, 3.0)
    assert standing.told.devices == (CPU._replace(score=3.0, rates=(("float32", 1e12),)),)


def test_a_card_that_is_found_later_is_as_paused_as_the_others() -> None:
    standing = StandingUnderTest()
    standing.change_offer(Offer(cards=(CardPause(GPUS, "paused by its owner", True),)))
    assert standing.heard == [], "there is none to speak of"

    standing.change_machine(devices=(CPU, CARD))

    assert [device.problem for device in standing.told.devices] == ["", "paused by its owner"]
    assert standing.withheld_cards(Offer(cards=(CardPause(GPUS, "", True),))) == {CARD.key: True}
    standing.change_offer(EVERYTHING)
    assert standing.told.devices == (CPU, CARD)


def test_what_changes_nothing_for_others_is_not_told() -> None:
    standing = StandingUnderTest()

    standing.change_pool(problem="")
    standing.change_offer(EVERYTHING)
    standing.change_machine(score=1.0)
    standing.change_offer(Offer(slots=Amount(8.0)))

    assert standing.heard == []


def test_readings_are_told_in_terms_of_what_is_lent() -> None:
    standing = StandingUnderTest()
    standing.change_machine(devices=(CPU, CARD))
    raw = (CardReading(CARD.key, others=3 * 10**9, used=4 * 10**9), CardReading("GPU-unknown", others=5))

    assert standing.as_lent(raw) == raw
    standing.change_offer(Offer(gpu_memory=((GPUS, Amount(8e9)),)))

    assert standing.as_lent(raw) == (raw[0]._replace(others=10**9), raw[1])
