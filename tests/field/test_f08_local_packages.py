"""F08: a function lives in a local package next to the script; no worker has it. It travels, edits included, to late workers, too."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path
from typing import Iterator, Tuple

import pytest

from tests.integration.programs import Programs, started_programs
from tests.support.projects import Project

TOKEN = "a-token-of-the-field-tests"

MAIN = """
from gpumesh import GPUMesh, accelerate
from proj import b

with GPUMesh(fallback=False) as mesh:
    print(accelerate(mesh)(b.f).remote().result())
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path / "home") as started:
        yield started


@pytest.fixture
def mesh(programs: Programs) -> Tuple[Programs, str]:
    """A coordinator, and a worker that was started elsewhere and has never heard of any project."""
    _, url = programs.serve("--no-self-worker", "--token", TOKEN)
    join(programs, url)
    return programs, url


def join(programs: Programs, url: str, **environment: str) -> None:
    worker = programs.gpumesh("join", url, "--token", TOKEN, "--slots", "1", **environment)
    worker.wait_for("works for")


@pytest.fixture(params=["packages", "folders without __init__"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    found = Project(tmp_path / "project")
    found.write("proj/util/a.py", "def g():\n    return 'first'\n")
    found.write("proj/b.py", "from proj.util.a import g\n\ndef f():\n    return g()\n")
    found.write("main.py", MAIN)
    if request.param == "packages":
        found.write("proj/__init__.py")
        found.write("proj/util/__init__.py")
    return found


def test_it_runs_on_a_worker_started_elsewhere_twice_with_an_edit_between(mesh: Tuple[Programs, str], project: Project) -> None:
    _, url = mesh

    first = project.run("main.py", url=url, token=TOKEN)
    project.write("proj/util/a.py", "def g():\n    return 'edited'\n")
    second = project.run("main.py", url=url, token=TOKEN)

    assert (first, second) == ("first", "edited")


def test_one_driver_sees_edits_that_it_has_not_loaded_itself(mesh: Tuple[Programs, str], project: Project) -> None:
    _, url = mesh
    project.write(
        "main.py",
        """
from pathlib import Path
from gpumesh import GPUMesh, accelerate
from proj import b

@accelerate
def by_value():
    from proj.util import a
    return a.g()

with GPUMesh(fallback=False) as mesh:
    accelerate.install(mesh)
    f = accelerate(mesh)(b.f)
    for text in ("first", "edit1", "edit2", "first"):
        Path("proj/util/a.py").write_text(f"def g():\\n    return {text!r}\\n")
        print(text, f.remote().result(), f.map([()]).result()[0], by_value.remote().result(), b.f())
""",
    )

    assert project.run("main.py", url=url, token=TOKEN).splitlines() == [
        "first first first first first",
        "edit1 edit1 edit1 edit1 first",
        "edit2 edit2 edit2 edit2 first",
        "first first first first first",
    ]


def test_a_worker_that_joins_late_gets_it_too(mesh: Tuple[Programs, str], project: Project) -> None:
    programs, url = mesh
    project.write(
        "main.py",
        """
import sys
from gpumesh import GPUMesh, accelerate
from proj import b

with GPUMesh(fallback=False) as mesh:
    f = accelerate(mesh, tags={"room": "late"}, placement_timeout=40)(b.f)
    print(accelerate(mesh)(b.f).remote().result(), flush=True)
    future = f.remote()
    print("submitted", flush=True)
    print(future.result(), flush=True)
""",
    )
    driver = programs.python(
        str(project.root / "main.py"), GPUMESH_URL=url, GPUMESH_TOKEN=TOKEN, PYTHONPATH=str(Path(__file__).parents[2])
    )
    driver.wait_for("submitted")
    join_late = programs.gpumesh("join", url, "--token", TOKEN, "--slots", "1", "--tag", "room=late")
    join_late.wait_for("works for")

    assert driver.wait() == 0
    assert [line for _, line in driver.lines if "first" in line] == ["first", "first"]


def test_a_compiled_extension_is_refused_before_anything_runs(mesh: Tuple[Programs, str], project: Project) -> None:
    _, url = mesh
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    project.write("proj/_fast" + suffix)
    project.write("proj/b.py", "def f():\n    from proj import _fast\n    return _fast.g()\n")

    said = project.run("main.py", url=url, token=TOKEN, check=False)

    assert "SerializationError: f needs proj._fast (imported by proj.b), a compiled extension module" in said
    assert "install 'proj' on the workers" in said


def test_arguments_results_and_exceptions_are_of_the_drivers_own_classes(mesh: Tuple[Programs, str], project: Project) -> None:
    _, url = mesh
    project.write(
        "models.py",
        "class Config:\n    def __init__(self, rate):\n        self.rate = rate\n\nclass Diverged(Exception):\n    pass\n",
    )
    project.write(
        "proj/b.py",
        """
import models

def scaled(config):
    return models.Config(config.rate * 2)

def diverge():
    raise models.Diverged("at step 3")  # the line to see
""",
    )
    project.write(
        "main.py",
        """
from gpumesh import GPUMesh, accelerate
from models import Config, Diverged
from proj import b

@accelerate
def rate_of(config):
    return config.rate

with GPUMesh(fallback=False) as mesh:
    accelerate.install(mesh)
    result = accelerate(mesh)(b.scaled).remote(Config(2)).result()
    print(type(result) is Config, result.rate, rate_of.remote(Config(7)).result())
    try:
        accelerate(mesh)(b.diverge).remote().result()
    except Diverged as error:
        print(error, error.__cause__)
""",
    )

    said = project.run("main.py", url=url, token=TOKEN)

    assert said.startswith("True 4 7\nat step 3")
    assert (
        f'File "{project.root}/proj/b.py", line 8, in diverge\n    raise models.Diverged("at step 3")  # the line to see'
        in said
    )


def test_two_projects_of_the_same_name_take_turns_on_one_runner(mesh: Tuple[Programs, str], tmp_path: Path) -> None:
    programs, url = mesh
    drivers = []
    for name in ("one", "two"):
        project = Project(tmp_path / name)
        project.write("proj/__init__.py")
        project.write("proj/where.py", f"def f(i):\n    return {name!r}\n")
        project.write(
            "main.py",
            """
from gpumesh import GPUMesh, accelerate
from proj import where

with GPUMesh(fallback=False) as mesh:
    f = accelerate(mesh)(where.f)
    found = [f.remote(i).result() for i in range(30)] + f.map(range(30)).result()
    print(sorted(set(found)))
""",
        )
        environment = {"GPUMESH_URL": url, "GPUMESH_TOKEN": TOKEN, "PYTHONPATH": str(Path(__file__).parents[2])}
        drivers.append(programs.python(str(project.root / "main.py"), **environment))

    for name, driver in zip(("one", "two"), drivers):
        assert driver.wait() == 0, driver.output
        assert driver.lines[-1][1] == f"['{name}']"


def test_it_wins_over_what_the_worker_happens_to_have(programs: Programs, project: Project, tmp_path: Path) -> None:
    decoy = Project(tmp_path / "decoy")
    decoy.write("proj/__init__.py")
    decoy.write("proj/util/__init__.py")
    decoy.write("proj/util/a.py", "def g():\n    return 'decoy'\n")
    decoy.write("proj/b.py", "def f():\n    return 'decoy'\n")
    project.write("proj/__init__.py")
    project.write("proj/util/__init__.py")
    _, url = programs.serve("--no-self-worker", "--token", TOKEN)
    join(programs, url, PYTHONPATH=str(decoy.root))

    assert project.run("main.py", url=url, token=TOKEN) == "first"


@pytest.mark.parametrize("way", ["-c", "-", "-m"])
def test_programs_that_are_no_script_file_do_the_same(mesh: Tuple[Programs, str], project: Project, way: str) -> None:
    _, url = mesh
    words = {"-c": ["-c", MAIN], "-": ["-"], "-m": ["-m", "main"]}[way]

    assert project.run(*words, url=url, token=TOKEN, stdin=MAIN if way == "-" else None) == "first"
