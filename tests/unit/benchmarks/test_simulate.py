"""The simulation of the scheduler: lengths, bounds, virtual workers, and the command."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any, List

import pytest

from benchmarks.__main__ import main
from benchmarks.simulate_decisions import measure_decisions, measure_memory
from benchmarks.simulate_engine import Simulation, first_come_first_served, simulate
from benchmarks.simulate_table import Row, cells, fairness_case, rows
from benchmarks.simulate_workload import (
    DISTRIBUTIONS,
    REAL_SCORES,
    Case,
    Machine,
    Submission,
    bound,
    lengths,
    parse_speeds,
    quantile,
    standard_case,
    told,
)
from gpumesh.model.ids import WorkerId
from gpumesh.scheduler import actions as act

MEANS = {**dict.fromkeys(DISTRIBUTIONS, 1.0), "bimodal": 1.95}


def rng() -> random.Random:
    return random.Random(1)


# --- what is simulated


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_lengths_have_the_mean_that_they_should_have(distribution: str) -> None:
    drawn = lengths(distribution, 100_000, rng())
    assert sum(drawn) / len(drawn) == pytest.approx(MEANS[distribution], rel=0.05)
    assert min(drawn) >= 0
    assert drawn == lengths(distribution, 100_000, rng())


def test_a_heavy_tail_is_cut_and_an_unknown_name_refused() -> None:
    drawn = lengths("pareto", 100_000, rng())
    assert max(drawn) / min(drawn) <= 100.001
    assert max(drawn) > 20
    with pytest.raises(ValueError, match="none of constant"):
        lengths("normal", 1, rng())
    with pytest.raises(ValueError, match="none of right"):
        told(1.0, "late", rng())


def test_scores_are_right_equal_or_wrong_by_up_to_ten() -> None:
    assert told(5.0, "right", rng()) == 5.0
    assert told(5.0, "equal", rng()) == 1.0
    source = rng()
    factors = [told(5.0, "wrong", source) / 5.0 for _ in range(1000)]
    assert 0.1 <= min(factors) < 0.12
    assert 8 < max(factors) <= 10


def test_real_scores_are_those_of_cards_and_of_machines_without() -> None:
    assert 100 < max(REAL_SCORES) < 300
    assert 0 < min(REAL_SCORES) < 1


def test_speeds_from_the_command_line() -> None:
    assert parse_speeds("120,85,0.3", rng()) == (120.0, 85.0, 0.3)
    assert set(parse_speeds("7", rng())) <= set(REAL_SCORES)
    for wrong in ("0", "-3", "1,-2", "1,nan", "many"):
        with pytest.raises(ValueError, match=r"."):
            parse_speeds(wrong, rng())


def test_the_same_tasks_whatever_the_scores() -> None:
    right, wrong = (standard_case("pareto", seed=3, scores=scores) for scores in ("right", "wrong"))
    assert right.submissions == wrong.submissions
    assert sorted(machine.speed for machine in right.machines) == sorted(machine.speed for machine in wrong.machines)


@pytest.mark.parametrize(
    ("machines", "work", "expected"),
    [
        ([Machine(2.0, 1.0), Machine(1.0, 1.0)], [1.0] * 6, 2.0),
        ([Machine(2.0, 1.0), Machine(1.0, 1.0)], [1.0, 10.0], 5.0),  # The longest on the fastest.
        ([Machine(4.0, 1.0, slots=2), Machine(3.0, 1.0)], [6.0], 2.0),  # A slot has half of its machine's speed.
        ([Machine(1.0, 1.0), Machine(2.0, 1.0, joins=1.0)], [1.0] * 4, 2.0),
        ([Machine(1.0, 1.0), Machine(2.0, 1.0, dies=1.0)], [1.0] * 4, 2.0),
        ([Machine(2.0, 1.0, dies=1.0)], [1.0] * 4, math.inf),
    ],
)
def test_the_bound(machines: List[Machine], work: List[float], expected: float) -> None:
    assert bound(Case(machines, [Submission(work)])) == pytest.approx(expected)


def test_a_quantile_is_one_of_the_values() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 1.0) == 2.0
    assert quantile([], 0.5) is None


# --- virtual workers


def test_one_worker_does_one_task_after_the_other() -> None:
    result = simulate(Case([Machine(2.0, 1.0, latency=0.001)], [Submission([1.0, 2.0, 3.0])]))
    assert 3.0 < result.seconds < 3.01
    assert result.bound == 3.0
    assert result.extra == 0
    assert result.failed == 0
    assert result.busy["w0"] == pytest.approx(3.0)


def test_slots_share_the_speed_of_their_machine() -> None:
    result = simulate(Case([Machine(2.0, 1.0, slots=2)], [Submission([1.0] * 4)]))
    assert result.ratio == pytest.approx(1.0, abs=0.01)
    assert result.busy["w0"] == pytest.approx(4.0)


def test_a_case_gives_the_same_run_each_time() -> None:
    case = standard_case("pareto", seed=5, tasks=200, scores="wrong", idempotent=True, joins=2, deaths=1)
    first, second = simulate(case), simulate(case)
    assert first.ends == second.ends
    assert first.extra == second.extra


def test_what_a_dead_machine_had_begun_is_done_again() -> None:
    machines = [Machine(1.0, 1.0), Machine(1.0, 1.0, dies=0.4)]
    result = simulate(Case(machines, [Submission([1.0, 1.0])]))
    assert result.extra == pytest.approx(0.4, abs=0.01)
    assert result.seconds == pytest.approx(2.0, abs=0.01)
    assert result.failed == 0


def test_a_task_that_may_run_once_is_lost_with_its_machine() -> None:
    machines = [Machine(1.0, 1.0), Machine(1.0, 1.0, dies=0.4)]
    result = simulate(Case(machines, [Submission([1.0, 1.0], retries=0)]))
    assert result.failed == 1


def test_a_submission_may_wait_for_another() -> None:
    case = Case([Machine(1.0, 1.0)], [Submission([1.0]), Submission([2.0], after=0)])
    result = simulate(case)
    assert [max(result.ends[task_id] for task_id in ids) for ids in result.submitted] == pytest.approx([1.0, 3.0], abs=0.01)


def test_a_recall_takes_back_what_waits_and_a_killing_one_what_runs_too() -> None:
    simulation = Simulation(Case([Machine(1.0, 1.0)], [Submission([1.0] * 3)]))
    worker = simulation.workers["w0"]
    reported: List[Any] = []
    simulation._report = lambda worker, results, done: reported.extend(results)  # type: ignore[method-assign]
    ids = simulation.submitted[0]
    simulation._arrive(worker, [(ids[0], 1), (ids[1], 1), (ids[2], 1)])
    simulation.now = 0.25
    simulation._recall(worker, [(ids[0], 1), (ids[1], 1)], False)
    assert [(task_id, int(status)) for task_id, _, status, _, _ in reported] == [(ids[1], 6)]
    simulation._recall(worker, [(ids[0], 1)], True)
    assert reported[-1][0:3] == (ids[0], 1, 5)
    assert reported[-1][4] == 0.25
    assert simulation.extra == 0.25
    assert list(worker.running) == [(ids[2], 1)]


def test_a_scheduler_that_forgets_tasks_is_found_out() -> None:
    simulation = Simulation(Case([Machine(1.0, 1.0)], [Submission([1.0])]))
    real = simulation.cluster.handle
    simulation.cluster.handle = lambda event, now: [  # type: ignore[method-assign]
        action for action in real(event, now) if not isinstance(action, act.Assign)
    ]
    with pytest.raises(RuntimeError, match="1 tasks are left"):
        simulation.run()


def test_a_second_end_is_found_out() -> None:
    simulation = Simulation(Case([Machine(1.0, 1.0)], [Submission([1.0])]))
    deliver = act.Deliver(1, WorkerId("w0"), [(simulation.submitted[0][0], 0, b"", 1.0)])  # type: ignore[arg-type]
    simulation._perform([deliver])
    with pytest.raises(RuntimeError, match="ended twice"):
        simulation._perform([deliver])


def test_first_come_first_served_gives_the_slow_machine_a_last_task() -> None:
    case = Case([Machine(10.0, 1.0, latency=0.0), Machine(1.0, 1.0, latency=0.0)], [Submission([1.0] * 13)])
    # The slow one takes a second task when its first is done, and is busy with it long after all others are.
    assert first_come_first_served(case) == pytest.approx(2.0 / (13 / 11))


# --- the table and the command


def test_every_row_of_the_table_can_be_simulated() -> None:
    shown: List[Row] = []
    found = rows(1, on_row=shown.append)
    assert shown == found
    assert len({row.title for row in found}) == len(found)
    assert all(row.median >= 0.9 for row in found if row.unit == "x bound"), "better than the bound"
    assert all(row.worst >= row.median for row in found)
    assert [len(cells(row)) for row in found] == [7] * len(found)


def test_a_bar_is_met_or_not() -> None:
    row = Row("x", median=1.04, worst=1.2, extra=0.005, bar_median=1.05, bar_worst=1.25)
    assert row.is_met
    assert not row._replace(median=1.06).is_met
    assert not row._replace(worst=1.3).is_met
    assert not row._replace(extra=0.02).is_met
    assert cells(row)[-2] == "yes"
    assert cells(row._replace(worst=1.3))[-2] == "NO"


def test_the_fairness_case_has_two_clients() -> None:
    case = fairness_case(0)
    assert [submission.client for submission in case.submissions] == [1, 2]
    assert len(case.submissions[0].lengths) == 1000


def test_decisions_are_counted_while_all_tasks_stay_pending() -> None:
    for idempotent in (False, True):
        found = measure_decisions(10, idempotent=idempotent, pending=2000, decisions=2000)
        assert found.decisions >= 2000
        assert 1000 < found.per_second < 1e7


def test_memory_of_a_pending_task() -> None:
    assert 30 < measure_memory(pending=10_000) < 700


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    arguments = ["simulate", "--tasks", "60", "--seeds", "2", "--lengths", "constant", "pareto", "--scores", "right", "wrong"]
    assert main([*arguments, "--workers", "20", "--slots", "2", "--idempotent", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "a task of length 1 takes 1 s on a machine of score 1" in printed
    assert "20 machines" in printed
    written = json.loads(path.read_text())
    assert [(row["distribution"], row["scores"]) for row in written["rows"]] == [
        ("constant", "right"),
        ("constant", "wrong"),
        ("pareto", "right"),
        ("pareto", "wrong"),
    ]
    assert all(len(row["ratios"]) == 2 for row in written["rows"])


def test_the_command_with_joins_deaths_and_slow_links(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tasks", "60", "--seeds", "1", "--lengths", "exponential", "--joins", "2", "--deaths", "2"]
    assert main(["simulate", *arguments, "--slow-links", "0.5"]) == 0
    assert capsys.readouterr().out.splitlines()[-3].startswith("exponential")


def test_the_command_refuses_machines_without_speed() -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--workers", "1,0.0"])
