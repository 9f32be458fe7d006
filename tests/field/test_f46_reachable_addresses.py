"""F46: what others are told are addresses at which they reach the coordinator, never those of bridges, loopback or link-local ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Iterator

import pytest

from tests.support.hosts import Hosts, why_not
from tests.support.lan import TOKEN, Lan, join_line

# What Docker does for a published port where it does not rewrite packets: accept, and pass the bytes on.
FORWARDER = """
import socket, threading
def pump(one, other):
    try:
        while data := one.recv(65536):
            other.sendall(data)
    except OSError:
        pass
    for each in (one, other):
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
listener = socket.create_server(("", 8080))
print("forwards", flush=True)
while True:
    outside = listener.accept()[0]
    inside = socket.create_connection(("172.17.0.3", 8000))
    for pair in ((outside, inside), (inside, outside)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Three hosts, with no network as yet."""
    if why_not():
        pytest.skip(why_not())
    try:
        made = Hosts(3, memory="1g")
    except RuntimeError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()


def test_the_join_line_works_and_names_no_bridge(hosts: Hosts, tmp_path: Path) -> None:
    lan = Lan(hosts, tmp_path)
    one, two, _ = hosts
    for host in (one, two):
        lan.bridge(host, "docker0", "172.17.0.1/16")  # The same on both, as Docker has it.
        lan.bridge(host, "br-0123456789ab", "172.18.0.1/16")
    lan.add("tailscale0", "100.64.7", [one, two])
    lan.add("link0", "169.254.7", [one])

    coordinator = lan.serve(one)
    worker = lan.command(two, "join", join_line(coordinator), "--score", "1", GPUMESH_TOKEN=TOKEN)
    worker.wait_for("works for http://10.9.0.1:8000")

    told = [line for _, line in coordinator.lines if "http://" in line]
    assert told[0] == "gpumesh: serving at http://10.9.0.1:8000, Ctrl-C to stop"
    assert told[2].startswith("If it cannot reach that: http://[fd09::1]:8000, http://100.64.7.1:8000")
    assert not any(wrong in line for line in told for wrong in ("172.1", "169.254", "127.0", "[::1]", "docker"))
    announced = lan.command(two, "radar", "--json")
    assert announced.wait() == 0
    (seen,) = json.loads(announced.output)
    assert seen["addresses"][:3] == ["http://10.9.0.1:8000", "http://[fd09::1]:8000", "http://100.64.7.1:8000"]
    # A link-local address is tried on the interface by which the announcement came: that may be one of the other networks.
    assert {each for each in seen["addresses"] if "[fe80" not in each} <= set(seen["answering"])


def test_a_container_is_joined_by_the_published_port_of_its_host(hosts: Hosts, tmp_path: Path) -> None:
    lan = Lan(hosts, tmp_path)
    one, two, container = hosts
    lan.bridge(one, "docker0", "172.17.0.1/16")
    lan.contain(container, one, "docker0", "172.17.0.3/16")
    one.program(sys.executable, "-c", FORWARDER, environment=lan.environment(one)).wait_for("forwards")

    coordinator = lan.serve(container, "--advertise", "10.9.0.1:8080")

    assert join_line(coordinator) == "http://10.9.0.1:8080"
    worker = lan.command(two, "join", join_line(coordinator), "--score", "1", GPUMESH_TOKEN=TOKEN)
    worker.wait_for("works for http://10.9.0.1:8080")  # Nobody ever dials the worker back.
    with_it = lan.command(one, "radar", "--json")  # Its host is in the bridge's network, too.
    assert with_it.wait() == 0
    (seen,) = json.loads(with_it.output)
    assert seen["addresses"][0] == "http://10.9.0.1:8080"
    assert "http://172.17.0.3:8000" in seen["answering"]
