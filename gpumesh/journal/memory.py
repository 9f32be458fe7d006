"""The journal without a file: for meshes that live no longer than their process. Loads no database; bounded in what it keeps."""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left, bisect_right
from collections import deque
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TypeVar

from gpumesh.config import (
    EVENTS_KEPT,
    JOURNAL_LOG_BYTES,
    JOURNAL_TASK_LOG_BYTES,
    MEMORY_JOURNAL_BYTES,
    MEMORY_JOURNAL_JOBS,
)
from gpumesh.errors import JournalError
from gpumesh.journal.base import (
    MAX_ROW,
    PENDING,
    EventRecord,
    Journal,
    JournalReader,
    LogPart,
    NewJob,
    OnSynced,
    TaskEnd,
    WorkerRecord,
    answer_read,
    nothing,
)
from gpumesh.journal.memory_rows import MemoryJob, MemoryReader

T = TypeVar("T")

_VARIANT_LIMIT = 1 << 16
_TASK_BYTES = 64  # What a task weighs beside its payload, about.


class MemoryJournal(Journal):
    """The journal of a coordinator without a database.

    Args:
        call_soon: Hands a call over to the loop's thread, for later: `loop.call_soon_threadsafe`.
        limit_bytes: Of all that is kept together. Finished jobs go first; then new ones are refused.
        wall: Tells the time of day.
    """

    def __init__(
        self,
        *,
        call_soon: Callable[[Callable[[], None]], Any],
        limit_bytes: int = MEMORY_JOURNAL_BYTES,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.path = ""
        self.mesh_id = secrets.token_hex(8)
        self.generation = 1
        self.on_trouble = nothing
        self.on_pruned = nothing
        self._call_soon = call_soon
        self._limit_bytes = limit_bytes
        self._wall = wall
        self._next_row = 1
        self._jobs: Dict[str, MemoryJob] = {}  # By id, in order of submission and so of rows.
        self._by_first: Dict[int, MemoryJob] = {}
        self._firsts: List[int] = []  # Their first rows, ascending.
        self._finished: Dict[str, None] = {}  # Ids, in the order in which they did.
        self._codes: Dict[bytes, bytes] = {}
        self._nbytes = 0  # Of jobs and code.
        self._log_bytes = 0
        self._parts = 0  # Of output, ever.
        self._events: Dict[int, EventRecord] = {}
        self._workers: Dict[str, WorkerRecord] = {}

    @property
    def trouble(self) -> Optional[JournalError]:
        return None

    @property
    def is_pressed(self) -> bool:
        return False  # Nothing waits here: what runs ends and makes room, however much its results weigh.

    # --- requests

    def begin_job(self, job: NewJob, tasks: int, *, code: Optional[bytes], on_synced: OnSynced) -> int:
        first = self._next_row
        self._next_row += max(1, tasks)
        why = ""
        if job.id in self._jobs:
            why = f"there is a job {job.id} already"
        elif first + tasks - 1 > MAX_ROW:
            why = "all numbers of script tasks are given; start the mesh again"
        elif job.code and code is None and job.code not in self._codes:
            why = f"the folder of job {job.id} is not kept here any more; submit the job again"
        else:
            why = self._make_room(len(code or b"") + _TASK_BYTES * tasks)
        if not why:
            self._jobs[job.id] = self._by_first[first] = made = MemoryJob(job, first, tasks)
            self._firsts.append(first)
            self._grow(made, _TASK_BYTES * tasks)
            if code is not None and job.code and job.code not in self._codes:
                self._codes[job.code] = code
                self._nbytes += len(code)
        self._answer(on_synced, why)
        return first

    def add_payloads(self, job_id: str, first: int, payloads: Sequence[Tuple[int, bytes]], on_synced: OnSynced) -> None:
        job = self._jobs.get(job_id)
        if job is None or job.is_accepted:
            return self._answer(on_synced, f"no job {job_id} is being submitted")
        end = first + len(payloads)
        if first < 0 or end > job.tasks:
            return self._answer(on_synced, f"job {job_id} has {job.tasks} tasks, but payloads came for {first} to {end - 1}")
        if not all(0 <= variant < _VARIANT_LIMIT for variant, _ in payloads):
            return self._answer(on_synced, f"job {job_id}: a variant is a number from 0 to {_VARIANT_LIMIT - 1}")
        before = [found for found in job.payloads[first:end] if found is not None]
        nbytes = sum([len(payload) for _, payload in payloads]) - sum([len(payload) for _, payload in before])
        why = self._make_room(nbytes)
        if not why:
            job.payloads[first:end] = payloads
            job.missing -= len(payloads) - len(before)
            self._grow(job, nbytes)
        return self._answer(on_synced, why)

    def accept_job(self, job_id: str, on_synced: OnSynced) -> None:
        job = self._jobs.get(job_id)
        if job is None or job.is_accepted:
            return self._answer(on_synced, f"no job {job_id} is being submitted")
        if job.missing:
            came = job.tasks - job.missing
            return self._answer(on_synced, f"job {job_id} is not complete: payloads of {came} of its {job.tasks} tasks came")
        job.is_accepted = True
        return self._answer(on_synced)

    def retry_job(self, job_id: str, statuses: Sequence[str], *, status: str, on_synced: OnSynced) -> None:
        job = self._accepted(job_id)
        if job is None:
            return self._answer(on_synced, f"there is no job {job_id}")
        again = [row for row, end in job.states.items() if end.status in statuses]
        if job.rest in statuses:
            job.rest = PENDING
        for row in again:
            self._grow(job, -_end_bytes(job.states.pop(row)))
            if job.rest != PENDING:
                job.pending[row] = False
        job.status, job.finished = status, 0.0
        self._finished.pop(job_id, None)
        return self._answer(on_synced)

    # --- facts

    def discard_job(self, job_id: str) -> None:
        job = self._jobs.get(job_id)
        if job is not None and not job.is_accepted:
            self._drop(job)

    def cancel_pending(
        self,
        job_id: str,
        task_status: str,
        *,
        status: str,
        except_rows: Sequence[int] = (),
        on_synced: Optional[OnSynced] = None,
    ) -> None:
        job = self._accepted(job_id)
        if job is not None:
            now = self._wall()
            kept = dict.fromkeys(row for row in except_rows if job.first <= row < job.first + job.tasks)
            for row in job.pending:
                if row not in kept:
                    job.states[row] = TaskEnd(row, task_status, 0, ended=now)
            if job.rest == PENDING:
                job.rest, job.rest_since = task_status, now
            job.pending = {row: True for row in kept if row not in job.states}
            job.status = status
        self._answer(on_synced)

    def mark_started(self, rows: Sequence[int], on_synced: Optional[OnSynced] = None) -> None:
        for row in rows:
            job = self._job_of(row)
            if job is not None and row not in job.states:
                job.pending[row] = True
        self._answer(on_synced)

    def end_tasks(self, ends: Sequence[TaskEnd], on_synced: Optional[OnSynced] = None) -> None:
        for end in ends:
            job = self._job_of(end.row)
            if job is not None:
                before = job.states.get(end.row)
                job.pending.pop(end.row, None)
                job.states[end.row] = end
                self._grow(job, _end_bytes(end) - (_end_bytes(before) if before is not None else 0))
        self._make_room(0)
        self._answer(on_synced)

    def set_job(self, job_id: str, status: str, on_synced: Optional[OnSynced] = None) -> None:
        job = self._accepted(job_id)
        if job is not None:
            job.status = status
        self._answer(on_synced)

    def finish_job(self, job_id: str, status: str, finished: float, on_synced: Optional[OnSynced] = None) -> None:
        job = self._accepted(job_id)
        if job is not None:
            job.status, job.finished = status, finished
            self._finished[job_id] = None
            while len(self._finished) > MEMORY_JOURNAL_JOBS:
                self._drop_oldest()
        self._answer(on_synced)

    # --- notes

    def append_log(self, row: int, attempt: int, stream: int, data: bytes) -> None:
        job = self._job_of(row)
        if job is None or not data:
            return
        parts = job.logs.setdefault(row, deque())
        start = parts[-1][1].start + len(parts[-1][1].data) if parts else 0
        kept = data[-JOURNAL_TASK_LOG_BYTES:]
        self._parts += 1
        parts.append((self._parts, LogPart(start + len(data) - len(kept), attempt, stream, kept)))
        size = job.log_bytes.get(row, 0) + len(kept)
        change = len(kept)
        while size > JOURNAL_TASK_LOG_BYTES:
            gone = len(parts.popleft()[1].data)
            size -= gone
            change -= gone
        job.log_bytes[row] = size
        self._log_bytes += change
        self._grow(job, change)
        while self._log_bytes > JOURNAL_LOG_BYTES or self._nbytes > self._limit_bytes:
            if not self._drop_a_log(row):
                break

    def note_event(self, event: EventRecord) -> None:
        self._events[event.number] = event
        if len(self._events) > EVENTS_KEPT:
            del self._events[next(iter(self._events))]

    def worker_joined(self, worker: WorkerRecord) -> None:
        self._workers[worker.id] = worker

    def worker_left(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    # --- and the rest

    def has_code(self, digest: bytes) -> bool:
        return digest in self._codes

    def read(self, call: Callable[[JournalReader], T], then: Callable[[Optional[T], Optional[JournalError]], None]) -> None:
        self._call_soon(lambda: answer_read(lambda: call(self.reader()), then))

    def reader(self) -> JournalReader:
        return MemoryReader(self._jobs, self._events, self._workers, self._codes)

    def close(self) -> None:
        """There is nothing to let go of."""

    # --- parts

    def _accepted(self, job_id: str) -> Optional[MemoryJob]:
        job = self._jobs.get(job_id)
        return job if job is not None and job.is_accepted else None

    def _job_of(self, row: int) -> Optional[MemoryJob]:
        place = bisect_right(self._firsts, row) - 1
        job = self._by_first[self._firsts[place]] if place >= 0 else None
        return job if job is not None and row in job.rows() else None

    def _grow(self, job: MemoryJob, nbytes: int) -> None:
        job.nbytes += nbytes
        self._nbytes += nbytes

    def _make_room(self, nbytes: int) -> str:
        """Drop finished jobs until so much more may be kept; what is wrong when that does not suffice."""
        while self._finished and self._nbytes + nbytes > self._limit_bytes:
            self._drop_oldest()
        if self._nbytes + nbytes > self._limit_bytes:
            return (
                f"no room for the job: a mesh without a database keeps {self._limit_bytes // 1_000_000} MB of jobs, and"
                f" {self._nbytes // 1_000_000} MB are in use; start one with `gpumesh serve`, or wait for jobs to finish"
            )
        return ""

    def _drop_a_log(self, but: int) -> bool:
        """Forget the output of the task that was first to write some, other than this one; whether there was one."""
        for job in self._jobs.values():
            for row in job.logs:
                if row != but:
                    del job.logs[row]
                    size = job.log_bytes.pop(row)
                    self._log_bytes -= size
                    self._grow(job, -size)
                    return True
        return False

    def _drop_oldest(self) -> None:
        ident = next(iter(self._finished))
        self._drop(self._jobs[ident])
        self._call_soon(lambda: self.on_pruned([ident]))

    def _drop(self, job: MemoryJob) -> None:
        del self._jobs[job.new.id]
        del self._by_first[job.first]
        del self._firsts[bisect_left(self._firsts, job.first)]
        self._finished.pop(job.new.id, None)
        self._nbytes -= job.nbytes
        self._log_bytes -= sum(job.log_bytes.values())
        if job.new.code and not any(other.new.code == job.new.code for other in self._jobs.values()):
            self._nbytes -= len(self._codes.pop(job.new.code, b""))

    def _answer(self, on_synced: Optional[OnSynced], why: str = "") -> None:
        if on_synced is not None:
            error = JournalError(why) if why else None
            waiting = on_synced
            self._call_soon(lambda: waiting(error))


def _end_bytes(end: TaskEnd) -> int:
    return len(end.result or b"") + len(end.error) + len(end.history)
