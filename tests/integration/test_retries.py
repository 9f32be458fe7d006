"""Exceptions that `retry_on` names are tried again, others are answers; `backoff` spaces the attempts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate


@pytest.fixture(scope="module")
def mesh() -> Iterator[GPUMesh]:
    with GPUMesh.local(workers=1, slots=2) as mesh:
        yield mesh


class Flaky(ConnectionError):
    """Of a service that is down for a moment."""


def fetch(log: str, failures: int) -> str:
    """Fails so many times; leaves the time of each attempt."""
    with open(log, "a") as file:
        file.write(f"{time.monotonic()}\n")
    if len(times(log)) <= failures:
        raise Flaky(f"attempt {len(times(log))}")
    return "fetched"


def times(log: str) -> List[float]:
    return [float(line) for line in Path(log).read_text().splitlines()]


def test_what_it_names_is_tried_again_with_growing_pauses(mesh: GPUMesh, tmp_path: Path) -> None:
    log = str(tmp_path / "log")

    assert accelerate(mesh, retry_on=ConnectionError, backoff=0.2)(fetch).remote(log, 3).result(20) == "fetched"

    starts = times(log)
    pauses = [after - before for before, after in zip(starts, starts[1:])]
    assert len(pauses) == 3
    assert all(pause >= least for pause, least in zip(pauses, (0.2, 0.4, 0.8)))


def test_in_the_end_its_own_exception_comes_back(mesh: GPUMesh, tmp_path: Path) -> None:
    log = str(tmp_path / "log")

    with pytest.raises(Flaky, match="attempt 3"):
        accelerate(mesh, retry_on=(OSError,), retries=2)(fetch).remote(log, 99).result(20)

    assert len(times(log)) == 3


@pytest.mark.parametrize("options", [{"retry_on": (ValueError,)}, {"retry_on": (OSError,), "retries": 0}, {}])
def test_anything_else_is_an_answer(mesh: GPUMesh, tmp_path: Path, options: dict[str, object]) -> None:
    log = str(tmp_path / "log")

    with pytest.raises(Flaky, match="attempt 1"):
        accelerate(mesh, **options)(fetch).remote(log, 99).result(20)  # type: ignore[call-overload]

    assert len(times(log)) == 1
