"""Orders and questions to the coordinator that may be repeated, and are when the connection was lost before the answer."""

from __future__ import annotations

from typing import Any, Callable, Dict, Sequence, Type

from gpumesh.client.channel import LOST, Channel
from gpumesh.errors import MeshError, MeshUnavailableError, UnknownActorError

ANSWER_SECONDS = 60.0  # For a coordinator that is busy with others.

_ERRORS: Dict[str, Type[Exception]] = {"unknown": UnknownActorError, "taken": ValueError, "value": ValueError}


def give_order(channel: Channel, make: Callable[[int], Any], *, cargo: Any = None, before: Sequence[Any] = ()) -> Any:
    """The answer to an order or question about actors; asked again as often as the coordinator is lost meanwhile.

    Args:
        channel: The connection.
        make: The message with this number.
        cargo: Modules that it refers to.
        before: Messages to send before it.

    Raises:
        UnknownActorError, ValueError: The coordinator's answer.
        MeshError: The connection is gone for good, or it does not answer.
    """
    while True:
        channel.await_link(None)
        number, question = channel.put(make, cargo=cargo, before=before)
        try:
            is_answered = channel.drive_until(question.answered, question.condition, ANSWER_SECONDS)
        finally:
            channel.forget(number)
        if not is_answered:
            raise MeshUnavailableError(f"the coordinator at {channel.address} did not answer within {ANSWER_SECONDS:g} s")
        error = question.error
        if error is None:
            return question.value
        if question.kind in (LOST, "again"):
            continue
        raise _ERRORS.get(question.kind, MeshError)(str(error)) if type(error) is MeshError else error
