"""What a worker may do that has joined with a token that only lends a machine. Whatever else it says is not heard.

    worker ── message ──> WorkerLimits.narrowed ──> what is left of it ──> the coordinator, as from any worker

Promises:

1. It reads only objects that a task given to it mentions, those in them, and its own.
2. It ends, and sends values and output of, only tasks that were given to it.
3. It deletes only objects that it has made, and makes none under the name of another.
4. It has at most OBJECTS_AT_ONCE objects of its own at a time.
5. What it says of objects that it may not read gives nobody else a way to read them there either.
6. After a restart of the coordinator it is believed what it says that it had before, until `has_returned`; never of a task that was
   submitted since.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Dict, Iterable, List, Sequence, Set, Tuple

from gpumesh.model.ids import SEQUENCE_BITS
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle, Stored
from gpumesh.protocol import messages as msg
from gpumesh.protocol.object_errors import FULL, LOST
from gpumesh.runtime.stream_service import NOTHING_KEPT
from gpumesh.scheduler.directory import Directory

OBJECTS_AT_ONCE = (
    100_000  # Of its own: each costs the coordinator half a kilobyte beside its bytes, and an empty one nothing else.
)
ENDED_TASKS_KNOWN = 10_000  # The last that have ended there: what they have printed may come behind their results.

_NOT_FOR_IT = (
    "{}object {:#x} is not for this worker: it joined with a worker-only token, and no task given to it mentions the object"
)
_NOT_ITS_NAME = "{}object {:#x} cannot be made by this worker, which joined with a worker-only token: the name is another's"
_TOO_MANY = "{}this worker, which joined with a worker-only token, has made {} objects that still live; drop references to some"
_NOT_ITS_OWN = "its result names an object that its worker, which joined with a worker-only token, may not read"

Narrowed = Tuple[Any, Any]
"""What the coordinator is to hear, None for nothing; what the worker is answered at once, None for nothing."""


class WorkerLimits:
    """See the module's promises.

    Args:
        directory: All objects of the mesh.
        was_here: It worked for this mesh before the coordinator was started anew, and may bring back what it had then.

    Attributes:
        claimed_before: Tasks that it says to have had before that, and that are in `submitted_anew` if they are no such.
    """

    def __init__(self, directory: Directory, *, was_here: bool = False) -> None:
        self._directory = directory
        self._is_returning = was_here
        self.claimed_before: Set[int] = set()
        self._tasks: Dict[int, int] = {}  # Given, and not ended -> attempt.
        self._ended: OrderedDict[int, int] = OrderedDict()
        self._readable: Set[int] = set()
        self._made: Set[int] = set()
        self._others: Set[int] = (
            set()
        )  # Numbers of clients and processes that it has heard of: they name objects after themselves.

    def __repr__(self) -> str:
        return f"<WorkerLimits: {len(self._tasks)} tasks, {len(self._readable)} objects>"

    # --- what it is given

    def give(self, tasks: Iterable[Tuple[int, int]]) -> None:
        """These (task, attempt) go there."""
        for task_id, attempt in tasks:
            self._tasks[task_id] = attempt
            self._ended.pop(task_id, None)
            self._others.add(task_id >> SEQUENCE_BITS)
            self._may_read_all(self._directory.mentions_of(task_id))

    def claimed(self, attempts: Sequence[Tuple[int, int]]) -> List[Tuple[int, int]]:
        """Those of the attempts that it says to have which it can have."""
        if self._is_returning:
            self.give(attempts)
            self.claimed_before.update(task_id for task_id, _ in attempts)
            return list(attempts)
        return [(task_id, attempt) for task_id, attempt in attempts if self._was_given(task_id, attempt)]

    def has_returned(self) -> None:
        """It has had time enough to bring back what it had."""
        self._is_returning = False

    def submitted_anew(self, task_ids: Iterable[int]) -> None:
        """These tasks are new, and nobody can have had them before."""
        for task_id in self.claimed_before.intersection(task_ids):
            self.claimed_before.discard(task_id)
            self._tasks.pop(task_id, None)

    def gone(self, oid: int) -> None:
        """The object is in the directory no more."""
        self._readable.discard(oid)
        self._made.discard(oid)

    # --- what it says

    def narrowed(self, kind: type, message: Any) -> Narrowed:
        """What is left of a message, and what to answer where it asked for what it may not have."""
        narrow = _NARROW.get(kind)
        return (message, None) if narrow is None else narrow(self, message)

    def _finished(self, message: msg.TasksFinished) -> Narrowed:
        results: List[Any] = []
        for result in message.results:
            if not isinstance(result, (tuple, list)) or len(result) != 5:
                return message, None  # Whoever handles it says so.
            task_id, attempt, status = result[:3]
            if self._was_given(task_id, attempt):
                results.append(self._cleaned(result))
                self._note_ended(task_id, is_back=status == int(Status.NOT_RUN))
        return message._replace(results=results), None

    def _cleaned(self, result: Sequence[Any]) -> Sequence[Any]:
        task_id, attempt, status, payload, seconds = result
        if status != int(Status.OK) or type(payload) is bytes:
            return result
        value = payload[0] if isinstance(payload, tuple) and payload else payload
        if type(value) is Stored and not self._may_name(value.oid):
            return (task_id, attempt, int(Status.REFUSED), {"reason": _NOT_ITS_OWN}, seconds)
        if isinstance(payload, tuple) and len(payload) == len(Bundle._fields) and isinstance(payload[2], tuple):
            return (task_id, attempt, status, Bundle(payload[0], (), self._names_of(payload[2])), seconds)
        return result

    def _items(self, message: msg.StreamItems) -> Narrowed:
        attempt = message.attempt if message.attempt != NOTHING_KEPT else self._attempt_of(message.task_id)
        return (message if self._was_given(message.task_id, attempt) else None), None

    def _output(self, message: msg.TaskOutput) -> Narrowed:
        return (message if message.task_id in self._tasks or message.task_id in self._ended else None), None

    def _asked(self, message: Any) -> Narrowed:
        oid = message.oid
        if self._may_read(oid):
            return message, None
        return None, msg.ObjectAt(message.number, oid, "", 0, None, _NOT_FOR_IT.format(LOST, oid))

    def _created(self, message: msg.CreateSegment) -> Narrowed:
        if self._may_make(message.oid):
            return message, None
        return None, msg.SegmentCreated(message.number, "", _NOT_ITS_NAME.format(FULL, message.oid))

    def _put(self, message: msg.PutObject) -> Narrowed:
        oid = message.oid
        if not self._may_make(oid):
            return None, msg.ObjectStored(oid, _NOT_ITS_NAME.format(FULL, oid))
        if len(self._made) >= OBJECTS_AT_ONCE and oid not in self._made:
            return None, msg.ObjectStored(oid, _TOO_MANY.format(FULL, OBJECTS_AT_ONCE))
        self._made.add(oid)
        return message._replace(refs=list(self._names_of(message.refs))), None

    def _hold(self, message: msg.HoldRefs) -> Narrowed:
        if self._is_returning:
            self._may_read_all(oid for oid in message.oids if type(oid) is int)
            self._is_returning = not message.is_all
        return message._replace(oids=[oid for oid in message.oids if type(oid) is not int or self._may_read(oid)]), None

    def _delete(self, message: msg.DeleteObjects) -> Narrowed:
        return message._replace(oids=[oid for oid in message.oids if type(oid) is not int or self._may_delete(oid)]), None

    # --- inside

    def _attempt_of(self, task_id: int) -> Any:
        return self._tasks.get(task_id, self._ended.get(task_id))

    def _was_given(self, task_id: Any, attempt: Any) -> bool:
        if type(task_id) is not int or type(attempt) is not int:
            return False
        return attempt in (self._tasks.get(task_id), self._ended.get(task_id))

    def _note_ended(self, task_id: int, *, is_back: bool) -> None:
        attempt = self._tasks.pop(task_id, None)
        if attempt is not None and not is_back:  # What it has handed back goes to others.
            self._ended[task_id] = attempt
            if len(self._ended) > ENDED_TASKS_KNOWN:
                self._ended.popitem(last=False)

    def _may_read(self, oid: int) -> bool:
        if oid in self._readable or oid in self._made:
            return True
        for task_id in self._tasks:  # What they mention may have become known, or more, since they were given.
            self._may_read_all(self._directory.mentions_of(task_id))
        return oid in self._readable

    def _may_name(self, oid: int) -> bool:
        """What nobody knows is no secret either."""
        return oid not in self._directory or self._may_read(oid)

    def _names_of(self, oids: Iterable[Any]) -> Tuple[Any, ...]:
        return tuple(oid for oid in oids if type(oid) is not int or self._may_name(oid))

    def _may_make(self, oid: Any) -> bool:
        if type(oid) is not int or oid in self._made:
            return True  # What is no name at all is refused by whoever handles it.
        return oid >> SEQUENCE_BITS not in self._others and (self._is_returning or oid not in self._directory)

    def _may_delete(self, oid: int) -> bool:
        return oid in self._made or oid not in self._directory

    def _may_read_all(self, oids: Iterable[int]) -> None:
        waiting = [oid for oid in oids if oid not in self._readable]
        while waiting:
            oid = waiting.pop()
            if oid in self._readable:
                continue
            entry = self._directory.get(oid)
            if entry is not None:  # Else it is looked at again when it is asked for.
                self._readable.add(oid)
                if oid not in self._made and not self._is_returning:
                    self._others.add(oid >> SEQUENCE_BITS)
                waiting.extend(entry.refs)


_NARROW: Dict[type, Any] = {
    msg.TasksFinished: WorkerLimits._finished,
    msg.StreamItems: WorkerLimits._items,
    msg.TaskOutput: WorkerLimits._output,
    msg.LocateObject: WorkerLimits._asked,
    msg.FetchObject: WorkerLimits._asked,
    msg.CreateSegment: WorkerLimits._created,
    msg.PutObject: WorkerLimits._put,
    msg.HoldRefs: WorkerLimits._hold,
    msg.DeleteObjects: WorkerLimits._delete,
}
