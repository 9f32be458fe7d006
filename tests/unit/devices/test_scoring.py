"""The score: linear, anchored at the reference card, and never a figure that cannot be a weight."""

from __future__ import annotations

import math
from typing import Dict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumesh.devices.scoring import (
    AGREEMENT,
    PRIOR_SPREAD,
    REFERENCE_BANDWIDTH,
    REFERENCE_RATE_FLOPS,
    check_score,
    cpu_prior,
    device_score,
    half_type,
    is_off,
    score_rates,
    settle,
)

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


A100 = {"float32": 18.5e12, "bfloat16": 258e12, "bandwidth": 1490e9, "to_device": 2e10}


def test_the_score_of_record_is_by_float32_and_half_precision_is_told_beside_it() -> None:
    assert score_rates(A100) == device_score(18.5e12, 1490e9)
    assert score_rates(A100, dtype="bfloat16") == device_score(258e12, 1490e9, dtype="bfloat16")


@pytest.mark.parametrize(
    "change",
    [
        {"float32": 0.0},
        {"float32": math.nan},
        {"float32": 500e12},
        {"bfloat16": math.inf},
        {"bfloat16": 1e16},
        {"bandwidth": 0.0},
        {"bandwidth": 1e14},
        {"bandwidth": -1.0},
    ],
)
def test_rates_that_no_device_has_are_refused(change: Dict[str, float]) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=f"{name} was measured as .* measure again"):
        score_rates({**A100, **change})


@pytest.mark.parametrize("missing", ["float32", "bandwidth"])
def test_rates_without_one_that_counts_are_refused(missing: str) -> None:
    with pytest.raises(ValueError, match=f"{missing} was measured as 0"):
        score_rates({name: rate for name, rate in A100.items() if name != missing})


def test_a_device_without_half_precision_has_a_score_all_the_same() -> None:
    assert score_rates({"float32": 10.1e12, "bandwidth": 300e9}) > 0


@pytest.mark.parametrize(
    ("kind", "capability", "dtype"),
    [
        ("cuda", "12.0", "bfloat16"),
        ("cuda", "8.9", "bfloat16"),
        ("cuda", "8.0", "bfloat16"),
        ("cuda", "7.5", "float16"),  # A T4 emulates bfloat16: 2.3 TFLOPS instead of 42.
        ("cuda", "7.0", "float16"),
        ("cuda", "6.1", ""),
        ("cuda", "", ""),
        ("rocm", "gfx942", "bfloat16"),
        ("rocm", "gfx1100", "bfloat16"),
        ("rocm", "gfx1030", "float16"),
        ("rocm", "gfx906", "float16"),
        ("mps", "", "float16"),
        ("cpu", "", ""),
    ],
)
def test_half_precision_is_measured_in_the_type_that_the_card_has(kind: str, capability: str, dtype: str) -> None:
    assert half_type(kind, capability) == dtype


def test_a_score_far_from_what_the_name_promises_is_off() -> None:
    assert [is_off(score, 60.0) for score in (19.9, 20.1, 60.0, 179.0, 181.0)] == [True, False, False, False, True]
    assert not is_off(1.0, 0.0)  # Nothing is known of such devices.


def test_two_measurements_that_agree_are_believed_over_the_name() -> None:
    assert settle(10.0, 11.0, 100.0) == 11.0  # A card that its owner has capped.


@given(first=positive, second=positive, prior=positive)
def test_of_two_that_disagree_the_more_plausible_counts_within_bounds(first: float, second: float, prior: float) -> None:
    settled = settle(first, second, prior)

    if max(first, second) > AGREEMENT * min(first, second):
        assert prior / PRIOR_SPREAD <= settled <= prior * PRIOR_SPREAD
        if not is_off(first, prior) and is_off(second, prior):
            assert settled == first
    else:
        assert settled == second
