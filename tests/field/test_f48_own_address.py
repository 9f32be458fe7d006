"""F48: a machine's own addresses without an internet route, a resolvable name, or a name that is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator

import pytest

from gpumesh.network import discovery
from tests.support.hosts import Hosts, why_not
from tests.support.lan import TOKEN, Lan, join_line


@pytest.fixture
def lan(tmp_path: Path) -> Iterator[Lan]:
    """Two machines in one flat, without a route to anywhere else."""
    if why_not():
        pytest.skip(why_not())
    try:
        hosts = Hosts(2, memory="1g")
    except RuntimeError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield Lan(hosts, tmp_path)
    hosts.close()


@pytest.mark.parametrize("hostname", ["debian", "my_host_that_nobody_knows"])
def test_names_play_no_part_and_loopback_is_never_told(lan: Lan, hostname: str) -> None:
    one, two = lan.hosts
    coordinator = lan.serve(one, before=lan.named(hostname))

    assert join_line(coordinator) == "http://10.9.0.1:8000"
    assert "127.0" not in coordinator.output
    assert hostname not in coordinator.output
    worker = lan.command(two, "quickjoin", "--token", TOKEN, "--score", "1", before=lan.named(hostname))
    worker.wait_for("works for http://10.9.0.1:8000")
    assert f'found the mesh "{hostname}"' in worker.output


def test_bound_to_loopback_is_said_so_and_announced_to_nobody(lan: Lan) -> None:
    one, two = lan.hosts
    coordinator = lan.serve(one, "--host", "localhost")
    refused = lan.command(two, "join", "http://10.9.0.1:8000", GPUMESH_TOKEN=TOKEN)
    refused.wait_for("nothing listens at 10.9.0.1:8000")

    assert "Only this machine can connect" in coordinator.output
    with two.inside():
        assert discovery.find(0.7) == []


def test_a_machine_without_any_network_serves_itself(lan: Lan) -> None:
    one, _ = lan.hosts
    lan.unplug(one)
    coordinator = lan.serve(one, before=lan.named("my_host_that_nobody_knows"))

    coordinator.wait_for("This machine is on no network now")
    worker = lan.command(one, "join", "http://127.0.0.1:8000", "--score", "1", GPUMESH_TOKEN=TOKEN)
    worker.wait_for("works for http://127.0.0.1:8000")
