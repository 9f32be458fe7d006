"""Calls of an actor whose class has `async def` methods: tasks of one event loop, which lives in the main thread as long as the actor.

    socket ── readable ──> calls ── one task each ──> results ── once in a round of the loop ──> socket

Promises, beside those of actor_runner:

1. The constructor runs on the loop, so that locks, queues and tasks that are made there belong to it.
2. Calls begin in the order received and interleave where they await. Methods that are not `async def` run between them on the loop's
   thread, or in threads where the plan allows several at a time.
3. A call that is cancelled, or runs longer than its timeout, is reported at once, and its task is cancelled; a thread goes on. One
   that blocks the loop is interrupted.
4. At the end all calls are cancelled, and have a quarter of ACTOR_CLOSE_SECONDS to return before the instance is closed.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections import deque
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Deque, Dict, Iterable, List, Optional, Tuple

from gpumesh.config import ACTOR_CLOSE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.protocol.messages import TasksFinished
from gpumesh.runtime import nesting
from gpumesh.runtime.actor_calls import Arrived, Calls, Result, is_async, own_copy, report_problem, timed_out
from gpumesh.runtime.actor_exit import ActorExit
from gpumesh.runtime.actor_limits import TimeLimits
from gpumesh.runtime.loop import new_event_loop
from gpumesh.runtime.page import CONCURRENT, FINISHED, INTERRUPT, SINCE, STARTED
from gpumesh.serialization import refs, values

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from gpumesh.runtime.actor_runner import ActorProcess
    from gpumesh.runtime.runner_base import KnownSpec

BLOCKED_SECONDS = 0.1  # A loop that has not told that a call's time is up by then is blocked, and that call is interrupted.
_OK, _TIMED_OUT, _CANCELLED = int(Status.OK), int(Status.TIMED_OUT), int(Status.CANCELLED)


class _Call:
    __slots__ = (
        "number",
        "spec",
        "task_id",
        "attempt",
        "payload",
        "inputs",
        "since",
        "task",
        "is_reported",
        "is_late",
        "is_open",
    )

    def __init__(self, number: int, spec: KnownSpec, task: Tuple[int, int, Any]) -> None:
        self.number = number
        self.spec = spec
        self.task_id, self.attempt, self.payload = task
        self.inputs: Dict[int, Any] = {}
        self.since = 0.0  # 0: it has not begun.
        self.task: Optional[asyncio.Task[None]] = None
        self.is_reported = False
        self.is_late = False  # Its time is up.
        self.is_open = False  # Its own code, or what it has called, may run: an interrupt is for that.


class AsyncCalls(Calls):
    """See the module's promises."""

    def __init__(self, process: ActorProcess, class_: Any, width: int) -> None:
        self._process = process
        self._class = class_
        self._words = process.words
        self._channel = process.channel
        self._objects = process.objects
        self._main = threading.get_ident()
        self._loop = new_event_loop()
        self._width = width
        self._executor: Optional[ThreadPoolExecutor] = None
        self._is_async: Dict[str, bool] = {}  # By the method's name, where there are threads for the others.
        self._arrived: Deque[_Call] = deque()
        self._calls: Dict[int, _Call] = {}  # Not reported.
        self._tasks: Dict[asyncio.Task[Any], _Call] = {}
        self._limits: Optional[TimeLimits] = None
        self._blocking = 0  # Number of a call that has blocked the loop since its time was up.
        self._results: List[Result] = []
        self._finished = 1
        self._is_stopped = False
        self._ending: Optional[asyncio.Task[None]] = None  # The loop holds tasks weakly.

    def run(self) -> None:
        self._words[CONCURRENT] = 1
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._begin)
        while not self._is_stopped:
            try:
                self._loop.run_forever()
            except (KeyboardInterrupt, SystemExit):
                report_problem("a task of the actor's own wanted to end the process")
        self._process.drop()
        self._send()

    def _begin(self) -> None:
        process = self._process
        if not process.construct(self._class):
            self._ending = self._loop.create_task(self._finish())
            return
        self._loop.add_reader(self._channel.fileno(), self._channel.receive_now)
        process.ready(self)

    # --- what comes

    def arrive(self, calls: List[Arrived]) -> None:
        if self._process.is_over:
            return
        for number, spec, task in calls:
            call = _Call(number, spec, task)
            if type(call.payload) is not bytes:
                self._objects.take(call.payload, call.inputs)
            self._arrived.append(call)
        self._on_loop(self._start)

    def cancel(self, task_ids: List[int], status: int) -> None:
        self._on_loop(self._cancel, task_ids, status)

    def end(self) -> None:
        self._on_loop(self._end)

    def on_signal(self) -> None:
        """For a call that blocks the loop, its cancellation waits in the socket, or the end of its time in the loop."""
        task = asyncio.current_task(self._loop)
        call = self._tasks.get(task) if task is not None else None
        if call is not None and call.is_open and call.number in (self._words[INTERRUPT], self._blocking):
            if self._channel.is_busy:
                self._channel.is_interrupted = True
            else:
                raise KeyboardInterrupt

    def _on_loop(self, function: Any, *arguments: Any) -> None:
        """A thread that waits for something receives what is for others, too."""
        if threading.get_ident() == self._main:
            function(*arguments)
        else:
            self._loop.call_soon_threadsafe(function, *arguments)

    def _start(self) -> None:
        create_task = self._loop.create_task
        while self._arrived:
            call = self._arrived.popleft()
            self._calls[call.task_id] = call
            call.task = create_task(self._serve(call))
            self._tasks[call.task] = call

    def _cancel(self, task_ids: List[int], status: int) -> None:
        for task_id in task_ids:
            call = self._calls.get(task_id)
            if call is not None:
                self._give_up(call, status, {"reason": "cancelled while it ran" if call.since else "cancelled before it began"})

    def _watch(self, call: _Call) -> None:
        if self._limits is None:
            self._limits = TimeLimits(self._on_limit)
        self._limits.add(call.since + call.spec.timeout, call)

    def _on_limit(self, call: _Call) -> None:
        assert self._limits is not None
        if not call.is_late:
            waited = self._process.streams.take_waited(call.task_id) if call.spec.is_stream else 0.0
            if waited:
                self._limits.add(monotonic() + waited, call)
                return
            call.is_late = True
            self._limits.add(monotonic() + BLOCKED_SECONDS, call)
            self._loop.call_soon_threadsafe(self._give_up, call, _TIMED_OUT, timed_out(call.spec.timeout))
        elif call.is_open:
            self._blocking = call.number
            signal.pthread_kill(self._main, signal.SIGINT)

    def _give_up(self, call: _Call, status: int, details: Any) -> None:
        if not call.is_reported:
            self._report(call, status, details)
            if call.since and call.task is not None:  # One that has not begun would never come to see its inputs freed.
                call.task.cancel()

    # --- a call

    async def _serve(self, call: _Call) -> None:
        if not call.is_reported:
            self._words[STARTED] = call.number
            call.since = self._process.page.floats[SINCE] = monotonic()
            if call.spec.timeout:
                self._watch(call)
            status, result = await self._evaluate(call)
            self._finished += 1
            self._words[FINISHED] = self._finished
            if not call.is_reported:
                self._report(call, status, result)
        if self._objects.is_used or refs.are_used:
            self._objects.end_task(call.inputs)
        assert call.task is not None
        del self._tasks[call.task]
        call.task = None

    async def _evaluate(self, call: _Call) -> Tuple[int, Any]:
        process, spec = self._process, call.spec
        running = nesting.Running(call.task_id, spec.name, spec.depth)
        nesting.call.set(running)
        arguments: Any = None
        keywords: Any = None
        value: Any = None
        try:
            try:
                call.is_open = True
                method = process.actor.method(spec.method)  # type: ignore[union-attr]
                if self._width > 1 and not self._is_async_method(spec.method, method):
                    return await self._evaluate_in_thread(call, method)
                arguments, keywords = process.arguments(spec, call.payload, call.inputs)
                call.payload = None
                value = method(*arguments, **keywords)
                if spec.is_stream:
                    dump = partial(process.dump_item, spec)
                    value = await process.streams.run_async(call.task_id, call.attempt, value, dump)
                elif type(value).__name__ == "coroutine" or asyncio.isfuture(value):
                    arguments = keywords = None
                    value = await value
                return _OK, own_copy(process.dump(spec, value))
            finally:
                call.is_open = False
                arguments = keywords = value = method = None
        except ActorExit:
            self._exit(call)
            return _OK, b""
        except BaseException as error:  # noqa: BLE001  # User code may raise anything; it is told to its owner.
            if call.is_reported:
                error.__traceback__ = None
                return _OK, b""
            if isinstance(error, KeyboardInterrupt) and call.number in (self._words[INTERRUPT], self._blocking):
                error.__traceback__ = None
                return (_TIMED_OUT, timed_out(spec.timeout)) if call.is_late else (_CANCELLED, {"reason": "interrupted"})
            return process.failure(spec, error)
        finally:
            if running.children:
                nesting.ended(running)

    async def _evaluate_in_thread(self, call: _Call, method: Any) -> Tuple[int, Any]:
        if self._executor is None:
            from concurrent.futures import ThreadPoolExecutor

            self._executor = ThreadPoolExecutor(self._width, thread_name_prefix="gpumesh-call")
        context = contextvars.copy_context()
        return await self._loop.run_in_executor(self._executor, context.run, self._evaluate_here, call, method)

    def _evaluate_here(self, call: _Call, method: Any) -> Tuple[int, Any]:
        process, spec = self._process, call.spec
        try:
            arguments, keywords = process.arguments(spec, call.payload, call.inputs)
            call.payload = None
            value = method(*arguments, **keywords)
            if spec.is_stream:
                value = process.streams.run(call.task_id, call.attempt, value, partial(process.dump_item, spec))
            return _OK, own_copy(process.dump(spec, value))
        except ActorExit:
            raise
        except BaseException as error:  # noqa: BLE001  # Not all exceptions can be raised through a future.
            return process.failure(spec, error)

    def _is_async_method(self, name: str, method: Any) -> bool:
        found = self._is_async.get(name)
        if found is None:
            found = self._is_async[name] = is_async(method)
        return found

    def _exit(self, call: _Call) -> None:
        """The result of this call is the last one."""
        if not call.is_reported:
            self._report(call, _OK, values.dumps(None))
        self._process.exit()

    # --- results

    def _report(self, call: _Call, status: int, payload: Any) -> None:
        call.is_reported = True
        self._calls.pop(call.task_id, None)
        if not self._results:
            self._loop.call_soon(self._send)
        self._results.append((call.task_id, call.attempt, status, payload, monotonic() - call.since if call.since else 0.0))

    def _send(self) -> None:
        results, self._results = self._results, []
        if results:
            self._process.has_written = False
            self._channel.send(TasksFinished(results))
        if self._objects.is_used or refs.are_used:
            self._objects.settle()

    # --- the end

    def _end(self) -> None:
        for call in self._calls.values():
            call.is_reported = True  # By the agent.
        self._calls.clear()
        self._arrived.clear()
        self._ending = self._loop.create_task(self._finish())

    async def _finish(self) -> None:
        process = self._process
        await _cancel_all(self._tasks)
        if process.actor is not None:
            try:
                left = process.actor.closing()
                if hasattr(left, "__await__"):
                    await left
            except BaseException:  # noqa: BLE001  # Nobody waits for it; it is told on standard error.
                report_problem(f"{process.actor.class_name} failed while it was closed")
        await _cancel_all(asyncio.all_tasks())
        self._is_stopped = True
        self._loop.stop()


async def _cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    others = [task for task in tasks if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=ACTOR_CLOSE_SECONDS / 4)
