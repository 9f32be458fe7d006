"""What waits for the mesh inside a task: the task's slot is given away meanwhile, so that what it waits for can run.

Where a client is no task's, `slot` is None everywhere, and none of this is loaded.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Callable, Iterable, List, Optional

if TYPE_CHECKING:
    from gpumesh.client.channel import AnyCondition, Channel
    from gpumesh.runtime.runner_slots import TaskSlot

SLOT_KEPT_SECONDS = (
    0.001  # Of waiting for what is at work already, before others may have the slot: most answers are here by then.
)


def drive(channel: Channel, done: Callable[[], bool], condition: AnyCondition, timeout: Optional[float]) -> bool:
    """`Channel.drive_until` in a task: without the slot, unless it is over in no time.

    Where tasks of this one are pending, which may need that very slot, it is given away at once.
    """
    slot: TaskSlot = channel.slot
    deadline = None if timeout is None else time.monotonic() + timeout
    if not channel.has_pending_tasks:
        least = SLOT_KEPT_SECONDS if timeout is None else min(timeout, SLOT_KEPT_SECONDS)
        if channel.drive(done, condition, least):
            return True
        if least == timeout:
            return False
    else:
        channel.flush()  # First: who has the slot next is chosen among what is there.
    number = slot.begin()
    is_over = False
    try:
        is_done = channel.drive(done, condition, None if deadline is None else max(0.0, deadline - time.monotonic()))
        is_over = True
    finally:
        slot.end(number, goes_on=is_over, is_brief=channel.has_pending_tasks)
    return is_done


async def arrive(session: Any, arrival: Any) -> None:
    """Await an asyncio future, to which something of this session leads. The last coroutine of a task that goes on stops their loop until there
    is a slot: that is for all of them."""
    session.flush()
    slot: TaskSlot = session.slot
    number = slot.begin()
    is_over = False
    try:
        await arrival
        is_over = True
    finally:
        slot.end(number, goes_on=is_over)


class Blocked:
    """A `with` block that waits for futures of these sessions in another way."""

    def __init__(self, sessions: Iterable[Any]) -> None:
        self._slots = [session.slot for session in sessions if session.slot is not None]
        self._numbers: List[int] = []

    def __enter__(self) -> None:
        self._numbers = [slot.begin() for slot in self._slots]

    def __exit__(self, kind: Any, *error: Any) -> None:
        for slot, number in zip(self._slots, self._numbers):
            slot.end(number, goes_on=kind is None)


class Waiters(List[Any]):
    """Those of the standard library's `wait` and `as_completed` that are told of a future's end: as long as one is here, somebody waits."""

    def __init__(self, slot: TaskSlot) -> None:
        super().__init__()
        self._slot = slot
        self._numbers: List[int] = []

    def append(self, waiter: Any) -> None:
        """A waiter begins to wait."""
        super().append(waiter)
        self._numbers.append(self._slot.begin())

    def remove(self, waiter: Any) -> None:
        """It does not wait any more."""
        super().remove(waiter)
        self._slot.end(self._numbers.pop())
