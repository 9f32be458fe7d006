"""One actor as this process knows it: how to reach it, which of its calls are pending, whether it is gone. Packs no arguments.

Promises:

1. All handles of an actor in one process share one contact, which keeps the actor alive as they do: it holds the one reference to
   its token. Pending calls hold it, too; ended ones do not.
2. Its calls go over one connection, in the order in which they are made.
3. Nothing runs when it is garbage but the drop of that reference; see `serialization.refs`.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Dict, Optional, Set, Tuple

from gpumesh.client.actor_shapes import Shape, read_shape
from gpumesh.errors import ActorBusyError, MeshError
from gpumesh.model.actors import show_actor
from gpumesh.model.ids import SEQUENCE_BITS
from gpumesh.model.outcomes import Status
from gpumesh.model.records import NamedTuple
from gpumesh.serialization import refs
from gpumesh.serialization.refs import ObjectRef

if TYPE_CHECKING:
    from gpumesh.client.actor_options import CallOptions
    from gpumesh.client.channel import Channel
    from gpumesh.client.lanes import SpecHandle
    from gpumesh.client.mesh import GPUMesh

_ACTOR_DIED = int(Status.ACTOR_DIED)
_LOST = int(Status.LOST)


class Known(NamedTuple):
    """How calls of one method of one actor are known at the other side of a connection."""

    spec: SpecHandle
    travel: Any  # serialization.shipping.Travel: says how long it holds.
    channel: Channel
    session: Any  # Its session, if that has to be told of each call; else None.


class Contact:
    """See the module's promises.

    Attributes:
        actor: Its id, which is that of the task that created it.
        shape: What is known of its class.
        token: The object that handles refer to; None: it lives on without them.
        channel: The connection over which it is reached; None: not known yet.
        mesh: Kept as long as the actor is; None where it came with a value.
        pending: Calls that have not ended.
        died: Why later calls fail, as what comes with ACTOR_DIED. None: it lives, as far as is known.
        waiting: Threads that wait for room in the mailbox.
    """

    __slots__ = (
        "actor", "shape", "token", "channel", "mesh", "pending", "died", "waiting", "condition", "_description", "_specs",
        "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        actor: int,
        description: bytes,
        token: Optional[ObjectRef],
        channel: Optional[Channel],
        mesh: Optional[GPUMesh] = None,
    ) -> None:
        self.actor = actor
        self.shape: Shape = read_shape(description)
        self.token = token
        self.channel = channel
        self.mesh = mesh
        self.pending: Set[Any] = set()
        self.died: Optional[Dict[str, Any]] = None
        self.waiting = 0
        self.condition = threading.Condition()
        self._description = description
        self._specs: Dict[Tuple[str, CallOptions], Known] = {}

    @property
    def shown(self) -> str:
        """How people call it."""
        name = f" {self.shape.name!r}" if self.shape.name else ""
        return f"{self.shape.class_name}{name} {show_actor(self.actor)}"

    @property
    def travels_as(self) -> Tuple[int, bytes, Optional[ObjectRef]]:
        """What makes a handle of it elsewhere."""
        return self.actor, self._description, self.token

    # --- the connection

    def reach(self) -> Channel:
        """The connection over which it is reached; connects on first use.

        Raises:
            MeshError: It is lost for good, or closed.
        """
        channel = self.channel
        if channel is not None and channel.end is None:
            return channel
        if channel is not None:
            is_forked = channel.objects.table.is_foreign
            if not is_forked and channel.client == self.actor >> SEQUENCE_BITS:
                raise _again(channel.end)  # It has ended with the connection that had created it.
            session = channel.session
            if session.is_closed:
                raise _again(channel.end)
        else:
            session = _session_of_the_moment()
        found: Channel = session.objects().channel
        if channel is not None and found.address != channel.address:
            raise _again(channel.end)
        if self.token is not None and channel is not None:
            self.token = ObjectRef(self.token.oid, self.token.nbytes, found.objects)
        if channel is not None:
            self.pending = set()  # Those are the other process's, or have ended.
        self._specs = {}
        self.channel = found
        found.tell(())  # That this process refers to it, if it has not been said.
        return found

    def known(self, method: str, kind: str, options: CallOptions) -> Known:
        """How calls of a method are known at the other side, as long as that holds. Raises as `reach`."""
        channel = self.reach()
        key = (method, options)
        known = self._specs.get(key)
        if known is None or not known.travel.holds():
            from gpumesh.client.actor_calls import define_call

            known = self._specs[key] = define_call(channel, self.actor, self.shape, method, kind, options)
        return known

    # --- the mailbox

    def make_room(self, what: str) -> None:
        """The mailbox is full: wait until a call has ended, as long as a call may.

        Raises:
            ActorBusyError: None has, or an asyncio loop waits on this thread.
        """
        limit, timeout = self.shape.mailbox, self.shape.call_timeout
        advice = f"{len(self.pending)} calls from here are pending at {self.shown}, and mailbox={limit}"
        if _is_in_a_loop():
            raise ActorBusyError(
                f"{what} was not called: {advice}; a coroutine cannot wait for room without stopping its loop: "
                "await some of these calls first, or give the actor a larger mailbox"
            )
        channel = self.reach()
        with self.condition:
            self.waiting += 1
        try:
            has_room = channel.drive_until(
                lambda: len(self.pending) < limit or channel.end is not None, self.condition, timeout
            )
        finally:
            with self.condition:
                self.waiting -= 1
        if not has_room:
            raise ActorBusyError(
                f"{what} was not called: {advice}, and none of them has ended within call_timeout={timeout:g} s; wait for results, "
                "use more actors, or give it a larger mailbox"
            )

    def call_ended(self, call: Any) -> None:
        """One of `pending` has ended. Quick, on the thread that receives."""
        self.pending.discard(call)
        if self.waiting:
            with self.condition:
                self.condition.notify_all()

    # --- the end

    def has_died(self, status: int, payload: Any, worker: str) -> None:
        """The word that it is gone: the end of its creation, or of a call, which tells more.

        A connection that has ended is no such word: others may still reach it, and a forked process over one of its own.
        """
        if status == _LOST and isinstance(payload, BaseException):
            return
        if self.died is None or status == _ACTOR_DIED:
            from gpumesh.client.actor_ends import details_of

            self.died = details_of(self, status, payload, worker)


class Life:
    """Told of the end of a creation; the channel keeps this, and this keeps neither actor nor handles."""

    __slots__ = ("contact", "end")

    def __init__(self) -> None:
        self.contact: Any = None  # A weak reference, once there is something to refer to.
        self.end: Optional[Tuple[int, Any, str]] = None

    def belongs_to(self, contact: Contact) -> None:
        """Tell that one."""
        self.contact = weakref.ref(contact)
        if self.end is not None:
            contact.has_died(*self.end)

    def task_ended(self, task_id: int, status: int, payload: Any, seconds: float, worker: str) -> None:
        """See `client.lanes.Sink`."""
        self.end = (status, payload, worker)
        contact = self.contact() if self.contact is not None else None
        if contact is not None:
            contact.has_died(status, payload, worker)


class PendingCall:
    """Stands between the channel and a call's future: keeps the actor until the call has ended, and counts it."""

    __slots__ = ("contact", "sink")

    def __init__(self, contact: Contact, sink: Any) -> None:
        self.contact = contact
        self.sink = sink

    def task_ended(self, task_id: int, status: int, payload: Any, seconds: float, worker: str) -> None:
        """See `client.lanes.Sink`."""
        contact = self.contact
        if status == _ACTOR_DIED and type(payload) is dict and payload.get("is_gone"):
            contact.has_died(status, payload, worker)
        self.sink.task_ended(task_id, status, payload, seconds, worker)
        contact.call_ended(self)

    def stream_items(self, *told: Any) -> None:
        """Values of a generator have come; see `client.item_streams`."""
        self.sink.stream_items(*told)


def contact_of(
    actor: int, description: bytes, token: Optional[ObjectRef], channel: Optional[Channel], mesh: Optional[GPUMesh] = None
) -> Contact:
    """The one contact of an actor over a connection."""
    key = (channel.client if channel is not None else 0, actor)
    with _lock:
        contact = _known.get(key)
        if contact is None:
            contact = _known[key] = Contact(actor, description, token, channel, mesh)
    return contact


def contact_from(actor: int, description: bytes, token: Optional[ObjectRef]) -> Contact:
    """The contact of an actor whose handle has come with a value: it is reached over the connection that the value came by."""
    space: Any = token.space if token is not None else refs.current_space()
    objects = sys.modules.get("gpumesh.client.objects")
    is_of_client = objects is not None and type(space) is objects.ObjectSpace and not space.table.is_foreign
    return contact_of(actor, description, token, space.channel if is_of_client else None)


def _session_of_the_moment() -> Any:
    from gpumesh.client.context import current_mesh

    return current_mesh()._open_session()


def _is_in_a_loop() -> bool:
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def _again(error: Optional[BaseException]) -> BaseException:
    return type(error)(*error.args) if error is not None else MeshError("the mesh is gone")


_known: weakref.WeakValueDictionary[Tuple[int, int], Contact] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # In a forked child: another thread of the parent may have held it.


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
