"""Opening the database: as the one coordinator that writes, or to read it beside or without a coordinator, changing nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
import tempfile
from typing import Tuple

from gpumesh.config import JOURNAL_BUSY_SECONDS, JOURNAL_CHECKPOINT_BYTES
from gpumesh.errors import JournalError
from gpumesh.journal.files import (
    WriterLock,
    check_file,
    check_header,
    check_owner,
    explained,
    prepare_file,
    shared_lock,
    size_of,
    uri_of,
    wal_of,
)
from gpumesh.journal.rows import SqliteReader
from gpumesh.journal.schema import VERSION, migrate, version_of

_PAGE_BYTES = 4096


def open_for_writing(path: str, lock: WriterLock) -> Tuple[sqlite3.Connection, str, int, int]:
    """Open the database as its writer, making it or bringing its tables up to date where needed.

    Args:
        path: Of the file, without links.
        lock: Of that path; held when this returns, released when it raises.

    Returns:
        The connection in autocommit mode, for any thread; the mesh's id, the number of this start, and the next row to give.

    Raises:
        JournalError: It cannot be used; it is as it was.
    """
    prepare_file(path)
    lock.take()
    try:
        check_file(path)
        try:
            return _open(path)
        except sqlite3.Error as error:
            raise explained(error, path) from None
    except BaseException:
        lock.release()
        raise


def _open(path: str) -> Tuple[sqlite3.Connection, str, int, int]:
    connection = sqlite3.connect(
        path, timeout=JOURNAL_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=200
    )
    try:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # Of a new one; of others it stays what it is.
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise JournalError(
                f"the database of jobs {path} lies where SQLite can keep no write-ahead log; name another one with --db"
            )
        # FULL: a commit returns when the disk has it. NORMAL would lose what was acknowledged when the power goes.
        connection.execute("PRAGMA synchronous = FULL")
        if sys.platform == "darwin":  # Where flushing alone leaves it in the drive's own memory.
            connection.execute("PRAGMA fullfsync = ON")
        # The writer moves the log into the database itself, after it has told who waits; SQLite does when that does not happen.
        connection.execute(f"PRAGMA wal_autocheckpoint = {8 * JOURNAL_CHECKPOINT_BYTES // _PAGE_BYTES}")
        connection.execute(f"PRAGMA journal_size_limit = {4 * JOURNAL_CHECKPOINT_BYTES}")
        connection.execute("BEGIN IMMEDIATE")
        try:
            migrate(connection)
            connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'generation'")
            meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return connection, str(meta["mesh_id"]), int(meta["generation"]), int(meta["next_row"])
    except BaseException:
        connection.close()
        raise


def open_beside(path: str) -> SqliteReader:
    """A reader for a process that has the database open for writing itself.

    Raises:
        JournalError: It cannot be opened.
    """
    return SqliteReader(_connect(path, "mode=ro"), path)


def open_reader(path: str) -> SqliteReader:
    """A reader for a process without a coordinator: nothing is created or changed beside the database, whoever writes meanwhile.

    While a coordinator writes, the database is read in place. What a killed one left behind, and what an older version wrote, is
    read from a copy in the temporary folder. Without a coordinator none can start before this reader is closed.

    Raises:
        JournalError: There is no such database, or it cannot be used.
    """
    path = os.path.realpath(path)
    if not os.path.exists(path):
        raise JournalError(f"there is no database of jobs at {path}")
    check_header(path)
    with contextlib.ExitStack() as holding:
        lock = shared_lock(path)
        if lock is not None:
            holding.callback(os.close, lock)
        if lock is None:
            connection = _connect(path, "mode=ro")
        elif size_of(wal_of(path)):
            connection = _connect_copy(path, holding)
        else:
            connection = _connect(path, "mode=ro&immutable=1")
        holding.callback(connection.close)
        if version_of(connection) < VERSION:
            connection = _migrated(connection, path, holding)
        return _LoneReader(connection, path, holding.pop_all())
    raise AssertionError("a stack without suppression has swallowed an error")


class _LoneReader(SqliteReader):
    """One that holds more than its connection."""

    def __init__(self, connection: sqlite3.Connection, path: str, holding: contextlib.ExitStack) -> None:
        super().__init__(connection, path)
        self._holding = holding

    def close(self) -> None:
        self._holding.close()


def _connect(path: str, parameters: str, *, file: str = "") -> sqlite3.Connection:
    """Open the database, or the file that is a copy of it."""
    try:
        connection = sqlite3.connect(
            uri_of(file or path, parameters),
            uri=True,
            timeout=JOURNAL_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            check_owner(path, connection)
        except BaseException:
            connection.close()
            raise
        return connection
    except sqlite3.Error as error:
        raise explained(error, path) from None


def _connect_copy(path: str, holding: contextlib.ExitStack) -> sqlite3.Connection:
    """Open a copy of the database and its log, in a folder that goes with `holding`."""
    copy = os.path.join(holding.enter_context(tempfile.TemporaryDirectory(prefix="gpumesh-jobs-")), "jobs.db")
    try:
        shutil.copyfile(path, copy)
        shutil.copyfile(wal_of(path), wal_of(copy))
    except OSError as error:
        raise JournalError(
            f"the database of jobs {path} was left behind by a killed coordinator, and cannot be copied to {copy} to be read:"
            f" {error.strerror or error}"
        ) from None
    return _connect(path, "mode=rw", file=copy)


def _migrated(connection: sqlite3.Connection, path: str, holding: contextlib.ExitStack) -> sqlite3.Connection:
    """Open a copy of an older database, with the tables of today."""
    folder = holding.enter_context(tempfile.TemporaryDirectory(prefix="gpumesh-jobs-"))
    try:
        copy = sqlite3.connect(os.path.join(folder, "jobs.db"), isolation_level=None, check_same_thread=False)
        holding.callback(copy.close)
        connection.backup(copy)
        copy.execute("BEGIN")
        migrate(copy)
        copy.execute("COMMIT")
        return copy
    except sqlite3.Error as error:
        raise explained(error, path) from None
