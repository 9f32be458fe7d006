"""Tasks on their way to one coordinator and back, across reconnects. Which coordinator, and what a result means, is decided elsewhere.

Promises:

1. A task that `submit` took ends exactly once at its sink, whatever happens to the connection, the coordinator or this object.
2. `_pending` is the only truth about what is on its way: after a reconnect everything in it is submitted again under the same
   ids, and what had been sent before is marked so. Whether it goes on, is run again or must not be is the coordinator's decision.
3. Whoever waits does the work: the waiting thread itself reads the socket (the leader) while the I/O thread sleeps; when nobody
   waits, or the leader leaves, the I/O thread reads. Only the holder of `_role` reads and dispatches.
4. Locks are taken in this order: `_role`, `_lock`, `link.lock`. Sinks are called with the receive lock alone, or, of tasks
   that never left this side, with none.
5. A task that has another's result among its arguments is sent after that one; see `client.calls` for what else there is to those.
6. Calls of one actor are sent in the order in which they were submitted, also after a reconnect; see `client.lines`.

    NEW ── connect ──> OPEN ── connection lost ──> LOST ── reconnected ──> OPEN
                         │                           └── too late ──> ENDED
                         └──────────── close ────────────────────────> ENDED
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Union

from gpumesh.client.calls import INPUT_FAILED, INPUT_MISSING, Calls
from gpumesh.client.lanes import BATCH_BYTES, BATCH_TASKS, Batch, Lane, Sink, SpecHandle, in_messages
from gpumesh.client.lines import Lines, parts_of, that_keep_order
from gpumesh.client.link import MeshLink, Poller, dial, local_facts
from gpumesh.client.outage import Outage
from gpumesh.client.output import OutputPrinter
from gpumesh.client.role import ReceiveRole
from gpumesh.config import ACKNOWLEDGED_RESULTS
from gpumesh.errors import (
    AuthenticationError,
    MeshClosedError,
    MeshError,
    MeshUnavailableError,
    ObjectStoreFullError,
    ProtocolError,
    VersionMismatchError,
)
from gpumesh.model.ids import CLIENT_LIMIT, SEQUENCE_BITS
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import is_payload
from gpumesh.network.address import Address
from gpumesh.protocol.connection import Closed, Established
from gpumesh.protocol.messages import (
    Answer,
    CancelTasks,
    DefineCode,
    DefineFunction,
    DefineSpec,
    MeshChanged,
    Query,
    RegisterClient,
    ResubmissionEnds,
    ResultsReceived,
    SessionResumed,
    StreamItems,
    SubmitTasks,
    TaskNotice,
    TaskOutput,
    TaskResults,
    TokenRotated,
)

if TYPE_CHECKING:
    from gpumesh.client.inputs import Call
    from gpumesh.client.objects import ObjectSpace

__all__ = ["AnyCondition", "Channel", "Sink", "SpecHandle"]

logger = logging.getLogger("gpumesh")

TRIM_TASKS = 20_000  # After so many tasks, when none is left, memory goes back to the system ...
TRIMS = 4  # ... so many times, as the futures are dropped by and by,
TRIM_SECONDS = 0.2  # this long apart.
_RECEIVE_TURNS = 16  # Reads of a busy socket before the I/O thread looks after the rest.
_DRAIN_POLL_SECONDS = 0.25
_CLOSE_SECONDS = 1.0
_LEAD_POLL_SECONDS = 1.0  # A leader looks this often whether what it waits for has come about in another way.
_LOOKED_AT = 16  # Of what is pending, to see of what kind it is.
_REFUSALS = 100  # Times the I/O thread finds the role taken, with something to read, before it doubts that.
_INTERRUPTED = Closed(MeshUnavailableError("its end came during an interrupt"), "")  # For the event that was lost with it.
_FOLLOW_SECONDS = 60.0  # Keeps a lost notification from being for ever.


CONFIRMED_WITH_OTHERS = 64  # Results whose arrival is confirmed when something else is sent anyway.
_OK = int(Status.OK)
_REFUSED = int(Status.REFUSED)

AnyCondition = Union[threading.Condition, Callable[[], threading.Condition]]

Dialer = Callable[[int, float], Tuple[MeshLink, Established, List[Any]]]
"""(client number, seconds) -> what `link.dial` returns, where somebody else shakes hands; raises as that."""


LOST = "lost"


class Question:
    """A query whose answer is awaited."""

    __slots__ = ("condition", "is_answered", "value", "error", "kind")

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.is_answered = False
        self.value: Any = None
        self.error: Optional[BaseException] = None
        self.kind = ""  # Of the error, as Answer tells it; LOST: the connection was lost before the answer.

    def answered(self) -> bool:
        return self.is_answered

    def answer(self, value: Any, error: Optional[BaseException], kind: str = "") -> None:
        with self.condition:
            self.value, self.error, self.kind, self.is_answered = value, error, kind, True
            self.condition.notify_all()


class Channel:
    """See the module's promises."""

    def __init__(
        self,
        address: Address,
        token: str,
        *,
        name: str,
        connect_timeout: float,
        reconnect_timeout: float,
        on_workers: Callable[[Channel, int], None],
        dialer: Optional[Dialer] = None,
        first_words: Sequence[Any] = (),
    ) -> None:
        self.address = address
        self.client = int.from_bytes(os.urandom(8), "little") % (CLIENT_LIMIT - 1) + 1  # 0 is the coordinator's own.
        self.workers = 0  # Alive and healthy, as the coordinator last said.
        self.end: Optional[BaseException] = None  # Why nothing can be submitted any more.
        self.output = OutputPrinter()
        self.session: Any = None  # Whose channel it is.
        self.slot: Any = None  # Of the task that this process runs (runtime.runner_slots), where it does.
        self.standing: Dict[int, None] = {}  # Pending tasks that are the lives of actors: nobody waits for their end.
        self.lines = Lines()  # Calls of actors that others have to go before.
        self._token = token
        self._name = name
        self._connect_timeout = connect_timeout
        self._dialer = dialer
        self._first_words = first_words  # Said on each connection, behind who this is.
        self.is_nested = dialer is not None  # The process that runs tasks is of the same mesh, by another connection.
        self._on_workers = on_workers
        self._ended_tasks = 0  # Tasks, since memory was last trimmed.
        self._trims_left = 0
        self._trim_at = 0.0
        self._pending: Dict[int, Any] = {}  # task id -> (handle, payload, sink) or Batch; a payload is bytes or a Call.
        self._calls = Calls(self, keep=reconnect_timeout > 0)
        self._next_id = self.client << SEQUENCE_BITS
        self._lanes: Dict[int, Lane] = {}  # by spec number
        self._dirty: List[Lane] = []  # Lanes with tasks, in the order of their first.
        self._queued_tasks = 0
        self._queued_bytes = 0
        self._cancelling: Dict[int, None] = {}
        self._questions: Dict[int, Question] = {}
        self._next_question = 0
        self._objects: Optional[ObjectSpace] = None  # Made at its first use.
        self._lock = threading.Lock()
        self._role = ReceiveRole(Channel._lead.__code__, Channel._run.__code__, Channel._finish.__code__)
        self._inbox: Deque[Any] = deque()  # Received, not yet dispatched.
        self._results: Optional[Tuple[str, Iterator[Any]]] = None  # The batch that is being dispatched.
        self._link: Optional[MeshLink] = None
        self._link_changed = threading.Condition()
        self._outage = Outage(reconnect_timeout)
        self._is_unsure = False  # Whether the coordinator that was found again still has our objects has not been said yet; ...
        self._unsure: Dict[int, None] = {}  # ... pending tasks that wait for that.
        self._sent_before: Set[int] = set()  # Pending tasks that an earlier connection has carried, and this one not yet.
        self._received = 0  # Results, over this connection; ...
        self._confirmed = 0  # ... as the coordinator has been told.
        self._is_woken = False  # The I/O thread has been told that lanes are dirty.
        self._refusals = 0
        self._coded_on: Optional[MeshLink] = None
        self._coded: Set[bytes] = set()  # Digests of the modules that the other side of that link has.
        self._poller = Poller()
        self._thread: Optional[threading.Thread] = None

    # --- connecting

    def connect(self) -> None:
        """Connect in the calling thread; see `link.dial` for what it raises."""
        link, established, rest = self._dial(self._connect_timeout)
        self.workers = established.workers
        link.send([RegisterClient(self.client, self._name), *self._first_words])
        self._link = link
        self._poller.watch(link.sock)
        if rest:
            self._inbox.extend(rest)
            self._poller.wake()
        self._thread = threading.Thread(target=self._run, name="gpumesh-io", daemon=True)
        self._thread.start()

    def _dial(self, timeout: float) -> Tuple[MeshLink, Established, List[Any]]:
        if self._dialer is not None:
            return self._dialer(self.client, timeout)
        return dial(self.address, token=self._token, timeout=timeout, facts=local_facts())

    def wait_for_workers(self, timeout: float, *, count: int = 1) -> bool:
        """Wait until the coordinator has `count` workers; for those that are just joining."""
        deadline = time.monotonic() + timeout
        question = Question()  # Never answered: the condition alone is needed.
        while self.workers < count and self.end is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.drive_until(lambda: self.workers >= count or self.end is not None, question.condition, min(left, 0.05))
        return self.workers >= count

    # --- submitting

    def submit(self, handle: SpecHandle, payload: Any, sink: Sink) -> int:
        """Take one task; returns its id. Blocks while more waits for the socket than should, or its arguments are stored.

        Args:
            payload: Its arguments: bytes, or a Call.

        Raises:
            ObjectStoreFullError: There is no room for its arguments.
        """
        if type(payload) is not bytes:
            return self._submit_call(handle, payload, sink)
        size = len(payload)
        link = self._link
        if link is not None and link.wants_write and link.is_congested_for(size):
            self._wait_until_drained(link, size)
        with self._lock:
            if self.end is not None:
                raise self._ended()
            try:
                task_id = self._next_id
                self._next_id = task_id + 1
                self._pending[task_id] = (handle, payload, sink)
                lane = handle.lane
                if lane is None or lane.channel is not self:
                    lane = self._lane(handle)
                if not lane.ids:
                    self._dirty.append(lane)
                lane.ids.append(task_id)
                lane.payloads.append(payload)
                queued = self._queued_tasks = self._queued_tasks + 1
                self._queued_bytes += size
                if (
                    queued >= BATCH_TASKS
                    or queued >= len(self._pending) - len(self.standing)
                    or self._queued_bytes >= BATCH_BYTES
                ):
                    self._send_lanes()
                elif not self._is_woken:
                    self._is_woken = True
                    self._poller.wake()
            except BaseException:
                self._cut()
                raise
        return task_id

    def submit_many(self, handle: SpecHandle, payloads: List[Any], sink: Sink) -> int:
        """Take tasks that share a sink; their ids are consecutive, the first is returned.

        A task whose arguments find no room in the store ends with that error.
        """
        size = 0
        calls: Dict[int, Optional[BaseException]] = {}  # Places of those that are not plain bytes, and what is wrong with them.
        for position, payload in enumerate(payloads):
            if type(payload) is bytes:
                size += len(payload)
            else:
                calls[position] = self._calls.settled(payload)
        link = self._link
        if link is not None and link.wants_write and link.is_congested_for(size):
            self._wait_until_drained(link, size)
        with self._lock:
            if self.end is not None:
                raise self._ended()
            try:
                first = self._next_id
                count = len(payloads)
                ids = range(first, first + count)
                self._next_id = first + count
                self._pending.update(dict.fromkeys(ids, Batch(handle, first, payloads, sink)))
                lane = handle.lane
                if lane is None or lane.channel is not self:
                    lane = self._lane(handle)
                if not calls:
                    if not lane.ids:
                        self._dirty.append(lane)
                    lane.ids.extend(ids)
                    lane.payloads.extend(payloads)
                else:
                    for task_id, payload in zip(ids, payloads):
                        self._queue(task_id, lane, payload, calls.get(task_id - first))
                self._queued_tasks += count
                self._queued_bytes += size
                self._send_lanes()
            except BaseException:
                self._cut()
                raise
        for position in calls:
            self._calls.watch_if_held(first + position, payloads[position])
        self._calls.tell_ended()
        return first

    def create(self, handle: SpecHandle, payload: Any, sink: Sink) -> int:
        """Take the creation of an actor, as `submit`; it leaves before anything that is submitted later."""
        task_id = self.submit(handle, payload, sink)
        self.standing[task_id] = None
        if task_id not in self._pending:
            self.standing.pop(task_id, None)
        self.flush()
        return task_id

    # --- calls that are more than bytes, or have to wait for their turn

    def submit_in_turn(self, handle: SpecHandle, payload: Any, sink: Sink) -> int:
        """Take a call of an actor while some calls stand in `lines`. Else as `submit`."""
        return self._submit_call(handle, payload, sink)

    def _submit_call(self, handle: SpecHandle, call: Any, sink: Sink) -> int:
        error = self._calls.settled(call) if type(call) is not bytes else None
        if isinstance(error, ObjectStoreFullError):
            raise error
        with self._lock:
            if self.end is not None:
                raise self._ended()
            try:
                task_id = self._next_id
                self._next_id = task_id + 1
                self._pending[task_id] = (handle, call, sink)
                self._queue(task_id, self._lane(handle), call, error)
                queued = self._queued_tasks = self._queued_tasks + 1
                if queued >= BATCH_TASKS or queued >= len(self._pending) - len(self.standing):
                    self._send_lanes()
                elif not self._is_woken:
                    self._is_woken = True
                    self._poller.wake()
            except BaseException:
                self._cut()
                raise
        self._calls.watch_if_held(task_id, call)
        self._calls.tell_ended()
        return task_id

    def _queue(self, task_id: int, lane: Lane, payload: Any, error: Optional[BaseException]) -> None:
        """A pending task goes into its lane, or is held back. Under `_lock`."""
        actor = lane.actor
        if actor and self.lines and error is None and not self.lines.may_go(actor, task_id):
            return
        if type(payload) is not bytes:
            if error is not None:
                self._end_soon(task_id, int(Status.REFUSED), error)
                return
            if payload.waits and self._dirty and self._dirty != [lane]:
                self._send_lanes()  # What it waits for may be in another lane: that is to arrive first.
            if payload.stored is not None and self._is_unsure:
                self._unsure[task_id] = None
                if actor:
                    self.lines.enter(actor, task_id)
                return
            if payload.stored is not None and payload.is_stale(self._objects):
                try:
                    payload.unsettle()
                except MeshUnavailableError as lost:
                    self._end_soon(task_id, int(Status.REFUSED), lost)
                    return
                payload = None
            else:
                payload = payload.wire(self.client)
            if payload is None:
                self._calls.held[task_id] = None
                if actor:
                    self.lines.enter(actor, task_id)
                return
            lane.has_others = True
        if not lane.ids:
            self._dirty.append(lane)
        lane.ids.append(task_id)
        lane.payloads.append(payload)
        if actor and self.lines:
            self.lines.leave(task_id)
            self._next_in_line(actor)

    def _next_in_line(self, actor: int) -> None:
        """Calls of this actor whose turn it is go into their lanes. Under `_lock`."""
        while True:
            task_id = self.lines.next_of(actor)
            if task_id is None:
                return
            entry = self._pending.get(task_id)
            if entry is not None and type(entry[1]) is not bytes:
                self._calls.its_turn(task_id)
                self._poller.wake()
                return
            self.lines.leave(task_id)
            if entry is not None:
                lane = self._lane(entry[0])
                if not lane.ids:
                    self._dirty.append(lane)
                lane.ids.append(task_id)
                lane.payloads.append(entry[1])

    def stand_in_line(self, task_id: int) -> None:
        """A task that the coordinator has not run for want of an input: if it is a call, those after it wait."""
        with self._lock:
            entry = self._pending.get(task_id)
            if entry is not None and type(entry) is tuple and entry[0].spec.actor:
                self.lines.enter(entry[0].spec.actor, task_id)

    def _leave_line(self, task_id: int) -> None:
        """A task has ended here that perhaps stood in line."""
        with self._lock:
            actor = self.lines.actor_of(task_id)
            if not actor:
                return
            self.lines.leave(task_id)
            if self._link is not None:
                self._link.send([CancelTasks([task_id])])  # The coordinator may keep others waiting for it.
            self._next_in_line(actor)
            self._send_lanes()

    def _end_soon(self, task_id: int, status: int, payload: Any) -> None:
        """A task has ended on this side: its sink is told in a moment, when no lock is held."""
        self._calls.end_soon(task_id, status, payload)
        self._poller.wake()

    # --- for client.calls

    def call_of(self, task_id: int) -> Optional[Call]:
        """The call of a task that has not ended."""
        entry = self._pending.get(task_id)
        if entry is None:
            return None
        call: Optional[Call] = entry[1] if type(entry) is tuple else entry.payloads[task_id - entry.first]
        return call

    def queue_again(self, task_id: int, call: Call, error: Optional[BaseException], link: Optional[MeshLink]) -> bool:
        """Queue a pending task again, or let it end with `error`; False if the connection is not `link` any more."""
        with self._lock:
            if self._link is not link or self.end is not None:
                return False
            entry = self._pending.get(task_id)
            if entry is not None:
                lane = self._lane(entry[0] if type(entry) is tuple else entry.handle)
                if not lane.actor or task_id in self.lines:
                    self._queue(task_id, lane, call, error)
        return True

    def take_cancelled(self, task_id: int) -> bool:
        """Whether the end of the task was asked for; nobody else is to see to that then."""
        with self._lock:
            return self._cancelling.pop(task_id, self) is None

    @property
    def link(self) -> Optional[MeshLink]:
        """The connection; None while it is lost."""
        return self._link

    # --- objects

    @property
    def objects(self) -> ObjectSpace:
        """The object store of this connection."""
        if self._objects is None:
            from gpumesh.client.objects import ObjectSpace

            with self._lock:
                if self._objects is None:
                    self._objects = ObjectSpace(self, self._poller.wake)
        return self._objects

    def await_link(self, deadline: Optional[float]) -> MeshLink:
        """The connection; waits for it while it is lost, also in a callback.

        Raises:
            MeshUnavailableError: It is lost, and does not come back until the deadline.
            MeshError: It has ended.
        """
        while True:
            link = self._link
            if self.end is not None:
                raise self._ended()
            if link is not None and not link.is_broken:
                return link
            if link is not None:
                is_settled = self._see_the_end_of(link, deadline)
            elif threading.current_thread() is self._thread:
                is_settled = self._connect_from_callback(deadline)
            elif self._role.is_mine:
                is_settled = self._follow_without_role(deadline)
            else:
                is_settled = self._follow(self._is_link_settled, self._link_changed, deadline)
            if not is_settled:
                raise self._unreachable_now()

    def _see_the_end_of(self, link: MeshLink, deadline: Optional[float]) -> bool:
        """Writing has failed, and the loss of the connection has not been noticed yet: in a callback this thread is who notices."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return self.drive_until(lambda: self._link is not link or self.end is not None, self._link_changed, left)

    def _is_link_settled(self) -> bool:
        return self._link is not None or self.end is not None

    def _connect_from_callback(self, deadline: Optional[float]) -> bool:
        """The I/O thread itself waits for the connection: it goes on looking for it."""
        while not self._is_link_settled():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return False
            if now >= self._outage.next_at:
                self._reconnect(now)
            else:
                until = self._outage.next_at if deadline is None else min(deadline, self._outage.next_at)
                self._poller.wait(until - now)
        return True

    def _follow_without_role(self, deadline: Optional[float]) -> bool:
        """A callback waits for the connection, and the I/O thread needs the role to have one."""
        self._give_role()
        try:
            return self._follow(self._is_link_settled, self._link_changed, deadline)
        finally:
            self._role.take()

    def post(self, link: MeshLink, messages: Sequence[Any], *, is_followed: bool = False) -> bool:
        """Send these, and what there is to tell of objects before them; False if that connection is over.

        Args:
            is_followed: They may wait for what this thread sends next, at once.
        """
        with self._lock:
            if self._link is not link or self.end is not None:
                return False
            objects = self._objects
            if objects is not None and objects.has_chores:
                messages = [*objects.chores(link), *messages]
            if is_followed:
                link.queue(messages)
            else:
                link.send(list(messages))
                self.see_to_writing(link)
            return not link.is_broken

    def tell(self, messages: Sequence[Any]) -> None:
        """Send these if there is a connection at the moment."""
        link = self._link
        if link is not None:
            self.post(link, messages)

    def flush(self) -> None:
        """Send what is queued, from the calling thread."""
        if self._dirty:
            with self._lock:
                self._send_lanes()

    def _lane(self, handle: SpecHandle) -> Lane:
        lane = self._lanes.get(handle.number)
        if lane is None:
            lane = self._lanes[handle.number] = Lane(self, handle)
        handle.lane = lane
        return lane

    def _send_lanes(self) -> None:
        """Everything queued becomes messages, and those bytes on the socket. Under `_lock`; keeps all while there is no link."""
        link = self._link
        if link is None:
            return
        try:
            self._send_lanes_on(link)
        except BaseException:
            self._cut()  # Interrupted half-way: everything pending is sent again over a new connection.
            raise
        self.see_to_writing(link)

    def _send_lanes_on(self, link: MeshLink) -> None:
        dirty, self._dirty = self._dirty, []
        self._queued_tasks = self._queued_bytes = 0
        if self._received - self._confirmed >= CONFIRMED_WITH_OTHERS:
            self._confirm_on(link)
        for parts in parts_of(dirty):
            messages: List[Any] = []
            for lane, ids, payloads in parts:
                self._add_part(link, lane, ids, payloads, messages)
            for lane, _, _ in parts:
                lane.has_others = False
            try:
                link.send(messages)
            except ProtocolError as error:
                for _, ids, _ in parts:
                    for task_id in ids:
                        self._end_soon(task_id, int(Status.REFUSED), error)

    def _add_part(self, link: MeshLink, lane: Lane, ids: List[int], payloads: List[Any], messages: List[Any]) -> None:
        """The messages for tasks of one lane. Under `_lock`."""
        number = lane.handle.number
        if lane.defined_on is not link:
            exported = lane.handle.exported
            messages.append(DefineFunction(exported.digest, exported.body))
            if lane.handle.cargo is not None:
                self._add_code(link, lane.handle.cargo, messages)
            messages.append(DefineSpec(number, tuple(lane.handle.spec)))
            lane.defined_on = link
        if lane.actor and (lane.has_others or self._sent_before):
            for call_ids, its_payloads in that_keep_order(ids, payloads):
                for part, those, again in self._split(call_ids, its_payloads):
                    messages.extend(in_messages(number, part, those, again=again))
        elif self._sent_before:
            for part, its_payloads, again in self._split(ids, payloads):
                messages.extend(in_messages(number, part, its_payloads, again=again))
        elif lane.has_others or len(ids) > BATCH_TASKS:
            messages.extend(in_messages(number, ids, payloads))
        else:
            messages.append(SubmitTasks(number, ids, payloads))

    def _split(self, ids: List[int], payloads: List[Any]) -> Iterator[Tuple[List[int], List[Any], bool]]:
        """Tasks in their order, those apart that an earlier connection has carried."""
        before = self._sent_before
        for again, group in itertools.groupby(zip(ids, payloads), key=lambda each: each[0] in before):
            part = list(group)
            yield [task_id for task_id, _ in part], [payload for _, payload in part], again
        before.difference_update(ids)

    def _confirm_on(self, link: MeshLink) -> None:
        """Tell the coordinator which results need not be kept for us. Under `_lock`."""
        self._confirmed = self._received
        link.send([ResultsReceived(self._received)])

    def confirm(self) -> None:
        """The same now, on any thread: what it keeps for us may refer to objects."""
        with self._lock:
            link = self._link
            if link is not None and self._received > self._confirmed:
                self._confirm_on(link)
                self.see_to_writing(link)

    def _add_code(self, link: MeshLink, cargo: Any, messages: List[Any]) -> None:
        """The same modules are sent once on a connection, whatever number of functions they come with."""
        if self._coded_on is not link:
            self._coded_on, self._coded = link, set()
        if cargo.digest not in self._coded:
            for digest, data, needs in cargo.parts():
                if digest not in self._coded:
                    self._coded.add(digest)
                    messages.append(DefineCode(digest, data, needs))

    def see_to_writing(self, link: MeshLink) -> None:
        """What the socket did not take is the I/O thread's now."""
        if (link.wants_write and not self._poller.is_watching_write) or link.is_broken:
            self._poller.wake()

    def _wait_until_drained(self, link: MeshLink, size: int) -> None:
        """Backpressure: hold the submitting thread until the socket has taken most of what waits."""
        if self._role.is_mine or threading.current_thread() is self._thread:
            return  # A callback submits: the thread that would make room is this one.
        while link is self._link and not link.is_broken and self.end is None:
            link.flush()
            if not link.is_congested_for(size):
                return
            _, writable = link.wait(_DRAIN_POLL_SECONDS, writable=True)
            if not writable:
                threading.Event().wait(0.001)  # Readable only: leave the reading to who does it.

    def _ended(self) -> BaseException:
        assert self.end is not None
        return type(self.end)(*self.end.args)

    # --- waiting

    def drive_until(self, done: Callable[[], bool], condition: AnyCondition, timeout: Optional[float]) -> bool:
        """Wait until `done()`; reads and dispatches in the calling thread if no other thread does.

        Args:
            done: Checked after each batch of messages.
            condition: Notified by whoever makes `done()` true; or a function that makes it, called only if it is needed.
            timeout: Seconds; None for ever.

        Returns:
            Whether it is done.
        """
        if done():
            return True
        if self.slot is not None and threading.current_thread() is not self._thread:
            from gpumesh.client.slots import drive

            return drive(self, done, condition, timeout)
        return self.drive(done, condition, timeout)

    def drive(self, done: Callable[[], bool], condition: AnyCondition, timeout: Optional[float]) -> bool:
        """The same, where the caller has nothing to give away meanwhile."""
        if done():
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        self.flush()
        if self._poller.can_hand_over and self._link is not None:
            role = self._role
            if role.is_mine:  # From a callback: the outer call gives the role back.
                if self._lead(done, deadline):
                    return True
            else:
                try:
                    if role.try_take() and self._lead(done, deadline):
                        return True
                finally:
                    if role.is_mine:
                        self._give_role()
        return self._follow(done, condition, deadline)

    def _give_role(self) -> None:
        """Give the role back; from now on the I/O thread is to hear of what arrives.

        Also where the I/O thread itself had the role: a callback that waited there was a leader, and has switched that off.
        """
        self._poller.set_read(True)
        self._role.give()

    def _lead(self, done: Callable[[], bool], deadline: Optional[float]) -> bool:
        """Read in this thread until done, too late, or the link is gone. Holds the receive lock."""
        link = self._link
        is_at_work = False
        writes_too = threading.current_thread() is self._thread  # From a callback there: nobody else would.
        try:
            self._poller.set_read(False)
            while link is not None and link is self._link and self.end is None:
                is_at_work = True
                self._dispatch()  # Also what an interrupted or outer call has left.
                is_at_work = False
                if done():
                    return True
                if link is not self._link:
                    break  # That was its end; what its socket says from now on is about nothing.
                left = _LEAD_POLL_SECONDS
                if deadline is not None:
                    left = min(left, deadline - time.monotonic())
                    if left <= 0:
                        return False
                readable, writable = link.wait(left, writable=writes_too and link.wants_write)
                if writable:
                    link.flush()
                if not readable:
                    continue
                is_at_work = True
                events = link.receive()
                if events:
                    self._inbox.extend(events)
                elif link.is_over:
                    self._inbox.append(_INTERRUPTED)
                if link.wants_write:
                    self.see_to_writing(link)
            return done()
        finally:
            if is_at_work:
                self._cut()

    def _follow(self, done: Callable[[], bool], condition: AnyCondition, deadline: Optional[float]) -> bool:
        if not isinstance(condition, threading.Condition):
            condition = condition()
        with condition:
            while not done():
                if deadline is None:
                    condition.wait(_FOLLOW_SECONDS)
                else:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    condition.wait(min(left, _FOLLOW_SECONDS))
        return True

    # --- dispatching, under the receive lock

    def _dispatch(self) -> None:
        """Tell everyone concerned what has arrived.

        A callback may wait for another future and so come back here: it goes on with the same batch where the outer call stands.
        """
        inbox = self._inbox
        pending = self._pending
        while True:
            results = self._results
            if results is not None:
                worker, iterator = results
                has_partial_lines = self.output.partial
                resent = self._calls.resent
                for task_id, status, payload, seconds in iterator:
                    entry = pending.get(task_id)
                    if type(payload) is not bytes and status == _OK and not is_payload(payload):
                        status, payload = _REFUSED, {"reason": "the coordinator sent what is no value"}
                    if type(payload) is not bytes and status == _OK:
                        payload = self.objects.received(payload)  # Also where nobody wants it: it was granted to us.
                        if entry is not None and payload.ref is not None:
                            payload.origin = _origin(entry, task_id)
                    if entry is None:
                        continue
                    if INPUT_MISSING <= status <= INPUT_FAILED:
                        call = entry[1] if type(entry) is tuple else entry.payloads[task_id - entry.first]
                        self._calls.on_trouble(task_id, call, status, payload)
                        continue
                    if has_partial_lines:
                        self.output.task_ended(task_id)
                    if type(entry) is tuple:
                        entry[2].task_ended(task_id, status, payload, seconds, worker)
                    else:
                        entry.sink.task_ended(task_id, status, payload, seconds, worker)
                        entry.payloads[task_id - entry.first] = None
                    pending.pop(task_id, None)  # Only now: an interrupt in between makes it be submitted again.
                    if self.standing:
                        self.standing.pop(task_id, None)
                    if resent:
                        resent.pop(task_id, None)
                if self._cancelling:
                    self._cancelling = {task_id: None for task_id in self._cancelling if task_id in pending}
                self._results = None
                if self._received - self._confirmed >= ACKNOWLEDGED_RESULTS:
                    self.confirm()
            if not inbox:
                if self._calls.resent and self._dirty:
                    self.flush()
                if len(pending) <= len(self.standing) and (self._trims_left or self._ended_tasks >= TRIM_TASKS):
                    self._trim_soon()
                return
            event = inbox.popleft()
            if type(event) is TaskResults:
                self._results = (event.worker, iter(event.results))
                self._ended_tasks += len(event.results)
                self._received += len(event.results)
            else:
                self._on_event(event)

    def _on_event(self, event: Any) -> None:
        kind = type(event)
        if kind is MeshChanged:
            self.workers = event.workers
            self._on_workers(self, event.workers)
        elif kind is TaskOutput:
            self.output.add(event.task_id, event.stream, event.data, self._task_name(event.task_id), event.worker)
        elif kind is TaskNotice:
            logger.warning("%s", event.text)
        elif kind is Answer:
            question = self._questions.pop(event.number, None)
            if question is not None:
                question.answer(event.value, MeshError(event.error) if event.error else None, event.kind)
        elif kind is TokenRotated:
            question = self._questions.pop(event.number, None)
            if question is not None:
                question.answer((event.token, event.is_kept), MeshError(event.error) if event.error else None)
        elif kind is StreamItems:
            self._on_items(event)
        elif kind is SessionResumed:
            self._on_resumed(is_kept=event.is_kept)
        elif kind is Closed:
            self._on_lost(event.error or MeshUnavailableError(f"the coordinator closed the connection: {event.reason}"))
        elif self._objects is not None and self._link is not None:
            self._objects.on_event(event, self._link)

    def _on_items(self, message: StreamItems) -> None:
        """Values of a generator. What they refer to was granted to us, also where nobody wants them."""
        if not all(type(item) is bytes or is_payload(item) for item in message.items):
            return  # The stream does not go on; its task's end is told all the same.
        items = [item if type(item) is bytes else self.objects.received(item) for item in message.items]
        entry = self._pending.get(message.task_id)
        if entry is not None:
            sink: Any = entry[2] if type(entry) is tuple else entry.sink
            sink.stream_items(self, message, items)

    def _task_name(self, task_id: int) -> str:
        entry = self._pending.get(task_id)
        if entry is None:
            return ""
        handle: SpecHandle = entry[0] if type(entry) is tuple else entry.handle
        return handle.name

    # --- cancelling and asking

    def cancel(self, task_ids: List[int]) -> None:
        """Ask for the end of these tasks; each still ends at its sink, as CANCELLED or with a result that was faster."""
        with self._lock:
            ids = [task_id for task_id in task_ids if task_id in self._pending and task_id not in self._cancelling]
            if self._calls.held or self.lines:  # The coordinator knows nothing of these.
                for task_id in ids:
                    actor = self.lines.actor_of(task_id)
                    if self._calls.let_go(task_id) or actor:
                        self._end_soon(task_id, int(Status.CANCELLED), {"reason": ""})
                    if actor:
                        self.lines.leave(task_id)
                        self._next_in_line(actor)
                ids = [task_id for task_id in ids if task_id in self._pending]
            if not ids:
                return
            self._cancelling.update(dict.fromkeys(ids))
            if self._link is not None:
                self._send_lanes()
                self._link.send([CancelTasks(ids)])
                self.see_to_writing(self._link)

    def is_pending(self, task_id: int) -> bool:
        """Whether the task has not ended yet."""
        return task_id in self._pending

    def pending_of(self, ranges: Sequence[Sequence[int]]) -> List[int]:
        """Those that have not ended of the tasks with ids in these ranges, [first, end) each."""
        if sum(end - first for first, end in ranges) <= len(self._pending):
            return [task_id for first, end in ranges for task_id in range(first, end) if task_id in self._pending]
        return [task_id for task_id in list(self._pending) if any(first <= task_id < end for first, end in ranges)]

    @property
    def next_id(self) -> int:
        """The id of the task that is submitted next."""
        return self._next_id

    @property
    def pending_tasks(self) -> int:
        """How many tasks have not ended yet, lives of actors aside."""
        return len(self._pending) - len(self.standing)

    @property
    def has_pending_tasks(self) -> bool:
        """Whether there are tasks among what has not ended, as far as a short look tells: neither actors nor calls of them."""
        for entry in list(islice(self._pending.values(), _LOOKED_AT)):
            spec = (entry[0] if type(entry) is tuple else entry.handle).spec
            if not spec.actor and spec.plan is None:
                return True
        return False

    def ask(self, what: str, arguments: Dict[str, Any], timeout: float) -> Any:
        """Ask the coordinator and wait for the answer."""
        number, question = self.put(lambda number: Query(number, what, arguments))
        try:
            is_answered = self.drive_until(question.answered, question.condition, timeout)
        finally:
            self._questions.pop(number, None)
        if not is_answered:
            raise MeshUnavailableError(
                f"the coordinator at {self.address} did not answer the question {what!r} within {timeout:g} s"
            )
        if question.error is not None:
            raise question.error
        return question.value

    def put(self, make: Callable[[int], Any], *, cargo: Any = None, before: Sequence[Any] = ()) -> Tuple[int, Question]:
        """Send a question or order, after the tasks that are queued; returns its number and whom it is answered to. See `forget`.

        Args:
            make: The message with this number.
            cargo: What it refers to, sent before it unless it is there already.
            before: Messages to send before it.
        """
        question = Question()
        with self._lock:
            if self.end is not None:
                raise self._ended()
            number = self._next_question
            self._next_question += 1
            self._questions[number] = question
            link = self._link
            if link is not None:
                messages: List[Any] = []
                if cargo is not None:
                    self._add_code(link, cargo, messages)
                if self._dirty:
                    self._send_lanes()
                link.send([*messages, *before, make(number)])
                self.see_to_writing(link)
        if link is None:
            question.answer(None, self._unreachable_now(), LOST)
        elif link.wants_write and link.is_congested_for(0):
            self._wait_until_drained(link, 0)
        return number, question

    def forget(self, number: int) -> None:
        """Nobody waits for the answer to this question any more."""
        self._questions.pop(number, None)

    def _unreachable_now(self) -> MeshUnavailableError:
        return MeshUnavailableError(
            f"the connection to the coordinator at {self.address} is lost at the moment; try again when it is back"
        )

    # --- memory

    def _trim_soon(self) -> None:
        """Many tasks have ended and none is left; their futures go in a moment, if nobody keeps them."""
        self._ended_tasks = 0
        is_new = not self._trims_left
        self._trims_left = TRIMS
        self._trim_at = time.monotonic() + TRIM_SECONDS
        if is_new:
            self._poller.wake()

    def _trim(self) -> None:
        """On the I/O thread: give back what a burst of tasks took, the table's own memory included."""
        from gpumesh.runtime.system import trim_memory

        self._trim_at = time.monotonic() + TRIM_SECONDS
        is_over = False
        if self._role.try_take():
            try:
                with self._lock:
                    if len(self._pending) <= len(self.standing):
                        is_over = True
                        self._pending = dict(self._pending)  # A dict that was emptied keeps its size.
                        # A number made in the middle of the burst keeps a whole megabyte of Python's heap from going back.
                        self._next_id += 0
                        link = self._link
                        if link is not None:
                            link.connection.renew_numbers()
            finally:
                self._give_role()
        if is_over:  # Else the burst goes on, and its end counts.
            self._trims_left -= 1
            trim_memory()

    # --- the I/O thread

    def _run(self) -> None:
        try:
            while self.end is None:
                self._turn()
        except BaseException as error:
            logger.exception("the connection to %s ended by a defect of gpumesh", self.address)
            self.close(MeshError(f"the client's own I/O failed: {error!r}"))
        finally:
            self._poller.close()
            link = self._link
            if link is not None:
                link.release()

    def _turn(self) -> None:
        link = self._link
        now = time.monotonic()
        if link is None:
            if now >= self._outage.next_at:
                self._reconnect(now)
                return
            self._poller.wait(self._outage.next_at - now)
            self._calls.tell_ended()
            return
        self._poller.set_write(link.wants_write)
        due = link.connection.next_deadline()
        if self._trims_left and (due is None or self._trim_at < due):
            due = self._trim_at
        readable, writable, woken = self._poller.wait(None if due is None else max(0.0, due - now))
        if self.end is not None or link is not self._link:
            return
        if woken:
            self._is_woken = False
            self.flush()
            self._calls.tell_ended()
            objects = self._objects
            if objects is not None and objects.has_chores:
                self.post(link, ())
        if writable:
            link.flush()
        if readable or self._inbox:
            if self._role.try_take():
                self._refusals = 0
                try:
                    self._receive(link)
                finally:
                    self._give_role()
            else:  # A leader is about to switch the watching of reads off.
                self._refusals += 1
                if self._refusals % _REFUSALS == 0:
                    self._role.heal()
        if self._objects is not None:
            self._objects.give_back_spare()
        if self._received - self._confirmed >= CONFIRMED_WITH_OTHERS:
            self.confirm()
        if due is None or time.monotonic() < due:
            return
        self.confirm()
        if self._trims_left and time.monotonic() >= self._trim_at:
            self._trim()
        events = link.on_time(time.monotonic())
        if events:  # The connection is given up.
            self._inbox.extend(events)
            link.cut()  # A leader asleep on the socket, with the role, wakes up and dispatches them.
            self._role.take()
            try:
                self._dispatch()
            finally:
                self._give_role()
        elif self._role.heal():
            self._poller.set_read(True)

    def _receive(self, link: MeshLink) -> None:
        self._dispatch()
        for _ in range(_RECEIVE_TURNS):
            if link is not self._link:
                return
            events = link.receive()
            if events is None:
                return
            self._inbox.extend(events)
            if not events and link.is_over:
                self._inbox.append(_INTERRUPTED)
            self._dispatch()

    def end_task(self, task_id: int, status: int, payload: Any) -> None:
        """A task has ended otherwise than by a result."""
        entry = self._pending.pop(task_id, None)
        if entry is not None:
            sink: Sink = entry[2] if type(entry) is tuple else entry.sink
            sink.task_ended(task_id, status, payload, 0.0, "")
            if type(entry) is not tuple:
                entry.payloads[task_id - entry.first] = None
            if self.standing:
                self.standing.pop(task_id, None)
        if self.lines:
            self._leave_line(task_id)

    # --- losing the coordinator and finding it again

    def _cut(self) -> None:
        """Give the connection up at once: what was in progress was interrupted. The I/O thread connects again."""
        link = self._link
        if link is not None:
            link.cut()
            self._poller.wake()

    def _on_lost(self, error: MeshError) -> None:
        """The connection is over. Under the receive lock."""
        with self._lock:
            link = self._link
            if link is None or self.end is not None:
                return
            self._poller.forget()
            self._inbox.clear()
            self._results = None
            self._outage.begin(time.monotonic())
            self._link = None  # Last: from now on the I/O thread tries to connect.
            questions, self._questions = self._questions, {}
        link.close("lost")
        link.release()
        if self._objects is not None:
            self._objects.on_lost()
        for question in questions.values():
            question.answer(None, self._unreachable_now(), LOST)
        level = logging.WARNING if self._pending or questions else logging.INFO  # Nobody waits for anything: no alarm.
        logger.log(level, "lost the coordinator at %s (%s); retrying for %g s", self.address, error, self._outage.patience)
        self._poller.wake()

    def _reconnect(self, now: float) -> None:
        """One attempt, on the I/O thread."""
        left = self._outage.left(now)
        try:
            if left <= 0:
                raise MeshUnavailableError("too late")
            link, established, rest = self._dial(min(self._connect_timeout, left))
        except (AuthenticationError, VersionMismatchError) as error:
            self._finish(error)
            return
        except MeshError as error:
            if not self._outage.failed(left, time.monotonic(), os.urandom(1)[0] / 255):
                self._finish(
                    MeshUnavailableError(
                        f"the coordinator at {self.address} was lost and did not come back within {self._outage.patience:g} s ({error}); "
                        "start it again with `gpumesh serve` and submit again"
                    )
                )
            return
        is_callback = self._role.is_mine  # It has waited for the connection.
        if not is_callback:
            self._role.take()
        try:
            self._resume(link, established.workers, rest)
        finally:
            if not is_callback:
                self._give_role()
        self._on_workers(self, self.workers)

    def _resume(self, link: MeshLink, workers: int, rest: List[Any]) -> None:
        """Tell the coordinator everything again."""
        cancelled: List[int] = []
        calls: List[int] = []
        objects = self._objects
        first = objects.renew() if objects is not None else []
        with self._lock:
            if self.end is not None:
                link.close("closed")
                link.release()
                return
            self.workers = workers
            self._received = self._confirmed = 0
            unsent = {task_id for lane in self._lanes.values() for task_id in lane.ids}
            unsent.update(self._calls.forget())
            unsent.update(self._unsure)
            unsent.update(self.lines)
            self.lines.clear()
            self._unsure = {}
            self._is_unsure = objects is not None
            unsent.difference_update(self._sent_before)  # Over a connection before that.
            self._sent_before.intersection_update(self._pending)
            for lane in self._lanes.values():
                lane.clear()
            self._dirty = []
            for task_id, entry in self._pending.items():
                if type(entry) is tuple:
                    handle, payload, _ = entry
                else:
                    handle, payload = entry.handle, entry.payloads[task_id - entry.first]
                if task_id in self._cancelling:
                    cancelled.append(task_id)
                    continue
                if task_id not in unsent:
                    self._sent_before.add(task_id)
                actor = handle.spec.actor
                if type(payload) is not bytes:
                    calls.append(task_id)
                    if actor:
                        self.lines.enter(actor, task_id)
                    continue
                if actor and self.lines and not self.lines.may_go(actor, task_id):
                    continue
                lane = self._lane(handle)
                if not lane.ids:
                    self._dirty.append(lane)
                lane.ids.append(task_id)
                lane.payloads.append(payload)
            self._cancelling = {}
            link.send([RegisterClient(self.client, self._name, True), *self._first_words, *first])
            self._inbox.extend(rest)
            self._link = link
            self._poller.watch(link.sock)
            self._poller.wake()
            self._send_lanes()
            if not calls:
                link.send([ResubmissionEnds()])
                self.see_to_writing(link)
            elif self._is_unsure:
                self._unsure.update(dict.fromkeys(calls))  # `_on_resumed` goes on with them.
        with self._link_changed:
            self._link_changed.notify_all()
        if calls and not self._is_unsure:
            self._calls.prepare_aside(calls, link, then=lambda: self.post(link, [ResubmissionEnds()]))
        logger.warning("the coordinator at %s is back", self.address)
        for task_id in cancelled:
            self.end_task(task_id, Status.CANCELLED, {"reason": ""})

    def _on_resumed(self, *, is_kept: bool) -> None:
        """The coordinator says whether it has kept our objects: calls that were stored there can be sent again now."""
        with self._lock:
            link = self._link
            if not self._is_unsure or link is None:
                return
            if self._objects is not None:
                self._objects.resumed(is_kept=is_kept)
            self._is_unsure = False
            unsure, self._unsure = list(self._unsure), {}
        if unsure:
            self._calls.prepare_aside(unsure, link, then=lambda: self.post(link, [ResubmissionEnds()]))

    # --- the end

    def _finish(self, error: BaseException) -> None:
        """Everything pending ends with `error`. The receive lock must be free or this thread's."""
        with self._lock:
            if self.end is not None:
                return
            self.end = error
            link = self._link
            questions, self._questions = self._questions, {}
        if link is not None:
            link.close("closed")
        if self._objects is not None:
            self._objects.close()
        with self._link_changed:
            self._link_changed.notify_all()
        self._poller.wake()
        for question in questions.values():
            question.answer(None, error)
        is_inner_call = self._role.is_mine
        has_role = not is_inner_call and self._role.take(_CLOSE_SECONDS)
        try:
            self._inbox.clear()
            self._results = None
            with self._lock:
                self.lines.clear()
            for task_id in list(self._pending):
                self.end_task(task_id, Status.LOST, error)
        finally:
            if has_role:
                self._give_role()

    def close(self, error: Optional[BaseException] = None) -> None:
        """End everything; pending sinks end with `error`. Idempotent."""
        self._finish(error or MeshClosedError("the mesh was closed"))
        thread = self._thread
        if thread is None:
            self._poller.close()
        elif thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)

    def abandon(self) -> List[Tuple[int, Sink]]:
        """In a forked child: let go of what belongs to the parent, without a word on its socket; returns what was pending."""
        self.end = MeshClosedError("this mesh connection belongs to the process that was forked")
        if self._link is not None:
            self._link.release()
        self._poller.release()
        return [(task_id, entry[2] if type(entry) is tuple else entry.sink) for task_id, entry in self._pending.items()]


def _origin(entry: Any, task_id: int) -> Optional[Tuple[SpecHandle, bytes]]:
    """What a task that has ended was made of, if it may run again and its arguments are at hand: bytes, which hold nothing else alive."""
    handle, payload = entry[:2] if type(entry) is tuple else (entry.handle, entry.payloads[task_id - entry.first])
    return (handle, payload) if type(payload) is bytes and handle.spec.retries and not handle.spec.is_stream else None
