"""The processes of one worker that run user code: started through spawners, read to their last word, mourned once.

    start ──> spawner ──fork──> process ──messages, output──> its user ... exit ──what it left behind──> its user

Who has a process runs it: see `ProcessUser`. Which task a process gets, and when it ends, is decided there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Set, Tuple, Union

from gpumesh.config import OUTPUT_READ_BYTES
from gpumesh.model.resources import DeviceFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.connection import Closed, Connection
from gpumesh.protocol.messages import DefineFunction, DefineSpec, TasksFinished
from gpumesh.runtime.link import PeerLink, Turn
from gpumesh.runtime.loop import take_over
from gpumesh.runtime.page import FINISHED, STARTED, Page, create_page_fd
from gpumesh.runtime.runner_cards import card_environment, no_card_environment
from gpumesh.runtime.spawner_link import Launch, SpawnerLink, append_to, text_of
from gpumesh.scheduler.local import OWN_ENVIRONMENT

logger = logging.getLogger(__name__)

_CODE = TaskSpec._fields.index("code")

_DEATH = (
    ("memory_bytes", "memory"),
    ("memory_limit_bytes", "limit"),
    ("out_of_memory", "out_of_memory"),
)  # As a spawner tells.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS",
)  # fmt: skip


class ProcessUser:
    """What is told of a process to who started it."""

    def on_process_message(self, process: Process, kind: Any, message: Any) -> None:
        """It has sent this."""
        raise AssertionError("overridden by the user")

    def on_process_down(self, process: Process, started: int, finished: int, details: Dict[str, Any]) -> None:
        """It is gone, and all it said has been told. `started`, `finished`: its page's last words; `details`: for people."""
        raise AssertionError("overridden by the user")

    def running_task(self, process: Process) -> int:
        """The task that what it writes now belongs to; 0: to none."""
        raise AssertionError("overridden by the user")


class OutputTaker:
    """Where the output of tasks goes."""

    @property
    def takes_output(self) -> bool:
        """Whether output can go on now; if not, tasks that write are held up until `RunnerProcesses.resume_output`."""
        raise AssertionError("overridden by the agent")

    def on_output(self, task_id: int, stream: int, data: bytes) -> None:
        """A task wrote something."""
        raise AssertionError("overridden by the agent")

    def on_pool_lost(self, reason: str) -> None:
        """The spawner is gone and every runner with it, and this pool cannot start another."""
        raise AssertionError("overridden by the agent")

    def on_runner_gone(self, runner: int) -> None:
        """A runner has ended, and all it said has been heard."""
        raise AssertionError("overridden by the agent")

    def mesh_for_tasks(self) -> Optional[Tuple[str, str, str]]:
        """What processes are told of the mesh: see `runtime.nesting.mesh`."""
        return None

    def on_process_gone(self, pid: int) -> None:
        """The process with this id has ended."""


class Process:
    """One process, from the request to its last word."""

    __slots__ = (
        "ident",
        "user",
        "socket",
        "link",
        "page",
        "outputs",
        "tail",
        "specs",
        "functions",
        "pid",
        "environment",
        "cards",
        "is_gone",
        "poll",
        "held",
        "written",
    )

    def __init__(
        self,
        ident: int,
        user: ProcessUser,
        sock: socket.socket,
        page: Page,
        outputs: List[int],
        environment: int,
        cards: Tuple[str, ...],
    ) -> None:
        self.ident = ident
        self.user = user
        self.socket = sock  # A duplicate of the link's: reads what a dead process left behind.
        self.link: Optional[PeerLink] = None
        self.page = page
        self.outputs = outputs  # Our ends of its standard output and standard error.
        self.tail: Deque[bytes] = deque()
        self.specs: Set[int] = set()
        self.functions: Set[bytes] = set()
        self.pid = 0
        self.environment = environment  # Which spawner is its parent.
        self.cards = cards  # That it sees.
        self.is_gone = False
        self.written = 0  # Writes of its that we know of; see page.WRITTEN.
        self.held: Set[int] = set()  # Streams that are not read: the agent's link is congested.
        self.poll = select.poll()
        for fd in outputs:
            self.poll.register(fd, select.POLLIN)


class Definitions:
    """Functions, code and specs of this worker's tasks, as long as the worker lives; and what each process has been told of them."""

    def __init__(self) -> None:
        self.specs: List[Tuple[Any, ...]] = []  # By the worker's own number.
        self._numbers: Dict[Tuple[Any, ...], int] = {}
        self._functions: Dict[bytes, Any] = {}  # Bodies of functions, and DefineCode of the modules that come with them.

    def define(self, digest: bytes, body: Any) -> None:
        """Keep a function's body, or modules that come with functions, for the processes that need it."""
        self._functions[digest] = body

    def number(self, spec: Tuple[Any, ...]) -> Tuple[int, bool]:
        """The worker's own number of a spec, the same for the life of the worker; and whether it is new."""
        number = self._numbers.get(spec)
        if number is not None:
            return number, False
        number = self._numbers[spec] = len(self.specs)
        self.specs.append(spec)
        return number, True

    def tell(self, process: Process, spec: int) -> None:
        """Before the first task of a spec goes to a process: what it needs to know for that."""
        link = process.link
        assert link is not None
        fields = self.specs[spec]
        digest = fields[0]
        code = fields[_CODE] if len(fields) > _CODE else b""
        if code and code not in process.functions:
            process.functions.add(code)
            # With all it needs, each time: what a runner has unpacked it does not keep as bytes.
            for part in (*self._functions[code].needs, code):
                link.send(self._functions[part])
        if digest + code not in process.functions:
            process.functions.add(digest + code)
            link.send(DefineFunction(digest, self._functions[digest]))
        process.specs.add(spec)
        link.send(DefineSpec(spec, fields))


class RunnerProcesses:
    """All of them, and the spawners.

    Args:
        spawner: The channel to a spawner that is somebody else's, or what starts one of our own.
        owner: Gets what they write.
        on_lost: Called when a spawner that is somebody else's is gone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spawner: Union[socket.socket, Launch],
        owner: OutputTaker,
        *,
        path: Optional[List[str]],
        folder: str,
        label: str,
        devices: Sequence[DeviceFacts],
        on_lost: Callable[[], None],
    ) -> None:
        self.label = label  # Of this worker, for people.
        self.turn = Turn()  # Shared with the agent's link to the coordinator.
        self.devices = tuple(devices)  # What the next ones can see.
        self.by_number: Dict[int, Process] = {}
        self.nests = False  # Tasks here have waited for others: those to come may, too.
        self._loop = loop
        self._owner = owner
        self._path = path
        self._folder = folder
        self._on_lost = on_lost
        self._is_closed = False
        self._spawners: Dict[int, SpawnerLink] = {}  # One for each environment.
        self.add_spawner(OWN_ENVIRONMENT, spawner)

    def add_spawner(self, environment: int, source: Union[socket.socket, Launch]) -> None:
        """What starts processes of an environment, unless there is one."""
        if environment not in self._spawners:
            link = SpawnerLink(self._loop, source, on_answer=self._on_spawner_answer, on_lost=self._on_spawner_lost)
            self._spawners[environment] = link

    def close(self) -> None:
        """End all of them; nothing is told any more."""
        self._is_closed = True
        for spawner in self._spawners.values():
            spawner.close()
        for process in list(self.by_number.values()):
            self._forget(process)

    def close_spawner(self, environment: int) -> None:
        """Nothing has run in this environment for long: without processes its spawner ends too."""
        spawner = self._spawners[environment]
        if spawner.is_open and not any(process.environment == environment for process in self.by_number.values()):
            spawner.close()

    # --- one process

    def start(
        self,
        ident: int,
        user: ProcessUser,
        *,
        threads: int,
        environment: int,
        cards: Tuple[str, ...] = (),
        extra: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Start one; whatever comes of that is told later.

        Args:
            ident: A number that no other has had.
            user: Is told.
            threads: For numeric libraries.
            environment: In which.
            cards: That it sees; ().
            extra: To stand in the request.
        """
        ours, theirs = socket.socketpair()
        page_fd = create_page_fd()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        page = Page(page_fd)
        ours.setblocking(False)
        process = Process(ident, user, ours.dup(), page, [out_read, err_read], environment, cards)
        self.by_number[ident] = process
        request = {
            "op": "fork",
            "role": "runner",
            "key": ident,
            "environment": {},
            "path": self._path if environment == OWN_ENVIRONMENT else None,  # Else the spawner has it.
            "folder": self._folder,
            "mesh": self._owner.mesh_for_tasks(),
            "nests": self.nests,
            **(extra or {}),
        }
        fds = [theirs.fileno(), page_fd, out_write, err_write]
        failure = ""
        try:
            request["environment"] = {**thread_environment(threads), **self._visibility(cards)}
            self._spawners[environment].ask(request, fds)
        except (OSError, ValueError) as error:
            failure = f"no process that starts runners: {error}" if isinstance(error, OSError) else str(error)
        finally:
            theirs.close()
            for fd in fds[1:]:
                os.close(fd)
        for stream, fd in enumerate(process.outputs, start=1):
            os.set_blocking(fd, False)
            self._loop.add_reader(fd, self._on_output_ready, process, stream)
        link = PeerLink(self._loop, Connection.trusted(), self._on_events, self.turn)
        link.peer = process
        process.link = link
        task = self._loop.create_task(take_over(self._loop, lambda: link, ours))
        task.add_done_callback(lambda task: ours.close() if task.cancelled() or task.exception() else None)
        _keep(task)
        if failure:
            task.add_done_callback(lambda _: None if process.is_gone else self._on_exit(process, 1, failure))

    def _visibility(self, cards: Tuple[str, ...]) -> Dict[str, str]:
        if cards:
            return card_environment(cards, self.devices, os.environ)
        return no_card_environment(self.devices)

    def send(self, ident: int, message: Any) -> bool:
        """Tell a process something; False if it is gone."""
        process = self.by_number.get(ident)
        if process is None or process.link is None:
            return False
        process.link.send(message)
        return True

    def signal(self, ident: int, number: int) -> None:
        """Send it a signal, if it is there."""
        process = self.by_number.get(ident)
        if process is None:
            return
        try:
            self._spawners[process.environment].ask({"op": "signal", "key": ident, "signal": int(number)}, [])
        except OSError as error:
            logger.debug("cannot reach the spawner: %s", error)

    def _on_events(self, link: PeerLink, events: List[Any]) -> None:
        process: Process = link.peer
        user = process.user
        for message in events:
            kind = type(message)
            if kind is not Closed:
                user.on_process_message(process, kind, message)
            elif not process.is_gone:
                # The spawner's word about its exit follows; or it has closed its own socket and is of no use.
                self.signal(process.ident, signal.SIGKILL)

    # --- spawners

    def _on_spawner_lost(self, spawner: SpawnerLink) -> None:
        """Its children are being killed by the kernel; what they left in their sockets and pages still counts."""
        reason = "the process that starts runners is gone"
        if not spawner.is_ours:
            self._on_lost()
            self._owner.on_pool_lost(reason)
            return
        lost = [process for process in self.by_number.values() if self._spawners[process.environment] is spawner]
        spawner.close()
        logger.warning("%s; starting another", reason)
        for process in lost:
            self._on_exit(process, -signal.SIGKILL, reason)

    def _on_spawner_answer(self, message: Dict[str, Any]) -> None:
        process = self.by_number.get(message["key"])
        if process is None:
            return
        if "exit" in message:
            self._on_exit(process, message["exit"], message.get("error", ""), message)
        else:
            process.pid = message["pid"]

    # --- the end of one

    def _on_exit(self, process: Process, code: int, error: str, death: Optional[Dict[str, Any]] = None) -> None:
        """The process is reaped: whatever it wrote is in the kernel's buffers now. `death`: what its spawner tells of it."""
        self._read_rest(process)
        held = process.page.held()
        if held and not self._is_closed:
            process.user.on_process_message(process, TasksFinished, TasksFinished(held))
        process.is_gone = True
        words = process.page.words
        started, finished = words[STARTED], words[FINISHED]
        self.drain_output(process, process.user.running_task(process))
        details: Dict[str, Any] = {
            "worker": self.label,
            "exit": code,
            "pid": process.pid,
            "stderr": text_of(process.tail) or ("" if started else self._spawners[process.environment].last_words),
            "reason": error,
        }
        for name, told in _DEATH:
            if death is not None and told in death:
                details[name] = death[told]
        self._forget(process)
        if not self._is_closed:
            self._owner.on_runner_gone(process.ident)
            if process.pid:
                self._owner.on_process_gone(process.pid)
            process.user.on_process_down(process, started, finished, details)

    def _read_rest(self, process: Process) -> None:
        link = process.link
        if link is None or link.connection.error is not None:
            return
        while True:
            try:
                count = process.socket.recv_into(link.connection.get_buffer())
            except OSError:
                return
            if not count:
                return
            link.buffer_updated(count)

    def _forget(self, process: Process) -> None:
        if self.by_number.pop(process.ident, None) is None:
            return
        process.is_gone = True
        for fd in process.outputs:
            self._loop.remove_reader(fd)
            os.close(fd)
        process.outputs = []
        process.socket.close()
        if process.link is not None:
            process.link.abort()
        process.page.close()

    # --- output

    def _on_output_ready(self, process: Process, stream: int) -> None:
        if self._owner.takes_output:
            self._read_output(process, stream, process.user.running_task(process), once=True)
        else:
            process.held.add(stream)
            self._loop.remove_reader(process.outputs[stream - 1])

    def resume_output(self) -> None:
        """The owner takes output again."""
        for process in self.by_number.values():
            for stream in process.held:
                self._loop.add_reader(process.outputs[stream - 1], self._on_output_ready, process, stream)
            process.held.clear()

    def drain_output(self, process: Process, task_id: int) -> None:
        """Read what it has written up to now; it belongs to this task."""
        if process.outputs and process.poll.poll(0):
            for stream in (1, 2):
                self._read_output(process, stream, task_id, once=False)

    def _read_output(self, process: Process, stream: int, task_id: int, *, once: bool) -> None:
        if not process.outputs:
            return
        fd = process.outputs[stream - 1]
        while True:
            try:
                data = os.read(fd, OUTPUT_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(fd)
                process.held.discard(stream)
                with contextlib.suppress(KeyError):
                    process.poll.unregister(fd)
                return
            if stream == 2:
                append_to(process.tail, data)
            self._owner.on_output(task_id, stream, data)
            if once or len(data) < OUTPUT_READ_BYTES:
                return


_tasks: Set[asyncio.Task[Any]] = set()


def _keep(task: asyncio.Task[Any]) -> None:
    """The loop holds tasks weakly; hold this one until it ends, and let its failure be heard."""
    _tasks.add(task)
    task.add_done_callback(_ended)


def _ended(task: asyncio.Task[Any]) -> None:
    _tasks.discard(task)
    if not task.cancelled() and task.exception() is not None:
        logger.error("background work failed", exc_info=task.exception())


def thread_environment(threads: int) -> Dict[str, str]:
    """Limits for the numeric libraries of one runner; what the user has set stays."""
    return {name: str(threads) for name in THREAD_VARIABLES if name not in os.environ}
