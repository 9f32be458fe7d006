"""Values of generators at the coordinator: in order past objects that are still arriving, and again for clients that were away."""

from __future__ import annotations

from typing import Any, Dict, List, Set, Tuple

import pytest

from gpumesh.model.ids import SEQUENCE_BITS
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Stored
from gpumesh.protocol.messages import StreamCredit, StreamItems
from gpumesh.runtime.stream_service import NOTHING_KEPT, StreamService

CLIENT = 5
TASK = CLIENT << SEQUENCE_BITS | 1
WORKER = "w1"
OK = int(Status.OK)
RESULT = (TASK, 1, OK, b"", 0.1)


class Coordinator:
    """Objects, clients and workers around the service."""

    def __init__(self) -> None:
        self.arriving: Set[int] = set()
        self.granted: Dict[int, int] = {}
        self.is_here = True
        self.to_client: List[Any] = []
        self.to_workers: List[Tuple[str, Any]] = []
        self.results: List[Tuple[str, Any]] = []
        self.all_sent: List[Tuple[int, int]] = []
        self.streams = StreamService(
            self,  # type: ignore[arg-type]
            send_to_client=self._send_to_client,
            send_to_worker=lambda worker, message: self.to_workers.append((worker, message)),
            on_result=lambda worker, result: self.results.append((worker, result)),
            on_all_sent=lambda client, task_id: self.all_sent.append((client, task_id)),
        )

    def _send_to_client(self, client: int, message: Any) -> bool:
        if self.is_here:
            assert client == CLIENT
            self.to_client.append(message)
        return self.is_here

    def is_arriving(self, oid: int) -> bool:
        return oid in self.arriving

    def grant_result(self, client: int, payload: Stored) -> None:
        self.granted[payload.oid] = self.granted.get(payload.oid, 0) + 1

    def ungrant_result(self, client: int, payload: Stored) -> None:
        self.granted[payload.oid] -= 1

    def items(self, *items: Any, first: int = 0, attempt: int = 1, task: Any = TASK) -> StreamItems:
        message = StreamItems(task, attempt, first, list(items))
        assert self.streams.on_items(WORKER, message) == ""
        return message

    def arrive(self, oid: int) -> None:
        self.arriving.discard(oid)
        self.streams.object_settled(oid)


@pytest.fixture
def here() -> Coordinator:
    return Coordinator()


def test_values_go_on_to_the_client_and_credit_to_the_worker(here: Coordinator) -> None:
    messages = [here.items(b"0", Stored(3, 100_000)), here.items(first=2)]
    credit = StreamCredit(TASK, 80)

    assert here.to_client == messages
    assert here.granted == {3: 1}
    assert here.streams.on_credit(CLIENT, credit) == ""
    assert here.to_workers == [(WORKER, credit)]
    here.streams.ended(TASK)
    assert here.streams.on_credit(CLIENT, credit) == ""
    assert len(here.to_workers) == 1


def test_credit_goes_to_the_newest_attempt(here: Coordinator) -> None:
    here.items(b"0", attempt=1)
    assert here.streams.on_items("w2", StreamItems(TASK, 2, 0, [b"0"])) == ""
    here.items(b"1", first=1, attempt=1)  # Of a worker that was taken to be lost.
    credit = StreamCredit(TASK, 80)
    here.streams.on_credit(CLIENT, credit)
    here.streams.send_again([TASK])

    assert here.to_workers == [("w2", credit), ("w2", StreamCredit(TASK, 0))]


def test_values_wait_for_those_before_them_and_so_does_the_result(here: Coordinator) -> None:
    here.arriving = {3, 4}
    messages = [here.items(b"0"), here.items(Stored(3, 1)), here.items(b"2", first=2), here.items(Stored(4, 1), first=3)]
    other = (TASK + 1, 1, OK, b"", 0.1)

    assert here.to_client == messages[:1]
    assert here.streams.hold_back(WORKER, [other, RESULT]) == [other]
    assert here.streams.results_of(WORKER) == [TASK]
    here.arrive(4)
    assert here.to_client == messages[:1]
    here.arrive(3)
    assert here.to_client == messages
    assert here.results == [(WORKER, RESULT)]
    assert here.streams.held == {}
    assert here.granted == {3: 1, 4: 1}


def test_what_was_held_of_a_worker_that_is_away_comes_again(here: Coordinator) -> None:
    here.arriving = {3}
    here.items(Stored(3, 1))
    here.streams.hold_back(WORKER, [RESULT])
    here.streams.worker_away(WORKER)
    assert here.streams.held == {}
    here.arrive(3)
    assert here.to_client == []
    assert here.results == []

    message = here.items(Stored(3, 1))
    assert here.to_client == [message]


def test_who_was_away_is_sent_what_was_not_taken(here: Coordinator) -> None:
    here.is_here = False
    here.items(b"0", Stored(3, 1))
    assert here.granted == {3: 0}
    here.is_here = True
    here.streams.send_again([TASK, TASK + 1])

    assert here.to_workers == [(WORKER, StreamCredit(TASK, 0))]


@pytest.mark.parametrize("last", [StreamItems(TASK, 1, 2, []), StreamItems(TASK, NOTHING_KEPT, 0, [])])
def test_a_kept_result_follows_the_values_before_it(here: Coordinator, last: StreamItems) -> None:
    here.streams.send_all_before(TASK, WORKER)
    assert here.to_workers == [(WORKER, StreamCredit(TASK, 0))]
    message = here.items(b"0", b"1")
    assert here.all_sent == []
    assert here.streams.on_items(WORKER, last) == ""

    assert here.all_sent == [(CLIENT, TASK)]
    assert here.to_client == [message, last] if last.attempt != NOTHING_KEPT else [message]
    assert here.streams.sources == {}


def test_a_worker_that_comes_back_is_asked_again_and_one_that_is_gone_has_nothing(here: Coordinator) -> None:
    here.streams.send_all_before(TASK, WORKER)
    here.streams.worker_back("w2")
    here.streams.worker_back(WORKER)
    assert here.to_workers == [(WORKER, StreamCredit(TASK, 0))] * 2
    here.streams.worker_gone("w2")
    assert here.all_sent == []
    here.streams.worker_gone(WORKER)

    assert here.all_sent == [(CLIENT, TASK)]


def test_nothing_is_left_of_a_client_that_is_gone(here: Coordinator) -> None:
    here.items(b"0")
    here.streams.send_all_before(TASK + 1, WORKER)
    here.streams.client_gone(CLIENT)

    assert here.streams.sources == {}
    assert here.streams.ending == {}
    here.streams.worker_gone(WORKER)
    assert here.all_sent == []


@pytest.mark.parametrize(
    "message",
    [
        StreamItems("x", 1, 0, []),  # type: ignore[arg-type]
        StreamItems(TASK, None, 0, []),  # type: ignore[arg-type]
        StreamItems(TASK, 1, -1, []),
        StreamItems(TASK, 1, 0, 5),  # type: ignore[arg-type]
        StreamItems(TASK, 1, 0, ["text"]),
    ],
)
def test_what_are_no_values_is_refused(here: Coordinator, message: StreamItems) -> None:
    assert here.streams.on_items(WORKER, message) == "these are not values of a generator"


def test_credit_of_others_is_refused(here: Coordinator) -> None:
    words = "this is not about a stream of this client's"
    assert here.streams.on_credit(CLIENT + 1, StreamCredit(TASK, 80)) == words
    assert here.streams.on_credit(CLIENT, StreamCredit(TASK, "80")) == words  # type: ignore[arg-type]
    assert here.streams.on_credit(CLIENT, StreamCredit(None, 80)) == words  # type: ignore[arg-type]
