"""A mesh gets a new token while it works."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Iterator, Tuple

import pytest

from gpumesh.errors import AuthenticationError
from gpumesh.protocol.auth import worker_token
from tests.integration.programs import Program, Programs, started_programs
from tests.support import tasks
from tests.support.client import Client
from tests.support.peers import own_address
from tests.support.processes import free_port


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as started:
        yield started


def said(programs: Programs, *words: str, **environment: str) -> Tuple[str, Program]:
    """What a command has printed to standard output, as a shell would take it."""
    program = programs.gpumesh(*words, **environment)
    assert program.wait() == 0, program.output
    return next(line for _, line in program.lines if not line.startswith("gpumesh: ")), program


def serve(programs: Programs, port: int, tmp_path: Path, *words: str) -> Program:
    server = programs.gpumesh(
        "serve", "--host", "127.0.0.1", "--port", str(port), "--db", str(tmp_path / "jobs.db"), "--slots", "1", *words
    )
    server.wait_for("serving at")
    return server


def refused(url: str, token: str) -> bool:
    with Client(url, token, connect_timeout=2) as client:
        try:
            client.workers()
        except AuthenticationError:
            return True
    return False


def test_work_goes_on_the_old_token_ends_and_a_restart_knows_the_new_one(programs: Programs, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = serve(programs, port, tmp_path, "--score", "1")
    first, _ = said(programs, "token")
    lender = programs.gpumesh(
        "join", url, "--slots", "1", "--score", "1", "--tag", "lent=yes", GPUMESH_TOKEN=worker_token(first)
    )
    lender.wait_for("works for")

    with Client(url, first) as client:
        running = [client.remote(tasks.sleep, 3.0, str(tmp_path / f"mark{n}")) for n in range(2)]
        second, rotated = said(programs, "token", "rotate")
        assert not refused(url, first)
        assert not refused(url, second)
        third, _ = said(programs, "token", "rotate", "--now")
        assert refused(url, first)
        assert refused(url, second)
        assert not refused(url, third)
        assert [future.result(20) for future in running] == ["slept"] * 2
        assert client.remote(tasks.noop, 5).result(20) == 5  # Its connection was there before.

    assert len({first, second, third}) == 3
    assert "on every other machine of the mesh: gpumesh join ADDRESS --token-file" in rotated.output
    assert "is saved for you on this machine has it already" in rotated.output
    assert said(programs, "token")[0] == third
    for program in (server, lender):
        assert not any(token in program.output for token in (first, second, third))

    server.interrupt()
    assert server.wait() == 0
    serve(programs, port, tmp_path)
    assert refused(url, second)
    assert not refused(url, third)


def test_a_token_of_somebodys_choice_is_chosen_anew_and_that_is_said(programs: Programs, tmp_path: Path) -> None:
    port = free_port()
    chosen = "chosen by somebody, and long"
    server = serve(programs, port, tmp_path, "--no-self-worker", "--token", chosen)
    saved = next(tmp_path.rglob("connection.json"))

    fresh, rotated = said(programs, "token", "rotate", "--grace", "30m")

    kept = json.loads(saved.read_text())
    assert (kept["url"], kept["token"]) == (f"http://127.0.0.1:{port}", fresh)
    assert re.search("token of before opens new connections until [0-9]", rotated.output)
    assert "was started with a token of somebody's choice" in rotated.output
    assert fresh not in server.output
    assert chosen not in server.output


@pytest.mark.parametrize("way", ["tls", "insecure"])
def test_the_new_token_is_told_only_where_nobody_else_can_read_it(programs: Programs, tmp_path: Path, way: str) -> None:
    """From an address of this machine that is not loopback, as another machine would come."""
    host, port, token = own_address(), free_port(), "chosen by somebody, and long"
    words = ["--insecure", "--yes"] if way == "insecure" else []
    server = programs.gpumesh("serve", "--port", str(port), "--no-self-worker", "--no-discovery", *words, GPUMESH_TOKEN=token)
    server.wait_for("serving at")
    url = f"insecure://{host}:{port}" if way == "insecure" else f"{host}:{port}"

    order = programs.gpumesh("token", "rotate", "--url", url, GPUMESH_TOKEN=token, XDG_CONFIG_HOME=str(tmp_path / "other"))

    if way == "tls":
        assert order.wait() == 0, order.output
        assert "the token was rotated" in server.wait_for("the token was rotated").string
    else:
        assert order.wait() == 1
        assert "is not encrypted" in order.output
        assert not refused(f"127.0.0.1:{port}", token)
