"""What the README and the docs show, run as it stands there. What installs is run by `.ci/run`."""

from __future__ import annotations

import os
import re
import shlex
import signal
from pathlib import Path
from typing import Iterator

import pytest

from tests.integration.programs import ROOT, Program, Programs, started_programs
from tests.support.processes import free_port


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as started:
        yield started


@pytest.mark.parametrize(
    "page", ["README.md", "docs/functions.md", "docs/objects.md", "docs/actors.md", "docs/nested.md", "docs/running-a-mesh.md"]
)
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


@pytest.mark.timeout(120)
def test_the_job_of_the_readme_outlives_the_coordinator(programs: Programs) -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Jobs that outlive you")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```console\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    shown = re.search(r"^j-\S+$", block, re.MULTILINE)
    assert shown is not None
    commands = [shlex.split(line[2:]) for line in block.splitlines() if line.startswith("$ ")]
    place = ("--host", "127.0.0.1", "--port", str(free_port()), "--slots", "2")
    job = ""
    output = ""
    server: Program

    for number, (name, *words) in enumerate(commands):
        if words[-1] == "&":
            server = programs.gpumesh(*words[:-1], *place)
            server.wait_for("serving at")
        elif name == "kill":
            assert words == ["-9", "%1"]
            os.kill(server.process.pid, signal.SIGKILL)
            server.wait()
        else:
            run = programs.gpumesh(*[job if word == shown.group() else word for word in words])
            assert run.wait(60) == 0, f"{number}: {run.output}"
            output = run.output
            job = job or output.splitlines()[0]

    rows = output.splitlines()
    assert rows[0].startswith("task,status,payload.seed,payload.darts,result.pi")
    assert len(rows) == 1 + 16
    assert all(re.match(r"\d+,done,\d+,1000000,3\.1[34]", row) for row in rows[1:])
