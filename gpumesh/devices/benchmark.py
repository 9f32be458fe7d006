"""How fast this machine's CPU is: measured in a throw-away process within a second, remembered per CPU and Python.

`python -m gpumesh.devices.benchmark` measures and prints one JSON object; `measure_cpu` runs that and keeps the result. numpy gives
matrix products and memory bandwidth; without it a plain-Python loop has to do, from which a rough score follows.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any, Dict, Mapping, Optional, Tuple

from gpumesh.devices import remembered
from gpumesh.devices.children import end_with_parent, run_module
from gpumesh.devices.scoring import PRIOR_LOOP_RATE, check_score, cpu_prior, device_score, is_off
from gpumesh.model.records import NamedTuple

logger = logging.getLogger(__name__)

CACHE_FORMAT = 1  # Raised when figures of an earlier version can no longer be compared.
MATRIX_SIZE = 768  # Three float32 matrices of 2.3 MB: large enough for every core to have work, 10 ms a product on two cores.
MATRIX_SECONDS = 0.25
COPY_BYTES = 64 << 20  # Two of these are far beyond the caches of most CPUs, and a small board still has room for them.
COPY_SECONDS = 0.15
LOOP_COUNT = 200_000
LOOP_SECONDS = 0.1
PROCESS_SECONDS = 60.0  # For a loaded Raspberry Pi whose card takes its time to load numpy.

_one_at_a_time = threading.Lock()


class CpuFigures(NamedTuple):
    """How fast this machine's CPU is."""

    score: float  # All usable cores together; 100 being an RTX 4090.
    rates: Tuple[Tuple[str, float], ...] = ()  # As in `DeviceFacts.rates`; "python": iterations/s of a plain loop on one core.


def measure_cpu(*, force: bool = False, save: bool = True) -> CpuFigures:
    """Measure this machine's CPU; blocks for about a second, or not at all when that was done before.

    Args:
        force: Measure again even if figures are remembered.
        save: Remember them.

    Returns:
        The figures; an estimate without rates, after a warning in the log, if measuring failed.
    """
    with _one_at_a_time:  # Who comes second finds what the first has measured.
        known = None if force else cached_cpu()
        return known if known is not None else _measure_now(save=save)


def _measure_now(*, save: bool) -> CpuFigures:
    import subprocess

    from gpumesh.devices.detect import usable_cores

    cores = usable_cores()
    try:
        figures = measure_in_subprocess()
        score = score_of(figures, cores)
        if is_off(score, cpu_prior(cores)):  # Once more: other load only slows, so the better one is nearer to the truth.
            again = measure_in_subprocess()
            if score_of(again, cores) > score:
                figures, score = again, score_of(again, cores)
        found = CpuFigures(score, rates_of(figures))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        logger.warning("the CPU benchmark failed (%s); using an estimate from %d cores, set one with --score", error, cores)
        return CpuFigures(cpu_prior(cores))
    if save:
        remembered.remember(cache_file(), _key(), {**figures, "score": score})
    return found


def measure_cpu_score(*, force: bool = False) -> float:
    """The score alone of `measure_cpu`."""
    return measure_cpu(force=force).score


def rates_of(figures: Mapping[str, Any]) -> Tuple[Tuple[str, float], ...]:
    """The printed figures under the names of `DeviceFacts.rates`, as far as there are such."""
    named = (("float32", "rate_flops"), ("bandwidth", "bandwidth"), ("python", "loop_rate"))
    return tuple((name, float(figures[key])) for name, key in named if figures.get(key))


def score_of(figures: Dict[str, Any], cores: int) -> float:
    """The score that the printed figures amount to.

    Raises:
        ValueError: A figure is not a positive number.
    """
    if figures.get("rate_flops"):
        return device_score(figures["rate_flops"], figures["bandwidth"])
    speed = min(4.0, max(0.05, figures["loop_rate"] / PRIOR_LOOP_RATE))
    return cpu_prior(cores, speed=speed)


def measure_in_subprocess() -> Dict[str, Any]:
    """Run this module in a process of its own and read what it prints.

    Raises:
        OSError: It cannot be started.
        subprocess.SubprocessError: It took longer than a minute.
        ValueError: It failed, or what it printed is not JSON.
    """
    finished = run_module("gpumesh.devices.benchmark", seconds=PROCESS_SECONDS)
    if finished.code:
        raise ValueError(f"the benchmark ended with exit code {finished.code}")
    figures = json.loads(finished.stdout)
    if not isinstance(figures, dict):
        raise ValueError(f"the benchmark printed {finished.stdout[:80]!r}, not an object")
    return figures


def cached_cpu() -> Optional[CpuFigures]:
    """What was measured earlier for this CPU, number of cores and Python; None if nothing was."""
    entry: Any = remembered.entries(cache_file()).get(_key())
    try:
        return CpuFigures(check_score(entry["score"]), rates_of(entry))
    except (ValueError, KeyError, TypeError):
        return None


def cached_cpu_score() -> Optional[float]:
    """The score alone of `cached_cpu`."""
    known = cached_cpu()
    return None if known is None else known.score


def cache_file() -> str:
    """Where the CPU's figures are remembered."""
    return remembered.cache_file("cpu-benchmark.json")


def _key() -> str:
    from gpumesh.devices.detect import cpu_name, usable_cores

    python = ".".join(str(part) for part in sys.version_info[:3])
    return f"{CACHE_FORMAT} {cpu_name()} x{usable_cores()} python {python}"


def loop_rate(*, budget_seconds: float = LOOP_SECONDS) -> float:
    """Iterations/s of a small plain-Python loop on one core: the best of several rounds, since other load only slows it."""
    best = 0.0
    deadline = time.perf_counter() + budget_seconds
    while True:
        started = time.perf_counter()
        total = 0
        for number in range(LOOP_COUNT):
            total += number & 7
        ended = time.perf_counter()
        best = max(best, LOOP_COUNT / (ended - started))
        if ended >= deadline:
            return best


def matmul_rate(numpy: Any, *, budget_seconds: float = MATRIX_SECONDS) -> float:
    """FLOP/s of float32 matrix products on all cores (2 n**3 a product): the best after one unmeasured round."""
    random = numpy.random.default_rng(1)
    left, right = (random.uniform(-1.0, 1.0, (MATRIX_SIZE, MATRIX_SIZE)).astype(numpy.float32) for _ in range(2))
    out = numpy.empty_like(left)
    numpy.matmul(left, right, out=out)
    return _best(lambda: numpy.matmul(left, right, out=out), 2.0 * MATRIX_SIZE**3, budget_seconds)


def copy_bandwidth(numpy: Any, *, budget_seconds: float = COPY_SECONDS) -> float:
    """Bytes/s of a copy in memory, read and written ones counted: the best after one unmeasured round, which touches the pages."""
    source = numpy.ones(COPY_BYTES // 8)
    target = numpy.empty_like(source)
    numpy.copyto(target, source)
    return _best(lambda: numpy.copyto(target, source), 2.0 * COPY_BYTES, budget_seconds)


def _best(run: Any, work: float, budget_seconds: float) -> float:
    best = 0.0
    deadline = time.perf_counter() + budget_seconds
    while True:
        started = time.perf_counter()
        run()
        ended = time.perf_counter()
        best = max(best, work / (ended - started))
        if ended >= deadline:
            return best


def main() -> None:
    """Measure, and print the figures as one JSON object."""
    end_with_parent()
    figures: Dict[str, Any] = {"loop_rate": loop_rate()}
    try:
        import numpy
    except ImportError:
        figures["numpy"] = None
    else:
        figures.update(numpy=numpy.__version__, rate_flops=matmul_rate(numpy), bandwidth=copy_bandwidth(numpy))
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
