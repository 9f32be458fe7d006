"""What processes that run user code have in common: functions, specs and code that came, devices, errors, standard streams.

What runs when is `runner`'s, for tasks, and `actor_runner`'s, for the calls of an actor.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

from gpumesh.errors import MeshError
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import show_requirement
from gpumesh.model.tasks import TaskSpec, spec_from_wire
from gpumesh.protocol.messages import DefineCode, DefineFunction, DefineSpec, RunTasks, SlotGranted, StreamCredit
from gpumesh.runtime import nesting, system
from gpumesh.runtime.page import WRITTEN, Page
from gpumesh.runtime.runner_cards import DEVICE
from gpumesh.runtime.runner_channel import RunnerChannel
from gpumesh.runtime.runner_objects import RunnerObjects
from gpumesh.serialization import exceptions, functions, refs, tensors, values

if TYPE_CHECKING:
    from gpumesh.runtime.runner_devices import TaskDevice
    from gpumesh.runtime.runner_streams import RunnerStreams

_RAISED, _RETRYABLE, _OUT_OF_MEMORY = (int(status) for status in (Status.RAISED, Status.RETRYABLE, Status.OUT_OF_MEMORY))


class _Output(io.RawIOBase):
    """A standard stream that writes through and remembers that something was written."""

    def __init__(self, fd: int, process: TaskProcess) -> None:
        self._fd = fd
        self._process = process

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return False

    def write(self, data: Any) -> int:
        self._process.has_written = True
        view = memoryview(data).cast("B")
        total = len(view)
        while len(view):
            view = view[os.write(self._fd, view) :]
        self._process.count_write()
        return total


class KnownFunction:
    """A function as this process knows it: unpickled at its first task."""

    __slots__ = ("body", "call", "retry_on", "error", "has_noted")

    def __init__(self, body: Any) -> None:
        self.has_noted = False  # That its tensors come back on the CPU.
        self.body = body
        self.call: Optional[Callable[..., Any]] = None
        self.retry_on: Tuple[type, ...] = ()
        self.error: Optional[BaseException] = None


class KnownSpec:
    """A spec as this process knows it."""

    __slots__ = (
        "function", "name", "at_most_once", "code", "need", "place", "device", "script", "is_packed", "timeout", "plan", "method",
        "is_stream", "depth",
    )  # fmt: skip

    def __init__(self, function: KnownFunction, told: TaskSpec, device: Optional[TaskDevice]) -> None:
        self.code = told.code  # Digest of the modules that came with it; b"": none.
        self.function = function
        self.name = told.name
        self.at_most_once = told.retries == 0
        self.need = told.requirement
        self.place = told.place
        self.device = device  # None: it runs on the CPU, where everything arrives.
        self.script = told.script  # "": a function.
        self.is_packed = bool(told.packages)
        self.is_stream = told.is_stream  # A generator, whose values go out one by one.
        self.timeout = told.timeout
        self.plan = told.plan  # None: it creates no actor.
        self.method = told.method  # Of a call of an actor.
        self.is_stream = told.is_stream
        self.depth = told.depth


class TaskProcess:
    """What a process that runs user code is made of; subclasses say what runs when.

    Args:
        sock: To the agent.
        page: Shared with it.
    """

    def __init__(self, sock: socket.socket, page: Page) -> None:
        self._birth = dict(os.environ), list(sys.path)  # For scripts: functions may change their process's.
        self._page = page
        self._words = page.words
        self._channel = RunnerChannel(sock, self._on_message, self._on_stray)
        self._objects = RunnerObjects(self._channel)
        self._functions: Dict[bytes, KnownFunction] = {}
        self._coded: Dict[Tuple[bytes, bytes], KnownFunction] = {}  # The same function with other modules is another function.
        self._code: Any = None  # ShippedCode, once there is some.
        self._active_code = b""
        self._specs: Dict[int, KnownSpec] = {}
        self._device: Optional[TaskDevice] = None  # Once there is a task for one.
        self._streams: Optional[RunnerStreams] = None  # Once there is a generator.
        self._making = threading.Lock()
        self.has_written = False  # Since the results that were sent last.

    def count_write(self) -> None:
        """Something was written to a standard stream."""
        self._words[WRITTEN] += 1

    def _on_tasks(self, spec: KnownSpec, tasks: Any) -> None:
        """These are to run, in this order: (task id, attempt, payload)."""
        raise AssertionError("overridden by each kind of process")

    def _on_granted(self, task_id: int) -> None:
        """A task that has waited for others may go on."""

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

    def _load(self, function: KnownFunction, *, keeps_body: bool) -> Callable[..., Any]:
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

    def _failure(self, spec: KnownSpec, error: BaseException) -> Tuple[int, Any]:
        """Status and payload for what a task has raised."""
        status = _RETRYABLE if isinstance(error, spec.function.retry_on) else _RAISED
        return self._told(spec, error, status)

    def _told(self, spec: KnownSpec, error: BaseException, status: int) -> Tuple[int, Any]:
        if spec.device is not None and spec.device.explain_full(
            error, task=spec.name, asked=show_requirement(spec.need._replace(python=""))
        ):
            status = _OUT_OF_MEMORY if status == _RETRYABLE else status
        try:
            return status, exceptions.dump_exception(error, hide_frames_of=__file__)
        finally:
            error.__traceback__ = None

    def _note_moved(self, spec: KnownSpec) -> None:
        """Say once for each function that its tensors have left their device."""
        device, self._objects.moved_from = self._objects.moved_from, ""
        if spec.device is not None and spec.device.has_moved:
            return  # We have put its arguments there; so they come back.
        if not spec.function.has_noted:
            spec.function.has_noted = True
            words = f"gpumesh: tensors in the result of {spec.name} were on {device} and come back on the CPU"
            self.has_written = True
            os.write(2, f"{words}; return tensor.cpu() to say so yourself\n".encode())
            self.count_write()

    def _dump_from(self, device: TaskDevice, spec: KnownSpec, value: Any) -> Any:
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

    @property
    def streams(self) -> RunnerStreams:
        """What sends the values of generators."""
        if self._streams is None:
            from gpumesh.runtime.runner_streams import RunnerStreams

            with self._making:
                if self._streams is None:  # Another thread may have been faster.
                    self._streams = RunnerStreams(self._channel, self._page.floats)
        return self._streams

    def _dump_item(self, spec: KnownSpec, value: Any) -> Any:
        """What a generator yields, as results travel."""
        objects = self._objects
        payload: Any
        if spec.device is not None:
            payload = self._dump_from(spec.device, spec, value)
        elif refs.are_used:
            payload = objects.dump_result(value)
        else:
            payload = values.dumps(value, what="a value of the generator", snapshot=False)
        return objects.keep(payload)

    # --- the channel

    def _on_message(self, kind: Any, message: Any) -> None:
        if kind is RunTasks:
            self._on_tasks(self._specs[message.spec], message.tasks)
        elif kind is DefineFunction:
            self._functions[message.digest] = KnownFunction(message.body)
        elif kind is DefineSpec:
            told = spec_from_wire(message.spec)
            key = (told.function, told.code)
            function = self._coded.get(key)
            if function is None:
                function = self._coded[key] = self._functions[told.function]
            self._specs[message.number] = KnownSpec(function, told, None if told.script else self._device_for(told))
        elif kind is DefineCode:
            if self._code is None:
                from gpumesh.runtime.code import ShippedCode
                from gpumesh.runtime.code_folder import CodeFolder

                self._code = ShippedCode(CodeFolder())
            self._code.define(message.digest, message.archive, tuple(message.needs))
        elif kind is SlotGranted:
            self._on_granted(message.task_id)
        elif kind is StreamCredit:
            if self._streams is not None:
                self._streams.on_credit(message)
        elif not self._objects.on_message(kind, message):
            raise RuntimeError(f"the agent sent {message!r}")

    def _on_stray(self, answer: Any) -> None:
        self._objects.on_stray(answer)


def become(name: str, request: Dict[str, Any], fds: List[int]) -> Tuple[socket.socket, Page]:
    """Be the process that was asked for; its socket and its page.

    Args:
        name: For `ps`.
        request: What the spawner was asked.
        fds: The socket, the page, the write ends for standard output and standard error.
    """
    sock_fd, page_fd, out_fd, err_fd = fds
    system.name_process(name)
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
    if request.get("mesh"):
        url, path, worker = request["mesh"]
        nesting.mesh = (url, path, worker)
    sock = socket.socket(fileno=sock_fd)
    sock.setblocking(True)
    page = Page(page_fd)
    os.close(page_fd)
    return sock, page


def take_streams(process: TaskProcess) -> None:
    """What user code writes goes to the agent, and `process` is told; so do the stacks of a crash."""
    sys.stdin = open(0, encoding="utf-8")
    sys.stdout = sys.__stdout__ = _text(1, process)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, process)  # type: ignore[misc]
    faulthandler.enable(file=2)
    gc.enable()


def await_now(value: Any) -> Any:
    """What a coroutine returns, on a loop of its own."""
    import asyncio

    return asyncio.run(value)


def _text(fd: int, process: TaskProcess) -> io.TextIOWrapper:
    return io.TextIOWrapper(_Output(fd, process), encoding="utf-8", errors="backslashreplace", write_through=True)  # type: ignore[arg-type]
