"""A mesh of commands whose parts take each other for other machines: real processes."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks import processes
from benchmarks.far import NO_SHARED_MEMORY, Far
from benchmarks.functions import increment
from gpumesh import accelerate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="part of the harness")


def test_clients_of_both_kinds_use_the_mesh_and_nothing_of_it_is_left() -> None:
    before = set(processes.descendants(os.getpid()))
    with Far(slots=1) as far:
        for is_far in (False, True):
            with far.client(is_far=is_far) as mesh:
                assert os.environ.get(NO_SHARED_MEMORY) == ("1" if is_far else None)
                assert accelerate(mesh)(increment).remote(1).result(20) == 2

    assert NO_SHARED_MEMORY not in os.environ
    assert set(processes.descendants(os.getpid())) <= before
