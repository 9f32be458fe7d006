"""Script jobs as the wire, the scheduler and the journal see them: ids, states, and what a job is. Nothing acts here."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from gpumesh.config import MAX_JOB_VARIANTS
from gpumesh.model.ids import SEQUENCE_LIMIT, ClientNumber
from gpumesh.model.records import NamedTuple, leading
from gpumesh.model.tasks import TaskSpec, spec_from_wire

JOBS_CLIENT = ClientNumber(0)
"""Whose tasks those of jobs are: the coordinator's own. The id of such a task is its row in the journal."""

PENDING, RUNNING, DONE, FAILED, CANCELLED = "pending", "running", "done", "failed", "cancelled"
TASK_STATES = (PENDING, RUNNING, DONE, FAILED, CANCELLED)
"""What a task of a job can be. The journal knows all but "running", which is true of an instant only."""

QUEUED = "queued"  # Of a job: nothing of it has started.

KEY_BYTES = 16  # Drawn by whoever submits a job: the same job submitted again is known by it.
ID_LETTERS = "0123456789abcdefghjkmnpqrstvwxyz"  # No i, l, o, u: nobody mistakes them for others, or for words.
ID_LENGTH = 8  # 40 bits of the key; of two jobs with the same the second is refused, and drawn again.
ID_PREFIX = "j-"
LEAST_ID_LETTERS = 3  # So many of them may stand for an id that begins with them.

_LOOKS_LIKE = str.maketrans("ilo", "110")


class JobSpec(NamedTuple):
    """A job as it is submitted, without its payloads."""

    job: str  # Its id, of `job_id(key)`.
    key: bytes
    name: str  # For people.
    script: str  # As its submitter called it, for people.
    variants: Tuple[TaskSpec, ...]  # What differs between its tasks by payload: each names one of these by its place.
    count: int  # type: ignore[assignment]  # Of its tasks.
    client: str = ""  # Who submitted it, for people.


class TaskEnd(NamedTuple):
    """How a task of a job has ended, for the journal."""

    row: int
    state: str  # DONE, FAILED or CANCELLED.
    result: bytes = b""  # JSON, of one that is DONE.
    error: str = ""  # For people.
    worker: str = ""  # WorkerId
    hostname: str = ""
    seconds: float = 0.0
    attempts: Tuple[Dict[str, Any], ...] = ()  # Each with `worker`, `hostname`, `status`, `reason`, ...


def job_id(key: bytes) -> str:
    """The id of the job with this key: `j-4k7mw2qx`."""
    number = int.from_bytes(key[:5], "little")
    letters: List[str] = []
    for _ in range(ID_LENGTH):
        number, rest = divmod(number, len(ID_LETTERS))
        letters.append(ID_LETTERS[rest])
    return ID_PREFIX + "".join(letters)


def typed_job_id(text: Any) -> str:
    """A job's id, or the beginning of one, as the mesh writes it: what people type may be in capitals, or lack the prefix.

    Raises:
        TypeError: It is no text.
        ValueError: It cannot be an id.
    """
    if not isinstance(text, str):
        raise TypeError(f"a job's id is text such as 'j-4k7mw2qx', not {text!r}")
    letters = text.strip().lower()
    if letters.startswith(ID_PREFIX):
        letters = letters[len(ID_PREFIX) :]
    letters = letters.translate(_LOOKS_LIKE)
    if not LEAST_ID_LETTERS <= len(letters) <= ID_LENGTH or any(letter not in ID_LETTERS for letter in letters):
        raise ValueError(f"{text!r} is not a job's id; they look like 'j-4k7mw2qx', and `gpumesh jobs` lists them")
    return ID_PREFIX + letters


def job_from_wire(fields: Any) -> JobSpec:
    """Rebuild a job from the plain tuple that travelled.

    Raises:
        ValueError: Not the shape of a job.
    """
    try:
        job = JobSpec(*leading(fields, JobSpec))  # A newer peer may tell more.
        job = job._replace(variants=tuple(spec_from_wire(spec) for spec in job.variants))
    except TypeError as error:
        raise ValueError(f"this is not a job: {error}") from None
    if not (isinstance(job.key, bytes) and len(job.key) == KEY_BYTES and job.job == job_id(job.key)):
        raise ValueError(f"a job has a key of {KEY_BYTES} bytes and the id that follows from it")
    if not all(isinstance(text, str) for text in (job.name, job.script, job.client)):
        raise ValueError("the names of a job are text")
    if isinstance(job.count, bool) or not isinstance(job.count, int) or not 0 <= job.count < SEQUENCE_LIMIT:
        raise ValueError(f"a job has 0 or more tasks, not {job.count!r}")
    if len(job.variants) > MAX_JOB_VARIANTS:
        raise ValueError(f"a job has up to {MAX_JOB_VARIANTS} variants of its tasks, not {len(job.variants)}")
    if not job.variants and job.count:
        raise ValueError("a job with tasks has at least one variant of them")
    for spec in job.variants:
        if not (spec.script and spec.code):
            raise ValueError("a task of a job names a script and the folder that it is in")
    return job
