"""F07: code that changes its arrays in place works on the mesh as it does here, at every size, and nobody else sees the change."""

from __future__ import annotations

from typing import Any

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.client.objects import NO_SHARED_MEMORY

np = pytest.importorskip("numpy")

SIZES = [10, 125, 8_191, 8_193, 12_500_000]
"""Float64 items: 80 bytes, 1 kB, both sides of what travels in a message, 100 MB."""


def add_one(array: Any) -> Any:
    array += 1
    return array


def add_one_to_all(arrays: Any) -> Any:
    for array in arrays["list"]:
        array += 1
    return arrays


@pytest.fixture(params=["shared memory", "connection"])
def client(request: pytest.FixtureRequest, mesh: GPUMesh, monkeypatch: pytest.MonkeyPatch) -> GPUMesh:
    """The mesh as a client on its host sees it, and as one elsewhere does."""
    if request.param == "connection":
        monkeypatch.setenv(NO_SHARED_MEMORY, "1")
    mesh._open_session().objects()._shared_on = None  # So that it looks again.
    return mesh


@pytest.mark.parametrize("size", SIZES)
def test_as_argument_as_reference_and_as_result(client: GPUMesh, size: int) -> None:
    array = np.zeros(size)
    ref = client.put(array)
    function = accelerate(client)(add_one)

    for argument in (array, ref):
        result = function.remote(argument).result(60)
        assert (result[0], result[-1], len(result)) == (1.0, 1.0, size)
        result[0] = 5
        result += 1
        assert (result[0], result[1]) == (6.0, 2.0)
    assert array[0] == 0.0
    found = client.get(ref)
    assert found[0] == 0.0
    found[0] = 5
    assert client.get(ref)[0] == 0.0


@pytest.mark.parametrize("size", [125, 12_500])
def test_no_task_sees_what_another_does_to_the_same_reference(client: GPUMesh, size: int) -> None:
    ref = client.put(np.zeros(size))
    function = accelerate(client)(add_one)
    results = [future.result(60) for future in [function.remote(ref) for _ in range(20)]]
    assert {float(array[0]) for array in results} == {1.0}


@pytest.mark.parametrize("size", [125, 12_500])
def test_a_result_that_feeds_several_calls_is_each_ones_own(client: GPUMesh, size: int) -> None:
    function = accelerate(client)(add_one)
    first = function.remote(np.zeros(size))
    others = [function.remote(first) for _ in range(5)]
    assert [float(other.result(60)[0]) for other in others] == [2.0] * 5
    assert first.result(60)[0] == 1.0


@pytest.mark.parametrize("size", [125, 12_500])
def test_inside_containers(client: GPUMesh, size: int) -> None:
    found = accelerate(client)(add_one_to_all).remote({"list": [np.zeros(size), np.ones(size)]}).result(60)
    first, second = found["list"]
    first += 1
    second += 1
    assert (first[0], second[0]) == (2.0, 3.0)


@pytest.mark.parametrize("size", [125, 125_000])
def test_frames(client: GPUMesh, size: int) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"a": np.zeros(size), "b": np.arange(size), "c": ["text"] * size})

    def change(frame: Any) -> Any:
        frame["a"] += 1
        frame.loc[0, "b"] = 7
        return frame

    function = accelerate(client)(change)
    for argument in (frame, client.put(frame)):
        result = function.remote(argument).result(60)
        result.loc[1, "a"] = 9
        assert (result["a"].iloc[0], result["a"].iloc[1], result["b"].iloc[0], len(result)) == (1.0, 9.0, 7, size)
    assert frame["a"].iloc[0] == 0.0


@pytest.mark.parametrize("size", [1_000, 1_000_000])
def test_what_was_read_only_stays_so(client: GPUMesh, size: int) -> None:
    array = np.zeros(size)
    array.flags.writeable = False
    ref = client.put(array)
    assert not client.get(ref).flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        accelerate(client)(add_one).remote(ref).result(60)


@pytest.mark.parametrize("size", [1_000, 1_000_000])
def test_a_bytearray_and_a_memory_of_its_own(client: GPUMesh, size: int) -> None:
    def change(data: bytearray) -> bytearray:
        data[0] = 7
        data.extend(b"more")
        return data

    data = bytearray(size)
    result = accelerate(client)(change).remote(client.put(data)).result(60)
    assert (result[0], len(result), data[0]) == (7, size + 4, 0)
