"""Script jobs and their tasks as plain data: what stands in the journal, and what people are shown. Reads and writes nothing itself."""

from __future__ import annotations

import json
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

import msgpack

from gpumesh.config import INLINE_VALUE_BYTES
from gpumesh.errors import JournalError
from gpumesh.journal.base import JobRecord, TaskEnd, TaskRecord
from gpumesh.model.jobs import CANCELLED, DONE, FAILED, KEY_BYTES, PENDING, RUNNING, JobSpec
from gpumesh.model.outcomes import Status, failure_text
from gpumesh.model.payloads import OutOfBand
from gpumesh.model.tasks import spec_from_wire
from gpumesh.scheduler.jobs import job_state

NO_COUNTS: Dict[str, int] = {PENDING: 0, RUNNING: 0, DONE: 0, FAILED: 0, CANCELLED: 0}


def pack_options(spec: JobSpec) -> bytes:
    """What the journal keeps of a job for us, beside what it knows of itself."""
    packed: bytes = msgpack.packb([spec.key, spec.script, spec.client, [list(variant) for variant in spec.variants]])
    return packed


def job_of_record(record: JobRecord) -> JobSpec:
    """The job as it was submitted.

    Raises:
        JournalError: The record cannot be understood: it was written by something else.
    """
    try:
        key, script, client, variants = msgpack.unpackb(record.options, use_list=False)
        specs = tuple(spec_from_wire(variant) for variant in variants)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise JournalError(f"what the database says of job {record.id} cannot be understood: {error}") from error
    return JobSpec(record.id, key, record.name, script, specs, record.tasks, client)


def key_of_record(record: JobRecord) -> bytes:
    """The key that the job was submitted with."""
    key: bytes = msgpack.unpackb(record.options, use_list=False)[0]
    return key if len(key) == KEY_BYTES else b""


def pack_code(parts: Sequence[Tuple[bytes, Any, Tuple[bytes, ...]]]) -> bytes:
    """A folder as the journal keeps it: what DefineCode said of it, in order."""
    packed: bytes = msgpack.packb([[digest, plain(archive), list(needs)] for digest, archive, needs in parts])
    return packed


def unpack_code(kept: bytes) -> List[Tuple[bytes, Any, Tuple[bytes, ...]]]:
    """The reverse."""
    return [(digest, archive, needs) for digest, archive, needs in msgpack.unpackb(kept, use_list=False)]


def plain(payload: Any) -> bytes:
    """A payload as one piece."""
    return b"".join(bytes(part) for part in payload.parts) if isinstance(payload, OutOfBand) else bytes(payload)


def moment(seconds: float) -> str:
    """A point in time for people and programs: ISO 8601 in UTC; "" for 0."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)) if seconds else ""


def job_view(
    spec: JobSpec, *, state: str, counts: Dict[str, int], submitted: float, ended: float, notices: Sequence[str] = ()
) -> Dict[str, Any]:
    """One job without its tasks; the shape of `mesh.jobs()`."""
    return {
        "id": spec.job,
        "name": spec.name,
        "script": spec.script,
        "client": spec.client,
        "state": state,
        "finished": bool(ended),
        "counts": {**NO_COUNTS, **counts},
        "total": spec.count,
        "submitted": moment(submitted),
        "ended": moment(ended),
        "notices": list(notices),
    }


def record_view(record: JobRecord) -> Dict[str, Any]:
    """The same of a job that is only in the journal."""
    counts = {**NO_COUNTS, **record.counts}
    state = record.status if record.finished else job_state(counts, has_started=False)
    return job_view(job_of_record(record), state=state, counts=counts, submitted=record.submitted, ended=record.finished)


def task_view(record: TaskRecord, first_row: int) -> Dict[str, Any]:
    """One task as the journal knows it; `payload` and `result` are JSON (OutOfBand where it is large), None where there is none."""
    attempts = json.loads(record.history) if record.history else []
    return {
        "id": record.row - first_row,
        "status": record.status,
        "payload": _beside(record.payload),
        "result": _beside(record.result),
        "error": record.error or None,
        "worker": record.worker,
        "hostname": attempts[-1].get("hostname", "") if attempts else "",
        "attempts": attempts,
        "seconds": record.seconds,
    }


def _beside(data: Optional[bytes]) -> Any:
    """As it travels in an answer, however large."""
    return data if data is None or len(data) <= INLINE_VALUE_BYTES else OutOfBand([data])


def task_end(
    row: int,
    status: int,
    payload: Any,
    seconds: float,
    *,
    now: float,
    earlier: Sequence[Dict[str, Any]],
    where: Tuple[str, str],
) -> TaskEnd:
    """How a task has ended, for the journal.

    Args:
        row: The task.
        status: A Status.
        payload: The JSON of an OK one, else a dict about the failure.
        seconds: Run time.
        now: Seconds since the epoch.
        earlier: Its failed attempts, as `attempt_view` gives them.
        where: (id, host name) of the last worker; "" where there was none.
    """
    worker, hostname = where
    state = DONE if status == Status.OK else CANCELLED if status == Status.CANCELLED else FAILED
    details: Dict[str, Any] = payload if isinstance(payload, dict) else {}
    result: Optional[bytes] = None
    error = ""
    if state == DONE:
        result = plain(payload)
    elif state == FAILED:
        error = failure_text(details) or f"it ended as {Status(status).name}"
    attempts = list(earlier)
    if worker:
        attempts.append(attempt_view(worker, hostname, status, details, seconds))
    history = json.dumps(attempts, default=str) if attempts else ""
    return TaskEnd(row, state, len(attempts), worker, seconds, now, error, history, result)


def attempt_view(worker: str, hostname: str, status: int, details: Dict[str, Any], seconds: float = 0.0) -> Dict[str, Any]:
    """One attempt for people: `worker`, `hostname`, `status` ("ok", "raised", "crashed", ...), `seconds`, and what is known of a failure."""
    if worker.endswith(")"):
        worker = worker.rpartition("(")[2][:-1]  # Elsewhere it is "host (id)".
    told = {name: value for name, value in details.items() if name not in ("worker", "hostname", "status", "attempts")}
    return {"worker": worker, "hostname": hostname, "status": Status(status).name.lower(), "seconds": seconds, **told}
