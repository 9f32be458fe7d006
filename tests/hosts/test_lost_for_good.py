"""F62: a driver is cut off from the coordinator for good, without a word; it notices, says so, and ends, whatever it waits in."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.client.waiting import as_completed
from gpumesh.errors import MeshUnavailableError
from tests.support import tasks
from tests.support.hosts import Hosts
from tests.support.site_of_hosts import QUICK, notice_silence_quickly, site_of_hosts

RECONNECT_SECONDS = 1.0


def in_result(mesh: GPUMesh, started: threading.Event) -> List[BaseException]:
    futures = submit(mesh, started)
    return [error for future in futures for error in [future.exception(30)] if error is not None]


def in_as_completed(mesh: GPUMesh, started: threading.Event) -> List[BaseException]:
    futures = submit(mesh, started)
    return [error for future in as_completed(futures, timeout=30) for error in [future.exception()] if error is not None]


def in_map(mesh: GPUMesh, started: threading.Event) -> List[BaseException]:
    stream = accelerate(mesh)(tasks.sleep).map([1000] * 10, return_exceptions=True)
    mesh.workers()
    started.set()
    return list(stream)


def submit(mesh: GPUMesh, started: threading.Event) -> List[Any]:
    sleep = accelerate(mesh)(tasks.sleep)
    futures = [sleep.remote(1000) for _ in range(10)]
    mesh.workers()
    started.set()
    return futures


WAYS: Dict[str, Callable[[GPUMesh, threading.Event], List[BaseException]]] = {
    "result": in_result,
    "as_completed": in_as_completed,
    "map": in_map,
}


def test_every_pending_future_fails_in_time(
    make_hosts: Callable[..., Hosts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notice_silence_quickly(monkeypatch)
    caplog.set_level(logging.WARNING, "gpumesh")
    hosts = make_hosts(3)
    with site_of_hosts(tmp_path, hosts) as site, hosts[2].inside():
        site.join("one", hosts.two)
        ended: Dict[str, Any] = {}

        def drive(way: str, started: threading.Event) -> None:
            with site.client(reconnect_timeout=RECONNECT_SECONDS) as mesh:
                errors = WAYS[way](mesh, started)
                ended[way] = (time.monotonic(), errors)

        drivers = []
        for way in WAYS:
            started = threading.Event()
            driver = threading.Thread(target=drive, args=(way, started), daemon=True)  # On the host of this thread.
            driver.start()
            drivers.append(driver)
            assert started.wait(20), way
        cut = time.monotonic()

        hosts.cut(hosts[2])

        for driver in drivers:
            driver.join(30)
        bound = QUICK["SILENCE_SECONDS"] + QUICK["HEARTBEAT_SECONDS"] + RECONNECT_SECONDS + 1.5
        assert set(ended) == set(WAYS)
        for way, (at, errors) in ended.items():
            assert at - cut < bound, way
            assert [type(error) for error in errors] == [MeshUnavailableError] * 10, way
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if "lost the coordinator" in text and "retrying for 1 s" in text]) == len(WAYS), said
