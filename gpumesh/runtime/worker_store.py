"""Where a worker's objects lie: in the coordinator's store, if both share memory, or in one of its own. One interface for both.

shared   runner ── CreateSegment, PutObject, LocateObject ──> agent ──> coordinator's store
own      runner ── CreateSegment, PutObject ──> store here ── PutObject, then chunks ──> coordinator
         coordinator ══ chunks ══> store here ── ObjectAt ──> runner
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple, Union

from gpumesh.config import FETCH_WINDOW_BYTES
from gpumesh.protocol import messages as msg
from gpumesh.protocol.connection import OBJECT_TRANSFER, ObjectDelivered
from gpumesh.protocol.object_errors import to_text
from gpumesh.runtime import settings
from gpumesh.runtime.loop import Alarm

if TYPE_CHECKING:
    from gpumesh.runtime.worker_objects import WorkerObjects
    from gpumesh.store.objects import ObjectStore

OnFound = Callable[[Optional["Copy"], str], None]
"""Told where an object is, or why it is nowhere."""


class Copy:
    """An object that somebody here wants or uses."""

    __slots__ = ("oid", "nbytes", "path", "data", "is_here", "users", "waiting", "store", "is_unwanted")

    def __init__(self, oid: int, nbytes: int) -> None:
        self.oid = oid
        self.nbytes = nbytes
        self.path = ""
        self.data: Any = None  # A small object's payload, instead of a path.
        self.is_here = False
        self.users = 0  # Tasks, and mappings of runners; the object is pinned while there are any.
        self.waiting: List[OnFound] = []
        self.store: Union[SharedStore, OwnStore, None] = None  # That has pinned it.
        self.is_unwanted = False  # The mesh has freed it meanwhile.


class SharedStore:
    """The coordinator's store is this host's. A connection has one of its own."""

    def __init__(self, objects: WorkerObjects) -> None:
        self.is_idle = True
        self.folder = ""
        self._objects = objects
        self._next = 1
        self._locating: Dict[int, Copy] = {}
        self._creating: Dict[int, Tuple[int, int, int, Callable[[str, str], None]]] = {}  # As `create` takes them.

    def resolve(self, copy: Copy) -> None:
        self._locating[self._next] = copy
        self._objects.send(msg.LocateObject(self._next, copy.oid))
        self._next += 1

    def let_go(self, copy: Copy) -> None:
        self._objects.send(msg.UnpinObjects([(copy.oid, 1)]))

    def create(self, runner: int, oid: int, nbytes: int, then: Callable[[str, str], None]) -> None:
        self._creating[self._next] = (runner, oid, nbytes, then)
        self._objects.send(msg.CreateSegment(self._next, oid, nbytes))
        self._next += 1

    def put(self, message: msg.PutObject) -> None:
        self._objects.send(message)

    def discard(self, oid: int) -> None:
        self._objects.send(msg.DeleteObjects([oid]))

    def handle(self, kind: Any, message: Any) -> None:
        if kind is msg.ObjectAt:
            copy = self._locating.pop(message.number, None)
            if copy is not None:
                self._objects.found(copy, message.path, message.data, message.error, message.nbytes if message.path else 0)
        elif kind is msg.SegmentCreated:
            waiting = self._creating.pop(message.number, None)
            if waiting is not None:
                self.folder = os.path.dirname(message.path) or self.folder
                waiting[3](message.path, message.error)
        elif kind is msg.SegmentsGone:
            self._objects.tell_writers(message.names)

    def disconnected(self) -> None:
        """Nothing of it can be used any more. What was asked for is asked of the next one."""
        creating, self._creating = self._creating, {}
        for runner, oid, nbytes, then in creating.values():
            self._objects.create(runner, oid, nbytes, then)
        self._objects.lose_copies()


class OwnStore:
    """This host has a store of its own, and the coordinator's objects come over the connection."""

    def __init__(self, objects: WorkerObjects, loop: asyncio.AbstractEventLoop) -> None:
        from gpumesh.store.objects import ObjectStore

        self._objects = objects
        self._loop = loop
        self._alarm = Alarm(loop, self._on_time)
        self._store: ObjectStore = ObjectStore(
            limit=objects.limit,
            spill_dir=settings.spill_dir(),
            call_soon=self._call_soon,
            now=loop.time,
            on_gone=lambda writer, names: objects.tell_writers(names, int(writer)) if writer else None,
        )
        self._store.on_dropped = lambda oids: objects.send(msg.FreeObjects(oids))
        self._next = OBJECT_TRANSFER
        self._incoming: Dict[int, Copy] = {}  # Fetch number -> what is being received.
        self._unsought: List[Copy] = []  # Wanted when the connection had ended, and nobody had said so.
        self._outgoing: Dict[int, int] = {}  # The coordinator's fetch number -> object.
        self._unconfirmed: Dict[int, None] = {}  # Objects of runners that the coordinator does not have yet.

    @property
    def is_idle(self) -> bool:
        """Whether the coordinator has all that was made here."""
        return not self._unconfirmed

    # --- objects come

    def resolve(self, copy: Copy) -> None:
        if self._store.is_sealed(copy.oid):
            self._pin(copy)
        else:
            size = max(copy.nbytes, 1)
            self._store.create(copy.oid, size, writer="", is_copy=True, then=lambda path, error: self._fetch(copy, path, error))
        self._arm()

    def _pin(self, copy: Copy) -> None:
        def then(path: Optional[str], error: Optional[Exception]) -> None:
            self._objects.found(copy, path or "", None, "" if path else to_text(error))

        self._store.pin(copy.oid, then)

    def _fetch(self, copy: Copy, path: Optional[str], error: Optional[Exception]) -> None:
        """There is room for it, or not."""
        link = self._objects.link
        if path is None:
            self._objects.found(copy, "", None, to_text(error))
        elif self._objects.copy_of(copy.oid) is not copy:
            self._store.discard(copy.oid)
            self._objects.found(copy, "", None, "lost: it was given up while there was no room for it")
        elif link is None:
            self._store.discard(copy.oid)
            self._objects.seek_again([copy])
        elif not link.connection.established:
            self._store.discard(copy.oid)
            self._unsought.append(copy)  # Its end is about to be told; until then it would be sought here again at once.
        else:
            number, self._next = self._next, OBJECT_TRANSFER | (self._next + 1)
            self._incoming[number] = copy
            link.connection.receive_into(number, self._store.writable_view(copy.oid))
            link.send(msg.FetchObject(number, copy.oid, FETCH_WINDOW_BYTES))

    def _on_sent(self, number: int) -> None:
        copy = self._incoming.pop(number, None)
        if copy is not None:
            self._store.release_view(copy.oid)
            self._pin(copy)  # Granted by the seal, which otherwise might let it be dropped for the next one.
            self._store.seal(copy.oid)

    def _on_not_sent(self, message: msg.ObjectAt) -> None:
        """A small object, or none."""
        copy = self._incoming.pop(message.number, None)
        if copy is not None:
            self._store.release_view(copy.oid)
            self._store.discard(copy.oid)
            self._objects.found(copy, "", message.data, message.error)

    def let_go(self, copy: Copy) -> None:
        self._store.unpin(copy.oid)
        if copy.is_unwanted:
            self._store.discard(copy.oid)
        self._arm()

    # --- objects go

    def create(self, runner: int, oid: int, nbytes: int, then: Callable[[str, str], None]) -> None:
        self._store.create(
            oid, nbytes, writer=str(runner), then=lambda path, error: then(path or "", "" if path else to_text(error))
        )
        self._arm()

    def put(self, message: msg.PutObject) -> None:
        self._store.seal(message.oid)
        self.offer(message)

    def has(self, oid: int) -> bool:
        """Whether it is here, whole."""
        return self._store.is_sealed(oid)

    def offer(self, message: msg.PutObject) -> None:
        """The coordinator may fetch it, and is to say when it has it."""
        self._unconfirmed[message.oid] = None
        self._store.make_evictable(message.oid, is_evictable=False)
        self._objects.send(message._replace(segment=""))
        self._arm()

    def discard(self, oid: int) -> None:
        if self._store.contains(oid):
            self._store.discard(oid)
            self._arm()

    def _on_fetch(self, message: msg.FetchObject) -> None:
        number, oid = message.number, message.oid
        link = self._objects.link
        assert link is not None
        if not self._store.is_sealed(oid):
            link.send(msg.ObjectAt(number, oid, "", 0, None, "lost: the worker that made it no longer has it"))
            return
        self._outgoing[number] = oid

        def then(path: Optional[str], error: Optional[Exception]) -> None:
            if path is None:
                if self._outgoing.pop(number, None) is not None:
                    link.send(msg.ObjectAt(number, oid, "", 0, None, to_text(error)))
            elif self._objects.link is not link or number not in self._outgoing:
                self._store.unpin(oid)
            else:
                link.connection.send_object(number, [self._store.view(oid)], message.window)
                link.flush_soon()

        self._store.pin(oid, then)

    def _on_delivered(self, number: int) -> None:
        oid = self._outgoing.pop(number, None)
        if oid is not None:
            self._store.release_view(oid)
            self._store.unpin(oid)

    def _on_stored(self, message: msg.ObjectStored) -> None:
        self._unconfirmed.pop(message.oid, None)
        if self._store.contains(message.oid):
            if message.error:
                self._store.discard(message.oid)
            else:
                self._store.make_evictable(message.oid)
        self._objects.may_be_idle()

    def _on_freed(self, oids: Any) -> None:
        for oid in oids:
            copy = self._objects.copy_of(oid)
            if copy is not None:
                copy.is_unwanted = True
            elif self._store.contains(oid):
                self._store.discard(oid)

    # --- the shell

    def handle(self, kind: Any, message: Any) -> None:
        if kind is msg.ObjectSent:
            self._on_sent(message.number)
        elif kind is msg.ObjectAt:
            self._on_not_sent(message)
        elif kind is msg.FetchObject:
            self._on_fetch(message)
        elif kind is ObjectDelivered or kind is msg.CancelFetch:
            self._on_delivered(message.number)
        elif kind is msg.ObjectStored:
            self._on_stored(message)
        elif kind is msg.FreeObjects:
            self._on_freed(message.oids)
        self._arm()

    def disconnected(self) -> None:
        """What was on its way is to come, or to go, anew. Copies that nobody uses go: nobody would tell when they are not wanted."""
        incoming, self._incoming = self._incoming, {}
        outgoing, self._outgoing = self._outgoing, {}
        self._unconfirmed.clear()
        for oid in outgoing.values():
            self._store.release_view(oid)
            self._store.unpin(oid)
        for copy in incoming.values():
            self._store.release_view(copy.oid)
            self._store.discard(copy.oid)
        unsought, self._unsought = self._unsought, []
        self._objects.seek_again([*incoming.values(), *unsought])
        for row in self._store.describe():
            oid = row["oid"]
            if not self._store.is_sealed(oid) or self._objects.is_made_here(oid):
                continue
            copy_in_use = self._objects.copy_of(oid)
            if copy_in_use is None:
                self._store.discard(oid)
            else:
                copy_in_use.is_unwanted = True
        self._arm()

    def close(self) -> None:
        """Remove the store's folder."""
        self._alarm.cancel()
        self._store.close()

    def _call_soon(self, callback: Callable[[], None]) -> None:
        def act() -> None:
            callback()
            self._arm()

        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:
            pass  # The loop has ended, and the store with it.

    def _arm(self) -> None:
        self._alarm.set(self._store.next_deadline())

    def _on_time(self, now: float) -> None:
        self._store.on_time(now)
        self._arm()
