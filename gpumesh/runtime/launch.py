"""Start a spawner: a fresh interpreter, reached through one socket, that ends with us."""

from __future__ import annotations

import os
import socket
import sys
from typing import Dict, List, Optional, Sequence, Tuple

SPAWNER_FD = 3
# In another environment: what is found there comes first, then what the starter has. Folders of packages may hold hooks.
_LOOK_BEHIND = (
    "import site, sys; [site.addsitedir(folder) if folder.endswith('-packages') else sys.path.append(folder)"
    " for folder in {behind!r} if folder not in sys.path]; "
)


def launch_spawner(
    *, environment: Dict[str, str], stderr: Optional[int] = None, python: str = "", behind: Sequence[str] = ()
) -> Tuple[int, socket.socket]:
    """Start the fork server.

    Uses posix_spawn: it costs the same from a driver of 100 MB as from one of 100 GB, and is safe with threads.

    Args:
        environment: The spawner's environment; its children inherit it.
        stderr: A descriptor for its standard error; ours if not given.
        python: The interpreter; ours if not given.
        behind: Folders in which it looks for modules that its own do not have.

    Returns:
        Its process id (ours to wait for) and our side of the channel. When that closes, the spawner and all its children end.

    Raises:
        OSError: It cannot be started.
    """
    ours, theirs = socket.socketpair()
    # Not `-m`: that imports the machinery of runpy and the module a second time.
    command = f"from gpumesh.runtime.spawner import main; main(['{SPAWNER_FD}'])"
    if behind:
        command = _LOOK_BEHIND.format(behind=list(behind)) + command
    arguments = [python or sys.executable, "-c", command]
    actions: List[Tuple[int, ...]] = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), SPAWNER_FD)]
    if theirs.fileno() == SPAWNER_FD:
        os.set_inheritable(SPAWNER_FD, True)
        actions = []
    if stderr is not None:
        actions.insert(0, (os.POSIX_SPAWN_DUP2, stderr, 2))  # First: `stderr` may be the very number that the channel takes.
    opened: List[Tuple[int, int, str, int, int]] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    try:
        pid = os.posix_spawn(arguments[0], arguments, environment, file_actions=[*opened, *actions])
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return pid, ours


def child_environment() -> Dict[str, str]:
    """Our environment without what must not reach tasks, and with the package importable."""
    environment = dict(os.environ)
    environment.pop("GPUMESH_TOKEN", None)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths and not root.endswith(("site-packages", "dist-packages")):
        environment["PYTHONPATH"] = os.pathsep.join([*paths, root])
    return environment
