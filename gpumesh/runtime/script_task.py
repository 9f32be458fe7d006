"""A task that is a script: a fresh interpreter runs it, its payload is its standard input, its result the last line that it prints.

    payload ──> stdin ──> script ── stdout ──> last line, as JSON: the result
                             │         └─────> this runner's stdout ──> agent ──> logs
                             └──── stderr ───> this runner's stderr, and the last lines for messages

Promises:

1. Whatever the script does, this process goes on: it never waits for a script that does not read, nor for a pipe that some grandchild
   holds open, and never keeps more of its output than a result may be long.
2. The script leads a process group, which ends with it: when it has exited, when it is interrupted, and with this runner, however
   that ends (`page.GROUP` tells the spawner).
3. An interrupt is a SIGINT for the group, a SIGTERM for what ignores it, and the end of all after `SCRIPT_GRACE_SECONDS`.
4. It runs in a copy of its folder that no other task sees.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from time import monotonic
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NoReturn, Optional, Sequence, Tuple, Union

from gpumesh.config import (
    OUTPUT_READ_BYTES,
    SCRIPT_EXIT_CHECK_SECONDS,
    SCRIPT_GATHER_SECONDS,
    SCRIPT_GRACE_SECONDS,
    SCRIPT_INTERRUPT_SECONDS,
)
from gpumesh.devices import detect
from gpumesh.errors import SerializationError
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import OutOfBand
from gpumesh.runtime import system
from gpumesh.runtime.page import GROUP, INTERRUPT, KEPT, Page
from gpumesh.runtime.runner_devices import OTHER_LIBRARIES
from gpumesh.runtime.script_folder import WorkFolders
from gpumesh.runtime.script_output import Forwarding, LastLine, Tail, why_no_result

if TYPE_CHECKING:
    from gpumesh.runtime.code import ShippedCode

Ended = Tuple[int, Any]  # Status, and what goes with it.

PIPE_BYTES = getattr(select, "PIPE_BUF", 512)  # What a pipe that can be written to takes without a wait.
GPU_LIBRARIES = ("torch", *OTHER_LIBRARIES)
LAST_READS = 64  # Of what a script has left in its pipes: someone it has left behind may go on writing.
_TERMINATED = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # What ru_maxrss counts in.
# Python ignores the first two, and a function may have ignored others: a program would inherit that.
_RESET = [
    getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ", "SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD") if hasattr(signal, name)
]
# In an environment: the script as the main program, with what the worker has behind what the environment has.
_LOOK_BEHIND = """
import site, sys
[site.addsitedir(folder) if folder.endswith("-packages") else sys.path.append(folder) for folder in {behind!r} if folder not in sys.path]
del sys.argv[0]
sys.path[0] = {folder!r}
__file__ = sys.argv[0]
del site, sys
exec(compile(open(__file__, "rb").read(), __file__, "exec"))
"""


class ScriptTasks:
    """Runs the scripts of one runner.

    Args:
        page: The runner's.
        environment: The process's at its birth: functions that have run in it may have changed their own.
        path: Likewise, of modules.
    """

    def __init__(self, page: Page, environment: Mapping[str, str], path: Sequence[str]) -> None:
        self._words = page.words
        self._environment = script_environment(environment)
        self._path = list(path)
        self._folders = WorkFolders()

    def run(
        self, number: int, script: str, *, code: bytes, shipped: Optional[ShippedCode], payload: Any, is_packed: bool
    ) -> Ended:
        """Run one to its end. NOT_RUN says that this process cannot: what had travelled is gone from the disk.

        Args:
            number: Of the task, on the page.
            script: Its path in the folder that has travelled.
            code: The digest of that.
            shipped: Has it.
            payload: JSON.
            is_packed: This process lives in an environment of the task's own.
        """
        name = os.path.basename(script)
        try:
            folders = shipped.folders(code) if shipped is not None and code else []
        except SerializationError as error:
            return _failed(str(error))
        if not all(map(os.path.isdir, folders)):
            return int(Status.NOT_RUN), {}  # Somebody has tidied up. A process that starts anew is sent all of it again.
        source = next((folder for folder in folders if os.path.isfile(os.path.join(folder, *script.split("/")))), "")
        if not source:
            return _failed(f"the script {script} is not among the files that have travelled with it; submit it again")
        data = _plain(payload)
        if data is None:
            return _failed(f"the payload of {name} is not JSON but a {type(payload).__name__}")
        try:
            copy = self._folders.take(source)
        except OSError as error:
            return _failed(f"no working copy of the folder of {name} can be made on this machine: {error}")
        try:
            file = os.path.join(copy, *script.split("/"))
            command = self._command(file, is_packed=is_packed)
            return _Run(self._words, number, name).run(command, os.path.dirname(file), self._environment, data)
        except OSError as error:
            return _failed(f"{name} cannot be started on this machine: {error}")
        finally:
            self._folders.give_back(copy)
            if not any(map(sys.modules.__contains__, GPU_LIBRARIES)):
                self._words[KEPT] = 1  # What the script had on a card is free, and this process has nothing there.

    def _command(self, file: str, *, is_packed: bool) -> List[str]:
        if not is_packed:
            return [sys.executable, file]
        return [sys.executable, "-c", _LOOK_BEHIND.format(behind=self._path, folder=os.path.dirname(file)), file]


class _Stream:
    """One of the script's standard streams, on its way to ours of the same number."""

    __slots__ = ("number", "fd", "out", "_listener", "_forward", "_gathered", "_since")

    def __init__(self, number: int, fd: int, listener: Union[LastLine, Tail]) -> None:
        self.number = number
        self.fd = fd  # Its end, here; -1: the script has closed the other.
        self.out = b""  # To be written to ours.
        self._listener = listener
        self._forward = Forwarding(monotonic())
        self._gathered = b""  # What has come since then, and goes on together: a line is often written in parts.
        self._since = 0.0

    def register(self, poll: select.poll) -> None:
        """What to wait for. As long as the agent does not take what is there, the script waits."""
        if self.out:
            poll.register(self.number, select.POLLOUT)
        elif self.fd >= 0:
            poll.register(self.fd, select.POLLIN)

    def due(self) -> float:
        """When to `move` in any case."""
        if self.out:
            return float("inf")
        return min(self._forward.due(), self._since + SCRIPT_GATHER_SECONDS) if self._gathered else self._forward.due()

    def move(self, ready: Dict[int, int]) -> None:
        """Read, or write, as far as that can be done without waiting."""
        if self.out:
            if self.number in ready:
                self._write()
            return
        if self.fd in ready:
            self.read()
        now = monotonic()
        if now >= self.due() or len(self._gathered) >= OUTPUT_READ_BYTES // 4:
            self.out = b"".join(self._forward.feed(self._gathered, now))
            self._gathered = b""

    def read(self) -> bool:
        """Take in some of it; whether there was any."""
        if self.fd < 0:
            return False
        try:
            data = os.read(self.fd, OUTPUT_READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._listener.feed(data)
        if not self._gathered:
            self._since = monotonic()
        self._gathered += data
        return True

    def read_rest(self) -> None:
        """The script has ended, and what it had written before is in the pipe."""
        for _ in range(LAST_READS):
            has_more = self.read()
            self.out += b"".join(self._forward.feed(self._gathered, monotonic()))
            self._gathered = b""
            if not has_more:
                break
        self.out += b"".join(self._forward.end())

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _write(self) -> None:
        try:
            self.out = self.out[os.write(self.number, self.out[:PIPE_BYTES]) :]
        except OSError:
            self.out = b""  # The agent is gone, and so are we in a moment.


class _Run:
    """One script, from its start to the end of its process group."""

    def __init__(self, words: Any, number: int, name: str) -> None:
        self._words = words
        self._number = number
        self._name = name
        self._last = LastLine()
        self._tail = Tail()
        self._streams: List[_Stream] = []
        self._pid = 0
        self._stdin = -1
        self._input = memoryview(b"")
        self._memory_kills: Optional[int] = None  # Of the system, before it started.
        self._signals = 0  # How many of _TERMINATED it has had.
        self._interrupted_at = 0.0

    def run(self, command: List[str], folder: str, environment: Dict[str, str], data: bytes) -> Ended:
        """See the module's promises.

        Raises:
            OSError: No process can be started.
        """
        wake, wake_write = _pipes(1)
        os.set_blocking(wake, False)
        os.set_blocking(wake_write, False)
        before = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            self._start(command, folder, environment, data)
            try:
                self._serve(wake)
            finally:
                status, memory = self._end()
            for stream in self._streams:
                stream.read_rest()
            self._write_rest(wake)
        finally:
            signal.set_wakeup_fd(before)
            os.close(wake)
            os.close(wake_write)
            for stream in self._streams:
                stream.close()
            self._close_input()
        return self._outcome(status, memory)

    # --- start and end

    def _start(self, command: List[str], folder: str, environment: Dict[str, str], data: bytes) -> None:
        theirs, self._stdin, out, out_write, err, err_write = _pipes(3)
        self._input = memoryview(data)
        self._streams = [_Stream(1, out, self._last), _Stream(2, err, self._tail)]
        for fd in (self._stdin, out, err):
            os.set_blocking(fd, False)
        self._memory_kills = detect.memory_kills()
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Some function's doing; nobody would learn how the script ends.
        runner = os.getpid()
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _become(command, folder, environment, [theirs, out_write, err_write], runner)
            self._words[GROUP] = self._pid
            try:
                os.setpgid(self._pid, self._pid)  # The child does so too; whoever comes first.
            except OSError:
                pass  # It has, and runs the script by now.
        finally:
            for fd in (theirs, out_write, err_write):
                os.close(fd)

    def _end(self) -> Tuple[int, int]:
        """The group is gone: the script's exit status as `wait` has it, and the memory that it had at most, in bytes."""
        _kill(self._pid, signal.SIGKILL)
        self._words[GROUP] = 0  # Before its id can be used again.
        _, status, usage = os.wait4(self._pid, 0)
        return status, usage.ru_maxrss * _MAXRSS_BYTES

    # --- meanwhile

    def _serve(self, wake: int) -> None:
        """Move bytes until the script has exited or is to be killed."""
        watch = _watch(self._pid)
        try:
            while watch >= 0 or not _has_exited(self._pid):
                ready = self._wait(wake, watch)
                if watch in ready:
                    return
                if self._stdin in ready:
                    self._write_input()
                for stream in self._streams:
                    stream.move(ready)
                if self._signal_due():
                    return
        finally:
            if watch >= 0:
                os.close(watch)

    def _wait(self, wake: int, watch: int) -> Dict[int, int]:
        """What can be read or written now, or will be first."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        if watch >= 0:
            poll.register(watch, select.POLLIN)
        if self._stdin >= 0:
            poll.register(self._stdin, select.POLLOUT)
        for stream in self._streams:
            stream.register(poll)
        now = monotonic()
        timeout = min(self._next_signal(now), *(stream.due() - now for stream in self._streams))
        if watch < 0:
            timeout = min(timeout, SCRIPT_EXIT_CHECK_SECONDS)
        ready = dict(poll.poll(None if timeout == float("inf") else max(0.0, timeout * 1000)))
        if wake in ready:
            _empty(wake)
        return ready

    def _write_input(self) -> None:
        try:
            while self._input:
                self._input = self._input[os.write(self._stdin, self._input) :]
        except BlockingIOError:
            return
        except OSError:
            pass  # It does not read that; it need not.
        self._close_input()

    def _close_input(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    # --- interrupts

    def _is_interrupted(self) -> bool:
        return bool(self._words[INTERRUPT] == self._number)

    def _next_signal(self, now: float) -> float:
        """Seconds until the next one is due."""
        if not self._signals:
            return 0.0 if self._is_interrupted() else float("inf")
        after = SCRIPT_INTERRUPT_SECONDS if self._signals == 1 else SCRIPT_GRACE_SECONDS
        return max(0.0, self._interrupted_at + after - now)

    def _signal_due(self) -> bool:
        """Send the signal that is due; whether that is the last one, which `_end` sends."""
        now = monotonic()
        if self._next_signal(now) > 0.0:
            return False
        if not self._signals:
            self._interrupted_at = now
        number = _TERMINATED[self._signals]
        self._signals += 1
        if number == signal.SIGKILL:
            return True
        _kill(self._pid, number)
        return False

    # --- afterwards

    def _write_rest(self, wake: int) -> None:
        """All that it has said goes on, unless the task is interrupted while the agent does not read."""
        while any(stream.out for stream in self._streams):
            poll = select.poll()
            poll.register(wake, select.POLLIN)
            for stream in self._streams:
                if stream.out:
                    stream.register(poll)
            ready = dict(poll.poll(0 if self._is_interrupted() else None))
            if not ready:
                return
            if wake in ready:
                _empty(wake)
            for stream in self._streams:
                if stream.number in ready:
                    stream.move(ready)

    def _outcome(self, status: int, memory: int) -> Ended:
        if self._signals:
            return int(Status.CANCELLED), {"reason": "interrupted"}
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        facts: Dict[str, Any] = {"exit": code, "stderr": self._tail.text}
        if code < 0:
            return int(Status.CRASHED), {**facts, **self._autopsy(-code, memory)}
        if code:
            return _failed(f"{self._name} exited with code {code}", **facts)
        line, length = self._last.value
        problem = why_no_result(self._name, line, length)
        if problem:
            return _failed(problem, **facts)
        return int(Status.OK), line

    def _autopsy(self, number: int, memory: int) -> Dict[str, Any]:
        """What is known of a script that was killed by a signal."""
        found: Dict[str, Any] = {"reason": f"{self._name} was killed by {_signal_name(number)}"}
        if memory > _own_memory():  # Otherwise it is this process's, of the moment in which the script was forked.
            found["memory_bytes"] = memory
        if number == signal.SIGKILL:
            found["memory_limit_bytes"] = detect.host_memory()
            kills = detect.memory_kills()
            if kills is not None and self._memory_kills is not None:
                found["out_of_memory"] = kills > self._memory_kills
        return found


def script_environment(environment: Mapping[str, str]) -> Dict[str, str]:
    """What a script gets of a process's environment: no secret of the mesh, UTF-8 everywhere, and output as it is written."""
    kept = {name: value for name, value in environment.items() if not _is_secret(name)}
    for name in ("PYTHONINSPECT", "PYTHONSAFEPATH"):  # To wait for input at the end; not to look beside the script.
        kept.pop(name, None)
    kept.setdefault("PYTHONFAULTHANDLER", "1")
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:surrogateescape"}


def _is_secret(name: str) -> bool:
    return name.startswith("GPUMESH_") and any(word in name for word in ("TOKEN", "SECRET", "PASSWORD"))


def _failed(reason: str, **facts: Any) -> Ended:
    return int(Status.RAISED), {"reason": reason, **facts}


def _plain(payload: Any) -> Optional[bytes]:
    """The bytes of a payload, with the line end that readers of lines wait for."""
    if type(payload) is OutOfBand:
        data = b"".join(payload.parts)
    elif isinstance(payload, bytes):
        data = payload
    else:
        return None
    return data if data.endswith(b"\n") else data + b"\n"


def _become(command: List[str], folder: str, environment: Dict[str, str], streams: List[int], runner: int) -> NoReturn:
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


def _pipes(count: int) -> List[int]:
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


def _close_others() -> None:
    """What the runner has open, its socket among them, is not for the script."""
    for name in os.listdir("/dev/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:
                pass  # The one that has listed them.


def _watch(pid: int) -> int:
    """A descriptor that becomes readable when the process has exited; -1 where there is none."""
    try:
        return os.pidfd_open(pid)  # type: ignore[attr-defined, no-any-return, unused-ignore]
    except (AttributeError, OSError):
        return -1


def _has_exited(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kill(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass  # Everyone in it is gone; some systems say so in the second way.


def _empty(pipe: int) -> None:
    try:
        while os.read(pipe, 4096):
            pass
    except BlockingIOError:
        pass


def _own_memory() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
