"""Modules and tensors are on the card for a call, on the mesh and here; a card that is full says so, a broken process is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, Dict, List

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.model.resources import DeviceFacts

pytestmark = pytest.mark.timeout(240)
WAIT = 120.0


def step(model: Any, batch: Dict[str, Any]) -> Dict[str, Any]:
    """One step of training, and where everything was."""
    loss = model(batch["x"]).pow(2).mean()
    loss.backward()
    devices = {str(model.weight.device), str(batch["x"].device), str(model.weight.grad.device), str(loss.device)}
    return {"devices": devices, "gradient": model.weight.grad, "loss": loss.detach(), "model": model}


def test_training_happens_on_the_card_and_everything_comes_home(
    mesh: GPUMesh, card: DeviceFacts, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    model = torch.nn.Linear(4, 2)

    found = accelerate(mesh, gpu=1, name="training")(step).remote(model, {"x": torch.ones(3, 4)}).result(WAIT)

    assert found["devices"] == {"cuda:0"}
    for tensor in (found["gradient"], found["loss"], found["model"].weight):
        assert tensor.device.type == "cpu"
    assert model.weight.device.type == "cpu"
    assert model.weight.grad is None
    assert "come back on the CPU" not in capfd.readouterr().err  # We have put them there.


def test_a_map_places_each_item(mesh: GPUMesh, card: DeviceFacts) -> None:
    import torch

    def where(x: Any) -> Any:
        return str(x.device), x * 2

    found = accelerate(mesh, gpu=0.25)(where).map([torch.full((2,), float(number)) for number in range(8)]).result(WAIT)

    assert [place for place, _ in found] == ["cuda:0"] * 8
    assert [value.tolist() for _, value in found] == [[2.0 * number] * 2 for number in range(8)]


def test_place_false_moves_nothing(mesh: GPUMesh, card: DeviceFacts) -> None:
    import torch

    def where(x: Any) -> str:
        return str(x.device)

    assert accelerate(mesh, gpu=1, place=False)(where).remote(torch.ones(2)).result(WAIT) == "cpu"


def test_a_card_that_is_full_says_who_is_on_it_and_serves_the_next_task(mesh: GPUMesh, card: DeviceFacts) -> None:
    import torch

    def fill() -> int:
        import torch

        total = torch.cuda.mem_get_info()[1]
        blocks = [torch.empty(total // 4, dtype=torch.uint8, device="cuda") for _ in range(8)]
        return len(blocks)

    def free() -> int:
        import torch

        return int(torch.cuda.mem_get_info()[0])

    before = accelerate(mesh, gpu=1)(free).remote().result(WAIT)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        accelerate(mesh, gpu=1)(fill).remote().result(WAIT)
    after = accelerate(mesh, gpu=1)(free).remote().result(WAIT)

    text = str(caught.value)
    assert text.startswith("CUDA out of memory")
    assert f"gpumesh: on {os.uname().nodename}, process " in text
    assert "cuda:0 (" in text
    assert "fill asked for 1 GPU; ask for more with options(" in text
    assert " in tensors and " in text
    assert after > before - (1 << 30)


def test_what_a_kernel_does_wrong_fails_its_task_and_no_other(mesh: GPUMesh, card: DeviceFacts) -> None:
    def beyond() -> None:
        import torch

        torch.ones(3, device="cuda")[torch.tensor([7], device="cuda")]  # Noticed on the card, after the call has returned.

    def fine() -> float:
        import torch

        return float(torch.ones(3, device="cuda").sum())

    with pytest.raises(Exception, match="device-side assert"):
        accelerate(mesh, gpu=1)(beyond).remote().result(WAIT)

    assert [accelerate(mesh, gpu=1)(fine).remote().result(WAIT) for _ in range(3)] == [3.0] * 3


def run_here(program: str) -> List[str]:
    """Run a program that uses the card itself, which this process must not."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


DIRECT = """
import torch
from gpumesh import accelerate

@accelerate
def step(model, x):
    print(model.weight.device.type, x.device.type, torch.ones(1, device="cuda").device.index == x.device.index)
    model(x).sum().backward()
    return {"y": model(x), "model": model}

model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
weight = model.weight
found = step(model, x)
print(found["y"].device.type, found["model"] is model, model.weight.device.type, model.weight is weight, model.weight.grad.device.type, x.device.type)
print(step.to("cuda")(model, x)["y"].device.type)
print(accelerate(place=False)(lambda x: x.device.type)(x), accelerate(lambda x: x.device.type).to("cpu")(x.cuda()))
"""


def test_a_direct_call_runs_on_the_card_and_leaves_the_callers_things_where_they_were(card: DeviceFacts) -> None:
    assert run_here(DIRECT) == [
        "cuda cuda True",
        "cpu True cpu True cpu cpu",
        "cuda cuda True",
        "cpu",
        "cpu cpu",
    ]


KEPT = """
import torch
from gpumesh import GPUMesh, accelerate

if __name__ == "__main__":
    with GPUMesh({url!r}, token={token!r}, fallback=False) as mesh:
        make = accelerate(mesh, gpu=1, place=False)(lambda: __import__("torch").ones(3, device="cuda"))
        print(make.remote().result(100).device.type)
        print(mesh.auto_device().partition(":")[0])
"""


def test_a_result_that_is_not_to_be_placed_is_on_the_card_here_too(mesh: GPUMesh, card: DeviceFacts) -> None:
    session = mesh._open_session()

    assert run_here(KEPT.format(url=mesh.url, token=session._token)) == ["cuda", "cuda"]
