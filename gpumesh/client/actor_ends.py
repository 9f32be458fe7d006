"""How the death of an actor reads to those who call it: what the coordinator tells of it to one exception."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict

from gpumesh.client.outcomes import exception_for, how_it_ended, last_lines
from gpumesh.errors import ActorDiedError
from gpumesh.model.actors import show_actor
from gpumesh.model.ids import TaskId, show_task
from gpumesh.model.outcomes import Status

if TYPE_CHECKING:
    from gpumesh.client.actor_contacts import Contact

_RAISED = frozenset({Status.RAISED, Status.RETRYABLE, Status.OUT_OF_MEMORY})


def details_of(contact: Contact, status: int, payload: Any, worker: str) -> Dict[str, Any]:
    """What later calls of an actor fail with, as Status.ACTOR_DIED has it.

    Args:
        status: How its creation has ended, or ACTOR_DIED of a call.
        payload: What came with that.
        worker: Where it was.
    """
    if status == Status.ACTOR_DIED:
        return dict(payload)
    where = f" on {worker}" if worker else ""
    details: Dict[str, Any] = {"actor": contact.actor, "name": contact.shape.name, "worker": worker, "is_gone": True}
    told = dict(payload) if isinstance(payload, dict) else {}
    if status in _RAISED:
        details["reason"] = f"actor {contact.shown} has no instance: its constructor failed{where}"
        details["cause"] = payload
    elif status == Status.OK:
        details["reason"] = f"actor {contact.shown} has ended itself{where}"
    elif status == Status.CANCELLED:
        details["reason"] = str(told.get("reason") or f"actor {contact.shown} was killed")
    else:
        cause = exception_for(status, payload, name=contact.shape.class_name, task_id=contact.actor, worker=worker)
        details["reason"] = str(told.get("actor_reason") or f"actor {contact.shown} is gone: {cause}")
        details["cause"] = cause
    return details


def error_of_death(details: Dict[str, Any], *, name: str, task_id: int) -> ActorDiedError:
    """The exception of a call that its actor's death has ended.

    Args:
        details: What came with Status.ACTOR_DIED.
        name: The call's.
        task_id: 0: it was not sent.
    """
    ident = details.get("actor")
    is_gone = bool(details.get("is_gone", True))
    reason = str(details.get("reason") or f"actor {show_actor(ident) if type(ident) is int else ''} is gone")
    call = f"{name} ({show_task(TaskId(task_id))})" if task_id else name
    text = f"{call} has no result: {reason}"
    if "exit" in details:
        text += f"; its process {how_it_ended(details, '')}"
    if is_gone:
        text += "; create another one with .remote(...)"
    else:
        text += "; call it again, or let such calls be repeated with .options(retries=...)"
    tail = last_lines(details.get("stderr"))
    if tail:
        text += f"; its last lines on stderr:\n{tail}"
    error = ActorDiedError(text)
    error.actor_id = show_actor(ident) if type(ident) is int else ""
    error.reason = reason
    error.worker = str(details.get("worker") or "")
    error.is_gone = is_gone
    cause = details.get("cause")
    if isinstance(cause, BaseException):
        error.__cause__ = cause
    elif cause is not None:
        from gpumesh.serialization.exceptions import load_exception

        error.__cause__ = load_exception(cause)
        error.args = (f"{text}; the constructor's exception is the cause: {_told(error.__cause__)}",)
    return error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
