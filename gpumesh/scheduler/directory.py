"""Which objects exist in the mesh and who refers to them; when nobody does, they are free. Sizes and names, never bytes.

    declared ──arrived──> STORED ──┐
        └──────lost──────> LOST ───┴── no holder left, or deleted ──> (gone)

Promises:

1. An object lives while a peer has grants for it, a task that has not ended mentions it, or a living object refers to it.
2. Grants are counted: each one given is given back once, by its holder or when its holder is gone; giving back more than
   was given changes nothing.
3. What is returned as freed is in no table any more, each id once.
4. The grants of a peer whose connection broke are set aside: they count until it has said anew what it refers to, or is gone.
"""

from __future__ import annotations

import enum
from typing import Dict, Iterable, Iterator, List, Sequence, Tuple, Union

PeerKey = Union[int, str]
"""A client's number or a worker's id."""


def aside(peer: PeerKey) -> str:
    """Who has the grants of a peer whose connection broke."""
    return f"before {peer}"


class ObjectState(enum.Enum):
    """Whether the bytes are here."""

    DECLARED = "arriving"
    STORED = "stored"
    LOST = "lost"


class Entry:
    """One object."""

    __slots__ = ("oid", "nbytes", "owner", "state", "reason", "grants", "tasks", "containers", "refs", "copies")

    def __init__(self, oid: int, nbytes: int, owner: str, refs: Tuple[int, ...]) -> None:
        self.oid = oid
        self.nbytes = nbytes
        self.owner = owner  # Who made it, for people.
        self.state = ObjectState.DECLARED
        self.reason = ""  # Why it is lost.
        self.grants: Dict[PeerKey, int] = {}  # Never 0.
        self.tasks = 0  # Mentions by tasks that have not ended.
        self.containers = 0  # Mentions by living objects.
        self.refs = refs  # The objects that it mentions, as far as they were known.
        self.copies: Dict[str, None] = {}  # Workers that have fetched it.

    @property
    def references(self) -> int:
        """How many keep it alive."""
        return sum(self.grants.values()) + self.tasks + self.containers


class Directory:
    """See the module's promises."""

    def __init__(self) -> None:
        self._objects: Dict[int, Entry] = {}
        self._tasks: Dict[int, List[int]] = {}  # Task that has not ended -> the objects that it mentions.
        self._peers: Dict[PeerKey, Dict[int, None]] = {}  # Who has grants -> for what.
        self._copied: Dict[PeerKey, Dict[int, None]] = {}  # Worker -> what it has copies of.

    def __contains__(self, oid: int) -> bool:
        return oid in self._objects

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._objects.values())

    @property
    def has_task_holds(self) -> bool:
        """Whether any task mentions an object."""
        return bool(self._tasks)

    def get(self, oid: int) -> Union[Entry, None]:
        """What is known of an object."""
        return self._objects.get(oid)

    def declare(self, oid: int, nbytes: int, *, peer: PeerKey, owner: str, refs: Sequence[int]) -> Entry:
        """An object exists; whoever tells has one grant. Known already: one more grant, nothing else changes."""
        entry = self._objects.get(oid)
        if entry is None:
            known = tuple(dict.fromkeys(ref for ref in refs if ref in self._objects))
            entry = self._objects[oid] = Entry(oid, nbytes, owner, known)
            for ref in known:
                self._objects[ref].containers += 1
        self._grant(entry, peer, 1)
        return entry

    def arrived(self, oid: int) -> None:
        """Its bytes are here."""
        entry = self._objects.get(oid)
        if entry is not None and entry.state is ObjectState.DECLARED:
            entry.state = ObjectState.STORED

    def arrives_again(self, oid: int) -> None:
        """It was lost, and its maker is back with it."""
        entry = self._objects.get(oid)
        if entry is not None and entry.state is ObjectState.LOST:
            entry.state = ObjectState.DECLARED
            entry.reason = ""

    def lost(self, oid: int, reason: str) -> None:
        """Its bytes are nowhere any more. Whoever refers to it may still ask why."""
        entry = self._objects.get(oid)
        if entry is not None:
            entry.state = ObjectState.LOST
            entry.reason = reason

    def copied(self, oid: int, worker: str) -> None:
        """A worker has a copy of its own."""
        entry = self._objects.get(oid)
        if entry is not None:
            entry.copies[worker] = None
            self._copied.setdefault(worker, {})[oid] = None

    def dropped(self, oid: int, worker: str) -> None:
        """It has that copy no more."""
        entry = self._objects.get(oid)
        if entry is not None:
            self._uncopied(entry, worker)

    # --- who holds

    def grant(self, peer: PeerKey, oid: int, count: int = 1) -> bool:
        """A peer refers to it; False if there is no such object."""
        entry = self._objects.get(oid)
        if entry is None:
            return False
        self._grant(entry, peer, count)
        return True

    def release(self, peer: PeerKey, objects: Iterable[Tuple[int, int]]) -> List[Entry]:
        """A peer gives (object, grants) back; what is free now."""
        touched: List[Entry] = []
        for oid, count in objects:
            entry = self._objects.get(oid)
            if entry is None or peer not in entry.grants:
                continue
            left = entry.grants[peer] - count
            if left > 0:
                entry.grants[peer] = left
                continue
            self._ungrant(entry, peer)
            touched.append(entry)
        return self._collect(touched)

    def set_aside(self, peer: PeerKey) -> List[int]:
        """Its connection broke: its grants count as those of `aside(peer)` from now on; the objects of which it had copies."""
        other = aside(peer)
        for oid in list(self._peers.get(peer, ())):
            entry = self._objects[oid]
            count = entry.grants[peer]
            self._ungrant(entry, peer)
            self._grant(entry, other, count)
        if not isinstance(peer, str):
            return []
        return self._forget_copies(peer)

    def peer_gone(self, peer: PeerKey) -> List[Entry]:
        """All grants of a peer are void; what is free now."""
        touched: List[Entry] = []
        for oid in list(self._peers.get(peer, ())):
            entry = self._objects[oid]
            self._ungrant(entry, peer)
            touched.append(entry)
        self._forget_copies(peer)
        return self._collect(touched)

    def hold_for_task(self, task_id: int, oids: Iterable[int]) -> None:
        """A task mentions these until it has ended; once more for each time this is called."""
        mentioned = self._tasks.setdefault(task_id, [])
        for oid in oids:
            entry = self._objects.get(oid)
            if entry is not None:
                entry.tasks += 1
                mentioned.append(oid)
        if not mentioned:
            del self._tasks[task_id]

    def mentions_of(self, task_id: int) -> Sequence[int]:
        """The objects that a task mentions which has not ended."""
        return self._tasks.get(task_id, ())

    def task_ended(self, task_id: int) -> List[Entry]:
        """What is free now that this task needs nothing any more."""
        touched: List[Entry] = []
        for oid in self._tasks.pop(task_id, ()):
            entry = self._objects.get(oid)
            if entry is not None:
                entry.tasks -= 1
                touched.append(entry)
        return self._collect(touched)

    def delete(self, oid: int) -> List[Entry]:
        """It goes, whoever refers to it."""
        entry = self._objects.get(oid)
        if entry is None:
            return []
        if entry.tasks:
            for mentioned in self._tasks.values():
                mentioned[:] = [other for other in mentioned if other != oid]
            self._tasks = {task_id: mentioned for task_id, mentioned in self._tasks.items() if mentioned}
        if entry.containers:
            for container in self._objects.values():
                if oid in container.refs:
                    container.refs = tuple(ref for ref in container.refs if ref != oid)
        freed: List[Entry] = []
        self._remove(entry, freed)
        return freed + self._collect([self._objects[ref] for ref in entry.refs if ref in self._objects])

    # --- inside

    def _grant(self, entry: Entry, peer: PeerKey, count: int) -> None:
        entry.grants[peer] = entry.grants.get(peer, 0) + count
        self._peers.setdefault(peer, {})[entry.oid] = None

    def _ungrant(self, entry: Entry, peer: PeerKey) -> None:
        del entry.grants[peer]
        mine = self._peers[peer]
        del mine[entry.oid]
        if not mine:
            del self._peers[peer]

    def _uncopied(self, entry: Entry, worker: str) -> None:
        if worker in entry.copies:
            del entry.copies[worker]
            self._drop_copy(entry.oid, worker)

    def _drop_copy(self, oid: int, worker: str) -> None:
        theirs = self._copied[worker]
        del theirs[oid]
        if not theirs:
            del self._copied[worker]

    def _forget_copies(self, peer: PeerKey) -> List[int]:
        """It has none any more; what it had copies of."""
        copied = list(self._copied.pop(peer, ()))
        for oid in copied:
            self._objects[oid].copies.pop(str(peer), None)
        return copied

    def _collect(self, touched: List[Entry]) -> List[Entry]:
        freed: List[Entry] = []
        while touched:
            entry = touched.pop()
            if entry.grants or entry.tasks or entry.containers or self._objects.get(entry.oid) is not entry:
                continue
            self._remove(entry, freed)
            touched.extend(self._objects[ref] for ref in entry.refs if ref in self._objects)
        return freed

    def _remove(self, entry: Entry, freed: List[Entry]) -> None:
        del self._objects[entry.oid]
        for peer in list(entry.grants):
            self._ungrant(entry, peer)
        for worker in entry.copies:  # They stay in the entry, for who tells those workers.
            self._drop_copy(entry.oid, worker)
        for ref in entry.refs:
            inner = self._objects.get(ref)
            if inner is not None:
                inner.containers -= 1
        freed.append(entry)

    def check(self) -> None:
        """Raise AssertionError if the tables disagree; for tests."""
        tasks: Dict[int, int] = {}
        for oids in self._tasks.values():
            assert oids, "a task without mentions is in the table"
            for oid in oids:
                tasks[oid] = tasks.get(oid, 0) + 1
        containers: Dict[int, int] = {}
        for entry in self._objects.values():
            for ref in entry.refs:
                containers[ref] = containers.get(ref, 0) + 1
        for oid, entry in self._objects.items():
            assert entry.tasks == tasks.get(oid, 0), f"object {oid} counts {entry.tasks} mentions by tasks"
            assert entry.containers == containers.get(oid, 0), f"object {oid} counts {entry.containers} mentions by objects"
            assert entry.references > 0, f"nobody refers to object {oid}"
            assert all(count > 0 for count in entry.grants.values()), f"object {oid} has an empty grant"
            for peer in entry.grants:
                assert oid in self._peers[peer], f"the grant of {peer} for {oid} is in one table only"
        copied: Dict[PeerKey, Dict[int, None]] = {}
        for oid, entry in self._objects.items():
            for worker in entry.copies:
                copied.setdefault(worker, {})[oid] = None
        assert copied == self._copied, "who has copies of what is told differently in two tables"
        for peer, held in self._peers.items():
            assert held, f"{peer} has no grants and is in the table"
            for oid in held:
                assert peer in self._objects[oid].grants, f"the grant of {peer} for {oid} is in one table only"
