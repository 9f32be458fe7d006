"""Whatever a user hands over: it comes back equal, or the error names a path that leads to the culprit."""

from __future__ import annotations

import threading
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumesh.errors import RemoteTaskError, SerializationError
from gpumesh.serialization import exceptions, values

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=200), st.just("__main__")
)
HASHABLE = st.one_of(st.integers(), st.text(max_size=8), st.tuples(st.integers(), st.text(max_size=3)))
DATA = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(HASHABLE, inner, max_size=5),
        st.tuples(inner, inner),
        st.frozensets(HASHABLE, max_size=4),
    ),
    max_leaves=30,
)


@given(DATA)
def test_data_comes_back_equal(value: Any) -> None:
    assert values.loads(values.dumps(value)) == value


@given(st.lists(DATA, max_size=4).map(tuple), st.dictionaries(st.text(max_size=6), DATA, max_size=4))
def test_calls_come_back_equal(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
    assert values.loads_call(values.dumps_call(args, kwargs)) == (args, kwargs)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([0, 1, 100, 8191, 8192, 8193, 20_000]), min_size=1, max_size=5),
    st.sampled_from(["float64", "int8", "complex64"]),
    st.booleans(),
)
def test_arrays_come_back_equal_writable_and_private(counts: List[int], dtype: str, snapshot: bool) -> None:
    arrays = [np.arange(count).astype(dtype) for count in counts]
    payload = values.dumps({"arrays": arrays}, snapshot=snapshot)
    originals = [array.copy() for array in arrays]

    for _ in range(2 if snapshot else 1):
        for back, original in zip(values.loads(payload)["arrays"], originals):
            assert np.array_equal(back, original)
            back += np.ones(1, dtype)
    if snapshot:
        assert all(np.array_equal(array, original) for array, original in zip(arrays, originals))


STEPS = st.lists(st.one_of(st.integers(0, 3), st.text("abc", min_size=1, max_size=3), st.just("attribute")), max_size=8)


class Box:
    pass


@given(STEPS)
def test_the_named_path_leads_to_the_culprit(steps: List[Any]) -> None:
    lock = threading.Lock()
    value: Any = lock
    for step in reversed(steps):
        if step == "attribute":
            box = Box()
            box.attribute = value  # type: ignore[attr-defined]
            value = box
        elif isinstance(step, int):
            value = [None] * step + [value]
        else:
            value = {"other": 1, step: value}

    with pytest.raises(SerializationError) as caught:
        values.dumps_call((), {"x": value}, what="f")

    head, _, rest = str(caught.value).partition("argument 'x' of f(): ")
    path = rest.partition(": a ")[0] if steps else "x"
    assert head == ""
    assert eval(path, {"x": value}) is lock


class Awkward(Exception):
    def __init__(self, first: Any, *, second: Any) -> None:
        super().__init__(first)
        self.second = second


@given(DATA, DATA, st.sampled_from([Awkward, ValueError, OSError, KeyError, SystemExit]), st.booleans())
def test_exceptions_come_back_as_themselves(first: Any, second: Any, kind: Any, holds_a_lock: bool) -> None:
    error = kind(first, second=second) if kind is Awkward else kind(first, second)
    error.third = second
    if holds_a_lock:
        error.lock = threading.Lock()

    back = exceptions.load_exception(exceptions.dump_exception(error))

    assert not isinstance(back, RemoteTaskError)
    assert type(back) is type(error)
    assert back.args == error.args
    assert vars(back) == {name: value for name, value in vars(error).items() if name != "lock"}
