"""How an attempt at a task can end."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Mapping

from gpumesh.model.resources import show_bytes


class Status(IntEnum):
    """The end of one attempt. On the wire the number; what travels with it differs by status.

    OK carries the value's payload, RAISED, RETRYABLE and OUT_OF_MEMORY the exception's payload (serialization.exceptions); the
    others a plain dict for people, as far as known: `reason`, `worker`, `seconds`; of a process that died `exit`, `stderr`, `pid`,
    `memory_bytes` (most that it had), and if it got SIGKILL `memory_limit_bytes` (that there are) and `out_of_memory` (whether the
    system killed it for that). Of a task that is a script, OK carries JSON, and RAISED such a dict.
    """

    OK = 0
    RAISED = 1  # The function raised.
    RETRYABLE = 2  # The function raised something that its `retry_on` names.
    CRASHED = 3  # The process that executed it died.
    TIMED_OUT = 4
    CANCELLED = 5
    NOT_RUN = 6  # Given back without having started: no strike.
    LOST = 7  # The worker is gone (only the scheduler says so).
    INFEASIBLE = 8  # No worker can ever run it (only the scheduler says so).
    REFUSED = 9  # The coordinator cannot take it: unknown spec, over a limit.
    INPUT_MISSING = 10  # The coordinator does not know a task among the inputs (any more): `input` says which; submit again.
    INPUT_FAILED = 11  # A task among the inputs has no result: `input` says which.
    HANDED_BACK = 12  # Had started, and was ended because the machine's owner wants it back: no strike.
    OUT_OF_MEMORY = 13  # RETRYABLE, because the memory of its GPU did not suffice: to be tried again on a larger one only.
    ACTOR_DIED = (
        14  # Of a call: its actor is gone, or was restarted (only the scheduler says so). `actor`, and `cause` if known.
    )


def failure_text(details: Mapping[str, Any]) -> str:
    """Why a task failed, from such a dict, for people: the reason, and what was last written to standard error."""
    text = str(details.get("reason") or "it failed for a reason that is not known")
    if details.get("out_of_memory"):
        text += ", by the system for lack of memory"
    memory, limit = details.get("memory_bytes"), details.get("memory_limit_bytes")
    if isinstance(memory, (int, float)) and memory > 0:
        text += f"; it had reached {show_bytes(memory)}"
        text += f" of {show_bytes(limit)}" if isinstance(limit, (int, float)) and limit > 0 else " of memory"
    said = str(details.get("stderr") or "").strip("\n")
    if not said:
        return text
    return f"{text}; its last lines on stderr:\n" + "\n".join(f"  {line}" for line in said.splitlines())
