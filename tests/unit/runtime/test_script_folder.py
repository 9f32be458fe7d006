"""Working copies of a script's folder: whole, writable, as they were sent for each task, and gone with their process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

from gpumesh.runtime import script_folder
from gpumesh.runtime.script_folder import KEPT_COPIES, WORK, WorkFolders

CONTENT = {"data.csv": "a,b\n", "deep/er/größe.txt": "7", "deep/mod.py": "X = 1\n", "tool.sh": "#!/bin/sh\n"}


def make_source(folder: Path) -> Path:
    for name, text in CONTENT.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o555 if name == "tool.sh" else 0o444)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "code" / "digest")


def content(folder: Path) -> Dict[str, Any]:
    """Files and their text, other things and None."""
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() and not path.is_symlink() else None
        for path in folder.rglob("*")
    }


WHOLE = {**CONTENT, "deep": None, "deep/er": None}


def test_a_copy_is_the_folder_and_can_be_written(source: Path) -> None:
    folders = WorkFolders()

    copy = Path(folders.take(str(source)))
    other = Path(folders.take(str(source)))

    assert content(copy) == content(other) == WHOLE
    assert (copy / "data.csv").stat().st_mode & 0o777 == 0o644
    assert (copy / "tool.sh").stat().st_mode & 0o777 == 0o755
    (copy / "data.csv").write_text("mine")
    assert (other / "data.csv").read_text() == (source / "data.csv").read_text() == "a,b\n"


def replace_by_link(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


CHANGES: Dict[str, Callable[[Path, Path], Any]] = {
    "a new file": lambda copy, source: (copy / "new.txt").write_text("x"),
    "a new file below": lambda copy, source: (copy / "deep" / "new.txt").write_text("x"),
    "new folders": lambda copy, source: (copy / "out" / "a" / "b").mkdir(parents=True),
    "other text": lambda copy, source: (copy / "data.csv").write_text("x,y\n"),
    "longer text": lambda copy, source: (copy / "data.csv").write_text("x,y,z\n"),
    "a file that is gone": lambda copy, source: (copy / "deep" / "mod.py").unlink(),
    "another file of this name": lambda copy, source: os.replace(copy / "tool.sh", copy / "data.csv"),
    "a file that may not be read": lambda copy, source: (copy / "data.csv").chmod(0),
    "a folder that may not be read": lambda copy, source: (copy / "deep").chmod(0),
    "a folder of another name": lambda copy, source: os.rename(copy / "deep", copy / "deeper"),
    "a folder in place of a file": lambda copy, source: ((copy / "data.csv").unlink(), (copy / "data.csv").mkdir()),
    "a file in place of a folder": lambda copy, source: (os.rename(copy / "deep", copy / "d"), (copy / "deep").write_text("")),
    "a link in place of a file": lambda copy, source: replace_by_link(copy / "data.csv", source / "data.csv"),
    "a link in place of a folder": lambda copy, source: (
        os.rename(copy / "deep", copy / "d"),
        (copy / "deep").symlink_to(source),
    ),
    "a link to a folder elsewhere": lambda copy, source: (copy / "more").symlink_to(source),
    "a second name of a file": lambda copy, source: os.link(copy / "data.csv", source.parent / "second"),
    "no bytecode in the folder of bytecode": lambda copy, source: (
        (copy / "__pycache__").mkdir(),
        (copy / "__pycache__" / "x").touch(),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_next_task_finds_what_was_sent(source: Path, change: Callable[[Path, Path], Any]) -> None:
    folders = WorkFolders()
    copy = folders.take(str(source))
    change(Path(copy), source)

    folders.give_back(copy)

    again = folders.take(str(source))
    assert again == copy
    assert content(Path(again)) == WHOLE
    assert content(source) == WHOLE, "no change has gone through a link"
    assert (Path(again) / "data.csv").stat().st_nlink == 1
    assert os.access(Path(again) / "data.csv", os.R_OK | os.W_OK)


def test_what_nobody_has_changed_is_not_made_again_and_bytecode_stays(source: Path) -> None:
    folders = WorkFolders()
    copy = Path(folders.take(str(source)))
    (copy / "deep" / "__pycache__").mkdir()
    (copy / "deep" / "__pycache__" / "mod.cpython-311.pyc").write_bytes(b"")
    inodes = {path: path.stat().st_ino for path in copy.rglob("*")}
    (copy / "data.csv").read_text()

    folders.give_back(str(copy))

    assert {path: path.stat().st_ino for path in Path(folders.take(str(source))).rglob("*")} == inodes


def test_a_process_keeps_a_few_copies_and_no_large_ones_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [make_source(tmp_path / "code" / str(number)) for number in range(KEPT_COPIES + 2)]
    folders = WorkFolders()
    copies = []
    for source in sources:
        copies.append(Path(folders.take(str(source))))
        folders.give_back(str(copies[-1]))

    assert [copy.exists() for copy in copies] == [False] * 2 + [True] * KEPT_COPIES

    monkeypatch.setattr(script_folder, "KEPT_BYTES", 1)
    folders.give_back(folders.take(str(sources[2])))
    assert [copy.exists() for copy in copies] == [False, False, True, *[False] * (KEPT_COPIES - 1)]


def left(source: Path) -> List[str]:
    return sorted(path.name for path in (source.parent / WORK).iterdir())


def test_what_a_dead_process_has_left_is_removed_by_the_next_and_what_a_living_one_uses_is_not(source: Path) -> None:
    living = WorkFolders()
    kept = Path(living.take(str(source)))
    dead = (
        "from gpumesh.runtime.script_folder import WorkFolders; import os\n"
        f"print(WorkFolders().take({str(source)!r}), flush=True); os._exit(9)"
    )
    run = subprocess.run([sys.executable, "-c", dead], stdout=subprocess.PIPE, text=True, timeout=20, check=False)
    assert run.returncode == 9
    assert Path(run.stdout.strip()).exists(), run.stdout
    assert len(left(source)) == 4

    next_one = WorkFolders()
    mine = Path(next_one.take(str(source)))

    assert not Path(run.stdout.strip()).parent.exists()
    assert left(source) == sorted([kept.parent.name, kept.parent.name + ".use", mine.parent.name, mine.parent.name + ".use"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_no_room_is_an_error_that_leaves_nothing(source: Path) -> None:
    source.parent.chmod(0o500)
    try:
        with pytest.raises(OSError):
            WorkFolders().take(str(source))
    finally:
        source.parent.chmod(0o700)


def test_a_copy_that_fails_half_way_leaves_nothing(source: Path) -> None:
    folders = WorkFolders()
    first = Path(folders.take(str(source)))
    os.symlink("nowhere", source / "broken")

    with pytest.raises(OSError):
        folders.take(str(source))

    assert list(first.parent.iterdir()) == [first]


def test_copies_that_somebody_has_removed_are_made_anew(source: Path) -> None:
    folders = WorkFolders()
    folders.give_back(folders.take(str(source)))
    shutil.rmtree(source.parent / WORK)

    copy = Path(folders.take(str(source)))

    assert content(copy) == WHOLE
    shutil.rmtree(source.parent / WORK)
    folders.give_back(str(copy))
    assert content(Path(folders.take(str(source)))) == WHOLE


def test_a_copy_that_cannot_be_restored_is_made_anew(source: Path) -> None:
    folders = WorkFolders()
    copy = Path(folders.take(str(source)))
    (copy / "data.csv").unlink()
    os.rename(source / "data.csv", source.parent / "aside")

    folders.give_back(str(copy))

    assert not copy.exists()
    os.rename(source.parent / "aside", source / "data.csv")
    assert content(Path(folders.take(str(source)))) == WHOLE
