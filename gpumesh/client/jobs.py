"""Script jobs at the client: payloads to JSON, orders and questions to the coordinator, asked again when it was lost. Packs no scripts.

Everything said to the coordinator is an order or question that may be repeated: a job is known by the key that was drawn for it.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from gpumesh.client.channel import LOST, Channel, Question
from gpumesh.client.options import make_options
from gpumesh.config import (
    INLINE_VALUE_BYTES,
    JOB_PART_BYTES,
    JOB_PART_TASKS,
    JOB_PARTS_AHEAD,
    JOB_WAIT_SECONDS,
    MAX_JOB_PAYLOAD_BYTES,
    MAX_JOB_VARIANTS,
)
from gpumesh.errors import JournalError, MeshError, MeshUnavailableError, UnknownJobError
from gpumesh.model.jobs import KEY_BYTES, JobSpec, job_id, typed_job_id
from gpumesh.model.payloads import OutOfBand
from gpumesh.model.resources import make_requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import ChangeJob, JobPayloads, Query, SubmitJob

if TYPE_CHECKING:
    from gpumesh.client.options import Options
    from gpumesh.client.scripts import PackedScript

ANSWER_SECONDS = 60.0  # For an order to be on disk, which may be slow, or busy with other jobs.
STEERING = ("cost", "gpu", "gpu_memory_mb", "cpu_cores")
NOT_OPTIONS = frozenset({"retry_on", "device", "place", "name", "idempotent"})  # Of functions only.
MB = 10**6

Payload = Tuple[int, Any]
"""Variant and JSON, as it travels."""


class _Again(Exception):
    """The coordinator was lost: everything from the beginning."""


class _Taken(Exception):
    """Another job has the id that was drawn."""


class JobClient:
    """See `GPUMesh.submit` and its neighbours.

    Args:
        channel: The connection to the coordinator; made anew where it has ended.
        name: Who submits, for people.
    """

    def __init__(self, channel: Callable[[], Channel], name: str) -> None:
        self._channel = channel
        self._name = name

    # --- submitting

    def submit(
        self, script: Any, payloads: Sequence[Mapping[str, Any]], name: Optional[str], options: Mapping[str, Any]
    ) -> str:
        """See `GPUMesh.submit`."""
        from gpumesh.client.scripts import pack_script

        if name is not None and not isinstance(name, str):
            raise TypeError(f"name={name!r} must be text")
        base = _job_options(options)
        plan = _Plan(base)
        ready = plan.encode(payloads)
        packed = pack_script(script)
        variants = plan.specs(packed)
        while True:
            key = os.urandom(KEY_BYTES)
            spec = JobSpec(job_id(key), key, name or packed.name, packed.path, variants, len(ready), self._name or _me())
            try:
                self._submit(spec, packed, ready)
            except _Taken:
                continue
            return spec.job

    def _submit(self, spec: JobSpec, packed: PackedScript, ready: List[Payload]) -> None:
        while True:
            channel = self._channel()
            channel.await_link(None)
            try:
                self._submit_once(channel, spec, packed, ready)
            except _Again:
                continue
            return

    def _submit_once(self, channel: Channel, spec: JobSpec, packed: PackedScript, ready: List[Payload]) -> None:
        """Over one connection.

        Raises:
            _Again: It was lost.
        """
        waiting: Deque[Tuple[int, Question]] = deque()
        try:
            fields = (*spec[:4], tuple(tuple(variant) for variant in spec.variants), *spec[5:])
            waiting.append(channel.put(lambda number: SubmitJob(number, fields), cargo=packed.cargo))
            first = 0
            for part in _parts(ready):
                while len(waiting) > JOB_PARTS_AHEAD:
                    if self._answer(channel, waiting.popleft())["accepted"]:
                        return
                waiting.append(channel.put(lambda number, at=first, part=part: JobPayloads(number, spec.job, at, part)))  # type: ignore[misc]
                first += len(part)
                if any(
                    type(payload) is not bytes for _, payload in part
                ):  # It travels in the lane for bulk: nothing may overtake it.
                    while waiting:
                        if self._answer(channel, waiting.popleft())["accepted"]:
                            return
            while waiting:
                if self._answer(channel, waiting.popleft())["accepted"]:
                    return
        finally:
            for number, _ in waiting:
                channel.forget(number)
        raise MeshError(f"the coordinator has all of job {spec.job} and has not accepted it")

    @staticmethod
    def _answer(channel: Channel, asked: Tuple[int, Question], timeout: float = ANSWER_SECONDS) -> Any:
        number, question = asked
        try:
            is_answered = channel.drive_until(question.answered, question.condition, timeout)
        finally:
            channel.forget(number)
        if not is_answered:
            raise MeshUnavailableError(
                f"the coordinator at {channel.address} did not answer within {timeout:g} s; its disk may be too slow, or the connection"
            )
        error = question.error
        if error is None:
            return question.value
        if question.kind in (LOST, "again"):
            raise _Again
        if question.kind == "taken":
            raise _Taken
        raise _ERRORS.get(question.kind, MeshError)(str(error)) if type(error) is MeshError else error

    # --- orders and questions

    def _ask(self, make: Callable[[int], Any], timeout: float = ANSWER_SECONDS) -> Any:
        """The answer to an order or question; again, as often as the coordinator is lost meanwhile."""
        while True:
            channel = self._channel()
            channel.await_link(None)
            try:
                return self._answer(channel, channel.put(make), timeout)
            except _Again:
                continue

    def _query(self, what: str, **arguments: Any) -> Any:
        return self._ask(lambda number: Query(number, what, arguments), ANSWER_SECONDS + JOB_WAIT_SECONDS)

    def status(self, job: str, *, tasks: bool) -> Dict[str, Any]:
        """See `GPUMesh.status`."""
        ident = _checked(job)
        found = _shown(self._query("job", job=ident))
        if tasks:
            found["tasks"] = self._tasks(found["id"])
        return found

    def _tasks(self, job: str) -> List[Dict[str, Any]]:
        rows: List[Dict[str, Any]] = []
        first = 0
        while first >= 0:
            page = self._query("job-tasks", job=job, first=first)
            rows.extend(_task(row) for row in page["tasks"])
            first = page["next"]
        return rows

    def wait(
        self, job: str, timeout: Optional[float], on_progress: Optional[Callable[[Dict[str, Any]], None]], *, tasks: bool
    ) -> Dict[str, Any]:
        """See `GPUMesh.wait`."""
        ident = _checked(job)
        deadline = None if timeout is None else time.monotonic() + timeout
        seen = 0
        last: Optional[Dict[str, Any]] = None
        while True:
            view = self._news(ident, seen, deadline)
            if view is None:
                raise TimeoutError(f"job {job} has not finished within {timeout:g} s; it goes on")
            seen = view["version"]
            shown = _shown(view)
            if shown != last:  # Versions alone do not tell: another coordinator counts its own.
                last = shown
                if on_progress is not None:
                    on_progress(_shown(view))
            if view["finished"]:
                return self.status(ident, tasks=tasks)

    def _news(self, job: str, seen: int, deadline: Optional[float]) -> Optional[Dict[str, Any]]:
        """How the job is, as soon as that is something else than was seen; None when it is too late."""
        while True:
            left = JOB_WAIT_SECONDS + ANSWER_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return None
            channel = self._channel()
            channel.await_link(deadline)
            arguments = {"job": job, "seen": seen}
            asked = channel.put(lambda number, arguments=arguments: Query(number, "job-wait", arguments))  # type: ignore[misc]
            try:
                view: Dict[str, Any] = self._answer(channel, asked, min(left, JOB_WAIT_SECONDS + ANSWER_SECONDS))
            except _Again:
                seen = 0
                continue
            except MeshUnavailableError:
                if asked[1].error is None and deadline is not None and time.monotonic() >= deadline:
                    return None
                raise
            return view

    def change(self, job: str, what: str) -> int:
        """Give an order about a job: "cancel", "kill", "retry"; returns how many tasks it concerned."""
        ident = _checked(job)
        count: int = self._ask(lambda number: ChangeJob(number, ident, what))["count"]
        return count

    def jobs(self) -> List[Dict[str, Any]]:
        """See `GPUMesh.jobs`."""
        return [_shown(view) for view in self._query("jobs")]

    def logs(self, job: str, task: Optional[int], since: int) -> List[Dict[str, Any]]:
        """See `GPUMesh.logs`."""
        parts = self._query("job-logs", job=_checked(job), task=task, since=since)
        return [
            {
                "number": number,
                "task": place,
                "attempt": attempt,
                "stream": "err" if stream == 2 else "out",
                "text": bytes(data).decode("utf-8", "replace"),
            }
            for number, place, attempt, stream, data in parts
        ]


_ERRORS: Dict[str, Any] = {"unknown": UnknownJobError, "value": ValueError, "journal": JournalError}


def _me() -> str:
    from gpumesh.client.session import client_name

    return client_name()


def _checked(job: Any) -> str:
    try:
        return typed_job_id(job)
    except ValueError as error:
        raise UnknownJobError(str(error)) from None


def _shown(view: Mapping[str, Any]) -> Dict[str, Any]:
    """What came over the wire, as people get it."""
    shown = {**view, "counts": dict(view["counts"]), "notices": list(view["notices"])}
    shown.pop("version", None)
    return shown


def _task(row: Mapping[str, Any]) -> Dict[str, Any]:
    return {
        **row,
        "payload": _loaded(row["payload"]),
        "result": _loaded(row["result"]),
        "attempts": [dict(attempt) for attempt in row["attempts"]],
    }


def _loaded(data: Any) -> Any:
    if data is None:
        return None
    return json.loads(bytes(data.parts[0]) if isinstance(data, OutOfBand) else data)


# --- payloads


def _job_options(given: Mapping[str, Any]) -> Options:
    wrong = sorted(NOT_OPTIONS.intersection(given))
    if wrong:
        raise TypeError(f"a job has no option {wrong[0]!r}: that is for functions")
    return make_options({"placement_timeout": None, **given})


def _parts(ready: List[Payload]) -> Iterator[List[Payload]]:
    """Payloads in portions of bounded size."""
    first = size = 0
    for position, (_, payload) in enumerate(ready):
        own = len(payload) if type(payload) is bytes else payload.nbytes
        if position > first and (position - first >= JOB_PART_TASKS or size + own > JOB_PART_BYTES):
            yield ready[first:position]
            first, size = position, 0
        size += own
    if first < len(ready):
        yield ready[first:]


class _Plan:
    """Payloads as JSON, and what they ask of the machines that run them."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._variants: Dict[Tuple[Any, ...], int] = {}

    def encode(self, payloads: Any) -> List[Payload]:
        """Each payload with its variant.

        Raises:
            TypeError, ValueError: Something is wrong with one; the message names it.
        """
        if not isinstance(payloads, (list, tuple)):
            raise TypeError(f"payloads must be a list of dicts, one for each task, not {type(payloads).__name__}")
        dumps = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
        variants = self._variants
        ready: List[Payload] = []
        for position, payload in enumerate(payloads):
            if not isinstance(payload, dict):
                raise TypeError(
                    f"payloads[{position}] must be a dict (a JSON object), not {type(payload).__name__}: {payload!r:.80}"
                )
            try:
                data = dumps(payload).encode()
            except (TypeError, ValueError, RecursionError) as error:
                raise _not_json(payload, f"payloads[{position}]", error) from None
            if len(data) > MAX_JOB_PAYLOAD_BYTES:
                raise ValueError(
                    f"payloads[{position}] is {len(data) / MB:.1f} MB of JSON, over the limit of {MAX_JOB_PAYLOAD_BYTES / MB:.1f} MB; "
                    "put the data into a file, and its path into the payload"
                )
            key = _steering(payload, position)
            variant = variants.get(key)
            if variant is None:
                self._check(key, position)
                variant = variants[key] = len(variants)
                if variant >= MAX_JOB_VARIANTS:
                    raise ValueError(
                        f"the payloads ask for more than {MAX_JOB_VARIANTS} different combinations of {', '.join(STEERING)}; "
                        "round them, or submit several jobs"
                    )
            ready.append((variant, data if len(data) <= INLINE_VALUE_BYTES else OutOfBand([data])))
        return ready

    def specs(self, packed: PackedScript) -> Tuple[TaskSpec, ...]:
        """One spec for each variant."""
        return tuple(self._spec(key, packed) for key in self._variants)

    def _check(self, key: Tuple[Any, ...], position: int) -> None:
        try:
            self._with(key)
        except (TypeError, ValueError) as error:
            raise type(error)(f"payloads[{position}]: {error}") from None

    def _with(self, key: Tuple[Any, ...]) -> Options:
        """The job's options with those of one payload."""
        cost, gpu, megabytes, cores = key
        given: Dict[str, Any] = {}
        if cost is not None:
            given["cost"] = cost
        if gpu is not None:
            given["gpu"] = gpu
        if cores is not None:
            given["cores"] = cores
        options = make_options(given, base=self._options)
        if megabytes:
            if gpu is not None and not gpu:
                raise ValueError(f"gpu_memory_mb={megabytes!r} asks for memory of a GPU, and gpu={gpu!r} for none")
            if not options.gpu:
                options = options._replace(gpu="gpu")
        return options

    def _spec(self, key: Tuple[Any, ...], packed: PackedScript) -> TaskSpec:
        megabytes = key[2]
        options = self._with(key)
        spec = options._replace(name=None).spec(function=packed.function, name=packed.name, python="")
        need = spec.requirement
        if megabytes:
            asked = make_requirement(gpu=options.gpu, memory=int(megabytes * MB))
            need = need._replace(gpu_memory=asked.gpu_memory, gpus=asked.gpus)
        return spec._replace(requirement=need, code=packed.code, script=packed.script, place=False)


def _steering(payload: Mapping[str, Any], position: int) -> Tuple[Any, ...]:
    """What a payload asks for; None where it says nothing."""
    cost, gpu, megabytes, cores = (payload.get(name) for name in STEERING)
    if cost is not None:
        if isinstance(cost, bool) or not isinstance(cost, (int, float)) or not 0 < cost < 1e300:
            raise ValueError(f"payloads[{position}]['cost'] must be a number above 0, not {cost!r}")
        cost = float(f"{cost:.2g}")  # So many different costs are enough to know which tasks are long.
    if megabytes is not None and (
        isinstance(megabytes, bool) or not isinstance(megabytes, (int, float)) or not 0 <= megabytes < 1e9
    ):
        raise ValueError(f"payloads[{position}]['gpu_memory_mb'] must be a number of megabytes, not {megabytes!r}")
    if gpu is not None and not isinstance(gpu, (str, int, float, bool)):
        raise ValueError(f"payloads[{position}]['gpu'] must be a kind, a model or a number of GPUs, not {gpu!r}")
    if cores is not None and (isinstance(cores, bool) or not isinstance(cores, int)):
        raise ValueError(f"payloads[{position}]['cpu_cores'] must be a whole number, not {cores!r}")
    return cost, gpu, megabytes, cores


def _not_json(value: Any, path: str, error: BaseException) -> Exception:
    """The error that names the part of a payload that JSON cannot say."""
    found = _culprit(value, path, ())
    if found is None:
        return ValueError(f"{path} cannot be written as JSON: {error}")
    where, what = found
    return ValueError(
        f"{where} is {what}, which JSON cannot say; a payload is dicts, lists, text, numbers, True, False and None"
    )


def _culprit(value: Any, path: str, above: Tuple[int, ...]) -> Optional[Tuple[str, str]]:
    if isinstance(value, float) and value - value != 0:
        return path, repr(value)
    if value is None or isinstance(value, (str, int, float)):
        return None
    if id(value) in above:
        return path, "a container that holds itself"
    inside = (*above, id(value))
    if isinstance(value, dict):
        for key, part in value.items():
            if not (key is None or isinstance(key, (str, int, float))):
                return f"{path}, at its key {key!r:.60}", f"a key of type {type(key).__name__}"
            found = _culprit(part, f"{path}[{key!r}]", inside)
            if found is not None:
                return found
        return None
    if isinstance(value, (list, tuple)):
        for position, part in enumerate(value):
            found = _culprit(part, f"{path}[{position}]", inside)
            if found is not None:
                return found
        return None
    return path, f"of type {type(value).__name__} ({value!r:.60})"
