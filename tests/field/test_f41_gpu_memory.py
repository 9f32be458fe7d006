"""F41: GPU memory is given away in bytes of what is measured free on each card: never more than there is, on cards large and small."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import NoSuitableWorkerError
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import CardReading, DeviceFacts
from gpumesh.protocol.messages import RunTasks, TasksFinished, WorkerReadings
from gpumesh.serialization.values import dumps
from tests.support.mesh_peer import MeshPeer
from tests.support.processes import until

GB = 10**9
ASK = 10 * GB
MEMORY = {"GPU-8": 8 * GB, "GPU-24": 24 * GB, "GPU-80": 80 * GB}
TOKEN = "secret"


class Site:
    """A real coordinator with a client; three machines with a card of 8, 24 and 80 GB, played by the test."""

    def __init__(self, ends: contextlib.ExitStack) -> None:
        coordinator = GPUMesh.start_coordinator(port=0, token=TOKEN)
        ends.callback(coordinator.stop)
        self.mesh = ends.enter_context(GPUMesh(coordinator.url, TOKEN, fallback=False))
        self.peers: Dict[str, MeshPeer] = {}
        port = int(coordinator.url.rpartition(":")[2])
        for key, memory in MEMORY.items():
            card = DeviceFacts("cuda", 0, f"Card {key}", memory, 100.0, uuid=key)
            peer = MeshPeer(port, TOKEN, worker=f"worker-{key}", devices=[card])
            self.peers[key] = ends.enter_context(peer)
        self.running: Dict[str, List[Tuple[int, int]]] = {key: [] for key in MEMORY}
        until(lambda: len(self.mesh.workers()) == 3, 10, what="three workers")

    def listen(self) -> None:
        """Hear what the workers are told to run, until nothing more comes."""
        news = True
        while news:
            news = False
            for key, peer in self.peers.items():
                for message in peer.quiet(0.2):
                    if type(message) is RunTasks:
                        assert tuple(message.cards) == (key,)
                        self.running[key].extend((task, attempt) for task, attempt, _ in message.tasks)
                        news = True

    def counts(self) -> List[int]:
        """Tasks at the worker of each card."""
        return [len(self.running[key]) for key in MEMORY]

    def free(self) -> List[int]:
        """What the coordinator thinks is free on each card."""
        found = {row["uuid"]: row["free"] for worker in self.mesh.workers() for row in worker["devices"]}
        return [found[key] for key in MEMORY]

    def end(self, key: str, count: int, value: Any = "done") -> None:
        """So many tasks on a card end."""
        ended, self.running[key] = self.running[key][:count], self.running[key][count:]
        results = [(task, attempt, int(Status.OK), dumps(value, what="a value"), 1.0) for task, attempt in ended]
        self.peers[key].send(TasksFinished(results))

    def measure(self, key: str, others: int) -> None:
        """Other programs now hold so much of a card."""
        self.peers[key].send(WorkerReadings([tuple(CardReading(key, others, others))]))


@pytest.fixture
def site() -> Iterator[Site]:
    with contextlib.ExitStack() as ends:
        yield Site(ends)


def job(number: int) -> int:
    return number


def test_tasks_in_parallel_never_ask_for_more_than_a_card_has(site: Site) -> None:
    stream = accelerate(site.mesh, gpu="gpu", memory="10GB", retries=0)(job).map(range(40))

    site.listen()

    assert all(count * ASK <= memory for count, memory in zip(site.counts(), MEMORY.values()))
    assert site.counts() == [0, 2, 7], "as many as fit beside their processes' own memory, and none on the small card"
    stream.cancel()


def test_what_another_program_holds_is_seen_before_the_next_task(site: Site) -> None:
    site.measure("GPU-80", 20 * GB)
    site.measure("GPU-24", 5 * GB)
    until(lambda: site.free() == [8 * GB, 19 * GB, 60 * GB], 10, what="the readings at the coordinator")

    stream = accelerate(site.mesh, gpu="gpu", memory="10GB", retries=0)(job).map(range(40))
    site.listen()

    assert site.counts() == [0, 1, 5]
    stream.cancel()


def test_a_program_that_comes_later_keeps_new_tasks_away_and_lets_them_in_when_it_goes(site: Site) -> None:
    stream = accelerate(site.mesh, gpu="gpu", memory="10GB", retries=0)(job).map(range(40))
    site.listen()
    assert site.counts() == [0, 2, 7]

    site.measure("GPU-80", 20 * GB)
    site.end("GPU-80", 2)
    site.listen()
    assert site.counts() == [0, 2, 5], "two have ended, and what they asked for is another program's now"

    site.measure("GPU-80", 0)
    site.listen()
    assert site.counts() == [0, 2, 7]
    stream.cancel()


def test_a_fraction_is_a_part_of_whichever_card_and_bytes_are_bytes(site: Site) -> None:
    halves = accelerate(site.mesh, gpu=0.5, retries=0)(job).map(range(20))
    site.listen()
    assert site.counts() == [2, 2, 2]
    halves.cancel()
    site.listen()
    for key in MEMORY:
        site.end(key, 2)

    bytes_each = accelerate(site.mesh, gpu=0.5, memory="10GB", retries=0)(job).map(range(20))
    site.listen()

    assert site.counts() == [0, 2, 2]
    bytes_each.cancel()


def test_more_than_any_card_has_is_refused_with_the_best_candidate(site: Site) -> None:
    future = accelerate(site.mesh, gpu="gpu", memory="100GB", placement_timeout=0.2)(job).remote(1)

    with pytest.raises(NoSuitableWorkerError, match=r"80 GB"):
        future.result(20)


def test_whole_and_shared_do_not_meet_on_a_card(site: Site) -> None:
    shared = accelerate(site.mesh, gpu="Card GPU-24", memory="10GB", retries=0)(job).remote(1)
    site.listen()
    assert site.counts() == [0, 1, 0]

    whole = accelerate(site.mesh, gpu="Card GPU-24", retries=0)(job).remote(2)
    site.listen()
    assert site.counts() == [0, 1, 0], "the whole card is not free"

    site.end("GPU-24", 1)
    assert shared.result(20) == "done"
    site.listen()
    assert site.counts() == [0, 1, 0]
    site.end("GPU-24", 1)
    assert whole.result(20) == "done"
