"""The table of `gpumesh devices`: of a recorded machine, of workers' views, and where asking fails."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, Dict, List

import pytest

from gpumesh.cli.console import set_gpu_score
from gpumesh.cli.devices import _print_table, _rows
from gpumesh.cli.main import main
from gpumesh.devices.scoring import GPU_SCORE_VARIABLE
from gpumesh.model.resources import CardReading, DeviceFacts, WorkerFacts, facts_as_dict
from gpumesh.scheduler.snapshot import device_view
from tests.support.hardware import Machine, card


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A 4090 that nvidia-smi numbers 1, a card that is hidden, and one that fell off the bus."""
    lost = {"handle": {"raises": "GPU_IS_LOST"}, "pci": "00000000:09:00.0"}
    made = Machine(tmp_path, [card(0, "NVIDIA GeForce GTX 1080 Ti", 11264), card(1, "NVIDIA GeForce RTX 4090", 24564), lost])
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # CUDA's number: the faster one.
    monkeypatch.setenv("COLUMNS", "240")
    return made


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_both_numberings_memory_score_and_reasons_are_shown(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("devices") == 0

    lines = capsys.readouterr().out.splitlines()
    shown = {line.split("NVIDIA")[1].split("  ")[0].strip(): line for line in lines if "NVIDIA " in line}
    assert shown["GeForce RTX 4090"].split() == [
        "cuda:0", "1", "NVIDIA", "GeForce", "RTX", "4090", "25.8", "GB", "25.4", "GB", "~100", "ready",
    ]  # fmt: skip
    assert "hidden by CUDA_VISIBLE_DEVICES=0" in shown["GeForce GTX 1080 Ti"]
    assert "fell off the bus" in shown["GPU"]
    assert lines[1].startswith("cpu")
    assert lines[-1] == "1 usable GPU"


def test_the_same_as_json(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("devices", "--json") == 0

    cpu, used, *rest = json.loads(capsys.readouterr().out)
    assert (cpu["kind"], cpu["is_measured"]) == ("cpu", bool(cpu["rates"]))
    assert (used["key"][:5], used["index"], used["system_index"], used["is_measured"]) == ("GPU-0", 0, 1, False)
    assert used["free"] == used["memory"] - used["others"] > 20e9
    assert [bool(row["problem"]) for row in rest] == [True, True]


def test_a_machine_without_any_sign_of_a_gpu_is_not_probed(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUMESH_PROBE", "0")

    assert call("devices") == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[-1] == "0 usable GPUs"


def test_a_probe_that_fails_is_an_error_that_says_so(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.add_module("pynvml", f"import os\ndef nvmlInit(): os.kill(os.getpid(), {int(signal.SIGKILL)})\n")
    machine.add_module("torch", "raise SystemError('such a mess')\n")
    package = machine.folder / "modules" / "torch-9.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9\n")

    assert call("devices") == 1

    assert "gpumesh: looking for GPUs failed: the probe " in capsys.readouterr().err


def test_workers_of_a_mesh_are_shown_with_what_their_cards_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    cpu = DeviceFacts("cpu", 0, "EPYC", 64 << 30, 0.6, rates=(("float32", 1e11),))
    a10 = DeviceFacts("cuda", 0, "NVIDIA A10", 24 << 30, 47.5, "GPU-1", 3, rates=(("float32", 14e12),))
    reading = CardReading("GPU-1", 1 << 30, 2 << 30, 87.0, 61.0, 143.2)

    rows = [
        *_rows(view("attic", (cpu, a10), {"GPU-1": reading})),
        *_rows(view("cellar", (cpu,), {}, problem="paused by its owner")),
    ]
    _print_table(rows)

    attic, gpu, cellar, total = capsys.readouterr().out.splitlines()[1:]
    assert attic.split() == ["attic", "cpu", "EPYC", "68.7", "GB", "0.6", "ready"]
    assert "cuda:0" in gpu
    assert "87 % 61 C 143 W" in gpu
    assert gpu.split()[2] == "3"
    assert cellar.endswith("paused by its owner")
    assert total == "1 usable GPU on 2 machines"


def view(host: str, devices: Any, readings: Dict[str, CardReading], *, problem: str = "") -> Dict[str, Any]:
    found: Dict[str, Any] = facts_as_dict(WorkerFacts(host, devices=devices, problem=problem))
    shown: List[Dict[str, Any]] = [device_view(device, None, readings.get(device.key)) for device in devices]
    return {**found, "devices": shown, "id": f"id of {host}"}


def test_an_empty_mesh_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    _print_table([])

    assert "gpumesh join" in capsys.readouterr().out


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.pop("COLUMNS", None)

    assert call("devices", "--help") == 0

    told = capsys.readouterr().out
    assert all(option in told for option in ("--mesh", "--url", "--json"))


@pytest.mark.parametrize("command", ["join", "serve"])
def test_a_gpu_score_that_is_no_weight_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "--token", "t", "--gpu-score", "0") == 1

    assert "a score must be a positive finite number" in capsys.readouterr().err


def test_a_gpu_score_reaches_the_worker_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_SCORE_VARIABLE, "1")

    set_gpu_score(60)
    set_gpu_score(None)

    assert os.environ[GPU_SCORE_VARIABLE] == "60.0"
