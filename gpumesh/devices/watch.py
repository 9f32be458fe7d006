"""Whether a card was alone and unhindered while it was measured, and the driver's version: NVML asked before and after."""

from __future__ import annotations

import os
from typing import Any, List, Optional

from gpumesh.devices import nvml

BUSY_PERCENT = 5  # Of the last sample period in which some kernel ran: an idle desktop shows 0 to 3.
# Bits of nvmlClocksThrottleReasons: what made the card slower than it is. The power cap (4) is not among them: it is the card's own.
_HINDRANCES = ((0x8, "slowed down by its hardware"), (0x40, "too hot"), (0x80, "short of power"), (0x20, "too warm"))


def driver_version(binding: Optional[Any] = None) -> str:
    """The NVIDIA driver's version; "" if it does not say."""
    visit = Visit(binding)
    if visit.open().code:
        return ""
    with visit:
        return visit.driver()


class Visit(nvml.Nvml):
    """NVML with the questions that only a measurement has."""

    def driver(self) -> str:
        """The driver's version; "" if it does not say."""
        value = self._ask("nvmlSystemGetDriverVersion").value
        return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value or "")

    def handle(self, uuid: str, pci: str) -> nvml.Answer:
        """The card of this UUID or, without one, at this PCI address."""
        if uuid:
            found = self._ask("nvmlDeviceGetHandleByUUID", uuid)
            return self._ask("nvmlDeviceGetHandleByUUID", uuid.encode()) if found.code == nvml.NOT_NVML else found
        return self._ask("nvmlDeviceGetHandleByPciBusId", pci.encode()) if pci else nvml.Answer(None, nvml.NOT_NVML)

    def busy(self, handle: Any) -> str:
        """Who else is at work on the card; "" if nobody is, as far as it tells."""
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle).value
        share = getattr(rates, "gpu", 0)
        if isinstance(share, int) and share > BUSY_PERCENT:
            return f"it was {share} % busy before the measurement"
        return ""

    def company(self, handle: Any) -> str:
        """The processes that calculate on it besides this one."""
        listed = self._ask("nvmlDeviceGetComputeRunningProcesses", handle).value
        pids = [getattr(process, "pid", 0) for process in listed] if isinstance(listed, (list, tuple)) else []
        # In a container the numbers are the host's: then ours is not among them, and nothing can be said.
        if os.getpid() not in pids:
            return ""
        others = len(set(pids)) - 1
        return f"{others} other program{'s' if others > 1 else ''} had it open" if others else ""

    def hindrance(self, handle: Any) -> str:
        """What slows the card down now."""
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle).value
        bits = getattr(bits, "value", bits)
        words = [text for bit, text in _HINDRANCES if isinstance(bits, int) and bits & bit]
        return f"it was {' and '.join(words)}" if words else ""


class Watch:
    """One card during its measurement.

    Args:
        torch: The module, with CUDA in use.
        name: As torch calls the card.
    """

    def __init__(self, torch: Any, name: str, binding: Optional[Any] = None) -> None:
        self._visit = Visit(binding)
        self._handle: Any = None
        self._doubts: List[str] = []
        if self._visit.open().code:
            return
        known = torch.cuda.get_device_properties(name)
        uuid = str(getattr(known, "uuid", "") or "")
        if uuid and not uuid.startswith(("GPU-", "MIG-")):
            uuid = f"GPU-{uuid}"
        pci = ""
        if hasattr(known, "pci_bus_id"):
            pci = f"{known.pci_domain_id:08X}:{known.pci_bus_id:02X}:{known.pci_device_id:02X}.0"
        self._handle = self._visit.handle(uuid, pci).value

    def before(self) -> None:
        """Look at the card while it should be idle."""
        if self._handle is not None:
            self._note(self._visit.busy(self._handle))

    def look(self) -> None:
        """Look at it directly after a burst of work: clocks go back within milliseconds."""
        if self._handle is not None:
            self._note(self._visit.hindrance(self._handle))
            self._note(self._visit.company(self._handle))

    def doubts(self) -> str:
        """What speaks against the figures; "" if nothing does."""
        return "; ".join(self._doubts)

    def _note(self, doubt: str) -> None:
        if doubt and doubt not in self._doubts:
            self._doubts.append(doubt)
