"""store.segments: real files and real processes; who owns a folder, who shares the host, how segments are written and read."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import pytest

from gpumesh.errors import ObjectStoreFullError
from gpumesh.store.container import container_bytes
from gpumesh.store.segments import (
    COPY_BELOW_BYTES,
    KeptMaps,
    Mapping,
    SegmentWriter,
    StoreFolder,
    create_segment,
    default_root,
    map_private,
    shares_host,
    sweep,
)

LARGE = 2 * COPY_BELOW_BYTES
OWN_A_FOLDER = """
import os, sys
from gpumesh.store.segments import StoreFolder
folder = StoreFolder(root=sys.argv[1])
if "fork" in sys.argv:
    if os.fork() == 0:
        folder.close()  # Not its own: must do nothing.
        print(folder.path, flush=True)
        sys.stdin.readline()
        os._exit(0)
else:
    print(folder.path, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StoreFolder]:
    made = StoreFolder(root=str(tmp_path))
    yield made
    made.close()


def owner_process(root: Path, *arguments: str) -> Tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_A_FOLDER, str(root), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def segment_with(folder: StoreFolder, writer: SegmentWriter, name: str, parts: List[Any]) -> Tuple[str, int]:
    path, nbytes = folder.segment_path(name), container_bytes(parts)
    if not os.path.exists(path):
        create_segment(path)
    writer.write(path, nbytes, parts)
    return path, nbytes


def read(path: str, nbytes: int) -> List[bytes]:
    mapping = Mapping(path, nbytes)
    found = [bytes(part) for part in mapping.parts]
    assert mapping.try_close()
    return found


# --- folders


def test_a_folder_is_ours_alone_and_goes_when_it_is_closed(tmp_path: Path) -> None:
    folder = StoreFolder(root=str(tmp_path))

    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    assert os.stat(os.path.dirname(folder.path)).st_mode & 0o777 == 0o700
    assert Path(folder.probe).read_bytes() == folder.secret
    assert sorted(os.listdir(folder.path)) == ["owner", "probe"]
    create_segment(folder.segment_path("s1"))
    folder.close()
    folder.close()
    assert not os.path.exists(folder.path)


def test_the_folder_of_a_killed_process_is_swept_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    dead, dead_path = owner_process(tmp_path)
    alive, alive_path = owner_process(tmp_path)
    try:
        Path(dead_path, "s1").write_bytes(b"left behind")
        dead.send_signal(signal.SIGKILL)
        dead.communicate()
        folder = StoreFolder(root=str(tmp_path))

        assert not os.path.exists(dead_path)
        assert sorted(os.listdir(alive_path)) == ["owner", "probe"]
        assert os.path.exists(folder.probe)
        folder.close()
    finally:
        end(alive)


def test_a_forked_child_neither_removes_its_parents_folder_nor_makes_it_look_alive(tmp_path: Path) -> None:
    process, path = owner_process(tmp_path, "fork")
    try:
        parent = os.path.dirname(path)
        assert sorted(os.listdir(path)) == ["owner", "probe"]
        assert sweep(parent) == []
        process.kill()
        process.wait()

        assert sweep(parent) == [os.path.basename(path)]
    finally:
        end(process)


def test_a_folder_that_is_being_set_up_is_left_alone_until_it_is_old(tmp_path: Path) -> None:
    with_lock, without = tmp_path / "a-1.new", tmp_path / "b-2.new"
    for staging in (with_lock, without):
        staging.mkdir()
    (with_lock / "owner").touch()

    assert sweep(str(tmp_path)) == []
    for staging in (with_lock, without):
        os.utime(staging, (0, 0))
    assert sorted(sweep(str(tmp_path))) == ["a-1.new", "b-2.new"]


def test_two_folders_of_one_process_leave_each_other_alone(tmp_path: Path) -> None:
    first, second = StoreFolder(root=str(tmp_path)), StoreFolder(root=str(tmp_path))

    assert os.path.exists(first.probe)
    first.close()
    assert os.path.exists(second.probe)
    second.close()


def test_a_parent_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    taken = tmp_path / f"gpumesh-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)

    folder = StoreFolder(root=str(tmp_path))

    assert os.path.dirname(folder.path) != str(taken)
    assert os.listdir(taken) == []
    folder.close()


def test_a_root_that_is_missing_is_made(tmp_path: Path) -> None:
    folder = StoreFolder(root=str(tmp_path / "deep" / "down"))

    assert os.path.exists(folder.probe)
    folder.close()


def test_shared_memory_is_the_default_where_there_is_enough_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gpumesh.store.segments.SHARED_MEMORY", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert default_root(1) == str(tmp_path)

    monkeypatch.setattr("gpumesh.store.segments.SHARED_MEMORY", str(Path.cwd()))
    assert default_root(1) == str(Path.cwd())
    monkeypatch.setattr("gpumesh.store.segments.SMALL_SHARED_MEMORY_BYTES", 1 << 62)
    assert default_root(1 << 61) == str(tmp_path)


# --- who shares the host


def test_who_reads_the_secret_shares_the_host_and_nobody_else(folder: StoreFolder, tmp_path: Path) -> None:
    assert shares_host(folder.probe, folder.secret)
    assert not shares_host(folder.probe, folder.secret[:-1] + bytes([folder.secret[-1] ^ 1]))
    assert not shares_host(folder.probe, folder.secret[:16])
    assert not shares_host(folder.probe + "x", folder.secret)
    assert not shares_host("\0", folder.secret)
    assert not shares_host(folder.path, folder.secret)
    empty = tmp_path / "empty"
    empty.touch()
    assert not shares_host(str(empty), b"")


def test_a_pipe_in_the_place_of_the_probe_does_not_hang_us(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "probe")

    assert not shares_host(str(tmp_path / "probe"), bytes(32))


# --- writing and reading


def test_a_segment_is_read_as_it_was_written_the_first_time_and_every_time_after(folder: StoreFolder) -> None:
    writer = SegmentWriter()

    for round_ in range(5):
        parts = [b"pickle %d" % round_, bytes([round_]) * LARGE, b"", b"small"]
        path, nbytes = segment_with(folder, writer, "s1", parts)
        assert read(path, nbytes) == parts
    assert os.path.getsize(path) == nbytes
    writer.close()


def test_a_segment_grows_when_it_is_given_out_for_a_larger_object(folder: StoreFolder) -> None:
    writer = SegmentWriter()

    for size in (LARGE, LARGE, LARGE + 100_000, LARGE + 200_000, 1000, LARGE + 200_000):
        parts = [b"pickle", os.urandom(size)]
        path, nbytes = segment_with(folder, writer, "s1", parts)
        assert read(path, nbytes) == parts
        assert os.path.getsize(path) >= nbytes
    writer.close()


def test_two_writers_of_one_segment_see_each_others_growth(folder: StoreFolder) -> None:
    first, second = SegmentWriter(), SegmentWriter()

    for round_ in range(6):
        parts = [b"pickle", bytes([round_]) * (LARGE + 50_000 * round_)]
        path, nbytes = segment_with(folder, (first, second)[round_ % 2], "s1", parts)
        assert read(path, nbytes) == parts
    first.close()
    second.close()


def test_a_writer_lets_go_of_segments_that_are_gone(folder: StoreFolder) -> None:
    writer = SegmentWriter()
    for _ in range(3):
        path, _ = segment_with(folder, writer, "s1", [b"x" * LARGE])
    assert path in Path("/proc/self/maps").read_text()

    writer.forget(["s1", "never heard of"])

    assert path not in Path("/proc/self/maps").read_text()


def test_a_thousand_parts_are_written_in_order(folder: StoreFolder) -> None:
    parts = [b"%d" % number * (number % 50) for number in range(3000)]
    path, nbytes = segment_with(folder, SegmentWriter(), "s1", parts)

    assert read(path, nbytes) == parts


def test_a_segment_that_is_gone_is_an_oserror(folder: StoreFolder) -> None:
    with pytest.raises(FileNotFoundError):
        SegmentWriter().write(folder.segment_path("s1"), 100, [b"x"])


def test_no_space_left_is_said_with_the_folder(folder: StoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    create_segment(folder.segment_path("s1"))
    os.unlink(folder.segment_path("s1"))
    os.symlink("/dev/full", folder.segment_path("s1"))

    with pytest.raises(ObjectStoreFullError, match=f"no space is left in {folder.path} for an object of") as caught:
        SegmentWriter().write(folder.segment_path("s1"), container_bytes([b"x"]), [b"x"])
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC


def test_kept_maps_are_bounded_by_count_and_by_bytes(folder: StoreFolder) -> None:
    maps = KeptMaps(count=3, nbytes=100_000)
    for number in range(6):
        path = folder.segment_path(f"s{number}")
        Path(path).write_bytes(bytes(40_000 if number == 5 else 20_000))
        descriptor = os.open(path, os.O_RDWR)
        maps.add(f"s{number}", descriptor)
        maps.get("s0")
        os.close(descriptor)

    assert [number for number in range(6) if maps.get(f"s{number}")] == [0, 4, 5]
    maps.close()
    assert len(maps) == 0


def test_a_map_with_a_view_is_closed_once_the_view_is_gone(folder: StoreFolder) -> None:
    path = folder.segment_path("s1")
    Path(path).write_bytes(bytes(8192))
    maps = KeptMaps()
    with open(path, "r+b") as file:
        view = memoryview(maps.add("s1", file.fileno()))

    maps.drop("s1")
    assert path in Path("/proc/self/maps").read_text()
    view.release()
    maps.drop("another")
    assert path not in Path("/proc/self/maps").read_text()


def test_a_reader_may_write_and_nobody_else_sees_it(folder: StoreFolder) -> None:
    path, nbytes = segment_with(folder, SegmentWriter(), "s1", [b"pickle", b"a" * LARGE])
    mapping, other = Mapping(path, nbytes), Mapping(path, nbytes)

    mapping.parts[1][0] = ord("b")

    assert bytes(mapping.parts[1][:2]) == b"ba"
    assert bytes(other.parts[1][:2]) == b"aa"
    assert read(path, nbytes)[1][:2] == b"aa"


def test_a_reader_lets_go_once_its_arrays_are_gone(folder: StoreFolder) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(LARGE, dtype=numpy.float64)
    frozen = numpy.arange(LARGE, dtype=numpy.float64)
    frozen.flags.writeable = False
    buffers: List[pickle.PickleBuffer] = []
    data = pickle.dumps([array, frozen], 5, buffer_callback=buffers.append)
    path, nbytes = segment_with(folder, SegmentWriter(), "s1", [data, *(buffer.raw() for buffer in buffers)])
    mapping = Mapping(path, nbytes)

    loaded, loaded_frozen = pickle.loads(mapping.parts[0], buffers=mapping.parts[1:])

    assert not mapping.is_private
    assert not mapping.try_close()
    assert (loaded == array).all()
    assert loaded.flags.writeable
    assert not loaded_frozen.flags.writeable
    assert loaded.ctypes.data % 64 == 0
    part = loaded[10:20]
    del loaded, loaded_frozen
    assert not mapping.try_close()
    assert part[0] == 10
    del part
    assert mapping.try_close()
    assert mapping.try_close()
    assert path not in Path("/proc/self/maps").read_text()


def test_small_objects_are_copied_so_that_nothing_stays_behind(folder: StoreFolder) -> None:
    path, nbytes = segment_with(folder, SegmentWriter(), "s1", [b"pickle", b"small"])
    mapping = Mapping(path, nbytes)
    part = mapping.parts[1]

    assert mapping.is_private
    assert mapping.try_close()
    part[0] = ord("S")
    assert bytes(part) == b"Small"


def test_a_reader_out_of_descriptors_copies_instead(folder: StoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    path, nbytes = segment_with(folder, SegmentWriter(), "s1", [b"pickle", b"a" * LARGE])

    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(path, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))  # Room for one more: the file, but not the map's own.
    try:
        mapped, parts = map_private(path, nbytes)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (mapped is None) == (sys.version_info < (3, 13))
    assert bytes(parts[1]) == b"a" * LARGE


def test_a_segment_that_is_too_short_for_its_object_is_refused(folder: StoreFolder) -> None:
    path, nbytes = segment_with(folder, SegmentWriter(), "s1", [b"x" * LARGE])

    with pytest.raises(ValueError, match=f"has {nbytes} bytes, but its object has {nbytes + 1}"):
        map_private(path, nbytes + 1)
