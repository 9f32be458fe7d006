"""Twenty recorded answers of real machines, replayed: each card is detected right, or listed with the reason why it is not used."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

import pytest

from gpumesh.devices import nvml, offered
from gpumesh.devices.gpus import from_torch
from gpumesh.devices.offered import HostMemory
from gpumesh.model.resources import DeviceFacts
from tests.support.fake_nvml import FakeNvml, devices_of, record, recorded

MIB = 1 << 20
HOST = HostMemory(16 << 30, 12 << 30)
GB10_HOST = HostMemory(127600748 << 10, 118566368 << 10)


def detected(
    one: Mapping[str, Any], *, host: HostMemory = HOST, environment: Mapping[str, str] = {}, init: Any = None
) -> Tuple[DeviceFacts, ...]:
    """What the worker would tell, the same with old bindings, whose text is bytes."""
    found = []
    for as_bytes in (False, True):
        binding = FakeNvml(one, as_bytes=as_bytes)
        binding.init_answer = init
        found.append(offered.join(nvml.survey(binding), environment, host))
    assert found[0] == found[1]
    return found[0]


def cuda(
    index: int, name: str, mib: int, *, others: int = 0, system_index: Optional[int] = None, **fields: Any
) -> Dict[str, Any]:
    """The facts that a report decides; figures in MiB."""
    return {
        "kind": "cuda",
        "index": index,
        "name": name,
        "memory": mib * MIB,
        "others": others * MIB,
        "system_index": index if system_index is None else system_index,
        "problem": "",
        "is_integrated": False,
        **fields,
    }


def agree(found: Tuple[DeviceFacts, ...], *expected: Dict[str, Any]) -> None:
    """Compare what is expected of each card, and nothing else; a score is always usable."""
    assert [{name: getattr(device, name) for name in fields} for device, fields in zip(found, expected)] == list(expected)
    assert len(found) == len(expected)
    assert all(0 < device.score <= 1000 for device in found)
    assert len({device.key for device in found}) == len(found)


UUID = "GPU-00000000-0000-4000-8000-0000000001"
SLICE = "MIG-00000000-0000-5000-8000-0000000001"
SHARED_MIB = 14 << 10  # Seven eighths of HOST.

EXPECTED: Dict[str, List[Dict[str, Any]]] = {
    "r01": [
        cuda(0, "NVIDIA A10", 0, uuid=f"{UUID}00") | {"memory": 24146608128, "others": 1257242624},
        cuda(1, "NVIDIA A10", 0, uuid=f"{UUID}01") | {"memory": 24146608128, "others": 541917184},
    ],
    "r02": [
        cuda(0, "NVIDIA GeForce RTX 4090", 24564, others=3987, score=pytest.approx(100)),
        cuda(
            1,
            "NVIDIA GPU",
            0,
            problem="cannot be opened (Unknown Error); reboot the machine, or restart the container if this is one",
        ),
    ],
    "r03": [cuda(0, "NVIDIA GeForce RTX 3060", 12288, others=1)],
    "r04": [
        cuda(0, "NVIDIA GeForce RTX 5090", 32607, others=29324),
        cuda(1, "NVIDIA GeForce RTX 5090", 32607, others=30357),
    ],
    "r05": [cuda(0, "NVIDIA GeForce ...", 8192, others=161)],
    "r06": [cuda(0, "Quadro RTX 8000", 49152, others=444), cuda(1, "Quadro RTX 8000", 49152, others=2492)],
    "r07": [cuda(0, "NVIDIA GeForce GTX 1080 Ti", 11264, others=1585)],
    "r08": [cuda(0, "Orin (nvgpu)", SHARED_MIB, others=2 << 10, is_integrated=True, key="cuda:0")],
    "r09": [cuda(0, "NVIDIA GB10", SHARED_MIB, others=2 << 10, is_integrated=True, capability="12.1")],
    "r10": [
        cuda(
            0,
            "NVIDIA GPU",
            0,
            problem="MIG is on, and there is no slice that this worker could use; create one with 'nvidia-smi mig', or switch MIG off",
        )
        | {"memory": 42505273344, "others": 14987362304}
    ],
    "r11": [
        cuda(0, "NVIDIA GPU MIG slice 0", 19968, uuid=f"{SLICE}10", others=14366, system_index=0),
        cuda(1, "NVIDIA GPU MIG slice 1", 19968, uuid=f"{SLICE}11", others=9880, system_index=0),
        cuda(2, "NVIDIA GPU MIG slice 2", 19968, uuid=f"{SLICE}12", others=13, system_index=0),
        cuda(3, "NVIDIA GPU", 0, system_index=0, problem="divided into 3 MIG slices, which are offered in its place"),
    ],
    "r12": [
        cuda(
            0,
            "NVIDIA GPU",
            0,
            problem="does not tell its memory (Insufficient Permissions): a MIG card, seen from a container that was given none of its slices?",
        )
    ],
    "r13": [cuda(0, "Tesla P100-PCIE-16GB", 16384, others=103)],
    "r14": [cuda(0, "Tesla V100-SXM2-16GB", 16160, others=12427)],
    "r15": [cuda(0, "GeForce RTX 2070 with Max-Q Design", 7974, others=603)],
    "r17": [
        # The report has no memory, so the stand-in refuses it; what counts is that CUDA's order is not NVML's.
        {"index": 0, "name": "NVIDIA GeForce GTX 1080 Ti", "uuid": f"{UUID}71", "system_index": 1},
        {"index": 1, "name": "NVIDIA GeForce GTX 745", "uuid": f"{UUID}70", "system_index": 0},
    ],
    "r18": [
        cuda(0, "NVIDIA GPU", 0, problem="fell off the bus (GPU is lost): heat, power or its slot; reboot the machine"),
    ],
}


def test_all_twenty_are_there() -> None:
    covered = {*EXPECTED, "r16", "r19", "r20"}

    assert sorted(name.partition("-")[0] for name in recorded()) == sorted(covered)
    assert len(covered) == 20


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_cards_of_a_report_are_detected_or_listed_with_the_reason(name: str) -> None:
    agree(detected(record(name)), *EXPECTED[name])


@pytest.mark.parametrize(
    ("guest", "expected"),
    [
        ("a", cuda(0, "GRID V100D-8C", 8192)),
        (
            "b",
            cuda(
                0,
                "NVIDIA A40-24A",
                24576,
                others=1,
                problem="its compute mode is Prohibited; its owner can allow programs with 'nvidia-smi -c 0'",
            ),
        ),
    ],
)
def test_virtual_cards_are_offered_unless_their_mode_forbids_it(guest: str, expected: Dict[str, Any]) -> None:
    agree(detected(devices_of(guest, record("r16"))), expected)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            "LIBRARY_NOT_FOUND",
            "there is a card, but its driver is not there (NVML Shared Library Not Found); install NVIDIA's driver, or load it",
        ),
        (
            "LIB_RM_VERSION_MISMATCH",
            "the NVIDIA driver was updated while the system ran (RM has detected an NVML/RM version mismatch.); reboot the machine",
        ),
        (
            "UNKNOWN",
            "the NVIDIA driver does not answer (Unknown Error); restart the container if this is one, else reboot the machine",
        ),
    ],
)
def test_a_library_that_does_not_start_is_a_reason(code: str, problem: str) -> None:
    (init,) = [init for init in record("r19")["init"] if init["raises"] == code]

    found = detected({"devices": []}, init=init)

    agree(found, cuda(0, "NVIDIA GPU", 0, system_index=-1, problem=problem))


def test_memory_of_a_machine_that_shares_it_is_the_hosts() -> None:
    (gb10,) = detected(record("r09"), host=GB10_HOST)

    assert gb10.memory == GB10_HOST.total - GB10_HOST.total // 8
    assert gb10.others == 0  # More is free than is offered.


def test_the_order_of_the_bus_can_be_asked_for() -> None:
    found = detected(record("r17"), environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})

    assert [(device.name, device.index, device.system_index) for device in found] == [
        ("NVIDIA GeForce GTX 745", 0, 0),
        ("NVIDIA GeForce GTX 1080 Ti", 1, 1),
    ]


def torch_properties(recorded_device: Mapping[str, Any]) -> Dict[str, Any]:
    """As torch names them, from the figures as printed."""
    fields = dict(recorded_device)
    total = fields.pop("total_memory_mb", 0) * MIB or round(fields.pop("total_memory_gb", 0) * (1 << 30))
    return {**fields, "total_memory": total}


def test_devices_of_rocm_by_torchs_properties() -> None:
    host = HostMemory(128 << 30, 100 << 30)
    mi300x, halo, phoenix = (
        from_torch(torch_properties(device), kind="rocm", index=index, host=host, others=MIB)
        for index, device in enumerate(record("r20")["devices"])
    )

    assert (mi300x.capability, mi300x.is_integrated, mi300x.memory, mi300x.others) == ("gfx942", False, 196592 * MIB, MIB)
    assert mi300x.score > 200
    assert (halo.capability, halo.is_integrated, halo.memory, halo.key) == ("gfx1151", True, 80065 * MIB, "rocm:1")
    assert (phoenix.capability, phoenix.is_integrated, phoenix.memory) == ("11.0", True, round(25.16 * (1 << 30)))
    assert 0 < phoenix.score < halo.score < mi300x.score


def test_an_apu_is_not_given_more_memory_than_its_host_has() -> None:
    halo = torch_properties(record("r20")["devices"][1])

    found = from_torch(halo, kind="rocm", index=0, host=HOST)

    assert (found.memory, found.others) == (SHARED_MIB * MIB, 2 << 30)


def test_an_apple_chip_has_the_memory_that_metal_recommends() -> None:
    properties = {"name": "Apple M3", "total_memory": int(11.84e9)}

    found = from_torch(properties, kind="mps", index=0, host=HostMemory(16 << 30, 5 << 30))

    assert (found.key, found.memory, found.others) == ("mps:0", int(11.84e9), int(11.84e9) - (5 << 30))
    assert found.is_integrated


def test_torchs_uuids_get_the_beginning_that_cuda_wants() -> None:
    properties = {
        "name": "NVIDIA L4",
        "major": 8,
        "minor": 9,
        "total_memory": 23034 * MIB,
        "uuid": "12345678-0000-0000-0000-000000000000",
    }

    found = from_torch(properties, kind="cuda", index=1, host=HOST)

    assert found.uuid == "GPU-12345678-0000-0000-0000-000000000000"
    assert (found.capability, found.is_integrated) == ("8.9", False)
