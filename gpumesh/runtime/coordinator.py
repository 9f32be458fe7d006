"""The coordinator's shell: messages to events, actions to messages. Holds the payloads, never opens one; holds no policy."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import OrderedDict
from typing import Any, Dict, List, Optional, Set, Tuple, Union

from gpumesh.config import PENDING_HANDSHAKES
from gpumesh.model.ids import CLIENT_LIMIT, SEQUENCE_BITS, SEQUENCE_LIMIT, ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import facts_from_wire
from gpumesh.model.tasks import spec_from_wire
from gpumesh.protocol.connection import Closed, Connection, Established
from gpumesh.protocol.messages import (
    Answer,
    CancelTasks,
    DefineFunction,
    DefineSpec,
    MeshChanged,
    Query,
    RecallTasks,
    RegisterClient,
    RegisterWorker,
    RunTasks,
    SubmitTasks,
    TaskNotice,
    TaskOutput,
    TaskResults,
    TasksFinished,
    WorkerChanged,
    WorkerDraining,
)
from gpumesh.runtime import system
from gpumesh.runtime.facts import fresh_nonce, peer_facts
from gpumesh.runtime.link import PeerLink, Turn
from gpumesh.scheduler import actions as act
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.cluster import Cluster

logger = logging.getLogger("gpumesh.coordinator")

TRIM_TASKS = 20_000  # After so many tasks have ended and none is left, memory goes back to the system.
TRIM_SECONDS = 0.3  # When the last results have left.


class _Worker:
    __slots__ = ("ident", "link", "functions", "specs", "label")

    def __init__(self, ident: WorkerId, link: PeerLink, label: str) -> None:
        self.ident = ident
        self.link = link
        self.label = label
        self.functions: Set[bytes] = set()
        self.specs: Dict[Any, int] = {}  # TaskSpec -> number on this link.


class _Client:
    __slots__ = ("number", "link", "functions", "name", "missed_bytes")

    def __init__(self, number: ClientNumber, link: PeerLink, name: str) -> None:
        self.number = number
        self.link = link
        self.name = name
        self.missed_bytes = 0  # Of task output, since it was last told.
        self.functions: Set[bytes] = set()


_Peer = Union[_Worker, _Client]


class Coordinator:
    """One mesh. Every method runs on the loop's thread."""

    def __init__(self, *, token: str, mesh: str = "") -> None:
        self.mesh = mesh or secrets.token_hex(8)
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._cluster = Cluster()
        self._server: Optional[asyncio.AbstractServer] = None
        self._links: Set[PeerLink] = set()
        self._turn = Turn()
        self._strangers: OrderedDict[PeerLink, None] = OrderedDict()  # Not yet registered, oldest first.
        self._workers: Dict[WorkerId, _Worker] = {}
        self._clients: Dict[ClientNumber, _Client] = {}
        self._functions: Dict[bytes, Any] = {}
        self._function_users: Dict[bytes, int] = {}
        self._payloads: Dict[int, Any] = {}  # task id -> arguments, until the task has ended.
        self._history: Dict[int, List[Dict[str, Any]]] = {}  # task id -> its failed attempts, while it is tried again.
        self._incoming: Any = ()  # The results being handled.
        self._healthy = 0
        self._ended = 0
        self._is_trim_due = False
        self._timer: Optional[asyncio.TimerHandle] = None
        self._timer_at = 0.0
        self._drained: Optional[asyncio.Future[None]] = None

    async def start(self, listener: socket.socket) -> None:
        """Serve on a listening socket, which is ours from now on."""
        listener.setblocking(False)
        self._server = await self._loop.create_server(self._accept, sock=listener)

    async def stop(self) -> None:
        """Close every connection and the port."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for link in list(self._links):
            link.close("the coordinator was stopped")
        self._links.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await asyncio.sleep(0)  # One turn of the loop: the goodbyes are written.

    async def drain(self) -> None:
        """Assign nothing more; return when nothing runs."""
        self._drained = self._loop.create_future()
        now = self._loop.time()
        for ident in list(self._workers):
            self._perform(self._cluster.handle(ev.WorkerDraining(ident), now))
        self._check_drained()
        await self._drained

    def _check_drained(self) -> None:
        if self._drained is not None and not self._drained.done() and not self._cluster.assigned_count():
            self._drained.set_result(None)

    # --- connections

    def _accept(self) -> PeerLink:
        while len(self._strangers) >= PENDING_HANDSHAKES:
            oldest, _ = self._strangers.popitem(last=False)
            logger.info("dropped the oldest of %d unfinished handshakes", PENDING_HANDSHAKES)
            self._links.discard(oldest)
            oldest.abort()
        now = self._loop.time()
        connection = Connection.listen(token=self._token, nonce=fresh_nonce(), mesh=self.mesh, now=now, facts=peer_facts())
        connection.workers = self._healthy
        link = PeerLink(self._loop, connection, self._on_events, self._turn)
        link.holds_back = True
        self._links.add(link)
        self._strangers[link] = None
        return link

    def _on_events(self, link: PeerLink, events: List[Any]) -> None:
        for message in events:
            kind = type(message)
            peer: Optional[_Peer] = link.peer
            if kind is Closed:
                self._on_closed(link, peer, message)
            elif kind is Established:
                pass  # Its first message says who it is.
            elif type(peer) is _Worker:
                self._on_worker_message(peer, kind, message)
            elif type(peer) is _Client:
                self._on_client_message(peer, kind, message)
            else:
                self._register(link, kind, message)
            if link.connection.next_deadline() is None:
                break

    def _register(self, link: PeerLink, kind: Any, message: Any) -> None:
        role = link.connection.role
        now = self._loop.time()
        if kind is RegisterWorker and role == "worker":
            try:
                facts = facts_from_wire(message.facts)
            except ValueError as error:
                self._refuse(link, "protocol", str(error))
                return
            ident = WorkerId(message.worker)
            before = self._workers.get(ident)
            if before is not None:
                self._lose_worker(before, "it connected again")
                before.link.abort()
            self._strangers.pop(link, None)
            worker = link.peer = _Worker(ident, link, facts.hostname)
            self._workers[ident] = worker
            logger.info("worker %s (%s, %d slots) joined from %s", ident, facts.hostname, facts.slots, link.address)
            self._perform(self._cluster.handle(ev.WorkerConnected(ident, facts), now))
        elif kind is RegisterClient and role == "client":
            number = ClientNumber(message.client)
            if not 0 <= number < CLIENT_LIMIT:
                self._refuse(link, "protocol", f"client number {number} is out of range")
                return
            before_client = self._clients.get(number)
            if before_client is not None:
                # It came back before we noticed that its old connection is dead; strangers cannot guess 31 random bits.
                self._lose_client(before_client)
                before_client.link.abort()
            self._strangers.pop(link, None)
            link.peer = _Client(number, link, message.name)
            self._clients[number] = link.peer
            if link.connection.workers != self._healthy:
                link.send(MeshChanged(self._healthy))
            self._perform(self._cluster.handle(ev.ClientConnected(number, message.name), now))
        else:
            self._refuse(link, "protocol", f"a {role} must register before it sends {kind.__name__}")

    def _refuse(self, link: PeerLink, reason: str, text: str) -> None:
        logger.warning("refused %s: %s", link.address, text)
        self._strangers.pop(link, None)
        self._links.discard(link)
        peer = link.peer
        link.refuse(reason, text)
        self._lose(peer, text)

    def _on_closed(self, link: PeerLink, peer: Optional[_Peer], closed: Closed) -> None:
        self._links.discard(link)
        if self._strangers.pop(link, link) is None and closed.error is not None:
            logger.warning("refused %s: %s", link.address, closed.reason)
        self._lose(peer, closed.reason)

    def _lose(self, peer: Optional[_Peer], reason: str) -> None:
        if type(peer) is _Worker:
            self._lose_worker(peer, reason)
        elif type(peer) is _Client:
            self._lose_client(peer)

    def _lose_worker(self, worker: _Worker, reason: str) -> None:
        if self._workers.get(worker.ident) is worker:
            del self._workers[worker.ident]
            logger.info("worker %s (%s) left: %s", worker.ident, worker.label, reason)
            self._perform(self._cluster.handle(ev.WorkerLost(worker.ident, reason), self._loop.time()))

    def _lose_client(self, client: _Client) -> None:
        if self._clients.get(client.number) is client:
            del self._clients[client.number]
            self._perform(self._cluster.handle(ev.ClientLost(client.number), self._loop.time()))
            for digest in client.functions:
                self._function_users[digest] -= 1
                if not self._function_users[digest]:
                    del self._function_users[digest]
                    del self._functions[digest]
            self._trim()

    # --- messages to events

    def _on_client_message(self, client: _Client, kind: Any, message: Any) -> None:
        now = self._loop.time()
        if kind is SubmitTasks:
            problem = _wrong_with_ids(message.task_ids, client.number) or (
                "as many payloads as task ids belong into SubmitTasks"
                if len(message.task_ids) != len(message.payloads)
                else "a task of that id is here already"
                if not self._payloads.keys().isdisjoint(message.task_ids)
                else ""
            )
            if problem:
                self._refuse(client.link, "protocol", problem)
                return
            self._payloads.update(zip(message.task_ids, message.payloads))
            self._perform(self._cluster.handle(ev.TasksSubmitted(client.number, message.spec, message.task_ids), now))
        elif kind is CancelTasks:
            problem = _wrong_with_ids(message.task_ids, client.number)
            if problem:
                self._refuse(client.link, "protocol", problem)
                return
            self._perform(self._cluster.handle(ev.CancelRequested(client.number, message.task_ids), now))
        elif kind is DefineFunction:
            if message.digest not in client.functions:
                client.functions.add(message.digest)
                self._functions.setdefault(message.digest, message.body)
                self._function_users[message.digest] = self._function_users.get(message.digest, 0) + 1
        elif kind is DefineSpec:
            try:
                spec = spec_from_wire(message.spec)
            except ValueError as error:
                self._refuse(client.link, "protocol", str(error))
                return
            if spec.function not in client.functions:
                self._refuse(client.link, "protocol", f"spec {message.number} refers to a function that was not defined")
                return
            self._perform(self._cluster.handle(ev.SpecDefined(client.number, message.number, spec), now))
        elif kind is Query:
            self._answer(client, message)
        else:
            self._refuse(client.link, "protocol", f"a client does not send {kind.__name__}")

    def _on_worker_message(self, worker: _Worker, kind: Any, message: Any) -> None:
        now = self._loop.time()
        if kind is TasksFinished:
            if not _are_results(message.results):
                self._refuse(worker.link, "protocol", "these are not results of tasks")
                return
            self._incoming = message.results
            self._perform(self._cluster.handle(ev.AttemptsFinished(worker.ident, message.results), now))
            self._incoming = ()
            if self._drained is not None:
                self._check_drained()
        elif kind is TaskOutput:
            self._forward_output(message)
        elif kind is WorkerChanged:
            try:
                facts = facts_from_wire(message.facts)
            except ValueError as error:
                self._refuse(worker.link, "protocol", str(error))
                return
            self._perform(self._cluster.handle(ev.WorkerChanged(worker.ident, facts), now))
        elif kind is WorkerDraining:
            logger.info("worker %s (%s) is leaving: %s", worker.ident, worker.label, message.reason)
            self._perform(self._cluster.handle(ev.WorkerDraining(worker.ident), now))
        else:
            self._refuse(worker.link, "protocol", f"a worker does not send {kind.__name__}")

    def _forward_output(self, output: TaskOutput) -> None:
        """To the task's owner; what an owner who does not keep up misses is told."""
        client = self._clients.get(ClientNumber(output.task_id >> SEQUENCE_BITS))
        if client is None:
            return
        if client.link.is_congested:
            client.missed_bytes += len(output.data)
            return
        if client.missed_bytes:
            words = f"[gpumesh: {client.missed_bytes} bytes of output were dropped; this client reads too slowly]\n"
            client.missed_bytes = 0
            client.link.send(output._replace(data=words.encode()))
        client.link.send(output)

    def _answer(self, client: _Client, query: Query) -> None:
        if query.what == "workers":
            client.link.send(Answer(query.number, self._cluster.snapshot(self._loop.time()), ""))
        else:
            client.link.send(Answer(query.number, None, f"this coordinator knows nothing of {query.what!r}"))

    # --- actions to messages

    def _perform(self, actions: List[Any]) -> None:
        for action in actions:
            kind = type(action)
            if kind is act.Deliver:
                self._deliver(action)
            elif kind is act.Assign:
                self._assign(action)
            elif kind is act.Fail:
                self._fail(action)
            elif kind is act.Recall:
                worker = self._workers.get(action.worker)
                if worker is not None:
                    worker.link.send(RecallTasks(action.tasks, action.kill))
            elif kind is act.Notice:
                client = self._clients.get(action.client)
                if client is not None:
                    client.link.send(TaskNotice(action.task_id, action.text))
            elif kind is act.Forget:
                for task_id in action.task_ids:
                    self._payloads.pop(task_id, None)
                    self._history.pop(task_id, None)
            elif kind is act.WorkersChanged:
                self._healthy = action.count
                for client in self._clients.values():
                    client.link.send(MeshChanged(action.count))
                for link in self._strangers:
                    link.connection.workers = action.count
            elif kind is act.Retrying:
                self._on_retrying(action)
        self._arm()

    def _on_retrying(self, action: act.Retrying) -> None:
        logger.info("task %x runs again (attempt %d) after %s", action.task_id, action.attempt, Status(action.status).name)
        details: Dict[str, Any] = {}
        for result in self._incoming:
            if result[0] == action.task_id and isinstance(result[3], dict):
                details = result[3]
        worker = self._workers.get(action.worker)
        label = worker.label if worker is not None else ""
        attempt = {"worker": action.worker, "hostname": label, "status": int(action.status), **details}
        self._history.setdefault(action.task_id, []).append(attempt)

    def _with_history(self, action: act.Deliver) -> List[Tuple[int, int, Any, float]]:
        """Failed attempts travel with the last one."""
        results: List[Tuple[int, int, Any, float]] = []
        for task_id, status, payload, seconds in action.results:
            history = self._history.pop(task_id, None)
            if history is not None and isinstance(payload, dict):
                payload = {**payload, "attempts": [*history, {"worker": action.worker, "status": status, **payload}]}
            results.append((task_id, status, payload, seconds))
        return results

    def _deliver(self, action: act.Deliver) -> None:
        payloads = self._payloads
        if self._history:
            action = action._replace(results=self._with_history(action))
        for result in action.results:
            payloads.pop(result[0], None)
        self._ended += len(action.results)
        client = self._clients.get(action.client)
        if client is not None:
            client.link.send(TaskResults(action.worker, action.results))
        if not payloads:
            self._trim()

    def _fail(self, action: act.Fail) -> None:
        self._payloads.pop(action.task_id, None)
        details = action.details
        history = self._history.pop(action.task_id, None)
        if history:
            details = {**details, "attempts": history}
        client = self._clients.get(action.client)
        if client is not None:
            worker = str(details.get("worker", ""))
            client.link.send(TaskResults(worker, [(action.task_id, int(action.status), details, 0.0)]))

    def _assign(self, action: act.Assign) -> None:
        worker = self._workers[action.worker]
        spec = action.spec
        number = worker.specs.get(spec)
        if number is None:
            if spec.function not in worker.functions:
                worker.functions.add(spec.function)
                worker.link.send(DefineFunction(spec.function, self._functions[spec.function]))
            number = worker.specs[spec] = len(worker.specs)
            worker.link.send(DefineSpec(number, spec))
        payloads = self._payloads
        worker.link.send(RunTasks(number, [(task, attempt, payloads[task]) for task, attempt in action.tasks]))

    def _trim(self) -> None:
        """After a burst: the tables' own memory, and what the C library keeps, go back to the system."""
        if self._ended >= TRIM_TASKS and not self._payloads and not self._is_trim_due:
            self._is_trim_due = True
            self._loop.call_later(TRIM_SECONDS, self._give_back)

    def _give_back(self) -> None:
        if self._payloads:  # The burst goes on, and its end counts.
            self._loop.call_later(TRIM_SECONDS, self._give_back)
            return
        self._is_trim_due = False
        self._ended = 0
        self._payloads = {}
        self._cluster.compact()
        for link in self._links:
            link.connection.renew_numbers()
        system.trim_memory()

    # --- time

    def _arm(self) -> None:
        deadline = self._cluster.next_deadline()
        if deadline is None:
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._perform(self._cluster.on_time(max(self._loop.time(), self._timer_at)))


def _wrong_with_ids(task_ids: Any, client: int) -> str:
    """Why these cannot be this client's task ids; "" when they can."""
    first = client << SEQUENCE_BITS
    try:
        mine = not task_ids or (first <= min(task_ids) and max(task_ids) < first + SEQUENCE_LIMIT)
    except TypeError:
        mine = False
    if not mine or any(type(task_id) is not int for task_id in task_ids):
        return "a task's id is its client's number and 32 bits"
    return ""


def _are_results(results: Any) -> bool:
    """Whether the shape is that of TasksFinished.results; what is in a payload is nobody's business here."""
    try:
        for task_id, attempt, status, _, seconds in results:
            if type(task_id) is not int or type(attempt) is not int or type(status) is not int or not 0 <= seconds < 1e12:
                return False
    except (TypeError, ValueError):
        return False
    return True
