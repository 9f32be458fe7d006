"""Probes: what they find in recorded machines, what is remembered, and what happens when a driver crashes, hangs or lies."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import pytest

from gpumesh.devices import probing
from gpumesh.devices.cards import prior_score
from gpumesh.devices.probing import Measured, Survey
from gpumesh.devices.scoring import PRIOR_SPREAD, score_rates
from gpumesh.model.resources import DeviceFacts
from tests.support.fake_nvml import record, write_module

CARD = DeviceFacts("cuda", 0, "NVIDIA A10", 24 << 30, 47.5, uuid="GPU-00000000-0000-4000-8000-000000000100", system_index=0)
RATES = {"float32": 14e12, "bfloat16": 55e12, "bandwidth": 469e9}


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GPUMESH_PROBE", "1")
    monkeypatch.delenv("GPUMESH_GPU_SCORE", raising=False)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose `pynvml` probes take for the real one: two A10."""
    folder = tmp_path / "fake"
    monkeypatch.setenv("PYTHONPATH", write_module(folder, record("r01")))
    return folder


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> List[Any]:
    """In place of processes that measure: what they answer, one after the other. They need cards, these tests do not."""
    given: List[Any] = []

    def ask(device: DeviceFacts) -> Tuple[Optional[Dict[str, Any]], str]:
        answer = given.pop(0)
        return (None, answer) if isinstance(answer, str) else (answer, "")

    monkeypatch.setattr(probing, "_ask_to_measure", ask)
    return given


def survey_of(device: DeviceFacts = CARD, **changes: Any) -> Survey:
    return Survey((device,), driver="535.1", torch="2.9", priors=(47.5,), **changes)


# --- which there are


def test_a_probe_finds_the_cards_of_a_recorded_machine(fake: Path) -> None:
    survey = probing.detect()

    assert [(device.kind, device.name, device.uuid[-3:], device.problem) for device in survey.devices] == [
        ("cuda", "NVIDIA A10", "100", ""),
        ("cuda", "NVIDIA A10", "101", ""),
    ]
    assert survey.devices[0].memory == 24146608128
    assert survey.devices[0].score == prior_score("NVIDIA A10")
    assert (survey.driver, survey.problem) == ("535.129.03", "")


def test_a_machine_without_cards_is_no_problem() -> None:
    assert probing.detect()._replace(torch="") == Survey()


def test_a_driver_that_crashes_the_probe_is_told_with_its_signal(fake: Path) -> None:
    (fake / "pynvml.py").write_text("import os, signal\ndef nvmlInit():\n    os.kill(os.getpid(), signal.SIGSEGV)\n")

    survey = probing.detect()

    # Asked a second time past NVML, the probe has an answer: nothing usable here.
    assert (survey.devices, survey.problem) == ((), "")


def test_a_driver_that_hangs_costs_its_time_limit(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "DETECT_SECONDS", 3.0)
    (fake / "pynvml.py").write_text("import time\ndef nvmlInit():\n    time.sleep(60)\n")

    assert probing.detect() == Survey(problem="looking for GPUs failed: the probe did not end within 3 s")


def test_a_library_that_prints_does_not_spoil_the_answer(fake: Path) -> None:
    module = (fake / "pynvml.py").read_text()
    (fake / "pynvml.py").write_text(module + "\nprint('WARNING: you use the stub library')\nprint('{}', end='')\n")

    assert len(probing.detect().devices) == 2


def test_a_probe_that_fails_says_why(fake: Path) -> None:
    (fake / "pynvml.py").write_text("raise SystemError('such a mess')\n")

    assert "such a mess" in probing.detect().problem


# --- the start of the next worker


def begin(monkeypatch: pytest.MonkeyPatch) -> Tuple[DeviceFacts, ...]:
    """What a worker that starts now takes its GPUs to be."""
    monkeypatch.delenv("GPUMESH_PROBE", raising=False)
    monkeypatch.setattr(probing, "gpus_may_exist", lambda: True)
    return probing.head_start()


def test_the_next_start_knows_at_once_what_was_found(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = probing.detect().devices

    assert begin(monkeypatch) == found


def test_it_knows_nothing_before_anything_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert begin(monkeypatch) == ()


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_it_looks_again_when_a_variable_has_changed(variable: str, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probing.detect()
    monkeypatch.setenv(variable, "1")

    assert begin(monkeypatch) == ()


def test_it_looks_again_after_a_restart_of_the_system_and_after_a_week(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probing.detect()
    with monkeypatch.context() as patch:
        patch.setattr(probing, "_looks", lambda: ["another boot"])
        assert begin(monkeypatch) == ()
    now = probing.time.time()
    monkeypatch.setattr(probing.time, "time", lambda: now + probing.HEAD_START_SECONDS + 1)
    assert begin(monkeypatch) == ()


@pytest.mark.parametrize("devices", [None, [1], [["cuda"]], [[*CARD[:4], "fast"]], [[*CARD[:4], 0.0]]])
def test_a_damaged_memory_is_no_memory(devices: Any, fake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    probing.detect()
    file = tmp_path / "cache" / "gpumesh" / "gpus.json"
    (entry,) = json.loads(file.read_text()).values()
    file.write_text(json.dumps({probing._place(): {**entry, "devices": devices}}))

    assert begin(monkeypatch) == ()


# --- how fast they are


def test_a_measured_card_has_its_rates_and_is_measured_once(answers: List[Any]) -> None:
    answers.append({"rates": RATES, "doubts": "", "torch": "2.9"})

    measured = probing.measure(survey_of(), 0)
    again = probing._with_known_figures((CARD,), "535.1", "2.9")

    assert measured == Measured(CARD._replace(score=score_rates(RATES), rates=tuple(sorted(RATES.items()))))
    assert again == (measured.device,)
    assert probing.measure(survey_of(again[0]), 0) == measured  # Without asking: no answer is left.


def test_another_driver_is_measured_anew(answers: List[Any]) -> None:
    answers.append({"rates": RATES})
    probing.measure(survey_of(), 0)

    assert probing._with_known_figures((CARD,), "550.2", "2.9") == (CARD,)


def test_figures_are_kept_only_if_wanted(answers: List[Any]) -> None:
    answers.append({"rates": RATES})
    probing.measure(survey_of(), 0, save=False)

    assert probing._with_known_figures((CARD,), "535.1", "2.9") == (CARD,)


def test_without_torch_a_card_keeps_the_score_of_its_name(answers: List[Any]) -> None:
    answers.append({"note": "torch is not installed here"})

    assert probing.measure(survey_of(), 0) == Measured(CARD, "not measured: torch is not installed here")


def test_a_card_that_torch_has_no_kernels_for_is_listed_with_the_reason_until_torch_changes(answers: List[Any]) -> None:
    answers.append({"problem": "torch 2.9 has no kernels for it", "torch": "2.9"})

    measured = probing.measure(survey_of(), 0)

    assert measured.device.problem == "torch 2.9 has no kernels for it"
    assert probing._with_known_figures((CARD,), "535.1", "2.9")[0].problem == "torch 2.9 has no kernels for it"
    assert probing._with_known_figures((CARD,), "535.1", "2.10") == (CARD,)


def test_a_card_that_crashes_its_benchmark_is_listed_with_the_reason(answers: List[Any]) -> None:
    answers.append("crashed with signal 11")

    assert probing.measure(survey_of(), 0).device.problem == "the benchmark crashed with signal 11 on it"


def test_a_card_in_use_is_measured_later(answers: List[Any]) -> None:
    answers.extend([{"note": "it was in use (out of memory)"}] * 2)

    first = probing.measure(survey_of(), 0, is_last_try=False)
    last = probing.measure(survey_of(), 0, is_last_try=True)

    assert first == Measured(CARD, "not measured: it was in use (out of memory)", is_final=False)
    assert last == Measured(CARD, "not measured: it was in use (out of memory)")


def test_figures_of_a_shared_card_do_not_count_before_the_last_try_and_are_never_kept(answers: List[Any]) -> None:
    answers.extend([{"rates": RATES, "doubts": "it was 50 % busy"}] * 2)

    first = probing.measure(survey_of(), 0, is_last_try=False)
    last = probing.measure(survey_of(), 0, is_last_try=True)

    assert first == Measured(CARD, "not measured: it was 50 % busy", is_final=False)
    assert (last.device.score, last.note) == (score_rates(RATES), "in doubt: it was 50 % busy")
    assert probing._with_known_figures((CARD,), "535.1", "2.9") == (CARD,)


def test_a_score_that_is_off_is_measured_again_and_believed_if_it_comes_back(answers: List[Any]) -> None:
    slow = {name: rate / 10 for name, rate in RATES.items()}
    answers.extend([{"rates": slow}, {"rates": slow}])

    assert probing.measure(survey_of(), 0).device.score == score_rates(slow)
    assert answers == []


def test_a_score_that_is_off_once_is_replaced_by_the_second_one(answers: List[Any]) -> None:
    wild = {**RATES, "float32": 390e12, "bandwidth": 30e12}
    answers.extend([{"rates": wild}, {"rates": RATES}])

    measured = probing.measure(survey_of(), 0).device

    assert measured.score == score_rates(RATES)
    assert dict(measured.rates) == RATES


def test_two_wild_scores_are_bounded_by_what_the_name_promises(answers: List[Any]) -> None:
    wild = {"float32": 300e12, "bandwidth": 30e12}
    answers.extend([{"rates": wild}, {"rates": {**wild, "float32": 100e12}}])

    assert probing.measure(survey_of(), 0).device.score == 47.5 * PRIOR_SPREAD


@pytest.mark.parametrize(
    "rates", [{}, {"float32": 0, "bandwidth": 1e9}, {"float32": float("nan"), "bandwidth": 1e9}, {"float32": "x"}, None]
)
def test_figures_that_are_no_speed_leave_the_estimate(rates: Any, answers: List[Any]) -> None:
    answers.append({"rates": rates})

    measured = probing.measure(survey_of(), 0)

    assert measured.device == CARD
    assert measured.note.startswith("not measured: ")


def test_a_card_that_is_not_used_is_not_measured(answers: List[Any]) -> None:
    lost = CARD._replace(problem="fell off the bus")

    assert probing.measure(survey_of(lost), 0) == Measured(lost, "fell off the bus")


def test_the_owner_s_score_wins_over_the_measured_one(answers: List[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMESH_GPU_SCORE", "12.5")
    answers.append({"rates": RATES})

    measured = probing.measure(survey_of(), 0).device

    assert (measured.score, dict(measured.rates)) == (12.5, RATES)


@pytest.mark.parametrize("wish", ["0", "nan", "fast", "1e9"])
def test_an_owner_s_score_that_is_no_weight_is_not_used(
    wish: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GPUMESH_GPU_SCORE", wish)
    with caplog.at_level(logging.WARNING):
        assert probing.overridden((CARD,)) == (CARD,)
    assert "is not used" in caplog.text


def test_all_devices_are_measured_in_turn_and_those_in_use_are_named(answers: List[Any]) -> None:
    told: List[Tuple[int, str]] = []
    answers.extend([{"rates": RATES}, {"note": "it was in use"}])
    second = CARD._replace(uuid="GPU-2", index=1)

    later = probing.measure_all(
        Survey((CARD, second), "1", "2", (47.5, 47.5)),
        lambda number, measured: told.append((number, measured.note)),
        is_last_try=False,
    )

    assert told == [(0, ""), (1, "not measured: it was in use")]
    assert later == [1]


# --- a real process measures a real device


def test_a_process_without_torch_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('its library is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    answer, problem = probing._ask(["--measure", "cuda:0"])

    assert problem == "answered nonsense" or answer is not None
    assert answer is not None
    assert answer["note"] == "torch does not load here (its library is missing)"


def test_a_process_measures_with_torch() -> None:
    pytest.importorskip("torch")

    answer, _ = probing._ask(["--measure", "cpu"])

    assert answer is not None
    assert 0 < score_rates(answer["rates"]) < 100
