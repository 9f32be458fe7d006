"""What a coordinator may tell a worker's agent, beyond the types of fields; one that has a defect ends a connection, not an agent."""

from __future__ import annotations

from typing import Any, Container, Tuple

from gpumesh.model.payloads import OutOfBand, is_payload
from gpumesh.model.resources import ANYTHING
from gpumesh.model.tasks import TaskSpec, spec_from_wire
from gpumesh.protocol.messages import DefineCode, DefineFunction, DefineSpec, RunTasks

_REQUIREMENT = TaskSpec._fields.index("requirement")
TO_BE_CHECKED = frozenset((DefineFunction, DefineCode, DefineSpec, RunTasks))


def wrong_with(message: Any, specs: Container[int]) -> str:
    """What is wrong with one of these; "" if nothing is.

    Args:
        specs: Numbers that were defined.
    """
    kind = type(message)
    if kind is RunTasks:
        if message.spec not in specs:
            return f"spec {message.spec} was not defined"
        if not all(type(task[2]) is bytes or is_payload(task[2]) for task in message.tasks):
            return "these are not the arguments of tasks"
    elif kind is DefineSpec:
        try:
            spec_from_wire(message.spec)
            hash(message.spec)  # It is known by its fields, also by those that a newer peer has added.
        except (TypeError, ValueError) as error:
            return str(error)
    else:
        body = message.body if kind is DefineFunction else message.archive
        if type(body) is not bytes and type(body) is not OutOfBand:
            return f"a {type(body).__name__} is no body of {kind.__name__}"
    return ""


def whole_spec(fields: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """The fields of a `TaskSpec` that nothing is wrong with; those that its sender does not tell have their defaults."""
    fields = (*fields, *TaskSpec(b"", "")[len(fields) :])
    requirement = fields[_REQUIREMENT]
    return (*fields[:_REQUIREMENT], (*requirement, *ANYTHING[len(requirement) :]), *fields[_REQUIREMENT + 1 :])
