"""Reading the database: rows to records. Changes nothing; who opens the connection is elsewhere."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from gpumesh.config import EVENTS_KEPT
from gpumesh.errors import JournalError
from gpumesh.journal.base import PENDING, EventRecord, JobLogPart, JobRecord, JournalReader, LogPart, TaskRecord, WorkerRecord
from gpumesh.journal.files import damaged, explained
from gpumesh.journal.packing import unpack_payloads, unpack_variants
from gpumesh.journal.schema import ACCEPTED, STARTED

_JOB = "id, name, script, code, options, submitted, status, finished, first_row, tasks, counts, rest, rest_since"
_STATE = "row, status, attempts, worker, seconds, ended, error, history"
_BATCH = 1000  # Rows of `states` read at once.
_TOGETHER = 50  # Jobs, from which their tasks are counted with one statement.
_LOG_BATCH = 100  # Parts of output.


class SqliteReader(JournalReader):
    """Reads through one connection, which it closes with itself. Each answer is of one moment, whatever is written meanwhile.

    Args:
        connection: Open, in autocommit mode.
        path: For messages.
    """

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection = connection
        self._path = path

    def unfinished(self) -> List[JobRecord]:
        with self._snapshot():
            return self._jobs("finished = 0 AND stage = ? ORDER BY first_row", (ACCEPTED,))

    def jobs(self, limit: int = 1000) -> List[JobRecord]:
        with self._snapshot():
            return self._jobs("stage = ? ORDER BY first_row DESC LIMIT ?", (ACCEPTED, limit))[::-1]

    def job(self, job_id: str) -> Optional[JobRecord]:
        with self._snapshot():
            found = self._jobs("id = ? AND stage = ?", (job_id, ACCEPTED))
            if not found and len(job_id) >= 4:
                found = self._jobs("substr(id, 1, ?) = ? AND stage = ? LIMIT 2", (len(job_id), job_id, ACCEPTED))
            return found[0] if len(found) == 1 else None

    def pending(self, job_id: str, *, after: int, limit: int, max_bytes: int) -> List[TaskRecord]:
        with self._snapshot():
            job = self._bare_job(job_id)
            found: List[TaskRecord] = []
            if job is None:
                return found
            record, rest, _ = job
            size = 0
            last = record.first_row + record.tasks - 1
            for first, tasks, packed in self._packs(max(after + 1, record.first_row), last):
                held = dict(
                    self._query(
                        "SELECT row, status IN (?, ?) FROM states WHERE row BETWEEN ? AND ?",
                        (STARTED, PENDING, first, first + tasks - 1),
                    )
                )
                if rest == PENDING:
                    rows = [row for row in range(max(first, after + 1), first + tasks) if held.get(row, True)]
                else:
                    rows = sorted(row for row, is_pending in held.items() if is_pending and row > after)
                if not rows:
                    continue
                variants, payloads = self._unpacked(first, tasks, packed)
                for row in rows:
                    payload = payloads[row - first]
                    if len(found) >= limit or (found and size + len(payload) > max_bytes):
                        return found
                    size += len(payload)
                    found.append(_pending_task(row, job_id, variants[row - first], payload))
            return found

    def started(self) -> List[TaskRecord]:
        with self._snapshot():
            found: List[TaskRecord] = []
            first, tasks, variants, payloads = 0, 0, (), []  # type: Tuple[int, int, Sequence[int], List[bytes]]
            for row, job_id in self._query(
                "SELECT row, (SELECT id FROM jobs WHERE first_row <= row AND first_row + tasks > row AND stage = ?"
                " ORDER BY first_row DESC LIMIT 1) FROM states WHERE status = ? ORDER BY row",
                (ACCEPTED, STARTED),
            ):
                if job_id is None:
                    continue
                if not first <= row < first + tasks:
                    for first, tasks, packed in self._packs(row, row):
                        variants, payloads = self._unpacked(first, tasks, packed)
                found.append(_pending_task(row, job_id, variants[row - first], payloads[row - first]))
            return found

    def tasks(
        self,
        job_id: str,
        *,
        first: int = 0,
        limit: Optional[int] = None,
        max_bytes: Optional[int] = None,
        payloads: bool = False,
        results: bool = True,
    ) -> List[TaskRecord]:
        with self._snapshot():
            job = self._bare_job(job_id)
            if job is None:
                return []
            record, rest, since = job
            begin = record.first_row + max(0, first)
            last = record.first_row + record.tasks - 1
            if limit is not None:
                last = min(last, begin + limit - 1)
            found: List[TaskRecord] = []
            size = 0
            states = self._states(begin, last, results=results)
            ahead: Optional[Tuple[Any, ...]] = next(states, None)
            for pack_first, tasks, packed in self._packs(begin, last):
                variants, values = self._unpacked(pack_first, tasks, packed, payloads=payloads)
                for row in range(max(begin, pack_first), min(last, pack_first + tasks - 1) + 1):
                    payload = values[row - pack_first] if payloads else None
                    variant = variants[row - pack_first]
                    if ahead is None or ahead[0] != row:
                        task = _pending_task(row, job_id, variant, payload)
                        if rest != PENDING:
                            task = task._replace(status=rest, ended=since)
                    else:
                        task = _task(ahead, job_id, variant, payload)
                        ahead = next(states, None)
                    if max_bytes is not None:
                        size += len(payload or b"") + len(task.result or b"") + len(task.error) + len(task.history)
                        if found and size > max_bytes:
                            return found
                    found.append(task)
            return found

    def task(self, row: int) -> Optional[TaskRecord]:
        with self._snapshot():
            jobs = self._query(
                "SELECT id, first_row FROM jobs WHERE first_row <= ? AND first_row + tasks > ? AND stage = ?"
                " ORDER BY first_row DESC LIMIT 1",
                (row, row, ACCEPTED),
            )
            if not jobs:
                return None
            found = self.tasks(jobs[0][0], first=row - jobs[0][1], limit=1, payloads=True)
            return found[0] if found else None

    def log(self, row: int, since: int = 0) -> List[LogPart]:
        parts: List[LogPart] = []
        for start, attempt, stream, data in self._query(
            "SELECT start, attempt, stream, data FROM logs WHERE row = ? AND start + length(data) > ? ORDER BY start",
            (row, since),
        ):
            if start < since:
                start, data = since, data[since - start :]
            parts.append(LogPart(start, attempt, stream, data))
        return parts

    def job_log(self, job_id: str, *, row: Optional[int] = None, after: int = 0, max_bytes: int) -> List[JobLogPart]:
        found: List[JobLogPart] = []
        size = 0
        with self._snapshot():
            job = self._bare_job(job_id)
            if job is None:
                return found
            first, last = job[0].first_row, job[0].first_row + job[0].tasks - 1
            if row is None:  # The plus keeps SQLite from another way than along the numbers, or along the task's parts.
                which, values = "number > ? AND +row BETWEEN ? AND ?", (first, last)
            else:
                which, values = "+number > ? AND row BETWEEN ? AND ?", (max(first, row), min(last, row))
            while True:
                parts = self._query(
                    f"SELECT number, row, attempt, stream, data FROM logs WHERE {which} ORDER BY number LIMIT ?",
                    (after, *values, _LOG_BATCH),
                )
                for part in parts:
                    size += len(part[4])
                    if found and size > max_bytes:
                        return found
                    found.append(JobLogPart._make(part))
                if len(parts) < _LOG_BATCH:
                    return found
                after = parts[-1][0]

    def events(self, after: int = 0, limit: int = EVENTS_KEPT) -> List[EventRecord]:
        rows = self._query(
            "SELECT number, time, kind, text, details FROM events WHERE number > ? ORDER BY number DESC LIMIT ?", (after, limit)
        )
        return [EventRecord(*row) for row in reversed(rows)]

    def workers(self) -> List[WorkerRecord]:
        return [WorkerRecord(*row) for row in self._query("SELECT id, name, joined FROM workers ORDER BY joined, id")]

    def code(self, digest: bytes) -> Optional[bytes]:
        rows = self._query("SELECT archive FROM code WHERE digest = ?", (digest,))
        return rows[0][0] if rows else None

    def close(self) -> None:
        self._connection.close()

    # --- parts

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[None]:
        if self._connection.in_transaction:
            yield  # Within another one, or the writer's own.
            return
        self._query("BEGIN")
        try:
            yield
        finally:
            if self._connection.in_transaction:
                self._query("COMMIT")

    def _query(self, statement: str, values: Sequence[Any] = ()) -> List[Tuple[Any, ...]]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise explained(error, self._path) from None

    def _jobs(self, where: str, values: Sequence[Any]) -> List[JobRecord]:
        rows = self._query(f"SELECT {_JOB} FROM jobs WHERE {where}", values)
        going_on = [(row[8], row[9]) for row in rows if not row[10]]
        found = self._counts(going_on)
        return [_job(row, json.loads(row[10]) if row[10] else _with_rest(row, found.get(row[8], {}))) for row in rows]

    def _bare_job(self, job_id: str) -> Optional[Tuple[JobRecord, str, float]]:
        """A job without its counts, and what the tasks are that have no state, since when."""
        rows = self._query(f"SELECT {_JOB} FROM jobs WHERE id = ? AND stage = ?", (job_id, ACCEPTED))
        return (_job(rows[0], {}), rows[0][11], rows[0][12]) if rows else None

    def count(self, job_id: str) -> Dict[str, int]:
        """Tasks by status of a job, counted now."""
        (row,) = self._query(f"SELECT {_JOB} FROM jobs WHERE id = ?", (job_id,))
        return _with_rest(row, self._counts([(row[8], row[9])]).get(row[8], {}))

    def _counts(self, jobs: Sequence[Tuple[int, int]]) -> Dict[int, Dict[str, int]]:
        """Tasks by status of jobs (first row, tasks) with these rows, by first row; those without a state are not counted."""
        found: Dict[int, Dict[str, int]] = {}
        if len(jobs) < _TOGETHER:
            counted = [
                (first, status, number)
                for first, tasks in jobs
                for status, number in self._query(
                    "SELECT status, count(*) FROM states WHERE row BETWEEN ? AND ? GROUP BY status", (first, first + tasks - 1)
                )
            ]
        else:
            firsts = [first for first, _ in jobs]
            counted = self._query(
                "SELECT first_row, states.status, count(*) FROM jobs JOIN states ON row BETWEEN first_row AND first_row + tasks - 1"
                " WHERE first_row BETWEEN ? AND ? AND counts = '' GROUP BY first_row, states.status",
                (min(firsts), max(firsts)),
            )
        for first, status, number in counted:
            status = PENDING if status == STARTED else status
            counts = found.setdefault(first, {})
            counts[status] = counts.get(status, 0) + number
        return found

    def _states(self, first: int, last: int, *, results: bool) -> Iterator[Tuple[Any, ...]]:
        result = "result" if results else "NULL"
        while first <= last:
            rows = self._query(
                f"SELECT {_STATE}, {result} FROM states WHERE row BETWEEN ? AND ? ORDER BY row LIMIT ?",
                (first, last, _BATCH),
            )
            yield from rows
            if len(rows) < _BATCH:
                return
            first = rows[-1][0] + 1

    def _packs(self, first: int, last: int) -> Iterator[Tuple[int, int, bytes]]:
        """(first row, tasks, variants) of each pack with any of these rows."""
        if first > last:
            return
        begin = self._query("SELECT max(first_row) FROM payloads WHERE first_row <= ?", (first,))[0][0]
        for row, tasks, variants in self._query(
            "SELECT first_row, tasks, variants FROM payloads WHERE first_row BETWEEN ? AND ? ORDER BY first_row",
            (first if begin is None else begin, last),
        ):
            if row + tasks > first:
                yield row, tasks, variants

    def _unpacked(self, first: int, tasks: int, packed: bytes, *, payloads: bool = True) -> Tuple[Sequence[int], List[bytes]]:
        try:
            variants = unpack_variants(packed, tasks)
            if not payloads:
                return variants, []
            ((data,),) = self._query("SELECT data FROM payloads WHERE first_row = ?", (first,))
            return variants, unpack_payloads(data, tasks)
        except ValueError as error:
            raise damaged(self._path, str(error)) from None


def _job(row: Tuple[Any, ...], counts: Dict[str, int]) -> JobRecord:
    return JobRecord._make([*row[:10], counts])


def _with_rest(row: Tuple[Any, ...], counts: Dict[str, int]) -> Dict[str, int]:
    """Counts of the tasks that have a state, and all others as the rest of their job."""
    tasks, rest = row[9], row[11]
    others = tasks - sum(counts.values())
    return {**counts, rest: counts.get(rest, 0) + others} if others else counts


def _pending_task(row: int, job_id: str, variant: int, payload: Optional[bytes]) -> TaskRecord:
    return TaskRecord(row, job_id, variant, PENDING, 0, "", 0.0, 0.0, "", "", payload, None)


def _task(state: Tuple[Any, ...], job_id: str, variant: int, payload: Optional[bytes]) -> TaskRecord:
    row, status, attempts, worker, seconds, ended, error, history, result = state
    status = PENDING if status == STARTED else status
    return TaskRecord(row, job_id, variant, status, attempts, worker, seconds, ended, error, history, payload, result)


__all__ = ["JournalError", "SqliteReader"]
