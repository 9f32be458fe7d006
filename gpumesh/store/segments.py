"""Files in shared memory that hold one object each: the folder they lie in, who may use it, how they are written and read.

Who owns a folder creates and removes the files (store.objects); peers on the same host write and map them.

Promises
    1. A folder belongs to the process that holds the lock on its `owner` file. Whoever can take that lock knows the process is
       dead, also across containers and after its number was given out again, and removes the folder.
    2. Every byte below the size of a segment's file has been written or allocated: touching it through a map cannot fail for
       want of memory. So a file only grows by writing, which reports a full file system as an error, not as SIGBUS.
    3. A reader's map is private: what it writes there nobody else sees.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import sys
import weakref
from collections import OrderedDict
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence, Tuple

from gpumesh.errors import ObjectStoreFullError
from gpumesh.store.container import container_bytes, container_views, open_container, write_container

try:
    import fcntl
except ImportError:  # Not a POSIX system: no locks, so nothing is swept there.
    fcntl = None  # type: ignore[assignment]

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - what we make there is ours alone, and checked to be
SMALL_SHARED_MEMORY_BYTES = (
    1 << 30
)  # A container's /dev/shm is 64 MB unless asked otherwise: there the temporary folder serves better.
WRITE_SLICE_BYTES = 16 << 20  # One system call: what an interrupt waits for.
KEPT_MAPS = 16  # A writer's own maps of segments it may be given again.
KEPT_MAP_BYTES = 4 << 30
COPY_BELOW_BYTES = 256 << 10  # Reading this much costs what mapping it costs, and holds neither a descriptor nor a pin.
STAGING_SECONDS = 60.0  # A folder that is still being set up after this long was left by a dead process.
_STAGING = ".new"
_OWNER = "owner"
_PROBE = "probe"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: page tables for a whole range at once, three times as fast as faults.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
_NO_MAPS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


def default_root(limit: int = 0) -> str:
    """Where a store's folder goes: shared memory, or the temporary folder where there is none or hardly any.

    Args:
        limit: Bytes that the store may hold.
    """
    if os.path.isdir(SHARED_MEMORY) and os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        info = os.statvfs(SHARED_MEMORY)
        if info.f_frsize * info.f_blocks >= min(limit, SMALL_SHARED_MEMORY_BYTES):
            return SHARED_MEMORY
    return _temporary_folder()


class StoreFolder:
    """A folder of this process alone, known to others by its path and its secret; dead siblings are removed when it is made.

    Attributes:
        path: The folder, mode 0700.
        probe: A file that holds the secret: who can read it shares this host's memory.
        secret: 32 random bytes.
    """

    def __init__(self, *, root: Optional[str] = None, limit: int = 0, name: Optional[str] = None) -> None:
        parent = _parent_folder(root if root is not None else default_root(limit))
        self.name = name or f"{os.urandom(6).hex()}-{os.getpid()}"
        self.path = os.path.join(parent, self.name)
        self.probe = os.path.join(self.path, _PROBE)
        self.secret = os.urandom(32)
        self._pid = os.getpid()
        self._lock: Optional[int] = None
        sweep(parent)
        staging = self.path + _STAGING
        os.mkdir(staging, 0o700)
        try:
            self._lock = os.open(os.path.join(staging, _OWNER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(os.open(os.path.join(staging, _PROBE), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as probe:
                probe.write(self.secret)
            os.rename(staging, self.path)
        except BaseException:
            self._unlock()
            _remove_folder(staging)
            raise
        _folders.add(self)

    def segment_path(self, name: str) -> str:
        """Path of a file in the folder."""
        return os.path.join(self.path, name)

    def free_bytes(self) -> int:
        """What the folder's file system still has for us."""
        info = os.statvfs(self.path)
        return info.f_frsize * info.f_bavail

    def total_bytes(self) -> int:
        """Size of the folder's file system."""
        info = os.statvfs(self.path)
        return info.f_frsize * info.f_blocks

    def close(self) -> None:
        """Remove the folder and all in it. Does nothing a second time, or in a forked child."""
        if self._lock is None or os.getpid() != self._pid:
            return
        _remove_folder(self.path)
        self._unlock()
        _folders.discard(self)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sweep(parent: str) -> List[str]:
    """Remove the folders in `parent` whose owner is dead; returns their names. Several may sweep at once."""
    if fcntl is None:
        return []
    swept = []
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            path = os.path.join(parent, name)
            if _is_dead(path, name):
                _remove_folder(path)
                swept.append(name)
    return swept


def sweep_all(*roots: str) -> None:
    """Remove what dead owners of this user left in shared memory, in the temporary folder and in `roots`."""
    for root in dict.fromkeys((SHARED_MEMORY, _temporary_folder(), *roots)):
        parent = os.path.join(root, f"gpumesh-{_user()}")
        if os.path.isdir(parent):
            sweep(parent)


def shares_host(probe_path: str, secret: bytes) -> bool:
    """Whether the folder of this probe is here: we read the same secret there, and may write beside it."""
    try:
        descriptor = os.open(probe_path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    except (OSError, ValueError):
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        found = os.read(descriptor, 2 * len(secret) + 1)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    same = len(found) == len(secret) and sum(a ^ b for a, b in zip(found, secret)) == 0  # Takes as long wherever they differ.
    return same and len(secret) >= 16 and os.access(os.path.dirname(probe_path), os.W_OK | os.X_OK)


class SegmentWriter:
    """Writes objects into segments that their owner created, and keeps its maps of them: written again, one is ten times as fast.

    For one thread at a time.
    """

    def __init__(self) -> None:
        self._maps = KeptMaps()
        self._seen: OrderedDict[str, None] = OrderedDict()  # Paths written once: a second time they are worth a map.

    def write(self, path: str, nbytes: int, parts: Sequence[Any]) -> None:
        """Write the container of `parts` to the start of a segment.

        Args:
            path: An existing segment that was given to us for this.
            nbytes: `container_bytes(parts)`.
            parts: Bytes-likes; they must not change meanwhile.

        Raises:
            ObjectStoreFullError: No space is left there.
            OSError: The segment is gone.
        """
        try:
            self._write(path, nbytes, parts)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            folder = os.path.dirname(path)
            raise ObjectStoreFullError(
                f"no space is left in {folder} for an object of {nbytes} bytes; free some of that file system, give it more, "
                f"or let the object store use less of it (--object-memory)"
            ) from error

    def _write(self, path: str, nbytes: int, parts: Sequence[Any]) -> None:
        kept = self._maps.get(path)  # By path: the store of another coordinator has the same names.
        if kept is None or len(kept) < nbytes:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if path not in self._seen or os.fstat(descriptor).st_size < nbytes:
                    _write_file(descriptor, parts)
                    self._remember(path)
                    return
                kept = self._maps.add(path, descriptor)
            finally:
                os.close(descriptor)
        view = memoryview(kept)
        try:
            write_container(view, parts)
        finally:
            view.release()

    def forget(self, names: Iterable[str]) -> None:
        """These segments are gone: give their memory back."""
        gone = frozenset(names)
        for path in [path for path in self._seen if os.path.basename(path) in gone]:
            del self._seen[path]
        for path in self._maps.names():
            if os.path.basename(path) in gone:
                self._maps.drop(path)

    def close(self) -> None:
        """Give all maps back."""
        self._seen.clear()
        self._maps.close()

    def _remember(self, path: str) -> None:
        self._seen[path] = None
        self._seen.move_to_end(path)
        while len(self._seen) > 4 * KEPT_MAPS:
            self._seen.popitem(last=False)


class KeptMaps:
    """Shared maps of segments by name; the least recently used are closed when there are too many.

    Args:
        count: Maps that are kept.
        nbytes: Bytes of all of them together, though one is kept at any size.
        elsewhere: Takes maps to be closed, and returns True, where closing a large one would hold others up: a second for 2 GB.
    """

    def __init__(
        self,
        *,
        count: int = KEPT_MAPS,
        nbytes: int = KEPT_MAP_BYTES,
        elsewhere: Callable[[mmap.mmap], bool] = lambda mapped: False,
    ) -> None:
        self._count = count
        self._limit = nbytes
        self._elsewhere = elsewhere
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._bytes = 0
        self._busy: List[mmap.mmap] = []  # Dropped while someone still held a view.

    def get(self, name: str) -> Optional[mmap.mmap]:
        """The map of this segment, if there is one."""
        kept = self._maps.get(name)
        if kept is not None:
            self._maps.move_to_end(name)
        return kept

    def add(self, name: str, descriptor: int, *, populate: bool = True) -> mmap.mmap:
        """Map the whole file, which replaces a map that was shorter."""
        self.drop(name)
        kept = mmap.mmap(descriptor, 0)
        if populate:
            populate_range(kept, 0, len(kept))
        self._maps[name] = kept
        self._bytes += len(kept)
        while len(self._maps) > 1 and (len(self._maps) > self._count or self._bytes > self._limit):
            self.drop(next(iter(self._maps)))
        return kept

    def drop(self, name: str) -> None:
        """Close the map of this segment, at once or when nobody has a view of it any more."""
        kept = self._maps.pop(name, None)
        if kept is not None:
            self._bytes -= len(kept)
            if not self._elsewhere(kept):
                self._busy.append(kept)
        self._busy = [each for each in self._busy if not _closed(each)]

    def close(self) -> None:
        """Close all maps."""
        for name in list(self._maps):
            self.drop(name)

    def names(self) -> List[str]:
        """Of all segments with a map."""
        return list(self._maps)

    def __len__(self) -> int:
        return len(self._maps)


class Mapping:
    """One object as its reader sees it: private memory, writable, taken from the segment page by page where it is touched.

    Attributes:
        parts: The object's parts. Whoever unpickles on them must keep no other list of them than the values need.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        self._map: Optional[mmap.mmap]
        self._map, self.parts = map_private(path, nbytes)

    @property
    def is_private(self) -> bool:
        """Whether the segment is not needed any more: small objects are copied."""
        return self._map is None

    def try_close(self) -> bool:
        """Let go of the segment unless some value still lives on it; True when it is let go."""
        self.parts = []  # Dropped, not released: an array made on one of them may refer to the very view.
        if self._map is None or _closed(self._map):
            self._map = None
            return True
        return False


def map_private(path: str, nbytes: int) -> Tuple[Optional[mmap.mmap], List[memoryview]]:
    """The parts of the object in a segment, in private, writable memory; and the map behind them, None when they are a copy.

    Raises:
        OSError: The segment is not there.
        ValueError: There is no whole object in it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size < nbytes:
            raise ValueError(f"{path} has {size} bytes, but its object has {nbytes}")
        if nbytes <= COPY_BELOW_BYTES:
            return None, open_container(_read(descriptor, bytearray(nbytes)))
        try:
            mapped = _map_copy(descriptor, nbytes)
        except OSError as error:
            if error.errno not in _NO_MAPS:
                raise
            return None, open_container(_read(descriptor, anonymous_memory(nbytes)))  # Out of descriptors or of maps.
    finally:
        os.close(descriptor)
    return mapped, open_container(memoryview(mapped))


def anonymous_memory(nbytes: int) -> mmap.mmap:
    """Fresh memory of this process alone, zeroed when touched; it goes back to the system with the last view of it.

    Raises:
        OSError: There is not so much.
    """
    if hasattr(mmap, "MAP_PRIVATE"):  # Shared memory, the default, has no huge pages.
        return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, max(nbytes, 1))


def create_segment(path: str) -> None:
    """Create an empty segment; its writer lets it grow."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def populate_range(mapped: mmap.mmap, start: int, nbytes: int) -> None:
    """Set up the page tables of a range at once, where the system can; without it they are set up page by page when touched."""
    if sys.platform == "linux" and nbytes > 0:
        with contextlib.suppress(OSError):
            mapped.madvise(_POPULATE_WRITE, start, nbytes)


def _write_file(descriptor: int, parts: Sequence[Any]) -> None:
    at = 0
    for batch in _batches(container_views(parts)):
        if len(batch) > 1:
            wanted = sum(len(piece) for piece in batch)
            if os.pwritev(descriptor, batch, at) == wanted:
                at += wanted
                continue
        for piece in batch:
            view = memoryview(piece)
            for start in range(0, len(view), WRITE_SLICE_BYTES):
                rest = view[start : start + WRITE_SLICE_BYTES]
                while rest:
                    written = os.pwrite(descriptor, rest, at)
                    at += written
                    rest = rest[written:]


def _batches(pieces: List[Any]) -> Iterator[List[Any]]:
    """Small pieces that follow each other in one system call; a large one alone."""
    batch: List[Any] = []
    size = 0
    for piece in pieces:
        if batch and (size + len(piece) > WRITE_SLICE_BYTES or len(batch) == 512):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += len(piece)
    if batch:
        yield batch


def _read(descriptor: int, target: Any) -> memoryview:
    view = memoryview(target)
    at = 0
    while at < len(view):
        got = os.preadv(descriptor, [view[at : at + WRITE_SLICE_BYTES]], at)
        if not got:
            raise ValueError(f"a segment ended at {at} of {len(view)} bytes")
        at += got
    return view


def _map_copy(descriptor: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY, trackfd=False)  # Holds no descriptor of its own.
    return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)


def _closed(mapped: mmap.mmap) -> bool:
    try:
        mapped.close()
    except BufferError:  # Someone has a view of it.
        return False
    return True


def _parent_folder(root: str) -> str:
    parent = os.path.join(root, f"gpumesh-{_user()}")
    for attempt in range(2):
        with contextlib.suppress(FileExistsError):
            os.makedirs(root, exist_ok=True)
            os.mkdir(parent, 0o700)
        info = os.lstat(parent)
        if stat.S_ISDIR(info.st_mode) and _is_ours(info) and not info.st_mode & 0o022:
            return parent
        if attempt == 0:
            parent = f"{parent}-{os.urandom(6).hex()}"  # Someone else took the name, in a folder where everybody may.
    return parent


def _is_ours(info: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or info.st_uid == os.getuid()


def _user() -> str:
    if hasattr(os, "getuid"):
        return str(os.getuid())
    import getpass

    return getpass.getuser()


def _temporary_folder() -> str:
    import tempfile

    return tempfile.gettempdir()


def _is_dead(path: str, name: str) -> bool:
    try:
        lock = os.open(os.path.join(path, _OWNER), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return os.path.isdir(path) and (not name.endswith(_STAGING) or _is_old(path))
    except OSError:
        return False
    try:
        if name.endswith(_STAGING) and not _is_old(path):
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # Its owner lives.
    finally:
        os.close(lock)
    return True


def _is_old(path: str) -> bool:
    import time

    return time.time() - os.stat(path).st_mtime > STAGING_SECONDS


def _remove_folder(path: str) -> None:
    """Remove a flat folder; what another removes meanwhile is as good."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            if name != _OWNER:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(path, name))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, _OWNER))
        os.rmdir(path)


_folders: weakref.WeakSet[StoreFolder] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """The lock is the parent's: a child that outlived it would make the dead parent look alive."""
    for folder in list(_folders):
        folder._unlock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = [
    "KeptMaps",
    "Mapping",
    "SegmentWriter",
    "StoreFolder",
    "anonymous_memory",
    "container_bytes",
    "create_segment",
    "map_private",
    "shares_host",
    "sweep",
]
