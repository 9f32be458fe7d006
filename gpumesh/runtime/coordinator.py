"""The coordinator's shell: messages to events, actions to messages. Holds the payloads, never opens one; holds no policy."""

from __future__ import annotations

import asyncio
import importlib
import logging
import secrets
import socket
import sys
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Union

from gpumesh.config import (
    ABSENT_CLIENT_SECONDS,
    ATTEMPTS_KEPT,
    EVENT_TEXT_CHARACTERS,
    FACTS_CHARACTERS,
    RECOVERY_SECONDS,
    WORKER_TTL_SECONDS,
)
from gpumesh.model.actors import ACTORS_CLIENT
from gpumesh.model.ids import CLIENT_LIMIT, SEQUENCE_BITS, SEQUENCE_LIMIT, ClientNumber, WorkerId
from gpumesh.model.jobs import JOBS_CLIENT
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle, Later, OutOfBand, Stored, mentioned
from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import WorkerFacts, facts_from_wire, readings_from_wire, show_bytes
from gpumesh.model.shown import clean_line
from gpumesh.model.tasks import TaskSpec, spec_from_wire
from gpumesh.protocol import auth
from gpumesh.protocol.connection import Closed, Connection, Established
from gpumesh.protocol.messages import (
    ActorReady,
    Answer,
    CancelTasks,
    ChangeJob,
    CreateDetached,
    DefineCode,
    DefineFunction,
    DefineSpec,
    ForgetResults,
    FreeObjects,
    JobPayloads,
    KillActor,
    MeshChanged,
    Query,
    RecallTasks,
    RegisterClient,
    RegisterWorker,
    ResubmissionEnds,
    ResultsReceived,
    RotateToken,
    RunTasks,
    SessionResumed,
    StreamCredit,
    StreamItems,
    SubmitJob,
    SubmitTasks,
    TaskNotice,
    TaskOutput,
    TaskResults,
    TasksFinished,
    TasksWait,
    WorkerChanged,
    WorkerDraining,
    WorkerReadings,
)
from gpumesh.protocol.object_errors import LOST
from gpumesh.runtime import nested_service, settings, system
from gpumesh.runtime.doorway import Doorway
from gpumesh.runtime.event_log import EventLog
from gpumesh.runtime.facts import fresh_nonce, peer_facts
from gpumesh.runtime.link import PeerLink, Turn
from gpumesh.runtime.loop import Alarm
from gpumesh.runtime.object_service import ObjectService, awaited_tasks, is_payload
from gpumesh.runtime.stream_service import StreamService
from gpumesh.runtime.tokens import Tokens
from gpumesh.runtime.worker_events import note_changes
from gpumesh.runtime.worker_limits import WorkerLimits
from gpumesh.scheduler import actions as act
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.cluster import Cluster
from gpumesh.scheduler.locality import TRACKED_BYTES
from gpumesh.scheduler.snapshot import WAITING_STATES, WORKER_STATES, worker_state
from gpumesh.version import __version__

if TYPE_CHECKING:
    from gpumesh.journal.base import Journal, WorkerRecord
    from gpumesh.network.certificates import Identity
    from gpumesh.runtime.actor_service import ActorService
    from gpumesh.runtime.job_service import JobService

logger = logging.getLogger("gpumesh.coordinator")

_OK = int(Status.OK)
_LOST = int(Status.LOST)
_NOT_RUN = int(Status.NOT_RUN)
_CRASHED = int(Status.CRASHED)
# Ends of attempts that are no ends of their tasks, unless those may run at most once.
_TRIED_AGAIN = frozenset((int(Status.RETRYABLE), int(Status.CRASHED), int(Status.HANDED_BACK)))
_BYTES = frozenset({bytes})
_OWN_CLIENTS = (JOBS_CLIENT, ACTORS_CLIENT)

DIED = "died"  # In the journal, instead of the ids of all workers that have died since the last start.
LIMITS_KNOWN = 1000  # Workers with a worker-only token of which it is known what they were given.
TRIM_TASKS = 20_000  # After so many tasks have ended and none is left, memory goes back to the system.
TRIM_SECONDS = 0.3  # When the last results have left.


class _Worker:
    __slots__ = ("ident", "link", "functions", "specs", "label", "facts", "is_leaving", "told", "limits")

    def __init__(self, ident: WorkerId, link: PeerLink, label: str, limits: Optional[WorkerLimits]) -> None:
        self.limits = limits  # None: it has the full token.
        self.facts: Optional[WorkerFacts] = None  # As it told them last.
        self.is_leaving = False
        self.ident = ident
        self.link: Optional[PeerLink] = link  # None while it is away.
        self.label = label
        self.functions: Set[bytes] = set()
        self.specs: Dict[Any, int] = {}  # TaskSpec -> number on this link.
        self.told = 1  # How many workers there are.

    def begin(self, link: PeerLink, label: str) -> None:
        """It is back, and knows nothing of what it was told before."""
        self.link = link
        self.label = label
        self.functions = set()
        self.specs = {}
        self.told = 1


class _Code(NamedTuple):
    archive: Any
    needs: Tuple[bytes, ...]


Result = Tuple[int, int, Any, float]
"""(task id, Status, payload or dict, run seconds)."""


class _Client:
    __slots__ = ("number", "link", "functions", "name", "missed_bytes", "unconfirmed", "confirmed_count", "kept", "answered",
                 "has_been_here", "undecided", "inside")  # fmt: skip

    def __init__(self, number: ClientNumber, link: Optional[PeerLink], name: str) -> None:
        self.number = number
        self.link = link  # None while it is away.
        self.name = name
        self.unconfirmed: Deque[Tuple[str, Sequence[Result]]] = deque()  # Sent, and who made them.
        self.confirmed_count = 0  # Results that it has received over this link.
        self.kept: Dict[
            int, Tuple[str, Result]
        ] = {}  # Task -> who made its result, and the result; while it is away or submits again.
        self.undecided: Set[int] = (
            set()
        )  # Of the kept: ends of attempts that came before it had said whether there may be others.
        self.answered: Optional[Set[int]] = None  # While it submits again: tasks whose results were sent meanwhile.
        self.missed_bytes = 0  # Of task output, since it was last told.
        self.functions: Set[bytes] = set()
        self.has_been_here = link is not None  # Else only workers have told of its tasks.
        self.inside = ""  # The worker that runs the task in which it is: it dies with that, and not of silence.

    def sent(self, ident: str, results: Sequence[Result]) -> None:
        """These are on their way to it, and need to be kept until it confirms them."""
        self.unconfirmed.append((ident, results))
        if self.answered is not None:
            self.answered.update(result[0] for result in results)


_Peer = Union[_Worker, _Client]


class Coordinator:
    """One mesh. Every method runs on the loop's thread.

    Args:
        token: What peers must know.
        mesh: Its id; drawn if not given.
        object_memory: Bytes of objects in this host's memory; as the environment says, or a part of RAM, if not given.
        spill_dir: Where objects above that go.
        journal: Keeps script jobs, is ours from now on, and what is unfinished in it goes on; without one they are kept in memory.
        worker_ttl: Seconds for which a lost worker is still shown.
        identity: Its certificate: other machines speak TLS then, and nothing else.
        is_insecure: Nobody has to.
        has_web: Speak HTTP on the port too; so does one with an identity.

    Raises:
        JournalError: What stands in the journal cannot be read.
    """

    def __init__(
        self,
        *,
        token: str,
        mesh: str = "",
        object_memory: Optional[int] = None,
        spill_dir: Optional[str] = None,
        journal: Optional[Journal] = None,
        worker_ttl: float = WORKER_TTL_SECONDS,
        identity: Optional[Identity] = None,
        is_insecure: bool = False,
        has_web: bool = False,
    ) -> None:
        self.mesh = mesh or secrets.token_hex(8)
        self.tokens = Tokens(token)
        self._loop = asyncio.get_running_loop()
        self._cluster = Cluster(worker_ttl=worker_ttl)
        self._links: Set[PeerLink] = set()
        self._turn = Turn()
        self.door = Doorway(
            self._loop,
            self._accept,
            on_refused=self._on_refused,
            make_web=self._make_web if identity is not None or has_web else None,
            identity=identity,
            is_insecure=is_insecure,
        )
        self._web: Any = None  # What speaks HTTP, once somebody did.
        self.names: Set[str] = set()  # By which others call this machine, as its owner says.
        self._started_at = self._loop.time()
        self._workers: Dict[WorkerId, _Worker] = {}
        self._limits: OrderedDict[WorkerId, WorkerLimits] = OrderedDict()  # Of those with a worker-only token.
        self._claiming: List[WorkerLimits] = []  # Those of them that had tasks before a restart, as they say.
        self._clients: Dict[ClientNumber, _Client] = {}
        self._functions: Dict[bytes, Any] = {}
        self._function_users: Dict[bytes, int] = {}
        self._payloads: Dict[int, Any] = {}  # task id -> arguments, until the task has ended.
        self._history: Dict[int, List[Dict[str, Any]]] = {}  # task id -> its failed attempts, while it is tried again.
        self._lost: Optional[Tuple[_Worker, str]] = None  # Whose tasks are being given up right now, and why.
        self._incoming: Any = ()  # The results being handled.
        self._wanted: List[Sequence[Result]] = []  # Those of them that somebody gets.
        self._incoming_has_objects = False  # Some of their payloads may name objects.
        self._late: Dict[int, List[int]] = {}  # Task whose result is wanted -> tasks that have it among their arguments.
        self._read_later: Dict[
            int, Tuple[str, int]
        ] = {}  # Value of a result that has arrived -> who keeps it, and whose result.
        self._held: Dict[int, List[Tuple[WorkerId, Any]]] = {}  # Object that is arriving -> results that wait for it.
        self._objects = ObjectService(
            self._loop,
            limit=settings.object_memory() if object_memory is None else object_memory,
            spill_dir=spill_dir or settings.spill_dir(),
            on_freed=self._on_objects_freed,
            on_settled=self._on_object_settled,
            on_unneeded=self._on_object_unneeded,
            tell=lambda news: self._perform(self._cluster.handle(news, self._loop.time())),
        )
        self._streams = StreamService(
            self._objects,
            send_to_client=self._send_to_client,
            send_to_worker=self._send_to_worker,
            on_result=self._on_held_result,
            on_all_sent=self._on_stream_sent,
        )
        self.events = _event_log(journal)
        self._objects.on_spilled = self._on_spilled
        self._healthy = 0
        self._ended = 0
        self._ended_before = 0  # Of these, before memory was given back last.
        self._is_trim_due = False
        self._alarm = Alarm(self._loop, self._on_time)
        self._drained: Optional[asyncio.Future[None]] = None
        self._has_scripts = False  # The scheduler knows JOBS_CLIENT.
        self._jobs: Optional[JobService] = None  # Made when there is a first job, or a journal.
        self._actors: Optional[ActorService] = None  # Made when there is a first actor.
        self._script_makers: Dict[
            int, str
        ] = {}  # Script task whose end is not on disk yet -> the worker that keeps its result.
        self._is_recovering = True  # Script jobs of before: their tasks may be at workers.
        self.own_workers: Set[str] = set()  # Ids of those that end with this process.
        self._journal = journal
        before = _workers_before(journal) if journal is not None else []
        knows = journal is not None and journal.generation > 1  # A new journal says nothing of who was there.
        living = [WorkerId(record.id) for record in before if record.name] if knows else None
        self._workers_before = [WorkerId(record.id) for record in before]
        self._has_died = False  # A worker has, since this start, and the journal says so.
        self._missing_timer: Optional[asyncio.TimerHandle] = None
        first_attempt = 1000 + secrets.randbelow(1 << 24)
        self._tell(ev.Started(living, first_attempt, living is not None and len(living) < len(before)))
        if journal is not None:
            self._open_jobs(journal).recover()
        self._is_recovering = False

    async def start(self, listener: socket.socket) -> None:
        """Serve on a listening socket, which is ours from now on."""
        self.door.open(listener)
        if self._workers_before:
            self._missing_timer = self._loop.call_later(ABSENT_CLIENT_SECONDS, self._forget_missing)
        self.events.note("started", f"the coordinator of mesh {self.mesh} has started")

    async def stop(self) -> None:
        """Close every connection and the port."""
        await self.door.close()
        links = list(self._links)
        self._links.clear()
        for link in links:
            link.close("the coordinator was stopped")
        self._alarm.cancel()
        if self._missing_timer is not None:
            self._missing_timer.cancel()
        if self._jobs is not None:
            self._jobs.close()
        self._objects.close()
        await self._turn.all_gone(links)
        if self._web is not None:
            await self._web.close()
        await asyncio.sleep(0)  # One more turn: the last connections are gone before the loop is closed.

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

    def _accept(self, binding: bytes) -> PeerLink:
        now = self._loop.time()
        connection = Connection.listen(
            tokens=self.tokens.grants(now), nonce=fresh_nonce(), mesh=self.mesh, now=now, facts=peer_facts(), binding=binding
        )
        connection.workers = self._healthy
        link = PeerLink(self._loop, connection, self._on_events, self._turn)
        link.holds_back = True
        self._links.add(link)
        return link

    def _on_refused(self, address: str, why: str) -> None:
        logger.warning("refused %s: %s", address, why)
        self.events.note("refused", f"refused {address}: {why}")

    def figures(self) -> Dict[str, Any]:
        """What the mesh does, in numbers, and a row for each worker; for people and monitors."""
        now = self._loop.time()
        workers = self._cluster.snapshot(now)
        waiting = self._cluster.waiting(now)
        here = [row for row in workers if row["alive"]]
        states = [worker_state(row) for row in workers]
        return {
            "mesh": self.mesh,
            "version": __version__,
            "python": ".".join(map(str, sys.version_info[:3])),
            "uptime": now - self._started_at,
            "workers": workers,
            "worker_states": {state: states.count(state) for state in WORKER_STATES},
            "task_states": {
                **{state: sum(row["count"] for row in waiting if row["state"] == state) for state in WAITING_STATES},
                "assigned": sum(row["queued"] for row in here),
                "running": sum(row["running"] for row in here),
                "waiting": sum(row["waiting"] for row in here),
            },
            "ended": self._ended_before + self._ended,
            "clients": sum(client.link is not None for client in self._clients.values()),
            "connections": len(self._links) - len(self.door.strangers()),
            "handshakes": len(self.door.admission),
            "refused": self.door.admission.refused,
            "objects": self._objects.usage(),
        }

    async def _make_web(self) -> Callable[[], asyncio.BaseProtocol]:
        """Loads what speaks HTTP, which takes a quarter of a second, beside the loop; the maker of its protocols."""
        if self._web is None:
            module = await self._loop.run_in_executor(None, importlib.import_module, "gpumesh.runtime.web")
            if self._web is None:
                self._web = module.Web(self)
        protocol: Callable[[], asyncio.BaseProtocol] = self._web.protocol
        return protocol

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
            if link not in self._links:
                break  # Refused. (That the connection is over does not say so: the goodbye may be among what comes next.)

    def _register(self, link: PeerLink, kind: Any, message: Any) -> None:
        role = link.connection.role
        now = self._loop.time()
        if kind is RegisterWorker and role == "worker":
            try:
                facts = facts_from_wire(message.facts)
            except ValueError as error:
                self._refuse(link, "protocol", str(error))
                return
            try:
                held, finished = _held_from_wire(message.held), _attempts_from_wire(message.finished)
            except (TypeError, ValueError, OverflowError) as error:
                self._refuse(link, "protocol", f"this is not what a worker can have: {error}")
                return
            ident = WorkerId(message.worker)
            worker = self._workers.get(ident)
            limits = self._limits_of(ident) if link.connection.grant == auth.WORKER else None
            problem = _wrong_with_worker_id(ident)
            if not problem and worker is not None and (worker.limits is None) is not (limits is None):
                problem = f"a worker {ident} is here already, with another kind of token"
            if problem:
                self._refuse(link, "protocol", problem)
                return
            if limits is not None:
                held, finished = _only_claimed(link, limits, held, finished)
                if limits.claimed_before and limits not in self._claiming:
                    self._claiming.append(limits)
            self.door.settle(link)
            if worker is None:
                worker = self._workers[ident] = _Worker(ident, link, facts.hostname, limits)
                what = "is back" if held or finished else "joined"
            else:
                what = "is back"
                if worker.link is not None:  # Its old connection is dead, and we have not noticed.
                    self._cut_off(worker)
                worker.begin(link, facts.hostname)
            link.peer = worker
            for inside in self._clients.values():
                if inside.inside == ident and inside.link is not None:
                    inside.link.connection.is_patient = True
            logger.info("worker %s (%s, %d slots) %s from %s", ident, facts.hostname, facts.slots, what, link.address)
            words = f"worker {ident} ({facts.hostname}, {facts.slots} slots) {what} from {link.address}"
            self.events.note("joined" if what == "joined" else "returned", words, worker=ident)
            self._note_facts(worker, facts)
            self._note_worker(worker)
            if any(each.spec.plan is not None for each in held):
                self._open_actors().coming_back(held)
            is_near = link.is_local and facts.hostname == socket.gethostname()
            self._perform(self._cluster.handle(ev.WorkerConnected(ident, facts, is_near, held, finished), now))
            self._streams.worker_back(ident)
        elif kind is RegisterClient and role == "client":
            number = ClientNumber(message.client)
            if number in _OWN_CLIENTS or not 0 < number < CLIENT_LIMIT:
                self._refuse(link, "protocol", f"client number {number} is out of range")
                return
            self.door.settle(link)
            name = clean_line(message.name, FACTS_CHARACTERS)
            # One that is known came back, maybe before we noticed that its old connection is dead: strangers cannot guess 31 random bits.
            client = self._clients.get(number)
            if client is not None:
                if client.link is not None:
                    self._cut_off(client)
                if not message.resumes:
                    self._lose_client(client)
                    client = None
            is_kept = client is not None and client.has_been_here
            if client is None:
                client = self._clients[number] = _Client(number, link, name)
            client.has_been_here = True
            client.link = link
            client.answered = set() if message.resumes else None
            client.name = name
            link.peer = client
            if link.connection.workers != self._healthy:
                link.send(MeshChanged(self._healthy))
            if message.resumes:
                link.send(SessionResumed(is_kept))
                self._objects.peer_back(number)
            self._perform(self._cluster.handle(ev.ClientConnected(number, name, message.resumes), now))
        else:
            self._refuse(link, "protocol", f"a {role} must register before it sends {kind.__name__}")

    def _refuse(self, link: PeerLink, reason: str, text: str) -> None:
        text = clean_line(text, EVENT_TEXT_CHARACTERS)  # It may quote what came.
        logger.warning("refused %s: %s", link.address, text)
        self.events.note("refused", f"refused {link.address}: {text}")
        self.door.settle(link)
        self._links.discard(link)
        peer = link.peer
        link.refuse(reason, text)
        self._lose(peer, text)

    def _on_closed(self, link: PeerLink, peer: Optional[_Peer], closed: Closed) -> None:
        self._links.discard(link)
        if self.door.settle(link) and closed.error is not None:
            self.door.tell(link.address, closed.reason)
        if closed.error is None:  # It said goodbye.
            self._lose(peer, closed.reason)
        elif type(peer) is _Worker:
            if peer.link is link:
                self._on_worker_away(peer, closed.reason)
        elif type(peer) is _Client and peer.link is link:
            logger.info("lost client %s: %s", peer.name, closed.reason)
            self._cut_off(peer)
            self._perform(self._cluster.handle(ev.ClientAway(peer.number), self._loop.time()))

    def _on_worker_away(self, worker: _Worker, reason: str) -> None:
        logger.info("lost the connection of worker %s (%s): %s", worker.ident, worker.label, reason)
        self.events.note(
            "away", f"the connection of worker {worker.ident} ({worker.label}) broke: {reason}", worker=worker.ident
        )
        arriving: List[int] = []
        if worker.link is not None and not worker.link.has_ended:  # Else its process is dead.
            arriving = [result[0] for held in self._held.values() for ident, result in held if ident == worker.ident]
            arriving += self._streams.results_of(worker.ident)
        self._cut_off(worker)
        self._perform(self._cluster.handle(ev.WorkerAway(worker.ident, reason, arriving), self._loop.time()))

    def _cut_off(self, peer: _Peer) -> None:
        """A peer's connection is over; what hung on it is gone, and what is kept for the peer is kept."""
        link, peer.link = peer.link, None
        if link is not None:
            self._links.discard(link)
            link.abort()
        if type(peer) is _Worker:
            for oid in list(self._held):  # It sends these again.
                self._held[oid] = [held for held in self._held[oid] if held[0] != peer.ident]
            self._streams.worker_away(peer.ident)
            self._objects.peer_away(peer.ident)
        elif type(peer) is _Client:
            self._streams.client_away(peer.number)
            for ident, results in peer.unconfirmed:
                for result in results:
                    self._keep(peer, ident, result)
            peer.unconfirmed.clear()
            peer.confirmed_count = 0
            self._objects.peer_away(peer.number)

    def _lose(self, peer: Optional[_Peer], reason: str) -> None:
        if type(peer) is _Worker:
            self._lose_worker(peer, reason)
        elif type(peer) is _Client:
            self._lose_client(peer)

    def _lose_worker(self, worker: _Worker, reason: str) -> None:
        if self._workers.get(worker.ident) is worker:
            worker.link = None
            self._on_worker_gone(worker, reason, "left", has_work=self._cluster.has_attempts_at(worker.ident))
            self._perform(self._cluster.handle(ev.WorkerLost(worker.ident, reason), self._loop.time()))
            self._objects.peer_gone(worker.ident)

    def _on_worker_gone(self, worker: _Worker, reason: str, how: str, *, has_work: bool) -> None:
        """`how` is "left" or "died"; `has_work`: as far as is known, tasks were lost with it, however it went."""
        del self._workers[worker.ident]
        self._streams.worker_gone(worker.ident)
        how = "left" if worker.is_leaving else how
        if self._journal is not None:
            if has_work:
                self._note_loss(self._journal)  # First: never is the one forgotten and the other not known.
            self._journal.worker_left(worker.ident)
        words = f"worker {worker.ident} ({worker.label}) {'has left' if how == 'left' else 'is lost'}: {reason}"
        logger.info("%s", words)
        self.events.note(how, words, worker=worker.ident)
        self._loop.call_soon(self._lose_clients_inside, worker.ident)
        self._lost = (worker, reason)  # Until the actions that follow have been performed.

    def _lose_clients_inside(self, ident: WorkerId) -> None:
        """A worker is gone, and the tasks that it ran with it: so are those that were clients."""
        for client in [client for client in self._clients.values() if client.inside == ident]:
            if client.link is not None:
                self._cut_off(client)
            self._lose_client(client)

    def _lose_client(self, client: _Client) -> None:
        if self._clients.get(client.number) is client:
            client.link = None
            self._perform(self._cluster.handle(ev.ClientLost(client.number), self._loop.time()))
            self._end_client(client)

    def _end_client(self, client: _Client) -> None:
        """Nothing is kept for it any more."""
        if self._clients.get(client.number) is client:
            del self._clients[client.number]
            self._streams.client_gone(client.number)
            self._objects.peer_gone(client.number)
            for ident, results in client.unconfirmed:
                self._forget_results(ident, [result[0] for result in results])
            client.unconfirmed.clear()
            for task_id in list(client.kept):
                self._drop_kept(client, task_id)
            if self._jobs is not None:
                self._jobs.client_gone(client.number)
            self._undefine(client.functions)
            self._trim()

    def _undefine(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._function_users[digest] -= 1
            if not self._function_users[digest]:
                del self._function_users[digest]
                del self._functions[digest]

    # --- messages to events

    def _on_client_message(self, client: _Client, kind: Any, message: Any) -> None:
        now = self._loop.time()
        link = client.link
        if link is None:
            return  # It was refused a moment ago.
        if kind is SubmitTasks:
            problem = _wrong_with_ids(message.task_ids, client.number) or (
                "as many payloads as task ids belong into SubmitTasks"
                if len(message.task_ids) != len(message.payloads)
                else "a task of that id is here already"
                if not message.again and not self._payloads.keys().isdisjoint(message.task_ids)
                else "a task stands twice in SubmitTasks"
                if len(message.task_ids) > 1 and len(set(message.task_ids)) < len(message.task_ids)
                else ""
            )
            if problem:
                self._refuse(link, "protocol", problem)
                return
            again = message.again
            if again:
                message = self._sift(client, message)
            elif self._claiming:
                for limits in self._claiming:
                    limits.submitted_anew(message.task_ids)
            is_plain = _BYTES.issuperset(map(type, message.payloads))
            if not is_plain and not all(map(is_payload, message.payloads)):
                self._refuse(link, "protocol", "these are not the arguments of tasks")
                return
            self._payloads.update(zip(message.task_ids, message.payloads))
            ids = message.task_ids
            dependents: List[Tuple[int, Tuple[int, ...]]] = []
            large: List[Tuple[int, Tuple[ev.Input, ...]]] = []
            if not is_plain:
                for task_id, payload in zip(ids, message.payloads):
                    if type(payload) is not bytes:
                        self._objects.task_arrived(task_id, payload)
                        producers = awaited_tasks(payload)
                        inputs = self._objects.inputs_of(payload, 0 if producers else TRACKED_BYTES)
                        if producers:
                            dependents.append((task_id, producers))
                        if inputs:
                            large.append((task_id, inputs))
            if dependents:
                late = {task_id for task_id, _ in dependents}
                ids = [task_id for task_id in ids if task_id not in late]
            if ids:
                self._perform(self._cluster.handle(ev.TasksSubmitted(client.number, message.spec, ids, large, again), now))
            inputs_by_task = dict(large) if dependents else {}
            for task_id, producers in dependents:
                inputs = inputs_by_task.get(task_id, ())
                event = ev.DependentSubmitted(client.number, message.spec, task_id, producers, inputs, again)
                self._perform(self._cluster.handle(event, now))
                if task_id in self._payloads:  # Otherwise it has ended already: an input is not known here.
                    for producer in producers:
                        self._late.setdefault(producer, []).append(task_id)
        elif kind is CancelTasks:
            problem = _wrong_with_ids(message.task_ids, client.number)
            if problem:
                self._refuse(link, "protocol", problem)
                return
            self._perform(self._cluster.handle(ev.CancelRequested(client.number, message.task_ids), now))
        elif kind is ResultsReceived:
            self._on_received(client, message.count)
        elif kind is StreamCredit:
            problem = self._streams.on_credit(client.number, message)
            if problem:
                self._refuse(link, "protocol", problem)
        elif kind is ResubmissionEnds:
            client.answered = None
            for task_id in list(client.kept):
                if task_id not in self._streams.ending:
                    self._drop_kept(client, task_id)
            self._objects.peer_renewed(client.number)
            self._perform(self._cluster.handle(ev.ResubmissionEnded(client.number), now))
        elif kind is DefineFunction or kind is DefineCode:
            body = message.body if kind is DefineFunction else message.archive
            if type(body) is not bytes and type(body) is not OutOfBand:
                self._refuse(link, "protocol", f"a {type(body).__name__} is no body of {kind.__name__}")
                return
            if kind is DefineFunction:
                self._define(client, message.digest, body)
                return
            needs = tuple(message.needs)
            if any(part not in client.functions or self._needs_of(part) for part in needs):
                self._refuse(link, "protocol", "code needs other code that was not defined, or that needs more")
                return
            self._define(client, message.digest, _Code(message.archive, needs))
        elif kind is DefineSpec:
            try:
                spec = spec_from_wire(message.spec)
            except ValueError as error:
                self._refuse(link, "protocol", str(error))
                return
            is_known = spec.function in client.functions and (not spec.code or spec.code in client.functions)
            if not is_known or (spec.code and type(self._functions[spec.code]) is not _Code):
                self._refuse(link, "protocol", f"spec {message.number} refers to a function that was not defined")
                return
            if spec.plan is not None:
                if spec.plan.is_detached:
                    self._refuse(link, "protocol", "an actor that outlives its client is created with CreateDetached")
                    return
                self._open_actors()
            self._perform(self._cluster.handle(ev.SpecDefined(client.number, message.number, spec), now))
        elif kind is Query:
            self._answer(client, link, message)
        elif kind is SubmitJob or kind is JobPayloads or kind is ChangeJob:
            self._open_jobs().on_message(client.number, message)
        elif kind is KillActor:
            self._open_actors().kill(client.number, message)
        elif kind is CreateDetached:
            self._create_detached(client, link, message)
        elif kind is RotateToken:
            link.send(self.tokens.on_order(message, self._loop.time(), is_private=link.is_private))
        elif self._objects.is_mine(kind):
            problem = self._objects.handle(client.number, link, client.name, message)
            if problem:
                self._refuse(link, "protocol", problem)
        else:
            self._refuse(link, "protocol", f"a client does not send {kind.__name__}")

    def _on_worker_message(self, worker: _Worker, kind: Any, message: Any) -> None:
        now = self._loop.time()
        link = worker.link
        if link is None:
            return  # It was refused a moment ago.
        if worker.limits is not None:
            message, answer = worker.limits.narrowed(kind, message)
            if answer is not None:
                link.send(answer)
            if message is None:
                return
        if kind is TasksFinished:
            results = message.results
            has_objects = _have_objects(results)
            if has_objects is None:
                self._refuse(link, "protocol", "these are not results of tasks")
                return
            if has_objects:
                if not all(result[2] != _OK or is_payload(result[3]) for result in results):
                    self._refuse(link, "protocol", "these are not results of tasks")
                    return
                results = self._hold_back(worker, results)
            if self._streams.held:
                results = self._streams.hold_back(worker.ident, results)
            self._on_results(worker, results, now, has_objects=has_objects)
        elif kind is StreamItems:
            problem = self._streams.on_items(worker.ident, message)
            if problem:
                self._refuse(link, "protocol", problem)
        elif kind is TaskOutput:
            self._forward_output(worker, message)
        elif kind is WorkerChanged:
            try:
                facts = facts_from_wire(message.facts)
            except ValueError as error:
                self._refuse(link, "protocol", str(error))
                return
            self._note_facts(worker, facts)
            self._perform(self._cluster.handle(ev.WorkerChanged(worker.ident, facts), now))
        elif kind is WorkerReadings:
            try:
                readings = readings_from_wire(message.readings)
            except ValueError as error:
                self._refuse(link, "protocol", str(error))
                return
            self._perform(self._cluster.handle(ev.CardsMeasured(worker.ident, readings), now))
        elif kind is TasksWait:
            if not all(type(task) is tuple and len(task) == 2 for task in message.tasks):
                self._refuse(link, "protocol", "these are not attempts")
                return
            self._perform(self._cluster.handle(ev.TasksWait(worker.ident, message.tasks, bool(message.waits)), now))
        elif kind is ActorReady:
            self._tell(ev.ActorStarted(worker.ident, message.actor, message.attempt))
        elif kind is WorkerDraining:
            reason = clean_line(message.reason, EVENT_TEXT_CHARACTERS)
            logger.info("worker %s (%s) is leaving: %s", worker.ident, worker.label, reason)
            worker.is_leaving = True
            self._perform(self._cluster.handle(ev.WorkerDraining(worker.ident), now))
        elif self._objects.is_mine(kind):
            problem = self._objects.handle(worker.ident, link, worker.label, message)
            if problem:
                self._refuse(link, "protocol", problem)
        else:
            self._refuse(link, "protocol", f"a worker does not send {kind.__name__}")

    def _needs_of(self, digest: bytes) -> Tuple[bytes, ...]:
        code = self._functions[digest]
        return code.needs if type(code) is _Code else ()

    def _define(self, client: _Client, digest: bytes, body: Any) -> None:
        if digest not in client.functions:
            client.functions.add(digest)
            self._functions.setdefault(digest, body)
            self._function_users[digest] = self._function_users.get(digest, 0) + 1

    def _on_results(self, worker: _Worker, results: Any, now: float, *, has_objects: bool) -> None:
        if has_objects and self._late:
            for result in results:
                if result[0] in self._late and result[2] == _OK:
                    value = result[3][0] if isinstance(result[3], tuple) else result[3]
                    inputs = self._objects.inputs_of(value)
                    if inputs:
                        self._perform(self._cluster.handle(ev.ResultStored(result[0], inputs), now))
        self._incoming, self._incoming_has_objects = results, has_objects
        self._perform(self._cluster.handle(ev.AttemptsFinished(worker.ident, results), now))
        self._incoming, self._incoming_has_objects = (), False
        if has_objects:
            for result in results:
                if type(result[3]) is not bytes and result[2] == _OK:
                    self._objects.take_over(worker.ident, result[3])
        wanted, self._wanted = self._wanted, []
        if sum(map(len, wanted)) != len(results):
            taken = {result[0] for each in wanted for result in each}  # Only asked for membership.
            unwanted = [
                result[0]
                for result in results
                if result[0] not in taken
                and result[2] != _NOT_RUN
                and (type(result[3]) is bytes or not self._keep_with_object(worker.ident, result[0], result[2], result[3]))
            ]
            if unwanted:
                self._forget_results(worker.ident, unwanted)
        if self._drained is not None:
            self._check_drained()

    def _hold_back(self, worker: _Worker, results: Any) -> List[Any]:
        """A result counts when its value is here: those that are on their way wait, and those that could not be kept are errors."""
        here: List[Any] = []
        for result in results:
            oids = mentioned(result[3]) if result[2] == _OK else []
            arriving = next((oid for oid in oids if self._objects.is_arriving(oid)), None)
            if arriving is not None:
                self._objects.grant_result(worker.ident, result[3])  # Its maker may let go of what is in it meanwhile.
                self._held.setdefault(arriving, []).append((worker.ident, result))
                continue
            problem = self._objects.why_no_value(result[3]) if oids else ""
            if problem:
                self._objects.take_over(worker.ident, result[3])
                if problem.startswith(LOST):
                    reason = f"its result was lost on its way: {problem[len(LOST) :]}"
                    result = (*result[:2], _CRASHED, {"reason": reason, "worker": worker.label}, result[4])
                else:
                    result = (*result[:2], int(Status.REFUSED), {"reason": problem}, result[4])
            here.append(result)
        return here

    def _on_held_result(self, ident: str, result: Any) -> None:
        """The values of its stream that were before it have gone on."""
        worker = self._workers.get(WorkerId(ident))
        if worker is not None:
            self._on_results(worker, self._hold_back(worker, [result]), self._loop.time(), has_objects=True)

    def _on_stream_sent(self, number: int, task_id: int) -> None:
        """A client that is back has the values before a result that was kept for it."""
        client = self._clients.get(ClientNumber(number))
        if client is not None and client.link is not None and task_id in client.kept:
            ident, result = client.kept[task_id]
            self._send_kept(client, ident, [result])

    def _send_to_client(self, number: int, message: Any) -> bool:
        client = self._clients.get(ClientNumber(number))
        if client is None or client.link is None:
            return False
        client.link.send(message)
        return True

    def _send_to_worker(self, ident: str, message: Any) -> None:
        worker = self._workers.get(WorkerId(ident))
        if worker is not None and worker.link is not None:
            worker.link.send(message)

    def _on_object_settled(self, oid: int) -> None:
        self._streams.object_settled(oid)
        for ident, result in self._held.pop(oid, ()):
            worker = self._workers.get(ident)
            if worker is None:
                continue  # The scheduler has dealt with all that was there.
            self._on_results(worker, self._hold_back(worker, [result]), self._loop.time(), has_objects=True)
            self._objects.ungrant_result(ident, result[3])

    def _on_objects_freed(self, ident: str, oids: List[int]) -> None:
        worker = self._workers.get(WorkerId(ident))
        if worker is not None and worker.link is not None:
            worker.link.send(FreeObjects(oids))

    def _forward_output(self, worker: _Worker, output: TaskOutput) -> None:
        """To the task's owner; what an owner who does not keep up misses is told."""
        output = output._replace(worker=worker.label)  # Whatever it calls itself here.
        client = self._clients.get(ClientNumber(output.task_id >> SEQUENCE_BITS))
        if client is None:
            if self._jobs is not None and output.task_id < SEQUENCE_LIMIT:
                self._jobs.wrote(output.task_id, output.stream, output.data)
            return
        link = client.link
        if link is None or link.is_congested:
            client.missed_bytes += len(output.data)
            return
        if client.missed_bytes:
            words = f"[gpumesh: {client.missed_bytes} bytes of output were dropped; this client reads too slowly]\n"
            client.missed_bytes = 0
            link.send(output._replace(data=words.encode()))
        link.send(output)

    def _answer(self, client: _Client, link: PeerLink, query: Query) -> None:
        if query.what == "workers":
            rows = self._cluster.snapshot(self._loop.time())
            for row in rows:
                row["trust"] = auth.WORKER if row["id"] in self._limits else auth.FULL
            link.send(Answer(query.number, rows, ""))
        elif query.what == "waiting":
            link.send(Answer(query.number, self._cluster.waiting(self._loop.time()), ""))
        elif query.what == "events":
            since = query.arguments.get("since")
            link.send(Answer(query.number, self.events.since(since if type(since) is int else 0), ""))
        elif query.what == "objects":
            link.send(Answer(query.number, {**self._objects.usage(), "objects": self._objects.views()}, ""))
        elif query.what == "inside":
            client.inside = str(query.arguments.get("worker"))
            link.connection.is_patient = WorkerId(client.inside) in self._workers
        elif query.what in nested_service.QUESTIONS:
            found = nested_service.answer(query.what, query.arguments, self._objects.directory, self._payloads)
            link.send(Answer(query.number, found, ""))
        elif query.what == "jobs" or query.what.startswith("job-") or query.what == "job":
            self._open_jobs().on_message(client.number, query)
        elif query.what == "actors" or query.what == "actor":
            self._open_actors().answer(client.number, query)
        else:
            link.send(Answer(query.number, None, f"this coordinator knows nothing of {query.what!r}"))

    def _note_worker(self, worker: _Worker) -> None:
        """It is connected: after a restart it is waited for, unless it ends with this process."""
        if self._journal is not None:
            from gpumesh.journal.base import WorkerRecord

            name = "" if worker.ident in self.own_workers else worker.label or "?"
            self._journal.worker_joined(WorkerRecord(worker.ident, name, time.time()))

    def _forget_missing(self) -> None:
        """Workers of before that are not back by now: the next start need not wait for them, and who may miss what they had has come."""
        self._missing_timer = None
        for ident in self._workers_before:
            if ident not in self._workers and self._journal is not None and not (ident == DIED and self._has_died):
                self._journal.worker_left(ident)
        self._workers_before = []

    def _note_loss(self, journal: Journal) -> None:
        """A worker has died, and what it had may only be known to this process: the next start must know that there was something."""
        if not self._has_died:
            from gpumesh.journal.base import WorkerRecord

            self._has_died = True
            journal.worker_joined(WorkerRecord(DIED, "", time.time()))

    def _note_facts(self, worker: _Worker, facts: WorkerFacts) -> None:
        note_changes(self.events, worker.ident, worker.facts, facts)
        worker.facts = facts

    def _on_spilled(self, nbytes: int, failure: Optional[OSError]) -> None:
        size = show_bytes(nbytes)
        if failure is None:
            self.events.note("spilled", f"an object of {size} went from the coordinator's memory to its disk")
        else:
            self.events.note("spilled", f"an object of {size} could not go to disk: {failure.strerror or failure}")

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
                if worker is not None and worker.link is not None:
                    worker.link.send(RecallTasks(action.tasks, action.kill, action.force))
            elif kind is act.Notice:
                client = self._clients.get(action.client)
                if client is not None and client.link is not None:
                    client.link.send(TaskNotice(action.task_id, action.text))
            elif kind is act.Forget:
                for task_id in action.task_ids:
                    self._forget(task_id)
                    self._history.pop(task_id, None)
            elif kind is act.WorkersChanged:
                self._healthy = action.count
                self._tell_workers(action.count)
            elif kind is act.Retrying:
                self._on_retrying(action)
            elif kind is act.Keep:
                self._keep_for_absent(action)
            elif kind is act.WorkerGone:
                worker = self._workers.get(action.worker)
                if worker is not None:
                    self._on_worker_gone(worker, action.reason, "died", has_work=True)
                    self._objects.peer_gone(worker.ident)
            elif kind is act.ClientGone:
                client = self._clients.get(action.client)
                if client is not None:
                    self._end_client(client)
        if self._jobs is not None:
            self._jobs.moved()  # Not every way in which a task begins or ceases to be executed is an action.
        self._lost = None
        self._arm()

    def _tell_workers(self, count: int) -> None:
        """So many workers are healthy: clients want to know exactly, workers only how many would come back at once."""
        for client in self._clients.values():
            if client.link is not None:
                client.link.send(MeshChanged(count))
        for link in self.door.strangers():
            if not link.connection.established:  # Else it has been told already, and hears of what differs when it registers.
                link.connection.workers = count
        for worker in self._workers.values():
            if worker.link is not None and not 0.75 * worker.told <= count <= 1.25 * worker.told:
                worker.told = max(1, count)
                worker.link.send(MeshChanged(worker.told))

    def _on_retrying(self, action: act.Retrying) -> None:
        logger.info("task %x runs again (attempt %d) after %s", action.task_id, action.attempt, Status(action.status).name)
        details: Dict[str, Any] = {}
        for result in self._incoming:
            if result[0] == action.task_id and isinstance(result[3], dict):
                details = result[3]
        attempt = self._attempt(action.worker, int(action.status), details)
        history = self._history.setdefault(action.task_id, [])
        history.append(attempt)
        if len(history) > ATTEMPTS_KEPT:
            del history[1]
            history[0]["left_out"] = history[0].get("left_out", 0) + 1
        reason = str(attempt.get("reason") or Status(action.status).name.lower().replace("_", " "))
        code = f", exit code {attempt['exit']}" if "exit" in attempt else ""
        job, place = self._jobs.place_of(action.task_id) if self._jobs is not None else ("", 0)
        name = f"task {place} of job {job}" if job else f"task {action.task_id:x}"
        words = f"{name} runs again (attempt {action.attempt}); on {attempt['worker']} it failed: {reason}{code}"
        self.events.note("retry", words, task=place if job else action.task_id, job=job, worker=action.worker)

    def _attempt(self, ident: str, status: int, details: Dict[str, Any]) -> Dict[str, Any]:
        """A failed attempt for people."""
        worker = self._workers.get(WorkerId(ident))
        if self._lost is not None and self._lost[0].ident == ident:
            worker, reason = self._lost
            details = {"reason": reason, **details}
        where = {"worker": ident if worker is None else f"{worker.label} ({ident})", "hostname": worker.label if worker else ""}
        return {**where, "status": status, **details}

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
        if self._jobs is not None and action.client == JOBS_CLIENT:
            if self._incoming:
                self._wanted.append(action.results)
                self._script_makers.update((result[0], action.worker) for result in action.results)
            self._jobs.ended(action.worker, action.results)
        if self._history:
            action = action._replace(results=self._with_history(action))
        supplied = 0
        if self._late:
            for result in action.results:
                if result[0] in self._late:
                    self._supply(result[0], result[1], result[2])
                    supplied += 1
        for result in action.results:
            payloads.pop(result[0], None)
        if self._streams.sources:
            for result in action.results:
                self._streams.ended(result[0])
        if self._incoming_has_objects and action.client in self._clients:
            for result in action.results:
                if type(result[2]) is not bytes and result[1] == _OK:
                    self._objects.grant_result(action.client, result[2])
        if self._objects.directory.has_task_holds:
            for result in action.results:
                self._objects.task_ended(result[0])
        self._ended += len(action.results)
        client = self._addressee(action.client)
        if client is not None:
            if self._incoming:
                self._wanted.append(action.results)
            link = client.link
            if link is None:
                for result in action.results:
                    self._keep(client, action.worker, result)
            else:
                client.sent(action.worker, action.results)
                # What other tasks have been waiting for is seldom what the client waits for: it waits for those.
                send = link.send_lazily if supplied == len(action.results) else link.send
                send(TaskResults(action.worker, action.results))
        if not payloads:
            self._trim()

    # --- results that have not arrived where they are wanted

    def _on_received(self, client: _Client, count: int) -> None:
        """A client has so many results, in all of this connection: whoever made them may forget them."""
        unconfirmed = client.unconfirmed
        while unconfirmed and client.confirmed_count + len(unconfirmed[0][1]) <= count:
            ident, results = unconfirmed.popleft()
            client.confirmed_count += len(results)
            arrived = [
                task_id
                for task_id, status, payload, _ in results
                if type(payload) is bytes or not self._keep_with_object(ident, task_id, status, payload)
            ]
            if arrived:
                self._forget_results(ident, arrived)

    def _keep_with_object(self, ident: str, task_id: int, status: int, payload: Any) -> bool:
        """Whether a result has arrived, but its value lies in the store and is read later: its worker keeps both until nobody refers to
        that any more, for the case that this store is lost."""
        value = payload[0] if isinstance(payload, tuple) else payload
        if status != _OK or type(value) is not Stored or value.oid not in self._objects.directory:
            return False
        self._read_later[value.oid] = (ident, task_id)
        return True

    def _limits_of(self, ident: WorkerId) -> WorkerLimits:
        """Of a worker that joined with a worker-only token. They outlive it for a while: it may be back."""
        limits = self._limits.pop(ident, None)
        if limits is None:
            was_here = ident in self._workers_before
            limits = WorkerLimits(self._objects.directory, was_here=was_here)
            if was_here:
                self._loop.call_later(RECOVERY_SECONDS, limits.has_returned)
            if len(self._limits) >= LIMITS_KNOWN:
                oldest = next((known for known in self._limits if known not in self._workers), None)
                if oldest is not None:
                    del self._limits[oldest]
        self._limits[ident] = limits
        return limits

    def _on_object_unneeded(self, oid: int) -> None:
        for limits in self._limits.values():
            limits.gone(oid)
        found = self._read_later.pop(oid, None)
        if found is not None:
            self._forget_results(found[0], [found[1]])
        if self._actors is not None:
            # Not now: actions that the scheduler has ordered before may still be under way.
            self._loop.call_soon(self._actors.token_unneeded, oid)

    def _forget_results(self, ident: str, task_ids: List[int]) -> None:
        worker = self._workers.get(WorkerId(ident))
        if worker is not None and worker.link is not None:
            worker.link.send(ForgetResults(task_ids))

    def _keep(self, client: _Client, ident: str, result: Result) -> None:
        """For a client that is away."""
        client.kept[result[0]] = (ident, result)
        if type(result[2]) is not bytes and result[1] == _OK:
            self._objects.grant_result(_keeper(client), result[2])

    def _keep_for_absent(self, action: act.Keep) -> None:
        """A result for a client that this coordinator has not seen yet, or that has not told yet what it waits for."""
        if action.client in _OWN_CLIENTS:
            return  # It has always told what it waits for before anybody could send a result.
        client = self._addressee(action.client)
        assert client is not None
        self._keep(client, action.worker, action.result)
        client.undecided.add(action.result[0])
        self._wanted.append((action.result,))

    def _addressee(self, number: ClientNumber) -> Optional[_Client]:
        """Whose result it is, also if it has not come back since the coordinator's start: a worker has gone on with its task."""
        client = self._clients.get(number)
        if client is None and number not in _OWN_CLIENTS:
            client = self._clients[number] = _Client(number, None, "")
        return client

    def _drop_kept(self, client: _Client, task_id: int) -> Tuple[str, Result]:
        """A kept result is sent, or nobody wants it."""
        client.undecided.discard(task_id)
        ident, result = client.kept.pop(task_id)
        if type(result[2]) is not bytes and result[1] == _OK:
            self._objects.ungrant_result(_keeper(client), result[2])
            if self._keep_with_object(ident, task_id, result[1], result[2]):
                return ident, result
        self._forget_results(ident, [task_id])
        return ident, result

    def _sift(self, client: _Client, message: SubmitTasks) -> SubmitTasks:
        """Tasks that a client submits again: those of which nothing is known here, or only what a worker has told."""
        confirmed: List[int] = []
        kept_ids: List[int] = []
        ids: List[int] = []
        payloads: List[Any] = []
        ready: Dict[str, List[Result]] = {}
        is_final = True if not client.kept else self._cluster.retries_of(client.number, message.spec) == 0
        answered = client.answered or ()
        is_stream = self._cluster.is_stream(client.number, message.spec)
        for task_id, payload in zip(message.task_ids, message.payloads):
            if task_id in answered:
                continue  # It has crossed its result.
            kept = client.kept.get(task_id)
            if kept is not None:
                ident, result = kept
                if is_final or result[1] not in _TRIED_AGAIN or task_id not in client.undecided:
                    kept_ids.append(task_id)
                    if is_stream and WorkerId(ident) in self._workers:
                        self._streams.send_all_before(task_id, ident)
                        continue
                    ready.setdefault(ident, []).append(result)
                    continue
                self._drop_kept(client, task_id)
            if self._cluster.is_confirmed(task_id):
                confirmed.append(task_id)
            else:
                ids.append(task_id)
                payloads.append(payload)
        if confirmed or kept_ids:
            self._tell(ev.TasksConfirmed(client.number, confirmed, kept_ids))
        for ident, results in ready.items():
            self._send_kept(client, ident, results)
        if is_stream:
            self._streams.send_again([*confirmed, *ids])
        return SubmitTasks(message.spec, ids, payloads, True)

    def _send_kept(self, client: _Client, ident: str, results: List[Result]) -> None:
        """The client is back for these."""
        assert client.link is not None
        for result in results:
            del client.kept[result[0]]
            client.undecided.discard(result[0])
            if type(result[2]) is not bytes and result[1] == _OK:
                self._objects.grant_result(client.number, result[2])
                self._objects.ungrant_result(_keeper(client), result[2])
        client.sent(ident, results)
        client.link.send(TaskResults(ident, results))

    def _supply(self, producer: int, status: int, payload: Any) -> None:
        """A result that others have among their arguments: it takes its places there."""
        dependents = self._late.pop(producer)
        if status != _OK:
            return
        value = payload[0] if isinstance(payload, tuple) else payload
        for task_id in dependents:
            call = self._payloads.get(task_id)
            if call is None:
                continue  # It has ended before.
            inputs = [
                (place, value if type(found) is Later and found.task_id == producer else found) for place, found in call[1]
            ]
            self._payloads[task_id] = Bundle(call[0], tuple(inputs), call[2])
            self._objects.task_arrived(task_id, payload)

    def _forget(self, task_id: int) -> None:
        """A task has ended without a result."""
        self._payloads.pop(task_id, None)
        self._late.pop(task_id, None)
        self._streams.ended(task_id)
        if self._objects.directory.has_task_holds:
            self._objects.task_ended(task_id)

    def _fail(self, action: act.Fail) -> None:
        self._forget(action.task_id)
        details = action.details
        if self._jobs is not None and action.client == JOBS_CLIENT:
            self._jobs.ended(str(details.get("worker", "")), [(action.task_id, int(action.status), details, 0.0)])
        history = self._history.pop(action.task_id, None) or []
        if action.status == _LOST and "worker" in details:  # Beside those that were followed by another.
            history.append(self._attempt(str(details["worker"]), _LOST, {}))
        if history:
            details = {**details, "attempts": history}
        client = self._addressee(action.client)
        if client is not None:
            worker = str(details.get("worker", ""))
            results = [(action.task_id, int(action.status), details, 0.0)]
            if client.link is None:
                self._keep(client, worker, results[0])
            else:
                client.sent(worker, results)
                client.link.send(TaskResults(worker, results))

    def _assign(self, action: act.Assign) -> None:
        worker = self._workers[action.worker]
        link = worker.link
        assert link is not None, f"worker {action.worker} is away"
        spec = action.spec
        number = worker.specs.get(spec)
        if number is None:
            if spec.code and spec.code not in worker.functions:
                for digest in (*self._needs_of(spec.code), spec.code):
                    if digest not in worker.functions:
                        worker.functions.add(digest)
                        link.send(DefineCode(digest, *self._functions[digest]))
            if spec.function not in worker.functions:
                worker.functions.add(spec.function)
                link.send(DefineFunction(spec.function, self._functions[spec.function]))
            number = worker.specs[spec] = len(worker.specs)
            link.send(DefineSpec(number, spec))
        payloads = self._payloads
        tasks = [(task, attempt, payloads[task]) for task, attempt in action.tasks]
        if self._objects.has_small:
            tasks = [(task, attempt, self._objects.inline(payload)) for task, attempt, payload in tasks]
        if worker.limits is not None:
            worker.limits.give(action.tasks)
        link.send(RunTasks(number, tasks, action.cards, action.ordinal))
        if self._jobs is not None and action.tasks[0][0] < SEQUENCE_LIMIT:
            self._jobs.started([task for task, _ in action.tasks])

    # --- actors: what runtime.actor_service needs (its Owner)

    def _open_actors(self) -> ActorService:
        if self._actors is None:
            from gpumesh.runtime.actor_service import ActorService

            self._actors = ActorService(self, self._cluster)
        return self._actors

    def _create_detached(self, client: _Client, link: PeerLink, message: CreateDetached) -> None:
        try:
            spec = spec_from_wire(message.spec)
        except ValueError as error:
            self._refuse(link, "protocol", str(error))
            return
        is_known = spec.function in client.functions and (not spec.code or spec.code in client.functions)
        if not is_known or (spec.code and type(self._functions[spec.code]) is not _Code):
            self._refuse(link, "protocol", "an actor refers to a function that was not defined")
        elif spec.plan is None or not spec.plan.is_detached or type(message.key) is not bytes:
            self._refuse(link, "protocol", "CreateDetached is for actors that outlive their client")
        elif type(message.payload) is not bytes and not is_payload(message.payload):
            self._refuse(link, "protocol", "these are not the arguments of a constructor")
        else:
            self._open_actors().create(client.number, message, spec)

    def submit_detached(self, number: int, spec: TaskSpec, task_id: int, payload: Any) -> None:
        """Define a spec of the coordinator's own client, and submit one task of it."""
        for digest in [spec.function, *((*self._needs_of(spec.code), spec.code) if spec.code else ())]:
            self._function_users[digest] += 1  # For good: it may be started again at any time.
        self._payloads[task_id] = payload
        if type(payload) is not bytes:
            self._objects.task_arrived(task_id, payload)
        self._tell(ev.SpecDefined(ClientNumber(ACTORS_CLIENT), number, spec))
        self._tell(ev.TasksSubmitted(ClientNumber(ACTORS_CLIENT), number, [task_id]))

    def tell_cluster(self, event: Any) -> None:
        """Something has happened."""
        self._tell(event)

    def restore_token(self, oid: int, holder: str) -> None:
        """There is such an object, if there is none yet, and somebody refers to it."""
        self._objects.restore(oid, b"", holder)

    def forget_holder(self, holder: str) -> None:
        """It refers to nothing any more."""
        self._objects.peer_gone(holder)

    def name_of(self, client: int) -> str:
        """For people."""
        peer = self._clients.get(ClientNumber(client))
        return peer.name if peer is not None else "a client that has left"

    def call_later(self, seconds: float, what: Any) -> None:
        """Once."""
        self._loop.call_later(seconds, what)

    # --- script jobs: what runtime.job_service needs (its Mesh)

    def _open_jobs(self, journal: Optional[Journal] = None) -> JobService:
        if self._jobs is None:
            from gpumesh.runtime.job_service import JobService

            if journal is None:
                from gpumesh.journal.memory import MemoryJournal

                journal = MemoryJournal(call_soon=self._loop.call_soon_threadsafe)
            self._jobs = JobService(self._loop, self, journal)
        return self._jobs

    def answer(self, client: int, number: int, value: Any, error: str = "", kind: str = "") -> None:
        """To a question or order of a client, if it is still there."""
        peer = self._clients.get(ClientNumber(client))
        if peer is not None and peer.link is not None:
            peer.link.send(Answer(number, value, error, kind))

    def run_script_tasks(self, spec: int, rows: Sequence[int], payloads: Sequence[Any], *, again: bool) -> None:
        """Give tasks to the scheduler. `again`: workers may have them from before a restart."""
        self._payloads.update(zip(rows, payloads))
        self._tell(ev.TasksSubmitted(JOBS_CLIENT, spec, rows, (), again))

    def cancel_script_tasks(self, rows: Sequence[int], *, force: bool) -> None:
        """End these. `force`: without giving them time."""
        self._tell(ev.CancelRequested(JOBS_CLIENT, rows, force))

    def define_script_code(self, parts: Sequence[Tuple[bytes, Any, Tuple[bytes, ...]]], functions: Iterable[bytes]) -> None:
        """The folder that scripts are in, and their functions, which have no body."""
        defined: List[Tuple[bytes, Any]] = [(digest, _Code(archive, tuple(needs))) for digest, archive, needs in parts]
        for digest, body in [*defined, *((digest, b"") for digest in functions)]:
            self._functions.setdefault(digest, body)
            self._function_users[digest] = self._function_users.get(digest, 0) + 1

    def define_script(self, number: int, spec: TaskSpec) -> None:
        """Tasks of that number are of this spec from now on; its code has been defined."""
        if not self._has_scripts:
            self._has_scripts = True
            self._tell(ev.ClientConnected(JOBS_CLIENT, "jobs", self._is_recovering))
        self._tell(ev.SpecDefined(JOBS_CLIENT, number, spec))

    def forget_script_code(self, digests: Iterable[bytes]) -> None:
        """Nothing needs these any more."""
        self._undefine(digests)

    def no_scripts_left(self) -> None:
        """All jobs have ended: what the scheduler knows of their specs may go."""
        if self._has_scripts:
            self._has_scripts = False
            self._tell(ev.ClientLost(JOBS_CLIENT))

    def code_parts(self, digest: bytes) -> Sequence[Tuple[bytes, Any, Tuple[bytes, ...]]]:
        """What a client has defined under this digest, after what it needs; () if nothing."""
        code = self._functions.get(digest)
        if type(code) is not _Code:
            return ()
        return [*((part, self._functions[part].archive, ()) for part in code.needs), (digest, code.archive, code.needs)]

    def executing_scripts(self) -> Dict[int, Tuple[str, int, float]]:
        """Tasks that workers execute now: (worker, attempt, seconds so far) of each."""
        found: Any = self._cluster.executing_of(JOBS_CLIENT, self._loop.time())
        executing: Dict[int, Tuple[str, int, float]] = found
        return executing

    def unable_scripts(self) -> Sequence[Tuple[Sequence[int], str]]:
        """Tasks that nobody here can run: (their rows, why) of each kind."""
        return self._cluster.unable(JOBS_CLIENT, self._loop.time())

    def script_slots(self) -> int:
        """Slots of all workers."""
        return self._cluster.slots()

    def failed_attempts(self, row: int) -> Sequence[Dict[str, Any]]:
        """Of a task that is tried again."""
        return self._history.get(row, ())

    def host_of(self, worker: str) -> str:
        """The host name of a worker; "" if it is not known any more."""
        known = self._workers.get(WorkerId(worker))
        return known.label if known is not None else ""

    def results_kept(self, rows: Sequence[int]) -> None:
        """The ends of these tasks are on disk: their workers may forget them."""
        by_worker: Dict[str, List[int]] = {}
        for row in rows:
            ident = self._script_makers.pop(row, None)
            if ident is not None:
                by_worker.setdefault(ident, []).append(row)
        for ident, task_ids in by_worker.items():
            self._forget_results(ident, task_ids)

    def scripts_submitted_again(self) -> None:
        """After a restart: all that may be running has been given to `run_script_tasks`."""
        self._tell(ev.ResubmissionEnded(JOBS_CLIENT))

    def note_job(self, kind: str, text: str, job: str) -> None:
        """Something for people has happened to a job: "accepted", "finished" or "cancelled"."""
        logger.info("%s", text)
        self.events.note(kind, text, job=job)

    def _tell(self, event: Any) -> None:
        self._perform(self._cluster.handle(event, self._loop.time()))

    # --- memory

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
        self._ended_before += self._ended
        self._ended = 0
        self._payloads = {}
        self._late = {}
        self._cluster.compact()
        for link in self._links:
            link.connection.renew_numbers()
        system.trim_memory()

    # --- time

    def _arm(self) -> None:
        self._alarm.set(self._cluster.next_deadline())

    def _on_time(self, now: float) -> None:
        self._perform(self._cluster.on_time(now))


def _event_log(journal: Optional[Journal]) -> EventLog:
    """Events of before, if a journal has kept them, and where to keep those to come."""
    if journal is None:
        return EventLog()
    reader = journal.reader()
    try:
        return EventLog(reader.events(), keep=journal.note_event)
    finally:
        reader.close()


def _wrong_with_worker_id(ident: Any) -> str:
    """Why this cannot be a worker's id; "" when it can. Ids stand in logs, and name who refers to objects."""
    if (
        type(ident) is str
        and 0 < len(ident) <= 64
        and ident != DIED
        and all(letter.isalnum() or letter in "-_." for letter in ident)
    ):
        return ""
    return "a worker's id is up to 64 letters and digits"


def _only_claimed(
    link: PeerLink, limits: WorkerLimits, held: List[ev.Held], finished: List[Tuple[int, int]]
) -> Tuple[List[ev.Held], List[Tuple[int, int]]]:
    """What a worker with a worker-only token can have of what it says to have; it is told to end the rest."""
    allowed = [each._replace(tasks=limits.claimed(each.tasks)) for each in held]
    foreign = [attempt for each, kept in zip(held, allowed) for attempt in each.tasks if attempt not in kept.tasks]
    if foreign:
        link.send(RecallTasks(foreign, True, True))
    return [each for each in allowed if each.tasks], limits.claimed(finished)


def _wrong_with_ids(task_ids: Any, client: int) -> str:
    """Why these cannot be this client's task ids; "" when they can."""
    first = client << SEQUENCE_BITS
    if len(task_ids) == 1 and type(task_ids[0]) is int and task_ids[0] >> SEQUENCE_BITS == client:
        return ""
    try:
        mine = not task_ids or (first <= min(task_ids) and max(task_ids) < first + SEQUENCE_LIMIT)
    except TypeError:
        mine = False
    if not mine or any(type(task_id) is not int for task_id in task_ids):
        return "a task's id is its client's number and 32 bits"
    return ""


def _have_objects(results: Any) -> Optional[bool]:
    """Whether any payload in TasksFinished.results may name objects; None when these are no results."""
    has_objects = False
    try:
        for task_id, attempt, status, payload, seconds in results:
            if type(task_id) is not int or type(attempt) is not int or type(status) is not int or not 0 <= seconds < 1e12:
                return None
            if type(payload) is not bytes:
                has_objects = True
    except (TypeError, ValueError):
        return None
    return has_objects


def _workers_before(journal: Journal) -> Sequence[WorkerRecord]:
    """Those that were connected when the journal was written last, or were missed then; without a name: they are gone."""
    reader = journal.reader()
    try:
        return reader.workers()
    finally:
        reader.close()


def _keeper(client: _Client) -> str:
    """Who refers to the objects in results that are kept for a client."""
    return f"kept for {client.number}"


def _attempts_from_wire(attempts: Any) -> List[Tuple[int, int]]:
    """(task id, attempt) each.

    Raises:
        TypeError, ValueError: They are not.
    """
    found = [(task_id, attempt) for task_id, attempt in attempts]
    if not all(type(task_id) is int and type(attempt) is int for task_id, attempt in found):
        raise TypeError("an attempt is two numbers")
    return found


def _held_from_wire(held: Any) -> List[ev.Held]:
    """What RegisterWorker.held says.

    Raises:
        TypeError, ValueError: It does not have the shape.
    """
    return [
        ev.Held(spec_from_wire(spec), _attempts_from_wire(tasks), tuple(str(card) for card in cards), int(ordinal))
        for spec, cards, ordinal, tasks in held
    ]
