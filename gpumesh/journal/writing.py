"""What each record does to the database, within a transaction that somebody else begins and commits. Knows no thread and no queue."""

from __future__ import annotations

import json
import sqlite3
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from gpumesh.config import (
    EVENTS_KEPT,
    JOURNAL_CODE_SECONDS,
    JOURNAL_LOG_BYTES,
    JOURNAL_SWEEP_ROWS,
    JOURNAL_TASK_LOG_BYTES,
)
from gpumesh.errors import JournalError
from gpumesh.journal.base import MAX_ROW, PENDING, EventRecord, NewJob, TaskEnd, WorkerRecord
from gpumesh.journal.packing import packs
from gpumesh.journal.rows import SqliteReader
from gpumesh.journal.schema import ACCEPTED, ARRIVING, DROPPED, STARTED

_REMEMBERED = 10_000


class Writing:
    """Statements on one connection.

    A request that makes no sense raises `JournalError` before it has changed anything; whatever SQLite raises leaves a transaction to be
    rolled back, and then `forget` has to be called.
    """

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection = connection
        self._execute = connection.execute
        self._path = path
        self._tails: Dict[int, Tuple[int, int]] = {}  # Row -> (bytes the task has written, bytes kept of them).
        self._log_bytes: Optional[int] = None  # Of all tasks.
        self._coming: Dict[str, Tuple[int, int, int]] = {}  # Job being submitted -> (first row, tasks, the first so many came).
        self._next_row: Optional[int] = None  # To be written before the commit.

    def complete(self) -> None:
        """The transaction is about to be committed."""
        if self._next_row is not None:
            self._execute("UPDATE meta SET value = ? WHERE key = 'next_row'", (self._next_row,))
            self._next_row = None

    def forget(self) -> None:
        """The transaction was rolled back: what is remembered of the tables may be wrong."""
        self._tails.clear()
        self._log_bytes = None
        self._coming.clear()
        self._next_row = None

    # --- requests

    def begin_job(self, job: NewJob, first: int, tasks: int, archive: Optional[bytes], now: float) -> None:
        if first + tasks - 1 > MAX_ROW:
            raise JournalError(f"all numbers of script tasks are given in {self._path}; start with a new database: --db")
        if job.code and archive is None:
            if not self._execute("UPDATE code SET used = ? WHERE digest = ?", (now, job.code)).rowcount:
                raise JournalError(f"the folder of job {job.id} is not kept here any more; submit the job again")
        elif job.code:
            self._execute("INSERT OR REPLACE INTO code (digest, used, archive) VALUES (?, ?, ?)", (job.code, now, archive))
        try:
            self._insert_job(job, first, tasks)
        except sqlite3.IntegrityError:
            self._execute("UPDATE jobs SET id = id || '/' || first_row WHERE id = ? AND stage = ?", (job.id, DROPPED))
            try:
                self._insert_job(job, first, tasks)
            except sqlite3.IntegrityError:
                raise JournalError(f"there is a job {job.id} already") from None
        self._remember_coming(job.id, first, tasks, 0)
        self._next_row = first + max(1, tasks)

    def _insert_job(self, job: NewJob, first: int, tasks: int) -> None:
        self._execute(
            "INSERT INTO jobs (first_row, tasks, id, name, script, code, options, stage, status, submitted)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                first,
                tasks,
                job.id,
                clean(job.name),
                clean(job.script),
                job.code,
                job.options,
                ARRIVING,
                job.status,
                job.submitted,
            ),
        )

    def add_payloads(self, job_id: str, first: int, payloads: Sequence[Tuple[int, bytes]]) -> None:
        begin, tasks, came = self._arriving(job_id)
        if first < 0 or first + len(payloads) > tasks:
            raise JournalError(f"job {job_id} has {tasks} tasks, but payloads came for {first} to {first + len(payloads) - 1}")
        row = begin + first
        try:
            packed = [(row + pack.first, pack.tasks, pack.variants, pack.data) for pack in packs(payloads)]
        except ValueError as error:
            raise JournalError(f"job {job_id}: {error}") from None
        if first == came:  # As they do; what came in another order is looked up.
            self._remember_coming(job_id, begin, tasks, came + len(payloads))
        else:
            self._remember_coming(job_id, begin, tasks, -1)
            self._execute("DELETE FROM payloads WHERE first_row BETWEEN ? AND ?", (row, row + len(payloads) - 1))
        for pack in packed:
            self._execute("INSERT INTO payloads VALUES (?, ?, ?, ?)", pack)

    def accept_job(self, job_id: str) -> None:
        begin, tasks, came = self._arriving(job_id)
        if came != tasks:
            (came,) = self._execute(
                "SELECT coalesce(sum(tasks), 0) FROM payloads WHERE first_row BETWEEN ? AND ?", (begin, begin + tasks - 1)
            ).fetchone()
        if came != tasks:
            raise JournalError(f"job {job_id} is not complete: payloads of {came} of its {tasks} tasks came")
        self._execute("UPDATE jobs SET stage = ? WHERE first_row = ?", (ACCEPTED, begin))
        self._coming.pop(job_id, None)

    def _arriving(self, job_id: str) -> Tuple[int, int, int]:
        """First row and tasks of a job that is being submitted, and how many of the first are there, -1: not known."""
        coming = self._coming.get(job_id)
        if coming is None:
            found = self._execute("SELECT first_row, tasks, stage FROM jobs WHERE id = ?", (job_id,)).fetchone()
            if found is None or found[2] != ARRIVING:
                raise JournalError(f"no job {job_id} is being submitted")
            coming = (found[0], found[1], -1)
        return coming

    def _remember_coming(self, job_id: str, first: int, tasks: int, came: int) -> None:
        if len(self._coming) >= _REMEMBERED:
            self._coming.clear()
        self._coming[job_id] = (first, tasks, came)

    def retry_job(self, job_id: str, statuses: Sequence[str], status: str) -> None:
        found = self._accepted(job_id)
        if found is None:
            raise JournalError(f"there is no job {job_id}")
        first, last, rest = found
        marks = ", ".join("?" * len(statuses))
        if rest == PENDING or rest in statuses:
            rest = PENDING
            change = "DELETE FROM states"  # What is as the rest of its job has no row.
        else:
            change = (
                "UPDATE states SET status = 'pending', attempts = 0, worker = '', seconds = 0, ended = 0, error = '', history = '',"
                " result = NULL"
            )
        self._execute(f"{change} WHERE row BETWEEN ? AND ? AND status IN ({marks})", (first, last, *statuses))
        self._execute(
            "UPDATE jobs SET status = ?, finished = 0, counts = '', rest = ? WHERE first_row = ?", (status, rest, first)
        )

    def _accepted(self, job_id: str) -> Optional[Tuple[int, int, str]]:
        """First and last row of a job, and what its tasks without a state are."""
        found = self._execute("SELECT first_row, tasks, rest, stage FROM jobs WHERE id = ?", (job_id,)).fetchone()
        if found is None or found[3] != ACCEPTED:
            return None
        return found[0], found[0] + found[1] - 1, found[2]

    # --- facts

    def discard_job(self, job_id: str) -> None:
        self._coming.pop(job_id, None)
        self._execute("UPDATE jobs SET stage = ? WHERE id = ? AND stage = ?", (DROPPED, job_id, ARRIVING))

    def cancel_pending(self, job_id: str, task_status: str, status: str, except_rows: Sequence[int], now: float) -> None:
        found = self._accepted(job_id)
        if found is None:
            return
        first, last, rest = found
        kept = set(except_rows)
        pending = self._execute(
            "SELECT row FROM states WHERE status IN (?, ?) AND row BETWEEN ? AND ?", (STARTED, PENDING, first, last)
        ).fetchall()
        self._connection.executemany(
            "UPDATE states SET status = ?, ended = ? WHERE row = ?",
            [(task_status, now, row) for (row,) in pending if row not in kept],
        )
        if rest == PENDING:
            self._execute("UPDATE jobs SET rest = ?, rest_since = ? WHERE first_row = ?", (task_status, now, first))
        self._execute("UPDATE jobs SET status = ? WHERE first_row = ?", (status, first))
        self.mark_started(row for row in except_rows if first <= row <= last)

    def mark_started(self, rows: Iterable[int]) -> None:
        for row in rows:
            if not self._execute("INSERT OR IGNORE INTO states (row, status) VALUES (?, ?)", (row, STARTED)).rowcount:
                self._execute("UPDATE states SET status = ? WHERE row = ? AND status = ?", (STARTED, row, PENDING))

    def end_tasks(self, ends: Sequence[TaskEnd]) -> None:
        self._connection.executemany(
            "INSERT OR REPLACE INTO states (row, status, attempts, worker, seconds, ended, error, history, result)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (end._replace(worker=clean(end.worker), error=clean(end.error), history=clean(end.history)) for end in ends),
        )

    def set_job(self, job_id: str, status: str) -> None:
        self._execute("UPDATE jobs SET status = ? WHERE id = ? AND stage = ?", (status, job_id, ACCEPTED))

    def finish_job(self, job_id: str, status: str, finished: float) -> None:
        found = self._accepted(job_id)
        if found is None:
            return
        counts = SqliteReader(self._connection, self._path).count(job_id)
        self._execute(
            "UPDATE jobs SET status = ?, finished = ?, counts = ? WHERE first_row = ?",
            (status, finished, json.dumps(counts), found[0]),
        )

    # --- notes

    def append_log(self, row: int, attempt: int, stream: int, data: bytes) -> None:
        written, kept = self._tail(row)
        written += len(data)
        data = data[-JOURNAL_TASK_LOG_BYTES:]
        self._execute(
            "INSERT INTO logs (row, start, attempt, stream, data) VALUES (?, ?, ?, ?, ?)",
            (row, written - len(data), attempt, stream, data),
        )
        kept += len(data)
        total = self._all_log_bytes() + len(data)
        if kept > JOURNAL_TASK_LOG_BYTES * 5 // 4:
            gone = self._drop_logs("row = ? ORDER BY start", (row,), kept - JOURNAL_TASK_LOG_BYTES)
            kept -= gone
            total -= gone
        self._tails[row] = (written, kept)
        if total > JOURNAL_LOG_BYTES:
            total -= self._drop_logs("1 ORDER BY number", (), total - JOURNAL_LOG_BYTES * 9 // 10)
            self._tails = {of: (end, -1) for of, (end, _) in self._tails.items()}  # Whose went is not known here.
        self._log_bytes = total

    def _tail(self, row: int) -> Tuple[int, int]:
        written, kept = self._tails.get(row, (-1, -1))
        if kept < 0:
            found = self._execute(
                "SELECT coalesce(max(start + length(data)), 0), coalesce(sum(length(data)), 0) FROM logs WHERE row = ?", (row,)
            ).fetchone()
            written, kept = max(written, found[0]), found[1]
            if len(self._tails) >= _REMEMBERED:
                self._tails.clear()
        return written, kept

    def _all_log_bytes(self) -> int:
        if self._log_bytes is None:
            self._log_bytes = int(self._execute("SELECT coalesce(sum(length(data)), 0) FROM logs").fetchone()[0])
        return self._log_bytes

    def _drop_logs(self, which: str, values: Sequence[int], nbytes: int) -> int:
        """Delete the first of these until so many bytes are gone; how many that are."""
        gone = 0
        numbers: List[Tuple[int]] = []
        for number, size in self._execute(f"SELECT number, length(data) FROM logs WHERE {which}", values):
            if gone >= nbytes:
                break
            gone += size
            numbers.append((number,))
        self._connection.executemany("DELETE FROM logs WHERE number = ?", numbers)
        return gone

    def note_event(self, event: EventRecord) -> None:
        self._execute(
            "INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?, ?)", (*event[:3], clean(event.text), clean(event.details))
        )
        self._execute("DELETE FROM events WHERE number <= ?", (event.number - EVENTS_KEPT,))

    def worker_joined(self, worker: WorkerRecord) -> None:
        self._execute("INSERT OR REPLACE INTO workers VALUES (?, ?, ?)", (worker.id, clean(worker.name), worker.joined))

    def worker_left(self, worker_id: str) -> None:
        self._execute("DELETE FROM workers WHERE id = ?", (worker_id,))

    def probe(self) -> None:
        """Write something that changes nothing, to see whether that is possible."""
        self._execute("UPDATE meta SET value = value WHERE key = 'next_row'")

    # --- what is old

    def drop_old(self, before: float) -> List[str]:
        """Take jobs that finished before this time out of sight; their ids. `sweep` deletes them."""
        ids = [
            job_id
            for (job_id,) in self._execute(
                "SELECT id FROM jobs WHERE finished > 0 AND finished < ? AND stage = ? ORDER BY first_row", (before, ACCEPTED)
            ).fetchall()
        ]
        self._connection.executemany("UPDATE jobs SET stage = ? WHERE id = ?", ((DROPPED, job_id) for job_id in ids))
        return ids

    def drop_unaccepted(self) -> None:
        """At a start: what had only come in part."""
        self._execute("UPDATE jobs SET stage = ? WHERE stage = ?", (DROPPED, ARRIVING))

    def sweep(self) -> bool:
        """Delete some of what was dropped; whether there is more."""
        found = self._execute("SELECT first_row, tasks FROM jobs WHERE stage <> 1 AND stage = ? LIMIT 1", (DROPPED,)).fetchone()
        if found is None:
            return False
        first, last = found[0], found[0] + found[1] - 1
        for table, key in (("logs", "row"), ("states", "row"), ("payloads", "first_row")):
            deleted = self._execute(
                f"DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} WHERE {key} BETWEEN ? AND ? LIMIT ?)",
                (first, last, JOURNAL_SWEEP_ROWS),
            ).rowcount
            if deleted:
                if table == "logs":
                    self.forget()
                return True
        self._execute("DELETE FROM jobs WHERE first_row = ?", (first,))
        return True

    def free_code(self, now: float) -> List[bytes]:
        """Delete folders that no job needs and that nobody has submitted lately; their digests."""
        digests = [
            digest
            for (digest,) in self._execute(
                "SELECT digest FROM code WHERE used < ? AND digest NOT IN (SELECT code FROM jobs)",
                (now - JOURNAL_CODE_SECONDS,),
            ).fetchall()
        ]
        self._connection.executemany("DELETE FROM code WHERE digest = ?", ((digest,) for digest in digests))
        return digests


def clean(text: str) -> str:
    """Text as SQLite takes it: what a process printed may hold half characters."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
