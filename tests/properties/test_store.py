"""The object store on real files under any sequence of what peers do: what is there is whole, the limit holds, nothing is left over."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpumesh.errors import MeshError, ObjectLostError, ObjectStoreFullError
from gpumesh.store import segments
from gpumesh.store.container import container_bytes, write_container
from gpumesh.store.objects import OWNER
from gpumesh.store.segments import Mapping, SegmentWriter
from tests.unit.store.owner import Owner, files_below, segments_of

LIMIT = 12 * 4096
WRITERS = ("a", "b")


class StoreMachine(RuleBasedStateMachine):
    """Peers create, write, pin, map, lose and drop objects; the model knows what each has to contain."""

    def __init__(self) -> None:
        super().__init__()
        self.copied_below, segments.COPY_BELOW_BYTES = segments.COPY_BELOW_BYTES, 0  # Small objects are mapped too.
        self.root = Path(tempfile.mkdtemp(prefix="store-property-"))
        self.owner = Owner(self.root, limit=LIMIT)
        self.store = self.owner.store
        self.store.on_dropped = self.on_dropped
        self.next_oid = 1
        self.data: Dict[int, bytes] = {}  # Of every object that has not gone.
        self.writer: Dict[int, str] = {}
        self.paths: Dict[int, str] = {}  # Given to be written, not sealed.
        self.sealed: Set[int] = set()
        self.copies: Set[int] = set()
        self.readers: List[Tuple[int, bytes, Mapping]] = []  # Each has a pin.
        self.lost: List[Tuple[bytes, Mapping]] = []  # Readers that were given up, and still look.
        self.asked_pins = 0
        self.answered_pins = 0
        self.asked = 0
        self.answered = 0

    def teardown(self) -> None:
        segments.COPY_BELOW_BYTES = self.copied_below
        self.owner.time += 1000.0
        while self.paths:
            self.write(min(self.paths))
        self.finish()
        for oid in list(self.data):
            self.discard(oid, recycle=True)
        self.finish()
        while self.readers:
            self.stop_reading(0, recycle=True)
        assert self.asked == self.answered
        assert self.asked_pins == self.answered_pins
        usage = self.store.usage()
        assert (usage["memory"], usage["disk"], usage["objects"]) == (0, 0, 0)
        assert sum(1 for name in files_below(self.root) if os.path.basename(name).startswith("o") and "owner" not in name) == 0
        self.owner.close()
        assert files_below(self.root) == []
        shutil.rmtree(self.root)

    def finish(self) -> None:
        """Let everything that moves arrive, and everybody who waits be answered."""
        for _ in range(50):
            while self.store._table._moving:
                self.owner.calls.get(timeout=20)()
            self.owner.settle()
            if not self.store._table.has_waiting:
                return
            self.owner.time += 6.0
            self.store.on_time(self.owner.time)
            while self.paths:
                self.write(min(self.paths))
        raise AssertionError("somebody waits for ever")

    # --- what comes back

    def on_dropped(self, oids: List[int]) -> None:
        for oid in oids:
            assert oid in self.copies
            self.forget(oid)

    def forget(self, oid: int) -> None:
        for table in (self.data, self.writer, self.paths):
            table.pop(oid, None)  # type: ignore[attr-defined]
        self.sealed.discard(oid)
        self.copies.discard(oid)

    def created(self, oid: int, path: Optional[str], error: Optional[MeshError]) -> None:
        self.answered += 1
        if error is None:
            assert path is not None
            assert oid in self.data
            self.paths[oid] = path
        else:
            assert isinstance(error, ObjectStoreFullError)
            self.forget(oid)

    def pinned(self, oid: int, path: Optional[str], error: Optional[MeshError]) -> None:
        self.answered_pins += 1
        if error is None:
            assert path is not None
            data = self.data[oid]
            mapping = Mapping(path, container_bytes([data]))
            assert bytes(mapping.parts[0]) == data
            self.readers.append((oid, data, mapping))
        elif oid in self.data and oid in self.sealed:
            assert isinstance(error, ObjectStoreFullError)
        else:
            assert isinstance(error, ObjectLostError)

    # --- what peers do

    @rule(pages=st.integers(1, 14), writer=st.sampled_from((*WRITERS, OWNER)), is_copy=st.booleans())
    def create(self, pages: int, writer: str, is_copy: bool) -> None:
        oid, self.next_oid = self.next_oid, self.next_oid + 1
        data = (b"%08d" % oid) * (pages * 512 - 16)
        self.data[oid] = data
        self.writer[oid] = writer
        if is_copy:
            self.copies.add(oid)
        self.asked += 1
        self.store.create(
            oid, container_bytes([data]), writer=writer, then=lambda *answer: self.created(oid, *answer), is_copy=is_copy
        )

    @precondition(lambda self: self.paths)
    @rule(which=st.integers(0, 99))
    def seal(self, which: int) -> None:
        self.write(sorted(self.paths)[which % len(self.paths)])

    def write(self, oid: int) -> None:
        path, data, writer = self.paths.pop(oid), self.data[oid], self.writer[oid]
        assert self.store.is_segment_of(oid, os.path.basename(path))
        if writer == OWNER:
            view = self.store.writable_view(oid)
            write_container(view, [data])
            self.store.release_view(oid)
        else:
            self.owner.writers.setdefault(writer, SegmentWriter()).write(path, container_bytes([data]), [data])
        self.sealed.add(oid)
        self.store.seal(oid)

    @precondition(lambda self: self.data)
    @rule(which=st.integers(0, 99))
    def pin(self, which: int) -> None:
        oid = sorted(self.data)[which % len(self.data)]
        self.asked_pins += 1
        self.store.pin(oid, lambda *answer: self.pinned(oid, *answer))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 99), recycle=st.booleans())
    def stop_reading(self, which: int, recycle: bool) -> None:
        oid, data, mapping = self.readers.pop(which % len(self.readers))
        if recycle:
            assert bytes(mapping.parts[0]) == data
            assert mapping.try_close()
        else:
            self.lost.append((data, mapping))
        self.store.unpin(oid, recycle=recycle)

    @precondition(lambda self: self.data)
    @rule(which=st.integers(0, 99), recycle=st.booleans())
    def drop(self, which: int, recycle: bool) -> None:
        oid = sorted(self.data)[which % len(self.data)]
        self.discard(oid, recycle)

    def discard(self, oid: int, recycle: bool) -> None:
        self.forget(oid)
        self.store.discard(oid, recycle=recycle)
        assert not self.store.contains(oid)

    @precondition(lambda self: self.sealed)
    @rule(which=st.integers(0, 99))
    def make_evictable(self, which: int) -> None:
        oid = sorted(self.sealed)[which % len(self.sealed)]
        self.copies.add(oid)
        self.store.make_evictable(oid)

    @rule(seconds=st.sampled_from([0.0, 0.5, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.owner.time += seconds
        deadline = self.store.next_deadline()
        if deadline is not None and deadline <= self.owner.time:
            self.store.on_time(self.owner.time)

    @precondition(lambda self: self.store._table._moving)
    @rule()
    def a_move_ends(self) -> None:
        self.owner.calls.get(timeout=20)()

    # --- what always holds

    @invariant()
    def the_books_are_right(self) -> None:
        self.store.check()
        usage = self.store.usage()
        assert usage["memory"] + usage["free"] <= LIMIT
        sizes = [os.path.getsize(os.path.join(self.store.folder.path, name)) for name in segments_of(self.owner)]
        assert sum(sizes) <= LIMIT
        assert {each["oid"] for each in self.store.describe()} >= set(self.data)

    @invariant()
    def readers_see_what_was_written(self) -> None:
        for oid, data, mapping in self.readers:
            assert bytes(mapping.parts[0]) == data, oid
        for data, mapping in self.lost:
            assert bytes(mapping.parts[0]) == data


def _small(machine: Any) -> Any:
    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=60, deadline=None)
    return machine.TestCase


TestStore = _small(StoreMachine)
