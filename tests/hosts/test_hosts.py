"""The hosts themselves: what is cut is cut, in that direction, without a word; what is mended works; nothing is left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Iterator, Tuple

import psutil
import pytest

from tests.support.hosts import REPOSITORY, Host, Hosts, freeze, kill, thaw, tree, until_reachable
from tests.support.processes import until

PORT = 4000
SHORT = 0.3  # For what must not come.


class Pair:
    """A connection from the second host to the first."""

    def __init__(self, hosts: Hosts) -> None:
        with hosts.one.inside():
            self._listener = socket.create_server(("0.0.0.0", PORT))
        self._hosts = hosts
        self.near, self.far = self.connect()

    def connect(self) -> Tuple[socket.socket, socket.socket]:
        """One more."""
        with self._hosts.two.inside():
            near = socket.create_connection((self._hosts.one.address, PORT), 5)
        return near, self.accept()

    def accept(self) -> socket.socket:
        """The first host's end of a connection."""
        return self._listener.accept()[0]

    def close(self) -> None:
        for sock in (self.near, self.far, self._listener):
            sock.close()


@pytest.fixture
def pair(hosts: Hosts) -> Iterator[Pair]:
    made = Pair(hosts)
    yield made
    made.close()


def arrives(sender: socket.socket, receiver: socket.socket, timeout: float) -> bool:
    """Whether a byte gets through in time."""
    sender.send(b"x")
    receiver.settimeout(timeout)
    try:
        return receiver.recv(1) == b"x"
    except socket.timeout:
        return False


def test_hosts_are_there_soon_and_gone_afterwards(make_hosts: Callable[..., Hosts]) -> None:
    started = time.monotonic()
    made = make_hosts(5)
    assert time.monotonic() - started < 1.0
    assert len(made) == 5
    names = [made.router, *(host.name for host in made)]
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert all(name in listed for name in names)

    made.close()

    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in names)


KILLED = """
import os, signal, subprocess
from tests.support.hosts import Hosts
hosts = Hosts(1)
process = hosts.one.start("sleep", "600", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(hosts.router, process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_has_left_is_taken_down(make_hosts: Callable[..., Hosts]) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    router, pid = killed.stdout.split()
    assert Path("/run/netns", router).exists()

    make_hosts(1)

    assert not Path("/run/netns", router).exists()
    until(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE, 5)


@pytest.mark.parametrize(("cut", "out", "back"), [("cut", 0, 0), ("cut_what_it_sends", 0, 1), ("cut_what_it_is_sent", 1, 0)])
def test_a_cut_is_silent_and_in_its_direction(hosts: Hosts, pair: Pair, cut: str, out: int, back: int) -> None:
    assert arrives(pair.near, pair.far, 5)
    assert arrives(pair.far, pair.near, 5)

    getattr(hosts, cut)(hosts.two)

    if out:  # Only what the other host sends is lost: acknowledgements too, and yet the bytes are there.
        assert arrives(pair.near, pair.far, 5)
    else:
        assert not arrives(pair.near, pair.far, SHORT)
    if back:
        assert arrives(pair.far, pair.near, 5)
    else:
        assert not arrives(pair.far, pair.near, SHORT)

    hosts.mend(hosts.two)

    for sender, receiver in ((pair.near, pair.far), (pair.far, pair.near)):
        assert arrives(sender, receiver, 10)  # Sent again by TCP, with what was lost.


def test_a_reset_is_heard_at_both_ends(hosts: Hosts, pair: Pair) -> None:
    hosts.reset(hosts.two, PORT)

    for sock in (pair.near, pair.far):
        sock.settimeout(5)
        with pytest.raises(ConnectionError):
            sock.recv(1)
    until_reachable_from(hosts.two, hosts.one.address)


def until_reachable_from(host: Host, address: str) -> None:
    with host.inside():
        until_reachable(address, PORT)


def test_a_pulled_cable_and_another_address(hosts: Hosts, pair: Pair) -> None:
    hosts.unplug(hosts.two)
    assert not arrives(pair.near, pair.far, SHORT)
    hosts.plug(hosts.two)
    pair.far.settimeout(5)
    assert pair.far.recv(1) == b"x"

    before = hosts.two.address
    hosts.change_address(hosts.two)

    assert hosts.two.address != before
    near, far = pair.connect()
    assert far.getpeername()[0] == hosts.two.address
    assert arrives(near, far, 5)
    assert not arrives(pair.near, pair.far, SHORT)
    near.close()
    far.close()


def test_a_limited_link_is_slow(hosts: Hosts, pair: Pair) -> None:
    hosts.limit(hosts.two, "8mbit")
    data = bytes(1_000_000)
    with hosts.two.inside():
        code = f"import socket; s = socket.create_connection(({hosts.one.address!r}, {PORT})); s.sendall(bytes(1_000_000)); s.close()"
        sender = subprocess.Popen([sys.executable, "-c", code])
    far = pair.accept()
    started = time.monotonic()
    received = 0
    while part := far.recv(65536):
        received += len(part)
    far.close()
    assert sender.wait(10) == 0
    assert received == len(data)
    assert 0.7 < time.monotonic() - started < 5.0


def test_a_router_forgets_idle_connections(hosts: Hosts) -> None:
    try:
        hosts.forget_idle_flows(1)
    except RuntimeError as error:
        pytest.skip(f"no packet filter here: {error}")
    pair = Pair(hosts)
    for _ in range(3):
        time.sleep(0.6)
        assert arrives(pair.near, pair.far, 5)  # In use: it is known for another second.
    time.sleep(1.8)

    assert not arrives(pair.near, pair.far, SHORT)
    near, far = pair.connect()
    assert arrives(near, far, 5)
    for sock in (near, far):
        sock.close()
    pair.close()


COUNT = """
import subprocess, sys, time
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "child"])
while True:
    print(len(sys.argv), flush=True)
    time.sleep(0.05)
"""


def test_a_frozen_program_stands_still_with_its_children_and_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    program = hosts.two.program(sys.executable, str(script), environment={"PATH": os.environ["PATH"]})
    program.wait_for("2")
    program.wait_for("1")

    freeze(program)

    assert {process.status() for process in tree(program)} == {psutil.STATUS_STOPPED}
    time.sleep(0.1)  # What they had said before is read.
    said = len(program.lines)
    time.sleep(SHORT)
    assert len(program.lines) == said
    thaw(program)
    until(lambda: {line for _, line in program.lines[said:]} == {"1", "2"}, 5, what="both go on")
    child = tree(program)[1]
    kill(program)
    assert child.is_running()  # Only the program itself: its child lives on until the host ends.
    child.kill()
