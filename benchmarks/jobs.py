"""Script jobs: how many tasks a second a coordinator takes onto its disk, and what that costs those who wait for small tasks meanwhile.

The tasks wait, for a machine that does not come: what they would cost where they run is not measured.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

from benchmarks.far import Commands
from benchmarks.figures import Metrics, percentile
from benchmarks.functions import noop
from benchmarks.systems import SLOTS, System

WARM_CALLS = 300
CALLS = 2000  # At rest, before and again after: what else the machine does changes meanwhile.
PACE_PER_S = 6000  # The bar is 5,000: so many come while the latency is measured.
JOB_TASKS = 600
PACED_SECONDS = 6.0
NEVER = {"never": "there"}
END_SECONDS = 30.0


def jobs(system: System, tasks: int) -> Metrics:
    """One job of so many tasks as fast as it goes; then round trips of a no-op at rest, and while another process submits at a steady pace."""
    metrics: Metrics = {}
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder, Commands() as commands:
        script = Path(folder, "wait.py")
        script.write_text("print(1)\n", encoding="utf-8")
        commands.join("--slots", str(SLOTS), environment={})
        with commands.client() as mesh:
            from gpumesh import accelerate

            call = accelerate(mesh)(noop).remote

            def round_trip() -> float:
                before = time.perf_counter()
                call(None).result()
                return time.perf_counter() - before

            for _ in range(WARM_CALLS):
                round_trip()
            idle = [round_trip() for _ in range(CALLS)]
            with subprocess.Popen(
                [sys.executable, "-m", "benchmarks.jobs", str(script)],
                env=commands.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as submitter:
                assert submitter.stdin is not None
                assert submitter.stdout is not None
                submitter.stdout.readline()  # It has connected.
                submitter.stdin.write("\n")
                submitter.stdin.flush()
                during = _while(lambda: submitter.poll() is None, round_trip)
                rate = float(submitter.stdout.readline())
            for job in mesh.jobs():
                mesh.cancel(job["id"])
            idle.extend(round_trip() for _ in range(CALLS))
            metrics["accepted_per_s"] = tasks / _submit(mesh, str(script), tasks)
        metrics["paced_per_s"] = rate
        for name, seconds in (("idle", idle), ("during", during)):
            metrics[f"{name}_p50_us"] = percentile(seconds, 50) * 1e6
            metrics[f"{name}_p99_us"] = percentile(seconds, 99) * 1e6
        metrics["latency_over_idle"] = metrics["during_p50_us"] / metrics["idle_p50_us"]
        metrics["tasks"] = tasks
    return metrics


def _while(goes_on: Callable[[], bool], act: Callable[[], float]) -> List[float]:
    seconds: List[float] = []
    end = time.perf_counter() + END_SECONDS
    while goes_on():
        seconds.append(act())
        if time.perf_counter() > end:
            raise AssertionError(f"the jobs did not come within {END_SECONDS:g} s")
    return seconds


def _payloads(count: int) -> List[Dict[str, Any]]:
    return [{"lr": 0.1, "epoch": number, "name": f"run {number}"} for number in range(count)]


def _submit(mesh: Any, script: str, count: int) -> float:
    payloads = _payloads(count)
    before = time.perf_counter()
    mesh.submit(script=script, payloads=payloads, tags=NEVER)
    return time.perf_counter() - before


def main(arguments: Sequence[str]) -> None:
    """The other process: jobs at a steady pace, once it is told to begin; prints the rate in tasks per second."""
    from gpumesh import GPUMesh

    (script,) = arguments
    with GPUMesh(fallback=False) as mesh:
        _submit(mesh, script, 1)
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        submitted = 0
        while time.perf_counter() - began < PACED_SECONDS:
            _submit(mesh, script, JOB_TASKS)
            submitted += JOB_TASKS
            time.sleep(max(0.0, began + submitted / PACE_PER_S - time.perf_counter()))
        print(submitted / (time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
