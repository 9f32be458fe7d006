"""Calls of one channel that are more than bytes, from the moment they are submitted until their inputs are known. Sends nothing itself.

Promises:

1. What must be stored before a call can be sent is stored by the submitting thread, or by one of our own; never while a lock is held.
2. A call waits here only for what the coordinator does not know: results of another mesh, or of a task that it has forgotten or
   was never sent. Everything else it is told by name, and sees to by itself.
3. A call ends with the error of the first input that fails.

    submitted ── all inputs known there ──> sent ──> ended
        │                                    │ ^
        └── some are not ──> held <──────────┘ │ (INPUT_MISSING)
                              │ └── they have ended ──> sent again, with their values
                              └── one has failed ──> ended
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, Optional, Tuple

from gpumesh.errors import MeshError, ObjectLostError, ObjectStoreFullError, SerializationError
from gpumesh.model.ids import TaskId, show_task
from gpumesh.model.outcomes import Status

if TYPE_CHECKING:
    from gpumesh.client.channel import Channel
    from gpumesh.client.inputs import Call
    from gpumesh.client.link import MeshLink

REFUSED = int(Status.REFUSED)
CANCELLED = int(Status.CANCELLED)
INPUT_MISSING = int(Status.INPUT_MISSING)
INPUT_FAILED = int(Status.INPUT_FAILED)


class Calls:
    """See the module's promises.

    Attributes:
        held: Pending tasks that are not with the coordinator.
        resent: Pending tasks that were sent again because it did not know an input.
    """

    def __init__(self, channel: Channel, *, keep: bool) -> None:
        self.held: Dict[int, None] = {}
        self.resent: Dict[int, None] = {}
        self._channel = channel
        self._keep = keep  # What is needed to store arguments again, at a coordinator that comes back.
        self._ended: Deque[Tuple[int, int, Any]] = deque()  # Tasks that ended here, whose sinks are to be told.
        self._turns: Deque[int] = deque()  # Calls of actors whose turn it is.

    # --- on the way

    def settled(self, call: Call) -> Optional[BaseException]:
        """Store what is large in a call; the error that it is to end with, if any. Blocks.

        Raises:
            MeshError: The mesh is gone.
        """
        from gpumesh.client.inputs import InputError

        try:
            call.settle(self._channel.objects, keep=self._keep)
        except InputError as failed:
            return failed.error
        except (ObjectStoreFullError, SerializationError, ObjectLostError, MemoryError) as error:
            return error
        return None

    def watch_if_held(self, task_id: int, call: Call) -> None:
        """Go on with a task that is held when one of its inputs ends."""
        if task_id in self.held:
            missing = call.missing()
            for future in missing:
                future.add_done_callback(lambda _: self._go_on(task_id, call))
            if not missing:
                self._go_on(task_id, call)

    def _go_on(self, task_id: int, call: Call) -> None:
        """Some input of a task that is held has ended. On any thread, quick."""
        if task_id not in self.held:
            return
        error = call.failure()
        if error is not None:
            if self.let_go(task_id):
                self._channel.end_task(task_id, REFUSED, error)
        elif not call.missing() and self.let_go(task_id):
            if call.is_ready:
                self._prepare([task_id], self._channel.link)
                self._channel.flush()
            else:
                self.prepare_aside([task_id], self._channel.link)

    def let_go(self, task_id: int) -> bool:
        """No longer hold a task; whether it was held."""
        return self.held.pop(task_id, self) is None

    def prepare_aside(
        self, task_ids: List[int], link: Optional[MeshLink], *, then: Optional[Callable[[], object]] = None
    ) -> None:
        """Send these again from a thread of its own: it may take time, and wait for answers. `then` is called when they have left."""

        def prepare() -> None:
            self._prepare(task_ids, link)
            self._channel.flush()
            if then is not None:
                then()

        threading.Thread(target=prepare, name="gpumesh-inputs", daemon=True).start()

    def _prepare(self, task_ids: List[int], link: Optional[MeshLink]) -> None:
        """Queue tasks whose inputs were not all known, unless the connection changes meanwhile: then all is sent again anyway."""
        for task_id in task_ids:
            call = self._channel.call_of(task_id)
            if call is None:
                continue  # It has ended.
            try:
                error = self.settled(call)
            except MeshError as failure:  # The mesh is gone.
                error = failure
            if not self._channel.queue_again(task_id, call, error, link):
                return
            self.watch_if_held(task_id, call)
        self._tell_sinks()

    def on_trouble(self, task_id: int, call: Call, status: int, details: Dict[str, Any]) -> None:
        """The coordinator did not run a task because of an input: it does not know that, or that has failed. Under the receive lock."""
        if self._channel.take_cancelled(task_id):
            self._channel.end_task(task_id, CANCELLED, {"reason": ""})
            return
        self.held[task_id] = None
        self._channel.stand_in_line(task_id)
        if status == INPUT_MISSING:
            self.resent[task_id] = None
            if call.is_ready and call.failure() is None and all(other.task_id in self.resent for other in call.missing()):
                del self.held[task_id]  # It follows those that were in the same situation a moment ago.
                self._prepare([task_id], self._channel.link)
            else:
                self.watch_if_held(task_id, call)
            return
        future = call.input_of(details.get("input", 0))
        if future is not None and not future.done():
            self.watch_if_held(task_id, call)  # Its own end is still on the way.
            return
        error = call.failure() or MeshError(f"task {show_task(TaskId(task_id))} was not run: a task among its arguments failed")
        if self.let_go(task_id):
            self._channel.end_task(task_id, REFUSED, error)

    def forget(self) -> List[int]:
        """The coordinator is another one: nothing is held, nothing was sent; the tasks that were held."""
        held, self.held, self.resent = list(self.held), {}, {}
        self._turns.clear()
        return held

    # --- tasks that ended here

    def end_soon(self, task_id: int, status: int, payload: Any) -> None:
        """A task has ended here: its sink is told by whoever comes to `tell_ended` first, the I/O thread at the latest."""
        self._ended.append((task_id, status, payload))

    def its_turn(self, task_id: int) -> None:
        """The calls before this one have left: it goes on as soon as somebody comes to `tell_ended`."""
        self._turns.append(task_id)

    def tell_ended(self) -> None:
        """Tell the sinks of tasks that ended here, and go on with calls whose turn it is. On any thread, with no lock."""
        self._tell_sinks()
        while self._turns:
            try:
                task_id = self._turns.popleft()
            except IndexError:
                return  # Another thread was faster.
            call = self._channel.call_of(task_id)
            if call is None or call.is_ready:
                self._prepare([task_id], self._channel.link)
                self._channel.flush()
            else:
                self.prepare_aside([task_id], self._channel.link)

    def _tell_sinks(self) -> None:
        while self._ended:
            try:
                ended = self._ended.popleft()
            except IndexError:
                return  # Another thread was faster.
            self._channel.end_task(*ended)
