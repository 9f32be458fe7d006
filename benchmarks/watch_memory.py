"""The process behind `PeakMemory`: samples until its standard input ends, then prints the peak."""

from __future__ import annotations

import select
import sys

from benchmarks.processes import pss_bytes

INTERVAL_SECONDS = 0.1


def main() -> None:
    """Print one line after the first sample and the peak, in bytes, at the end."""
    pids = [int(argument) for argument in sys.argv[1:]]
    peak = sum(map(pss_bytes, pids))
    print("watching", flush=True)
    while not select.select([sys.stdin], [], [], INTERVAL_SECONDS)[0]:
        peak = max(peak, sum(map(pss_bytes, pids)))
    print(max(peak, sum(map(pss_bytes, pids))), flush=True)


if __name__ == "__main__":
    main()
