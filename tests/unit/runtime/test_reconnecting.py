"""When a worker looks for its coordinator, and what it keeps for it."""

from __future__ import annotations

from typing import List

import pytest

from gpumesh.config import (
    OUTAGE_LINE_MAX_SECONDS,
    OUTAGE_REASONS,
    RECONNECT_FIRST_DELAY_SECONDS,
    RECONNECT_MAX_DELAY_SECONDS,
    RECONNECTS_PER_SECOND,
)
from gpumesh.model.outcomes import Status
from gpumesh.runtime.reconnecting import BATCH_BYTES, BATCH_RESULTS, Backoff, KeptResults, Outage, Result

OK, NOT_RUN, CRASHED = int(Status.OK), int(Status.NOT_RUN), int(Status.CRASHED)


def pauses(backoff: Backoff, count: int, draw: float = 1.0) -> List[float]:
    return [backoff.next(draw) for _ in range(count)]


def test_the_first_try_is_at_once_and_later_ones_are_further_and_further_apart() -> None:
    found = pauses(Backoff(), 12)
    assert found[0] <= RECONNECT_FIRST_DELAY_SECONDS / 2
    assert found == sorted(found)
    assert found[-1] == RECONNECT_MAX_DELAY_SECONDS
    assert all(0 < low < high for low, high in zip(pauses(Backoff(), 12, 0.01), found))


def test_a_connection_begins_it_anew() -> None:
    backoff = Backoff()
    first = pauses(backoff, 5)
    backoff.reset()
    assert pauses(backoff, 5) == first


@pytest.mark.parametrize("workers", [100, 1000])
def test_workers_that_are_lost_together_come_back_one_after_another(workers: int) -> None:
    backoff = Backoff()
    backoff.workers = workers
    backoff.next(0.5)
    longest, shortest = backoff.next(1.0), backoff.next(0.0)
    assert workers / (longest - shortest) <= 1.3 * RECONNECTS_PER_SECOND


def result(task: int, payload: object = b"value", status: int = OK, attempt: int = 1) -> Result:
    return (task, attempt, status, payload, 0.5)


def test_results_are_kept_until_they_are_to_be_forgotten() -> None:
    kept = KeptResults()
    kept.add([result(1), result(2, {}, NOT_RUN), result(3, {"reason": "it died"}, CRASHED)])
    assert kept.attempts() == [(1, 1), (3, 1)]
    kept.add([result(3, attempt=2)])
    assert kept.attempts() == [(1, 1), (3, 2)]
    kept.forget([1, 7])
    assert [each[0] for each in kept.values()] == [3]
    assert len(kept) == 1


def test_they_are_sent_again_in_messages_of_bounded_size() -> None:
    kept = KeptResults()
    assert list(kept.batches()) == []
    kept.add(result(task) for task in range(BATCH_RESULTS + 1))
    assert [len(batch) for batch in kept.batches()] == [BATCH_RESULTS, 1]

    large = KeptResults()
    large.add(result(task, bytes(BATCH_BYTES // 2)) for task in range(4))
    assert [len(batch) for batch in large.batches()] == [2, 2]
    assert [each[0] for batch in large.batches() for each in batch] == [0, 1, 2, 3]


# --- what is said of an outage


def test_a_reason_is_told_once_and_then_at_growing_intervals() -> None:
    outage, told = Outage(), []
    for second in range(4 * 3600):
        more = outage.failed(f"nothing listens; {second} tries", float(second))
        if more is not None:
            told.append((second, more))
    assert told[0] == (0, "")
    assert told[1] == (60, ", for 60 s now")
    assert told[2] == (180, ", for 3 min now")
    assert len(told) < 20, "few lines an hour"
    gaps = [later - sooner for (sooner, _), (later, _) in zip(told[1:], told[2:])]
    assert gaps == sorted(gaps)
    assert gaps[-1] == OUTAGE_LINE_MAX_SECONDS


def test_another_reason_is_told_at_once_and_not_again_when_they_take_turns() -> None:
    outage = Outage()
    told = [outage.failed(reason, 0.1 * number) for number, reason in enumerate(["off", "off", "no way", "off", "no way"])]
    assert told == ["", None, ", for 0 s now", None, None]


def test_reasons_without_end_are_not_told_without_end() -> None:
    outage = Outage()
    told = [outage.failed("x" * number, 0.01 * number) for number in range(1000)]
    assert len([each for each in told if each is not None]) == OUTAGE_REASONS


def test_its_end_is_told_once_and_the_next_one_begins_anew() -> None:
    outage = Outage()
    assert outage.end(1.0) == ""
    for second in (2.0, 3.0, 19.0):
        outage.failed("off", second)
    assert outage.end(19.5) == ", 18 s after the first of 3 attempts"
    assert outage.end(20.0) == ""
    assert outage.failed("off", 21.0) == ""
