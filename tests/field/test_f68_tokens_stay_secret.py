"""F68: the token is in no list of processes, no log, no error, no environment of a task, and in no file that others can read."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import psutil
import pytest

from gpumesh import GPUMesh
from gpumesh.cli.main import main
from gpumesh.protocol.auth import worker_token
from gpumesh.protocol.connection import Connection
from gpumesh.runtime.embedded import EmbeddedMesh, start_coordinator
from gpumesh.runtime.facts import fresh_nonce, peer_facts
from gpumesh.runtime.settings import read_environment
from tests.integration.programs import Programs, started_programs
from tests.support import tasks
from tests.support.client import Client
from tests.support.processes import free_port, until

TOKEN = "hush-hush-hush-hush-1234"
LENT = worker_token(TOKEN)
SECRETS = (TOKEN, LENT)

LOOK = """
    import os

    def look():
        "What a task can read of its own process and of those above it."
        found, pid = [repr(dict(os.environ))], os.getpid()
        while pid > 1:
            for name in ("environ", "cmdline"):
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    found.append(file.read().decode(errors="replace"))
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"pytest" in file.read():
                    break
        return "\\n".join(found)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path / "home") as started:
        yield started


def holders(programs: Programs) -> List[Tuple[int, str]]:
    """Processes of ours in whose arguments or environment a secret can be read."""
    found = []
    for program in programs.running:
        if program.process.poll() is not None:
            continue
        for process in [psutil.Process(program.process.pid), *program.remember_children()]:
            try:
                shown = " ".join(process.cmdline()) + repr(process.environ())
            except psutil.Error:
                continue
            if any(secret in shown for secret in SECRETS):
                found.append((process.pid, shown))
    return found


def readable_files(folder: Path) -> List[Path]:
    """Files with a secret in them that others than their owner can read."""
    found = []
    for file in folder.rglob("*"):
        if file.is_file() and stat.S_IMODE(file.stat().st_mode) & 0o077:
            content = file.read_bytes()
            if any(secret.encode() in content for secret in SECRETS):
                found.append(file)
    return found


WAYS: Dict[str, Tuple[List[str], Dict[str, str]]] = {
    "argument": (["--token", TOKEN], {}),
    "variable": ([], {"GPUMESH_TOKEN": TOKEN}),
}


@pytest.mark.parametrize("way", WAYS)
def test_whoever_looks_at_a_working_mesh_sees_no_token(programs: Programs, tmp_path: Path, way: str) -> None:
    words, environment = WAYS[way]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = programs.gpumesh(
        "-vv", "serve", "--host", "127.0.0.1", "--port", str(port), "--slots", "1", "--score", "1", *words, **environment
    )
    server.wait_for("serving at")
    worker = programs.gpumesh("-vv", "join", url, "--slots", "1", "--score", "1", *words, **environment)
    worker.wait_for("works for")
    script = tmp_path / "looks.py"
    report = tmp_path / "report"
    script.write_text(textwrap.dedent(LOOK) + f"open({str(report)!r}, 'w').write(look())\nprint('null')\n")
    name: Dict[str, Any] = {}
    exec(textwrap.dedent(LOOK), name)  # In no module of this process, so that it travels.

    with Client(url, TOKEN) as client:
        seen = [client.remote(name["look"]) for _ in range(4)]
        failing = client.remote(tasks.die)
        assert not any(secret in future.result(20) for future in seen for secret in SECRETS)
        with pytest.raises(Exception) as caught:
            failing.result(20)
        assert not any(secret in f"{caught.value!r}{vars(caught.value)}" for secret in SECRETS)
        assert holders(programs) == []
    job = programs.gpumesh("submit", str(script), "--wait")
    assert job.wait() == 0, job.output
    assert "PATH" in report.read_text(errors="replace")
    assert not any(secret in report.read_text(errors="replace") for secret in SECRETS)
    refused = programs.gpumesh("-vv", "workers", GPUMESH_TOKEN=f"{TOKEN}-not")
    assert refused.wait() != 0
    assert "token was refused" in refused.output

    for program in (server, worker):
        program.interrupt()
        assert program.wait() == 0
    for program in (server, worker, job, refused):
        assert not any(secret in program.output for secret in SECRETS), program.output
    assert readable_files(tmp_path) == []


def test_a_machine_lent_with_the_worker_token_shows_neither(programs: Programs, tmp_path: Path) -> None:
    port = free_port()
    server = programs.gpumesh(
        "-vv", "serve", "--host", "127.0.0.1", "--port", str(port), "--no-self-worker", GPUMESH_TOKEN=TOKEN
    )
    server.wait_for("serving at")
    file = tmp_path / "token"
    file.write_text(LENT + "\n")
    file.chmod(0o600)
    worker = programs.gpumesh("-vv", "join", f"127.0.0.1:{port}", "--slots", "1", "--score", "1", "--token-file", str(file))
    worker.wait_for("works for")
    name: Dict[str, Any] = {}
    exec(textwrap.dedent(LOOK), name)

    with Client(f"127.0.0.1:{port}", TOKEN) as client:
        assert not any(secret in client.remote(name["look"]).result(20) for secret in SECRETS)
        assert holders(programs) == []
    assert not any(secret in program.output for program in (server, worker) for secret in SECRETS)
    assert readable_files(tmp_path) == []


def test_the_token_may_come_from_standard_input(programs: Programs, tmp_path: Path) -> None:
    listening = programs.gpumesh("serve", "--host", "127.0.0.1", "--port", "0", "--no-self-worker", GPUMESH_TOKEN=TOKEN)
    url = listening.wait_for(r"serving at (\S+),").group(1)

    shown = subprocess.run(
        [sys.executable, "-m", "gpumesh", "workers", "--json", "--url", url, "--token-file", "-"],
        input=f"{TOKEN}\n",
        env=programs.environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    assert shown.stdout.strip() == "[]"


def test_a_short_token_is_warned_of_once_and_written_where_only_its_owner_can_read(programs: Programs, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        server = programs.gpumesh("serve", "--host", "127.0.0.1", "--port", "0", "--no-self-worker", GPUMESH_TOKEN="a-guess")
    finally:
        os.umask(before)
    server.wait_for("serving at")

    (saved,) = until(lambda: list(tmp_path.rglob("connection.json")))
    assert "a-guess" in saved.read_text()
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    server.interrupt()
    server.wait()
    warned = r"gpumesh: the token has 7 characters, .* run code here; choose 16 or more"
    assert len(re.findall(warned, server.output)) == 1
    assert "a-guess" not in server.output


def test_nothing_that_may_be_printed_has_the_token_in_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMESH_TOKEN", TOKEN)
    with start_coordinator(0, TOKEN) as handle, GPUMesh(handle.url, token=TOKEN) as mesh, EmbeddedMesh(workers=0) as embedded:
        mesh.workers()
        session = mesh._open_session()
        dialing = Connection.dial(role="client", token=TOKEN, nonce=fresh_nonce(), now=0.0, facts=peer_facts())
        shown = [
            repr(each)
            for each in (
                mesh, session, *session.all_channels(), handle, handle._coordinator, handle._coordinator.tokens, dialing, read_environment(),
                embedded,
            )
        ]  # fmt: skip

    assert not any(TOKEN in text or embedded.token in text for text in shown)


@pytest.mark.skipif(sys.platform != "linux", reason="of systemd")
def test_a_service_has_its_token_in_a_file_and_its_unit_names_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    called = tmp_path / "called"
    manager = tmp_path / "bin" / "systemctl"
    manager.parent.mkdir()
    manager.write_text(f'#!/bin/sh\necho "$@" >> {called}\n')
    manager.chmod(0o755)
    monkeypatch.setenv("PATH", f"{manager.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("GPUMESH_TOKEN", TOKEN)

    with pytest.raises(SystemExit) as ended:
        main(["service", "install", "host:8000"])

    assert not ended.value.code
    shown = "".join(capsys.readouterr()) + called.read_text()
    (unit,) = tmp_path.rglob("*.service")
    holding = [file for file in tmp_path.rglob("*") if file.is_file() and TOKEN in file.read_text(errors="replace")]
    assert TOKEN not in shown
    assert unit not in holding
    assert "--token-file" in unit.read_text()
    assert [stat.S_IMODE(file.stat().st_mode) for file in holding] == [0o600]
