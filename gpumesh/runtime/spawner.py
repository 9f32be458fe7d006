"""The clean, single-threaded fork server: forks runners, and for an embedded mesh also the coordinator and the agents.

    python -c "from gpumesh.runtime.spawner import main; main(['FD'])"     FD: this side of a stream socket pair, the first channel

A channel carries length-prefixed msgpack requests with file descriptors attached, and answers:

    {"op": "fork", "key": K, "role": ..., ...} + fds  ->  {"key": K, "pid": P}, later {"key": K, "pid": P, "exit": code, ...}
    {"op": "signal", "key": K, "signal": N}               no answer; nothing happens when the child is gone

Promises:

1. The children of a channel are killed when the channel ends, however its other side ended; with the first channel, or the
   coordinator whose mesh this is, the spawner itself ends, and with it everything.
2. A child inherits no descriptor but its own, so an end of stream means what it says.
3. A signal reaches the child it is meant for or nobody: only this process reaps, so no process id is used twice.
4. Exit codes are as in `subprocess`: negative for a signal. Beside one stand `memory`, the most bytes that the child or one of its own
   children ever had resident, and for a runner that got SIGKILL, `limit`, the bytes that there are, and `out_of_memory`: whether it was the
   system that killed it for lack of memory; missing where the system does not tell.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from typing import Any, Dict, List, Optional, Set

import msgpack

from gpumesh.runtime import nesting, system
from gpumesh.runtime.spawner_channel import LENGTH, MAX_FDS, MessageReader

ORPHAN_CHECK_MILLISECONDS = 2000  # A process that our starter forked may hold the channel open after its death.


class _Channel:
    __slots__ = ("socket", "reader", "children")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.reader = MessageReader()
        self.children: Dict[Any, int] = {}  # key -> pid


class Spawner:
    """The loop of the fork server."""

    def __init__(self, first: socket.socket) -> None:
        self._channels: Dict[int, _Channel] = {first.fileno(): _Channel(first)}
        self._first = first.fileno()
        self._owners: Dict[int, _Channel] = {}  # pid -> channel
        self._pages: Dict[
            int, int
        ] = {}  # pid of a runner -> its page, which names the process group of the script that it runs.
        self._kills_before: Dict[
            int, Optional[int]
        ] = {}  # pid of a runner -> processes that the system had killed for lack of memory when it started; None: it does not say.
        self._kills_claimed = 0  # Of those, the last that was a child of ours.
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._pid = os.getpid()
        self._preloaded: Set[str] = set()
        self._coordinator = 0  # Its pid, in an embedded mesh; a worker without it has nobody to work for.
        self._is_over = False

    def run(self) -> None:
        """Serve until the first channel ends."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(self._first, select.POLLIN)
        self._reap()
        starter = os.getppid()
        while self._first in self._channels and os.getppid() == starter and not self._is_over:
            for fd, _ in poll.poll(ORPHAN_CHECK_MILLISECONDS):
                if fd == self._wake_read:
                    try:
                        os.read(self._wake_read, 4096)
                    except BlockingIOError:
                        pass
                    self._reap()
                elif fd in self._channels and not self._serve(self._channels[fd], poll):
                    poll.unregister(fd)
                    self._drop(fd)
        self.kill_all()

    def kill_all(self) -> None:
        """Kill every child and wait for them, so that none is left to anybody."""
        for pid in self._owners:
            _kill_group(pid)
        for pid in self._owners:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                pass
            self._kill_script(pid)
        _sweep_stores()

    def _serve(self, channel: _Channel, poll: select.poll) -> bool:
        """Read and obey; False when the channel is at its end."""
        try:
            data, fds, _, _ = socket.recv_fds(channel.socket, 65536, MAX_FDS)
        except ConnectionError:
            return False
        if not data:
            return False
        for request in channel.reader.feed(data, list(fds)):
            if request["op"] == "fork":
                self._fork(channel, request, poll)
            elif request["op"] == "signal":
                pid = channel.children.get(request["key"])
                if pid is None:
                    continue
                if request["signal"] == signal.SIGKILL:
                    _kill_group(pid)
                else:
                    os.kill(pid, request["signal"])
        return True

    def _fork(self, channel: _Channel, request: Dict[str, Any], poll: select.poll) -> None:
        kind = "actor" if request.get("actor") else request["role"]
        if kind not in self._preloaded:
            self._preloaded.add(kind)
            preload(kind)
        if request.get("nests") and "nests" not in self._preloaded:
            self._preloaded.add("nests")
            preload("nests")
        own: Optional[socket.socket] = None
        other: Optional[socket.socket] = None
        if request["role"] == "worker":
            own, other = socket.socketpair()  # The agent's own channel to this spawner, for its runners.
        try:
            pid = os.fork()
        except OSError as error:
            self._answer(channel, {"key": request["key"], "pid": 0, "exit": 1, "error": f"cannot fork: {error}"})
            for fd in request["fd_list"]:
                os.close(fd)
            if own is not None and other is not None:
                own.close()
                other.close()
            return
        if pid == 0:
            self._become_child(request, own, other)
        if request["role"] == "runner":
            self._kills_before[pid] = _memory_kills()  # Now: the first look takes longer than its start should.
            self._pages[pid] = request["fd_list"].pop(1)
        for fd in request["fd_list"]:
            os.close(fd)
        if own is not None and other is not None:
            other.close()
            self._channels[own.fileno()] = _Channel(own)
            poll.register(own.fileno(), select.POLLIN)
        channel.children[request["key"]] = pid
        self._owners[pid] = channel
        if request["role"] == "coordinator":
            self._coordinator = pid
        self._answer(channel, {"key": request["key"], "pid": pid})

    def _become_child(self, request: Dict[str, Any], own: Optional[socket.socket], other: Optional[socket.socket]) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            gc.enable()
            os.setpgid(0, 0)
            system.die_with_parent(self._pid)
            if request["role"] == "runner":
                system.go_first()
            os.close(self._wake_read)
            os.close(self._wake_write)
            for page in self._pages.values():
                os.close(page)
            for other_channel in self._channels.values():
                other_channel.socket.close()
            if own is not None:
                own.close()
            run_role(request, other)
            code = 0
        except KeyboardInterrupt:
            code = 130
        except BaseException:  # noqa: BLE001  # The child's last word; it must not return into the spawner's loop.
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None:
                    return
                _kill_group(ended.si_pid)  # What a dead runner's task had started; before its id can be used again.
                self._kill_script(ended.si_pid)
                pid, status, usage = os.wait4(ended.si_pid, 0)
            except ChildProcessError:
                return
            death = {"exit": -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), "memory": _peak(usage)}
            if pid in self._kills_before:
                before = self._kills_before.pop(pid)
                if death["exit"] == -signal.SIGKILL:
                    death.update(self._autopsy(before))
                os.close(self._pages.pop(pid))
            channel = self._owners.pop(pid, None)
            self._is_over = self._is_over or pid == self._coordinator
            if channel is None:
                continue
            for key, child in list(channel.children.items()):
                if child == pid:
                    del channel.children[key]
                    self._answer(channel, {"key": key, "pid": pid, **death})

    def _kill_script(self, pid: int) -> None:
        """A runner has died: the script that it ran leads a process group of its own, which dies too."""
        page = self._pages.get(pid)
        if page is None:
            return
        from gpumesh.runtime.page import GROUP

        group = int.from_bytes(os.pread(page, 8, 8 * GROUP), sys.byteorder)
        if group > 1:
            _kill_group(group)

    def _autopsy(self, before: Optional[int]) -> Dict[str, Any]:
        """What the system says of a runner that got SIGKILL; `before`: its count of such kills when the runner started."""
        from gpumesh.devices import detect

        found: Dict[str, Any] = {"limit": detect.host_memory()}
        kills = _memory_kills()
        if kills is not None and before is not None:
            found["out_of_memory"] = kills > max(before, self._kills_claimed)
            if found["out_of_memory"]:
                self._kills_claimed = max(before, self._kills_claimed) + 1
        return found

    def _answer(self, channel: _Channel, answer: Dict[str, Any]) -> None:
        body = msgpack.packb(answer)
        try:
            channel.socket.sendall(LENGTH.pack(len(body)) + body)
        except OSError:
            pass  # Its owner is gone; the end of the channel comes next.

    def _drop(self, fd: int) -> None:
        channel = self._channels.pop(fd)
        channel.socket.close()
        for pid in channel.children.values():
            _kill_group(pid)


def _memory_kills() -> Optional[int]:
    from gpumesh.devices import detect  # Not at start-up, which the first agent waits for.

    return detect.memory_kills()


def _peak(usage: Any) -> int:
    """Bytes; the C library counts them in kilobytes, but for that of macOS."""
    return int(usage.ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


def _sweep_stores() -> None:
    """Objects of children that were killed, coordinator or agent, go with them."""
    from gpumesh.runtime import settings
    from gpumesh.store import segments

    segments.sweep_all(*filter(None, [settings.spill_dir()]))


def _kill_group(pid: int) -> None:
    """Kill a child and what it has started: each child leads a process group of its own."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # The group not made yet, or everyone in it gone.


def run_role(request: Dict[str, Any], channel: Optional[socket.socket]) -> None:
    """In the child: be what was asked for, until the end."""
    role = request["role"]
    if request.get("path"):
        sys.path[:] = request["path"]
    if request.get("actor"):
        from gpumesh.runtime import actor_runner

        actor_runner.main(request, request["fd_list"])
    elif role == "runner":
        from gpumesh.runtime import runner

        runner.main(request, request["fd_list"])
    elif role == "coordinator":
        from gpumesh.runtime import nodes

        nodes.run_coordinator_child(request, request["fd_list"][0])
    elif role == "worker":
        from gpumesh.runtime import nodes

        assert channel is not None
        nodes.run_worker_child(request, channel)
    else:
        raise ValueError(f"no role {role!r}")


def preload(role: str) -> None:
    """Import once, before the first fork of a role, what each child of that role would import again.

    By role and not at start-up: while the coordinator of an embedded mesh opens its port, the spawner imports what agents need,
    and while those connect, what runners need.
    """
    if role == "coordinator":
        from gpumesh.runtime import coordinator, nodes  # noqa: F401
    elif role == "worker":
        from gpumesh.runtime import nodes, worker  # noqa: F401
    elif role == "nests":  # Runners on a worker whose tasks use the mesh.
        for name in nesting.CLIENT:
            importlib.import_module(name)
    elif role == "actor":
        from gpumesh.runtime import actor_runner, actor_serial  # noqa: F401
        from gpumesh.serialization import pickling
    else:
        from gpumesh.runtime import runner
        from gpumesh.serialization import pickling  # noqa: F401

        assert runner is not None
    gc.freeze()  # What is here now stays shared with the children: no collector touches it again.


def main(arguments: List[str]) -> None:
    """Start-up: own session (no terminal signals), then the loop."""
    import types

    gc.disable()  # Imports make no garbage worth a search; children switch it on again.
    channel = socket.socket(fileno=int(arguments[0]))
    os.set_inheritable(channel.fileno(), False)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    system.preload()
    system.name_process("gpumesh-spawner")
    sys.modules["__main__"] = types.ModuleType("__main__")  # User code must not find this program under that name.
    Spawner(channel).run()
