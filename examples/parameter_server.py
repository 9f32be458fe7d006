"""A parameter server: several workers train one model at the same time, each on its own share of the data.

The server is an actor that keeps the weights. The workers are actors, too: each keeps its share of the data, and has the server's handle. It
fetches the weights, computes a gradient on some of its rows, pushes that, and fetches again without waiting for the others.

    python examples/parameter_server.py                 the mesh saved by `gpumesh serve` or `gpumesh join` on this machine
    GPUMESH_URL=http://host:8000 python examples/parameter_server.py     some other mesh, with GPUMESH_TOKEN set

Without a mesh the same runs on this machine alone. Needs numpy.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, Tuple

import numpy as np

from gpumesh import ActorHandle, GPUMesh

FEATURES = 50


class Server:
    """Keeps the weights, and takes gradients as they come."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.weights = np.zeros(FEATURES)
        self.updates = 0

    def pull(self) -> Any:
        """The weights as they are now."""
        return self.weights

    def push(self, gradient: Any) -> None:
        """One step against a gradient."""
        self.weights = self.weights - self.rate * gradient
        self.updates += 1

    def state(self) -> Tuple[Any, int]:
        """The weights, and how many gradients have come."""
        return self.weights, self.updates


class Worker:
    """Has a share of the rows, and makes gradients of them.

    Args:
        server: The actor with the weights.
        seed: Says which rows these are.
        rows: How many.
    """

    def __init__(self, server: ActorHandle, seed: int, rows: int) -> None:
        self.server = server
        self.random = np.random.default_rng(seed)
        self.x, self.y = make_rows(seed, rows)

    def train(self, steps: int) -> float:
        """So many gradients, each of the newest weights and 100 rows; returns the last loss."""
        loss = 0.0
        for _ in range(steps):
            weights = self.server.pull.remote().result()
            chosen = self.random.integers(0, len(self.x), 100)
            off = self.x[chosen] @ weights - self.y[chosen]
            loss = float((off**2).mean())
            self.server.push.remote(2 * self.x[chosen].T @ off / len(chosen))  # Nobody waits for that.
        self.server.ready()  # All that was pushed is there.
        return loss


def make_rows(seed: int, count: int) -> Tuple[Any, Any]:
    """Rows of a linear problem, with a little noise."""
    truth = np.random.default_rng(0).normal(size=FEATURES)
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, FEATURES))
    return x, x @ truth + random.normal(scale=0.1, size=count)


def main() -> None:
    """Read the arguments, train, tell how well it went."""
    parser = argparse.ArgumentParser(description="Train one model from several machines.")
    parser.add_argument("--workers", type=int, default=3, help="actors that make gradients (default 3)")
    parser.add_argument("--steps", type=int, default=200, help="gradients of each (default 200)")
    parser.add_argument("--rows", type=int, default=10_000, help="rows of each (default 10,000)")
    arguments = parser.parse_args()

    with GPUMesh() as mesh:
        server = mesh.actor(Server).remote(0.02)
        shares = [(server, seed + 1, arguments.rows) for seed in range(arguments.workers)]
        workers = mesh.actors_group(Worker, arguments.workers, members=shares)
        workers.ready(60)
        began = time.perf_counter()
        losses = workers.train.remote(arguments.steps).result()
        seconds = time.perf_counter() - began
        weights, updates = server.state.remote().result()

    x, y = make_rows(999, 2000)
    print("last losses of the workers: " + " ".join(f"{loss:.3f}" for loss in losses))
    print(f"{updates} gradients in {seconds:.2f} s: {updates / seconds:,.0f} a second")
    print(f"loss on rows that nobody has seen: {((x @ weights - y) ** 2).mean():.3f} (the noise alone is 0.010)")


if __name__ == "__main__":
    main()
