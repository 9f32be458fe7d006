"""The project itself: contracts between its parts, and pages that tell the truth about commands."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set, Tuple

import pytest
import typer.main

import gpumesh
from gpumesh.cli.main import app
from gpumesh.version import __version__

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]


def console_commands() -> Iterator[Tuple[str, str]]:
    """Each command that a page shows at a prompt."""
    for page in PAGES:
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                if line.startswith("$ "):
                    for command in line[2:].split("&&"):
                        yield page.name, command.strip()


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own, from the root of the project."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=50,
    )


def test_the_imports_respect_the_floors_and_pure_parts_stay_pure() -> None:
    pytest.importorskip("importlinter")

    linted = run_python("import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))")

    assert linted.returncode == 0, linted.stdout


def test_importing_the_package_loads_no_event_loop_and_nothing_heavy() -> None:
    heavy = (
        "asyncio",
        "cloudpickle",
        "inspect",
        "msgpack",
        "multiprocessing",
        "numpy",
        "pandas",
        "rich",
        "torch",
        "typer",
        "uvloop",
    )
    printed = run_python(f"import sys, gpumesh; print([name for name in {heavy} if name in sys.modules])")

    assert printed.stdout.strip() == "[]"


def test_the_client_loads_no_event_loop_and_nothing_heavy() -> None:
    heavy = ("asyncio", "numpy", "pandas", "rich", "torch", "typer", "uvloop")
    printed = run_python(
        f"import sys; from gpumesh import GPUMesh, accelerate; print([name for name in {heavy} if name in sys.modules])"
    )

    assert printed.stdout.strip() == "[]"


def test_the_version_is_the_same_everywhere() -> None:
    assert importlib.metadata.version("gpumesh") == __version__ == gpumesh.__version__
    assert __version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_public_name_exists() -> None:
    assert [name for name in gpumesh.__all__ if not hasattr(gpumesh, name)] == []
    assert set(gpumesh.__all__) <= set(dir(gpumesh))


def test_the_whole_package_is_valid_for_the_oldest_python() -> None:
    for file in sorted((ROOT / "gpumesh").rglob("*.py")):
        ast.parse(file.read_text(encoding="utf-8"), filename=str(file), feature_version=(3, 9))


def test_the_extras_are_there_and_all_means_all_that_a_user_may_want() -> None:
    metadata = importlib.metadata.metadata("gpumesh")
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert extras == {"all", "demo", "dev", "gpu", "notebook", "peers", "sysinfo", "tunnel"}

    required: Dict[str, Set[str]] = {extra: set() for extra in extras}
    for line in metadata.get_all("Requires-Dist") or []:
        requirement, _, marker = line.partition(";")
        for extra in re.findall(r"extra == ['\"](\w+)['\"]", marker):
            required[extra].add(requirement.strip())
    assert required["all"] == set().union(*(required[extra] for extra in extras - {"all", "dev", "peers"}))


def test_the_readme_opens_with_the_two_commands() -> None:
    lines = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("$ ")]

    assert lines[:2] == ["$ pip install -e '.[demo]' && gpumesh demo", "$ pip install -e '.[dev]' && pytest"]


@pytest.mark.parametrize(("page", "command"), sorted(set(console_commands())))
def test_a_command_on_a_page_exists(page: str, command: str) -> None:
    words = shlex.split(command)

    if words[0] == "gpumesh":
        check_gpumesh_command(words[1:])
    elif words[0] == "docker":
        check_docker_command(words[1:])
    elif words[:2] == ["sudo", "chown"]:
        assert f"--uid {words[2]} " in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    elif words[0] == "kill":
        assert words[1:] == ["-9", "%1"]  # The shell's; what was started before is there to be killed.
    elif words[0] == "export":
        assert re.fullmatch(r"[A-Z_]+=\S+", words[1]), command
    elif words[:2] == ["python", "-m"]:
        assert (ROOT / words[2] / "__main__.py").exists(), command
    elif words[0] == "python":
        assert (ROOT / words[1]).exists(), command
    elif words[:3] == ["pip", "install", "-e"]:
        (extra,) = re.findall(r"\.\[(\w+)\]", command)
        assert extra in (importlib.metadata.metadata("gpumesh").get_all("Provides-Extra") or [])
    else:
        assert words == ["pytest"], command


def check_gpumesh_command(words: List[str]) -> None:
    """The command, of a group the one in it, and each option are known to the program."""
    command: Any = typer.main.get_command(app)
    rest = [word for word in words if not re.fullmatch("-v+", word)]
    while rest and not rest[0].startswith("-") and getattr(command, "commands", None):
        assert rest[0] in command.commands, words
        command = command.commands[rest.pop(0)]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        if word.startswith("--"):
            assert word.partition("=")[0] in {*known, "--help"}, word


def check_docker_command(words: List[str]) -> None:
    """What runs in the container is ours; files that it names are there."""
    if words[0] == "run":
        check_gpumesh_command(words[words.index("gpumesh") + 1 :])
    else:
        assert words[:2] == ["compose", "up"], words
        assert (ROOT / "compose.yaml").exists()


def test_links_between_pages_lead_somewhere() -> None:
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^):\s]+)\)", outside_of_code(page))]
    assert any("#" in target for _, target in links)
    for page, target in links:
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


def test_anchors_go_by_the_rule_of_the_site_that_shows_the_pages(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n## `join`, or: What's *this*?\n```console\n# no heading\n```\n## One\n"
        "### A [link](x.md) - and_more\n## One\n## ~~Ünicode~~ & 1.5 x\n",
        encoding="utf-8",
    )

    assert anchors(page) == ["one", "join-or-whats-this", "one-1", "a-link---and_more", "one-2", "ünicode--15-x"]


def outside_of_code(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> List[str]:
    """What GitHub calls the headings of a page: small letters without marks, blanks as hyphens; one that is there already is numbered."""
    found: List[str] = []
    seen: Dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", outside_of_code(page), re.MULTILINE):
        shown = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        seen[anchor] = seen.get(anchor, -1) + 1
        found.append(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
    return found
