"""Real processes for tests: start a command, watch its output, interrupt it, and see that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, Optional, Tuple

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
READY_SECONDS = 20.0  # Far beyond what a start takes, also on a loaded machine.


class Program:
    """One command in a session of its own, like the foreground job of a terminal; its output is read as it comes."""

    def __init__(self, words: List[str], environment: Mapping[str, str]) -> None:
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: List[Tuple[float, str]] = []  # Seconds since the start, line.
        self._fresh: queue.Queue[Optional[str]] = queue.Queue()
        self._seen: Dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.started, line.rstrip("\n")))
            self._fresh.put(line)
        self._fresh.put(None)

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return "\n".join(line for _, line in self.lines)

    def wait_for(self, pattern: str, timeout: float = READY_SECONDS) -> re.Match[str]:
        """The first match in a line that has not been waited past yet."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._fresh.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{pattern!r} was not printed within {timeout} s but:\n{self.output}") from None
            assert line is not None, f"ended with {self.process.wait()} without printing {pattern!r} but:\n{self.output}"
            match = re.search(pattern, line)
            if match:
                return match

    def interrupt(self) -> None:
        """Ctrl-C: like a terminal's, it reaches every process of the foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, timeout: float = READY_SECONDS) -> int:
        """The exit code, all output having been read."""
        self.remember_children()
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.output}") from None
        self._reader.join(timeout)
        return code

    def remember_children(self) -> List[psutil.Process]:
        """All processes below this one, now or at an earlier call."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen[child.pid] = child
        return list(self._seen.values())

    def survivors(self, timeout: float = 5.0) -> List[psutil.Process]:
        """Remembered children that still run after some seconds."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout)
        return [child for child in alive if _is_alive(child)]

    def kill(self) -> None:
        """End it and all of its children, whatever state they are in."""
        self.remember_children()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for child in self.survivors(timeout=0.0):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._reader.join(5.0)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Programs:
    """Starts programs with settings of their own, and ends them all."""

    def __init__(self, home: Path) -> None:
        self.environment: Dict[str, str] = {
            name: value for name, value in os.environ.items() if not name.startswith(("GPUMESH_", "PYTEST_"))
        }
        self.environment.update(
            HOME=str(home),
            XDG_CONFIG_HOME=str(home / "config"),
            XDG_CACHE_HOME=str(home / "cache"),
            XDG_DATA_HOME=str(home / "data"),
            XDG_STATE_HOME=str(home / "state"),
            COLUMNS="200",
            NO_COLOR="1",
            TERM="dumb",
            PYTHONUNBUFFERED="1",
        )
        self.running: List[Program] = []

    def python(self, *words: str, **environment: str) -> Program:
        """Start Python with these arguments."""
        program = Program([sys.executable, *words], {**self.environment, **environment})
        self.running.append(program)
        return program

    def gpumesh(self, *words: str, **environment: str) -> Program:
        """Start one of the commands."""
        return self.python("-m", "gpumesh", *words, **environment)

    def serve(self, *words: str, **environment: str) -> Tuple[Program, str]:
        """A coordinator on a free port, and its address."""
        program = self.gpumesh("serve", "--host", "127.0.0.1", "--port", "0", *words, **environment)
        return program, program.wait_for(r"serving at (\S+?),").group(1)

    def end_all(self) -> None:
        """Kill what still runs."""
        for program in reversed(self.running):
            program.kill()


@contextlib.contextmanager
def started_programs(home: Path) -> Iterator[Programs]:
    """Programs that end with the block."""
    programs = Programs(home)
    try:
        yield programs
    finally:
        programs.end_all()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # It ended between the two questions.
        return False
