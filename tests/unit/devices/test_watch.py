"""Whether a card was alone while it was measured, by recorded and made-up answers of NVML."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, Dict, List

import pytest

from gpumesh.devices.watch import Visit, Watch, driver_version
from tests.support.fake_nvml import FakeNvml, record

UUID = "GPU-00000000-0000-4000-8000-000000000100"


class Machine(FakeNvml):
    """One recorded card with other figures for the moment."""

    def __init__(self, **figures: Any) -> None:
        one = record("r01")
        one["devices"] = [{**one["devices"][0], "processes": [], **figures}]
        super().__init__(one)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return int(handle.device.get("reasons", 0))


def torch_with(uuid: str) -> Any:
    properties = SimpleNamespace(uuid=uuid)
    return SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda name: properties))


def doubts(uuid: str = UUID[4:], **figures: Any) -> str:
    watch = Watch(torch_with(uuid), "cuda:0", Machine(**figures))
    watch.before()
    watch.look()
    watch.look()
    return watch.doubts()


def process(pid: int) -> Dict[str, Any]:
    return {"pid": pid, "usedGpuMemory": 1 << 20}


OURS = process(os.getpid())


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({}, ""),
        ({"util": {"gpu": 3, "memory": 0}}, ""),
        ({"util": {"gpu": 92, "memory": 5}}, "it was 92 % busy before the measurement"),
        ({"util": {"raises": "NOT_SUPPORTED"}}, ""),
        ({"processes": [OURS]}, ""),
        ({"processes": [OURS, process(1)]}, "1 other program had it open"),
        ({"processes": [process(1)]}, ""),  # A container: the numbers are the host's, and which is ours cannot be told.
        ({"reasons": 0x1 | 0x4 | 0x100}, ""),  # Idle, at its power cap, display: nothing unusual.
        ({"reasons": 0x40}, "it was too hot"),
        ({"reasons": 0x80 | 0x8}, "it was slowed down by its hardware and short of power"),
    ],
)  # fmt: skip
def test_what_speaks_against_a_figure_is_said_once(figures: Dict[str, Any], found: str) -> None:
    assert doubts(**figures) == found


@pytest.mark.parametrize("uuid", [UUID, "", "11111111-0000-4000-8000-000000000100"])
def test_a_card_that_nvml_knows_or_does_not_is_measured_all_the_same(uuid: str) -> None:
    assert doubts(uuid) == ""


def test_the_driver_says_its_version_in_old_and_new_bindings() -> None:
    found: List[str] = [driver_version(FakeNvml(record("r01"), as_bytes=as_bytes)) for as_bytes in (False, True)]

    assert found == ["535.129.03", "535.129.03"]


def test_a_driver_that_does_not_say_has_none() -> None:
    library = FakeNvml(record("r01"))
    library.init_answer = {"raises": "LIB_RM_VERSION_MISMATCH"}

    assert driver_version(library) == ""
    assert Visit(library).driver() == "535.129.03"
