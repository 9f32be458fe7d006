"""ResultStream and what reads its input, without a mesh."""

from __future__ import annotations

import asyncio
import collections
import gc
import itertools
import pickle
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Iterator, List, NamedTuple

import pytest

from gpumesh import accelerate
from gpumesh.client import feeding
from gpumesh.client.futures import MeshFuture
from gpumesh.client.streams import ResultStream
from gpumesh.client.waiting import as_completed, wait
from gpumesh.errors import MeshClosedError, MeshError, SerializationError, TaskCancelledError
from tests.unit.client.fake_session import FakeMesh, FakeSession, until


def identity(value: Any) -> Any:
    return value


def whole(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def fail_at_3(value: int) -> int:
    if value == 3:
        raise ValueError(f"no {value}")
    return value


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def held() -> Iterator[FakeSession]:
    """Tasks end only when the test runs them."""
    session = FakeSession(runs=False)
    yield session
    session.error = MeshClosedError("over")  # Feeder threads that wait for results end.
    for task_id, entry in list(session.pending.items()):
        entry[2].task_ended(task_id, 7, MeshClosedError("over"), 0.0, "")


def mapping(session: FakeSession, function: Any, items: Any, **options: Any) -> ResultStream:
    return accelerate(function).on(FakeMesh(session)).map(items, **options)  # type: ignore[arg-type]


class Sized:
    """An input that says one length and has another."""

    def __init__(self, said: int, has: int) -> None:
        self.said = said
        self.has = has

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.has))


# --- items and order


def test_an_item_is_keywords_positions_or_the_argument(session: FakeSession) -> None:
    class Point(NamedTuple):
        x: int
        y: int

    items = [{"a": 1}, (1, 2), [3, 4], 5, None, collections.OrderedDict(b=2), Point(6, 7), ()]

    assert mapping(session, whole, items) == [
        ((), {"a": 1}), ((1, 2), {}), (([3, 4],), {}), ((5,), {}), ((None,), {}), ((), {"b": 2}), ((6, 7), {}), ((), {}),
    ]  # fmt: skip


def test_several_inputs_are_zipped(session: FakeSession) -> None:
    stream = accelerate(whole).on(FakeMesh(session)).map([1, 2, 3], "ab")  # type: ignore[arg-type]

    assert [args for args, _ in stream] == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 2048, 2049, 11_000])
@pytest.mark.parametrize("kind", [list, tuple, range, iter, dict.fromkeys])
def test_values_come_in_input_order(session: FakeSession, count: int, kind: Any) -> None:
    items = range(count) if kind is range else kind(range(count))

    assert list(mapping(session, identity, items)) == list(range(count))


def test_values_come_in_input_order_whatever_ends_first(held: FakeSession) -> None:
    stream = mapping(held, identity, range(100))
    held.run(last_first=True)

    assert list(stream) == list(range(100))
    assert [future.index for future in stream.as_completed()] == list(range(99, -1, -1))


def test_a_small_map_is_submitted_before_map_returns(held: FakeSession) -> None:
    mapping(held, identity, range(2000))

    assert len(held.pending) == 2000
    assert held.batches == [8, 64, 512, 512, 512, 392]


def test_the_list_may_change_after_the_call(session: FakeSession) -> None:
    items = list(range(5000))
    stream = mapping(session, identity, items)
    items.clear()

    assert list(stream) == list(range(5000))


def test_inputs_whose_length_is_wrong(session: FakeSession) -> None:
    shorter = mapping(session, identity, Sized(10, 7))
    longer = mapping(session, identity, Sized(7, 10))

    assert list(shorter) == list(range(7))
    assert len(shorter) == 7
    assert list(longer) == list(range(10))
    assert len(longer) == 10


# --- as a list


def test_it_behaves_as_the_list_of_results(session: FakeSession) -> None:
    stream = mapping(session, identity, [5, 6, 7])

    assert stream == [5, 6, 7]
    assert stream != [5, 6]
    assert stream == [5, 6, 7]
    assert stream == mapping(session, identity, (5, 6, 7))
    assert (len(stream), stream[0], stream[-1], stream[1:], stream[::-1]) == (3, 5, 7, [6, 7], [7, 6, 5])
    assert list(stream) == list(stream) == stream.result() == list(reversed(list(reversed(stream))))
    assert 6 in stream
    assert 8 not in stream
    assert stream
    assert not mapping(session, identity, [])
    assert [future.result() for future in stream.futures] == [5, 6, 7]
    with pytest.raises(IndexError, match="there are 3 results, none at 3"):
        stream[3]


def test_the_same_object_each_time(session: FakeSession) -> None:
    stream = mapping(session, identity, [[1], [2]])

    assert stream[0] is stream[0]
    assert stream[1] is list(stream)[1]
    assert stream.futures[1].result() is stream[1]


def test_without_a_length_it_is_read_once(session: FakeSession) -> None:
    stream = mapping(session, identity, iter(range(4)))

    assert next(iter(stream)) == 0
    assert list(stream) == [1, 2, 3]
    assert list(stream) == []
    assert stream
    for use in (len, lambda stream: stream[0], lambda stream: stream.futures):
        with pytest.raises(TypeError, match="needs an input with a length"):
            use(stream)
    assert (stream == [0, 1, 2, 3]) is False


def test_two_threads_share_a_stream(held: FakeSession) -> None:
    stream = mapping(held, identity, range(3000))
    found: List[List[int]] = []
    threads = [threading.Thread(target=lambda: found.append(list(stream))) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        held.run()
        time.sleep(0.001)

    assert found == [list(range(3000))] * 3


# --- finishing order


@pytest.mark.parametrize("kind", [list, iter])
def test_as_completed_gives_finishing_order(held: FakeSession, kind: Any) -> None:
    stream = mapping(held, identity, kind([10, 11, 12]))
    held.wait_for_pending(3)
    found = stream.as_completed()
    order = []
    for place in (1, 2, 0):
        held.end(sorted(held.pending)[place if place < len(held.pending) else -1])
        future = next(found)
        order.append((future.index, future.result(), future.worker, future.elapsed, type(future)))

    assert order == [
        (1, 11, "w1", 0.25, MeshFuture),
        (2, 12, "w1", 0.25, MeshFuture),
        (0, 10, "w1", 0.25, MeshFuture),
    ]
    assert next(found, None) is None


@pytest.mark.parametrize("kind", [list, iter])
def test_the_functions_of_the_package_take_streams(session: FakeSession, kind: Any) -> None:
    assert {future.result() for future in as_completed(mapping(session, identity, kind(range(5000))))} == set(range(5000))


def test_wait_takes_streams(session: FakeSession) -> None:
    assert len(wait(mapping(session, identity, [1, 2])).done) == 2


def test_both_orders_of_one_input_without_a_length(held: FakeSession) -> None:
    stream = mapping(held, identity, iter(range(5)))
    held.wait_for_pending(5)
    for task_id in (sorted(held.pending)[3], sorted(held.pending)[1]):
        held.end(task_id)

    first = [future.index for future in itertools.islice(stream.as_completed(), 2)]
    held.run()

    assert sorted(first) == [1, 3]
    assert list(stream) == [0, 2, 4]


def test_futures_of_tasks_that_are_not_submitted_yet(held: FakeSession) -> None:
    stream = mapping(held, identity, range(20_000), window=100)
    futures = stream.futures
    last, cancelled = futures[-1], futures[-2]
    assert cancelled.cancel()
    done = []
    last.add_done_callback(lambda future: done.append(future.result()))
    held.runs = True
    held.run()

    assert last.result() == 19_999
    assert done == [19_999]
    assert last.task_id != 0
    assert stream[-1] == 19_999
    with pytest.raises(TaskCancelledError):
        stream[-2]


# --- failures


def test_the_first_failure_raises_where_it_is_met(session: FakeSession) -> None:
    stream = mapping(session, fail_at_3, range(5))
    found = iter(stream)

    assert [next(found), next(found), next(found)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no 3"):
        next(found)
    with pytest.raises(ValueError, match="no 3"):
        stream.result()
    assert stream[4] == 4
    assert repr(stream) == "<ResultStream of fail_at_3: 4 done, 1 failed, 0 pending of 5>"


@pytest.mark.parametrize("kind", [list, iter])
def test_exceptions_as_values(session: FakeSession, kind: Any) -> None:
    values = list(mapping(session, fail_at_3, kind(range(5)), return_exceptions=True))

    assert values[:3] + values[4:] == [0, 1, 2, 4]
    assert isinstance(values[3], ValueError)


def test_after_a_failure_the_rest_of_an_unsized_input_is_still_there(session: FakeSession) -> None:
    stream = mapping(session, fail_at_3, iter(range(5)))

    with pytest.raises(ValueError, match="no 3"):
        list(stream)
    assert list(stream) == [4]


@pytest.mark.parametrize("kind", [list, iter])
def test_an_item_that_cannot_travel_fails_at_its_place(session: FakeSession, kind: Any) -> None:
    items = [0, 1, {"value": threading.Lock()}, 3]
    stream = mapping(session, identity, kind(items), return_exceptions=True)

    values = list(stream)

    assert values[:2] + values[3:] == [0, 1, 3]
    assert isinstance(values[2], SerializationError)
    assert "value" in str(values[2])


@pytest.mark.parametrize("count", [3, 3000])
@pytest.mark.parametrize("has_length", [True, False])
def test_an_error_of_the_input_is_raised_at_its_place(session: FakeSession, count: int, has_length: bool) -> None:
    class Broken(Sized):
        def __iter__(self) -> Iterator[int]:
            yield from range(self.has)
            raise OSError("disk")

    items = Broken(5000, count)
    stream = mapping(session, identity, items if has_length else iter(items))
    found = []

    with pytest.raises(OSError, match="disk"):
        found.extend(stream)
    assert found == list(range(count))


def test_an_error_of_the_input_comes_after_all_that_completed(session: FakeSession) -> None:
    def broken() -> Iterator[int]:
        yield from range(3)
        raise OSError("disk")

    found = []
    with pytest.raises(OSError, match="disk"):
        for future in mapping(session, identity, broken()).as_completed():
            found.append(future.index)
    assert sorted(found) == [0, 1, 2]


def test_a_mesh_that_refuses_is_told_by_map(session: FakeSession) -> None:
    session.error = MeshError("refused")

    with pytest.raises(MeshError, match="refused"):
        mapping(session, identity, [1, 2])
    with pytest.raises(MeshError, match="refused"):
        list(mapping(session, identity, iter([1, 2])))


def test_a_mesh_that_is_lost_on_the_way_ends_the_stream(held: FakeSession) -> None:
    stream = mapping(held, identity, range(20_000), window=1000)
    futures = stream.futures
    held.error = MeshError("lost")
    held.run()

    with pytest.raises(MeshError, match="lost"):
        list(stream)
    with pytest.raises(MeshError, match="lost"):
        futures[-1].result(5)


def test_time_is_up(held: FakeSession) -> None:
    for stream in (mapping(held, identity, [1]), mapping(held, identity, iter([1]))):
        with pytest.raises(FutureTimeoutError, match=r"result 0 of the map of identity is not there after 0\.01 s"):
            stream.result(timeout=0.01)
        with pytest.raises(FutureTimeoutError, match=r"is not done after 0\.01 s"):
            list(stream.as_completed(timeout=0.01))


# --- windows


@pytest.mark.parametrize("window", [1, 2, 10, 3000])
def test_an_endless_input_is_read_no_further_than_the_window(held: FakeSession, window: int) -> None:
    read = itertools.count()
    stream = mapping(held, identity, read, window=window)
    assert held.wait_for_pending(window)
    held.run()
    found = iter(stream)

    assert next(found) == 0
    assert until(lambda: True)
    assert held.most_pending <= window
    assert next(read) <= 2 * window + 1
    del found, stream


def test_a_sized_input_is_read_no_further_than_the_window_ahead_of_what_ended(held: FakeSession) -> None:
    stream = mapping(held, identity, range(50_000), window=1000)
    found = 0
    while found < 50_000:
        assert held.wait_for_pending(1)
        assert len(held.pending) <= 1000
        held.run()
        while found < 50_000 and stream._feed.slots[found] is not None:
            assert stream[found] == found
            found += 1

    assert held.most_pending <= 1000


def test_nobody_needs_to_wait_for_a_large_map_to_go_on(session: FakeSession) -> None:
    stream = mapping(session, identity, range(50_000))

    assert until(stream.done)


def test_large_items_narrow_the_window(held: FakeSession) -> None:
    item = "x" * 4_000_000
    stream = mapping(held, len, (item for _ in range(100)))

    assert held.wait_for_pending(feeding.MIN_WINDOW_ITEMS)
    assert not held.wait_for_pending(40, timeout=0.3)
    held.runs = True
    held.run()
    assert list(stream) == [4_000_000] * 100


def test_large_sized_inputs_are_not_pickled_all_at_once(held: FakeSession) -> None:
    stream = mapping(held, len, ["x" * 4_000_000] * 100)

    assert len(held.pending) < 40
    held.runs = True
    held.run()
    assert list(stream) == [4_000_000] * 100


def test_taken_results_of_an_unsized_input_are_forgotten(session: FakeSession) -> None:
    stream = mapping(session, identity, iter(range(30_000)))

    for value in stream:
        if value % 1000 == 999:
            assert len(stream._feed.slots) <= 8192
            assert len(stream._feed._runs) <= 2
    assert value == 29_999
    assert not stream._feed.slots


def test_an_input_that_blocks_holds_nothing_back(session: FakeSession) -> None:
    gate = threading.Event()

    def slow() -> Iterator[int]:
        yield 1
        yield 2
        gate.wait(10)
        yield 3

    found = iter(mapping(session, identity, slow()))

    assert [next(found), next(found)] == [1, 2]
    gate.set()
    assert next(found) == 3
    assert list(found) == []


def test_an_input_may_depend_on_results(session: FakeSession) -> None:
    values: List[int] = [1]

    def loop() -> Iterator[int]:
        for _ in range(20):
            assert until(lambda: bool(values))
            yield values.pop()

    for value in mapping(session, identity, loop()):
        values.append(value + 1)
    assert values == [21]


@pytest.mark.parametrize(("window", "error"), [(0, ValueError), (-3, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_window_without_meaning_is_refused(session: FakeSession, window: Any, error: Any) -> None:
    with pytest.raises(error, match="window="):
        mapping(session, identity, [1], window=window)


# --- ending early


def test_cancel_ends_everything(held: FakeSession) -> None:
    stream = mapping(held, identity, range(20_000), window=1000)
    futures = stream.futures
    held.run(10)
    stream.cancel()

    assert until(stream.done)
    assert stream[9] == 9
    with pytest.raises(TaskCancelledError):
        stream[10]
    assert all(future.cancelled() for future in futures[10:])
    assert not held.pending


def test_leaving_the_with_block_cancels(held: FakeSession) -> None:
    with mapping(held, identity, itertools.count()) as stream:
        held.wait_for_pending(5)

    assert until(lambda: not held.pending)
    assert until(stream.done)


def test_dropping_an_iteration_cancels_the_rest(held: FakeSession) -> None:
    held.runs = True

    assert list(itertools.islice(mapping(held, identity, itertools.count()), 5)) == [0, 1, 2, 3, 4]

    held.runs = False
    gc.collect()
    assert until(lambda: not [thread for thread in threading.enumerate() if thread.name == "gpumesh-feeder"])
    assert until(lambda: not held.pending)  # What the feeder submitted last is cancelled by another thread.

    stream = mapping(held, identity, range(10))
    held.run(1)
    for _ in stream:
        break
    del stream
    gc.collect()
    assert until(lambda: len(held.cancelled) >= 9)
    assert not held.pending


def test_a_stream_that_nobody_looked_at_runs_on(held: FakeSession) -> None:
    mapping(held, identity, range(10))
    gc.collect()

    assert len(held.pending) == 10
    assert not held.cancelled


def test_futures_live_on_without_their_stream(held: FakeSession) -> None:
    futures = mapping(held, identity, range(3)).futures
    gc.collect()
    held.run()

    assert [future.result() for future in futures] == [0, 1, 2]


def test_a_mesh_that_is_closed_ends_the_stream(held: FakeSession) -> None:
    stream = mapping(held, identity, itertools.count())
    held.wait_for_pending(100)
    held.error = MeshClosedError("closed")
    for task_id in list(held.pending):
        held.pending.pop(task_id)[2].task_ended(task_id, 7, MeshClosedError("closed"), 0.0, "")

    with pytest.raises(MeshClosedError):
        list(stream)


# --- futures as items


@pytest.mark.parametrize("kind", [list, iter])
def test_futures_as_items(held: FakeSession, kind: Any) -> None:
    function = accelerate(identity).on(FakeMesh(held))  # type: ignore[arg-type]
    firsts = [function.remote(number) for number in range(3)]
    stream = mapping(held, whole, kind([firsts[0], (firsts[1], 5), {"key": firsts[2]}, 7]))
    assert held.wait_for_pending(7)

    for _ in range(3):
        held.run()

    assert list(stream) == [((0,), {}), ((1, 5), {}), ((), {"key": 2}), ((7,), {})]


def test_cancel_reaches_items_that_wait_for_futures(held: FakeSession) -> None:
    function = accelerate(identity).on(FakeMesh(held))  # type: ignore[arg-type]
    stream = mapping(held, identity, [function.remote(1), 2])
    stream.cancel()
    held.run()

    assert stream.done()
    assert not held.pending


# --- asyncio


@pytest.mark.parametrize("kind", [list, iter])
def test_asyncio(held: FakeSession, kind: Any) -> None:
    async def main() -> Any:
        stream = mapping(held, identity, kind(range(3000)))
        asyncio.get_running_loop().run_in_executor(None, run)
        return [value async for value in stream], await mapping(held, identity, kind(range(5)))

    def run() -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not over.is_set():
            held.run()
            over.wait(0.001)

    over = threading.Event()
    try:
        values, few = asyncio.run(asyncio.wait_for(_then_set(main(), over), 10))
    finally:
        over.set()

    assert values == list(range(3000))
    assert few == list(range(5))


async def _then_set(awaitable: Any, event: threading.Event) -> Any:
    try:
        return await awaitable
    finally:
        event.set()


def test_asyncio_meets_failures(session: FakeSession) -> None:
    async def main() -> Any:
        return [value async for value in mapping(session, fail_at_3, range(5), return_exceptions=True)]

    assert isinstance(asyncio.run(main())[3], ValueError)

    async def fail() -> None:
        await mapping(session, fail_at_3, iter(range(5)))

    with pytest.raises(ValueError, match="no 3"):
        asyncio.run(fail())


# --- for people


def test_repr_counts_and_never_blocks(held: FakeSession) -> None:
    stream = mapping(held, identity, range(3))
    held.run(1)

    assert repr(stream) == "<ResultStream of identity: 1 done, 2 pending of 3>"
    assert stream._repr_html_() == "<code>identity</code>: 1 done, 2 pending of 3"
    endless = mapping(held, identity, itertools.count(), window=2)
    assert held.wait_for_pending(4)
    assert repr(endless) == "<ResultStream of identity: 0 done, 2 pending, input not read to its end>"


def test_a_stream_does_not_travel(session: FakeSession) -> None:
    with pytest.raises(SerializationError, match=r"list\(stream\)"):
        pickle.dumps(mapping(session, identity, [1]))


def test_progress_ends_with_a_line(session: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(mapping(session, identity, range(10), progress=True)) == list(range(10))

    assert capsys.readouterr().err.startswith("identity [########################] 10/10 done, ")


def test_results_as_a_frame(session: FakeSession) -> None:
    pytest.importorskip("pandas")
    from gpumesh.client.frames import results_to_dataframe

    frame = results_to_dataframe(mapping(session, whole, [{"a": 1}]))
    assert frame.columns.tolist() == ["result"]
    frame = results_to_dataframe(mapping(session, identity, [({"a": 1, "b": 2},), ({"a": 3},)]))
    assert frame.to_dict("list")["a"] == [1, 3]
    frame = results_to_dataframe(mapping(session, fail_at_3, [2, 3]).futures)
    assert frame["worker"].tolist() == ["w1", "w1"]
    assert frame["error"].tolist()[1] == "ValueError: no 3"
