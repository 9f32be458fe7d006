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


def test_commands_end_with_an_error_too(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    script = tmp_path / "linger" / "linger.py"
    script.parent.mkdir()
    script.write_text("import time\ntime.sleep(1000)\n")
    hosts = make_hosts(3)
    with site_of_hosts(tmp_path, hosts) as site:
        site.join("one", hosts.two)
        where = site.environment("cut-off")
        words = ["submit", str(script), "--wait", "--reconnect-timeout", str(RECONNECT_SECONDS)]
        waiting = site.command(hosts[2], words, where)
        job = waiting.wait_for(r"^(\S+)$").group(1)
        waiting.wait_for("1 running")

        hosts.cut(hosts[2])

        asking = site.command(hosts[2], ["status", job], where)
        for command, bound in ((waiting, QUICK["SILENCE_SECONDS"] + RECONNECT_SECONDS + 5.0), (asking, 10.0)):
            assert command.wait(bound) == 1
            assert "Traceback" not in command.output
            assert f"{hosts.one.address}:{site.port}" in command.output.splitlines()[-1]
        assert f"gpumesh status {job} --wait" in waiting.output.splitlines()[-1]
