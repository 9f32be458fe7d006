"""The database's file: where it is by default, who may write to it, and what is wrong with it. Reads before it touches."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import sys
import time
import weakref
from typing import List, Optional
from urllib.parse import quote

from gpumesh.config import DEFAULT_PORT, JOURNAL_BUSY_SECONDS, JOURNAL_CHECK_BYTES, JOURNAL_LOCK_SECONDS
from gpumesh.errors import JournalError
from gpumesh.journal.schema import APPLICATION_ID, VERSION, version_of

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_INDEX_BYTES = 64 * 1024  # What SQLite adds to it at once is half of that.


def default_db_path(port: int = DEFAULT_PORT) -> str:
    """Where the coordinator on this port keeps its jobs: in the user's folder for data. Two of one user do not share a file."""
    name = "jobs.db" if port == DEFAULT_PORT else f"jobs-{port}.db"
    if sys.platform == "linux":  # What platformdirs says too, without the 5 ms that importing it takes.
        folder = os.environ.get("XDG_DATA_HOME", "").strip() or os.path.join(os.path.expanduser("~"), ".local", "share")
        return os.path.join(folder, "gpumesh", name)
    import platformdirs

    return os.path.join(platformdirs.user_data_dir("gpumesh", appauthor=False), name)


def wal_of(path: str) -> str:
    """The file in which a database's newest transactions are."""
    return f"{path}-wal"


def size_of(path: str) -> int:
    """Bytes of a file, 0: there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def uri_of(path: str, parameters: str) -> str:
    """How SQLite is told of a file with parameters: `mode=ro`, `immutable=1`."""
    return f"file:{quote(os.path.abspath(path))}?{parameters}"


def prepare_file(path: str) -> None:
    """Make sure that there is a file, if only an empty one, that this process may write to.

    Raises:
        JournalError: Its folder or the file cannot be made, it is no file, or may only be read.
    """
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600))
        mode = os.stat(path).st_mode
    except OSError as error:
        raise JournalError(
            f"the database of jobs {path} cannot be made: {error.strerror or error}; name another one with --db"
        ) from None
    if not stat.S_ISREG(mode):
        raise JournalError(f"the database of jobs {path} is not a file; name another one with --db")
    for what, where in ((path, path), ("its folder", folder)):
        if not os.access(where, os.W_OK):
            raise JournalError(
                f"the database of jobs {path} cannot be written: {what} is read-only for this user;"
                " change that, or name another one with --db"
            )


def check_file(path: str) -> None:
    """Look whether this is a database of ours that this version can use, without changing it. An empty file is one.

    Raises:
        JournalError: It is no database, that of another program, damaged, or written by a newer version.
    """
    check_header(path)
    if not size_of(path):
        return
    parameters = "mode=ro" if size_of(wal_of(path)) else "mode=ro&immutable=1"
    try:
        connection = sqlite3.connect(uri_of(path, parameters), uri=True, timeout=JOURNAL_BUSY_SECONDS, isolation_level=None)
        with contextlib.closing(connection):
            check_owner(path, connection)
            if size_of(path) + size_of(wal_of(path)) <= JOURNAL_CHECK_BYTES:
                found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            else:
                connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
                found = "ok"
    except sqlite3.Error as error:
        raise explained(error, path) from None
    if found != "ok":
        raise damaged(path, str(found))


def check_header(path: str) -> None:
    """The part of `check_file` that needs nothing but the first bytes.

    Raises:
        JournalError: As there; also when it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError as error:
        raise JournalError(f"the database of jobs {path} cannot be read: {error.strerror or error}") from None
    if not header:
        return
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise JournalError(
            f"{path} is not a database of jobs, or is damaged; nothing was changed in it; name another one with --db"
        )
    _check_identity(path, int.from_bytes(header[60:64], "big"), int.from_bytes(header[68:72], "big"))


def check_owner(path: str, connection: sqlite3.Connection) -> None:
    """Whether an open database is ours and not newer than this; what only stands in its log counts.

    Raises:
        JournalError: It is not.
        sqlite3.Error: It cannot be read.
    """
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    version = version_of(connection)
    _check_identity(path, version, owner)
    if not version and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        _check_identity(path, version, -1)


def _check_identity(path: str, version: int, owner: int) -> None:
    if owner != APPLICATION_ID and (owner or version):
        raise JournalError(f"{path} is a database of another program; nothing was changed in it; name another one with --db")
    if version > VERSION:
        raise JournalError(
            f"the database of jobs {path} was written by a newer gpumesh (its tables have version {version}, this one knows"
            f" {VERSION}); nothing was changed in it; update gpumesh, or name another one with --db"
        )


def explained(error: BaseException, path: str) -> JournalError:
    """What SQLite says, in words that help."""
    text = str(error)
    if "full" in text or ("I/O" in text and _is_full(path)):  # The second: no room for the log's index.
        return JournalError(f"no room for the database of jobs {path}: the disk is full; free some space")
    if "locked" in text or "busy" in text:
        return JournalError(f"the database of jobs {path} is locked by another program; end it, or name another one with --db")
    if "readonly" in text:
        return JournalError(f"the database of jobs {path} cannot be written: it is read-only; name another one with --db")
    if "malformed" in text or "not a database" in text:
        return damaged(path, text)
    if "unable to open" in text:
        return JournalError(
            f"the database of jobs {path} cannot be opened; look whether file and folder may be read and written"
        )
    return JournalError(f"the database of jobs {path} cannot be used: {text}")


def _is_full(path: str) -> bool:
    try:
        return shutil.disk_usage(os.path.dirname(path)).free < _INDEX_BYTES
    except OSError:
        return False


def damaged(path: str, what: str) -> JournalError:
    """The error for a file that is broken inside."""
    return JournalError(
        f"the database of jobs {path} is damaged ({' '.join(what.split())[:200]}); nothing was changed in it;"
        " name another one with --db, or restore a copy"
    )


class WriterLock:
    """Held by the one coordinator that writes to a database, in a file beside it; gone with the process, however it ends.

    Readers take it for a moment, shared. It says nothing to other programs; those meet SQLite's own locks.
    """

    def __init__(self, path: str) -> None:
        self._path = f"{path}.lock"
        self._database = path
        self._file: Optional[int] = None

    def take(self) -> None:
        """Become the writer; waits JOURNAL_LOCK_SECONDS for one that is just ending, or a reader.

        Raises:
            JournalError: Another coordinator is it, or the file cannot be made.
        """
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        except OSError as error:
            raise JournalError(f"{self._path} cannot be made: {error.strerror or error}") from None
        deadline = time.monotonic() + JOURNAL_LOCK_SECONDS
        while not _try_lock(file):
            if time.monotonic() > deadline:
                holder = ""
                with contextlib.suppress(OSError):  # Where a lock keeps others from reading, too.
                    holder = os.read(file, 32).decode("ascii", "replace").strip()
                os.close(file)
                raise JournalError(
                    f"the database of jobs {self._database} is in use by another coordinator"
                    f"{f' (process {holder})' if holder else ''}; stop that one, or give this one another with --db"
                )
            time.sleep(0.02)
        self._file = file
        _held.append(weakref.ref(self))
        with contextlib.suppress(OSError):  # For people only; the disk may be full.
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Let another one write. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            _held[:] = [held for held in _held if held() not in (None, self)]


def shared_lock(path: str) -> Optional[int]:
    """Keep coordinators from starting on this database until the descriptor is closed; None: one is running.

    A database without the file beside it has no coordinator; then the descriptor stands for nothing.
    """
    try:
        file = os.open(f"{path}.lock", os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return os.open(os.devnull, os.O_RDONLY)
    if _try_lock(file, shared=True):
        return file
    os.close(file)
    return None


def _try_lock(file: int, *, shared: bool = False) -> bool:
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_held: List[weakref.ref[WriterLock]] = []


def _let_go_in_child() -> None:
    """A forked child keeps its parent's locks for as long as it has the descriptors."""
    for held in _held:
        lock = held()
        if lock is not None and lock._file is not None:
            os.close(lock._file)
            lock._file = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
