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
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import signal
import socket
import sys
from collections import deque
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, Optional, Tuple

from gpumesh.config import CONTROL_FRAME_BYTES, INLINE_VALUE_BYTES, RESULT_FLUSH_SECONDS
from gpumesh.errors import MeshError
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import OutOfBand
from gpumesh.model.resources import show_requirement
from gpumesh.model.tasks import TaskSpec, spec_from_wire
from gpumesh.protocol.messages import DefineCode, DefineFunction, DefineSpec, RunnerReady, RunTasks, TasksFinished
from gpumesh.runtime import system
from gpumesh.runtime.page import FINISHED, FLUSH, INTERRUPT, KEPT, REVOKED, SENT, SINCE, STARTED, Page
from gpumesh.runtime.runner_cards import DEVICE
from gpumesh.runtime.runner_channel import RunnerChannel
from gpumesh.runtime.runner_objects import RunnerObjects
from gpumesh.serialization import exceptions, functions, refs, tensors, values

if TYPE_CHECKING:
    from gpumesh.runtime.runner_devices import TaskDevice
    from gpumesh.runtime.script_task import ScriptTasks

OUTPUT_FDS = (1, 2)
_load_call, _dumps = values.loads_call, values.dumps  # Looked up for every task.
HELD_RESULTS = 256  # Results held at most, whatever their age.
HELD_BYTES = 1024 * 1024
_OK, _RAISED, _RETRYABLE, _CANCELLED, _NOT_RUN = (
    int(status) for status in (Status.OK, Status.RAISED, Status.RETRYABLE, Status.CANCELLED, Status.NOT_RUN)
)
_OUT_OF_MEMORY = int(Status.OUT_OF_MEMORY)


class _Output(io.RawIOBase):
    """A standard stream that writes through and remembers that something was written."""

    def __init__(self, fd: int, runner: Runner) -> None:
        self._fd = fd
        self._runner = runner

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return False

    def write(self, data: Any) -> int:
        self._runner.has_written = True
        view = memoryview(data).cast("B")
        total = len(view)
        while len(view):
            view = view[os.write(self._fd, view) :]
        return total


class _Function:
    """A function as this process knows it: unpickled at its first task."""

    __slots__ = ("body", "call", "retry_on", "error", "has_noted")

    def __init__(self, body: Any) -> None:
        self.has_noted = False  # That its tensors come back on the CPU.
        self.body = body
        self.call: Optional[Callable[..., Any]] = None
        self.retry_on: Tuple[type, ...] = ()
        self.error: Optional[BaseException] = None


class _Spec:
    __slots__ = ("function", "name", "at_most_once", "code", "need", "place", "device", "script", "is_packed")

    def __init__(self, function: _Function, told: TaskSpec, device: Optional[TaskDevice]) -> None:
        self.code = told.code  # Digest of the modules that came with it; b"": none.
        self.function = function
        self.name = told.name
        self.at_most_once = told.retries == 0
        self.need = told.requirement
        self.place = told.place
        self.device = device  # None: it runs on the CPU, where everything arrives.
        self.script = told.script  # "": a function.
        self.is_packed = bool(told.packages)


class Runner:
    """The process's one object."""

    def __init__(self, sock: socket.socket, page: Page) -> None:
        self._birth = dict(os.environ), list(sys.path)  # For scripts: functions may change their process's.
        self._page = page
        self._words = page.words
        self._channel = RunnerChannel(sock, self._on_message, self._on_stray)
        self._objects = RunnerObjects(self._channel)
        self._queue: Deque[Tuple[_Spec, Tuple[Any, ...]]] = deque()
        self._functions: Dict[bytes, _Function] = {}
        self._coded: Dict[Tuple[bytes, bytes], _Function] = {}  # The same function with other modules is another function.
        self._code: Any = None  # ShippedCode, once there is some.
        self._scripts: Optional[ScriptTasks] = None  # Once there is one.
        self._active_code = b""
        self._specs: Dict[int, _Spec] = {}
        self._results: List[Tuple[int, int, int, Any, float]] = []
        self._held_bytes = 0
        self._number = 0  # Of the task started last.
        self._is_executing = False
        self._flushes = 0
        self._last_sent = 0.0
        self.has_written = False
        self._device: Optional[TaskDevice] = None  # Once there is a task for one.
        self._is_spent = False  # Its GPU does not answer this process any more; another one may have better luck.

    def run(self) -> None:
        """Serve until the agent closes the socket."""
        signal.signal(signal.SIGINT, self._on_signal)
        refs.set_process_space(self._objects)
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

    def _run(self, spec: _Spec, task_id: int, attempt: int, payload: Any) -> None:
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
                if type(value).__name__ == "coroutine":
                    value = _await(value)
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
            status, result = self._failure(spec, error, number)
        if spec.device is not None:
            self._is_spent = not spec.device.free()
            words[KEPT] = 1 + spec.device.kept
        if objects.is_used or refs.are_used:
            objects.end_task()
        if objects.moved_from:
            self._note_moved(spec)
        seconds = monotonic() - started
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

    def _run_script(self, spec: _Spec, task_id: int, attempt: int, payload: Any) -> None:
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

    def _use_code(self, code: bytes) -> None:
        generation = self._code.generation
        try:
            self._active_code = b"in between"
            self._code.activate(code)
            self._active_code = code
        finally:
            if self._code.generation != generation:
                for (_, own), function in self._coded.items():
                    if own:
                        function.call = None  # It refers to modules that are not there any more.

    def _load(self, function: _Function, *, keeps_body: bool) -> Callable[..., Any]:
        if function.error is not None:
            raise function.error
        try:
            function.call, function.retry_on = functions.load(function.body)
        except MeshError as error:
            function.error = error
            raise
        if not keeps_body:
            function.body = None
        return function.call

    def _failure(self, spec: _Spec, error: BaseException, number: int) -> Tuple[int, Any]:
        if isinstance(error, KeyboardInterrupt) and self._words[INTERRUPT] == number:
            return _CANCELLED, {"reason": "interrupted"}
        status = _RETRYABLE if isinstance(error, spec.function.retry_on) else _RAISED
        if spec.device is not None and spec.device.explain_full(
            error, task=spec.name, asked=show_requirement(spec.need._replace(python=""))
        ):
            status = _OUT_OF_MEMORY if status == _RETRYABLE else status
        try:
            return status, exceptions.dump_exception(error, hide_frames_of=__file__)
        finally:
            error.__traceback__ = None

    def _note_moved(self, spec: _Spec) -> None:
        """Say once for each function that its tensors have left their device."""
        device, self._objects.moved_from = self._objects.moved_from, ""
        if spec.device is not None and spec.device.has_moved:
            return  # We have put its arguments there; so they come back.
        if not spec.function.has_noted:
            spec.function.has_noted = True
            words = f"gpumesh: tensors in the result of {spec.name} were on {device} and come back on the CPU"
            self.has_written = True
            os.write(2, f"{words}; return tensor.cpu() to say so yourself\n".encode())

    def _dump_from(self, device: TaskDevice, spec: _Spec, value: Any) -> Any:
        """The result of a task on a device, once that has finished; its tensors are on the CPU, or remember where they were."""
        device.finish()
        tensors.keeps_device = not spec.place
        try:
            return self._objects.dump_result(value)
        finally:
            tensors.keeps_device = False

    def _device_for(self, told: TaskSpec) -> Optional[TaskDevice]:
        if told.place and not told.requirement.needs_gpu and DEVICE not in os.environ:
            return None
        if self._device is None:
            from gpumesh.runtime.runner_devices import TaskDevice

            self._device = TaskDevice(os.environ.get(DEVICE, ""))
        return self._device

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

    def _flush(self) -> None:
        results, self._results = self._results, []
        self._held_bytes = 0
        self.has_written = False
        self._channel.send(TasksFinished(results))
        self._words[SENT] += len(results)
        self._last_sent = monotonic()

    def _on_message(self, kind: Any, message: Any) -> None:
        if kind is RunTasks:
            spec = self._specs[message.spec]
            self._queue.extend([(spec, task) for task in message.tasks])
        elif kind is DefineFunction:
            self._functions[message.digest] = _Function(message.body)
        elif kind is DefineSpec:
            told = spec_from_wire(message.spec)
            key = (told.function, told.code)
            function = self._coded.get(key)
            if function is None:
                function = self._coded[key] = self._functions[told.function]
            self._specs[message.number] = _Spec(function, told, None if told.script else self._device_for(told))
        elif kind is DefineCode:
            if self._code is None:
                from gpumesh.runtime.code import ShippedCode
                from gpumesh.runtime.code_folder import CodeFolder

                self._code = ShippedCode(CodeFolder())
            self._code.define(message.digest, message.archive, tuple(message.needs))
        elif not self._objects.on_message(kind, message):
            raise RuntimeError(f"the agent sent {message!r}")

    def _on_stray(self, answer: Any) -> None:
        self._objects.on_stray(answer)


def _trace() -> str:
    import traceback

    return traceback.format_exc()


def _await(value: Any) -> Any:
    import asyncio

    return asyncio.run(value)


def main(request: Dict[str, Any], fds: List[int]) -> None:
    """Become a runner: `fds` are the socket, the page, the write ends for standard output and standard error."""
    sock_fd, page_fd, out_fd, err_fd = fds
    system.name_process("gpumesh-runner")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(out_fd, 1)
    os.dup2(err_fd, 2)
    os.close(out_fd)
    os.close(err_fd)
    os.environ.update(request["environment"])
    if request.get("folder"):
        os.chdir(request["folder"])
    sock = socket.socket(fileno=sock_fd)
    sock.setblocking(True)
    page = Page(page_fd)
    os.close(page_fd)
    runner = Runner(sock, page)
    sys.stdin = open(0, encoding="utf-8")
    sys.stdout = sys.__stdout__ = _text(1, runner)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, runner)  # type: ignore[misc]
    faulthandler.enable(file=2)
    gc.enable()
    runner.run()


def _text(fd: int, runner: Runner) -> io.TextIOWrapper:
    return io.TextIOWrapper(_Output(fd, runner), encoding="utf-8", errors="backslashreplace", write_through=True)  # type: ignore[arg-type]


assert CONTROL_FRAME_BYTES > HELD_BYTES
