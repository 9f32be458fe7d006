"""From measured speeds to the score that weighs a device. Pure: figures in, a figure out.

The score is linear in speed, so it serves as a weight: a device of 50 takes half the work of one of 100. 100 is the reference card, an
RTX 4090, by the geometric mean of its matrix product rate and its memory bandwidth. The reference figures are *measured* ones, for what
is scored is measured too: by its data sheet (165.2 TFLOPS in bfloat16, 82.6 in float32, 1008 GB/s) a real RTX 4090 would score 96 by one
type and 78 by the other.
"""

from __future__ import annotations

import math
from typing import Dict

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

MAX_SCORE = 1e6  # 10,000 reference cards: anything above is a slip of the keyboard.

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
