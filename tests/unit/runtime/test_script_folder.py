"""Working copies of a script's folder: whole, writable, one for each task, and gone afterwards, whoever dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from gpumesh.runtime.script_folder import WORK, WorkFolders


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "code" / "digest"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "größe.txt").write_text("7")
    (folder / "data.csv").write_text("a,b\n")
    (folder / "tool.sh").write_text("#!/bin/sh\n")
    (folder / "data.csv").chmod(0o444)
    (folder / "tool.sh").chmod(0o555)
    return folder


def test_a_copy_is_the_folder_and_can_be_written(source: Path) -> None:
    folders = WorkFolders()
    copy = Path(folders.make(str(source)))

    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*")) == [
        "data.csv",
        "deep",
        "deep/er",
        "deep/er/größe.txt",
        "tool.sh",
    ]
    assert (copy / "data.csv").stat().st_mode & 0o777 == 0o644
    assert (copy / "tool.sh").stat().st_mode & 0o777 == 0o755
    (copy / "data.csv").write_text("mine")
    other = Path(folders.make(str(source)))
    assert other != copy
    assert (other / "data.csv").read_text() == (source / "data.csv").read_text() == "a,b\n"

    folders.remove(str(copy))

    assert not copy.exists()
    assert other.exists()


def left(source: Path) -> List[str]:
    return sorted(path.name for path in (source.parent / WORK).iterdir())


def test_what_a_dead_process_has_left_is_removed_by_the_next_and_what_a_living_one_uses_is_not(source: Path) -> None:
    living = WorkFolders()
    kept = Path(living.make(str(source)))
    dead = f"from gpumesh.runtime.script_folder import WorkFolders; import os; print(WorkFolders().make({str(source)!r})); os._exit(9)"
    run = subprocess.run([sys.executable, "-c", dead], check=False, stdout=subprocess.PIPE, text=True, timeout=20)
    assert run.returncode == 9
    assert Path(run.stdout.strip()).exists(), run.stdout
    assert len(left(source)) == 4

    mine = Path(WorkFolders().make(str(source)))

    assert not Path(run.stdout.strip()).parent.exists()
    assert left(source) == sorted([kept.parent.name, kept.parent.name + ".use", mine.parent.name, mine.parent.name + ".use"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_no_room_is_an_error_that_leaves_nothing(source: Path) -> None:
    source.parent.chmod(0o500)
    try:
        with pytest.raises(OSError):
            WorkFolders().make(str(source))
    finally:
        source.parent.chmod(0o700)


def test_a_copy_that_fails_half_way_leaves_nothing(source: Path) -> None:
    folders = WorkFolders()
    first = Path(folders.make(str(source)))
    os.symlink("nowhere", source / "broken")

    with pytest.raises(OSError):
        folders.make(str(source))

    assert list(first.parent.iterdir()) == [first]
