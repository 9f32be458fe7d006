"""F04: enums and classes defined in a script or notebook cell come back as themselves."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = """
from enum import Enum
from gpumesh import GPUMesh, accelerate

class Color(Enum):
    RED = 1
    GREEN = 2

class Box:
    def __init__(self, value):
        self.value = value

def green(i):
    return Color.GREEN

def box(i):
    return Box(Color.RED)

with GPUMesh.local(workers=2, slots=1) as mesh:
    answers = list(accelerate(mesh)(green).map(range(8)))
    assert all(answer is Color.GREEN for answer in answers), answers
    assert {Color.GREEN: "found"}[answers[0]] == "found"
    boxes = list(accelerate(mesh)(box).map(range(4)))
    assert all(isinstance(item, Box) and item.value is Color.RED for item in boxes), boxes

    class Color(Enum):  # The cell is run again with a change.
        RED = 1
        GREEN = 3

    again = list(accelerate(mesh)(green).map(range(8)))
    assert all(answer is Color.GREEN and answer.value == 3 for answer in again), again
print("identical")
"""


def test_members_and_classes_of_main_are_identical_after_the_round_trip() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=50, check=False
    )

    assert done.stdout.strip() == "identical", done.stderr
