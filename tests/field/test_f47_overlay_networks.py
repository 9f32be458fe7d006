"""F47: two overlay networks on the same machines: one entry, with the address that truly answers; a reason where none does."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator, List, Sequence

import pytest

from gpumesh.network import discovery
from gpumesh.network.address import Address
from gpumesh.network.announcement import Mesh
from tests.support.hosts import Host, Hosts, why_not
from tests.support.lan import TOKEN, Lan


@pytest.fixture
def lan(tmp_path: Path) -> Iterator[Lan]:
    """Two machines in one flat and two overlays; over the first, a machine is heard and does not answer."""
    if why_not():
        pytest.skip(why_not())
    try:
        hosts = Hosts(2, memory="1g")
    except RuntimeError as error:
        pytest.skip(f"no network namespaces here: {error}")
    made = Lan(hosts, tmp_path)
    made.add("wg0", "10.66.0", list(hosts))
    made.add("zt0", "10.147.0", list(hosts))
    made.no_unicast(hosts.one, "10.66.0")
    yield made
    hosts.close()


def seen_from(host: Host) -> Mesh:
    """The one mesh that is seen there, once all that it announces has been looked at."""
    with host.inside(), discovery.Watcher() as watcher:
        (found,) = watcher.wait(20, until=lambda found: len(found) == 1 and found[0].is_settled)
    assert found.is_settled
    return found


def urls(addresses: Sequence[Address]) -> List[str]:
    return [address.url for address in addresses]


def test_one_entry_with_the_address_that_answers_and_a_reason_where_none_does(lan: Lan) -> None:
    one, two = lan.hosts
    lan.no_unicast(one, "10.9.0")
    lan.serve(one, "--host", "0.0.0.0")

    seen = seen_from(two)

    assert set(urls(seen.addresses)) == {f"http://{prefix}.1:8000" for prefix in ("10.9.0", "10.66.0", "10.147.0")}
    assert urls(seen.answering) == ["http://10.147.0.1:8000"]
    assert seen.is_joinable
    worker = lan.command(two, "quickjoin", "--token", TOKEN, "--score", "1")
    worker.wait_for("works for http://10.147.0.1:8000")

    lan.no_unicast(one, "10.147.0")
    seen = seen_from(two)

    assert (seen.is_joinable, seen.address, len(seen.addresses)) == (False, None, 3)
    assert "(timeout): nothing answers; a firewall may drop it" in seen.reason
    assert "(and 2 more of its addresses)" in seen.reason


def test_the_interface_can_be_chosen(lan: Lan) -> None:
    one, two = lan.hosts
    lan.serve(one, "--host", "10.147.0.1")

    seen = seen_from(two)

    assert urls(seen.addresses) == urls(seen.answering) == ["http://10.147.0.1:8000"]
