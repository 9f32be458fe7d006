"""What an owner's rules make of a machine at a moment, as examples."""

from __future__ import annotations

from typing import Any, Tuple

import pytest

from gpumesh.model.resources import CardReading, DeviceFacts, WorkerFacts
from gpumesh.scheduler.ownership import (
    EVERYTHING,
    GPUS,
    MACHINE,
    QUIET_SECONDS,
    Amount,
    CardPause,
    Observations,
    Offer,
    Ownership,
    Pause,
    Rules,
    describe,
    names_card,
    offered,
    offered_reading,
    withheld_cards,
)
from gpumesh.scheduler.ownership_forms import parse_hours

GB = 10**9
CPU = DeviceFacts("cpu", 0, "Some CPU", 64 * GB, 2.0)
FIRST = DeviceFacts("cuda", 1, "RTX 3080", 10 * GB, 60.0, uuid="GPU-aaaa1111-2222", system_index=0)
SECOND = DeviceFacts("cuda", 0, "RTX 4090", 24 * GB, 100.0, uuid="GPU-bbbb1111-2222", system_index=1, others=GB)
MACHINE_FACTS = WorkerFacts(hostname="den", slots=8, cores=16, memory=64 * GB, score=2.0, devices=(CPU, SECOND, FIRST))
TUESDAY = 1


def at(time: str, *, weekday: int = TUESDAY, **seen: Any) -> Observations:
    """A moment; `now` and `wall` are its minute of the week in seconds, so that later moments are later everywhere."""
    hour, _, minute = time.partition(":")
    minutes = int(hour) * 60 + float(minute)
    moment = (weekday * 1440 + minutes) * 60
    return Observations(now=moment, wall=1e9 + moment, weekday=weekday, minute=minutes, **seen)


def judge(rules: Rules, seen: Observations) -> Offer:
    ownership = Ownership()
    ownership.rules = rules
    return ownership.judge(seen)


def test_without_rules_everything_is_lent() -> None:
    assert judge(Rules(), at("12:00")) == EVERYTHING
    assert offered(MACHINE_FACTS, EVERYTHING) is MACHINE_FACTS


def test_a_pause_says_until_when_and_why() -> None:
    seen = at("12:00")
    paused = Pause(until=seen.wall + 60, until_text="12:01", reason="a call", ends_running=True)
    rules = Rules(pauses=((MACHINE, paused),))

    assert judge(rules, seen) == Offer("paused by its owner until 12:01 (a call)", ends_running=True)
    assert judge(rules, at("12:00.99")).problem
    assert judge(rules, at("12:01")) == EVERYTHING


def test_a_pause_without_an_end_has_none() -> None:
    assert judge(Rules(pauses=((MACHINE, Pause()),)), at("23:59", weekday=6)).problem == "paused by its owner"


def test_one_card_is_paused_and_the_rest_goes_on() -> None:
    offer = judge(Rules(pauses=(("GPU-aaaa1111-2222", Pause(reason="a game")),)), at("12:00"))

    assert offer.problem == ""
    assert withheld_cards(MACHINE_FACTS, offer) == {FIRST.key: False}
    told = offered(MACHINE_FACTS, offer)
    assert told.problem == ""
    assert [device.problem for device in told.devices] == ["", "", "paused by its owner (a game)"]
    assert told._replace(devices=()) == MACHINE_FACTS._replace(devices=())


def test_all_cards_are_paused_together_and_the_processor_is_none_of_them() -> None:
    offer = judge(Rules(pauses=((GPUS, Pause(ends_running=True)),)), at("12:00"))

    assert withheld_cards(MACHINE_FACTS, offer) == {FIRST.key: True, SECOND.key: True}
    assert [bool(device.problem) for device in offered(MACHINE_FACTS, offer).devices] == [False, True, True]


@pytest.mark.parametrize(
    ("target", "card"),
    [("0", FIRST), ("1", SECOND), ("cuda:0", SECOND), ("cuda:1", FIRST), ("gpu-aaaa", FIRST), ("GPU-BBBB1111-2222", SECOND)],
)
def test_a_card_has_many_names(target: str, card: DeviceFacts) -> None:
    assert [device for device in MACHINE_FACTS.devices if names_card(target, device)] == [card]


def test_a_card_that_the_system_does_not_number_goes_by_the_programs_number() -> None:
    apple = DeviceFacts("mps", 0, "Apple M2", 16 * GB, 8.0)

    assert names_card("0", apple)
    assert names_card("mps:0", apple)
    assert not names_card("GPU-", apple)


@pytest.mark.parametrize("target", ["2", "cuda", "gpu-", "cpu", "cpu:0", ""])
def test_nothing_else_names_one(target: str) -> None:
    assert not any(names_card(target, device) for device in MACHINE_FACTS.devices)


@pytest.mark.parametrize(
    ("hours", "time", "weekday", "lent"),
    [
        ("22-7", "21:59", 1, False),
        ("22-7", "22:00", 1, True),
        ("22-7", "0:00", 1, True),
        ("22-7", "6:59", 1, True),
        ("22-7", "7:00", 1, False),
        ("9:30-17", "9:29", 1, False),
        ("9:30-17", "9:30", 1, True),
        ("9:30-17", "17:00", 1, False),
        (
            "Mon-Fri 22-7, Sat-Sun",
            "3:00",
            0,
            False,
        ),  # The night from Sunday to Monday begins on a Sunday, which ends at midnight.
        ("Mon-Fri 22-7, Sat-Sun", "6:59", 5, True),
        ("Mon-Fri 22-7, Sat-Sun", "12:00", 5, True),
        ("Mon-Fri 22-7, Sat-Sun", "12:00", 4, False),
        ("Sun 22-7", "6:59", 0, True),  # Across the end of the week.
        ("Sun 22-7", "6:59", 6, False),
        ("Fri-Mon", "12:00", 3, False),
        ("Fri-Mon", "12:00", 0, True),
        ("0-24", "23:59", 3, True),
    ],
)
def test_hours_are_local_ones_and_may_cross_midnight(hours: str, time: str, weekday: int, lent: bool) -> None:
    rules = Rules(hours=hours, windows=parse_hours(hours), ends_running=True)

    offer = judge(rules, at(time, weekday=weekday))

    assert offer == (EVERYTHING if lent else Offer(f"lent by its owner {hours} only", ends_running=True))


def test_idleness_has_to_last_and_must_be_known() -> None:
    rules = Rules(idle_minutes=10)

    assert judge(rules, at("12:00", idle_seconds=600.0)) == EVERYTHING
    assert judge(rules, at("12:00", idle_seconds=599.0)).problem == "in use by its owner, lent when idle for 10 min"
    assert judge(rules, at("12:00", idle_seconds=None, idle_problem="nobody knows")).problem == (
        "lent by its owner only when idle for 10 min, but nobody knows"
    )


def test_an_exclusive_program_takes_the_machine_at_once_and_a_short_gap_does_not_return_it() -> None:
    ownership = Ownership()
    ownership.rules = Rules(exclusive=("steam", "blender"))

    def after(seconds: float, *programs: str) -> str:
        return ownership.judge(Observations(now=seconds, wall=seconds, weekday=0, minute=0, programs=programs)).problem

    assert after(0.0) == ""
    assert after(1.0, "steam") == "paused while its owner runs steam"
    assert after(2.0, "steam", "blender") == "paused while its owner runs steam"
    assert after(3.0, "blender") == "paused while its owner runs blender"
    assert after(3.1 + QUIET_SECONDS - 0.2) == "paused while its owner runs blender"
    assert after(4.0 + QUIET_SECONDS - 0.5, "blender") == "paused while its owner runs blender", "back before the gap was over"
    assert after(4.0 + QUIET_SECONDS + 5) == "paused while its owner runs blender"
    assert after(4.0 + 2 * QUIET_SECONDS) == ""


def test_a_rule_that_is_taken_back_leaves_no_gap_to_wait_for() -> None:
    ownership = Ownership()
    ownership.rules = Rules(exclusive=("steam",))
    assert ownership.judge(at("12:00", programs=("steam",))).problem

    ownership.rules = Rules()

    assert ownership.judge(at("12:00")) == EVERYTHING


def test_rules_that_cannot_be_read_pause_the_machine() -> None:
    assert judge(Rules(trouble="/somewhere: broken"), at("12:00")) == Offer(
        "paused: what its owner allows cannot be read"
    )  # Without the folder's name: others read it.


def test_a_share_of_the_slots_takes_cores_and_score_along() -> None:
    told = offered(MACHINE_FACTS, Offer(slots=Amount(0.5, is_share=True)))

    assert (told.slots, told.cores, told.score) == (4, 8, 1.0)
    assert [device.score for device in told.devices] == [1.0, 100.0, 60.0]


@pytest.mark.parametrize(
    ("amount", "slots"), [((3, False), 3), ((100, False), 8), ((0.01, True), 1), ((0.99, True), 7), ((1.0, True), 8)]
)
def test_slots_are_never_none_and_never_more_than_there_are(amount: Tuple[float, bool], slots: int) -> None:
    assert offered(MACHINE_FACTS, Offer(slots=Amount(*amount))).slots == slots


def test_less_of_a_cards_memory_is_lent_and_what_others_hold_takes_the_rest_first() -> None:
    offer = Offer(gpu_memory=((GPUS, Amount(0.5, is_share=True)), ("0", Amount(8.0 * GB))))

    told = offered(MACHINE_FACTS, offer)

    assert [(device.memory, device.others) for device in told.devices] == [(64 * GB, 0), (12 * GB, 0), (8 * GB, 0)]
    reading = CardReading(SECOND.key, others=13 * GB, used=20 * GB)
    assert offered_reading(reading, SECOND, offer) == reading._replace(others=1 * GB), (
        "of 24 GB others hold 13, so 11 of 12 are left"
    )
    assert offered_reading(reading._replace(others=-1), SECOND, offer).others == -1


def test_a_limit_above_the_memory_is_none() -> None:
    assert offered(MACHINE_FACTS, Offer(gpu_memory=((GPUS, Amount(100.0 * GB)),))) == MACHINE_FACTS


def test_problems_of_the_machine_and_of_its_owner_are_both_told() -> None:
    facts = MACHINE_FACTS._replace(problem="its processes do not start", devices=(FIRST._replace(problem="fell off the bus"),))

    told = offered(facts, Offer("paused by its owner", cards=(CardPause("0", "paused by its owner", False),)))

    assert told.problem == "paused by its owner; its processes do not start"
    assert told.devices[0].problem == "paused by its owner; fell off the bus"


def test_rules_are_described_as_long_as_they_are_in_force() -> None:
    rules = Rules(
        pauses=((MACHINE, Pause(until=100.0, until_text="12:00")), ("0", Pause(reason="a game", ends_running=True))),
        slots=Amount(0.5, is_share=True),
        gpu_memory=((GPUS, Amount(8.0 * GB)), ("1", Amount(0.25, is_share=True))),
        hours="22-7",
        windows=parse_hours("22-7"),
        idle_minutes=10,
        exclusive=("steam", "blender"),
        ends_running=True,
    )

    assert describe(rules, 99.0)[0] == "this machine is paused by its owner until 12:00"
    assert describe(rules, 100.0) == [
        "GPU 0 is paused by its owner (a game), running work is ended",
        "at most 50% of its slots",
        "at most 8 GB of the memory of each GPU",
        "at most 25% of the memory of GPU 1",
        "only 22-7",
        "only when nobody has touched it for 10 min",
        "not while steam or blender runs",
        "running work is ended when the machine is taken back, rather than let finish",
    ]
    assert describe(Rules(), 0.0) == []
