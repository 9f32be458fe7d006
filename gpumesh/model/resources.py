"""What a task requires and what a worker offers; matching is a filter, never a hint."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from gpumesh.config import FACTS_CHARACTERS, FACTS_ITEMS
from gpumesh.model.records import NamedTuple, leading
from gpumesh.model.shown import clean_line

GPU_KINDS = ("cuda", "mps", "rocm", "gpu")
_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_TEXTS = ("hostname", "python", "platform", "gpumesh", "problem")  # Of WorkerFacts.
_DEVICE_TEXTS = ("kind", "name", "uuid", "problem", "capability")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*\Z")


class Requirement(NamedTuple):
    """What a worker must have. Hashable: tasks that require the same share a queue.

    Attributes:
        device: "" for any; a kind ("cuda", "mps", "rocm", "gpu", "cpu"), or a kind with an index ("cuda:1").
        model: Lower-case substring of the device's name, "" for any.
        gpus: Number of GPUs, fractions allowed; 0 for none, or for a place on a card that only `gpu_memory` measures.
        gpu_memory: Bytes free on one card; without `gpus` the card is shared by as many tasks as find their bytes on it.
        memory: Bytes of host memory.
        cores: CPU cores; 0: one slot.
        tags: Sorted (name, value) pairs that the worker's tags must contain.
        python: "3.11" when the function travels by value and so needs that minor version; "" for any.
    """

    device: str = ""
    model: str = ""
    gpus: float = 0.0
    gpu_memory: int = 0
    memory: int = 0
    cores: int = 0
    tags: Tuple[Tuple[str, str], ...] = ()
    python: str = ""

    @property
    def needs_gpu(self) -> bool:
        """Whether it runs on a GPU; if not, it sees none."""
        return self.gpus > 0 or self.gpu_memory > 0


ANYTHING = Requirement()


class DeviceFacts(NamedTuple):
    """One compute device of a worker, as told to the mesh."""

    kind: str  # "cpu", "cuda", "mps", "rocm"
    index: int  # type: ignore[assignment]  # Hides tuple.index, which nobody needs here. Within its kind, as user code on that worker would number it.
    name: str
    memory: int  # Bytes that tasks may use of it in all; host memory for a CPU.
    score: float  # 100 is the reference card (RTX 4090); a CPU is a fraction of 1 to a few.
    uuid: str = ""  # "GPU-...", "MIG-..."; "" where the system gives none.
    system_index: int = -1  # As the system's own tools number it (nvidia-smi); -1 where there is no such number.
    problem: str = ""  # Not empty: not used, and why, for people: lost, paused by its owner, no kernels for it.
    others: int = 0  # Bytes of `memory` that other programs hold, or the driver; not available to tasks.
    is_integrated: bool = False  # Its memory is the host's.
    capability: str = ""  # "8.9", "gfx942"; "" if unknown.
    rates: Tuple[Tuple[str, float], ...] = ()  # Measured: ("float32", FLOP/s), ("bfloat16", ...), ("bandwidth", bytes/s), ...

    @property
    def key(self) -> str:
        """What names this device on its worker, also in the order to make it visible: the UUID where there is one."""
        return self.uuid or f"{self.kind}:{self.index}"


class CardReading(NamedTuple):
    """What a card's own instruments say now. -1: not to be had."""

    key: str  # DeviceFacts.key
    others: int = -1  # Bytes that other programs hold, or the driver.
    used: int = -1  # Bytes in use by anyone.
    utilisation: float = -1.0  # Percent of the time in which something ran on it.
    temperature: float = -1.0  # Degrees Celsius.
    power: float = -1.0  # Watts.


class WorkerFacts(NamedTuple):
    """What a worker tells of itself when it joins, and again when something changes."""

    hostname: str = ""
    slots: int = 1
    cores: int = 1
    memory: int = 0  # Bytes of host memory.
    score: float = 1.0  # Of the device that tasks without a requirement run on; > 0, finite.
    devices: Tuple[DeviceFacts, ...] = ()
    tags: Tuple[Tuple[str, str], ...] = ()
    python: str = ""
    platform: str = ""
    gpumesh: str = ""
    pid: int = 0
    problem: str = ""  # Not empty: unhealthy or paused, takes no tasks; the text is for people.
    versions: Tuple[Tuple[str, str], ...] = ()  # (package, version) of well-known packages, as far as installed.
    installing: Tuple[Tuple[str, ...], ...] = ()  # Sets of packages that it builds environments of: their tasks have to wait.


def withhold(devices: Tuple[DeviceFacts, ...], reason: str) -> Tuple[DeviceFacts, ...]:
    """The same, none of the GPUs being offered."""
    return tuple(device if device.kind == "cpu" else device._replace(problem=device.problem or reason) for device in devices)


def facts_from_wire(fields: Any) -> WorkerFacts:
    """Rebuild facts from the plain tuple that travelled.

    Raises:
        ValueError: Not the shape of facts, or a score or slot count out of range.
    """
    try:
        facts = WorkerFacts(*leading(fields, WorkerFacts))  # A newer peer may tell more.
        plain: Any = facts.devices
        lists: Any = (plain, facts.tags, facts.versions, facts.installing, *facts.installing)
        if max(map(len, lists)) > FACTS_ITEMS:
            raise ValueError(f"more than {FACTS_ITEMS} devices, tags or packages")
        devices = tuple(_device_from_wire(device) for device in plain)
        tags = tuple((_told(name), _told(value)) for name, value in facts.tags)
        versions = tuple((_told(package), _told(version)) for package, version in facts.versions)
        installing = tuple(tuple(_told(package) for package in packages) for packages in facts.installing)
        facts = facts._replace(devices=devices, tags=tags, score=float(facts.score), versions=versions, installing=installing)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"these are not worker facts: {error}") from None
    _check_fields(facts, text=_TEXTS, counts=("cores", "memory", "pid"))
    told: Dict[str, Any] = {name: _told(getattr(facts, name)) for name in _TEXTS}
    facts = facts._replace(**told)
    for device in devices:
        _check_device(device)
    if len({device.key for device in devices}) < len(devices):
        raise ValueError(f"two devices of a worker have the same name: {', '.join(device.key for device in devices)}")
    if not 0 < facts.score < 1e9:  # Also refuses NaN.
        raise ValueError(f"a worker's score must be a positive finite number, not {facts.score!r}; set one with --score")
    if not (isinstance(facts.slots, int) and 1 <= facts.slots <= 4096):
        raise ValueError(f"a worker has 1 to 4096 slots, not {facts.slots!r}")
    return facts


def _check_device(device: DeviceFacts) -> None:
    """Its score divides times and weighs cards: it has to be a weight even where the device is not used."""
    _check_fields(device, text=_DEVICE_TEXTS, counts=("index", "memory", "others"), numbers=("score",))
    if not 0 < device.score < 1e9:
        raise ValueError(f"the score of {device.name!r} must be a positive finite number, not {device.score!r}")
    if not isinstance(device.system_index, int):
        raise ValueError(f"system_index must be a whole number, not {device.system_index!r}")


def _device_from_wire(fields: Any) -> DeviceFacts:
    device = DeviceFacts(*leading(fields, DeviceFacts))
    rates = tuple((_told(name), float(rate)) for name, rate in device.rates[:FACTS_ITEMS])
    texts = {name: getattr(device, name) for name in _DEVICE_TEXTS}
    told: Any = {
        name: _told(text) for name, text in texts.items() if isinstance(text, str)
    }  # What is no text is refused later.
    return device._replace(rates=rates, **told)


def _told(text: Any) -> str:
    return clean_line(text, FACTS_CHARACTERS)


def readings_from_wire(rows: Any) -> Tuple[CardReading, ...]:
    """Rebuild readings from the plain tuples that travelled.

    Raises:
        ValueError: Not the shape of readings.
    """
    try:
        if len(rows) > FACTS_ITEMS:
            raise ValueError(f"these are readings of {len(rows)} cards; more than {FACTS_ITEMS} are too many")
        readings = tuple(CardReading(*leading(row, CardReading)) for row in rows)
    except TypeError as error:
        raise ValueError(f"these are not readings of cards: {error}") from None
    for reading in readings:
        figures = reading[1:]
        if not isinstance(reading.key, str) or not all(isinstance(figure, (int, float)) for figure in figures):
            raise ValueError(f"this is not a reading of a card: {reading!r}")
    return readings


def requirement_from_wire(fields: Any) -> Requirement:
    """Rebuild a requirement from the plain tuple that travelled.

    Raises:
        ValueError: Not the shape of a requirement.
    """
    try:
        need = Requirement(*leading(fields, Requirement))
        need = need._replace(tags=tuple((str(name), str(value)) for name, value in need.tags))
    except (TypeError, ValueError) as error:
        raise ValueError(f"this is not a requirement: {error}") from None
    _check_fields(need, text=("device", "model", "python"), counts=("gpu_memory", "memory", "cores"), numbers=("gpus",))
    index = need.device.partition(":")[2]
    if index and not index.isdecimal():
        raise ValueError(f"the device {need.device[:40]!r} has no number after the colon")
    return need


def _check_fields(record: Any, *, text: Sequence[str], counts: Sequence[str], numbers: Sequence[str] = ()) -> None:
    """What comes from elsewhere is compared and added here: names must be text, counts and numbers finite and not negative."""
    for name in text:
        if not isinstance(getattr(record, name), str):
            raise ValueError(f"{name} must be text, not {getattr(record, name)!r}")
    for name in (*counts, *numbers):
        value = getattr(record, name)
        if not isinstance(value, int if name in counts else (int, float)) or not 0 <= value < 2**63:
            raise ValueError(f"{name} must be a number that is not negative, not {value!r}")


def parse_bytes(size: Union[str, int, float], *, what: str = "memory") -> int:
    """Bytes from `"16GB"` (10**9), `"512MiB"` (2**20) or a number of bytes.

    Raises:
        ValueError: Not a size, or negative.
    """
    if isinstance(size, bool) or not isinstance(size, (str, int, float)):
        raise ValueError(f"{what} must be a size such as '16GB', '512MiB' or a number of bytes, not {size!r}")
    if isinstance(size, (int, float)):
        if not 0 <= size < 2**63:
            raise ValueError(f"{what} must be between 0 and 2**63 bytes, not {size!r}")
        return int(size)
    match = _SIZE.match(size)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{what} {size!r} is not a size; write '16GB', '512MiB' or a number of bytes")
    number = match.group(1)
    count = float(number) * unit
    if not count < 2**63:
        raise ValueError(f"{what} must be between 0 and 2**63 bytes, not {size!r}")
    return int(count) if "." in number else int(number) * unit


def make_requirement(
    *,
    gpu: Union[None, str, int, float, bool] = None,
    memory: Union[None, str, int, float] = None,
    cores: Optional[int] = None,
    tags: Optional[Mapping[str, str]] = None,
    device: Optional[str] = None,
    python: str = "",
) -> Requirement:
    """A requirement from the options a user writes (CONTRACT: `gpu=`, `memory=`, `cores=`, `tags=`, `.to(...)`).

    Raises:
        ValueError: An option has no meaning; the message says which and what to write.
    """
    kind, model, gpus = "", "", 0.0
    if device is not None:
        kind, model, gpus = _parse_device(device)
    if gpu is not None and gpu is not False:
        if isinstance(gpu, str):
            kind, model, gpus = _parse_device(gpu)
        elif isinstance(gpu, (int, float)) and 0 <= gpu <= 1024:
            gpus = float(gpu)
            kind = kind or ("gpu" if gpus else "")
        else:
            raise ValueError(f"gpu={gpu!r} is neither a kind ('cuda'), a model ('A100') nor a number of GPUs")
    host_memory, gpu_memory = 0, 0
    if memory is not None:
        if gpus:
            gpu_memory = parse_bytes(memory)
            if not isinstance(gpu, (int, float)) and gpu_memory:
                gpus = 0.0  # No number was asked for: as many share a card as find room on it.
        else:
            host_memory = parse_bytes(memory)
    if cores is not None and (isinstance(cores, bool) or not isinstance(cores, int) or not 1 <= cores <= 65536):
        raise ValueError(f"cores={cores!r} must be a whole number of CPU cores, at least 1")
    pairs = tuple(sorted((str(name), str(value)) for name, value in (tags or {}).items()))
    return Requirement(kind, model, gpus, gpu_memory, host_memory, cores or 0, pairs, python)


def _parse_device(text: str) -> Tuple[str, str, float]:
    """(kind, model, gpus) of "cuda", "cuda:1", "cpu" or a model name."""
    word = text.strip().lower()
    if not word:
        raise ValueError("a device must be named: 'cuda', 'cuda:1', 'mps', 'cpu' or a model such as 'RTX 3080'")
    base, _, index = word.partition(":")
    if base == "cpu":
        return "cpu", "", 0.0
    if base in GPU_KINDS:
        if ":" in word and not index.isdecimal():
            raise ValueError(f"the device {text!r} has no number after the colon; write {base!r} or '{base}:0'")
        return word, "", 1.0
    return "gpu", word, 1.0


def lacks(facts: WorkerFacts, need: Requirement) -> List[str]:
    """Why a worker can never satisfy a requirement, one clause each; empty when it can."""
    reasons: List[str] = []
    if need.python and facts.python and facts.python != need.python:
        reasons.append(f"runs Python {facts.python}, not {need.python}")
    if need.cores > facts.cores:
        reasons.append(f"has {facts.cores} cores, not {need.cores}")
    if need.memory > facts.memory:
        reasons.append(f"has {show_bytes(facts.memory)} of memory, not {show_bytes(need.memory)}")
    missing = [f"{name}={value}" for name, value in need.tags if (name, value) not in facts.tags]
    if missing:
        reasons.append(f"has no tag {', '.join(missing)}")
    if need.needs_gpu:
        reasons.extend(_lacks_gpus(facts, need))
    return reasons


def _lacks_gpus(facts: WorkerFacts, need: Requirement) -> List[str]:
    cards = [device for device in facts.devices if device.kind != "cpu"]
    if not cards:
        return ["has no GPU"]
    kind, _, index = need.device.partition(":")
    if kind and kind != "gpu":
        cards = [card for card in cards if card.kind == kind and (not index or card.index == int(index))]
        if not cards:
            return [f"has no {need.device} device"]
    if need.model:
        named = [card for card in cards if need.model in card.name.lower()]
        if not named:
            return [f"has {_named(cards)}, not {need.model!r}"]
        cards = named
    broken = [card for card in cards if card.problem]
    cards = [card for card in cards if not card.problem]
    if not cards:
        return [f"does not offer {' and '.join(f'{card.name} ({card.problem})' for card in broken)}"]
    if need.gpu_memory:
        largest = max(card.memory for card in cards)
        cards = [card for card in cards if card.memory >= need.gpu_memory]
        if not cards:
            return [f"has at most {show_bytes(largest)} on one GPU, not {show_bytes(need.gpu_memory)}"]
    if need.gpus > len(cards):
        return [f"has {len(cards)} such GPUs, not {need.gpus:g}"]
    return []


def _named(cards: Sequence[DeviceFacts]) -> str:
    """`2 x NVIDIA A100, NVIDIA T4`"""
    counts: Dict[str, int] = {}
    for card in cards:
        counts[card.name] = counts.get(card.name, 0) + 1
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())


def show_bytes(count: float) -> str:
    """`1.5 GB`: a number of bytes for people, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:.0f} TB"


def show_requirement(need: Requirement) -> str:
    """A requirement for people: `1 GPU 'a100' with 16 GB, 8 cores`."""
    parts: List[str] = []
    if need.needs_gpu:
        kind = "" if need.device in ("", "gpu") else f"{need.device} "
        model = f" {need.model!r}" if need.model else ""
        memory = f" with {show_bytes(need.gpu_memory)}" if need.gpu_memory else ""
        count = f"{need.gpus:g}" if need.gpus else "room on a"
        parts.append(f"{count} {kind}GPU{'s' if need.gpus > 1 else ''}{model}{memory}")
    if need.cores:
        parts.append(f"{need.cores} cores")
    if need.memory:
        parts.append(f"{show_bytes(need.memory)} of memory")
    parts.extend(f"tag {name}={value}" for name, value in need.tags)
    if need.python:
        parts.append(f"Python {need.python}")
    return ", ".join(parts) or "nothing special"


def facts_as_dict(facts: WorkerFacts) -> Dict[str, Any]:
    """Facts as the plain dict that `mesh.workers()` starts from."""
    plain = facts._asdict()
    plain["devices"] = [device._asdict() for device in facts.devices]
    plain["tags"] = dict(facts.tags)
    plain["versions"] = dict(facts.versions)
    plain["installing"] = [list(packages) for packages in facts.installing]
    return plain
