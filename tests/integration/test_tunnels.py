"""`gpumesh serve --public` over a stand-in for ngrok that really forwards (tests/support/fake_ngrok.py), and `--tailscale`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Iterator, List, Optional

import psutil
import pytest
import typer

from gpumesh import GPUMesh, accelerate
from gpumesh.cli import doctor
from gpumesh.cli.serve_ways import Ways
from gpumesh.errors import MeshUnavailableError
from gpumesh.network.address import Address, parse_address
from gpumesh.network.tunnels.ngrok import explain, open_tunnel
from gpumesh.runtime import tunnelling
from tests.integration.programs import Program, Programs, started_programs
from tests.support import fake_ngrok
from tests.support.processes import until

TOKEN = "a token of some length"


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as started:
        log = tmp_path / "ngrok.log"
        log.touch()
        started.environment.update(
            GPUMESH_PROBE="0",
            PYNGROK_NGROK_PATH=str(fake_ngrok.install(tmp_path)),
            FAKE_NGROK_LOG=str(log),
            NGROK_AUTHTOKEN="secret-of-the-account",
        )
        yield started


def serve(programs: Programs, *words: str, mode: str = "", **environment: str) -> Program:
    """A public mesh; its worker is this machine."""
    environment = {"FAKE_NGROK": mode, "GPUMESH_TOKEN": TOKEN, **environment}
    return programs.gpumesh("serve", "--host", "127.0.0.1", "--port", "0", "--slots", "1", "--public", *words, **environment)


def ngrok_of(programs: Programs) -> Optional[psutil.Process]:
    """The process of the stand-in, if it runs."""
    for line in Path(programs.environment["FAKE_NGROK_LOG"]).read_text().splitlines():
        if line.startswith("started ") and " start " in line:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(line.split()[1]))
                return process if process.status() != psutil.STATUS_ZOMBIE else None
    return None


def asked(programs: Programs) -> List[str]:
    """Kinds of the endpoints that were asked for."""
    lines = Path(programs.environment["FAKE_NGROK_LOG"]).read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith("asked ")]


def tailscale(folder: Path) -> Path:
    """A program that says what `tailscale status --json` says on a machine with this address."""
    program = folder / "bin" / "tailscale"
    program.parent.mkdir(exist_ok=True)
    program.write_text('#!/bin/sh\necho \'{"BackendState": "Running", "Self": {"TailscaleIPs": ["100.64.7.7"]}}\'\n')
    program.chmod(0o755)
    return program


def test_what_is_said_is_understood_behind_the_progress_of_fetching_ngrok() -> None:
    """As pyngrok writes it where ngrok is not installed yet: the line begins anew and anew, and never ends."""
    program = (
        "import sys; from gpumesh.network.tunnels import ngrok; sys.stdout.write('Downloading ngrok: 99%\\rInstalling ngrok ...\\r   \\r'); "
        "ngrok._tell(url='tcp://there:1')"
    )

    async def told() -> object:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
        found = await tunnelling._told(process)
        await process.wait()
        return found

    assert asyncio.run(told()) == {"url": "tcp://there:1"}


def square(x: int) -> int:
    return x * x


def variable(name: str) -> Optional[str]:
    return os.environ.get(name)


def test_a_public_mesh_works_through_its_tunnel_and_closes_it_on_ctrl_c(programs: Programs) -> None:
    server = serve(programs)
    url = server.wait_for(r"To join with another machine: gpumesh join (\S+)").group(1)
    tunnel = ngrok_of(programs)
    assert tunnel is not None
    assert asked(programs) == ["tcp"]
    assert "secret-of-the-account" not in " ".join(tunnel.cmdline())
    assert TOKEN not in str(tunnel.environ())
    assert tunnel.environ()["NGROK_AUTHTOKEN"] == "secret-of-the-account"

    with GPUMesh(f"insecure://{parse_address(url)}", token=TOKEN, fallback=False, connect_timeout=5) as mesh:
        with pytest.raises(ConnectionError, match="TLS"):  # Who comes through a tunnel is nobody of this machine.
            mesh.workers()
    with GPUMesh(f"https://{parse_address(url)}", token=TOKEN, fallback=False, connect_timeout=10) as mesh:
        assert accelerate(mesh)(square).remote(7).result(30) == 49
        assert accelerate(mesh)(variable).remote("NGROK_AUTHTOKEN").result(30) is None

    server.interrupt()
    assert server.wait() == 0
    until(lambda: ngrok_of(programs) is None, 10)
    assert "Traceback" not in server.output


def test_an_account_without_tcp_gets_https_and_the_mesh_goes_by_websocket(programs: Programs) -> None:
    server = serve(programs, mode="no-tcp")
    url = server.wait_for(r"To join with another machine: gpumesh join (https://\S+)").group(1)
    assert asked(programs) == ["tcp", "http"]

    with GPUMesh(url, token=TOKEN, fallback=False, connect_timeout=10) as mesh:
        assert accelerate(mesh)(square).remote(8).result(30) == 64

    found = {each.check: each for each in doctor.on_the_way(parse_address(url), TOKEN)}
    assert {each.state for each in found.values()} == {"ok"}
    assert "inside it the mesh speaks TLS once more" in found["tls"].text
    assert "it can do everything" in found["token"].text
    assert "reach" not in found

    assert ngrok_of(programs) is not None
    server.process.kill()  # It leaves no tunnel behind.
    until(lambda: ngrok_of(programs) is None, 10)


def test_a_tunnel_that_ends_by_itself_is_told(programs: Programs, tmp_path: Path) -> None:
    server = serve(programs, "--no-self-worker", mode="dead", FAKE_NGROK_END=str(tmp_path / "end"))
    server.wait_for("To join with another machine")

    (tmp_path / "end").touch()

    server.wait_for(
        r"the tunnel at http://\S+ is gone \(ngrok has ended with exit code 7\): nobody comes in through it any more"
    )
    assert server.process.poll() is None


def test_what_ngrok_refuses_ends_the_start_with_what_to_do(programs: Programs) -> None:
    server = serve(programs, "--no-self-worker", mode="sessions")

    assert server.wait() == 1
    said = r"no tunnel: the account has as many ngrok sessions open as it may; .* \(ERR_NGROK_108\)"
    assert re.search(rf"^gpumesh: {said}$", server.output, re.MULTILINE), server.output
    assert "serving at" not in server.output
    assert "Traceback" not in server.output


def test_a_tunnel_that_carries_nothing_is_not_announced(programs: Programs) -> None:
    code = (
        "import gpumesh.config as c; c.TUNNEL_CHECK_SECONDS = 0.5; import sys; from gpumesh.cli.main import main; "
        "main(['serve', '--host', '127.0.0.1', '--port', '0', '--no-self-worker', '--public'])"
    )
    server = programs.python("-c", code, FAKE_NGROK="deaf", GPUMESH_TOKEN=TOKEN)

    assert server.wait() == 1
    assert re.search(r"the tunnel is open at http://\S+, and the mesh does not answer through it: ", server.output), (
        server.output
    )
    assert "serving at" not in server.output
    assert ngrok_of(programs) is None


def test_ctrl_c_while_the_tunnel_opens_ends_at_once(programs: Programs) -> None:
    server = serve(programs, "--no-self-worker", mode="slow")
    until(lambda: ngrok_of(programs), 20)

    server.interrupt()

    assert server.wait(10) == 0
    assert "Traceback" not in server.output
    until(lambda: ngrok_of(programs) is None, 10)


def test_pyngrok_is_asked_for_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyngrok", None)

    with pytest.raises(
        RuntimeError, match=re.escape('pyngrok is not installed; install it with: pip install "gpumesh[tunnel]"')
    ):
        open_tunnel("127.0.0.1:1", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "failed: ERR_NGROK_107 bad",
            "no tunnel: ngrok does not know the authtoken; copy it again from its dashboard into NGROK_AUTHTOKEN",
        ),
        ("ERR_NGROK_121", "no tunnel: this ngrok is too old; update it: ngrok update"),
        ("authentication failed: something new", "no tunnel: ngrok wants an account; "),
        (
            "ERR_NGROK_9999:\n\x1b[31mred",
            "no tunnel: ngrok says: ERR_NGROK_9999: [31mred; see whether `ngrok http 8000` works here",
        ),
    ],
)
def test_ngroks_errors_are_explained(text: str, says: str) -> None:
    assert explain(text).startswith(says)
    assert len(explain("x" * 10_000)) < 500


def test_tailscale_puts_the_tailnets_address_first(programs: Programs, tmp_path: Path) -> None:
    environment = {"PATH": f"{tailscale(tmp_path).parent}{os.pathsep}{os.environ['PATH']}", "GPUMESH_TOKEN": TOKEN}

    server = programs.gpumesh("serve", "--port", "0", "--no-self-worker", "--no-discovery", "--tailscale", **environment)
    server.wait_for(r"To join with another machine: gpumesh join http://100\.64\.7\.7:\d+")
    server.wait_for(r"http://100\.64\.7\.7:\d+ does not answer when it is tried from here")  # Nobody here has that address.


def test_without_a_tailnet_nothing_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(MeshUnavailableError, match="tailscale is not installed here"):
        Ways(host="", public=False, tailscale=True, named=[])


def test_a_tailnet_goes_with_all_addresses_or_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tailscale(tmp_path).parent}{os.pathsep}{os.environ['PATH']}")
    named = [Address("router.example", 4000)]

    assert Ways(host="", public=False, tailscale=True, named=named).named == [Address("100.64.7.7", 0), *named]
    assert Ways(host="100.64.7.7", public=False, tailscale=True, named=[]).known == [Address("100.64.7.7", 0)]
    with pytest.raises(typer.BadParameter, match="of no use with --host 127.0.0.1; leave that out, or say --host 100.64.7.7"):
        Ways(host="127.0.0.1", public=False, tailscale=True, named=[])
