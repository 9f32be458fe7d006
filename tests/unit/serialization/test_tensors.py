"""torch tensors as values. Those that need torch are skipped where it is not installed."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from gpumesh.model.payloads import OutOfBand
from gpumesh.serialization import pickling, tensors, values


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu", "hip"])
def test_what_lies_on_a_device_leaves_it(kind: str) -> None:
    assert tensors.leaves_device(kind)


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_what_lies_on_none_stays(kind: str) -> None:
    assert not tensors.leaves_device(kind)


class _Moved:
    """A tensor as far as `reduce_tensor` looks at one before it has left its device."""

    requires_grad = False

    def __init__(self, there: str, here: Any) -> None:
        self.device = type("device", (), {"type": there})
        self._here = here

    def detach(self) -> Any:
        return self

    def cpu(self) -> Any:
        return self._here


class _Odd:
    """A tensor on the CPU that is more than its numbers."""

    device = type("device", (), {"type": "cpu"})
    layout = "torch.sparse_coo"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, ("odd",)


def test_a_tensor_on_a_device_is_pickled_as_its_copy_on_the_cpu_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(tensors, "on_moved", told.append)
    assert tensors.reduce_tensor(_Moved("cuda", _Odd())) == (str, ("odd",))
    assert told == ["cuda"]


@pytest.mark.parametrize("is_quick", [True, False])
def test_the_hook_is_in_both_ways_of_pickling(monkeypatch: pytest.MonkeyPatch, is_quick: bool) -> None:
    monkeypatch.setitem(tensors.reducers, _Moved, tensors.reduce_tensor)
    monkeypatch.setitem(values._modules, "torch", type("torch", (), {}))
    value = [_Moved("cuda", _Odd())] if is_quick else [_Moved("cuda", _Odd()), lambda: 1]
    data = values.dumps(value)
    assert isinstance(data, bytes)
    assert pickle.loads(data)[0] == "odd"
    assert pickle.loads(pickling.dump(value)[0])[0] == "odd"


def test_a_large_tensor_rides_beside_the_pickle(torch: Any) -> None:
    tensor = torch.arange(100_000, dtype=torch.float64).reshape(100, 1000)
    payload = values.dumps({"x": tensor})
    assert isinstance(payload, OutOfBand)
    assert len(payload.parts[0]) < 1000
    back = values.loads(payload)["x"]
    assert torch.equal(back, tensor)
    back += 1  # Writable.


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int64", "bool", "complex64", "uint8"])
def test_every_type_of_number(torch: Any, name: str) -> None:
    tensor = torch.ones((3, 4)).to(getattr(torch, name))
    back = values.loads(values.dumps(tensor))
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


def test_shapes_that_are_odd(torch: Any) -> None:
    for tensor in (torch.tensor(5.0), torch.empty((0, 3)), torch.ones((4, 6)).t(), torch.ones(8)[::2]):
        back = values.loads(values.dumps(tensor))
        assert back.shape == tensor.shape
        assert torch.equal(back, tensor)


def test_what_torch_knows_better_is_left_to_it(torch: Any) -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(values.loads(values.dumps(sparse)).to_dense(), torch.eye(3))
    conj = torch.tensor([1 + 2j]).conj()
    assert torch.equal(values.loads(values.dumps(conj)), conj)


def test_a_model_and_its_gradients(torch: Any) -> None:
    model = torch.nn.Linear(300, 300)
    payload = values.dumps(model)
    assert isinstance(payload, OutOfBand), "its weights ride beside the pickle"
    back = values.loads(payload)
    assert isinstance(back.weight, torch.nn.Parameter)
    assert back.weight.requires_grad
    assert torch.equal(back.weight, model.weight)
    leaf = torch.ones(3, requires_grad=True)
    assert values.loads(values.dumps(leaf)).requires_grad
    assert not values.loads(values.dumps(torch.ones(3))).requires_grad


class _There:
    """A tensor on a device, as `reduce_tensor` looks at one."""

    requires_grad = False

    def __init__(self, torch: Any, device: str) -> None:
        self.device = torch.device(device)
        self._here = torch.arange(3)

    def detach(self) -> Any:
        return self

    def cpu(self) -> Any:
        return self._here


def test_a_tensor_that_keeps_its_device_is_there_again_where_there_is_one(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: Any = []
    monkeypatch.setattr(tensors, "on_moved", told.append)
    monkeypatch.setattr(tensors, "keeps_device", True)

    make, facts = tensors.reduce_tensor(_There(torch, "cuda:1"))

    assert facts[1:] == ("torch.int64", (3,), False, "cuda:1")
    assert told == []
    assert make(*facts[:4], "meta").device.type == "meta"


def test_a_device_that_is_not_here_is_said_once_and_the_tensor_is_on_the_cpu(
    torch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr(tensors, "_missed", set())
    monkeypatch.setattr(tensors, "keeps_device", True)
    make, facts = tensors.reduce_tensor(_There(torch, "cuda:1"))

    found = [make(*facts) for _ in range(3)]

    assert all(torch.equal(each, torch.arange(3)) for each in found)
    (text,) = caplog.messages
    assert text.startswith("tensors that were on cuda:1 are on the CPU here, because of place=False and this: ")
