"""A mesh whose every connection is inside TLS: what it does plainly, and what happens when connections end."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate, current_mesh
from gpumesh.client.link import SecureLink
from tests.support.hosts import kill
from tests.support.processes import until
from tests.support.site_of_hosts import Site, site_of_hosts

SOON = 30.0
FAR = {"GPUMESH_NO_SHARED_MEMORY": "1"}  # As on another machine: objects go over the connection.


def secured(site: Site) -> Site:
    """The same, asked for by https://, which is TLS on loopback too."""
    site.url = site.url.replace("http://", "https://")
    return site


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_of_hosts(tmp_path_factory.mktemp("tls"), times={}) as made:
        secured(made).join("one", slots=3, environment=FAR)
        yield made


@pytest.fixture
def mesh(shared: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[GPUMesh]:
    for name, value in FAR.items():
        monkeypatch.setenv(name, value)
    with shared.client() as made:
        assert len(made.workers()) == 1
        assert type(link_of(made)) is SecureLink
        yield made
    assert shared.tracebacks() == []


def link_of(mesh: GPUMesh) -> Any:
    session: Any = mesh._session
    return session.job_channel().link


def add(left: int, right: int) -> int:
    return left + right


def same_again(value: bytes) -> bytes:
    return value


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


def nested(count: int) -> List[Any]:
    """What tasks of a task have returned, by whose connection."""
    own: Any = current_mesh()
    return [*own.distribute(abs, range(-count, 0)), type(link_of(own)).__name__]


class Counter:
    """Counts, and keeps what it was given."""

    def __init__(self) -> None:
        self.kept: Dict[str, bytes] = {}

    def keep(self, name: str, value: bytes) -> int:
        self.kept[name] = value
        return len(self.kept)

    def back(self, name: str) -> bytes:
        return self.kept[name]


def test_tasks_and_a_map(mesh: GPUMesh) -> None:
    remote = accelerate(mesh)(add).remote
    futures = [remote(number, 1) for number in range(300)]
    assert [future.result(SOON) for future in futures] == list(range(1, 301))
    assert list(mesh.distribute(abs, range(-5000, 0))) == list(range(5000, 0, -1))


def test_a_stream(mesh: GPUMesh) -> None:
    assert list(accelerate(mesh)(numbers).remote(2000)) == list(range(2000))


@pytest.mark.parametrize("size", [1, 70_000, 3_000_000, 20_000_000])
def test_values_and_objects_both_ways(mesh: GPUMesh, size: int) -> None:
    value = os.urandom(size)
    same = accelerate(mesh)(same_again).remote
    assert same(value).result(SOON) == value
    ref = mesh.put(value)
    assert same(ref).result(SOON) == value
    assert mesh.get(ref) == value


def test_large_ones_both_ways_at_once(mesh: GPUMesh) -> None:
    """Arguments and results fill both directions of all connections."""
    same = accelerate(mesh)(same_again).remote
    values = [os.urandom(6_000_000) for _ in range(8)]
    futures = [same(value) for value in values]
    assert [future.result(2 * SOON) for future in futures] == values


def test_an_actor(mesh: GPUMesh) -> None:
    actor = mesh.actor(Counter).remote()
    value = os.urandom(5_000_000)
    assert actor.keep.remote("a", value).result(SOON) == 1
    assert actor.keep.remote("b", b"").result(SOON) == 2
    assert actor.back.remote("a").result(SOON) == value


def test_tasks_of_tasks_go_through_their_agent(mesh: GPUMesh) -> None:
    """The runner's end is a plain one: the agent has the TLS."""
    assert accelerate(mesh)(nested).remote(20).result(SOON) == [*range(20, 0, -1), "MeshLink"]


def test_nothing_that_is_sent_can_be_read_on_the_way(tmp_path: Path) -> None:
    """The needle is in arguments, results and objects, in both directions, and in none of the bytes that a listener in between sees."""
    needle = b"NEEDLE-" + os.urandom(8).hex().encode()
    with site_of_hosts(tmp_path, times={}) as site, tapped(site.port) as (port, seen):
        site.url = f"https://127.0.0.1:{port}"
        site.join("one", environment=FAR)
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as ends:
            patch.setenv("GPUMESH_NO_SHARED_MEMORY", "1")
            mesh = ends.enter_context(site.client())
            value = needle * 10_000
            assert accelerate(mesh)(same_again).remote(value).result(SOON) == value
            assert mesh.get(mesh.put(value)) == value
    assert len(seen) == 2
    for each in seen:
        assert each[:2] == b"\x16\x03"
        assert len(each) > len(value)
        assert needle not in each
        assert b"RegisterClient" not in each


@contextlib.contextmanager
def tapped(port: int) -> Iterator[Any]:
    """A port that passes everything on to another, and all bytes of each connection, both directions in one."""
    import socket
    import threading

    from tests.support.peers import Server

    seen: List[bytearray] = []

    def serve(sock: socket.socket) -> None:
        bytes_seen = bytearray()
        seen.append(bytes_seen)
        with socket.create_connection(("127.0.0.1", port)) as other:

            def carry(source: socket.socket, target: socket.socket) -> None:
                with contextlib.suppress(OSError):
                    while True:
                        data = source.recv(1 << 18)
                        if not data:
                            break
                        bytes_seen.extend(data)
                        target.sendall(data)
                for each in (source, target):
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)

            back = threading.Thread(target=carry, args=(other, sock), daemon=True)
            back.start()
            carry(sock, other)
            back.join(10)

    with Server(serve) as server:
        yield server.port, seen


def test_a_coordinator_that_was_killed_is_found_again(tmp_path: Path) -> None:
    """`kill -9` in the middle of tasks, objects and large results; the worker keeps its results, the client its futures."""
    with site_of_hosts(tmp_path, times={}) as site:
        secured(site).join("one", slots=2, environment=FAR)
        with site.client() as mesh:
            same = accelerate(mesh)(same_again).remote
            value = os.urandom(2_000_000)
            held = site.hold(mesh, "held", retries=3)
            site.until_started("held")
            under_way = [same(value) for _ in range(6)]
            kill(site.coordinator)
            site.go("held")
            site.serve()
            assert held[0].result(SOON) == ("held", "one")
            assert [future.result(SOON) for future in under_way] == [value] * 6
            assert type(link_of(mesh)) is SecureLink
            assert [name for name, _ in site.starts()] == ["held"]
        until(lambda: not site.tracebacks(), 1, what="no tracebacks")


def test_interrupts_while_results_come_in_lose_nothing(mesh: GPUMesh) -> None:
    """Ctrl-C in the middle of a record: the connection is given up and made again, every task ends once."""
    import _thread
    import threading

    same = accelerate(mesh)(same_again).remote
    value = os.urandom(2_000_000)
    interrupted = 0
    for turn in range(6):
        futures = [same(value) for _ in range(4)]
        timer = threading.Timer(0.005 * turn, _thread.interrupt_main)
        try:
            timer.start()
            results = [future.result(SOON) for future in futures]
            timer.join(10)
        except KeyboardInterrupt:
            interrupted += 1
            results = [future.result(SOON) for future in futures]
        assert results == [value] * 4
    assert interrupted
