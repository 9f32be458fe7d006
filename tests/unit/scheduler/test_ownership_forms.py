"""The owner's rules as people write them, and as the file keeps them."""

from __future__ import annotations

from typing import Any, Callable, Tuple

import pytest

from gpumesh.scheduler.ownership import GPUS, MACHINE, Amount, Pause, Rules, Window
from gpumesh.scheduler.ownership_forms import (
    parse_gpu_memory,
    parse_hours,
    parse_minutes,
    parse_programs,
    parse_slots,
    parse_span,
    rules_from_plain,
    rules_to_plain,
)

EVERY_DAY = tuple(range(7))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200),
        ("90m", 5400),
        ("1h30m", 5400),
        ("1 h 30 min", 5400),
        ("1.5d", 129600),
        ("45s", 45),
        (" 10min ", 600),
        ("2H", 7200),
    ],
)
def test_a_length_of_time(text: str, seconds: float) -> None:
    assert parse_span(text) == seconds


@pytest.mark.parametrize(
    ("text", "windows"),
    [
        ("22-7", (Window(EVERY_DAY, 22 * 60, 7 * 60),)),
        ("9:30 - 17", (Window(EVERY_DAY, 570, 1020),)),
        ("0-24", (Window(EVERY_DAY, 0, 1440),)),
        ("22-24", (Window(EVERY_DAY, 1320, 1440),)),
        ("22-0", (Window(EVERY_DAY, 1320, 1440),)),
        ("24-5", (Window(EVERY_DAY, 0, 300),)),
        ("Mon-Fri 22-7, Sat-Sun", (Window((0, 1, 2, 3, 4), 1320, 420), Window((5, 6), 0, 1440))),
        ("saturday/Sun 8-20", (Window((5, 6), 480, 1200),)),
        ("Sat-Mon", (Window((0, 5, 6), 0, 1440),)),
    ],
)
def test_hours(text: str, windows: Tuple[Window, ...]) -> None:
    assert parse_hours(text) == windows


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_span, text) for text in ("", "2", "h", "2h foo", "0s", "400d", "-1h", "1e3s", "nan")]
    + [
        (parse_hours, text)
        for text in ("", "9", "9-9", "7-7:00", "25-3", "9:75-10", "9-", "-9", "22-7,", "Foo 9-10", "24-0", "9-10-11", "9h-10h")
    ]
    + [(parse_slots, text) for text in ("", "0", "-1", "5000", "0%", "101%", "x%", "nan%", "4.5", "four")]
    + [(parse_gpu_memory, text) for text in ("", "0", "0GB", "-8GB", "0%", "200%", "lots")],
)
def test_what_has_no_meaning_is_refused(parse: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_amounts_are_counts_or_shares() -> None:
    assert parse_slots("4") == Amount(4.0)
    assert parse_slots(" 50% ") == Amount(0.5, is_share=True)
    assert parse_gpu_memory("8GB") == Amount(8e9)
    assert parse_gpu_memory("100%") == Amount(1.0, is_share=True)
    assert (Amount(0.5, is_share=True).of(9), Amount(12.0).of(9), Amount(1 / 3, is_share=True).of(9)) == (4, 9, 3)


def test_names_of_programs_are_compared_without_case_and_exe() -> None:
    assert parse_programs(" Steam.exe, blender ,, STEAM") == ("steam", "blender")
    assert parse_programs("") == ()
    with pytest.raises(ValueError, match="is a path"):
        parse_programs("/usr/bin/blender")


@pytest.mark.parametrize("number", [-1, float("nan"), float("inf"), "10", True, 10**6])
def test_minutes_that_are_none_are_refused(number: Any) -> None:
    with pytest.raises(ValueError, match="idle minutes"):
        parse_minutes(number)


FULL = Rules(
    pauses=((MACHINE, Pause(1796052560.5, "15:29", "a game", ends_running=True)), ("GPU-1", Pause())),
    slots=Amount(0.125, is_share=True),
    gpu_memory=((GPUS, Amount(8e9)), ("GPU-1", Amount(0.5, is_share=True))),
    hours="Mon-Fri 22-7",
    windows=parse_hours("Mon-Fri 22-7"),
    idle_minutes=2.5,
    exclusive=("steam",),
    ends_running=True,
)


def test_what_was_written_is_read_again() -> None:
    assert rules_from_plain(rules_to_plain(FULL)) == FULL
    assert rules_to_plain(Rules()) == {"version": 1}
    assert rules_from_plain({}) == Rules()


def test_a_file_may_be_written_by_hand() -> None:
    plain = {"slots": 4, "gpu_memory": {"gpus": 8000000000}, "exclusive": ["Steam.exe"], "pauses": {"0": {}}}

    assert rules_from_plain(plain) == Rules(
        pauses=(("0", Pause()),), slots=Amount(4.0), gpu_memory=((GPUS, Amount(8e9)),), exclusive=("steam",)
    )


@pytest.mark.parametrize(
    "plain",
    [
        [],
        None,
        "paused",
        {"version": 2},
        {"quiet": True},
        {"pauses": []},
        {"pauses": {"machine": None}},
        {"pauses": {"machine": {"until": "22:00"}}},
        {"pauses": {"machine": {"until": True}}},
        {"pauses": {"machine": {"now": "yes"}}},
        {"slots": "none"},
        {"gpu_memory": "8GB"},
        {"gpu_memory": {"gpus": None}},
        {"hours": 22},
        {"hours": "late"},
        {"only_when_idle": "10"},
        {"exclusive": "steam"},
        {"exclusive": [1]},
        {"now": 1},
    ],
)
def test_a_rule_that_is_not_understood_is_not_passed_over(plain: Any) -> None:
    with pytest.raises(ValueError):
        rules_from_plain(plain)
