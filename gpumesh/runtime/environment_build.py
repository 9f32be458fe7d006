"""Main of the process that builds one environment: takes its lock, installs, marks it complete; leaves nothing half-built.

    python -c "from gpumesh.runtime.environment_build import main; main()" < {"folder": ..., "packages": [...], "paths": [...], ...}

Promises:

1. Of several such processes for one folder one builds; the others wait, and then find it complete.
2. The folder has its mark only if everything was installed. Whatever else was there is removed, before and after.
3. It and the installer end, and what they had built is removed, when the time is over or whoever started it is gone.

Standard output carries, for a failure, the reason and the installer's last lines. Everything the installer says is in `<folder>.log`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Tuple

from gpumesh.config import STDERR_TAIL_LINES

MARK = ".gpumesh-complete"  # A file in a complete environment.
PATHS_FILE = "zz_gpumesh_worker.pth"  # Sorted behind all others: what the environment does not have comes from the worker.
PIP_THAT_INSTALLS_ELSEWHERE = (22, 3)  # The first with `--python`.
POLL_SECONDS = 0.1
LOG_TAIL_BYTES = 64 * 1024
_MISLEADING = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "VIRTUAL_ENV")  # For an installer.


class BuildError(Exception):
    """It cannot be built; the message is for people."""


def is_complete(folder: str) -> bool:
    """Whether an environment can be used."""
    return os.path.exists(os.path.join(folder, MARK)) and os.path.exists(python_of(folder))


def python_of(folder: str) -> str:
    """The interpreter of an environment."""
    return os.path.join(folder, "bin", "python")


def main() -> None:
    """Build what standard input asks for; exit code 0 when the environment is complete."""
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal lets the worker finish what it has begun.
    request: Dict[str, Any] = json.load(sys.stdin)
    try:
        build(request["folder"], request["packages"], request["paths"], seconds=request["seconds"], starter=request["starter"])
    except (BuildError, OSError) as error:
        with contextlib.suppress(BrokenPipeError):  # The worker is gone.
            os.write(1, f"{error}\n".encode())
        sys.exit(1)


def build(folder: str, packages: List[str], paths: List[str], *, seconds: float, starter: int) -> None:
    """Build one environment, or wait until another process has.

    Args:
        folder: Where it is to be; beside it, `.lock` and `.log` files.
        packages: Requirements, as the installer takes them.
        paths: Folders of modules to be found behind its own.
        seconds: Time for the building.
        starter: Process that this is done for.

    Raises:
        BuildError: It cannot be built.
        OSError: The folder cannot be written.
    """
    os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    with open(folder + ".lock", "ab") as lock:
        _take(lock.fileno(), starter)
        if is_complete(folder):
            return
        _remove(folder)
        try:
            with open(folder + ".log", "wb") as log:
                builder = _Builder(log, lock.fileno(), time.monotonic() + seconds, starter)
                for what, step in _steps(folder, packages):
                    builder.run(what, step)
            _add_paths(folder, paths)
            with open(os.path.join(folder, MARK), "w", encoding="utf-8") as mark:
                mark.write("\n".join(packages) + "\n")
        except BaseException:
            _remove(folder)
            raise


def _end(number: int, frame: Any) -> None:
    sys.exit(1)


def _take(lock: int, starter: int) -> None:
    import fcntl

    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            _check(starter)
            time.sleep(POLL_SECONDS)


def _check(starter: int) -> None:
    if os.getppid() != starter:
        raise BuildError("the worker that it was for is gone")


def _remove(folder: str) -> None:
    if os.path.lexists(folder):
        mark = os.path.join(folder, MARK)
        if os.path.exists(mark):
            os.unlink(mark)  # First: it must not be taken for complete meanwhile.
        shutil.rmtree(folder)


class _Builder:
    """Runs the steps of one build, each in a process group of its own, with the build's lock in its hands."""

    def __init__(self, log: Any, lock: int, deadline: float, starter: int) -> None:
        self._log = log
        self._lock = lock
        self._deadline = deadline
        self._starter = starter

    def run(self, what: str, words: List[str]) -> None:
        """Run one step to its end.

        Raises:
            BuildError: It failed, or the time is over.
        """
        environment = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
        environment.update(PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
        step = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,
            pass_fds=(self._lock,),  # If this process is killed alone, nobody else begins before that step has ended.
        )
        try:
            self._await(what, step)
        finally:
            if step.returncode is None:
                os.killpg(step.pid, signal.SIGKILL)
                step.wait()
        if step.returncode:
            raise BuildError(f"{what} ended with exit code {step.returncode}; its last lines:\n{self._last_lines()}")

    def _await(self, what: str, step: subprocess.Popen[bytes]) -> None:
        while True:
            try:
                step.wait(POLL_SECONDS)
                return
            except subprocess.TimeoutExpired:
                _check(self._starter)
                if time.monotonic() > self._deadline:
                    raise BuildError(f"{what} did not end in time; its last lines:\n{self._last_lines()}") from None

    def _last_lines(self) -> str:
        self._log.flush()
        with open(self._log.name, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        return "\n".join(f"  {line}" for line in lines[-STDERR_TAIL_LINES:]) or "  (it said nothing)"


def _steps(folder: str, packages: List[str]) -> List[Tuple[str, List[str]]]:
    """What to run, one after the other. Packages are installed by uv where it is, else by pip; the environment's own as a last resort."""
    python = python_of(folder)
    bare = ("python -m venv", [sys.executable, "-m", "venv", "--without-pip", folder])
    uv = shutil.which("uv")
    if uv is not None:
        return [bare, ("uv pip install", [uv, "pip", "install", "--quiet", "--python", python, "--", *packages])]
    install = ["install", "--quiet", "--no-input", "--disable-pip-version-check", "--no-warn-script-location", "--", *packages]
    if _pip_version() >= PIP_THAT_INSTALLS_ELSEWHERE:
        return [bare, ("pip install", [sys.executable, "-m", "pip", "--python", python, *install])]
    whole = ("python -m venv", [sys.executable, "-m", "venv", folder])
    return [whole, ("pip install", [python, "-m", "pip", *install])]


def _pip_version() -> Tuple[int, ...]:
    """Of this interpreter's pip; nothing if it has none."""
    from importlib import metadata

    try:
        words = metadata.version("pip").split(".")
    except metadata.PackageNotFoundError:
        return ()
    return tuple(int(word) if word.isdecimal() else 0 for word in words[:2])


def _add_paths(folder: str, paths: List[str]) -> None:
    """Also programs that a task starts in the environment find the worker's packages."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    lines = [
        f"import site; site.addsitedir({path!r})" if path.endswith("-packages") else path
        for path in paths
        if "\n" not in path and os.path.isdir(path)
    ]
    with open(os.path.join(folder, "lib", version, "site-packages", PATHS_FILE), "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
