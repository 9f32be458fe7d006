"""Mesh processes of this process's own: `GPUMesh.local`, `start_coordinator`, `add_worker`. Loads no event loop itself."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from typing import Any, Dict, List, Mapping, Optional

from gpumesh.config import DEFAULT_PORT
from gpumesh.errors import MeshError
from gpumesh.network.address import Address, parse_address
from gpumesh.runtime.launch import child_environment, launch_spawner
from gpumesh.runtime.spawner_channel import MessageReader, send_request

END_SECONDS = 5.0  # From closing the channel to the last process being reaped; killed then.
STOP_SECONDS = 10.0  # For a worker to finish what it runs ...
HAND_BACK_SECONDS = 3.0  # ... and then to end it.

_open: weakref.WeakSet[_Processes] = weakref.WeakSet()


class _Processes:
    """A spawner of ours and the children asked of it."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._reader = MessageReader()
        self._answers: Dict[str, Dict[str, Any]] = {}
        self._exits: Dict[str, int] = {}
        self._is_closed = False
        self._is_gone = False  # The spawner has ended by itself.
        self.pid, self.channel = launch_spawner(environment=child_environment())
        _open.add(self)

    def fork(self, key: str, request: Dict[str, Any], fds: List[int]) -> None:
        """Ask for a child; does not wait for it."""
        try:
            send_request(self.channel, dict(request, op="fork", key=key, path=sys.path, verbose=_verbosity()), fds)
        except OSError as error:
            raise MeshError(f"cannot start the {key} process: {error}") from error

    def pids(self, *, wait_for: int = 0, timeout: float = 5.0) -> Dict[str, int]:
        """Process ids by name, waiting until `wait_for` of them are known."""
        deadline = time.monotonic() + timeout
        with self._lock:
            while not self._is_closed:
                wait = max(0.0, deadline - time.monotonic()) if len(self._answers) < wait_for else 0.0
                if not self._read(wait):
                    break
        known = {key: answer["pid"] for key, answer in self._answers.items() if key not in self._exits}
        return {"spawner": self.pid, **known}

    def why_ended(self, key: str, *, wait: float = 0.0) -> str:
        """What became of a child; "" while it lives, as far as is known after waiting for such news."""
        with self._lock:
            while not self._is_closed and not self._is_gone and key not in self._exits and self._read(wait):
                pass
        if key in self._exits:
            code = self._exits[key]
            return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return "the process that started it has ended" if self._is_gone else ""

    def stop_child(self, key: str, *, timeout: float) -> None:
        """Interrupt a child and wait for its end."""
        deadline = time.monotonic() + timeout
        with self._lock:
            if self._is_closed:
                return
            try:
                send_request(self.channel, {"op": "signal", "key": key, "signal": int(signal.SIGINT)}, [])
            except OSError:
                return
            while key not in self._exits and self._read(max(0.0, deadline - time.monotonic())):
                pass

    def _read(self, wait: float) -> bool:
        """Take in what the spawner says; False when nothing came."""
        ready, _, _ = select.select([self.channel], [], [], wait)
        try:
            data = self.channel.recv(65536) if ready else b""
        except ConnectionResetError:
            data = b""
        self._is_gone = self._is_gone or (bool(ready) and not data)
        for message in self._reader.feed(data, []):
            if "exit" in message:
                self._exits[message["key"]] = message["exit"]
            else:
                self._answers[message["key"]] = message
        return bool(data)

    def close(self) -> None:
        """End all of them and wait. Idempotent; in a forked child only the descriptor is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.channel.close()
        if os.getpid() != self._owner:
            return
        deadline = time.monotonic() + END_SECONDS
        delay = 0.0005
        while time.monotonic() < deadline:
            try:
                pid, _ = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                return
            if pid:
                return
            time.sleep(delay)
            delay = min(delay * 2, 0.02)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def random_hex(count: int) -> str:
    """`count` bytes of the system's entropy in hexadecimal, without the imports of `secrets`."""
    return os.urandom(count).hex()


def _verbosity() -> int:
    return 1 if os.environ.get("GPUMESH_VERBOSE", "") not in ("", "0") else 0


@atexit.register
def _close_all() -> None:
    for processes in list(_open):
        processes.close()


class EmbeddedMesh:
    """Coordinator and workers on loopback, in processes of their own that end with this object or with this process.

    Returns as soon as the coordinator's port exists; a connection made at once is served once the process is up.

    Args:
        workers: Worker agents, each with runners of its own.
        slots: Tasks that run at the same time on each worker.
    """

    def __init__(self, *, workers: int = 2, slots: int = 1) -> None:
        if workers < 0 or slots < 1:
            raise ValueError(f"an embedded mesh has 0 or more workers with 1 or more slots, not {workers} with {slots}")
        self.token = random_hex(32)
        self.workers = workers
        self._processes = _Processes()
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            self.address = Address("127.0.0.1", listener.getsockname()[1])
            self.url = self.address.url
            # A spawner that cannot start may have ended by now, or in a moment: either way the first use says so (`problem`).
            with contextlib.suppress(MeshError):
                self._processes.fork("coordinator", {"role": "coordinator", "token": self.token}, [listener.fileno()])
                for number in range(1, workers + 1):
                    withheld = OFFERED_BY_THE_FIRST if number > 1 else ""
                    facts = _facts(slots, None, None)
                    _fork_worker(self._processes, f"worker-{number}", self.address, self.token, facts, withheld=withheld)

    @property
    def problem(self) -> str:
        """Why nobody answers here any more; "" if nothing is known that would explain it."""
        why = self._processes.why_ended("coordinator", wait=0.2)
        if not why:
            return ""
        return f"the mesh in processes of this program's own has ended ({why}); what they said last is on its standard error"

    @property
    def processes(self) -> Dict[str, int]:
        """Process ids: "spawner", "coordinator", "worker-1", ... (runners belong to their workers)."""
        return self._processes.pids(wait_for=self.workers + 1)

    def close(self) -> None:
        """End every process of this mesh. Idempotent."""
        self._processes.close()

    def __enter__(self) -> EmbeddedMesh:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class WorkerHandle:
    """This machine as a worker of some mesh.

    Attributes:
        info: The worker's id and facts (`hostname`, `slots`, `cores`, `score`, `devices`, ...).
    """

    def __init__(self, processes: _Processes, info: Dict[str, Any]) -> None:
        self._processes = processes
        self.info = info

    @property
    def processes(self) -> Dict[str, int]:
        """Process ids: "spawner", "worker"."""
        return self._processes.pids(wait_for=1)

    def fileno(self) -> int:
        """Readable when `why_ended` may have an answer."""
        return self._processes.channel.fileno()

    def why_ended(self) -> str:
        """Why it is no worker any more, "" while it is one. Does not wait."""
        return self._processes.why_ended("worker")

    def __getitem__(self, name: str) -> Any:
        return self.info[name]

    def stop(self) -> None:
        """Leave the mesh: what runs may finish for `STOP_SECONDS` and is handed back then, what waits goes elsewhere. Idempotent."""
        self._processes.stop_child("worker", timeout=STOP_SECONDS)
        self._processes.stop_child("worker", timeout=HAND_BACK_SECONDS)
        self._processes.close()

    def kill(self) -> None:
        """End its processes now. Idempotent."""
        self._processes.close()

    def __enter__(self) -> WorkerHandle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def add_worker(
    url: str,
    token: str,
    *,
    slots: Optional[int] = None,
    score: Optional[float] = None,
    tags: Optional[Mapping[str, str]] = None,
) -> WorkerHandle:
    """Lend this machine to the mesh at `url`, as its owner's rules allow, in a process of its own; returns at once, joining goes on behind.

    Raises:
        ValueError: The address, slots or score make no sense.
    """
    from gpumesh.model.resources import facts_as_dict
    from gpumesh.runtime.owner_file import rules_file

    address = parse_address(url)
    facts = _facts(slots, score, tags)
    processes = _Processes()
    worker_id = _fork_worker(processes, "worker", address, token, facts, measure=score is None, rules=rules_file())
    return WorkerHandle(processes, {"id": worker_id, **facts_as_dict(facts)})


class CoordinatorHandle:
    """A coordinator on a background thread of this process.

    Attributes:
        url: Its address, for `GPUMesh(url, token=...)` and `gpumesh join`.
        token: Its token; keep it secret.
    """

    def __init__(self, thread: Any, coordinator: Any, url: str, token: str) -> None:
        self._thread = thread
        self._coordinator = coordinator
        self.url = url
        self.token = token

    def stop(self) -> None:
        """End it. Clients and workers lose their connection. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.call(self._coordinator.stop, timeout=5.0)
            finally:
                thread.stop()

    def __enter__(self) -> CoordinatorHandle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def start_coordinator(port: int = DEFAULT_PORT, token: Optional[str] = None, *, host: str = "127.0.0.1") -> CoordinatorHandle:
    """Start a coordinator on a background thread; it listens when this returns.

    Args:
        port: 0 picks a free one.
        token: Generated (256 bits) when not given.
        host: The address to bind, "" for every address of this machine. Other machines speak TLS with it, as with `gpumesh serve`.

    Raises:
        OSError: The port is taken, the address is not ours, or there is no place for a certificate.
    """
    from gpumesh.network.ranking import is_only_local
    from gpumesh.network.tcp import ANY, listen, near
    from gpumesh.runtime.coordinator import Coordinator
    from gpumesh.runtime.loop import LoopThread

    token = token or random_hex(32)
    identity = None
    if not is_only_local(host):
        from gpumesh.network.certificates import load_or_make_identity

        identity = load_or_make_identity()
    listener = listen(host, port)
    shown = host
    if host in ANY:
        from gpumesh.runtime.serving_addresses import reachable_hosts

        shown = (reachable_hosts(host) or [near(host)])[0]
    bound = Address(shown, listener.getsockname()[1])
    thread = LoopThread("gpumesh-coordinator")

    async def start() -> Coordinator:
        coordinator = Coordinator(token=token, identity=identity)
        await coordinator.start(listener)
        return coordinator

    coordinator = thread.call(start, timeout=5.0)
    handle = CoordinatorHandle(thread, coordinator, bound.url, token)
    _coordinators.add(handle)
    return handle


OFFERED_BY_THE_FIRST = "offered by the first worker of this mesh"  # Two books of one card would lend it twice.
_coordinators: weakref.WeakSet[CoordinatorHandle] = weakref.WeakSet()


def _facts(slots: Optional[int], score: Optional[float], tags: Optional[Mapping[str, str]]) -> Any:
    from gpumesh.devices.detect import local_facts

    return local_facts(slots=slots, score=score, tags=tags)


def _fork_worker(
    processes: _Processes,
    key: str,
    address: Address,
    token: str,
    facts: Any,
    *,
    measure: bool = False,
    withheld: str = "",
    rules: str = "",
) -> str:
    from gpumesh.model.resources import withhold

    worker_id = random_hex(8)
    if withheld:
        facts = facts._replace(devices=withhold(facts.devices, withheld))
    request = {
        "role": "worker",
        "host": address.host,
        "port": address.port,
        "way": address.way,
        "token": token,
        "facts": facts,
        "worker": worker_id,
        "measure": measure,
        "withheld": withheld,
        "rules": rules,
    }
    processes.fork(key, request, [])
    return worker_id
