"""A generator function as a function that returns the list of its values."""

from __future__ import annotations

from typing import Any, Callable, List

from gpumesh.serialization.functions import display_name


class Listed:
    """Calling it calls the generator function, and gives all that its generator makes at once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__qualname__ = display_name(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = self.function(*args, **kwargs)
        return _gather(values) if hasattr(values, "__anext__") else list(values)


async def _gather(values: Any) -> List[Any]:
    return [value async for value in values]
