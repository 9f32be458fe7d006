"""The GPUs of this machine as records for the mesh: NVIDIA's by NVML and CUDA, without torch; AMD's and Apple's by what torch says of them.

`detect_gpus` talks to drivers and belongs into a process that may be lost; what it decides is in `offered`.
"""

from __future__ import annotations

import os
from typing import Any, Mapping, Tuple

from gpumesh.devices import cuda_driver, nvml, offered
from gpumesh.devices.cards import Hardware, prior_score
from gpumesh.devices.offered import HostMemory
from gpumesh.model.resources import DeviceFacts

_PCI = "/sys/bus/pci/devices"
_PCI_NVIDIA = "0x10de"
_PCI_DISPLAY = "0x03"  # Base class "display controller" (PCI code and ID assignment): VGA, 3D.

# Processors with graphics on the chip, whose memory is the host's: LLVM's AMDGPU usage page, table of processors, type "APU".
APU_ARCHITECTURES = frozenset(
    {
        "gfx801", "gfx810", "gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1103",
        "gfx1150", "gfx1151", "gfx1152", "gfx1153",
    }
)  # fmt: skip


def detect_gpus() -> Tuple[DeviceFacts, ...]:
    """All NVIDIA cards of this machine, those that this process may use first and in CUDA's order. Never imports torch.

    To be called once in a process that may be lost, and with a time limit: drivers of broken cards hang or crash whoever asks. A machine
    without such cards costs a few milliseconds.

    Returns:
        Usable cards have an empty `problem` and are numbered (`index`) as a program here would number them; `score` is a guess from the
        card's name (`cards.prior_score`) until it is measured. The others follow, each with its reason.
    """
    answers = nvml.survey()
    shown = cuda_driver.list_cards()
    is_without_driver = answers.code in (nvml.LIBRARY_NOT_FOUND, nvml.DRIVER_NOT_LOADED, nvml.NO_BINDING)
    if is_without_driver and not shown.cards and not _nvidia_on_bus():
        return ()
    return offered.join(answers, os.environ, host_memory(), shown)


def host_memory() -> HostMemory:
    """What the system says now, within the limits of our control group."""
    import psutil

    from gpumesh.devices import detect

    total = detect.host_memory()
    return HostMemory(total, min(total, int(psutil.virtual_memory().available)))


def _nvidia_on_bus() -> bool:
    """Whether Linux has found an NVIDIA graphics card, driver or not; False where there is no such list."""
    try:
        slots = sorted(os.listdir(_PCI))
    except OSError:
        return False
    return any(
        _read(f"{_PCI}/{slot}/vendor") == _PCI_NVIDIA and _read(f"{_PCI}/{slot}/class").startswith(_PCI_DISPLAY)
        for slot in slots
    )


def _read(file: str) -> str:
    try:
        with open(file, encoding="ascii", errors="replace") as opened:
            return opened.read(32).strip()
    except OSError:
        return ""


def from_torch(
    properties: Mapping[str, Any],
    *,
    kind: str,
    index: int,
    host: HostMemory,
    others: int = 0,
    problem: str = "",
) -> DeviceFacts:
    """One device as torch describes it.

    Args:
        properties: The fields of `torch.cuda.get_device_properties(i)` that this torch has, by name: `name`, `total_memory` (bytes), `major`,
            `minor`, `gcnArchName`, `multi_processor_count`, `is_integrated`, `uuid`. For MPS: `name` and, as `total_memory`,
            `torch.mps.recommended_max_memory()`.
        kind: "cuda", "rocm" or "mps".
        index: As torch numbers it.
        host: Its memory, for devices that share it.
        others: Bytes that are not free, for devices with memory of their own.
        problem: Why it is not used.
    """
    architecture = str(properties.get("gcnArchName") or "").partition(":")[0]
    capability = ""
    if kind == "rocm" and architecture:
        capability = architecture
    elif kind != "mps" and properties.get("major") is not None:
        capability = f"{properties['major']}.{properties.get('minor') or 0}"
    total = max(0, int(properties.get("total_memory") or 0))
    is_integrated = kind == "mps" or bool(properties.get("is_integrated")) or architecture in APU_ARCHITECTURES
    if is_integrated:
        memory, others = offered.shared_memory(host, limit=total)
    else:
        memory, others = total, min(total, max(0, others))
    uuid = str(properties.get("uuid") or "") if kind == "cuda" else ""  # ROCm's names nothing that its masks understand.
    hardware = Hardware(capability=capability, multiprocessors=int(properties.get("multi_processor_count") or 0))
    name = str(properties.get("name") or f"{kind} device")
    return DeviceFacts(
        kind=kind,
        index=index,
        name=name,
        memory=memory,
        score=prior_score(name, hardware),
        uuid=f"GPU-{uuid}" if uuid and not uuid.startswith(("GPU-", "MIG-")) else uuid,
        problem=problem,
        others=others,
        is_integrated=is_integrated,
        capability=capability,
    )
