"""What code imports, read from its bytecode. Nothing is imported or run."""

from __future__ import annotations

import dis
import types
from typing import Any, Iterable, List, Set, Tuple

_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_LOAD_CONST = dis.opmap["LOAD_CONST"]
_EXTENDED_ARG = dis.EXTENDED_ARG
_CAUGHT = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


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


def is_optional(name: str, path: str, package: str) -> bool:
    """Whether every import of module `name` in a source file stands where an ImportError is caught."""
    import ast

    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return False
    return not any(_imports_name(statement, name, package) for statement in _unguarded(tree))


def _unguarded(tree: Any) -> Iterable[Any]:
    """Imports outside of a `try` that survives their failure."""
    import ast

    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.Try) and any(_catches(handler) for handler in node.handlers):
            waiting.extend([*node.handlers, *node.orelse, *node.finalbody])
        else:
            waiting.extend(ast.iter_child_nodes(node))


def _catches(handler: Any) -> bool:
    import ast

    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in _CAUGHT for kind in kinds)


def _imports_name(statement: Any, name: str, package: str) -> bool:
    import ast

    code = compile(ast.Module([statement], []), "", "exec", dont_inherit=True)
    return any(found == name or found.startswith(name + ".") for found in imported_names(code, package))
