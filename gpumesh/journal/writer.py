"""The one thread that writes to the database: takes what is queued, commits it at once, tells who waits. Knows no job.

1. Records are applied in order. What `on_synced(None)` was called for is in a transaction that the disk has.
2. A transaction that fails is undone as a whole. Then facts and notes are tried without the requests, and each request alone.
3. Facts that cannot be written wait in front of everything else; while any waits, requests are refused, for they came later.
4. Whatever goes wrong with the disk, the thread goes on; only `stop` ends it.

    waiting ── urgent record, or a note that lingered ──> taking ──> committing ──> telling ──> moving the log ──> deleting what is old
       ^                                                                 │ failed: the backlog, tried again every JOURNAL_RETRY_SECONDS   │
       └──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections import deque
from math import inf
from typing import Any, Callable, Deque, List, Optional, Tuple

from gpumesh.config import (
    JOURNAL_CHECKPOINT_BYTES,
    JOURNAL_GAP_SECONDS,
    JOURNAL_GROUP_BYTES,
    JOURNAL_LINGER_SECONDS,
    JOURNAL_PRUNE_SECONDS,
    JOURNAL_QUEUE_BYTES,
    JOURNAL_RETRY_SECONDS,
)
from gpumesh.errors import JournalError
from gpumesh.journal.base import OnSynced
from gpumesh.journal.files import explained
from gpumesh.journal.writing import Writing
from gpumesh.model.records import NamedTuple

logger = logging.getLogger(__name__)

REQUEST, FACT, NOTE, READ = range(4)

RECORD_BYTES = 200  # What a record weighs beside what it carries, about.
_COMMIT_BYTES = 16 * 1024  # What a commit writes at least, about: a few pages.
_FAILURES_IN_A_ROW = 4  # So many requests are tried alone before the others of their group are refused as well.
_DAY = 86400.0
_VACUUM_PAGES = 2000  # Given back to the file system at once.

_LASTING = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.ProgrammingError,
    sqlite3.InterfaceError,
    OverflowError,
    UnicodeError,
)
"""What is wrong with a record, not with the disk: trying again would not help."""


class Record(NamedTuple):
    """Something to do, in order."""

    kind: int
    apply: Callable[..., None]  # A method of Writing; of a READ what starts it.
    values: Tuple[Any, ...]
    on_synced: Optional[OnSynced]
    nbytes: int


_PROBE = Record(NOTE, Writing.probe, (), None, 0)


class Writer:
    """Owns the connection from now on.

    Args:
        connection: Open for writing, in autocommit mode.
        path: For messages.
        tell: Hands a call over to whoever gave the records.
        on_trouble: Told (through `tell`) when writing begins to fail, and with None when it works again.
        on_old: Told (through `tell`) the ids of jobs that were dropped, and the digests of folders that were.
        keep_days: Finished jobs older than this go; None: none.
        wall: The time of day.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: str,
        *,
        tell: Callable[[Callable[[], None]], Any],
        on_trouble: Callable[[Optional[JournalError]], None],
        on_old: Callable[[List[str], List[bytes]], None],
        keep_days: Optional[float],
        wall: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._path = path
        self._tell_loop = tell
        self._on_trouble = on_trouble
        self._on_old = on_old
        self._keep_seconds = None if keep_days is None else keep_days * _DAY
        self._wall = wall
        self._writing = Writing(connection, path)

        self._wake = threading.Condition()  # Guards the next five.
        self._queue: Deque[Record] = deque()
        self._queued_bytes = 0  # Of all records that are neither written nor refused.
        self._is_urgent = False  # Somebody waits for what is in the queue.
        self._lingers_until = inf  # When notes have waited long enough.
        self._is_closing = False

        self._backlog: List[Record] = []  # Could not be written; no requests.
        self._failure: Optional[JournalError] = None
        self._retry_at = 0.0
        self._not_before = 0.0  # The next commit.
        self._unmoved_bytes = 0  # In the log, about, since it was moved into the database last.
        self._prune_at = 0.0
        self._maintain_at = 0.0
        self._told: List[Tuple[OnSynced, Optional[JournalError]]] = []
        self._thread = threading.Thread(target=self._run, name="gpumesh-journal", daemon=True)
        self._thread.start()

    # --- on any thread

    @property
    def is_pressed(self) -> bool:
        """More than half of what may wait does."""
        return self._queued_bytes > JOURNAL_QUEUE_BYTES // 2

    def add(self, record: Record) -> Optional[JournalError]:
        """Queue a record; an error if it is refused at once, and then nothing is called for it."""
        with self._wake:
            refusal = self._refusal(record)
            if refusal is not None:
                return JournalError(refusal)
            self._queue.append(record)
            self._queued_bytes += record.nbytes
            if record.kind != NOTE:
                if not self._is_urgent:
                    self._is_urgent = True
                    self._wake.notify()
            elif self._lingers_until == inf:
                self._lingers_until = time.monotonic() + JOURNAL_LINGER_SECONDS
                self._wake.notify()
        return None

    def stop(self) -> None:
        """Write what is queued, end the thread. Facts that cannot be written are told so."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def close(self) -> None:
        """Move the log into the database, where there is room for that, and close the connection. After `stop`."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._connection.close()

    def _refusal(self, record: Record) -> Optional[str]:
        if self._is_closing:
            return f"the database of jobs {self._path} is closed"
        if record.kind == REQUEST and self._queued_bytes and self._queued_bytes + record.nbytes > JOURNAL_QUEUE_BYTES:
            waiting = self._queued_bytes // 1_000_000
            return f"{waiting} MB wait to be written to {self._path}, no more may; try again later"
        if record.kind == NOTE and self.is_pressed:
            return "dropped in need"
        return None

    # --- on the thread

    def _run(self) -> None:
        try:
            while True:
                group = self._take()
                if group is None:
                    break
                reads = [record for record in group if record.kind == READ]
                records = [record for record in group if record.kind != READ]
                if records or self._failure is not None:
                    self._write(records)
                self._deliver()
                for record in reads:
                    record.apply(*record.values)
                self._done(reads)
                self._move_log()
                self._look_after_old()
        finally:
            with self._wake:  # After an error of our own as well: nobody waits for a thread that is gone.
                self._is_closing = True
                left = [*self._backlog, *self._queue]
                self._queue.clear()
            self._refuse(left, self._failure or JournalError(f"the database of jobs {self._path} is closed"))
            self._deliver()

    def _take(self) -> Optional[List[Record]]:
        """Wait for something to do: records for about one transaction, [] when it is time for other work, None at the end."""
        with self._wake:
            while True:
                now = time.monotonic()
                due = self._next_due()
                if due <= now:
                    break
                self._wake.wait(None if due == inf else due - now)
            if self._is_closing and not self._queue:
                return None
            group: List[Record] = []
            nbytes = 0
            while self._queue and nbytes < JOURNAL_GROUP_BYTES:
                record = self._queue.popleft()
                nbytes += record.nbytes
                group.append(record)
            if not self._queue:
                self._is_urgent = False
                self._lingers_until = inf
            return group

    def _next_due(self) -> float:
        if self._is_closing or (self._queued_bytes > JOURNAL_GROUP_BYTES and self._queue):
            return 0.0
        due = self._maintain_at
        if self._failure is not None:
            due = min(due, self._retry_at)
        if self._is_urgent:
            due = min(due, self._not_before)
        return min(due, self._lingers_until)

    def _write(self, records: List[Record]) -> None:
        records = self._backlog + records
        if self._failure is not None and time.monotonic() < self._retry_at and not self._is_closing:
            self._put_off(records, self._failure)
            return
        error = self._commit(records or [_PROBE])
        if isinstance(error, _LASTING):
            for record in records:
                error = self._commit([record])
                if isinstance(error, _LASTING):
                    logger.error("a record cannot be written to %s: %s: %s", self._path, type(error).__name__, error)
                    self._refuse([record], JournalError(f"this cannot be written to {self._path}: {error}"))
                elif error is not None:
                    self._fail([record], error)
        elif error is not None:
            self._fail(records, error)
        elif self._failure is not None:
            self._failure = None
            logger.warning("the database of jobs %s can be written again", self._path)
            self._tell_loop(lambda: self._on_trouble(None))

    def _fail(self, records: List[Record], error: BaseException) -> None:
        """A commit failed for the disk's reasons: save what must not be lost, refuse what may be."""
        requests = [record for record in records if record.kind == REQUEST]
        others = [record for record in records if record.kind != REQUEST]
        if others and (not requests or self._commit(others) is not None):
            self._put_off(records, explained(error, self._path))
            return
        self._backlog = []
        failures = 0
        for place, request in enumerate(requests):
            failed = self._commit([request]) if len(requests) > 1 or others else error
            if failed is None:
                failures = 0
                continue
            failures += 1
            self._refuse([request], explained(failed, self._path))
            if failures >= _FAILURES_IN_A_ROW:
                self._refuse(requests[place + 1 :], explained(failed, self._path))
                return

    def _put_off(self, records: List[Record], failure: JournalError) -> None:
        self._refuse([record for record in records if record.kind == REQUEST], failure)
        waiting = [record for record in records if record.kind != REQUEST]
        if self.is_pressed:
            self._done([record for record in waiting if record.kind == NOTE])
            waiting = [record for record in waiting if record.kind != NOTE]
        self._backlog = waiting
        now = time.monotonic()
        if now >= self._retry_at:
            self._retry_at = now + JOURNAL_RETRY_SECONDS
        if self._failure is None:
            self._failure = failure
            logger.warning("%s; what ends meanwhile is kept in memory, and written when that is possible again", failure)
            self._tell_loop(lambda: self._on_trouble(failure))

    def _commit(self, records: List[Record]) -> Optional[BaseException]:
        """One transaction; None: the disk has it, and `_told` who waits for that. An error: nothing has happened."""
        told: List[Tuple[OnSynced, Optional[JournalError]]] = []
        writing = self._writing
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for record in records:
                refusal = None
                try:
                    record.apply(writing, *record.values)
                except JournalError as error:
                    refusal = error
                if record.on_synced is not None:
                    told.append((record.on_synced, refusal))
            writing.complete()
            self._connection.execute("COMMIT")
        except (sqlite3.Error, *_LASTING) as error:
            with contextlib.suppress(sqlite3.Error):
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            writing.forget()
            return error
        self._backlog = []
        self._told.extend(told)
        self._unmoved_bytes += self._done(records) + _COMMIT_BYTES
        self._not_before = time.monotonic() + JOURNAL_GAP_SECONDS
        return None

    def _refuse(self, records: List[Record], error: JournalError) -> None:
        self._told.extend((record.on_synced, error) for record in records if record.on_synced is not None)
        self._done(records)

    def _done(self, records: List[Record]) -> int:
        """These do not wait any more; their bytes."""
        nbytes = sum([record.nbytes for record in records])
        with self._wake:
            self._queued_bytes -= nbytes
        return nbytes

    def _deliver(self) -> None:
        if self._told:
            told = deque(self._told)
            self._told = []
            self._tell_loop(lambda: self._call_all(told))

    def _call_all(self, told: Deque[Tuple[OnSynced, Optional[JournalError]]]) -> None:
        try:
            while told:
                on_synced, error = told.popleft()
                on_synced(error)
        finally:
            if told:  # One has raised: the others are called all the same.
                self._tell_loop(lambda: self._call_all(told))

    def _move_log(self) -> None:
        if self._unmoved_bytes >= JOURNAL_CHECKPOINT_BYTES:
            self._unmoved_bytes = 0
            with contextlib.suppress(
                sqlite3.Error
            ):  # No room, or a reader is in the way: later. What is in the log is as safe.
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _look_after_old(self) -> None:
        """Drop jobs that are too old; delete what was dropped, a little at a time."""
        now = time.monotonic()
        if now < self._maintain_at:
            return
        if self._failure is not None:
            self._maintain_at = now + JOURNAL_RETRY_SECONDS
            return
        wall = self._wall()
        ids: List[str] = []
        digests: List[bytes] = []
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            if now >= self._prune_at and self._keep_seconds is not None:
                ids = self._writing.drop_old(wall - self._keep_seconds)
            has_more = self._writing.sweep()
            if not has_more:
                digests = self._writing.free_code(wall)
            self._connection.execute("COMMIT")
            if not has_more:
                self._connection.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            self._writing.forget()
            self._maintain_at = now + JOURNAL_RETRY_SECONDS
            logger.warning("old jobs cannot be deleted: %s", explained(error, self._path))
            return
        if now >= self._prune_at:
            self._prune_at = now + JOURNAL_PRUNE_SECONDS
        self._maintain_at = now if has_more else self._prune_at
        self._unmoved_bytes += _COMMIT_BYTES
        if ids or digests:
            self._tell_loop(lambda: self._on_old(ids, digests))
