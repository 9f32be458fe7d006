"""What arrives of a generator: order, places that come twice, what is told back. Without a mesh."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Callable, List, Optional

import pytest

from gpumesh.client.arrivals import CREDIT_ITEMS
from gpumesh.client.item_streams import ItemStream
from gpumesh.config import GENERATOR_WINDOW_BYTES, GENERATOR_WINDOW_ITEMS
from gpumesh.errors import SerializationError, TaskCancelledError, WorkerCrashedError
from gpumesh.model.outcomes import Status
from gpumesh.protocol.messages import StreamCredit, StreamItems
from tests.support.processes import until

TASK = 7
OK, LOST = int(Status.OK), int(Status.LOST)


class _Session:
    """Waits on conditions, as a session does whose thread for input and output reads."""

    slot = None

    def __init__(self) -> None:
        self.cancelled: List[int] = []

    def drive_until(self, done: Callable[[], bool], condition: Any, timeout: Optional[float] = None) -> bool:
        condition = condition() if callable(condition) else condition
        with condition:
            return bool(condition.wait_for(done, timeout))

    def cancel(self, task_ids: List[int]) -> None:
        self.cancelled.extend(task_ids)


class _Handle:
    name = "numbers"

    def __init__(self, session: _Session) -> None:
        self.session = session


class _Channel:
    def __init__(self) -> None:
        self.told: List[Any] = []

    def tell(self, messages: List[Any]) -> None:
        self.told.extend(messages)

    @property
    def limits(self) -> List[int]:
        assert all(type(message) is StreamCredit and message.task_id == TASK for message in self.told)
        return [message.limit for message in self.told]


class Mesh:
    """One stream, and what a mesh would do for it."""

    def __init__(self) -> None:
        self.session = _Session()
        self.channel = _Channel()
        self.stream = ItemStream(_Handle(self.session)).submitted(TASK)  # type: ignore[arg-type]
        self.sink = self.stream.sink

    def send(self, *values: Any, first: int = 0, attempt: int = 1) -> None:
        message = StreamItems(TASK, attempt, first, [pickle.dumps(value) for value in values])
        self.sink.stream_items(self.channel, message, message.items)  # type: ignore[arg-type]

    def end(self, status: int = OK, payload: Any = None) -> None:
        payload = pickle.dumps(payload) if status == OK else {"reason": "gone"}
        self.sink.task_ended(TASK, status, payload, 0.5, "w1")


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


def test_values_in_order_then_the_return_value(mesh: Mesh) -> None:
    mesh.send(0, 1)
    mesh.send(2, first=2)
    mesh.send(first=3)
    mesh.end(payload="all")

    assert [next(mesh.stream), next(mesh.stream), next(mesh.stream)] == [0, 1, 2]
    with pytest.raises(StopIteration) as end:
        next(mesh.stream)
    assert end.value.value == "all"
    assert mesh.stream.result() == "all"
    assert repr(mesh.stream).startswith("<ItemStream t-00000000-7 numbers finished")


def test_places_that_come_again_are_not_taken_twice(mesh: Mesh) -> None:
    mesh.send(0, 1, 2)
    mesh.send(1, 2, 3, first=1)
    mesh.send(0, 1, first=0)
    mesh.send("too early", first=9)
    mesh.send(4, first=4)
    mesh.send(first=5)
    mesh.end()

    assert list(mesh.stream) == [0, 1, 2, 3, 4]


def test_a_later_attempt_goes_on_and_an_earlier_one_is_not_heard_any_more(mesh: Mesh) -> None:
    mesh.send(0, 1, 2, attempt=1)
    mesh.send("0", "1", "2", "3", attempt=2)
    mesh.send("of before", first=4, attempt=1)
    mesh.send(first=3, attempt=1)
    mesh.send("4", first=4, attempt=2)
    mesh.send(first=5, attempt=2)
    mesh.end()

    assert list(mesh.stream) == [0, 1, 2, "3", "4"]


def test_credit_is_told_a_quarter_of_the_window_at_a_time(mesh: Mesh) -> None:
    mesh.send(*range(GENERATOR_WINDOW_ITEMS))
    for _ in range(CREDIT_ITEMS - 1):
        next(mesh.stream)
    assert mesh.channel.limits == []
    next(mesh.stream)
    assert mesh.channel.limits == [GENERATOR_WINDOW_ITEMS + CREDIT_ITEMS]
    for _ in range(CREDIT_ITEMS):
        next(mesh.stream)
    assert mesh.channel.limits[1:] == [GENERATOR_WINDOW_ITEMS + 2 * CREDIT_ITEMS]


def test_large_values_are_told_sooner(mesh: Mesh) -> None:
    mesh.send(b"x" * (GENERATOR_WINDOW_BYTES // 3))
    next(mesh.stream)

    assert mesh.channel.limits == [GENERATOR_WINDOW_ITEMS + 1]


def test_who_does_not_go_on_where_it_was_is_told_again(mesh: Mesh) -> None:
    mesh.send(*range(GENERATOR_WINDOW_ITEMS))
    for _ in range(CREDIT_ITEMS):
        next(mesh.stream)
    limit = GENERATOR_WINDOW_ITEMS + CREDIT_ITEMS
    assert mesh.channel.limits == [limit]

    mesh.send(*range(10), attempt=2)
    mesh.send(*range(10, 20), first=10, attempt=2)
    assert mesh.channel.limits == [limit, limit]
    mesh.send(*range(5, 25), first=5, attempt=2)
    assert mesh.channel.limits == [limit, limit, limit]


def test_waiting_for_the_end_alone_lifts_the_window(mesh: Mesh) -> None:
    mesh.send(*range(GENERATOR_WINDOW_ITEMS))
    results: List[Any] = []
    thread = threading.Thread(target=lambda: results.append(mesh.stream.result(20)))
    thread.start()
    until(lambda: mesh.channel.limits == [2 * GENERATOR_WINDOW_ITEMS])
    mesh.send(*range(CREDIT_ITEMS), first=GENERATOR_WINDOW_ITEMS)
    assert mesh.channel.limits[-1] == 2 * GENERATOR_WINDOW_ITEMS + CREDIT_ITEMS
    mesh.send(first=GENERATOR_WINDOW_ITEMS + CREDIT_ITEMS)
    mesh.end(payload="end")
    thread.join(20)

    assert results == ["end"]
    assert list(mesh.stream) == [*range(GENERATOR_WINDOW_ITEMS), *range(CREDIT_ITEMS)]
    assert len(mesh.channel.limits) == 2  # What was taken was told when it came.


def test_an_end_before_all_values_have_come_is_an_error(mesh: Mesh) -> None:
    mesh.send(0, 1)
    mesh.end()

    assert [next(mesh.stream), next(mesh.stream)] == [0, 1]
    with pytest.raises(WorkerCrashedError, match="values of task t-00000000-7 .numbers. were lost"):
        next(mesh.stream)
    assert list(mesh.stream) == []


def test_a_failed_end_comes_after_the_values(mesh: Mesh) -> None:
    mesh.send(0)
    mesh.end(LOST)

    assert next(mesh.stream) == 0
    with pytest.raises(WorkerCrashedError):
        next(mesh.stream)
    with pytest.raises(StopIteration):
        next(mesh.stream)


def test_a_value_that_cannot_be_loaded_is_one_error_and_the_rest_follows(mesh: Mesh) -> None:
    message = StreamItems(TASK, 1, 0, [b"no pickle", pickle.dumps(1)])
    mesh.sink.stream_items(mesh.channel, message, message.items)  # type: ignore[arg-type]

    with pytest.raises(SerializationError, match="cannot be rebuilt here"):
        next(mesh.stream)
    assert next(mesh.stream) == 1


def test_cancelled_and_closed(mesh: Mesh) -> None:
    mesh.send(0, 1)
    assert mesh.stream.cancel()
    assert mesh.session.cancelled == [TASK]
    mesh.send(2, first=2)
    with pytest.raises(TaskCancelledError):
        next(mesh.stream)

    other = Mesh()
    other.send(0)
    with other.stream as stream:
        assert next(stream) == 0
    assert list(stream) == []
    stream.close()
    assert other.session.cancelled == [TASK]


def test_dropping_it_cancels_its_task(mesh: Mesh) -> None:
    mesh.send(0)
    sink, mesh.stream = mesh.sink, None  # type: ignore[assignment]
    gc.collect()

    until(lambda: mesh.session.cancelled == [TASK])
    sink.task_ended(TASK, int(Status.CANCELLED), {}, 0.0, "")  # Nobody is there to hear it.


def test_dropping_one_that_has_ended_cancels_nothing(mesh: Mesh) -> None:
    mesh.send(first=0)
    mesh.end()
    mesh.stream = None  # type: ignore[assignment]
    gc.collect()
    other = Mesh()
    other.stream = None  # type: ignore[assignment]
    gc.collect()
    until(lambda: other.session.cancelled == [TASK])  # They are cancelled in order.

    assert mesh.session.cancelled == []


def test_waiting_ends_in_time(mesh: Mesh) -> None:
    started = time.monotonic()
    with pytest.raises(FutureTimeoutError, match="ask again"):
        mesh.stream.next(0.05)
    assert 0.05 <= time.monotonic() - started < 5
    mesh.send(3)
    assert mesh.stream.next(0.05) == 3
