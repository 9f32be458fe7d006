"""Which modules are the user's own source, and which of them code can reach. Looks, imports nothing, runs nothing.

A module is *local* when its source lies neither in the standard library nor among the installed packages: the project's folder, the
folder of the script, an editable install. What travels together is an *origin*:

    package   a folder with `__init__.py`, whole                     proj/__init__.py, proj/util/a.py, proj/data/x.csv
    folder    the files of a folder without, not what lies deeper    tests/support/*
    file      one module that stands alone                           helper.py
    shipped   a folder or file that the user has named
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from typing import Any, Dict, FrozenSet, Iterable, List, Optional, Set, Tuple

from gpumesh.model.records import NamedTuple
from gpumesh.serialization.imports import imported_names, is_optional

PACKAGE, FOLDER, FILE, SHIPPED = "package", "folder", "file", "shipped"

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_NEEDED = (
    "gpumesh",
    "cloudpickle",
    "msgpack",
    "platformdirs",
)  # On every machine of a mesh; twice in one process they do harm.
_NEVER = frozenset({*_NEEDED, "__main__", "__mp_main__", *sys.builtin_module_names, *getattr(sys, "stdlib_module_names", ())})
_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_PYC_HEADER = 16


class Origin(NamedTuple):
    """Files that travel together; see the module's documentation for the kinds."""

    kind: str
    name: str  # Of the module; of what was shipped its path.
    path: str  # The folder or file, absolute.


class Module(NamedTuple):
    """A local module that can be imported."""

    name: str
    path: str  # Its source, or the library of an extension.
    package: str  # What its relative imports are relative to.
    origin: Origin

    @property
    def is_extension(self) -> bool:
        """Whether it is compiled."""
        return self.path.endswith(_EXTENSIONS)


class Reach(NamedTuple):
    """What code can reach.

    Attributes:
        modules: By name.
        missing: Names without a dot that lead nowhere now.
        extension: A compiled module that the code does not run without, and who imports it ("" for the function itself).
    """

    modules: Dict[str, Module]
    missing: Set[str]
    extension: Optional[Tuple[Module, str]]


def is_local_path(path: str) -> bool:
    """Whether a file or folder belongs to the user rather than to an installation."""
    folders = path.split(os.sep)
    if _INSTALLED[0] in folders or _INSTALLED[1] in folders:
        return False
    return not path.startswith(_STANDARD) and not path.startswith(_OWN)


def reach(names: Iterable[str], *, without: FrozenSet[str] = frozenset()) -> Reach:
    """Everything local behind modules of these names, by what the code of each imports in turn.

    Args:
        without: Names without a dot that are somebody else's matter, with all below them.
    """
    search = _Search()
    waiting = [(name, "") for name in sorted(names, reverse=True)]
    seen: Set[str] = set()
    found: Dict[str, Module] = {}
    missing: Set[str] = set()
    extension: Optional[Tuple[Module, str]] = None
    while waiting:
        name, importer = waiting.pop()
        if name in seen or not name or name.partition(".")[0] in without:
            continue
        seen.add(name)
        parent = name.rpartition(".")[0]
        if parent:
            waiting.append((parent, importer))
        module = search.find(name)
        if module is None:
            if not parent and search.is_missing(name):
                missing.add(name)
            continue
        if module.is_extension:
            if extension is None and not (importer and is_optional(name, found[importer].path, found[importer].package)):
                extension = module, importer
            continue
        found[name] = module
        waiting.extend((imported, name) for imported in sorted(_imports(module), reverse=True))
    return Reach(found, missing, extension)


def main_names() -> Set[str]:
    """Modules that the main program has at hand, itself or something defined in them."""
    names: Set[str] = set()
    for value in list(vars(sys.modules["__main__"]).values()):
        if isinstance(value, types.ModuleType):
            names.add(value.__name__)
        elif isinstance(value, (type, types.FunctionType)) or hasattr(type(value), "__gpumesh_reduce__"):
            names.add(value.__module__)
        else:
            names.add(type(value).__module__)
    return {name for name in names if isinstance(name, str) and name.partition(".")[0] not in _NEVER}


def have_appeared(names: Iterable[str]) -> bool:
    """Whether any of these names, which led nowhere, leads somewhere now."""
    return any(_look_for(name, None) is not None for name in names)


def loaded_besides(claims: Iterable[str]) -> List[str]:
    """Local modules that are loaded, without those that these claims (`cargo.Parcel.claims`) are about."""
    found: List[str] = []
    claimed = set(claims)
    for name, module in list(sys.modules.items()):
        is_local = _locals.get(name)
        if is_local is None:
            file = getattr(module, "__dict__", {}).get("__file__")
            is_local = _locals[name] = (
                name.partition(".")[0] not in _NEVER
                and isinstance(file, str)
                and file.endswith(".py")
                and is_local_path(os.path.abspath(file))
            )
        if is_local and not _is_claimed(name, claimed):
            found.append(name)
    return found


def _is_claimed(name: str, claimed: Set[str]) -> bool:
    above = name.rpartition(".")[0]
    if above + ".*" in claimed:
        return True
    while name:
        if name in claimed:
            return True
        name = name.rpartition(".")[0]
    return False


_locals: Dict[str, bool] = {}  # Loaded modules looked at before.


class _Search:
    """Finds modules by name; remembers what it has seen, as long as it lives."""

    def __init__(self) -> None:
        self._places: Dict[str, Optional[_Place]] = {}
        self._modules: Dict[str, Optional[Module]] = {}

    def find(self, name: str) -> Optional[Module]:
        """The local module of this name; None for a namespace, for what is installed, and for what does not exist."""
        if name not in self._modules:
            self._modules[name] = self._find(name)
        return self._modules[name]

    def is_missing(self, top: str) -> bool:
        """Whether nothing of this name, which has no dot, can be imported now."""
        return top not in _NEVER and self._place(top, None) is None

    def _find(self, name: str) -> Optional[Module]:
        parts = name.split(".")
        if parts[0] in _NEVER:
            return None
        origin: Optional[Origin] = None
        folders: Optional[List[str]] = None
        for count in range(1, len(parts) + 1):
            so_far = ".".join(parts[:count])
            place = self._place(so_far, folders)
            if place is None:
                return _loaded_alone(name)
            is_last = count == len(parts)
            if place.file and not is_local_path(place.file):
                return None
            if place.folders and place.file:
                origin = origin or Origin(PACKAGE, so_far, os.path.dirname(place.file))
            if is_last:
                if not place.file or not os.path.isfile(place.file):
                    return None  # A namespace; or inside a zip file.
                package = so_far if place.folders else so_far.rpartition(".")[0]
                return Module(name, place.file, package, _home(name, place.file, origin))
            folders = place.folders
            if not folders:
                return None  # An attribute of a module.
        return None

    def _place(self, name: str, folders: Optional[List[str]]) -> Optional[_Place]:
        if name not in self._places:
            self._places[name] = _loaded_place(name) or _look_for(name, folders)
        return self._places[name]


class _Place:
    __slots__ = ("file", "folders")

    def __init__(self, file: str, folders: List[str]) -> None:
        self.file = file  # "" for a namespace.
        self.folders = folders  # Where submodules are.


def _loaded_place(name: str) -> Optional[_Place]:
    module = sys.modules.get(name)
    if module is None:
        return None
    file = getattr(module, "__file__", None)
    folders = _strings(getattr(module, "__path__", None))
    return _place_of(file if isinstance(file, str) else "", folders)


def _look_for(name: str, folders: Optional[List[str]]) -> Optional[_Place]:
    """What importing would find, as far as that can be told without importing."""
    for finder in list(sys.meta_path):
        try:
            spec = finder.find_spec(name, folders)
        except Exception:  # noqa: BLE001 - anybody's code, for any name
            spec = None
        if spec is not None:
            origin = spec.origin if spec.has_location else None
            return _place_of(origin or "", _strings(spec.submodule_search_locations)) or _Place(str(spec.origin), [])
    # A namespace inside of a namespace, which finders find only when the outer one is loaded.
    inner = [os.path.join(folder, name.rpartition(".")[2]) for folder in folders or ()]
    return _place_of("", [folder for folder in inner if os.path.isdir(folder)])


def _place_of(file: str, folders: List[str]) -> Optional[_Place]:
    if file:
        file = os.path.abspath(file)
        if is_local_path(file) and not file.endswith((".py", *_EXTENSIONS)):
            return None
    return _Place(file, folders) if file or folders else None


def _strings(paths: Any) -> List[str]:
    try:
        # That of a namespace can be read only once its parent is loaded, but for this attribute.
        return [os.path.abspath(path) for path in getattr(paths, "_path", paths) or () if isinstance(path, str)]
    except Exception:  # noqa: BLE001 - a module may put anything in place of its path
        return []


def _home(name: str, file: str, package: Optional[Origin]) -> Origin:
    if package is not None and file.startswith(package.path + os.sep):
        return package
    folder = name.rpartition(".")[0]
    if folder and package is None:
        return Origin(FOLDER, folder, os.path.dirname(file))
    return Origin(FILE, name, file)


def _loaded_alone(name: str) -> Optional[Module]:
    """A module that was loaded under a name that leads nowhere, as test runners do."""
    place = _loaded_place(name)
    if place is None or not place.file or place.folders or not is_local_path(place.file):
        return None
    return Module(name, place.file, name.rpartition(".")[0], Origin(FILE, name, place.file))


_imports_of: Dict[str, Tuple[Tuple[int, int], Set[str]]] = {}  # File -> (time, size), names.


def _imports(module: Module) -> Set[str]:
    try:
        status = os.stat(module.path)
    except OSError:
        return set()
    stamp = status.st_mtime_ns, status.st_size
    known = _imports_of.get(module.path)
    if known is None or known[0] != stamp:
        code = _code(module.path, status)
        names = imported_names(code, module.package) if code is not None else set()
        known = _imports_of[module.path] = stamp, names
    return known[1]


def _code(path: str, status: os.stat_result) -> Optional[types.CodeType]:
    """The code of a source file: as compiled before, or compiled now."""
    import importlib.util
    import marshal

    try:
        with open(importlib.util.cache_from_source(path), "rb") as file:
            data = file.read()
        wanted = importlib.util.MAGIC_NUMBER + bytes(4)
        wanted += (int(status.st_mtime) & 0xFFFFFFFF).to_bytes(4, "little") + (status.st_size & 0xFFFFFFFF).to_bytes(
            4, "little"
        )
        if data[:_PYC_HEADER] == wanted:
            code = marshal.loads(data[_PYC_HEADER:])
            return code if isinstance(code, types.CodeType) else None
    except (OSError, NotImplementedError, ValueError, EOFError, TypeError):
        pass
    import warnings

    try:
        with open(path, "rb") as file:
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compile(source, path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # Whoever imports it will be told.
