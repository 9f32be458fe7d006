"""`as_completed` and `wait` over mesh futures, in which the waiting thread does the socket's work itself."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Set

from gpumesh.client.futures import MeshFuture
from gpumesh.model.records import NamedTuple


class DoneAndNotDone(NamedTuple):
    """What `wait` returns."""

    done: Set[Any]
    not_done: Set[Any]


class _Gathering:
    """Collects futures as they end, in that order. Speaks the standard library's protocol for waiters."""

    def __init__(self) -> None:
        self.ended: Deque[Any] = deque()
        self.has_error = False
        self._condition = threading.Condition()
        self._is_waited_for = False
        self._watched: Dict[Any, None] = {}
        self._sessions: Dict[int, Any] = {}
        self._has_strangers = False

    def watch(self, futures: Iterable[Any]) -> List[Any]:
        """Start watching; returns those that have ended already."""
        ended: List[Any] = []
        session = None
        for future in futures:
            if type(future) is MeshFuture:
                if not future.watch(self):
                    ended.append(future)
                    continue
                if future.session is not session:
                    session = future.session
                    self._sessions[id(session)] = session
            else:
                with future._condition:
                    if future.done():
                        ended.append(future)
                        continue
                    future._waiters.append(self)
                self._has_strangers = True
            self._watched[future] = None
        return ended

    def unwatch(self) -> None:
        """Leave no trace at futures that go on."""
        for future in self._watched:
            if type(future) is MeshFuture:
                future.unwatch(self)
            else:
                with future._condition:
                    if self in future._waiters:
                        future._waiters.remove(self)

    def take(self) -> Any:
        """The next that has ended; forgotten here."""
        future = self.ended.popleft()
        self._watched.pop(future, None)
        return future

    def wait_until(self, done: Callable[[], bool], timeout: Optional[float]) -> bool:
        """Wait for `done()`, doing the socket's work if one session's futures are all that is waited for."""
        sessions = list(self._sessions.values())
        if len(sessions) == 1 and not self._has_strangers:
            return bool(sessions[0].drive_until(done, self._sleep, timeout))
        for session in sessions:
            session.flush()
        if any(session.slot is not None for session in sessions):
            from gpumesh.client.slots import Blocked

            with Blocked(sessions), self._sleep():
                return self._condition.wait_for(done, timeout)
        with self._sleep():
            return self._condition.wait_for(done, timeout)

    def _sleep(self) -> threading.Condition:
        self._is_waited_for = True
        return self._condition

    def _add(self, future: Any) -> None:
        self.ended.append(future)
        if self._is_waited_for:
            with self._condition:
                self._condition.notify_all()

    add_result = _add
    add_cancelled = _add

    def add_exception(self, future: Any) -> None:
        """One ended with an exception."""
        self.has_error = True
        self._add(future)


def as_completed(fs: Any, timeout: Optional[float] = None) -> Iterator[Any]:
    """Futures in the order in which they end.

    Args:
        fs: Futures of the mesh or the standard library, mixed as you like; or the stream that `.map` returned.
        timeout: Seconds for the whole iteration.

    Raises:
        TimeoutError: Not all had ended in time.
    """
    if hasattr(fs, "as_completed"):
        stream: Iterator[Any] = fs.as_completed() if timeout is None else fs.as_completed(timeout=timeout)
        return stream
    return _as_completed(list(dict.fromkeys(fs)), timeout)


def _as_completed(futures: List[Any], timeout: Optional[float]) -> Iterator[Any]:
    deadline = None if timeout is None else time.monotonic() + timeout
    total = len(futures)
    gathering = _Gathering()
    try:
        gathering.ended.extend(gathering.watch(futures))
        del futures
        left = total
        while True:
            while gathering.ended:
                left -= 1
                yield gathering.take()
            if left == 0:
                return
            remaining = None if deadline is None else deadline - time.monotonic()
            if not gathering.wait_until(lambda: bool(gathering.ended), remaining):
                raise FutureTimeoutError(f"{left} of {total} futures are not done after {timeout:g} s; their tasks go on")
    finally:
        gathering.unwatch()


def _has_failed(future: Any) -> bool:
    if future.cancelled():
        return False
    return future.has_failed if type(future) is MeshFuture else future.exception() is not None


def wait(fs: Any, timeout: Optional[float] = None, return_when: str = ALL_COMPLETED) -> DoneAndNotDone:
    """Wait for futures; the same as `concurrent.futures.wait`.

    Args:
        fs: Futures of the mesh or the standard library; or the stream that `.map` returned.
        timeout: Seconds; afterwards what is not done is returned as such.
        return_when: ALL_COMPLETED, FIRST_COMPLETED or FIRST_EXCEPTION.

    Returns:
        Two sets, `done` and `not_done`.
    """
    if return_when not in (ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION):
        raise ValueError(f"return_when={return_when!r} must be ALL_COMPLETED, FIRST_COMPLETED or FIRST_EXCEPTION")
    futures = set(fs.futures if hasattr(fs, "as_completed") else fs)
    gathering = _Gathering()
    try:
        ended = gathering.watch(futures)
        left = len(futures) - len(ended)
        if return_when == FIRST_COMPLETED:
            left = 0 if ended else min(left, 1)
        stops_at_error = return_when == FIRST_EXCEPTION
        if stops_at_error and any(map(_has_failed, ended)):
            left = 0
        if left:
            gathering.wait_until(lambda: len(gathering.ended) >= left or (stops_at_error and gathering.has_error), timeout)
    finally:
        gathering.unwatch()
    done = {future for future in futures if future.done()}
    return DoneAndNotDone(done, futures - done)
