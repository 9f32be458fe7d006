"""A host from which nothing gets out but through the HTTP proxy of its network, which wants a password: joining, working, and errors.

host 3 ──X── host 1, the coordinator, and host 2's port 443
   └── proxy on host 2, port 3128 ──> host 1, port 8000, its own TLS; or a reverse proxy on host 2, port 443 ──> host 1
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import MeshError, MeshUnavailableError, ProtocolError
from tests.integration.programs import Program
from tests.support import forward_proxy
from tests.support.hosts import REPOSITORY, Hosts, kill, until_reachable, why_not
from tests.support.site_of_hosts import SOON, TOKEN, Site, site_of_hosts

NAME = "mesh.example.org"  # Only the proxy knows it.
PASSWORD = "s3cr%t@"
LOGIN = "friend:s3cr%25t%40"
PORT = 3128
VARIABLES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")
PATIENCE = 60.0  # What a dial would cost that goes directly from the third host.


class Office:
    """The third host, its proxy, and the mesh outside."""

    def __init__(self, site: Site, hosts: Hosts) -> None:
        self.site = site
        self.one, self.two, self.three = hosts
        self.proxy = f"http://{self.two.address}:{PORT}"
        self.through = f"http://{LOGIN}@{self.two.address}:{PORT}"
        self.own = f"https://{self.one.address}:8000"  # The coordinator's port.
        self.reverse = f"https://{NAME}"
        self.proxies: List[Program] = []
        hosts.part(self.three, self.one)
        hosts.block_port(self.two, 443)

    def start_proxy(self) -> None:
        """The forward proxy, if it does not run."""
        if self.proxies and self.proxies[-1].process.poll() is None:
            return
        names = {
            NAME: f"{self.two.address}:443",
            "forbidden.example.org": "403",
            "cut.example.org": "",
            "gone.example.org": "502",
        }
        command = forward_proxy.command("0.0.0.0", PORT, f"friend:{PASSWORD}", names)
        self.proxies.append(self.two.program(*command, environment={**os.environ, "PYTHONPATH": str(REPOSITORY)}))
        self.proxies[-1].wait_for(forward_proxy.LISTENS)

    def kill_proxy(self) -> None:
        """As by a power cut."""
        kill(self.proxies[-1])

    @property
    def asked(self) -> List[str]:
        """What the proxy was asked for, and what it answered."""
        return [line for program in self.proxies for _, line in program.lines if line.startswith("CONNECT")]

    def command(self, place: str, *words: str, **environment: str) -> Program:
        """A gpumesh command on the third host."""
        usual = {name: value for name, value in self.site.environment(place).items() if name.upper() not in VARIABLES}
        program = self.site.command(self.three, words, {**usual, **environment})
        self.site.workers[place] = program  # For the story.
        return program

    def join(self, place: str, url: str, **environment: str) -> Program:
        """A worker there, which may not have joined yet."""
        return self.command(place, "join", url, "--slots", "1", "--score", "1", "--tag", f"place={place}", **environment)

    @contextlib.contextmanager
    def client(self, url: str) -> Iterator[GPUMesh]:
        """One of this process, on the third host."""
        with self.three.inside(), GPUMesh(url, token=TOKEN, fallback=False, connect_timeout=PATIENCE) as mesh:
            yield mesh


@pytest.fixture(scope="module")
def whole_office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    if why_not():
        pytest.skip(why_not())
    with contextlib.ExitStack() as ends:
        try:
            hosts = Hosts(3, memory="1g")
        except RuntimeError as error:
            pytest.skip(f"no network namespaces here: {error}")
        ends.callback(hosts.close)
        folder = tmp_path_factory.mktemp("office")
        behind = [str(folder), "443", f"{hosts.one.address}:8000"]
        reverse = hosts.two.python("-m", "tests.support.reverse_proxy", *behind, cwd=REPOSITORY, stdin=subprocess.PIPE)
        assert reverse.stdin is not None
        ends.enter_context(reverse.stdin)  # It ends with that.
        site = ends.enter_context(site_of_hosts(folder, hosts))
        office = Office(site, hosts)
        office.start_proxy()
        with hosts.two.inside():
            until_reachable(hosts.two.address, 443)
        yield office


@pytest.fixture(scope="module")
def _workers(whole_office: Office) -> None:
    """One that comes through the reverse proxy, one at the coordinator's own port; both on the third host."""
    office = whole_office
    behind = office.join("behind", office.reverse, HTTPS_PROXY=office.through)
    direct = office.join("direct", office.own, ALL_PROXY=office.through)
    behind.wait_for(r"works for https://mesh\.example\.org:443", SOON)
    direct.wait_for(r"works for https://10\.77\.1\.2:8000", SOON)


@pytest.fixture
def office(whole_office: Office) -> Office:
    """With its proxy at work."""
    whole_office.start_proxy()
    return whole_office


@pytest.fixture(autouse=True)
def no_other_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def place() -> str:
    return os.environ["MACHINE_PLACE"]


@pytest.mark.usefixtures("_workers")
def test_joining_and_working_through_it(office: Office, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = office.site
    monkeypatch.setenv("https_proxy", office.through)
    for url in (office.reverse, office.own):
        started = time.monotonic()
        with office.client(url) as mesh:
            assert len([each for each in mesh.workers() if each["alive"]]) == 2
            assert time.monotonic() - started < PATIENCE / 2
            calls = [accelerate(mesh, tags={"place": name})(place).remote() for name in ("behind", "direct")]
            assert [call.result(SOON) for call in calls] == ["behind", "direct"]

    (tmp_path / "double.py").write_text("import json\nprint(2 * json.loads(input())['n'])\n")
    (tmp_path / "payloads.json").write_text('[{"n": 20}, {"n": 1}]')
    words = ["submit", str(tmp_path / "double.py"), "--payloads", str(tmp_path / "payloads.json"), "--wait"]
    submitted = office.command("submitter", *words, "--url", office.reverse, HTTPS_PROXY=office.through)
    doctor = office.command("doctor", "doctor", "--quick", office.own, HTTPS_PROXY=office.through)
    assert submitted.wait(SOON) == 0, submitted.output
    assert doctor.wait(SOON) == 0, doctor.output
    assert f"the HTTP proxy {office.proxy} (HTTPS_PROXY) connects to 10.77.1.2:8000" in doctor.output
    assert "the mesh knows this token" in doctor.output
    assert {line.rpartition(" ")[0] for line in office.asked} == {f"CONNECT {NAME}:443", "CONNECT 10.77.1.2:8000"}
    assert {line.rpartition(" ")[2] for line in office.asked} == {"200"}
    for program in (*site.coordinators, *site.workers.values()):
        assert "s3cr" not in program.output


@pytest.mark.usefixtures("_workers")
def test_a_restart_of_the_proxy_or_the_coordinator_costs_nothing_but_time(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", office.through)
    with office.client(office.reverse) as mesh:

        def places() -> List[str]:
            calls = [accelerate(mesh, tags={"place": name})(place).remote() for name in ("behind", "direct")]
            return [call.result(SOON) for call in calls]

        assert places() == ["behind", "direct"]
        office.kill_proxy()
        office.start_proxy()
        assert places() == ["behind", "direct"]
        kill(office.site.coordinator)
        office.site.serve()
        assert places() == ["behind", "direct"]
    assert not office.site.tracebacks()


@pytest.mark.usefixtures("_workers")
def test_what_is_not_for_it_does_not_go_there(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain address never, and an https:// one not if NO_PROXY says so."""
    before = len(office.asked)
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://10.77.1.9:1")  # Nobody is there.
    with office.two.inside():
        with GPUMesh(office.site.url, token=TOKEN, fallback=False) as mesh:
            assert mesh.workers()
        with pytest.raises(MeshUnavailableError, match=r"the HTTP proxy http://10\.77\.1\.9:1 cannot be reached"):
            GPUMesh(office.own, token=TOKEN, fallback=False, connect_timeout=0.3).workers()
        for exception in ("10.77.0.0/16", "other.net, 10.77.1.2:8000"):
            monkeypatch.setenv("NO_PROXY", exception)
            with GPUMesh(office.own, token=TOKEN, fallback=False) as mesh:
                assert mesh.workers()
    assert len(office.asked) == before


WRONG = "friend:wr0ng"


@pytest.mark.parametrize(
    ("host", "login", "kind", "text"),
    [
        ("forbidden", LOGIN, ProtocolError, "does not let us through to forbidden.example.org:443 (status 403); have it allow"),
        ("mesh", WRONG, ProtocolError, "does not take the user name and password of HTTPS_PROXY (status 407); correct"),
        (
            "mesh",
            "",
            ProtocolError,
            "wants a user name and a password (status 407); set HTTPS_PROXY=http://USER:PASSWORD@10.77.2.2:3128",
        ),
        ("gone", LOGIN, MeshUnavailableError, "does not reach gone.example.org:443 (status 502); check the address"),
        ("cut", LOGIN, MeshUnavailableError, "closed the connection before it had reached cut.example.org:443; look"),
    ],
)
def test_a_proxy_that_lets_us_not_through_is_named_without_its_password(
    office: Office, host: str, login: str, kind: type, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://{login}@{office.two.address}:{PORT}" if login else office.proxy)
    started = time.monotonic()
    with pytest.raises(MeshError) as caught, office.client(f"https://{host}.example.org") as mesh:
        mesh.workers()
    assert time.monotonic() - started < PATIENCE / 2
    assert type(caught.value) is kind
    assert f"the HTTP proxy {office.proxy} {text}" in str(caught.value)
    assert "s3cr" not in str(caught.value)
    assert "wr0ng" not in str(caught.value)


def test_one_that_is_down_is_waited_for_and_one_that_refuses_is_not(office: Office) -> None:
    office.kill_proxy()
    patient = office.join("patient", office.reverse, HTTPS_PROXY=office.through)
    patient.wait_for(
        r"the HTTP proxy http://10\.77\.2\.2:3128 cannot be reached \(nothing listens at 10\.77\.2\.2:3128\)", SOON
    )
    office.start_proxy()
    refused = office.join("refused", office.reverse, HTTPS_PROXY=f"http://{WRONG}@{office.two.address}:{PORT}")
    assert refused.wait(SOON) != 0
    assert refused.output.count("does not take the user name and password of HTTPS_PROXY (status 407)") == 1
    patient.wait_for("works for", SOON)
    patient.kill()
    for program in (patient, refused):
        for word in ("s3cr", "wr0ng", "Traceback"):
            assert word not in program.output
