"""What is said of an actor when it is created, and of a call when it is made."""

from __future__ import annotations

from math import isfinite
from typing import Any

from gpumesh.model.ids import SEQUENCE_BITS, SEQUENCE_LIMIT
from gpumesh.model.records import NamedTuple, leading

PLACEMENTS = ("", "spread", "pack")
NAME_CHARACTERS = 200  # Of an actor's name and of its group's, at most.
CONCURRENCY_LIMIT = 1000  # Threads of one actor, at most.

ACTORS_CLIENT = (1 << 31) - 1
"""The coordinator's own client number, for the actors that outlive their clients."""


class ActorPlan(NamedTuple):
    """How an actor lives. Its creation is a task that ends when the actor does; the id of that task is the actor's id.

    `TaskSpec.retries` of the creation is how often the actor may be restarted.
    """

    token: int = 0  # Object that all handles refer to: when nobody refers to it, the actor ends. 0: it outlives all handles.
    name: str = ""  # By which others find it; "": they cannot.
    is_detached: bool = False  # It outlives its client.
    max_concurrency: int = 1  # Calls of methods that are not `async def`, at the same time.
    restart_seconds: float = 0.0  # Its restarts count within so many seconds; 0: for its whole life.
    group: str = ""  # Actors of one group are placed with regard to each other.
    placement: str = ""  # "spread" or "pack" them, "": each where there is most room.
    description: bytes = b""  # For handles that others make: which methods it has. Opaque.


def plan_from_wire(fields: Any) -> ActorPlan:
    """Rebuild a plan from the plain tuple that travelled.

    Raises:
        ValueError: Not the shape of a plan.
    """
    try:
        plan = ActorPlan(*leading(fields, ActorPlan))  # A newer peer may tell more.
        plan = plan._replace(is_detached=bool(plan.is_detached))
    except (TypeError, ValueError) as error:
        raise ValueError(f"this is not the plan of an actor: {error}") from None
    for name in ("name", "group"):
        value = getattr(plan, name)
        if not isinstance(value, str) or len(value) > NAME_CHARACTERS:
            raise ValueError(f"{name} of an actor must be a text of at most {NAME_CHARACTERS} characters, not {value!r:.300}")
    if plan.placement not in PLACEMENTS:
        raise ValueError(f"placement of an actor must be one of {PLACEMENTS}, not {plan.placement!r:.200}")
    if type(plan.token) is not int or not 0 <= plan.token < 1 << 63:
        raise ValueError(f"token of an actor must be the id of an object, not {plan.token!r:.200}")
    if type(plan.max_concurrency) is not int or not 1 <= plan.max_concurrency <= CONCURRENCY_LIMIT:
        raise ValueError(
            f"max_concurrency of an actor must be from 1 to {CONCURRENCY_LIMIT}, not {plan.max_concurrency!r:.200}"
        )
    if not isinstance(plan.restart_seconds, (int, float)) or not isfinite(plan.restart_seconds) or plan.restart_seconds < 0:
        raise ValueError(f"restart_seconds of an actor must be a number from 0, not {plan.restart_seconds!r:.200}")
    if not isinstance(plan.description, bytes):
        raise ValueError("description of an actor must be bytes")
    return plan


def show_actor(actor: int) -> str:
    """The form people read and type: `a-1a2b3c4d-17`."""
    return f"a-{actor >> SEQUENCE_BITS:08x}-{actor & (SEQUENCE_LIMIT - 1)}"


def read_actor(text: str) -> int:
    """The id that `show_actor` shows; 0 when the text is none."""
    parts = text.split("-")
    if len(parts) != 3 or parts[0] != "a":
        return 0
    try:
        return (int(parts[1], 16) << SEQUENCE_BITS) | int(parts[2])
    except ValueError:
        return 0
