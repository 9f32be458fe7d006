"""F36: a script without a main guard that starts a local mesh runs once, in every way of running Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
print("started", flush=True)
from gpumesh import GPUMesh, accelerate
mesh = GPUMesh.local(workers=2, slots=1)

@accelerate(mesh)
def square(n):
    return n * n

print(list(square.map(range(5))))
"""
EXPECTED = "started\n[0, 1, 4, 9, 16]\n"


def test_as_a_script(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.returncode) == (EXPECTED, 0), done.stderr


def test_from_standard_input() -> None:
    done = subprocess.run([sys.executable, "-"], input=SCRIPT, capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.returncode) == (EXPECTED, 0), done.stderr


def test_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.returncode) == (EXPECTED, 0), done.stderr


def test_in_an_interactive_session() -> None:
    lines = SCRIPT.replace("    return n * n\n", "    return n * n\n\n")
    done = subprocess.run([sys.executable, "-i", "-q"], input=lines, capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.returncode) == (EXPECTED, 0), done.stderr
