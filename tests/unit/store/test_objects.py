"""store.objects and store.spill on real files: what is created, moved to disk and back, pinned, refused; and what is left over."""

from __future__ import annotations

import os
import pickle
import subprocess
import threading
from pathlib import Path
from typing import Callable, Iterator, List, Optional

import pytest

from gpumesh.config import FREE_SEGMENTS_SECONDS
from gpumesh.errors import ObjectLostError, ObjectStoreFullError
from gpumesh.store.container import container_bytes
from gpumesh.store.objects import OWNER
from gpumesh.store.segments import Mapping, StoreFolder, shares_host
from gpumesh.store.spill import Spiller
from tests.unit.store.owner import Owner, files_below, given, payload, segments_of

SIZE = 60_000  # In segments of 64 KiB.
SEGMENT = 65536
MakeOwner = Callable[..., Owner]


@pytest.fixture
def make_owner(tmp_path: Path) -> Iterator[MakeOwner]:
    owners: List[Owner] = []

    def make(segments: int, *, memory: Optional[Path] = None, disk: Optional[Path] = None) -> Owner:
        owners.append(Owner(tmp_path, limit=segments * SEGMENT, memory=memory, disk=disk))
        return owners[-1]

    yield make
    for owner in owners:
        owner.close()
    assert files_below(tmp_path) == []


@pytest.fixture
def tiny_file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB in memory."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a small file system here: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_nothing_is_made_before_the_first_object(make_owner: MakeOwner, tmp_path: Path) -> None:
    owner = make_owner(4)

    assert not owner.store.contains(1)
    assert owner.store.next_deadline() is None
    assert owner.store.describe() == []
    assert owner.store.usage() == {"memory": 0, "free": 0, "disk": 0, "limit": 4 * SEGMENT, "objects": 0}
    with pytest.raises(ObjectLostError):
        owner.pin(1)
    owner.store.discard(1)
    assert list(tmp_path.iterdir()) == []


def test_an_object_is_written_sealed_pinned_read_and_gone(make_owner: MakeOwner) -> None:
    owner = make_owner(4)
    store = owner.store
    owner.time = 10.0

    path = owner.create(1, container_bytes([payload(1, SIZE)]))
    name = os.path.basename(path)
    assert os.path.getsize(path) == 0
    assert (store.contains(1), store.is_sealed(1), store.segment_name(1)) == (True, False, name)
    assert store.is_segment_of(1, name)
    assert not store.is_segment_of(1, "s99")
    assert not store.is_segment_of(2, name)
    store.discard(1)
    owner.put(2, payload(2, SIZE))
    owner.time = 12.0

    assert not store.is_segment_of(2, store.segment_name(2))  # Sealed: nobody may hand it over again.
    assert store.describe() == [{"oid": 2, "nbytes": store.nbytes_of(2), "where": "memory", "pins": 0, "age": 2.0}]
    assert owner.get(2) == payload(2, SIZE)
    store.discard(2)
    assert store.usage() == {"memory": 0, "free": SEGMENT, "disk": 0, "limit": 4 * SEGMENT, "objects": 0}
    with pytest.raises(ObjectLostError, match="object 0x2 is not in the object store any more"):
        owner.pin(2)


def test_a_freed_segment_is_used_again_by_its_writer(make_owner: MakeOwner) -> None:
    owner = make_owner(4)
    paths = []
    for oid in range(10):
        paths.append(owner.put(oid, payload(oid, SIZE)))
        assert owner.get(oid) == payload(oid, SIZE)
        owner.store.discard(oid)

    assert len(set(paths)) == 1
    assert segments_of(owner) == [os.path.basename(paths[0])]


def test_what_readers_keep_of_objects_that_are_gone_does_not_fill_the_store(make_owner: MakeOwner) -> None:
    owner = make_owner(4)
    mappings = []
    for oid in range(20):  # A program that keeps the arrays it got, and no reference to any.
        owner.put(oid, payload(oid, SIZE))
        mappings.append(Mapping(owner.pin(oid), owner.store.nbytes_of(oid)))
        owner.store.discard(oid)

    for oid, mapping in enumerate(mappings):
        assert bytes(mapping.parts[0]) == payload(oid, SIZE)
        assert mapping.try_close()
        owner.store.unpin(oid)
    assert owner.store.describe() == []
    owner.store.check()


def test_freed_segments_that_nobody_uses_go_back_to_the_system(make_owner: MakeOwner) -> None:
    owner = make_owner(4)
    path = owner.put(1, payload(1, SIZE))
    owner.store.discard(1)
    assert owner.store.next_deadline() == FREE_SEGMENTS_SECONDS
    owner.time = FREE_SEGMENTS_SECONDS
    owner.store.on_time(owner.time)
    owner.until(lambda: not Path(path).exists())
    assert owner.store.usage()["free"] == 0
    assert owner.gone == [("a", [Path(path).name])]
    assert owner.store.next_deadline() is None


def test_twenty_times_the_limit_goes_through_and_every_byte_comes_back(make_owner: MakeOwner) -> None:
    owner = make_owner(5)
    for oid in range(100):
        owner.put(oid, payload(oid, SIZE))
        usage = owner.store.usage()
        assert usage["memory"] + usage["free"] <= 5 * SEGMENT
        assert sum(os.path.getsize(os.path.join(owner.store.folder.path, name)) for name in segments_of(owner)) <= 5 * SEGMENT

    wheres = [each["where"] for each in owner.store.describe()]
    assert wheres.count("memory") == 5
    assert wheres.count("disk") == 95
    for oid in range(100):
        assert owner.get(oid) == payload(oid, SIZE)
        owner.store.discard(oid)
    owner.settle()
    assert owner.store.usage()["memory"] == owner.store.usage()["disk"] == owner.store.usage()["objects"] == 0


def test_what_is_pinned_stays_in_its_segment_while_others_go_to_disk(make_owner: MakeOwner) -> None:
    owner = make_owner(3)
    owner.put(0, payload(0, SIZE))
    mapping = Mapping(owner.pin(0), owner.store.nbytes_of(0))
    for oid in range(1, 8):
        owner.put(oid, payload(oid, SIZE))

    assert bytes(mapping.parts[0]) == payload(0, SIZE)
    assert owner.store.describe()[0]["where"] == "memory"
    assert owner.store.describe()[0]["pins"] == 1
    owner.store.discard(0)
    assert bytes(mapping.parts[0]) == payload(0, SIZE)
    mapping.try_close()
    owner.store.unpin(0)
    assert owner.store.usage()["objects"] == 7


def test_a_segment_of_a_lost_reader_is_removed_and_not_given_out(make_owner: MakeOwner) -> None:
    owner = make_owner(4)
    owner.put(1, payload(1, SIZE))
    lost = Mapping(owner.pin(1), owner.store.nbytes_of(1))

    owner.store.unpin(1, recycle=False)
    owner.store.discard(1)

    assert segments_of(owner) == []
    assert owner.gone == [("a", ["s1"])]
    owner.put(2, payload(2, SIZE))
    assert bytes(lost.parts[0]) == payload(1, SIZE)


def test_writers_hear_of_removed_segments_once_for_all_of_them(make_owner: MakeOwner) -> None:
    owner = make_owner(4)
    owner.put(1, payload(1, SIZE), writer="a")
    owner.put(2, payload(2, SIZE), writer="b")
    owner.put(3, payload(3, SIZE), writer="a")
    for oid in (1, 2, 3):
        owner.store.discard(oid)
    owner.gone.clear()

    owner.put(4, payload(4, 4 * SEGMENT - 1000))

    assert owner.gone == [("b", ["s2"]), ("a", ["s3"])]


def test_an_object_larger_than_the_limit_is_refused_at_once_with_both_numbers(make_owner: MakeOwner) -> None:
    owner = make_owner(4)

    with pytest.raises(ObjectStoreFullError) as caught:
        owner.create(1, 1_000_000)
    assert str(caught.value) == (
        f"an object of 1 MB is larger than the object store {owner.store.folder.path} may be: 262 kB; "
        f"give it more with --object-memory, or put the value in pieces"
    )
    assert not owner.store.contains(1)


def test_a_full_store_waits_and_then_says_who_holds_what(make_owner: MakeOwner) -> None:
    owner = make_owner(2)
    owner.store.set_holders({1: "held by client 7", 2: ""}.__getitem__)
    owner.put(1, payload(1, SIZE))
    owner.pin(1)
    owner.create(2, 50_000)

    answers = owner.ask(3, SIZE)
    assert owner.store.next_deadline() == 5.0
    owner.store.on_time(4.9)
    assert answers == []
    owner.store.on_time(5.0)

    with pytest.raises(ObjectStoreFullError) as caught:
        given(answers)
    assert str(caught.value) == (
        f"no room for an object of 60 kB in the object store {owner.store.folder.path}: 131 kB of its limit of 131 kB are in use, "
        f"by object 0x1 (60.1 kB, 1 readers, held by client 7), object 0x2 (50 kB, being written); drop references to objects that "
        f"are not needed, give it more with --object-memory, or name a larger folder with --spill-dir"
    )
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), ObjectStoreFullError)
    assert not owner.store.contains(3)


def test_whoever_waits_for_room_gets_it_when_a_pin_goes(make_owner: MakeOwner) -> None:
    owner = make_owner(1)
    owner.put(1, payload(1, SIZE))
    owner.pin(1)
    answers = owner.ask(2, SIZE)
    assert answers == []

    owner.store.unpin(1)
    owner.until(lambda: bool(answers))

    assert os.path.exists(given(answers))
    assert owner.store.describe()[0]["where"] == "disk"


def test_a_waiting_object_that_is_discarded_is_answered(make_owner: MakeOwner) -> None:
    owner = make_owner(1)
    owner.create(1, SIZE)
    answers = owner.ask(2, SIZE)

    owner.store.discard(2)

    with pytest.raises(ObjectStoreFullError, match="was given up while it waited for room"):
        given(answers)


def test_copies_are_dropped_to_make_room_and_not_written_to_disk(make_owner: MakeOwner, tmp_path: Path) -> None:
    owner = make_owner(2)
    dropped: List[List[int]] = []
    owner.store.on_dropped = dropped.append
    owner.put(1, payload(1, SIZE), is_copy=True)
    owner.put(2, payload(2, SIZE))
    owner.store.make_evictable(2)

    owner.put(3, payload(3, SIZE))
    owner.put(4, payload(4, SIZE))

    assert dropped == [[1], [2]]
    assert [each["oid"] for each in owner.store.describe()] == [3, 4]
    assert not (tmp_path / "disk").exists()


def test_a_pin_of_an_object_being_written_is_answered_when_it_is_sealed(make_owner: MakeOwner) -> None:
    owner = make_owner(2)
    path = owner.create(1, SIZE)
    Path(path).write_bytes(bytes(SIZE))
    first, second = owner.ask_pin(1), owner.ask_pin(1)
    assert (first, second) == ([], [])

    owner.store.seal(1)

    assert first == second == [(path, None)]
    assert owner.store.describe()[0]["pins"] == 2
    owner.store.unpin(1, 2)


def test_callbacks_may_call_the_store(make_owner: MakeOwner) -> None:
    owner = make_owner(2)
    owner.put(1, payload(1, SIZE))
    order: List[str] = []

    def pinned(path: object, error: object) -> None:
        order.append("pinned")
        owner.store.discard(1)
        owner.store.pin(1, lambda path, error: order.append(type(error).__name__))
        owner.store.unpin(1)
        owner.store.create(2, SIZE, writer="a", then=lambda path, error: order.append("created"))
        order.append("end of callback")

    owner.store.pin(1, pinned)

    assert order == ["pinned", "end of callback", "ObjectLostError", "created"]
    owner.store.check()


def test_the_same_object_is_not_created_twice(make_owner: MakeOwner) -> None:
    owner = make_owner(2)
    owner.create(1, SIZE)

    with pytest.raises(ValueError, match="object 0x1 exists already"):
        owner.ask(1, SIZE)
    with pytest.raises(KeyError):
        owner.store.seal(2)


# --- transfers


@pytest.mark.parametrize("size", [1000, SIZE, 5_000_000])
def test_an_object_is_received_through_a_view_that_has_memory_and_sent_through_another(
    make_owner: MakeOwner, size: int
) -> None:
    owner = make_owner(200)
    for oid in (1, 2, 3):  # The last two into a recycled segment.
        data = payload(oid, size)
        path = owner.create(oid, len(data), writer=OWNER)
        assert os.path.getsize(path) >= len(data)
        view = owner.store.writable_view(oid)
        assert len(view) == len(data)
        view[:] = data
        owner.store.release_view(oid)
        with pytest.raises(ValueError, match="released"):
            view[0]
        owner.store.seal(oid)
        owner.pin(oid)
        assert owner.store.view(oid) == data
        owner.store.release_view(oid)
        owner.store.release_view(oid)
        owner.store.unpin(oid)
        owner.store.discard(oid)
    owner.settle()
    assert segments_of(owner) == ["s1"]
    assert owner.gone == []  # The owner knows.


def test_a_transfer_that_is_given_up_leaves_no_segment_that_is_used_again(make_owner: MakeOwner) -> None:
    owner = make_owner(4)
    owner.create(1, SIZE, writer=OWNER)
    chunk = owner.store.writable_view(1)[:1000]

    owner.store.discard(1)

    assert segments_of(owner) == []
    chunk[:] = b"x" * 1000  # Came late; nobody reads it.
    owner.put(2, payload(2, SIZE))
    assert owner.get(2) == payload(2, SIZE)


def test_large_maps_are_closed_on_the_spillers_thread_also_those_that_are_still_looked_at(make_owner: MakeOwner) -> None:
    owner = make_owner(200)
    chunks = []
    for oid in (1, 2):
        owner.create(oid, 5_000_000, writer=OWNER)
        chunks.append(owner.store.writable_view(oid)[:1000])
    folder = owner.store.folder.path
    chunks.pop()

    owner.store.discard(1)
    owner.store.discard(2)
    owner.store.close()

    assert Path("/proc/self/maps").read_text().count(folder) == 1
    chunks.clear()
    assert folder not in Path("/proc/self/maps").read_text()


def test_an_object_given_up_while_its_memory_is_set_up_is_answered_once(make_owner: MakeOwner) -> None:
    owner = make_owner(1000)
    answers = owner.ask(1, 50_000_000, writer=OWNER)

    owner.store.discard(1)
    owner.put(2, payload(2, SIZE))
    owner.store.discard(2)
    owner.until(owner.calls.empty)

    with pytest.raises(ObjectStoreFullError, match="given up"):
        given(answers)


def test_one_of_two_transfers_of_an_object_ends_and_the_other_goes_on_also_when_nobody_refers_to_it(
    make_owner: MakeOwner,
) -> None:
    owner = make_owner(4)
    owner.put(1, payload(1, SIZE))
    views = []
    for _ in range(2):
        owner.pin(1)
        views.append(owner.store.view(1))

    owner.store.release_view(1)
    owner.store.unpin(1)
    owner.store.discard(1)
    assert len(views[1]) == container_bytes([payload(1, SIZE)])
    assert segments_of(owner) == ["s1"]
    owner.store.release_view(1)
    owner.store.unpin(1)

    with pytest.raises(ValueError, match="released"):
        views[1][0]
    assert owner.store.usage()["objects"] == 0


def test_an_object_that_was_sealed_half_written_is_refused_by_its_reader_and_its_segment_removed(make_owner: MakeOwner) -> None:
    owner = make_owner(4)
    Path(owner.create(1, SIZE)).write_bytes(b"half")
    owner.store.seal(1)

    with pytest.raises(ValueError, match="has 4 bytes, but its object has 60000"):
        Mapping(owner.pin(1), SIZE)
    owner.store.unpin(1)
    owner.store.discard(1)
    assert segments_of(owner) == []


# --- no space


def test_a_file_system_smaller_than_the_limit_leads_to_disk_and_not_to_a_bus_error(
    tiny_file_system: Path, make_owner: MakeOwner
) -> None:
    owner = make_owner(100, memory=tiny_file_system)
    for oid in range(40):
        owner.put(oid, payload(oid, SIZE))

    assert owner.store.usage()["limit"] == 1 << 20
    assert owner.store.usage()["disk"] > 20 * SIZE
    for oid in range(40):
        assert owner.get(oid) == payload(oid, SIZE)
    with pytest.raises(
        ObjectStoreFullError, match=r"may be: 1\.05 MB, all that its file system has \(in a container: --shm-size\)"
    ):
        owner.create(100, 2_000_000)


def test_space_that_others_take_is_not_counted_on(tiny_file_system: Path, make_owner: MakeOwner) -> None:
    owner = make_owner(100, memory=tiny_file_system)
    owner.put(1, payload(1, SIZE))
    other = tiny_file_system / "other"
    other.write_bytes(bytes(owner.store.folder.free_bytes() - 8192))
    owner.pin(1)

    answers = owner.ask(2, SIZE)
    assert owner.store.next_deadline() == 0.1
    owner.store.on_time(0.1)
    assert answers == []
    owner.time = 1.0
    other.unlink()
    owner.store.on_time(1.0)
    assert os.path.exists(given(answers))


def test_no_space_for_an_incoming_object_names_the_file_system(
    tiny_file_system: Path, make_owner: MakeOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = make_owner(100, memory=tiny_file_system)
    monkeypatch.setattr(StoreFolder, "free_bytes", lambda folder: 1 << 30)  # As it was a moment before another took it.
    other = tiny_file_system / "other"
    other.write_bytes(bytes(900_000))

    with pytest.raises(ObjectStoreFullError, match=r"no room for an object of 500 kB .* the file system of .* has"):
        owner.create(1, 500_000, writer=OWNER)
    assert owner.store.usage()["objects"] == 0
    assert segments_of(owner) == []
    other.unlink()


def test_a_full_disk_is_said_and_leaves_no_partial_file(tiny_file_system: Path, make_owner: MakeOwner) -> None:
    owner = make_owner(30, disk=tiny_file_system)
    for oid in range(30):
        owner.put(oid, payload(oid, SIZE))
    waiting = [owner.ask(100 + number, SIZE) for number in range(30)]
    owner.until(lambda: owner.store.next_deadline() is not None)
    owner.time = 5.0
    owner.store.on_time(5.0)  # Tries the disk once more.
    owner.until(lambda: owner.store.next_deadline() is not None)
    owner.store.on_time(5.0)

    refused = [answers for answers in waiting if answers and answers[0][1] is not None]
    with pytest.raises(ObjectStoreFullError, match=f"nothing can be moved to {tiny_file_system}.*: No space left on device"):
        given(refused[0])
    files = [path for path in tiny_file_system.rglob("o*") if path.name != "owner"]
    assert 10 <= len(files) == 30 - len(refused) <= 17  # As many got a segment.
    assert all(path.stat().st_size == owner.store.nbytes_of(int(path.name[1:], 16)) for path in files)
    assert all(answers for answers in waiting)
    for number in range(30):
        owner.store.discard(100 + number)
    for oid in range(30):
        assert owner.get(oid) == payload(oid, SIZE)
        owner.store.discard(oid)


def test_an_object_whose_file_was_cut_is_lost_and_not_half_there(make_owner: MakeOwner, tmp_path: Path) -> None:
    owner = make_owner(1)
    owner.put(1, payload(1, SIZE))
    owner.put(2, payload(2, SIZE))
    (file,) = [path for path in (tmp_path / "disk").rglob("o*") if path.name != "owner"]
    os.truncate(file, 1000)

    with pytest.raises(ObjectLostError, match="object 0x1 could not be read back from"):
        owner.pin(1)
    assert not owner.store.contains(1)
    assert owner.get(2) == payload(2, SIZE)


# --- the end


def test_closing_removes_both_folders_also_while_objects_move(make_owner: MakeOwner, tmp_path: Path) -> None:
    owner = make_owner(1000)
    owner.put(1, payload(1, 900 * SEGMENT))
    owner.ask(2, 900 * SEGMENT)
    view = owner.store.view(1)
    probe, secret = owner.store.folder.probe, owner.store.folder.secret
    assert shares_host(probe, secret)

    owner.store.close()
    owner.store.close()

    assert files_below(tmp_path) == []
    assert not shares_host(probe, secret)
    assert [thread.name for thread in threading.enumerate() if thread.name == "gpumesh-spill"] == []
    with pytest.raises(ValueError, match="released"):
        view[0]


def test_an_owner_whose_loop_has_ended_does_not_trouble_the_spiller(tmp_path: Path) -> None:
    called = threading.Event()

    def ended(call: Callable[[], None]) -> None:
        called.set()
        raise RuntimeError("the loop is closed")

    spiller = Spiller(folder=str(tmp_path), name="n", call_soon=ended)
    spiller.unlink(str(tmp_path / "none"), lambda failure: None)

    assert called.wait(20)
    spiller.close()
