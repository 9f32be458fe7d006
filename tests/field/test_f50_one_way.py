"""F50: everything runs over the connection that the worker opened, and what keeps others out is told before success is declared."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.cli import doctor
from gpumesh.network.address import parse_address
from tests.support.hosts import Host, Hosts, until_reachable, why_not
from tests.support.site_of_hosts import PORT, SOON, TOKEN, Site

MIB = 1 << 20


@pytest.fixture
def make_hosts() -> Iterator[Callable[[int], Hosts]]:
    """Hosts as asked for, which go with the test."""
    if why_not():
        pytest.skip(why_not())
    with contextlib.ExitStack() as ends:

        def make(count: int) -> Hosts:
            try:
                made = Hosts(count, memory="1g")
            except RuntimeError as error:
                pytest.skip(f"no network namespaces here: {error}")
            ends.callback(made.close)
            return made

        yield make


def examine(host: Host, url: str, token: str = TOKEN) -> Dict[str, List[Dict[str, Any]]]:
    """What the doctor finds on the way from this host to a mesh, by check."""
    found: Dict[str, List[Dict[str, Any]]] = {}
    with host.inside():
        for finding in doctor.on_the_way(parse_address(url), token):
            found.setdefault(finding.check, []).append(finding.as_dict())
    return found


def faults(found: Dict[str, List[Dict[str, Any]]]) -> List[str]:
    return [f"{each['check']}:{each['place']}" for rows in found.values() for each in rows if each["state"] == "fault"]


def reverse(data: bytes) -> bytes:
    """Of some megabytes, so that objects travel both ways."""
    return data[::-1]


def test_a_worker_that_nobody_can_call_works_over_the_connection_that_it_opened(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    hosts = make_hosts(3)
    site = Site(tmp_path, hosts)
    hosts.let_nobody_in(hosts.two)
    with hosts.two.inside():
        nobody_gets_here = socket.create_server(("0.0.0.0", 9))
    with hosts.one.inside(), pytest.raises((TimeoutError, socket.timeout)):
        socket.create_connection((hosts.two.address, 9), 0.5)
    nobody_gets_here.close()
    try:
        site.serve()
        site.join("behind", hosts.two)
        with site.client(hosts[2]) as mesh:
            data = os.urandom(4 * MIB)
            assert accelerate(mesh)(reverse).remote(data).result(SOON) == data[::-1]
            held = site.hold(mesh, "a")
            site.until_started("a")
            site.go()
            assert held[0].result(SOON) == ("a", "behind")
            assert faults(examine(hosts[2], site.url)) == []
    finally:
        site.close()
        print(site.story())


def test_a_coordinator_behind_one_forwarded_port_is_told_by_it_and_reached_through_it(
    make_hosts: Callable[[int], Hosts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpumesh.runtime.doctor_way.DOCTOR_STEP_SECONDS", 1.0)
    hosts = make_hosts(3)
    home, router, away = hosts
    hosts.part(home, away)
    forwarder = router.python("-m", "tests.support.forwarder", "9000", f"{home.address}:{PORT}")
    with away.inside():
        until_reachable(router.address, 9000)
    site = Site(tmp_path, hosts)
    advertised = f"{router.address}:9000"
    try:
        server = site.serve("--advertise", advertised)
        server.wait_for(f"To join with another machine: gpumesh join http://{advertised}")
        found = examine(away, site.url)
        assert faults(found) == ["tcp:mesh"]
        assert "a firewall may drop it" in found["tcp"][0]["text"]
        assert "gpumesh serve --public, or --tailscale" in found["tcp"][0]["advice"]

        found = examine(away, f"http://{advertised}")
        assert faults(found) == []
        assert "it speaks TLS" in found["tls"][0]["text"]
        site.url = f"http://{advertised}"
        site.join("away", away)
        with away.inside(), GPUMesh(site.url, token=TOKEN, fallback=False) as mesh:
            data = os.urandom(4 * MIB)
            assert accelerate(mesh)(reverse).remote(data).result(SOON) == data[::-1]
    finally:
        site.close()
        print(site.story())
        assert forwarder.poll() is None


def test_the_doctor_tells_a_dropped_port_from_a_closed_one_and_from_no_way_at_all(
    make_hosts: Callable[[int], Hosts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = make_hosts(2)
    monkeypatch.setattr("gpumesh.runtime.doctor_way.DOCTOR_STEP_SECONDS", 1.0)
    site = Site(tmp_path, hosts)
    try:
        site.serve()
        well = examine(hosts.two, site.url)
        assert faults(well) == []
        assert f"begins at {hosts.two.address} of this machine" in well["route"][0]["text"]
        assert well["token"][0]["text"] == "the mesh knows this token, and it can do everything"
        assert faults(examine(hosts.two, site.url, "another token entirely")) == ["token:here"]

        closed = examine(hosts.two, f"http://{hosts.one.address}:{PORT + 1}")
        assert faults(closed) == ["tcp:mesh"]
        assert closed["tcp"][0]["text"].endswith("the machine is there, but nothing listens on this port")

        hosts.block_port(hosts.one, PORT)
        dropped = examine(hosts.two, site.url)
        assert faults(dropped) == ["tcp:mesh"]
        assert f"sudo ufw allow {PORT}/tcp" in dropped["tcp"][0]["advice"]

        with hosts.two.inside():
            assert os.system("ip route add unreachable 198.51.100.7") == 0  # As a network answers where no machine is.
        nobody = examine(hosts.two, f"http://198.51.100.7:{PORT}")
        assert faults(nobody) == ["tcp:mesh"]
        assert "no machine takes anything at this address" in nobody["tcp"][0]["text"]

        with hosts.two.inside():
            assert os.system("ip route del default") == 0
        none = examine(hosts.two, site.url)
        assert faults(none) == ["route:here"]
        assert "there is no way to this address from here" in none["route"][0]["text"]
    finally:
        site.close()
        print(site.story())


def test_serve_tells_at_which_of_its_addresses_it_cannot_be_reached(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    (host,) = make_hosts(1)
    site = Site(tmp_path, None)
    words = ["serve", "--port", "8000", "--no-self-worker", "--no-discovery", "--advertise", "10.77.1.99:8000"]

    server = site.command(host, words, site.environment("coordinator"))

    server.wait_for(r"To join with another machine: gpumesh join http://10\.77\.1\.99:8000", SOON)
    server.wait_for(rf"If it cannot reach that: http://{host.address}:8000")
    server.wait_for(
        r"http://10\.77\.1\.99:8000 does not answer when it is tried from here: .*a router in between may let in only who comes"
    )
    assert f"http://{host.address}:8000 does not answer" not in server.output
