"""What every test of this folder asks in the end: nothing unpickled, nobody in, nothing but refusals in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator

import pytest

from tests.support.guarded import Guarded


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with Guarded(Path(tmp_path_factory.mktemp("guarded"))) as site:
        yield site


@pytest.fixture(autouse=True)
def _nobody_came_in(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "guarded" in request.fixturenames:
        site: Guarded = request.getfixturevalue("guarded")
        assert not site.sung.exists(), "somebody has unpickled what a stranger sent"
        assert site.log.about("Traceback") == []
        assert site.log.about(site.token) == []
        site.forgive()
