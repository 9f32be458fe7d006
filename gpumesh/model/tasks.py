"""What is the same for all calls of one function with one set of options."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpumesh.model.resources import ANYTHING, Requirement


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


def spec_from_wire(fields: Any) -> TaskSpec:
    """Rebuild a spec from the plain tuple that travelled.

    Raises:
        ValueError: Not the shape of a spec.
    """
    try:
        spec = TaskSpec(*fields)
        need = Requirement(*spec.requirement)
        spec = spec._replace(requirement=need._replace(tags=tuple((str(n), str(v)) for n, v in need.tags)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"this is not a task spec: {error}") from None
    if not (isinstance(spec.function, bytes) and isinstance(spec.name, str) and isinstance(spec.retries, int)):
        raise ValueError("a task spec starts with a digest and a name")
    if not all(isinstance(value, (int, float)) for value in (spec.timeout, spec.priority, spec.cost, spec.placement_timeout)):
        raise ValueError("timeout, priority, cost and placement_timeout of a task spec are numbers")
    return spec
