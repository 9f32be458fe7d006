"""The objects of one host: the store that a coordinator or a worker agent owns, on its event loop's thread.

The books are in store.table, which decides; here segments are created, handed out, mapped and removed, and errors get their text.
Nothing here waits: what takes time happens on the spiller's thread, and whoever asked is called when it is there.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

from gpumesh.config import FREE_SEGMENTS_SECONDS
from gpumesh.errors import MeshError, ObjectLostError, ObjectStoreFullError
from gpumesh.model.resources import show_bytes
from gpumesh.store.segments import NO_SPACE, KeptMaps, StoreFolder, create_segment
from gpumesh.store.spill import Spiller, allocate
from gpumesh.store.table import (
    Action,
    Dropped,
    Entry,
    ForgetFile,
    Give,
    MoveIn,
    MoveOut,
    PinFailed,
    Pinned,
    Refusal,
    Refuse,
    Table,
    Unlink,
)

OWNER = ""  # The writer of what the owner itself receives.
ON_LOOP_BYTES = 1 << 20  # Allocating or removing up to this much takes under a millisecond.
LOOK_AGAIN_SECONDS = 0.1  # How often the file system is asked again while somebody waits for space that others use.
NAMED_HOLDERS = 5  # In the text of an error.

Created = Callable[[Optional[str], Optional[ObjectStoreFullError]], None]
WasPinned = Callable[[Optional[str], Optional[MeshError]], None]


class ObjectStore:
    """Objects in shared memory up to a limit, and on disk beyond it.

    Args:
        limit: Bytes of memory for objects.
        spill_dir: Where objects go beyond it; the temporary folder if None.
        root: Where the folder of segments goes; shared memory if None.
        call_soon: Hands a call over to the thread that owns the store (`loop.call_soon_threadsafe`).
        now: The owner's clock, in seconds.
        on_gone: Called with a writer and the names of removed segments of which that writer may keep maps.

    The folder is made at the first need. Callbacks are called on the owner's thread, some before the method returns; each once,
    unless the store is closed first. They may call the store.
    """

    def __init__(
        self,
        *,
        limit: int,
        spill_dir: Optional[str] = None,
        root: Optional[str] = None,
        call_soon: Callable[[Callable[[], None]], Any],
        now: Callable[[], float],
        on_gone: Callable[[str, List[str]], None],
    ) -> None:
        self.limit = limit
        self.on_dropped: Optional[Callable[[List[int]], None]] = None  # Copies that went to make room.
        self.on_spilled: Optional[Callable[[int, Optional[OSError]], None]] = None  # So many bytes went to disk, or did not.
        self._spill_dir = spill_dir
        self._root = root
        self._call_soon = call_soon
        self._now = now
        self._on_gone = on_gone
        self._describe_holder: Callable[[int], str] = lambda oid: ""
        self._table = Table(limit)
        self._folder: Optional[StoreFolder] = None
        self._spiller: Optional[Spiller] = None
        self._maps = KeptMaps(nbytes=limit, elsewhere=self._close_elsewhere)
        self._views: Dict[int, Tuple[memoryview, int]] = {}  # And how often it was given out.
        self._creating: Dict[int, Tuple[Created, int]] = {}  # Who waits for a segment of how many bytes.
        self._pinning: Dict[int, Deque[WasPinned]] = {}
        self._spill_failure: Optional[OSError] = None
        self._space_failure: Optional[OSError] = None
        self._actions: Deque[Action] = deque()
        self._acting = False
        self._gone: Dict[str, List[str]] = {}
        self._dropped: List[int] = []
        self._closed = False
        self._used_at = 0.0  # When a segment was last asked for.

    @property
    def folder(self) -> StoreFolder:
        """The folder of segments, made now if need be."""
        if self._folder is None:
            self._folder = StoreFolder(root=self._root, limit=self.limit)
            self._table.restrict(self._folder.total_bytes())
        return self._folder

    def set_holders(self, describe: Callable[[int], str]) -> None:
        """Let errors say who holds an object: `describe(oid)` is a short text."""
        self._describe_holder = describe

    # --- writing

    def create(self, oid: int, nbytes: int, *, writer: str, then: Created, is_copy: bool = False) -> None:
        """Get room for a new object, after moving others to disk if that is what it takes.

        Args:
            oid: A new number.
            nbytes: Size of its container.
            writer: Who will write it; `OWNER` if it comes in through `writable_view`.
            then: Called with the path of the segment to be written, or with the reason why there is none.
            is_copy: It may be dropped to make room.

        Raises:
            ValueError: There is such an object.
        """
        if self._table.find(oid) is not None:
            raise ValueError(f"object {oid:#x} exists already")
        self._look_at_space()
        self._used_at = self._now()
        self._creating[oid] = (then, nbytes)
        self._act(self._table.create(oid, nbytes, writer=writer, now=self._now(), is_copy=is_copy))

    def seal(self, oid: int) -> None:
        """It is written; from now on it can be pinned, and moved to disk. If it is not, its readers are told, and only they.

        Raises:
            KeyError: There is no such object, or nobody was given a segment for it.
        """
        entry = self._entry(oid)
        if entry.segment is None:
            raise KeyError(f"object {oid:#x} has no segment")
        if not entry.sealed:
            if os.path.getsize(self.folder.segment_path(entry.segment.name)) < entry.nbytes:
                entry.segment.recycle = False  # Its writer found no space, or lies: we do not know how much memory it has.
            self._act(self._table.seal(oid, self._now()))

    def writable_view(self, oid: int) -> memoryview:
        """Where the bytes of an unsealed object of writer `OWNER` go; all of it has memory. Until `release_view`."""
        entry = self._entry(oid)
        assert entry.segment is not None, oid
        assert not entry.sealed, oid
        path = self.folder.segment_path(entry.segment.name)
        if os.path.getsize(path) < entry.nbytes:
            allocate(path, entry.nbytes)
        return self._map(entry)

    # --- reading

    def contains(self, oid: int) -> bool:
        """Whether there is such an object, or it is being written."""
        return self._table.find(oid) is not None

    def is_sealed(self, oid: int) -> bool:
        """Whether it is there and whole."""
        entry = self._table.find(oid)
        return entry is not None and entry.sealed

    def nbytes_of(self, oid: int) -> int:
        """Size of its container."""
        return self._entry(oid).nbytes

    def segment_name(self, oid: int) -> str:
        """The segment it lies in, "" while it is in none."""
        segment = self._entry(oid).segment
        return segment.name if segment is not None else ""

    def is_segment_of(self, oid: int, name: str) -> bool:
        """Whether this segment was given out for this object, which is not sealed yet."""
        entry = self._table.find(oid)
        return entry is not None and not entry.sealed and entry.segment is not None and entry.segment.name == name

    def pin(self, oid: int, then: WasPinned) -> None:
        """Keep it in memory for a reader, after bringing it back from disk or waiting for its seal if need be.

        Args:
            then: Called with the path of its segment, and from then on there is one pin more; or with why not.
        """
        self._pinning.setdefault(oid, deque()).append(then)
        if self._folder is not None and not self.segment_is_here(oid):
            self._look_at_space()
        self._act(self._table.pin(oid, self._now()))

    def unpin(self, oid: int, count: int = 1, *, recycle: bool = True) -> None:
        """Take pins back. `recycle=False`: their reader was lost and may still map the segment.

        Raises:
            KeyError: There is no such object; whoever has a pin keeps it alive, so this is a mistake of the caller.
        """
        self._act(self._table.unpin(oid, count, self._now(), recycle=recycle))

    def view(self, oid: int) -> memoryview:
        """The bytes of an object that is pinned, or being written, in memory that its writers share. Until `release_view`."""
        return self._map(self._entry(oid))

    def release_view(self, oid: int) -> None:
        """Done with what one call of `view` or `writable_view` gave for this object."""
        view, count = self._views.pop(oid, (None, 0))
        if view is not None and count == 1:
            view.release()
        elif view is not None:
            self._views[oid] = (view, count - 1)

    def segment_is_here(self, oid: int) -> bool:
        """Whether its bytes are in memory."""
        entry = self._table.find(oid)
        return entry is not None and entry.segment is not None

    # --- the end of an object

    def discard(self, oid: int, *, recycle: bool = True) -> None:
        """Nobody refers to it: it goes at once, or with its last pin. `recycle=False`: somebody lost may still map its segment."""
        if oid in self._views and not self.is_sealed(oid):
            self._views.pop(oid)[0].release()
            recycle = False  # A transfer into it may not have ended.
        self._act(self._table.discard(oid, self._now(), recycle=recycle))
        given_up = self._creating.pop(oid, None)  # Its memory was still being set up.
        if given_up is not None:
            then, nbytes = given_up
            then(None, self._full(nbytes, Refusal.GONE))

    def make_evictable(self, oid: int, *, is_evictable: bool = True) -> None:
        """The coordinator has it too: from now on it may be dropped to make room; or that cannot be relied on any more."""
        self._table.make_copy(oid, is_copy=is_evictable)

    # --- time

    def next_deadline(self) -> Optional[float]:
        """When `on_time` is to be called, if nothing else happens before."""
        deadline = self._table.next_deadline()
        if deadline is not None and self._table.room < self._table.limit:
            return min(deadline, self._now() + LOOK_AGAIN_SECONDS)
        if self._table.free_bytes:
            idle_at = self._used_at + FREE_SEGMENTS_SECONDS
            return idle_at if deadline is None else min(deadline, idle_at)
        return deadline

    def on_time(self, now: float) -> None:
        """Refuse what has waited too long for room; give back what nobody has used for long."""
        if self._table.has_waiting:
            self._look_at_space()
            self._act(self._table.serve(now))
            self._act(self._table.on_time(now))
        elif self._table.free_bytes and now >= self._used_at + FREE_SEGMENTS_SECONDS:
            self._act(self._table.forget_free())

    # --- what a person wants to know

    def describe(self) -> List[Dict[str, Any]]:
        """One dict for each object: `oid`, `nbytes`, `where` ("memory", "disk", "writing", "readers"), `pins`, `age` in seconds."""
        now = self._now()
        return [
            {"oid": entry.oid, "nbytes": entry.nbytes, "where": _where(entry), "pins": entry.pins, "age": now - entry.since}
            for entry in self._table.entries()
        ]

    def usage(self) -> Dict[str, int]:
        """Bytes in `memory`, in `free` segments, on `disk`; the `limit` in bytes; the number of `objects`."""
        table = self._table
        return {
            "memory": table.used - table.free_bytes,
            "free": table.free_bytes,
            "disk": table.disk_bytes,
            "limit": table.limit,
            "objects": len(table),
        }

    def check(self) -> None:
        """Raise AssertionError if the books are wrong."""
        self._table.check()

    def close(self) -> None:
        """Remove everything, also what somebody still maps: they keep what they have. Nobody who waits is called any more."""
        if self._closed:
            return
        self._closed = True
        self._actions.clear()
        for view, _ in self._views.values():
            view.release()
        self._views.clear()
        if self._spiller is not None:
            self._spiller.close()
        self._maps.close()
        if self._folder is not None:
            self._folder.close()

    # --- acting

    def _act(self, actions: List[Action]) -> None:
        """Do these, in order, and what callbacks add; only the outermost call works, so nothing overtakes."""
        self._actions.extend(actions)
        if self._acting:
            return
        self._acting = True
        try:
            while self._actions or self._gone or self._dropped:
                while self._actions:
                    self._do(self._actions.popleft())
                self._tell()
        finally:
            self._acting = False

    def _do(self, action: Action) -> None:
        if type(action) is Pinned:
            path = self.folder.segment_path(action.name)
            for then in self._take_pins(action.oid, action.pins):
                then(path, None)
        elif type(action) is Give:
            self._give(action)
        elif type(action) is Unlink:
            self._unlink(action)
        elif type(action) is MoveOut:
            self._move_out(action)
        elif type(action) is MoveIn:
            self._move_in(action)
        elif type(action) is ForgetFile:
            self._disk.forget(action.oid)
        elif type(action) is Dropped:
            self._dropped.append(action.oid)
        elif type(action) is Refuse:
            self._refuse(action.oid, action.why)
        elif type(action) is PinFailed:
            error = self._unreadable(action.oid, action.why)
            for then in self._take_pins(action.oid, action.pins):
                then(None, error)

    def _give(self, action: Give) -> None:
        oid = action.oid
        entry = self._table.find(oid)
        if entry is None or oid not in self._creating:
            return  # Discarded by a callback in between.
        path = self.folder.segment_path(action.name)
        try:
            if action.fresh:
                create_segment(path)
            lacking = entry.nbytes - os.path.getsize(path) if entry.writer == OWNER else 0
            if lacking > ON_LOOP_BYTES:
                self._disk.allocate(path, entry.nbytes, lambda failure: self._allocated(oid, path, failure))
                return
            if lacking > 0:
                allocate(path, entry.nbytes)
            if entry.writer == OWNER and entry.nbytes > ON_LOOP_BYTES and self._maps.get(action.name) is None:
                self._allocated(oid, path, None)
                return
        except OSError as failure:
            self._allocated(oid, path, failure)
            return
        then, _ = self._creating.pop(oid)
        then(path, None)

    def _allocated(self, oid: int, path: str, failure: Optional[OSError]) -> None:
        waiting = self._creating.pop(oid, None)
        if waiting is None:
            return  # Discarded meanwhile.
        then, nbytes = waiting
        if failure is None:
            self._set_up(oid, path, waiting)
            return
        self._space_failure = failure
        error = self._full(nbytes, Refusal.NO_ROOM)
        self._act(self._table.discard(oid, self._now(), recycle=False))
        then(None, error)

    def _set_up(self, oid: int, path: str, waiting: Tuple[Created, int]) -> None:
        """Map memory that a large object comes into, all of it, before the first byte does: done meanwhile it would slow both."""
        then, nbytes = waiting
        self._creating[oid] = waiting  # Who discards it meanwhile finds it there.

        def is_set_up(failure: Optional[OSError]) -> None:
            if not self._closed and self._creating.pop(oid, None) is not None:
                then(path, None)

        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                kept = self._maps.add(os.path.basename(path), descriptor, populate=False)
            finally:
                os.close(descriptor)
        except OSError:
            is_set_up(None)  # `writable_view` will say what is wrong.
            return
        self._disk.populate(kept, nbytes, is_set_up)

    def _refuse(self, oid: int, why: Refusal) -> None:
        waiting = self._creating.pop(oid, None)
        if waiting is not None:
            then, nbytes = waiting
            then(None, self._full(nbytes, why))

    def _unlink(self, action: Unlink) -> None:
        self._maps.drop(action.name)
        for writer in action.writers:
            if writer != OWNER:
                self._gone.setdefault(writer, []).append(action.name)
        path = self.folder.segment_path(action.name)
        with contextlib.suppress(FileNotFoundError):
            if os.path.getsize(path) > ON_LOOP_BYTES:
                self._disk.unlink(path, lambda failure: self._space_came_free())
            else:
                os.unlink(path)

    def _space_came_free(self) -> None:
        if self._table.has_waiting and not self._closed:
            self._look_at_space()
            self._act(self._table.serve(self._now()))

    def _move_out(self, action: MoveOut) -> None:
        path = self.folder.segment_path(action.name)
        self._disk.move_out(
            action.oid, path, action.nbytes, lambda failure: self._moved_out(action.oid, action.nbytes, failure)
        )

    def _moved_out(self, oid: int, nbytes: int, failure: Optional[OSError]) -> None:
        if self._closed:
            return
        self._look_at_space()
        self._spill_failure = failure
        if self.on_spilled is not None:
            self.on_spilled(nbytes, failure)
        if failure is None:
            self._act(self._table.moved_out(oid, self._now()))
        else:
            self._act(self._table.move_out_failed(oid, self._now()))

    def _move_in(self, action: MoveIn) -> None:
        path = self.folder.segment_path(action.name)
        try:
            if action.fresh:
                create_segment(path)
        except OSError as failure:
            self._moved_in(action.oid, failure)
            return
        self._disk.move_in(action.oid, path, action.nbytes, lambda failure: self._moved_in(action.oid, failure))

    def _moved_in(self, oid: int, failure: Optional[OSError]) -> None:
        if self._closed:
            return
        self._look_at_space()
        if failure is None:
            self._act(self._table.moved_in(oid, self._now()))
            return
        full = failure.errno in NO_SPACE or failure.errno in (errno.EMFILE, errno.ENFILE)
        if full:
            self._space_failure = failure
        why = Refusal.NO_ROOM if full else Refusal.UNREADABLE
        self._act(self._table.move_in_failed(oid, self._now(), why=why))

    def _tell(self) -> None:
        gone, self._gone = self._gone, {}
        for writer, names in gone.items():
            self._on_gone(writer, names)
        dropped, self._dropped = self._dropped, []
        if dropped and self.on_dropped is not None:
            self.on_dropped(dropped)

    def _take_pins(self, oid: int, count: int) -> List[WasPinned]:
        waiting = self._pinning[oid]
        taken = [waiting.popleft() for _ in range(count)]
        if not waiting:
            del self._pinning[oid]
        return taken

    # --- the pieces

    @property
    def _disk(self) -> Spiller:
        if self._spiller is None:
            self._spiller = Spiller(folder=self._spill_dir, name=f"{self.folder.name}-disk", call_soon=self._call_soon)
        return self._spiller

    def _map(self, entry: Entry) -> memoryview:
        segment = entry.segment
        assert segment is not None, entry.oid
        given, count = self._views.get(entry.oid, (None, 0))
        if given is not None:
            self._views[entry.oid] = (given, count + 1)
            return given
        kept = self._maps.get(segment.name)
        if kept is None or len(kept) < entry.nbytes:
            descriptor = os.open(self.folder.segment_path(segment.name), os.O_RDWR | os.O_CLOEXEC)
            try:
                kept = self._maps.add(segment.name, descriptor, populate=False)
            finally:
                os.close(descriptor)
        view = memoryview(kept)[: entry.nbytes]
        self._views[entry.oid] = (view, 1)
        return view

    def _close_elsewhere(self, mapped: mmap.mmap) -> bool:
        if self._closed or len(mapped) <= ON_LOOP_BYTES:
            return False
        self._disk.close_map(mapped)
        return True

    def _look_at_space(self) -> None:
        """The file system may have less for us than the limit says. What is written already is ours."""
        self._table.room = min(self._table.limit, self._table.written + self.folder.free_bytes())

    def _entry(self, oid: int) -> Entry:
        entry = self._table.find(oid)
        if entry is None:
            raise KeyError(f"object {oid:#x} is not here")
        return entry

    # --- errors

    def _unreadable(self, oid: int, why: Refusal) -> MeshError:
        if why is Refusal.NO_ROOM:
            return self._full(self._entry(oid).nbytes, why)
        if why is Refusal.UNREADABLE:
            return ObjectLostError(f"object {oid:#x} could not be read back from {self._disk.path}; put it again")
        return ObjectLostError(f"object {oid:#x} is not in the object store any more: its last reference was dropped")

    def _full(self, nbytes: int, why: Refusal) -> ObjectStoreFullError:
        size, path = show_bytes(nbytes), self.folder.path
        limit = show_bytes(self._table.limit)
        if why is Refusal.GONE:
            return ObjectStoreFullError(f"an object of {size} was given up while it waited for room in {path}")
        if why is Refusal.TOO_LARGE:
            if self._table.limit < self.limit:
                limit = f"{limit}, all that its file system has (in a container: --shm-size)"
            return ObjectStoreFullError(
                f"an object of {size} is larger than the object store {path} may be: {limit}; "
                f"give it more with --object-memory, or put the value in pieces"
            )
        used = show_bytes(self._table.used - self._table.free_bytes)
        reasons = [f"{used} of its limit of {limit} are in use{self._holders()}"]
        if self._table.room < self._table.limit or self._space_failure is not None:
            reasons.append(f"the file system of {path} has {show_bytes(self.folder.free_bytes())} left")
        if self._spill_failure is not None:
            reasons.append(f"nothing can be moved to {self._disk.path}: {self._spill_failure.strerror or self._spill_failure}")
        return ObjectStoreFullError(
            f"no room for an object of {size} in the object store {path}: {'; '.join(reasons)}; drop references to objects that are "
            f"not needed, give it more with --object-memory, or name a larger folder with --spill-dir"
        )

    def _holders(self) -> str:
        """The largest objects in memory, and who holds them."""
        inside = [entry for entry in self._table.entries() if entry.segment is not None]
        inside.sort(key=lambda entry: entry.nbytes, reverse=True)
        texts = []
        for entry in inside[:NAMED_HOLDERS]:
            facts = [show_bytes(entry.nbytes)]
            if entry.pins:
                facts.append(f"{entry.pins} readers")
            if not entry.sealed:
                facts.append("being written")
            holder = self._describe_holder(entry.oid)
            if holder:
                facts.append(holder)
            texts.append(f"object {entry.oid:#x} ({', '.join(facts)})")
        more = len(inside) - len(texts)
        if more > 0:
            texts.append(f"{more} more")
        return f", by {', '.join(texts)}" if texts else ""


def _where(entry: Entry) -> str:
    if not entry.sealed:
        return "writing"
    if entry.segment is not None and entry.moving != "in":
        return "memory"
    return "disk" if entry.on_disk else "readers"
