"""Settings of all tests: nothing of theirs is left in the user's cache."""

from __future__ import annotations

import os
from typing import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def code_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where processes that tests start unpack the code that is sent to them."""
    before = os.environ.get("GPUMESH_CODE")
    folder = str(tmp_path_factory.mktemp("code"))
    os.environ["GPUMESH_CODE"] = folder
    yield folder
    if before is None:
        del os.environ["GPUMESH_CODE"]
    else:
        os.environ["GPUMESH_CODE"] = before
