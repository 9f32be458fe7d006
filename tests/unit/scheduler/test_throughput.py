"""What is learned about lengths and speeds, and how soon a wrong score is forgotten."""

from __future__ import annotations

import random
from math import exp
from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumesh.model.ids import WorkerId
from gpumesh.scheduler.throughput import LENGTH_MEMORY_TASKS, PRIOR_VARIANCE, SHORTEST_SECONDS, SPEED_MEMORY_TASKS, Function

W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")


def learned(*lengths: float, worker: WorkerId = W1, prior: float = 1.0) -> Function:
    """A function whose tasks, of these lengths, have ended on one worker."""
    function = Function(b"f" * 16)
    for seconds in lengths:
        function.observe(worker, prior, seconds, 1)
    return function


# --- scores


def test_only_ratios_of_scores_count() -> None:
    one, other = Function(b"f" * 16), Function(b"f" * 16)
    for function, factor in ((one, 1.0), (other, 1000.0)):
        function.observe(W1, 4.0 * factor, 2.0, 1)
        function.observe(W2, 1.0 * factor, 12.0, 1)
    assert one.seconds_on(W1, 4.0) == pytest.approx(other.seconds_on(W1, 4000.0))
    assert one.seconds_on(W2, 1.0) == pytest.approx(other.seconds_on(W2, 1000.0))
    assert one.seconds_on(W3, 2.0) == pytest.approx(other.seconds_on(W3, 2000.0))


@pytest.mark.parametrize("error", [0.01, 100.0])
def test_a_score_that_is_wrong_by_a_factor_of_a_hundred_is_healed_within_a_few_tasks(error: float) -> None:
    function = learned(1.0, 1.0, 1.0)
    assert function.seconds_on(W2, error) == pytest.approx(1 / error, rel=0.01), (
        "it is believed until something has ended there"
    )
    for _ in range(3):
        function.observe(W2, error, 1.0, 1)
    assert function.seconds_on(W2, error) == pytest.approx(1.0, rel=0.35)
    for _ in range(5):
        function.observe(W2, error, 1.0, 1)
    assert function.seconds_on(W2, error) == pytest.approx(1.0, rel=0.1)


def test_one_wrong_score_does_not_spoil_what_is_known_of_the_others() -> None:
    function = Function(b"f" * 16)
    for _ in range(8):
        function.observe(W1, 1.0, 1.0, 1)
        function.observe(W2, 100.0, 1.0, 1)  # No faster than the first.
    assert function.seconds_on(W1, 1.0) == pytest.approx(1.0, rel=0.1)
    assert function.seconds_on(W2, 100.0) == pytest.approx(1.0, rel=0.1)


@given(
    prior=st.floats(min_value=-7.0, max_value=7.0).map(exp),
    seconds=st.floats(min_value=-5.0, max_value=5.0).map(exp),
    reference=st.floats(min_value=-3.0, max_value=3.0).map(exp),
    spread=st.lists(st.floats(min_value=0.95, max_value=1.05), min_size=16, max_size=16),
)
def test_whatever_the_score_sixteen_tasks_tell_the_speed_to_a_fifth(
    prior: float, seconds: float, reference: float, spread: List[float]
) -> None:
    function = learned(*[reference] * 4)
    for factor in spread:
        function.observe(W2, prior, seconds * factor, 1)
    assert function.seconds_on(W2, prior) == pytest.approx(seconds, rel=0.2)


def test_the_mean_of_lengths_that_differ_is_learned_and_not_the_typical_one() -> None:
    seed = random.Random(7)
    lengths = [seed.expovariate(1 / 3.0) for _ in range(400)]
    function = learned(*lengths)
    recent = lengths[-int(LENGTH_MEMORY_TASKS) :]
    assert function.unit == pytest.approx(sum(recent) / len(recent), rel=0.3)


def test_an_unmeasured_worker_is_expected_to_be_as_fast_as_its_score_says() -> None:
    function = learned(2.0, 2.0, prior=10.0)
    assert function.seconds_on(W2, 5.0) == pytest.approx(4.0)
    assert function.seconds_on(W3, 20.0) == pytest.approx(1.0)


def test_a_worker_that_becomes_slow_is_followed_within_its_memory() -> None:
    function = learned(*[1.0] * 100)
    for _ in range(2 * SPEED_MEMORY_TASKS):
        function.observe(W1, 1.0, 4.0, 1)
    assert function.seconds_on(W1, 1.0) == pytest.approx(4.0, rel=0.3)


def test_times_too_short_for_a_clock_are_taken_for_the_shortest_it_shows() -> None:
    function = learned(0.0, 0.0)
    assert function.seconds_on(W1, 1.0) >= SHORTEST_SECONDS
    assert function.seconds_on(W2, 1.0) >= SHORTEST_SECONDS


# --- what was ended before its time


def test_an_attempt_that_was_ended_counts_as_twice_as_long_as_it_had_run() -> None:
    killed, ended = learned(1.0, 1.0), learned(1.0, 1.0)
    killed.observe_at_least(W2, 1.0, 5.0)
    ended.observe(W2, 1.0, 10.0, 1)
    assert killed.is_measured_on(W2)
    assert killed.seconds_on(W2, 1.0) == ended.seconds_on(W2, 1.0) > 5.0


def test_an_attempt_that_was_ended_before_it_was_due_tells_nothing() -> None:
    function = learned(1.0, 1.0)
    before = function.seconds_on(W2, 1.0)
    function.observe_at_least(W2, 1.0, 0.5)
    assert not function.is_measured_on(W2)
    assert function.seconds_on(W2, 1.0) == before


def test_an_attempt_that_was_ended_tells_nothing_of_a_function_without_a_unit() -> None:
    function = Function(b"f" * 16)
    function.observe_at_least(W1, 1.0, 1e9)
    assert not function.is_known


# --- overshoot


def test_lengths_are_taken_for_exponential_until_some_are_seen() -> None:
    function = Function(b"f" * 16)
    assert function.overshoot(2.0, 0.0) == pytest.approx(2.0)
    assert function.overshoot(2.0, 3.0) == pytest.approx(2.0 * exp(-1.5))


@given(
    logs=st.lists(st.floats(min_value=-2.0, max_value=2.0), min_size=40, max_size=60),
    part=st.floats(min_value=0.0, max_value=3.0),
)
def test_the_overshoot_is_near_the_exact_mean_over_all_lengths_seen(logs: List[float], part: float) -> None:
    lengths = [exp(log) for log in logs]
    function = learned(*lengths * 4)  # Of every length many, lest the guess or the age of one of them weighs.
    mean = sum(lengths) / len(lengths)
    limit = part * mean

    found = function.overshoot(mean, limit)

    exact = sum(max(0.0, length - limit) for length in lengths) / len(lengths)
    assert found == pytest.approx(exact, abs=0.1 * mean)
    assert 0.0 <= found <= mean * 1.0001, "no more than all of it"


def test_equal_lengths_overshoot_only_before_their_end() -> None:
    function = learned(*[2.0] * 200)
    assert function.overshoot(2.0, 0.0) == pytest.approx(2.0)
    assert function.overshoot(2.0, 1.0) == pytest.approx(1.0, abs=0.05)
    assert function.overshoot(2.0, 4.0) < 0.02


def test_a_rare_long_task_is_remembered() -> None:
    function = learned(*[1.0] * 99, 500.0, *[1.0] * 20)
    mean = function.seconds_on(W1, 1.0)
    assert function.overshoot(mean, 10.0) > 2.0


# --- risk


def test_the_risk_is_greater_where_nothing_has_ended_yet() -> None:
    function = learned(*[1.0] * 30)
    assert function.risk(W1, 1.0, 1.5) < 0.05
    assert function.risk(W2, 1.0, 1.5) > 5 * function.risk(W1, 1.0, 1.5)


def test_the_risk_at_an_unmeasured_worker_falls_as_the_others_scores_turn_out_right() -> None:
    def after(*ratios: float) -> float:
        function = Function(b"f" * 16)
        for index, ratio in enumerate(ratios):
            for _ in range(8):
                function.observe(WorkerId(f"m{index}"), 1.0, ratio, 1)
        return function.risk(W1, 1.0, 3.0)

    assert after(1.0, 1.0, 1.0, 1.0, 1.0, 1.0) < after(1.0) < after(1.0, 20.0, 0.05, 8.0, 0.1, 1.0)


def test_without_any_measurement_the_risk_counts_a_factor_of_e() -> None:
    function = Function(b"f" * 16)
    factor = exp((3.0 * PRIOR_VARIANCE) ** 0.5)
    expected = sum(
        weight * function.overshoot(seconds, 2.0) for weight, seconds in ((1 / 6, 1 / factor), (2 / 3, 1.0), (1 / 6, factor))
    )
    assert function.risk(W1, 1.0, 2.0) == pytest.approx(expected)


# --- who leaves


def test_the_work_is_still_known_when_the_last_who_measured_it_has_left() -> None:
    function = learned(3.0, 3.0, prior=2.0)
    function.forget(W1)
    assert function.is_known
    assert not function.is_measured_on(W1)
    assert function.seconds_on(W2, 1.0) == pytest.approx(6.0)
    function.observe(W2, 1.0, 12.0, 1)
    assert function.seconds_on(W2, 1.0) > 8.0, "what was measured last counts for more than what nobody here can tell any more"


def test_who_leaves_takes_his_measurements_out_of_the_mean() -> None:
    function = learned(1.0, 1.0, 1.0, 1.0)
    for _ in range(4):
        function.observe(W2, 1.0, 100.0, 1)
    with_both = function.seconds_on(W3, 1.0)
    function.forget(W2)
    function.observe(W1, 1.0, 1.0, 1)
    assert function.seconds_on(W3, 1.0) < with_both
    function.forget(W3)
    assert function.is_measured_on(W1)
