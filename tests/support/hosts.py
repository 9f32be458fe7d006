"""Hosts with addresses and memory of their own, on this machine: a network namespace and a private /dev/shm each, around one router.

              router 10.77.N.1 ---- cable ---- host N, 10.77.N.2

What the router and the cables do to packets can be changed while programs run: see `Hosts`. Needs root, `ip`, and for some of it `tc` and
`ss`; nothing of this machine's own network is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import psutil

from tests.integration.programs import Program
from tests.support.processes import until

REPOSITORY = Path(__file__).resolve().parents[2]
_PRIVATE_MEMORY = 'mount -t tmpfs -o size="$1" tmpfs /dev/shm && shift && exec "$@"'
_NETWORK = 0x40000000  # CLONE_NEWNET
_NAMESPACES = Path("/run/netns")
_PREFIX = "gm-ho-"  # Of our namespaces' names; the id of the process that made them follows.
_END = "eth0"  # Of the cable, in every host.


class Host:
    """One machine of a network."""

    def __init__(self, number: int, name: str, *, memory: str) -> None:
        self.number = number
        self.name = name  # Of the network namespace.
        self.address = f"10.77.{number}.2"
        self.router = f"10.77.{number}.1"
        self.cable = f"host{number}"  # Its end at the router.
        self._memory = memory
        self._processes: List[subprocess.Popen[str]] = []
        self._programs: List[Program] = []

    # --- programs

    def start(self, *command: str, environment: Optional[Dict[str, str]] = None, **options: Any) -> subprocess.Popen[str]:
        """Start a program there; it ends with the test."""
        process = subprocess.Popen(
            self._there(command),
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
            text=True,
            start_new_session=True,
            **options,
        )
        self._processes.append(process)
        return process

    def python(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start Python there."""
        return self.start(sys.executable, *arguments, **options)

    def program(self, *command: str, environment: Mapping[str, str]) -> Program:
        """The same with its output read all the time."""
        program = Program(self._there(command), environment)
        self._programs.append(program)
        return program

    def _there(self, command: Sequence[str]) -> List[str]:
        private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _PRIVATE_MEMORY, "sh", self._memory]
        return ["ip", "netns", "exec", self.name, *private, *command]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread, and threads that it starts, are on this host as far as the network goes."""
        with open("/proc/thread-self/ns/net") as before, open(_NAMESPACES / self.name) as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def close(self) -> None:
        """End all that was started there."""
        for program in self._programs:
            thaw(program)
            program.kill()
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


class Hosts:
    """Some hosts and the router between them.

    Args:
        count: Hosts, at most 200; `hosts[0]` is also `hosts.one`, `hosts[1]` is `hosts.two`.
        memory: Size of the /dev/shm of each of their programs.

    Raises:
        RuntimeError: This machine or this user cannot have them.
    """

    def __init__(self, count: int = 2, *, memory: str = "12g") -> None:
        _sweep()
        tag = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
        self.router = f"{tag}-r"
        self._hosts = [Host(number, f"{tag}-{number}", memory=memory) for number in range(1, count + 1)]
        try:
            _batch([f"netns add {name}" for name in (self.router, *(host.name for host in self._hosts))])
            _batch(
                [
                    f"link add {host.cable} netns {self.router} type veth peer name {_END} netns {host.name}"
                    for host in self._hosts
                ]
            )
            _batch(
                ["link set lo up"]
                + [f"addr add {host.router}/24 dev {host.cable}" for host in self._hosts]
                + [f"link set {host.cable} up" for host in self._hosts],
                there=self.router,
            )
            for host in self._hosts:
                _batch(
                    ["link set lo up", f"addr add {host.address}/24 dev {_END}", f"link set {_END} up"]
                    + [f"route add default via {host.router}"],
                    there=host.name,
                )
            self._at_router("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        except BaseException:
            self.close()
            raise

    @property
    def one(self) -> Host:
        return self._hosts[0]

    @property
    def two(self) -> Host:
        return self._hosts[1]

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    # --- what happens to packets

    def cut(self, host: Host) -> None:
        """Nothing reaches this host and nothing of it gets out; nobody is told."""
        self.cut_what_it_sends(host)
        self.cut_what_it_is_sent(host)

    def cut_what_it_sends(self, host: Host) -> None:
        """What this host sends is lost; it hears the others."""
        self._route("rule", "add", "iif", host.cable, "priority", str(2 * host.number), "blackhole")

    def cut_what_it_is_sent(self, host: Host) -> None:
        """What others send to this host is lost; they hear it."""
        self._route("rule", "add", "to", f"{host.router}/24", "priority", str(2 * host.number + 1), "blackhole")

    def mend(self, host: Host) -> None:
        """Undo any of the three."""
        for priority in (2 * host.number, 2 * host.number + 1):
            done = subprocess.run(
                ["ip", "-n", self.router, "rule", "del", "priority", str(priority)], check=False, capture_output=True
            )
            assert done.returncode in (0, 2), done.stderr  # 2: there is no such rule.

    def unplug(self, host: Host) -> None:
        """Pull this host's cable: the host sees that it has no carrier."""
        self._route("link", "set", host.cable, "down")

    def plug(self, host: Host) -> None:
        """Put it back."""
        self._route("link", "set", host.cable, "up")

    def reset(self, host: Host, port: int) -> None:
        """Break this host's connections to and from this port of others, with a reset at both ends."""
        for side in ("dport", "sport"):
            _run("ip", "netns", "exec", host.name, "ss", "--tcp", "--kill", "state", "established", side, "=", f":{port}")

    def limit(self, host: Host, rate: str) -> None:
        """Let no more than this pass to and from this host, each ("8mbit")."""
        tbf = ["root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms"]
        _run("ip", "netns", "exec", host.name, "tc", "qdisc", "replace", "dev", _END, *tbf)
        self._at_router("tc", "qdisc", "replace", "dev", host.cable, *tbf)

    def unlimit(self, host: Host) -> None:
        """Undo that."""
        _run("ip", "netns", "exec", host.name, "tc", "qdisc", "del", "dev", _END, "root")
        self._at_router("tc", "qdisc", "del", "dev", host.cable, "root")

    def slow_down(self, rate: str) -> None:
        """Let no more than this leave the first host ("20mbit")."""
        _run("ip", "netns", "exec", self.one.name, "tc", "qdisc", "add", "dev", _END, "root", "tbf", "rate", rate,
             "burst", "32kbit", "latency", "400ms")  # fmt: skip

    def forget_idle_flows(self, seconds: int) -> None:
        """Forget connections through the router that are silent for so long, and drop what comes of them afterwards.

        To be called before they are made: those that exist are forgotten at once.
        """
        code = "import sys; from tests.support.packet_filter import forget_idle_flows; forget_idle_flows(int(sys.argv[1]))"
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self._at_router(sys.executable, "-c", code, str(seconds), environment=environment)

    def let_nobody_in(self, host: Host) -> None:
        """Nobody can connect to this host; it can connect to others, as behind a home router."""
        code = "import sys; from tests.support.packet_filter import let_nobody_in; let_nobody_in(sys.argv[1])"
        self._at_router(sys.executable, "-c", code, host.cable, environment={**os.environ, "PYTHONPATH": str(REPOSITORY)})

    def block_port(self, host: Host, port: int) -> None:
        """What is sent to this TCP port of this host is lost without a word, as by a firewall."""
        where = ["to", f"{host.router}/24", "ipproto", "tcp", "dport", str(port)]
        self._route("rule", "add", *where, "priority", str(1000 + host.number), "blackhole")

    def part(self, host: Host, other: Host) -> None:
        """Nothing gets from one of them to the other, either way; both reach everybody else."""
        for source, target in ((host, other), (other, host)):
            where = ["iif", source.cable, "to", f"{target.router}/24"]
            self._route("rule", "add", *where, "priority", str(2000 + 200 * source.number + target.number), "blackhole")

    def change_address(self, host: Host) -> None:
        """This host gets another address, as after a change of network; the old one is gone, nobody is told."""
        before, last = host.address, int(host.address.rpartition(".")[2])
        host.address = f"10.77.{host.number}.{last + 1}"
        _batch(
            [
                f"addr add {host.address}/24 dev {_END}",
                f"addr del {before}/24 dev {_END}",
                f"addr replace {host.address}/24 dev {_END}",  # With the first address of a net goes the second, as systems are set up.
                f"route replace default via {host.router}",
            ],
            there=host.name,
        )

    # ---

    def close(self) -> None:
        """Take it all down."""
        for host in self._hosts:
            host.close()
        for name in (self.router, *(host.name for host in self._hosts)):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _route(self, *arguments: str) -> None:
        _run("ip", "-n", self.router, *arguments)

    def _at_router(self, *command: str, environment: Optional[Mapping[str, str]] = None) -> None:
        _run("ip", "netns", "exec", self.router, *command, environment=environment)


# --- processes


def tree(program: Program) -> List[psutil.Process]:
    """A program and all that it has started, parents first; those that have just ended are left out."""
    try:
        top = psutil.Process(program.process.pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def freeze(program: Program) -> None:
    """A laptop's lid is closed: the program and all that it has started stand still."""
    _signal(tree(program), signal.SIGSTOP)
    _signal(tree(program), signal.SIGSTOP)  # What one of them had just forked.


def thaw(program: Program) -> None:
    """The lid is opened."""
    _signal(reversed(tree(program)), signal.SIGCONT)


def kill(program: Program) -> None:
    """`kill -9` of the program alone; what it has started is expected to end by itself."""
    program.remember_children()
    program.process.kill()
    program.process.wait()


def kill_one_of(program: Program, choice: random.Random, *, name: str = "") -> Tuple[int, str]:
    """`kill -9` of any process of a program's, or of any with this name; its id and name."""
    found = []
    for process in tree(program):
        with contextlib.suppress(psutil.Error):
            if not name or process.name() == name:
                found.append((process.pid, process.name()))
    pid, called = choice.choice(found)
    os.kill(pid, signal.SIGKILL)
    return pid, called


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


# --- whether, and how


def why_not() -> str:
    """Why there are no such hosts here; empty: there are."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "ss", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    return ""


def reachable(address: str, port: int) -> bool:
    """Whether somebody listens there, seen from the calling thread's network."""
    with contextlib.suppress(OSError):
        socket.create_connection((address, port), 1.0).close()
        return True
    return False


def until_reachable(address: str, port: int) -> None:
    """Wait for a listener."""
    until(lambda: reachable(address, port), 20, what=f"a listener at {address}:{port}")


def _sweep() -> None:
    """Take down what a test run that was killed has left."""
    for path in _NAMESPACES.glob(f"{_PREFIX}*"):
        maker = path.name[len(_PREFIX) :].partition("-")[0]
        if not maker.isdigit() or psutil.pid_exists(int(maker)):
            continue
        pids = subprocess.run(["ip", "netns", "pids", path.name], check=False, capture_output=True, text=True).stdout
        for pid in pids.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)


def _enter(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NETWORK):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")


def _batch(lines: List[str], *, there: str = "") -> None:
    command = ["ip", *(["-n", there] if there else []), "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{'; '.join(lines)}: {done.stderr.strip()}")


def _run(*command: str, environment: Optional[Mapping[str, str]] = None) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
