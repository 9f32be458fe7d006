"""Values, and the arguments of a call, as payloads: buffers beside the pickle, errors that name the culprit.

Plain data goes through the C pickler alone. Only what that cannot carry, and what belongs to `__main__`, takes the slow way.
"""

from __future__ import annotations

import pickle
from sys import modules as _modules
from typing import Any, Callable, Dict, List, Optional, Set, Tuple, Union

from gpumesh.config import INLINE_BUFFER_BYTES
from gpumesh.errors import SerializationError
from gpumesh.model.payloads import OutOfBand, Payload
from gpumesh.serialization import tensors

Data = Union[bytes, OutOfBand]
"""A payload that holds the value itself."""

_PROTOCOL = 5
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_NO_ARGUMENTS = pickle.dumps(((), {}), _PROTOCOL)
modules_by_value: Set[str] = set()  # Modules registered with cloudpickle; its own set, once `pickling` is loaded.
_dumps = pickle.dumps
_loads = pickle.loads


def dumps(value: Any, *, what: str = "value", snapshot: bool = True) -> Data:
    """Turn a value into a payload.

    Args:
        value: Anything that pickles, and code of `__main__` or a notebook.
        what: Its name in an error message.
        snapshot: Copy large buffers, so that changing the value afterwards changes nothing. False only where the payload is
            sent before anyone can touch the value again.

    Raises:
        SerializationError: Some part cannot be pickled; the message names the path to it.
    """
    if type(value) in _SCALARS:
        return _dumps(value, _PROTOCOL)
    payload = _dump_quickly(value, snapshot)
    return payload if payload is not None else _dump_thoroughly(value, snapshot, lambda error: _explain(value, what, error))


def loads(payload: Payload, *, what: str = "value") -> Any:
    """Turn a payload back into the value; its arrays are private and, unless they were read-only, writable.

    Raises:
        SerializationError: It cannot be rebuilt here: a module or a name is missing.
    """
    try:
        if type(payload) is OutOfBand:
            return _load_parts(payload.parts)
        return _loads(payload)  # type: ignore[arg-type]
    except MemoryError:
        raise
    except Exception as error:  # Unpickling runs code of the value's own classes.
        from gpumesh.serialization.versions import loading_error

        failure = loading_error(what, error)
        if failure is error:
            raise
        raise failure from error


def dumps_call(
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
    *,
    what: str = "the function",
    function: Optional[Callable[..., Any]] = None,
    snapshot: bool = True,
) -> Data:
    """Turn the arguments of a call into a payload.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        what: The function's name in an error message.
        function: Asked for its parameters' names when an error message needs them.
        snapshot: As in `dumps`.

    Raises:
        SerializationError: An argument cannot be pickled; the message names it, and the path to the part that cannot.
    """
    if not kwargs:
        if not args:
            return _NO_ARGUMENTS
        if len(args) <= 4 and _SCALARS.issuperset(map(type, args)):
            return _dumps((args, kwargs), _PROTOCOL)
    elif not args and len(kwargs) <= 4 and _SCALARS.issuperset(map(type, kwargs.values())):
        return _dumps((args, kwargs), _PROTOCOL)
    call = (args, kwargs)
    payload = _dump_quickly(call, snapshot)
    if payload is not None:
        return payload
    return _dump_thoroughly(call, snapshot, lambda error: _explain_call(args, kwargs, what, function, error))


def loads_call(payload: Payload, *, what: str = "the arguments") -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """Turn a payload of `dumps_call` back into `(args, kwargs)`."""
    call: Tuple[Tuple[Any, ...], Dict[str, Any]] = loads(payload, what=what)
    return call


def to_payload(data: bytes, large: List[pickle.PickleBuffer], snapshot: bool) -> Data:
    """A pickle and the buffers beside it as one payload."""
    if not large:
        return data
    parts: List[Any] = [data]
    for buffer in large:
        raw = buffer.raw()
        parts.append(bytes(raw) if snapshot else raw)
    return OutOfBand(parts)


def _dump_quickly(value: Any, snapshot: bool) -> Optional[Data]:
    """The C pickler without any of our hooks; None when the value may need them."""
    large: List[pickle.PickleBuffer] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        if memoryview(buffer).nbytes < INLINE_BUFFER_BYTES:
            return True
        large.append(buffer)
        return False

    try:
        if "torch" in _modules and tensors.is_loaded():
            data = tensors.dumps(value, keep)
        else:
            data = _dumps(value, _PROTOCOL, buffer_callback=keep)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - whatever it was: the thorough pickler succeeds, or reports it
        return None
    if data.find(b"__main__") >= 0 or modules_by_value:  # `find` takes half the time of `in`.
        return None  # It refers to something that means another thing, or nothing, in another process.
    return to_payload(data, large, snapshot) if large else data


def _dump_thoroughly(value: Any, snapshot: bool, explain: Callable[[BaseException], str]) -> Data:
    from gpumesh.serialization import pickling

    try:
        data, large, _ = pickling.dump(value)
        return to_payload(data, large, snapshot)
    except MemoryError:
        raise
    except Exception as error:  # Pickling runs code of the value's own classes.
        raise SerializationError(explain(error)) from error


def _explain(value: Any, what: str, error: BaseException) -> str:
    from gpumesh.serialization import culprit

    return culprit.explain(value, what, error, root="" if what.isidentifier() else "value")


def _explain_call(
    args: Tuple[Any, ...], kwargs: Dict[str, Any], what: str, function: Optional[Callable[..., Any]], error: BaseException
) -> str:
    from gpumesh.serialization import culprit

    return culprit.explain_call(args, kwargs, what, function, error)


def _load_parts(parts: List[Any]) -> Any:
    buffers = [bytearray(part) if memoryview(part).readonly else part for part in parts[1:]]
    return _loads(parts[0], buffers=buffers)
