"""From nothing to a sweep over three machines with the commands of the README, in a flat and from behind a proxy."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Callable, List, Sequence

from tests.integration.programs import Program
from tests.support.hosts import REPOSITORY, Host, Hosts
from tests.support.lan import Lan
from tests.support.processes import until

TERMINAL = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])"]
WAN = "10.66.0"
PROXY = 4


def commands() -> List[str]:
    """Those of the README's section."""
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    section = page.partition("## Three machines in a minute")[2].partition("`gpumesh token worker`")[0]
    return re.findall(r"^\$ (.+)$", section, re.MULTILINE)


class Machine:
    """A host with a name of its own, on which commands are typed."""

    def __init__(self, lan: Lan, host: Host, hostname: str, *, knows: str = "") -> None:
        self._lan = lan
        self._host = host
        self._before: Sequence[str] = lan.named(hostname)
        if knows:
            with open(self._before[-1], "a", encoding="utf-8") as table:
                table.write(f"{knows}\n")

    def type(self, command: str, token: str = "") -> Program:
        """Start a command as it stands in the README, with the token that was shown."""
        first, *words = shlex.split(command.replace("3f9c...", token))
        start = {"gpumesh": ["-m", "gpumesh.cli.main"], "python": []}[first]
        return self._host.program(
            *self._before, *TERMINAL, sys.executable, *start, *words, environment=self._lan.environment(self._host)
        )


def test_three_commands_and_a_sweep(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    hosts = make_hosts(4, memory="1g")
    _, _, three, four = hosts
    lan = Lan(hosts, tmp_path)
    lan.unplug(three)
    lan.add("wan", WAN, [three, four])  # The friend's machine reaches the proxy, and nothing of the flat.
    proxy = four.python(
        "-m", "tests.support.reverse_proxy", str(tmp_path), "443", "10.9.0.1:8000", cwd=REPOSITORY, stdin=subprocess.PIPE
    )
    assert proxy.stdin is not None
    with proxy.stdin:  # It ends with that.
        join_and_sweep(lan)


def join_and_sweep(lan: Lan) -> None:
    """What the three people type, and what they read."""
    serve, quickjoin, through_proxy, sweep = commands()
    one, two, three, _ = lan.hosts
    desk = Machine(lan, one, "desk")
    laptop = Machine(lan, two, "laptop")
    friend = Machine(lan, three, "friend", knows=f"{WAN}.{PROXY} mesh.example.org")

    mesh = desk.type(serve)
    token = mesh.wait_for(r"gpumesh join http://10\.9\.0\.1:8000 --token ([0-9a-f]{64})").group(1)
    first = laptop.type(quickjoin, token)
    second = friend.type(through_proxy, token)
    first.wait_for(r'found the mesh "desk" at http://10\.9\.0\.1:8000', 30.0)
    first.wait_for(r"laptop works for http://10\.9\.0\.1:8000 with \d+ slots", 30.0)
    second.wait_for(r"friend works for https://mesh\.example\.org:443 with \d+ slots", 30.0)
    done = desk.type(f"{sweep} --points 60 --steps 300000")
    done.wait_for(r"values of r are chaotic", 60.0)
    until(lambda: done.process.poll() is not None, 20.0)

    counts = dict(re.findall(r"^ *\d+ on (\w+) \((\w+)\)", done.output, re.MULTILINE))
    assert sorted(counts.values()) == ["desk", "friend", "laptop"]
    assert "Traceback" not in mesh.output + first.output + second.output
