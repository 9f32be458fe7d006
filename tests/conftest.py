"""Settings of all tests: nothing of theirs is left in the user's folders or in the log's settings, and no owner's rules hold them up."""

from __future__ import annotations

import logging
from typing import Iterator

import pytest

from tests.support import through_proxy

FOLDERS = {
    "GPUMESH_CODE": "code",  # Where processes that tests start unpack the code that is sent to them.
    "XDG_CONFIG_HOME": "config",  # Neither the mesh that this user has saved nor what they lend of this machine is the tests' business.
    "XDG_DATA_HOME": "data",  # Where coordinators keep their jobs.
    "XDG_STATE_HOME": "state",  # Where they keep their certificate.
}


@pytest.fixture(scope="session", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Folders of the tests' own, for this process and all that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, name in FOLDERS.items():
            patch.setenv(variable, str(tmp_path_factory.mktemp(name)))
        yield


@pytest.fixture(autouse=True)
def log_settings() -> Iterator[None]:
    """Commands that run inside a test's process set up the log; the next test is to find it as it was."""
    logger = logging.getLogger("gpumesh")
    level, handlers = logger.level, logger.handlers[:]
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture(scope="session", autouse=through_proxy.is_wanted())
def reverse_proxy(tmp_path_factory: pytest.TempPathFactory, folders: None) -> Iterator[None]:
    """With MESH_TEST_PROXY=1: everything through a reverse proxy (`tests.support.through_proxy`)."""
    yield from through_proxy.through_a_proxy(tmp_path_factory.mktemp("proxy"))
