"""Jobs that are being submitted: their payloads come in parts, and each part is answered when it is on disk."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Callable, Dict, List, Optional

from gpumesh.config import JOB_PARTS_AHEAD, MAX_JOB_PAYLOAD_BYTES
from gpumesh.errors import JournalError
from gpumesh.journal.base import JobRecord, Journal, NewJob
from gpumesh.model.jobs import JobSpec, job_from_wire
from gpumesh.model.payloads import OutOfBand, payload_bytes
from gpumesh.protocol.messages import JobPayloads, SubmitJob
from gpumesh.runtime.job_views import key_of_record, pack_code, pack_options, plain

if TYPE_CHECKING:
    from gpumesh.runtime.job_mesh import Mesh, Parts
    from gpumesh.runtime.job_service import JobService

logger = logging.getLogger("gpumesh.jobs")


class _Arriving:
    """A job of which not all payloads are here."""

    __slots__ = ("client", "spec", "first_row", "submitted", "received", "error", "parts")

    def __init__(self, client: int, spec: JobSpec, submitted: float, parts: Parts) -> None:
        self.client = client
        self.spec = spec
        self.submitted = submitted
        self.parts = parts
        self.first_row = 0
        self.received = 0
        self.error: Optional[JournalError] = None  # The journal has refused it: so is all that comes of it.


class _Expected:
    """A job that was announced and is being looked up, with the payloads that have come meanwhile."""

    __slots__ = ("client", "waiting")

    def __init__(self, client: int) -> None:
        self.client = client
        self.waiting: List[JobPayloads] = []


class JobIntake:
    """See the module."""

    def __init__(self, service: JobService, journal: Journal, mesh: Mesh, wall: Callable[[], float]) -> None:
        self._service = service
        self._journal = journal
        self._mesh = mesh
        self._wall = wall
        self._arriving: Dict[str, _Arriving] = {}
        self._expected: Dict[str, _Expected] = {}  # The newest announcement of each job counts.

    def begin(self, client: int, message: SubmitJob) -> None:
        """A job is announced."""
        try:
            spec = job_from_wire(message.job)
        except ValueError as error:
            self._mesh.answer(client, message.number, None, str(error), "value")
            return
        digest = spec.variants[0].code if spec.variants else b""
        parts = self._mesh.code_parts(digest) if digest else ()
        is_one_folder = all(variant.code == digest for variant in spec.variants)
        if digest and not (parts and is_one_folder):
            self._mesh.answer(
                client, message.number, None, "the folder of a job's script has to be sent before the job", "value"
            )
            return
        expected = self._expected[spec.job] = _Expected(client)

        def found(record: Optional[JobRecord], error: Optional[JournalError]) -> None:
            if self._expected.get(spec.job) is not expected:
                return  # It was announced once more meanwhile, or its client is gone.
            del self._expected[spec.job]
            if error is not None:
                self._mesh.answer(client, message.number, None, str(error), "journal")
            elif record is not None and record.id == spec.job:
                is_same = key_of_record(record) == spec.key
                text = "" if is_same else f"there is another job {spec.job} already"
                self._mesh.answer(
                    client, message.number, {"accepted": True} if is_same else None, text, "" if is_same else "taken"
                )
            elif self._is_complete(spec.job):
                self.begin(client, message)  # It came before, and is on its way to the disk: the next look finds it.
            else:
                self._open(client, message.number, spec, parts)
                for payloads in expected.waiting:
                    self.add(client, payloads)

        self._journal.read(lambda reader: reader.job(spec.job), found)

    def _open(self, client: int, number: int, spec: JobSpec, parts: Parts) -> None:
        if spec.job in self._arriving:
            self._drop(spec.job)  # It began before, over a connection that was lost.
        arriving = self._arriving[spec.job] = _Arriving(client, spec, self._wall(), parts)
        digest = spec.variants[0].code if spec.variants else b""
        new = NewJob(
            spec.job,
            spec.name,
            spec.variants[0].script if spec.variants else spec.script,
            digest,
            pack_options(spec),
            arriving.submitted,
        )
        folder = None if not digest or self._journal.has_code(digest) else pack_code(parts)

        def synced(error: Optional[JournalError]) -> None:
            if error is not None:
                self._refused(arriving, error)
                self._mesh.answer(client, number, None, str(error), "journal")
            elif spec.count:
                self._mesh.answer(client, number, {"accepted": False})

        arriving.first_row = self._journal.begin_job(new, spec.count, code=folder, on_synced=synced)
        if not spec.count:
            self._accept(arriving, number)

    def add(self, client: int, message: JobPayloads) -> None:
        """Payloads have come."""
        expected = self._expected.get(message.job)
        if expected is not None and expected.client == client and len(expected.waiting) <= JOB_PARTS_AHEAD:
            expected.waiting.append(message)
            return
        arriving = self._arriving.get(message.job)
        if arriving is None or arriving.client != client:
            self._mesh.answer(client, message.number, None, "this job was not announced, or is being submitted anew", "again")
            return
        problem = _wrong_with(message, arriving)
        if problem:
            self._drop(message.job)
            self._mesh.answer(client, message.number, None, problem, "value")
            return
        arriving.received += len(message.payloads)
        is_last = arriving.received == arriving.spec.count

        def synced(error: Optional[JournalError]) -> None:
            if error is not None:
                self._refused(arriving, error)
                self._mesh.answer(client, message.number, None, str(error), "journal")
            elif not is_last:
                self._mesh.answer(client, message.number, {"accepted": False})

        payloads = [(variant, plain(payload)) for variant, payload in message.payloads]
        self._journal.add_payloads(message.job, message.first, payloads, synced)
        if is_last:
            self._accept(arriving, message.number)

    def _accept(self, arriving: _Arriving, number: int) -> None:
        spec = arriving.spec

        def synced(error: Optional[JournalError]) -> None:
            if error is not None:
                if arriving.error is None:  # Else this was answered.
                    self._refused(arriving, error)
                    self._mesh.answer(arriving.client, number, None, str(error), "journal")
                return
            self._arriving.pop(spec.job, None)
            active = self._service.admit(spec, arriving.first_row, arriving.submitted, arriving.parts)
            self._mesh.answer(arriving.client, number, {"accepted": True})
            self._service.accepted(active)

        self._journal.accept_job(spec.job, synced)

    def _refused(self, arriving: _Arriving, error: JournalError) -> None:
        if arriving.error is None:
            arriving.error = error
            logger.error("job %s was not taken: %s", arriving.spec.job, error)
            self._journal.discard_job(arriving.spec.job)
            if self._arriving.get(arriving.spec.job) is arriving:
                del self._arriving[arriving.spec.job]

    def _drop(self, job: str) -> None:
        del self._arriving[job]
        self._journal.discard_job(job)

    def client_gone(self, client: int) -> None:
        """What it was submitting is dropped, except what is complete and only waits for the disk."""
        for job, expected in list(self._expected.items()):
            if expected.client == client:
                del self._expected[job]
        for job, arriving in list(self._arriving.items()):
            if arriving.client == client and not self._is_complete(job):
                self._drop(job)

    def _is_complete(self, job: str) -> bool:
        """Whether all of it is here, and the journal has been told to accept it."""
        arriving = self._arriving.get(job)
        return arriving is not None and arriving.received == arriving.spec.count


def _wrong_with(message: JobPayloads, arriving: _Arriving) -> str:
    """Why these cannot be the next payloads; "" when they can."""
    payloads = message.payloads
    if message.first != arriving.received or arriving.received + len(payloads) > arriving.spec.count:
        return f"payloads from place {message.first!r} on cannot follow {arriving.received} of {arriving.spec.count}"
    variants = len(arriving.spec.variants)
    for each in payloads:
        if not (
            isinstance(each, (tuple, list))
            and len(each) == 2
            and type(each[0]) is int
            and 0 <= each[0] < variants
            and isinstance(each[1], (bytes, OutOfBand))
            and payload_bytes(each[1]) <= MAX_JOB_PAYLOAD_BYTES
        ):
            return "these are not payloads of a job"
    return ""
