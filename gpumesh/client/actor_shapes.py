"""What a handle knows of its actor's class: which methods it has, and of what kind. Imports no user code, sends nothing."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Optional, Tuple

from gpumesh.client.actor_options import ActorOptions
from gpumesh.model.records import NamedTuple
from gpumesh.serialization.functions import display_name, is_generator_function, unwrap

READY = "__ready__"
"""A method that every actor has, and that does nothing."""

STREAMS = "s"  # Kinds of methods: generators, asynchronous ones included, and ...
PLAIN = ""  # ... all others.

_VERSION = 1
_MISSING = object()


class Shape(NamedTuple):
    """A class, as handles of its actors know it, and what was said of these actors that is the callers' business.

    Attributes:
        class_name: For people.
        methods: Kind by name.
        others: Names of attributes that are no methods, for error messages.
        is_open: Any name may be a method: the class has a `__getattr__`.
        name: By which the actor is found; "" for none.
        mailbox: Calls that one program may have pending.
        call_timeout: Seconds that a further one waits; None for ever.
        place: Whether tensors among arguments are moved to its device.
    """

    class_name: str
    methods: Dict[str, str]
    others: Tuple[str, ...]
    is_open: bool
    name: str
    mailbox: int
    call_timeout: Optional[float]
    place: bool

    def pack(self) -> bytes:
        """As bytes, for `ActorPlan.description`."""
        import msgpack

        packed: bytes = msgpack.packb([_VERSION, *self])
        return packed

    def kind_of(self, name: str) -> str:
        """What kind of method that is.

        Raises:
            AttributeError: There is none; the message says what there is.
        """
        kind = self.methods.get(name)
        if kind is not None:
            return kind
        if name == READY or (self.is_open and not name.startswith("_")):
            return PLAIN
        raise AttributeError(_explain(self, name))


def shape_of(class_: type, options: ActorOptions) -> Shape:
    """What there is to know of a class."""
    methods: Dict[str, str] = {}
    others: List[str] = []
    for name in dir(class_):
        if _is_private(name):
            continue
        found = _look_up(class_, name)
        function = found.func if type(found) is functools.partialmethod else unwrap(found)
        if isinstance(found, property) or not callable(function) or isinstance(function, type):
            others.append(name)
        else:
            methods[name] = STREAMS if is_generator_function(function) else PLAIN
    return Shape(
        display_name(class_),
        methods,
        tuple(others),
        hasattr(class_, "__getattr__"),
        options.name or "",
        options.mailbox,
        options.call_timeout,
        options.task.place,
    )


@functools.lru_cache(maxsize=1000)
def read_shape(data: bytes) -> Shape:
    """What `Shape.pack` has packed; the same object for the same bytes.

    Raises:
        ValueError: It is nothing of the kind, or of a later version.
    """
    import msgpack

    try:
        version, *fields = msgpack.unpackb(data)
        shape = Shape(*fields[: len(Shape._fields)])
        shape = shape._replace(methods=dict(shape.methods), others=tuple(shape.others))
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"this does not describe an actor: {error}") from None
    if version != _VERSION:
        raise ValueError(f"this actor was created by another version of gpumesh (its description is version {version})")
    return shape


def _look_up(class_: type, name: str) -> Any:
    for base in class_.__mro__:
        found = base.__dict__.get(name, _MISSING)
        if found is not _MISSING:
            return found
    return None


def _is_private(name: str) -> bool:
    """What other programs look for at any object (pickle, copy, IPython) is no method of an actor."""
    return (name.startswith("__") and name != "__call__") or name.startswith(("_repr_", "_ipython"))


def _explain(shape: Shape, name: str) -> str:
    if name in shape.others:
        return f"{shape.class_name}.{name} is no method, and an actor's attributes are in another process; write a method that returns it"
    import difflib

    close = difflib.get_close_matches(name, shape.methods, n=3)
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    elif shape.methods:
        hint = f"it has {', '.join(sorted(shape.methods)[:20])}"
    else:
        hint = "it has none"
    return f"the actor's class {shape.class_name} has no method {name!r}; {hint}"
