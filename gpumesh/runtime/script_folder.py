"""Working copies of scripts' folders: a task finds its folder as it was sent, whatever the tasks before it have done there.

    <root of unpacked code>/.work/<name>/<number>/    a copy, in use by one task at a time
    <root of unpacked code>/.work/<name>.use          locked by the runner whose copies they are; without that, anybody removes them

To make a file costs up to a millisecond, to look at one microseconds. So a copy is used again: after each task what that has made is
removed, and what it has changed is copied anew.
"""

from __future__ import annotations

import os
import shutil
import stat
from typing import Dict, List, Optional, Tuple

from gpumesh.config import MAX_CODE_BYTES
from gpumesh.runtime.code_folder import can_lock, lock

WORK = ".work"
KEPT_COPIES = 4  # By one process, of different folders, ...
KEPT_BYTES = MAX_CODE_BYTES  # ... and of no more together, if it is several.
BLOCK_BYTES = 1 << 20
_USE = ".use"
_CACHE = "__pycache__"
_SECOND_NS = 1_000_000_000

Stamp = Tuple[
    int, int, int, int, int
]  # Inode, links, mode, size, time of the last change: a file that has these is as it was made.


class WorkFolders:
    """Those of one process, until it ends."""

    def __init__(self) -> None:
        self._folder: Optional[str] = None
        self._lock = -1
        self._number = 0
        self._copies: Dict[str, _Copy] = {}  # By source; the least recently used first.
        self._out: Dict[str, _Copy] = {}  # By their own folder: those in use.

    def take(self, source: str) -> str:
        """A copy of a folder of unpacked code, for one task; everything in it can be written.

        Raises:
            OSError: There is no room for it.
        """
        if self._folder is not None and not os.path.isdir(self._folder):
            self._forget()
        if self._folder is None:
            self._folder = self._open(os.path.join(os.path.dirname(source), WORK))
        copy = self._copies.pop(source, None)
        if copy is None:
            self._number += 1
            copy = _Copy(source, os.path.join(self._folder, str(self._number)))
        self._out[copy.folder] = copy
        return copy.folder

    def give_back(self, folder: str) -> None:
        """The task is over."""
        copy = self._out.pop(folder)
        try:
            copy.restore()
        except OSError:  # No room, or something that may not be removed.
            shutil.rmtree(folder, ignore_errors=True)
            return
        copies = self._copies
        copies[copy.source] = copy
        while len(copies) > KEPT_COPIES or (len(copies) > 1 and sum(each.nbytes for each in copies.values()) > KEPT_BYTES):
            oldest = copies.pop(next(iter(copies)))
            shutil.rmtree(oldest.folder, ignore_errors=True)

    def _forget(self) -> None:
        """Somebody has removed all of it, as may happen in folders for what is temporary."""
        os.close(self._lock)
        self._folder = None
        self._copies.clear()

    def _open(self, root: str) -> str:
        os.makedirs(root, mode=0o700, exist_ok=True)
        for name in os.listdir(root):
            if can_lock and name.endswith(_USE):
                _remove_abandoned(os.path.join(root, name))
        while True:
            folder = os.path.join(root, os.urandom(4).hex())
            try:
                self._lock = os.open(folder + _USE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue
            lock(self._lock, exclusive=True)
            if os.fstat(self._lock).st_nlink:
                os.mkdir(folder, 0o700)
                return folder
            os.close(self._lock)  # Taken for an abandoned one between the two.


class _Copy:
    """One copy, and what is in it when nobody has changed it."""

    __slots__ = ("source", "folder", "nbytes", "_content")

    def __init__(self, source: str, folder: str) -> None:
        self.source = source
        self.folder = folder
        self.nbytes = 0
        self._content: Dict[str, Dict[str, Optional[Stamp]]] = {}  # Folder, relative -> name -> None: a folder.
        try:
            self._make("")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.nbytes = sum(stamp[3] for names in self._content.values() for stamp in names.values() if stamp is not None)

    def restore(self) -> None:
        """Make it what it was.

        Raises:
            OSError: That is not possible.
        """
        self._restore("")

    def _make(self, inside: str) -> None:
        """A folder that is not there."""
        os.mkdir(self._at(inside), 0o700)
        names = self._content[inside] = {}
        with os.scandir(os.path.join(self.source, inside)) as items:
            for item in items:
                path = os.path.join(inside, item.name)
                if item.is_dir(follow_symlinks=False):
                    names[item.name] = None
                    self._make(path)
                else:
                    names[item.name] = _copy(item.path, self._at(path))

    def _restore(self, inside: str) -> None:
        names = self._content[inside]
        folder = self._at(inside)
        if os.lstat(folder).st_mode & 0o700 != 0o700:
            os.chmod(folder, 0o700)
        with os.scandir(folder) as items:
            found = list(items)
        there: List[str] = []
        for item in found:
            is_folder = item.is_dir(follow_symlinks=False)
            if item.name in names:
                stamp = names[item.name]
                if stamp is None and is_folder:
                    self._restore(os.path.join(inside, item.name))
                    there.append(item.name)
                    continue
                if stamp is not None and _stamp(item.stat(follow_symlinks=False)) == stamp:
                    there.append(item.name)
                    continue
            elif item.name == _CACHE and is_folder and _is_bytecode(item.path):
                continue  # Of sources that are as they were, or it is not used.
            if is_folder:
                shutil.rmtree(item.path)
            else:
                os.unlink(item.path)
        for name in names.keys() - set(there):
            path = os.path.join(inside, name)
            if names[name] is None:
                self._make(path)
            else:
                names[name] = _copy(os.path.join(self.source, path), self._at(path))

    def _at(self, inside: str) -> str:
        return os.path.join(self.folder, inside) if inside else self.folder


def _copy(source: str, target: str) -> Stamp:
    """A file that can be written. It is given a time that whoever writes to it cannot leave by chance."""
    before = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(before)
        after = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o755 if status.st_mode & 0o100 else 0o644)
        try:
            while True:
                data = os.read(before, BLOCK_BYTES)
                if not data:
                    break
                while data:
                    data = data[os.write(after, data) :]
            changed = status.st_mtime_ns - _SECOND_NS
            os.utime(after if os.utime in os.supports_fd else target, ns=(changed, changed))
            return _stamp(os.fstat(after))
        finally:
            os.close(after)
    finally:
        os.close(before)


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_nlink, status.st_mode, status.st_size, status.st_mtime_ns


def _is_bytecode(folder: str) -> bool:
    with os.scandir(folder) as items:
        return all(item.name.endswith(".pyc") and stat.S_ISREG(item.stat(follow_symlinks=False).st_mode) for item in items)


def _remove_abandoned(use: str) -> None:
    try:
        descriptor = os.open(use, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if lock(descriptor, exclusive=True, wait=False) and os.fstat(descriptor).st_nlink:
            shutil.rmtree(use[: -len(_USE)], ignore_errors=True)
            os.unlink(use)
    finally:
        os.close(descriptor)
