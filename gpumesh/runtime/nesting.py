"""What a process that runs tasks says of them to the client inside it, and how that is told of their ends. Light: every runner loads it.

the process of a task                        gpumesh.client.nested, once user code asks for the mesh
mesh, running, call ── where, and for whom ──> session ── on_ended: what the task has submitted and has not ended goes
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Callable, List, Optional, Tuple

__all__ = ["Running", "call", "ended", "find", "mesh", "on_ended", "on_mentioned", "owner", "running"]


CLIENT = (
    "gpumesh.client.nested", "gpumesh.client.slots", "gpumesh.client.mesh", "gpumesh.client.accelerate", "gpumesh.client.streams",
    "gpumesh.client.inputs", "gpumesh.client.objects", "gpumesh.serialization.shipping",
)  # fmt: skip
"""Modules that a task imports with its first use of the mesh; named here, as nothing in this package depends on them."""


class Running:
    """A task, or a call of an actor, that is executed here: what is submitted meanwhile belongs to it.

    Args:
        task_id: Its id.
        name: Of its function, for people.
        depth: Tasks that it is inside of.
    """

    __slots__ = ("task_id", "name", "depth", "children", "feeds", "is_over")

    def __init__(self, task_id: int, name: str, depth: int) -> None:
        self.task_id = task_id
        self.name = name
        self.depth = depth
        self.children: List[List[int]] = []  # [first, end) of the ids of tasks that it has submitted.
        self.feeds: List[Any] = []  # Weak references to what goes on submitting for it by itself.
        self.is_over = False


mesh: Optional[Tuple[str, str, str]] = None
"""The coordinator's URL, for people, the path of the socket through which it is reached, and the worker's id. None: this process runs no
tasks."""

running: Optional[Running] = None
"""The task that this process executes, once somebody has asked for it; in an actor's process the actor itself."""

find: Optional[Callable[[], Optional[Running]]] = None
"""Makes `running`, where a process has tasks one after the other, most of which nobody asks for."""

call: ContextVar[Optional[Running]] = ContextVar("gpumesh_call", default=None)
"""The call of an actor that this thread, or coroutine, executes."""

on_ended: Optional[Callable[[Running], None]] = None
"""Set by the client once something is submitted here."""

on_mentioned: Optional[Callable[[List[Any]], None]] = None
"""The same: told the references in a result, or in a value that is put here, which count in the client's space."""


def owner() -> Optional[Running]:
    """Whom what is submitted now belongs to; None between two tasks."""
    found = call.get()
    if found is not None and not found.is_over:
        return found
    return running or (find() if find is not None else None)


def ended(task: Running) -> None:
    """A task, or a call, is over, and its result was not sent yet."""
    task.is_over = True
    if on_ended is not None and (task.children or task.feeds):
        on_ended(task)
