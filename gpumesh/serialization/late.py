"""Calls whose arguments include results of other tasks: the result's payload is put in as it came, never opened on the way."""

from __future__ import annotations

import pickle
from typing import Any, Dict, Iterable, List, Tuple, Union

from gpumesh.config import INLINE_BUFFER_BYTES
from gpumesh.model.payloads import OutOfBand, Payload
from gpumesh.serialization import values

Place = Union[int, str]
"""A position or a keyword."""


def complete_call(call: Payload, inputs: Iterable[Tuple[Place, Any]]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """On the worker: the arguments of a call, with the values of its inputs in their places.

    Args:
        call: What `values.dumps_call` made, with anything in those places.
        inputs: (place, payload of the value).

    Raises:
        SerializationError: One of them cannot be rebuilt here.
    """
    args, kwargs = values.loads_call(call)
    positional = list(args)
    for place, payload in inputs:
        value = values.loads(payload, what=f"argument {place!r}")
        if isinstance(place, int):
            positional[place] = value
        else:
            kwargs[place] = value
    return tuple(positional), kwargs


def fill_in(call: Payload, results: List[Tuple[Place, Payload]]) -> Payload:
    """A payload of `dumps_call` with the values of other payloads in some of its places.

    Args:
        call: The call, with anything in those places.
        results: Which payload's value goes where.
    """
    return values.dumps(_Filled(call, results), snapshot=False)


class _Filled:
    """Pickles as the call with its places filled in."""

    def __init__(self, call: Payload, results: List[Tuple[Place, Payload]]) -> None:
        self._call = call
        self._results = results

    def __reduce__(self) -> Any:
        return _rebuild, (_carry(self._call), [(place, _carry(payload)) for place, payload in self._results])


def _carry(payload: Payload) -> List[Any]:
    """A payload's parts, the large ones in a form that pickle keeps beside itself."""
    parts = [payload] if isinstance(payload, bytes) else payload.parts
    return [pickle.PickleBuffer(part) if memoryview(part).nbytes >= INLINE_BUFFER_BYTES else bytes(part) for part in parts]


def _rebuild(call: List[Any], results: List[Tuple[Place, List[Any]]]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """On the worker: the arguments."""
    args, kwargs = values.loads_call(OutOfBand(call))
    positional = list(args)
    for place, parts in results:
        value = values.loads(OutOfBand(parts), what="the result of another task")
        if isinstance(place, int):
            positional[place] = value
        else:
            kwargs[place] = value
    return tuple(positional), kwargs
