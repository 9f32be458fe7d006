"""What is simulated: machines, tasks and their lengths, who comes and goes; and the bound that no schedule beats.

A task of length 1 takes 1 second on a machine of speed 1. A machine with several slots runs each task at its speed over its slots.
"""

from __future__ import annotations

import math
import random
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from gpumesh.devices.scoring import cpu_prior, device_score

LATENCY_SECONDS = 0.0001  # One way; a round trip is 0.2 ms, as between two processes of one machine.
EIGHT_SCORES = (120.0, 85.0, 52.0, 25.0, 12.0, 1.0, 0.5, 0.3)  # A rack's best card to an old laptop.

_CARDS = (
    # (float32 TFLOPS, memory bandwidth in GB/s) by the data sheets, as techpowerup.com/gpu-specs lists them.
    (4.375, 192.2),  # GTX 1060
    (11.34, 484.4),  # GTX 1080 Ti
    (8.141, 320.0),  # T4
    (13.45, 616.0),  # RTX 2080 Ti
    (9.098, 224.0),  # RTX 3050
    (12.74, 360.0),  # RTX 3060
    (29.77, 760.3),  # RTX 3080
    (35.58, 936.2),  # RTX 3090
    (15.11, 272.0),  # RTX 4060
    (29.15, 504.2),  # RTX 4070
    (48.74, 716.8),  # RTX 4080
    (82.58, 1008.0),  # RTX 4090
    (104.8, 1792.0),  # RTX 5090
    (10.94, 336.0),  # RTX 3060 Laptop
    (2.29, 68.25),  # M1
    (14.2, 400.0),  # M3 Max
    (1.28, 68.22),  # Orin Nano
    (15.67, 897.0),  # V100
    (19.49, 1555.0),  # A100
    (66.91, 3350.0),  # H100
)
_CORES = (2, 4, 8, 16)  # Machines without a card.
REAL_SCORES = tuple(round(device_score(rate * 1e12, bandwidth * 1e9), 2) for rate, bandwidth in _CARDS) + tuple(
    round(cpu_prior(cores), 3) for cores in _CORES
)

DISTRIBUTIONS = ("constant", "uniform", "exponential", "lognormal", "pareto", "bimodal")
SCORES = ("right", "equal", "wrong")
WRONG_FACTOR = 10.0  # A wrong score is off by up to this, either way.

PARETO_ALPHA = 1.5
PARETO_CUT = 100.0  # Times the shortest.
PARETO_MEAN = 3 * (1 - PARETO_CUT**-0.5) / (1 - PARETO_CUT**-1.5)  # Of the truncated one, in units of the shortest.
BIMODAL_LONG = 20.0
BIMODAL_FRACTION = 0.05


class Machine(NamedTuple):
    """A virtual worker. `speed` is that of all its slots together; `score` is what it tells of itself."""

    speed: float
    score: float
    slots: int = 1
    latency: float = LATENCY_SECONDS
    joins: float = 0.0
    dies: float = math.inf


class Submission(NamedTuple):
    """Tasks of one function that a client submits at one time."""

    lengths: Sequence[float]
    at: float = 0.0
    client: int = 1
    idempotent: bool = False
    priority: int = 0
    function: int = 0
    retries: int = 3
    after: int = -1  # Submitted when all tasks of that submission have ended, not `at` a time; -1: no.


class Case(NamedTuple):
    """One run of the simulation."""

    machines: Sequence[Machine]
    submissions: Sequence[Submission]


def lengths(distribution: str, count: int, rng: random.Random) -> List[float]:
    """Lengths of `count` tasks, of mean 1 (bimodal: 1.95, by the definition: 95 % of 1, 5 % of 20).

    Raises:
        ValueError: No such distribution.
    """
    if distribution == "constant":
        return [1.0] * count
    if distribution == "uniform":
        return [rng.uniform(0.0, 2.0) for _ in range(count)]
    if distribution == "exponential":
        return [rng.expovariate(1.0) for _ in range(count)]
    if distribution == "lognormal":
        return [rng.lognormvariate(-0.5, 1.0) for _ in range(count)]
    if distribution == "pareto":
        least = 1 / PARETO_MEAN
        kept = 1 - PARETO_CUT**-PARETO_ALPHA  # Probability of the part that is not cut off.
        return [float(least * (1 - kept * rng.random()) ** (-1 / PARETO_ALPHA)) for _ in range(count)]
    if distribution == "bimodal":
        return [BIMODAL_LONG if rng.random() < BIMODAL_FRACTION else 1.0 for _ in range(count)]
    raise ValueError(f"{distribution!r} is none of {', '.join(DISTRIBUTIONS)}")


def told(speed: float, scores: str, rng: random.Random) -> float:
    """The score that a machine of this speed tells.

    Raises:
        ValueError: `scores` is none of SCORES.
    """
    if scores == "right":
        return speed
    if scores == "equal":
        return 1.0
    if scores == "wrong":
        return float(speed * WRONG_FACTOR ** rng.uniform(-1.0, 1.0))
    raise ValueError(f"{scores!r} is none of {', '.join(SCORES)}")


def draw_speeds(count: int, rng: random.Random) -> List[float]:
    """Speeds of so many machines: scores of real cards and CPUs."""
    return [rng.choice(REAL_SCORES) for _ in range(count)]


def standard_case(
    distribution: str = "exponential",
    *,
    seed: int = 0,
    tasks: int = 1000,
    speeds: Sequence[float] = EIGHT_SCORES,
    scores: str = "right",
    idempotent: bool = False,
    slots: int = 1,
    latency: float = LATENCY_SECONDS,
    slow_links: float = 0.0,
    slow_latency: float = 0.05,
    joins: int = 0,
    deaths: int = 0,
) -> Case:
    """`tasks` tasks of one function at once on machines of these speeds, in random order of joining.

    The lengths depend on `distribution`, `tasks` and `seed` only, so policies and scores are compared on the same tasks.

    Args:
        distribution: One of DISTRIBUTIONS.
        seed: Of everything random.
        tasks: How many.
        speeds: One for each machine.
        scores: "right", "equal" or "wrong" (by a random factor of up to 10 either way).
        idempotent: Whether the tasks may run twice.
        slots: Of each machine.
        latency: One way, in seconds.
        slow_links: Fraction of the machines whose latency is `slow_latency` instead.
        slow_latency: One way, in seconds.
        joins: So many of the machines join late, at random times within the bound without them.
        deaths: So many of the others die at random times within the bound.
    """
    work = lengths(distribution, tasks, random.Random(f"lengths {distribution} {tasks} {seed}"))
    rng = random.Random(f"machines {scores} {seed}")
    machines = []
    for speed in rng.sample(list(speeds), len(speeds)):
        link = slow_latency if rng.random() < slow_links else latency
        machines.append(Machine(speed, told(speed, scores, rng), slots, link))
    if joins or deaths:
        horizon = sum(work) / sum(speeds)
        chosen = rng.sample(range(len(machines)), min(joins + deaths, len(machines) - 1))
        for index in chosen[:joins]:
            machines[index] = machines[index]._replace(joins=rng.uniform(0.0, horizon))
        for index in chosen[joins:]:
            machines[index] = machines[index]._replace(dies=rng.uniform(0.0, horizon))
    return Case(machines, [Submission(work, idempotent=idempotent)])


def bound(case: Case) -> float:
    """Seconds that no schedule beats: all work on all machines at full speed, and the longest task on the machine that ends it first."""
    begin = min(submission.at for submission in case.submissions)
    work = sum(sum(submission.lengths) for submission in case.submissions)
    longest = max(
        submission.at + max(submission.lengths, default=0.0) * _best_pace(case.machines) for submission in case.submissions
    )
    return max(_pooled(case.machines, begin, work), longest) - begin


def _best_pace(machines: Sequence[Machine]) -> float:
    return min(machine.slots / machine.speed for machine in machines)


def _pooled(machines: Sequence[Machine], begin: float, work: float) -> float:
    """When so much work is done if every machine is busy whenever it is there."""
    changes: Dict[float, float] = {}
    for machine in machines:
        changes[max(begin, machine.joins)] = changes.get(max(begin, machine.joins), 0.0) + machine.speed
        if machine.dies > begin:
            changes[machine.dies] = changes.get(machine.dies, 0.0) - machine.speed
    now, speed = begin, 0.0
    for at in sorted(changes):
        if speed > 0 and (at - now) * speed >= work:
            break
        work -= max(0.0, (at - now) * speed) if at != math.inf else 0.0
        if at == math.inf:
            break
        now, speed = at, max(0.0, speed + changes[at])
    return now + work / speed if speed > 0 else math.inf


def parse_speeds(text: str, rng: random.Random) -> Tuple[float, ...]:
    """Speeds from "120,85,52" or a number of machines to draw.

    Raises:
        ValueError: Neither.
    """
    if "," in text or "." in text:
        speeds = tuple(float(word) for word in text.split(","))
        if not all(0 < speed < math.inf for speed in speeds):
            raise ValueError(f"speeds are positive numbers, not {text!r}")
        return speeds
    count = int(text)
    if not 1 <= count <= 100_000:
        raise ValueError(f"{count} machines are too few or too many")
    return tuple(draw_speeds(count, rng))


def quantile(values: Sequence[float], fraction: float) -> Optional[float]:
    """The value below which this fraction of the values lies, None of nothing; the nearest one, not interpolated."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else None
