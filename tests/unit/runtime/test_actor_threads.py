"""The process of an actor whose plan allows several calls at a time: threads, and what cannot be interrupted in them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Callable, Iterator

import pytest

from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle
from gpumesh.runtime.page import CONCURRENT, STARTED
from gpumesh.serialization import values
from gpumesh.serialization.exceptions import load_exception
from tests.support.actor_classes import Counter, Leaving, Meeting
from tests.support.actor_site import ActorSite, sites
from tests.support.processes import until

Make = Callable[[], ActorSite]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    yield from sites(tmp_path_factory.mktemp("segments"))


def test_as_many_calls_run_at_once_as_the_plan_allows(make: Make) -> None:
    site = make().create(Meeting, 3, max_concurrency=3).ready()
    assert site.page.words[CONCURRENT] == 1
    met = [site.value(task_id) for task_id in site.calls("meet", [((), {})] * 3)]
    assert len(set(met)) == 3


def test_calls_begin_in_order_and_no_more_at_once(make: Make) -> None:
    site = make().create(Meeting, 1, max_concurrency=2).ready()
    ids = site.calls("count", [((number,), {}) for number in range(40)])
    assert [site.value(task_id) for task_id in ids] == list(range(40))
    order, most = site.ask("counted")
    assert most == 2
    assert all(abs(number - place) <= 1 for place, number in enumerate(order)), "two threads take turns"


def test_a_call_that_runs_is_given_up_at_once_and_its_thread_replaced(make: Make, tmp_path: Path) -> None:
    site = make().create(Counter, max_concurrency=2).ready()
    gate = tmp_path / "gate"
    stuck = [site.call("wait_for", str(gate)) for _ in range(2)]
    until(lambda: site.page.words[STARTED] == 3)
    waiting, dropped = site.call("add", 1), site.call("add", 100)
    site.cancel(dropped)
    assert site.outcome(dropped) == (Status.CANCELLED, {"reason": "cancelled before it began"})
    site.cancel(*stuck)
    for task_id in stuck:
        assert site.outcome(task_id) == (Status.CANCELLED, {"reason": "cancelled while it ran"})
    assert site.value(waiting) == 1
    gate.touch()
    assert [site.ask("add") for _ in range(5)] == [2, 3, 4, 5, 6], "and what the two return is reported to nobody"


def test_a_call_that_runs_too_long_is_given_up(make: Make, tmp_path: Path) -> None:
    site = make().create(Counter, max_concurrency=2).ready()
    quick = site.call("add", timeout=30.0)
    slow = site.call("wait_for", str(tmp_path / "gate"), timeout=0.05)
    status, details = site.outcome(slow)
    assert (status, details["seconds"]) == (Status.TIMED_OUT, 0.05)
    assert site.value(quick) == 1
    (tmp_path / "gate").touch()


def test_the_end_waits_for_what_runs_before_it_closes(make: Make, tmp_path: Path) -> None:
    site = make().create(Counter, max_concurrency=2).ready()
    running = [site.call("wait_for", str(tmp_path / "gate")) for _ in range(2)]
    dropped = site.call("add")
    until(lambda: site.page.words[STARTED] == 3)
    site.end()
    (tmp_path / "gate").touch()
    assert site.ended() == (Status.CANCELLED, {"reason": "ended"})
    assert [site.value(task_id) for task_id in running] == [str(tmp_path / "gate")] * 2
    assert dropped not in site.results_seen
    assert site.said() == "closed at 0\ndeleted\n"


def test_an_actor_ends_itself_from_a_thread(make: Make) -> None:
    site = make().create(Leaving, 3, max_concurrency=2).ready()
    leaving = site.call("leave")
    status, payload = site.ended()
    assert (status, values.loads(payload), site.value(leaving)) == (Status.OK, None, None)
    assert site.said() == "closed at 3\ndeleted\n"


def test_what_the_constructor_raises_is_the_result_of_the_creation(make: Make) -> None:
    class Broken:
        def __init__(self) -> None:
            raise OSError(5, "no model here")

    status, payload = make().create(Broken, max_concurrency=2).ended()
    assert (status, str(load_exception(payload))) == (Status.RAISED, "[Errno 5] no model here")


def test_whatever_is_raised_is_the_end_of_its_call_only(make: Make) -> None:
    site = make().create(Counter, max_concurrency=2).ready()
    for end in (SystemExit(3), KeyboardInterrupt(), StopIteration(4)):
        assert type(site.error(site.call("fail", end))) is type(end)
    assert site.ask("add") == 1


def test_calls_that_raise_leave_nothing_for_the_collector(make: Make) -> None:
    site = make().create(Counter, max_concurrency=2).ready()
    site.ask("garbage")
    site.outcome(site.calls("fail", [((ValueError("no"),), {})] * 200)[-1])
    assert site.ask("garbage") < 50


def test_calls_at_the_same_time_have_their_own_inputs(make: Make) -> None:
    class Adder:
        def __init__(self) -> None:
            self.barrier = threading.Barrier(2)

        def add(self, one: bytearray, other: bytearray) -> int:
            self.barrier.wait(20)
            one[0] += 1  # Nobody else sees this.
            return one[0] + other[0]

    site = make().create(Adder, max_concurrency=2).ready()
    shared = site.stored(bytearray(b"\1" * 100_000))
    site.hand_over(shared.oid)
    other = site.stored(bytearray(b"\5" * 100_000))
    payloads = [
        Bundle(values.dumps_call((None, bytearray(1)), {}), ((0, shared),)),
        Bundle(values.dumps_call((None, None), {}), ((0, shared), (1, other))),
    ]
    assert [site.value(task_id) for task_id in site.calls_of("add", payloads)] == [2, 7]
    until(lambda: not site.has_result(0) and site.pins == {shared.oid: 0, other.oid: 0})


def test_a_result_is_what_it_was_when_the_call_returned(make: Make) -> None:
    class Changing:
        def __init__(self) -> None:
            self.data = bytearray(b"a" * 20_000)

        def get(self) -> bytearray:
            return self.data

        def change(self) -> None:
            self.data[:] = b"b" * len(self.data)

    site = make().create(Changing, max_concurrency=2).ready()
    before = site.call("get")
    site.ask("change")
    assert set(site.value(before)) <= {ord("a"), ord("b")}
    assert set(site.ask("get")) == {ord("b")}


def test_generators_of_several_calls_stream_at_once(make: Make) -> None:
    class Counting:
        def __init__(self) -> None:
            self.barrier = threading.Barrier(2)

        def to(self, end: int) -> Iterator[int]:
            for number in range(end):
                self.barrier.wait(20)
                yield number

    site = make().create(Counting, max_concurrency=2).ready()
    ids = [site.call("to", 5, is_stream=True) for _ in range(2)]
    assert [site.value(task_id) for task_id in ids] == [None, None]
    assert [site.streams[task_id] for task_id in ids] == [[0, 1, 2, 3, 4]] * 2


def test_the_process_ends_with_its_agent(make: Make, tmp_path: Path) -> None:
    site = make().create(Counter, max_concurrency=2).ready()
    site.hang_up()
    assert site.exit_code() == 0
    assert os.read(site.out, 100).startswith(b"closed at 0")
