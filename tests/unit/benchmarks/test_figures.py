"""Medians, spreads, ratios and verdicts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figures import ROWS, Bar, Row, Runs, judge, judge_all, percentile, summarize
from benchmarks.systems import PROFILES
from benchmarks.workloads import WORKLOADS

FASTER = Row(
    "work",
    "tasks a second",
    "stream_per_s",
    "tasks/s",
    smaller_is_better=False,
    peer_metric="futures_per_s",
    bars=(Bar(3, "processpool"),),
    goals=(Bar(6, "processpool"),),
)
SMALLER = Row("work", "time", "seconds", "s", smaller_is_better=True, bars=(Bar(0.4), Bar(0.25, "ray")))


def runs_of(metric: str, **values: list[float]) -> Runs:
    return {system: {repeat: {metric: value} for repeat, value in enumerate(given)} for system, given in values.items()}


def test_a_percentile_between_two_values_is_interpolated() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([7.0], 99) == 7.0


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_within_the_values(values: list[float], percent: float) -> None:
    assert min(values) <= percentile(values, percent) <= max(values)


def test_a_summary_keeps_every_value() -> None:
    assert summarize([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0, [3.0, 1.0, 2.0])


def test_a_peers_figure_may_have_another_name() -> None:
    runs: Runs = {
        "gpumesh": {0: {"stream_per_s": 400.0, "futures_per_s": 1.0}},
        "processpool": {0: {"futures_per_s": 100.0}},
    }

    judged = judge(FASTER, runs)

    assert judged.ratios["processpool"].median == 4.0
    assert [(verdict.is_goal, verdict.limit, verdict.is_met) for verdict in judged.verdicts] == [
        (False, 300.0, True),
        (True, 600.0, False),
    ]


def test_a_ratio_is_that_of_the_medians_and_its_spread_that_of_the_repeats() -> None:
    judged = judge(SMALLER, runs_of("seconds", gpumesh=[1.0, 2.0, 6.0], ray=[4.0, 4.0, 8.0]))

    ratio = judged.ratios["ray"]

    assert ratio.median == 0.5
    assert (ratio.low, ratio.high) == (0.25, 0.75)
    assert ratio.values == [0.25, 0.5, 0.75]


def test_repeats_that_only_one_system_has_are_not_paired() -> None:
    judged = judge(SMALLER, {"gpumesh": {0: {"seconds": 1.0}, 1: {"seconds": 3.0}}, "ray": {1: {"seconds": 6.0}}})

    assert judged.ratios["ray"].values == [0.5]


def test_a_bar_is_met_at_its_very_limit() -> None:
    judged = judge(SMALLER, runs_of("seconds", gpumesh=[0.4], ray=[1.6]))

    assert [verdict.is_met for verdict in judged.verdicts] == [True, True]


def test_a_bar_against_a_peer_that_was_not_measured_is_neither_met_nor_missed() -> None:
    judged = judge(SMALLER, runs_of("seconds", gpumesh=[0.5]))

    assert [(verdict.limit, verdict.is_met) for verdict in judged.verdicts] == [(0.4, False), (None, None)]


def test_without_gpumesh_there_are_figures_but_no_ratios_and_no_verdict() -> None:
    judged = judge(SMALLER, runs_of("seconds", ray=[0.5]))

    assert judged.summaries["ray"].median == 0.5
    assert judged.ratios == {}
    assert {verdict.is_met for verdict in judged.verdicts} == {None}


def test_a_system_whose_runs_all_failed_has_no_summary() -> None:
    judged = judge(SMALLER, {"gpumesh": {0: {"seconds": 0.1}}, "ray": {}})

    assert set(judged.summaries) == {"gpumesh"}
    assert judged.ratios == {}


def test_only_the_rows_of_measured_workloads_are_judged() -> None:
    judged = judge_all({"start": runs_of("seconds", gpumesh=[0.2])})

    assert [entry.row.workload for entry in judged] == ["start"]
    assert [verdict.is_met for verdict in judged[0].verdicts] == [True, True]


def test_every_row_names_a_workload_and_every_bar_a_system_that_exist() -> None:
    assert {row.workload for row in ROWS} == set(WORKLOADS)
    for row in ROWS:
        assert {bar.against for bar in (*row.bars, *row.goals)} <= {None, *WORKLOADS[row.workload].systems}
    assert {system for workload in WORKLOADS.values() for system in workload.systems} <= set(PROFILES)


def test_the_bars_are_those_of_the_plan() -> None:
    asked = {
        (row.workload, row.metric): ([tuple(bar) for bar in row.bars], [tuple(bar) for bar in row.goals])
        for row in ROWS
        if row.bars or row.goals
    }

    assert asked == {
        ("noop_latency", "p50_us"): ([(0.25, "ray"), (1.8, "processpool")], [(1.3, "processpool")]),
        ("noop_throughput", "stream_per_s"): ([(3, "processpool"), (20, "ray")], [(6, "processpool")]),
        ("noop_throughput", "futures_per_s"): ([(1.5, "processpool")], [(3, "processpool")]),
        ("small_args", "stream_per_s"): ([(2, "processpool")], [(4, "processpool")]),
        ("first_result", "first_ms"): ([(30, None)], []),
        ("first_result", "total_over_ideal"): ([(1.03, None)], []),
        ("start", "seconds"): ([(0.4, None)], [(0.25, None)]),
        ("idle_memory", "system_mb"): ([(75, None)], [(50, None)]),
        ("idle_memory", "cpu_percent"): ([(1, None)], [(0.3, None)]),
        ("many_pending", "total_s"): ([(0.5, "processpool")], [(0.25, "processpool")]),
        ("many_pending", "peak_mb"): ([(1, "processpool")], []),
        ("many_pending", "after_over_before"): ([(1.2, None)], []),
        ("put_repeated", "warm_gb_s"): ([(0.7, "ray"), (5, "dask")], [(1, "ray")]),
        ("get_other_process", "get_largest_over_smallest"): ([(2, None)], []),
        ("get_other_process", "argument_largest_over_smallest"): ([(2, None)], []),
        ("ref_argument", "calls_per_s"): ([(0.5, "ray")], [(1, "ray")]),
        ("ref_argument", "at_once_per_s"): ([(0.5, "ray")], [(1, "ray")]),
        ("return_100mb", "warm_gb_s"): ([(0.7, "ray"), (4, "dask")], [(1, "ray")]),
        ("broadcast", "seconds"): ([(1.5, "ray")], [(1, "ray")]),
        ("chain_1000", "seconds"): ([(0.5, "ray")], [(0.25, "ray")]),
        ("store_spill", "resident_mb"): ([(700, None)], []),
        ("actor_latency", "p50_us"): ([(0.45, "ray")], [(0.3, "ray")]),
        ("actor_throughput", "per_s"): ([(4, "ray"), (1.5, "xoscar")], [(8, "ray")]),
        ("actor_create", "seconds"): ([(0.3, "ray")], []),
        ("actor_array", "calls_per_s"): ([(1, "ray")], []),
        ("actor_array", "at_once_per_s"): ([(1, "ray")], []),
        ("nested", "total_over_ideal"): ([(1.15, None)], [(1.05, None)]),
        ("quickjoin", "first_result_s"): ([(5, None)], []),
        ("cross_host", "put_over_plain"): ([(0.6, None)], [(0.9, None)]),
        ("cross_host", "get_over_plain"): ([(0.6, None)], [(0.9, None)]),
        ("cross_host", "argument_over_plain"): ([(0.6, None)], [(0.9, None)]),
        ("cross_host", "result_over_plain"): ([(0.6, None)], [(0.9, None)]),
        ("tls_latency", "tls_over_plain"): ([(1.25, None)], []),
        ("tls_bulk", "tls_link_to_gb_s"): ([(1.5, None)], []),
        ("tls_bulk", "tls_link_from_gb_s"): ([(1.5, None)], []),
        ("latency_under_transfer", "client_p99_ms"): ([(5, None)], [(2, None)]),
        ("latency_under_transfer", "worker_p99_ms"): ([(5, None)], [(2, None)]),
        ("deaths", "process_over_s"): ([(0.35, None)], [(1, "ray"), (1, "dask")]),
        ("deaths", "worker_wait_s"): ([(0.75, None)], []),
        ("jobs", "accepted_per_s"): ([(5000, None)], []),
        ("jobs", "latency_over_idle"): ([(1.5, None)], []),
        ("unlike", "even_over_bound"): ([(1.08, None), (1, "dask")], [(1.03, None)]),
        ("unlike", "right_over_bound"): ([(1.12, None)], [(1.05, None)]),
        ("unlike", "unseen_over_bound"): ([(1.3, None)], [(1.15, None)]),
        ("unlike", "second_over_bound"): ([(1.12, None)], [(1.05, None)]),
        ("unlike", "wrong_over_bound"): ([(1.3, None)], [(1.15, None)]),
    }
