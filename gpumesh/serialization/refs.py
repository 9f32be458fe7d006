"""ObjectRef, a value in the object store by its name, and the count of them in one process. Nothing of the wire is known here.

Promises:

1. A process that has an ObjectRef holds a grant of its object, or the table says in `take_holds` that it must ask for one.
2. `__del__` runs anywhere, at any moment: it appends to a deque and calls the hook that wakes whoever sends, nothing more. Ctrl-C
   that comes meanwhile is raised after it.
3. Grants are given back (`take_releases`) only when no ObjectRef of that object is left here, all at once.

    first ref without a grant ──> to hold ── take_holds ──> granted ── last ref gone ──> idle ── take_releases ──> (forgotten)
                                  └── gone before that ──> (forgotten)
"""

from __future__ import annotations

import os
import threading
from collections import deque
from types import TracebackType
from typing import Any, Callable, Deque, Dict, List, Optional, Protocol, Tuple, Type

from gpumesh.errors import MeshError
from gpumesh.serialization.interrupts import interrupt_again


class Space(Protocol):
    """Where references mean something: a client's connection to a mesh, or the mesh as a task sees it."""

    table: RefTable

    def put(self, value: Any) -> ObjectRef:
        """Store a value."""

    def get(self, refs: Any, timeout: Optional[float] = None) -> Any:
        """The value of a reference; of a list or tuple of them, the list of values."""

    def delete(self, oids: List[int]) -> None:
        """Nobody needs these objects any more, whoever still refers to them."""


class RefTable:
    """How many ObjectRefs of each object live in this process, and what the coordinator has granted for them.

    Args:
        on_drop: Called when the first ObjectRef since the last `take_...` is gone, from any thread and from within the
            collector: it must neither block nor take a lock. None: somebody asks from time to time.
    """

    def __init__(self, on_drop: Optional[Callable[[], None]] = None) -> None:
        self._on_drop = on_drop
        self._lock = threading.Lock()
        self._local: Dict[int, int] = {}  # ObjectRefs by object, all above 0.
        self._grants: Dict[int, int] = {}  # Grants by object, all above 0.
        self._to_hold: Dict[int, None] = {}  # Referred to here, and not granted.
        self._idle: Dict[int, None] = {}  # Granted, and perhaps not referred to any more.
        self._dropped: Deque[int] = deque()  # Objects of ObjectRefs that are gone, not yet counted.
        self._is_awake = False  # `on_drop` has been called since the last look.
        self._forks = _forks  # A table of the parent process counts nothing.

    def __bool__(self) -> bool:
        """Whether there is anything to hold or to release now."""
        return bool(self._to_hold or self._idle or self._dropped)

    @property
    def is_foreign(self) -> bool:
        """Whether it belongs to the process that was forked."""
        return self._forks != _forks

    def add(self, oid: int, granted: int = 0) -> None:
        """One ObjectRef more, and so many grants with it."""
        with self._lock:
            self._local[oid] = self._local.get(oid, 0) + 1
            if granted:
                self._grants[oid] = self._grants.get(oid, 0) + granted
                self._to_hold.pop(oid, None)
            elif oid not in self._grants:
                self._to_hold[oid] = None

    def granted(self, oid: int, count: int = 1) -> None:
        """The coordinator counts this process `count` times more as one that refers to the object."""
        with self._lock:
            self._grants[oid] = self._grants.get(oid, 0) + count
            self._to_hold.pop(oid, None)
            if oid not in self._local:
                self._idle[oid] = None

    def drop(self, oid: int) -> None:
        """One ObjectRef less; see promise 2."""
        self._dropped.append(oid)
        if not self._is_awake:
            self.wake()

    def wake(self) -> None:
        """Have somebody look here, and send what is to be sent; as `on_drop`, from anywhere."""
        self._is_awake = True
        if self._on_drop is not None:
            self._on_drop()

    def take_holds(self) -> List[int]:
        """Objects to ask a grant for (HoldRefs); they count as granted from now on."""
        with self._lock:
            self._count_drops()
            if not self._to_hold:
                return []
            to_hold, self._to_hold = self._to_hold, {}
            oids = [oid for oid in to_hold if oid in self._local]
            self._grants.update(dict.fromkeys(oids, 1))
        return oids

    def take_releases(self) -> List[Tuple[int, int]]:
        """(object, grants) to give back (ReleaseRefs): send what `take_holds` says first."""
        with self._lock:
            self._count_drops()
            if not self._idle:
                return []
            idle, self._idle = self._idle, {}
            return [(oid, self._grants.pop(oid)) for oid in idle if oid not in self._local and oid in self._grants]

    def renew(self) -> None:
        """The coordinator has forgotten this process: everything that lives here is to be held anew, nothing to be released."""
        with self._lock:
            self._count_drops()
            self._grants.clear()
            self._idle.clear()
            self._to_hold = dict.fromkeys(self._local)

    def counts(self) -> Dict[int, int]:
        """ObjectRefs by object."""
        with self._lock:
            self._count_drops()
            return dict(self._local)

    def _count_drops(self) -> None:
        self._is_awake = False  # First: what is dropped from now on wakes again.
        dropped = self._dropped
        local = self._local
        while dropped:
            oid = dropped.popleft()
            left = local.get(oid, 0) - 1
            if left > 0:
                local[oid] = left
            else:
                local.pop(oid, None)
                if oid in self._grants:
                    self._idle[oid] = None


class ObjectRef:
    """A value in the object store. Passed as an argument it arrives as the value; inside a container as itself.

    The object lives as long as anyone refers to it, here or in another process. Made by `mesh.put`.

    Args:
        oid: The object's number; unique in a mesh.
        nbytes: Its size in the store.
        space: Where it counts.
        granted: Grants that came with it: the sender of a PutObject has one, and whoever is sent a Stored result.
    """

    __slots__ = ("oid", "nbytes", "_space", "_table", "__weakref__")

    oid: int
    nbytes: int

    def __init__(self, oid: int, nbytes: int, space: Optional[Space] = None, *, granted: int = 0) -> None:
        global are_used
        are_used = True
        self._table: Optional[RefTable] = None
        self.oid = oid
        self.nbytes = nbytes
        self._space = space
        if space is not None:
            space.table.add(oid, granted)
            self._table = space.table

    @property
    def space(self) -> Optional[Space]:
        """Where it counts; None if it was unpickled where there is no mesh."""
        return self._space

    def bind(self, space: Space) -> None:
        """Count it there, if it does not count anywhere."""
        if self._space is None:
            space.table.add(self.oid)
            self._space, self._table = space, space.table

    def delete(self) -> None:
        """Free the object now, whoever still refers to it: using it then raises ObjectLostError. Returns at once."""
        space = self._space or current_space()
        if space is None:
            raise MeshError(f"{self!r} belongs to no mesh here; make one first, with GPUMesh(...)")
        space.delete([self.oid])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectRef) and self.oid == other.oid

    def __hash__(self) -> int:
        return hash(self.oid)

    def __repr__(self) -> str:
        return f"ObjectRef({show_object(self.oid)}, {self.nbytes} bytes)"

    def __copy__(self) -> ObjectRef:
        return ObjectRef(self.oid, self.nbytes, self._space)

    def __deepcopy__(self, memo: Any) -> ObjectRef:
        return self.__copy__()

    def __reduce__(self) -> Any:
        collected = getattr(_thread, "collected", None)
        if collected is not None:
            collected[self.oid] = self
        return make_ref, (self.oid, self.nbytes)

    def __gpumesh_reduce__(self, by_value: bool) -> Any:
        return self.__reduce__()  # Says that what it refers to never changes: functions that captured it need no second look.

    def __del__(self) -> None:
        table = self._table
        if table is not None and table._forks == _forks:
            try:
                table.drop(self.oid)
            except KeyboardInterrupt:
                table.wake()  # Which may be what was interrupted.
                interrupt_again()


def make_ref(oid: int, nbytes: int) -> ObjectRef:
    """What an ObjectRef unpickles by: it counts in the space of the moment."""
    return ObjectRef(oid, nbytes, current_space())


def show_object(oid: int) -> str:
    """The form people read: 16 hexadecimal digits, as `gpumesh objects` shows them."""
    return f"{oid:016x}"


# --- what is pickled


class collecting:
    """Gathers the ObjectRefs that this thread pickles meanwhile, each object once.

    ```python
    with collecting() as collected:
        payload = dumps(value)
    refs = list(collected)  # Object numbers, for Bundle.refs; the values are the ObjectRefs.
    ```
    """

    __slots__ = ("_before", "_collected")

    def __enter__(self) -> Dict[int, ObjectRef]:
        self._before = getattr(_thread, "collected", None)
        self._collected: Dict[int, ObjectRef] = {}
        _thread.collected = self._collected
        return self._collected

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> None:
        _thread.collected = self._before


# --- where what is unpickled counts


class use_space:
    """ObjectRefs that this thread unpickles meanwhile count in `space`."""

    __slots__ = ("_space", "_before")

    def __init__(self, space: Optional[Space]) -> None:
        self._space = space

    def __enter__(self) -> None:
        self._before = getattr(_thread, "space", None)
        _thread.space = self._space

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> None:
        _thread.space = self._before


def set_process_space(space: Optional[Space]) -> None:
    """The space of every thread that uses no other: a runner's own, the same for all its tasks and their threads."""
    global _process_space
    _process_space = space


def current_space() -> Optional[Space]:
    """Where references count that are unpickled now; None where there is no mesh."""
    space: Optional[Space] = getattr(_thread, "space", None)
    return space if space is not None else _process_space


def process_space() -> Optional[Space]:
    """What `set_process_space` was given."""
    return _process_space


def is_task_process() -> bool:
    """Whether this process runs the tasks of a mesh."""
    return _process_space is not None


are_used = False  # Whether this process has ever had an ObjectRef: until then nothing needs to be collected.
_process_space: Optional[Space] = None
_thread = threading.local()
_forks = 0  # How often an ancestor of this process was forked since it loaded this module.


def _after_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
