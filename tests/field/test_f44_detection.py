"""F44: each GPU that is there is listed with its memory, or with the reason why it is not used; detected by real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Tuple

import psutil
import pytest

from gpumesh import GPUMesh
from tests.support import fake_nvml
from tests.support.hardware import MIB, Machine, card, torch_of, uuid
from tests.support.processes import until

HOST = psutil.virtual_memory().total


def told(rows: List[Dict[str, Any]]) -> List[Tuple[Any, ...]]:
    """What people look at."""
    return [(row["kind"], row["name"], row["memory"] // MIB, row["problem"]) for row in rows]


def test_three_unlike_cards_are_three_with_their_own_memory_without_torch(tmp_path: Path) -> None:
    machine = Machine(
        tmp_path,
        [card(0, "NVIDIA GeForce GTX 1060 6GB", 6144), card(1, mib=24576), card(2, "Something Nobody Knows", 8192)],
    )

    rows = machine.devices()

    assert sorted(told(rows)) == [
        ("cuda", "NVIDIA GeForce GTX 1060 6GB", 6144, ""),
        ("cuda", "NVIDIA GeForce RTX 3090", 24576, ""),
        ("cuda", "Something Nobody Knows", 8192, ""),
    ]
    assert all(1 < row["score"] < 1000 for row in rows)  # Not in a table is not 0.
    assert {row["others"] for row in rows} == {300 * MIB}


SLOW_AND_ODD = "#!/bin/sh\ntouch {mark}\nsleep 30\necho 'KMD Version: [N/A] ??'\n"


def test_nvidia_smi_is_never_asked_and_may_be_slow_or_odd(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [card(0)])
    mark = tmp_path / "asked"
    machine.add_program("nvidia-smi", SLOW_AND_ODD.format(mark=mark))

    assert len(machine.devices()) == 1
    assert not mark.exists()


def test_an_integrated_card_and_a_discrete_one_each_have_the_right_memory(tmp_path: Path) -> None:
    integrated = card(0, "NVIDIA GB10", memory_v1={"raises": "NOT_SUPPORTED"}, memory_v2={"raises": "NOT_SUPPORTED"})
    machine = Machine(tmp_path, [integrated, card(1)])

    small, large = sorted(machine.devices(), key=lambda row: int(row["system_index"]))

    assert (small["is_integrated"], large["is_integrated"]) == (True, False)
    assert HOST // 2 < small["memory"] < HOST
    assert large["memory"] == 24576 * MIB


def test_a_jetson_whose_library_answers_nothing_is_offered_with_the_hosts_memory(tmp_path: Path) -> None:
    machine = Machine(tmp_path, fake_nvml.record("r08")["devices"])

    (orin,) = machine.devices()

    assert (orin["name"], orin["problem"], orin["is_integrated"], orin["key"]) == ("Orin (nvgpu)", "", True, "cuda:0")
    assert 0 < orin["memory"] < HOST


def test_a_lost_card_is_listed_and_the_others_stay(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [card(0), {"handle": {"raises": "GPU_IS_LOST"}}, card(2, "NVIDIA L4", 23034)])

    rows = machine.devices()

    assert told(rows)[:2] == [
        ("cuda", "NVIDIA GeForce RTX 3090", 24576, ""),
        ("cuda", "NVIDIA L4", 23034, ""),
    ]
    assert "fell off the bus" in rows[2]["problem"]
    assert [row["system_index"] for row in rows] == [0, 2, 1]


@pytest.mark.parametrize(
    ("code", "advice"), [("LIB_RM_VERSION_MISMATCH", "reboot the machine"), ("UNKNOWN", "restart the container")]
)
def test_a_driver_that_does_not_work_is_a_reason_with_advice(tmp_path: Path, code: str, advice: str) -> None:
    machine = Machine(tmp_path, init={"raises": code})

    (row,) = machine.devices()

    assert advice in row["problem"]


def test_a_machine_without_driver_and_card_has_no_gpus_to_tell_of(tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a card")

    assert Machine(tmp_path, init={"raises": "LIBRARY_NOT_FOUND"}).devices() == []


def test_amd_cards_are_torchs_and_the_chip_in_the_processor_has_no_memory_of_its_own(tmp_path: Path) -> None:
    machine = Machine(tmp_path, init={"raises": "LIBRARY_NOT_FOUND"})
    mi300x, halo = (
        {**device, "total_memory": device["total_memory_mb"] * MIB} for device in fake_nvml.record("r20")["devices"][:2]
    )
    machine.add_module("torch", torch_of([mi300x, halo], hip="6.4", held=500 * MIB))

    large, small = machine.devices()

    assert (large["kind"], large["capability"], large["memory"], large["others"]) == ("rocm", "gfx942", 196592 * MIB, 500 * MIB)
    assert (small["key"], small["is_integrated"]) == ("rocm:1", True)
    assert small["memory"] < HOST


def test_an_apple_chip_is_torchs(tmp_path: Path) -> None:
    machine = Machine(tmp_path, init={"raises": "LIBRARY_NOT_FOUND"})
    machine.add_module("torch", torch_of(mps="Apple M3"))

    (row,) = machine.devices()

    assert (row["kind"], row["name"], row["is_integrated"]) == ("mps", "Apple M3", True)


CRASHING = """
import os, signal

def nvmlInit():
    os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_library_that_crashes_costs_neither_the_worker_nor_what_torch_sees(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add_module("pynvml", CRASHING)
    machine.add_module("torch", torch_of([{"name": "AMD Instinct MI300X", "total_memory": 196592 * MIB}], hip="6.4"))

    assert told(machine.devices()) == [("rocm", "AMD Instinct MI300X", 196592, "")]


def test_a_worker_tells_the_mesh_of_every_card_and_the_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, [card(0), card(1, compute_mode="Prohibited"), {"handle": {"raises": "UNKNOWN"}}])
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)

    with GPUMesh.local(workers=1, slots=1) as mesh:
        until(lambda: len(mesh.workers()[0]["devices"]) == 4, 30, what="the worker tells of its cards")
        _, good, prohibited, lost = mesh.workers()[0]["devices"]

    assert (good["uuid"], good["memory"], good["problem"]) == (uuid(0), 24576 * MIB, "")
    assert "compute mode is Prohibited" in prohibited["problem"]
    assert "cannot be opened (Unknown Error)" in lost["problem"]
