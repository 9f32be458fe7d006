"""`gpumesh doctor` against meshes, and against what is none, as people run it."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import pytest

from gpumesh.cli import doctor
from gpumesh.network.address import Address, parse_address
from gpumesh.network.certificates import load_or_make_identity
from gpumesh.network.probing import OTHER, ProbeResult
from gpumesh.protocol import frames
from gpumesh.protocol.auth import metrics_token, worker_token
from gpumesh.runtime.doctor_here import check_connection, torch_build
from gpumesh.runtime.doctor_way import check_identity, check_tls
from gpumesh.runtime.settings import connection_file
from tests.field.test_f55_clocks import TEN_MINUTES, Clock
from tests.integration.programs import Programs, started_programs
from tests.support.processes import free_port

TOKEN = "a token of some length"
Found = Dict[str, List[Dict[str, Any]]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuple[Programs, str]]:
    """A mesh on this machine, for this machine alone, and its address."""
    with started_programs(tmp_path_factory.mktemp("served")) as programs:
        programs.environment["GPUMESH_PROBE"] = "0"
        _, url = programs.serve("--token", TOKEN, "--slots", "1")
        yield programs, url


@pytest.fixture
def url(served: Tuple[Programs, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The address of that mesh; this process knows no other."""
    for name in ("GPUMESH_URL", "GPUMESH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPUMESH_PROBE", "0")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return served[1]


def by_check(findings: List[Dict[str, Any]]) -> Found:
    found: Found = {}
    for each in findings:
        found.setdefault(each["check"], []).append(each)
    return found


def way(address: str, token: Optional[str] = TOKEN) -> Found:
    """The findings on the way to a mesh."""
    return by_check([finding.as_dict() for finding in doctor.on_the_way(parse_address(address), token)])


def states(found: Found, check: str) -> List[str]:
    return [each["state"] for each in found.get(check, [])]


def faults(found: Found) -> List[str]:
    return [each["check"] for rows in found.values() for each in rows if each["state"] == "fault"]


def test_a_well_mesh_on_this_machine_has_no_faults(served: Tuple[Programs, str]) -> None:
    programs, url = served

    examined = programs.gpumesh("doctor", "--json")

    assert examined.wait() == 0
    assert TOKEN not in examined.output
    report = json.loads(examined.output)
    found = by_check(report["findings"])
    assert report["ok"] is True
    assert faults(found) == []
    steps = [check for check in found if check in ("name", "route", "tcp", "tls", "coordinator", "clock", "token", "versions")]
    assert steps == ["name", "route", "tcp", "tls", "coordinator", "clock", "token", "versions"]
    assert {state for step in steps for state in states(found, step)} == {"ok"}
    assert found["devices"][0]["text"].startswith("CPU ")
    assert found["connection"][0]["text"].endswith(f"names {url}, and only this user can read it")
    assert "for this machine alone" in found["reach"][0]["text"]  # It was told --host 127.0.0.1.


def test_text_for_people_says_what_to_do_and_nothing_is_changed(served: Tuple[Programs, str], tmp_path: Path) -> None:
    programs, _ = served
    home = tmp_path / "home"
    home.mkdir()
    places = {f"XDG_{name}_HOME": str(home / name) for name in ("CONFIG", "CACHE", "DATA", "STATE")}
    port = free_port()

    told = programs.gpumesh("doctor", "--quick", f"127.0.0.1:{port}", GPUMESH_TOKEN=TOKEN, HOME=str(home), **places)

    assert told.wait() == 0  # What is down elsewhere is no fault of this machine.
    assert f"The mesh at http://127.0.0.1:{port}" in told.output
    assert "fault    tcp" in told.output
    assert "-> start a coordinator there with `gpumesh serve`, or check the port" in told.output
    assert "devices" not in told.output
    assert told.lines[-1][1] == "Nothing is wrong on this machine; 1 fault on the way to the mesh, or there."
    assert list(home.iterdir()) == []


def test_a_wrong_token_is_a_fault_here_and_the_exit_code_says_so(served: Tuple[Programs, str]) -> None:
    programs, url = served

    told = programs.gpumesh("doctor", "--quick", url, GPUMESH_TOKEN="something else entirely")

    assert told.wait() == 1
    assert "fault    token       the token was refused" in told.output
    assert "versions" not in told.output
    assert told.lines[-1][1] == "1 fault here: token."


def test_a_worker_token_is_known_for_what_it_is(url: str) -> None:
    found = way(url, worker_token(TOKEN))

    assert faults(found) == []
    assert "lends a machine and can do nothing else" in found["token"][0]["text"]
    assert states(found, "versions") == ["ok", "note"]


def test_a_token_for_metrics_is_of_no_use_to_join(url: str) -> None:
    assert faults(way(url, metrics_token(TOKEN))) == ["token"]


def test_without_a_token_the_rest_is_still_checked(url: str) -> None:
    found = way(url, None)

    assert (states(found, "coordinator"), states(found, "token"), faults(found)) == (["ok"], ["note"], [])


def test_a_foreign_web_server_is_no_mesh(url: str) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        found = way(f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

    assert faults(found) == ["coordinator"]
    assert found["coordinator"][0]["text"] == "the other side is an HTTP server, not a gpumesh coordinator"
    assert found["coordinator"][0]["place"] == "mesh"


def test_another_version_is_told(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                sock, _ = listener.accept()
                with sock:
                    while sock.recv(1000):
                        sock.sendall(frames.MAGIC + (99).to_bytes(2, "little"))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        found = way(f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join(5)

    assert faults(found) == ["version"]
    assert "speaks mesh protocol 99" in found["version"][0]["text"]
    assert found["version"][0]["advice"] == "install the same gpumesh version on both machines"


def test_a_name_that_nobody_knows_is_a_fault_here(url: str) -> None:
    found = way("no-such-machine.invalid:8000")

    assert faults(found) == ["name"]
    assert found["name"][0]["place"] == "here"
    assert "tcp" not in found


def test_an_address_that_makes_no_sense_is_a_fault_here(url: str) -> None:
    address, _, trouble = doctor._which("ftp://somewhere", TOKEN)

    assert address is None
    assert trouble is not None
    assert (trouble.check, trouble.state, trouble.place) == ("address", "fault", "here")


def test_a_saved_connection_that_others_can_read_or_nobody_understands_is_a_fault(url: str) -> None:
    file = Path(connection_file())
    assert check_connection().state == "note"  # There is none.
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"url": url, "token": TOKEN}))
    file.chmod(0o644)
    assert (check_connection().state, check_connection().advice) == ("fault", f"chmod 600 {file}")
    assert file.stat().st_mode & 0o777 == 0o644  # Only looked at.

    file.chmod(0o600)
    assert check_connection().state == "ok"
    for nonsense in ("{", '{"url": "ftp://x", "token": "t"}', '{"token": "t"}', "[]", f'{{"url": "{url}", "token": 1}}'):
        file.write_text(nonsense)
        assert (check_connection().state, check_connection().advice) == ("fault", "delete it, or join again"), nonsense


def test_a_coordinators_clock_that_is_off_is_a_note_with_the_difference(
    served: Tuple[Programs, str], url: str, tmp_path: Path
) -> None:
    clock = Clock(tmp_path, "coordinator")
    clock.set(TEN_MINUTES)
    _, other = served[0].serve("--token", TOKEN, "--no-self-worker", **clock.environment)

    found = way(other)

    assert faults(found) == []
    assert found["clock"][0]["state"] == "note"
    assert "its clock is 10 min ahead of this one; nothing depends on that" in found["clock"][0]["text"]
    assert found["token"][0]["state"] == "ok"


def test_torchs_build_is_read_without_loading_it(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('loaded')")
    (package / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.5.1+cu124'\ncuda: Optional[str] = '12.4'\nhip = None\n"
    )
    information = tmp_path / "site" / "torch-2.5.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    assert torch_build() == ("2.5.1", "12.4", "")


def test_a_server_that_speaks_tls_and_no_mesh_is_told_by_its_certificate(tmp_path: Path) -> None:
    identity = load_or_make_identity(str(tmp_path))
    result = ProbeResult(
        Address("10.0.0.1", 1), OTHER, "no mesh; go away", certificate=identity.fingerprint.hex(), ip="10.0.0.1"
    )

    assert check_tls(result)[0].text.endswith(":".join(f"{byte:02x}" for byte in identity.fingerprint[:16]))
    assert (check_identity(result)[0].text, check_identity(result)[0].advice) == ("no mesh", "go away")
