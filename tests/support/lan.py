"""Hosts of tests/support/hosts.py on networks that they share, as machines in one flat are: a bridge at the router for each network.

    lan 10.9.0.0/24 ---- eth0 of every host, 10.9.0.N, fd09::N
    any more          ---- an interface of a name of its own, of some of them

Multicast goes from each to all of the same network, and nowhere else. There is no route to anywhere else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Dict, Sequence

from tests.integration.programs import Program
from tests.support.hosts import REPOSITORY, Host, Hosts

TOKEN = "a token for machines in one flat"
_END = "eth0"
_NAMED = 'echo "$1" > /proc/sys/kernel/hostname; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


class Lan:
    """The network that all hosts share; more can be added."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self._folder = folder
        for name in (hosts.router, *(host.name for host in hosts)):  # Addresses can be used at once, not after a second or two.
            _run(
                "ip",
                "netns",
                "exec",
                name,
                "sh",
                "-c",
                "for each in /proc/sys/net/ipv6/conf/*/accept_dad; do echo 0 > $each; done",
            )
        _ip(hosts.router, "link add lan type bridge mcast_snooping 0", "link set lan up")
        for host in hosts:
            _ip(hosts.router, f"addr flush dev {host.cable}", f"link set {host.cable} master lan")
            _ip(
                host.name,
                f"addr flush dev {_END}",
                f"addr add {self.address(host)}/24 dev {_END}",
                f"addr add {self.six(host)}/64 dev {_END} nodad",
            )

    @staticmethod
    def address(host: Host) -> str:
        """Its IPv4 address in the network that all share."""
        return f"10.9.0.{host.number}"

    @staticmethod
    def six(host: Host) -> str:
        """Its IPv6 address there."""
        return f"fd09::{host.number}"

    def add(self, interface: str, prefix: str, hosts: Sequence[Host]) -> None:
        """Another network, "10.66.0" for 10.66.0.0/24, to which some of them have an interface of this name."""
        bridge = f"n{interface}"[:15]
        _ip(self.hosts.router, f"link add {bridge} type bridge mcast_snooping 0", f"link set {bridge} up")
        for host in hosts:
            cable = f"{interface[:9]}-{host.number}"
            _ip(
                self.hosts.router,
                f"link add {cable} type veth peer name {interface} netns {host.name}",
                f"link set {cable} master {bridge} up",
            )
            _ip(host.name, f"addr add {prefix}.{host.number}/24 dev {interface}", f"link set {interface} up")

    def bridge(self, host: Host, interface: str, address: str) -> None:
        """A bridge to containers, as Docker makes it: the host's own, and the same on every host."""
        _ip(host.name, f"link add {interface} type bridge", f"addr add {address} dev {interface}", f"link set {interface} up")

    def contain(self, container: Host, inside: Host, interface: str, address: str) -> None:
        """This host becomes a container in another one: it has only an address at that one's bridge."""
        _ip(container.name, f"link del {_END}")
        _ip(
            inside.name,
            f"link add con type veth peer name {_END} netns {container.name}",
            f"link set con master {interface} up",
        )
        _ip(container.name, f"addr add {address} dev {_END}", f"link set {_END} up")

    def no_unicast(self, host: Host, prefix: str) -> None:
        """What this host sends to single machines of that network is lost; what it sends to all of them arrives."""
        _ip(host.name, f"rule add to {prefix}.0/24 priority 10 blackhole")

    def change_address(self, host: Host, address: str) -> None:
        """This host has another address in the network that all share, and no IPv6."""
        _ip(host.name, f"addr flush dev {_END}", f"addr add {address}/24 dev {_END}")

    def unplug(self, host: Host) -> None:
        """This host has no network any more, not even an interface."""
        _ip(host.name, f"link del {_END}")

    # --- programs

    def environment(self, host: Host, **more: str) -> Dict[str, str]:
        """Of a command there: nothing of this user's, and of no other host's."""
        home = str(self._folder / f"home-{host.number}")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMESH_", "PYTEST_"))}
        return {
            **kept,
            "HOME": home,
            **{f"XDG_{kind}_HOME": f"{home}/{kind.lower()}" for kind in ("CONFIG", "CACHE", "DATA", "STATE")},
            "GPUMESH_PROBE": "0",
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "250",
            "NO_COLOR": "1",
            **more,
        }

    def command(self, host: Host, *words: str, before: Sequence[str] = (), **environment: str) -> Program:
        """A gpumesh command there."""
        return host.program(
            *before, sys.executable, "-m", "gpumesh.cli.main", *words, environment=self.environment(host, **environment)
        )

    def serve(self, host: Host, *words: str, before: Sequence[str] = ()) -> Program:
        """A mesh without workers, once its port is open."""
        program = self.command(host, "serve", "--no-self-worker", *words, before=before, GPUMESH_TOKEN=TOKEN)
        program.wait_for("serving at")
        program.wait_for("To join with")
        return program

    def named(self, hostname: str) -> Sequence[str]:
        """Words before a command: this machine has that name, and /etc/hosts makes it 127.0.1.1, as Debian does."""
        table = self._folder / f"hosts-{hostname}"
        table.write_text(f"127.0.0.1 localhost\n127.0.1.1 {hostname}\n" if "_" not in hostname else "127.0.0.1 localhost\n")
        return ["unshare", "--uts", "sh", "-c", _NAMED, "sh", hostname, str(table)]


def join_line(program: Program) -> str:
    """The address in the line for other machines."""
    (line,) = [line for _, line in program.lines if line.startswith("To join with another machine: gpumesh join ")]
    return line.split(" gpumesh join ")[1].split(" ")[0]


def _ip(namespace: str, *lines: str) -> None:
    done = subprocess.run(
        ["ip", "-n", namespace, "-batch", "-"], input="\n".join(lines) + "\n", check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{'; '.join(lines)}: {done.stderr.strip()}"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
