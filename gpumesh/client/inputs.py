"""A call whose arguments are more than a few bytes: large ones, references, results of other tasks. How it is sent is the channel's matter.

pack_call ──> Call ── settle: what is large is stored, results at hand take their places ──> wire form
                        └── a future of another mesh, or of an item not sent yet, is not done ──> later
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

from gpumesh.client.futures import MeshFuture
from gpumesh.client.objects import ObjectSpace, StoredValue
from gpumesh.config import INLINE_VALUE_BYTES, MAX_KEPT_ARGUMENTS_BYTES
from gpumesh.errors import MeshError, MeshUnavailableError
from gpumesh.model.ids import SEQUENCE_BITS
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle, Later, OutOfBand, Stored, payload_bytes
from gpumesh.serialization import refs
from gpumesh.serialization.late import Place
from gpumesh.serialization.refs import ObjectRef
from gpumesh.serialization.values import dumps, dumps_call

MAX_INLINE_INPUTS_BYTES = 4 * INLINE_VALUE_BYTES  # Of one call; further small results go through the object store.

_OK = int(Status.OK)
_APART = frozenset({MeshFuture, ObjectRef})


class Call:
    """The arguments of one call.

    Attributes:
        value: The call as pickled, with None in the place of each input; None once it is stored and not needed any more.
        inputs: (place, where its value comes from): a MeshFuture, an ObjectRef, a StoredValue, or bytes.
        refs: ObjectRefs somewhere inside `value`.
        nbytes: Size of `value`.
        stored: The object that `value` has become.
        renewals: How often its space had been renewed before it became that.
    """

    __slots__ = ("value", "inputs", "refs", "nbytes", "stored", "renewals")

    def __init__(self, value: Any, inputs: Sequence[Tuple[Place, Any]] = (), refs: Sequence[ObjectRef] = ()) -> None:
        self.value = value
        self.inputs = list(inputs)
        self.refs = list(refs)
        self.nbytes = payload_bytes(value)
        self.stored: Optional[ObjectRef] = None
        self.renewals = 0

    # --- getting it ready: this may block, and runs the user's code

    @property
    def is_ready(self) -> bool:
        """Whether `settle` has nothing to do that takes time."""
        if self.stored is None and is_large(self.value):
            return False
        return all(type(source) is not MeshFuture or not _needs_work(source) for _, source in self.inputs)

    def settle(self, space: ObjectSpace, *, keep: bool) -> None:
        """Store what is large, and put the results in that are there.

        Args:
            space: Where it is sent.
            keep: Keep what is needed to do this again at another coordinator. Else the user's arrays are let go of.

        Raises:
            InputError: A future among the inputs has failed.
            ObjectStoreFullError: There is no room.
            MeshError: The mesh is gone.
        """
        size = 0
        for position, (place, source) in enumerate(self.inputs):
            if type(source) is MeshFuture:
                if source.done():
                    source = _result_of(source, space)
            elif type(source) is ObjectRef and source.space is not space:
                source = _moved(source, space)
            if type(source) is bytes:
                size += len(source)
                if size > MAX_INLINE_INPUTS_BYTES:
                    source = StoredValue(space, space.store(source, ()))
            self.inputs[position] = (place, source)
        if self.stored is not None and (self.stored.space is not space or self.is_stale(space)):
            self.unsettle()
        if self.stored is None and is_large(self.value):
            self.renewals = space.renewals
            self.stored = space.store(self.value, self.refs, is_followed=True)
            self.value = _kept(self.value) if keep and self.stored.nbytes <= MAX_KEPT_ARGUMENTS_BYTES else None

    def is_stale(self, space: ObjectSpace) -> bool:
        """Whether the coordinator was lost after its arguments were stored: they are to be stored again."""
        return self.stored is not None and self.renewals != space.renewals

    def unsettle(self) -> None:
        """The coordinator that knew its objects is gone: they are to be stored again.

        Raises:
            MeshUnavailableError: Nothing was kept for that.
        """
        if self.stored is not None and self.value is None:
            raise MeshUnavailableError("the mesh was lost with the arguments of this call; submit it again")
        self.stored = None

    # --- what is missing

    def failure(self) -> Optional[BaseException]:
        """The error of the first input that has failed."""
        for _, source in self.inputs:
            if type(source) is MeshFuture and source.done():
                error = error_of(source)
                if error is not None:
                    return error
        return None

    def missing(self) -> List[MeshFuture]:
        """Inputs that have not ended."""
        return [source for _, source in self.inputs if type(source) is MeshFuture and not source.done()]

    def input_of(self, task_id: int) -> Optional[MeshFuture]:
        """The future of that task among the inputs."""
        for _, source in self.inputs:
            if type(source) is MeshFuture and source.task_id == task_id:
                return source
        return None

    # --- on the wire

    @property
    def waits(self) -> bool:
        """Whether some inputs are results that are not here."""
        return any(type(source) is MeshFuture for _, source in self.inputs)

    def wire(self, client: int) -> Any:
        """The payload to send; None while some input is not known to the coordinator that `client` talks to."""
        mentioned: List[int] = []
        value = self.value
        if self.stored is not None:
            value = Stored(self.stored.oid, self.stored.nbytes)
        else:
            mentioned.extend(ref.oid for ref in self.refs)
        if not self.inputs:
            return Bundle(value, (), tuple(mentioned)) if mentioned else value
        inputs: List[Tuple[Place, Any]] = []
        for place, source in self.inputs:
            if type(source) is MeshFuture:
                if source.task_id >> SEQUENCE_BITS != client:
                    return None
                inputs.append((place, Later(source.task_id)))
            elif type(source) is ObjectRef:
                inputs.append((place, Stored(source.oid, source.nbytes)))
            elif type(source) is StoredValue:
                inputs.append((place, source.wire))
                mentioned.extend(ref.oid for ref in source.refs)
            else:
                inputs.append((place, source))
        return Bundle(value, tuple(inputs), tuple(mentioned))


class InputError(Exception):
    """A future among a call's inputs has failed; `error` is what that call ends with."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def has_parts(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bool:
    """Whether `pack_call` may have more to do than to pickle."""
    return refs.are_used or MeshFuture in map(type, args) or (bool(kwargs) and MeshFuture in map(type, kwargs.values()))


def pack_call(
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
    *,
    what: str,
    function: Optional[Callable[..., Any]],
    captured: Sequence[Callable[[], Optional[ObjectRef]]] = (),
) -> Union[bytes, Call]:
    """The arguments of a call as a payload: bytes if it is a small one without futures and references.

    What is large in it still lies in the user's own arrays: store it before they can change.

    Args:
        what: The function's name in an error message.
        function: Asked for its parameters' names there.
        captured: References that the function itself refers to, weakly; the call keeps them alive, as the function may be gone soon.

    Raises:
        SerializationError: An argument cannot be pickled.
    """
    inputs: List[Tuple[Place, Any]] = []
    value: Any
    if not _APART.isdisjoint(map(type, args)):
        inputs.extend((place, value) for place, value in enumerate(args) if type(value) in _APART)
        args = tuple([None if type(value) in _APART else value for value in args])
    if kwargs and not _APART.isdisjoint(map(type, kwargs.values())):
        inputs.extend((place, value) for place, value in kwargs.items() if type(value) in _APART)
        kwargs = {name: None if type(value) in _APART else value for name, value in kwargs.items()}
    if not refs.are_used:
        value = dumps_call(args, kwargs, what=what, function=function, snapshot=False)
        return Call(value, inputs) if inputs or is_large(value) else value
    with refs.collecting() as collected:
        value = dumps_call(args, kwargs, what=what, function=function, snapshot=False)
    for weak in captured:
        ref = weak()
        if ref is not None:
            collected.setdefault(ref.oid, ref)
    if not inputs and not collected and not is_large(value):
        return value  # type: ignore[no-any-return]
    return Call(value, inputs, list(collected.values()))


def is_large(payload: Any) -> bool:
    """Whether a payload goes through the object store."""
    return len(payload) >= INLINE_VALUE_BYTES if type(payload) is bytes else type(payload) is OutOfBand


def error_of(future: MeshFuture) -> Optional[BaseException]:
    """Why a future that is done has no value; None if it has one, which is not loaded."""
    if not future.has_failed:
        return None
    try:
        return future.exception()
    except MeshError as error:  # It was cancelled.
        return error


def _needs_work(future: MeshFuture) -> bool:
    """Whether its value must be pickled again, or moved from another mesh."""
    return (
        future.done()
        and not future.has_failed
        and type(future.payload) is not bytes
        and type(future.payload) is not StoredValue
    )


def _result_of(future: MeshFuture, space: ObjectSpace) -> Any:
    """The value as it travelled, or pickled again if somebody has asked for it meanwhile."""
    error = error_of(future)
    if error is not None:
        raise InputError(error)
    payload = future.payload
    if type(payload) is bytes or (type(payload) is StoredValue and payload.space is space):
        return payload
    with refs.collecting() as collected:
        payload = dumps(future.result(), what=f"the result of {future.name}", snapshot=False)
    inner = list(collected.values())
    if is_large(payload):
        return StoredValue(space, space.store(payload, inner))
    return StoredValue(space, None, payload, inner) if inner else payload


def _moved(ref: ObjectRef, space: ObjectSpace) -> ObjectRef:
    """A reference that means something in `space`."""
    owner = ref.space
    if owner is None:
        ref.bind(space)
        return ref
    if owner.table.is_foreign:  # Of the process that was forked: the same mesh.
        return ObjectRef(ref.oid, ref.nbytes, space)
    if space.is_nested and owner is refs.process_space():
        return ref  # The same mesh; see `Session.adopt`.
    return space.put(owner.get(ref))


def _kept(payload: Any) -> Any:
    """The same payload, with nothing in it that the user can change."""
    if type(payload) is bytes:
        return payload
    return OutOfBand([part if type(part) is bytes else bytes(part) for part in payload.parts])
