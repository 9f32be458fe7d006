"""Functions as bodies that are sent once, known by the hash of their content."""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import types
import weakref
from typing import Any, Callable, Dict, Hashable, Optional, Set, Tuple, Type

from gpumesh.config import FUNCTION_CACHE_ENTRIES, LARGE_FUNCTION_BYTES, MAX_FUNCTION_BYTES
from gpumesh.errors import SerializationError
from gpumesh.model.payloads import Body, payload_bytes
from gpumesh.model.records import NamedTuple
from gpumesh.serialization import values
from gpumesh.serialization.refs import collecting

DIGEST_BYTES = 16
_CO_GENERATOR = 0x20
_CO_ASYNC_GENERATOR = 0x200
_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
_log = logging.getLogger("gpumesh")

ExceptionTypes = Tuple[Type[BaseException], ...]


class Exported(NamedTuple):
    """A function ready to be sent."""

    digest: bytes  # Of the body; equal digests, equal functions.
    body: Body
    name: str  # For people.
    python: str  # "3.11" where the body holds bytecode, which only that version can run; "" where any can.
    modules: Tuple[str, ...] = ()  # That it refers to, or imports when it runs; names of what is none may be among them.
    refs: Tuple[Callable[[], Any], ...] = ()  # ObjectRefs that it captured, weakly: it is the function that keeps them.


class _Entry:
    __slots__ = ("exported", "frozen", "owner", "retry_on", "watch")

    def __init__(
        self, owner: Callable[[], Any], retry_on: ExceptionTypes, exported: Exported, watch: Any, frozen: bool
    ) -> None:
        self.owner = owner
        self.retry_on = retry_on
        self.exported = exported
        self.watch = watch
        self.frozen = frozen  # Too large to be pickled again on every call.


class Exporter:
    """Exports functions, and remembers what it exported as long as the function lives.

    A function is pickled again when something that it captured has been replaced or may have been changed. One with more than
    LARGE_FUNCTION_BYTES is captured once; the warning that it gets says so.
    """

    def __init__(self) -> None:
        self._entries: Dict[Hashable, _Entry] = {}

    def export(self, function: Callable[..., Any], retry_on: ExceptionTypes = ()) -> Exported:
        """The body and digest of `function`, together with the exceptions that it is retried on.

        Raises:
            SerializationError: It cannot be pickled, or is too large; the message names the captured variable.
        """
        entry = self._entries.get((id(function), retry_on) if retry_on else id(function))
        if entry is not None and entry.owner() is function:
            if (entry.frozen or not entry.watch.volatile) and entry.watch.holds(function):
                return entry.exported
            return self._export(function, retry_on, entry)
        if type(function) is types.MethodType:
            key = _key(function, retry_on)
            entry = self._entries.get(key)
            if entry is not None and entry.owner() is function.__self__:
                if entry.frozen and entry.watch.holds(function):
                    return entry.exported
                return self._export(function, retry_on, entry)
        return self._export(function, retry_on, None)

    def _export(self, function: Callable[..., Any], retry_on: ExceptionTypes, known: Optional[_Entry]) -> Exported:
        from gpumesh.serialization import pickling
        from gpumesh.serialization.watching import Watch

        target = unwrap(function)
        name = display_name(target)
        if known is None:
            check_callable(target)
        try:
            with collecting() as captured:
                data, large, pickler = pickling.dump((target, retry_on))
        except MemoryError:
            raise
        except Exception as error:  # Pickling runs code of the captured values' classes.
            from gpumesh.serialization import culprit

            raise SerializationError(culprit.explain_function(target, name, error)) from error
        body = values.to_payload(data, large, snapshot=True)
        size = payload_bytes(body)
        if size > MAX_FUNCTION_BYTES:
            raise SerializationError(
                f"{name} is {_megabytes(size)}, over the limit of {_megabytes(MAX_FUNCTION_BYTES)}{_weight(target)}"
            )
        by_value = pickler.functions or pickler.classes
        refs = tuple(map(weakref.ref, captured.values()))
        exported = Exported(_digest(body), body, name, _PYTHON if by_value else "", _modules(pickler), refs)
        if known is not None and known.watch.volatile and known.exported.digest == exported.digest:
            return known.exported
        frozen = size > LARGE_FUNCTION_BYTES
        if frozen and (known is None or not known.frozen):
            _log.warning(
                "%s is sent with %s%s; a change inside what it captured is not seen from now on, only its replacement",
                name,
                _megabytes(size),
                _weight(target),
            )
        watch = Watch(function, target, pickler.functions, pickler.classes)
        self._remember(function, retry_on, exported, watch, frozen)
        return exported

    def _remember(self, function: Any, retry_on: ExceptionTypes, exported: Exported, watch: Any, frozen: bool) -> None:
        key = _key(function, retry_on)
        anchor = function.__self__ if type(function) is types.MethodType else function
        entries = self._entries
        owner: Callable[[], Any]
        try:
            owner = weakref.ref(anchor, lambda _: entries.pop(key, None))
        except TypeError:
            owner = lambda: anchor  # noqa: E731 - it cannot be referred to weakly; the bound below limits how many stay
        if len(entries) >= FUNCTION_CACHE_ENTRIES and key not in entries:
            entries.pop(next(iter(entries)), None)
        entries[key] = _Entry(owner, retry_on, exported, watch, frozen)


def export_body(body: Body, name: str, modules: Tuple[str, ...] = ()) -> Exported:
    """A body that is no function, to be sent as one is."""
    return Exported(_digest(body), body, name, "", modules)


def load(body: Body) -> Tuple[Callable[..., Any], ExceptionTypes]:
    """Rebuild an exported function and the exception types that it is retried on.

    Raises:
        SerializationError: Something that it needs is missing here.
    """
    loaded: Tuple[Callable[..., Any], ExceptionTypes] = values.loads(body, what="the function")
    return loaded


def check_callable(function: Any) -> None:
    """Refuse what cannot be a task.

    Raises:
        SerializationError: It is not callable.
    """
    target = unwrap(function)
    if not callable(target):
        raise SerializationError(f"{target!r} is not callable; a task needs a function")


def is_generator_function(function: Any) -> bool:
    """Whether calling it makes a generator, also an asynchronous one: its values are made one by one."""
    return bool(_code_flags(unwrap(function)) & (_CO_GENERATOR | _CO_ASYNC_GENERATOR))


def unwrap(function: Any) -> Any:
    """The function inside a `staticmethod` or `classmethod` object; anything else as it is."""
    while type(function) in (staticmethod, classmethod):
        function = function.__func__
    return function


def display_name(function: Any) -> str:
    """What people call it: the qualified name, without the parts that only the interpreter needs."""
    function = unwrap(function)
    while type(function) is functools.partial:
        function = function.func
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or type(function).__qualname__
    return str(name).replace("<locals>.", "")


def _modules(pickler: Any) -> Tuple[str, ...]:
    names: Set[Any] = pickler.modules
    if pickler.functions:
        from gpumesh.serialization.imports import imports_of_functions

        names |= imports_of_functions(pickler.functions)
    return tuple(sorted(name for name in names if isinstance(name, str)))


def _code_flags(function: Any) -> int:
    for _ in range(20):
        if type(function) is functools.partial:
            function = function.func
        elif type(function) is types.MethodType:
            function = function.__func__
        elif type(function) is functools._lru_cache_wrapper or hasattr(type(function), "__gpumesh_reduce__"):
            function = getattr(function, "__wrapped__", None)
        elif type(function) is types.FunctionType:
            return function.__code__.co_flags
        elif isinstance(function, type) or type(function) is types.BuiltinFunctionType:
            return 0
        else:
            function = vars(type(function)).get("__call__")
    return 0


def _key(function: Any, retry_on: ExceptionTypes) -> Hashable:
    if type(function) is types.MethodType:
        return (id(function.__self__), id(function.__func__), retry_on)
    return (id(function), retry_on) if retry_on else id(function)


def _digest(body: Body) -> bytes:
    parts = [body] if isinstance(body, bytes) else body.parts
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(memoryview(part).nbytes.to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _weight(function: Any) -> str:
    """The part of a sentence that names what makes a function large."""
    from gpumesh.serialization import culprit

    heaviest, most = "", 0
    for variable, value in culprit.captured(function):
        size = _size(value)
        if size > most:
            heaviest, most = variable, size
    if not heaviest:
        return "; pass large values as arguments, or put them on the mesh once with mesh.put(...)"
    return f" because it captures {heaviest} of {_megabytes(most)}; pass it as an argument, or put it on the mesh once with mesh.put(...)"


def _size(value: Any) -> int:
    """Bytes that `value` takes on its own; 0 where it can only travel as a part of something else."""
    from gpumesh.serialization import pickling

    try:
        data, large, _ = pickling.dump(value)
    except Exception:  # noqa: BLE001 - pickling runs code of the value's own class
        return 0
    return len(data) + sum(memoryview(buffer).nbytes for buffer in large)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
