"""The mesh through a real HTTPS reverse proxy that knows only HTTP/1.1: joining, working, and a proxy that dies meanwhile."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import AuthenticationError, MeshError, MeshUnavailableError, ProtocolError
from gpumesh.network.address import parse_address
from gpumesh.protocol.auth import worker_token
from gpumesh.runtime import piping
from tests.integration.programs import Programs, started_programs
from tests.support.processes import free_port, until
from tests.support.reverse_proxy import ReverseProxy

TOKEN = "of the tests through a proxy"
PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy", "NO_PROXY", "no_proxy")


class Site:
    """A coordinator, a proxy before it, and a worker that has joined through that."""

    def __init__(self, folder: Path, programs: Programs) -> None:
        self.programs = programs
        self.server, self.direct = programs.serve("--no-self-worker", "--token", TOKEN)
        self.proxy = ReverseProxy(folder, parse_address(self.direct).port)
        self.url = self.proxy.url
        self.worker = programs.gpumesh("join", self.url, "--token", TOKEN, "--slots", "2", "--score", "1")
        self.worker.wait_for(r"works for https://")

    def mesh(self, **options: Any) -> GPUMesh:
        return GPUMesh(self.url, token=TOKEN, fallback=False, **options)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with started_programs(tmp_path_factory.mktemp("home")) as programs:
        site = Site(tmp_path_factory.mktemp("proxy"), programs)
        yield site
        site.proxy.kill()


@pytest.fixture(autouse=True)
def _no_other_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


def double(value: int) -> int:
    return 2 * value


def size_of(data: bytes) -> int:
    return len(data)


def grow(count: int) -> bytes:
    return os.urandom(1) * count


def total(count: int) -> int:
    from gpumesh import GPUMesh, accelerate

    return sum(accelerate(GPUMesh())(double).map(range(count)).result())


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, more: int) -> int:
        self.count += more
        return self.count


def test_who_joined_through_it_works(site: Site) -> None:
    with site.mesh() as mesh:
        assert accelerate(mesh)(double).map(range(500)).result() == [2 * value for value in range(500)]
        assert [row["alive"] for row in mesh.workers()] == [True]


def test_objects_actors_and_tasks_within_tasks(site: Site) -> None:
    with site.mesh() as mesh:
        data = os.urandom(1000) * 20_000
        reference = mesh.put(data)
        assert accelerate(mesh)(size_of).remote(reference).result(30) == len(data)
        assert len(accelerate(mesh)(grow).remote(20_000_000).result(30)) == 20_000_000
        actor = mesh.actor(Counter).remote()
        assert [actor.add.remote(1).result(30) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert accelerate(mesh)(total).remote(10).result(30) == 90


def test_a_wrong_token_is_refused_behind_it_too(site: Site) -> None:
    with pytest.raises(AuthenticationError, match="token"):
        GPUMesh(site.url, token="another", fallback=False).workers()


def test_threads_end_with_the_last_pipe(site: Site) -> None:
    with site.mesh() as first, site.mesh() as second:
        assert len(first.workers()) == len(second.workers()) == 1
        assert [thread.name for thread in threading.enumerate()].count("gpumesh-websocket") == 1
    until(lambda: not any(thread.name == "gpumesh-websocket" for thread in threading.enumerate()), what="the end of the thread")


def test_a_proxy_that_dies_and_comes_back_costs_nothing_but_time(site: Site) -> None:
    def slowly(value: int) -> int:
        time.sleep(0.05)
        return value

    with site.mesh() as mesh:
        futures = [accelerate(mesh)(slowly).remote(number) for number in range(60)]
        assert futures[0].result(30) == 0
        site.proxy.kill()
        site.proxy.start()
        assert [future.result(60) for future in futures] == list(range(60))


@pytest.fixture(scope="module")
def dead_end(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReverseProxy]:
    with ReverseProxy(tmp_path_factory.mktemp("dead"), free_port()) as proxy:
        yield proxy


@pytest.mark.parametrize(
    ("url", "kind", "text"),
    [
        ("https://127.0.0.1:{dead}", MeshUnavailableError, "does not reach a coordinator"),
        ("wss://127.0.0.1:{dead}", MeshUnavailableError, "does not reach a coordinator"),
        ("ws://127.0.0.1:{dead}", MeshUnavailableError, "closed the connection before it answered"),
        ("ws://127.0.0.1:{free}", MeshUnavailableError, "check the address"),
    ],
)
def test_who_is_not_there_is_named(dead_end: ReverseProxy, url: str, kind: type, text: str) -> None:
    with pytest.raises(MeshError) as caught:
        GPUMesh(url.format(dead=dead_end.port, free=free_port()), token=TOKEN, fallback=False).workers()
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert "; " in str(caught.value), "and what to do"


def test_a_web_server_without_a_mesh_is_no_mesh(tmp_path: Path) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(ProtocolError, match="no mesh behind it"):
            piping.open_pipe(parse_address(f"ws://127.0.0.1:{server.server_port}"), timeout=5)
        thread.join()


def test_plain_websockets_go_straight_to_the_port(site: Site) -> None:
    """As through a proxy that speaks plain HTTP: what is inside is TLS all the same."""
    with GPUMesh(site.direct.replace("http://", "ws://"), token=TOKEN, fallback=False) as mesh:
        assert accelerate(mesh)(double).remote(21).result(30) == 42


def test_commands_take_the_address_of_a_proxy(site: Site) -> None:
    program = site.programs.gpumesh("workers", "--url", site.url, "--token", TOKEN)
    assert program.wait() == 0, program.output
    assert socket.gethostname() in program.output


def test_the_wizard_tries_the_token_through_it(site: Site) -> None:
    """Before it is saved: with the worker-only token too, which a friend has."""
    words = ("setup", "--role", "worker", "--url", site.url, "--yes", "--no-start")

    wrong = site.programs.gpumesh(*words, "--token", "not the token of this mesh")
    lent = site.programs.gpumesh(*words, "--token", worker_token(TOKEN))

    assert wrong.wait() == 2
    assert "token was refused" in wrong.output
    assert lent.wait() == 0
    assert f"{site.url} accepts this machine" in lent.output


@pytest.mark.parametrize(
    "program",
    [
        "from gpumesh import GPUMesh; mesh = GPUMesh(url, token=token, fallback=False); mesh.workers()",
        "from gpumesh.cli.setup import _problem_of as tried; assert not tried(parse_address(url), token)",
    ],
    ids=["a client", "the wizard"],
)
def test_no_loop_runs_any_more_when_the_interpreter_takes_itself_apart(site: Site, program: str) -> None:
    """One that is written in C crashed there, now and then: exit status -11."""
    code = f"""
import atexit, sys, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if "websocket" in thread.name]))  # The last to be called.
url, token = sys.argv[1:]
from gpumesh.network.address import parse_address
{program}
assert "gpumesh-websocket" in [thread.name for thread in threading.enumerate()] or "mesh" not in globals()
"""
    run = subprocess.run([sys.executable, "-c", code, site.url, TOKEN], check=False, capture_output=True, text=True, timeout=50)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
