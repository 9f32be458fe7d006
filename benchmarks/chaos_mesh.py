"""The processes of the chaos run: a coordinator, workers and clients, each a command of its own, with wires between them; and what they use."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

from benchmarks import processes
from benchmarks.far import NO_SHARED_MEMORY
from benchmarks.running import ROOT

WORKERS = 4
CLIENTS = 2
SLOTS = 2
START_SECONDS = 30.0
END_SECONDS = 15.0
MARK = "GPUMESH_CHAOS_MARK"  # In the environment of all, so that what is left can be found.
_ENTRY = re.compile(r"^(?=\d\d:\d\d:\d\d [A-Z] |--- started at |Exception in callback|Fatal error on transport)", re.MULTILINE)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|was never retrieved|was never awaited|Fatal error|dumped core")


class Program:
    """One command that may be killed and started again; what it says goes to one file.

    Attributes:
        pids: Of all its lives.
        is_meant_to_live: Nobody has killed it, so it should be there.
    """

    def __init__(self, name: str, command: List[str], environment: Dict[str, str], log: Path) -> None:
        self.name = name
        self.command = command
        self.environment = environment
        self.log = log
        self.pids: List[int] = []
        self.is_meant_to_live = False
        self._process: Optional[subprocess.Popen[bytes]] = None

    @property
    def pid(self) -> int:
        """Of its present life; 0 when there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    def start(self) -> None:
        """Begin a life; returns at once."""
        with open(self.log, "ab") as log:
            log.write(f"--- started at {time.monotonic():.3f}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C at the harness reaches only us.
            )
        self.pids.append(self._process.pid)
        self.is_meant_to_live = True

    def kill(self) -> None:
        """As by a power cut; does nothing to the dead."""
        self.is_meant_to_live = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def tree(self) -> List[int]:
        """It and all its descendants."""
        return [self.pid, *processes.descendants(self.pid)] if self.pid else []

    def end(self) -> Optional[int]:
        """As by Ctrl-C, twice if need be; its exit status, None when it had to be killed."""
        if self._process is None:
            return 0
        self.is_meant_to_live = False
        for _ in range(2):
            self._process.send_signal(signal.SIGINT)
            try:
                return self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        self._process.kill()
        self._process.wait()
        return None

    def why_over(self) -> Optional[int]:
        """The exit status of one that should be there and is not."""
        if self.is_meant_to_live and self._process is not None:
            return self._process.poll()
        return None

    def said(self) -> str:
        """All of it."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def said_last(self) -> str:
        """In its present or last life."""
        return self.said().rpartition("--- started at ")[2]


class Driver:
    """A client's program: takes orders, says lines of JSON."""

    def __init__(
        self, name: str, settings: Dict[str, Any], environment: Dict[str, str], log: Path, hear: Callable[..., None]
    ) -> None:
        self.name = name
        self.log = log
        with open(log, "ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.chaos_client", json.dumps(settings)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._hear = hear
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """0 when it has ended."""
        return self.process.pid if self.process.poll() is None else 0

    def tree(self) -> List[int]:
        """It and all its descendants."""
        return [self.pid, *processes.descendants(self.pid)] if self.pid else []

    def order(self, word: str) -> None:
        """ "go", "hold" or "end"."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{word}\n".encode())
            self.process.stdin.flush()

    def end(self) -> Optional[int]:
        """Its exit status, None when it had to be killed."""
        self.order("end")
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.process.kill()
            self.process.wait()
            self._thread.join(END_SECONDS)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._hear(self, json.loads(line))

    def said(self) -> str:
        """On its standard error."""
        return self.log.read_text(encoding="utf-8", errors="replace")


class Mesh:
    """All of them. Wires 0 to WORKERS - 1 are the workers', the others the clients'.

    Args:
        folder: For logs, the database, and all that the processes take for the user's own folders.
        seed: Of what the clients submit.
        hear: Called with a Driver and what it said, on a thread of its own.
        rate: Tasks per second of each client.
        kinds: Of tasks; empty for all.
    """

    def __init__(self, folder: Path, *, seed: int, hear: Callable[..., None], rate: float, kinds: List[str]) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self.temporary = folder / "tmp"
        self.database = folder / "jobs.db"
        self.marks = [folder / f"marks-{number}" for number in range(CLIENTS)]
        self.port = _free_port()
        self._token = secrets.token_hex(32)
        self._seed = seed
        self._hear = hear
        self._rate = rate
        self._kinds = kinds
        self.temporary.mkdir()
        self._relay = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.chaos_relay", str(self.port), str(WORKERS + CLIENTS)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._relay.stdout is not None
        self._ports: List[int] = json.loads(self._relay.stdout.readline())
        self.coordinator = self._program("coordinator", self._serve(), far=False)
        self.workers = [
            self._program(f"worker {number + 1}", self._join(number), far=number % 2 == 1) for number in range(WORKERS)
        ]
        self.clients: List[Driver] = []

    def start(self) -> None:
        """Everything is there when this returns.

        Raises:
            RuntimeError: Something is not.
        """
        self.coordinator.start()
        self._await("serving at", self.coordinator)
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            self._await("works for", worker)
        for number in range(CLIENTS):
            settings = {
                "name": f"client {number + 1}",
                "url": f"http://127.0.0.1:{self._ports[WORKERS + number]}",
                "seed": f"client {number} {self._seed}",
                "rate": self._rate,
                "kinds": self._kinds,
                "marks": str(self.marks[number]),
            }
            environment = self._environment(f"client {number + 1}", far=number % 2 == 1)
            log = self.folder / f"client-{number + 1}.log"
            self.clients.append(Driver(settings["name"], settings, environment, log, self._hear))

    def wire(self, number: int, **order: Any) -> None:
        """Do something to a wire; see chaos_relay."""
        assert self._relay.stdin is not None
        self._relay.stdin.write(json.dumps({"wire": number, **order}).encode() + b"\n")
        self._relay.stdin.flush()

    def programs(self) -> Iterator[Any]:
        """Coordinator, workers, clients."""
        yield self.coordinator
        yield from self.workers
        yield from self.clients

    def usage(self) -> Dict[str, Dict[str, float]]:
        """What each of them uses now: memory in bytes and descriptors of it alone, and the processes below it."""
        found: Dict[str, Dict[str, float]] = {}
        for program in self.programs():
            tree = program.tree()
            if tree:
                found[program.name] = {
                    "memory": processes.own_pss_bytes(tree[0]),
                    "descriptors": _descriptors(tree[0]),
                    "processes": len(tree),
                    "memory of all": sum(map(processes.own_pss_bytes, tree)),
                }
        return found

    def tracebacks(self) -> List[str]:
        """What coordinator and workers said that no program should say; the same thing said again is counted."""
        found: Dict[str, List[str]] = {}
        for program in [self.coordinator, *self.workers]:
            for entry in _ENTRY.split(program.said()):
                if _TRACEBACK.search(entry):
                    error = entry.strip().rpartition("\n")[2]
                    found.setdefault(f"{program.name}: {error}", []).append(entry.strip())
        return [f"{error} ({len(entries)} times): {entries[0][:3000]}" for error, entries in found.items()]

    def end(self) -> List[str]:
        """End everything in good order; what did not end as it should."""
        problems = []
        for program in [*self.clients, *self.workers, self.coordinator]:
            status = program.end()
            if status != 0:
                problems.append(f"{program.name} ended with {'SIGKILL, at last' if status is None else f'status {status}'}")
        self._end_relay()
        return problems

    def kill_all(self) -> None:
        """Leave nothing running, whatever its state."""
        for program in self.programs():
            for pid in program.tree():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._end_relay()

    def leftovers(self, seconds: float) -> List[str]:
        """What is still there so long after the end: processes, segments of our processes in shared memory, temporary files."""
        deadline = time.monotonic() + seconds
        while True:
            left = [*self._marked(), *self._segments(), *self._temporary_files()]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def _marked(self) -> List[str]:
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0") and processes.is_running(int(entry)):
                    found.append(f"process {entry} ({processes.name(int(entry))})")
        return found

    def _segments(self) -> List[str]:
        pids = {pid for program in [self.coordinator, *self.workers] for pid in program.pids}
        pids.update(client.process.pid for client in self.clients)
        found = []
        for folder in Path(processes.SHARED_MEMORY).glob("gpumesh-*/*"):
            if folder.name.rpartition("-")[2] in map(str, pids):
                found.append(f"{folder} with {len(list(folder.glob('*')))} files")
        return found

    def _temporary_files(self) -> List[str]:
        return [str(path) for path in self.temporary.rglob("*") if not path.is_dir()]

    def _end_relay(self) -> None:
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.close()
        self._relay.wait(END_SECONDS)
        self._relay.stdout.close()

    def _await(self, words: str, program: Program) -> None:
        deadline = time.monotonic() + START_SECONDS
        while words not in program.said():
            if time.monotonic() > deadline or not program.pid:
                raise RuntimeError(f"{program.name} did not start: {program.said()}")
            time.sleep(0.05)

    def _program(self, name: str, arguments: List[str], *, far: bool) -> Program:
        command = [sys.executable, "-m", "gpumesh", *arguments]
        return Program(name, command, self._environment(name, far=far), self.folder / f"{name.replace(' ', '-')}.log")

    def _serve(self) -> List[str]:
        return ["serve", "--host", "127.0.0.1", "--port", str(self.port), "--no-self-worker", "--db", str(self.database)]

    def _join(self, number: int) -> List[str]:
        return ["join", f"http://127.0.0.1:{self._ports[number]}", "--slots", str(SLOTS), "--score", "1"]

    def _environment(self, name: str, *, far: bool) -> Dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("GPUMESH_")}
        home = self.folder / f"home-{name.replace(' ', '-')}"
        home.mkdir(exist_ok=True)
        return {
            **kept,
            **({NO_SHARED_MEMORY: "1"} if far else {}),
            "GPUMESH_TOKEN": self._token,
            "GPUMESH_VERBOSE": "1",
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_DATA_HOME": str(home / "data"),
            "XDG_STATE_HOME": str(home / "state"),
            "TMPDIR": str(self.temporary),
            "PYTHONUNBUFFERED": "1",
            MARK: self.mark,
        }


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
