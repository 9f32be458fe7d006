"""The worker agent: one outbound connection to the coordinator, one pool of runners. Runs no user code, imports no torch."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple, Union

from gpumesh.config import STEADY_SECONDS
from gpumesh.errors import AuthenticationError, MeshError, MeshUnavailableError, ProtocolError, VersionMismatchError
from gpumesh.model.resources import CardReading, DeviceFacts, WorkerFacts
from gpumesh.network.address import Address
from gpumesh.protocol.connection import Closed, Connection, Established
from gpumesh.protocol.messages import (
    ActorReady,
    DefineCode,
    DefineFunction,
    DefineSpec,
    ForgetResults,
    MeshChanged,
    RecallTasks,
    RegisterWorker,
    ReleaseRefs,
    RunTasks,
    StreamCredit,
    StreamItems,
    TaskOutput,
    TasksFinished,
    TasksWait,
    WorkerChanged,
    WorkerDraining,
    WorkerReadings,
)
from gpumesh.runtime.dialing import Dialer
from gpumesh.runtime.facts import fresh_nonce, peer_facts
from gpumesh.runtime.link import PeerLink
from gpumesh.runtime.orders import TO_BE_CHECKED, whole_spec, wrong_with
from gpumesh.runtime.owner import Obedience, OwnerWatch
from gpumesh.runtime.pool import Launch, PoolOwner, RunnerPool
from gpumesh.runtime.reconnecting import Backoff, KeptResults, Outage
from gpumesh.runtime.relay import Relay
from gpumesh.runtime.standing import Standing

if TYPE_CHECKING:
    from gpumesh.runtime.readings import Holders
    from gpumesh.runtime.worker_objects import WorkerObjects
    from gpumesh.runtime.worker_streams import WorkerStreams

logger = logging.getLogger("gpumesh.worker")

STOP_GRACE_SECONDS = 0.5  # Of a leaving worker: from the interrupt of what runs to the kill.
STOP_SECONDS = 3.0  # In which all of that has been reported, or is not any more.
FINAL_ERRORS = (AuthenticationError, VersionMismatchError)


class WorkerAgent(PoolOwner):
    """One worker of a mesh, from joining to leaving.

    The agent looks for its coordinator again and again, and goes on with what it has meanwhile; results are kept until it is told that
    they have arrived. A refused token or version, or a foreign server at the first try, ends it.
    """

    def __init__(
        self,
        *,
        address: Address,
        token: str,
        facts: WorkerFacts,
        worker_id: str,
        spawner: Union[socket.socket, Launch],
        path: Optional[List[str]] = None,
        on_joined: Optional[Callable[[Dict[str, Any]], None]] = None,
        rules_file: Optional[str] = None,
    ) -> None:
        self.address = address
        self.standing = Standing(facts, self._tell_facts)
        self.worker_id = worker_id
        self._token = token
        self._path = path
        self._on_joined = on_joined
        self._loop = asyncio.get_running_loop()
        label = f"{facts.hostname} ({worker_id})"
        self._pool = RunnerPool(
            self._loop, spawner, self, slots=facts.slots, cores=facts.cores, path=path, label=label, devices=facts.devices
        )
        self._dialer = Dialer(self._loop, address)
        self._relay = Relay(self._loop, address, token)
        self._link: Optional[PeerLink] = None
        self._specs: Dict[int, int] = {}  # Number on this connection -> number in the pool.
        self._kept = KeptResults()
        self._backoff = Backoff()
        self._outage = Outage()
        self._was_complained = False  # Of its loss; then its return is worth as much.
        self._joined_at = 0.0  # The loop's time, the last time.
        self._is_unsteady = False  # The last connection broke at once.
        self._is_draining = False
        self._over: asyncio.Future[Optional[BaseException]] = self._loop.create_future()  # Resolved when the agent is to end.
        self._lost: asyncio.Future[MeshError] = self._loop.create_future()  # Of the current connection.
        self._has_joined = False
        self._has_heard_goodbye = False  # The last connection ended as the coordinator said, and not by itself.
        self._objects: Optional[WorkerObjects] = None
        self._streams: Optional[WorkerStreams] = None
        self._is_stopping = False
        self._obedience = Obedience(self.standing, self._pool, lambda: self._objects.inputs if self._objects else None)
        self._owner = OwnerWatch(rules_file, self._obedience.change_offer) if rules_file else None

    @property
    def facts(self) -> WorkerFacts:
        """The machine as it is; what the mesh is told of it is `standing.told`."""
        return self.standing.machine

    def is_kept(self, card: str = "") -> bool:
        """Whether the machine's owner keeps all of it at the moment, or this card. Callable on any thread."""
        offer = self.standing.offer
        return offer is not None and (bool(offer.problem) or (card != "" and card in self.standing.withheld_cards(offer)))

    async def run(self, *, on_ruled: Optional[Callable[[], None]] = None) -> None:
        """Serve until drained or stopped.

        Args:
            on_ruled: Called once it is known what the machine's owner lends.

        Raises:
            MeshError: It can never join: refused token, version, or not a coordinator at this address.
        """
        self._pool.start()
        self._note_versions()
        try:
            if self._owner is not None:
                await self._owner.start()
            if on_ruled is not None:
                on_ruled()
            await self._serve()
        finally:
            if self._owner is not None:
                self._owner.stop()
            if self._link is not None:
                self._link.close("the worker leaves")
            self._pool.close()
            await self._relay.close()
            if self._objects is not None:
                self._objects.close()
            if self._link is not None:
                await self._pool.turn.all_gone([self._link])  # What was said last, the goodbye included, is on its way by then.
            pipes = sys.modules.get("gpumesh.network.websocket")
            if pipes is not None:
                await pipes.finish()

    def _note_versions(self) -> None:
        """While the runners start: it costs a millisecond."""
        from gpumesh.serialization.versions import well_known_versions

        self.standing.change_machine(versions=well_known_versions())

    def drain(self, reason: str) -> None:
        """Finish what runs, give back what waits, then leave."""
        if self._is_draining:
            return
        self._is_draining = True
        if self._link is not None and self._link.connection.established:
            self._link.send(WorkerDraining(reason))
        if self._objects is not None:
            self._objects.inputs.drain()
        self._pool.drain()
        self._leave_if_done()

    def stop(self) -> None:
        """Leave now: what runs is ended and given back, which takes a second at most; called again, lose it with its process."""
        if self._is_stopping or self._link is None or not self._link.connection.established:
            self._end(None)
            return
        self._is_stopping = True
        if self._owner is not None:
            self._owner.stop()  # Whatever is lent from now on.
        self.drain("its owner ended it")
        self._pool.hand_back(running=True, grace_seconds=STOP_GRACE_SECONDS)
        self._loop.call_later(STOP_SECONDS, self._end, None)

    async def _serve(self) -> None:
        while not self._over.done():
            error = await self._connect_and_stay()
            if self._over.done():
                break
            if isinstance(error, FINAL_ERRORS) or (isinstance(error, ProtocolError) and not self._has_joined):
                raise error
            if self._is_draining and self._pool.is_idle and not len(self._kept):
                break
            if self._was_joined():
                self._tell_of_loss(error)
                if self._objects is not None:
                    self._lose_objects(self._objects)
            else:
                self._tell_of_outage(error)
            self._link = None
            await asyncio.wait([self._over], timeout=self._backoff.next(random.random()))
        failure = self._over.result() if self._over.done() else None
        if failure is not None:
            raise failure

    def _tell_of_loss(self, error: MeshError) -> None:
        """A connection is over on which this worker had joined.

        One that ends at once, again and again, since its two sides cannot agree is as good as none. One that merely broke is not: the way
        back is as short as ever, and its tasks wait for it.
        """
        was_unsteady = self._is_unsteady
        has_broken = self._has_heard_goodbye or isinstance(error, MeshUnavailableError)
        self._is_unsteady = self._loop.time() - self._joined_at < STEADY_SECONDS and not has_broken
        if self._is_unsteady and was_unsteady:
            self._tell_of_outage(error)
            return
        if not self._is_unsteady:
            self._backoff.reset()
        self._was_complained = not self._has_heard_goodbye
        level = logging.WARNING if self._was_complained else logging.INFO
        logger.log(level, "lost the coordinator at %s (%s); trying again", self.address, error)

    def _tell_of_outage(self, error: MeshError) -> None:
        more = self._outage.failed(str(error), self._loop.time())
        if more is not None:
            hint = "" if self._has_joined or sys.stderr is None or not sys.stderr.isatty() else ", Ctrl-C ends this"
            logger.info("cannot reach the coordinator at %s%s (%s); trying again%s", self.address, more, error, hint)

    def _lose_objects(self, objects: WorkerObjects) -> None:
        """The coordinator's store cannot be relied on any more: tasks that have not started are not to look for their inputs there."""
        if not objects.has_own_store:
            self._pool.give_back_holding()
        objects.disconnected()

    def _was_joined(self) -> bool:
        return self._link is not None and bool(self._link.peer)

    async def _connect_and_stay(self) -> MeshError:
        """One connection, from dialing to its end; returns why it ended."""
        error = await self._connect_once()
        if self._dialer.wants_tls(error) and not self._over.done():
            error = await self._connect_once()
        return error

    async def _connect_once(self) -> MeshError:
        self._lost = self._loop.create_future()
        self._specs = {}
        dialing = asyncio.ensure_future(self._dialer.dial(self._make_link))
        waited: List[asyncio.Future[Any]] = [dialing, self._over]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not dialing.done():  # Nobody is waited for who may not even be there.
            dialing.cancel()
            await asyncio.wait([dialing])
            return MeshUnavailableError("stopped")
        try:
            dialing.result()
        except MeshError as error:
            return error
        ends: List[asyncio.Future[Any]] = [self._lost, self._over]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return self._lost.result() if self._lost.done() else MeshUnavailableError("stopped")

    def _make_link(self, binding: bytes) -> PeerLink:
        now = self._loop.time()
        connection = Connection.dial(
            role="worker", token=self._token, nonce=fresh_nonce(), now=now, facts=peer_facts(), binding=binding
        )
        link = self._link = PeerLink(self._loop, connection, self._on_events, self._pool.turn)
        link.on_drained = self._pool.resume_output
        return link

    def _on_events(self, link: PeerLink, events: List[Any]) -> None:
        for message in events:
            kind = type(message)
            problem = wrong_with(message, self._specs) if kind in TO_BE_CHECKED else ""
            if problem:
                self._refuse(link, problem)
                return
            if kind is RunTasks:
                self._run(self._specs[message.spec], message)
            elif kind is DefineFunction:
                self._pool.define_function(message.digest, message.body)
            elif kind is DefineCode:
                self._pool.define_code(message)
            elif kind is DefineSpec:
                fields = whole_spec(message.spec)
                self._specs[message.number] = self._pool.define_spec(fields, cores=fields[2][5], timeout=float(fields[3]))
            elif kind is ForgetResults:
                self._kept.forget(message.task_ids)
                if self._streams is not None:
                    self._streams.forget(message.task_ids)
                if self._objects is not None and self._objects.has_leftovers:
                    self._objects.forgotten()
            elif kind is MeshChanged:
                self._backoff.workers = message.workers
            elif kind is RecallTasks:
                wanted = message.tasks
                if self._objects is not None:
                    wanted = self._objects.inputs.recall(wanted, kill=message.kill)
                self._pool.recall(wanted, kill=message.kill, force=message.force)
            elif kind is StreamCredit:
                if self._streams is not None:
                    self._streams.on_credit(message)
            elif kind is Established:
                self._join(link)
            elif kind is Closed and not self._lost.done():
                self._has_heard_goodbye = message.error is None
                self._lost.set_result(message.error or MeshUnavailableError(f"the coordinator left: {message.reason}"))
            elif self._objects is not None and kind is not Closed:
                self._objects.handle(kind, message)

    def _refuse(self, link: PeerLink, problem: str) -> None:
        """The coordinator makes no sense: end this connection, as if it had broken."""
        link.refuse("protocol", problem)
        if not self._lost.done():
            self._lost.set_result(ProtocolError(f"the coordinator breaks the rules: {problem}"))

    def _run(self, spec: int, message: RunTasks) -> None:
        tasks = message.tasks
        for task in tasks:
            if type(task[2]) is not bytes:
                self._open_objects().inputs.run(spec, tasks, message.cards, message.ordinal)
                return
        self._pool.run(spec, tasks, cards=message.cards, ordinal=message.ordinal)

    def _join(self, link: PeerLink) -> None:
        link.peer = self
        self._has_joined = True
        facts = self.standing.told
        held = tuple((spec, cards, ordinal, tuple(tasks)) for spec, cards, ordinal, tasks in self._pool.held())
        link.send(RegisterWorker(self.worker_id, facts, held, tuple(self._kept.attempts())))
        waiting = self._pool.waiting()
        if waiting:
            link.send(TasksWait(waiting, True))
        if self._pool.actors is not None:
            for actor, attempt in self._pool.actors.local.alive():
                link.send(ActorReady(actor, attempt))
        passing = self._objects.connected(link) if self._objects is not None else None
        if self._streams is not None:
            self._streams.connected()
        for results in self._kept.batches():
            link.send(TasksFinished(results))
        if passing:
            link.send(ReleaseRefs(passing))
        self._joined_at = self._loop.time()
        if self._is_unsteady:
            self._loop.call_later(STEADY_SECONDS, self._tell_joined, link)
        else:
            self._tell_joined(link)
        if self._is_draining:
            link.send(WorkerDraining("leaving"))
            self._leave_if_done()

    def _tell_joined(self, link: PeerLink) -> None:
        if link is not self._link or not link.connection.established:
            return
        self._is_unsteady = False
        level = logging.WARNING if self._was_complained else logging.INFO
        self._was_complained = False
        facts = self.standing.told
        logger.log(
            level, "joined the mesh at %s with %d slots%s", self.address, facts.slots, self._outage.end(self._loop.time())
        )
        if self._on_joined is not None:
            certificate = link.connection.binding.hex()  # "" without TLS.
            self._on_joined({"id": self.worker_id, "certificate": certificate, **facts._asdict()})

    def change_score(self, score: float, *, rates: Tuple[Tuple[str, float], ...] = ()) -> None:
        """The benchmark of the CPU has an answer."""
        self.standing.change_cpu_score(score, rates)

    def change_devices(self, devices: Tuple[DeviceFacts, ...]) -> None:
        """They have been looked at, measured, or one of them does not answer any more."""
        self.standing.change_machine(devices=devices)
        if self.standing.offer is not None:
            self._obedience.change_offer(self.standing.offer)  # It may be about a card that nobody knew of.

    def _tell_facts(self, facts: WorkerFacts) -> None:
        self._pool.change_devices(facts.devices)
        self.tell(WorkerChanged(facts))

    def tell_readings(self, readings: Tuple[CardReading, ...]) -> None:
        """What the cards' instruments say, as they say it."""
        self.tell(WorkerReadings(self.standing.as_lent(readings)))

    def tell(self, message: Any) -> None:
        """Send something to the coordinator, if there is one now."""
        if self._link is not None and self._link.connection.established:
            self._link.send(message)

    def card_holders(self) -> Holders:
        """Which processes of ours may hold memory of cards, and of which."""
        return self._pool.card_holders()

    # --- from the pool

    def on_results(self, results: List[Tuple[int, int, int, Any, float]]) -> None:
        if self._objects is not None:
            self._objects.reported(results)
        if self._streams is not None:
            self._streams.on_results(results)
        self._kept.add(results)
        if self._link is not None and self._link.connection.established:
            self._link.send(TasksFinished(results))
        if self._is_draining:
            self._leave_if_done()

    @property
    def takes_output(self) -> bool:
        return self._link is None or not self._link.is_congested

    def on_output(self, task_id: int, stream: int, data: bytes) -> None:
        if self._link is None or not self._link.connection.established:
            return
        if task_id == 0:
            logger.info("a runner wrote outside of any task: %s", data.decode("utf-8", "replace").rstrip())
            return
        self._link.send(TaskOutput(task_id, stream, data, self.facts.hostname))

    def on_health(self, problem: str) -> None:
        if problem:
            logger.warning("this worker takes no tasks: %s", problem)
        self.standing.change_pool(problem=problem)

    def on_installing(self, packages: Tuple[Tuple[str, ...], ...]) -> None:
        self.standing.change_pool(installing=packages)

    def on_pool_lost(self, reason: str) -> None:
        self._end(MeshUnavailableError(reason))

    # --- objects: nothing of it is there before the first one is

    def _open_objects(self) -> WorkerObjects:
        if self._objects is None:
            from gpumesh.runtime.worker_objects import WorkerObjects

            self._objects = WorkerObjects(
                self._loop,
                self._pool,
                report=self.on_results,
                on_idle=self._leave_if_done,
                kept=self._kept.values,
                streamed=lambda: self._streams.kept() if self._streams is not None else (),
            )
            if self._link is not None and self._link.connection.established:
                self._objects.began(self._link)
            self._obedience.apply_to(self._objects.inputs)
            if self._is_draining:
                self._objects.inputs.drain()
        return self._objects

    def on_feeding(self, runner: int, task_id: int, payload: Any) -> None:
        if self._objects is not None:
            self._objects.feeding(runner, task_id, payload)

    def on_tasks_wait(self, tasks: List[Tuple[int, int]], *, waits: bool) -> None:
        self.tell(TasksWait(tasks, waits))

    def on_inputs_free(self, task_id: int) -> None:
        if self._objects is not None:
            self._objects.inputs.ended(task_id)

    def on_actor_alive(self, actor: int, attempt: int) -> None:
        self.tell(ActorReady(actor, attempt))

    def on_inputs_unwanted(self, tasks: List[Tuple[int, int]]) -> None:
        if self._objects is not None:
            self._objects.inputs.forget(tasks)

    def on_results_heard(self, results: Any) -> None:
        if self._objects is not None:
            self._objects.unreported(results)

    def on_runner_message(self, runner: int, kind: Any, message: Any) -> None:
        if kind is StreamItems:
            if self._streams is None:
                from gpumesh.runtime.worker_streams import WorkerStreams

                self._streams = WorkerStreams(self.tell, self._pool.send, self._open_objects)
            self._streams.on_items(runner, message)
            return
        self._open_objects().runner_message(runner, kind, message)

    def mesh_for_tasks(self) -> Optional[Tuple[str, str, str]]:
        path = self._relay.path
        return (self.address.url, path, self.worker_id) if path else None

    def on_process_gone(self, pid: int) -> None:
        self._relay.process_gone(pid)

    def on_runner_gone(self, runner: int) -> None:
        if self._streams is not None:
            self._streams.runner_gone(runner)
        if self._objects is not None:
            self._objects.runner_gone(runner)

    def _leave_if_done(self) -> None:
        is_heard = self._link is not None and self._link.connection.established
        if self._pool.is_idle and (self._objects is None or self._objects.is_idle) and (is_heard or not len(self._kept)):
            # One more turn of the loop: the last results leave first.
            self._loop.call_soon(self._end, None)

    def _end(self, error: Optional[BaseException]) -> None:
        if not self._over.done():
            self._over.set_result(error)
