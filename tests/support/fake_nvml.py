"""A stand-in for the module `pynvml` that gives recorded answers of real machines, with the quirks of the real one.

The answers are those of tests/data/nvml_recorded.json. What a report does not tell raises NOT_SUPPORTED; no figure is invented, but for the
one that NVML's own rule yields: version 1 has `free` = `total` - `used`. Exceptions and structures are the real binding's: its errors
can be neither hashed nor compared. `FakeNvml` is used as the module itself; `write_module` makes a `pynvml` for another process.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Dict, List, Mapping, Optional

RECORDED = Path(__file__).resolve().parent.parent / "data" / "nvml_recorded.json"
MEMORY_V2 = 0x02000028


def recorded() -> Dict[str, Dict[str, Any]]:
    """All recorded answers by id."""
    with open(RECORDED, encoding="utf-8") as file:
        return {record["id"]: record for record in json.load(file)}


def record(beginning: str) -> Dict[str, Any]:
    """One record, by the beginning of its id ("r09")."""
    (found,) = [one for name, one in recorded().items() if name.startswith(beginning)]
    return found


def devices_of(guest: str, one: Mapping[str, Any]) -> Dict[str, Any]:
    """A record of several guests as one of them sees it."""
    seen = copy.deepcopy(dict(one))
    seen["devices"] = [device for device in seen["devices"] if device["guest"] == guest]
    return seen


def real_binding() -> ModuleType:
    """The binding of nvidia-ml-py, also where a stand-in of its name comes first on the path."""
    name = "real_pynvml_of_the_tests"
    if name not in sys.modules:
        file = importlib.metadata.distribution("nvidia-ml-py").locate_file("pynvml.py")
        spec = importlib.util.spec_from_file_location(name, str(file))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def raise_code(suffix: str) -> Any:
    """Raise the binding's error of a code: "NOT_SUPPORTED", ..."""
    binding = real_binding()
    raise binding.NVMLError(getattr(binding, f"NVML_ERROR_{suffix}"))


def given(answer: Any) -> Any:
    """A recorded answer, or its error."""
    if answer is None or (isinstance(answer, Mapping) and "printed" in answer):
        raise_code("NOT_SUPPORTED")
    if isinstance(answer, Mapping) and "raises" in answer:
        raise_code(answer["raises"])
    return answer


class Handle:
    """What the library hands out for a card or a slice."""

    def __init__(self, device: Dict[str, Any], *, is_slice: bool = False) -> None:
        self.device = device
        self.is_slice = is_slice


class FakeNvml:
    """The module, as far as anyone here asks it.

    Args:
        one: A record.
        as_bytes: Like bindings up to 11.510: text is bytes, and UUIDs have to be.
    """

    def __init__(self, one: Mapping[str, Any], *, as_bytes: bool = False) -> None:
        self.record = one
        self.as_bytes = as_bytes
        self.init_answer: Optional[Mapping[str, Any]] = None
        self.is_open = False
        self.asked: List[str] = []
        binding = real_binding()
        self.NVMLError = binding.NVMLError
        self.NVMLLibraryMismatchError = binding.NVMLLibraryMismatchError

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Functions that no report tells of."""
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: raise_code("NOT_SUPPORTED")

    # The library.

    def nvmlInit(self) -> None:
        self.asked.append("init")
        if self.init_answer is not None:
            given(self.init_answer)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        if not self.is_open:
            raise_code("UNINITIALIZED")
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._text(given(self.record.get("driver")))

    def nvmlDeviceGetCount(self) -> int:
        if not self.is_open:
            raise_code("UNINITIALIZED")
        return len(self.record["devices"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        if not 0 <= index < len(self.record["devices"]):
            raise_code("INVALID_ARGUMENT")
        device = self.record["devices"][index]
        if "handle" in device:
            given(device["handle"])
        return Handle(device)

    def nvmlDeviceGetHandleByUUID(self, uuid: Any) -> Handle:
        if self.as_bytes != isinstance(uuid, bytes):
            raise TypeError("bytes or integer address expected instead of str instance")
        wanted = uuid.decode() if isinstance(uuid, bytes) else uuid
        for device in self.record["devices"]:
            if device.get("uuid") == wanted:
                return Handle(device)
            for part in device.get("mig_devices", ()):
                if part["uuid"] == wanted:
                    return Handle(part, is_slice=True)
        raise_code("NOT_FOUND")
        raise AssertionError

    # One card.

    def nvmlDeviceGetName(self, handle: Handle) -> Any:
        return self._text(given(handle.device.get("name")))

    def nvmlDeviceGetUUID(self, handle: Handle) -> Any:
        return self._text(given(handle.device.get("uuid")))

    def nvmlDeviceGetPciInfo(self, handle: Handle) -> Any:
        return SimpleNamespace(busId=self._text(given(handle.device.get("pci"))))

    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: Optional[int] = None) -> Any:
        device, binding = handle.device, real_binding()
        given(device.get("memory", {}))
        generation = "v2" if version else "v1"
        if version not in (None, MEMORY_V2):
            raise_code("ARGUMENT_VERSION_MISMATCH")
        given(device.get(f"memory_{generation}", {}))
        figures = device.get(f"memory_{generation}_mib")
        if figures is None and generation == "v1":
            figures = device.get("memory_mib")
        if figures is not None:
            figures = {name: value << 20 for name, value in figures.items()}
        elif generation == "v1":
            figures = device.get("memory_b")
        figures = given(figures)
        if version:
            info = binding.c_nvmlMemory_v2_t()
            info.version = version
        else:
            info = binding.c_nvmlMemory_t()
        info.total, info.used = figures["total"], figures["used"]
        info.free = figures.get("free", figures["total"] - figures["used"])
        return info

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:
        device = handle.device
        if "util" in device:
            return SimpleNamespace(**given(device["util"]))
        return SimpleNamespace(gpu=given(device.get("util_gpu")))

    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int:
        return int(given(handle.device.get("temperature")))

    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int:
        if "power_mw" in handle.device:
            return int(given(handle.device["power_mw"]))
        return int(given(handle.device.get("power_w")) * 1000)

    def nvmlDeviceGetComputeMode(self, handle: Handle) -> int:
        modes = {"Default": 0, "Exclusive_Thread": 1, "Prohibited": 2, "Exclusive_Process": 3}
        return modes[given(handle.device.get("compute_mode"))]

    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle) -> Any:
        return tuple(given(handle.device.get("compute_capability")))

    def nvmlDeviceGetMemoryBusWidth(self, handle: Handle) -> int:
        return int(given(handle.device.get("memory_bus_width")))

    def nvmlDeviceGetMaxClockInfo(self, handle: Handle, kind: int) -> int:
        return int(given(handle.device.get({1: "max_clock_sm", 2: "max_clock_mem"}[kind])))

    def nvmlDeviceGetAttributes(self, handle: Handle) -> Any:
        if not handle.is_slice:
            raise_code("NOT_SUPPORTED")
        return SimpleNamespace(multiprocessorCount=given(handle.device.get("sm")))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle) -> List[Any]:
        return [SimpleNamespace(**process) for process in given(handle.device.get("processes"))]

    # Slices.

    def nvmlDeviceGetMigMode(self, handle: Handle) -> List[int]:
        return list(given(handle.device.get("mig_mode")))

    def nvmlDeviceIsMigDeviceHandle(self, handle: Handle) -> ctypes.c_uint:
        return ctypes.c_uint(int(handle.is_slice))  # An object that equals no number, as in the binding.

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle) -> int:
        return int(given(handle.device.get("max_mig_device_count")))

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, place: int) -> Handle:
        for part in handle.device.get("mig_devices", ()):
            if part["mig_index"] == place:
                return Handle(part, is_slice=True)
        raise_code("NOT_FOUND")
        raise AssertionError

    def _text(self, text: str) -> Any:
        return text.encode() if self.as_bytes else text


def write_module(folder: Path, one: Mapping[str, Any], *, init: Optional[Mapping[str, Any]] = None) -> str:
    """Put a `pynvml` into a folder that answers with this record; the folder, for PYTHONPATH.

    The record is read again whenever the library is initialised, so a test can change what the machine looks like.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps({"record": one, "init": init}), encoding="utf-8")
    (folder / "pynvml.py").write_text(
        f"""
import importlib.util, json, os, sys

spec = importlib.util.spec_from_file_location("stand_in_nvml", {os.path.abspath(__file__)!r})
stand_in = importlib.util.module_from_spec(spec)
sys.modules["stand_in_nvml"] = stand_in
spec.loader.exec_module(stand_in)
fake = stand_in.FakeNvml({{"devices": []}})


def nvmlInit():
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "record.json"), encoding="utf-8") as file:
        told = json.load(file)
    fake.record, fake.init_answer = told["record"], told["init"]
    fake.nvmlInit()


def __getattr__(name):
    return getattr(fake, name)
""",
        encoding="utf-8",
    )
    return str(folder)
