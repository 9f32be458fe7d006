"""F06: CUDA tensors in results, and in exceptions, come back on the CPU with one note."""

from __future__ import annotations

from typing import Any

import pytest

from gpumesh.runtime.embedded import EmbeddedMesh
from tests.support.client import Client

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def on_cuda(count: int) -> Any:
    import torch

    return {"x": torch.ones(count, device="cuda"), "model": torch.nn.Linear(10, 10).cuda()}


def fail_with_cuda() -> None:
    import torch

    raise ValueError(torch.ones(3, device="cuda"))


@pytest.mark.parametrize("count", [3, 3_000_000])
def test_tensors_of_a_result_come_back_on_the_cpu_with_one_note(count: int, capfd: pytest.CaptureFixture[str]) -> None:
    with EmbeddedMesh(workers=1) as mesh, Client(mesh.url, mesh.token) as client:
        found = [client.remote(on_cuda, count).result(120) for _ in range(3)]
        for each in found:
            assert each["x"].device.type == "cpu"
            assert float(each["x"].sum()) == count
            assert each["model"].weight.device.type == "cpu"
    assert capfd.readouterr().err.count("come back on the CPU") == 1


def test_tensors_of_an_exception_come_back_on_the_cpu() -> None:
    with EmbeddedMesh(workers=1) as mesh, Client(mesh.url, mesh.token) as client:
        error = client.remote(fail_with_cuda).exception(120)
        assert isinstance(error, ValueError)
        assert error.args[0].device.type == "cpu"
