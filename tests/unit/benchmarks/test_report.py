"""The figures as a table and as JSON."""

from __future__ import annotations

import json
from typing import Any, Dict, Sequence

import pytest

from benchmarks.report import as_json, as_text
from benchmarks.running import Run
from benchmarks.table import number

ENVIRONMENT: Dict[str, Any] = {
    "date": "2030-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "is_modified": False,
    "cpu": "A Processor",
    "cores": 2,
    "memory_gib": 8.0,
    "kernel": "6.1",
    "python": "CPython 3.11.7",
    "load_average_before": [0.0, 0.1, 0.2],
    "versions": {"gpumesh": "0.1.0", "ray": "2.60.0"},
}
OPTIONS: Dict[str, Any] = {"workloads": ["start"], "systems": ["gpumesh", "processpool", "ray"], "repeats": 2, "quick": False}


def run_of(system: str, repeat: int, seconds: float, *, error: str = "", left_behind: Sequence[str] = ()) -> Run:
    return Run("start", system, repeat, {} if error else {"seconds": seconds}, error, 1.0, 0.1, list(left_behind))


EXPECTED_TEXT = """\
2030-01-02T03:04:05+00:00, 0123456789ab, load before 0.00 0.10 0.20
A Processor, 2 cores, 8.0 GiB, Linux 6.1
CPython 3.11.7; gpumesh 0.1.0, ray 2.60.0
2 repeats

median (lowest-highest)                       gpumesh          ProcessPool     Ray
----------------------------------------------------------------------------------
process start to first result, s  0.300 (0.200-0.400)  0.100 (0.050-0.150)  failed

gpumesh / peer (+ better, - worse)         ProcessPool  Ray
-----------------------------------------------------------
process start to first result       3.00 (2.67-4.00) -    -

bars and goals                           asked  reached  verdict
----------------------------------------------------------------
process start to first result   bar   <= 0.4 s  0.300 s      met
process start to first result  goal  <= 0.25 s  0.300 s  NOT MET

start of ray, repeat 1 failed: exit status 1
    boom
start of ray, repeat 2 failed: did not end within 60 s
start of ray, repeat 2 left processes behind: raylet"""

RUNS = [
    run_of("gpumesh", 0, 0.2),
    run_of("processpool", 0, 0.05),
    run_of("ray", 0, 0.0, error="exit status 1\nboom"),
    run_of("processpool", 1, 0.15),
    run_of("ray", 1, 0.0, error="did not end within 60 s", left_behind=["raylet"]),
    run_of("gpumesh", 1, 0.4),
]


def test_the_text_has_environment_figures_ratios_verdicts_and_failures() -> None:
    assert as_text(ENVIRONMENT, OPTIONS, RUNS) == EXPECTED_TEXT


def test_without_gpumesh_the_text_is_the_peers_figures() -> None:
    options = {**OPTIONS, "systems": ["processpool"], "repeats": 1, "quick": True}

    text = as_text({**ENVIRONMENT, "commit": None}, options, [run_of("processpool", 0, 0.05)])

    assert "no commit" in text
    assert "1 repeat, quick: smaller sizes, not for comparison" in text
    assert "NOT MET" not in text
    assert text.endswith("process start to first result, s        0.050")


def test_the_json_has_each_run_and_survives_a_round_trip() -> None:
    written = as_json(ENVIRONMENT, OPTIONS, RUNS)

    assert json.loads(json.dumps(written)) == written
    assert written["format"] == 1
    assert written["environment"] == ENVIRONMENT
    assert len(written["runs"]) == len(RUNS)
    assert written["runs"][4]["left_behind"] == ["raylet"]
    (row,) = written["rows"]
    assert row["systems"]["gpumesh"] == {"median": pytest.approx(0.3), "low": 0.2, "high": 0.4, "values": [0.2, 0.4]}
    assert row["ratios"]["processpool"]["median"] == pytest.approx(3.0)
    assert row["metrics"] == {"gpumesh": "seconds", "processpool": "seconds"}
    assert row["verdicts"] == [
        {"kind": "bar", "limit": 0.4, "against": None, "limit_in_unit": 0.4, "is_met": True},
        {"kind": "goal", "limit": 0.25, "against": None, "limit_in_unit": 0.25, "is_met": False},
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.0024, "0.0024"),
        (0.0462, "0.046"),
        (0.3, "0.300"),
        (1.234, "1.23"),
        (22.34, "22.3"),
        (129.4, "129"),
        (1137980.0, "1,137,980"),
        (-22.34, "-22.3"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
