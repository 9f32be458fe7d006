"""Main of a pool process: runs user code, one task at a time, from a plain blocking loop. No event loop, no policy.

    agent ── RunTasks ──> channel ──> [queue] ── one task ──> user code ──> [results] ──> channel ── TasksFinished ──> agent

Promises:

1. One task at a time, in the order received; never one at or above the page's REVOKED mark.
2. Finished results wait for company at most `RESULT_FLUSH_SECONDS` before the next task starts, not at all when the task may run
   at most once or has written output, and a request to flush (SIGINT with FLUSH raised) is heard between two bytecodes of a long
   task.
3. Whatever user code raises, `SystemExit` and `KeyboardInterrupt` included, is the end of that task only.
4. What user code writes reaches the pipe at each write: nothing is lost when the process dies in the next line.
5. It never outlives its agent: end of stream when idle, the spawner's kill when busy.
6. What runs on a GPU finds torch's modules and tensors there, and leaves no memory behind but what its globals hold; a process
   whose GPU does not answer any more ends.
7. A process that was interrupted while it imported something ends: nobody can tell what half of it is there.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
from collections import deque
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, Deque, Dict, List, Optional, Tuple

from gpumesh.config import CONTROL_FRAME_BYTES, INLINE_VALUE_BYTES, RESULT_FLUSH_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import OutOfBand
from gpumesh.protocol.messages import RunnerReady, TasksFinished
from gpumesh.runtime import nesting, runner_slots
from gpumesh.runtime.page import FINISHED, FLUSH, INTERRUPT, KEPT, REVOKED, SENT, SINCE, STARTED, Page
from gpumesh.runtime.runner_base import KnownSpec, TaskProcess, await_now, become, take_streams
from gpumesh.serialization import refs, values

if TYPE_CHECKING:
    from gpumesh.runtime.script_task import ScriptTasks

OUTPUT_FDS = (1, 2)
_load_call, _dumps = values.loads_call, values.dumps  # Looked up for every task.
ERRORS_LOOKED_AT = 10  # Of a chain of exceptions, for whether an interrupt has hit an import.
HELD_RESULTS = 256  # Results held at most, whatever their age.
HELD_BYTES = 1024 * 1024
_OK, _RAISED, _CANCELLED, _NOT_RUN = (int(status) for status in (Status.OK, Status.RAISED, Status.CANCELLED, Status.NOT_RUN))


class Runner(TaskProcess):
    """The process's one object."""

    def __init__(self, sock: socket.socket, page: Page) -> None:
        super().__init__(sock, page)
        self._queue: Deque[Tuple[KnownSpec, Tuple[Any, ...]]] = deque()
        self._scripts: Optional[ScriptTasks] = None  # Once there is one.
        self._results: List[Tuple[int, int, int, Any, float]] = []
        self._held_bytes = 0
        self._number = 0  # Of the task started last.
        self._is_executing = False
        self._current: Optional[Tuple[KnownSpec, int]] = None  # The task that is executed.
        self._flushes = 0
        self._last_sent = 0.0
        self._slot = runner_slots.TaskSlot(self._channel, self._slot_task, self._flush_if_any)
        self._is_spent = (
            False  # Another process may have better luck: this one's GPU does not answer, or an import was interrupted.
        )

    def run(self) -> None:
        """Serve until the agent closes the socket."""
        signal.signal(signal.SIGINT, self._on_signal)
        runner_slots.current = self._slot
        refs.set_process_space(self._objects)
        nesting.find = self._running_task
        self._channel.send(RunnerReady(os.getpid()))
        queue = self._queue
        receive = self._channel.receive
        objects = self._objects
        while True:
            while not queue:
                if self._results:
                    self._flush()
                if objects.is_used or refs.are_used:
                    objects.settle()
                if not receive(queue.__len__):
                    return
            spec, task = queue.popleft()
            self._run(spec, task[0], task[1], task[2])
            if self._is_spent:
                self._flush()
                return

    # --- one task

    def _run(self, spec: KnownSpec, task_id: int, attempt: int, payload: Any) -> None:
        words = self._words
        self._number = number = self._number + 1
        words[STARTED] = number
        self._page.floats[SINCE] = started = monotonic()
        revoked = words[REVOKED]
        if revoked and number >= revoked:
            words[FINISHED] = number
            self._results.append((task_id, attempt, _NOT_RUN, {}, 0.0))
            if type(payload) is not bytes:
                self._objects.take(payload)
                self._objects.end_task()
            return
        if spec.script:
            self._run_script(spec, task_id, attempt, payload)
            return
        self._current = (spec, task_id)
        status = _OK
        is_plain = type(payload) is bytes
        objects = self._objects
        arguments: Any = None
        keywords: Any = None
        value: Any = None
        try:
            try:
                self._is_executing = True
                if not is_plain:
                    objects.take(payload)
                function = spec.function
                if spec.code != self._active_code:
                    self._use_code(spec.code)
                call = function.call
                if call is None:
                    call = self._load(function, keeps_body=bool(spec.code))
                arguments, keywords = _load_call(payload) if is_plain else objects.load_call(payload)
                device = spec.device
                if device is not None and spec.place:
                    arguments, keywords = device.place(arguments, keywords)
                value = call(*arguments, **keywords)
                if spec.is_stream:
                    value = self._stream(spec, task_id, attempt, value)
                elif type(value).__name__ == "coroutine":
                    value = await_now(value)
                result: Any
                if device is not None:
                    result = self._dump_from(device, spec, value)
                else:
                    result = objects.dump_result(value) if refs.are_used else _dumps(value, what="the result", snapshot=False)
                if type(result) is not bytes or len(result) > INLINE_VALUE_BYTES:
                    result = objects.keep(result)
            finally:
                self._is_executing = False
                arguments = keywords = value = None  # Arrays among them would keep their mappings open.
        except BaseException as error:  # noqa: BLE001  # User code may raise anything; it is told to its owner.
            status, result = self._failure(spec, error)
        self._current = None
        if nesting.running is not None:
            nesting.ended(nesting.running)
            nesting.running = None
        if spec.device is not None:
            self._is_spent = not spec.device.free() or self._is_spent
            words[KEPT] = 1 + spec.device.kept
        if objects.is_used or refs.are_used:
            objects.end_task()
        if objects.moved_from:
            self._note_moved(spec)
        seconds = monotonic() - started
        if self._slot.number:
            self._slot.end_task()
        words[FINISHED] = number
        self._results.append((task_id, attempt, status, result, seconds))
        self._held_bytes += len(result) if type(result) is bytes else 0
        if (
            spec.at_most_once
            or self.has_written
            or started + seconds - self._last_sent > RESULT_FLUSH_SECONDS
            or len(self._results) >= HELD_RESULTS
            or self._held_bytes > HELD_BYTES
            or type(result) is not bytes
        ):
            self._flush()
            if objects.is_used or refs.are_used:
                objects.settle()

    def _running_task(self) -> Optional[nesting.Running]:
        """Somebody asks for the task that is executed: the client inside it."""
        current = self._current
        if current is not None and nesting.running is None:
            spec, task_id = current
            nesting.running = nesting.Running(task_id, spec.name, spec.depth)
        return nesting.running

    def _slot_task(self) -> Tuple[int, int]:
        """The task that has the slot of this process."""
        current = self._current
        return (self._number, current[1]) if current is not None else (0, 0)

    def _on_granted(self, task_id: int) -> None:
        self._slot.on_granted(task_id)

    def _stream(self, spec: KnownSpec, task_id: int, attempt: int, generator: Any) -> Any:
        """Send the values of a generator; what it returns."""
        self._flush_if_any()
        return self.streams.run(task_id, attempt, generator, functools.partial(self._dump_item, spec))

    def _run_script(self, spec: KnownSpec, task_id: int, attempt: int, payload: Any) -> None:
        """Nothing in here is user code, and an interrupt is read from the page."""
        if self._results:
            self._flush()
        started, number = self._page.floats[SINCE], self._number
        try:
            if self._scripts is None:
                from gpumesh.runtime.script_task import ScriptTasks

                self._scripts = ScriptTasks(self._page, *self._birth)
            status, result = self._scripts.run(
                number, spec.script, code=spec.code, shipped=self._code, payload=payload, is_packed=spec.is_packed
            )
        except Exception as error:  # noqa: BLE001  # The next task must find this process as it was.
            status, result = _RAISED, {"reason": f"the runner failed at {spec.name}: {error!r}", "stderr": _trace()}
        self._is_spent = status == _NOT_RUN
        if status == _OK and len(result) > INLINE_VALUE_BYTES:
            result = OutOfBand([result])  # Else it would travel before everything else, in one piece.
        self._words[FINISHED] = number
        self._results.append((task_id, attempt, status, result, monotonic() - started))
        self._flush()

    def _failure(self, spec: KnownSpec, error: BaseException) -> Tuple[int, Any]:
        if self._words[INTERRUPT] == self._number and _came_in_an_import(error):
            self._is_spent = True
        if isinstance(error, KeyboardInterrupt) and self._words[INTERRUPT] == self._number:
            return _CANCELLED, {"reason": "interrupted"}
        return super()._failure(spec, error)

    def _on_signal(self, number: int, frame: Optional[FrameType]) -> None:
        channel = self._channel
        if self._is_executing and self._words[INTERRUPT] == self._number:
            if not channel.is_busy:
                raise KeyboardInterrupt
            channel.is_interrupted = True
        if self._words[FLUSH] != self._flushes and not channel.is_busy:
            self._flushes = self._words[FLUSH]
            if self._results:
                self._flush()

    # --- the channel

    def _flush_if_any(self) -> None:
        if self._results:
            self._flush()

    def _flush(self) -> None:
        results, self._results = self._results, []
        self._held_bytes = 0
        self.has_written = False
        self._channel.send(TasksFinished(results))
        self._words[SENT] += len(results)
        self._last_sent = monotonic()

    def _on_tasks(self, spec: KnownSpec, tasks: Any) -> None:
        self._queue.extend([(spec, task) for task in tasks])


def _came_in_an_import(error: Optional[BaseException]) -> bool:
    """Whether an exception, or one that it replaced, came out of a module that was being imported. Python hides the import itself."""
    for _ in range(ERRORS_LOOKED_AT):
        if error is None:
            return False
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_name == "<module>":
                return True
            trace = trace.tb_next
        error = error.__context__
    return False


def _trace() -> str:
    import traceback

    return traceback.format_exc()


def main(request: Dict[str, Any], fds: List[int]) -> None:
    """Become a runner."""
    sock, page = become("gpumesh-runner", request, fds)
    runner = Runner(sock, page)
    take_streams(runner)
    runner.run()


assert CONTROL_FRAME_BYTES > HELD_BYTES
