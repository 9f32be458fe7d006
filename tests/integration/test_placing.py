"""torch arguments are on the task's device when it starts, on real workers. The device is torch's "meta", named as the agent names one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate
from tests.support.hardware import card
from tests.support.site import Site

torch: Any = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def mesh() -> Iterator[GPUMesh]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUMESH_DEVICE", "meta")
        with GPUMesh.local(workers=1) as mesh:
            yield mesh


@pytest.fixture(scope="module")
def mesh_without_a_device() -> Iterator[GPUMesh]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GPUMESH_DEVICE", raising=False)
        with GPUMesh.local(workers=1) as mesh:
            yield mesh


def devices_of(batch: Dict[str, Any], model: Any, plain: Any = None) -> List[str]:
    return [str(batch["x"].device), str(model.weight.device), type(plain).__name__]


def test_tensors_and_modules_are_moved_before_the_call(mesh: GPUMesh) -> None:
    model = torch.nn.Linear(2, 2)
    function = accelerate(mesh)(devices_of)

    assert function.remote({"x": torch.ones(2)}, model=model, plain=7).result(60) == ["meta", "meta", "int"]
    assert function.map([({"x": torch.ones(2)}, model)] * 3).result(60) == [["meta", "meta", "NoneType"]] * 3
    assert model.weight.device.type == "cpu"


def test_large_tensors_and_references_are_moved_too(mesh: GPUMesh) -> None:
    batch, model = mesh.put({"x": torch.ones(300_000)}), torch.nn.Linear(2, 2)

    assert accelerate(mesh)(devices_of).remote(batch, model).result(60) == ["meta", "meta", "NoneType"]
    assert accelerate(mesh)(devices_of).remote({"x": torch.ones(300_000)}, model).result(60) == ["meta", "meta", "NoneType"]


def test_place_false_leaves_them_where_they_are(mesh: GPUMesh) -> None:
    function = accelerate(mesh, place=False)(devices_of)

    assert function.remote({"x": torch.ones(2)}, torch.nn.Linear(2, 2)).result(60) == ["cpu", "cpu", "NoneType"]
    assert function.options(place=True).remote({"x": torch.ones(2)}, torch.nn.Linear(2, 2)).result(60)[0] == "meta"


def test_a_task_without_a_gpu_runs_on_the_cpu(mesh_without_a_device: GPUMesh) -> None:
    function = accelerate(mesh_without_a_device)(devices_of)

    assert function.remote({"x": torch.ones(2)}, torch.nn.Linear(2, 2)).result(60) == ["cpu", "cpu", "NoneType"]


def test_a_runner_without_torch_values_never_loads_torch(mesh: GPUMesh) -> None:
    def is_loaded(value: Any) -> bool:
        import sys

        return "torch" in sys.modules

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUMESH_DEVICE", "meta")
        with GPUMesh.local(workers=1) as fresh:
            assert accelerate(fresh)(is_loaded).remote([1, 2]).result(60) is False


def test_results_are_values_as_ever(mesh: GPUMesh) -> None:
    def doubled(x: Any) -> Any:
        import torch

        return {"shape": tuple((x * 2).shape), "home": torch.ones(2)}

    found = accelerate(mesh)(doubled).remote(torch.ones(3)).result(60)

    assert found["shape"] == (3,)
    assert torch.equal(found["home"], torch.ones(2))


def fill(x: Any) -> None:
    import torch

    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {x.numel()} bytes.")


@pytest.mark.parametrize("retry_on", [(), (RuntimeError,)])
def test_a_full_device_keeps_the_type_of_its_error_and_says_what_was_asked(mesh: GPUMesh, retry_on: Any) -> None:
    function = accelerate(mesh, memory="1MB", retry_on=retry_on, retries=0)(fill)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        function.remote(torch.ones(5)).result(60)

    assert str(caught.value).startswith("CUDA out of memory. Tried to allocate 5 bytes.\ngpumesh: on ")
    assert "fill asked for 1 MB of memory; ask for more with options(" in str(caught.value)


def test_a_task_without_a_device_keeps_its_error_as_it_is(mesh_without_a_device: GPUMesh) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        accelerate(mesh_without_a_device)(fill).remote(torch.ones(5)).result(60)

    assert str(caught.value) == "CUDA out of memory. Tried to allocate 5 bytes."


def test_without_a_device_a_result_that_keeps_its_own_arrives_on_the_cpu(mesh: GPUMesh) -> None:
    def tensor() -> Any:
        import torch

        return torch.arange(3)

    assert torch.equal(accelerate(mesh, place=False)(tensor).remote().result(60), torch.arange(3))


def test_a_direct_call_inside_a_task_is_on_the_tasks_device(mesh: GPUMesh, mesh_without_a_device: GPUMesh) -> None:
    def outer() -> str:
        import torch

        from gpumesh import accelerate

        return str(accelerate(lambda x: str(x.device))(torch.ones(2)))

    assert accelerate(mesh)(outer).remote().result(60) == "meta"
    assert accelerate(mesh_without_a_device)(outer).remote().result(60) == "cpu"


def test_on_a_card_the_error_says_what_was_asked_of_it(tmp_path: Path) -> None:
    def full() -> None:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    with contextlib.ExitStack() as ends:
        site = Site(tmp_path, ends)
        site.join([card(0, "NVIDIA A100-SXM4-40GB", 40960)])
        with pytest.raises(torch.OutOfMemoryError, match=r"full asked for room on a GPU 'a100' with 4 GB; ask for more with"):
            accelerate(site.mesh, gpu="A100", memory="4GB")(full).remote().result(60)


class Model:
    """An actor that says where things are."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def devices(self, batch: Any) -> List[str]:
        return [str(self.model.weight.device), str(batch.device)]

    def tensor(self) -> Any:
        return self.model.weight

    def fill(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 bytes.")


def test_what_an_actor_gets_is_on_its_device(mesh: GPUMesh) -> None:
    actor = mesh.actor(Model).remote(torch.nn.Linear(2, 2))
    assert actor.devices.remote(torch.ones(2)).result(60) == ["meta", "meta"]
    assert actor.devices.remote(torch.ones(300_000)).result(60) == ["meta", "meta"]

    actor = mesh.actor(Model, memory="1MB").remote(torch.nn.Linear(2, 2))
    assert "fill asked for 1 MB of memory" in str(actor.fill.remote().exception(60))

    elsewhere = mesh.actor(Model, place=False).remote(torch.nn.Linear(2, 2))
    assert elsewhere.devices.remote(torch.ones(2)).result(60) == ["cpu", "cpu"]
    assert elsewhere.tensor.remote().result(60).shape == (2, 2)
