"""Objects on a real mesh of this machine's own processes: through shared memory, and over the connection as from another host."""

from __future__ import annotations

import gc
import time
from typing import Any, Callable, Dict, Iterator, List

import pytest

import gpumesh
from gpumesh import GPUMesh, ObjectRef, accelerate
from gpumesh.client.objects import NO_SHARED_MEMORY
from gpumesh.errors import MeshError, ObjectLostError

np = pytest.importorskip("numpy")


@pytest.fixture(scope="module", params=["shared memory", "connection"])
def mesh(request: pytest.FixtureRequest) -> Iterator[GPUMesh]:
    """One worker with two slots; with "connection" this process takes itself for one on another host."""
    with pytest.MonkeyPatch.context() as patch:
        opened = GPUMesh.local(workers=1, slots=2)
        if request.param == "connection":
            patch.setenv(NO_SHARED_MEMORY, "1")
        with opened:
            opened.get(opened.put(np.zeros(100_000)))
            yield opened


def objects(mesh: GPUMesh) -> List[Dict[str, Any]]:
    found: List[Dict[str, Any]] = mesh._open_session().query("objects")["objects"]
    return list(found)


def until(condition: Callable[[], bool], timeout: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def total(array: Any) -> float:
    return float(array.sum())


def make(size: int) -> Any:
    return np.arange(float(size))


def double(array: Any) -> Any:
    array *= 2
    return array


def look_inside(found: Any) -> Any:
    return type(found["ref"]).__name__, float(gpumesh.get(found["ref"]).sum())


def give_references(size: int) -> Any:
    return {"ref": gpumesh.put(np.ones(size)), "size": size}


def add(*values: Any) -> Any:
    return sum(values)


def fail() -> None:
    raise LookupError("on purpose")


def test_put_and_get(mesh: GPUMesh) -> None:
    array = np.arange(500_000.0)
    ref = mesh.put(array)
    array[0] = 77
    found = mesh.get(ref)
    assert isinstance(ref, ObjectRef)
    assert (found[0], found[-1], found.flags.writeable) == (0.0, 499_999.0, True)


def test_a_reference_as_argument_is_the_value(mesh: GPUMesh) -> None:
    ref = mesh.put(np.ones(500_000))
    function = accelerate(mesh)(total)
    assert function.remote(ref).result(20) == 500_000
    assert list(function.map([ref] * 5)) == [500_000.0] * 5
    assert accelerate(mesh)(add).remote(1, mesh.put(2), 3).result(20) == 6
    assert function.map([{"array": ref}]).result(20) == [500_000.0]


def test_no_task_sees_what_another_writes(mesh: GPUMesh) -> None:
    ref = mesh.put(np.ones(500_000))
    function = accelerate(mesh)(double)
    found = [future.result(20) for future in [function.remote(ref) for _ in range(4)]]
    assert [array[0] for array in found] == [2.0] * 4
    assert mesh.get(ref)[0] == 1.0


def test_a_reference_inside_a_container_stays_one(mesh: GPUMesh) -> None:
    ref = mesh.put(np.ones(500_000))
    assert accelerate(mesh)(look_inside).remote({"ref": ref}).result(20) == ("ObjectRef", 500_000.0)


def test_a_task_may_return_references(mesh: GPUMesh) -> None:
    found = accelerate(mesh)(give_references).remote(300_000).result(20)
    assert mesh.get(found["ref"]).sum() == 300_000
    assert accelerate(mesh)(total).remote(found["ref"]).result(20) == 300_000


def test_large_arguments_and_results(mesh: GPUMesh) -> None:
    result = accelerate(mesh)(double).remote(np.ones(1_000_000)).result(30)
    result[0] = 5
    assert (result[0], result[1], len(result)) == (5.0, 2.0, 1_000_000)


def test_large_items_and_results_of_a_map(mesh: GPUMesh) -> None:
    items = [np.full(200_000, float(number)) for number in range(20)]
    function = accelerate(mesh)(double)
    assert [array[0] for array in function.map(items)] == [2.0 * number for number in range(20)]
    assert [array[0] for array in function.map(iter(items))] == [2.0 * number for number in range(20)]
    assert sorted(future.result()[0] for future in function.map(items).as_completed()) == [2.0 * number for number in range(20)]


def test_futures_and_large_results_as_arguments(mesh: GPUMesh) -> None:
    array = accelerate(mesh)(make).remote(300_000)
    doubled = accelerate(mesh)(double).remote(array)
    assert accelerate(mesh)(total).remote(doubled).result(20) == np.arange(300_000.0).sum() * 2
    assert array.result(20)[1] == 1.0
    assert accelerate(mesh)(total).remote(array).result(20) == np.arange(300_000.0).sum()


def test_a_chain_is_as_long_as_it_is(mesh: GPUMesh) -> None:
    function = accelerate(mesh)(add)
    for _ in range(3):
        future = function.remote(0)
        for _ in range(200):
            future = function.remote(future, 1)
        assert future.result(60) == 200


def test_a_tree_of_futures(mesh: GPUMesh) -> None:
    function = accelerate(mesh)(add)
    level = [function.remote(number) for number in range(64)]
    while len(level) > 1:
        level = [function.remote(first, second) for first, second in zip(level[::2], level[1::2])]
    assert level[0].result(30) == sum(range(64))


def test_a_failure_runs_down_a_chain(mesh: GPUMesh) -> None:
    future = accelerate(mesh)(fail).remote()
    chain = [accelerate(mesh)(add).remote(future, 1)]
    for _ in range(50):
        chain.append(accelerate(mesh)(add).remote(chain[-1], 1))
    for each in (chain[-1], chain[0], accelerate(mesh)(add).remote(future)):
        with pytest.raises(LookupError, match="on purpose"):
            each.result(30)


def test_a_value_of_many_windows_and_slices(mesh: GPUMesh) -> None:
    array = np.zeros(16_000_000)  # 128 MB.
    array[::1000] = 1
    found = mesh.get(mesh.put(array))
    assert np.array_equal(found, array)


def test_a_deleted_object_is_gone(mesh: GPUMesh) -> None:
    ref = mesh.put(np.ones(300_000))
    ref.delete()
    with pytest.raises(ObjectLostError):
        mesh.get(ref)
    with pytest.raises((ObjectLostError, MeshError)):
        accelerate(mesh)(total).remote(ref).result(20)


def test_nothing_is_left_when_nobody_refers_to_it(mesh: GPUMesh) -> None:
    gc.collect()
    assert until(lambda: objects(mesh) == [])
    refs = [mesh.put(np.full(100_000, number)) for number in range(10)]
    nested = mesh.put([refs[0]])
    futures = [accelerate(mesh)(double).remote(ref) for ref in refs]
    results = [future.result(20) for future in futures]
    assert until(lambda: len(objects(mesh)) >= 11)
    oid = refs[0].oid
    del refs
    assert until(lambda: len(objects(mesh)) == 2)  # The nested one, and what it refers to.
    assert results[3][0] == 6
    del futures, results
    assert mesh.get(mesh.get(nested)[0])[0] == 0
    assert {row["id"] for row in objects(mesh)} == {f"{nested.oid:016x}", f"{oid:016x}"}
    del nested
    assert until(lambda: objects(mesh) == [])


def test_a_function_that_is_gone_at_once_has_kept_what_it_captured(mesh: GPUMesh) -> None:
    def start() -> List[Any]:
        ref = mesh.put(np.ones(300_000))
        function = accelerate(mesh)(lambda: total(gpumesh.get(ref)))
        return [function.remote() for _ in range(5)]

    futures = start()
    gc.collect()
    assert [future.result(20) for future in futures] == [300_000.0] * 5


def test_a_stream_keeps_what_its_function_captured(mesh: GPUMesh) -> None:
    def start() -> Any:
        ref = mesh.put(np.ones(300_000))
        return accelerate(mesh)(lambda number: total(gpumesh.get(ref)) + number).map(range(50))

    stream = start()
    gc.collect()
    assert stream.result(30) == [300_000.0 + number for number in range(50)]
