"""A script as it is submitted: what travels with it, what it is known by, and what is no script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List

import pytest

from gpumesh.client.scripts import PackedScript, pack_script
from gpumesh.config import MAX_CODE_BYTES
from gpumesh.errors import SerializationError
from gpumesh.model.tasks import TaskSpec, spec_from_wire
from gpumesh.serialization.cargo import unpack, unpack_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "project"
    found.mkdir()
    return found


def write(folder: Path, files: Dict[str, str]) -> Path:
    """Text files; the last one's path."""
    path = folder
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def files_of(packed: PackedScript) -> Dict[str, bytes]:
    """What arrives, as the other side unpacks it."""
    parts = {digest: (data, needs) for digest, data, needs in packed.cargo.parts()}
    data, needs = parts[packed.code]
    (parcel,) = unpack(data)
    assert set(needs) == set(parcel.pieces)
    return {os.fsdecode(file.name): file.data for piece in parcel.pieces for file in unpack_files(parts[piece][0])}


def test_a_script_takes_its_folder_along(folder: Path) -> None:
    write(folder, {"data.csv": "1,2\n", "sub/more.py": "X = 1\n", ".git/config": "", "__pycache__/a.pyc": ""})
    script = write(folder, {"helper.py": "Y = 2\n", "train.py": "import helper\n"})

    packed = pack_script(script)

    assert files_of(packed) == {
        "data.csv": b"1,2\n",
        "sub/more.py": b"X = 1\n",
        "train.py": b"import helper\n",
        "helper.py": b"Y = 2\n",
    }
    assert (packed.path, packed.name, packed.script) == (str(script), "train.py", "train.py")
    assert packed.code == packed.cargo.digest
    spec = TaskSpec(packed.function, packed.name, code=packed.code, script=packed.script)
    assert spec_from_wire(tuple(spec)) == spec


def test_a_relative_path_is_one_from_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = write(folder, {"a.py": "1"})
    monkeypatch.chdir(folder.parent)

    assert pack_script("project/a.py").path == str(script)
    monkeypatch.setenv("HOME", str(folder))
    assert pack_script("~/a.py").path == str(script)


def test_a_script_in_a_package_lies_in_it(folder: Path) -> None:
    script = write(folder, {"__init__.py": "", "run.py": "1"})

    packed = pack_script(script)

    assert packed.script == "project/run.py"
    assert packed.script in files_of(packed)


def test_the_script_and_what_it_imports_travel_whatever_an_ignore_file_says(folder: Path) -> None:
    write(folder, {".gitignore": "*.py\n*.bin\n", "big.bin": "0", "notes.txt": "n", "other.py": "no"})
    write(folder, {"tool.py": "import pack.inner\n", "pack/inner.py": "from . import more\n", "pack/more.py": ""})
    write(folder, {"pack/__init__.py": ""})
    script = write(folder, {"go.py": "import json, tool\n"})

    assert sorted(files_of(pack_script(script))) == [
        ".gitignore",
        "go.py",
        "notes.txt",
        "pack/__init__.py",
        "pack/inner.py",
        "pack/more.py",
        "tool.py",
    ]


def test_the_same_files_are_known_by_the_same_digests_and_others_by_others(folder: Path) -> None:
    one, two = write(folder, {"one.py": "1"}), write(folder, {"two.py": "2"})
    first = pack_script(one)

    again, other = pack_script(one), pack_script(two)
    write(folder, {"data.csv": "new"})
    changed = pack_script(one)

    assert (again.code, again.function) == (first.code, first.function)
    assert other.code == first.code
    assert other.function != first.function
    assert changed.code != first.code
    assert changed.function != first.function


@pytest.mark.parametrize("home", ["HOME", "TMPDIR"])
def test_of_a_folder_that_is_no_project_only_what_the_script_imports_travels(
    folder: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv(home, str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    write(folder, {".ssh/id_rsa": "secret", "helper.py": "", "letter.txt": "dear"})
    script = write(folder, {"run.py": "import helper\n"})

    packed = pack_script(script)

    assert sorted(files_of(packed)) == ["helper.py", "run.py"]
    assert packed.script == "run.py"


def test_any_text_can_be_a_script(folder: Path) -> None:
    script = write(folder, {"run": "this is { no Python 3\n"})

    assert files_of(pack_script(script)) == {"run": b"this is { no Python 3\n"}


def wrong(path: object) -> str:
    with pytest.raises(ValueError) as caught:
        pack_script(path)
    return str(caught.value)


def test_what_is_no_script_is_named(folder: Path) -> None:
    os.mkfifo(folder / "pipe.py")

    assert wrong(folder / "missing.py") == f"there is no script {folder}/missing.py; it would be {folder}/missing.py"
    assert "is a folder, not a script" in wrong(folder)
    assert "cannot be read" in wrong(folder / "pipe.py")
    assert "cannot be read" in wrong("/dev/null")
    (folder / os.fsdecode(b"\xff.py")).write_text("1")
    assert "is not text; rename it" in wrong(folder / os.fsdecode(b"\xff.py"))
    with pytest.raises(TypeError):
        pack_script(None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_a_script_that_may_not_be_read_is_named(folder: Path) -> None:
    script = write(folder, {"a.py": "1"})
    script.chmod(0)

    assert "cannot be read" in wrong(script)


def test_too_large_a_folder_is_refused_with_its_largest_files(folder: Path) -> None:
    sizes: List[int] = [MAX_CODE_BYTES, 3_000_000, 2_000_000, 1_000_000, 900_000, 800_000]
    for number, size in enumerate(sizes):
        os.truncate(write(folder, {f"data{number}.bin": ""}), size)
    script = write(folder, {"train.py": "1"})

    with pytest.raises(SerializationError) as caught:
        pack_script(script)

    said = str(caught.value)
    assert f"train.py ({folder}) is 57.7 MB, over the limit of 50.0 MB" in said
    assert "data0.bin 50.0 MB, data1.bin 3.0 MB, data2.bin 2.0 MB, data3.bin 1.0 MB, data4.bin 0.9 MB;" in said
    assert said.endswith("keep large data outside of that folder, or name what is not needed in a .gitignore file")
