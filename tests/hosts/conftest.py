"""Hosts with addresses and memory of their own, on this machine: a network namespace and a private /dev/shm each, joined by a cable."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import pytest

REPOSITORY = Path(__file__).parents[2]
_PRIVATE_MEMORY = 'mount -t tmpfs -o size="$1" tmpfs /dev/shm && shift && exec "$@"'


class Host:
    """One end of the cable."""

    def __init__(self, name: str, address: str, *, memory: str) -> None:
        self.name = name
        self.address = address
        self._memory = memory
        self._processes: List[subprocess.Popen[str]] = []

    def start(self, *command: str, environment: Optional[Dict[str, str]] = None, **options: Any) -> subprocess.Popen[str]:
        """Start a program there; it ends with the test."""
        private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _PRIVATE_MEMORY, "sh", self._memory]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *private, *command],
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

    def close(self) -> None:
        """End all that was started there."""
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
    """Two hosts and the cable between them."""

    def __init__(self, *, memory: str = "12g") -> None:
        tag = secrets.token_hex(3)
        self._cable = f"gm{tag}"
        self.one = Host(f"gpumesh-{tag}-1", "10.77.0.1", memory=memory)
        self.two = Host(f"gpumesh-{tag}-2", "10.77.0.2", memory=memory)
        try:
            for host in (self.one, self.two):
                _ip("netns", "add", host.name)
            _ip("link", "add", f"{self._cable}a", "netns", self.one.name, "type", "veth", "peer", "name", f"{self._cable}b",
                "netns", self.two.name)  # fmt: skip
            for host, end in ((self.one, "a"), (self.two, "b")):
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", f"{self._cable}{end}")
                _ip("-n", host.name, "link", "set", f"{self._cable}{end}", "up")
                _ip("-n", host.name, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def slow_down(self, rate: str) -> None:
        """Let no more than this pass from one to two ("20mbit")."""
        _run("ip", "netns", "exec", self.one.name, "tc", "qdisc", "add", "dev", f"{self._cable}a", "root", "tbf", "rate", rate,
             "burst", "32kbit", "latency", "400ms")  # fmt: skip

    def close(self) -> None:
        """Take it all down."""
        for host in (self.one, self.two):
            host.close()
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root, ip and unshare")
    try:
        made = Hosts()
    except RuntimeError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()
