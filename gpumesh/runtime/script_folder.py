"""Working copies of a script's folder: each task has one of its own, and nothing of it is left behind.

<root of unpacked code>/.work/<name>/<number>/    the copy of one task
<root of unpacked code>/.work/<name>.use          locked by the runner whose tasks they are; without that, anybody removes them
"""

from __future__ import annotations

import os
import shutil
from typing import Optional

from gpumesh.runtime.code_folder import can_lock, lock

WORK = ".work"
_USE = ".use"


class WorkFolders:
    """Those of one process, until it ends."""

    def __init__(self) -> None:
        self._root = ""
        self._folder: Optional[str] = None
        self._lock = -1
        self._number = 0

    def make(self, source: str) -> str:
        """A copy of a folder of unpacked code, for one task; everything in it can be written.

        Raises:
            OSError: There is no room for it.
        """
        if self._folder is None:
            self._root = os.path.join(os.path.dirname(source), WORK)
            self._folder = self._open()
        self._number += 1
        folder = os.path.join(self._folder, str(self._number))
        try:
            _copy(source, folder)
        except BaseException:
            self.remove(folder)
            raise
        return folder

    def remove(self, folder: str) -> None:
        """The task is over."""
        shutil.rmtree(folder, ignore_errors=True)

    def _open(self) -> str:
        os.makedirs(self._root, mode=0o700, exist_ok=True)
        for name in os.listdir(self._root):
            if can_lock and name.endswith(_USE):
                _remove_abandoned(os.path.join(self._root, name))
        while True:
            folder = os.path.join(self._root, os.urandom(4).hex())
            try:
                self._lock = os.open(folder + _USE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue
            lock(self._lock, exclusive=True)
            if os.fstat(self._lock).st_nlink:
                os.mkdir(folder, 0o700)
                return folder
            os.close(self._lock)  # Taken for an abandoned one between the two.


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


def _copy(source: str, target: str) -> None:
    os.mkdir(target, 0o700)
    with os.scandir(source) as items:
        for item in items:
            path = os.path.join(target, item.name)
            if item.is_dir(follow_symlinks=False):
                _copy(item.path, path)
            else:
                shutil.copyfile(item.path, path)
                os.chmod(path, 0o755 if item.stat().st_mode & 0o100 else 0o644)
