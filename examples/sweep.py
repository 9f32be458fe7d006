"""A parameter sweep over every worker of a mesh, with each result printed as soon as it is there.

Where does the logistic map x -> r x (1 - x) turn chaotic? Each task iterates it for one r and measures how fast two neighbouring starts
drift apart (the Lyapunov exponent): below zero the orbit settles, above zero it is chaotic.

    python examples/sweep.py                            the mesh saved by `gpumesh serve` or `gpumesh join` on this machine
    GPUMESH_URL=http://host:8000 python examples/sweep.py     some other mesh, with GPUMESH_TOKEN set

Without a mesh the same runs on this machine alone.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter

from gpumesh import GPUMesh, accelerate


def lyapunov_exponent(r: float, steps: int) -> float:
    """Mean logarithm of the map's slope along an orbit, after 1,000 steps to settle."""
    x = 0.4
    for _ in range(1000):
        x = r * x * (1.0 - x)
    total = 0.0
    for _ in range(steps):
        x = r * x * (1.0 - x)
        total += math.log(abs(r * (1.0 - 2.0 * x)) + 1e-300)
    return total / steps


def main() -> None:
    """Read the arguments, sweep, print."""
    parser = argparse.ArgumentParser(description="Sweep the logistic map's parameter over a mesh.")
    parser.add_argument("--points", type=int, default=48, help="values of r between 3.4 and 4.0 (default 48)")
    parser.add_argument("--steps", type=int, default=500_000, help="steps of each orbit (default 500,000: about 0.1 s)")
    arguments = parser.parse_args()

    sweep = [{"r": 3.4 + 0.6 * i / max(1, arguments.points - 1), "steps": arguments.steps} for i in range(arguments.points)]
    done: Counter[str] = Counter()
    chaotic = 0
    with GPUMesh() as mesh:
        for future in accelerate(mesh)(lyapunov_exponent).map(sweep).as_completed():
            exponent = future.result()
            chaotic += exponent > 0
            done[future.worker] += 1
            print(
                f"r = {sweep[future.index]['r']:.4f}  exponent {exponent:+.4f}  {future.elapsed:.2f} s on {future.worker}",
                flush=True,
            )
        hosts = {worker["id"]: worker["hostname"] for worker in mesh.workers()}

    print(f"{chaotic} of {len(sweep)} values of r are chaotic")
    for worker, count in done.most_common():
        print(f"{count:4d} on {worker} ({hosts.get(worker, 'gone meanwhile')})")


if __name__ == "__main__":
    main()
