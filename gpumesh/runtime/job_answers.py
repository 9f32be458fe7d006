"""What clients are told of script jobs, at once or when there are news. Changes no job."""

from __future__ import annotations

import asyncio
from typing import Any, Callable, Dict, List, Optional, Tuple

from gpumesh.config import JOB_NEWS_SECONDS, JOB_PAGE_BYTES, JOB_PAGE_TASKS, JOB_WAIT_SECONDS
from gpumesh.errors import JournalError
from gpumesh.journal.base import JobRecord, Journal, TaskRecord
from gpumesh.model.jobs import PENDING, RUNNING, JobSpec, typed_job_id
from gpumesh.model.outcomes import Status
from gpumesh.model.records import NamedTuple
from gpumesh.protocol.messages import Query
from gpumesh.runtime.job_mesh import Mesh
from gpumesh.runtime.job_views import attempt_view, job_view, record_view, task_view
from gpumesh.scheduler.jobs import Job, JobBook


class _Waiter:
    """Somebody who wants to hear of a job's progress."""

    __slots__ = ("client", "number", "seen", "timer")

    def __init__(self, client: int, number: int, seen: int) -> None:
        self.client = client
        self.number = number
        self.seen = seen  # Version that it knows.
        self.timer: Optional[asyncio.TimerHandle] = None


class _Now(NamedTuple):
    """What the scheduler says of the jobs at the moment, by their ids."""

    running: Dict[str, int]  # How many of their tasks are being executed.
    notices: Dict[str, Dict[str, None]]  # Why others can be by nobody here.


class Active:
    """A job that has not finished, with what the scheduler need not know of it."""

    __slots__ = ("job", "spec", "submitted", "numbers", "digests", "version", "looks", "waiters")

    def __init__(
        self, job: Job, spec: JobSpec, submitted: float, numbers: List[int], digests: List[bytes], *, version: int = 1
    ) -> None:
        self.job = job
        self.spec = spec
        self.submitted = submitted  # Seconds since the epoch.
        self.numbers = numbers  # Of its variants, as specs of the scheduler.
        self.digests = digests  # Of what was defined for it.
        self.version = version  # Grows with each change that somebody may wait for.
        self.looks: Tuple[int, List[str]] = (0, [])  # When the scheduler was asked last: how many run, and its notices.
        self.waiters: List[_Waiter] = []

    def record(self) -> JobRecord:
        """The job as the journal has it, without what only that knows."""
        spec = self.spec
        script = spec.variants[0].script if spec.variants else ""
        code = spec.variants[0].code if spec.variants else b""
        counts = self.job.counts(0)
        return JobRecord(
            spec.job, spec.name, script, code, b"", self.submitted, PENDING, 0.0, self.job.first, self.job.total, counts
        )


class JobAnswers:
    """See the module.

    Args:
        jobs: The active ones; somebody else's.
        book: The same.
        earlier: Row -> attempts of before a restart; the same.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        mesh: Mesh,
        journal: Journal,
        jobs: Dict[str, Active],
        book: JobBook,
        earlier: Dict[int, List[Dict[str, Any]]],
    ) -> None:
        self._loop = loop
        self._mesh = mesh
        self._journal = journal
        self._jobs = jobs
        self._book = book
        self._earlier = earlier
        self._watched: Dict[Active, None] = {}  # Somebody waits for news of them.
        self._timer: Optional[asyncio.TimerHandle] = None  # Until those are looked at, and who waits is told what is new.

    def close(self) -> None:
        """Nobody is told anything any more."""
        if self._timer is not None:
            self._timer.cancel()
        for active in self._watched:
            for waiter in active.waiters:
                if waiter.timer is not None:
                    waiter.timer.cancel()
        self._watched.clear()

    def with_job(self, client: int, number: int, text: Any, then: Callable[[JobRecord], None]) -> None:
        """Find a job by what a person typed."""
        try:
            ident = typed_job_id(text)
        except (TypeError, ValueError) as error:
            self._mesh.answer(client, number, None, str(error), "value" if isinstance(error, TypeError) else "unknown")
            return

        def found(record: Optional[JobRecord], error: Optional[JournalError]) -> None:
            if error is not None:
                self._mesh.answer(client, number, None, str(error), "journal")
            elif record is None:
                self._mesh.answer(
                    client, number, None, f"there is no job {text!r} here; `gpumesh jobs` lists those there are", "unknown"
                )
            else:
                then(record)

        active = self._jobs.get(ident)
        if active is not None:
            then(active.record())
            return
        self._journal.read(lambda reader: reader.job(ident), found)

    def list(self, client: int, number: int) -> None:
        def found(records: Optional[List[JobRecord]], error: Optional[JournalError]) -> None:
            if error is not None:
                self._mesh.answer(client, number, None, str(error), "journal")
                return
            now = self._now()
            views: List[Dict[str, Any]] = []
            for record in reversed(records or []):
                active = self._jobs.get(record.id)
                views.append(record_view(record) if active is None else self._view(active, now))
            self._mesh.answer(client, number, views)

        self._journal.read(lambda reader: reader.jobs(), found)

    def tell(self, client: int, query: Query, arguments: Dict[str, Any], record: JobRecord) -> None:
        active = self._jobs.get(record.id)
        if query.what == "job":
            self._mesh.answer(client, query.number, self._current_view(active, record))
        elif query.what == "job-tasks":
            self._tell_tasks(client, query.number, record, first=_count(arguments.get("first")))
        elif query.what == "job-logs":
            self._tell_logs(client, query.number, record, task=arguments.get("task"), since=_count(arguments.get("since")))
        elif active is None:
            self._mesh.answer(client, query.number, self._current_view(None, record))
        else:
            self._wait(client, query.number, active, seen=_count(arguments.get("seen")))

    def _current_view(self, active: Optional[Active], record: JobRecord) -> Dict[str, Any]:
        if active is None:
            return {**record_view(record), "version": 0}
        return self._view(active, self._now())

    def _view(self, active: Active, now: _Now) -> Dict[str, Any]:
        job = active.job
        running, notices = looks = (now.running.get(job.id, 0), list(now.notices.get(job.id, ())))
        if looks != active.looks:
            active.looks = looks
            active.version += 1
        view = job_view(
            active.spec,
            state=job.state(running),
            counts=job.counts(running),
            submitted=active.submitted,
            ended=0.0,
            notices=notices,
        )
        return {**view, "version": active.version}

    def _now(self) -> _Now:
        running: Dict[str, int] = {}
        for row in self._mesh.executing_scripts():
            job = self._book.job_of(row)
            if job is not None:
                running[job.id] = running.get(job.id, 0) + 1
        notices: Dict[str, Dict[str, None]] = {}
        for rows, text in self._mesh.unable_scripts():
            for row in rows:
                job = self._book.job_of(row)
                if job is not None:
                    notices.setdefault(job.id, {})[text] = None
        return _Now(running, notices)

    def _tell_tasks(self, client: int, number: int, record: JobRecord, *, first: int) -> None:
        def found(tasks: Optional[List[TaskRecord]], error: Optional[JournalError]) -> None:
            if error is not None:
                self._mesh.answer(client, number, None, str(error), "journal")
                return
            tasks = tasks or []
            active = self._jobs.get(record.id)
            executing = self._mesh.executing_scripts() if active is not None else {}
            views = [self._task_view(task, record.first_row, active, executing) for task in tasks]
            next_place = first + len(views)
            self._mesh.answer(
                client, number, {"tasks": views, "next": next_place if tasks and next_place < record.tasks else -1}
            )

        self._journal.read(
            lambda reader: reader.tasks(record.id, first=first, limit=JOB_PAGE_TASKS, max_bytes=JOB_PAGE_BYTES, payloads=True),
            found,
        )

    def _task_view(
        self, task: TaskRecord, first_row: int, active: Optional[Active], executing: Dict[int, Tuple[str, int, float]]
    ) -> Dict[str, Any]:
        view = task_view(task, first_row)
        if active is None or task.row not in active.job.fed:
            return view
        where = executing.get(task.row)
        failed = self.attempts_before(task.row)
        view.update(status=PENDING, result=None, error=None, worker="", hostname="", attempts=failed)
        if where is not None:
            worker, _, seconds = where
            view.update(status=RUNNING, worker=worker, hostname=self._mesh.host_of(worker), seconds=seconds)
        return view

    def _tell_logs(self, client: int, number: int, record: JobRecord, *, task: Any, since: int) -> None:
        row: Optional[int] = None
        if task is not None:
            if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < record.tasks:
                text = f"job {record.id} has the tasks 0 to {record.tasks - 1}, not {task!r}"
                self._mesh.answer(client, number, None, text, "value")
                return
            row = record.first_row + task

        def found(parts: Optional[List[Any]], error: Optional[JournalError]) -> None:
            if error is not None:
                self._mesh.answer(client, number, None, str(error), "journal")
                return
            told = [(part[0], part[1] - record.first_row, part[2], part[3], part[4]) for part in parts or ()]
            self._mesh.answer(client, number, told)

        self._journal.read(lambda reader: reader.job_log(record.id, row=row, after=since, max_bytes=JOB_PAGE_BYTES), found)

    # --- waiting for news

    def _wait(self, client: int, number: int, active: Active, *, seen: int) -> None:
        view = self._view(active, self._now())
        if seen != active.version and (not seen or self._timer is None):
            self._mesh.answer(client, number, view)
            self._look_soon()  # Not before that comes another.
            return
        waiter = _Waiter(client, number, seen)
        active.waiters.append(waiter)
        self._watched[active] = None
        waiter.timer = self._loop.call_later(JOB_WAIT_SECONDS, self._give_news, active, waiter)

    def _give_news(self, active: Active, waiter: _Waiter) -> None:
        """News or not: it has waited long enough."""
        if waiter in active.waiters:
            self._tell_waiters(active, [waiter], self._view(active, self._now()))

    def changed(self, active: Active) -> None:
        """There is something new about a job."""
        active.version += 1
        self.moved()

    def moved(self) -> None:
        """Tasks may have come to workers or gone from there, of whatever job: called often, so it only sees to it that somebody looks."""
        if self._watched:
            self._look_soon()

    def _look_soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(JOB_NEWS_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._watched:
            return
        now = self._now()
        for active in list(self._watched):
            if self._jobs.get(active.job.id) is not active:
                continue  # It has finished; that is told when it is on disk.
            view = self._view(active, now)
            waiters = [waiter for waiter in active.waiters if waiter.seen != active.version]
            if waiters:
                self._tell_waiters(active, waiters, view)
                self._look_soon()

    def end(self, active: Active, view: Dict[str, Any]) -> None:
        """It has finished: who waits is told so."""
        self._tell_waiters(active, list(active.waiters), view)

    def _tell_waiters(self, active: Active, waiters: List[_Waiter], view: Dict[str, Any]) -> None:
        for waiter in waiters:
            active.waiters.remove(waiter)
            if waiter.timer is not None:
                waiter.timer.cancel()
            self._mesh.answer(waiter.client, waiter.number, view)
        if not active.waiters:
            self._watched.pop(active, None)

    def attempts_before(self, row: int) -> List[Dict[str, Any]]:
        """Attempts of a task with the scheduler that have failed."""
        now = [
            attempt_view(each.get("worker", ""), each.get("hostname", ""), int(each.get("status", Status.LOST)), each)
            for each in self._mesh.failed_attempts(row)
        ]
        return [*self._earlier.get(row, ()), *now]


def _count(value: Any) -> int:
    """A number from a client's arguments; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
