"""F70: what a task printed before it died reaches the driver, attributed to it."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import ctypes, os, subprocess, sys, time
from gpumesh import GPUMesh, accelerate

def dies():
    print("line one")
    print("line two")
    print("line three", end="")
    os._exit(1)

def segfaults():
    print("before the fault", end="")
    ctypes.string_at(0)

def times_out():
    print("before the timeout", end="")
    time.sleep(1000)

def writes_below_python():
    os.write(1, b"from the descriptor\\n")
    subprocess.run([sys.executable, "-c", "print('from a subprocess')"])
    print("to stderr", file=sys.stderr)
    return 1

with GPUMesh.local(workers=1, slots=1) as mesh:
    for function, options in ((dies, {}), (segfaults, {}), (times_out, {"timeout": 0.3})):
        error = accelerate(mesh, retries=0, **options)(function).remote().exception(30)
        assert error is not None
    assert accelerate(mesh)(writes_below_python).remote().result(30) == 1
"""


def test_all_output_up_to_the_end_arrives() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=50, check=False)

    assert done.returncode == 0, done.stderr
    for text in (
        "line one", "line two", "line three", "before the fault", "before the timeout", "from the descriptor",
        "from a subprocess",
    ):  # fmt: skip
        assert text in done.stdout, (text, done.stdout)
    assert "to stderr" in done.stderr
    attributed = [line for line in done.stdout.splitlines() if "line two" in line]
    assert "dies" in attributed[0], os.linesep.join(attributed)
