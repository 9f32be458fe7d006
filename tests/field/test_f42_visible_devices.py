"""F42: a worker that was started with some of the GPUs visible offers these and no others, and its tasks get no others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import NoSuitableWorkerError
from tests.support.hardware import Machine, card, uuid
from tests.support.processes import until

FOUR = [card(number) for number in range(4)]
SLICES = [
    {"mig_index": place, "name": f"NVIDIA A100-SXM4-40GB MIG {place + 1}g.10gb", "uuid": f"MIG-{place}0000000-0000-5000-8000-000000000000",
     "memory_mib": {"total": 9856, "used": 13}}
    for place in range(2)
]  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Four equal cards."""
    return Machine(tmp_path, FOUR)


@pytest.mark.parametrize(
    ("value", "offered"),
    [
        (None, [0, 1, 2, 3]),
        ("2,3", [2, 3]),
        ("3,2", [3, 2]),
        ("GPU-00000001", [1]),
        (f"{uuid(3)},{uuid(0)}", [3, 0]),
        ("", []),
        ("-1", []),
        ("1,1", []),
        ("0,7,1", [0]),
    ],
)
def test_only_what_the_variable_shows_is_offered_and_the_rest_has_the_reason(
    machine: Machine, value: Optional[str], offered: List[int]
) -> None:
    found = machine.probe(**({} if value is None else {"CUDA_VISIBLE_DEVICES": value}))

    used = [device for device in found if not device.problem]
    assert [device.uuid for device in used] == [uuid(number) for number in offered]
    assert [device.index for device in used] == list(range(len(offered)))
    assert [device.system_index for device in used] == offered
    hidden = [device for device in found if device.problem]
    assert sorted(device.uuid for device in hidden) == [uuid(number) for number in range(4) if number not in offered]
    reason = f"hidden by CUDA_VISIBLE_DEVICES={value[:60]}" if value else "hidden: CUDA_VISIBLE_DEVICES is empty"
    assert all(device.problem.startswith(reason) for device in hidden)


def test_numbers_are_those_of_cudas_order(tmp_path: Path) -> None:
    unlike = Machine(tmp_path, [card(0, "NVIDIA GeForce GTX 1070", 8192), card(1)])

    def first(**variables: str) -> List[Tuple[str, int, int]]:
        found = unlike.probe(CUDA_VISIBLE_DEVICES="0", **variables)
        return [(device.name, device.index, device.system_index) for device in found if not device.problem]

    assert first() == [("NVIDIA GeForce RTX 3090", 0, 1)]
    assert first(CUDA_DEVICE_ORDER="PCI_BUS_ID") == [("NVIDIA GeForce GTX 1070", 0, 0)]


def test_slices_are_offered_one_by_one(tmp_path: Path) -> None:
    divided = Machine(tmp_path, [card(0), card(1, "NVIDIA A100-SXM4-40GB", 40960, mig_mode=[1, 1], mig_devices=SLICES)])

    by_name = divided.probe(CUDA_VISIBLE_DEVICES=SLICES[1]["uuid"])
    everything = divided.probe()

    assert [device.uuid for device in by_name if not device.problem] == [SLICES[1]["uuid"]]
    assert {device.uuid for device in everything if not device.problem} == {uuid(0), *(part["uuid"] for part in SLICES)}
    (whole,) = [device for device in everything if device.problem]
    assert whole.problem == "divided into 2 MIG slices, which are offered in its place"


def test_both_numberings_are_shown(machine: Machine) -> None:
    lines = machine.run("gpumesh", "devices", CUDA_VISIBLE_DEVICES="3,1", COLUMNS="160").splitlines()

    rows = [line.split() for line in lines if "RTX 3090" in line]
    assert [row[:2] for row in rows] == [["cuda:0", "3"], ["cuda:1", "1"], ["cuda", "0"], ["cuda", "2"]]
    assert [row[-1] for row in rows] == ["ready", "ready", *["CUDA_VISIBLE_DEVICES=3,1"] * 2]


def seen() -> str:
    """What a task's process may use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")


def start_with(machine: Machine, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give processes that are started from here this machine's hardware."""
    for name, content in {**machine.environment, "CUDA_VISIBLE_DEVICES": value}.items():
        monkeypatch.setenv(name, content)


def mesh_of(machine: Machine) -> Iterator[GPUMesh]:
    """One worker that has told of its cards."""
    with GPUMesh.local(workers=1, slots=1) as mesh:
        until(lambda: len(mesh.workers()[0]["devices"]) == 5, 30, what="the worker tells of its cards")
        yield mesh


def test_tasks_get_cards_out_of_the_workers_set_by_uuid_and_others_none(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_with(machine, "2,3", monkeypatch)

    for mesh in mesh_of(machine):
        one = accelerate(mesh, gpu=1)(seen).map([()] * 6).result(60)
        two = accelerate(mesh, gpu=2)(seen).remote().result(60)
        by_number = accelerate(mesh, gpu="cuda:1")(seen).remote().result(60)
        none = accelerate(mesh)(seen).remote().result(60)

    assert set(one) <= {uuid(2), uuid(3)}
    assert sorted(two.split(",")) == [uuid(2), uuid(3)]
    assert by_number == uuid(3)
    assert none == ""


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_worker_that_sees_none_is_a_worker_without_gpus(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    start_with(machine, value, monkeypatch)

    for mesh in mesh_of(machine):
        with pytest.raises(NoSuitableWorkerError, match="CUDA_VISIBLE_DEVICES"):
            accelerate(mesh, gpu=1, placement_timeout=0.2)(seen).remote().result(60)
        assert accelerate(mesh)(seen).remote().result(60) == ""
