"""A model server: one model per GPU of the mesh, loaded once and asked often, behind an asyncio client that gathers requests into batches.

Each model is an actor: its constructor loads the weights, onto its own GPU where there is one, and its process keeps them until the server
ends. The client has many requests of one row each under way. Those that come within a few milliseconds are sent as one batch, to the model
with the fewest rows to do.

    python examples/model_server.py                     the mesh saved by `gpumesh serve` or `gpumesh join` on this machine
    GPUMESH_URL=http://host:8000 python examples/model_server.py     some other mesh, with GPUMESH_TOKEN set

Without GPUs there are two models on CPUs; without a mesh the same runs on this machine alone. The model is written in torch where the machine
that it lives on has that, else with scikit-learn, else with numpy.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any, List, Optional, Tuple

import numpy as np

from gpumesh import ActorGroup, GPUMesh

ROWS, CLASSES, FEATURES = 4000, 10, 64


def make_data(seed: int, count: int) -> Tuple[Any, Any]:
    """Rows in ten clouds, and which cloud each is from."""
    centres = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count)
    return (centres[labels] + random.normal(scale=0.8, size=(count, FEATURES))).astype(np.float32), labels


class Classifier:
    """A model that is expensive to load and cheap to ask. Lives in a process of its own.

    Args:
        backend: "torch", "sklearn" or "numpy"; "auto" for the first of these that is installed there.
    """

    def __init__(self, backend: str = "auto") -> None:
        rows, labels = make_data(1, ROWS)
        self.place = "cpu"
        for name in ("torch", "sklearn", "numpy") if backend == "auto" else (backend,):
            try:
                self._ask = getattr(self, f"_load_{name}")(rows, labels)
            except ImportError:
                continue
            self.backend = name
            return
        raise ImportError(f"{backend} is not installed here")

    def _load_torch(self, rows: Any, labels: Any) -> Any:
        import torch

        self.place = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(FEATURES, 128), torch.nn.ReLU(), torch.nn.Linear(128, CLASSES)).to(self.place)
        x, y = torch.as_tensor(rows, device=self.place), torch.as_tensor(labels, device=self.place)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(30):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()

        def ask(batch: Any) -> Any:
            with torch.inference_mode():
                return net(torch.as_tensor(batch, device=self.place)).argmax(dim=1).cpu().numpy()

        return ask

    def _load_sklearn(self, rows: Any, labels: Any) -> Any:
        from sklearn.linear_model import LogisticRegression

        return LogisticRegression(max_iter=200).fit(rows, labels).predict

    def _load_numpy(self, rows: Any, labels: Any) -> Any:
        centres = np.stack([rows[labels == label].mean(axis=0) for label in range(CLASSES)])
        return lambda batch: ((batch[:, None, :] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)

    def predict(self, batch: Any) -> Any:
        """The class of each row."""
        return self._ask(batch)

    def describe(self) -> str:
        """What it is made of, and where it is."""
        return f"{self.backend} on {self.place}"


class Batcher:
    """Gathers single requests into batches, and spreads these over the models.

    Args:
        models: The actors.
        size: Rows of a batch, at most.
        seconds: For how long the first row of a batch waits for others.
    """

    def __init__(self, models: ActorGroup, size: int, seconds: float) -> None:
        self.batches = 0
        self._models = list(models)
        self._under_way = [0] * len(self._models)  # Rows, at each.
        self._size = size
        self._seconds = seconds
        self._waiting: List[Tuple[Any, asyncio.Future[Any]]] = []
        self._timer: Optional[asyncio.TimerHandle] = None
        self._sent: set[asyncio.Task[None]] = set()

    async def predict(self, row: Any) -> int:
        """The class of one row."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((row, answer))
        if len(self._waiting) >= self._size:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self._seconds, self._send)
        return int(await answer)

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        if batch:
            task = asyncio.ensure_future(self._ask(batch))
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)

    async def _ask(self, batch: List[Tuple[Any, asyncio.Future[Any]]]) -> None:
        self.batches += 1
        model = min(range(len(self._models)), key=self._under_way.__getitem__)
        self._under_way[model] += len(batch)
        try:
            labels = await self._models[model].predict.remote(np.stack([row for row, _ in batch]))
        except Exception as error:  # noqa: BLE001 - whoever asked is told
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
        else:
            for (_, answer), label in zip(batch, labels):
                if not answer.done():
                    answer.set_result(label)
        finally:
            self._under_way[model] -= len(batch)


async def serve(models: ActorGroup, requests: int, users: int, size: int) -> None:
    """Let so many users ask one after the other, and tell how it went."""
    for place, what in enumerate(await models.describe.remote()):
        print(f"model {place}: {what}", flush=True)
    rows, labels = make_data(2, requests)
    batcher = Batcher(models, size, seconds=0.002)
    left = iter(range(requests))
    right = 0

    async def user() -> None:
        nonlocal right
        for number in left:
            answer = await batcher.predict(rows[number])
            right += answer == labels[number]

    began = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(users)))
    seconds = time.perf_counter() - began
    print(
        f"{requests} requests in {seconds:.2f} s: {requests / seconds:,.0f} a second, {requests / batcher.batches:.0f} rows a batch"
    )
    print(f"{right / requests:.1%} of the answers are right")


def main() -> None:
    """Read the arguments, load the models, serve."""
    parser = argparse.ArgumentParser(description="Serve a model from every GPU of a mesh.")
    parser.add_argument("--requests", type=int, default=5000, help="requests of one row each (default 5,000)")
    parser.add_argument("--users", type=int, default=200, help="requests under way at a time (default 200)")
    parser.add_argument("--batch", type=int, default=64, help="rows of a batch, at most (default 64)")
    parser.add_argument(
        "--backend", default="auto", choices=["auto", "torch", "sklearn", "numpy"], help="what the model is written in"
    )
    arguments = parser.parse_args()

    with GPUMesh() as mesh:
        gpus = sum(device["device"].startswith("cuda") and device["status"] != "unused" for device in mesh.devices())
        models = mesh.actors_group(Classifier, gpus or 2, arguments.backend, gpu=1 if gpus else None, max_restarts=3)
        asyncio.run(serve(models, arguments.requests, arguments.users, arguments.batch))


if __name__ == "__main__":
    main()
