"""Direct calls: which device of this machine they run on, and what of torch goes there and comes back."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any, List

import pytest

from gpumesh import accelerate
from gpumesh.client import local_device
from gpumesh.client.local_device import best_device, call_here, device_named
from gpumesh.errors import NoSuitableWorkerError
from gpumesh.model.resources import DeviceFacts, WorkerFacts

CPU = DeviceFacts("cpu", 0, "EPYC", 64 * 10**9, 0.5)
OLD = DeviceFacts("cuda", 0, "NVIDIA GeForce GTX 1080", 8 * 10**9, 20.0, uuid="GPU-a")
FAST = DeviceFacts("cuda", 1, "NVIDIA GeForce RTX 3080", 10 * 10**9, 55.0, uuid="GPU-b")
BROKEN = DeviceFacts("cuda", 2, "NVIDIA A100", 80 * 10**9, 90.0, uuid="GPU-c", problem="fell off the bus")
RADEON = DeviceFacts("rocm", 0, "AMD Instinct MI100", 32 * 10**9, 60.0)
APPLE = DeviceFacts("mps", 0, "Apple M2", 16 * 10**9, 10.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says which devices this machine has."""
    known: List[WorkerFacts] = []
    monkeypatch.setattr(local_device, "_known", known)

    def has(*devices: DeviceFacts) -> None:
        known[:] = [WorkerFacts("box", devices=(CPU, *devices))]

    has()
    return has


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        ((), "cpu"),
        ((OLD,), "cuda:0"),
        ((OLD, FAST), "cuda:1"),
        ((OLD, FAST, BROKEN), "cuda:1"),
        ((BROKEN,), "cpu"),
        ((RADEON,), "cuda:0"),
        ((APPLE,), "mps"),
    ],
)
def test_the_best_device_is_the_fastest_that_can_be_used(machine: Any, devices: Any, name: str) -> None:
    machine(*devices)

    assert best_device() == name


@pytest.mark.parametrize(
    ("wanted", "name"),
    [("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("RTX 3080", "cuda:1"), ("gtx", "cuda:0"), ("cpu", "cpu"), ("gpu", "cuda:1")],
)
def test_a_name_stands_for_the_fastest_of_that_name(machine: Any, wanted: str, name: str) -> None:
    machine(OLD, FAST, BROKEN)

    assert device_named(wanted, function="train") == name


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("cuda:7", "has no cuda:7 device"),
        ("mps", "has no mps device"),
        ("A100", r"does not offer NVIDIA A100 \(fell off the bus\)"),
        ("RTX 9999", "has NVIDIA GeForce GTX 1080, NVIDIA GeForce RTX 3080, NVIDIA A100, not 'rtx 9999'"),
    ],
)
def test_a_device_that_is_not_here_is_refused(machine: Any, wanted: str, words: str) -> None:
    machine(OLD, FAST, BROKEN)

    with pytest.raises(NoSuitableWorkerError, match=f"train is bound to '{wanted}', but this machine {words}; call .remote"):
        device_named(wanted, function="train")


def test_a_bound_function_asks_once_and_then_runs_here(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def double(value: int) -> int:
        return value * 2

    with pytest.raises(NoSuitableWorkerError, match="has no GPU"):
        accelerate(double).to("cuda")(2)
    machine(OLD)
    bound = accelerate(double).to("cuda")
    assert bound(2) == 4
    machine()
    assert bound(3) == 6


def test_a_call_without_torch_looks_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_device, "local_facts", None)  # Calling it would raise.
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    assert accelerate(max)(2, 3) == 3


# --- with torch; the device is "meta", which any build has


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


class Model:
    """Makes modules that only say where they are sent: what goes to "meta" does not come back."""

    def __init__(self, torch: Any) -> None:
        self.module = torch.nn.Linear(2, 2)
        self.sent: List[str] = []
        self.module.to = lambda device: self.sent.append(str(device))


def on_meta(function: Any, *args: Any, **kwargs: Any) -> Any:
    place, is_bound = kwargs.pop("place", True), kwargs.pop("is_bound", False)
    return call_here(function, args, kwargs, device="meta", place=place, is_bound=is_bound)


def test_tensors_are_on_the_device_for_the_call_and_the_callers_stay(torch: Any) -> None:
    batch = {"x": [torch.ones(2)]}

    assert on_meta(lambda given, factor: (str(given["x"][0].device), factor), batch, factor=3) == ("meta", 3)
    assert batch["x"][0].device.type == "cpu"
    assert on_meta(lambda given: str(given.device), torch.ones(2), place=False) == "cpu"


def test_a_module_is_on_the_device_for_the_call_and_back_afterwards(torch: Any) -> None:
    model = Model(torch)

    assert on_meta(lambda given: list(model.sent), model.module) == ["meta"]
    assert model.sent == ["meta", "cpu"]

    def fail(given: Any) -> None:
        raise ValueError("in vain")

    with pytest.raises(ValueError, match="in vain"):
        on_meta(fail, model.module)
    assert model.sent == ["meta", "cpu"] * 2


def test_a_module_goes_back_when_the_last_of_several_threads_is_done(torch: Any) -> None:
    model = Model(torch)
    inside, leave = threading.Barrier(2), threading.Event()

    def long(given: Any) -> None:
        inside.wait(10)
        leave.wait(10)

    thread = threading.Thread(target=on_meta, args=(long, model.module))
    thread.start()
    inside.wait(10)
    assert on_meta(lambda given: list(model.sent), model.module)[0] == "meta"
    assert "cpu" not in model.sent
    leave.set()
    thread.join(10)

    assert model.sent[-1] == "cpu"
    assert model.sent.count("cpu") == 1
    assert not local_device._lent


def test_what_a_failed_move_has_moved_goes_back(torch: Any) -> None:
    first, second = Model(torch), torch.nn.Linear(2, 2)

    def refuse(device: Any) -> None:
        if str(device) == "meta":
            raise RuntimeError("out of memory")

    second.to = refuse
    with pytest.raises(RuntimeError, match="out of memory"):
        on_meta(lambda *given: None, first.module, second)
    assert first.sent == ["meta", "cpu"]
    assert not local_device._lent


def test_the_result_of_a_coroutine_comes_home_when_it_ends(torch: Any) -> None:
    model = Model(torch)

    async def later(given: Any, x: Any) -> Any:
        await asyncio.sleep(0)
        return [str(x.device), list(model.sent)]

    pending = on_meta(later, model.module, torch.ones(1))

    assert asyncio.run(pending) == ["meta", ["meta"]]
    assert model.sent == ["meta", "cpu"]


def test_results_of_a_call_on_the_cpu_are_untouched(torch: Any, machine: Any) -> None:
    value = {"x": torch.ones(2)}

    assert accelerate(lambda given: given)(value) is value
    assert accelerate(lambda given: given).to("cpu")(value) is value


def test_the_best_device_is_used_without_being_named(torch: Any, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(APPLE)
    monkeypatch.setattr(local_device, "torch_name", lambda device: "meta" if device is APPLE else "cpu")

    assert accelerate(lambda x: str(x.device))(torch.ones(2)) == "meta"
    assert accelerate(place=False)(lambda x: str(x.device))(torch.ones(2)) == "cpu"
