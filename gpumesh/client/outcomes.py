"""How the end of a task reads to the person who called it: status and details to one exception."""

from __future__ import annotations

import signal
from typing import Any, Dict, List

from gpumesh.errors import (
    MeshError,
    NoSuitableWorkerError,
    ObjectLostError,
    ObjectStoreFullError,
    SerializationError,
    TaskCancelledError,
    TaskTimeoutError,
    VersionMismatchError,
    WorkerCrashedError,
)
from gpumesh.model.ids import TaskId, show_task
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import show_bytes

_SHOWN_STDERR_LINES = 5
_SHOWN_ATTEMPTS = 8  # In the text; the error's `attempts` has them all.
_ABOUT_ATTEMPT = ("worker", "exit", "reason", "stderr", "pid", "memory_bytes", "memory_limit_bytes", "out_of_memory")


class SecondRunError(Exception):
    """The task that was to make a lost value again has failed with `error`, which is how the value's own task ends then."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def exception_for(status: int, payload: Any, *, name: str, task_id: int, worker: str) -> BaseException:
    """The exception that a task which did not end well raises in its caller.

    Args:
        status: A `Status` other than OK.
        payload: What came with it: the exception's payload, a dict of details, or the exception itself.
        name: The function's name.
        task_id: The task.
        worker: Where the last attempt ran, "" when nowhere.
    """
    if isinstance(payload, BaseException):
        return payload
    if status in (Status.RAISED, Status.RETRYABLE, Status.OUT_OF_MEMORY):
        from gpumesh.serialization.exceptions import load_exception

        error = load_exception(payload)
        if isinstance(error, SerializationError) and error.package:
            from gpumesh.client.versions import tell_of_task

            tell_of_task(error, worker)
        return error
    details: Dict[str, Any] = dict(payload) if isinstance(payload, dict) else {}
    where = str(details.get("worker") or worker)
    task = f"task {show_task(TaskId(task_id))} ({name})" if name else f"task {show_task(TaskId(task_id))}"
    reason = str(details.get("reason") or "")
    if status == Status.ACTOR_DIED:
        from gpumesh.client.actor_ends import error_of_death

        return error_of_death(details, name=name, task_id=task_id)
    if status in (Status.CRASHED, Status.LOST):
        return _crash(status, details, task=task, where=where, reason=reason)
    if status == Status.HANDED_BACK:
        error = WorkerCrashedError(
            f"{task} had started{_on(where)} and was ended, because the machine's owner wants it back; with retries=0 it does not start again"
        )
        error.attempts = [{"worker": where, "reason": reason}]
        return error
    if status == Status.TIMED_OUT:
        limit = details.get("seconds")
        ran = (
            f"ran longer than its limit of {limit:g} s"
            if isinstance(limit, (int, float)) and limit
            else "ran longer than its limit"
        )
        return TaskTimeoutError(f"{task} {ran}{_on(where)} and was ended; give it more with options(timeout=...)")
    if status == Status.CANCELLED:
        return TaskCancelledError(f"{task} was cancelled{': ' + reason if reason else ''}")
    if status == Status.INFEASIBLE and details.get("cause") == "version":
        return VersionMismatchError(reason)
    if status == Status.INFEASIBLE:
        return NoSuitableWorkerError(
            reason or f"{task} requires what no worker has; ask for less, or join a machine that has it"
        )
    kind, _, told = reason.partition(": ")
    if kind == "lost":
        return ObjectLostError(f"{task} needs what is gone: {told}")
    if kind == "full":
        return ObjectStoreFullError(f"{task}: {told}")
    return MeshError(f"{task} was refused by the coordinator: {reason or 'no reason given'}")


def _crash(status: int, details: Dict[str, Any], *, task: str, where: str, reason: str) -> WorkerCrashedError:
    attempts = details.get("attempts")
    tries: List[Dict[str, Any]] = []
    if isinstance(attempts, (list, tuple)):
        tries = [dict(attempt) for attempt in attempts if isinstance(attempt, dict)]
    if not tries:
        tries = [{key: details[key] for key in _ABOUT_ATTEMPT if key in details}]
        tries[0].setdefault("worker", where)
        tries[0]["status"] = int(status)
    details = {**tries[-1], **details}  # Of a task whose worker was lost as well, only the attempts know how the process died.
    if status == Status.LOST:
        what = f"{task} lost its worker{' ' + where if where else ''}"
        what += f" ({reason})" if reason else ""
    else:
        what = f"{task} died{_on(where)}: the process {how_it_ended(details, reason)}"
    if details.get("out_of_memory"):
        what += "; a task that needs much gets a machine that has it with options(memory=...)"
    tail = last_lines(details.get("stderr"))
    if tail:
        what += "; its last lines on stderr:\n" + tail
    if len(tries) > 1:
        left_out = tries[0].get("left_out")
        count = len(tries) + (left_out if isinstance(left_out, int) else 0)
        what += f"\n{count} attempts failed:"
        shown = tries if len(tries) <= _SHOWN_ATTEMPTS else tries[-_SHOWN_ATTEMPTS:]
        if len(shown) < count:
            what += f"\n  ... {count - len(shown)} more"
        for attempt in shown:
            what += f"\n  {_attempt(attempt)}"
    error = WorkerCrashedError(what)
    error.attempts = tries
    return error


def _attempt(attempt: Dict[str, Any]) -> str:
    """One line: where it was, and how it failed."""
    where = str(attempt.get("worker") or "a worker")
    reason = str(attempt.get("reason") or "")
    status = attempt.get("status")
    if status == Status.LOST:
        return f"{where}: the worker was lost{f' ({reason})' if reason else ''}"
    if status == Status.OUT_OF_MEMORY:
        return f"{where}: the memory of its GPU did not suffice"
    if status == Status.RETRYABLE:
        return f"{where}: it raised an exception that retry_on names"
    return f"{where}: the process {how_it_ended(attempt, reason)}"


def how_it_ended(details: Dict[str, Any], reason: str) -> str:
    """Of a process: `was killed by SIGKILL, by the system for lack of memory; it had reached 3.1 GB of 4 GB`."""
    code = details.get("exit")
    words = _ended(code, reason)
    peak, limit = (details.get(name) for name in ("memory_bytes", "memory_limit_bytes"))
    reached = ""
    if isinstance(peak, (int, float)) and peak > 0:
        reached = f"it had reached {show_bytes(peak)}"
        reached += f" of {show_bytes(limit)}" if isinstance(limit, (int, float)) and limit > 0 else " of memory"
    if code == -signal.SIGKILL and not reason:
        is_out = details.get("out_of_memory")
        if is_out:
            words += ", by the system for lack of memory"
        elif is_out is None:
            words += "; probably out of memory, if nobody killed it by hand"
        else:
            words += ", and not by the system for lack of memory"
    return f"{words}; {reached}" if reached else words


def _ended(code: Any, reason: str) -> str:
    """`exited with code 3`, `was killed by SIGKILL`, and the reason if one is known."""
    told = f" ({reason})" if reason else ""
    if not isinstance(code, int):
        return "ended" + told
    if code >= 0:
        return f"exited with code {code}{told}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{told}"


def _on(where: str) -> str:
    return f" on {where}" if where else ""


def last_lines(stderr: Any) -> str:
    """The last of what a process has written, indented; "" where that is nothing."""
    if isinstance(stderr, bytes):
        stderr = stderr.decode("utf-8", "replace")
    if isinstance(stderr, (list, tuple)):
        lines = [str(line) for line in stderr]
    elif isinstance(stderr, str):
        lines = stderr.splitlines()
    else:
        return ""
    return "\n".join(f"  {line}" for line in lines[-_SHOWN_STDERR_LINES:] if line.strip())
