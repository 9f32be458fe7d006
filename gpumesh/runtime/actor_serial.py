"""Calls of an actor one at a time, in the main thread, from a plain blocking loop: nothing stands between the socket and the method.

Promises, beside those of actor_runner:

1. A result leaves at once when no other call waits here; else it waits for company at most `RESULT_FLUSH_SECONDS`, and a request to
   flush (SIGINT with FLUSH raised) is heard between two bytecodes of a long call. Meanwhile it stands on the page: no call that has
   returned is lost when a later one takes the process down.
2. No call starts before every CancelCalls and EndActor that the page counts has been taken in.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Callable, Deque, List

from gpumesh.config import INLINE_VALUE_BYTES, RESULT_FLUSH_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.protocol.messages import TasksFinished
from gpumesh.runtime import nesting
from gpumesh.runtime.actor_calls import Arrived, Calls, Result
from gpumesh.runtime.actor_exit import ActorExit
from gpumesh.runtime.page import FINISHED, FLUSH, HELD, INTERRUPT, ORDERS, SENT, SINCE, STARTED
from gpumesh.runtime.runner_base import await_now
from gpumesh.serialization import refs, values

if TYPE_CHECKING:
    from gpumesh.runtime.actor_runner import ActorProcess
    from gpumesh.runtime.runner_base import KnownSpec

_load_call, _dumps = values.loads_call, values.dumps  # Looked up for every call.
_OK, _CANCELLED = int(Status.OK), int(Status.CANCELLED)


class SerialCalls(Calls):
    """See the module's promises."""

    def __init__(self, process: ActorProcess, class_: Any) -> None:
        self._process = process
        self._class = class_
        self._words = process.words
        self._floats = process.page.floats
        self._hold = process.page.hold
        self._channel = process.channel
        self._objects = process.objects
        self._queue: Deque[Arrived] = deque()
        self._results: List[Result] = []
        self._flushes = 0
        self._last_sent = 0.0
        self._method: Callable[[str], Callable[..., Any]]
        self._code = b""

    def run(self) -> None:
        process = self._process
        if process.construct(self._class):
            process.ready(self)
            self._serve()
            if self._results:
                self._flush()
        process.close()

    def arrive(self, calls: List[Arrived]) -> None:
        if not self._process.is_over:
            self._queue.extend(calls)

    def cancel(self, task_ids: List[int], status: int) -> None:
        ended = set(task_ids)
        dropped = [task for _, _, task in self._queue if task[0] in ended]
        if dropped:
            left = [call for call in self._queue if call[2][0] not in ended]
            self._queue.clear()
            self._queue.extend(left)
            self._process.tell_dropped(dropped, status)

    def end(self) -> None:
        self._queue.clear()

    def on_signal(self) -> None:
        if self._words[FLUSH] != self._flushes and not self._channel.is_busy:
            self._flushes = self._words[FLUSH]
            if self._results:
                self._flush()

    # --- inside

    def _serve(self) -> None:
        process = self._process
        assert process.actor is not None
        self._method = process.actor.method
        self._code = process.code
        queue = self._queue
        objects = self._objects
        receive = self._channel.receive
        while True:
            while not queue:
                if self._results:
                    self._flush()
                if objects.is_used or refs.are_used:
                    objects.settle()
                if process.is_over:
                    return
                if not receive(self._has_news):
                    process.abandon()
                    return
            number, spec, task = queue.popleft()
            self._run(number, spec, task[0], task[1], task[2])

    def _has_news(self) -> bool:
        return bool(self._queue) or self._process.is_over

    def _take_orders(self) -> None:
        """Take in what the page counts."""
        process, words = self._process, self._words
        while process.orders < words[ORDERS]:
            if not self._channel.receive(lambda: process.orders >= words[ORDERS]):
                process.abandon()
                self._queue.clear()
                return

    def _run(self, number: int, spec: KnownSpec, task_id: int, attempt: int, payload: Any) -> None:
        words = self._words
        process = self._process
        process.number = number
        words[STARTED] = number
        self._floats[SINCE] = started = monotonic()
        if words[ORDERS] > process.orders:
            self._queue.appendleft((number, spec, (task_id, attempt, payload)))
            self._take_orders()
            return
        status = _OK
        is_plain = type(payload) is bytes
        objects = self._objects
        call = nesting.Running(task_id, spec.name, spec.depth)
        method: Any = None
        arguments: Any = None
        keywords: Any = None
        value: Any = None
        result: Any
        try:
            try:
                process.is_executing = True
                nesting.call.set(call)
                if not is_plain:
                    objects.take(payload)
                method = self._method(spec.method)
                is_simple = is_plain and spec.device is None and (not spec.code or spec.code == self._code)
                arguments, keywords = _load_call(payload) if is_simple else process.arguments(spec, payload, None)
                value = method(*arguments, **keywords)
                if spec.is_stream:
                    value = process.streams.run(task_id, attempt, value, partial(process.dump_item, spec))
                elif type(value).__name__ == "coroutine":
                    value = await_now(value)
                if spec.device is not None or refs.are_used:
                    result = process.dump(spec, value)
                else:
                    result = _dumps(value, what="the result", snapshot=False)
                    if type(result) is not bytes or len(result) > INLINE_VALUE_BYTES:
                        result = objects.keep(result)
            finally:
                process.is_executing = False
                arguments = keywords = value = method = None
        except ActorExit:
            result = values.dumps(None)
            process.exit()
        except BaseException as error:  # noqa: BLE001  # User code may raise anything; it is told to its owner.
            if isinstance(error, KeyboardInterrupt) and words[INTERRUPT] == number:
                error.__traceback__ = None
                status, result = _CANCELLED, {"reason": "interrupted"}
            else:
                status, result = process.failure(spec, error)
        if call.children:
            nesting.ended(call)
        if objects.is_used or refs.are_used:
            objects.end_task()
        seconds = monotonic() - started
        words[FINISHED] = number
        self._results.append((task_id, attempt, status, result, seconds))
        if not self._queue:
            return  # It leaves at once.
        if (
            type(result) is not bytes
            or process.has_written
            or started + seconds - self._last_sent > RESULT_FLUSH_SECONDS
            or not self._hold(task_id, attempt, status, result, seconds)
        ):
            self._flush()
            if objects.is_used or refs.are_used:
                objects.settle()

    def _flush(self) -> None:
        results, self._results = self._results, []
        self._process.has_written = False
        number = self._words[FINISHED]
        self._channel.send(TasksFinished(results))
        self._words[HELD] = 0
        self._words[SENT] = number
        self._last_sent = monotonic()
