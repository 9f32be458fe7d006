"""Methods of actors, as their handles have them: from arguments to a call on its way. What becomes of calls is the channel's matter."""

from __future__ import annotations

import functools
import pickle
from typing import TYPE_CHECKING, Any, Dict, List, NoReturn, Optional, Tuple

from gpumesh.client.actor_contacts import Contact, Known, PendingCall
from gpumesh.client.actor_options import CALL_DEFAULTS, CallOptions, make_call_options
from gpumesh.client.actor_shapes import PLAIN, READY, Shape
from gpumesh.client.futures import MeshFuture
from gpumesh.client.inputs import Call, pack_call
from gpumesh.config import INLINE_VALUE_BYTES
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Body
from gpumesh.model.tasks import TaskSpec
from gpumesh.serialization.functions import export_body
from gpumesh.serialization.values import dumps

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpumesh.client.actor_options import CallOptionsGiven
    from gpumesh.client.channel import Channel
    from gpumesh.client.item_streams import ItemStream
    from gpumesh.client.lanes import SpecHandle

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_NO_ARGUMENTS = pickle.dumps(((), {}), 5)
_ACTOR_DIED = int(Status.ACTOR_DIED)
_dumps = pickle.dumps


class ActorMethod:
    """One method of one actor. Made by a handle: `handle.method`."""

    __slots__ = ("_contact", "_name", "_kind", "_options", "_known")

    def __init__(self, contact: Contact, name: str, kind: str, options: CallOptions = CALL_DEFAULTS) -> None:
        self._contact = contact
        self._name = name
        self._kind = kind
        self._options = options
        self._known: Optional[Known] = None

    # --- calling

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; returns a MeshFuture at once, or for a generator method a stream of its values.

        Calls of one program run in the order in which they were made, whatever their arguments are: futures stand for their results,
        references for their values. While as many calls as the actor's `mailbox` allows are pending, this waits, up to `call_timeout`.

        Raises:
            ActorBusyError: There was no room. In a thread that runs an asyncio loop that is said at once.
            SerializationError: An argument cannot travel; the message names the path to the part that cannot.
            ObjectStoreFullError: There is no room for the arguments.
            MeshUnavailableError, MeshClosedError: The connection to the mesh is gone.
        """
        contact = self._contact
        payload = _plain(args, kwargs)
        known = self._known
        if (
            known is None
            or known.channel.end is not None
            or not (known.travel.holds() if payload is None else known.travel.names_the_same())
        ):
            known = self._known = contact.known(self._name, self._kind, self._options)
        spec = known.spec
        if self._kind:
            return self._stream(known, args, kwargs)
        future = MeshFuture(spec)
        if contact.died is not None:
            future.task_ended(0, _ACTOR_DIED, contact.died, 0.0, "")
            return future
        if payload is None:
            payload = pack_call(args, kwargs, what=spec.name, function=None)
        if len(contact.pending) >= contact.shape.mailbox:
            contact.make_room(spec.name)
        call = PendingCall(contact, future)
        contact.pending.add(call)
        try:
            future.task_id = _submit(known, payload, call)
        except BaseException:
            contact.pending.discard(call)
            raise
        return future

    def stream(self, *args: Any, **kwargs: Any) -> ItemStream:
        """Call a generator method; returns a stream of its values at once, `for value in stream`. Else as `remote`.

        The generator is at most some values ahead of who takes them. A stream that is dropped or closed ends it.

        Raises:
            TypeError: It is no generator method.
        """
        if not self._kind:
            raise TypeError(f"{self._title} is no generator, so it has no values to stream; call it with .remote(...)")
        found: ItemStream = self.remote(*args, **kwargs)
        return found

    def _stream(self, known: Known, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> ItemStream:
        from gpumesh.client.item_streams import ItemStream

        contact, spec = self._contact, known.spec
        stream = ItemStream(spec)
        if contact.died is not None:
            stream.sink.task_ended(0, _ACTOR_DIED, contact.died, 0.0, "")
            return stream
        payload = _plain(args, kwargs) or pack_call(args, kwargs, what=spec.name, function=None)
        if len(contact.pending) >= contact.shape.mailbox:
            contact.make_room(spec.name)
        call = PendingCall(contact, stream.sink)
        contact.pending.add(call)
        try:
            stream.submitted(_submit(known, payload, call))
        except BaseException:
            contact.pending.discard(call)
            raise
        return stream

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        way = ".stream(...)" if self._kind else ".remote(...)"
        raise TypeError(f"{self._title} runs in the actor's process; call it with {way}, which returns at once")

    # --- variants

    def options(self, **options: Unpack[CallOptionsGiven]) -> ActorMethod:
        """The same method, called otherwise.

        Args:
            options: timeout: seconds of run time. retries (0): how often a call is run again when the actor has died before it returned;
                without, such a call fails with ActorDiedError. retry_on: exceptions on which it is run again, too; they count among the
                retries. name: for people.

        Raises:
            TypeError, ValueError: As `accelerate`.
        """
        return ActorMethod(self._contact, self._name, self._kind, make_call_options(options, base=self._options))

    @property
    def _title(self) -> str:
        return f"{self._contact.shape.class_name}.{self._name}"

    def __reduce__(self) -> Any:
        return _make_method, (*self._contact.travels_as, self._name, tuple(self._options))

    def __gpumesh_reduce__(self, by_value: bool) -> Any:
        return self.__reduce__()

    def __repr__(self) -> str:
        return f"<method {self._name} of actor {self._contact.shown}>"


def ready_of(contact: Contact) -> MeshFuture:
    """A call that does nothing, when all that were made before it from here have been run."""
    future: MeshFuture = ActorMethod(contact, READY, PLAIN, CallOptions(name=f"{contact.shape.class_name}.ready")).remote()
    return future


def _make_method(actor: int, description: bytes, token: Any, name: str, options: Tuple[Any, ...]) -> ActorMethod:
    from gpumesh.client.actor_contacts import contact_from

    contact = contact_from(actor, description, token)
    return ActorMethod(contact, name, contact.shape.kind_of(name), CallOptions(*options))


def _plain(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """Few small arguments as a payload, in the shortest way: what they are made of is everywhere. None: they are no such arguments."""
    if kwargs or len(args) > 4:
        return None
    if not args:
        return _NO_ARGUMENTS
    if not _SCALARS.issuperset(map(type, args)):
        return None
    payload = _dumps((args, kwargs), 5)
    return payload if len(payload) < INLINE_VALUE_BYTES else Call(payload)


def _submit(known: Known, payload: Any, call: PendingCall) -> int:
    spec, channel = known.spec, known.channel
    if known.session is not None:  # Inside a task, whose this call is.
        task_id: int = known.session.submit(spec, Call(payload) if channel.lines and type(payload) is bytes else payload, call)
        return task_id
    if spec.others is not None:
        spec = spec.others(spec, [payload])
    if channel.lines:
        return channel.submit_in_turn(spec, payload, call)
    return channel.submit(spec, payload, call)


# --- what is told of a method once


def define_call(channel: Channel, actor: int, shape: Shape, method: str, kind: str, options: CallOptions) -> Known:
    """Make calls of a method known. What is made of it is remembered for long, and keeps no actor alive.

    Raises:
        SerializationError: A class of `retry_on` cannot travel.
    """
    session = channel.session
    body: Body = dumps(options.retry_on, what="retry_on") if options.retry_on else b""
    name = options.name or f"{shape.class_name}.{method}"
    exported = export_body(body, name, tuple(sorted({class_.__module__ for class_ in options.retry_on})))
    travel = session.travel(exported, ())
    spec = TaskSpec(
        function=exported.digest,
        name=name,
        timeout=options.timeout or 0.0,
        retries=options.retries,
        placement_timeout=-1.0,
        place=shape.place,
        actor=actor,
        method=method,
        is_stream=bool(kind),
    )
    if travel.cargo is not None:
        spec = spec._replace(code=travel.cargo.digest)
    handle = session.define(exported, spec, travel.cargo)
    if travel.others:
        handle.others = functools.partial(_with_modules_of, channel, travel, (actor, shape, method, kind, options))
    else:
        handle.others = None
    return Known(handle, travel, channel, session if session.is_nested else None)


def _with_modules_of(
    channel: Channel, travel: Any, what: Tuple[int, Shape, str, str, CallOptions], handle: SpecHandle, payloads: List[Any]
) -> SpecHandle:
    """A handle that takes along what arguments are made of, too."""
    names = travel.mentioned_in(payloads)
    return define_call(channel, *what).spec if names and channel.session.ship_modules(names) else handle
