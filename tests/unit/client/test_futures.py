"""MeshFuture against the semantics of concurrent.futures, without a socket."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import sys
import threading
from typing import Any, Callable, List, Optional

import pytest

from gpumesh.client.channel import SpecHandle
from gpumesh.client.futures import MeshFuture
from gpumesh.client.waiting import as_completed, wait
from gpumesh.errors import RemoteTaskError, SerializationError, TaskCancelledError, WorkerCrashedError
from gpumesh.model.outcomes import Status
from gpumesh.model.tasks import TaskSpec
from gpumesh.serialization.exceptions import dump_exception
from gpumesh.serialization.values import dumps


class NoIo:
    """A session without a mesh: whoever waits, waits for the condition."""

    slot = None

    def __init__(self) -> None:
        self.cancelled: List[int] = []

    def drive_until(self, done: Callable[[], bool], condition: Any, timeout: Optional[float]) -> bool:
        made = condition if isinstance(condition, threading.Condition) else condition()
        with made:
            return bool(made.wait_for(done, timeout))

    def cancel(self, task_ids: List[int]) -> None:
        self.cancelled.extend(task_ids)

    def flush(self) -> None:
        pass


def make(task_id: int = 7) -> MeshFuture:
    future = MeshFuture(SpecHandle(1, TaskSpec(b"d" * 16, "work"), None, NoIo()))
    future.task_id = task_id
    return future


def finish(future: MeshFuture, value: Any = None, *, status: int = Status.OK, payload: Any = None) -> None:
    future.task_ended(future.task_id, int(status), dumps(value) if payload is None else payload, 0.5, "w1")


def test_a_future_has_its_value_worker_and_run_time_when_its_task_ends() -> None:
    future = make()
    assert not future.done()

    finish(future, {"a": 1})

    assert future.done()
    assert future.result() == {"a": 1}
    assert future.result() is future.result()
    assert future.exception() is None
    assert (future.worker, future.elapsed, future.name, future.task_id) == ("w1", 0.5, "work", 7)


def test_a_pending_future_is_small() -> None:
    future = make()
    assert not hasattr(future, "__dict__") or not future.__dict__
    assert sys.getsizeof(future) <= 160


def test_a_timeout_of_result_says_that_the_task_goes_on() -> None:
    with pytest.raises(concurrent.futures.TimeoutError, match="the task goes on"):
        make().result(timeout=0.01)
    with pytest.raises(concurrent.futures.TimeoutError, match="t-00000000-7"):
        make().exception(timeout=0.01)


def test_an_exception_of_the_function_comes_back_as_its_own_type() -> None:
    future = make()

    finish(future, status=Status.RAISED, payload=dump_exception(KeyError("k")))

    error = future.exception()
    assert type(error) is KeyError
    with pytest.raises(KeyError) as caught:
        future.result()
    assert caught.value is error
    assert caught.value.__cause__ is not None


def test_a_value_that_cannot_be_rebuilt_is_an_error_of_its_future() -> None:
    future = make()

    finish(future, payload=b"\x80\x05not a pickle")

    assert isinstance(future.exception(), SerializationError)
    with pytest.raises(SerializationError, match="cannot be rebuilt here"):
        future.result()


def test_a_crash_tells_where_and_how() -> None:
    future = make()

    finish(future, status=Status.CRASHED, payload={"worker": "pc1", "exit": -9, "reason": "", "stderr": "boom\n"})

    with pytest.raises(WorkerCrashedError, match=r"(?s)work.*pc1.*SIGKILL.*out of memory.*boom") as caught:
        future.result()
    assert caught.value.attempts == [{"worker": "pc1", "status": 3, "exit": -9, "reason": "", "stderr": "boom\n"}]


def test_an_error_made_on_this_side_is_raised_as_it_is() -> None:
    future, error = make(), RemoteTaskError("x")
    finish(future, status=Status.LOST, payload=error)
    assert future.exception() is error


def test_cancel_is_final_and_a_late_result_is_dropped() -> None:
    future = make()
    told: List[Any] = []
    future.add_done_callback(told.append)

    assert future.cancel()
    finish(future, 1)

    assert future.cancelled()
    assert future.done()
    assert future.session.cancelled == [7]
    assert told == [future]
    assert future.cancel()
    assert future.session.cancelled == [7]
    with pytest.raises(TaskCancelledError):
        future.result()
    with pytest.raises(concurrent.futures.CancelledError):
        future.exception()


def test_a_finished_future_cannot_be_cancelled() -> None:
    future = make()
    finish(future, 1)
    assert not future.cancel()
    assert not future.cancelled()
    assert future.result() == 1


def test_a_task_cancelled_by_somebody_else_reads_as_cancelled() -> None:
    future = make()
    finish(future, status=Status.CANCELLED, payload={"reason": ""})
    assert future.cancelled()


def test_callbacks_are_called_once_each_and_their_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    future = make()
    told: List[Any] = []
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(told.append)

    finish(future, 1)
    future.add_done_callback(told.append)

    assert told == [future, future]
    assert "ZeroDivisionError" in caplog.text


def test_a_thread_that_waits_is_woken() -> None:
    future = make()
    results: List[Any] = []
    thread = threading.Thread(target=lambda: results.append(future.result(10)))
    thread.start()
    finish(future, 5)
    thread.join(10)
    assert results == [5]


@pytest.mark.parametrize("gather", [concurrent.futures.as_completed, as_completed])
def test_as_completed_mixes_mesh_futures_with_the_standard_librarys(gather: Any) -> None:
    futures = [make(number) for number in range(4)]
    stranger: concurrent.futures.Future[int] = concurrent.futures.Future()
    finish(futures[2], 2)

    def work() -> None:
        finish(futures[0], 0)
        stranger.set_result(9)
        futures[3].cancel()
        finish(futures[1], status=Status.RAISED, payload=dump_exception(ValueError("no")))

    thread = threading.Thread(target=work)
    iterator = gather([*futures, stranger, futures[0]], timeout=10)
    first = next(iterator)
    thread.start()
    rest = list(iterator)
    thread.join(10)

    assert first is futures[2]
    assert set(rest) == {futures[0], futures[1], futures[3], stranger}
    assert len(rest) == 4
    assert all(not future._waiters and not future._watched.gatherings for future in futures)


@pytest.mark.parametrize("gather", [concurrent.futures.as_completed, as_completed])
def test_as_completed_gives_up_in_time_and_leaves_no_trace(gather: Any) -> None:
    futures = [make(1), make(2)]
    finish(futures[0], 1)
    with pytest.raises(concurrent.futures.TimeoutError):
        list(gather(futures, timeout=0.02))
    assert all(not future._waiters and not future._watched.gatherings for future in futures)


@pytest.mark.parametrize("wait_for", [concurrent.futures.wait, wait])
def test_wait_knows_three_ways_to_be_done(wait_for: Any) -> None:
    futures = [make(number) for number in range(3)]
    assert wait_for(futures, timeout=0.01) == (set(), set(futures))

    finish(futures[0], 1)
    assert wait_for(futures, return_when="FIRST_COMPLETED") == ({futures[0]}, set(futures[1:]))

    finish(futures[1], status=Status.RAISED, payload=dump_exception(ValueError("no")))
    done, not_done = wait_for(futures, return_when="FIRST_EXCEPTION")
    assert (done, not_done) == (set(futures[:2]), {futures[2]})

    thread = threading.Thread(target=lambda: finish(futures[2], 2))
    thread.start()
    done, not_done = wait_for(futures)
    thread.join(10)
    assert (done, not_done) == (set(futures), set())
    with pytest.raises(ValueError, match="return_when|return condition"):
        wait_for([make()], return_when="SOMETIMES")


def test_many_futures_and_threads_meet_in_as_completed_without_loss() -> None:
    def finish_all(futures: List[MeshFuture]) -> None:
        for future in futures:
            finish(future, 1)

    for _ in range(20):
        futures = [make(number) for number in range(50)]
        threads = [threading.Thread(target=finish_all, args=(futures[part::2],)) for part in range(2)]
        for thread in threads:
            thread.start()
        assert set(concurrent.futures.as_completed(futures, timeout=10)) == set(futures)
        for thread in threads:
            thread.join(10)


def test_await_gives_the_value_in_any_loop() -> None:
    async def main() -> List[Any]:
        futures = [make(number) for number in range(3)]
        finish(futures[0], 0)
        thread = threading.Thread(target=lambda: [finish(future, future.task_id) for future in futures[1:]])
        thread.start()
        values = await asyncio.wait_for(asyncio.gather(*futures), 10)
        thread.join(10)
        return list(values)

    assert asyncio.run(main()) == [0, 1, 2]


def test_await_works_under_uvloop_and_wrap_future() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> Any:
        future, wrapped = make(), make()
        thread = threading.Thread(target=lambda: (finish(future, 3), finish(wrapped, 4)))
        wrapper = asyncio.wrap_future(wrapped)
        thread.start()
        values = await future, await wrapper
        thread.join(10)
        return values

    loop = uvloop.new_event_loop()
    try:
        assert loop.run_until_complete(main()) == (3, 4)
    finally:
        loop.close()


def test_cancelling_the_awaiting_task_cancels_the_future() -> None:
    async def main() -> MeshFuture:
        future = make()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(future), 0.01)
        return future

    assert asyncio.run(main()).cancelled()


def test_a_stop_iteration_of_a_task_does_not_stall_its_awaiter() -> None:
    async def main() -> None:
        future = make()
        finish(future, status=Status.RAISED, payload=dump_exception(StopIteration(1)))
        await future

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(main())


def test_a_future_does_not_travel_inside_a_value() -> None:
    with pytest.raises(SerializationError, match="pass the future itself"):
        pickle.dumps([make()])


def test_repr_says_how_it_stands() -> None:
    future = make()
    assert repr(future) == "<MeshFuture t-00000000-7 work pending>"
    finish(future, 1)
    assert repr(future) == "<MeshFuture t-00000000-7 work finished in 0.5 s on w1>"


def test_only_the_mesh_sets_results() -> None:
    for change in (
        lambda f: f.set_result(1),
        lambda f: f.set_exception(ValueError()),
        lambda f: f.set_running_or_notify_cancel(),
    ):
        with pytest.raises(concurrent.futures.InvalidStateError):
            change(make())
