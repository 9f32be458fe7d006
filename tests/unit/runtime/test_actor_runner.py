"""The process of an actor whose calls run one at a time: its life, its methods, what ends it. The test is its agent."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle
from gpumesh.runtime.actor_exit import exit_actor
from gpumesh.runtime.page import CONCURRENT, FINISHED, FLUSH, SENT, STARTED, WRITTEN
from gpumesh.serialization import values
from gpumesh.serialization.exceptions import load_exception
from tests.support.actor_classes import Counter, Leaving
from tests.support.actor_site import ActorSite, sites
from tests.support.processes import until

Make = Callable[[], ActorSite]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    yield from sites(tmp_path_factory.mktemp("segments"))


def test_the_state_lives_from_call_to_call(make: Make) -> None:
    site = make().create(Counter, start=5).ready()
    assert [site.ask("add"), site.ask("add", by=4), site.ask("__call__", "x")] == [6, 10, "called with x"]
    assert site.ask("__ready__") is None
    assert site.page.words[CONCURRENT] == 0


def test_an_actor_of_plain_methods_loads_no_event_loop(make: Make) -> None:
    modules = make().create(Counter).ready().ask("modules")
    assert not {"asyncio", "numpy", "json"}.intersection(modules)


def test_an_exception_is_the_end_of_its_call_only(make: Make) -> None:
    site = make().create(Counter).ready()
    error = site.error(site.call("fail", KeyError("this")))
    assert type(error) is KeyError
    assert error.args == ("this",)
    assert "in fail" in str(error.__cause__)
    assert "actor_serial" not in str(error.__cause__)
    for end in (SystemExit(3), KeyboardInterrupt(), GeneratorExit()):
        assert type(site.error(site.call("fail", end))) is type(end)
    assert site.ask("add") == 1


def test_there_is_no_such_method(make: Make) -> None:
    site = make().create(Counter).ready()
    assert str(site.error(site.call("subtract"))) == "Counter has no method 'subtract'"
    private = site.error(site.call("__del__"))
    assert type(private) is AttributeError
    assert "private" in str(private)


def test_a_property_that_fails_says_why_itself(make: Make) -> None:
    class Broken:
        @property
        def work(self) -> Any:
            raise AttributeError("the property's own")

    site = make().create(Broken).ready()
    assert str(site.error(site.call("work"))) == "the property's own"


def test_what_the_constructor_raises_is_the_result_of_the_creation(make: Make) -> None:
    class Broken:
        def __init__(self) -> None:
            print("about to fail")
            raise OSError(5, "no model here")

    site = make().create(Broken)
    status, payload = site.ended()
    error = load_exception(payload)
    assert status == Status.RAISED
    assert isinstance(error, OSError)
    assert error.errno == 5
    assert "in __init__" in str(error.__cause__)
    assert (site.is_ready, site.said()) == (False, "about to fail\n")


def test_a_class_that_cannot_be_unpickled_is_an_error_of_the_creation(make: Make) -> None:
    site = make()
    body = b"\x80\x05\x8c\x0fno_such_module_\x8c\x01X\x93."
    status, payload = site.create_from(body).ended()
    assert status == Status.RAISED
    assert "no_such_module_" in str(load_exception(payload))


def test_a_constructor_that_is_interrupted_ends_the_actor(make: Make) -> None:
    class Slow:
        def __init__(self) -> None:
            print("begun", flush=True)
            time.sleep(60)

    site = make().create(Slow)
    os.read(site.out, 100)
    site.interrupt(1)
    assert site.ended() == (Status.CANCELLED, {"reason": "interrupted"})


def test_a_call_that_is_interrupted_is_cancelled_and_the_next_runs(make: Make, tmp_path: Path) -> None:
    site = make().create(Counter).ready()
    first, second = site.call("wait_for", str(tmp_path / "never")), site.call("add")
    until(lambda: site.page.words[STARTED] == 2)
    site.interrupt(2)
    assert site.outcome(first) == (Status.CANCELLED, {"reason": "interrupted"})
    assert site.value(second) == 1


def test_calls_that_have_not_begun_are_dropped_while_another_runs(make: Make, tmp_path: Path) -> None:
    site = make().create(Counter).ready()
    gate = tmp_path / "gate"
    first, second, third = site.call("wait_for", str(gate)), site.call("add", 10), site.call("add", 100)
    until(lambda: site.page.words[STARTED] == 2)
    site.cancel(second, status=Status.TIMED_OUT)
    gate.touch()
    assert site.value(first) == str(gate)
    assert site.outcome(second) == (Status.TIMED_OUT, {"reason": "cancelled before it began"})
    assert site.value(third) == 100
    site.cancel(third)  # It is over.
    assert site.ask("add") == 101
    until(lambda: site.page.words[SENT] == 5)
    assert (site.page.words[STARTED], site.page.words[FINISHED]) == (5, 5)


def test_a_result_leaves_while_the_next_call_runs_when_it_is_asked_for(make: Make, tmp_path: Path) -> None:
    site = make().create(Counter).ready()
    quick, slow = site.calls("add", [((), {}), ((), {})])[0], site.call("wait_for", str(tmp_path / "gate"))
    until(lambda: site.page.words[STARTED] == 4)
    site.page.words[FLUSH] += 1
    site.interrupt(0)
    assert site.value(quick) == 1
    (tmp_path / "gate").touch()
    site.value(slow)


def test_thousands_of_calls_in_a_row_come_back_in_order(make: Make) -> None:
    site = make().create(Counter).ready()
    ids = [task_id for _ in range(20) for task_id in site.calls("add", [((), {})] * 100)]
    assert [site.value(task_id) for task_id in ids] == list(range(1, 2001))
    assert site.results_seen == ids


def test_the_end_drops_what_waits_closes_and_deletes(make: Make, tmp_path: Path) -> None:
    site = make().create(Counter).ready()
    site.call("wait_for", str(tmp_path / "never"))
    dropped = site.call("add")
    until(lambda: site.page.words[STARTED] == 2)
    site.end()
    site.interrupt(2)
    assert site.ended() == (Status.CANCELLED, {"reason": "ended"})
    assert dropped not in site.results_seen
    assert site.said() == "closed at 0\ndeleted\n"


def test_an_end_that_nothing_interrupts_lets_the_running_call_finish(make: Make, tmp_path: Path) -> None:
    site = make().create(Counter).ready()
    running, dropped = site.call("wait_for", str(tmp_path / "gate")), site.call("add")
    until(lambda: site.page.words[STARTED] == 2)
    site.end()
    (tmp_path / "gate").touch()
    assert site.ended()[0] == Status.CANCELLED
    assert site.value(running) == str(tmp_path / "gate")
    assert dropped not in site.results_seen


def test_a_context_manager_is_left_at_the_end(make: Make) -> None:
    class Managed:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *args: object) -> None:
            print("left with", args)

    site = make().create(Managed).ready()
    site.end()
    site.ended()
    assert site.said() == "left with (None, None, None)\n"


def test_a_coroutine_is_awaited_at_the_end_and_as_a_result(make: Make) -> None:
    class Late:
        async def close(self) -> None:
            print("closed")

        def work(self) -> Any:
            async def inside() -> int:
                return 7

            return inside()

    site = make().create(Late).ready()
    assert site.page.words[CONCURRENT] == 0, "an asynchronous close alone makes no loop"
    assert site.ask("work") == 7
    site.end()
    site.ended()
    assert site.said() == "closed\n"


def test_what_close_raises_is_said_on_standard_error(make: Make) -> None:
    class Stubborn:
        def close(self) -> None:
            raise RuntimeError("not yet")

    site = make().create(Stubborn).ready()
    site.end()
    assert site.ended()[0] == Status.CANCELLED
    assert "Stubborn failed while it was closed" in (said := site.complained())
    assert "RuntimeError: not yet" in said


def test_an_actor_ends_itself(make: Make) -> None:
    site = make().create(Leaving, 3).ready()
    before, leaving, after = site.call("add"), site.call("leave"), site.call("add")
    status, payload = site.ended()
    assert (status, values.loads(payload)) == (Status.OK, None)
    assert [site.value(before), site.value(leaving)] == [4, None]
    assert after not in site.results_seen
    assert site.said() == "closed at 4\ndeleted\n"


def test_only_an_actor_can_end_itself() -> None:
    from gpumesh.errors import MeshError

    with pytest.raises(MeshError, match="holds none"):
        exit_actor()


def test_calls_may_ask_to_be_retried_on_some_errors(make: Make) -> None:
    site = make().create(Counter).ready()
    for error, status in ((ConnectionResetError("x"), Status.RETRYABLE), (ValueError("x"), Status.RAISED)):
        outcome = site.outcome(site.call("fail", error, retry_on=(ConnectionError, KeyError)))
        assert (outcome[0], type(load_exception(outcome[1]))) == (status, type(error))


def test_calls_that_raise_leave_nothing_for_the_collector(make: Make) -> None:
    site = make().create(Counter).ready()
    site.ask("garbage")
    site.outcome(site.calls("fail", [((ValueError("no"),), {})] * 200)[-1])
    site.outcome(site.call("nowhere"))
    assert site.ask("garbage") < 50


def test_large_arguments_and_results_go_through_the_store(make: Make) -> None:
    class Keeper:
        def __init__(self, data: bytearray) -> None:
            self.data = data

        def head(self, data: bytearray, count: int) -> bytes:
            return bytes(self.data[:count] + data[:count])

        def all(self) -> bytearray:
            return self.data

    site = make()
    own = site.stored(bytearray(b"a" * 100_000))
    site.create_with(Keeper, Bundle(values.dumps_call((None,), {}), ((0, own),))).ready()
    other = site.stored(bytearray(b"b" * 100_000))
    (task_id,) = site.calls_of("head", [Bundle(values.dumps_call((None, 3), {}), ((0, other),))])
    assert site.value(task_id) == b"aaabbb"
    assert site.ask("all") == b"a" * 100_000
    assert site.pins[other.oid] == 0, "it was let go of"


def test_the_process_ends_with_its_agent(make: Make) -> None:
    site = make().create(Counter).ready()
    site.hang_up()
    assert site.exit_code() == 0
    assert site.said() == "closed at 0\ndeleted\n"


def test_a_generator_method_streams(make: Make) -> None:
    class Counting:
        def to(self, end: int) -> Iterator[int]:
            yield from range(end)
            return "the end"  # type: ignore[return-value]

    site = make().create(Counting).ready()
    task_id = site.call("to", 5, is_stream=True)
    assert site.value(task_id) == "the end"
    assert site.streams[task_id] == [0, 1, 2, 3, 4]


def test_what_has_returned_is_not_lost_when_the_next_call_takes_the_process_down(make: Make) -> None:
    class Fragile:
        def work(self, number: int) -> int:
            if number == 10:
                os._exit(3)
            return number

    site = make().create(Fragile).ready()
    ids = site.calls("work", [((number,), {}) for number in range(11)])
    while site.receive():
        pass
    assert site.exit_code() == 3
    held = {task_id: values.loads(payload) for task_id, _, status, payload, _ in site.page.held() if status == Status.OK}
    known = {task_id: site.value(task_id) for task_id in site.results_seen}
    assert {**known, **held} == {task_id: number for number, task_id in enumerate(ids[:10])}
    assert held, "the last results waited for company"


def test_the_page_tells_that_something_was_written(make: Make) -> None:
    class Talking:
        def say(self, text: str) -> None:
            print(text)

    site = make().create(Talking).ready()
    before = site.page.words[WRITTEN]
    site.ask("say", "")
    assert site.page.words[WRITTEN] > before
    now = site.page.words[WRITTEN]
    site.ask("__ready__")
    assert site.page.words[WRITTEN] == now
