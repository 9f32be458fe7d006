"""Finds which part of a value cannot be pickled, after pickling it has failed, and says so in one line."""

from __future__ import annotations

import copyreg
import functools
import io
import time
import types
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from gpumesh.model.records import NamedTuple
from gpumesh.serialization.pickling import Pickler

MAX_DEPTH = 60  # Steps from the value to the culprit; deeper paths are not readable anyway.
MAX_PROBES = 5000
SEARCH_SECONDS = 3.0  # The error is certain already: a vague message now beats an exact one much later.

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, type(Ellipsis), range, types.CodeType})


class Step(NamedTuple):
    """One step towards the culprit: `.text` is appended to the path, or a captured variable starts a new one."""

    text: str
    captured_as: str = ""  # "global", "closure", "default": the step enters a function's variable called `text`.


def explain(value: Any, label: str, error: BaseException, *, root: str) -> str:
    """One line: `label`, the path from `root` to the part of `value` that cannot be pickled, and what to do."""
    if isinstance(error.__cause__, RecursionError) or isinstance(error, RecursionError):
        return f"{label} is nested too deeply to be pickled; flatten it, or send it in parts"
    steps, found, reason = _search(value, error)
    return f"{label}{_join(root, steps)}: {_verdict(found, reason)}"


def explain_call(
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
    what: str,
    function: Optional[Callable[..., Any]],
    error: BaseException,
) -> str:
    """The same for the arguments of a call, by the names of the parameters."""
    call = what if what.endswith(")") or " " in what else f"{what}()"
    names = _parameter_names(function, len(args))
    arguments = [(names[i], value) for i, value in enumerate(args)] + list(kwargs.items())
    for position, (name, value) in enumerate(arguments):
        problem = _probe(value)
        if problem is not None:
            label = f"argument '{name}' of {call}" if name else f"argument {position + 1} of {call}"
            return explain(value, label, problem, root=name or "argument")
    return explain((args, kwargs), f"the arguments of {call}", error, root="arguments")


def explain_function(function: Any, name: str, error: BaseException) -> str:
    """The same for a function: which captured variable, attribute or default holds the culprit."""
    return explain(function, name, error, root="")


def captured(function: Any) -> Iterator[Tuple[str, Any]]:
    """What a function carries along when it goes by value: (how it reads in a sentence, value)."""
    for step, child in _children(function):
        if step.captured_as:
            yield f"'{step.text}' ({step.captured_as})", child
        elif child is not None and type(child) not in _ATOMS:
            yield f"'{step.text.lstrip('.')}'", child


def _join(root: str, steps: List[Step]) -> str:
    text, path, has_moved = "", root, False
    for step in steps:
        if step.captured_as:
            text += (_glue(path) if has_moved else "") + f" captures '{step.text}' ({step.captured_as})"
            path, has_moved = step.text, False
        else:
            path, has_moved = path + step.text, True
    return text + _glue(path) if has_moved else text


def _glue(path: str) -> str:
    """An attribute or an item belongs to the name before it, a name of its own does not."""
    return path if path[:1] in (".", "[", "{") else f": {path}"


def _verdict(found: Any, reason: BaseException) -> str:
    kind = type(found)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    article = "an" if name[:1].lower() in "aeiou" else "a"
    family = kind.__module__.partition(".")[0]
    if kind is types.GeneratorType or kind is types.AsyncGeneratorType:
        return f"{article} {name} cannot be pickled; return list(...) or pass list(...) instead, or yield in the task's own function"
    if kind is types.CoroutineType:
        return f"{article} {name} cannot be pickled; await it first and send its result"
    if isinstance(found, io.IOBase) or family in ("socket", "_socket", "ssl"):
        return f"{article} {name} cannot be pickled; open it inside the task, and pass its path or address"
    if family in ("_thread", "threading", "multiprocessing"):
        return f"{article} {name} cannot be pickled; create it inside the task or pass what is needed to make it"
    return f"{article} {name} cannot be pickled ({reason}); create it inside the task or pass what is needed to make it"


def _search(value: Any, error: BaseException) -> Tuple[List[Step], Any, BaseException]:
    """Descend from `value` into the first part that fails on its own, as long as there is one."""
    steps: List[Step] = []
    seen = {id(value)}
    keep = [value]  # The ids stay ours: reducing makes objects that would otherwise be freed at once.
    probes, deadline = MAX_PROBES, time.monotonic() + SEARCH_SECONDS
    while len(steps) < MAX_DEPTH:
        for step, child in _children(value):
            if type(child) in _ATOMS or id(child) in seen:
                continue
            probes -= 1
            if probes < 0 or time.monotonic() > deadline:
                return steps, value, error
            problem = _probe(child)
            if problem is not None:
                steps.append(step)
                seen.add(id(child))
                keep.append(child)
                value, error = child, problem
                break
        else:
            break
    return steps, value, error


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def _probe(value: Any) -> Optional[BaseException]:
    try:
        Pickler(_Nowhere(), buffer_callback=lambda buffer: False).dump(value)
    except Exception as error:  # noqa: BLE001 - pickling runs code of the value's own classes
        return error
    return None


def _children(value: Any) -> Iterator[Tuple[Step, Any]]:
    kind = type(value)
    if isinstance(value, dict):
        for key, item in list(value.items()):
            yield Step(f"[{_short(key)}]"), item
            yield Step(f".keys()[{_short(key)}]"), key
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(list(value)):
            yield Step(f"[{index}]"), item
    elif isinstance(value, (set, frozenset)):
        for item in list(value):
            yield Step(f"{{{_short(item)}}}"), item
    if kind is types.FunctionType:
        yield from _function_children(value)
    elif kind is types.MethodType:
        yield Step("self", "bound method"), value.__self__
        yield Step(".__func__"), value.__func__
    elif kind is functools.partial:
        yield Step(".func"), value.func
        yield Step(".args"), value.args
        yield Step(".keywords"), value.keywords
    elif kind is staticmethod or kind is classmethod:
        yield Step(".__func__"), value.__func__
    elif kind is property:
        for name in ("fget", "fset", "fdel"):
            yield Step(f".{name}"), getattr(value, name)
    elif kind is types.CellType:
        yield Step(""), _cell_contents(value)
    elif isinstance(value, type):
        for name, item in list(vars(value).items()):
            if name not in ("__dict__", "__weakref__", "__doc__", "_abc_impl"):
                yield Step(f".{name}"), item
        for base in value.__bases__:
            yield Step(f".{base.__name__}"), base
    elif kind not in (dict, list, tuple, set, frozenset):
        yield from _reduced_children(value)


def _function_children(function: types.FunctionType) -> Iterator[Tuple[Step, Any]]:
    from gpumesh.serialization.watching import global_names

    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        yield Step(name, "closure"), _cell_contents(cell)
    for name in global_names(function.__code__):
        if name in function.__globals__:
            yield Step(name, "global"), function.__globals__[name]
    code, defaults = function.__code__, function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    for name, default in zip(code.co_varnames[first : code.co_argcount], defaults):
        yield Step(name, "default"), default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield Step(name, "default"), default
    for name, annotation in getattr(function, "__annotations__", {}).items():
        yield Step(name, "annotation"), annotation
    for name, item in list(vars(function).items()):
        yield Step(f".{name}"), item


def _reduced_children(value: Any) -> Iterator[Tuple[Step, Any]]:
    """The parts that the object's own way of being pickled would write."""
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        hook = getattr(type(value), "__gpumesh_reduce__", None)
        reduced = hook(value, True) if hook is not None else reduce(value) if reduce is not None else value.__reduce_ex__(5)
    except Exception:  # noqa: BLE001 - the object's own code refuses: it is the culprit itself
        return
    if not isinstance(reduced, tuple):
        return
    state = reduced[2] if len(reduced) > 2 else None
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            for name, item in list(part.items()):
                yield Step(f".{name}"), item
        elif part is not None:
            yield Step(".__getstate__()"), part
    for item in reduced[1] or ():
        yield Step(f".{_attribute_of(value, item)}"), item


def _attribute_of(value: Any, item: Any) -> str:
    if item is type(value):
        return "__class__"
    for name, candidate in list(getattr(value, "__dict__", {}).items()):
        if candidate is item:
            return str(name)
    return "__reduce__()"


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _short(value: Any) -> str:
    if not isinstance(value, (str, bytes, int, float, tuple, type(None))):
        return f"<{type(value).__name__}>"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _parameter_names(function: Optional[Callable[..., Any]], count: int) -> List[str]:
    """Names of the first `count` positional parameters; empty where not known."""
    names: List[str] = []
    if function is not None:
        import inspect

        try:
            for name, parameter in inspect.signature(function).parameters.items():
                if parameter.kind is parameter.VAR_POSITIONAL:
                    names += [f"{name}[{i}]" for i in range(count - len(names))]
                elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                    names.append(name)
        except (TypeError, ValueError):
            pass
    return (names + [""] * count)[:count]
