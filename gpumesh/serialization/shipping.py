"""What travels with a function: its local modules and the folders that were named, as they are on disk at the time of a call.

    function ── names ──> reach ── origins ──> sources (files, times) ── content ──> parcels ── digest ──> cargo

A source is read again only when the time or size of a file, or the time of a folder, says that it has changed; and whether they say so
is looked at for no more than a small share of the time.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
from typing import Any, Dict, FrozenSet, Iterable, List, Optional, Sequence, Set, Tuple

from gpumesh.config import CODE_CHECK_BURST_SECONDS, CODE_CHECK_SHARE, MAX_CODE_BYTES
from gpumesh.errors import SerializationError
from gpumesh.model.payloads import OutOfBand
from gpumesh.serialization import folders, modules
from gpumesh.serialization.cargo import Parcel, pack
from gpumesh.serialization.modules import SHIPPED, Module, Origin
from gpumesh.serialization.sources import Source

BIGGEST = 5  # Named when there is too much.


class Cargo:
    """Everything that one function takes along."""

    __slots__ = ("digest", "parcels", "pieces", "_list")

    def __init__(self, parcels: List[Parcel], pieces: Dict[bytes, bytes]) -> None:
        from hashlib import blake2b

        self.parcels = parcels
        self.pieces = pieces  # Of all parcels.
        digest = blake2b(digest_size=16)
        for parcel in parcels:
            digest.update(repr(tuple(parcel)).encode("utf-8", "backslashreplace"))
        self.digest = digest.digest()
        self._list: Optional[bytes] = None

    def parts(self) -> List[Tuple[bytes, bytes, Tuple[bytes, ...]]]:
        """What travels, each by its digest, with the digests of what it needs: first the pieces, at last the list of parcels."""
        if self._list is None:
            self._list = pack(self.parcels)
        return [*((digest, piece, ()) for digest, piece in self.pieces.items()), (self.digest, self._list, tuple(self.pieces))]


class Travel:
    """What was found for one function, until something that it depends on has changed."""

    __slots__ = ("cargo", "others", "_shipper", "_version", "_names", "_missing", "_seen", "_loaded", "_next_look")

    def __init__(
        self, shipper: Shipper, cargo: Optional[Cargo], names: FrozenSet[str], missing: Set[str], sources: List[Source]
    ) -> None:
        self.cargo = cargo  # None: it takes nothing along.
        self.others = self._others()  # Local modules that are loaded and stay here, as pickles mention them.
        self._shipper = shipper
        self._version = shipper.version
        self._names = names  # Of the main program.
        self._missing = missing
        self._seen = [(source, source.made) for source in sources]
        self._loaded = len(sys.modules)
        self._next_look = 0.0 if sources or missing else math.inf

    def holds(self) -> bool:
        """Whether it would be the same now. A tenth of a microsecond, but for the moments when it looks at the files."""
        if (len(sys.modules) != self._loaded or self._version != self._shipper.version) and not self._still_names_the_same():
            return False
        return time.perf_counter() < self._next_look or self._look()

    def names_the_same(self) -> bool:
        """Whether the same modules would travel now, whatever is in their files."""
        return (len(sys.modules) == self._loaded and self._version == self._shipper.version) or self._still_names_the_same()

    def _still_names_the_same(self) -> bool:
        loaded = len(sys.modules)
        if self._version != self._shipper.version or modules.main_names() != self._names:
            return False
        if self.others != self._others():
            return False
        self._loaded = loaded
        return True

    def _others(self) -> List[Tuple[bytes, str]]:
        parcels = self.cargo.parcels if self.cargo is not None else []
        names = modules.loaded_besides(claim for parcel in parcels for claim in parcel.claims)
        return [(_mark(name), name) for name in names if len(name.encode()) < 256]

    def mentioned_in(self, payloads: Iterable[Any]) -> Set[str]:
        """Which of the others a pickle refers to."""
        found: Set[str] = set()
        for payload in payloads:
            data = payload if type(payload) is bytes else getattr(payload, "value", None)
            if type(data) is OutOfBand:
                data = data.parts[0]
            if type(data) is bytes:
                found.update(name for mark, name in self.others if data.find(mark) >= 0)
        return found

    def _look(self) -> bool:
        started = time.perf_counter()
        with _lock:
            same = all(source.made is parcel and source.is_unchanged() for source, parcel in self._seen)
        same = same and not modules.have_appeared(self._missing)
        self._next_look = _budget.spend(started, time.perf_counter())
        return same


class Shipper:
    """Finds what travels with the functions of one session."""

    def __init__(self) -> None:
        self.version = 0  # Of what was named.
        self._named: List[Origin] = []
        self._further: Set[str] = set()  # Modules that arguments were made of.

    def add(self, path: Any) -> None:
        """Take a folder's content, or a file, along with every function from now on.

        Raises:
            ValueError: There is no such folder or file.
            SerializationError: It is too large.
        """
        origin = named_origin(path)
        with _lock:
            if origin in self._named:
                return
            source = _source(origin)
            source.list()
            _check_size([source], f"ship({str(path)!r})")
            self._named.append(origin)
            self.version += 1

    def add_modules(self, names: Set[str]) -> bool:
        """Take these along with every function from now on, as far as there is room; whether that is new."""
        with _lock:
            if names <= self._further:
                return False
            self._further |= names
            self.version += 1
            return True

    def travel(self, name: str, names: Iterable[str], *, packages: Sequence[str] = ()) -> Travel:
        """What a function takes along.

        Args:
            name: The function's, for messages.
            names: Modules that it refers to or imports.
            packages: Requirements of the environment that it runs in: what those install does not travel.

        Raises:
            SerializationError: A module that it needs cannot travel, or all together are too large.
        """
        with _lock:
            main = modules.main_names()
            without = _installed_by(packages) if packages else frozenset()
            needed = modules.reach(names, without=without)
            if needed.extension is not None:
                raise SerializationError(_explain_extension(name, *needed.extension))
            sources = _sources_of(needed.modules.values()) + [_source(origin) for origin in self._named]
            for source in sources:
                source.list()
            _check_size(sources, name)
            further = modules.reach(main | self._further, without=without).modules if main or self._further else {}
            sources += _that_fit(_sources_of(further.values()), sources)
            parcels = [source.parcel() for source in sorted(sources, key=lambda source: source.order)]
            return Travel(self, _cargo(parcels, sources), frozenset(main), needed.missing, sources)


def folder_cargo(folder: str, *, name: str, keep: Iterable[str] = ()) -> Cargo:
    """A folder with everything in it that travels, as it is on disk now.

    Args:
        folder: Absolute.
        name: What it is for, in messages.
        keep: Files in it that travel whatever an ignore file says.

    Raises:
        SerializationError: It is too large.
    """
    source = Source(Origin(SHIPPED, folder, folder))
    source.keep.update(keep)
    source.list()
    _check_size(
        [source], name, advice="keep large data outside of that folder, or name what is not needed in a .gitignore file"
    )
    return Cargo([source.parcel()], source.pieces)


class _Budget:
    """Time for looking: a share of all time, saved up to a small sum."""

    def __init__(self) -> None:
        self._saved = CODE_CHECK_BURST_SECONDS
        self._at = 0.0

    def spend(self, started: float, now: float) -> float:
        """A look took from `started` until `now`; when the next may be."""
        self._saved = min(CODE_CHECK_BURST_SECONDS, self._saved + (now - self._at) * CODE_CHECK_SHARE) - (now - started)
        self._at = now
        return now - min(0.0, self._saved) / CODE_CHECK_SHARE


_budget = _Budget()
_lock = threading.RLock()
_sources: Dict[Origin, Source] = {}
_cargos: Dict[Tuple[Tuple[Any, ...], ...], Cargo] = {}
_CARGOS = 8  # Of the last few calls: functions that take the same along share it.


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()  # In a forked child: another thread of the parent may have held it.


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def named_origin(path: Any) -> Origin:
    """What a user has named, as an origin.

    Raises:
        ValueError: There is no such folder or file.
    """
    found = os.path.abspath(os.path.expanduser(os.fsdecode(path)))
    if not os.path.isdir(found) and not os.path.isfile(found):
        raise ValueError(f"ship({str(path)!r}): there is no such folder or file; it would be {found}")
    return Origin(SHIPPED, found, found)


def _mark(name: str) -> bytes:
    """A module's name as a pickle writes it."""
    return b"\x8c" + bytes([len(name.encode())]) + name.encode()


def _source(origin: Origin) -> Source:
    source = _sources.get(origin)
    if source is None:
        source = _sources[origin] = Source(origin)
    return source


def _sources_of(found: Iterable[Module]) -> List[Source]:
    sources: Dict[Origin, Source] = {}
    for module in found:
        source = sources[module.origin] = _source(module.origin)
        source.keep.add(module.path)
    return list(sources.values())


def _that_fit(further: List[Source], sources: List[Source]) -> List[Source]:
    """What the main program has at hand comes along, in case that an argument is of one of its classes, but is no must."""
    room = MAX_CODE_BYTES - sum(source.total for source in sources)
    fitting: List[Source] = []
    for source in further:
        if source in sources:
            continue
        source.list()
        if source.total <= room and len(source.listing) <= folders.MAX_FILES:
            room -= source.total
            fitting.append(source)
    return fitting


def _cargo(parcels: List[Parcel], sources: List[Source]) -> Optional[Cargo]:
    if not parcels:
        return None
    key = tuple((parcel.name, parcel.digest, *parcel.shown) for parcel in parcels)
    cargo = _cargos.pop(key, None)
    if cargo is None:
        cargo = Cargo(parcels, {digest: piece for source in sources for digest, piece in source.pieces.items()})
    _cargos[key] = cargo
    while len(_cargos) > _CARGOS:
        del _cargos[next(iter(_cargos))]
    return cargo


ADVICE = (
    "name what is not needed in a .gitignore file, keep data outside of the package and pass it as arguments or with mesh.put(...), "
    "or install the package on the workers"
)


def _check_size(sources: List[Source], name: str, *, advice: str = ADVICE) -> None:
    total = sum(source.total for source in sources)
    count = sum(len(source.listing) for source in sources)
    if total <= MAX_CODE_BYTES and count <= folders.MAX_FILES:
        return
    entries = [(entry.path if len(sources) > 1 else entry.name, entry.nbytes) for source in sources for entry in source.listing]
    where = ", ".join(source.origin.path for source in sources)
    size = f"{_megabytes(total)}, over the limit of {_megabytes(MAX_CODE_BYTES)}"
    if total <= MAX_CODE_BYTES:
        size = f"more than {folders.MAX_FILES} files of {_megabytes(total)}"
    raise SerializationError(
        f"the code that would travel for {name} ({where}) is {size}; the biggest: "
        f"{folders.biggest(entries, BIGGEST, _megabytes)}; {advice}"
    )


def _explain_extension(name: str, module: Module, importer: str) -> str:
    top = module.name.partition(".")[0]
    by = f" (imported by {importer})" if importer else ""
    return (
        f"{name} needs {module.name}{by}, a compiled extension module of yours, and those cannot travel: {module.path} runs only on "
        f"machines like this one; install '{top}' on the workers and here (not in editable mode), or name it in packages=[...]"
    )


def _installed_by(packages: Sequence[str]) -> FrozenSet[str]:
    """Modules without a dot that requirements provide, as far as can be told here."""
    from importlib import metadata

    tops: Set[str] = set()
    for requirement in packages:
        match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
        if match is None:
            continue
        tops.add(re.sub(r"[-.]+", "_", match[0]))
        tops.add(re.sub(r"[-.]+", "_", match[0]).lower())
        try:
            tops.update((metadata.distribution(match[0]).read_text("top_level.txt") or "").split())
        except metadata.PackageNotFoundError:
            pass
    return frozenset(tops)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 50_000 else f"{size / 1e3:.1f} kB"
