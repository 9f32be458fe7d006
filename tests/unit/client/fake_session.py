"""A session without a mesh: runs what is submitted in this process, when the test says so or at once."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from gpumesh.client.channel import SpecHandle
from gpumesh.client.futures import MeshFuture
from gpumesh.client.inputs import Call
from gpumesh.client.objects import StoredValue
from gpumesh.model.outcomes import Status
from gpumesh.serialization import functions
from gpumesh.serialization.exceptions import dump_exception
from gpumesh.serialization.late import complete_call
from gpumesh.serialization.values import dumps, loads_call


class _Travel:
    """Nothing goes along with any function."""

    cargo = None
    others = ()

    def holds(self) -> bool:
        return True


class FakeSession:
    """Speaks the part of `Session` that functions and streams use.

    Args:
        runs: Tasks run in the thread that submits them; otherwise when `run` is called.
    """

    is_nested = False
    slot = None

    def __init__(self, *, runs: bool = True) -> None:
        self.runs = runs
        self.pending: Dict[int, Tuple[SpecHandle, Any, Any]] = {}
        self.cancelled: List[int] = []
        self.batches: List[int] = []
        self.defined = 0
        self.error: Optional[BaseException] = None  # Raised by the next submission.
        self.most_pending = 0
        self.worker = "w1"
        self._next = 1 << 32
        self._lock = threading.RLock()
        self._handles: Dict[Any, SpecHandle] = {}
        self._functions: Dict[int, Any] = {}
        self._changed = threading.Condition(self._lock)

    def travel(self, exported: Any, packages: Any = ()) -> Any:
        return _Travel()

    def define(self, exported: Any, spec: Any, cargo: Any = None) -> SpecHandle:
        with self._lock:
            if spec not in self._handles:
                self.defined += 1
                self._handles[spec] = SpecHandle(self.defined, spec, exported, self)
            return self._handles[spec]

    def submit(self, handle: SpecHandle, payload: Any, sink: Any) -> int:
        return self._take(handle, [payload], sink)

    def submit_many(self, handle: SpecHandle, payloads: List[Any], sink: Any) -> int:
        self.batches.append(len(payloads))
        return self._take(handle, payloads, sink)

    def _take(self, handle: SpecHandle, payloads: List[Any], sink: Any) -> int:
        with self._lock:
            if self.error is not None:
                raise self.error
            first = self._next
            self._next += len(payloads)
            for number, payload in enumerate(payloads):
                self.pending[first + number] = (handle, payload, sink)
            self.most_pending = max(self.most_pending, len(self.pending))
            self._changed.notify_all()
        if self.runs:
            self.run()
        return first

    def run(self, count: Optional[int] = None, *, last_first: bool = False) -> None:
        """Run pending tasks, `count` of them or all."""
        with self._lock:  # Another thread may submit meanwhile.
            ids = [task_id for task_id in sorted(self.pending, reverse=last_first) if not _missing(self.pending[task_id][1])]
        for task_id in ids[:count]:
            self.end(task_id)

    def end(self, task_id: int) -> None:
        """Run one task."""
        with self._lock:
            entry = self.pending.pop(task_id, None)
        if entry is None:
            return  # Another thread runs it.
        handle, payload, sink = entry
        if handle.number not in self._functions:
            self._functions[handle.number] = functions.load(handle.exported.body)
        function, retry_on = self._functions[handle.number]
        args, kwargs = _arguments(payload)
        status: Status = Status.OK
        result: Any = None
        try:
            result = dumps(function(*args, **kwargs))
            if type(result) is not bytes:
                result = StoredValue(None, None, result)  # type: ignore[arg-type]
        except Exception as error:
            status, result = Status.RETRYABLE if isinstance(error, retry_on) else Status.RAISED, dump_exception(error)
        sink.task_ended(task_id, int(status), result, 0.25, self.worker)
        self._end_dependents()

    def _end_dependents(self) -> None:
        """Those of which an input has failed, as the coordinator and the channel would."""
        with self._lock:
            pending = sorted(self.pending.items())
        for task_id, (_, payload, sink) in pending:
            error = payload.failure() if type(payload) is Call else None
            if error is not None and self.pending.pop(task_id, None) is not None:
                sink.task_ended(task_id, int(Status.REFUSED), error, 0.0, "")

    def wait_for_pending(self, count: int, timeout: float = 5.0) -> bool:
        """Until so many tasks have been submitted and wait."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.pending) >= count, timeout)

    def flush(self) -> None:
        pass

    def drive_until(self, done: Callable[[], bool], condition: Any, timeout: Optional[float] = None) -> bool:
        if not isinstance(condition, threading.Condition):
            condition = condition()
        with condition:
            return bool(condition.wait_for(done, timeout))

    def cancel(self, task_ids: Sequence[int]) -> None:
        self.cancelled.extend(task_ids)
        for task_id in task_ids:
            with self._lock:
                entry = self.pending.pop(task_id, None)
            if entry is not None:
                entry[2].task_ended(task_id, int(Status.CANCELLED), {}, 0.0, "")
        self._end_dependents()


def _missing(payload: Any) -> bool:
    return type(payload) is Call and bool(payload.missing())


def _arguments(payload: Any) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    if type(payload) is not Call:
        return loads_call(payload)
    inputs: List[Tuple[Any, Any]] = []
    for place, source in payload.inputs:
        assert type(source) is MeshFuture, source
        found = source.payload if source.payload is not None else dumps(source.result())
        inputs.append((place, found.payload if type(found) is StoredValue else found))
    return complete_call(payload.value, inputs)


class FakeMesh:
    """What an accelerated function needs of a mesh."""

    def __init__(self, session: FakeSession) -> None:
        self._session = session
        self._verbosity = 0


def until(condition: Callable[[], bool], timeout: float = 5.0) -> bool:
    """Whether it becomes true; looked at every millisecond."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
