"""The score: linear, anchored at the reference card, and never a figure that cannot be a weight."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumesh.devices.scoring import REFERENCE_BANDWIDTH, REFERENCE_RATE_FLOPS, check_score, cpu_prior, device_score

positive = st.floats(min_value=1e-3, max_value=1e3)


@pytest.mark.parametrize("dtype", sorted(REFERENCE_RATE_FLOPS))
def test_the_reference_card_scores_100_by_every_type(dtype: str) -> None:
    assert device_score(REFERENCE_RATE_FLOPS[dtype], REFERENCE_BANDWIDTH, dtype=dtype) == pytest.approx(100.0)


def test_measured_cards_rank_as_people_found_them() -> None:
    # fp32 rate and copy bandwidth of cards measured by others; an A100 ranks below a 4090 by fp32 and above it by bf16.
    assert device_score(18.5e12, 1490e9) == pytest.approx(73, abs=2)
    assert device_score(258e12, 1490e9, dtype="bfloat16") == pytest.approx(158, abs=3)
    assert device_score(4.2e12, 240e9) == pytest.approx(14, abs=1)


def test_a_cpu_is_a_fraction_of_the_reference() -> None:
    assert 0.1 < device_score(130e9, 18e9) < 1.0
    assert 0.1 < cpu_prior(2) < 1.0
    assert 0.5 < cpu_prior(64) < 10.0


@given(rate=positive, bandwidth=positive, factor=st.floats(min_value=0.1, max_value=10))
def test_a_device_that_is_faster_in_both_by_a_factor_scores_higher_by_it(rate: float, bandwidth: float, factor: float) -> None:
    base = device_score(rate * 1e12, bandwidth * 1e9)
    assert device_score(rate * 1e12 * factor, bandwidth * 1e9 * factor) == pytest.approx(base * factor)


@given(cores=st.integers(min_value=1, max_value=1024))
def test_more_cores_never_score_less(cores: int) -> None:
    assert cpu_prior(cores) < cpu_prior(cores + 1)


@pytest.mark.parametrize("figure", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_figures_that_are_no_speed_are_refused(figure: float) -> None:
    with pytest.raises(ValueError, match="rate must be a positive finite number"):
        device_score(figure, 1e9)
    with pytest.raises(ValueError, match="bandwidth must be a positive finite number"):
        device_score(1e9, figure)


def test_a_type_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="no reference rate for 'float64'; measure one of bfloat16, float16, float32"):
        device_score(1e12, 1e9, dtype="float64")


@pytest.mark.parametrize("score", [0, 0.0, -3, math.nan, math.inf, 1e7, True, "5", None])
def test_scores_that_cannot_be_weights_are_refused(score: object) -> None:
    with pytest.raises(ValueError, match="a score must be a positive finite number"):
        check_score(score)  # type: ignore[arg-type]


def test_a_score_that_can_be_a_weight_is_returned_as_a_float() -> None:
    assert check_score(3) == 3.0
    assert isinstance(check_score(3), float)
