"""How fast this machine's CPU is: measured in a throw-away process within a second, remembered per CPU and Python.

`python -m gpumesh.devices.benchmark` measures and prints one JSON object; `measure_cpu_score` runs that and keeps the result. numpy gives
matrix products and memory bandwidth; without it a plain-Python loop has to do, from which a rough score follows.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any, Dict, Optional

from gpumesh.devices.scoring import PRIOR_LOOP_RATE, cpu_prior, device_score

logger = logging.getLogger(__name__)

CACHE_FORMAT = 1  # Raised when figures of an earlier version can no longer be compared.
MATRIX_SIZE = 768  # Three float32 matrices of 2.3 MB: large enough for every core to have work, 10 ms a product on two cores.
MATRIX_SECONDS = 0.25
COPY_BYTES = 64 << 20  # Two of these are far beyond the caches of most CPUs, and a small board still has room for them.
COPY_SECONDS = 0.15
LOOP_COUNT = 200_000
LOOP_SECONDS = 0.1
WITH_PARENT = "--with-parent"  # End when standard input does.
PROCESS_SECONDS = 60.0  # For a loaded Raspberry Pi whose card takes its time to load numpy.


def measure_cpu_score(*, force: bool = False) -> float:
    """The score of this machine's CPU; blocks for about a second when nobody has measured it yet.

    Args:
        force: Measure again even if a figure is remembered.

    Returns:
        The score, 100 being an RTX 4090; all usable cores together. An estimate, after a warning in the log, if measuring failed.
    """
    import subprocess

    from gpumesh.devices.detect import usable_cores

    remembered = None if force else cached_cpu_score()
    if remembered is not None:
        return remembered
    cores = usable_cores()
    try:
        figures = measure_in_subprocess()
        score = score_of(figures, cores)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        logger.warning("the CPU benchmark failed (%s); using an estimate from %d cores, set one with --score", error, cores)
        return cpu_prior(cores)
    _remember({**figures, "score": score})
    return score


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
        subprocess.SubprocessError: It failed, or took longer than a minute.
        ValueError: What it printed is not JSON.
    """
    import subprocess  # Here, because every worker's start reads the cache, and only few starts measure.

    environment = dict(os.environ)
    environment.pop("GPUMESH_TOKEN", None)
    root = os.path.dirname(
        os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    )  # Also when run from a checkout that is not installed.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH", ""), root]))
    theirs, ours = os.pipe()  # Ours is closed when we are gone, however we went, and then the process ends itself.
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "gpumesh.devices.benchmark", WITH_PARENT],
            env=environment,
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROCESS_SECONDS,
            check=True,
        )
    finally:
        os.close(theirs)
        os.close(ours)
    figures = json.loads(finished.stdout)
    if not isinstance(figures, dict):
        raise ValueError(f"the benchmark printed {finished.stdout[:80]!r}, not an object")
    return figures


def cached_cpu_score() -> Optional[float]:
    """The score measured earlier for this CPU, number of cores and Python; None if there is none."""
    try:
        entry = _load()[_key()]
        score = float(entry["score"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return score if 0 < score < float("inf") else None


def cache_file() -> str:
    """Where figures are remembered: in the user's cache folder."""
    if sys.platform == "linux":  # What platformdirs says too, without the 5 ms that importing it takes from a worker's start.
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME", "").strip() or os.path.expanduser("~/.cache"), "gpumesh")
    else:
        import platformdirs

        folder = platformdirs.user_cache_dir("gpumesh", appauthor=False)
    return os.path.join(folder, "cpu-benchmark.json")


def _key() -> str:
    from gpumesh.devices.detect import cpu_name, usable_cores

    python = ".".join(str(part) for part in sys.version_info[:3])
    return f"{CACHE_FORMAT} {cpu_name()} x{usable_cores()} python {python}"


def _load() -> Dict[str, Any]:
    with open(cache_file(), encoding="utf-8") as file:
        entries = json.load(file)
    return entries if isinstance(entries, dict) else {}


def _remember(entry: Dict[str, Any]) -> None:
    """Add an entry to the cache; a folder that cannot be written to only costs the next start a second."""
    try:
        entries = _load()
    except (OSError, ValueError):
        entries = {}
    entries[_key()] = entry
    file = cache_file()
    fresh = f"{file}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(fresh, "w", encoding="utf-8") as opened:
            json.dump(entries, opened, indent=1)
        os.replace(fresh, file)  # Two writers at once: the last one's figures stay, never half of each.
    except OSError as error:
        logger.debug("the CPU benchmark is not remembered: %s", error)


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


def _end_with_parent() -> None:
    """Wait for the end of standard input, which is the end of whoever asked, and end this process."""
    if not os.read(0, 1):
        os._exit(1)


def main() -> None:
    """Measure, and print the figures as one JSON object."""
    if WITH_PARENT in sys.argv:
        import threading

        threading.Thread(target=_end_with_parent, daemon=True).start()
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
