"""Values and arguments make the round trip, arrays stay writable, and what cannot travel is named."""

from __future__ import annotations

import functools
import logging
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, List

import numpy as np
import pandas as pd
import pytest

from gpumesh.config import INLINE_BUFFER_BYTES
from gpumesh.errors import SerializationError
from gpumesh.model.payloads import OutOfBand
from gpumesh.serialization import values


@dataclass
class Point:
    x: int
    y: int


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        2.5,
        "text",
        b"bytes",
        "a text that mentions __main__",
        (1, "a", None),
        [1, [2, [3]]],
        {"a": 1, "b": [1, 2]},
        {1, 2},
        Point(1, 2),
        bytearray(b"x"),
        range(3),
        1 + 2j,
    ],
)
def test_a_value_comes_back_equal_and_of_its_type(value: Any) -> None:
    back = values.loads(values.dumps(value))

    assert back == value
    assert type(back) is type(value)


def test_a_call_comes_back_as_its_arguments() -> None:
    for args, kwargs in [((), {}), ((1,), {}), ((1, "b", None, 2.0, b"c"), {}), ((), {"x": 1}), (([1],), {"y": {"z": (1,)}})]:
        assert values.loads_call(values.dumps_call(args, kwargs, what="train")) == (args, kwargs)


@pytest.mark.parametrize("count", [1, 10, INLINE_BUFFER_BYTES // 8 - 1, INLINE_BUFFER_BYTES // 8, 200_000])
def test_an_array_arrives_writable_and_private_at_every_size(count: int) -> None:
    array = np.arange(count, dtype=np.float64)
    payload = values.dumps(array)

    first, second = values.loads(payload), values.loads(payload)
    first += 1

    assert isinstance(payload, OutOfBand) == (array.nbytes >= INLINE_BUFFER_BYTES)
    assert second[0] == 0
    assert array[0] == 0


@pytest.mark.parametrize("count", [10, 200_000])
def test_a_payload_is_a_snapshot(count: int) -> None:
    array = np.zeros(count)
    payload = values.dumps([array])

    array[:] = 5

    assert values.loads(payload)[0].sum() == 0


@pytest.mark.parametrize("count", [10, 200_000])
def test_a_frame_arrives_writable(count: int) -> None:
    frame = pd.DataFrame({"a": np.zeros(count), "b": np.arange(count), "c": ["x"] * count})

    back = values.loads(values.dumps(frame))
    back.loc[0, "a"] = 5.0
    back["b"] += 1

    assert back["a"].iloc[0] == 5.0
    assert back["b"].iloc[0] == 1


def test_a_transposed_and_a_strided_array_come_back_equal() -> None:
    array = np.arange(90_000.0).reshape(300, 300)
    for view in (array.T, array[::2, ::3]):
        back = values.loads(values.dumps(view))
        assert np.array_equal(back, view)
        back[0, 0] = 1


def test_large_received_parts_that_are_bytes_are_copied_before_they_are_handed_out() -> None:
    payload = values.dumps(np.zeros(100_000))
    assert isinstance(payload, OutOfBand)

    received = OutOfBand([bytes(part) for part in payload.parts])
    back = values.loads(received)
    back[0] = 1

    assert values.loads(received)[0] == 0


def test_large_received_parts_that_are_private_already_are_used_in_place() -> None:
    payload = values.dumps(np.zeros(100_000))
    assert isinstance(payload, OutOfBand)
    buffer = bytearray(payload.parts[1])

    back = values.loads(OutOfBand([payload.parts[0], buffer]))
    back[0] = 1

    assert buffer[:8] == np.float64(1).tobytes()


def test_local_classes_lambdas_and_loggers_travel() -> None:
    class Local:
        def __init__(self) -> None:
            self.double: Callable[[int], int] = lambda x: 2 * x

    back = values.loads(values.dumps([Local(), logging.getLogger("some.name")]))

    assert back[0].double(4) == 8
    assert type(back[0]) is Local
    assert back[1] is logging.getLogger("some.name")


def _culprits(tmp_path: Path) -> List[Any]:
    lock = threading.Lock()
    return [
        (
            {"x": Holder(client=Holder(lock=lock))},
            "argument 'x' of train(): x.client.lock: a _thread.lock cannot be pickled; create it",
        ),
        ({"x": [1, {"k": (2, lock)}]}, "argument 'x' of train(): x[1]['k'][1]: a _thread.lock cannot be pickled"),
        ({"y": 1, "x": lock}, "argument 'x' of train(): a _thread.lock cannot be pickled"),
        ({"x": Slotted(lock)}, "argument 'x' of train(): x.inner: a _thread.lock cannot be pickled"),
        ({"x": threading.RLock()}, "argument 'x' of train(): a _thread.RLock cannot be pickled"),
        ({"x": functools.partial(print, lock)}, "argument 'x' of train(): x.args[0]: a _thread.lock cannot be pickled"),
        ({"x": lambda: lock}, "argument 'x' of train() captures 'lock' (closure): a _thread.lock cannot be pickled"),
        ({"x": [lambda: lock]}, "argument 'x' of train(): x[0] captures 'lock' (closure): a _thread.lock cannot be pickled"),
        ({"x": (i for i in ())}, "argument 'x' of train(): a generator cannot be pickled; return list(...) or pass list(...)"),
    ]


def test_what_cannot_travel_is_named_with_the_path_to_it(tmp_path: Path) -> None:
    for kwargs, text in _culprits(tmp_path):
        with pytest.raises(SerializationError) as caught:
            values.dumps_call((), kwargs, what="train")
        assert str(caught.value).startswith(text)


def test_positional_arguments_are_named_after_the_parameters() -> None:
    def train(rate: float, client: Any, *rest: Any) -> None: ...

    lock = threading.Lock()
    for args, name in [((1.0, lock), "argument 'client'"), ((1.0, 2, 3, lock), "argument 'rest[1]'")]:
        with pytest.raises(SerializationError, match=name.replace("[", r"\[").replace("]", r"\]") + r" of train\(\)"):
            values.dumps_call(args, {}, what="train", function=train)
    with pytest.raises(SerializationError, match=r"argument 2 of train\(\): a _thread.lock"):
        values.dumps_call((1.0, lock), {}, what="train")


def test_open_files_and_sockets_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with open(tmp_path / "file") as text, open(tmp_path / "file", "rb") as binary, socket.socket() as connection:
        for value in (text, binary, connection):
            with pytest.raises(SerializationError, match=r"^value\[0\]: a.* cannot be pickled; open it inside the task"):
                values.dumps([value])


def test_a_generator_as_result_is_refused_with_what_to_write_instead() -> None:
    with pytest.raises(SerializationError, match=r"^result of f\(\): a generator cannot be pickled; return list\(\.\.\.\)"):
        values.dumps((i for i in range(3)), what="result of f()")


def test_a_cycle_around_the_culprit_is_no_trap() -> None:
    holder = Holder(lock=threading.Lock())
    holder.itself = holder
    holder.more = [holder, {"holder": holder}]

    with pytest.raises(SerializationError, match=r"value.lock: a _thread.lock"):
        values.dumps(holder)


def test_nesting_too_deep_says_so() -> None:
    value: List[Any] = []
    for _ in range(100_000):
        value = [value]

    with pytest.raises(SerializationError, match="nested too deeply"):
        values.dumps(value)
    while value:  # Taken apart by hand: freeing it in one go is as deep.
        value = value[0]


def test_an_object_that_refuses_is_quoted() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise RuntimeError("not me, please")

    with pytest.raises(SerializationError, match=r"value\[0\]: a .*Stubborn cannot be pickled \(not me, please\)"):
        values.dumps([Stubborn()])


def test_a_value_whose_module_is_missing_names_it_and_what_to_do() -> None:
    payload = b"\x80\x05\x8c\x0eabsent_package\x8c\x05thing\x93."

    with pytest.raises(
        SerializationError, match="the result cannot be rebuilt here: module 'absent_package' is not installed here"
    ):
        values.loads(payload, what="the result")


def test_a_value_whose_class_has_moved_says_that_versions_differ() -> None:
    payload = b"\x80\x05\x8c\x04json\x8c\x0cNoSuchThing0\x93."

    with pytest.raises(SerializationError, match="NoSuchThing0.*bring both to the same version"):
        values.loads(payload)
