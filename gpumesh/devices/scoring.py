"""From measured speeds to the score that weighs a device. Pure: figures in, a figure out.

The score is linear in speed, so it serves as a weight: a device of 50 takes half the work of one of 100. 100 is the reference card, an
RTX 4090, by the geometric mean of its matrix product rate and its memory bandwidth. The reference figures are *measured* ones, for what
is scored is measured too: by its data sheet (165.2 TFLOPS in bfloat16, 82.6 in float32, 1008 GB/s) a real RTX 4090 would score 96 by one
type and 78 by the other.
"""

from __future__ import annotations

import math
from typing import Dict, Mapping

REFERENCE_NAME = "NVIDIA GeForce RTX 4090"
REFERENCE_SCORE = 100.0
REFERENCE_RATE_FLOPS: Dict[str, float] = {
    # Dense matrix products as people measured them on their own cards: bfloat16 and float16 (with float32 accumulation) 162 to 179 TFLOPS,
    # float32 46 to 58. Sources: public repositories zzc0721/torch-performance-test-data (database.md), mag-/gpu_benchmark,
    # chsasank/device-benchmarks and xzwgit/gpu-flops-bench.
    "bfloat16": 168e12,
    "float16": 168e12,
    "float32": 56e12,
}
REFERENCE_BANDWIDTH = (
    912e9  # Bytes/s of a copy, read and written ones counted (the sheet says 1008): chsasank/device-benchmarks.
)

GPU_SCORE_VARIABLE = "GPUMESH_GPU_SCORE"  # In the environment of a worker: what --gpu-score says.
MAX_SCORE = 1e6  # 10,000 reference cards: anything above is a slip of the keyboard.

# No figure of one device is believed above these, five times the fastest card of 2025 that people have measured (B200: 80 TFLOPS in
# float32, 1,745 in bfloat16, 8 TB/s on its sheet; stas00/ml-engineering): a clock that was stopped before the device had finished.
MAX_RATE_FLOPS: Dict[str, float] = {"float32": 400e12, "bfloat16": 9e15, "float16": 9e15}
MAX_BANDWIDTH = 40e12
PRIOR_SPREAD = 3.0  # A card whose measured score is off its name's by more is measured once more before it is believed.
AGREEMENT = 1.25  # Two measurements that differ by less tell the same: boost clocks and a power cap make up to 20 %.

# Where nothing was measured, one CPU core counts as this much of the reference: about a 3 GHz server core with 256-bit vectors.
PRIOR_CORE_RATE_FLOPS = 60e9  # float32.
PRIOR_CORE_BANDWIDTH = 10e9  # Bytes/s, until the memory controller is full:
PRIOR_MAX_BANDWIDTH = 80e9
PRIOR_LOOP_RATE = 25e6  # Iterations/s of the plain-Python loop of `benchmark` on that core (CPython 3.11).


def device_score(rate_flops: float, bandwidth: float, *, dtype: str = "float32") -> float:
    """The score of a device whose speed was measured.

    Args:
        rate_flops: Matrix product rate in FLOP/s.
        bandwidth: Bytes/s of a copy in the device's own memory, read and written ones counted.
        dtype: Element type of the products: "float32", "bfloat16" or "float16".

    Returns:
        `100 * sqrt(rate / reference rate * bandwidth / reference bandwidth)`.

    Raises:
        ValueError: A figure is zero, negative, infinite or not a number, or the type has no reference.
    """
    reference = REFERENCE_RATE_FLOPS.get(dtype)
    if reference is None:
        raise ValueError(f"no reference rate for {dtype!r}; measure one of {', '.join(sorted(REFERENCE_RATE_FLOPS))}")
    for what, figure in (("rate", rate_flops), ("bandwidth", bandwidth)):
        if not 0 < figure < math.inf:
            raise ValueError(f"a measured {what} must be a positive finite number, not {figure!r}; measure again")
    return check_score(REFERENCE_SCORE * math.sqrt(rate_flops / reference) * math.sqrt(bandwidth / REFERENCE_BANDWIDTH))


def score_rates(rates: Mapping[str, float], *, dtype: str = "float32") -> float:
    """The score that measured rates amount to.

    The score of record is by float32 on every device: it is what torch and everything else multiplies in unless told otherwise, what
    a CPU and a card that nobody has measured are scored by, and so the one type in which all of them compare. Half precision ranks
    cards differently (an A100 is 73 by float32 and 158 by bfloat16), so its rate travels with the score; and what a function really
    reached on a device replaces the score soon.

    Args:
        rates: In FLOP/s by element type, and "bandwidth" in bytes/s. All that this module knows are looked at, others are not.
        dtype: Whose rate counts.

    Raises:
        ValueError: The rate or "bandwidth" is missing, or a figure is no speed that a device can have; measure again.
    """
    for name, most in (*MAX_RATE_FLOPS.items(), ("bandwidth", MAX_BANDWIDTH)):
        if name not in rates and name not in (dtype, "bandwidth"):
            continue
        figure = rates.get(name, 0.0)
        if not 0 < figure <= most:
            raise ValueError(f"{name} was measured as {figure:.3g}, which is not between 0 and {most:.3g}; measure again")
    return device_score(rates[dtype], rates["bandwidth"], dtype=dtype)


def half_type(kind: str, capability: str) -> str:
    """The half precision that a device really has; "" where it is emulated or gains nothing.

    A card that only emulates bfloat16 says that it supports it, and is then 20 times slower (a T4 2.3 TFLOPS instead of 42).

    Args:
        kind: "cuda", "rocm" or "mps".
        capability: "8.9", "gfx942"; "" if unknown.
    """
    if kind == "cuda":
        major = int(capability.partition(".")[0] or 0)
        return "bfloat16" if major >= 8 else "float16" if major == 7 else ""
    if kind == "rocm":
        # Matrix units with bfloat16: CDNA (gfx908 on) and RDNA 3 on; older ones pack two float16 into one float32 lane.
        return "bfloat16" if capability.startswith(("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")) else "float16"
    return "float16" if kind == "mps" else ""


def is_off(score: float, prior: float) -> bool:
    """Whether a measured score is so far from what the device's name promises that it should be measured once more.

    Args:
        prior: What is known of devices of that name; 0: nothing.
    """
    return prior > 0 and not prior / PRIOR_SPREAD <= score <= prior * PRIOR_SPREAD


def settle(first: float, second: float, prior: float) -> float:
    """The score to believe after a first measurement that was off its prior and a second one.

    Two that agree are believed over any table, for cards are capped, shared and renamed. Of two that do not, the one nearer to the
    prior counts, and no further from it than `PRIOR_SPREAD`.
    """
    if max(first, second) <= AGREEMENT * min(first, second):
        return second
    nearer = min((first, second), key=lambda score: abs(math.log(score / prior)))
    return min(max(nearer, prior / PRIOR_SPREAD), prior * PRIOR_SPREAD)


def cpu_prior(cores: int, *, speed: float = 1.0) -> float:
    """A rough score for a CPU nobody has measured.

    Args:
        cores: Usable cores.
        speed: Of one core, 1 being a 3 GHz server core.
    """
    bandwidth = min(cores * PRIOR_CORE_BANDWIDTH, PRIOR_MAX_BANDWIDTH)
    return device_score(cores * speed * PRIOR_CORE_RATE_FLOPS, bandwidth)


def check_score(score: float) -> float:
    """The score itself, if it can serve as a weight.

    Raises:
        ValueError: It is zero, negative, infinite, not a number, or absurdly large.
    """
    is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
    if not (is_number and 0 < score <= MAX_SCORE):  # NaN fails every comparison.
        raise ValueError(f"a score must be a positive finite number up to {MAX_SCORE:g}, not {score!r}; 100 is an RTX 4090")
    return float(score)
