"""Settings of all tests: nothing of theirs is left in the user's folders or in the log's settings, and no owner's rules hold them up."""

from __future__ import annotations

import logging
import os
from typing import Iterator

import pytest

from tests.support import through_proxy


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


@pytest.fixture(scope="session", autouse=True)
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Neither the mesh that this user has saved nor what they lend of this machine is any of the tests' business."""
    before = os.environ.get("XDG_CONFIG_HOME")
    folder = str(tmp_path_factory.mktemp("config"))
    os.environ["XDG_CONFIG_HOME"] = folder
    yield folder
    if before is None:
        del os.environ["XDG_CONFIG_HOME"]
    else:
        os.environ["XDG_CONFIG_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where coordinators that tests start keep their jobs."""
    before = os.environ.get("XDG_DATA_HOME")
    folder = str(tmp_path_factory.mktemp("data"))
    os.environ["XDG_DATA_HOME"] = folder
    yield folder
    if before is None:
        del os.environ["XDG_DATA_HOME"]
    else:
        os.environ["XDG_DATA_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where coordinators that tests start keep their certificate."""
    before = os.environ.get("XDG_STATE_HOME")
    folder = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_STATE_HOME"] = folder
    yield folder
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


@pytest.fixture(autouse=True)
def log_settings() -> Iterator[None]:
    """Commands that run inside a test's process set up the log; the next test is to find it as it was."""
    logger = logging.getLogger("gpumesh")
    level, handlers = logger.level, logger.handlers[:]
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture(scope="session", autouse=through_proxy.is_wanted())
def reverse_proxy(tmp_path_factory: pytest.TempPathFactory, state_folder: str) -> Iterator[None]:
    """With MESH_TEST_PROXY=1: everything through a reverse proxy (`tests.support.through_proxy`)."""
    yield from through_proxy.through_a_proxy(tmp_path_factory.mktemp("proxy"))
