"""torch values on their way to a device: everything in containers, nothing of the caller's changed. The device is torch's "meta"."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import pytest

from gpumesh.serialization.moving import MAX_DEPTH, Mover

torch: Any = pytest.importorskip("torch")


class Pair(NamedTuple):
    """A tuple with names."""

    left: Any
    right: Any


def moved(value: Any) -> Any:
    return Mover(torch, "meta").move(value)


def is_on_meta(tensor: Any) -> bool:
    return bool(tensor.device.type == "meta")


@pytest.mark.parametrize(
    ("value", "find"),
    [
        (lambda x: x, lambda value: value),
        (lambda x: [1, x], lambda value: value[1]),
        (lambda x: (1, x), lambda value: value[1]),
        (lambda x: {"a": [({"b": x},)]}, lambda value: value["a"][0][0]["b"]),
        (lambda x: Pair(1, x), lambda value: value.right),
        (lambda x: collections.OrderedDict(a=x), lambda value: value["a"]),
        (lambda x: collections.defaultdict(list, a=x), lambda value: value["a"]),
    ],
)
def test_a_tensor_is_moved_wherever_it_stands(value: Any, find: Any) -> None:
    tensor = torch.ones(3)
    given = value(tensor)

    made = moved(given)

    assert type(made) is type(given)
    assert is_on_meta(find(made))
    assert find(given) is tensor
    assert tensor.device.type == "cpu"


def test_what_holds_no_tensor_stays_the_same_object() -> None:
    for value in (17, "text", [1, [2, {"a": (3, None)}]], {"a": object()}, Pair(1, 2), list(range(1000)), torch.Size([1, 2])):
        assert moved(value) is value


def test_a_tensor_in_two_places_stays_one_tensor() -> None:
    tensor = torch.ones(3)

    first, second = moved(([tensor], {"a": tensor}))

    assert first[0] is second["a"]


def test_a_leaf_that_wants_a_gradient_stays_a_leaf() -> None:
    made = moved({"x": torch.ones(3, requires_grad=True), "p": torch.nn.Parameter(torch.ones(2)), "y": torch.ones(3) * 2})

    assert made["x"].is_leaf
    assert made["x"].requires_grad
    assert isinstance(made["p"], torch.nn.Parameter)
    assert not made["y"].requires_grad


def test_a_result_of_a_graph_keeps_its_graph() -> None:
    source = torch.ones(3, requires_grad=True)

    made = moved(source * 2)

    assert not made.is_leaf
    assert made.grad_fn is not None


def test_a_module_is_moved_itself_and_may_be_put_back_with_its_parameters_the_same_objects() -> None:
    module = torch.nn.Linear(3, 3).double()
    weight, numbers = module.weight, module.weight.detach().clone()
    mover = Mover(torch, "cpu")
    assert mover.move([module])[0] is module
    assert mover.moved == 0
    with torch.device("meta"):
        elsewhere = torch.nn.Linear(3, 3)
    assert Mover(torch, "cpu").move(elsewhere) is elsewhere
    assert is_on_meta(elsewhere.weight)

    calls: Any = []
    module.to = calls.append
    mover = Mover(torch, "meta")
    assert mover.move({"m": module})["m"] is module
    mover.move_back()

    assert calls == [torch.device("meta"), torch.device("cpu")]
    assert module.weight is weight
    assert torch.equal(module.weight, numbers)


def test_a_module_spread_over_devices_is_left_alone() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))

    assert moved(module) is module

    assert module[0].weight.device.type == "cpu"


def test_a_packed_sequence_moves_as_it_wants_to() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])

    made = moved([packed])[0]

    assert type(made) is type(packed)
    assert is_on_meta(made.data)
    assert made.batch_sizes.device.type == "cpu"


def test_what_holds_itself_and_what_is_nested_very_deeply_ends_the_walk() -> None:
    loop: Any = [torch.ones(1)]
    loop.append(loop)
    deep: Any = torch.ones(1)
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]

    made = moved(loop)

    assert is_on_meta(made[0])
    assert moved(deep) is deep
    assert is_on_meta(_innermost(moved(deep[0])))


def _innermost(value: Any) -> Any:
    while isinstance(value, list):
        (value,) = value
    return value
