"""The pickler: code of `__main__` by value, everything importable by reference, large buffers beside the pickle.

A class sent by value keeps its identity. The process that defined it owns it: when a copy of its definition comes home, the
definition here is left alone, so that its methods keep the module globals they were written against.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import sys
import types
import weakref
from typing import Any, Callable, List, Optional, Set, Tuple

import cloudpickle.cloudpickle as cp  # type: ignore[import-untyped, unused-ignore]

from gpumesh.config import INLINE_BUFFER_BYTES
from gpumesh.errors import VersionMismatchError
from gpumesh.serialization import tensors, values
from gpumesh.serialization.versions import host_name

PICKLE_PROTOCOL = 5

values.modules_by_value = cp._PICKLE_BY_VALUE_MODULES

_defined_here: weakref.WeakSet[type] = weakref.WeakSet()
_received: weakref.WeakSet[type] = weakref.WeakSet()
_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


def _reduce_code(code: types.CodeType) -> Any:
    return _make_code, (_PYTHON, *cp._code_reduce(code)[1])


def _make_code(python: str, *parts: Any) -> types.CodeType:
    """Bytecode of another version would load, now and then, and then end the process without a word."""
    if python != _PYTHON:
        raise VersionMismatchError(
            f"code of Python {python} cannot run here, on Python {_PYTHON} of {host_name()}; run both sides with the same minor "
            "version, or put that code into a module that both can import"
        )
    return types.CodeType(*parts)


class Pickler(cp.Pickler):  # type: ignore[misc, unused-ignore]
    """Writes one value to `file`, remembering which functions and classes went by value.

    Objects whose type has `__gpumesh_reduce__(by_value)` say themselves how they travel; `by_value` is true when the other
    side cannot import them under their own name.
    """

    dispatch_table = collections.ChainMap({types.CodeType: _reduce_code}, cp.Pickler.dispatch_table)

    def __init__(self, file: Any, *, buffer_callback: Optional[Callable[[pickle.PickleBuffer], bool]] = None) -> None:
        super().__init__(file, protocol=PICKLE_PROTOCOL, buffer_callback=buffer_callback)
        tensors.is_loaded()
        self.functions: List[types.FunctionType] = []
        self.classes: List[type] = []
        self.modules: Set[str] = set()  # Named by what went by reference.

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in tensors.reducers:
            return tensors.reducers[kind](obj)
        if kind is types.FunctionType:
            return self._reduce_function(obj)
        if issubclass(kind, type):
            return self._reduce_class(obj)
        if kind is functools._lru_cache_wrapper:
            return _reduce_cached(obj)
        if kind is io.TextIOWrapper:
            return _reduce_text_file(obj)
        hook = getattr(kind, "__gpumesh_reduce__", None)
        if hook is not None:
            by_name = is_importable(obj)
            if by_name:
                self.modules.add(obj.__module__)
            return hook(obj, not by_name)
        if kind is types.ModuleType:
            self.modules.add(obj.__name__)
        return super().reducer_override(obj)

    def _reduce_function(self, function: types.FunctionType) -> Any:
        reduced = super().reducer_override(function)
        if reduced is NotImplemented:
            self.modules.add(function.__module__)
            return reduced
        by_name = _find_by_unwrapping(function)
        if by_name is not None:
            self.modules.add(function.__module__)
            return _unwrap_by_name, by_name
        self.functions.append(function)
        return reduced

    def _reduce_class(self, class_: type) -> Any:
        reduced = super().reducer_override(class_)
        if reduced is NotImplemented or len(reduced) != 6:
            self.modules.add(class_.__module__)
            return reduced  # By reference, or one of the few built-in types without a name.
        by_name = _find_by_unwrapping(class_)
        if by_name is not None:
            self.modules.add(class_.__module__)
            return _unwrap_by_name, by_name
        self.classes.append(class_)
        if class_ not in _received:
            _defined_here.add(class_)
        return (*reduced[:5], _complete_class)


def dump(value: Any) -> Tuple[bytes, List[pickle.PickleBuffer], Pickler]:
    """Pickle `value`; returns the pickle, the buffers kept beside it, and the pickler with what went by value."""
    large: List[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = Pickler(file, buffer_callback=keeper(large))
    pickler.dump(value)
    return file.getvalue(), large, pickler


def keeper(large: List[pickle.PickleBuffer]) -> Callable[[pickle.PickleBuffer], bool]:
    """A buffer callback that moves buffers worth it to `large` and leaves the others in the pickle."""

    def keep(buffer: pickle.PickleBuffer) -> bool:
        if memoryview(buffer).nbytes < INLINE_BUFFER_BYTES:
            return True
        large.append(buffer)
        return False

    return keep


def is_importable(obj: Any) -> bool:
    """Whether importing `obj.__module__` elsewhere finds this very object under `obj.__qualname__`."""
    module_name, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(qualname, str) or not is_importable_module(module_name):
        return False
    return _look_up(sys.modules[module_name], qualname) is obj


def is_importable_module(name: str) -> bool:
    """Whether code of module `name` travels as a name: it is loaded, not `__main__`, and not registered to go by value."""
    if name in ("__main__", "__mp_main__") or name not in sys.modules:
        return False
    by_value = cp.list_registry_pickle_by_value()
    return not by_value or not any(name == entry or name.startswith(entry + ".") for entry in by_value)


def _look_up(root: Any, qualname: str) -> Any:
    for part in qualname.split("."):
        root = getattr(root, part, None)
    return root


def _find_by_unwrapping(hidden: Any) -> Optional[Tuple[str, str, int]]:
    """How to reach a function or class hidden behind its decorators: module, qualified name, and how often to unwrap."""
    if not is_importable_module(hidden.__module__ or ""):
        return None
    found = _look_up(sys.modules[hidden.__module__], hidden.__qualname__)
    for depth in range(1, 20):
        found = getattr(found, "__wrapped__", None)
        if found is None:
            return None
        if found is hidden:
            return hidden.__module__, hidden.__qualname__, depth
    return None


def _unwrap_by_name(module_name: str, qualname: str, depth: int) -> Any:
    __import__(module_name)
    found = sys.modules[module_name]
    for part in qualname.split("."):
        found = getattr(found, part)
    for _ in range(depth):
        found = found.__wrapped__
    return found


def _reduce_cached(wrapper: Any) -> Any:
    """`functools.lru_cache` wrappers pickle by name only; where the name means nothing, make a fresh one."""
    if is_importable(wrapper):
        return NotImplemented
    return _make_cached, (wrapper.__wrapped__, wrapper.cache_parameters())


def _make_cached(function: Callable[..., Any], parameters: Any) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_text_file(file: Any) -> Any:
    for name in ("stdin", "stdout", "stderr"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    raise TypeError(f"cannot pickle the open file {getattr(file, 'name', '')!r}")


def _complete_class(class_: type, state: Any) -> Any:
    """Fill in a class that arrived by value, unless it is our own definition that came home."""
    if class_ in _defined_here:
        return class_
    _received.add(class_)
    return cp._class_setstate(class_, state)
