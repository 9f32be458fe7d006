"""Which workers have copies of what, as the coordinator knows it, and what follows: real processes with stores of their own."""

from __future__ import annotations

import time
from typing import Any, Dict, Iterator, List

import numpy as np
import pytest

from gpumesh import accelerate
from tests.support.machines import Machines, machines
from tests.support.processes import until

MB = 1_000_000


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    with machines() as site:
        monkeypatch.setenv("GPUMESH_NO_SHARED_MEMORY", "1")  # For the workers that join: they keep copies of their own.
        yield site


def size(array: Any) -> int:
    return int(array.nbytes)


def warm(seconds: float) -> float:
    """Bring numpy into a process: what that takes would count as the run time of the first task with an array."""
    time.sleep(seconds)
    return float(np.zeros(1)[0])


def made(count: int) -> Any:
    return np.ones(count)


def copies(site: Machines, nbytes: int) -> List[str]:
    """The workers that have the object of about this size."""
    rows: List[Dict[str, Any]] = site.mesh.objects()["objects"]
    [found] = [row for row in rows if nbytes <= row["bytes"] < nbytes * 1.01]
    return list(found["copies"])


def test_a_copy_that_made_room_for_another_counts_no_more(site: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMESH_OBJECT_MEMORY", "100MB")
    worker = site.join()
    measure = accelerate(site.mesh)(size)
    first, second = (site.mesh.put(np.zeros(nbytes, dtype=np.uint8)) for nbytes in (60 * MB, 70 * MB))
    assert measure.remote(first).result(30) == 60 * MB
    assert copies(site, 60 * MB) == [worker]
    assert measure.remote(second).result(30) == 70 * MB
    until(lambda: copies(site, 60 * MB) == [], 10, what="the first copy is known to be gone")
    assert copies(site, 70 * MB) == [worker]
    assert measure.remote(first).result(30) == 60 * MB


def test_tasks_follow_their_inputs_and_chains_stay(site: Machines) -> None:
    homes = {site.join(), site.join()}
    measure, make = accelerate(site.mesh)(size), accelerate(site.mesh)(made)
    prepared = [accelerate(site.mesh)(warm).remote(1.0) for _ in homes]
    assert [future.result(30) for future in prepared] == [0.0, 0.0]
    assert {future.worker for future in prepared} == homes
    refs = [site.mesh.put(np.zeros(nbytes, dtype=np.uint8)) for nbytes in (200 * MB, 210 * MB)]
    first = [measure.remote(ref) for ref in refs]
    assert [future.result(30) for future in first] == [200 * MB, 210 * MB]
    assert {future.worker for future in first} == homes
    for number in (1, 0, 0, 1, 0, 1):
        future = measure.remote(refs[number])
        future.result(30)
        assert future.worker == first[number].worker
    value = make.remote(20 * MB)
    end = measure.remote(value)
    assert end.result(30) == 160 * MB
    assert end.worker == value.worker
