"""F52: values that fill a slow link for longer than silence may last do not make anybody look dead, and small tasks keep going."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Iterator

import pytest

from gpumesh import accelerate
from tests.support import tasks
from tests.support.hosts import Hosts
from tests.support.site_of_hosts import QUICK, Site, notice_silence_quickly, site_of_hosts

RATE = "40mbit"  # 5 MB/s
BYTES = 14_000_000  # 2.8 s: longer than the silence.


@pytest.fixture
def site(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    notice_silence_quickly(monkeypatch)
    with site_of_hosts(tmp_path, hosts) as made:
        made.join("one", hosts.two, slots=2)
        hosts.limit(hosts.two, RATE)
        yield made


def make(size: int, folder: str) -> bytes:
    """A value that does not get smaller on its way; leaves a mark."""
    tasks.count_then_sleep(folder, "make", 0.0)
    return b"\x5a" * size


def measure(value: bytes, folder: str) -> int:
    """Its size; leaves a mark."""
    tasks.count_then_sleep(folder, "measure", 0.0)
    return len(value)


@pytest.mark.parametrize("way", ["result", "argument"])
def test_a_value_of_several_seconds_is_no_silence(site: Site, hosts: Hosts, tmp_path: Path, way: str) -> None:
    folder = tmp_path / "starts"
    folder.mkdir()
    with site.client(hosts.one) as mesh:
        before = site.ident(mesh, "one")
        small = accelerate(mesh)(tasks.noop)
        small.remote(0).result(20)
        started = time.monotonic()

        if way == "result":
            future = accelerate(mesh)(make).remote(BYTES, str(folder))
        else:
            future = accelerate(mesh)(measure).remote(b"\x5a" * BYTES, str(folder))
        waits = []
        while not future.done():
            asked = time.monotonic()
            assert small.remote(1).result(20) == 1
            waits.append(time.monotonic() - asked)
            time.sleep(0.05)
        value = future.result(30)

        assert (len(value) if way == "result" else value) == BYTES
        assert time.monotonic() - started > QUICK["SILENCE_SECONDS"], "the link is not slow"
        assert len(list(folder.iterdir())) == 1
        assert site.alive(mesh, "one") == [before]
        assert max(waits) < QUICK["SILENCE_SECONDS"]
    assert site.complaints() == []
