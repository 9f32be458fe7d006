"""F33: agent and spawner never touch CUDA: detection, benchmark and monitor are processes of their own, and runners come from a clean server.

The machine is made up, with teeth: whoever loads its `pynvml` or `torch` is written down, maps a file named like the driver's library and
keeps one open that is named like its device. tests/gpu asks the same of a real card.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import psutil
import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.runtime.embedded import WorkerHandle
from tests.support.hardware import Machine, card
from tests.support.processes import until

TEETH = """
import mmap, os
_folder = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(_folder, "loaded"), "a") as _log:
    _log.write(f"{os.getpid()} {__name__}\\n")
_device = open(os.path.join(_folder, "nvidia0"), "rb")
_library = open(os.path.join(_folder, "libcuda.so.1"), "rb")
_mapped = mmap.mmap(_library.fileno(), 0, access=mmap.ACCESS_READ)
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path, [card(0), card(1, "NVIDIA L4", 23034)])
    modules = tmp_path / "modules"
    (modules / "nvidia0").write_bytes(b"0")
    (modules / "libcuda.so.1").write_bytes(b"0" * 4096)
    (modules / "pynvml.py").write_text(TEETH + (modules / "pynvml.py").read_text())
    made.add_module("torch", TEETH + "raise ImportError('only here to be loaded')\n")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def mesh_and_worker(machine: Machine) -> Iterator[Tuple[GPUMesh, WorkerHandle]]:
    coordinator = GPUMesh.start_coordinator(port=0)
    with coordinator, GPUMesh.add_worker(coordinator.url, token=coordinator.token, slots=1) as worker:
        with GPUMesh(coordinator.url, token=coordinator.token, fallback=False) as mesh:
            yield mesh, worker


def loaded(machine: Machine) -> List[Tuple[int, str]]:
    """(process, module) of each that was loaded so far."""
    lines = (
        (machine.folder / "modules" / "loaded").read_text().splitlines()
        if (machine.folder / "modules" / "loaded").exists()
        else []
    )
    return [(int(pid), name) for pid, name in (line.split() for line in lines)]


def traces(pid: int) -> List[str]:
    """What of drivers and of torch a process has mapped or open."""
    marks = ("libcuda", "libnvidia", "nvidia0", "nvidiactl", "/torch/", "libtorch", "kfd")
    mapped = {line.split(maxsplit=5)[5].strip() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line}
    opened = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            opened.add(os.readlink(fd))
        except OSError:
            continue
    return sorted(path for path in mapped | opened if any(mark in path for mark in marks))


def look_around(x: int) -> Dict[str, Any]:
    """In a runner, before it has loaded anything of its own."""
    names = [name for name in sys.modules if name.partition(".")[0] in ("torch", "pynvml", "cupy")]
    return {"pid": os.getpid(), "parent": os.getppid(), "modules": names}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_whoever_lives_on_has_touched_no_driver(machine: Machine, mesh_and_worker: Tuple[GPUMesh, WorkerHandle]) -> None:
    mesh, worker = mesh_and_worker
    until(lambda: any(device["kind"] == "cuda" for each in mesh.workers() for device in each["devices"]), 20, what="cards")
    # Detection, the attempts at a benchmark of each card, and the monitor of both have been.
    until(lambda: len([pid for pid, name in loaded(machine) if name == "torch"]) >= 2, 30, what="benchmarks")
    until(lambda: len({pid for pid, name in loaded(machine) if name == "pynvml"}) >= 2, 20, what="detection and monitor")

    seen = accelerate(mesh)(look_around).remote(1).result(20)

    agent, spawner = worker.processes["worker"], worker.processes["spawner"]
    assert seen["modules"] == []
    assert seen["parent"] == spawner
    for pid in (agent, spawner, seen["pid"], os.getpid()):
        assert traces(pid) == []
        assert pid not in {who for who, _ in loaded(machine)}
    (monitor,) = [child for child in psutil.Process(agent).children() if "gpumesh.devices.monitor" in child.cmdline()]
    assert traces(monitor.pid) != []  # The teeth bite.


def test_everything_that_touched_one_ends_with_the_worker(
    machine: Machine, mesh_and_worker: Tuple[GPUMesh, WorkerHandle]
) -> None:
    _, worker = mesh_and_worker
    until(lambda: len({pid for pid, name in loaded(machine) if name == "pynvml"}) >= 2, 30, what="detection and monitor")

    worker.kill()

    until(lambda: not any(psutil.pid_exists(pid) and is_running(pid) for pid, _ in loaded(machine)), 20, what="an end of all")


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
