"""F32: runners start with as many numeric threads as their share of the cores."""

from __future__ import annotations

import os
from typing import Dict, Optional

import pytest

from gpumesh import GPUMesh, accelerate

NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS")


def limits() -> Dict[str, Optional[str]]:
    return {name: os.environ.get(name) for name in NAMES}


def test_each_of_as_many_slots_as_cores_gets_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with GPUMesh.local(workers=1, slots=2) as mesh:
        share = max(1, mesh.workers()[0]["cores"] // 2)
        assert accelerate(mesh)(limits).remote().result(20) == dict.fromkeys(NAMES, str(share))


def test_the_users_own_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with GPUMesh.local(workers=1, slots=2) as mesh:
        assert accelerate(mesh)(limits).remote().result(20)["OMP_NUM_THREADS"] == "7"


def test_a_task_that_asks_for_all_cores_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with GPUMesh.local(workers=1, slots=2) as mesh:
        cores = mesh.workers()[0]["cores"]
        assert accelerate(mesh, cores=cores)(limits).remote().result(20)["OMP_NUM_THREADS"] == str(cores)
