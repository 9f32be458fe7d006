"""Unpacked code on this machine's disk: one folder for each content, shared by all processes of this user.

    <root>/<digest>-<boot>/      the files; there are no half ones: they are written beside, then renamed
    <root>/<digest>-<boot>.use   locked, shared, by whoever imports from the folder; its time is that of the last use
    <root>/.lock                 held by the one process that unpacks or tidies up

A folder is of use only until the machine starts anew: what was written shortly before a loss of power may be there in name only.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import Any, Dict, List, Mapping, Optional, Tuple

from gpumesh.config import CODE_CACHE_BYTES, CODE_CACHE_ENTRIES, MAX_CODE_BYTES
from gpumesh.errors import SerializationError
from gpumesh.serialization.cargo import File, Parcel, unpack_files

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there, and so nothing removed.
    fcntl = None  # type: ignore[assignment]

can_lock = fcntl is not None
FOLDER_VARIABLE = "GPUMESH_CODE"  # Where it is kept, if not in the user's cache.
_USE = ".use"


class CodeFolder:
    """This process's view of it; holds the locks of what it uses until it ends."""

    def __init__(self, root: Optional[str] = None) -> None:
        self._root = root
        self._held: Dict[str, int] = {}  # Folder -> descriptor of its lock.

    @property
    def root(self) -> str:
        """The folder of folders."""
        if self._root is None:
            self._root = _find_root()
        return self._root

    def place(self, parcel: Parcel, pieces: Mapping[bytes, Any]) -> str:
        """The folder with the files of a parcel, which stays while this process lives.

        Raises:
            SerializationError: They cannot be unpacked here.
        """
        try:
            folder = os.path.join(self.root, f"{parcel.digest.hex()}-{_boot()}")
            if folder not in self._held:
                self._hold(folder)
            if not os.path.isdir(folder):
                self._unpack([pieces[digest] for digest in parcel.pieces], folder)
        except OSError as error:
            raise SerializationError(
                f"the code of {parcel.name} cannot be unpacked on this machine: {error}; make room there, or name another folder in "
                f"{FOLDER_VARIABLE}"
            ) from error
        return folder

    def _hold(self, folder: str) -> None:
        while True:
            descriptor = os.open(folder + _USE, os.O_RDWR | os.O_CREAT, 0o600)
            lock(descriptor, exclusive=False)
            if os.fstat(descriptor).st_nlink:
                break  # Otherwise it was tidied away between the two.
            os.close(descriptor)
        os.utime(descriptor if os.utime in os.supports_fd else folder + _USE)
        self._held[folder] = descriptor

    def _unpack(self, pieces: List[Any], folder: str) -> None:
        files = [file for piece in pieces for file in unpack_files(piece)]
        total = sum(len(file.data) for file in files)
        if total > MAX_CODE_BYTES:
            raise SerializationError(f"shipped code of {total / 1e6:.1f} MB is over the limit of {MAX_CODE_BYTES / 1e6:.0f} MB")
        guard = os.open(os.path.join(self.root, ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            lock(guard, exclusive=True)
            if os.path.isdir(folder):
                return  # A sibling was quicker.
            self._tidy(total)
            part = os.path.join(self.root, f".part-{os.getpid()}-{os.urandom(4).hex()}")
            os.mkdir(part, 0o700)
            try:
                _write(files, part)
                os.write(self._held[folder], b"%d" % total)
                os.rename(part, folder)
            except BaseException:
                _remove(part)
                raise
        finally:
            os.close(guard)

    def _tidy(self, coming: int) -> None:
        """Remove what was used least recently, and is not in use, to make room for so many bytes. Under the lock."""
        if fcntl is None:
            return
        kept: List[Tuple[int, str, int]] = []
        total = coming
        for name in os.listdir(self.root):
            path = os.path.join(self.root, name)
            if name.startswith(".part-"):
                _remove(path)  # Whoever wrote it is dead: it had the lock that we have.
            elif name.endswith(_USE):
                size = _read_size(path)
                kept.append((os.stat(path).st_mtime_ns, path, size))
                total += size
        kept.sort()
        count = len(kept)
        for _, path, size in kept:
            if count <= CODE_CACHE_ENTRIES and total <= CODE_CACHE_BYTES:
                return
            if path[: -len(_USE)] not in self._held and _remove_unused(path):
                count -= 1
                total -= size


def _remove_unused(use: str) -> bool:
    descriptor = os.open(use, os.O_RDWR)
    try:
        if not lock(descriptor, exclusive=True, wait=False):
            return False
        _remove(use[: -len(_USE)])
        os.unlink(use)
        return True
    finally:
        os.close(descriptor)


def _write(files: List[File], folder: str) -> None:
    made = {folder}
    for file in files:
        path = os.path.join(folder, *os.fsdecode(file.name).split("/"))
        parent = os.path.dirname(path)
        if parent not in made:
            os.makedirs(parent, exist_ok=True)
            made.add(parent)
        # Read-only: whatever a task changed here would be seen by all that come after it.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o555 if file.is_executable else 0o444)
        with open(descriptor, "wb") as out:
            out.write(file.data)


_BINARY = getattr(os, "O_BINARY", 0)


def _read_size(use: str) -> int:
    with open(use, "rb") as file:
        text = file.read(32)
    return int(text) if text.isdigit() else 0


def _remove(path: str) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def lock(descriptor: int, *, exclusive: bool, wait: bool = True) -> bool:
    """Lock a file until it is closed; False if another has it and we do not wait."""
    if fcntl is None:
        return True
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _find_root() -> str:
    """A folder that is ours alone: the user's cache, or one in the temporary folder."""
    named = os.environ.get(FOLDER_VARIABLE, "").strip()
    if named:
        os.makedirs(named, mode=0o700, exist_ok=True)
        return os.path.abspath(named)
    folder = _cache_folder()
    if _is_usable(folder):
        return folder
    import tempfile

    folder = os.path.join(tempfile.gettempdir(), f"gpumesh-code-{_user()}")
    return folder if _is_usable(folder) else tempfile.mkdtemp(prefix="gpumesh-code-")


def _is_usable(folder: str) -> bool:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return _is_ours(os.lstat(folder)) and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def _cache_folder() -> str:
    if sys.platform == "linux":  # What platformdirs says too, without the 5 ms that importing it takes.
        cache = os.environ.get("XDG_CACHE_HOME", "").strip() or os.path.join(os.path.expanduser("~"), ".cache")
        return os.path.join(cache, "gpumesh", "code")
    import platformdirs

    return os.path.join(platformdirs.user_cache_dir("gpumesh", appauthor=False), "code")


def _is_ours(status: os.stat_result) -> bool:
    """Whether nobody else can have put code there."""
    if not hasattr(os, "geteuid"):
        return True
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _user() -> Any:
    return os.geteuid() if hasattr(os, "geteuid") else os.environ.get("USERNAME", "user")


def _boot() -> str:
    """Changes when the machine starts anew, where that can be told."""
    global _boot_text
    if _boot_text is None:
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                _boot_text = file.read(8)
        except OSError:
            _boot_text = "0"
    return _boot_text


_boot_text: Optional[str] = None
