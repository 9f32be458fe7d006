"""A control group with a limit on memory, for processes of a test; only where this machine permits it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Iterable, Iterator, Optional

import pytest

from tests.support.processes import until

ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """One group below the one that this process is in, so that whatever holds for us holds for what is moved there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, pids: Iterable[int]) -> None:
        """Move these processes; what they start later is in the group, too."""
        for pid in pids:
            (self.folder / "cgroup.procs").write_text(str(pid))

    def is_empty(self) -> bool:
        return not (self.folder / "cgroup.procs").read_text().strip()


@contextlib.contextmanager
def memory_group(limit: int, name: str) -> Iterator[MemoryGroup]:
    """A group whose processes may have `limit` bytes together; they must have ended when the block does. Skips the test if there can be none."""
    home = _home()
    if home is None:
        pytest.skip("no control group of this process watches memory")
    folder = home / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    group = MemoryGroup(folder)
    try:
        file = folder / ("memory.limit_in_bytes" if (folder / "memory.limit_in_bytes").exists() else "memory.max")
        try:
            file.write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no limit can be set in a control group here: {error}")
        yield group
        until(group.is_empty, 10, what="the end of the processes in the group")
    finally:
        folder.rmdir()


def _home() -> Optional[Path]:
    """The group of this process that watches memory; version 1 first."""
    home = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _existing(ROOT / "memory", path)
        if number == "0":
            home = _existing(ROOT, path)
    return home if home is not None and (home / "cgroup.controllers").exists() else None


def _existing(base: Path, path: str) -> Optional[Path]:
    folder = base / path.strip("/")
    return folder if folder.is_dir() else None
