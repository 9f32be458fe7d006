"""Exceptions of tasks as payloads: they come back as their own type where that is possible, and as their text always.

The outer layer holds plain strings and bytes, so that it loads everywhere; the exception itself is a pickle inside it.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import traceback
import types
from typing import Any, Dict, Iterator, List, Optional, Tuple, Type

import gpumesh
from gpumesh.errors import RemoteTaskError
from gpumesh.model.payloads import Body, OutOfBand
from gpumesh.serialization import values
from gpumesh.serialization.pickling import Pickler

MAX_MESSAGE_CHARS = 64 * 1024
MAX_TRACEBACK_CHARS = 1024 * 1024  # The first and the last half are kept of a longer one.

_PACKAGE = os.path.dirname(os.path.abspath(gpumesh.__file__)) + os.sep
shown_paths: Dict[str, str] = {}  # Of files and folders that lie elsewhere at their owner's: tracebacks name that place.
_INTERPRETER_FIELDS = frozenset(
    {"args", "__dict__", "__weakref__", "__cause__", "__context__", "__traceback__", "__suppress_context__", "_gpumesh_fields"}
)


class RemoteTraceback(Exception):
    """The cause of an exception that a task raised: `str()` of it is the traceback on the worker."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def dump_exception(error: BaseException, *, hide_frames_of: str = "") -> Body:
    """Turn an exception into a payload; never fails, whatever it holds.

    Args:
        error: Any exception, with its traceback.
        hide_frames_of: Path prefix of further files whose frames, at the outer end of the traceback, are not the user's
            business. Those of gpumesh are left out anyway.
    """
    dropped: List[str] = []
    data = b""
    try:
        file = io.BytesIO()
        _ExceptionPickler(file, dropped).dump(error)
        data = file.getvalue()
    except Exception:  # noqa: BLE001 - its class cannot travel: what is left is its text
        dropped.append("the exception itself")
    text = _format(error, hide_frames_of)
    if dropped:
        text += f"(could not travel: {', '.join(dict.fromkeys(dropped))})\n"
    return pickle.dumps((_type_name(type(error)), _message(error), text, data), 5)


def load_exception(payload: Body) -> BaseException:
    """The exception of its own type, or a `RemoteTaskError`; its `__cause__` is a `RemoteTraceback`. Never fails."""
    outer = payload.parts[0] if isinstance(payload, OutOfBand) else payload
    type_name, message, text, data = pickle.loads(outer)
    error: Optional[BaseException] = None
    reason = "it cannot be pickled"
    if data:
        try:
            error = pickle.loads(data)
        except Exception as problem:  # noqa: BLE001 - unpickling runs code of the exception's own class
            reason = f"{type(problem).__name__}: {problem}"
    if not isinstance(error, BaseException):
        summary = f"{type_name}: {message}" if message else type_name
        error = RemoteTaskError(
            f"the task raised {summary} (which cannot be rebuilt here: {reason}); its remote traceback is the cause"
        )
        error.type_name, error.remote_message, error.remote_traceback = type_name, message, text
    try:
        error.__cause__ = RemoteTraceback(text)
    except Exception:  # noqa: BLE001 - a class may refuse attributes; it is still the right exception
        pass
    return error


class _ExceptionPickler(Pickler):
    """Takes exceptions apart where their own way of being pickled does not bring them back."""

    def __init__(self, file: Any, dropped: List[str], outer: Optional[_ExceptionPickler] = None) -> None:
        super().__init__(file)
        self._dropped = dropped
        self._is_probe = outer is not None
        self._fits: Dict[int, Tuple[Any, bool]] = {} if outer is None else outer._fits

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, BaseException):
            return super().reducer_override(obj)
        if not self._is_probe and _comes_back(obj):
            return NotImplemented
        return self._take_apart(obj)

    def _take_apart(self, error: BaseException) -> Any:
        """Reduce to arguments for `__new__`, and the rest as state: an exception may hold itself."""
        self._fits[id(error)] = (error, True)
        args = tuple(self._part(f"args[{i}]", arg, repr_instead=True) for i, arg in enumerate(_args(error)))
        attributes = self._parts(getattr(error, "__dict__", {}))
        fields = self._parts(dict(_fields(error)))
        return _new, (type(error), args), (args, attributes, fields), None, None, _complete

    def _parts(self, named: Dict[str, Any]) -> Dict[str, Any]:
        parts = ((name, self._part(name, value)) for name, value in list(named.items()))
        return {name: value for name, value in parts if value is not _LOST}

    def _part(self, name: str, value: Any, *, repr_instead: bool = False) -> Any:
        """`value` if it can travel on its own; otherwise a stand-in."""
        if type(value) in _PLAIN:
            return value
        known = self._fits.get(id(value))
        if known is None:
            known = self._fits[id(value)] = (value, self._try(value))
        if known[1]:
            return value
        self._dropped.append(name)
        return _safe(repr, value) if repr_instead else _LOST

    def _try(self, value: Any) -> bool:
        try:
            _ExceptionPickler(io.BytesIO(), [], self).dump(value)
        except Exception:  # noqa: BLE001 - pickling runs code of the value's own class
            return False
        return True


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_LOST = object()


def _comes_back(error: BaseException) -> bool:
    """Whether pickling as its class wants it gives an exception like this one: tried out, here and now."""
    try:
        payload = values.dumps(error, snapshot=False)
        clone = values.loads(payload)
        if type(clone) is not type(error) or str(clone) != str(error):
            return False
        if getattr(clone, "__dict__", {}).keys() != getattr(error, "__dict__", {}).keys():
            return False
        if clone.args != error.args:
            return False
        return all(_alike(getattr(clone, name, _LOST), value) for name, value in _fields(error))
    except Exception:  # noqa: BLE001 - any failure in the exception's own code means the same: no
        return False


def _alike(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and (type(one) not in _PLAIN or one == other))


def _fields(error: BaseException) -> Iterator[Tuple[str, Any]]:
    """What the exception keeps outside its `__dict__`: `errno` of an OSError, `__slots__` of the user's classes."""
    seen = set()
    for class_ in type(error).__mro__:
        for name, descriptor in list(vars(class_).items()):
            if name in _INTERPRETER_FIELDS or name in seen:
                continue
            if not isinstance(descriptor, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                continue
            seen.add(name)
            value = _field(descriptor, error)
            if value is not None:
                yield name, value


def _field(descriptor: Any, error: BaseException) -> Any:
    try:
        return descriptor.__get__(error, type(error))
    except (AttributeError, TypeError, ValueError):
        return None  # An unset slot.


def _complete(error: BaseException, state: Tuple[Tuple[Any, ...], Dict[str, Any], Dict[str, Any]]) -> None:
    args, attributes, fields = state
    error.args = args
    for name, value in fields.items():
        try:
            setattr(error, name, value)
        except (AttributeError, TypeError, ValueError):
            pass  # Read-only: `__new__` has set it.
    if attributes:
        error.__dict__.update(attributes)


def _new(class_: Type[BaseException], args: Tuple[Any, ...]) -> BaseException:
    """Make the exception without calling its constructor, which may want other arguments than `args`."""
    builtin = next(base for base in class_.__mro__ if base.__module__ == "builtins")
    try:
        made: Any = builtin.__new__(class_, *args)
    except Exception:  # noqa: BLE001 - arguments that even the built-in base does not take
        made = builtin.__new__(class_)  # type: ignore[call-overload]
    if not isinstance(made, BaseException):
        raise TypeError(f"{class_!r} made {made!r}")
    error: BaseException = made
    http_error: Any = getattr(sys.modules.get("urllib.error"), "HTTPError", ())
    if isinstance(error, http_error):
        http_error.__init__(error, "", 0, "", {}, io.BytesIO())  # Its own response: without a body every look breaks.
    return error


def _args(error: BaseException) -> Tuple[Any, ...]:
    args: Any = error.args
    return args if isinstance(args, tuple) else ()


def _type_name(class_: type) -> str:
    return class_.__qualname__ if class_.__module__ == "builtins" else f"{class_.__module__}.{class_.__qualname__}"


def _message(error: BaseException) -> str:
    return _clip(_safe(str, error), MAX_MESSAGE_CHARS)


def _safe(convert: Any, value: Any) -> str:
    try:
        return str(convert(value))
    except Exception as problem:  # noqa: BLE001 - the value's own code
        return f"<unprintable {type(value).__name__}: {type(problem).__name__}>"


def _clip(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n... {len(text) - limit} characters left out ...\n{text[-limit // 2 :]}"


def _format(error: BaseException, hide_frames_of: str) -> str:
    trace = error.__traceback__
    while trace is not None and _is_hidden(trace.tb_frame.f_code.co_filename, hide_frames_of):
        trace = trace.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception as problem:  # noqa: BLE001 - formatting calls the exception's own code
        text = (
            f"{_type_name(type(error))}: {_message(error)}\n(no traceback: {type(problem).__name__} while it was formatted)\n"
        )
    for path, shown in shown_paths.items():
        text = text.replace(f'"{path}', f'"{shown}')
    return _clip(text, MAX_TRACEBACK_CHARS)


def _is_hidden(filename: str, also: str) -> bool:
    return filename.startswith(_PACKAGE) or (bool(also) and filename.startswith(also))
