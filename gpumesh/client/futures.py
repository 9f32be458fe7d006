"""MeshFuture: the result of one task, as `concurrent.futures` users know it. How tasks travel is the session's matter.

Promises:

1. Semantics of `concurrent.futures.Future`, including the standard library's `wait` and `as_completed`, which reach into
   `_condition`, `_state` and `_waiters`. Both exist only once somebody asks for them, so a pending future is small.
2. A value is fetched and unpickled once, on the first thread that asks for it, never on the thread that received it.
3. Every change of state happens under `_lock` and, if the future's condition exists, under that too (taken first).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, Callable, Generator, List, Optional, Tuple

from gpumesh.client.outcomes import SecondRunError, exception_for
from gpumesh.errors import MeshError, MeshUnavailableError, SerializationError, TaskCancelledError
from gpumesh.model.ids import TaskId, show_task
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Payload
from gpumesh.serialization.values import loads

if TYPE_CHECKING:
    from gpumesh.client.channel import SpecHandle

# The standard library compares with these words.
_PENDING = "PENDING"
_CANCELLED = "CANCELLED_AND_NOTIFIED"
_FINISHED = "FINISHED"

_LOADED_VALUE = -1  # In place of a status: the value is unpickled.
_LOADED_ERROR = -2

_OK = int(Status.OK)
_CANCELLED_STATUS = int(Status.CANCELLED)

_lock = threading.Lock()
_logger = logging.getLogger("gpumesh")


class _Watched:
    """What only a future that somebody watches needs."""

    __slots__ = ("condition", "waiters", "gatherings", "callbacks")

    def __init__(self) -> None:
        self.condition: Optional[threading.Condition] = None
        self.waiters: List[Any] = []  # Of the standard library's protocol: add_result, add_exception, add_cancelled.
        self.gatherings: List[Any] = []  # The same of `client.waiting`, which are let go of at the end.
        self.callbacks: List[Callable[[Any], Any]] = []


class MeshFuture(Future[Any]):
    """The result of one task on the mesh.

    Attributes:
        task_id: The task's number; `gpumesh` shows it as `t-client-sequence`.
        index: Place in the input, for a task of a stream.
        worker: Where it ran; "" until it has ended.
        elapsed: Run time inside the worker's process in seconds; 0 until it has ended.
    """

    __slots__ = ("_state", "_status", "_outcome", "_watched", "_handle", "task_id", "index", "worker", "elapsed")

    def __init__(self, handle: SpecHandle, index: int = 0) -> None:
        # The base class would create a condition and two lists for each future; see the module's promises.
        self._state = _PENDING
        self._status = 0
        self._outcome: Any = None  # The payload as it came (bytes, a StoredValue); once loaded, the value or the exception.
        self._watched: Optional[_Watched] = None
        self._handle = handle
        self.task_id = 0
        self.index = index
        self.worker = ""
        self.elapsed = 0.0

    @property
    def name(self) -> str:
        """The function's name."""
        return self._handle.name

    # --- the end of the task

    def task_ended(self, task_id: int, status: int, payload: Any, seconds: float, worker: str) -> None:
        """The session's word that the task is over; see `client.channel.Sink`."""
        with _lock:
            watched = self._watched
            if watched is None:
                if self._state is not _PENDING:
                    return
                self.task_id = task_id
                self.worker = worker
                self.elapsed = seconds
                self._status = status
                self._outcome = payload
                self._state = _CANCELLED if status == _CANCELLED_STATUS else _FINISHED
                return
        self._end(
            watched, _CANCELLED if status == _CANCELLED_STATUS else _FINISHED, (task_id, status, payload, seconds, worker)
        )

    def _end(self, watched: _Watched, state: str, told: Tuple[int, int, Any, float, str]) -> bool:
        """Enter a final state and tell who watches; False if it had one."""
        while True:
            condition = watched.condition
            if condition is None:
                with _lock:
                    if watched.condition is not None:
                        continue  # It was created this moment: it must be held for the change.
                    waiters, callbacks = self._enter(watched, state, told)
                self._tell(waiters)
            else:
                with condition:
                    with _lock:
                        waiters, callbacks = self._enter(watched, state, told)
                    self._tell(waiters)
                    condition.notify_all()
            break
        if callbacks is None:
            return False
        for callback in callbacks:
            self._call(callback)
        return True

    def _enter(
        self, watched: _Watched, state: str, told: Tuple[int, int, Any, float, str]
    ) -> Tuple[List[Any], Optional[List[Callable[[Any], Any]]]]:
        """The change itself, under `_lock`; who was watching at that moment."""
        if self._state is not _PENDING:
            return [], None
        self.task_id, self._status, self._outcome, self.elapsed, self.worker = told
        self._state = state
        callbacks, watched.callbacks = watched.callbacks, []
        gatherings, watched.gatherings = watched.gatherings, []
        return watched.waiters + gatherings, callbacks

    def _tell(self, waiters: List[Any]) -> None:
        for waiter in waiters:
            if self._state is _CANCELLED:
                waiter.add_cancelled(self)
            elif self._status == _OK:
                waiter.add_result(self)
            else:
                waiter.add_exception(self)

    def _call(self, callback: Callable[[Any], Any]) -> None:
        try:
            callback(self)
        except Exception:  # A user's callback; the standard library logs it as well.
            _logger.exception("a callback of %r raised", self)

    def _watch(self) -> _Watched:
        watched = self._watched
        if watched is None:
            with _lock:
                watched = self._watched
                if watched is None:
                    watched = self._watched = _Watched()
        return watched

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        return self._get_condition()

    def _get_condition(self) -> threading.Condition:
        watched = self._watch()
        condition = watched.condition
        if condition is None:
            with _lock:
                condition = watched.condition
                if condition is None:
                    condition = watched.condition = threading.Condition()
        return condition

    @property
    def _waiters(self) -> List[Any]:  # type: ignore[override]
        watched = self._watch()
        slot = self._handle.session.slot
        if slot is not None and not watched.waiters:
            from gpumesh.client.slots import Waiters

            with _lock:
                if type(watched.waiters) is not Waiters:
                    watched.waiters = Waiters(slot)
        return watched.waiters

    def watch(self, waiter: Any) -> bool:
        """Tell `waiter` (add_result, add_exception, add_cancelled) when this ends; False if it has ended already."""
        watched = self._watch()
        with _lock:
            if self._state is not _PENDING:
                return False
            watched.gatherings.append(waiter)
            return True

    def unwatch(self, waiter: Any) -> None:
        """No longer tell `waiter`."""
        with _lock:
            if self._watched is not None and waiter in self._watched.gatherings:
                self._watched.gatherings.remove(waiter)

    @property
    def session(self) -> Any:
        """The session that it was submitted through."""
        return self._handle.session

    # --- asking

    def done(self) -> bool:
        """Whether the task has ended, in whatever way."""
        return self._state is not _PENDING

    @property
    def has_failed(self) -> bool:
        """Whether it is done, and has no value. Loads nothing, so it does not know whether the value can be rebuilt here."""
        return self._state is not _PENDING and self._status not in (_OK, _LOADED_VALUE)

    @property
    def payload(self) -> Any:
        """The value as it came, bytes or a StoredValue; None if there is none, or it has been loaded."""
        with _lock:
            return self._outcome if self._state is _FINISHED and self._status == _OK else None

    def running(self) -> bool:
        """False: the mesh does not tell each start, and a future that is not done can be cancelled."""
        return False

    def cancelled(self) -> bool:
        """Whether the task was cancelled."""
        return self._state is _CANCELLED

    def cancel(self) -> bool:
        """Cancel the task, also one that runs: its process is interrupted, then killed.

        The future is cancelled at once; a result that was already on its way is dropped.

        Returns:
            False if the task had ended.
        """
        if self._state is _PENDING:
            told: Tuple[int, int, Any, float, str] = (self.task_id, _CANCELLED_STATUS, {}, 0.0, "")
            if self._end(self._watch(), _CANCELLED, told):
                self._handle.session.cancel([self.task_id])
        return self._state is _CANCELLED

    def result(self, timeout: Optional[float] = None) -> Any:
        """The task's value; blocks until it is there.

        Args:
            timeout: Seconds to wait for the task's end, and for a large value to come. It ends the waiting, not the task.

        Raises:
            TimeoutError: Not done in time (`concurrent.futures.TimeoutError`); the task goes on.
            TaskCancelledError: It was cancelled.
            WorkerCrashedError, TaskTimeoutError, NoSuitableWorkerError, ...: It could not be run to its end.
            BaseException: Whatever the function raised, with the remote traceback as its cause.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._state is _PENDING:
            self._wait(timeout)
        if self._status != _LOADED_VALUE:
            self._load(deadline)
        if self._status == _LOADED_VALUE:
            return self._outcome
        raise self._outcome

    def exception(self, timeout: Optional[float] = None) -> Optional[BaseException]:
        """What the task raised, None if it returned; blocks until one is known. `timeout` as for `result`.

        It fetches and rebuilds the value, as that may fail, too.

        Raises:
            TimeoutError: Not done in time.
            TaskCancelledError: It was cancelled.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._state is _PENDING:
            self._wait(timeout)
        self._load(deadline)
        if self._state is _CANCELLED:
            raise self._outcome
        error: Optional[BaseException] = self._outcome if self._status == _LOADED_ERROR else None
        return error

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Call `fn(self)` when the task has ended, on the thread that learns of it; at once if it has. Errors are logged."""
        watched = self._watch()
        with _lock:
            if self._state is _PENDING:
                watched.callbacks.append(fn)
                return
        self._call(fn)

    def _wait(self, timeout: Optional[float]) -> None:
        if not self._handle.session.drive_until(self.done, self._get_condition, timeout):
            raise FutureTimeoutError(
                f"{self._title()} is not done after {timeout:g} s of waiting; the task goes on: ask again later, or cancel() it"
            )

    def _load(self, deadline: Optional[float] = None) -> None:
        """Fetch and unpickle what came, once. The value or the exception is then in `_outcome`.

        Raises:
            TimeoutError: It has not come in time; ask again.
        """
        status, outcome = self._status, self._outcome
        if status in (_LOADED_VALUE, _LOADED_ERROR):
            return
        loaded = _LOADED_ERROR
        value: Any
        if self._state is _CANCELLED:
            value = TaskCancelledError(f"{self._title()} was cancelled")
        elif status == _OK:
            try:
                if type(outcome) is bytes:
                    value = loads(outcome)
                else:
                    value = outcome.load(None if deadline is None else max(0.0, deadline - time.monotonic()))
                loaded = _LOADED_VALUE
            except (FutureTimeoutError, MeshUnavailableError):
                raise  # It may come yet.
            except MemoryError as error:
                value = error
            except SecondRunError as second:
                value = second.error
            except Exception as error:  # noqa: BLE001  # Unpickling runs user code.
                value = self._why_not(error, outcome)
        else:
            value = exception_for(status, outcome, name=self.name, task_id=self.task_id, worker=self.worker)
        with _lock:
            if self._status == status:  # Another thread may have been faster: everybody gets the same object.
                self._outcome = value
                self._status = loaded

    def _why_not(self, error: Exception, outcome: Any) -> BaseException:
        """What to raise instead of a value that could not be loaded."""
        is_ours = isinstance(error, MeshError) and type(outcome) is not bytes
        value: Any = error if is_ours else _cannot_load(self._title(), error)
        if isinstance(error, SerializationError) and error.package:
            from gpumesh.client.versions import tell_of_value

            tell_of_value(value, error, self.session, self.worker)
        return value  # type: ignore[no-any-return]

    def _title(self) -> str:
        return f"task {show_task(TaskId(self.task_id))} ({self.name})"

    # --- asyncio

    def __await__(self) -> Generator[Any, None, Any]:
        """Await it in any asyncio loop. Cancelling the awaiting asyncio task cancels this future."""
        if self._state is _PENDING:
            import asyncio

            loop = asyncio.get_running_loop()
            arrival = loop.create_future()
            self.add_done_callback(lambda _: _arrive(loop, arrival))
            session = self._handle.session
            try:
                if session.slot is None:
                    yield from arrival
                else:
                    from gpumesh.client.slots import arrive

                    yield from arrive(session, arrival).__await__()
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self._status == _OK and type(self._outcome) is not bytes:  # It may have to be fetched: not on the loop's thread.
            import asyncio

            yield from asyncio.get_running_loop().run_in_executor(None, self._load)
        return self.result()

    # --- for the standard library and for people

    def _get_snapshot(self) -> Tuple[bool, bool, Any, Optional[BaseException]]:
        """(done, cancelled, value, exception): asyncio asks for it on Python 3.14."""
        if self._state is not _FINISHED:
            return self.done(), self.cancelled(), None, None
        self._load()
        if self._status == _LOADED_ERROR:
            return True, False, None, self._outcome
        return True, False, self._outcome, None

    def set_running_or_notify_cancel(self) -> bool:
        """Not for a future of the mesh: the mesh decides."""
        raise InvalidStateError("the mesh sets the state of its futures")

    def set_result(self, result: Any) -> None:
        """Not for a future of the mesh: the mesh decides."""
        raise InvalidStateError("the mesh sets the results of its futures")

    def set_exception(self, exception: Optional[BaseException]) -> None:
        """Not for a future of the mesh: the mesh decides."""
        raise InvalidStateError("the mesh sets the results of its futures")

    def __repr__(self) -> str:
        words = {_PENDING: "pending", _CANCELLED: "cancelled"}.get(self._state, "")
        if not words:
            words = "finished" if self._status in (_OK, _LOADED_VALUE) else "failed"
            words += f" in {self.elapsed:.3g} s"
            words += f" on {self.worker}" if self.worker else ""
        return f"<MeshFuture {show_task(TaskId(self.task_id))} {self.name} {words}>"

    def __reduce__(self) -> Any:
        raise SerializationError(
            f"{self!r} cannot travel inside a value; pass the future itself as an argument, or its result()"
        )


def submit_one(session: Any, handle: SpecHandle, payload: Payload) -> MeshFuture:
    """Submit one task and return its future; raises as `Session.submit`."""
    future = MeshFuture(handle)
    future.task_id = session.submit(handle, payload, future)
    return future


def _arrive(loop: Any, arrival: Any) -> None:
    try:
        loop.call_soon_threadsafe(_set_arrived, arrival)
    except RuntimeError:
        pass  # The loop is closed: nobody waits any more.


def _set_arrived(arrival: Any) -> None:
    if not arrival.done():
        arrival.set_result(None)


def _cannot_load(title: str, error: Exception) -> SerializationError:
    failure = SerializationError(
        f"the value of {title} arrived but cannot be rebuilt here: {type(error).__name__}: {error}; is what it needs installed on this machine?"
    )
    failure.__cause__ = error
    return failure


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # In a forked child: another thread of the parent may have held it.


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
