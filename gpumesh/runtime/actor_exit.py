"""How an actor ends itself from inside one of its methods."""

from __future__ import annotations

from typing import NoReturn

from gpumesh.errors import MeshError

is_actor = False  # Whether this process is one: its main says so.


class ActorExit(BaseException):
    """Goes through the method's own handlers of `Exception` up to the process, which ends."""


def exit_actor() -> NoReturn:
    """End the actor that this method belongs to: this call returns None, no further call begins, and calls that wait raise ActorDiedError.

    Raises:
        MeshError: This is no process of an actor.
    """
    if not is_actor:
        raise MeshError("exit_actor() ends the actor whose method calls it, and this process holds none")
    raise ActorExit
