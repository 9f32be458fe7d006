"""The rows of the table of `python -m benchmarks simulate --table`: what the placement promises, in simulation."""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

from benchmarks.simulate_engine import Result, first_come_first_served, simulate
from benchmarks.simulate_workload import (
    DISTRIBUTIONS,
    EIGHT_SCORES,
    SCORES,
    Case,
    Machine,
    Submission,
    bound,
    lengths,
    quantile,
    standard_case,
    told,
)

TASKS = 1000
FOUR_SPEEDS = (10.0, 5.0, 2.0, 1.0)
HEAL_FACTORS = (100.0, 0.01)  # A score wrong by so much.


class Row(NamedTuple):
    """One line: what was simulated, and figures over the seeds."""

    title: str
    median: float
    worst: float
    extra: float = 0.0  # Fraction of the work.
    bar_median: float = 0.0  # 0: none is set.
    bar_worst: float = 0.0
    baseline_median: float = 0.0  # First come first served, where that means something.
    baseline_worst: float = 0.0
    unit: str = "x bound"

    @property
    def is_met(self) -> bool:
        """Whether the figures keep what was asked."""
        return (
            (not self.bar_median or self.median <= self.bar_median)
            and (not self.bar_worst or self.worst <= self.bar_worst)
            and (not self.bar_worst or self.unit != "x bound" or self.extra <= EXTRA_BAR)
        )


EXTRA_BAR = 0.01
MEDIAN_BAR_TWICE, WORST_BAR_TWICE = 1.05, 1.25  # For tasks that may run twice, whatever the scores.
MEDIAN_BAR_ONCE = 1.06  # For tasks that may not, scores right.
UNKNOWN_BAR = 1.3  # A function never seen, scores wrong by up to 10 either way.
UNTOLD_BAR = 1.08  # Speeds that the mesh is not told; asked of real processes.
FEW_BAR, FEW_UNSEEN_BAR = 1.12, 1.30  # Likewise: few tasks on very unlike machines.
FAIR_BAR = 3.0  # Task lengths until five short tasks behind a thousand are done.


def rows(seeds: int, *, on_row: Callable[[Row], None]) -> List[Row]:
    """All rows, in order; `on_row` is called with each when it is there."""
    found: List[Row] = []

    def add(row: Row) -> None:
        found.append(row)
        on_row(row)

    for scores in SCORES:
        for distribution in DISTRIBUTIONS:
            add(_standard(distribution, seeds, scores=scores, idempotent=True, bars=(MEDIAN_BAR_TWICE, WORST_BAR_TWICE)))
    for scores in SCORES:
        for distribution in DISTRIBUTIONS:
            bar = MEDIAN_BAR_ONCE if scores == "right" else 0.0
            add(_standard(distribution, seeds, scores=scores, idempotent=False, bars=(bar, 0.0)))
    add(_over_seeds("B's 5 tasks behind A's 1,000", seeds, fairness_case, _fairness, unit="task lengths", bar_worst=FAIR_BAR))
    for speeds, idempotent in product((EIGHT_SCORES, FOUR_SPEEDS), (False, True)):
        title = f"300 tasks never seen, speeds {speeds[0]:g} to {speeds[-1]:g}, scores wrong, {_kind(idempotent)}"
        bar = (
            UNKNOWN_BAR if idempotent or speeds is FOUR_SPEEDS else 0.0
        )  # A first task on the slowest of eight takes longer than that.
        add(_over_seeds(title, seeds, partial(_never_seen, speeds, idempotent), _ratio, bar_median=bar))
    for factor, idempotent in product(HEAL_FACTORS, (False, True)):
        title = f"300 tasks, one score wrong x {factor:g}, {_kind(idempotent)}"
        add(_over_seeds(title, seeds, partial(wrong_score_case, factor, idempotent), _ratio))
    add(_over_seeds("speeds 10, 5, 2, 1 not told, 200 tasks of 1", seeds, untold_case, _ratio, bar_median=UNTOLD_BAR))
    few = "speeds 20, 10, 2, 0.2, 60 tasks of 1"
    add(_over_seeds(f"{few}, scores right", seeds, partial(few_case, "right", False), _ratio, bar_median=FEW_BAR))
    add(
        _over_seeds(
            f"{few}, scores equal, may run twice", seeds, partial(few_case, "equal", True), _ratio, bar_median=FEW_UNSEEN_BAR
        )
    )
    add(_over_seeds(f"{few}, a second call, may not", seeds, second_call_case, _second_call, bar_median=FEW_BAR))
    add(_over_seeds("a late joiner's first result", seeds, late_case, _late, unit="its task lengths"))
    for idempotent in (False, True):
        title = f"2 of 8 join late, 2 die, exponential, {_kind(idempotent)}"
        add(_over_seeds(title, seeds, partial(_restless, idempotent), _ratio))
        title = f"half of the links 50 ms one way, exponential, {_kind(idempotent)}"
        add(_over_seeds(title, seeds, partial(_far, idempotent), _ratio))
    return found


def _kind(idempotent: bool) -> str:
    return "may run twice" if idempotent else "may not run twice"


def _standard(distribution: str, seeds: int, *, scores: str, idempotent: bool, bars: Sequence[float]) -> Row:
    cases = [standard_case(distribution, seed=seed, scores=scores, idempotent=idempotent) for seed in range(seeds)]
    results = [simulate(case) for case in cases]
    baseline = [first_come_first_served(case) for case in cases]
    ratios = [result.ratio for result in results]
    return Row(
        f"{distribution}, scores {scores}, {_kind(idempotent)}",
        _median(ratios),
        max(ratios),
        sum(result.extra for result in results) / sum(result.work for result in results),
        bars[0],
        bars[1],
        _median(baseline),
        max(baseline),
    )


def _over_seeds(
    title: str,
    seeds: int,
    make: Callable[[int], Case],
    judge: Callable[[Case, Result], float],
    *,
    unit: str = "x bound",
    bar_median: float = 0.0,
    bar_worst: float = 0.0,
) -> Row:
    figures: List[float] = []
    extra = work = 0.0
    for seed in range(seeds):
        case = make(seed)
        result = simulate(case)
        figures.append(judge(case, result))
        extra += result.extra
        work += result.work
    return Row(title, _median(figures), max(figures), extra / work, bar_median, bar_worst, unit=unit)


def _median(values: Sequence[float]) -> float:
    middle = quantile(values, 0.5)
    assert middle is not None
    return middle


def _ratio(case: Case, result: Result) -> float:
    return result.ratio


def fairness_case(seed: int) -> Case:
    """Client A submits 1,000 tasks of length 1 to four like machines; when they are busy, client B five of its own."""
    rng = random.Random(f"fairness {seed}")
    machines = [Machine(1.0, 1.0) for _ in range(4)]
    return Case(machines, [Submission([1.0] * TASKS), Submission([1.0] * 5, at=rng.uniform(1.0, 20.0), client=2, function=1)])


def _fairness(case: Case, result: Result) -> float:
    """Task lengths from B's submission to the last of its results."""
    return max(result.ends[task_id] for task_id in result.submitted[1]) - case.submissions[1].at


def _never_seen(speeds: Sequence[float], idempotent: bool, seed: int) -> Case:
    return standard_case("constant", seed=seed, tasks=300, speeds=speeds, scores="wrong", idempotent=idempotent)


def _shuffled(speeds: Sequence[float], scores: str, seed: int) -> List[Machine]:
    rng = random.Random(f"shuffled {seed}")
    return [Machine(speed, told(speed, scores, rng)) for speed in rng.sample(speeds, len(speeds))]


def untold_case(seed: int) -> Case:
    """200 tasks of length 1 on speeds 10, 5, 2 and 1, all with the same score."""
    return Case(_shuffled(FOUR_SPEEDS, "equal", seed), [Submission([1.0] * 200)])


def few_case(scores: str, idempotent: bool, seed: int) -> Case:
    """60 tasks of length 1 on speeds 20, 10, 2 and 0.2."""
    return Case(_shuffled((20.0, 10.0, 2.0, 0.2), scores, seed), [Submission([1.0] * 60, idempotent=idempotent)])


def second_call_case(seed: int) -> Case:
    """The same with equal scores, and once more when the first have ended; the second time they may not run twice."""
    first, machines = Submission([1.0] * 60, idempotent=True), _shuffled((20.0, 10.0, 2.0, 0.2), "equal", seed)
    return Case(machines, [first, Submission([1.0] * 60, after=0)])


def _second_call(case: Case, result: Result) -> float:
    """Seconds of the second call over its bound."""
    first, second = (max(result.ends[task_id] for task_id in ids) for ids in result.submitted)
    return (second - first) / bound(case._replace(submissions=[case.submissions[1]]))


def wrong_score_case(factor: float, idempotent: bool, seed: int) -> Case:
    """300 tasks of length 1; one of the machines, by the seed, tells a score that is wrong by this factor."""
    rng = random.Random(f"wrong {seed}")
    speeds = rng.sample(EIGHT_SCORES, len(EIGHT_SCORES))
    liar = seed % len(speeds)
    machines = [Machine(speed, speed * (factor if index == liar else 1.0)) for index, speed in enumerate(speeds)]
    return Case(machines, [Submission([1.0] * 300, idempotent=idempotent)])


def late_case(seed: int) -> Case:
    """1,000 tasks of random lengths around 1; a machine of speed 100 joins seven others when a third of the time has passed."""
    rng = random.Random(f"late {seed}")
    machines = [Machine(speed, speed) for speed in EIGHT_SCORES[1:]]
    work = lengths("uniform", TASKS, rng)
    at = sum(work) / sum(EIGHT_SCORES[1:]) / 3
    return Case([*machines, Machine(100.0, 100.0, joins=at)], [Submission(work)])


def _late(case: Case, result: Result) -> float:
    """Mean task lengths on the late machine from its joining to its first result."""
    joined = case.machines[-1].joins
    return (result.done[f"w{len(case.machines) - 1}"][0] - joined) * case.machines[-1].speed


def _restless(idempotent: bool, seed: int) -> Case:
    return standard_case("exponential", seed=seed, idempotent=idempotent, joins=2, deaths=2)


def _far(idempotent: bool, seed: int) -> Case:
    return standard_case("exponential", seed=seed, idempotent=idempotent, slow_links=0.5)


def cells(row: Row) -> List[str]:
    """A row as text."""
    asked = " / ".join(f"{bar:g}" if bar else "-" for bar in (row.bar_median, row.bar_worst))
    plain = f"{row.baseline_median:.2f} / {row.baseline_worst:.2f}" if row.baseline_median else "-"
    verdict = "" if asked == "- / -" else ("yes" if row.is_met else "NO")
    return [row.title, row.unit, f"{row.median:.3f} / {row.worst:.3f}", f"{100 * row.extra:.2f} %", asked, verdict, plain]


HEADING = ["simulated", "unit", "median / worst", "extra work", "asked", "met", "first come first served"]


def as_json(found: Sequence[Row]) -> List[Dict[str, Any]]:
    """Rows as plain dicts."""
    return [{**row._asdict(), "is_met": row.is_met} for row in found]
