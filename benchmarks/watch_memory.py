"""The process behind `PeakMemory`: samples until its standard input ends, then prints the peaks."""

from __future__ import annotations

import select
import sys
from typing import List, Tuple

from benchmarks.processes import own_pss_bytes, pss_bytes, shared_memory_bytes

INTERVAL_SECONDS = 0.1


def main() -> None:
    """Print one line after the first sample and the three peaks, in bytes, at the end."""
    pids = [int(argument) for argument in sys.argv[1:]]
    base = shared_memory_bytes()
    peaks = sample(pids, base)
    print("watching", flush=True)
    is_over = False
    while not is_over:
        is_over = bool(select.select([sys.stdin], [], [], INTERVAL_SECONDS)[0])
        peaks = tuple(map(max, peaks, sample(pids, base)))  # type: ignore[assignment]
    print(*peaks, flush=True)


def sample(pids: List[int], base: int) -> Tuple[int, int, int]:
    """Summed PSS; shared memory beyond `base`; both without counting a page twice."""
    shared = shared_memory_bytes() - base
    return sum(map(pss_bytes, pids)), shared, sum(map(own_pss_bytes, pids)) + shared


if __name__ == "__main__":
    main()
