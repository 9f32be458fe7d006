"""A small disk that can be filled up and made read-only, where this user may mount one."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from pathlib import Path
from typing import Iterator

import pytest


class SmallDisk:
    """A file system of its own, that can be filled up and made read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Take all the room that is left."""
        with open(self._ballast, "ab", buffering=0) as file:
            for size in (65536, 1024, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Give it back."""
        self._ballast.unlink()

    def mount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.folder)], check=True, timeout=20)


@contextlib.contextmanager
def mounted_disk(folder: Path, *, megabytes: int) -> Iterator[SmallDisk]:
    """A new one in a folder that is made; the test is skipped where that is not permitted."""
    folder.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "gpumesh-test", str(folder)],
            capture_output=True,
            timeout=20,
            check=False,
        )
    except OSError as error:
        pytest.skip(f"no small disk can be mounted here: {error}")
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)
