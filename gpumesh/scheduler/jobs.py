"""Which tasks of which script jobs are given to the cluster, and how far each job is. Pure: reads no journal, tells no cluster.

    journal ── pages of pending rows ──> JobBook ── at most a window of them ──> cluster ── ends ──> JobBook ──> journal

Promises:

1. No more than `window` tasks (and about as many bytes as `window_bytes`) are with the cluster at a time, whatever the jobs' sizes. Jobs share them.
2. A row is with the cluster at most once at a time, and never again after its end, unless it is retried.
3. Rows of a job are read in order; what is retried is read again from the beginning.
4. A job has finished when each of its tasks has ended, and nothing of it is with the cluster.

A row is a task of a job: a number that the journal knows it by, consecutive within a job.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from gpumesh.config import JOB_LEAST_SHARE_TASKS, JOB_ONCE_TASKS, JOB_WINDOW_BYTES, JOB_WINDOW_TASKS
from gpumesh.model.jobs import CANCELLED, DONE, FAILED, PENDING, QUEUED, RUNNING
from gpumesh.model.records import NamedTuple

Row = Tuple[int, int]
"""A pending task: its row, and the size of its payload in bytes."""


class Wanted(NamedTuple):
    """A page of pending tasks to read: those of `job` behind row `after`, at most so many, and at most so many bytes of payloads."""

    job: str
    after: int
    limit: int
    limit_bytes: int
    turn: int  # Of the job's readings.
    room: int  # For so many of them there is room; the others are with the cluster already.


class Job:
    """One job that has not finished."""

    __slots__ = ("id", "first", "total", "priority", "is_once", "ended", "fed", "cursor", "turn", "is_reading", "passed", "is_cancelled", "revived",
                 "has_started")  # fmt: skip

    def __init__(self, ident: str, first: int, total: int, *, priority: int = 0, is_once: bool = False) -> None:
        self.id = ident
        self.first = first  # Row of its first task.
        self.total = total
        self.priority = priority
        self.is_once = is_once  # Its tasks may run at most once.
        self.ended: Dict[str, int] = {DONE: 0, FAILED: 0, CANCELLED: 0}
        self.fed: Dict[int, int] = {}  # Row -> bytes of its payload, of those with the cluster.
        self.cursor = first - 1  # All pending rows up to here have been read ...
        self.turn = 0  # Times it began at the front again.
        self.is_reading = False  # A page behind the cursor is being read ...
        self.passed: Dict[int, None] = {}  # ... which may say of these that they are pending: they have ended meanwhile.
        self.is_cancelled = False
        self.revived: Dict[int, None] = {}  # With the cluster, being cancelled, and retried meanwhile: they are to run again.
        self.has_started = False  # Some task of it was given to a worker.

    @property
    def left(self) -> int:
        """Tasks that have not ended."""
        return self.total - sum(self.ended.values())

    @property
    def is_finished(self) -> bool:
        """Whether nothing of it is left to do."""
        return not self.fed and self.left == 0

    def counts(self, running: int) -> Dict[str, int]:
        """How many tasks are in which state, `running` of them with workers that execute them."""
        return {PENDING: self.left - running, RUNNING: running, **self.ended}

    def state(self, running: int) -> str:
        """The job's own."""
        return job_state(self.counts(running), has_started=self.has_started)


def job_state(counts: Dict[str, int], *, has_started: bool) -> str:
    """A job's state by those of its tasks: the worst that has happened decides once nothing is left to do."""
    if counts[RUNNING] or counts[PENDING]:
        ended = counts[DONE] + counts[FAILED] + counts[CANCELLED]
        return RUNNING if counts[RUNNING] or ended or has_started else QUEUED
    if counts[CANCELLED]:
        return CANCELLED
    return FAILED if counts[FAILED] else DONE


class JobBook:
    """The jobs that have not finished; see the module's promises."""

    def __init__(self, *, window: int = JOB_WINDOW_TASKS, window_bytes: int = JOB_WINDOW_BYTES) -> None:
        self.most_once = JOB_ONCE_TASKS  # Of one job whose tasks may run at most once, with the cluster at a time.
        self._window = window
        self._window_bytes = window_bytes
        self._jobs: Dict[str, Job] = {}
        self._hungry: Dict[Job, None] = {}  # With rows to read that nobody reads at the moment.
        self._fed: Dict[int, Job] = {}  # Rows with the cluster.
        self._fed_bytes = 0
        self._reserved = 0  # Tasks that are being read.
        self._is_new = (
            False  # Somebody is hungry who was not when the window was last handed out, or has nothing left with the cluster.
        )

    # --- jobs

    def add(self, job: Job) -> None:
        """A job comes: submitted, or of before a restart."""
        assert job.id not in self._jobs, job.id
        self._jobs[job.id] = job
        self._crave(job)

    def get(self, ident: str) -> Optional[Job]:
        """The job, if it has not finished."""
        return self._jobs.get(ident)

    def jobs(self) -> List[Job]:
        """All, in order of submission."""
        return list(self._jobs.values())

    def job_of(self, row: int) -> Optional[Job]:
        """Whose task this is, if it is with the cluster."""
        return self._fed.get(row)

    def finish(self, ident: str) -> None:
        """A finished job is forgotten here."""
        job = self._jobs.pop(ident)
        assert job.is_finished, ident
        self._hungry.pop(job, None)

    # --- tasks to the cluster

    def wanted(self) -> List[Wanted]:
        """The pages to read now. Each has to be answered by `read`, or `unread` if that failed."""
        room = self._window - len(self._fed) - self._reserved
        if not self._hungry or room <= 0 or self._fed_bytes >= self._window_bytes:
            return []
        if not self._is_new and room < JOB_LEAST_SHARE_TASKS and self._fed:
            return []
        self._is_new = False
        hungry = sorted(self._hungry, key=lambda job: (-job.priority, job.first))
        share = max(JOB_LEAST_SHARE_TASKS, self._window // len(hungry))
        share_bytes = max(1, (self._window_bytes - self._fed_bytes) // len(hungry))
        pages: List[Wanted] = []
        for job in hungry:
            if room <= 0:
                break
            own = min(share, self.most_once) if job.is_once else share
            left = job.left - len(job.fed)
            limit = min(own - len(job.fed), room, left)
            if limit <= 0 or (limit < left and limit < min(own // 4, len(job.fed))):
                continue  # Few large pages rather than many small ones.
            room -= limit
            self._reserved += limit
            job.is_reading = True
            del self._hungry[job]
            there = sum(row > job.cursor for row in job.fed)  # They stand in the way, where a reading began at the front again.
            pages.append(Wanted(job.id, job.cursor, limit + there, share_bytes, job.turn, limit))
        return pages

    def read(self, page: Wanted, rows: Sequence[Row], *, is_last: bool) -> List[int]:
        """A page has been read: which of its tasks go to the cluster, all from now on with it.

        Args:
            page: As it was asked for.
            rows: Pending tasks in order, none left out.
            is_last: There are no more behind them.
        """
        job, passed = self._done_reading(page)
        if job is None or job.is_cancelled:
            return []
        if page.turn != job.turn:  # Something was retried meanwhile, which the page may not show.
            self._crave(job)
            return []
        fresh: List[Row] = []
        for row in rows:
            if row[0] not in job.fed and row[0] not in passed:
                if len(fresh) == page.room:
                    is_last = False
                    break
                fresh.append(row)
            job.cursor = row[0]
        self.feed(job, fresh)
        if not is_last:
            self._crave(job)
        return [row for row, _ in fresh]

    def unread(self, page: Wanted) -> None:
        """A page could not be read; it will be asked for again when something else happens."""
        job, _ = self._done_reading(page)
        if job is not None and not job.is_cancelled:
            self._crave(job)
            self._is_new = False

    def feed(self, job: Job, rows: Iterable[Row]) -> None:
        """These are with the cluster from now on."""
        for row, nbytes in rows:
            assert row not in self._fed, row
            job.fed[row] = nbytes
            self._fed[row] = job
            self._fed_bytes += nbytes

    def _done_reading(self, page: Wanted) -> Tuple[Optional[Job], Dict[int, None]]:
        self._reserved -= page.room
        job = self._jobs.get(page.job)
        passed: Dict[int, None] = {}
        if job is not None:
            job.is_reading = False
            passed, job.passed = job.passed, {}
        return job, passed

    def _crave(self, job: Job) -> None:
        if not job.is_reading and not job.is_cancelled and job.left > len(job.fed):
            self._hungry[job] = None
            self._is_new = True

    # --- tasks from the cluster

    def ended(self, row: int, state: str) -> Tuple[Optional[Job], str]:
        """A task with the cluster has ended: whose it was, and what it is now: `state`, or PENDING if it was retried meanwhile.

        None: nobody knows it; it was not with the cluster.
        """
        job = self._fed.pop(row, None)
        if job is None:
            return None, state
        self._fed_bytes -= job.fed.pop(row)
        if job.is_reading:
            job.passed[row] = None
        is_revived = row in job.revived
        job.revived.pop(row, None)
        if is_revived and state == CANCELLED:
            self._rewind(job)
            return job, PENDING
        job.ended[state] += 1
        if not job.fed and job in self._hungry:
            self._is_new = True
        return job, state

    # --- cancelling and trying again

    def cancel(self, job: Job) -> Tuple[List[int], int]:
        """Nothing more of it is to run: the rows with the cluster, to be cancelled there, and how many others end by this at once."""
        job.is_cancelled = True
        job.revived.clear()
        self._hungry.pop(job, None)
        others = job.left - len(job.fed)
        job.ended[CANCELLED] += others
        return list(job.fed), others

    def retry(self, job: Job) -> int:
        """What has failed or was cancelled is to run again: how many tasks that are. Those still being cancelled count."""
        count = job.ended[FAILED] + job.ended[CANCELLED]
        job.ended[FAILED] = job.ended[CANCELLED] = 0
        if job.is_cancelled:
            job.is_cancelled = False
            count += len(job.fed)
            job.revived.update(dict.fromkeys(job.fed))
        if count:
            self._rewind(job)
        return count

    def _rewind(self, job: Job) -> None:
        job.cursor = job.first - 1
        job.turn += 1
        self._crave(job)
