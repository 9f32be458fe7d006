"""F56: a port that is taken says by whom and what to do, nobody is sent to another port in silence, and a quick restart works."""

from __future__ import annotations

import getpass
import http.server
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Iterator

import pytest

from gpumesh.config import OCCUPANT_SECONDS
from gpumesh.network.occupant import Occupant, free_port_after, occupant
from gpumesh.network.tcp import listen
from tests.integration.programs import Programs, started_programs
from tests.support.processes import free_port

TOKEN = "a token of some length"
ALONE = ("--host", "127.0.0.1", "--no-self-worker", "--token", TOKEN)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as started:
        yield started


def refusal(port: int) -> str:
    """What somebody is told who wants that port."""
    with pytest.raises(OSError, match=f"^.*port {port} on 127.0.0.1 is taken by ") as caught:
        listen("127.0.0.1", port)
    return str(caught.value)


def test_a_second_mesh_is_told_of_the_first_and_a_killed_one_is_back_on_its_port_at_once(programs: Programs) -> None:
    port = free_port()
    first = programs.gpumesh("serve", *ALONE, "--port", str(port))
    first.wait_for("serving at")

    second = programs.gpumesh("serve", *ALONE, "--port", str(port))

    assert second.wait() == 1
    pid = first.process.pid
    assert re.match(
        rf"gpumesh: port {port} on 127\.0\.0\.1 is taken by a gpumesh coordinator of mesh [0-9a-f]+ \(gpumesh [\d.]+\), of user \S+, as you are, "
        rf"process {pid} \(\S+\), since [-\d :]+; use that mesh, end it with `kill {pid}`, or choose another port with --port \d+$",
        second.lines[-1][1],
    ), second.output
    assert "serving at" not in second.output  # At no other port either.
    first.process.kill()
    first.wait()
    programs.gpumesh("serve", *ALONE, "--port", str(port)).wait_for(f"serving at http://127.0.0.1:{port}")


def test_somebody_elses_mesh_is_not_offered_to_be_ended(programs: Programs) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("another user's program needs root and setpriv")
    port = free_port()
    nobody = ["setpriv", "--reuid", "65534", "--clear-groups"]
    code = (
        "import http.server, socket, sys; from gpumesh import GPUMesh; c = GPUMesh.start_coordinator(port=int(sys.argv[1]), "
        f"token={TOKEN!r}); print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [*nobody, sys.executable, "-c", code, str(port)],
        env={**programs.environment, "HOME": "/", "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            pytest.skip("another user cannot read this checkout")

        said = refusal(port)

        assert "of user nobody, process" in said or "of user 65534, process" in said
        assert re.search(r"; that is somebody else's mesh; choose another port with --port \d+$", said), said
    finally:
        process.communicate("", 20)


def test_a_foreign_web_server_is_called_one() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        said = refusal(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

    assert "is taken by an HTTP server that is no gpumesh coordinator, of user" in said
    assert f"process {os.getpid()}" in said
    assert re.search(rf"; end it with `kill {os.getpid()}`, or choose another port with --port \d+$", said), said


def test_what_says_nothing_does_not_hold_up_the_answer() -> None:
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]

        assert f"taken by another program, of user {getpass.getuser()}, as you are, process {os.getpid()}" in refusal(port)
    assert time.monotonic() - started < OCCUPANT_SECONDS + 3


def test_a_socket_that_is_only_bound_is_somebody_too() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))

        with pytest.raises(OSError, match="is taken by another program; end it, or choose another port"):
            listen("127.0.0.1", bound.getsockname()[1])


def test_a_mesh_that_listens_on_one_address_is_found_by_who_wants_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        with pytest.raises(OSError, match=f"port {one.getsockname()[1]} is taken by another program"):
            listen("", one.getsockname()[1])


def test_a_free_port_has_nobody() -> None:
    port = free_port()

    assert not occupant("127.0.0.1", port).is_there
    assert port < free_port_after(port) <= port + 20


def test_where_nothing_is_known_it_is_still_a_sentence() -> None:
    assert Occupant(8000).text == "another program"
    assert Occupant(8000).advice(free=0) == "end it, or choose another port with --port"
    stale = Occupant(
        8000,
        kind="mesh",
        mesh="m1",
        gpumesh="0.1.0",
        pid=7,
        program="python",
        user="ann",
        is_own=True,
        since="2026-01-02 03:04",
    )
    assert (
        stale.text
        == "a gpumesh coordinator of mesh m1 (gpumesh 0.1.0), of user ann, as you are, process 7 (python), since 2026-01-02 03:04"
    )
    assert stale.advice(free=8001) == "use that mesh, end it with `kill 7`, or choose another port with --port 8001"


def test_connections_that_linger_in_the_kernel_do_not_keep_the_port() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            first.accept()[0].close()  # By the server first: that is whose side waits for a minute.
            assert client.recv(1) == b""
    assert time_waits_at(port)

    listen("127.0.0.1", port).close()


def time_waits_at(port: int) -> bool:
    """Whether the kernel still keeps a connection of that port which is over."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[3] == "06" and int(row[1].rpartition(":")[2], 16) == port for row in rows)
