"""What became of each task of a client of the chaos run: it ends once, with what it was submitted for."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from gpumesh.errors import MeshError, WorkerCrashedError

Expected = Callable[[Any, Optional[BaseException]], bool]  # Whether a task may end with this value or error.

SLOWEST = 5  # Tasks that are told of.


class Task:
    """One task on its way, and what is to come of it."""

    __slots__ = ("number", "kind", "future", "task_id", "begun", "expected")

    def __init__(self, number: int, kind: str) -> None:
        self.number = number
        self.kind = kind
        self.future: Any = None
        self.task_id = ""  # Of a job's task.
        self.begun = time.monotonic()
        self.expected: Optional[Expected] = None  # None: its number.

    def may_end_with(self, value: Any, error: Optional[BaseException]) -> bool:
        """Whether this is what it was submitted for."""
        if self.expected is not None:
            return self.expected(value, error)
        return error is None and value == self.number


class Accounts:
    """Every task that was submitted ends here, once."""

    def __init__(self, say: Callable[[Dict[str, Any]], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._pending: Dict[int, Task] = {}
        self._ended = bytearray()  # By number: how often.
        self.submitted = 0
        self.done = 0
        self.given_up = 0  # Of tasks that may be lost, as they are to run at most once.
        self.by_kind: Dict[str, int] = {}
        self.slowest: List[Tuple[float, str, int, str]] = []  # Seconds, kind, number and id of those that took longest.
        self._numbers = itertools.count()

    def open(self, kind: str) -> Task:
        """A task that is submitted now."""
        with self._lock:
            task = Task(next(self._numbers), kind)
            self._pending[task.number] = task
            self._ended.append(0)
            self.submitted += 1
            self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
        return task

    def close(self, task: Task, value: Any, error: Optional[BaseException]) -> None:
        """Something came of it."""
        with self._lock:
            self._pending.pop(task.number, None)
            self._ended[task.number] += 1
            is_again = self._ended[task.number] > 1
            seconds = round(time.monotonic() - task.begun, 2)
            if len(self.slowest) < SLOWEST or seconds > self.slowest[-1][0]:
                self.slowest = sorted([*self.slowest, (seconds, task.kind, task.number, id_of(task))], reverse=True)[:SLOWEST]
            self.done += not is_again
        if is_again:
            self.complain("delivered twice", task, value, error)
            return
        if error is not None and task.kind in ("once", "job once") and isinstance(error, WorkerCrashedError):
            with self._lock:
                self.given_up += 1
            return
        if not task.may_end_with(value, error):
            is_lost = isinstance(error, (MeshError, concurrent.futures.CancelledError))
            self.complain("lost" if is_lost else "wrong", task, value, error)

    def ended(self, task: Task, future: Any) -> None:
        """The same, of a future."""
        try:
            value, error = future.result(), None
        except BaseException as raised:  # noqa: BLE001 - whatever a task ends with is judged
            value, error = None, raised
        self.close(task, value, error)

    def complain(self, what: str, task: Task, value: Any = None, error: Optional[BaseException] = None) -> None:
        """A promise was broken."""
        future = task.future
        self._say(
            {
                "violation": what,
                "number": task.number,
                "kind": task.kind,
                "task_id": id_of(task),
                "worker": getattr(future, "worker", None) if future is not None and future.done() else None,
                "submitted_at": task.begun,
                "ended_at": time.monotonic(),
                "value": _short(value),
                "error": "" if error is None else f"{type(error).__name__}: {error}"[:2000],
            }
        )

    def pending(self) -> List[Task]:
        """What has not ended, oldest first."""
        with self._lock:
            return list(self._pending.values())

    def counts(self) -> Dict[str, Any]:
        """In figures."""
        with self._lock:
            oldest = next(iter(self._pending.values()), None)
            return {
                "submitted": self.submitted,
                "done": self.done,
                "given_up": self.given_up,
                "pending": len(self._pending),
                "oldest_seconds": 0.0 if oldest is None else time.monotonic() - oldest.begun,
                "kinds": dict(self.by_kind),
                "slowest": self.slowest,
            }


def id_of(task: Task) -> str:
    """As the logs name it."""
    number = getattr(task.future, "task_id", None)
    return f"{number:x}" if isinstance(number, int) else task.task_id


def _short(value: Any) -> str:
    text = repr(value[:40] if isinstance(value, (bytes, bytearray)) else value)
    return text if len(text) <= 200 else f"{text[:200]}..."
