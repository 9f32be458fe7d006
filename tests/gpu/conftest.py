"""Fixtures for tests on a real GPU: a mesh with one worker that lends it. Everything here skips, with the reason, where there is none."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Dict, Iterator, List

import pytest

from gpumesh import GPUMesh
from gpumesh.devices import probing
from gpumesh.devices.detect import gpus_may_exist
from gpumesh.model.resources import DeviceFacts
from gpumesh.runtime.embedded import WorkerHandle
from tests.support.processes import until


@functools.cache
def usable_cards() -> List[DeviceFacts]:
    """What a probe finds here: this process itself touches no driver, as F33 wants it of an agent."""
    if not gpus_may_exist():
        return []
    return [device for device in probing.detect().devices if device.kind in ("cuda", "rocm") and not device.problem]


@functools.cache
def obstacle() -> str:
    """Why nothing can be tested here; "" if it can."""
    if not usable_cards():
        return "no usable NVIDIA or AMD GPU here"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    answer, problem = probing._ask_to_measure(usable_cards()[0])
    if answer is None or "rates" not in answer:
        return f"torch cannot use the GPU: {problem or answer}"
    return ""


@pytest.fixture(scope="session")
def card() -> DeviceFacts:
    """The first usable card, with its score from its name."""
    why = obstacle()
    if why:
        pytest.skip(why)
    return usable_cards()[0]


@pytest.fixture(scope="module")
def worker_and_mesh(card: DeviceFacts) -> Iterator[Any]:
    """A worker with two slots that lends the cards, and a client of its mesh; its GPUs are known."""
    with GPUMesh.start_coordinator(port=0) as coordinator:
        with GPUMesh.add_worker(coordinator.url, token=coordinator.token, slots=2) as worker:
            with GPUMesh(coordinator.url, token=coordinator.token, fallback=False) as mesh:
                until(lambda: cards_of(mesh), 60, what="the worker's cards")
                yield worker, mesh


@pytest.fixture
def mesh(worker_and_mesh: Any) -> GPUMesh:
    """The client."""
    found: GPUMesh = worker_and_mesh[1]
    return found


@pytest.fixture
def worker(worker_and_mesh: Any) -> WorkerHandle:
    """The worker."""
    found: WorkerHandle = worker_and_mesh[0]
    return found


def cards_of(mesh: GPUMesh) -> List[Dict[str, Any]]:
    """The usable GPUs in `mesh.devices()`."""
    return [row for row in mesh.devices() if row["device"] != "cpu" and row["status"] != "unused"]
