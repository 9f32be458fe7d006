"""`gpumesh benchmark`: what it measures, shows and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import pytest

from gpumesh.cli.benchmark import _print_table, _row
from gpumesh.cli.main import main
from gpumesh.devices.scoring import score_rates
from gpumesh.model.resources import DeviceFacts
from tests.support.hardware import Machine, card

RATES: Dict[str, float] = {"float32": 14e12, "bfloat16": 55e12, "bandwidth": 469e9, "to_device": 12e9, "from_device": 13e9}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GPUMESH_PROBE", "0")
    monkeypatch.setenv("COLUMNS", "240")
    return tmp_path / "cache" / "gpumesh"


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["benchmark", *arguments])
    return int(ended.value.code or 0)


def test_the_cpu_s_figures_are_shown_and_not_kept(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0

    head, cpu, legend = capsys.readouterr().out.splitlines()
    assert [part.strip() for part in head.split("  ") if part.strip()] == [
        "device", "name", "fp32 TFLOPS", "copy GB/s", "Python M/s", "score", "by half",
    ]  # fmt: skip
    assert cpu.startswith("cpu")
    assert "RTX 4090" in legend
    assert not cache.exists()


def test_figures_that_are_saved_are_those_of_the_next_worker(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gpumesh.devices.detect import local_facts

    assert call("--json", "--save") == 0

    (row,) = json.loads(capsys.readouterr().out)
    facts = local_facts()
    assert facts.score == row["score"] == score_rates(row["rates"])
    assert dict(facts.devices[0].rates) == row["rates"]
    assert row["scores"] == {"float32": round(row["score"], 3)}


def test_a_card_that_cannot_be_measured_is_listed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(tmp_path, [card(0, "NVIDIA A10", 23028)])
    machine.add_module("torch", "raise ImportError('its library is missing')\n")
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "240")

    assert call() == 0

    told = capsys.readouterr().out
    assert "cuda:0  NVIDIA A10" in told
    assert "cuda:0 NVIDIA A10: not measured: torch does not load here (its library is missing)" in told


def test_every_rate_has_its_column_and_both_scores_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    a10 = DeviceFacts("cuda", 0, "NVIDIA A10", 24 << 30, score_rates(RATES), "GPU-1", 0, rates=tuple(RATES.items()))
    lost = DeviceFacts("cuda", 1, "NVIDIA A10", 0, 47.5, problem="fell off the bus")

    _print_table([_row(a10, ""), _row(lost, lost.problem)], is_saved=True)

    head, first, second, note, _, saved = capsys.readouterr().out.splitlines()
    assert "bf16 TFLOPS" in head
    assert "fp16" not in head
    assert first.split()[3:] == ["14", "55", "469", "12", "13", "35.9", "41"]
    assert second.split() == ["cuda:1", "NVIDIA", "A10", "~47.5"]
    assert note == "cuda:1 NVIDIA A10: fell off the bus"
    assert saved.startswith("Saved")


def test_a_row_holds_the_facts_and_the_scores_by_type() -> None:
    a10 = DeviceFacts("cuda", 0, "NVIDIA A10", 24 << 30, 35.9, "GPU-1", 0, rates=tuple(RATES.items()))

    row: Dict[str, Any] = _row(a10, "in doubt")

    assert (row["key"], row["note"], set(row["scores"])) == ("GPU-1", "in doubt", {"float32", "bfloat16"})
    json.dumps(row)
