"""The journal in a database file: one thread writes and commits in groups, another one reads.

Durable means: the transaction is in the write-ahead log, and the disk was told to keep it (`synchronous = FULL`; on macOS `fullfsync`).
That costs one flush of the disk for each commit, however many records are in it. A disk that lies about it cannot be helped.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, List, Optional, Sequence, Set, Tuple, TypeVar

from gpumesh.config import KEEP_JOBS_DAYS
from gpumesh.errors import JournalError
from gpumesh.journal.base import (
    EventRecord,
    Journal,
    JournalReader,
    NewJob,
    OnSynced,
    TaskEnd,
    WorkerRecord,
    answer_read,
    nothing,
)
from gpumesh.journal.files import WriterLock, default_db_path, explained
from gpumesh.journal.opening import open_beside, open_for_writing, open_reader
from gpumesh.journal.writer import FACT, NOTE, READ, RECORD_BYTES, REQUEST, Record, Writer
from gpumesh.journal.writing import Writing

__all__ = ["SqliteJournal", "default_db_path", "open_reader"]

T = TypeVar("T")
Then = Callable[[Optional[T], Optional[JournalError]], None]


class SqliteJournal(Journal):
    """The journal of a coordinator in a file. Opening blocks for some milliseconds, more for a large database.

    Args:
        path: Of the file; made, with its folder, if it is not there.
        call_soon: Hands a call over to the loop's thread: `loop.call_soon_threadsafe`.
        keep_days: Jobs that finished so long ago, by this machine's clock, are deleted; None: never.
        wall: Tells the time of day.

    Raises:
        JournalError: The database cannot be used, or another coordinator uses it.
    """

    def __init__(
        self,
        path: str,
        *,
        call_soon: Callable[[Callable[[], None]], Any],
        keep_days: Optional[float] = KEEP_JOBS_DAYS,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.path = os.path.realpath(os.path.expanduser(path))
        self.on_trouble = nothing
        self.on_pruned = nothing
        self._call_soon = call_soon
        self._wall = wall
        self._trouble: Optional[JournalError] = None
        self._reader: Optional[JournalReader] = None  # On the readers' thread.
        self._lock = WriterLock(self.path)
        connection, self.mesh_id, self.generation, self._next_row = open_for_writing(self.path, self._lock)
        try:
            self._codes = _prepared(connection, self.path)
        except BaseException:
            connection.close()
            self._lock.release()
            raise
        self._readers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpumesh-journal-read")
        self._writer = Writer(
            connection,
            self.path,
            tell=self._tell,
            on_trouble=self._set_trouble,
            on_old=self._forget_old,
            keep_days=keep_days,
            wall=wall,
        )

    @property
    def trouble(self) -> Optional[JournalError]:
        return self._trouble

    @property
    def is_pressed(self) -> bool:
        return self._writer.is_pressed

    def begin_job(self, job: NewJob, tasks: int, *, code: Optional[bytes], on_synced: OnSynced) -> int:
        first = self._next_row
        self._next_row += max(1, tasks)

        def synced(error: Optional[JournalError]) -> None:
            if error is None and job.code:
                self._codes.add(job.code)
            on_synced(error)

        self._add(
            REQUEST, Writing.begin_job, (job, first, tasks, code, self._wall()), synced, len(job.options) + len(code or b"")
        )
        return first

    def add_payloads(self, job_id: str, first: int, payloads: Sequence[Tuple[int, bytes]], on_synced: OnSynced) -> None:
        nbytes = sum([len(payload) for _, payload in payloads]) + 64 * len(payloads)
        self._add(REQUEST, Writing.add_payloads, (job_id, first, payloads), on_synced, nbytes)

    def accept_job(self, job_id: str, on_synced: OnSynced) -> None:
        self._add(REQUEST, Writing.accept_job, (job_id,), on_synced)

    def retry_job(self, job_id: str, statuses: Sequence[str], *, status: str, on_synced: OnSynced) -> None:
        self._add(REQUEST, Writing.retry_job, (job_id, statuses, status), on_synced)

    def discard_job(self, job_id: str) -> None:
        self._add(FACT, Writing.discard_job, (job_id,))

    def cancel_pending(
        self,
        job_id: str,
        task_status: str,
        *,
        status: str,
        except_rows: Sequence[int] = (),
        on_synced: Optional[OnSynced] = None,
    ) -> None:
        values = (job_id, task_status, status, except_rows, self._wall())
        self._add(FACT, Writing.cancel_pending, values, on_synced, 8 * len(except_rows))

    def mark_started(self, rows: Sequence[int], on_synced: Optional[OnSynced] = None) -> None:
        self._add(FACT, Writing.mark_started, (rows,), on_synced, 8 * len(rows))

    def end_tasks(self, ends: Sequence[TaskEnd], on_synced: Optional[OnSynced] = None) -> None:
        nbytes = sum([RECORD_BYTES + len(end.result or b"") + len(end.error) + len(end.history) for end in ends])
        self._add(FACT, Writing.end_tasks, (ends,), on_synced, nbytes)

    def set_job(self, job_id: str, status: str, on_synced: Optional[OnSynced] = None) -> None:
        self._add(FACT, Writing.set_job, (job_id, status), on_synced)

    def finish_job(self, job_id: str, status: str, finished: float, on_synced: Optional[OnSynced] = None) -> None:
        self._add(FACT, Writing.finish_job, (job_id, status, finished), on_synced)

    def append_log(self, row: int, attempt: int, stream: int, data: bytes) -> None:
        if data:
            self._add(NOTE, Writing.append_log, (row, attempt, stream, data), None, len(data))

    def note_event(self, event: EventRecord) -> None:
        self._add(NOTE, Writing.note_event, (event,), None, len(event.text) + len(event.details))

    def worker_joined(self, worker: WorkerRecord) -> None:
        self._add(FACT, Writing.worker_joined, (worker,))

    def worker_left(self, worker_id: str) -> None:
        self._add(NOTE, Writing.worker_left, (worker_id,))

    def has_code(self, digest: bytes) -> bool:
        return digest in self._codes

    def read(self, call: Callable[[JournalReader], T], then: Then[T]) -> None:
        self._add(READ, self._start_read, (call, then), lambda error: then(None, error))

    def reader(self) -> JournalReader:
        return open_beside(self.path)

    def close(self) -> None:
        self._writer.stop()
        self._readers.shutdown()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._writer.close()
        self._lock.release()

    # --- parts

    def _add(
        self,
        kind: int,
        apply: Callable[..., None],
        values: Tuple[Any, ...],
        on_synced: Optional[OnSynced] = None,
        nbytes: int = 0,
    ) -> None:
        refusal = self._writer.add(Record(kind, apply, values, on_synced, nbytes + RECORD_BYTES))
        if refusal is not None and on_synced is not None:
            waiting = on_synced
            self._tell(lambda: waiting(refusal))

    def _tell(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has ended, and nobody waits any more.
            self._call_soon(call)

    def _set_trouble(self, trouble: Optional[JournalError]) -> None:
        self._trouble = trouble
        self.on_trouble(trouble)

    def _forget_old(self, ids: List[str], digests: List[bytes]) -> None:
        self._codes.difference_update(digests)
        if ids:
            self.on_pruned(ids)

    def _start_read(self, call: Callable[[JournalReader], T], then: Then[T]) -> None:
        """On the writer's thread: everything that came before is written, or waits for room."""
        done = self._readers.submit(self._read, call)
        done.add_done_callback(lambda future: self._tell(lambda: answer_read(future.result, then)))

    def _read(self, call: Callable[[JournalReader], T]) -> T:
        if self._reader is None:
            self._reader = open_beside(self.path)
        return call(self._reader)


def _prepared(connection: sqlite3.Connection, path: str) -> Set[bytes]:
    """Take half submitted jobs out of sight; the digests of kept folders."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        Writing(connection, path).drop_unaccepted()
        connection.execute("COMMIT")
        return {digest for (digest,) in connection.execute("SELECT digest FROM code")}
    except sqlite3.Error as error:
        raise explained(error, path) from None
