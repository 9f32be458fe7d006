"""F77: a project with a large `.git`, environments, data, thousands of tiny files, odd links and names travels as what it is: code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.client.link import MeshLink
from gpumesh.errors import SerializationError
from gpumesh.model.payloads import payload_bytes
from gpumesh.protocol.messages import DefineCode
from gpumesh.runtime.code_folder import FOLDER_VARIABLE
from tests.support.projects import Project, touch_later


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    found = Project(tmp_path_factory.mktemp("f77") / "project")
    found.write("f77_tool/__init__.py", "from f77_tool.inner import answer\n")
    found.write("f77_tool/inner.py", "def answer():\n    return 42\n")
    found.write("f77_tool/naïve/größe.txt", "groß")
    found.write("main.py", "print('hello')\n")
    sparse(found, ".git/objects/pack/pack.pack", 300_000_000)
    sparse(found, ".venv/lib/libtorch.so", 100_000_000)
    sparse(found, "environment/lib/libcuda.so", 100_000_000)
    found.write("environment/pyvenv.cfg")
    sparse(found, "node_modules/x/y.js", 60_000_000)
    for number in range(5000):
        found.write(f"tiny/{number % 50}/{number}.txt", "x" * 100)
    os.symlink(found.root, found.root / "f77_tool" / "loop")
    os.symlink("nowhere", found.root / "f77_tool" / "dangling")
    found.write("f77_tool/unreadable.bin", "secret").chmod(0)
    return found


def sparse(project: Project, name: str, size: int) -> None:
    os.truncate(project.write(name), size)


@pytest.fixture
def data(project: Project) -> Iterator[None]:
    for number, size in enumerate((2_000_000_000, 70_000_000, 60_000_000, 55_000_000, 51_000_000, 2_000_000)):
        sparse(project, f"data/set{number}.bin", size)
    yield
    for path in (project.root / "data").iterdir():
        path.unlink()


@pytest.fixture
def ignore_file(project: Project) -> Iterator[Path]:
    path = project.write(".gitignore", "/data/\n*.bin\n")
    yield path
    path.unlink()


@pytest.fixture
def own_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GPUMesh]:
    """With a code folder of its own, and nothing of the project on its path."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "unpacked"))
    with GPUMesh.local(workers=1, slots=1) as mesh:
        yield mesh


def look_around() -> List[Any]:
    """What a task sees of the project."""
    import f77_tool

    folder = Path(f77_tool.__file__).parent
    names = sorted(str(path.relative_to(folder.parent)) for path in folder.parent.iterdir() if path.name != "__pycache__")
    return [f77_tool.answer(), (folder / "naïve" / "größe.txt").read_text(encoding="utf-8"), names]


def test_data_beside_the_code_is_refused_with_the_biggest_files_named(project: Project, data: None, own_mesh: GPUMesh) -> None:
    with pytest.raises(SerializationError) as caught:
        own_mesh.ship(project.root)

    said = str(caught.value)
    assert "over the limit of 50.0 MB" in said
    assert "2238.5 MB" in said
    assert (
        "data/set0.bin 2000.0 MB, data/set1.bin 70.0 MB, data/set2.bin 60.0 MB, data/set3.bin 55.0 MB, data/set4.bin 51.0 MB;"
        in said
    )
    assert ".gitignore" in said


def test_with_an_ignore_file_it_travels_without_what_is_not_code(
    project: Project, data: None, ignore_file: Path, own_mesh: GPUMesh
) -> None:
    own_mesh.ship(project.root)

    answer, text, names = accelerate(own_mesh)(look_around).remote().result()

    assert (answer, text) == (42, "groß")
    assert names == [".gitignore", "f77_tool", "main.py", "tiny"]


def test_thousands_of_tiny_files_are_no_obstacle(project: Project, ignore_file: Path, own_mesh: GPUMesh) -> None:
    own_mesh.ship(project.root)

    @accelerate(own_mesh)
    def count() -> int:
        import f77_tool

        return sum(1 for path in (Path(f77_tool.__file__).parents[1] / "tiny").rglob("*.txt"))

    assert count.remote().result() == 5000


def test_too_many_tiny_files_are_counted_by_folder(project: Project, own_mesh: GPUMesh) -> None:
    for number in range(60):
        sparse(project, f"shards/part{number:02d}/x.bin", 1_000_000)
        for piece in range(10):
            sparse(project, f"shards/all/{number}-{piece}.bin", 100_000)
    try:
        with pytest.raises(SerializationError, match=r"all/ \(600 files\) 60\.0 MB, part00/x\.bin 1\.0 MB, part01"):
            own_mesh.ship(project.root / "shards")
    finally:
        for path in (project.root / "shards").rglob("*.bin"):
            path.unlink()


def test_what_did_not_change_is_not_sent_again(project: Project, own_mesh: GPUMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: List[int] = []
    really = MeshLink.send

    def send(link: MeshLink, messages: Any) -> Any:
        sent.extend(payload_bytes(message.archive) for message in messages if type(message) is DefineCode)
        return really(link, messages)

    monkeypatch.setattr(MeshLink, "send", send)
    small = Project(project.root.parent / "small")
    small.write("f77_small.py", "def f():\n    return 1\n")
    own_mesh.ship(project.root)
    own_mesh.ship(small.root)

    @accelerate(own_mesh)
    def first() -> Any:
        import f77_small

        return f77_small.f()

    @accelerate(own_mesh)
    def second() -> Any:
        import f77_small

        return -f77_small.f()

    assert (first.remote().result(), second.remote().result()) == (1, -1)
    assert sum(sent) > 20_000  # Once for both functions: the list comes after what it lists.
    assert sent.count(sent[-1]) == 1
    sent.clear()
    touch_later(small.write("f77_small.py", "def f():\n    return 2\n"))
    assert (first.remote().result(), second.remote().result()) == (2, -2)
    assert len(sent) == 2  # What was edited, and the list.


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_an_unreadable_file_is_left_out_and_told_once(
    tmp_path: Path, own_mesh: GPUMesh, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = Project(tmp_path / "guarded")
    guarded.write("f77_guarded.py", "x = 1")
    guarded.write("unreadable.bin", "secret").chmod(0)
    own_mesh.ship(guarded.root)

    @accelerate(own_mesh)
    def names() -> List[str]:
        import f77_guarded

        return sorted(os.listdir(Path(f77_guarded.__file__).parent))

    assert "unreadable.bin" not in names.remote().result()
    assert names.remote().result()
    assert caplog.text.count("unreadable.bin cannot be read, so it does not travel") == 1
