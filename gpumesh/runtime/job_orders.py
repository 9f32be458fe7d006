"""What clients order about jobs that are there: cancel, kill, retry. Answered when it is on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Optional, Tuple

from gpumesh.errors import JournalError
from gpumesh.journal.base import JobRecord, Journal
from gpumesh.model.jobs import CANCELLED, FAILED, PENDING
from gpumesh.protocol.messages import ChangeJob
from gpumesh.runtime.job_answers import Active, JobAnswers
from gpumesh.runtime.job_mesh import Mesh
from gpumesh.scheduler.jobs import JobBook

if TYPE_CHECKING:
    from gpumesh.runtime.job_service import JobService


class JobOrders:
    """See the module; all that it is given is somebody else's."""

    def __init__(
        self, service: JobService, mesh: Mesh, journal: Journal, jobs: Dict[str, Active], book: JobBook, answers: JobAnswers
    ) -> None:
        self._service = service
        self._mesh = mesh
        self._journal = journal
        self._jobs = jobs
        self._book = book
        self._answers = answers

    def change(self, client: int, message: ChangeJob, record: JobRecord) -> None:
        """Carry out one of them."""
        if message.what in ("cancel", "kill"):
            self._cancel(client, message.number, record, force=message.what == "kill")
        elif message.what == "retry":
            self._retry(client, message.number, record)
        else:
            self._mesh.answer(client, message.number, None, f"a job cannot be told to {message.what!r}", "value")

    def _cancel(self, client: int, number: int, record: JobRecord, *, force: bool) -> None:
        active = self._jobs.get(record.id)
        if active is None:
            self._mesh.answer(client, number, {"count": 0})
            return
        is_new = not active.job.is_cancelled
        rows, others = self._book.cancel(active.job)
        count = others + len(rows) if is_new else 0

        def synced(error: Optional[JournalError]) -> None:
            if error is None:
                self._mesh.answer(client, number, {"count": count})
            else:
                self._mesh.answer(client, number, None, str(error), "journal")

        self._journal.cancel_pending(active.job.id, CANCELLED, status=CANCELLED, on_synced=synced)
        if is_new:
            self._mesh.note_job("cancelled", f"job {active.job.id} ({active.spec.name}) is cancelled", active.job.id)
        self._mesh.cancel_script_tasks(rows, force=force)
        self._answers.changed(active)
        self._service.finish_if_done(active)
        self._service.feed()

    def _retry(self, client: int, number: int, record: JobRecord) -> None:
        active = self._jobs.get(record.id)
        if active is not None:
            self._retry_now(client, number, active)
            return
        if not (record.counts.get(FAILED) or record.counts.get(CANCELLED)):
            self._mesh.answer(client, number, {"count": 0})
            return

        def found(pair: Optional[Tuple[Optional[JobRecord], Optional[bytes]]], error: Optional[JournalError]) -> None:
            fresh, folder = pair if pair is not None else (None, None)
            if fresh is None:
                self._mesh.answer(client, number, None, str(error or f"job {record.id} is gone"), "journal")
                return
            active = self._jobs.get(fresh.id)  # Somebody else may have retried it meanwhile.
            try:
                self._retry_now(client, number, active or self._service.activate(fresh, folder, is_retry=True))
            except JournalError as broken:
                self._mesh.answer(client, number, None, str(broken), "journal")

        self._journal.read(
            lambda reader: (reader.job(record.id), reader.code(record.code)), found
        )  # Its folder is needed again.

    def _retry_now(self, client: int, number: int, active: Active) -> None:
        job = active.job
        count = self._book.retry(job)

        def synced(error: Optional[JournalError]) -> None:
            if error is None:
                self._mesh.answer(client, number, {"count": count})
                self._service.feed()
                return
            self._mesh.answer(client, number, None, str(error), "journal")
            self._journal.read(lambda reader: reader.job(job.id), self._not_retried)

        self._journal.retry_job(job.id, (FAILED, CANCELLED), status=PENDING, on_synced=synced)
        self._answers.changed(active)

    def _not_retried(self, record: Optional[JobRecord], error: Optional[JournalError]) -> None:
        """The journal refused: what it says is how things are."""
        active = self._jobs.get(record.id) if record is not None else None
        if active is None or record is None:
            return
        for state in active.job.ended:
            active.job.ended[state] = record.counts.get(state, 0)
        self._service.finish_if_done(active)
