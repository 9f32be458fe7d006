"""The benchmark on a real card: plausible, repeatable, kept, and gone with its process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Dict

import pytest

from gpumesh.devices import probing
from gpumesh.devices.cards import sheet_of
from gpumesh.devices.probing import Measured
from gpumesh.devices.scoring import AGREEMENT, half_type, is_off, score_rates
from gpumesh.model.resources import DeviceFacts


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.timeout(300)
def test_a_card_is_measured_within_seconds_plausibly_and_only_once(card: DeviceFacts) -> None:
    survey = probing.detect()
    number = [device.key for device in survey.devices].index(card.key)

    started = time.monotonic()
    first = probing.measure(survey, number, force=True)
    took = time.monotonic() - started
    again = probing.measure(probing.detect(), number)

    assert first.note == ""
    assert took < 60  # Two seconds of work; the rest is torch's import and the first context.
    assert not is_off(first.device.score, survey.priors[number])
    assert again == Measured(first.device)  # Remembered for this card and driver.
    check_against_sheet(first.device)


def check_against_sheet(device: DeviceFacts) -> None:
    rates: Dict[str, float] = dict(device.rates)
    half = half_type(device.kind, device.capability)
    assert {"float32", "bandwidth", "to_device", "from_device"} <= set(rates)
    assert not half or rates[half] > rates["float32"]
    assert 1e8 < rates["to_device"] < rates["bandwidth"]
    sheet = sheet_of(device.name)
    if sheet is None:
        return
    # The range of what people measured, from a GeForce's 56 % of its sheet to cards that boost above it; TF32 would be far out of it.
    if sheet.float32:
        assert 0.4 < rates["float32"] / sheet.float32 < 1.25
    if sheet.half and half:
        assert 0.3 < rates[half] / sheet.half < 1.3
    if sheet.bandwidth:
        assert 0.5 < rates["bandwidth"] / sheet.bandwidth < 1.1


@pytest.mark.timeout(300)
def test_two_measurements_agree(card: DeviceFacts) -> None:
    survey = probing.Survey((card,), "", "", (card.score,))
    scores = [probing.measure(survey, 0, force=True, save=False).device.score for _ in range(2)]

    assert max(scores) < AGREEMENT * min(scores)


@pytest.mark.timeout(300)
def test_float32_is_not_tf32_even_if_the_environment_asks_for_it(card: DeviceFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")

    answer, _ = probing._ask_to_measure(card)

    assert answer is not None
    half = half_type(card.kind, card.capability)
    assert score_rates(answer["rates"]) > 0
    # TF32 does half of what bfloat16 does.
    assert half != "bfloat16" or answer["rates"]["float32"] < 0.45 * answer["rates"][half]
