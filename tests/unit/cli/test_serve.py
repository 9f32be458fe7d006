"""`gpumesh serve` to others: who it says can connect, its certificate, and what it takes to do without."""

from __future__ import annotations

import getpass
import logging
import os
import socket
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from gpumesh.cli import serve_banner
from gpumesh.cli.main import main
from gpumesh.cli.serve_banner import Banner
from gpumesh.network import interfaces
from gpumesh.network.address import Address
from gpumesh.network.certificates import load_or_make_identity
from gpumesh.network.ranking import BRIDGE, LOOPBACK, HostAddress
from gpumesh.runtime import serving, serving_addresses
from gpumesh.runtime import settings as saved
from gpumesh.runtime.serving_addresses import reachable_hosts

Answer = Tuple[int, str, str]
LAN = ["192.168.1.20", "fd00::20"]


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("GPUMESH_URL", "GPUMESH_TOKEN", "GPUMESH_LOCAL", "GPUMESH_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    logger = logging.getLogger("gpumesh")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> List[Dict[str, Any]]:
    """Replaces the coordinator on a machine with two addresses; what it would have been started with."""
    calls: List[Dict[str, Any]] = []

    def run_coordinator(host: str, port: int, token: str, *, on_ready: Callable[[str], None], **options: Any) -> int:
        calls.append({"host": host, "port": port, "token": token, **options})
        on_ready(serving.own_address(host, port, options["identity"]).url)
        return 0

    monkeypatch.setattr(serving, "run_coordinator", run_coordinator)
    monkeypatch.setattr(serving_addresses, "reachable_hosts", lambda host: [host] if host else LAN)
    monkeypatch.setattr(interfaces, "in_container", lambda: False)
    return calls


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], served: List[Dict[str, Any]]) -> Callable[..., Answer]:
    """Runs one command line in this process: exit code, standard output, standard error."""

    def command(*words: str) -> Answer:
        with pytest.raises(SystemExit) as stopped:
            main(["serve", *words])
        printed = capsys.readouterr()
        return int(stopped.value.code or 0), printed.out, printed.err

    return command


def test_it_listens_everywhere_and_says_who_can_connect_and_as_whom_their_code_runs(
    run: Callable[..., Answer], served: List[Dict[str, Any]]
) -> None:
    code, out, _ = run("--port", "9000", "--no-self-worker", "--show-token")

    assert code == 0
    (call,) = served
    assert (call["host"], call["self_worker"]) == ("", False)
    fingerprint = call["identity"].fingerprint.hex()
    pairs = ":".join(fingerprint[place : place + 2] for place in range(0, 32, 2))
    user = f'user "{getpass.getuser()}"'
    assert out.splitlines() == [
        "gpumesh: serving at http://192.168.1.20:9000, Ctrl-C to stop",
        f"Whoever knows the token can connect, from every network that this machine is on, and run code here as {user}.",
        f"What is said with other machines is encrypted (TLS); the certificate's SHA-256 begins with {pairs}.",
        f"To join with another machine: gpumesh join http://192.168.1.20:9000 --token {call['token']}",
        "If it cannot reach that: http://[fd00::20]:9000",
    ]
    assert saved.load_connection()[0] == "http://127.0.0.1:9000"


def test_one_address_of_this_machine_is_for_who_can_reach_it(run: Callable[..., Answer]) -> None:
    _, out, _ = run("--host", "192.168.1.20", "--port", "9000")

    assert "Whoever knows the token can connect, who can reach 192.168.1.20, and" not in out
    assert "Whoever knows the token and can reach 192.168.1.20 can connect, and run code here as" in out
    assert saved.load_connection()[0] == "http://192.168.1.20:9000"


def test_the_certificate_is_the_same_at_the_next_start(run: Callable[..., Answer], served: List[Dict[str, Any]]) -> None:
    run()
    run("--host", "127.0.0.1")

    assert served[0]["identity"] == served[1]["identity"] == load_or_make_identity()


def test_a_certificate_of_ones_own(run: Callable[..., Answer], served: List[Dict[str, Any]], tmp_path: Path) -> None:
    own = load_or_make_identity(str(tmp_path / "own"))
    pem = Path(own.key).read_text()
    begin = pem.index("-----BEGIN CERTIFICATE-----")
    (tmp_path / "key.pem").write_text(pem[:begin])
    (tmp_path / "cert.pem").write_text(pem[begin:])

    assert run("--cert", own.certificate)[0] == 0  # With the key in the same file.
    assert run("--cert", str(tmp_path / "cert.pem"), "--key", str(tmp_path / "key.pem"))[0] == 0
    code, _, err = run("--cert", str(tmp_path / "cert.pem"))

    assert [call["identity"].fingerprint for call in served] == [own.fingerprint] * 2
    assert code == 1
    assert "cannot be used with the certificate" in err
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--key", "k.pem"), "--key belongs to a certificate; give that with --cert"),
        (("--insecure", "--cert", "c.pem"), "give a certificate or --insecure, not both"),
        (("--insecure",), "or add --yes if that is what you want"),
    ],
)
def test_what_makes_no_sense_or_is_not_confirmed_is_not_served(
    words: Tuple[str, ...], said: str, run: Callable[..., Answer], served: List[Any]
) -> None:
    code, _, err = run(*words)

    assert code == 2
    assert said in err
    assert served == []


def test_without_tls_it_says_what_that_means(run: Callable[..., Answer], served: List[Dict[str, Any]]) -> None:
    _, _, err = run("--insecure")
    code, out, _ = run("--insecure", "--yes", "--port", "9000")

    assert "can read all code, arguments and results, and can take over" in err
    assert code == 0
    assert served[0]["identity"] is None
    assert "NOTHING IS ENCRYPTED" in out
    assert "gpumesh join insecure://192.168.1.20:9000" in out
    assert saved.load_connection()[0] == "http://127.0.0.1:9000"  # On this machine nobody listens.


@pytest.mark.parametrize("answer", ["n", "y"])
def test_a_person_is_asked(answer: str, run: Callable[..., Answer], served: List[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    with open(slave, encoding="utf-8") as terminal, open(master, "w", encoding="utf-8") as keys:
        keys.write(f"{answer}\n")
        keys.flush()
        monkeypatch.setattr("sys.stdin", terminal)
        code, _, err = run("--insecure")

    assert "Serve without TLS all the same?" in err
    assert "can read all code" in err
    assert (code, len(served)) == ((0, 1) if answer == "y" else (1, 0))


def test_this_machine_alone_needs_neither_a_word_nor_a_certificate(
    run: Callable[..., Answer], served: List[Dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))

    assert run("--insecure", "--host", "::1")[0] == 0
    code, _, err = run("--host", "127.0.0.1")
    everywhere, _, why = run()

    assert (code, everywhere) == (0, 1)
    assert "cannot keep a certificate in" in err
    assert why.startswith("gpumesh: cannot keep a certificate in")
    assert [call["identity"] for call in served] == [None, None]


def test_what_others_are_told_are_addresses_of_this_machine() -> None:
    assert reachable_hosts("10.1.2.3") == ["10.1.2.3"]
    for host in reachable_hosts(""):
        ip, _, zone = host.partition("%")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        name = (ip, 0, 0, socket.if_nametoindex(zone)) if zone else (ip, 0)
        with socket.socket(family, socket.SOCK_STREAM) as mine:
            mine.bind(name)  # It is one of this machine's.


def test_a_machine_without_a_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lonely = [HostAddress("127.0.0.1", "lo", LOOPBACK), HostAddress("172.17.0.1", "docker0", BRIDGE)]
    monkeypatch.setattr(serving_addresses, "host_addresses", lambda: lonely)

    assert reachable_hosts("") == []
    lines = Banner("", Address("127.0.0.1", 8000), b"").lines("", is_generated=True)
    assert any("on no network now" in line for line in lines)


def test_what_is_advertised_comes_first(run: Callable[..., Answer]) -> None:
    _, out, _ = run("--advertise", "mesh.example:9000", "--advertise", "10.9.9.9", "--no-discovery")

    assert "gpumesh join http://mesh.example:9000 " in out
    assert "If it cannot reach that: http://10.9.9.9:8000, http://192.168.1.20:8000, http://[fd00::20]:8000" in out


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost:9000", "::1", "0.0.0.0", "a b"])
def test_nobody_is_told_of_an_address_that_means_themselves(run: Callable[..., Answer], address: str) -> None:
    code, _, err = run("--advertise", address)

    assert code == 1
    assert err.startswith("gpumesh: ")


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_001)

    lines = serve_banner.Banner("10.1.2.3", Address("10.1.2.3", 8000), b"x" * 32).lines("", is_generated=True)

    assert "run code here as user 4000000001." in lines[1]
