"""What CUDA itself would show to a program started here: asked of the driver's own library, without torch and without a context.

It settles what can only be guessed from outside: in which order CUDA numbers unlike cards, what an odd `CUDA_VISIBLE_DEVICES` leaves, whether
CUDA starts at all; and it finds cards where there is no NVML (Jetsons before JetPack 6). Only for processes that may be lost, and once in
each: the library reads the variables when it is initialised. Functions and numbers are those of cuda.h.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, List, Optional, Tuple

from gpumesh.devices.cards import Hardware
from gpumesh.model.records import NamedTuple

STUB_LIBRARY = 34  # CUresult of the toolkit's library to link against, which is no driver.
NO_DEVICE = 100
NOT_THERE = -1  # No such library here, or not one that has these functions.

_NAME_BYTES = 256
_MAX_DEVICES = 256
# CUdevice_attribute
_CLOCK_KHZ = 13
_MULTIPROCESSORS = 16
_INTEGRATED = 18
_PCI_BUS = 33
_PCI_DEVICE = 34
_MEMORY_CLOCK_KHZ = 36
_BUS_WIDTH = 37
_PCI_DOMAIN = 50
_MAJOR = 75
_MINOR = 76


class CudaCard(NamedTuple):
    """One card as CUDA numbers it: its place in the list is its number."""

    name: str
    uuid: str = ""  # "GPU-..."
    bus: str = ""  # "00000000:01:00", without the function: as NVML writes it up to there.
    memory: int = 0  # Bytes; less than NVML's by what the driver keeps.
    is_integrated: bool = False
    hardware: Hardware = Hardware()


class CudaList(NamedTuple):
    """What CUDA shows to this process. `code` not 0: CUDA does not start, and `refusal` says why."""

    cards: Tuple[CudaCard, ...] = ()
    code: int = 0
    refusal: str = ""


def list_cards(library: Optional[Any] = None) -> CudaList:
    """Initialise CUDA in this process and list what it shows; an empty list where the variables hide everything.

    Args:
        library: In place of the driver's.
    """
    try:
        cuda = library or ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        return _list(cuda)
    except (OSError, AttributeError) as error:  # AttributeError: a function is missing.
        return CudaList((), NOT_THERE, str(error))


def _list(cuda: Any) -> CudaList:
    code = int(cuda.cuInit(0))
    if code == NO_DEVICE:
        return CudaList()
    if code == STUB_LIBRARY:
        return CudaList((), NOT_THERE, "only a library to link against")
    if code:
        return CudaList((), code, _explain(cuda, code))
    count = ctypes.c_int()
    code = int(cuda.cuDeviceGetCount(ctypes.byref(count)))
    if code:
        return CudaList((), code, _explain(cuda, code))
    cards: List[CudaCard] = []
    for number in range(min(count.value, _MAX_DEVICES)):
        device = ctypes.c_int()
        if int(cuda.cuDeviceGet(ctypes.byref(device), number)):
            return CudaList((), NOT_THERE, f"device {number} is counted and cannot be opened")  # Then the numbers mean nothing.
        cards.append(_card(cuda, device))
    return CudaList(tuple(cards))


def _card(cuda: Any, device: ctypes.c_int) -> CudaCard:
    name = ctypes.create_string_buffer(_NAME_BYTES)
    if int(cuda.cuDeviceGetName(name, _NAME_BYTES - 1, device)):
        name.value = b""
    memory = ctypes.c_size_t()
    if int(cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)):
        memory.value = 0
    major, minor = _attribute(cuda, device, _MAJOR), _attribute(cuda, device, _MINOR)
    domain, bus, slot = (_attribute(cuda, device, what) for what in (_PCI_DOMAIN, _PCI_BUS, _PCI_DEVICE))
    return CudaCard(
        name=" ".join(name.value.decode("utf-8", "replace").split()),
        uuid=_uuid(cuda, device),
        bus=f"{domain:08X}:{bus:02X}:{slot:02X}",
        memory=memory.value,
        is_integrated=_attribute(cuda, device, _INTEGRATED) > 0,
        hardware=Hardware(
            capability=f"{major}.{minor}" if major else "",
            multiprocessors=_attribute(cuda, device, _MULTIPROCESSORS),
            clock=_attribute(cuda, device, _CLOCK_KHZ) * 1e3,
            bandwidth=2.0 * _attribute(cuda, device, _MEMORY_CLOCK_KHZ) * 1e3 * _attribute(cuda, device, _BUS_WIDTH) / 8,
        ),
    )


def _attribute(cuda: Any, device: ctypes.c_int, what: int) -> int:
    value = ctypes.c_int()
    return value.value if not int(cuda.cuDeviceGetAttribute(ctypes.byref(value), what, device)) and value.value > 0 else 0


def _uuid(cuda: Any, device: ctypes.c_int) -> str:
    value = (ctypes.c_ubyte * 16)()
    if int(cuda.cuDeviceGetUuid(ctypes.byref(value), device)):
        return ""
    text = bytes(value).hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _explain(cuda: Any, code: int) -> str:
    """The driver's own words; only its number where it has none."""
    text = ctypes.c_char_p()
    if int(cuda.cuGetErrorString(code, ctypes.byref(text))) or not text.value:
        return f"CUDA error {code}"
    return f"{text.value.decode('utf-8', 'replace')}, CUDA error {code}"
