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
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple

from gpumesh.config import (
    SCRIPT_EXIT_CHECK_SECONDS,
    SCRIPT_GRACE_SECONDS,
    SCRIPT_INTERRUPT_SECONDS,
)
from gpumesh.devices import detect
from gpumesh.errors import SerializationError
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import OutOfBand
from gpumesh.runtime import script_process as process
from gpumesh.runtime.page import GROUP, INTERRUPT, KEPT, Page
from gpumesh.runtime.runner_devices import OTHER_LIBRARIES
from gpumesh.runtime.script_folder import WorkFolders
from gpumesh.runtime.script_output import LastLine, Tail, why_no_result
from gpumesh.runtime.script_stream import Stream

if TYPE_CHECKING:
    from gpumesh.runtime.code import ShippedCode

Ended = Tuple[int, Any]  # Status, and what goes with it.

GPU_LIBRARIES = ("torch", *OTHER_LIBRARIES)
_TERMINATED = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
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


class _Run:
    """One script, from its start to the end of its process group."""

    def __init__(self, words: Any, number: int, name: str) -> None:
        self._words = words
        self._number = number
        self._name = name
        self._last = LastLine()
        self._tail = Tail()
        self._streams: List[Stream] = []
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
        wake, wake_write = process.pipes(1)
        os.set_blocking(wake, False)
        os.set_blocking(wake_write, False)
        before = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            self._start(command, folder, environment, data)
            try:
                self._serve(wake)
            finally:
                code, memory = self._end()
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
        return self._outcome(code, memory)

    # --- start and end

    def _start(self, command: List[str], folder: str, environment: Dict[str, str], data: bytes) -> None:
        theirs, self._stdin, out, out_write, err, err_write = process.pipes(3)
        self._input = memoryview(data)
        self._streams = [Stream(1, out, self._last), Stream(2, err, self._tail)]
        for fd in (self._stdin, out, err):
            os.set_blocking(fd, False)
        self._memory_kills = detect.memory_kills()
        try:
            self._pid = self._words[GROUP] = process.start(command, folder, environment, [theirs, out_write, err_write])
            process.lead_group(self._pid)
        finally:
            for fd in (theirs, out_write, err_write):
                os.close(fd)

    def _end(self) -> Tuple[int, int]:
        """The group is gone: the script's exit code, and the most memory that it had, in bytes."""
        process.kill_group(self._pid, signal.SIGKILL)
        self._words[GROUP] = 0  # Before its id can be used again.
        return process.wait(self._pid)

    # --- meanwhile

    def _serve(self, wake: int) -> None:
        """Move bytes until the script has exited or is to be killed."""
        watch = process.watch(self._pid)
        try:
            while watch >= 0 or not process.has_exited(self._pid):
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
            process.empty(wake)
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
        process.kill_group(self._pid, number)
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
                process.empty(wake)
            for stream in self._streams:
                if stream.number in ready:
                    stream.move(ready)

    def _outcome(self, code: int, memory: int) -> Ended:
        if self._signals:
            return int(Status.CANCELLED), {"reason": "interrupted"}
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
        found: Dict[str, Any] = {"reason": f"{self._name} was killed by {process.signal_name(number)}"}
        if memory > process.own_memory():  # Otherwise it is this process's, of the moment in which the script was forked.
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
