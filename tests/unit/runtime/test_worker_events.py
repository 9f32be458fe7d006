"""What an owner's pause, and a broken machine or GPU, look like among the events."""

from __future__ import annotations

from typing import List, Tuple

import pytest

from gpumesh.model.resources import DeviceFacts, WorkerFacts
from gpumesh.runtime.event_log import EventLog
from gpumesh.runtime.worker_events import note_changes

CARD = DeviceFacts("cuda", 0, "RTX 4090", 24 << 30, 100.0, uuid="GPU-1")
PLAIN = WorkerFacts("attic", devices=(CARD,))
PAUSED = PLAIN._replace(problem="paused by its owner until 17:00 (a film)")
BROKEN = PLAIN._replace(problem="its processes do not start: no module named site")
CARD_PAUSED = PLAIN._replace(devices=(CARD._replace(problem="paused by its owner"),))
CARD_LOST = PLAIN._replace(devices=(CARD._replace(problem="it is gone"),))


@pytest.mark.parametrize(
    ("told", "events"),
    [
        ([PLAIN, PLAIN._replace(slots=2)], []),
        (
            [PLAIN, PAUSED, PAUSED, PLAIN],
            [
                ("paused", "attic takes no tasks: paused by its owner until 17:00 (a film)"),
                ("resumed", "attic takes tasks again"),
            ],
        ),
        ([PAUSED], [("paused", "attic takes no tasks: paused by its owner until 17:00 (a film)")]),
        (
            [PLAIN, BROKEN, PLAIN],
            [
                ("unwell", "attic takes no tasks: its processes do not start: no module named site"),
                ("resumed", "attic takes tasks again"),
            ],
        ),
        (
            [PLAIN, CARD_PAUSED, CARD_LOST, PLAIN],
            [
                ("paused", "RTX 4090 of attic takes no tasks: paused by its owner"),
                ("unwell", "RTX 4090 of attic takes no tasks: it is gone"),
                ("resumed", "RTX 4090 of attic takes tasks again"),
            ],
        ),
        (
            [CARD_LOST, BROKEN, PLAIN],
            [
                ("unwell", "RTX 4090 of attic takes no tasks: it is gone"),
                ("unwell", "attic takes no tasks: its processes do not start: no module named site"),
                ("resumed", "attic takes tasks again"),
            ],
        ),
    ],
)
def test_what_takes_no_tasks_and_what_does_again_is_noted_once(told: List[WorkerFacts], events: List[Tuple[str, str]]) -> None:
    log = EventLog()

    for before, now in zip([None, *told], told):
        note_changes(log, "w1", before, now)

    assert [(event["kind"], event["text"]) for event in log.since(0)] == events
    assert all(event["worker"] == "w1" for event in log.since(0))
