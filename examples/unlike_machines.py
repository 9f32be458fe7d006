"""Four machines of very unlike speed, about which the mesh is told nothing: it finds out, and deals out the work accordingly.

This starts a mesh of its own: a coordinator in this process and four workers on this computer, each of which stands for a machine that
is 20, 10, 2 or 0.2 times as fast as the machine for which a task takes one second. Every worker says the same of itself. The sweep runs
twice: at first nobody knows how long a task takes anywhere; the second time the mesh remembers.

    python examples/unlike_machines.py
    python examples/unlike_machines.py --idempotent     a task may run in two places at once, so that nobody waits for the slowest machine

No mesh can be faster than the bound: all machines busy until the very end.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from collections import Counter
from typing import Dict, Iterator

from gpumesh import GPUMesh, accelerate

SPEEDS = (20.0, 10.0, 2.0, 0.2)


def settle(r: float) -> float:
    """Where the logistic map with this parameter is after a while: a second's work for a machine of speed 1."""
    x = 0.4
    for _ in range(1000):
        x = r * x * (1.0 - x)
    time.sleep(1.0 / float(os.environ["MACHINE_SPEED"]))  # On a real machine this would be computing.
    return x


@contextlib.contextmanager
def unlike_machines() -> Iterator[Dict[str, float]]:
    """A mesh of four workers, saved as this process's default; the true speed of each, by the worker's id."""
    with contextlib.ExitStack() as ends:
        coordinator = GPUMesh.start_coordinator(port=0)
        ends.callback(coordinator.stop)
        os.environ.update(GPUMESH_URL=coordinator.url, GPUMESH_TOKEN=coordinator.token)
        true_speeds = {}
        for speed in SPEEDS:
            os.environ["MACHINE_SPEED"] = str(speed)  # The worker's processes inherit it.
            worker = ends.enter_context(GPUMesh.add_worker(slots=1, score=1.0))
            true_speeds[worker.info["id"]] = speed
        yield true_speeds


def sweep(mesh: GPUMesh, true_speeds: Dict[str, float], *, points: int, idempotent: bool) -> None:
    """Run the sweep once; print who did how much of it, and how long it took."""
    parameters = [2.8 + 1.2 * i / points for i in range(points)]
    done: Counter[str] = Counter()
    seconds: Dict[str, float] = dict.fromkeys(true_speeds, 0.0)
    before = time.perf_counter()
    for future in accelerate(mesh, idempotent=idempotent)(settle).map(parameters).as_completed():
        assert math.isfinite(future.result())
        done[future.worker] += 1
        seconds[future.worker] += future.elapsed
    elapsed = time.perf_counter() - before

    print("  true speed   measured   tasks   busy for")
    for worker, speed in true_speeds.items():
        measured = f"{done[worker] / seconds[worker]:8.2f}" if done[worker] else "       -"
        print(f"  {speed:10g}   {measured}   {done[worker]:5d}   {seconds[worker]:6.2f} s")
    bound = points / sum(true_speeds.values())
    print(
        f"  {points} tasks in {elapsed:.2f} s; all machines busy to the end would take {bound:.2f} s, {elapsed / bound:.2f} x"
    )


def main() -> None:
    """Read the arguments, start the machines, sweep twice."""
    parser = argparse.ArgumentParser(description="Sweep twice over four unlike machines that the mesh knows nothing about.")
    parser.add_argument("--points", type=int, default=60, help="tasks in each sweep (default 60)")
    parser.add_argument("--idempotent", action="store_true", help="a task may run in two places at the same time")
    arguments = parser.parse_args()

    with unlike_machines() as true_speeds, GPUMesh() as mesh:
        deadline = time.monotonic() + 20.0
        while len(mesh.workers()) < len(SPEEDS):  # They are starting.
            if time.monotonic() > deadline:
                raise SystemExit("not all workers came up; what they said is above")
            time.sleep(0.05)
        for title in ("Nothing known:", "Once more:"):
            print(title, flush=True)
            sweep(mesh, true_speeds, points=arguments.points, idempotent=arguments.idempotent)


if __name__ == "__main__":
    main()
