"""The process of an actor whose class has `async def` methods: one loop for its life, calls that interleave on it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Callable, Iterator

import pytest

from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle
from gpumesh.runtime.page import CONCURRENT
from gpumesh.serialization import values
from gpumesh.serialization.exceptions import load_exception
from tests.support.actor_site import ActorSite, sites
from tests.support.async_actor_classes import Blocking, Mixed, Room

Make = Callable[[], ActorSite]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    yield from sites(tmp_path_factory.mktemp("segments"))


def test_the_constructor_runs_on_the_loop_of_the_calls(make: Make) -> None:
    site = make().create(Room).ready()
    assert site.page.words[CONCURRENT] == 1
    assert site.ask("is_same_loop") is True


def test_calls_begin_in_order_and_interleave(make: Make) -> None:
    site = make().create(Room).ready()
    waiting = [site.call("wait", str(number)) for number in range(100)]
    assert site.ask("seen") == [str(number) for number in range(100)]
    site.ask("open")
    assert [site.value(task_id) for task_id in waiting] == [str(number) for number in range(100)]


def test_a_call_that_is_cancelled_is_told_at_once_and_unwound(make: Make) -> None:
    site = make().create(Room).ready()
    waiting = site.call("wait", "a")
    site.ask("seen")
    site.cancel(waiting, 77)  # The other is nobody's.
    assert site.outcome(waiting) == (Status.CANCELLED, {"reason": "cancelled while it ran"})
    assert site.ask("seen") == ["a", "cancelled"]


def test_calls_that_have_not_begun_are_dropped(make: Make) -> None:
    class Busy:
        def block(self) -> None:
            print("begun", flush=True)
            time.sleep(0.3)

        async def work(self) -> str:
            return "done"

    site = make().create(Busy).ready()
    site.call("block")
    site.out_line()
    ids = [site.call("work") for _ in range(3)]
    site.cancel(ids[0], ids[1])
    assert [site.outcome(task_id)[0] for task_id in ids] == [Status.CANCELLED, Status.CANCELLED, Status.OK]


def test_a_call_that_runs_too_long_is_cancelled(make: Make) -> None:
    site = make().create(Room).ready()
    status, details = site.outcome(site.call("wait", "a", timeout=0.05))
    assert (status, details["seconds"]) == (Status.TIMED_OUT, 0.05)
    assert site.ask("seen") == ["a", "cancelled"]


@pytest.mark.parametrize("method", ["block", "block_inside"])
def test_a_call_that_blocks_the_loop_is_interrupted(make: Make, method: str) -> None:
    site = make().create(Blocking).ready()
    blocking, other = site.call(method), site.call("work")
    site.out_line()
    site.cancel(blocking)
    site.interrupt(2)
    assert site.outcome(blocking) == (Status.CANCELLED, {"reason": "interrupted"})
    assert site.value(other) == "done"


def test_a_call_that_blocks_the_loop_when_its_time_is_up_is_interrupted(make: Make) -> None:
    site = make().create(Blocking).ready()
    blocking, other = site.call("block", timeout=0.05), site.call("work", timeout=30.0)
    status, details = site.outcome(blocking)
    assert (status, details["seconds"]) == (Status.TIMED_OUT, 0.05)
    assert site.value(other) == "done"


def test_an_interrupt_for_another_call_does_not_hit_the_one_that_blocks(make: Make, tmp_path: Path) -> None:
    site = make().create(Blocking).ready()
    blocking, other = site.call("block", str(tmp_path / "gate")), site.call("work")
    site.out_line()
    site.cancel(other)
    site.interrupt(3)
    (tmp_path / "gate").touch()
    assert site.value(blocking) is None
    assert site.outcome(other)[0] in (Status.CANCELLED, Status.OK)


def test_whatever_is_raised_is_the_end_of_its_call_only(make: Make) -> None:
    site = make().create(Room).ready()
    for end in (SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError("own")):
        assert type(site.error(site.call("fail", end))) is type(end)
    assert "in fail" in str(site.error(site.call("fail", KeyError(1))).__cause__)
    assert site.ask("is_same_loop") is True


def test_a_task_of_its_own_does_not_end_the_actor(make: Make) -> None:
    class Rash:
        async def start(self) -> None:
            async def end() -> None:
                raise SystemExit(3)

            self.task = asyncio.ensure_future(end())

        async def work(self) -> str:
            return "still here"

    site = make().create(Rash).ready()
    site.ask("start")
    assert site.ask("work") == "still here"
    site.end()
    site.ended()
    assert "a task of the actor's own wanted to end the process" in site.complained()


def test_the_end_cancels_calls_awaits_close_and_deletes(make: Make) -> None:
    site = make().create(Room).ready()
    waiting = site.call("wait", "a")
    site.ask("seen")
    site.end()
    assert site.ended() == (Status.CANCELLED, {"reason": "ended"})
    assert waiting not in site.results_seen
    assert site.said() == "closing\nclosed ['a', 'cancelled']\ndeleted\n"
    assert site.complained() == ""


def test_an_async_context_manager_is_left_at_the_end(make: Make) -> None:
    class Managed:
        async def __aexit__(self, *args: object) -> None:
            print("left with", args)
            raise RuntimeError("still in use")

        async def work(self) -> None:
            pass

    site = make().create(Managed).ready()
    site.end()
    assert site.ended()[0] == Status.CANCELLED
    assert site.said() == "left with (None, None, None)\n"
    assert "RuntimeError: still in use" in site.complained()


def test_an_actor_ends_itself(make: Make) -> None:
    site = make().create(Room).ready()
    waiting, leaving = site.call("wait", "a"), site.call("leave")
    status, payload = site.ended()
    assert (status, values.loads(payload), site.value(leaving)) == (Status.OK, None, None)
    assert waiting not in site.results_seen
    assert site.said().endswith("deleted\n")


def test_what_the_constructor_raises_is_the_result_of_the_creation(make: Make) -> None:
    class Broken:
        def __init__(self) -> None:
            raise OSError(5, "no model here")

        async def work(self) -> None:
            pass

    site = make().create(Broken)
    status, payload = site.ended()
    assert (status, str(load_exception(payload))) == (Status.RAISED, "[Errno 5] no model here")
    assert site.complained() == ""


def test_a_constructor_that_is_interrupted_ends_the_actor(make: Make) -> None:
    class Slow:
        def __init__(self) -> None:
            print("begun", flush=True)
            time.sleep(60)

        async def work(self) -> None:
            pass

    site = make().create(Slow)
    site.out_line()
    site.interrupt(1)
    assert site.ended() == (Status.CANCELLED, {"reason": "interrupted"})


def test_plain_methods_run_on_the_loops_thread_or_in_threads_where_the_plan_allows(make: Make) -> None:
    alone = make().create(Mixed).ready()
    alone.call("open")
    assert alone.ask("wait") == "MainThread"
    several = make().create(Mixed, max_concurrency=2).ready()
    waiting = [several.call("wait") for _ in range(2)]
    several.ask("open")
    assert all(several.value(task_id).startswith("gpumesh-call") for task_id in waiting)
    for end in (SystemExit(3), StopIteration(4)):
        assert type(several.error(several.call("fail", end))) is type(end)


@pytest.mark.parametrize("width", [1, 2])
def test_generators_stream(make: Make, width: int) -> None:
    site = make().create(Mixed, max_concurrency=width).ready()
    ids = [site.call(name, 5, is_stream=True) for name in ("to", "slowly_to")]
    assert [site.value(task_id) for task_id in ids] == [None, None]
    assert [site.streams[task_id] for task_id in ids] == [[0, 1, 2, 3, 4]] * 2


def test_calls_that_raise_leave_nothing_for_the_collector(make: Make) -> None:
    class Failing(Mixed):
        async def fail_late(self) -> None:
            await asyncio.sleep(0)
            raise ValueError("no")

    site = make().create(Failing).ready()
    for method, arguments in (("fail", (ValueError("no"),)), ("fail_late", ())):
        site.ask("garbage")
        site.outcome(site.calls(method, [(arguments, {})] * 200)[-1])
        assert site.ask("garbage") < 50


def test_calls_at_the_same_time_have_their_own_inputs(make: Make) -> None:
    class Adder:
        async def add(self, one: bytearray, other: bytearray) -> int:
            one[0] += 1
            await asyncio.sleep(0.01)
            return one[0] + other[0]

    site = make().create(Adder).ready()
    shared = site.stored(bytearray(b"\1" * 100_000))
    site.hand_over(shared.oid)
    payload = Bundle(values.dumps_call((None, bytearray(1)), {}), ((0, shared),))
    assert [site.value(task_id) for task_id in site.calls_of("add", [payload, payload])] == [2, 2]
    site.ask("add", bytearray(1), bytearray(1))
    assert site.pins == {shared.oid: 0}


def test_a_result_is_what_it_was_when_the_call_returned(make: Make) -> None:
    class Changing:
        def __init__(self) -> None:
            self.data = bytearray(b"a" * 20_000)

        async def get(self) -> bytearray:
            return self.data

        async def change(self) -> None:
            self.data[:] = b"b" * len(self.data)

    site = make().create(Changing).ready()
    body = values.dumps_call((), {})
    before = site.calls_of("get", [body])
    after = site.calls_of("change", [body])
    assert set(site.value(before[0])) == {ord("a")}
    site.value(after[0])
    assert set(site.ask("get")) == {ord("b")}


def test_the_process_ends_with_its_agent(make: Make) -> None:
    site = make().create(Room).ready()
    site.hang_up()
    assert site.exit_code() == 0
