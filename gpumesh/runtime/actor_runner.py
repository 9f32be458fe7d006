"""Main of a process that holds one actor: makes the instance, runs its calls, and ends with it. Policy is the agent's.

    agent ── RunTasks of the creation ──> instance ── ActorReady ──> agent
          ── RunTasks of calls ────────> calls ───── TasksFinished ──> agent
          ── CancelCalls, EndActor ────> calls       (the creation's result is the last thing that is sent)

Promises:

1. Calls begin in the order received, the first after the constructor has returned. How they run is decided by the class: one at a
   time (actor_serial), in threads (actor_threads) where its plan says so, on one event loop (actor_async) where it has `async def`
   methods.
2. Each call is reported once, unless the actor ends before: then it is the agent's.
3. Whatever a method raises is the end of that call only; `exit_actor()` alone ends the actor.
4. At the end `close()`, `__exit__` or `__aexit__` runs, then `__del__`, then the result of the creation leaves: OK when the actor
   ended itself, CANCELLED when it was told to, RAISED when its constructor failed.
5. Calls that raise leave nothing behind that only the collector finds.
6. It never outlives its agent: end of stream when idle, the spawner's kill when busy.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from time import monotonic
from types import FrameType
from typing import Any, Dict, List, Optional, Tuple

from gpumesh.config import INLINE_VALUE_BYTES
from gpumesh.model.outcomes import Status
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import ActorReady, CancelCalls, DefineSpec, EndActor, RunnerReady, RunTasks, TasksFinished
from gpumesh.runtime import actor_exit, nesting
from gpumesh.runtime.actor_calls import Actor, Arrived, Calls, has_async_methods, is_retryable, own_copy, report_problem
from gpumesh.runtime.page import FINISHED, INTERRUPT, SENT, SINCE, STARTED, Page
from gpumesh.runtime.runner_base import KnownSpec, TaskProcess, await_now, become, take_streams
from gpumesh.serialization import refs, values

_OK, _RAISED, _RETRYABLE, _CANCELLED, _OUT_OF_MEMORY = (
    int(status) for status in (Status.OK, Status.RAISED, Status.RETRYABLE, Status.CANCELLED, Status.OUT_OF_MEMORY)
)
_load_call, _dumps = values.loads_call, values.dumps  # Looked up for every call.


class ActorProcess(TaskProcess):
    """The process's one object."""

    def __init__(self, sock: socket.socket, page: Page) -> None:
        super().__init__(sock, page)
        self.channel, self.objects, self.page, self.words = self._channel, self._objects, page, page.words
        self.actor: Optional[Actor] = None
        self.number = 0  # On the page, of what the main thread executes.
        self.is_executing = False  # User code, on the main thread.
        self.orders = 0  # CancelCalls and EndActor that have come.
        self.is_over = False
        self._end: Tuple[int, Any] = (_CANCELLED, {"reason": "ended"})
        self._creation: Optional[Tuple[KnownSpec, Tuple[int, int, Any]]] = None
        self._calls: Optional[Calls] = None
        self._early: List[Arrived] = []  # Calls that came before the instance was there.
        self._seen = 0  # Tasks that came, the creation included.
        self._born = 0.0
        self._switching = threading.Lock()

    def run(self) -> None:
        """Serve until the actor ends or the agent closes the socket."""
        signal.signal(signal.SIGINT, self._on_signal)
        refs.set_process_space(self._objects)
        self._channel.send(RunnerReady(os.getpid()))
        while self._creation is None:
            if not self._channel.receive(lambda: self._creation is not None):
                return
        class_ = self._load_class()
        if class_ is not None:
            calls = self._choose(class_)
            calls.run()
        if self._end[0] >= 0:
            task_id, attempt, _ = self._creation[1]
            status, payload = self._end
            self._channel.send(TasksFinished([(task_id, attempt, status, payload, monotonic() - self._born)]))

    def _choose(self, class_: Any) -> Calls:
        assert self._creation is not None
        plan = self._creation[0].plan
        width = plan.max_concurrency if plan is not None else 1
        if has_async_methods(class_):
            from gpumesh.runtime.actor_async import AsyncCalls

            return AsyncCalls(self, class_, width)
        if width > 1:
            from gpumesh.runtime.actor_threads import ThreadCalls

            return ThreadCalls(self, class_, width)
        from gpumesh.runtime.actor_serial import SerialCalls

        return SerialCalls(self, class_)

    # --- its life

    def _load_class(self) -> Any:
        """The class, or None: the creation has failed."""
        assert self._creation is not None
        spec, (task_id, _, payload) = self._creation
        self._born = self._page.floats[SINCE] = monotonic()
        self.number = self._words[STARTED] = 1
        nesting.running = nesting.Running(task_id, spec.name, spec.depth)
        if type(payload) is not bytes:
            self._objects.take(payload)
        try:
            try:
                self.is_executing = True
                if spec.code:
                    self._use_code(spec.code)
                return self._load(spec.function, keeps_body=False)
            finally:
                self.is_executing = False
        except BaseException as error:  # noqa: BLE001  # Loading a class runs its module.
            self._fail(spec, error)
            return None

    def construct(self, class_: Any) -> bool:
        """Make the instance; False when that has failed, and the actor is over."""
        assert self._creation is not None
        spec, (_, _, payload) = self._creation
        arguments: Any = None
        keywords: Any = None
        try:
            try:
                self.is_executing = True
                arguments, keywords = self._load_arguments(spec, payload, None)
                self.actor = Actor(class_(*arguments, **keywords))
                if spec.device is not None:
                    spec.device.finish()
            finally:
                self.is_executing = False
                arguments = keywords = None
        except actor_exit.ActorExit:
            self.end(_OK, values.dumps(None))
        except BaseException as error:  # noqa: BLE001  # User code may raise anything; it is told to its owner.
            self._fail(spec, error)
        self._objects.end_task()
        self._creation = spec, (self._creation[1][0], self._creation[1][1], None)  # The arguments are the instance's now.
        return self.actor is not None and not self.is_over

    def _fail(self, spec: KnownSpec, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt) and self._words[INTERRUPT] == self.number:
            error.__traceback__ = None
            self.end(_CANCELLED, {"reason": "interrupted"})
        else:
            self.end(*self._told(spec, error, _RAISED))

    def ready(self, calls: Calls) -> None:
        """The instance is there: tell, and take the calls that came meanwhile."""
        assert self._creation is not None
        self._words[FINISHED] = 1
        self._channel.send(ActorReady(self._creation[1][0], self._creation[1][1]))
        self._words[SENT] = 1
        if self._objects.is_used or refs.are_used:
            self._objects.settle()
        self._calls = calls
        early, self._early = self._early, []
        if early:
            calls.arrive(early)

    def end(self, status: int, payload: Any) -> None:
        """The actor comes to its end, for this reason; the first one counts. Any thread."""
        if not self.is_over:
            self._end = status, payload
            self.is_over = True
            if self._calls is not None:
                self._calls.end()

    def exit(self) -> None:
        """A method has called exit_actor()."""
        self.end(_OK, values.dumps(None))

    def abandon(self) -> None:
        """The agent is gone."""
        self._end = -1, None
        self.is_over = True

    def close(self) -> None:
        """Run what the class wants to be run at its end, on no loop."""
        nesting.call.set(None)
        if self.actor is None:
            return
        try:
            left = self.actor.closing()
            if hasattr(left, "__await__"):
                await_now(_awaited(left))
        except BaseException:  # noqa: BLE001  # Nobody waits for it; it is told on standard error.
            report_problem(f"{self.actor.class_name} failed while it was closed")
        self.drop()

    def drop(self) -> None:
        """Let go of the instance."""
        if self.actor is not None:
            self.actor.drop()
            self.actor = None

    # --- for its calls

    @property
    def code(self) -> bytes:
        """Digest of the modules that its class came with."""
        return self._active_code

    def arguments(self, spec: KnownSpec, payload: Any, inputs: Any) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """The arguments of a call, on the actor's device."""
        if spec.code and spec.code != self._active_code:
            with self._switching:
                own = self._active_code
                try:
                    self._use_code(spec.code)
                    return self._load_arguments(spec, payload, inputs)
                finally:
                    self._use_code(own)
        return self._load_arguments(spec, payload, inputs)

    def _load_arguments(self, spec: KnownSpec, payload: Any, inputs: Any) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        arguments, keywords = _load_call(payload) if type(payload) is bytes else self._objects.load_call(payload, inputs)
        if spec.device is not None and spec.place:
            return spec.device.place(arguments, keywords)
        return arguments, keywords

    def dump(self, spec: KnownSpec, value: Any) -> Any:
        """The payload of a result."""
        objects = self._objects
        if spec.device is not None:
            result = self._dump_from(spec.device, spec, value)
        else:
            result = objects.dump_result(value) if refs.are_used else _dumps(value, what="the result", snapshot=False)
        if type(result) is not bytes or len(result) > INLINE_VALUE_BYTES:
            result = objects.keep(result)
        if objects.moved_from:
            self._note_moved(spec)
        return result

    def failure(self, spec: KnownSpec, error: BaseException) -> Tuple[int, Any]:
        """Status and payload for what a call has raised."""
        status, payload = self._told(spec, error, _RETRYABLE if is_retryable(spec, error) else _RAISED)
        return (_RETRYABLE if status == _OUT_OF_MEMORY else status), payload  # It stays on its card.

    def dump_item(self, spec: KnownSpec, value: Any) -> Any:
        """The payload of a value that a generator yields."""
        return own_copy(self.dump(spec, value))

    # --- what comes

    def _on_tasks(self, spec: KnownSpec, tasks: Any) -> None:
        if self._creation is None:
            self._seen += 1
            self._creation = spec, tasks[0]
            return
        first = self._seen + 1
        self._seen += len(tasks)
        arrived = [(number, spec, task) for number, task in enumerate(tasks, first)]
        if self._calls is None:
            self._early.extend(arrived)
        else:
            self._calls.arrive(arrived)

    def _on_message(self, kind: Any, message: Any) -> None:
        if kind is RunTasks:
            self._on_tasks(self._specs[message.spec], message.tasks)
        elif kind is CancelCalls:
            self.orders += 1
            self._cancel(message)
        elif kind is EndActor:
            self.orders += 1
            self.end(_CANCELLED, {"reason": "ended"})
        else:
            super()._on_message(kind, message)
            if kind is DefineSpec and self._creation is not None:
                self._specs[message.number].need = self._creation[0].need  # What its calls have was asked for once.

    def _cancel(self, message: CancelCalls) -> None:
        if self._calls is not None:
            self._calls.cancel(list(message.task_ids), message.status)
            return
        ended = set(message.task_ids)
        dropped = [task for _, _, task in self._early if task[0] in ended]
        self._early = [call for call in self._early if call[2][0] not in ended]
        self.tell_dropped(dropped, message.status)

    def tell_dropped(self, tasks: List[Tuple[int, int, Any]], status: int) -> None:
        """These calls will not begin."""
        for task in tasks:
            if type(task[2]) is not bytes:
                inputs: Dict[int, Any] = {}
                self._objects.take(task[2], inputs)
                self._objects.end_task(inputs)
        if tasks:
            self._channel.send(
                TasksFinished([(task[0], task[1], status, {"reason": "cancelled before it began"}, 0.0) for task in tasks])
            )

    def _device_for(self, told: TaskSpec) -> Any:
        return self._device if told.actor else super()._device_for(told)

    def _on_signal(self, number: int, frame: Optional[FrameType]) -> None:
        channel = self._channel
        if self.is_executing and self._words[INTERRUPT] == self.number:
            if not channel.is_busy:
                raise KeyboardInterrupt
            channel.is_interrupted = True
        if self._calls is not None:
            self._calls.on_signal()


async def _awaited(value: Any) -> Any:
    return await value


def main(request: Dict[str, Any], fds: List[int]) -> None:
    """Become the process of an actor."""
    sock, page = become("gpumesh-actor", request, fds)
    actor_exit.is_actor = True
    nesting.mesh = request.get("mesh")
    process = ActorProcess(sock, page)
    take_streams(process)
    process.run()
