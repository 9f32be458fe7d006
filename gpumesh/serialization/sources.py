"""Files of one origin: looked at cheaply, read when they have changed, made into a parcel."""

from __future__ import annotations

import logging
import os
import time
from typing import Dict, List, Optional, Set, Tuple

from gpumesh.config import MAX_CODE_BYTES
from gpumesh.serialization import folders
from gpumesh.serialization.cargo import File, Parcel, digest_of, digest_of_parcel, in_pieces, pack_files
from gpumesh.serialization.modules import FILE, FOLDER, SHIPPED, Origin

logger = logging.getLogger("gpumesh")

TOLD = 5  # Files named in one warning.
SAME_TICK_NS = 20_000_000  # Clocks of file systems step by up to 4 ms: a file this young may change again unseen.
SAME_SECOND_NS = 2_000_000_000  # The same where they keep whole seconds only.


class Source:
    """One origin: what is in it, and what of that has been read."""

    __slots__ = ("origin", "keep", "listing", "total", "pieces", "_parcel", "_files", "_stamps", "_young", "_told", "_kept")

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.keep: Set[str] = set()  # Files that the code imports: they travel whatever an ignore file says.
        self.listing: List[folders.Entry] = []
        self.total = 0
        self.pieces: Dict[bytes, bytes] = {}  # Of the parcel: digest -> packed files.
        self._parcel: Optional[Parcel] = None
        self._files: Dict[str, Tuple[Tuple[int, int], File]] = {}  # Path -> time and size when read, content.
        self._stamps: List[Tuple[str, int, int]] = []  # Path, time, size (-1: a folder).
        self._young: List[str] = []  # Read so soon after a change that the next might leave the same time.
        self._told: Set[str] = set()
        self._kept: Set[str] = set()  # `keep` at the last look.

    @property
    def order(self) -> Tuple[bool, str]:
        """What was found comes before what was named."""
        return self.origin.kind == SHIPPED, self.origin.name

    def is_unchanged(self) -> bool:
        """Whether the files are as they were when the parcel was made."""
        try:
            for path, mtime, size in self._stamps:
                status = os.stat(path)
                if status.st_mtime_ns != mtime or (size >= 0 and status.st_size != size):
                    return False
        except OSError:
            return False
        return not self._young or self._grows_up()

    def _grows_up(self) -> bool:
        """Read again what was young when it was read."""
        now = time.time_ns()
        for path in list(self._young):
            known = self._files.get(path)
            try:
                with open(path, "rb") as file:
                    data = file.read()
            except OSError:
                return False
            if known is None or known[1].data != data:
                self._files.pop(path, None)
                return False
            if not _is_young(known[0][0], now):
                self._young.remove(path)
        return True

    def list(self) -> None:
        """Look at what is there now, without reading any of it."""
        if self._parcel is not None and self.keep == self._kept and self.is_unchanged():
            return
        self._parcel = None
        self._kept = set(self.keep)
        path, kind = self.origin.path, self.origin.kind
        found: Dict[str, int] = {}
        if os.path.isdir(path):
            listed = folders.list_folder(path, deep=kind != FOLDER, keep=self.keep)
            self.listing, found = listed.entries, listed.folders
            self._tell_of(listed.unreadable)
            self._add_kept()
        else:
            self.listing = folders.list_file(path)
        self.total = sum(entry.nbytes for entry in self.listing)
        self._stamps = [(folder, mtime, -1) for folder, mtime in found.items()]

    def _add_kept(self) -> None:
        """What the code imports travels even from a folder that is left out for its name."""
        folder = self.origin.path + os.sep
        for path in sorted(self.keep - {entry.path for entry in self.listing}):
            if path.startswith(folder):
                name = path[len(folder) :].replace(os.sep, "/")
                self.listing += [entry._replace(name=name) for entry in folders.list_file(path)]

    def _tell_of(self, unreadable: List[str]) -> None:
        news = sorted(set(unreadable) - self._told)
        if news:
            self._told.update(news)
            logger.warning("%s cannot be read, so it does not travel to the workers", ", ".join(news[:TOLD]))

    @property
    def made(self) -> Optional[Parcel]:
        """The parcel, if it has been made since the last look that saw a change."""
        return self._parcel

    def parcel(self) -> Parcel:
        """What was there at the last look, read."""
        if self._parcel is not None:
            return self._parcel
        read: Dict[str, Tuple[Tuple[int, int], File]] = {}
        stamps = [stamp for stamp in self._stamps if stamp[2] < 0]
        young: List[str] = []
        gone: List[str] = []
        now = time.time_ns()
        for entry in self.listing:
            known = self._files.get(entry.path)
            if known is None or known[0] != (entry.mtime_ns, entry.nbytes) or entry.path in self._young:
                try:
                    with open(entry.path, "rb") as file:
                        status = os.fstat(file.fileno())
                        data = file.read(MAX_CODE_BYTES)
                except OSError:
                    gone.append(entry.path)
                    continue
                packed = File(self._name_of(entry.name), entry.is_executable, data)
                known = (status.st_mtime_ns, status.st_size), packed
            read[entry.path] = known
            stamps.append((entry.path, *known[0]))
            if _is_young(known[0][0], now):
                young.append(entry.path)
        self._tell_of(gone)
        self._files, self._stamps, self._young = read, stamps, young
        files = sorted((known[1] for known in read.values()), key=lambda file: file.name)
        pieces = {digest_of(piece): piece for piece in in_pieces(files)}
        self.pieces = {digest: self.pieces.get(digest) or pack_files(piece) for digest, piece in pieces.items()}
        parcel = self._parcel = Parcel(
            self.origin.name, digest_of_parcel(pieces), self._claims(), self._roots(), self._shown(), tuple(pieces)
        )
        return parcel

    def _name_of(self, name: str) -> bytes:
        """A file's name in the parcel."""
        origin = self.origin
        if origin.kind == FILE:
            return os.fsencode(origin.name.replace(".", "/") + ".py")
        return os.fsencode(self._prefix() + name)

    def _prefix(self) -> str:
        origin = self.origin
        if origin.kind == SHIPPED:
            return os.path.basename(origin.path) + "/" if self._is_package() else ""
        return origin.name.replace(".", "/") + "/"

    def _is_package(self) -> bool:
        return any(entry.name == "__init__.py" for entry in self.listing)

    def _claims(self) -> Tuple[str, ...]:
        if self.origin.kind == FOLDER:
            return (self.origin.name + ".*",)
        if self.origin.kind != SHIPPED:
            return (self.origin.name,)
        if self._is_package():
            return (os.path.basename(self.origin.path),)
        tops = {entry.name.partition("/")[0] for entry in self.listing if entry.name.endswith(".py")}
        return tuple(sorted({top[:-3] if top.endswith(".py") else top for top in tops}))

    def _roots(self) -> Tuple[str, ...]:
        """A folder that is a package itself can be imported under its name, and its modules under theirs."""
        is_package = self.origin.kind == SHIPPED and self._is_package()
        return ("", os.path.basename(self.origin.path)) if is_package else ("",)

    def _shown(self) -> Tuple[Tuple[str, str], ...]:
        if self.origin.kind == FILE:
            return ((os.fsdecode(self._name_of("")), self.origin.path),)
        if os.path.isdir(self.origin.path):
            return ((self._prefix().rstrip("/"), self.origin.path),)
        return ((os.path.basename(self.origin.path), self.origin.path),)


def _is_young(mtime_ns: int, now_ns: int) -> bool:
    return now_ns - mtime_ns < (SAME_SECOND_NS if mtime_ns % 1_000_000_000 == 0 else SAME_TICK_NS)
