"""F11: a large object captured by a function travels once, and somebody says so."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from gpumesh import GPUMesh, accelerate


def test_a_captured_array_is_sent_once_and_warned_about(mesh: GPUMesh, caplog: pytest.LogCaptureFixture) -> None:
    bulk = np.ones(2_500_000)  # 20 MB

    def use(i: int) -> float:
        return float(bulk[i])

    with caplog.at_level(logging.WARNING, logger="gpumesh"):
        results = list(accelerate(mesh)(use).map(range(300)))

    assert results == [1.0] * 300
    warnings = [record.getMessage() for record in caplog.records if "bulk" in record.getMessage()]
    assert len(warnings) == 1, warnings
    assert "20" in warnings[0]


def test_captured_bulk_over_the_cap_is_refused(mesh: GPUMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpumesh.errors import SerializationError
    from gpumesh.serialization import functions

    monkeypatch.setattr(functions, "MAX_FUNCTION_BYTES", 1_000_000)
    too_much = bytes(3_000_000)

    def use() -> int:
        return len(too_much)

    with pytest.raises(SerializationError, match="too_much"):
        accelerate(mesh)(use).remote()


def test_the_suggested_way_stores_it_once(mesh: GPUMesh) -> None:
    ref = mesh.put(np.ones(2_500_000))

    def use(bulk: np.ndarray, i: int) -> float:  # type: ignore[type-arg]
        return float(bulk[i])

    assert list(accelerate(mesh)(use).map([(ref, i) for i in range(300)])) == [1.0] * 300
    found = mesh._open_session().query("objects")["objects"]
    assert [row["bytes"] for row in found if row["bytes"] >= 20_000_000] == [ref.nbytes]


def test_a_reference_may_be_captured(mesh: GPUMesh) -> None:
    ref = mesh.put(np.ones(2_500_000))

    def use(i: int) -> float:
        import gpumesh

        return float(gpumesh.get(ref)[i])

    assert list(accelerate(mesh)(use).map(range(50))) == [1.0] * 50
