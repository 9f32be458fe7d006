"""The object store as a task sees it: inputs that are mapped, results and puts that are written, references that are counted.

    ObjectAt(0) ──> given ──task starts──> mapped ──task ends, nobody uses it──> closed ── UnpinObjects ──> agent
                                              └── still used (a global array) ──> tried again after each later task

Nothing of the store is imported before the first object is large.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple

from gpumesh.config import INLINE_VALUE_BYTES
from gpumesh.errors import MeshError, ObjectLostError, ObjectStoreFullError
from gpumesh.model.payloads import Bundle, OutOfBand, Stored, payload_bytes
from gpumesh.protocol.messages import (
    CreateSegment,
    DeleteObjects,
    HoldRefs,
    LocateObject,
    ObjectAt,
    PutObject,
    ReleaseRefs,
    SegmentCreated,
    SegmentsGone,
    UnpinObjects,
)
from gpumesh.protocol.object_errors import from_text
from gpumesh.runtime import nesting
from gpumesh.runtime.runner_channel import RunnerChannel
from gpumesh.serialization import refs, tensors, values

if TYPE_CHECKING:
    from gpumesh.store.segments import Mapping, SegmentWriter

_OWNER_BITS = 31
SWEPT_MAPPINGS = 16  # Looked at after each task: an actor may keep thousands for its life.
SEGMENT_TRIES = 3  # To write a value, when coordinators are lost meanwhile.


class _Input:
    """An object that this process may map: `pins` answers said where it is."""

    __slots__ = ("oid", "path", "nbytes", "pins", "mapping")

    def __init__(self, oid: int, path: str, nbytes: int) -> None:
        self.oid = oid
        self.path = path
        self.nbytes = nbytes
        self.pins = 1
        self.mapping: Optional[Mapping] = None


Inputs = Dict[int, _Input]


class RunnerObjects:
    """The space (serialization.refs) of a pool process. Everything but `take` and what ends a task may be called by any thread."""

    def __init__(self, channel: RunnerChannel) -> None:
        self.table = refs.RefTable()
        self.is_used = False  # Until then there is nothing to settle.
        self._channel = channel
        self._given: Dict[int, Deque[_Input]] = {}  # Inputs of tasks to come, by object.
        self._current: Dict[int, _Input] = {}  # Inputs of the task that runs.
        self._mapped: Deque[_Input] = deque()  # Perhaps in use.
        self._unpins: Deque[Tuple[int, int]] = deque()
        self._segments: Dict[int, int] = {}  # Number of a CreateSegment -> the object.
        self._unwanted: Deque[int] = deque()  # Objects that were to be written, and will not be.
        self._writer: Optional[SegmentWriter] = None
        self._writing = threading.Lock()
        self.moved_from = ""  # Device that a tensor in the last value that was pickled came from.
        tensors.on_moved = self._on_moved
        self._owner = 0
        self._sequence = count(1)

    # --- inputs

    def on_message(self, kind: Any, message: Any) -> bool:
        """A message of the agent; False if it is none of these."""
        if kind is ObjectAt and message.number == 0:
            self.is_used = True
            given = _Input(message.oid, message.path, message.nbytes)
            self._given.setdefault(message.oid, deque()).append(given)
        elif kind is ObjectAt or kind is SegmentCreated:
            self._channel.take_answer(message)
        elif kind is SegmentsGone:
            if self._writer is not None:
                self._writer.forget(message.names)
        else:
            return False
        return True

    def on_stray(self, answer: Any) -> None:
        """An answer that nobody waits for any more."""
        if type(answer) is SegmentCreated:
            oid = self._segments.pop(answer.number, 0)
            if oid and not answer.error:
                self._unwanted.append(oid)
        elif answer.path:
            self._unpins.append((answer.oid, 1))

    def take(self, payload: Any, inputs: Optional[Inputs] = None) -> None:
        """A task is next: its inputs are its own from now on. `end_task` ends that.

        Args:
            payload: Its arguments.
            inputs: Where several run at the same time: an empty dict for those of this one, which goes to `load_call` and `end_task`
                with it. Called by the thread that receives.
        """
        current = self._current if inputs is None else inputs
        for oid in stored_in(payload):
            given = self._given.get(oid)
            if not given:
                continue  # The agent knows nobody who wants this task any more.
            found = given.popleft()
            if not given:
                del self._given[oid]
            before = current.setdefault(oid, found)
            if before is not found:
                before.pins += found.pins

    def load_call(self, payload: Any, inputs: Optional[Inputs] = None) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """The arguments of the task whose payload was taken; `inputs` as there.

        An object that stands in several places is the same value in all of them, as it would be without a mesh.

        Raises:
            SerializationError: Something cannot be rebuilt here.
        """
        if not isinstance(payload, tuple):
            arguments: Tuple[Tuple[Any, ...], Dict[str, Any]] = self._load(payload, "the arguments", inputs)
            return arguments
        args, kwargs = self._load(payload[0], "the arguments", inputs)
        if not payload[1]:
            return args, kwargs
        loaded: Dict[int, Any] = {}
        positional = list(args)
        for place, part in payload[1]:
            oid = part.oid if type(part) is Stored else 0
            value = loaded[oid] if oid in loaded else self._load(part, f"argument {place!r}", inputs)
            if oid:
                loaded[oid] = value
            if isinstance(place, int):
                positional[place] = value
            else:
                kwargs[place] = value
        return tuple(positional), kwargs

    def _load(self, payload: Any, what: str, inputs: Optional[Inputs] = None) -> Any:
        while isinstance(payload, tuple):
            payload = payload[0]  # A result that refers to others; its refs count as they are unpickled.
        if type(payload) is not Stored:
            return values.loads(payload, what=what)
        given = (self._current if inputs is None else inputs).get(payload.oid)
        if given is None:
            raise ObjectLostError(f"{refs.show_object(payload.oid)} was not handed to this process")
        return self._map(given, what)

    def _map(self, given: _Input, what: str) -> Any:
        from gpumesh.store.segments import Mapping

        if given.mapping is None:
            given.mapping = Mapping(given.path, given.nbytes)
        return values.loads(OutOfBand(given.mapping.parts), what=what)

    def end_task(self, inputs: Optional[Inputs] = None) -> None:
        """The task is over and its arguments are dropped: let go of what nobody uses any more; `inputs` as in `take`.

        References that live on here are told now: before its end is, which may be told at any moment from now on.
        """
        current = self._current if inputs is None else inputs
        if current:
            for given in current.values():
                self._let_go(given)
            current.clear()
        self._channel.end_task()
        self.sweep()
        held = self.table.take_holds() if self.table else []
        if held:
            self._channel.send(HoldRefs(held))

    def _let_go(self, given: _Input) -> None:
        if given.mapping is None or given.mapping.is_private or given.mapping.try_close():
            self._unpins.append((given.oid, given.pins))
        else:
            self._mapped.append(given)

    def sweep(self) -> None:
        """Close the mappings that nobody uses any more: of many, some at each call."""
        for _ in range(min(len(self._mapped), SWEPT_MAPPINGS)):
            try:
                given = self._mapped.popleft()
            except IndexError:
                return  # Another thread has it.
            assert given.mapping is not None
            if given.mapping.try_close():
                self._unpins.append((given.oid, given.pins))
            else:
                self._mapped.append(given)

    # --- what the mesh is told

    def settle(self) -> None:
        """After the ends of tasks were told: tell what is not needed any more."""
        self.sweep()
        news = self._news()
        if news:
            self._channel.send(*news)

    def _news(self) -> List[Any]:
        news: List[Any] = []
        if self.table:
            held = self.table.take_holds()
            released = self.table.take_releases()
            if held:
                news.append(HoldRefs(held))
            if released:
                news.append(ReleaseRefs(released))
        if self._unwanted:
            news.append(DeleteObjects([self._unwanted.popleft() for _ in range(len(self._unwanted))]))
        if self._unpins:
            counts: Dict[int, int] = {}
            while self._unpins:
                oid, pins = self._unpins.popleft()
                counts[oid] = counts.get(oid, 0) + pins
            news.append(UnpinObjects(list(counts.items())))
        return news

    def _on_moved(self, device: str) -> None:
        self.moved_from = device

    # --- results

    def dump_result(self, value: Any) -> Any:
        """A value that may hold references as the payload of a result, in the store if it is large.

        Raises:
            SerializationError: It cannot be pickled.
            ObjectStoreFullError: There is no room for it.
        """
        with refs.collecting() as collected:
            payload = values.dumps(value, what="the result", snapshot=False)
        if collected:
            self._tell_mentioned(collected)
        oids = tuple(collected)
        payload = self.keep(payload, oids)
        return Bundle(payload, (), oids) if oids else payload

    def keep(self, payload: Any, oids: Sequence[int] = ()) -> Any:
        """A payload without references in it, or with these, as it travels: in the store if it is large."""
        if type(payload) is Stored or isinstance(payload, tuple) or payload_bytes(payload) <= INLINE_VALUE_BYTES:
            return payload
        self.is_used = True
        return self._store(payload, oids)

    def _store(self, payload: Any, oids: Sequence[int]) -> Stored:
        """Write a value into a segment and hand it over; one grant of it is this process's."""
        from gpumesh.store.container import container_bytes

        parts = payload.parts if type(payload) is OutOfBand else [payload]
        nbytes = container_bytes(parts)
        for _ in range(SEGMENT_TRIES - 1):
            try:
                return self._store_as(self._new_oid(), nbytes, parts, oids)
            except FileNotFoundError:
                pass  # The coordinator that gave the segment was lost a moment ago; the agent asks the next one.
        return self._store_as(self._new_oid(), nbytes, parts, oids)

    def _store_as(self, oid: int, nbytes: int, parts: List[Any], oids: Sequence[int]) -> Stored:
        """The same under this number.

        Raises:
            FileNotFoundError: Its segment was gone before it could be written.
        """
        from gpumesh.store.segments import SegmentWriter

        created = self._create_segment(oid, nbytes)
        try:
            with self._writing:
                if self._writer is None:
                    self._writer = SegmentWriter()
                self._writer.write(created.path, nbytes, parts)
            self._channel.send(PutObject(oid, nbytes, os.path.basename(created.path), None, list(oids)))
        except BaseException as error:
            self._unwanted.append(oid)
            if isinstance(error, FileNotFoundError):
                raise
            if isinstance(error, OSError):
                folder = os.path.dirname(created.path)
                raise ObjectStoreFullError(f"cannot write {nbytes} bytes to {folder}: {error.strerror}") from error
            raise
        return Stored(oid, nbytes)

    def _create_segment(self, oid: int, nbytes: int) -> SegmentCreated:
        def question(number: int) -> CreateSegment:
            self._segments[number] = oid
            return CreateSegment(number, oid, nbytes)

        created: SegmentCreated = self._channel.answer_to(self._channel.ask(question))
        del self._segments[created.number]
        if created.error:
            raise from_text(created.error)
        return created

    def _tell_mentioned(self, collected: Dict[int, refs.ObjectRef]) -> None:
        """The client in this process may have made some of these, and its word comes by another way than ours."""
        if nesting.on_mentioned is not None:
            others = [ref for ref in collected.values() if ref.space is not self]
            if others:
                nesting.on_mentioned(others)

    def made_here(self) -> List[int]:
        """Objects made by this process that it still refers to."""
        return [oid for oid in self.table.counts() if self.is_made_here(oid)]

    def is_made_here(self, oid: int) -> bool:
        """Whether it was made by this process."""
        return oid >> 32 == self._owner

    def _new_oid(self) -> int:
        if not self._owner:
            self._owner = (int.from_bytes(os.urandom(4), "little") >> (32 - _OWNER_BITS)) | 1
        return self._owner << 32 | next(self._sequence)

    # --- in tasks

    def _enter(self) -> None:
        self.is_used = True
        if self.table.is_foreign:
            raise MeshError(
                "a process that a task has forked cannot use the mesh; put and get in the task, and give the other the value"
            )

    def put(self, value: Any) -> refs.ObjectRef:
        """Store a value; the reference keeps it alive.

        Raises:
            SerializationError: It cannot be pickled.
            ObjectStoreFullError: There is no room for it.
        """
        self._enter()
        with refs.collecting() as collected:
            payload = values.dumps(value, what="the value", snapshot=False)
        if collected:
            self._tell_mentioned(collected)
        oids = list(collected)
        if payload_bytes(payload) > INLINE_VALUE_BYTES:
            stored = self._store(payload, oids)
            return refs.ObjectRef(stored.oid, stored.nbytes, self, granted=1)
        nbytes = payload_bytes(payload)
        oid = self._new_oid()
        self._channel.send(PutObject(oid, nbytes, "", payload, oids))
        return refs.ObjectRef(oid, nbytes, self, granted=1)

    def get(self, wanted: Any, timeout: Optional[float] = None) -> Any:
        """The value of a reference; of a list or tuple of them, the list of values. Arrays are private to the caller.

        Raises:
            TimeoutError: It is not there after `timeout` seconds.
            ObjectLostError: The object is gone.
        """
        self._enter()
        deadline = None if timeout is None else monotonic() + timeout
        if isinstance(wanted, refs.ObjectRef):
            return self._get([wanted], deadline)[0]
        return self._get(list(wanted), deadline)

    def _get(self, wanted: List[refs.ObjectRef], deadline: Optional[float]) -> List[Any]:
        for ref in wanted:
            if not isinstance(ref, refs.ObjectRef):
                raise TypeError(f"get takes an ObjectRef or a list of them, not {type(ref).__name__}")
        asked: List[int] = []
        found: List[Any] = []
        try:
            for ref in wanted:
                asked.append(self._channel.ask(_locate(ref)))
            for ref in wanted:
                answer = self._channel.answer_to(asked[len(found)], deadline)
                if answer is None:
                    raise TimeoutError(f"{ref!r} is not there yet")
                found.append(self._value_of(answer))
        finally:
            self._channel.forget(asked[len(found) :])
        return found

    def _value_of(self, answer: ObjectAt) -> Any:
        if answer.error:
            raise from_text(answer.error)
        what = f"the value of {refs.show_object(answer.oid)}"
        if not answer.path:
            return self._load(answer.data, what)
        given = _Input(answer.oid, answer.path, answer.nbytes)
        try:
            return self._map(given, what)
        finally:
            self._let_go(given)

    def delete(self, oids: List[int]) -> None:
        """Nobody needs these any more."""
        self._enter()
        self._channel.send(DeleteObjects(oids))


def _locate(ref: refs.ObjectRef) -> Callable[[int], LocateObject]:
    return lambda number: LocateObject(number, ref.oid, ref.nbytes)


def stored_in(payload: Any) -> List[int]:
    """The stored objects whose bytes a payload stands for, once for each mention."""
    if type(payload) is Stored:
        return [payload.oid]
    if not isinstance(payload, tuple):
        return []
    found = stored_in(payload[0])
    for _, part in payload[1]:
        found += stored_in(part)
    return found
