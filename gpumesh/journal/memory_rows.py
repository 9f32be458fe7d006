"""What a journal without a file keeps of one job, and reading it. Loads no database."""

from __future__ import annotations

from typing import Deque, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from gpumesh.config import EVENTS_KEPT
from gpumesh.journal.base import (
    PENDING,
    EventRecord,
    JobLogPart,
    JobRecord,
    JournalReader,
    LogPart,
    NewJob,
    TaskEnd,
    TaskRecord,
    WorkerRecord,
)


class MemoryJob:
    """One job; its tasks are known by their places in it."""

    __slots__ = ("new", "first", "status", "finished", "is_accepted", "payloads", "missing", "states", "pending", "rest",
                 "rest_since", "logs", "log_bytes", "nbytes")  # fmt: skip

    def __init__(self, new: NewJob, first: int, tasks: int) -> None:
        self.new = new
        self.first = first
        self.status = new.status
        self.finished = 0.0
        self.is_accepted = False
        self.payloads: List[Optional[Tuple[int, bytes]]] = [None] * tasks
        self.missing = tasks  # None among them.
        self.states: Dict[int, TaskEnd] = {}  # By row, of those that ended.
        self.pending: Dict[
            int, bool
        ] = {}  # Row -> whether it has started, of those that are whatever the rest is; not in `states`.
        self.rest = PENDING  # What all others are.
        self.rest_since = 0.0
        self.logs: Dict[int, Deque[Tuple[int, LogPart]]] = {}  # By row, with the numbers of parts.
        self.log_bytes: Dict[int, int] = {}
        self.nbytes = 0  # Payloads, results and output.

    def state(self, row: int) -> str:
        end = self.states.get(row)
        return end.status if end is not None else PENDING if row in self.pending else self.rest

    def record(self) -> JobRecord:
        counts: Dict[str, int] = {}
        for end in self.states.values():
            counts[end.status] = counts.get(end.status, 0) + 1
        for status, number in ((PENDING, len(self.pending)), (self.rest, self.tasks - len(self.states) - len(self.pending))):
            if number:
                counts[status] = counts.get(status, 0) + number
        new = self.new
        return JobRecord(new.id, new.name, new.script, new.code, new.options, new.submitted, self.status, self.finished,
                         self.first, self.tasks, counts)  # fmt: skip

    @property
    def tasks(self) -> int:
        return len(self.payloads)

    def task(self, row: int, *, payload: bool, result: bool) -> TaskRecord:
        found = self.payloads[row - self.first]
        assert found is not None, row
        variant, value = found
        end = self.states.get(row)
        if end is None:
            status = self.state(row)
            ended = 0.0 if status == PENDING else self.rest_since
            return TaskRecord(row, self.new.id, variant, status, 0, "", 0.0, ended, "", "", value if payload else None, None)
        return TaskRecord(
            row, self.new.id, variant, end.status, end.attempts, end.worker, end.seconds, end.ended, end.error, end.history,
            value if payload else None, end.result if result else None,
        )  # fmt: skip

    def rows(self) -> Sequence[int]:
        return range(self.first, self.first + self.tasks)


class MemoryReader(JournalReader):
    """Reads the tables of a journal in memory, as they are at each call.

    Args:
        jobs: By id, oldest first; those that are not accepted are not shown.
        events: By number, oldest first.
        workers: By id.
        codes: By digest.
    """

    def __init__(
        self,
        jobs: Mapping[str, MemoryJob],
        events: Mapping[int, EventRecord],
        workers: Mapping[str, WorkerRecord],
        codes: Mapping[bytes, bytes],
    ) -> None:
        self._jobs = jobs
        self._events = events
        self._workers = workers
        self._codes = codes

    def unfinished(self) -> List[JobRecord]:
        return [job.record() for job in self._accepted() if not job.finished]

    def jobs(self, limit: int = 1000) -> List[JobRecord]:
        return [job.record() for job in list(self._accepted())[-limit:]] if limit > 0 else []

    def job(self, job_id: str) -> Optional[JobRecord]:
        job = self._get(job_id)
        if job is None and len(job_id) >= 4:
            found = [job for job in self._accepted() if job.new.id.startswith(job_id)]
            job = found[0] if len(found) == 1 else None
        return None if job is None else job.record()

    def pending(self, job_id: str, *, after: int, limit: int, max_bytes: int) -> List[TaskRecord]:
        job = self._get(job_id)
        found: List[TaskRecord] = []
        size = 0
        for row in job.rows() if job is not None else ():
            if job is None or row <= after or job.state(row) != PENDING:
                continue
            task = job.task(row, payload=True, result=True)
            size += len(task.payload or b"")
            if len(found) >= limit or (found and size > max_bytes):
                break
            found.append(task)
        return found

    def started(self) -> List[TaskRecord]:
        return [
            job.task(row, payload=True, result=True)
            for job in self._accepted()
            for row in sorted(job.pending)
            if job.pending[row]
        ]

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
        job = self._get(job_id)
        if job is None:
            return []
        found: List[TaskRecord] = []
        size = 0
        first = max(0, first)
        for row in job.rows()[first : None if limit is None else first + limit]:
            task = job.task(row, payload=payloads, result=results)
            size += len(task.payload or b"") + len(task.result or b"") + len(task.error) + len(task.history)
            if max_bytes is not None and found and size > max_bytes:
                break
            found.append(task)
        return found

    def task(self, row: int) -> Optional[TaskRecord]:
        for job in self._accepted():
            if row in job.rows():
                return job.task(row, payload=True, result=True)
        return None

    def log(self, row: int, since: int = 0) -> List[LogPart]:
        parts: List[LogPart] = []
        for job in self._jobs.values():
            for _, part in job.logs.get(row, ()):
                if part.start + len(part.data) > since:
                    cut = max(0, since - part.start)
                    parts.append(part._replace(start=part.start + cut, data=part.data[cut:]))
        return parts

    def job_log(self, job_id: str, *, row: Optional[int] = None, after: int = 0, max_bytes: int) -> List[JobLogPart]:
        job = self._get(job_id)
        found: List[JobLogPart] = []
        if job is None:
            return found
        size = 0
        parts = [
            JobLogPart(number, of, part.attempt, part.stream, part.data)
            for of in (job.logs if row is None else [row])
            for number, part in job.logs.get(of, ())
            if number > after
        ]
        for part in sorted(parts):
            size += len(part.data)
            if found and size > max_bytes:
                break
            found.append(part)
        return found

    def events(self, after: int = 0, limit: int = EVENTS_KEPT) -> List[EventRecord]:
        found = [event for number, event in sorted(self._events.items()) if number > after]
        return found[-limit:] if limit > 0 else []

    def workers(self) -> List[WorkerRecord]:
        return sorted(self._workers.values(), key=lambda worker: (worker.joined, worker.id))

    def code(self, digest: bytes) -> Optional[bytes]:
        return self._codes.get(digest)

    def close(self) -> None:
        """There is nothing to let go of."""

    def _accepted(self) -> Iterable[MemoryJob]:
        return (job for job in self._jobs.values() if job.is_accepted)

    def _get(self, job_id: str) -> Optional[MemoryJob]:
        job = self._jobs.get(job_id)
        return job if job is not None and job.is_accepted else None
