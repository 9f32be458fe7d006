"""A machine that joined with a worker-only token, on a host of its own: nothing is in shared memory there, and all goes through TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

import gpumesh
from gpumesh import GPUMesh, accelerate
from gpumesh.errors import AuthenticationError, ObjectLostError
from gpumesh.protocol.auth import worker_token
from gpumesh.serialization.refs import make_ref
from tests.support.hosts import Hosts
from tests.support.lan import TOKEN, Lan
from tests.support.processes import until


def total(array: Any) -> int:
    return int(array.sum())


def total_within(found: Any) -> int:
    return int(gpumesh.get(found["deep"][0]).sum())


def make(n: int) -> Any:
    return np.ones(n)


def submit() -> Any:
    return gpumesh.current_mesh().workers()


def steal(oid: int, nbytes: int) -> Any:
    """Ask, as any code in this process can, for an object that nobody has given to it."""
    return gpumesh.get(make_ref(oid, nbytes))


def test_it_works_with_what_it_is_given_and_gets_nothing_else(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    lan = Lan(make_hosts(2, memory="1g"), tmp_path)
    one, two = lan.hosts
    lan.serve(one, "--no-discovery")
    lender = lan.command(two, "join", lan.address(one), "--slots", "2", "--score", "1", GPUMESH_TOKEN=worker_token(TOKEN))
    lender.wait_for("works for")

    with one.inside(), GPUMesh("http://127.0.0.1:8000", token=TOKEN, fallback=False) as mesh:
        assert [worker["trust"] for worker in until(mesh.workers, 10, what="the worker")] == ["worker"]
        large = np.arange(1_000_000)
        ref, secret = mesh.put(large), mesh.put(np.full(1_000_000, 7))
        assert accelerate(mesh)(total).remote(ref).result(20) == large.sum()
        assert accelerate(mesh)(total_within).remote({"deep": [ref]}).result(20) == large.sum()
        assert accelerate(mesh)(total).remote(accelerate(mesh)(make).remote(1_000_000)).result(20) == 1_000_000
        with pytest.raises(AuthenticationError, match="worker-only token"):
            accelerate(mesh)(submit).remote().result(20)
        with pytest.raises(ObjectLostError, match="is not for this worker"):
            accelerate(mesh)(steal).remote(secret.oid, secret.nbytes).result(20)
        assert mesh.get(secret)[0] == 7
