"""A stand-in for the CUDA driver's library: functions of cuda.h that fill in what they are pointed to and return a code."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

NO_DEVICE = 100
INVALID_VALUE = 1
ATTRIBUTES = {
    13: "clock_khz", 16: "multiprocessors", 18: "integrated", 33: "bus", 34: "slot", 36: "memory_clock_khz", 37: "bus_width",
    50: "domain", 75: "major", 76: "minor",
}  # fmt: skip


class FakeCuda:
    """The library.

    Args:
        devices: In CUDA's order: "name", "uuid" (32 hex digits), "memory", and attributes by the names above.
        init: What initialising returns.
    """

    def __init__(self, devices: Sequence[Mapping[str, Any]] = (), *, init: int = 0) -> None:
        self._devices: List[Dict[str, Any]] = [dict(device) for device in devices]
        self._init = init

    def cuInit(self, flags: int) -> int:
        return self._init if self._devices or self._init else NO_DEVICE

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._devices)
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        if self._devices[number].get("broken"):
            return INVALID_VALUE
        device._obj.value = number
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = self._devices[device.value]["name"].encode()[: size - 1]
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:
        memory._obj.value = self._devices[device.value]["memory"]
        return 0

    def cuDeviceGetUuid(self, uuid: Any, device: Any) -> int:
        text = self._devices[device.value].get("uuid")
        if text is None:
            return INVALID_VALUE
        uuid._obj[:] = bytes.fromhex(text)
        return 0

    def cuDeviceGetAttribute(self, value: Any, what: int, device: Any) -> int:
        found = self._devices[device.value].get(ATTRIBUTES[what])
        if found is None:
            return INVALID_VALUE
        value._obj.value = found
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        if code != 802:
            return INVALID_VALUE
        text._obj.value = b"system not yet initialized"
        return 0
