"""Messages to frame bodies and back: msgpack for the body, raw buffers beside it.

A value with large buffers (`OutOfBand`) stands in the body as an extension that holds only the number of its parts; the parts
follow in the frame's buffer table, in the order in which the extensions appear. `Stored` and `Later` are extensions that name a
value which is not here.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Set, Tuple, Type

import msgpack

from gpumesh.errors import ProtocolError
from gpumesh.model.payloads import Later, OutOfBand, Stored
from gpumesh.protocol.frames import MAX_BUFFERS, TRANSFER_ID, TRANSFERRED, Frame
from gpumesh.protocol.messages import MESSAGE_TYPES, TAGS

OUT_OF_BAND = 1  # msgpack extension codes.
STORED = 2
LATER = 3
HANDSHAKE_FIELDS = 16  # The longest array before authentication: the most fields that a handshake message may ever have.

_COUNT = struct.Struct("<H")
_STORED = struct.Struct("<QQ")
_LATER = struct.Struct("<Q")
_CHECKS: Dict[str, Tuple[Type[Any], ...]] = {
    "str": (str,), "bytes": (bytes,), "bool": (bool,), "int": (int,), "float": (float, int), "Any": (object,),
    "List": (tuple, list), "Tuple": (tuple, list), "Dict": (dict,),
}  # fmt: skip
_SHAPES: Dict[Type[Any], Tuple[Tuple[Type[Any], ...], ...]] = {}
_Inside = Callable[[Any], bool]
_INSIDE: Dict[
    Type[Any], Tuple[Tuple[int, _Inside], ...]
] = {}  # Which fields are arrays of something, and whether all of one is that.
_CHECKED_LATER = ("SubmitTasks", "TasksFinished")  # By the coordinator, which looks at each of their many items anyway.
# Types of fields that were found right for a message, by the message: a look takes a tenth of the check. Few, as msgpack has few types.
_RIGHT: Dict[Type[Any], Set[Tuple[Type[Any], ...]]] = {}
_new = tuple.__new__

# A few bytes can announce arrays within arrays, and msgpack allocates what is announced: 4 KiB would cost 30 MiB.
_unpack_stranger = partial(msgpack.unpackb, max_array_len=HANDSHAKE_FIELDS, max_map_len=0, max_ext_len=0)


class UnknownTag(Exception):
    """A frame whose tag this version does not know; `tag` says which."""

    def __init__(self, tag: int) -> None:
        super().__init__(tag)
        self.tag = tag


class Encoder:
    """Messages to bodies; keeps one packer. Not for use by two threads at once."""

    __slots__ = ("_packer", "_buffers")

    def __init__(self) -> None:
        self._buffers: List[Any] = []
        self._packer = msgpack.Packer(default=self._default)

    def encode(self, message: Any) -> Tuple[int, bytes, List[Any]]:
        """(tag, body, raw buffers).

        Raises:
            ProtocolError: The message cannot be put on the wire; a defect of the sender.
        """
        try:
            body: bytes = self._packer.pack(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            self._packer = msgpack.Packer(default=self._default)
            self._buffers = []
            raise ProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error
        buffers = self._buffers
        if buffers:
            self._buffers = []
        return TAGS[type(message)], body, buffers

    def _default(self, value: Any) -> Any:
        if type(value) is OutOfBand:
            if not value.parts:
                raise ValueError("a value without parts")
            self._buffers.extend(value.parts)
            if len(self._buffers) > MAX_BUFFERS:
                raise ValueError(f"more than {MAX_BUFFERS} large buffers in one message; put them into fewer arrays")
            return msgpack.ExtType(OUT_OF_BAND, _COUNT.pack(len(value.parts)))
        try:
            if type(value) is Stored:
                return msgpack.ExtType(STORED, _STORED.pack(value.oid, value.nbytes))
            if type(value) is Later:
                return msgpack.ExtType(LATER, _LATER.pack(value.task_id))
        except struct.error as error:
            raise ValueError(f"{value} is out of range: {error}") from None
        raise TypeError(f"{type(value).__name__} is not plain data")


def decode(frame: Frame, transferred: Callable[[int, int], List[Any]]) -> Any:
    """The message in a frame.

    Args:
        transferred: (transfer id, number of buffers) -> the buffers that came before as chunks.

    Raises:
        ProtocolError: Not a message.
        UnknownTag: A message of a newer version.
    """
    kind, flags, count, data = frame
    cls = MESSAGE_TYPES.get(kind)
    if cls is None:
        raise UnknownTag(kind)
    if count == 0 and flags == 0:
        try:
            fields = _unpack_plain(data)
        except _NOT_MSGPACK as error:
            raise _not_msgpack(error) from None
        if type(fields) is tuple and cls in _RIGHT and tuple(map(type, fields)) in _RIGHT[cls]:
            if cls in _INSIDE:
                _look_inside(cls, fields)
            return _new(cls, fields)  # As `build` would.
    else:
        buffers, body = _split(data, flags, count, transferred)
        hook = _Hook(buffers)
        fields = _unpack(body, hook)
        if not hook.is_done:
            raise ProtocolError("a frame has buffers that its body does not refer to")
    return build(cls, fields)


def decode_handshake(frame: Frame) -> Any:
    """The handshake message in a frame from someone who has proved nothing: no buffers, and no containers worth naming.

    Raises:
        ProtocolError: Not a handshake message.
    """
    cls = MESSAGE_TYPES[frame.kind]
    if frame.flags or frame.buffers:
        raise ProtocolError(f"{cls.__name__} has no buffers")
    return build(cls, _unpack(frame.data, _no_buffers, _unpack_stranger))


def build(cls: Type[Any], fields: Any) -> Any:
    """A message from its unpacked fields, checked for shape.

    Raises:
        ProtocolError: Too few fields, or one of the wrong type.
    """
    if type(fields) is not tuple:
        raise ProtocolError(f"the body of {cls.__name__} is not an array")
    shape = _SHAPES.get(cls)
    if shape is None:
        hints = _hints(cls)
        inside = tuple((place, check) for place, check in enumerate(map(_inside_of, hints)) if check is not None)
        if inside and cls.__name__ not in _CHECKED_LATER:
            _INSIDE[cls] = inside
        shape = _SHAPES[cls] = tuple(_CHECKS[hint.partition("[")[0]] for hint in hints)
        _RIGHT[cls] = set()
    if len(fields) != len(shape):
        if len(fields) < len(shape) - len(cls._field_defaults):
            raise ProtocolError(f"{cls.__name__} has {len(shape)} fields, not {len(fields)}")
        fields = fields[: len(shape)]
    for value, allowed in zip(fields, shape):
        if not isinstance(value, allowed):
            raise ProtocolError(f"{cls.__name__} holds a {type(value).__name__} where {allowed[0].__name__} belongs")
    if cls in _INSIDE:
        _look_inside(cls, fields)
    if len(fields) == len(shape):
        _RIGHT[cls].add(tuple(map(type, fields)))
    return cls(*fields)


def _look_inside(cls: Type[Any], fields: Tuple[Any, ...]) -> None:
    for place, is_right in _INSIDE[cls]:
        if place < len(fields) and not is_right(fields[place]):
            raise ProtocolError(f"{cls.__name__} holds something else than {_hints(cls)[place]} as its {cls._fields[place]}")


def _inside_of(hint: str) -> Optional[_Inside]:
    """What tells whether all that is in an array of this kind belongs there; None: anything does."""
    kind, _, inner = hint.partition("[")
    inner = inner[:-1]
    if kind == "Dict":
        return _keyed_by(_CHECKS[inner.partition(",")[0]])
    item = inner if kind == "List" else inner[: -len(", ...")] if kind == "Tuple" and inner.endswith(", ...") else "Any"
    if item == "Any":
        return None
    if item.startswith("Tuple["):
        return _rows_of(tuple(_CHECKS[each.strip()] for each in item[len("Tuple[") : -1].split(",")))
    return _all_of(_CHECKS[item])


def _all_of(allowed: Tuple[Type[Any], ...]) -> _Inside:
    types = frozenset(allowed)
    return lambda items: types.issuperset(map(type, items))


def _keyed_by(allowed: Tuple[Type[Any], ...]) -> _Inside:
    types = frozenset(allowed)
    return lambda mapping: types.issuperset(map(type, mapping))


def _rows_of(columns: Tuple[Tuple[Type[Any], ...], ...]) -> _Inside:
    known: Set[Tuple[Type[Any], ...]] = set()  # Types of rows that were found right; few.

    def is_right(rows: Any) -> bool:
        for row in rows:
            if type(row) is not tuple:
                return False
            types = tuple(map(type, row))
            if types in known:
                continue
            # Of a number only a number itself: True is none.
            if len(row) != len(columns) or not all(
                object in allowed or kind in allowed for kind, allowed in zip(types, columns)
            ):
                return False
            known.add(types)
        return True

    return is_right


def _hints(cls: Type[Any]) -> List[str]:
    # On Python 3.9 to 3.13 a NamedTuple under postponed annotations keeps ForwardRef or str; on 3.9 one without fields has none.
    return [str(getattr(hint, "__forward_arg__", hint)) for hint in getattr(cls, "__annotations__", {}).values()]


def _unpack(body: Any, hook: Callable[[int, bytes], Any], unpack: Callable[..., Any] = msgpack.unpackb) -> Any:
    try:
        return unpack(body, use_list=False, ext_hook=hook, strict_map_key=False)
    except _NOT_MSGPACK as error:
        raise _not_msgpack(error) from None


_NOT_MSGPACK = (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError)


def _not_msgpack(error: BaseException) -> ProtocolError:
    return ProtocolError(f"the body of a frame is not msgpack: {error}")


def _no_buffers(code: int, data: bytes) -> Any:
    raise ProtocolError("a frame refers to buffers that it does not have")


def _name(code: int, data: bytes) -> Any:
    """A value that is elsewhere."""
    if code == STORED and len(data) == _STORED.size:
        return Stored(*_STORED.unpack(data))
    if code == LATER and len(data) == _LATER.size:
        return Later(*_LATER.unpack(data))
    if code == OUT_OF_BAND:
        _no_buffers(code, data)
    raise ProtocolError(f"a frame holds an unknown extension {code}")


_unpack_plain = partial(msgpack.unpackb, use_list=False, ext_hook=_name, strict_map_key=False)


class _Hook:
    __slots__ = ("_buffers", "_next")

    def __init__(self, buffers: List[Any]) -> None:
        self._buffers = buffers
        self._next = 0

    @property
    def is_done(self) -> bool:
        """Whether every buffer has found its value."""
        return self._next == len(self._buffers)

    def __call__(self, code: int, data: bytes) -> Any:
        if code != OUT_OF_BAND:
            return _name(code, data)
        if len(data) != _COUNT.size:
            raise ProtocolError(f"a frame holds an unknown extension {code}")
        count = _COUNT.unpack(data)[0]
        parts = self._buffers[self._next : self._next + count]
        if len(parts) != count or count == 0:
            _no_buffers(code, data)
        self._next += count
        return OutOfBand(parts)


def _split(
    data: memoryview, flags: int, count: int, transferred: Callable[[int, int], List[Any]]
) -> Tuple[List[Any], memoryview]:
    if flags not in (0, TRANSFERRED):
        raise ProtocolError(f"a frame has the unknown flags {flags:#x}")
    if flags == TRANSFERRED:
        if count == 0:
            raise ProtocolError("the end of a transfer has no buffers")
        if len(data) < TRANSFER_ID.size:
            raise ProtocolError("the end of a transfer has no transfer id")
        return transferred(TRANSFER_ID.unpack_from(data)[0], count), data[TRANSFER_ID.size :]
    if len(data) < 4 * count:
        raise ProtocolError("a frame is shorter than its buffer table")
    sizes = struct.unpack_from(f"<{count}I", data)
    position = len(data) - sum(sizes)
    if position < 4 * count:
        raise ProtocolError("the buffers of a frame are larger than the frame")
    body = data[4 * count : position]
    buffers: List[Any] = []
    for size in sizes:
        # A private, writable copy: arrays built on it can be changed in place.
        buffers.append(bytearray(data[position : position + size]))
        position += size
    return buffers, body
