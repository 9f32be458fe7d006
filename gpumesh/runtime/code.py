"""Code that was shipped, in the process that imports it: which folders are on the path of modules, and what was loaded from them.

Promises:

1. The modules of the cargo that is active win over modules of the same name from anywhere else but the standard library; modules of
   no other cargo can be imported.
2. What was loaded of a parcel stays loaded, with its state, as long as no other content of the same modules becomes active: what is
   not part of the active cargo is put aside meanwhile.
3. When other content becomes active, everything shipped is forgotten, as it may refer to what it replaces. `generation` tells.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any, Dict, List, Set, Tuple

from gpumesh.runtime.code_folder import CodeFolder
from gpumesh.serialization import exceptions
from gpumesh.serialization.cargo import unpack

_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_NEVER = frozenset({"gpumesh", "__main__", "__mp_main__", *sys.builtin_module_names})


class _Placed:
    """A parcel that lies on this machine's disk."""

    __slots__ = ("digest", "folder", "paths", "claims")

    def __init__(self, digest: bytes, folder: str, roots: Tuple[str, ...], claims: Tuple[str, ...]) -> None:
        self.digest = digest
        self.folder = folder + os.sep
        self.paths = [os.path.join(folder, root) if root else folder for root in roots]
        self.claims = claims

    def holds(self, module: Any) -> bool:
        """Whether a module was loaded from here."""
        file = _file_of(module)
        return file is not None and file.startswith(self.folder)


class ShippedCode:
    """See the module's promises."""

    def __init__(self, folder: CodeFolder) -> None:
        self.generation = 0
        self._folder = folder
        self._pieces: Dict[bytes, Any] = {}
        self._lists: Dict[bytes, Tuple[Any, Dict[bytes, Any]]] = {}  # With their pieces; of cargos not unpacked yet.
        self._cargos: Dict[bytes, List[_Placed]] = {b"": []}
        self._active: List[_Placed] = []
        self._paths: List[str] = []  # On the path of modules for the active cargo.
        self._content: Dict[str, bytes] = {}  # Claim -> digest of what was loaded for it, put aside or not.
        self._aside: Dict[bytes, Dict[str, Any]] = {}  # Digest -> its modules that were put aside.

    def define(self, digest: bytes, archive: Any, needs: Tuple[bytes, ...]) -> None:
        """Keep a list of parcels, or a piece of one for the list that comes next, until it is needed."""
        self._pieces[digest] = archive
        if needs:
            if digest not in self._cargos:
                self._lists[digest] = archive, {part: self._pieces[part] for part in needs}
            self._pieces.clear()

    def folders(self, digest: bytes) -> List[str]:
        """Where the files of a cargo lie on this machine, unpacked, as long as this process lives.

        Raises:
            SerializationError: It cannot be unpacked here.
        """
        return [placed.folder.rstrip(os.sep) for placed in self._placed(digest)]

    def activate(self, digest: bytes) -> None:
        """Make the modules of a cargo importable, and those of no other; `b""` is the cargo without any.

        Raises:
            SerializationError: It cannot be unpacked here.
        """
        cargo = self._placed(digest)
        try:
            self._switch(cargo)
        except BaseException:  # An interrupt, most likely: half of this cargo and half of that would be worse than none.
            self._forget()
            self._set_path([])
            raise

    def _switch(self, cargo: List[_Placed]) -> None:
        content: Dict[str, bytes] = {}
        for placed in cargo:
            for claim in placed.claims:
                content.setdefault(claim, placed.digest)
        if any(self._content.get(claim, own) != own for claim, own in content.items()):
            self._forget()
        else:
            staying = {placed.digest for placed in cargo}
            for placed in self._active:
                if placed.digest not in staying:
                    self._put_aside(placed)
        for placed in cargo:
            self._bring_back(placed)
            news = [claim for claim in placed.claims if claim not in self._content and content[claim] == placed.digest]
            if news:
                _drop([name for name, module in _claimed(news) if not placed.holds(module) and _may_go(name, module)])
        self._content.update(content)
        self._active = cargo
        self._set_path([path for placed in cargo for path in placed.paths])

    def _set_path(self, paths: List[str]) -> None:
        sys.path[:] = paths + [path for path in sys.path if path not in self._paths]
        self._paths = paths

    def _placed(self, digest: bytes) -> List[_Placed]:
        cargo = self._cargos.get(digest)
        if cargo is None:
            packed, pieces = self._lists[digest]
            cargo = []
            for parcel in unpack(packed):
                folder = self._folder.place(parcel, pieces)
                for inside, shown in parcel.shown:
                    exceptions.shown_paths[os.path.join(folder, inside) if inside else folder] = shown
                cargo.append(_Placed(parcel.digest, folder, parcel.roots, parcel.claims))
            self._cargos[digest] = cargo
            del self._lists[digest]
        return cargo

    def _forget(self) -> None:
        """Other content of modules that were loaded: away with everything, nothing may refer to what it replaces."""
        self.generation += 1
        known = tuple({placed.folder for cargo in self._cargos.values() for placed in cargo})
        _drop([name for name, module in list(sys.modules.items()) if (_file_of(module) or "").startswith(known)])
        self._aside.clear()
        self._content.clear()
        self._active = []
        gc.collect()  # Functions and their modules refer to each other; a model among them may fill a GPU.

    def _put_aside(self, placed: _Placed) -> None:
        names = [name for name, module in _claimed(placed.claims) if placed.holds(module)]
        if names:
            self._aside.setdefault(placed.digest, {}).update((name, sys.modules[name]) for name in names)
            _drop(names)

    def _bring_back(self, placed: _Placed) -> None:
        for name, module in self._aside.pop(placed.digest, {}).items():
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], child, module)


def _claimed(claims: Any) -> List[Tuple[str, Any]]:
    """Loaded modules that these claims are about: "proj" itself and all below it, "tests.*" those directly below it."""
    whole = {claim for claim in claims if not claim.endswith(".*")}
    direct = {claim[:-2] for claim in claims if claim.endswith(".*")}
    tops = {claim.partition(".")[0] for claim in claims}
    found: List[Tuple[str, Any]] = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in tops:
            continue
        is_direct = name.rpartition(".")[0] in direct and _file_of(module) is not None  # Not a namespace: others are in it.
        if is_direct or _has_prefix(name, whole):
            found.append((name, module))
    return found


def _has_prefix(name: str, prefixes: Set[str]) -> bool:
    while name:
        if name in prefixes:
            return True
        name = name.rpartition(".")[0]
    return False


def _may_go(name: str, module: Any) -> bool:
    """Whether shipped code takes the place of this module: not what the interpreter or this program itself is made of."""
    if name.partition(".")[0] in _NEVER:
        return False
    file = _file_of(module)
    return file is None or not file.startswith(_STANDARD) or "site-packages" in file or "dist-packages" in file


def _drop(names: List[str]) -> None:
    """Make as if these had not been imported."""
    for name in names:
        module = sys.modules.pop(name, None)
        parent, _, child = name.rpartition(".")
        owner = sys.modules.get(parent) if parent else None
        if owner is not None and getattr(owner, "__dict__", {}).get(child) is module:
            delattr(owner, child)


def _file_of(module: Any) -> Any:
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else None
