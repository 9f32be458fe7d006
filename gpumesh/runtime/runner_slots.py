"""The slot of the task that a process runs: given away while a thread of the task waits for the mesh, and taken back before it goes on.

    held ──begin──> given away ──end: ask──> in line ──SlotGranted──> held
                        ^                       │
                        └────── begin ──────────┘

Whatever threads and coroutines a task has, it has one slot. It is given away when the first of them waits and asked back when the last one
goes on: the main thread may wait in a way that nobody here sees, for a thread that waits for the mesh. So in a task of several threads
some may work without a slot; nobody waits for ever.

Whoever goes through results, one after the other, while the next are being made, waits again and again for very little. To ask for a slot
each time would cost more than what is done with each. So it goes on without one, and only who has not waited again within
`LOOSE_SECONDS` gets in line, without being stopped.

Promises:

1. Each question is answered once, so answers that come late, to a thread that was interrupted, are told from the one that is waited for.
2. Who leaves a wait by an exception does not wait for a slot: it is cancelled, or has its own reasons; it asks for one all the same.
3. A task that ends while its slot is given away leaves nothing for the next.
"""

from __future__ import annotations

import threading
from time import monotonic, sleep
from typing import Callable, Optional, Tuple

from gpumesh.protocol.messages import TaskWaits
from gpumesh.runtime.runner_channel import RunnerChannel

__all__ = ["LOOSE_SECONDS", "TaskSlot", "current"]

LOOSE_SECONDS = 0.002
_IDLE_LOOKS = 25  # Without anything to see, before nobody looks any more.


class TaskSlot:
    """See the module's promises. All but `end_task` may be called by any thread.

    Args:
        channel: To the agent.
        task: (number on the page, task id) of the task that runs; (0, 0) if none does.
        flush: Sends the results of earlier tasks; called on the main thread, before the slot is given away.
    """

    __slots__ = ("number", "_channel", "_task", "_flush", "_lock", "_task_id", "_blocked", "_is_lent", "_loose_at", "_late", "_asked",
                 "_granted", "_has_left")  # fmt: skip

    def __init__(self, channel: RunnerChannel, task: Callable[[], Tuple[int, int]], flush: Callable[[], None]) -> None:
        self.number = 0  # Of the task that has waited; 0: the one that runs has not.
        self._channel = channel
        self._task = task
        self._flush = flush
        self._lock = threading.Lock()
        self._late: Optional[threading.Event] = None  # Set while somebody may have to be put in line late.
        self._forget(0, 0)

    def _forget(self, number: int, task_id: int) -> None:
        self.number = number
        self._task_id = task_id
        self._blocked = 0  # Threads and coroutines that wait.
        self._is_lent = False
        self._loose_at = 0.0  # When the task went on without having asked for a slot; 0.0: it has not.
        self._asked = 0  # Times that it was asked back, ...
        self._granted = 0  # ... and times that this was answered.
        self._has_left = False  # Given away again since it was asked back.

    def begin(self) -> int:
        """The calling thread is going to wait for the mesh. What `end` wants to be told; 0 where no task runs."""
        number, task_id = self._task()
        if not number:
            return 0
        with self._lock:
            if self.number != number:
                self._forget(number, task_id)
            self._blocked += 1
            if self._loose_at:
                self._loose_at = 0.0
                return number
            is_asking = self._asked > self._granted
            if self._is_lent and (not is_asking or self._has_left):
                return number
            if self._is_lent:
                self._has_left = True
            else:
                self._is_lent = True
        if threading.current_thread() is threading.main_thread():
            self._flush()
        self._channel.send(TaskWaits(task_id, True))
        return number

    def end(self, number: int, *, goes_on: bool = True, is_brief: bool = False) -> None:
        """The wait that `begin` began is over; returns when there is a slot.

        Args:
            number: What `begin` has returned.
            goes_on: If not, the wait ended by an exception: a slot is asked for, but not waited for.
            is_brief: It will probably wait again in a moment, for tasks of its own that have not ended.
        """
        if not number:
            return
        with self._lock:
            if self.number != number:
                return  # Its task has ended.
            self._blocked -= 1
            if self._blocked > 0 or not self._is_lent:
                return
            if is_brief and goes_on:
                self._loose_at = monotonic()
                self._watch()
                return
            asks = self._has_left or self._asked == self._granted
            if asks:
                self._asked += 1
                self._has_left = False
            turn = self._asked
        if asks:
            self._channel.send(TaskWaits(self._task_id, False))
        if goes_on:
            self._channel.wait_until(lambda: self.number != number or self._granted >= turn)

    def on_granted(self, task_id: int) -> None:
        """The agent has answered."""
        with self._lock:
            if not self.number or task_id != self._task_id:
                return
            self._granted += 1
            if self._granted == self._asked and not self._has_left:
                self._is_lent = False

    # --- those who did not wait again

    def _watch(self) -> None:
        """See to it that somebody looks. Under the lock."""
        if self._late is None:
            self._late = threading.Event()
            threading.Thread(target=self._put_in_line, args=(self._late,), name="gpumesh-slot", daemon=True).start()
        if not self._late.is_set():
            self._late.set()

    def _put_in_line(self, late: threading.Event) -> None:
        while True:
            late.wait()
            idle = 0
            while idle < _IDLE_LOOKS:
                sleep(LOOSE_SECONDS)
                idle += 1
                with self._lock:
                    task_id = self._task_id
                    if self._loose_at:
                        idle = 0
                    is_due = self._loose_at > 0.0 and monotonic() - self._loose_at >= LOOSE_SECONDS
                    if is_due:
                        self._loose_at = 0.0
                        self._has_left = False
                        self._asked += 1
                if is_due:
                    self._channel.send(TaskWaits(task_id, False))
            with self._lock:
                if not self._loose_at:
                    late.clear()

    def end_task(self) -> None:
        """The task that has waited is over."""
        with self._lock:
            self._forget(0, 0)


current: Optional[TaskSlot] = None
"""That of this process; None: it runs no tasks one after the other."""
