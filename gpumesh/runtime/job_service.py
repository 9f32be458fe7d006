"""Script jobs at the coordinator: between the journal, which keeps them, the scheduler, which runs them, and clients, who ask.

    client ── SubmitJob, JobPayloads ──> JobIntake ──> journal ── on disk ──> Answer
                                                          │
              JobBook: which are next <── pages of pending tasks
                 │                                        ^
                 └── run ──> scheduler ── ends ───────────┘ ── on disk ──> acknowledged to the worker

The coordinator is a client of its own scheduler for them (JOBS_CLIENT). What runs is decided by `scheduler.jobs` and by the cluster.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from gpumesh.config import (
    INLINE_VALUE_BYTES,
    JOB_ONCE_TASKS,
    JOB_ONCE_TASKS_PER_SLOT,
)
from gpumesh.errors import JournalError
from gpumesh.journal.base import JobRecord, Journal, JournalReader, TaskEnd, TaskRecord
from gpumesh.model.jobs import CANCELLED, PENDING, JobSpec
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import OutOfBand
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import ChangeJob, JobPayloads, SubmitJob
from gpumesh.runtime.job_answers import Active, JobAnswers
from gpumesh.runtime.job_intake import JobIntake
from gpumesh.runtime.job_mesh import Mesh, Parts
from gpumesh.runtime.job_orders import JobOrders
from gpumesh.runtime.job_views import (
    job_of_record,
    job_view,
    task_end,
    unpack_code,
)
from gpumesh.scheduler.jobs import Job, JobBook, Wanted

logger = logging.getLogger("gpumesh.jobs")

AGAIN_SECONDS = 1.0  # After the journal could not be read.

JOB_QUERIES = frozenset({"jobs", "job", "job-tasks", "job-wait", "job-logs"})


class JobService:
    """All script jobs of one coordinator. On the loop's thread only.

    Args:
        mesh: The coordinator.
        journal: Ours from now on; `close` closes it.
        wall: Tells the time of day, for people.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, mesh: Mesh, journal: Journal, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._loop = loop
        self._mesh = mesh
        self._journal = journal
        self._wall = wall
        self._book = JobBook()
        self._active: Dict[str, Active] = {}
        self._specs: Dict[TaskSpec, int] = {}  # Numbers that the scheduler knows them by.
        self._code_users: Dict[bytes, int] = {}  # Of what was defined, how many active jobs need it.
        self._earlier: Dict[
            int, List[Dict[str, Any]]
        ] = {}  # Row -> attempts of before a restart or retry, of those with the scheduler.
        self._intake = JobIntake(self, journal, mesh, wall)
        self._answers = JobAnswers(loop, mesh, journal, self._active, self._book, self._earlier)
        self._orders = JobOrders(self, mesh, journal, self._active, self._book, self._answers)
        self._is_closed = False
        self._resubmitting: Dict[Wanted, None] = {}  # Pages of what may be running since before a restart.
        self._retry_timer: Optional[asyncio.TimerHandle] = None
        journal.on_trouble = self._on_trouble

    def recover(self) -> None:
        """Go on with the jobs of before. Blocks while the journal is read; call it before anybody is served.

        Raises:
            JournalError: It cannot be read.
        """
        reader = self._journal.reader()
        try:
            records = reader.unfinished()
            if not records:
                return
            started = reader.started()
            folders = {record.code: reader.code(record.code) for record in records if record.code}
        finally:
            reader.close()
        for record in records:
            self.activate(record, folders.get(record.code))
        rows: List[TaskRecord] = []
        for task in started:
            active = self._active[task.job_id]
            active.job.has_started = True
            if not active.job.is_cancelled:
                rows.append(task)
                self._book.feed(active.job, [(task.row, len(task.payload or b""))])
        self._run(rows, again=True)
        for active in list(self._active.values()):
            if active.job.is_cancelled:  # It was killed before the last of them had ended.
                _, others = self._book.cancel(active.job)
                self._journal.cancel_pending(active.job.id, CANCELLED, status=CANCELLED)
                logger.info("job %s was being cancelled: %d of its tasks end with that", active.job.id, others)
            self.finish_if_done(active)
        if self._active:
            logger.info("%d jobs of before the restart go on", len(self._active))
        pages = self._book.wanted()
        self._resubmitting = dict.fromkeys(pages)
        for page in pages:
            self._read_page(page)
        if not pages:
            self._mesh.scripts_submitted_again()

    def close(self) -> None:
        """Write what is to be written. Blocks as long as that takes."""
        self._is_closed = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._answers.close()
        self._journal.close()

    # --- what clients want

    def on_message(self, client: int, message: Any) -> None:
        """A SubmitJob, JobPayloads, ChangeJob, or a Query about jobs. What is wrong with it is its answer."""
        kind = type(message)
        if kind is SubmitJob:
            self._intake.begin(client, message)
        elif kind is JobPayloads:
            self._intake.add(client, message)
        elif kind is ChangeJob:
            self._answers.with_job(client, message.number, message.job, lambda job: self._orders.change(client, message, job))
        elif message.what not in JOB_QUERIES:
            self._mesh.answer(client, message.number, None, f"this coordinator knows nothing of {message.what!r}")
        elif message.what == "jobs":
            self._answers.list(client, message.number)
        else:
            arguments = message.arguments if isinstance(message.arguments, dict) else {}
            wanted = arguments.get("job")
            self._answers.with_job(
                client, message.number, wanted, lambda job: self._answers.tell(client, message, arguments, job)
            )

    def client_gone(self, client: int) -> None:
        """A client is not connected any more: what it was just submitting is dropped, it will begin again."""
        self._intake.client_gone(client)

    # --- jobs come and go

    def activate(self, record: JobRecord, folder: Optional[bytes], *, is_retry: bool = False) -> Active:
        """A job of the journal becomes active."""
        spec = job_of_record(record)
        if spec.variants and folder is None:
            raise JournalError(f"the database does not hold the folder that the script of job {record.id} is in")
        active = self.admit(spec, record.first_row, record.submitted, unpack_code(folder) if folder else ())
        job = active.job
        for state in job.ended:
            job.ended[state] = record.counts.get(state, 0)
        job.is_cancelled = record.status == CANCELLED and not is_retry
        job.has_started = any(job.ended.values())
        return active

    def admit(self, spec: JobSpec, first_row: int, submitted: float, parts: Parts) -> Active:
        """A job becomes active: the scheduler hears of its specs."""
        functions = list(dict.fromkeys(variant.function for variant in spec.variants))
        users = self._code_users
        self._mesh.define_script_code(
            [part for part in parts if part[0] not in users], [each for each in functions if each not in users]
        )
        digests = [*(part[0] for part in parts), *functions]
        for digest in digests:
            users[digest] = users.get(digest, 0) + 1
        numbers: List[int] = []
        for variant in spec.variants:
            number = self._specs.get(variant)
            if number is None:
                number = self._specs[variant] = len(self._specs) + 1
                self._mesh.define_script(number, variant)
            numbers.append(number)
        priority = spec.variants[0].priority if spec.variants else 0
        is_once = bool(spec.variants) and spec.variants[0].retries == 0
        job = Job(spec.job, first_row, spec.count, priority=priority, is_once=is_once)
        version = max(1, int(self._wall() * 1000))  # After a restart no number means something else than before.
        active = self._active[spec.job] = Active(job, spec, submitted, numbers, digests, version=version)
        self._book.add(job)
        return active

    def accepted(self, active: Active) -> None:
        """A new job is on disk."""
        spec = active.spec
        what = f"job {spec.job} ({spec.name}): {spec.count} tasks of {spec.script}, submitted by {spec.client}"
        self._mesh.note_job("accepted", what, spec.job)
        if not self.finish_if_done(active):
            self.feed()

    def finish_if_done(self, active: Active) -> bool:
        """End a job of which nothing is left to do; whether it is one."""
        job = active.job
        if not job.is_finished or self._active.get(job.id) is not active:
            return False
        ended = self._wall()
        state = job.state(0)
        view = job_view(
            active.spec,
            state=state,
            counts=job.counts(0),
            submitted=active.submitted,
            ended=ended,
        )
        self._book.finish(job.id)
        del self._active[job.id]
        self._let_go_of_code(active)

        def synced(error: Optional[JournalError]) -> None:
            self._answers.end(active, {**view, "version": 0})

        self._journal.finish_job(job.id, state, ended, synced)
        counts = job.counts(0)
        told = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no tasks"
        self._mesh.note_job("finished", f"job {job.id} ({active.spec.name}) has finished: {told}", job.id)
        return True

    def _let_go_of_code(self, active: Active) -> None:
        unused: List[bytes] = []
        for digest in active.digests:
            self._code_users[digest] -= 1
            if not self._code_users[digest]:
                del self._code_users[digest]
                unused.append(digest)
        self._mesh.forget_script_code(unused)
        if not self._active:
            self._specs = {}
            self._mesh.no_scripts_left()

    # --- tasks to the scheduler

    def feed(self) -> None:
        """Read what is to run next, as far as there is room."""
        journal = self._journal
        if self._is_closed or journal.trouble is not None or journal.is_pressed:
            return  # What has ended could not be kept.
        if any(active.job.is_once for active in self._active.values()):
            able = max(self._mesh.script_slots(), len(self._mesh.executing_scripts()))
            self._book.most_once = max(JOB_ONCE_TASKS, JOB_ONCE_TASKS_PER_SLOT * able)
        for page in self._book.wanted():
            self._read_page(page)

    def _read_page(self, page: Wanted) -> None:
        def read(reader: JournalReader) -> List[TaskRecord]:
            return reader.pending(page.job, after=page.after, limit=page.limit, max_bytes=page.limit_bytes)

        self._journal.read(read, lambda tasks, error: self._on_page(page, tasks or [], error))

    def _on_page(self, page: Wanted, tasks: List[TaskRecord], error: Optional[JournalError]) -> None:
        again = page in self._resubmitting
        self._on_tasks(page, tasks, error, again=again)
        if again:
            del self._resubmitting[page]
            if not self._resubmitting:
                self._mesh.scripts_submitted_again()
                self.feed()

    def _on_tasks(self, page: Wanted, tasks: List[TaskRecord], error: Optional[JournalError], *, again: bool) -> None:
        if error is not None:
            logger.warning("the tasks of job %s cannot be read (%s); trying again", page.job, error)
            self._book.unread(page)
            if self._retry_timer is None and not self._is_closed:
                self._retry_timer = self._loop.call_later(AGAIN_SECONDS, self._feed_again)
            return
        sizes = [(task.row, len(task.payload or b"")) for task in tasks]
        active = self._active.get(page.job)
        is_last = not tasks or (active is not None and tasks[-1].row == active.job.first + active.job.total - 1)
        fresh = set(self._book.read(page, sizes, is_last=is_last))
        once: List[TaskRecord] = []
        often: List[TaskRecord] = []
        for task in tasks:
            if task.row in fresh:
                retries = self._active[task.job_id].spec.variants[task.variant].retries
                (often if retries else once).append(task)
        self._run(often, again=again)
        if once:
            rows = [task.row for task in once]
            self._journal.mark_started(rows, lambda failure: self._run_once(once))
        if not is_last and not again:
            self.feed()

    def _run_once(self, tasks: List[TaskRecord]) -> None:
        """What may run at most once is known on disk to have been started; only now it is."""
        ready: List[TaskRecord] = []
        for task in tasks:
            job = self._book.job_of(task.row)
            if job is None or self._is_closed:
                continue
            if job.is_cancelled or task.row in job.revived:
                self.ended("", [(task.row, int(Status.CANCELLED), {}, 0.0)])
            else:
                ready.append(task)
        self._run(ready, again=False)

    def _feed_again(self) -> None:
        self._retry_timer = None
        self.feed()

    def _run(self, tasks: List[TaskRecord], *, again: bool) -> None:
        """Give tasks to the scheduler, those of one spec together."""
        runs: List[Tuple[int, List[int], List[Any]]] = []
        for task in tasks:
            number = self._active[task.job_id].numbers[task.variant]
            if not runs or runs[-1][0] != number:
                runs.append((number, [], []))
            payload = task.payload or b""
            runs[-1][1].append(task.row)
            runs[-1][2].append(payload if len(payload) <= INLINE_VALUE_BYTES else OutOfBand([payload]))
            if task.history:
                self._earlier[task.row] = json.loads(task.history)
        for number, rows, payloads in runs:
            self._mesh.run_script_tasks(number, rows, payloads, again=again)

    def started(self, rows: Sequence[int]) -> None:
        """These were given to workers."""
        marked: List[int] = []
        for row in rows:
            job = self._book.job_of(row)
            if job is not None:
                job.has_started = True
                self._answers.changed(self._active[job.id])
                if not job.is_once:  # Else that is known on disk already.
                    marked.append(row)
        if marked:
            self._journal.mark_started(marked)

    def moved(self) -> None:
        """The scheduler has done something: other tasks than before may be executed, or be such that nobody can."""
        self._answers.moved()

    # --- and back

    def ended(self, worker: str, results: Sequence[Tuple[int, int, Any, float]]) -> None:
        """Tasks have ended, as a Deliver says, or (with a dict each) a Fail."""
        now = self._wall()
        ends: List[TaskEnd] = []
        concerned: Dict[str, Active] = {}
        where = (worker, self._mesh.host_of(worker) if worker else "")
        for row, status, payload, seconds in results:
            earlier = self._answers.attempts_before(row)
            end = task_end(row, status, payload, seconds, now=now, earlier=earlier, where=where)
            self._earlier.pop(row, None)
            job, state = self._book.ended(row, end.status)
            if job is None:
                continue
            concerned[job.id] = self._active[job.id]
            if state != PENDING:
                ends.append(end)
        rows = [result[0] for result in results]

        def synced(error: Optional[JournalError]) -> None:
            if error is None:
                self._mesh.results_kept(rows)
            self.feed()

        self._journal.end_tasks(ends, synced)
        for active in concerned.values():
            self._answers.changed(active)
            self.finish_if_done(active)

    def place_of(self, row: int) -> Tuple[str, int]:
        """The job of a task that is with the scheduler, and its place among the payloads; ("", 0) if it is not."""
        job = self._book.job_of(row)
        return (job.id, row - job.first) if job is not None else ("", 0)

    def wrote(self, row: int, stream: int, data: bytes) -> None:
        """A task has written to its standard output (1) or error (2)."""
        if self._book.job_of(row) is not None:
            attempt = len(self._mesh.failed_attempts(row)) + len(self._earlier.get(row, ())) + 1
            self._journal.append_log(row, attempt, stream, data)

    def _on_trouble(self, error: Optional[JournalError]) -> None:
        if error is None:
            logger.warning("the database of jobs can be written again")
            self.feed()
        else:
            logger.error("the database of jobs cannot be written: %s; no further task of a job is started until it can", error)
