"""The examples that start a mesh of their own, run as a reader would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, Iterator, List

import pytest

from tests.integration.programs import ROOT, Programs, started_programs

POINTS = 60


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as started:
        yield started


def sweeps(output: str) -> List[Dict[float, int]]:
    """For each sweep, the tasks that each machine has done, by its true speed."""
    found: List[Dict[float, int]] = []
    for line in output.splitlines():
        row = re.fullmatch(r" +([\d.]+) +([\d.]+|-) +(\d+) +[\d.]+ s", line)
        if row:
            found[-1][float(row[1])] = int(row[3])
        elif line.endswith(":"):
            found.append({})
    return found


@pytest.mark.parametrize("options", [[], ["--idempotent"]])
def test_unlike_machines_get_work_by_their_speed(programs: Programs, options: List[str]) -> None:
    example = programs.python("examples/unlike_machines.py", "--points", str(POINTS), *options, PYTHONPATH=str(ROOT))

    assert example.wait(50) == 0, example.output
    first, second = sweeps(example.output)
    for done in (first, second):
        assert sum(done.values()) == POINTS
        assert done[20.0] > done[10.0] > done[2.0] >= done[0.2]
    assert second[0.2] == 0, "by then the mesh knows that one task there takes longer than all others together"
    assert not example.survivors()


@pytest.mark.timeout(120)
def test_models_are_served_in_batches(programs: Programs) -> None:
    pytest.importorskip("numpy")
    example = programs.python(
        "examples/model_server.py", "--requests", "1000", "--backend", "numpy", PYTHONPATH=str(ROOT), GPUMESH_LOCAL="1"
    )

    assert example.wait(110) == 0, example.output
    assert len(re.findall(r"^model \d: numpy on cpu$", example.output, re.MULTILINE)) >= 2
    asked = re.search(r"^1000 requests in .* (\d+) rows a batch$", example.output, re.MULTILINE)
    assert asked is not None, example.output
    assert int(asked[1]) > 1
    right = re.search(r"^([\d.]+)% of the answers are right$", example.output, re.MULTILINE)
    assert right is not None, example.output
    assert float(right[1]) > 95
    assert not example.survivors()


@pytest.mark.timeout(120)
def test_a_model_is_trained_by_several_actors(programs: Programs) -> None:
    pytest.importorskip("numpy")
    example = programs.python(
        "examples/parameter_server.py", "--steps", "150", "--rows", "2000", PYTHONPATH=str(ROOT), GPUMESH_LOCAL="1"
    )

    assert example.wait(110) == 0, example.output
    assert "450 gradients in" in example.output
    loss = re.search(r"^loss on rows that nobody has seen: ([\d.]+) ", example.output, re.MULTILINE)
    assert loss is not None, example.output
    assert float(loss[1]) < 0.1
    assert not example.survivors()
