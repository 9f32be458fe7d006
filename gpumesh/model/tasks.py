"""What is the same for all calls of one function with one set of options."""

from __future__ import annotations

from math import isfinite
from typing import Any, Optional, Tuple

from gpumesh.config import MAX_NESTING_DEPTH
from gpumesh.model.actors import ActorPlan, plan_from_wire
from gpumesh.model.ids import SEQUENCE_BITS
from gpumesh.model.records import NamedTuple, leading
from gpumesh.model.resources import ANYTHING, Requirement, requirement_from_wire

DIGEST_BYTES = 16


class TaskSpec(NamedTuple):
    """One function with one set of options; many tasks share one spec.

    A client numbers its specs and defines each once per connection; the coordinator does the same towards each worker.
    """

    function: bytes  # 16-byte digest of the function's body.
    name: str  # For people: "train".
    requirement: Requirement = ANYTHING
    timeout: float = 0.0  # Seconds of run time; 0: none.
    retries: int = 3  # Lost processes and machines (and exceptions named by retry_on); 0: at most once.
    priority: int = 0  # Higher first.
    cost: float = 0.0  # Relative length if the user knows it; 0: unknown.
    idempotent: bool = False  # May run twice at the same time.
    placement_timeout: float = 60.0  # Seconds an infeasible task waits for a fitting worker; < 0: for ever.
    code: bytes = b""  # 16-byte digest of the modules that travel with it; b"": none do.
    packages: Tuple[str, ...] = ()  # Sorted requirements ("scikit-learn==1.5.*") of the environment it runs in.
    place: bool = True  # Move torch modules and tensors among its arguments to its device, and those of its result to the CPU.
    script: str = ""  # Path of a script in the folder that `code` is; its payload and result are bytes of JSON. "": a function.
    backoff: float = 0.0  # Seconds after a failed attempt until the next, doubled after each further one; 0: at once.
    plan: Optional[ActorPlan] = (
        None  # Its task is the life of an actor, of which the function is the class. None: it is no creation.
    )
    actor: int = 0  # Its tasks are calls of this actor; 0: they are no calls.
    method: str = ""  # Of a call.
    is_stream: bool = False  # Its function is a generator, whose values go to the client one by one.
    depth: int = 0  # Tasks that this one was submitted inside of, one in the other; 0: it comes from a client's program.


def spec_from_wire(fields: Any) -> TaskSpec:
    """Rebuild a spec from the plain tuple that travelled.

    Raises:
        ValueError: Not the shape of a spec.
    """
    try:
        spec = TaskSpec(*leading(fields, TaskSpec))  # A newer peer may tell more.
        spec = spec._replace(
            requirement=requirement_from_wire(spec.requirement),
            idempotent=bool(spec.idempotent),
            place=bool(spec.place),
            is_stream=bool(spec.is_stream),
            plan=None if spec.plan is None else plan_from_wire(spec.plan),
            packages=tuple(str(package) for package in spec.packages),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"this is not a task spec: {error}") from None
    if not (isinstance(spec.function, bytes) and len(spec.function) == DIGEST_BYTES and isinstance(spec.name, str)):
        raise ValueError(f"a task spec starts with a digest of {DIGEST_BYTES} bytes and a name")
    if not (isinstance(spec.code, bytes) and len(spec.code) in (0, DIGEST_BYTES)):
        raise ValueError(f"the code of a task spec is a digest of {DIGEST_BYTES} bytes")
    for name in ("timeout", "retries", "priority", "cost", "placement_timeout", "backoff"):
        value = getattr(spec, name)
        if not isinstance(value, (int, float)) or not isfinite(value):
            raise ValueError(f"{name} of a task spec must be a finite number, not {value!r}")
    if not isinstance(spec.script, str) or (spec.script and not (spec.code and _stays_inside(spec.script))):
        raise ValueError(f"script of a task spec must be a path in the folder that is its code, not {spec.script!r:.200}")
    if type(spec.actor) is not int or not 0 <= spec.actor >> SEQUENCE_BITS < 1 << 31 or not isinstance(spec.method, str):
        raise ValueError("the actor of a task spec is an id, and its method a name")
    if spec.actor and (spec.plan is not None or spec.script):
        raise ValueError("a call of an actor is neither a creation nor a script")
    if type(spec.depth) is not int or not 0 <= spec.depth <= MAX_NESTING_DEPTH:
        raise ValueError(f"depth of a task spec must be from 0 to {MAX_NESTING_DEPTH}, not {spec.depth!r:.200}")
    if spec.backoff < 0:
        raise ValueError(f"backoff of a task spec must not be negative, but is {spec.backoff!r}")
    return spec


def _stays_inside(path: str) -> bool:
    parts = path.split("/")
    return not ({"", ".", ".."}.intersection(parts) or "\\" in path or "\0" in path or ":" in parts[0])
