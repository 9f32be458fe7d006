"""The object store as one client connection sees it: puts, gets, references, mappings. What calls and results are is decided elsewhere.

    put ── same host: CreateSegment, write, PutObject ──> store          get ── same host: LocateObject, map privately
        └─ other host: PutObject, then it fetches from here                  └─ other host: FetchObject into private memory

Promises:

1. `put` returns when the value may be changed again; `get` gives private, writable memory.
2. A value read from shared memory stays pinned in the store until the last array on it is gone, and no longer.
3. HoldRefs leave before any ReleaseRefs that could end an object's other life.
4. Nothing is asked of a coordinator that has no objects of ours: all of this costs nothing until it is used.
5. A connection that breaks costs nothing as long as the coordinator keeps this session: all references that live here are held
   anew over the next one, and what may have been on its way is put again.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import threading
import time
import weakref
from collections import deque
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple, Union

from gpumesh.client.outcomes import SecondRunError
from gpumesh.client.spare_segments import Segment, Spare
from gpumesh.config import FETCH_WINDOW_BYTES, INLINE_VALUE_BYTES, KIB, MIB
from gpumesh.errors import ObjectLostError, ObjectStoreFullError
from gpumesh.model.ids import SEQUENCE_BITS
from gpumesh.model.payloads import OutOfBand, Stored, payload_bytes
from gpumesh.protocol.connection import OBJECT_TRANSFER, ObjectDelivered
from gpumesh.protocol.messages import (
    CancelFetch,
    CreateSegment,
    DeleteObjects,
    FetchObject,
    HoldRefs,
    LocateObject,
    ObjectAt,
    ObjectSent,
    ObjectStored,
    OpenStore,
    PutObject,
    ReleaseRefs,
    SegmentCreated,
    SegmentsGone,
    StoreOffer,
    UnpinObjects,
)
from gpumesh.protocol.object_errors import from_text
from gpumesh.serialization import refs
from gpumesh.serialization.refs import ObjectRef, RefTable, show_object
from gpumesh.serialization.values import dumps, loads

if TYPE_CHECKING:
    from gpumesh.client.channel import Channel
    from gpumesh.client.link import MeshLink
    from gpumesh.store.segments import SegmentWriter

logger = logging.getLogger("gpumesh")

NO_SHARED_MEMORY = "GPUMESH_NO_SHARED_MEMORY"
"""Set to 1: values travel over the connection even where the processes share a host."""

FETCHES_AT_ONCE = 8  # Of one `get` of many; each makes room for its value first.
LOCATES_AT_ONCE = 256
CHECKED_BYTES = 64 * MIB  # Smaller values are received without asking how much memory is left.
HUGE_PAGES_BYTES = 4 * MIB  # Fresh memory from this size on is asked for in huge pages: half the time.
UNPROVEN_BYTES = (
    1 * MIB
)  # Of small values put one after the other, before the coordinator is asked for a sign that they have come.
UNPROVEN_OVERHEAD_BYTES = 1 * KIB  # What each counts beside its own size.
_OFFER = "offer"

_Key = Union[int, str, Tuple[str, int]]


class StoredValue:
    """A result that lies in the store, or that refers to what lies there; loaded when it is asked for.

    Attributes:
        space: Where it is.
        ref: Its object; None when the value itself is small and at hand.
        payload: That small value.
        refs: Objects that it refers to, held as long as it may be loaded.
        origin: The task that makes it again, once every place that had it is lost: its handle and arguments. None: it must not, or cannot.
    """

    __slots__ = ("space", "ref", "payload", "refs", "origin", "_again")

    def __init__(
        self, space: ObjectSpace, ref: Optional[ObjectRef], payload: Any = None, refs: Sequence[ObjectRef] = ()
    ) -> None:
        self.space = space
        self.ref = ref
        self.payload = payload
        self.refs = refs
        self.origin: Optional[Tuple[Any, bytes]] = None
        self._again: Optional[Any] = None  # The future of the one task that makes it again.

    @property
    def nbytes(self) -> int:
        """Size of the value."""
        return self.ref.nbytes if self.ref is not None else payload_bytes(self.payload)

    @property
    def wire(self) -> Any:
        """The payload that names it in another call."""
        return Stored(self.ref.oid, self.ref.nbytes) if self.ref is not None else self.payload

    def load(self, timeout: Optional[float] = None) -> Any:
        """The value; see `ObjectSpace.get`. Where it is lost, and its task may be tried again, that makes it once more."""
        if self.ref is not None:
            try:
                return self.space.get(self.ref, timeout)
            except ObjectLostError as error:
                if self.origin is None:
                    raise
                return self._made_again(*self.origin, timeout, why=error)
        with refs.use_space(self.space):
            return loads(self.payload)

    def _made_again(self, handle: Any, payload: bytes, timeout: Optional[float], *, why: ObjectLostError) -> Any:
        """The value from a second run, of which there is one, however often it is asked for."""
        again = self._again
        if again is None:
            from gpumesh.client.futures import submit_one

            logger.warning("the result of %s was lost before it was read (%s); it runs again", handle.name, why)
            again = self._again = submit_one(handle.session, handle, payload)
        error = again.exception(timeout)
        if error is not None:
            raise SecondRunError(error)
        return again.result()

    def __repr__(self) -> str:
        return f"StoredValue({self.ref if self.ref is not None else self.payload!r})"


class _Reply:
    """An answer that somebody waits for. `event` stays None when the connection was lost first."""

    __slots__ = ("event", "is_there", "target", "mark")

    def __init__(self, target: Any = None) -> None:
        self.event: Any = None
        self.mark = 0  # What had been put when it was asked for has arrived when it is here.
        self.is_there = False
        self.target = target  # Memory that the answer fills.


class _Pin(weakref.ref):  # type: ignore[type-arg]
    """Tells when the last array on a private mapping is gone."""

    __slots__ = ("oid", "link")

    oid: int
    link: Any  # The pin counts for this connection.


class _ConnectionLost(Exception):
    """It broke while an answer was awaited."""


class ObjectSpace:
    """See the module's promises. One for each channel; used by any thread."""

    def __init__(self, channel: Channel, wake: Callable[[], None]) -> None:
        self.table = RefTable(wake)
        self.is_nested = channel.is_nested  # Objects of the process's own space are known here, too.
        self._channel = channel
        self._wake = wake
        self._sequence = itertools.count(1)
        self._numbers = itertools.count(1)
        self._replies: Dict[_Key, _Reply] = {}
        self._offers: Deque[_Reply] = deque()  # StoreOffers, in the order in which they were asked for.
        self._condition = threading.Condition()
        self._shared_on: Any = None  # The link of which `_shares` is known.
        self._shares = False
        self._sources: Dict[int, List[Any]] = {}  # Objects that the other side may fetch from here: their parts.
        self._unwritten: Dict[int, Tuple[int, int]] = {}  # Segments asked for, by number: object and size.
        self._sending: Dict[int, int] = {}  # Fetch number -> object that leaves through it.
        self._pins: Dict[int, _Pin] = {}  # By their own id(): they must live until they have told.
        self._unpinned: Deque[Any] = deque()  # Pins whose mapping is gone, and (oid, link).
        self._is_awake = False  # `wake` was called since the last chores.
        self._writer: Optional[SegmentWriter] = None
        self._writing = threading.Lock()
        self._gone_segments: Deque[str] = deque()
        self._putting = threading.Lock()
        self._spare = Spare()  # Under `_putting`.
        self._unproven: Deque[Tuple[int, PutObject]] = deque()  # Put, and perhaps still on their way.
        self._puts = 0  # Of those, ever.
        self._unproven_bytes = 0  # Put since somebody asked for an answer.
        self.renewals = 0  # Sessions that were lost: what was stored before was stored in vain.

    @property
    def channel(self) -> Channel:
        """The connection whose objects these are."""
        return self._channel

    # --- for users

    def put(self, value: Any) -> ObjectRef:
        """Store a value; see `GPUMesh.put`."""
        with refs.collecting() as collected:
            payload = dumps(value, what="the value", snapshot=False)
        return self.store(payload, list(collected.values()))

    def get(self, wanted: Any, timeout: Optional[float] = None) -> Any:
        """The value of a reference, or the list of values of several, fetched side by side.

        Raises:
            ObjectLostError: It was deleted, or every copy is gone.
            TimeoutError: It is not here in time.
            MemoryError: This machine has no room for it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if isinstance(wanted, ObjectRef):
            return self._get_some([wanted], deadline)[0]
        found: List[Any] = []
        wanted = list(wanted)
        while len(found) < len(wanted):
            found.extend(self._get_some(wanted[len(found) :], deadline))
        return found

    def delete(self, oids: List[int]) -> None:
        """Nobody needs these objects any more, whoever still refers to them."""
        self._channel.tell([DeleteObjects(oids)])

    # --- storing

    def store(self, payload: Any, inner: Sequence[ObjectRef], *, is_followed: bool = False) -> ObjectRef:
        """Make an object of a payload, from the memory that it lies in now; returns when that may change.

        Args:
            inner: What the value refers to.
            is_followed: Something else is sent at once, so that the last word of this may leave with that.

        Raises:
            ObjectStoreFullError: There is no room.
            MeshError: The mesh is gone.
        """
        from gpumesh.store.container import container_bytes

        parts = [payload] if type(payload) is bytes else payload.parts
        nbytes = container_bytes(parts)
        oids = list(dict.fromkeys(ref.oid for ref in inner))
        while True:
            link = self._channel.await_link(None)
            try:
                if type(payload) is bytes and len(payload) < INLINE_VALUE_BYTES:
                    oid = self._new_oid()
                    self._put(link, PutObject(oid, nbytes, "", payload, oids), len(payload), is_followed=is_followed)
                elif self._shares_host(link):
                    oid = self._store_here(link, nbytes, parts, oids, is_followed=is_followed)
                else:
                    oid = self._new_oid()
                    self._store_there(link, oid, nbytes, parts, oids)
                return ObjectRef(oid, nbytes, self, granted=1)
            except _ConnectionLost:
                continue  # To the one that comes next, if any does.

    def _store_here(self, link: MeshLink, nbytes: int, parts: List[Any], oids: List[int], *, is_followed: bool) -> int:
        segment = self._spare_segment(link, nbytes)
        if segment is None:
            segment = self._new_segment(link, nbytes)
            self._post(link, [CreateSegment(segment.number, segment.oid, nbytes)])
        created = self._await_segment(segment)
        oid = segment.oid
        if created.error:
            raise from_text(created.error)
        written = PutObject(oid, nbytes, os.path.basename(created.path), None, oids)
        try:
            with self._writing:
                if self._writer is None:
                    from gpumesh.store.segments import SegmentWriter

                    self._writer = SegmentWriter()
                self._forget_segments(self._writer)
                self._writer.write(created.path, nbytes, parts)
        except BaseException as error:
            self._channel.post(link, [written, ReleaseRefs([(oid, 1)])])  # So that the segment is free again.
            if isinstance(error, FileNotFoundError):
                raise _ConnectionLost from error  # The store is gone: its owner has ended.
            if isinstance(error, OSError):
                raise ObjectStoreFullError(
                    f"no room for {nbytes} bytes in {os.path.dirname(created.path)}: {error.strerror}; "
                    "drop references that are not needed, or give the store less memory with --object-memory"
                ) from error
            raise
        self._put(link, written, 0, is_followed=is_followed)
        return oid

    def _new_segment(self, link: MeshLink, nbytes: int) -> Segment:
        """One to be asked for, whose answer is awaited from now on."""
        number, oid = next(self._numbers), self._new_oid()
        reply = _Reply()
        reply.mark = self._puts
        self._unwritten[number] = (oid, nbytes)
        self._replies[number] = reply
        return Segment(link, number, oid, nbytes, reply)

    def _spare_segment(self, link: MeshLink, nbytes: int) -> Optional[Segment]:
        """The one that was asked for ahead, if it fits."""
        with self._putting:
            spare = self._spare.take()
        if spare is None or (spare.link is link and spare.nbytes == nbytes):
            return spare
        self._leave(spare)
        return None

    def _await_segment(self, segment: Segment) -> SegmentCreated:
        reply = segment.reply
        try:
            self._channel.drive_until(lambda: reply.is_there, self._condition, None)
        except BaseException:  # Interrupted: the segment goes back as it is when it comes.
            self._leave(segment)
            raise
        self._replies.pop(segment.number, None)
        self._unwritten.pop(segment.number, None)
        if reply.event is None:
            raise _ConnectionLost
        created: SegmentCreated = reply.event
        return created

    def _leave(self, segment: Segment) -> None:
        """Nobody will write into it."""
        self._replies.pop(segment.number, None)
        if segment.reply.event is not None:
            self._give_back(segment.link, segment.reply.event)

    def _put(self, link: MeshLink, message: PutObject, nbytes: int, *, is_followed: bool = False) -> None:
        """Send what nobody answers; until something else is answered, it may have to be sent again."""
        with self._putting:
            number = self._puts + 1
            self._unproven.append((number, message))
            messages: List[Any] = [message]
            spare = None
            if message.segment and self._spare.is_wanted(message.nbytes):
                spare = self._new_segment(link, message.nbytes)
                spare.reply.mark = number
                messages.append(CreateSegment(spare.number, spare.oid, message.nbytes))
            self._post(link, messages, is_followed=is_followed)
            self._spare.segment = spare or self._spare.segment
            self._puts = number
            self._unproven_bytes += nbytes + UNPROVEN_OVERHEAD_BYTES
            is_proof_due = self._unproven_bytes >= UNPROVEN_BYTES
            if is_proof_due:
                self._unproven_bytes = 0
        if is_proof_due:
            reply = _Reply()
            reply.mark = number
            self._offers.append(reply)
            self._post(link, [OpenStore()])

    def _give_back(self, link: MeshLink, created: SegmentCreated) -> None:
        """Nobody will write this segment: an object that is released at once."""
        oid, nbytes = self._unwritten.pop(created.number, (0, 0))
        if nbytes and created.path:
            segment = os.path.basename(created.path)
            self._channel.post(link, [PutObject(oid, nbytes, segment, None, []), ReleaseRefs([(oid, 1)])])

    def _store_there(self, link: MeshLink, oid: int, nbytes: int, parts: List[Any], oids: List[int]) -> None:
        self._sources[oid] = parts
        is_stored = False
        try:
            (stored,) = self._ask(link, [(("stored", oid), _Reply())], [PutObject(oid, nbytes, "", None, oids)], None)
            is_stored = True
        finally:
            del self._sources[oid]
            if not is_stored:
                self._stop_sending(link, oid)
        if stored.error:
            self._channel.post(link, [ReleaseRefs([(oid, 1)])])
            raise from_text(stored.error)

    def _stop_sending(self, link: MeshLink, oid: int) -> None:
        """Interrupted: the value may change from now on, so what has been sent of it is worth nothing."""
        with link.lock:
            for number, source in list(self._sending.items()):
                if source == oid:
                    del self._sending[number]
                    link.connection.stop_sending(number)
                    link.connection.send(ObjectAt(number, oid, "", 0, None, "lost: its sender was interrupted"))
            link.connection.send(ReleaseRefs([(oid, 1)]))
        link.flush()
        self._channel.see_to_writing(link)

    def _forget_segments(self, writer: SegmentWriter) -> None:
        names: List[str] = []
        while self._gone_segments:
            names.append(self._gone_segments.popleft())
        if names:
            writer.forget(names)

    # --- reading

    def _get_some(self, wanted: List[ObjectRef], deadline: Optional[float]) -> List[Any]:
        while True:
            link = self._channel.await_link(deadline)
            try:
                if self._shares_host(link):
                    some = wanted[:LOCATES_AT_ONCE]
                    found = self._locate(link, some, deadline)
                else:
                    some = wanted[:FETCHES_AT_ONCE]
                    found = self._fetch(link, some, deadline)
                break
            except _ConnectionLost:
                continue
        values: List[Any] = []
        try:
            for ref, (event, target) in zip(some, found):
                values.append(self._load(link, ref, event, target))
        except BaseException:
            self._unpin_answers(link, [event for event, _ in found[len(values) + 1 :]])
            raise
        return values

    def _unpin_answers(self, link: MeshLink, events: Sequence[Any]) -> None:
        """Nobody will map what these say."""
        for event in events:
            if type(event) is ObjectAt and event.path:
                self._unpin((event.oid, link))

    def _locate(self, link: MeshLink, some: List[ObjectRef], deadline: Optional[float]) -> List[Tuple[Any, Any]]:
        replies: List[Tuple[int, _Reply]] = []
        messages: List[Any] = []
        for ref in some:
            number = next(self._numbers)
            replies.append((number, _Reply()))
            messages.append(LocateObject(number, ref.oid))
        return [(event, None) for event in self._ask(link, replies, messages, deadline)]

    def _fetch(self, link: MeshLink, some: List[ObjectRef], deadline: Optional[float]) -> List[Tuple[Any, Any]]:
        replies: List[Tuple[int, _Reply]] = []
        messages: List[Any] = []
        for ref in some:
            number = OBJECT_TRANSFER | (next(self._numbers) % OBJECT_TRANSFER)
            replies.append((number, _Reply(_private_memory(ref.nbytes))))
            messages.append(FetchObject(number, ref.oid, FETCH_WINDOW_BYTES))
        with link.lock:
            for number, reply in replies:
                link.connection.receive_into(number, reply.target)
        is_done = False
        try:
            events = self._ask(link, replies, messages, deadline)
            is_done = True
        finally:
            if not is_done:
                with link.lock:
                    for number, reply in replies:
                        if not reply.is_there:
                            link.connection.forget_transfer(number)
                            if not link.is_over:
                                link.connection.send(CancelFetch(number))
                link.flush()
                self._channel.see_to_writing(link)
        return [(event, reply.target) for event, (_, reply) in zip(events, replies)]

    def _load(self, link: MeshLink, ref: ObjectRef, event: Any, target: Any) -> Any:
        """The value that an answer has brought."""
        payload: Any
        if type(event) is ObjectSent:
            from gpumesh.store.container import open_container

            payload = OutOfBand(open_container(memoryview(target)))
        elif event.error:
            raise from_text(event.error)
        elif event.data is not None:
            payload = event.data[0] if isinstance(event.data, tuple) else event.data
        else:
            payload = self._map(link, ref.oid, event.path, event.nbytes)
        with refs.use_space(self):
            return loads(payload)

    def _map(self, link: MeshLink, oid: int, path: str, nbytes: int) -> OutOfBand:
        from gpumesh.store.segments import map_private

        try:
            mapped, parts = map_private(path, nbytes)
        except BaseException as error:
            self._unpin((oid, link))
            if isinstance(error, (OSError, ValueError)):
                raise ObjectLostError(f"object {show_object(oid)} cannot be read where it should be: {error}") from error
            raise
        if mapped is None:  # A copy.
            self._unpin((oid, link))
        else:
            pin = _Pin(mapped, self._unpin)
            pin.oid, pin.link = oid, link
            self._pins[id(pin)] = pin
        return OutOfBand(parts)

    def _unpin(self, pin: Any) -> None:
        """A mapping is gone. Called from anywhere, the collector included."""
        self._unpinned.append(pin)
        if not self._is_awake:
            self._is_awake = True
            self._wake()

    # --- asking

    def _shares_host(self, link: MeshLink) -> bool:
        """Whether this process and the coordinator see the same shared memory; asked once for each connection."""
        if self._shared_on is not link:
            if os.environ.get(NO_SHARED_MEMORY, "") not in ("", "0"):
                shares = False
            else:
                from gpumesh.store.segments import shares_host

                (offer,) = self._ask(link, [(_OFFER, _Reply())], [OpenStore()], None)
                shares = shares_host(offer.probe, offer.secret)
            self._shares = shares
            self._shared_on = link
        return self._shares

    def _ask(
        self, link: MeshLink, replies: Sequence[Tuple[_Key, _Reply]], messages: List[Any], deadline: Optional[float]
    ) -> List[Any]:
        """Send, and wait for all the answers; the calling thread does the socket's work meanwhile if no other does."""
        for key, reply in replies:
            reply.mark = self._puts
            if key == _OFFER:
                self._offers.append(reply)
            else:
                self._replies[key] = reply
        missing = [reply for _, reply in reversed(replies)]

        def are_there() -> bool:
            while missing and missing[-1].is_there:
                missing.pop()
            return not missing

        try:
            self._post(link, messages)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._channel.drive_until(are_there, self._condition, left):
                raise FutureTimeoutError("the value is not here yet; ask again later, or give it more time")
        except BaseException:
            self._unpin_answers(link, [reply.event for _, reply in replies])
            raise
        finally:
            for key, _ in replies:
                self._replies.pop(key, None)
        events = [reply.event for _, reply in replies]
        if None in events:
            raise _ConnectionLost
        return events

    def _post(self, link: MeshLink, messages: List[Any], *, is_followed: bool = False) -> None:
        if not self._channel.post(link, messages, is_followed=is_followed):
            raise _ConnectionLost

    def _new_oid(self) -> int:
        return self._channel.client << SEQUENCE_BITS | next(self._sequence)

    def give_back_spare(self) -> None:
        """Nobody has needed for long what was asked for ahead. On the I/O thread, from time to time."""
        if self._spare.is_stale() and self._putting.acquire(blocking=False):
            try:
                spare = self._spare.take()
            finally:
                self._putting.release()
            if spare is not None:
                self._leave(spare)

    # --- what arrives, under the receive lock

    def on_event(self, event: Any, link: MeshLink) -> None:
        """Take a message in; quick."""
        kind = type(event)
        if kind is ObjectAt or kind is SegmentCreated or kind is ObjectSent:
            reply = self._replies.pop(event.number, None)
            if reply is not None:
                self._answer(reply, event)
            elif kind is ObjectAt and event.path:  # Whoever asked was interrupted.
                self._unpin((event.oid, link))
            elif kind is SegmentCreated:
                self._give_back(link, event)
        elif kind is ObjectStored:
            reply = self._replies.pop(("stored", event.oid), None)
            if reply is not None:
                self._answer(reply, event)
        elif kind is StoreOffer:
            if self._offers:
                self._answer(self._offers.popleft(), event)
        elif kind is FetchObject:
            self._send(event, link)
        elif kind is SegmentsGone:
            self._gone_segments.extend(event.names)
            self._wake()
        elif kind is ObjectDelivered or kind is CancelFetch:
            self._sending.pop(event.number, None)

    def _answer(self, reply: _Reply, event: Any) -> None:
        unproven = self._unproven
        with self._condition:
            reply.event = event
            reply.is_there = True
            while unproven and unproven[0][0] <= reply.mark:
                unproven.popleft()
            self._condition.notify_all()

    def _send(self, fetch: FetchObject, link: MeshLink) -> None:
        parts = self._sources.get(fetch.oid)
        with link.lock:
            if parts is None:
                link.connection.send(ObjectAt(fetch.number, fetch.oid, "", 0, None, "lost: it is not here any more"))
            else:
                from gpumesh.store.container import container_views

                self._sending[fetch.number] = fetch.oid
                link.connection.send_object(fetch.number, container_views(parts), fetch.window)
        link.flush()
        self._channel.see_to_writing(link)

    def received(self, payload: Any) -> StoredValue:
        """A result as it came, holding what it was granted."""
        if type(payload) is Stored:
            return StoredValue(self, ObjectRef(payload.oid, payload.nbytes, self, granted=1))
        if not isinstance(payload, tuple):
            return StoredValue(self, None, payload)
        inner = [ObjectRef(oid, 0, self, granted=1) for oid in payload[2]]
        value = payload[0]
        if type(value) is Stored:
            return StoredValue(self, ObjectRef(value.oid, value.nbytes, self, granted=1), None, inner)
        return StoredValue(self, None, value, inner)

    # --- from time to time

    @property
    def has_chores(self) -> bool:
        """Whether `chores` has something to tell."""
        return bool(self.table) or bool(self._unpinned) or bool(self._gone_segments)

    def chores(self, link: MeshLink) -> List[Any]:
        """What the coordinator is to know of references and mappings, in this order. Under the channel's lock."""
        messages: List[Any] = []
        self._is_awake = False  # First: what happens from now on wakes again.
        holds = self.table.take_holds()
        if holds:
            messages.append(HoldRefs(holds))
        counts: Dict[int, int] = {}
        while self._unpinned:
            pin = self._unpinned.popleft()
            if type(pin) is _Pin:
                self._pins.pop(id(pin), None)
                oid, of = pin.oid, pin.link
            else:
                oid, of = pin
            if of is link:
                counts[oid] = counts.get(oid, 0) + 1
        if counts:
            messages.append(UnpinObjects(list(counts.items())))
        releases = self.table.take_releases()
        if releases:
            messages.append(ReleaseRefs(releases))
        if self._gone_segments and self._writing.acquire(blocking=False):
            try:
                if self._writer is not None:
                    self._forget_segments(self._writer)
                self._gone_segments.clear()
            finally:
                self._writing.release()
        return messages

    # --- the end of a connection

    def on_lost(self) -> None:
        """The connection is over: nothing that was asked will be answered."""
        offers, self._offers = self._offers, deque()
        replies, self._replies = self._replies, {}
        self._shared_on = None
        self._unwritten.clear()
        self._spare.segment = None
        self._sending.clear()
        with self._condition:
            for reply in itertools.chain(offers, replies.values()):
                reply.is_there = True
            self._condition.notify_all()

    def renew(self) -> List[Any]:
        """A new connection: what lives here is to be held there anew; what to send first."""
        self.table.renew()
        with self._writing:
            if self._writer is not None:
                self._writer.close()
            self._gone_segments.clear()
        again = [message for _, message in self._unproven]
        for message in again:
            self.table.granted(message.oid)
        holds = self.table.take_holds()
        return [*again, HoldRefs(holds)] if holds else again

    def resumed(self, *, is_kept: bool) -> None:
        """The coordinator has said whether it has kept what this session had there."""
        if not is_kept:
            self.renewals += 1

    def close(self) -> None:
        """The end. Arrays on mappings live on."""
        self.on_lost()
        if self._writing.acquire(timeout=1.0):
            try:
                if self._writer is not None:
                    self._writer.close()
            finally:
                self._writing.release()


def _private_memory(nbytes: int) -> mmap.mmap:
    """Fresh memory that goes back to the system with the last array on it.

    Raises:
        MemoryError: There is not so much.
    """
    from gpumesh.store.segments import anonymous_memory

    if nbytes >= CHECKED_BYTES:
        available = available_memory()
        if nbytes > available:
            raise MemoryError(
                f"a value of {nbytes} bytes does not fit into the {available} bytes of memory that this machine has left"
            )
    try:
        memory = anonymous_memory(nbytes)
    except OSError as error:
        raise MemoryError(f"no memory for a value of {nbytes} bytes: {error.strerror}") from error
    if nbytes >= HUGE_PAGES_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # A kernel without them.
    return memory


def available_memory() -> int:
    """Bytes that this process can still get without making the system fight for memory."""
    from gpumesh.devices.detect import host_memory

    limit = host_memory() or 1 << 62
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return min(limit, int(line.split()[1]) * KIB)
    except (OSError, ValueError):
        pass  # Not Linux.
    return limit
