"""What the README and the docs show, run as it stands there. What installs is run by `.ci/run`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Iterator

import pytest

from tests.integration.programs import ROOT, Programs, started_programs


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as started:
        yield started


@pytest.mark.parametrize("page", ["README.md", "docs/functions.md", "docs/objects.md", "docs/running-a-mesh.md"])
def test_the_python_on_a_page_runs(page: str, programs: Programs, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")

    run = programs.python("-W", "error", str(script), PYTHONPATH=str(ROOT))

    assert run.wait(50) == 0, run.output


@pytest.mark.timeout(240)
def test_the_demo_of_the_readme_runs_in_full(programs: Programs) -> None:
    demo = programs.gpumesh("demo")

    assert demo.wait(200) == 0, demo.output
    assert len(re.findall(r"accuracy 0\.\d{4}", demo.output)) == 30 + 5
    assert "One after the other" in demo.output


def test_the_sweep_runs_on_this_machine_alone_when_there_is_no_mesh(programs: Programs) -> None:
    sweep = programs.python("examples/sweep.py", "--points", "8", "--steps", "20000")

    assert sweep.wait(50) == 0, sweep.output
    assert len(re.findall(r"^r = ", sweep.output, re.MULTILINE)) == 8
