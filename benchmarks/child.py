"""One run: one system, one workload, in this process as the driver. Started by running.py, loads as little as it can."""

from __future__ import annotations

import json
import sys

from benchmarks.systems import PROFILES, create
from benchmarks.workloads import WORKLOADS, warm_up


def main() -> None:
    """Arguments: system, workload, size, and the file to write the figures to."""
    system_name, workload_name, size, path = sys.argv[1:]
    workload = WORKLOADS[workload_name]
    assert workload.run is not None
    system = create(system_name)
    if workload.needs_system:
        system.open(object_bytes=workload.object_bytes)
    try:
        if workload.needs_system and PROFILES[system_name].has_tasks:
            warm_up(system)
        metrics = workload.run(system, int(size))
        with open(path, "w", encoding="utf-8") as file:  # Before closing: a hang there does not take the figures along.
            json.dump(metrics, file)
    finally:
        if workload.needs_system:
            system.close()


if __name__ == "__main__":
    main()
