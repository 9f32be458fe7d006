"""Code that travels, through a whole mesh of this machine's own processes."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import SerializationError
from gpumesh.runtime.code_folder import FOLDER_VARIABLE
from tests.support.projects import Project, touch_later


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GPUMesh]:
    """A coordinator of this process, and a worker that it knows nothing of: no module of a test's project is on its path."""
    folder = str(tmp_path_factory.mktemp("unpacked"))
    before = os.environ.get(FOLDER_VARIABLE, "")
    os.environ[FOLDER_VARIABLE] = folder
    coordinator = GPUMesh.start_coordinator(port=0)
    worker = GPUMesh.add_worker(coordinator.url, token=coordinator.token, slots=1)
    os.environ[FOLDER_VARIABLE] = before
    with GPUMesh(coordinator.url, token=coordinator.token, fallback=False) as mesh:
        yield mesh
    worker.kill()
    coordinator.stop()


@pytest.fixture
def project(mesh: GPUMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Its folder is on this process's path of modules only; what was imported from it is forgotten at the end."""
    mesh.workers()
    before = set(sys.modules)
    found = Project(tmp_path / "project")
    monkeypatch.syspath_prepend(found.root)
    yield found
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def load(name: str) -> Any:
    return importlib.import_module(name)


def test_the_path_of_a_worker_does_not_have_the_project(mesh: GPUMesh, project: Project) -> None:
    assert str(project.root) not in accelerate(mesh)(lambda: list(sys.path)).remote().result()


def test_edits_of_code_and_data_are_seen_by_the_next_call(mesh: GPUMesh, project: Project) -> None:
    project.write("edited_pkg/data.txt", "data 0")
    source = (
        "from pathlib import Path\n"
        "def f():\n    return {number}, (Path(__file__).parent / 'data.txt').read_text(), sorted(__import__('edited_pkg').here())\n"
    )
    project.write(
        "edited_pkg/__init__.py",
        "import os\ndef here():\n    return [n for n in os.listdir(__path__[0]) if n != '__pycache__']\n",
    )
    project.write("edited_pkg/code.py", source.replace("{number}", "0"))
    f = accelerate(mesh)(load("edited_pkg.code").f)
    seen: List[Any] = [f.remote().result()]
    touch_later(project.write("edited_pkg/code.py", source.replace("{number}", "1")))
    seen.append(f.map([()]).result()[0])
    touch_later(project.write("edited_pkg/data.txt", "data 2"))
    seen.append(f.remote().result())
    added = project.write("edited_pkg/more.py")
    seen.append(f.remote().result())
    added.unlink()
    seen.append(f.remote().result())

    names = ["__init__.py", "code.py", "data.txt"]
    assert seen == [
        (0, "data 0", names),
        (1, "data 0", names),
        (1, "data 2", names),
        (1, "data 2", [*names, "more.py"]),
        (1, "data 2", names),
    ]


def test_a_hundred_edits_in_a_row_are_all_seen(mesh: GPUMesh, project: Project) -> None:
    path = project.write("often.py", "def f():\n    return 100\n")
    f = accelerate(mesh)(load("often").f)
    seen = []
    for number in range(100, 200):
        path.write_text(f"def f():\n    return {number}\n")
        seen.append(f.remote().result())

    assert seen == list(range(100, 200))


def test_modules_keep_their_state_between_tasks_until_an_edit(mesh: GPUMesh, project: Project) -> None:
    source = "n = 0\ndef count():\n    global n\n    n += 1\n    return n\n"
    project.write("counting.py", source)
    project.write("beside.py", "def f():\n    return 'beside'\n")
    count, beside = accelerate(mesh)(load("counting").count), accelerate(mesh)(load("beside").f)
    seen = []
    for _ in range(3):
        seen.append(count.remote().result())
        assert beside.remote().result() == "beside"
    touch_later(project.write("counting.py", source + "# edited\n"))
    seen.append(count.remote().result())

    assert seen == [1, 2, 3, 1]


def test_an_edit_that_breaks_the_code_is_that_tasks_error_and_the_next_edit_mends_it(mesh: GPUMesh, project: Project) -> None:
    project.write("mended.py", "def f():\n    return 1\n")
    f = accelerate(mesh)(load("mended").f)
    assert f.remote().result() == 1
    touch_later(project.write("mended.py", "def f(:\n"))
    with pytest.raises(SerializationError, match="invalid syntax") as caught:
        f.remote().result()
    assert str(project.root / "mended.py") in str(caught.value.__cause__)
    project.write("mended.py", "def f():\n    return 22\n")
    assert f.remote().result() == 22


def test_a_module_that_appears_after_a_call_that_wanted_it_is_found(mesh: GPUMesh, project: Project) -> None:
    @accelerate(mesh)
    def f() -> Any:
        import appears_late  # type: ignore[import-not-found]

        return appears_late.x

    with pytest.raises(ModuleNotFoundError):
        f.remote().result()
    project.write("appears_late.py", "x = 1")
    assert f.remote().result() == 1


def test_megabytes_of_data_travel_with_a_package(mesh: GPUMesh, project: Project) -> None:
    project.write(
        "weighty/__init__.py", "import os\ndef f():\n    return os.path.getsize(os.path.join(__path__[0], 'weights.bin'))\n"
    )
    path = project.write("weighty/weights.bin")
    path.write_bytes(os.urandom(8_000_000))

    assert accelerate(mesh)(load("weighty").f).remote().result() == 8_000_000


def test_shipped_folders_are_importable_and_readable(mesh: GPUMesh, tmp_path: Path) -> None:
    plugins = Project(tmp_path / "plugins")
    plugins.write("plugin_one.py", "from pathlib import Path\nx = (Path(__file__).parent / 'tables' / 'one.csv').read_text()\n")
    plugins.write("tables/one.csv", "1,2,3")

    def f(name: str) -> Any:
        import importlib

        return importlib.import_module(name).x

    with GPUMesh(mesh.url, token=mesh._session._token, fallback=False, ship=[plugins.root]) as other:  # type: ignore[union-attr]
        assert accelerate(other)(f).remote("plugin_one").result() == "1,2,3"
        late = Project(tmp_path / "late_plugins")
        late.write("plugin_two.py", "x = 2")
        other.ship(late.root / "plugin_two.py")
        assert accelerate(other)(f).remote("plugin_two").result() == 2
    with pytest.raises(ModuleNotFoundError):
        accelerate(mesh)(f).remote("plugin_one").result()  # Another client's.


def test_shipping_what_is_not_there_is_an_error_at_once(mesh: GPUMesh, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such folder or file"):
        GPUMesh(mesh.url, token="x", ship=[tmp_path / "nowhere"])


def test_a_mesh_in_this_programs_own_processes_sees_edits_too(project: Project) -> None:
    project.write("of_local.py", "def f():\n    return 1\n")
    with GPUMesh.local(workers=1, slots=1) as own:
        f = accelerate(own)(load("of_local").f)
        assert f.remote().result() == 1
        touch_later(project.write("of_local.py", "def f():\n    return 2\n"))
        assert f.remote().result() == 2


def test_what_arguments_are_made_of_comes_along_when_nothing_else_names_it(mesh: GPUMesh, project: Project) -> None:
    project.write("of_arguments.py", "class Config:\n    def __init__(self, x):\n        self.x = x\n")
    project.write("of_more_arguments.py", "class Other:\n    x = 'other'\n")
    project.write(
        "duck.py",
        "def f(config):\n    return config.x\n\ndef g(pair, extra=None):\n    return pair['config'].x, extra and extra[0].x\n",
    )
    config, other, duck = load("of_arguments").Config, load("of_more_arguments").Other, load("duck")
    f, g = accelerate(mesh)(duck.f), accelerate(mesh)(duck.g)

    assert f.map([config(1), config(2), other()]).result() == [1, 2, "other"]
    assert f.map(iter([config(3)])).result() == [3]
    assert g.remote({"config": config(4)}, extra=[other()]).result() == (4, "other")


def test_after_a_coordinator_was_lost_its_successor_gets_the_code_again(project: Project) -> None:
    project.write("of_reconnect.py", "def f():\n    return 'here'\n")
    first = GPUMesh.start_coordinator(port=0)
    port, token = int(first.url.rpartition(":")[2]), first.token
    with GPUMesh.add_worker(first.url, token=token, slots=1), GPUMesh(first.url, token=token, fallback=False) as own:
        f = accelerate(own)(load("of_reconnect").f)
        assert f.remote().result() == "here"
        first.stop()
        second = GPUMesh.start_coordinator(port=port, token=token)
        assert f.remote().result(timeout=30) == "here"
        second.stop()
