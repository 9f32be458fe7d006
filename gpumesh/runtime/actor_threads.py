"""Calls of an actor side by side in threads: the class has no `async def` methods, and its plan allows several calls at a time.

    main thread: receives ──> [waiting] ──> threads ──> results ──> whoever is free sends them

Promises, beside those of actor_runner:

1. Calls begin in the order received, at most `width` at a time.
2. A call that is cancelled, or runs longer than its timeout, is reported at once. A thread cannot be interrupted: it goes on, what it
   returns is dropped, and another thread takes its place meanwhile.
3. At the end, calls that run have half of ACTOR_CLOSE_SECONDS to return before the instance is closed.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, Deque, Dict, List, Optional, Tuple

from gpumesh.config import ACTOR_CLOSE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.protocol.messages import TasksFinished
from gpumesh.runtime import nesting
from gpumesh.runtime.actor_calls import Arrived, Calls, Result, own_copy, timed_out
from gpumesh.runtime.actor_exit import ActorExit
from gpumesh.runtime.actor_limits import TimeLimits
from gpumesh.runtime.page import CONCURRENT, FINISHED, ORDERS, SINCE, STARTED
from gpumesh.runtime.runner_base import await_now
from gpumesh.serialization import refs, values

if TYPE_CHECKING:
    from gpumesh.runtime.actor_runner import ActorProcess
    from gpumesh.runtime.runner_base import KnownSpec

SENT_RESULTS = 256  # In one message.
_OK, _TIMED_OUT = int(Status.OK), int(Status.TIMED_OUT)


class _Call:
    __slots__ = ("number", "spec", "task_id", "attempt", "payload", "inputs", "since", "has_begun", "is_reported")

    def __init__(self, number: int, spec: KnownSpec, task: Tuple[int, int, Any]) -> None:
        self.number = number
        self.spec = spec
        self.task_id, self.attempt, self.payload = task
        self.inputs: Dict[int, Any] = {}
        self.since = 0.0
        self.has_begun = False
        self.is_reported = False


class ThreadCalls(Calls):
    """See the module's promises."""

    def __init__(self, process: ActorProcess, class_: Any, width: int) -> None:
        self._process = process
        self._class = class_
        self._width = width
        self._words = process.words
        self._channel = process.channel
        self._objects = process.objects
        self._main = threading.get_ident()
        self._waiting: SimpleQueue[_Call] = SimpleQueue()
        self._calls: Dict[int, _Call] = {}  # Not reported.
        self._lock = threading.Lock()  # For what is counted here.
        self._idle = threading.Condition(self._lock)  # No call runs.
        self._threads = 0  # Those that take calls.
        self._running = 0  # Calls in threads, reported or not.
        self._lost = 0  # Of them, those that were reported.
        self._finished = 1
        self._ending = threading.Lock()  # For what ends calls: their inputs, their references.
        self._results: Deque[Result] = deque()
        self._sending = threading.Lock()
        self._limits: Optional[TimeLimits] = None
        self._wakes = False  # A thread wants the main one to leave the channel.

    def run(self) -> None:
        process = self._process
        self._words[CONCURRENT] = 1
        if process.construct(self._class):
            process.ready(self)
            self._receive()
            self._wait_for_threads()
        process.close()
        self._send()

    def arrive(self, calls: List[Arrived]) -> None:
        if self._process.is_over:
            return
        for number, spec, task in calls:
            call = _Call(number, spec, task)
            if type(call.payload) is not bytes:
                self._objects.take(call.payload, call.inputs)
            with self._lock:
                self._calls[call.task_id] = call
                self._start_thread_if_needed()
            self._waiting.put(call)

    def cancel(self, task_ids: List[int], status: int) -> None:
        for task_id in task_ids:
            call = self._calls.get(task_id)
            if call is not None:
                self._give_up(
                    call, status, {"reason": "cancelled while it ran" if call.has_begun else "cancelled before it began"}
                )

    def end(self) -> None:
        if threading.get_ident() != self._main:
            self._wakes = True
            signal.pthread_kill(self._main, signal.SIGINT)

    def on_signal(self) -> None:
        if self._wakes:
            if self._channel.is_busy:
                self._channel.is_interrupted = True
            else:
                self._wakes = False
                raise KeyboardInterrupt

    # --- the main thread

    def _receive(self) -> None:
        process = self._process
        try:
            while not process.is_over:
                if not self._channel.receive(lambda: process.is_over):
                    process.abandon()
        except KeyboardInterrupt:
            pass  # A method has called exit_actor().
        self._wakes = False

    def _wait_for_threads(self) -> None:
        deadline = monotonic() + ACTOR_CLOSE_SECONDS / 2
        with self._idle:
            while self._running and self._idle.wait(deadline - monotonic()):
                pass

    # --- the threads

    def _start_thread_if_needed(self) -> None:
        """Under the lock."""
        useful = self._threads - self._lost
        if useful < self._width and useful < len(self._calls):
            self._threads += 1
            threading.Thread(target=self._work, name=f"gpumesh-call-{self._threads}", daemon=True).start()

    def _work(self) -> None:
        process, words = self._process, self._words
        while True:
            call = self._waiting.get()
            if words[ORDERS] > process.orders:
                self._channel.wait_until(lambda: process.orders >= words[ORDERS])
            with self._lock:
                if process.is_over or call.is_reported:
                    begins = False
                else:
                    begins = call.has_begun = True
                    self._running += 1
                    words[STARTED] = max(words[STARTED], call.number)
            if begins:
                self._run(call)
            self._end_inputs(call.inputs)
            del call  # Not while waiting for the next.
            if begins and not self._goes_on():
                return

    def _goes_on(self) -> bool:
        with self._lock:
            self._running -= 1
            if not self._running:
                self._idle.notify_all()
            surplus = self._threads - self._lost > self._width
            self._threads -= surplus
            return not surplus

    def _run(self, call: _Call) -> None:
        process, spec = self._process, call.spec
        words = self._words
        call.since = process.page.floats[SINCE] = monotonic()
        if spec.timeout:
            self._watch(call)
        status, result = self._evaluate(call)
        with self._lock:
            self._finished += 1
            words[FINISHED] = self._finished
            is_lost = call.is_reported
            if is_lost:
                self._lost -= 1
            else:
                del self._calls[call.task_id]
                call.is_reported = True
        if not is_lost:
            self._tell((call.task_id, call.attempt, status, result, monotonic() - call.since))

    def _evaluate(self, call: _Call) -> Tuple[int, Any]:
        process, spec = self._process, call.spec
        running = nesting.Running(call.task_id, spec.name, spec.depth)
        nesting.call.set(running)
        arguments: Any = None
        keywords: Any = None
        value: Any = None
        try:
            try:
                method = process.actor.method(spec.method)  # type: ignore[union-attr]
                arguments, keywords = process.arguments(spec, call.payload, call.inputs)
                call.payload = None
                value = method(*arguments, **keywords)
                if spec.is_stream:
                    value = process.streams.run(call.task_id, call.attempt, value, partial(process.dump_item, spec))
                elif type(value).__name__ == "coroutine":
                    value = await_now(value)
                return _OK, own_copy(process.dump(spec, value))
            finally:
                arguments = keywords = value = method = None
        except ActorExit:
            return _OK, self._exit(call)
        except BaseException as error:  # noqa: BLE001  # User code may raise anything; it is told to its owner.
            return process.failure(spec, error)
        finally:
            if running.children:
                nesting.ended(running)
            nesting.call.set(None)

    def _exit(self, call: _Call) -> Any:
        """The result of this call is the last one."""
        result = values.dumps(None)
        with self._lock:
            is_mine = not call.is_reported
            if is_mine:
                self._forget(call)
        if is_mine:
            self._tell((call.task_id, call.attempt, _OK, result, monotonic() - call.since))
        self._process.exit()
        return result

    def _end_inputs(self, inputs: Dict[int, Any]) -> None:
        if self._objects.is_used or refs.are_used:
            with self._ending:
                self._objects.end_task(inputs)
                self._objects.settle()

    # --- reports

    def _watch(self, call: _Call) -> None:
        with self._lock:
            if self._limits is None:
                self._limits = TimeLimits(self._time_out)
        self._limits.add(call.since + call.spec.timeout, call)

    def _time_out(self, call: _Call) -> None:
        waited = self._process.streams.take_waited(call.task_id) if call.spec.is_stream else 0.0
        if waited and self._limits is not None:
            self._limits.add(monotonic() + waited, call)
            return
        self._give_up(call, _TIMED_OUT, timed_out(call.spec.timeout))

    def _give_up(self, call: _Call, status: int, details: Any) -> None:
        """Report a call, whether it has begun or not; nothing if it was reported before."""
        with self._lock:
            if call.is_reported:
                return
            self._forget(call)
        if call.spec.is_stream:
            self._process.streams.cancel(call.task_id)
        self._tell((call.task_id, call.attempt, status, details, monotonic() - call.since if call.has_begun else 0.0))

    def _forget(self, call: _Call) -> None:
        """It counts as reported, and if it runs, another thread may do so. Under the lock."""
        del self._calls[call.task_id]
        call.is_reported = True
        if call.has_begun:
            self._lost += 1
            self._start_thread_if_needed()

    def _tell(self, result: Result) -> None:
        self._results.append(result)
        self._send()

    def _send(self) -> None:
        """Send what has finished, unless another thread is doing so and will find this, too."""
        results = self._results
        while results and self._sending.acquire(blocking=False):
            try:
                batch: List[Result] = []
                while results and len(batch) < SENT_RESULTS:
                    batch.append(results.popleft())
                if batch:
                    self._process.has_written = False
                    self._channel.send(TasksFinished(batch))
            finally:
                self._sending.release()
