"""What NVIDIA's management library says of the cards, asked with care: every question in its own try, no answer believed blindly.

Only for processes that may be lost: a card that fell off the bus can take the whole process with it. Knows nothing of
`CUDA_VISIBLE_DEVICES` (NVML does not either) and decides nothing; see `gpus`.

What is minded here, each seen in the field: text comes as bytes from bindings up to 11.510; errors that are no NVMLError
(NVMLLibraryMismatchError, UnicodeDecodeError, TypeError and AttributeError of old bindings); NVMLErrors can be neither hashed nor compared;
single figures missing on good cards; memory missing where the memory is the host's; cards that are counted and cannot be opened.
"""

from __future__ import annotations

import ctypes
import warnings
from typing import Any, Collection, Dict, Optional, Sequence, Tuple, Type

from gpumesh.devices.cards import Hardware
from gpumesh.devices.holders import exists, host_use, is_descendant
from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import CardReading, DeviceFacts

# Codes of nvml.h (nvmlReturn_t), as the binding's errors hold them in `.value`.
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
GPU_IS_LOST = 15
LIBRARY_MISMATCH = 18
UNKNOWN = 999
NO_BINDING = -1  # nvidia-ml-py is not installed, or cannot be imported.
NOT_NVML = -2  # The binding itself failed: text that is not UTF-8, a function that it or the driver is too old for.

COMPUTE_PROHIBITED = 2  # nvmlComputeMode_t
_TEMPERATURE_OF_GPU = 0  # nvmlTemperatureSensors_t
_CLOCK_SM, _CLOCK_MEMORY = 1, 2  # nvmlClockType_t
_MEMORY_V2 = 0x02000028  # nvmlMemory_v2: any other number goes to the driver unchanged.

MAX_SLICES = 7  # Of one card, where the driver does not say how many places there are (MIG user guide).
MAX_CARDS = 256  # A count beyond this is nonsense.


class Memory(NamedTuple):
    """Bytes of a card. `total - free` is what anyone holds, the driver's reserve included."""

    total: int
    free: int
    used: int  # As nvidia-smi prints it where the driver tells that; else with the reserve.


class Card(NamedTuple):
    """One card, or one MIG slice of it, as NVML describes it. A field that NVML does not tell is empty."""

    system_index: int  # As nvidia-smi numbers it; of a slice: its card's.
    name: str = ""
    uuid: str = ""
    bus: str = ""  # "00000000:01:00": domain, bus and device, without the function. A slice has its card's.
    hardware: Hardware = Hardware()
    memory: Optional[Memory] = None
    memory_code: int = 0  # Why there is no memory.
    memory_refusal: str = ""
    compute_mode: int = 0
    code: int = 0  # Not 0: it is counted but does not answer.
    refusal: str = ""
    is_divided: bool = False  # MIG is on: only its slices can be used.
    slices: Tuple[Card, ...] = ()


class Survey(NamedTuple):
    """Everything NVML told. `code` not 0: nothing, and `refusal` is the reason."""

    cards: Tuple[Card, ...] = ()
    code: int = 0
    refusal: str = ""


class Answer(NamedTuple):
    """The value, or the reason why there is none."""

    value: Any = None
    code: int = 0
    refusal: str = ""


class Nvml:
    """One visit to the library: open, ask, close. Not for several threads."""

    def __init__(self, binding: Optional[Any] = None) -> None:
        """Args: binding: In place of the module `pynvml`."""
        self._binding = binding
        self._errors: Tuple[Type[BaseException], ...] = ()

    def open(self) -> Answer:
        """Load and initialise the library; may be tried again."""
        if self._binding is None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # The package "pynvml" adds a FutureWarning to the import.
                    import pynvml
            except (ImportError, OSError, ValueError, AttributeError) as error:
                return Answer(None, NO_BINDING, str(error))
            self._binding = pynvml
        kinds = (getattr(self._binding, name, None) for name in ("NVMLError", "NVMLLibraryMismatchError"))
        self._errors = (
            *(kind for kind in kinds if isinstance(kind, type)),
            ctypes.ArgumentError,
            AttributeError,
            LookupError,
            OSError,
            TypeError,
            ValueError,
        )
        return self._ask("nvmlInit")

    def close(self) -> None:
        """End the visit."""
        self._ask("nvmlShutdown")

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def driver(self) -> str:
        """The driver's version; "" if it does not say."""
        return _text(self._ask("nvmlSystemGetDriverVersion").value)

    def cards(self) -> Tuple[Card, ...]:
        """All that are counted, in nvidia-smi's order."""
        count = self._ask("nvmlDeviceGetCount")
        if count.code or not isinstance(count.value, int):
            return ()
        return tuple(self._card(index) for index in range(min(count.value, MAX_CARDS)))

    def read(self, devices: Sequence[DeviceFacts], own: Collection[int], leased: Collection[str]) -> Tuple[CardReading, ...]:
        """Live figures of the NVIDIA cards among the devices, those that still answer.

        Args:
            devices: As they were detected; those that are not used are left out.
            own: Processes whose memory, and that of their descendants, is ours.
            leased: Keys of the cards on which processes of ours run now. Only there does it matter which process holds what, and where the
                library cannot tell (containers, WSL2, Windows), `others` is -1.
        """
        readings = []
        for device in devices:
            if device.kind != "cuda" or device.problem:
                continue
            handle = self._handle(device)
            if handle.code:
                continue
            reading = self._reading(device, handle.value, own, device.key in leased)
            if reading is not None:
                readings.append(reading)
        return tuple(readings)

    def _ask(self, function: str, *arguments: Any) -> Answer:
        """One question, with whatever can go wrong made into a refusal."""
        try:
            return Answer(getattr(self._binding, function)(*arguments))
        except self._errors as error:
            code = getattr(error, "value", None)
            is_nvml = isinstance(code, int) and code > 0
            return Answer(
                None, int(code) if is_nvml and code is not None else NOT_NVML, _text(str(error)) or type(error).__name__
            )

    def _card(self, index: int) -> Card:
        handle = self._ask("nvmlDeviceGetHandleByIndex", index)
        if handle.code:
            return Card(index, code=handle.code, refusal=handle.refusal)
        mode = self._ask("nvmlDeviceGetMigMode", handle.value)
        is_divided = isinstance(mode.value, (list, tuple)) and len(mode.value) > 0 and _number(mode.value[0]) == 1
        card = self._describe(index, handle.value)
        if not is_divided or card.code:
            return card
        slices = []
        places = self._ask("nvmlDeviceGetMaxMigDeviceCount", handle.value)
        for place in range(min(_number(places.value), MAX_CARDS) if not places.code else MAX_SLICES):
            part = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle.value, place)
            if not part.code:  # Empty places raise.
                slices.append(self._describe(index, part.value))
        return card._replace(is_divided=True, slices=tuple(slices))

    def _describe(self, index: int, handle: Any) -> Card:
        name, uuid = self._ask("nvmlDeviceGetName", handle), self._ask("nvmlDeviceGetUUID", handle)
        memory, refused = self._memory(handle)
        mode = self._ask("nvmlDeviceGetComputeMode", handle)
        bus = _text(getattr(self._ask("nvmlDeviceGetPciInfo", handle).value, "busId", ""))
        for answer in (name, uuid, refused, mode):
            if answer.code == GPU_IS_LOST:
                return Card(index, _text(name.value), _text(uuid.value), code=answer.code, refusal=answer.refusal)
        return Card(
            index,
            name=_text(name.value),
            uuid=_text(uuid.value),
            bus=bus.upper().partition(".")[0],
            hardware=self._hardware(handle),
            memory=memory,
            memory_code=refused.code,
            memory_refusal=refused.refusal,
            compute_mode=_number(mode.value),
        )

    def _memory(self, handle: Any) -> Tuple[Optional[Memory], Answer]:
        """Version 1 says what is free; version 2, where there is one, what is used without the driver's reserve."""
        plain = self._ask("nvmlDeviceGetMemoryInfo", handle)
        detailed = self._ask("nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2)
        info = detailed if plain.code else plain
        if info.code:
            return None, plain
        total, free = _number(getattr(info.value, "total", 0)), _number(getattr(info.value, "free", 0))
        if not total:  # Said by cards whose memory is the host's: the same as not supported.
            return None, Answer(None, NOT_SUPPORTED, "a total of 0")
        free = min(free, total)
        used = _number(getattr((plain if detailed.code else detailed).value, "used", total - free))
        return Memory(total, free, min(used, total)), Answer()

    def _hardware(self, handle: Any) -> Hardware:
        capability = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
        is_pair = isinstance(capability.value, (tuple, list)) and len(capability.value) == 2
        width = _number(self._ask("nvmlDeviceGetMemoryBusWidth", handle).value)  # Bits.
        memory_clock = _number(self._ask("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_MEMORY).value)  # MHz.
        return Hardware(
            capability=".".join(str(_number(part)) for part in capability.value) if is_pair else "",
            multiprocessors=_number(getattr(self._ask("nvmlDeviceGetAttributes", handle).value, "multiprocessorCount", 0)),
            cores=_number(self._ask("nvmlDeviceGetNumGpuCores", handle).value),
            clock=_number(self._ask("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_SM).value) * 1e6,
            # Two transfers a cycle: an RTX 3090's 384 bits at 9751 MHz are the 936 GB/s of its sheet, an A100's 5120 at 1215 the 1555.
            bandwidth=2.0 * memory_clock * 1e6 * width / 8,
        )

    def processes(self, uuid: str, total: int) -> Dict[int, int]:
        """Bytes by process id of the card with this UUID and so many bytes; empty unless all of it makes sense."""
        handle = self._handle(DeviceFacts("cuda", 0, "", total, 1.0, uuid=uuid))
        return {} if handle.code else self._processes(handle.value, total)

    def _handle(self, device: DeviceFacts) -> Answer:
        """By UUID; by number only where there is none, for numbers do not survive a restart. A slice's goes stale when it is rebuilt."""
        if not device.uuid:
            return self._ask("nvmlDeviceGetHandleByIndex", device.system_index)
        handle = self._ask("nvmlDeviceGetHandleByUUID", device.uuid)
        if handle.code == NOT_NVML:  # Bindings up to 11.510 want bytes.
            handle = self._ask("nvmlDeviceGetHandleByUUID", device.uuid.encode())
        return handle

    def _reading(self, device: DeviceFacts, handle: Any, own: Collection[int], is_leased: bool) -> Optional[CardReading]:
        """None if the card is found and yet lost."""
        if device.is_integrated:
            others, used = host_use(device.memory, own)
        else:
            memory, refused = self._memory(handle)
            if refused.code == GPU_IS_LOST:
                return None
            used = memory.used if memory else -1
            others = self._others(handle, memory, own, is_leased) if memory else -1
        utilisation = getattr(self._ask("nvmlDeviceGetUtilizationRates", handle).value, "gpu", None)
        temperature = self._ask("nvmlDeviceGetTemperature", handle, _TEMPERATURE_OF_GPU).value
        power = self._ask("nvmlDeviceGetPowerUsage", handle).value  # Milliwatts.
        return CardReading(
            key=device.key,
            others=others,
            used=used,
            utilisation=-1.0 if utilisation is None else float(_number(utilisation)),
            temperature=-1.0 if temperature is None else float(_number(temperature)),
            power=-1.0 if power is None else _number(power) / 1000.0,
        )

    def _others(self, handle: Any, memory: Memory, own: Collection[int], is_leased: bool) -> int:
        held = memory.total - memory.free
        if not is_leased:
            return held
        processes = self._processes(handle, memory.total)
        ours = [size for pid, size in processes.items() if is_descendant(pid, own)]
        return max(0, held - sum(ours)) if ours else -1

    def _processes(self, handle: Any, total: int) -> Dict[int, int]:
        """Bytes by process, empty unless all of it makes sense.

        Drivers and bindings disagree about the layout of this list without a word, in containers it holds other numbers or nothing, and
        Windows leaves out the sizes: one process that does not exist, or a size beyond the card, and none of it is believed.
        """
        listed = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        found: Dict[int, int] = {}
        for process in listed.value if isinstance(listed.value, (list, tuple)) else ():
            pid, size = getattr(process, "pid", None), getattr(process, "usedGpuMemory", None)
            if not (isinstance(pid, int) and isinstance(size, int) and 0 <= size <= total and exists(pid)):
                return {}
            found[pid] = found.get(pid, 0) + size
        return found


def survey(binding: Optional[Any] = None) -> Survey:
    """Ask for everything once.

    Args:
        binding: In place of the module `pynvml`.
    """
    nvml = Nvml(binding)
    opened = nvml.open()
    if opened.code:
        return Survey((), opened.code, opened.refusal)
    with nvml:
        return Survey(nvml.cards())


def driver_version(binding: Optional[Any] = None) -> str:
    """The NVIDIA driver's version; "" where there is none, or it does not say.

    Args:
        binding: In place of the module `pynvml`.
    """
    nvml = Nvml(binding)
    if nvml.open().code:
        return ""
    with nvml:
        return nvml.driver()


def read_cards(
    devices: Sequence[DeviceFacts],
    own: Collection[int],
    leased: Collection[str],
    binding: Optional[Any] = None,
) -> Tuple[CardReading, ...]:
    """`Nvml.read` in one visit; nothing where the library cannot be opened. Whoever reads again and again keeps an `Nvml` open."""
    nvml = Nvml(binding)
    if nvml.open().code:
        return ()
    with nvml:
        return nvml.read(devices, own, leased)


def processes_on(uuid: str, total: int, binding: Optional[Any] = None) -> Dict[int, int]:
    """Bytes by process id of one card; empty where the library does not say, or what it says makes no sense.

    Args:
        uuid: Of the card or slice.
        total: Its bytes.
        binding: In place of the module `pynvml`.
    """
    nvml = Nvml(binding)
    if nvml.open().code:
        return {}
    with nvml:
        return nvml.processes(uuid, total)


def _number(value: Any) -> int:
    """A count that is not negative; 0 for what is none. Some functions return a ctypes object, which equals no number."""
    value = getattr(value, "value", value)
    return value if isinstance(value, int) and value > 0 else 0


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return " ".join(value.split()) if isinstance(value, str) else ""
