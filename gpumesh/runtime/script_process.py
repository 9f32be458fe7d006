"""The process of a script: how a runner forks it, in a group of its own, hears of its end, and ends all of the group."""

from __future__ import annotations

import os
import signal
import sys
from typing import Dict, List, NoReturn, Sequence, Tuple

from gpumesh.runtime import system

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # What ru_maxrss counts in.
# Python ignores the first two, and a function may have ignored others: a program would inherit that.
_RESET = [
    getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ", "SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD") if hasattr(signal, name)
]


def start(command: List[str], folder: str, environment: Dict[str, str], streams: Sequence[int]) -> int:
    """Fork; the process id, which is that of the group as well.

    Args:
        command: The program, by its path, and its arguments.
        folder: In which it starts.
        environment: All of it.
        streams: Descriptors of its standard input, output and error; it has no others.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Some function's doing; nobody would learn how the script ends.
    runner = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(command, folder, environment, streams, runner)
    return pid


def lead_group(pid: int) -> None:
    """The child makes its group too; whoever comes first."""
    try:
        os.setpgid(pid, pid)
    except OSError:
        pass  # It has, and runs the script by now.


def kill_group(group: int, number: int) -> None:
    """Send a signal to everyone in a process group, if there is anyone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass  # Everyone in it is gone; some systems say so in the second way.


def wait(pid: int) -> Tuple[int, int]:
    """Its exit code, negative for a signal, and the most memory that it had, in bytes."""
    _, status, usage = os.wait4(pid, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), usage.ru_maxrss * _MAXRSS_BYTES


def watch(pid: int) -> int:
    """A descriptor that becomes readable when the process has exited; -1 where there is none."""
    try:
        return os.pidfd_open(pid)  # type: ignore[attr-defined, no-any-return, unused-ignore]
    except (AttributeError, OSError):
        return -1


def has_exited(pid: int) -> bool:
    """Whether it waits to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def signal_name(number: int) -> str:
    """SIGKILL, or `signal 70`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def own_memory() -> int:
    """The most that this process had, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES


def pipes(count: int) -> List[int]:
    """Read end, write end, and so on: all of them, or none."""
    ends: List[int] = []
    try:
        for _ in range(count):
            ends.extend(os.pipe())
    except OSError:
        for end in ends:
            os.close(end)
        raise
    return ends


def empty(pipe: int) -> None:
    """Read all that is there."""
    try:
        while os.read(pipe, 4096):
            pass
    except BlockingIOError:
        pass


def _become(command: List[str], folder: str, environment: Dict[str, str], streams: Sequence[int], runner: int) -> NoReturn:
    """In the forked child: be the script."""
    try:
        os.setpgid(0, 0)
        system.die_with_parent(runner)
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for target, fd in enumerate(streams):
            os.dup2(fd, target)
        _close_others()
        os.chdir(folder)
        os.execve(command[0], command, environment)
    except BaseException as error:  # noqa: BLE001  # Its last word; it must not return into the runner's loop.
        os.write(2, f"gpumesh: {command[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(127)


def _close_others() -> None:
    """What the runner has open, its socket among them, is not for the script."""
    for name in os.listdir("/dev/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:
                pass  # The one that has listed them.
