"""The environments of one worker: which sets of packages its tasks ask for, and how far each is.

    NEW ── a task comes ──> BUILDING ── built, or found on disk ──> READY
                               └── fails ──> FAILED ── a task comes, after a while ──> BUILDING

An environment is a virtual environment in the user's cache folder, named by a hash of what is in it, shared by all workers of that
user on this machine. It is built by a process of its own (runtime.environment_build). Tasks that come before that is done go
back, and the coordinator is told that no more of them can run here for a while: whoever waits for an installer holds no slot.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import json
import logging
import os
import subprocess
import sys
from typing import AbstractSet, Any, Callable, Dict, Iterable, List, Optional, Tuple

from gpumesh.config import (
    ENVIRONMENT_BUILD_SECONDS,
    ENVIRONMENT_IDLE_SECONDS,
    ENVIRONMENT_RETRY_SECONDS,
    OUTPUT_READ_BYTES,
    STDERR_TAIL_BYTES,
)
from gpumesh.runtime.environment_build import is_complete, python_of
from gpumesh.runtime.launch import child_environment, launch_spawner
from gpumesh.version import __version__

logger = logging.getLogger("gpumesh.worker")

FOLDER_VARIABLE = "GPUMESH_ENVIRONMENTS"  # Where they are kept, if not in the user's cache.
MAX_PACKAGES = 1000
MAX_REQUIREMENT_CHARS = 1000


class EnvironmentState(enum.Enum):
    """See the drawing above."""

    NEW = enum.auto()
    BUILDING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()


class Environment:
    """One set of packages."""

    __slots__ = ("number", "packages", "folder", "state", "problem", "failed_at", "used_at", "builder", "said", "is_announced")

    def __init__(self, number: int, packages: Tuple[str, ...], folder: str) -> None:
        self.number = number  # 1, 2, ...: the pool's name of it.
        self.packages = packages
        self.folder = folder
        self.state = EnvironmentState.NEW
        self.problem = ""  # Why the last build came to nothing.
        self.failed_at = 0.0
        self.used_at = 0.0  # When the last task came.
        self.builder: Optional[subprocess.Popen[bytes]] = None
        self.said = b""  # By the builder.
        self.is_announced = False  # Whoever wants it has been told that it is being built.

    @property
    def is_ready(self) -> bool:
        """Whether tasks can run in it."""
        return self.state is EnvironmentState.READY

    @property
    def is_building(self) -> bool:
        """Whether tasks can run in it later."""
        return self.state is EnvironmentState.BUILDING

    def announcement(self, *, where: str) -> str:
        """What is written to the output of the first task that has to wait for it."""
        return f"[gpumesh: installing {', '.join(self.packages)} on {where}; tasks that need it wait, this once]\n"

    def fail(self, problem: str, now: float) -> None:
        """It cannot be used; tasks that come later try again."""
        self.state = EnvironmentState.FAILED
        self.problem = problem
        self.failed_at = now

    def failures(
        self, tasks: Iterable[Tuple[int, int]], *, where: str, scripts: AbstractSet[int] = frozenset()
    ) -> List[Tuple[int, int, int, Any, float]]:
        """How these tasks end, because it cannot be used on the worker of that name.

        Args:
            scripts: Tasks that are scripts; whoever hears of their end reads no pickles.
        """
        from gpumesh.errors import EnvironmentBuildError
        from gpumesh.model.outcomes import Status
        from gpumesh.serialization.exceptions import dump_exception

        error = EnvironmentBuildError(
            f"no environment with packages={list(self.packages)!r} on {where}: {self.problem}\n"
            f"(correct packages=..., or what that machine lacks; it tries again {ENVIRONMENT_RETRY_SECONDS:g} s after a failure)"
        )
        payload = dump_exception(error)
        told = {"reason": str(error)}
        return [
            (task_id, attempt, int(Status.RAISED), told if task_id in scripts else payload, 0.0) for task_id, attempt in tasks
        ]


class Environments:
    """All environments of one pool.

    Args:
        path: Where the worker finds modules; tasks in an environment find there what the environment does not have.
        on_change: Called when a build begins, and when it is over.
        on_idle: Called now and then for one that no task has come for in `ENVIRONMENT_IDLE_SECONDS`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: List[str],
        *,
        on_change: Callable[[], None],
        on_idle: Callable[[Environment], None],
    ) -> None:
        self._loop = loop
        self._path = path
        self._root = environments_folder()
        self._on_change = on_change
        self._on_idle = on_idle
        self._by_packages: Dict[Tuple[str, ...], Environment] = {}
        self._of_spec: Dict[int, Environment] = {}
        self._idle_timer: Optional[asyncio.TimerHandle] = None

    def define(self, spec: int, packages: Iterable[Any]) -> Environment:
        """This spec's tasks need these packages."""
        names = tuple(str(package) for package in packages)
        environment = self._by_packages.get(names)
        if environment is None:
            folder = os.path.join(self._root, environment_name(names))
            environment = self._by_packages[names] = Environment(len(self._by_packages) + 1, names, folder)
        self._of_spec[spec] = environment
        return environment

    def by_number(self, number: int) -> Environment:
        """The environment that the pool calls this."""
        return next(environment for environment in self._by_packages.values() if environment.number == number)

    def obstacle(self, spec: int) -> Optional[Environment]:
        """What keeps tasks of this spec from running now: an environment that is being built, from now on, or cannot be."""
        environment = self._of_spec.get(spec)
        if environment is None:
            return None
        environment.used_at = self._loop.time()
        if environment.state in (EnvironmentState.NEW, EnvironmentState.FAILED):
            self._prepare(environment)
        return None if environment.is_ready else environment

    def under_way(self) -> Tuple[Tuple[str, ...], ...]:
        """The sets of packages that are being installed."""
        return tuple(e.packages for e in self._by_packages.values() if e.state is EnvironmentState.BUILDING)

    def launch(self, environment: Environment, stderr: int) -> Any:
        """Start the process that forks this environment's runners; see `runtime.spawner_link.Launch`."""
        variables = child_environment()
        for name in ("PYTHONPATH", "PYTHONHOME"):
            variables.pop(name, None)  # They would come before the environment's own packages.
        programs = os.path.join(environment.folder, "bin")
        variables["VIRTUAL_ENV"] = environment.folder
        variables["PATH"] = os.pathsep.join(filter(None, [programs, variables.get("PATH", "")]))
        python = python_of(environment.folder)
        return launch_spawner(environment=variables, stderr=stderr, python=python, behind=self._path)

    def close(self) -> None:
        """Builds under way end and leave nothing."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for environment in self._by_packages.values():
            builder, environment.builder = environment.builder, None
            if builder is not None:
                assert builder.stdout is not None
                self._loop.remove_reader(builder.stdout.fileno())
                builder.terminate()  # It is not waited for: it has to remove what may be gigabytes.

    # --- building

    def _prepare(self, environment: Environment) -> None:
        """Have it built, unless that has failed a moment ago."""
        is_failed = environment.state is EnvironmentState.FAILED
        if is_failed and self._loop.time() - environment.failed_at < ENVIRONMENT_RETRY_SECONDS:
            return
        problem = wrong_with(environment.packages)
        if problem or is_complete(environment.folder):
            self._settle(environment, problem)
            return
        try:
            self._start_builder(environment)
        except OSError as error:
            self._settle(environment, f"no process for it can be started: {error}")
            return
        logger.info("building an environment for %s in %s", ", ".join(environment.packages), environment.folder)
        environment.state = EnvironmentState.BUILDING
        environment.is_announced = False
        self._on_change()

    def _start_builder(self, environment: Environment) -> None:
        request = {
            "folder": environment.folder,
            "packages": environment.packages,
            "paths": _lasting(self._path),
            "seconds": ENVIRONMENT_BUILD_SECONDS,
            "starter": os.getpid(),
        }
        builder = subprocess.Popen(
            [sys.executable, "-c", "from gpumesh.runtime.environment_build import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C is not for it.
        )
        assert builder.stdin is not None
        assert builder.stdout is not None
        environment.builder = builder
        environment.said = b""
        os.set_blocking(builder.stdout.fileno(), False)
        self._loop.add_reader(builder.stdout.fileno(), self._on_builder, environment, builder)
        try:
            builder.stdin.write(json.dumps(request).encode())  # A pipe takes 64 KiB at once; the rest as fast as it starts.
            builder.stdin.close()
        except BrokenPipeError:
            pass  # Its end says more.

    def _on_builder(self, environment: Environment, builder: subprocess.Popen[bytes]) -> None:
        assert builder.stdout is not None
        data = builder.stdout.read(OUTPUT_READ_BYTES)
        if data is None:
            return
        if data:
            environment.said = (environment.said + data)[-4 * STDERR_TAIL_BYTES :]
            return
        self._loop.remove_reader(builder.stdout.fileno())
        builder.stdout.close()
        environment.builder = None
        code = builder.wait()  # It has closed its standard output: nothing but its exit is left.
        said = environment.said.decode("utf-8", "replace").strip()
        self._settle(environment, "" if code == 0 else said or f"the process that builds it ended with exit code {code}")

    def _settle(self, environment: Environment, problem: str) -> None:
        was_building = environment.state is EnvironmentState.BUILDING
        if problem:
            environment.fail(problem, self._loop.time())
            logger.warning("no environment for %s: %s", ", ".join(environment.packages), problem)
        else:
            environment.state = EnvironmentState.READY
            if self._idle_timer is None:
                self._idle_timer = self._loop.call_later(ENVIRONMENT_IDLE_SECONDS, self._look_for_idle)
        if was_building:
            self._on_change()

    def _look_for_idle(self) -> None:
        now = self._loop.time()
        for environment in self._by_packages.values():
            if environment.state is EnvironmentState.READY and now - environment.used_at >= ENVIRONMENT_IDLE_SECONDS:
                self._on_idle(environment)
        self._idle_timer = self._loop.call_later(ENVIRONMENT_IDLE_SECONDS / 4, self._look_for_idle)


def environments_folder() -> str:
    """Where all of them are."""
    told = os.environ.get(FOLDER_VARIABLE)
    if told:
        return os.path.abspath(told)
    import platformdirs

    return os.path.join(platformdirs.user_cache_dir("gpumesh", appauthor=False), "environments")


def environment_name(packages: Tuple[str, ...]) -> str:
    """The folder of a set of packages, for this interpreter and this version of gpumesh; a package in a file counts by its date."""
    files = [
        (package, os.stat(package).st_mtime_ns, os.stat(package).st_size) for package in packages if os.path.exists(package)
    ]
    what = [list(packages), files, sys.version, sys.prefix, sys.executable, __version__]
    return hashlib.blake2b(json.dumps(what).encode(), digest_size=12).hexdigest()


def wrong_with(packages: Iterable[Any]) -> str:
    """Why an installer must not be given these; "" when it may."""
    names = list(packages)
    if len(names) > MAX_PACKAGES:
        return f"{len(names)} packages are more than the {MAX_PACKAGES} allowed"
    for name in names:
        if not isinstance(name, str) or not name.strip() or name.lstrip().startswith("-") or len(name) > MAX_REQUIREMENT_CHARS:
            return f"{name!r:.100} is not a requirement such as 'scikit-learn==1.5.*'"
    return ""


def _lasting(path: List[str]) -> List[str]:
    """Of the worker's folders of modules those that are the same next time: packages installed, and gpumesh itself."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [*(folder for folder in path if folder.endswith("-packages")), *([] if root.endswith("-packages") else [root])]
