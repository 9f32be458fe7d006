"""`python -m benchmarks herd`: a hundred workers lose their coordinator at once, and come back when it does.

The agents are real, only that they start no runners: they share a few processes. The coordinator is `gpumesh serve`, killed and started again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Dict, Iterator, List, Mapping

BACK_SECONDS = 5.0  # The bars: all are back within this time ...
HANDSHAKES_PER_SECOND = 100  # ... and no second has more of them, per hundred workers.
GIVE_UP_SECONDS = 60.0
_AGENTS_PER_PROCESS = 25
_TOKEN = "GPUMESH_TOKEN"


def main(arguments: List[str]) -> int:
    """Measure and print one line of JSON; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks herd", description=__doc__)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--down", type=float, default=20.0, help="seconds for which there is no coordinator (default 20)")
    options = parser.parse_args(arguments)
    found = measure(options.workers, options.down)
    print(json.dumps(found), flush=True)
    return int(
        found["missing"] > 0 or found["last_back_seconds"] > BACK_SECONDS or found["most_per_second"] > HANDSHAKES_PER_SECOND
    )


def measure(workers: int, down_seconds: float) -> Dict[str, Any]:
    """When the workers are back, in seconds since the coordinator's return, and how many of them came in one second."""
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="benchmarks-"))
        environment = {**os.environ, _TOKEN: secrets.token_hex(32), "HOME": folder, "PYTHONUNBUFFERED": "1"}
        environment.update({f"XDG_{kind}_HOME": f"{folder}/{kind}" for kind in ("CONFIG", "DATA", "STATE", "CACHE")})
        port = _free_port()
        coordinator = _Coordinator(port, environment)
        ends.callback(coordinator.end)
        agents = ends.enter_context(_agents(workers, port, environment))
        first = _wait_for(agents, workers)
        time.sleep(1.0)  # All of them rest.

        coordinator.end()
        time.sleep(down_seconds)
        coordinator = _Coordinator(port, environment)
        ends.callback(coordinator.end)
        back = _wait_for(agents, workers)
    delays = sorted(at - coordinator.listens_at for at in back)
    return {
        "workers": workers,
        "down_seconds": down_seconds,
        "first_joining": len(first),
        "missing": workers - len(back),
        "median_back_seconds": delays[len(delays) // 2],
        "last_back_seconds": delays[-1],
        "most_per_second": most_in_one_second(delays),
    }


def most_in_one_second(times: List[float]) -> int:
    """The most of these sorted times that fall within any one second."""
    most = first = 0
    for last, at in enumerate(times):
        while times[first] <= at - 1.0:
            first += 1
        most = max(most, last - first + 1)
    return most


class _Coordinator:
    """`gpumesh serve`, once it listens."""

    def __init__(self, port: int, environment: Mapping[str, str]) -> None:
        words = [sys.executable, "-m", "gpumesh", "serve", "--host", "127.0.0.1", "--port", str(port), "--no-self-worker"]
        self._process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        while True:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError("gpumesh serve has ended")
            if "serving at" in line:
                break
        self.listens_at = time.monotonic()

    def end(self) -> None:
        """`kill -9`. Idempotent."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextlib.contextmanager
def _agents(workers: int, port: int, environment: Mapping[str, str]) -> Iterator[queue.Queue[float]]:
    """Agents in processes of their own; the times of their joinings, each time anew."""
    joinings: queue.Queue[float] = queue.Queue()
    processes: List[subprocess.Popen[str]] = []
    threads = []

    def read(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            joinings.put(float(line))

    try:
        for first in range(0, workers, _AGENTS_PER_PROCESS):
            count = min(_AGENTS_PER_PROCESS, workers - first)
            words = [sys.executable, "-m", "benchmarks.herd", str(port), str(count)]
            process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            processes.append(process)
            threads.append(threading.Thread(target=read, args=(process,), daemon=True))
            threads[-1].start()
        yield joinings
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for thread in threads:
            thread.join(5)
        for process in processes:
            assert process.stdout is not None
            process.stdout.close()


def _wait_for(joinings: queue.Queue[float], count: int) -> List[float]:
    """The times of so many joinings; fewer when no more come."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    times: List[float] = []
    while len(times) < count:
        try:
            times.append(joinings.get(timeout=max(0.0, deadline - time.monotonic())))
        except queue.Empty:
            if not times:
                raise RuntimeError(f"no worker joined within {GIVE_UP_SECONDS:g} s") from None
            break
    return times


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


async def _be_agents(port: int, count: int) -> None:
    """Join with so many workers and print when each has joined, each time."""
    from gpumesh.model.resources import WorkerFacts
    from gpumesh.network.address import Address
    from gpumesh.runtime.worker import WorkerAgent

    def joined(_: Dict[str, Any]) -> None:
        print(time.monotonic(), flush=True)

    kept = []
    runs = []
    for number in range(count):
        ours, theirs = socket.socketpair()  # Whoever should start runners never answers.
        kept.append(theirs)
        agent = WorkerAgent(
            address=Address("127.0.0.1", port),
            token=os.environ[_TOKEN],
            facts=WorkerFacts(hostname=f"herd-{number}", slots=1, cores=1, pid=os.getpid()),
            worker_id=secrets.token_hex(8),
            spawner=ours,
            on_joined=joined,
        )
        runs.append(agent.run())
    await asyncio.gather(*runs)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gpumesh.runtime.nodes import run_loop

    run_loop(_be_agents(int(sys.argv[1]), int(sys.argv[2])))
