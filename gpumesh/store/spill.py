"""Work on a store's files that would hold up the event loop, on one thread: objects to disk and back, memory set up in advance.

Bytes go from file to file inside the kernel, so that the process does not grow by what it moves.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections import deque
from typing import Any, Callable, Deque, Optional, Tuple

from gpumesh.store.segments import StoreFolder, create_segment

SLICE_BYTES = 8 << 20  # Between two looks at whether the store is closing.
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, as in store.segments; here called so that other threads run meanwhile.

Ended = Callable[[Optional[OSError]], None]


class Spiller:
    """Moves objects between segments and files in a folder on disk, one after the other, on a thread of its own.

    Args:
        folder: Where objects go: `spill_dir`, or the temporary folder.
        name: Of the folder made in there at the first use.
        call_soon: Hands a call over to the thread that owns the store.

    What a method was given as `then` is called on that thread when the work has ended: with None, or with what went wrong.
    """

    def __init__(self, *, folder: Optional[str], name: str, call_soon: Callable[[Callable[[], None]], Any]) -> None:
        self._root = folder
        self._name = name
        self._call_soon = call_soon
        self._folder: Optional[StoreFolder] = None
        self._jobs: Deque[Tuple[Callable[[], None], Ended]] = deque()
        self._wake = threading.Condition()
        self._thread: Optional[threading.Thread] = None
        self._closing = False

    @property
    def path(self) -> str:
        """Where objects go, for messages: the folder, or where it will be."""
        if self._folder is not None:
            return self._folder.path
        import tempfile

        return self._root or tempfile.gettempdir()

    def move_out(self, oid: int, segment_path: str, nbytes: int, then: Ended) -> None:
        """Copy an object to its file on disk. If that fails there is no such file."""
        self._start(lambda: self._move_out(oid, segment_path, nbytes), then)

    def move_in(self, oid: int, segment_path: str, nbytes: int, then: Ended) -> None:
        """Copy an object from its file on disk into a segment. A file that ended early is an `EOFError` in an OSError."""
        self._start(lambda: self._move_in(oid, segment_path, nbytes), then)

    def allocate(self, segment_path: str, nbytes: int, then: Ended) -> None:
        """Let a segment have `nbytes` bytes of memory, so that writing through a map cannot fail."""
        self._start(lambda: allocate(segment_path, nbytes, self._check_open), then)

    def populate(self, mapped: mmap.mmap, nbytes: int, then: Ended) -> None:
        """Set up the page tables of the first bytes of a map while other threads run."""
        self._start(lambda: populate_in_slices(mapped, nbytes, self._check_open), then)

    def close_map(self, mapped: mmap.mmap) -> None:
        """Close a large map; one that is still looked at is closed with its last view."""
        self._start(lambda: _close_map(mapped), _nothing, first=True)

    def unlink(self, path: str, then: Ended) -> None:
        """Remove a large segment, before anything else: its pages go one by one."""
        self._start(lambda: _unlink(path), then, first=True)

    def forget(self, oid: int) -> None:
        """Remove an object's file."""
        with contextlib.suppress(OSError):
            os.unlink(self._file(oid))

    def close(self) -> None:
        """End the thread, remove the folder. Whatever was waiting is not called any more."""
        with self._wake:
            self._closing = True
            self._jobs.clear()
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._folder is not None:
            self._folder.close()

    # --- on the thread

    def _start(self, work: Callable[[], None], then: Ended, *, first: bool = False) -> None:
        with self._wake:
            if self._closing:
                return
            if first:
                self._jobs.appendleft((work, then))
            else:
                self._jobs.append((work, then))
            self._wake.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpumesh-spill", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
                work, then = self._jobs.popleft()
            failure: Optional[OSError] = None
            try:
                work()
            except OSError as error:
                failure = error
            except _ClosingError:
                return
            if not self._closing:
                with contextlib.suppress(RuntimeError):  # The owner's loop has ended.
                    self._call_soon(_call(then, failure))
            del work, then, failure  # A map may be waiting for its last reference to go.

    def _move_out(self, oid: int, segment_path: str, nbytes: int) -> None:
        if self._folder is None:
            if self._root is not None:
                os.makedirs(self._root, exist_ok=True)
            self._folder = StoreFolder(root=self._root or self.path, name=self._name)
        path = self._file(oid)
        try:
            create_segment(path)
            self._copy(segment_path, path, nbytes)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise

    def _move_in(self, oid: int, segment_path: str, nbytes: int) -> None:
        self._copy(self._file(oid), segment_path, nbytes)

    def _copy(self, source: str, target: str, nbytes: int) -> None:
        reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            writing = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
            try:
                copy_bytes(reading, writing, nbytes, self._check_open)
            finally:
                os.close(writing)
        finally:
            os.close(reading)

    def _file(self, oid: int) -> str:
        return os.path.join(self._folder.path if self._folder is not None else self.path, f"o{oid:x}")

    def _check_open(self) -> None:
        if self._closing:
            raise _ClosingError


class _ClosingError(Exception):
    """The store closes; nobody waits for this work any more."""


def copy_bytes(reading: int, writing: int, nbytes: int, check: Callable[[], None]) -> None:
    """Copy the first bytes of one file to the start of another, inside the kernel where it can.

    Raises:
        OSError: No space, an unreadable file; `EOFError` is its cause when the source is too short.
    """
    at = 0
    in_kernel = sys.platform == "linux"
    while at < nbytes:
        check()
        wanted = min(SLICE_BYTES, nbytes - at)
        if in_kernel:
            try:
                done = os.sendfile(writing, reading, at, wanted)  # Writes where `writing` stands: right behind the last slice.
            except OSError as error:
                if at or error.errno not in _NO_SENDFILE:
                    raise
                in_kernel = False
                continue
        else:
            block = os.pread(reading, wanted, at)
            done = os.pwrite(writing, block, at) if block else 0
        if done == 0:
            raise OSError(f"a file ended after {at} of {nbytes} bytes") from EOFError()
        at += done


def allocate(path: str, nbytes: int, check: Callable[[], None] = lambda: None) -> None:
    """Let a file have memory for its first bytes; it keeps what was written there before.

    Raises:
        OSError: There is not so much left (ENOSPC).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        start = os.fstat(descriptor).st_size
        while start < nbytes:
            check()
            size = min(4 * SLICE_BYTES, nbytes - start)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, start, size)
            else:
                size = os.pwrite(descriptor, bytes(size), start)
            start += size
    finally:
        os.close(descriptor)


def populate_in_slices(mapped: mmap.mmap, nbytes: int, check: Callable[[], None]) -> None:
    """Set up page tables without holding the interpreter's lock, which `mmap.madvise` does."""
    if sys.platform != "linux":
        return
    import ctypes

    try:
        first = ctypes.c_char.from_buffer(mapped)  # Keeps the map open meanwhile.
    except ValueError:
        return  # Closed already.
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        address = ctypes.addressof(first)
        for start in range(0, nbytes, SLICE_BYTES):
            check()
            if madvise(address + start, min(SLICE_BYTES, nbytes - start), _POPULATE_WRITE):
                return  # An older kernel: pages come when they are touched.
    finally:
        del first


def _close_map(mapped: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):
        mapped.close()


def _nothing(failure: Optional[OSError]) -> None:
    """Nobody waits for the end of this work."""


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _call(then: Ended, failure: Optional[OSError]) -> Callable[[], None]:
    return lambda: then(failure)


_NO_SENDFILE = (22, 38, 95)  # EINVAL, ENOSYS, EOPNOTSUPP: these two files cannot be joined in the kernel.
