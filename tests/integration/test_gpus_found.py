"""A worker and its GPUs, as the mesh sees them: found after joining, known at once the next time, read live, lost and back."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import psutil
import pytest

from gpumesh import GPUMesh
from gpumesh.cli.main import main
from gpumesh.runtime.embedded import OFFERED_BY_THE_FIRST, CoordinatorHandle
from tests.support.hardware import MIB, Machine, card, uuid
from tests.support.processes import until


@pytest.fixture
def coordinator() -> Iterator[CoordinatorHandle]:
    with GPUMesh.start_coordinator(port=0) as handle:
        yield handle


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Two cards, asked anew at each look: the stand-in reads its record when the library is initialised."""
    made = Machine(tmp_path, [card(0), card(1, "NVIDIA L4", 23034)])
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    module = tmp_path / "modules" / "pynvml.py"
    look_again = "\n\ndef nvmlDeviceGetHandleByUUID(uuid):\n    nvmlInit()\n    return fake.nvmlDeviceGetHandleByUUID(uuid)\n"
    module.write_text(module.read_text() + look_again)
    return made


def change(machine: Machine, *cards: Dict[str, Any]) -> None:
    """From now on its cards are these; in one step, for it is being read all the time."""
    fresh = machine.folder / "modules" / "record.new"
    fresh.write_text(json.dumps({"record": {"driver": "550.54.14", "devices": list(cards)}, "init": None}))
    os.replace(fresh, machine.folder / "modules" / "record.json")


def gpus(mesh: GPUMesh) -> List[Dict[str, Any]]:
    return [device for worker in mesh.workers() for device in worker["devices"] if device["kind"] != "cpu"]


def test_cards_are_told_a_moment_after_joining(coordinator: CoordinatorHandle, machine: Machine) -> None:
    with GPUMesh(coordinator.url, token=coordinator.token, fallback=False) as mesh:
        with GPUMesh.add_worker(coordinator.url, token=coordinator.token) as worker:
            until(mesh.workers, 5, what="the worker")
            found = until(lambda: gpus(mesh), 20, what="its cards")

    assert [device["kind"] for device in worker["devices"]] == ["cpu"]  # What was known when it was started.
    assert [(device["name"], device["uuid"], device["problem"]) for device in found] == [
        ("NVIDIA GeForce RTX 3090", uuid(0), ""),
        ("NVIDIA L4", uuid(1), ""),
    ]


def test_the_next_worker_knows_its_cards_when_it_joins(
    coordinator: CoordinatorHandle, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GPUMesh(coordinator.url, token=coordinator.token, fallback=False) as mesh:
        with GPUMesh.add_worker(coordinator.url, token=coordinator.token):
            until(lambda: gpus(mesh), 20, what="cards")
    # As on a machine with the marks of a GPU, where nobody has to insist.
    monkeypatch.delenv("GPUMESH_PROBE")
    monkeypatch.setattr("gpumesh.devices.detect._GPU_SIGNS", ("/dev/null",))
    monkeypatch.setattr("gpumesh.devices.probing.gpus_may_exist", lambda: True)

    with GPUMesh.add_worker(coordinator.url, token=coordinator.token) as worker:
        assert [device["name"] for device in worker["devices"]][1:] == ["NVIDIA GeForce RTX 3090", "NVIDIA L4"]


def test_no_probe_is_started_where_there_is_no_sign_of_a_gpu(
    coordinator: CoordinatorHandle, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUMESH_PROBE", "0")
    mark = machine.folder / "asked"
    machine.add_module("pynvml", f"open({str(mark)!r}, 'w').close()\n")

    with GPUMesh(coordinator.url, token=coordinator.token, fallback=False) as mesh:
        with GPUMesh.add_worker(coordinator.url, token=coordinator.token, score=1.0) as worker:
            until(mesh.workers, 5, what="the worker")
            agent = psutil.Process(worker.processes["worker"])
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:  # A look for something that must not come.
                assert agent.children() == []
                time.sleep(0.02)

    assert not mark.exists()


def test_the_command_shows_the_cards_of_the_whole_mesh(
    coordinator: CoordinatorHandle, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUMESH_TOKEN", coordinator.token)
    with GPUMesh(coordinator.url, token=coordinator.token, fallback=False) as mesh:
        with GPUMesh.add_worker(coordinator.url, token=coordinator.token):
            until(lambda: gpus(mesh), 20, what="cards")

            with pytest.raises(SystemExit) as ended:
                main(["devices", "--url", coordinator.url, "--json"])

    assert ended.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["kind"], row["key"]) for row in rows] == [("cpu", "cpu:0"), ("cuda", uuid(0)), ("cuda", uuid(1))]
    assert {row["worker"] for row in rows} != {""}


def test_a_score_for_gpus_given_by_a_person_wins(
    coordinator: CoordinatorHandle, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUMESH_GPU_SCORE", "12.5")

    with GPUMesh(coordinator.url, token=coordinator.token, fallback=False) as mesh:
        with GPUMesh.add_worker(coordinator.url, token=coordinator.token):
            assert {device["score"] for device in until(lambda: gpus(mesh), 20, what="cards")} == {12.5}


def test_what_others_hold_of_a_card_reaches_the_mesh_within_seconds(coordinator: CoordinatorHandle, machine: Machine) -> None:
    with GPUMesh(coordinator.url, token=coordinator.token, fallback=False) as mesh:
        with GPUMesh.add_worker(coordinator.url, token=coordinator.token):
            until(lambda: [each["used"] for each in gpus(mesh)] == [300 * MIB, 300 * MIB], 20, what="the first readings")

            change(machine, card(0, used=9000, temperature=71, power_w=320, util_gpu=98), card(1, "NVIDIA L4", 23034))

            until(lambda: gpus(mesh)[0]["others"] == 9000 * MIB, 4, what="the new figure")
            busy, idle = gpus(mesh)
            assert (busy["utilisation"], busy["temperature"], busy["power"]) == (98, 71, 320)
            assert (idle["others"], idle["utilisation"]) == (300 * MIB, None)
            assert busy["free"] == busy["memory"] - 9000 * MIB


def test_a_card_that_is_lost_while_the_worker_runs_is_told_and_the_other_stays(
    coordinator: CoordinatorHandle, machine: Machine
) -> None:
    with GPUMesh(coordinator.url, token=coordinator.token, fallback=False) as mesh:
        with GPUMesh.add_worker(coordinator.url, token=coordinator.token):
            until(lambda: gpus(mesh), 20, what="cards")

            change(machine, card(1, "NVIDIA L4", 23034))
            until(lambda: [bool(each["problem"]) for each in gpus(mesh)] == [True, False], 10, what="the loss")
            assert gpus(mesh)[0]["problem"] == "it does not answer any more"

            change(machine, card(0), card(1, "NVIDIA L4", 23034))
            until(lambda: [bool(each["problem"]) for each in gpus(mesh)] == [False, False], 10, what="its return")


def test_the_workers_of_one_program_do_not_lend_the_same_card_twice(machine: Machine) -> None:
    with GPUMesh.local(workers=2, slots=1) as mesh:
        until(lambda: len(gpus(mesh)) == 4, 20, what="the cards of both workers")
        first, second = ([device for device in worker["devices"] if device["kind"] != "cpu"] for worker in mesh.workers())

        assert {frozenset(device["problem"] for device in cards) for cards in (first, second)} == {
            frozenset([""]),
            frozenset([OFFERED_BY_THE_FIRST]),
        }
        assert mesh.device_count() == 2 + 2  # Two CPUs' shares, and each card once.
