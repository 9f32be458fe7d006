"""What an object store holds and where: decides who gets which segment, what goes to disk and what is dropped. Pure; store.objects acts.

    create ─► waiting ─► writing ── seal ──► in memory ◄─────── pinned while somebody reads it
                                               │   ▲
                                      moving out   moving in
                                               ▼   │
                                              on disk            (discarded from anywhere: gone, or once the last pin is gone)

Promises, checked by `check()`
    1. The segments in use and the free ones together never exceed the limit.
    2. A segment belongs to one object, or is free: never both, never two.
    3. A pinned object is in memory and stays in its segment. When nobody refers to it any more and room is short, the segment is
       its readers': it is removed, counts no more, and goes back to the system with their last map.
    4. What goes to disk, or is dropped, is the least recently used that is sealed and that nobody has pinned. A copy of what
       the coordinator has too is dropped; everything else is kept.
    5. A segment that somebody unknown may still map is not given out again.
    6. Every request is answered once: given or refused, pinned or failed; whoever waits does so in order, and no longer than
       `wait_seconds` after the last bytes moved.
    7. Free segments are a bounded part of the limit, and go before any object does.

Every method returns what is to be done, in order. Times are seconds of one clock.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from typing import Any, Deque, Dict, List, Optional, Set, Tuple, Union

from gpumesh.config import FREE_SEGMENTS_FRACTION, MIB, STORE_WAIT_SECONDS
from gpumesh.model.records import NamedTuple

SMALLEST_SEGMENT_BYTES = 4096
STEPS_PER_DOUBLING = 8  # Of sizes above 1 MiB: at most 12.5 % of a segment is waste,
LARGE_SEGMENT_BYTES = 64 * MIB  # and above this,
LARGE_STEPS_PER_DOUBLING = 64  # 1.6 %: two large objects of half the limit should nearly fit.
FIT_FACTOR = 1.25  # A free segment up to this much larger is used; a better fit would have to be written page by page.
WRITERS_PER_SEGMENT = 32  # That are told when it is gone; any other closes its map when it has too many of them.
SPILL_AGAIN_SECONDS = 5.0  # After the disk was full: each try costs a partial write.


class Refusal(enum.Enum):
    """Why a request was not met."""

    TOO_LARGE = "too large"  # Larger than the limit: it can never fit.
    NO_ROOM = "no room"  # Everything else is in use, or on a disk that is full.
    GONE = "gone"  # The object was discarded, or is not known.
    UNREADABLE = "unreadable"  # Its file on disk could not be read back.


class Give(NamedTuple):
    """The object may be written into this segment; create it if it is `fresh`."""

    oid: int
    name: str
    fresh: bool


class Refuse(NamedTuple):
    """The object cannot be created, and is forgotten."""

    oid: int
    why: Refusal


class Pinned(NamedTuple):
    """So many waiting pins are granted, oldest first; the object lies in this segment."""

    oid: int
    name: str
    pins: int


class PinFailed(NamedTuple):
    """So many waiting pins fail, oldest first."""

    oid: int
    why: Refusal
    pins: int


class MoveOut(NamedTuple):
    """Copy the object to disk, then say `moved_out` or `move_out_failed`."""

    oid: int
    name: str
    nbytes: int


class MoveIn(NamedTuple):
    """Copy the object from disk to this segment, then say `moved_in` or `move_in_failed`; create the segment if it is `fresh`."""

    oid: int
    name: str
    nbytes: int
    fresh: bool


class Unlink(NamedTuple):
    """Remove the segment; each of these writers may keep a map of it."""

    name: str
    writers: Tuple[str, ...]


class ForgetFile(NamedTuple):
    """Remove the object's file on disk."""

    oid: int


class Dropped(NamedTuple):
    """This copy is gone, to make room."""

    oid: int


Action = Union[Give, Refuse, Pinned, PinFailed, MoveOut, MoveIn, Unlink, ForgetFile, Dropped]


class Segment:
    """A file of the store."""

    __slots__ = ("name", "capacity", "written", "writers", "recycle")

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity  # What it counts for. Its file is never larger.
        self.written = 0  # Bytes known to have memory: what was sealed in it so far.
        self.writers: Dict[str, None] = {}  # Who may keep a map of it; the last is who wrote it last.
        self.recycle = True  # False: somebody unknown may still map it.


class Entry:
    """An object."""

    __slots__ = (
        "oid", "nbytes", "writer", "since", "is_copy", "segment", "sealed", "pins", "waiting_pins", "moving", "on_disk", "doomed",
    )  # fmt: skip

    def __init__(self, oid: int, nbytes: int, writer: str, since: float, is_copy: bool) -> None:
        self.oid = oid
        self.nbytes = nbytes
        self.writer = writer
        self.since = since
        self.is_copy = is_copy
        self.segment: Optional[Segment] = None
        self.sealed = False
        self.pins = 0
        self.waiting_pins = 0  # Asked for while it was not in memory, or not sealed.
        self.moving: Optional[str] = None  # "out" or "in".
        self.on_disk = False  # There is a whole file of it; also while it is in memory again.
        self.doomed = False  # Discarded while it was pinned or moving.

    @property
    def is_idle(self) -> bool:
        """Whether it may leave memory."""
        return self.sealed and self.segment is not None and self.pins == 0 and self.moving is None and not self.doomed


class _Request:
    __slots__ = ("oid", "capacity", "deadline")

    def __init__(self, oid: int, capacity: int, deadline: float) -> None:
        self.oid = oid
        self.capacity = capacity
        self.deadline = deadline


class Table:
    """The store's books.

    Args:
        limit: Bytes that segments may take.
        wait_seconds: How long a request waits for room while nothing moves.
        free_fraction: Part of the limit that free segments may take.

    Attributes:
        room: What the file system allows us now, at most `limit`; its owner updates it before it asks for anything.
        used: Bytes of all segments, free ones included.
    """

    def __init__(
        self, limit: int, *, wait_seconds: float = STORE_WAIT_SECONDS, free_fraction: float = FREE_SEGMENTS_FRACTION
    ) -> None:
        self.limit = limit
        self.room = limit
        self.used = 0
        self.free_bytes = 0
        self.disk_bytes = 0
        self.written = 0  # Bytes of segments that are known to have memory.
        self._free_limit = int(limit * free_fraction)
        self._wait_seconds = wait_seconds
        self._entries: Dict[int, Entry] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # Least recently used first.
        self._free: OrderedDict[str, Segment] = OrderedDict()  # Oldest first.
        self._free_by_capacity: Dict[int, OrderedDict[str, Segment]] = {}
        self._queue: Deque[_Request] = deque()
        self._moving: Dict[int, Entry] = {}
        self._no_spill_before = float("-inf")
        self._next_name = 0

    # --- what the store asks

    def __len__(self) -> int:
        return sum(1 for entry in self._entries.values() if not entry.doomed)

    def find(self, oid: int) -> Optional[Entry]:
        """The object, unless it is discarded."""
        entry = self._entries.get(oid)
        return entry if entry is not None and not entry.doomed else None

    def entries(self) -> List[Entry]:
        """All objects, also those that are only kept by their pins."""
        return list(self._entries.values())

    @property
    def has_waiting(self) -> bool:
        """Whether some request waits for room."""
        return bool(self._queue)

    def next_deadline(self) -> Optional[float]:
        """When `on_time` is to be called, if nothing happens before."""
        return self._queue[0].deadline if self._queue and not self._moving else None

    # --- what happens

    def create(self, oid: int, nbytes: int, *, writer: str, now: float, is_copy: bool = False) -> List[Action]:
        """A new object is to be written: `Give` or `Refuse`, now or later."""
        if self.find(oid) is not None:
            raise ValueError(f"object {oid:#x} exists already")
        if oid in self._entries:
            return [Refuse(oid, Refusal.NO_ROOM)]  # One of that number is gone, and its readers still have it.
        if nbytes > self.limit:
            return [Refuse(oid, Refusal.TOO_LARGE)]
        self._entries[oid] = Entry(oid, nbytes, writer, now, is_copy)
        self._queue.append(_Request(oid, self._capacity(nbytes), now + self._wait_seconds))
        return self._serve(now)

    def seal(self, oid: int, now: float) -> List[Action]:
        """It is written: from now on it can be pinned and moved."""
        entry = self._known(oid)
        assert entry.segment is not None, oid
        assert not entry.sealed, oid
        entry.sealed = True
        self._note_written(entry.segment, entry.nbytes)
        return self._settle(entry) + self._serve(now)

    def pin(self, oid: int, now: float) -> List[Action]:
        """Somebody wants to read it: `Pinned` or `PinFailed`, now or later."""
        entry = self.find(oid)
        if entry is None:
            return [PinFailed(oid, Refusal.GONE, 1)]
        if entry.sealed and entry.segment is not None and entry.moving != "in":
            entry.pins += 1
            self._idle.pop(oid, None)
            return [Pinned(oid, entry.segment.name, 1)]
        entry.waiting_pins += 1
        if entry.waiting_pins == 1 and entry.segment is None and entry.on_disk:
            self._queue.append(_Request(oid, self._capacity(entry.nbytes), now + self._wait_seconds))
            return self._serve(now)
        return []

    def unpin(self, oid: int, count: int, now: float, *, recycle: bool = True) -> List[Action]:
        """`count` pins are gone. `recycle=False`: whoever had them may still map the segment."""
        entry = self._entries[oid]
        assert 0 < count <= entry.pins, (oid, count, entry.pins)
        entry.pins -= count
        if entry.segment is not None:
            entry.segment.recycle = entry.segment.recycle and recycle
        if entry.pins:
            return []
        return self._settle(entry) + self._serve(now)

    def discard(self, oid: int, now: float, *, recycle: bool = True) -> List[Action]:
        """Nobody refers to it any more. `recycle=False`: somebody unknown may still map its segment."""
        entry = self.find(oid)
        if entry is None:
            return []
        actions: List[Action] = []
        if entry.segment is not None:
            entry.segment.recycle = entry.segment.recycle and recycle
        else:
            self._withdraw(oid)
            if not entry.sealed:
                actions.append(Refuse(oid, Refusal.GONE))
        actions += self._fail_pins(entry, Refusal.GONE)
        entry.doomed = True
        return actions + self._settle(entry) + self._serve(now)

    def moved_out(self, oid: int, now: float) -> List[Action]:
        """Its file on disk is whole."""
        entry = self._end_move(oid, "out")
        self._extend_deadlines(now)
        entry.on_disk = True
        self.disk_bytes += entry.nbytes
        return self._settle(entry, first=True) + self._serve(now)

    def move_out_failed(self, oid: int, now: float) -> List[Action]:
        """There is no file of it; it stays in memory."""
        entry = self._end_move(oid, "out")
        self._no_spill_before = now + SPILL_AGAIN_SECONDS
        return self._settle(entry, first=True) + self._serve(now)

    def moved_in(self, oid: int, now: float) -> List[Action]:
        """It is in its segment."""
        entry = self._end_move(oid, "in")
        self._extend_deadlines(now)
        assert entry.segment is not None, oid
        self._note_written(entry.segment, entry.nbytes)
        return self._settle(entry) + self._serve(now)

    def move_in_failed(self, oid: int, now: float, *, why: Refusal) -> List[Action]:
        """It is not in its segment: for want of memory (NO_ROOM), or because its file is damaged, and then it is lost."""
        entry = self._end_move(oid, "in")
        actions = self._fail_pins(entry, why)
        if why is Refusal.UNREADABLE:
            entry.doomed = True
        segment, entry.segment = entry.segment, None
        assert segment is not None, oid
        segment.recycle = False  # Nobody knows how much of it has memory.
        actions += self._release(segment)
        return actions + self._settle(entry) + self._serve(now)

    def restrict(self, limit: int) -> None:
        """There is less memory than was thought. Before the first object."""
        assert not self._entries
        self.limit = self.room = min(self.limit, limit)

    def make_copy(self, oid: int, *, is_copy: bool = True) -> None:
        """The coordinator has it too, or may have it no more."""
        entry = self.find(oid)
        if entry is not None:
            entry.is_copy = is_copy

    def serve(self, now: float) -> List[Action]:
        """`room` may have changed."""
        return self._serve(now)

    def on_time(self, now: float) -> List[Action]:
        """Refuse what has waited too long."""
        actions: List[Action] = []
        while self._queue and not self._moving and self._queue[0].deadline <= now:
            entry = self._entries[self._queue.popleft().oid]
            if entry.sealed:
                actions += self._fail_pins(entry, Refusal.NO_ROOM)
            else:
                del self._entries[entry.oid]
                actions.append(Refuse(entry.oid, Refusal.NO_ROOM))
                actions += self._fail_pins(entry, Refusal.GONE)
            actions += self._serve(now)
        return actions

    def forget_free(self) -> List[Action]:
        """Give the memory of all free segments back."""
        return [self._unlink_oldest() for _ in range(len(self._free))]

    # --- who gets what

    def _serve(self, now: float) -> List[Action]:
        actions: List[Action] = []
        while self._queue:
            request = self._queue[0]
            entry = self._entries[request.oid]
            found = self._take(entry, request.capacity)
            if found is None:
                done, progress = self._make_room(request.capacity, now)
                actions += done
                if progress:
                    continue
                break
            self._queue.popleft()
            segment, fresh = found
            entry.segment = segment
            if entry.on_disk:
                entry.moving = "in"
                self._moving[entry.oid] = entry
                actions.append(MoveIn(entry.oid, segment.name, entry.nbytes, fresh))
            else:
                segment.writers.pop(entry.writer, None)
                segment.writers[entry.writer] = None
                if len(segment.writers) > WRITERS_PER_SEGMENT:
                    del segment.writers[next(iter(segment.writers))]
                actions.append(Give(entry.oid, segment.name, fresh))
        while self.free_bytes > self._free_limit:
            actions.append(self._unlink_oldest())
        return actions

    def _take(self, entry: Entry, capacity: int) -> Optional[Tuple[Segment, bool]]:
        """A free segment that fits, best one that this writer wrote last; or a new one, if there is room."""
        best: Optional[Segment] = None
        size = capacity
        while size <= capacity * FIT_FACTOR:
            free = self._free_by_capacity.get(size)
            if free:
                for segment in reversed(free.values()):
                    if next(reversed(segment.writers), None) == entry.writer:
                        self._take_free(segment)
                        return segment, False
                    best = best or segment
            size = size_class(size + 1)
        if best is not None:
            self._take_free(best)
            return best, False
        if self.used + capacity > self.room:
            return None
        self._next_name += 1
        self.used += capacity
        return Segment(f"s{self._next_name:x}", capacity), True

    def _make_room(self, capacity: int, now: float) -> Tuple[List[Action], bool]:
        """Free memory at once where that is possible (the second value says so), and start moving out what has to."""
        actions: List[Action] = []
        while self._free and self.used + capacity > self.room:
            actions.append(self._unlink_oldest())
        if actions:
            return actions, True
        lacking = self.used + capacity - self.room - self._leaving()
        victims: List[Entry] = []
        for oid in self._idle:
            if lacking <= 0:
                break
            entry = self._entries[oid]
            assert entry.segment is not None, oid
            if entry.is_copy or entry.on_disk:
                return self._let_go(entry), True
            if now >= self._no_spill_before:
                lacking -= entry.segment.capacity
                victims.append(entry)
        for entry in victims:
            assert entry.segment is not None, entry.oid
            del self._idle[entry.oid]
            self._moving[entry.oid] = entry
            entry.moving = "out"
            actions.append(MoveOut(entry.oid, entry.segment.name, entry.nbytes))
        if lacking > 0 and not self._moving:
            disowned = self._disown()
            return disowned, bool(disowned)
        return actions, False

    def _disown(self) -> List[Action]:
        """Leave the segment of something that nobody refers to to those who still map it; the oldest first."""
        for entry in self._entries.values():
            if entry.doomed and entry.pins and entry.moving is None and entry.segment is not None:
                segment, entry.segment = entry.segment, None
                segment.recycle = False
                return self._release(segment)
        return []

    def _let_go(self, entry: Entry) -> List[Action]:
        """Out of memory at once: it is on disk already, or the coordinator has it."""
        segment, entry.segment = entry.segment, None
        assert segment is not None, entry.oid
        del self._idle[entry.oid]
        if entry.on_disk:
            return self._release(segment)
        del self._entries[entry.oid]
        return [Dropped(entry.oid), *self._release(segment)]

    def _leaving(self) -> int:
        """Bytes that will be free when what moves out now has moved."""
        return sum(
            entry.segment.capacity
            for entry in self._moving.values()
            if entry.moving == "out" and not entry.pins and entry.segment is not None
        )

    def _capacity(self, nbytes: int) -> int:
        return min(size_class(nbytes), self.limit)

    # --- the ways out

    def _settle(self, entry: Entry, *, first: bool = False) -> List[Action]:
        """After any change: grant the pins that waited, forget it if it is doomed, or let it wait for its turn to leave memory."""
        if entry.moving is not None or entry.pins:
            return []
        if entry.doomed:
            del self._entries[entry.oid]
            self._idle.pop(entry.oid, None)
            actions: List[Action] = []
            if entry.on_disk:
                self.disk_bytes -= entry.nbytes
                actions.append(ForgetFile(entry.oid))
            if entry.segment is not None:
                actions += self._release(entry.segment)
            return actions
        if not entry.sealed or entry.segment is None:
            return []
        if entry.waiting_pins:
            entry.pins, entry.waiting_pins = entry.waiting_pins, 0
            return [Pinned(entry.oid, entry.segment.name, entry.pins)]
        self._idle[entry.oid] = None
        self._idle.move_to_end(entry.oid, last=not first)
        return []

    def _release(self, segment: Segment) -> List[Action]:
        """The segment has no object any more: keep it free, or remove it."""
        if not segment.recycle or segment.written == 0:
            return [self._unlink(segment)]
        self.free_bytes += segment.capacity
        self._free[segment.name] = segment
        self._free_by_capacity.setdefault(segment.capacity, OrderedDict())[segment.name] = segment
        return []

    def _take_free(self, segment: Segment) -> None:
        self.free_bytes -= segment.capacity
        del self._free[segment.name]
        same = self._free_by_capacity[segment.capacity]
        del same[segment.name]
        if not same:
            del self._free_by_capacity[segment.capacity]

    def _unlink_oldest(self) -> Action:
        segment = next(iter(self._free.values()))
        self._take_free(segment)
        return self._unlink(segment)

    def _unlink(self, segment: Segment) -> Action:
        self.used -= segment.capacity
        self.written -= segment.written
        return Unlink(segment.name, tuple(segment.writers))

    def _fail_pins(self, entry: Entry, why: Refusal) -> List[Action]:
        count, entry.waiting_pins = entry.waiting_pins, 0
        return [PinFailed(entry.oid, why, count)] if count else []

    def _withdraw(self, oid: int) -> None:
        for request in self._queue:
            if request.oid == oid:
                self._queue.remove(request)
                return

    def _end_move(self, oid: int, way: str) -> Entry:
        entry = self._entries[oid]
        assert entry.moving == way, (oid, entry.moving)
        entry.moving = None
        del self._moving[oid]
        return entry

    def _extend_deadlines(self, now: float) -> None:
        """Bytes have moved: whoever waits does so for a reason."""
        for request in self._queue:
            request.deadline = max(request.deadline, now + self._wait_seconds)

    def _note_written(self, segment: Segment, nbytes: int) -> None:
        if nbytes > segment.written:
            self.written += nbytes - segment.written
            segment.written = nbytes

    def _known(self, oid: int) -> Entry:
        entry = self.find(oid)
        if entry is None:
            raise KeyError(f"object {oid:#x} is not here")
        return entry

    # --- the promises

    def check(self) -> None:
        """Raise AssertionError if a promise is broken."""
        held = [entry.segment for entry in self._entries.values() if entry.segment is not None]
        segments = held + list(self._free.values())
        names: Set[str] = {segment.name for segment in segments}
        assert len(names) == len(segments), "2: a segment has two objects, or is free and in use"
        assert self.used == sum(segment.capacity for segment in segments), "1: used bytes"
        assert self.used <= self.limit, "1: over the limit"
        assert self.written == sum(segment.written for segment in segments), "1: written bytes"
        assert self.free_bytes == sum(segment.capacity for segment in self._free.values()), "7: free bytes"
        assert self.free_bytes <= self._free_limit, "7: too much is free"
        by_capacity: Dict[str, Any] = {}
        for capacity, free in self._free_by_capacity.items():
            assert free, "7: an empty size"
            assert all(segment.capacity == capacity for segment in free.values()), "7: a free segment under the wrong size"
            by_capacity.update(free)
        assert by_capacity == dict(self._free), "7: free segments by size"
        assert all(segment.recycle for segment in self._free.values()), "5: a segment that may be mapped is free"
        queued = [request.oid for request in self._queue]
        assert len(set(queued)) == len(queued), "6: one object waits twice"
        for entry in self._entries.values():
            waits = entry.oid in queued
            is_wanted = not entry.doomed and (not entry.sealed or entry.waiting_pins > 0)
            assert waits == (entry.segment is None and is_wanted), f"6: {entry.oid} waits"
            assert (entry.oid in self._idle) == entry.is_idle, f"4: {entry.oid} in the order of use"
            assert entry.sealed or not (entry.on_disk or entry.moving or entry.pins), f"3: {entry.oid} is not written"
            is_there = entry.segment is not None and entry.moving != "in"
            assert entry.pins == 0 or is_there or entry.doomed, f"3: {entry.oid} is pinned"
            assert not entry.doomed or entry.pins or entry.moving, f"6: {entry.oid} should be gone"
            assert not entry.doomed or not entry.waiting_pins, f"6: {entry.oid} is gone and somebody waits for it"
            assert entry.segment is not None or not entry.sealed or entry.on_disk or entry.doomed, f"4: {entry.oid} is nowhere"
            if entry.segment is not None:
                assert entry.nbytes <= entry.segment.capacity, f"1: {entry.oid} is larger than its segment"
        assert self._moving == {oid: entry for oid, entry in self._entries.items() if entry.moving}, "6: moves under way"
        assert self.disk_bytes == sum(entry.nbytes for entry in self._entries.values() if entry.on_disk), "1: disk bytes"


def size_class(nbytes: int) -> int:
    """Capacity of the segment for so many bytes: a power of two up to 1 MiB, above it one of eight (later 64) steps per doubling."""
    if nbytes <= MIB:
        return max(SMALLEST_SEGMENT_BYTES, 1 << (nbytes - 1).bit_length() if nbytes > 1 else 1)
    steps = STEPS_PER_DOUBLING if nbytes <= LARGE_SEGMENT_BYTES else LARGE_STEPS_PER_DOUBLING
    step = (1 << ((nbytes - 1).bit_length() - 1)) // steps
    return -(-nbytes // step) * step
