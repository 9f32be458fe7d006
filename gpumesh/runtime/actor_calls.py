"""What the calls of an actor have in common, however they run: who may be called, and what comes back.

The instance and what is known of it live here; nothing in here sends, and nothing decides when a call runs.
"""

from __future__ import annotations

import gc
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NoReturn, Tuple

from gpumesh.errors import SerializationError
from gpumesh.model.payloads import Bundle, OutOfBand
from gpumesh.serialization import values

if TYPE_CHECKING:
    from gpumesh.runtime.runner_base import KnownSpec

READY = "__ready__"  # A method that every actor has: it returns None once all calls before it have begun.
_CALLABLE = (READY, "__call__")  # Of those that begin with an underscore.
_AT_THE_END = frozenset(("close", "__aenter__", "__aexit__"))  # Asynchronous ones do not make the calls asynchronous.
_ASYNC = 0x80 | 0x100 | 0x200  # inspect.CO_COROUTINE | CO_ITERABLE_COROUTINE | CO_ASYNC_GENERATOR


class Actor:
    """The instance."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        self._ready = _ready

    def method(self, name: str) -> Callable[..., Any]:
        """What a call of this name calls.

        Raises:
            AttributeError: There is no such method, or it is private.
        """
        if name[:1] == "_" and name not in _CALLABLE:
            raise AttributeError(f"{name!r} of {self.class_name} is private: only its own methods may call it")
        if name == READY:
            return self._ready
        try:
            found: Callable[..., Any] = getattr(self.instance, name)
        except AttributeError:
            if hasattr(type(self.instance), name):
                raise  # It is a property, whose own code raised this.
            self._refuse(name)
        return found

    def _refuse(self, name: str) -> NoReturn:
        raise AttributeError(f"{self.class_name} has no method {name!r}") from None

    @property
    def class_name(self) -> str:
        """For people."""
        return type(self.instance).__qualname__.replace("<locals>.", "")

    def closing(self) -> Any:
        """Run what the class wants to be run at its end: `close()`, else `__exit__`, else `__aexit__`; what that returns."""
        instance = self.instance
        close = getattr(instance, "close", None)
        if callable(close):
            return close()
        for name in ("__exit__", "__aexit__"):
            leave = getattr(type(instance), name, None)
            if leave is not None:
                return leave(instance, None, None, None)
        return None

    def drop(self) -> None:
        """Let go of the instance, so that its `__del__` runs."""
        self.instance = None
        gc.collect()


def _ready() -> None:
    return None


def has_async_methods(class_: Any) -> bool:
    """Whether a class has `async def` methods or asynchronous generators, its own or inherited."""
    for base in getattr(class_, "__mro__", ()):
        for name, found in vars(base).items():
            if name not in _AT_THE_END and is_async(found):
                return True
    return False


def is_async(method: Any) -> bool:
    """Whether calling this gives something to be awaited, or to be iterated asynchronously."""
    for _ in range(20):
        if type(method) is FunctionType:
            if method.__code__.co_flags & _ASYNC:
                return True
            inner = method.__dict__.get("__wrapped__")
        else:
            inner = getattr(method, "__func__", None) or getattr(method, "func", None)
        if inner is None:
            return False
        method = inner
    return False


def is_retryable(spec: KnownSpec, error: BaseException) -> bool:
    """Whether the call was made with `retry_on` for this."""
    function = spec.function
    if function.body:
        body, function.body = function.body, b""
        try:
            function.retry_on = values.loads(body, what="retry_on")
        except SerializationError:
            report_problem(f"what {spec.name} is retried on cannot be loaded, so it is not")
    return isinstance(error, function.retry_on)


def own_copy(payload: Any) -> Any:
    """A small result that no later change of the actor's arrays changes, while it waits to be sent."""
    if type(payload) is OutOfBand:
        return OutOfBand([bytes(part) for part in payload.parts])
    if isinstance(payload, Bundle):
        return payload._replace(value=own_copy(payload.value))
    return payload


def timed_out(seconds: float) -> Dict[str, Any]:
    """Details of TIMED_OUT."""
    return {"reason": f"it ran longer than its timeout of {seconds:g} s", "seconds": seconds}


def report_problem(what: str) -> None:
    """Say on standard error what user code has raised where nobody waits for its result."""
    import traceback

    sys.stderr.write(f"gpumesh: {what}\n{traceback.format_exc()}")


Result = Tuple[int, int, int, Any, float]
Arrived = Tuple[int, "KnownSpec", Tuple[int, int, Any]]
"""A call: its number on the page, its spec, (task id, attempt, payload)."""


class Calls:
    """How calls run: one at a time, in threads, on a loop."""

    def run(self) -> None:
        """Make the instance, serve calls until the end, and run what the class wants to be run then."""
        raise AssertionError("overridden by each way")

    def arrive(self, calls: List[Arrived]) -> None:
        """These came, in this order; on the thread that receives."""
        raise AssertionError("overridden by each way")

    def cancel(self, task_ids: List[int], status: int) -> None:
        """End these calls; on the thread that receives."""
        raise AssertionError("overridden by each way")

    def end(self) -> None:
        """Begin no more calls and come to the end; on any thread. Why is known to the process."""
        raise AssertionError("overridden by each way")

    def on_signal(self) -> None:
        """SIGINT came, and was not for the constructor; on the main thread, wherever that is."""
