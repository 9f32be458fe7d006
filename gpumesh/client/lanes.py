"""What waits in a channel: tasks by spec, batches of one sink, and how they become messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Optional, Protocol

from gpumesh.config import MIB
from gpumesh.model.payloads import payload_bytes
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import SubmitTasks

if TYPE_CHECKING:
    from gpumesh.client.channel import Channel
    from gpumesh.client.link import MeshLink

BATCH_TASKS = 512  # Sent as one message; hides a message's cost of tens of microseconds and keeps the workers fed meanwhile.
BATCH_BYTES = 1 * MIB


class Sink(Protocol):
    """Who waits for tasks: a MeshFuture, a ResultStream."""

    def task_ended(self, task_id: int, status: int, payload: Any, seconds: float, worker: str) -> None:
        """One task has ended. Called on whichever thread does the I/O, under the receive lock: quick, must not block.

        Args:
            task_id: The task; after an interrupt (Ctrl-C) the same task may be told a second time.
            status: A `Status`.
            payload: bytes or a StoredValue for OK, a Payload for RAISED and RETRYABLE, a dict for other statuses, or an exception
                for failures on this side.
            seconds: Run time inside the runner.
            worker: Where it ran, "" if nowhere.
        """


class SpecHandle:
    """One function with one set of options, known to a session under one number."""

    __slots__ = ("number", "spec", "exported", "name", "session", "cargo", "others", "lane")

    def __init__(self, number: int, spec: TaskSpec, exported: Any, session: Any, cargo: Any = None) -> None:
        self.number = number
        self.spec = spec
        self.exported = exported  # digest, body, ... as serialization.functions made it.
        self.name = spec.name
        self.session = session
        self.cargo = cargo  # The modules that travel with it, as serialization.shipping found them; None: none.
        self.others: Optional[Others] = None  # There are modules that do not travel with it, and arguments may need them.
        self.lane: Optional[Lane] = None  # Of the channel used last.


Others = Callable[[SpecHandle, List[Any]], SpecHandle]
"""The handle to use for these payloads: the same one, or one that takes more modules along."""


class Lane:
    """Tasks of one spec that wait to be put into a message."""

    __slots__ = ("channel", "handle", "actor", "ids", "payloads", "has_others", "defined_on")

    def __init__(self, channel: Channel, handle: SpecHandle) -> None:
        self.channel = channel
        self.handle = handle
        self.actor = handle.spec.actor  # Whose calls they are; 0: they are none.
        self.ids: List[int] = []
        self.payloads: List[Any] = []  # One for each id.
        self.has_others = False  # Some payloads are not plain bytes.
        self.defined_on: Optional[MeshLink] = None  # The link whose other side knows the spec.

    def clear(self) -> None:
        """Nothing waits."""
        self.ids, self.payloads, self.has_others = [], [], False


class Batch:
    """Tasks submitted together for one sink, with consecutive ids."""

    __slots__ = ("handle", "first", "payloads", "sink")

    def __init__(self, handle: SpecHandle, first: int, payloads: List[Any], sink: Sink) -> None:
        self.handle = handle
        self.first = first
        self.payloads = payloads  # Each is dropped when its task ends.
        self.sink = sink


def in_messages(number: int, ids: List[int], payloads: List[Any], *, again: bool = False) -> Iterator[SubmitTasks]:
    """Tasks of the spec `number` as messages of bounded size. `again`: they have been sent before."""
    first = size = 0
    for position, payload in enumerate(payloads):
        own = payload_bytes(payload)
        if position > first and (position - first >= BATCH_TASKS or size + own > BATCH_BYTES):
            yield SubmitTasks(number, ids[first:position], payloads[first:position], again)
            first, size = position, 0
        size += own
    if first < len(ids):
        yield SubmitTasks(number, ids[first:], payloads[first:], again)
