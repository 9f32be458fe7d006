"""Which GPUs this machine has, which of them this worker may use, and why not the others: NVML's answers joined with the variables.

`detect_gpus` talks to drivers and belongs into a process that may be lost; `join` and `from_torch`, which decide, are plain functions of what
was answered.
"""

from __future__ import annotations

import os
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from gpumesh.devices import nvml, visible
from gpumesh.devices.cards import Hardware, prior_score
from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import DeviceFacts

UNNAMED = "NVIDIA GPU"
HOST_RESERVE = 8  # One part in this many of the host's memory stays with it where the card has none of its own; Apple keeps a quarter or more.
_SHOWN = 60  # Characters of a variable that a reason quotes.
_PCI = "/sys/bus/pci/devices"
_PCI_NVIDIA = "0x10de"
_PCI_DISPLAY = "0x03"  # Base class "display controller" (PCI code and ID assignment): VGA, 3D.

# Processors with graphics on the chip, whose memory is the host's: LLVM's AMDGPU usage page, table of processors, type "APU".
APU_ARCHITECTURES = frozenset(
    {
        "gfx801", "gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1103",
        "gfx1150", "gfx1151", "gfx1152", "gfx1153",
    }
)  # fmt: skip


class HostMemory(NamedTuple):
    """Bytes of host memory that this process may use, and what of it is free now."""

    total: int
    available: int


def detect_gpus() -> Tuple[DeviceFacts, ...]:
    """All NVIDIA cards of this machine, usable ones first, in CUDA's order. Never imports torch.

    To be called in a process that may be lost, and with a time limit: drivers of broken cards hang or crash whoever asks. A machine without
    such cards costs a few milliseconds.

    Returns:
        Usable cards have an empty `problem` and are numbered (`index`) as a program here would number them; `score` is a guess from the
        card's name (`cards.prior_score`) until it is measured. The others follow, each with its reason.
    """
    answers = nvml.survey()
    if not answers.code and not answers.cards:
        return ()
    if answers.code in (nvml.LIBRARY_NOT_FOUND, nvml.DRIVER_NOT_LOADED, nvml.NO_BINDING) and not _nvidia_on_bus():
        return ()
    return join(answers, os.environ, host_memory())


def host_memory() -> HostMemory:
    """What the system says now, within the limits of our control group."""
    import psutil

    from gpumesh.devices import detect

    total = detect.host_memory()
    return HostMemory(total, min(total, int(psutil.virtual_memory().available)))


def join(answers: nvml.Survey, environment: Mapping[str, str], host: HostMemory) -> Tuple[DeviceFacts, ...]:
    """What to tell of the cards that NVML described.

    Args:
        answers: All of them, whatever the variables say.
        environment: Of this process: `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` count.
        host: For cards that have no memory of their own.
    """
    if answers.code:
        return (DeviceFacts("cuda", 0, UNNAMED, 0, prior_score(""), problem=_library_problem(answers)),)
    speeds = [prior_score(card.name, card.hardware) for card in answers.cards]
    opened = [place for place, card in enumerate(answers.cards) if not card.code]  # CUDA does not count what cannot be opened.
    order = visible.cuda_order(environment.get(visible.ORDER), [speeds[place] for place in opened])
    places = [opened[position] for position in order]
    value = environment.get(visible.VISIBLE)
    named = [visible.VisibleCard(card.uuid, _slice_names(card)) for card in (answers.cards[place] for place in places)]
    chosen = [(places[position], part) for position, part in visible.select(value, named)]

    used: List[DeviceFacts] = []
    unused: List[DeviceFacts] = []
    for place, part in chosen:
        card = answers.cards[place]
        facts = _facts(card, host) if part == visible.WHOLE else _facts(_named_slice(card, part), host)
        (unused if facts.problem else used).append(facts)
    hidden = _hidden_problem(value)
    for place, card in enumerate(answers.cards):
        if not card.slices:
            if (place, visible.WHOLE) not in chosen:
                unused.append(_facts(card, host, problem="" if card.code else hidden))
            continue
        parts = [part for part in range(len(card.slices)) if (place, part) not in chosen]
        unused.extend(_facts(_named_slice(card, part), host, problem=hidden) for part in parts)
        whole = f"divided into {len(card.slices)} MIG slices, which are offered in its place"
        unused.append(_facts(card, host, problem=whole if len(parts) < len(card.slices) else hidden))
    return tuple(facts._replace(index=index) for index, facts in enumerate([*used, *unused]))


def _slice_names(card: nvml.Card) -> Tuple[str, ...]:
    return tuple(part.uuid for part in card.slices)


def _named_slice(card: nvml.Card, part: int) -> nvml.Card:
    """A slice by its own name, or by its card's."""
    found = card.slices[part]
    return found if found.name else found._replace(name=f"{card.name or UNNAMED} MIG slice {part}")


def _facts(card: nvml.Card, host: HostMemory, problem: str = "") -> DeviceFacts:
    """One card; `problem` if it has none of its own."""
    memory, others, is_integrated = 0, 0, False
    if card.memory is not None:
        memory, others = card.memory.total, card.memory.total - card.memory.free
    elif card.memory_code == nvml.NOT_SUPPORTED and not card.is_divided and (card.name or card.uuid):
        # Only this means that the memory is the host's; a refusal for want of rights, or a lost card, must not turn into all of its RAM.
        is_integrated = True
        memory, others = shared_memory(host)
    return DeviceFacts(
        kind="cuda",
        index=0,
        name=card.name or UNNAMED,
        memory=memory,
        score=prior_score(card.name, card.hardware),
        uuid=card.uuid,
        system_index=card.system_index,
        problem=_card_problem(card) or problem,
        others=others,
        is_integrated=is_integrated,
        capability=card.hardware.capability,
    )


def shared_memory(host: HostMemory, limit: int = 0) -> Tuple[int, int]:
    """(memory, others) of a card whose memory is the host's: what is offered leaves the host a part, what is free is what the host has free.

    Args:
        host: Its memory.
        limit: Bytes that the device can address at most; 0: all.
    """
    memory = host.total - host.total // HOST_RESERVE
    memory = min(memory, limit) if limit else memory
    return memory, memory - min(memory, host.available)


def _card_problem(card: nvml.Card) -> str:
    if card.code == nvml.GPU_IS_LOST:
        return f"fell off the bus ({card.refusal}): heat, power or its slot; reboot the machine"
    if card.code:
        return f"cannot be opened ({card.refusal}); reboot the machine, or restart the container if this is one"
    if card.compute_mode == nvml.COMPUTE_PROHIBITED:
        return "its compute mode is Prohibited; its owner can allow programs with 'nvidia-smi -c 0'"
    if card.is_divided and not card.slices:
        return (
            "MIG is on, and there is no slice that this worker could use; create one with 'nvidia-smi mig', or switch MIG off"
        )
    if card.memory is None and not card.is_divided and card.memory_code == nvml.NO_PERMISSION:
        return f"does not tell its memory ({card.memory_refusal}): a MIG card, seen from a container that was given none of its slices?"
    if (
        card.memory is None
        and not card.is_divided
        and not (card.memory_code == nvml.NOT_SUPPORTED and (card.name or card.uuid))
    ):
        return f"does not tell its memory ({card.memory_refusal})"
    return ""


def _hidden_problem(value: Optional[str]) -> str:
    if not value:
        return f"hidden: {visible.VISIBLE} is empty"
    shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
    return f"hidden by {visible.VISIBLE}={shown}"


def _library_problem(answers: nvml.Survey) -> str:
    if answers.code == nvml.LIBRARY_MISMATCH:
        return f"the NVIDIA driver was updated while the system ran ({answers.refusal}); reboot the machine"
    if answers.code in (nvml.LIBRARY_NOT_FOUND, nvml.DRIVER_NOT_LOADED):
        return f"there is a card, but its driver is not there ({answers.refusal}); install NVIDIA's driver, or load it"
    if answers.code == nvml.NO_BINDING:
        return f"there is a card, but it cannot be asked ({answers.refusal}); run 'pip install nvidia-ml-py'"
    if answers.code == nvml.UNKNOWN:
        return f"the NVIDIA driver does not answer ({answers.refusal}); restart the container if this is one, else reboot the machine"
    return f"the NVIDIA driver does not answer ({answers.refusal}); does 'nvidia-smi' work here?"


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
        memory, others = shared_memory(host, limit=total)
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


def usable(devices: Sequence[DeviceFacts]) -> Tuple[DeviceFacts, ...]:
    """Those that tasks may use."""
    return tuple(device for device in devices if not device.problem)
