"""What code imports, read from its bytecode. Nothing is imported or run."""

from __future__ import annotations

import dis
import types
from typing import Any, Iterable, List, Set, Tuple

_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_LOAD_CONST = dis.opmap["LOAD_CONST"]
_EXTENDED_ARG = dis.EXTENDED_ARG


def imported_names(code: types.CodeType, package: str) -> Set[str]:
    """Absolute names of all that `code`, and the functions and classes nested in it, import.

    `from a import b` gives both `a` and `a.b`: whether the latter is a module cannot be seen from here.

    Args:
        package: What relative imports are relative to.
    """
    names: Set[str] = set()
    codes = [code]
    while codes:
        code = codes.pop()
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
        instructions = code.co_code
        operations = instructions[::2]
        position = operations.find(_IMPORT_NAME)
        while position >= 0:
            argument, before = _argument(instructions, position)
            fromlist, before = _constant(code, instructions, before)
            level, _ = _constant(code, instructions, before)
            name = _absolute(code.co_names[argument], level, package)
            if name:
                names.add(name)
                names.update(f"{name}.{item}" for item in fromlist or () if item != "*")
            position = operations.find(_IMPORT_NAME, position + 1)
    return names


def imports_of_functions(functions: Iterable[types.FunctionType]) -> Set[str]:
    """The same for functions that travel by value."""
    names: Set[str] = set()
    for function in functions:
        package = function.__globals__.get("__package__")
        names |= imported_names(function.__code__, package if isinstance(package, str) else "")
    return names


def _argument(instructions: bytes, position: int) -> Tuple[int, int]:
    """The argument of the instruction at `position`, with its extensions before it; and where the instruction before those is."""
    argument, shift = instructions[2 * position + 1], 8
    position -= 1
    while position >= 0 and instructions[2 * position] == _EXTENDED_ARG:
        argument |= instructions[2 * position + 1] << shift
        shift += 8
        position -= 1
    return argument, position


def _constant(code: types.CodeType, instructions: bytes, position: int) -> Tuple[Any, int]:
    """What the instruction at `position` loads; later Pythons load small numbers without a constant."""
    argument, before = _argument(instructions, position)
    return (code.co_consts[argument] if instructions[2 * position] == _LOAD_CONST else argument), before


def _absolute(name: str, level: Any, package: str) -> str:
    if not isinstance(level, int) or level <= 0:
        return name
    parts: List[str] = package.split(".") if package else []
    if level > len(parts):
        return ""  # Fails wherever it runs.
    return ".".join(parts[: len(parts) - level + 1] + ([name] if name else []))
