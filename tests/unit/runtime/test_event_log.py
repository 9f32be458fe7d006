"""What a coordinator remembers of what has happened."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from gpumesh.config import EVENT_BURST, EVENT_TEXT_CHARACTERS, EVENTS_KEPT, EVENTS_PER_SECOND
from gpumesh.journal.base import EventRecord
from gpumesh.runtime.event_log import KINDS, EventLog, time_of_day


class Told:
    """A log whose clocks stand still until told otherwise, and what it has handed to its journal."""

    def __init__(self, earlier: List[EventRecord] = []) -> None:  # noqa: B006  # Never changed.
        self.now = 0.0
        self.kept: List[EventRecord] = []
        self.log = EventLog(earlier, keep=self.kept.append, wall=lambda: 1.7e9 + self.now, clock=lambda: self.now)

    @property
    def events(self) -> List[Dict[str, Any]]:
        return self.log.since(0)


def test_an_event_says_when_what_and_where() -> None:
    told = Told()

    told.log.note("died", "worker w1 (attic)\n  is gone", worker="w1", task=None, job="")

    assert told.events == [
        {"number": 1, "time": "2023-11-14T22:13:20.000Z", "kind": "died", "text": "worker w1 (attic) is gone", "worker": "w1"}
    ]


def test_asking_again_gives_only_what_is_new() -> None:
    told = Told()
    for number in range(4):
        told.log.note(KINDS[number], "")

    assert [event["number"] for event in told.log.since(0)] == [1, 2, 3, 4]
    assert [event["number"] for event in told.log.since(2)] == [3, 4]
    assert told.log.since(4) == []
    assert [event["number"] for event in told.log.since(0, limit=2)] == [3, 4]


def test_who_asks_with_a_number_of_an_earlier_coordinator_is_told_everything() -> None:
    told = Told()
    told.log.note("started", "")

    assert [event["number"] for event in told.log.since(17)] == [1]


def test_events_stay_and_numbers_go_on_after_a_restart() -> None:
    before = Told()
    before.log.note("joined", "one", worker="w1", job="j-1")
    before.log.note("left", "two")

    after = Told(before.kept)
    after.log.note("started", "three")

    assert [event["text"] for event in after.events] == ["one", "two", "three"]
    assert after.events[:2] == before.events
    assert after.log.since(2) == after.events[2:]
    assert [record.number for record in after.kept] == [after.events[2]["number"]]


def test_who_was_told_what_did_not_reach_the_disk_is_told_what_comes_after_a_restart() -> None:
    before = Told()
    for number in range(EVENT_BURST):
        before.log.note("retry", str(number))

    after = Told(before.kept[:1])
    after.log.note("started", "again")

    assert [event["text"] for event in after.log.since(EVENT_BURST)] == ["again"]


def test_a_flood_of_one_kind_is_thinned_out_and_counted_and_hides_no_other() -> None:
    told = Told()
    for knock in range(EVENT_BURST + 50):
        told.log.note("refused", f"knock {knock}")
    told.log.note("joined", "a friend")

    assert [event["kind"] for event in told.events] == ["refused"] * EVENT_BURST + ["joined"]

    told.now = 1.0 / EVENTS_PER_SECOND
    told.log.note("refused", "one more")
    told.log.note("refused", "too many")

    assert told.events[-1]["text"] == "one more (and 50 more of this kind before, not listed)"


def test_only_the_newest_are_kept() -> None:
    told = Told()
    for number in range(EVENTS_KEPT + 10):
        told.now = float(number)
        told.log.note("retry", str(number))

    assert len(told.events) == EVENTS_KEPT
    assert told.events[-1]["number"] == EVENTS_KEPT + 10
    assert told.events[0]["text"] == "10"
    assert len(told.kept) == EVENTS_KEPT + 10


def test_a_long_text_is_cut() -> None:
    told = Told()

    told.log.note("died", "x" * 10_000)

    assert len(told.events[0]["text"]) == EVENT_TEXT_CHARACTERS + 3


@pytest.mark.parametrize(("wall", "text"), [(0.0, "1970-01-01T00:00:00.000Z"), (1.7e9 + 0.9999, "2023-11-14T22:13:20.999Z")])
def test_times_are_utc_with_milliseconds(wall: float, text: str) -> None:
    assert time_of_day(wall) == text
