"""Fixtures of the field cases: real meshes of this machine's own processes."""

from __future__ import annotations

from typing import Iterator

import pytest

from gpumesh import GPUMesh


@pytest.fixture(scope="module")
def mesh() -> Iterator[GPUMesh]:
    """One worker with two slots."""
    with GPUMesh.local(workers=1, slots=2) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def mesh_of_two() -> Iterator[GPUMesh]:
    """Two workers with one slot each."""
    with GPUMesh.local(workers=2, slots=1) as mesh:
        yield mesh
