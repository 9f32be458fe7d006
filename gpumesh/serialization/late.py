"""Calls whose arguments include values from elsewhere (results, objects): put together on the worker, where all of them are."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Tuple, Union

from gpumesh.model.payloads import Payload
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
