"""Machines with made-up hardware, for processes that really start: stand-ins for pynvml, torch and nvidia-smi on their path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from gpumesh.devices.probe import ANSWER
from gpumesh.devices.probing import device_from
from gpumesh.model.resources import DeviceFacts
from tests.support import fake_nvml

ROOT = Path(__file__).resolve().parent.parent.parent
MIB = 1 << 20


def uuid(number: int) -> str:
    """Of a made-up card."""
    return f"GPU-{number:08d}-0000-4000-8000-000000000000"


def card(
    number: int, name: str = "NVIDIA GeForce RTX 3090", mib: int = 24576, *, used: int = 300, **more: Any
) -> Dict[str, Any]:
    """A good card, as a record of the stand-in has it."""
    memory = {"total": mib, "used": used}
    return {
        "index": number,
        "name": name,
        "uuid": uuid(number),
        "pci": f"00000000:{number + 1:02X}:00.0",
        "memory_mib": memory,
        **more,
    }


class Machine:
    """The environment of a machine.

    Args:
        folder: An empty one.
        devices: What NVML tells of its cards.
        init: What NVML's start answers instead of starting.
    """

    def __init__(
        self, folder: Path, devices: Sequence[Mapping[str, Any]] = (), *, init: Optional[Mapping[str, Any]] = None
    ) -> None:
        self.folder = folder
        (folder / "libraries").mkdir(parents=True, exist_ok=True)
        (
            folder / "libraries" / "libcuda.so.1"
        ).touch()  # No library: the loader looks no further, so a real driver stays out of it.
        self.environment = {
            "GPUMESH_PROBE": "1",
            "LD_LIBRARY_PATH": os.pathsep.join(
                filter(None, [str(folder / "libraries"), os.environ.get("LD_LIBRARY_PATH", "")])
            ),
            "PATH": os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", "")]),
            "PYTHONPATH": os.pathsep.join([str(folder / "modules"), str(ROOT)]),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        self.change(devices, init=init)

    def change(self, devices: Sequence[Mapping[str, Any]], *, init: Optional[Mapping[str, Any]] = None) -> None:
        """From now on NVML tells this."""
        fake_nvml.write_module(self.folder / "modules", {"driver": "550.54.14", "devices": list(devices)}, init=init)

    def add_module(self, name: str, text: str) -> None:
        """A module of its own making, in place of the real one."""
        (self.folder / "modules" / f"{name}.py").write_text(text, encoding="utf-8")

    def add_program(self, name: str, text: str) -> None:
        """A program that is found first."""
        (self.folder / "bin").mkdir(exist_ok=True)
        program = self.folder / "bin" / name
        program.write_text(text, encoding="utf-8")
        program.chmod(0o755)

    def devices(self, **variables: str) -> List[Dict[str, Any]]:
        """Rows of `gpumesh devices` for the GPUs, as a person would see them there."""
        rows: List[Dict[str, Any]] = json.loads(self.run("gpumesh", "devices", "--json", **variables))
        assert rows[0]["kind"] == "cpu"
        return rows[1:]

    def probe(self, **variables: str) -> List[DeviceFacts]:
        """What the probe tells of the GPUs."""
        printed = self.run("gpumesh.devices.probe", **variables)
        (line,) = [line for line in printed.splitlines() if line.startswith(ANSWER)]
        return [device_from(fields) for fields in json.loads(line[len(ANSWER) :])["devices"]]

    def run(self, module: str, *arguments: str, **variables: str) -> str:
        """What a program prints that starts there."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        finished = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env={**environment, **self.environment, **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
        assert finished.returncode == 0, finished.stderr
        return finished.stdout


TORCH = """
class Properties:
    def __init__(self, fields):
        self.__dict__.update(fields)


class version:
    hip = {hip!r}
    cuda = None


class cuda:
    devices = [Properties(fields) for fields in {devices!r}]

    def is_available():
        return bool(cuda.devices)

    def device_count():
        return len(cuda.devices)

    def get_device_properties(index):
        return cuda.devices[index]

    def mem_get_info(index):
        total = cuda.devices[index].total_memory
        return total - {held}, total


class backends:
    class mps:
        def is_available():
            return {mps!r} is not None

        def get_name():
            return {mps!r}

    class cuda:
        class matmul:
            allow_tf32 = False


class mps:
    def recommended_max_memory():
        return 11_840_000_000
"""


def torch_of(
    devices: Sequence[Mapping[str, Any]] = (), *, hip: Optional[str] = None, mps: Optional[str] = None, held: int = 0
) -> str:
    """A module `torch` that knows these devices and cannot calculate.

    Args:
        devices: Fields of the properties of each, as torch names them.
        hip: The version of ROCm that it was built for.
        mps: The name of an Apple chip.
        held: Bytes that are not free on each device.
    """
    return TORCH.format(devices=[dict(device) for device in devices], hip=hip, mps=mps, held=held)
