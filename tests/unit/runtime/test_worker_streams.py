"""Values of generators at their worker: kept until they are taken, sent again when asked for, forgotten when nobody needs them."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import pytest

from gpumesh.config import GENERATOR_WINDOW_ITEMS
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle, Stored
from gpumesh.protocol.messages import StreamCredit, StreamItems
from gpumesh.runtime.worker_streams import BATCH_BYTES, NOTHING_KEPT, WorkerStreams

TASK, RUNNER = 7, 3
OK = int(Status.OK)


class Worker:
    """What it sends, and what it holds for kept values."""

    def __init__(self) -> None:
        self.told: List[Any] = []
        self.sent: List[Tuple[int, Any]] = []
        self.held: Dict[Any, int] = {}
        self.streams = WorkerStreams(self.told.append, self._send, lambda: self)  # type: ignore[arg-type, return-value]

    def _send(self, runner: int, message: Any) -> bool:
        self.sent.append((runner, message))
        return True

    def keep_item(self, runner: int, payload: Any) -> None:
        self.held[payload] = self.held.get(payload, 0) + 1

    def drop_items(self, payloads: Any) -> None:
        for payload in payloads:
            self.held[payload] -= 1
            if not self.held[payload]:
                del self.held[payload]

    def items(self, *items: Any, first: int = 0, attempt: int = 1, task: int = TASK, runner: int = RUNNER) -> None:
        self.streams.on_items(runner, StreamItems(task, attempt, first, list(items)))

    def again(self) -> List[Any]:
        """What it sends to a coordinator that it has reached anew."""
        self.told.clear()
        self.streams.connected()
        return list(self.told)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_what_has_not_been_taken_is_sent_again(worker: Worker) -> None:
    worker.items(*[b"%d" % value for value in range(GENERATOR_WINDOW_ITEMS)])
    assert len(worker.told) == 1
    credit = StreamCredit(TASK, GENERATOR_WINDOW_ITEMS + 16)
    worker.streams.on_credit(credit)

    assert worker.sent == [(RUNNER, credit)]
    assert worker.again() == [StreamItems(TASK, 1, 16, [b"%d" % value for value in range(16, GENERATOR_WINDOW_ITEMS)])]
    worker.items(b"more", first=GENERATOR_WINDOW_ITEMS)
    worker.told.clear()
    worker.streams.on_credit(StreamCredit(TASK, 0))
    (sent,) = worker.told
    assert (sent.first, len(sent.items)) == (16, GENERATOR_WINDOW_ITEMS - 15)
    assert len(worker.sent) == 1  # The process has nothing to do with that.


def test_large_values_are_sent_again_in_several_messages(worker: Worker) -> None:
    items = [bytes([value]) * (BATCH_BYTES // 2) for value in range(5)]
    worker.items(*items)

    sent = worker.again()
    assert [message.first for message in sent] == [0, 2, 4]
    assert [item for message in sent for item in message.items] == items


def test_after_the_last_word_it_is_sent_again_too(worker: Worker) -> None:
    worker.items(b"0")
    worker.items(first=1)

    assert worker.again() == [StreamItems(TASK, 1, 0, [b"0"]), StreamItems(TASK, 1, 1, [])]


def test_a_generator_that_failed_has_a_last_word_when_asked(worker: Worker) -> None:
    worker.items(b"0")
    worker.streams.on_results([(TASK, 1, int(Status.CRASHED), {}, 0.0)])

    assert worker.again()[-1] == StreamItems(TASK, 1, 1, [])


def test_it_is_forgotten_with_its_result_and_not_before(worker: Worker) -> None:
    worker.items(b"0")
    worker.streams.forget([TASK])  # Of an attempt before.
    assert worker.again()
    worker.streams.on_results([(TASK, 0, OK, b"", 0.0)])
    worker.streams.forget([TASK])
    assert worker.again()
    worker.streams.on_results([(TASK, 1, OK, b"", 0.0)])
    worker.streams.forget([TASK, 99])
    assert worker.again() == []
    worker.streams.on_credit(StreamCredit(TASK, 0))
    assert worker.told == [StreamItems(TASK, NOTHING_KEPT, 0, [])]
    worker.streams.on_credit(StreamCredit(TASK, 100))
    assert len(worker.told) == 1


def test_objects_are_held_as_long_as_their_values_are_kept(worker: Worker) -> None:
    values = [Stored(number, 100_000) for number in range(3)]
    bundle = Bundle(b"x", (), (8, 9))
    worker.items(values[0], b"small", bundle, values[1])
    assert worker.held == {values[0]: 1, bundle: 1, values[1]: 1}
    assert list(worker.streams.kept()) == [values[0], bundle, values[1]]

    worker.streams.on_credit(StreamCredit(TASK, GENERATOR_WINDOW_ITEMS + 3))
    assert worker.held == {values[1]: 1}
    worker.items(values[2], attempt=2)  # It runs again: what was taken before need not be kept again ...
    assert worker.held == {values[2]: 1}
    worker.streams.on_credit(StreamCredit(TASK, GENERATOR_WINDOW_ITEMS + 3))
    worker.items(values[0], b"", values[1], first=1, attempt=2)
    assert worker.held == {values[1]: 1}  # ... not even for a moment.
    worker.items(values[2], first=9, attempt=1)  # Of the run before, which is being ended.
    assert worker.held == {values[1]: 1}
    worker.streams.runner_gone(RUNNER + 1)
    assert worker.held == {values[1]: 1}
    worker.streams.runner_gone(RUNNER)
    assert worker.held == {}


def test_what_has_ended_outlives_its_process(worker: Worker) -> None:
    worker.items(b"0")
    worker.items(b"1", task=TASK + 1)
    worker.streams.on_results([(TASK, 1, OK, b"", 0.0)])
    worker.streams.runner_gone(RUNNER)

    assert worker.again() == [StreamItems(TASK, 1, 0, [b"0"]), StreamItems(TASK, 1, 1, [])]
