"""`gpumesh.put` and `gpumesh.get`: the mesh of the moment, inside a task and outside. It is found here, used elsewhere."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Tuple

from gpumesh.client.decorator import accelerate
from gpumesh.runtime import nesting
from gpumesh.serialization import refs
from gpumesh.serialization.refs import ObjectRef, Space

if TYPE_CHECKING:
    from gpumesh.client.mesh import GPUMesh


def put(value: Any) -> ObjectRef:
    """Store a value: inside a task on the mesh that runs it, elsewhere on the default mesh. Else as `GPUMesh.put`."""
    check_put(value)
    return _space().put(value)


def get(wanted: Any, *, timeout: Optional[float] = None) -> Any:
    """The value of a reference, or the list of values of several, inside a task and outside. Else as `GPUMesh.get`."""
    return get_from(_space, wanted, timeout)


def current_mesh() -> GPUMesh:
    """The mesh at hand: inside a task, or a method of an actor, the one that runs it; elsewhere that of `accelerate.install`, or else
    `GPUMesh()`.

    Inside a task it needs neither address nor token. What is submitted through it belongs to the task: what has not ended when the task
    has is cancelled.
    """
    installed = accelerate.mesh
    if installed is not None and nesting.mesh is None:
        return installed
    from gpumesh.client.mesh import default_mesh

    return default_mesh()


def _space() -> Space:
    space = refs.current_space()
    if space is not None:
        return space
    return current_mesh()._open_session().space()


def check_put(value: Any) -> None:
    """Refuse what stands for a value already.

    Raises:
        TypeError: It is a reference or a future.
    """
    if isinstance(value, ObjectRef):
        raise TypeError(f"{value!r} is in the store already; pass it on as it is, or put a list of references")
    if isinstance(value, Future):
        raise TypeError(f"{value!r} is a future; pass it to .remote() as it is, or put its result()")


def get_from(default: Callable[[], Space], wanted: Any, timeout: Optional[float]) -> Any:
    """The value of a reference or future, or the list of values of several.

    Args:
        default: Where references are looked up that belong to no mesh; called only if there is one.
        timeout: Seconds for all of them.

    Raises:
        TypeError: One of them is neither.
    """
    if type(wanted) is not list and type(wanted) is not tuple:
        return _get([wanted], default, timeout)[0]
    return _get(wanted, default, timeout)


def _get(wanted: Any, default: Callable[[], Space], timeout: Optional[float]) -> List[Any]:
    for each in wanted:
        if not isinstance(each, (ObjectRef, Future)):
            raise TypeError(f"get takes an ObjectRef, as put returns it, or a list of them, not {type(each).__name__}")
    deadline = None if timeout is None else time.monotonic() + timeout

    def left() -> Optional[float]:
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    values: List[Any] = [None] * len(wanted)
    spaces: List[Tuple[Space, List[int]]] = []  # Usually one, with all places.
    for place, each in enumerate(wanted):
        if not isinstance(each, ObjectRef):
            continue
        if each.space is None:
            each.bind(default())
        space = each.space
        if space is None or space.table.is_foreign:  # Of the process that was forked: the same mesh, another connection.
            space = default()
        for known, places in spaces:
            if known is space:
                places.append(place)
                break
        else:
            spaces.append((space, [place]))
    for space, places in spaces:
        for place, value in zip(places, space.get([wanted[place] for place in places], left())):
            values[place] = value
    for place, each in enumerate(wanted):
        if not isinstance(each, ObjectRef):
            values[place] = each.result(left())
    return values
