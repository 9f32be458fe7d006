"""Tasks on a real card: which cards they see, who runs beside whom, and what a card that is too small is called."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import NoSuitableWorkerError
from gpumesh.model.resources import DeviceFacts

pytestmark = pytest.mark.timeout(240)
WAIT = 120.0  # For a first task: torch's import and a context.


def see(x: int) -> Dict[str, Any]:
    """What a task sees of GPUs."""
    import torch

    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "pid": os.getpid(),
        "count": len(names),
        "uuids": [f"GPU-{getattr(each, 'uuid', '')}" for each in names],
        "sum": float(torch.ones(1000, device="cuda").sum()) if names else 0.0,
        "mask": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def span(seconds: float) -> List[float]:
    """When a task on the card began and ended."""
    import torch

    began = time.time()
    until = began + seconds
    block = torch.rand(256, 256, device="cuda")
    while time.time() < until:
        block = (block @ block).sigmoid()
    torch.cuda.synchronize()
    return [began, time.time(), os.getpid()]


def overlap(one: List[float], other: List[float]) -> float:
    return min(one[1], other[1]) - max(one[0], other[0])


def test_a_task_for_one_gpu_sees_just_that_one(mesh: GPUMesh, card: DeviceFacts) -> None:
    seen = accelerate(mesh, gpu=1)(see).remote(0).result(WAIT)

    assert seen["count"] == 1
    assert seen["sum"] == 1000.0
    if card.uuid.startswith("GPU-"):
        assert seen["mask"] == card.uuid
        assert seen["uuids"] in ([card.uuid], ["GPU-"])  # Old torch tells none.


def test_a_task_for_no_gpu_sees_none(mesh: GPUMesh, card: DeviceFacts) -> None:
    assert accelerate(mesh)(see).remote(0).result(WAIT)["count"] == 0


def test_the_card_is_found_by_kind_by_model_and_by_number(mesh: GPUMesh, card: DeviceFacts) -> None:
    model = " ".join(card.name.split()[-2:])

    for function in (
        accelerate(mesh, gpu=card.kind)(see),
        accelerate(mesh, gpu=model)(see),
        accelerate(mesh)(see).to(card.kind),
    ):
        assert function.remote(0).result(WAIT)["count"] == 1


def meet(folder: str, name: str) -> int:
    """Wait on the card until another task is there too; the process, or 0 if none came."""
    import torch

    block = torch.rand(256, 256, device="cuda")
    with open(os.path.join(folder, name), "w"):
        pass
    deadline = time.monotonic() + WAIT / 2
    while len(os.listdir(folder)) < 2:
        if time.monotonic() > deadline:
            return 0
        block = (block @ block).sigmoid()
        torch.cuda.synchronize()
        time.sleep(0.01)
    return os.getpid()


def test_two_halves_of_a_card_run_at_the_same_time_in_two_processes(mesh: GPUMesh, card: DeviceFacts, tmp_path: Path) -> None:
    half = accelerate(mesh, gpu=0.5)(meet)

    pids = [future.result(WAIT) for future in [half.remote(str(tmp_path), "one"), half.remote(str(tmp_path), "other")]]

    assert all(pids)
    assert len(set(pids)) == 2


def test_whole_cards_are_given_to_one_task_at_a_time(mesh: GPUMesh, card: DeviceFacts) -> None:
    whole = accelerate(mesh, gpu=1)(span)
    usable = sum(row["device"] != "cpu" and row["status"] != "unused" for row in mesh.devices())

    spans = [future.result(WAIT) for future in [whole.remote(1.0) for _ in range(usable + 1)]]

    assert min(overlap(one, other) for one in spans for other in spans if one is not other) <= 0


def test_more_memory_than_the_card_has_is_never_possible(mesh: GPUMesh, card: DeviceFacts) -> None:
    asked = accelerate(mesh, gpu=1, memory=card.memory * 2, placement_timeout=3)(see)

    with pytest.raises(NoSuitableWorkerError, match="GB"):
        asked.remote(0).result(30)


def test_a_model_that_is_not_there_is_never_possible(mesh: GPUMesh, card: DeviceFacts) -> None:
    with pytest.raises(NoSuitableWorkerError, match="(?i)voodoo"):
        accelerate(mesh, gpu="Voodoo 2", placement_timeout=3)(see).remote(0).result(30)


def test_torch_arguments_are_moved_there_and_results_come_back(mesh: GPUMesh, card: DeviceFacts) -> None:
    import torch

    def apply(model: Any, batch: Any) -> Any:
        assert batch.is_cuda
        assert next(model.parameters()).is_cuda
        return model(batch)

    model, batch = torch.nn.Linear(8, 4), torch.ones(3, 8)

    result = accelerate(mesh, gpu=1)(apply).remote(model, batch).result(WAIT)

    assert result.device.type == "cpu"
    assert torch.allclose(result, model(batch), atol=1e-2)
