"""F06: CUDA tensors in results, and in exceptions, come back on the CPU with one note."""

from __future__ import annotations

from typing import Any

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.model.resources import DeviceFacts

pytestmark = pytest.mark.timeout(240)


def on_cuda(count: int) -> Any:
    import torch

    return {"x": torch.ones(count, device="cuda"), "model": torch.nn.Linear(10, 10).cuda()}


def fail_with_cuda() -> None:
    import torch

    raise ValueError(torch.ones(3, device="cuda"))


@pytest.mark.parametrize("count", [3, 3_000_000])
def test_tensors_of_a_result_come_back_on_the_cpu_with_one_note(
    mesh: GPUMesh, card: DeviceFacts, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    task = accelerate(mesh, gpu=1, name=f"make {count}")(on_cuda)

    for found in [task.remote(count).result(120) for _ in range(3)]:
        assert found["x"].device.type == "cpu"
        assert float(found["x"].sum()) == count
        assert found["model"].weight.device.type == "cpu"

    assert capfd.readouterr().err.count("come back on the CPU") <= 1  # The process may have told a test before this one.


def test_tensors_of_an_exception_come_back_on_the_cpu(mesh: GPUMesh, card: DeviceFacts) -> None:
    error = accelerate(mesh, gpu=1)(fail_with_cuda).remote().exception(120)

    assert isinstance(error, ValueError)
    assert error.args[0].device.type == "cpu"
