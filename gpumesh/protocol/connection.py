"""One side of one mesh connection, without a socket: bytes and time in, events and bytes out.

    dialer                                listener
    PREAMBLE  ── preamble, Hello ──────>  PREAMBLE
    PREAMBLE  <─ preamble, Challenge ───  HELLO
    CHALLENGE ── Proof ────────────────>  PROOF
    WELCOME   <─ Welcome (with proof) ──  OPEN
    OPEN
                    any state ── Refused, Goodbye, silence, an error ──> CLOSED

Promises:

1. Before OPEN only the five handshake messages are decoded, in frames of at most 4 KiB, and nothing is unpickled. A listener
   opens only for who has proved one of its secrets, and `grant` then says what that one allows.
2. The last event is always Closed, once; `error` then says why.
3. Messages on the control lane leave before any chunk that has not left yet. Definitions precede what refers to them, and what
   lets go of an object follows what was sent before it, whichever lane they take. What arrives is the same however the bytes
   were cut on the way.
4. `next_deadline` is the only clock: a handshake, a heartbeat or a silence that is due is handled by `on_time`, and a side that
   was itself stopped for a while does not blame the other for it.
5. An object is sent only to who asked for it, never more of it than the receiver has given credit for, and received only into
   the memory that was made ready for it. Each FetchObject is answered once: by ObjectSent (also when it was cancelled) or ObjectAt.

    receiver                                sender
    receive_into, FetchObject ───────────>  FetchObject ── send_object, or ObjectAt instead
              <──────── chunks ───────────
    (credit)  ───── TransferCredit ──────>
    ObjectSent <──── the last chunk ──────
    (credit)  ───── TransferCredit ──────>  ObjectDelivered
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Sequence, Set, Tuple, Type

from gpumesh.config import (
    BULK_MESSAGE_BYTES,
    CHUNK_BYTES,
    CONTROL_FRAME_BYTES,
    FETCH_WINDOW_BYTES,
    HANDSHAKE_SECONDS,
    HEARTBEAT_SECONDS,
    INLINE_BUFFER_BYTES,
    MIB,
    PROTOCOL_VERSION,
    SILENCE_SECONDS,
    TRANSFER_BYTES,
)
from gpumesh.errors import (
    AuthenticationError,
    MeshError,
    MeshUnavailableError,
    ProtocolError,
    VersionMismatchError,
)
from gpumesh.model.payloads import OutOfBand, payload_bytes
from gpumesh.model.records import NamedTuple
from gpumesh.model.shown import clean, clean_line
from gpumesh.protocol import auth, codec, frames, strangers
from gpumesh.protocol.messages import (
    PREAUTH_TAGS,
    TAGS,
    CancelFetch,
    CancelTasks,
    Challenge,
    DefineCode,
    DefineFunction,
    DefineSpec,
    DeleteObjects,
    FetchObject,
    FreeObjects,
    Goodbye,
    Hello,
    HoldRefs,
    JobPayloads,
    ObjectAt,
    ObjectSent,
    Ping,
    Pong,
    Proof,
    RecallTasks,
    Refused,
    ReleaseRefs,
    RunTasks,
    SegmentsGone,
    SubmitJob,
    SubmitTasks,
    TaskResults,
    TasksFinished,
    TransferCredit,
    UnknownMessage,
    UnpinObjects,
    Welcome,
)

MAX_OPEN_TRANSFERS = 64  # Begun and not ended, from one peer; this side itself never has more than one.
BESIDE_BYTES = 4096  # In a message over BULK_MESSAGE_BYTES, the inputs of a large call travel as buffers from this size on.
UNFILLED_BYTES = 32 * MIB  # Memory held for chunks that have not come yet; a larger value grows as it arrives.

MAX_WINDOW_BYTES = 32 * MIB  # Of one object: 300 MB/s at a round trip of 100 ms.
SHORT_WINDOW_BYTES = 512 * 1024  # Left to each object when many share the link.
STALL_SECONDS = 0.002  # Where any credit works sooner than this, silence is a process waiting for a processor.
STALL_FRACTION = 0.25  # Of the time that some windows took: waiting longer for credit, the window doubles.
ROUND_SECONDS = 0.05  # Looked at at least: two processes that take turns on one processor are no long way.
OBJECT_CHUNK_BYTES = 256 * 1024  # Of an object: what one process writes while the other reads stays in the processor's cache.
SAID_CHARACTERS = 1000  # Of the reason that a peer gives for leaving or refusing; it ends up in logs and terminals.
OBJECT_TRANSFER = 1 << 31  # Set in the number of every transfer that answers a FetchObject, in no other.

TLS = "tls"  # Reason of Refused: this mesh speaks TLS with such a peer, and nothing else.
LATER = "later"  # This address has failed too often; it may come again in a while.
BUSY = "busy"  # There are too many.
UNAVAILABLE = (TLS, LATER, BUSY)
LOOKED = "looked"  # The dialer only wanted to see who is there; nothing to complain about.

NOT_KNOWN = "the token was refused; `gpumesh token` on the machine that serves shows the right one"
NOT_A_CLIENT = (
    "this token lends a machine and nothing else; submitting work and looking at the mesh need the full token, "
    "which `gpumesh token` shows on the machine that serves"
)

_NEVER = float("inf")
_ZEROS = bytes(CHUNK_BYTES)
_DEFINITIONS = (DefineFunction, DefineCode, DefineSpec, SubmitJob)
_AFTER_DEFINITIONS = (*_DEFINITIONS, SubmitTasks, RunTasks, JobPayloads)
_LETTING_GO = (UnpinObjects, ReleaseRefs, DeleteObjects)
_HANDLED_HERE = frozenset(
    (
        Hello,
        Challenge,
        Proof,
        Welcome,
        Refused,
        Ping,
        Pong,
        Goodbye,
        FetchObject,
        ObjectAt,
        ObjectSent,
        TransferCredit,
        CancelFetch,
    )
)
_OBJECT_AT = TAGS[ObjectAt]
_LISTS = {
    CancelTasks: "task_ids", RunTasks: "tasks", RecallTasks: "tasks", TasksFinished: "results", TaskResults: "results",
    UnpinObjects: "objects", ReleaseRefs: "objects", HoldRefs: "oids", DeleteObjects: "oids", FreeObjects: "oids",
    SegmentsGone: "names",
}  # fmt: skip
_PAYLOAD_PLACES = {RunTasks: ("tasks", 2), TaskResults: ("results", 2), TasksFinished: ("results", 3)}
_HTTP_ANSWER = (
    b"HTTP/1.1 426 Upgrade Required\r\nContent-Type: text/plain\r\nConnection: close\r\nUpgrade: gpumesh\r\n\r\n"
    b"This port is a gpumesh coordinator; connect with GPUMesh(...) or `gpumesh join`.\n"
)


class PeerFacts(NamedTuple):
    """What a side says about itself in the handshake."""

    gpumesh: str
    python: str
    platform: str


class Established(NamedTuple):
    """Event: both sides have proved that they know the token."""

    role: str  # Of the dialer: "client" or "worker".
    mesh: str  # The coordinator's id.
    workers: int  # As Welcome says.
    peer: PeerFacts


class Closed(NamedTuple):
    """Event, the last one: the connection is over. Without an error the peer left on purpose."""

    error: Optional[MeshError]
    reason: str


class ObjectDelivered(NamedTuple):
    """Event at the sender of an object: the receiver has all of it. Nothing here refers to the memory it came from any more."""

    number: int


class State(enum.Enum):
    """Where a connection stands; see the drawing above."""

    PREAMBLE = enum.auto()
    HELLO = enum.auto()
    CHALLENGE = enum.auto()
    PROOF = enum.auto()
    WELCOME = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


_HEADER = frames.HEADER.pack
_OPEN = State.OPEN  # Looked up for every message; a member of an enum is slow to find.
_CLOSED = State.CLOSED


class _Transfer:
    """One message on the bulk lane."""

    __slots__ = ("tag", "body", "buffers", "number", "index", "offset", "is_definition")

    def __init__(self, number: int, tag: int, body: bytes, buffers: List[memoryview], *, is_definition: bool) -> None:
        self.number = number
        self.tag = tag
        self.body = body
        self.buffers = buffers
        self.index = 0
        self.offset = 0
        self.is_definition = is_definition


class _Incoming:
    """One buffer of a transfer under way."""

    __slots__ = ("data", "total", "filled")

    def __init__(self, data: bytearray, total: int) -> None:
        self.data = data  # At least `filled` bytes long.
        self.total = total
        self.filled = 0  # Bytes that have come or whose chunk is coming in now.


class _Outgoing:
    """One object being sent."""

    __slots__ = ("number", "views", "offset", "total", "credit", "credited")

    def __init__(self, number: int, views: Deque[memoryview], window: int) -> None:
        self.number = number
        self.views = views  # What has not left, in order.
        self.offset = 0  # Bytes that have left.
        self.total = sum(map(len, views))
        self.credit = window  # Bytes that may leave.
        self.credited = 0  # All credit that came after the window; the whole object only when the receiver has all of it.

    def take(self, size: int) -> List[memoryview]:
        """The next `size` bytes."""
        self.offset += size
        self.credit -= size
        views = self.views
        taken: List[memoryview] = []
        while size:
            view = views[0]
            if len(view) <= size:
                taken.append(views.popleft())
                size -= len(view)
            else:
                taken.append(view[:size])
                views[0] = view[size:]
                size = 0
        return taken


class _Target:
    """Where one object goes that this side has asked for."""

    __slots__ = (
        "view",
        "total",
        "is_begun",
        "filled",
        "window",
        "limit",
        "credited",
        "edges",
        "stalled_seconds",
        "quickest_seconds",
        "round_start",
        "round_offset",
    )

    def __init__(self, view: memoryview, window: int) -> None:
        self.view: Optional[memoryview] = view  # None once forgotten.
        self.total = len(view)
        self.is_begun = False
        self.filled = 0  # Bytes that have come or whose chunk is coming in now.
        self.window = window  # Bytes that should be under way. It grows on a link with long round trips.
        self.limit = window  # Bytes that the sender may have sent.
        self.credited = 0  # What was added to the first window.
        self.edges: Deque[Tuple[int, float]] = deque()  # Limits of the past, and when credit moved them.
        self.stalled_seconds = 0.0  # The link was silent, since `round_start`, while this object's credit was on its way.
        self.quickest_seconds = _NEVER  # From credit to what it let come, since then.
        self.round_start = 0.0
        self.round_offset = 0


class Connection:
    """One side of a mesh connection; see the module's promises. Not for use by two threads at once."""

    def __init__(
        self, *, is_dialer: bool, role: str, token: str, nonce: bytes, mesh: str, now: float, facts: PeerFacts, binding: bytes
    ) -> None:
        assert len(nonce) == auth.NONCE_BYTES
        self.state = State.PREAMBLE
        self.error: Optional[MeshError] = None
        self.role = role
        self.mesh = mesh
        self.grant = ""  # Of a listener, once open: what the dialer's secret allows, `auth.FULL` or `auth.WORKER`.
        self.turned_away: Optional[Tuple[str, str]] = None  # Of a listener: nobody gets in here; the reason and text to tell.
        self.has_failed_proof = False  # Of a listener: the dialer does not know any of its secrets.
        self.workers = 0  # Told in Welcome; the listener's shell keeps it current until then.
        self.bytes_waiting = 0  # On the control lane.
        self.bulk_bytes_waiting = 0  # Raw bytes on the bulk lane.
        self.is_patient = False  # Silence says nothing of this peer: somebody else tells of its death.
        self._is_dialer = is_dialer
        self._token = token
        self._tokens: Sequence[Tuple[str, str]] = ()  # Of a listener: secrets, and what each grants.
        self._nonce = nonce
        self._facts = facts
        self._peer = PeerFacts("", "", "")
        self.binding = binding  # What both sides have seen of the channel, once this is established.
        self._hands_over = False
        self._hello = b""
        self._challenge = b""
        self._decoder = frames.FrameDecoder(stepwise=True)
        self._encoder = codec.Encoder()
        self._control: List[Any] = []
        self._bulk: Deque[_Transfer] = deque()
        self._definitions_in_bulk = 0
        self._next_transfer = 0
        self._incoming: Dict[int, Dict[int, _Incoming]] = {}  # Transfer number -> buffer index -> buffer.
        self._incoming_bytes = 0  # Sum of their totals.
        self._unfilled_bytes = 0  # Allocated among them and not filled.
        self._fetches: Set[int] = set()  # FetchObjects of the peer that have no answer yet.
        self._outgoing: Dict[
            int, _Outgoing
        ] = {}  # Those being answered, and those whose last bytes the peer has not confirmed.
        self._ready: Deque[_Outgoing] = deque()  # Those of them of which something may leave now; the next one first.
        self._is_turn_of_objects = False
        self._targets: Dict[int, _Target] = {}
        self._scratch = bytearray()  # Takes in what nobody wants any more.
        self._silent_seconds = 0.0  # Between the last two reads.
        self._window_bytes = 0  # As far as windows have grown.
        self._last_received = now
        self._deadline = now + HANDSHAKE_SECONDS
        self._ping_number = 0

    @classmethod
    def dial(
        cls,
        *,
        role: str,
        token: str,
        nonce: bytes,
        now: float,
        facts: PeerFacts,
        binding: bytes = b"",
        hands_over: bool = False,
    ) -> Connection:
        """The side that opened the socket. Its preamble and Hello wait in `data_to_send` at once.

        Args:
            hands_over: It is for somebody else, who goes on as `relayed`: what comes behind the handshake is left as it is; see
                `take_rest`.
        """
        self = cls(is_dialer=True, role=role, token=token, nonce=nonce, mesh="", now=now, facts=facts, binding=binding)
        self._hands_over = hands_over
        self._queue([frames.PREAMBLE])
        self._hello = self._send_handshake(Hello(role, nonce, facts.gpumesh, facts.python, facts.platform))
        return self

    @classmethod
    def listen(
        cls,
        *,
        token: str = "",
        tokens: Sequence[Tuple[str, str]] = (),
        nonce: bytes,
        mesh: str,
        now: float,
        facts: PeerFacts,
        binding: bytes = b"",
    ) -> Connection:
        """The side that accepted the socket; says nothing until the dialer's preamble is there.

        Args:
            token: The one secret, which allows everything.
            tokens: Instead of it: secrets, each with what it grants, `auth.FULL` or `auth.WORKER`.
            binding: What both sides must see of the channel: the hash of this side's TLS certificate, nothing without TLS.

        Raises:
            ValueError: A secret is empty: anybody would know it.
        """
        secrets = tuple(tokens) or ((token, auth.FULL),)
        if not all(secret for secret, _ in secrets):
            raise ValueError("a mesh needs a token that is not empty")
        self = cls(is_dialer=False, role="", token="", nonce=nonce, mesh=mesh, now=now, facts=facts, binding=binding)
        self._tokens = secrets
        return self

    @classmethod
    def trusted(cls) -> Connection:
        """Either side of a socket pair between an agent and its own runner: open at once, no handshake, no heartbeat."""
        nobody = PeerFacts("", "", "")
        nonce = bytes(auth.NONCE_BYTES)
        self = cls(is_dialer=False, role="runner", token="", nonce=nonce, mesh="", now=0.0, facts=nobody, binding=b"")
        self._decoder = frames.FrameDecoder()
        self._open(0.0)
        self._deadline = _NEVER
        return self

    @classmethod
    def relayed(cls, *, role: str, mesh: str, workers: int, now: float, facts: PeerFacts) -> Connection:
        """The dialing side of a connection on which somebody else has shaken hands: open at once, and it goes on as any other."""
        nonce = bytes(auth.NONCE_BYTES)
        self = cls(is_dialer=True, role=role, token="", nonce=nonce, mesh=mesh, now=now, facts=facts, binding=b"")
        self.workers = workers
        self._decoder = frames.FrameDecoder()
        self._open(now)
        return self

    @property
    def established(self) -> bool:
        """Whether messages can be sent."""
        return self.state is State.OPEN

    @property
    def has_bulk(self) -> bool:
        """Whether chunks wait that may leave now."""
        return bool(self._bulk or self._ready)

    @property
    def has_bulk_messages(self) -> bool:
        """Whether messages wait on the bulk lane."""
        return bool(self._bulk)

    @property
    def has_data(self) -> bool:
        """Whether anything waits that may be sent now."""
        return bool(self._control or self._bulk or self._ready)

    @property
    def sending(self) -> int:
        """Objects being sent, or sent and not yet confirmed."""
        return len(self._outgoing)

    @property
    def has_object_transfers(self) -> bool:
        """Whether any object is under way, in either direction."""
        return bool(self._outgoing or self._targets)

    # --- receiving

    def get_buffer(self) -> memoryview:
        """Where the shell receives next. Void after the next call."""
        return self._decoder.get_buffer()

    def buffer_updated(self, count: int, now: float) -> List[Any]:
        """`count` bytes arrived in the last `get_buffer()`; what follows from them, in order."""
        if self.state is _CLOSED:
            return []
        if self._targets:
            self._silent_seconds = now - self._last_received
        self._last_received = now
        received = self._decoder.buffer_updated(count)
        if self.state is _OPEN:
            return self._messages(received)
        try:
            events = self._handshake(now)
        except ProtocolError as error:
            return self._fail(error, tell="protocol")
        if self.established and not self._hands_over:
            events.extend(self._messages(self._decoder.parse_rest()))
        return events

    def take_rest(self) -> bytes:
        """Of one that hands over: what has come behind the handshake. The first bytes for who goes on."""
        return self._decoder.peek()

    def receive_data(self, data: Any, now: float) -> List[Any]:
        """The same for bytes at hand."""
        events: List[Any] = []
        view = memoryview(data)
        while len(view) and self.state is not State.CLOSED:
            target = self.get_buffer()
            count = min(len(target), len(view))
            target[:count] = view[:count]
            view = view[count:]
            events.extend(self.buffer_updated(count, now))
        return events

    def receive_eof(self, now: float) -> List[Any]:
        """The peer closed its side, or the socket broke."""
        if self.state is State.CLOSED:
            return []
        if self.state is State.OPEN:
            return self._fail(MeshUnavailableError("the connection was lost"))
        waiting = self._decoder.peek() if self.state is State.PREAMBLE else b""
        if waiting and not frames.PREAMBLE.startswith(waiting[: len(frames.PREAMBLE)]):
            return self._fail(self._not_a_mesh(waiting))
        return self._fail(ProtocolError(strangers.HUNG_UP))

    def _messages(self, received: List[frames.Frame]) -> List[Any]:
        events: List[Any] = []
        failure = self._decoder.failure
        for frame in received:
            try:
                message = codec.decode(frame, self._take_transfer)
            except codec.UnknownTag as unknown:
                self._drop_transfer(frame)
                self.send(UnknownMessage(unknown.tag))
                continue
            except ProtocolError as error:
                failure = error
                break
            kind = type(message)
            if kind not in _HANDLED_HERE:
                events.append(message)
            elif kind is Goodbye:
                return events + self._end(clean_line(message.reason, SAID_CHARACTERS))
            elif kind is Refused:
                return events + self._fail(_refusal(message))
            elif frame.kind in PREAUTH_TAGS:
                failure = ProtocolError(f"{kind.__name__} has no place after the handshake")
                break
            else:
                try:
                    events.extend(self._handle(kind, message))
                except ProtocolError as error:
                    failure = error
                    break
        if failure is not None:
            events.extend(self._fail(failure, tell="protocol"))
        return events

    def _handle(self, kind: Type[Any], message: Any) -> List[Any]:
        """What this side does by itself; what its owner hears of it."""
        if kind is Ping:
            self.send(Pong(message.number))
        elif kind is FetchObject:
            return self._on_fetch(message)
        elif kind is ObjectSent:
            return self._on_sent(message)
        elif kind is ObjectAt:
            target = self._targets.pop(message.number, None)
            if target is None or self._forget_rest(message.number, target):
                return [message]
        elif kind is TransferCredit:
            return self._on_credit(message)
        elif kind is CancelFetch:
            return self._on_cancel(message)
        return []

    # --- handshake

    def _handshake(self, now: float) -> List[Any]:
        if self.state is State.PREAMBLE:
            preamble = self._take_preamble()
            if preamble is None:
                return []
            version = int.from_bytes(preamble[6:], "little")
            if version != PROTOCOL_VERSION:
                if not self._is_dialer:
                    self._queue([frames.PREAMBLE])
                return self._fail(strangers.other_version(version, PROTOCOL_VERSION, self._facts.gpumesh))
            if self._is_dialer:
                self.state = State.CHALLENGE
            else:
                self._queue([frames.PREAMBLE])
                self.state = State.HELLO
                if self.turned_away is not None:
                    reason, text = self.turned_away
                    return self._fail(MeshUnavailableError(text), tell=reason)
        events: List[Any] = []
        # One frame at a time: what comes behind Welcome or Proof is held to the limits of an open connection, not to these.
        while self.state is not State.OPEN and self.state is not State.CLOSED:
            frame = self._decoder.next_frame()
            if frame is None:
                if self._decoder.failure is not None:
                    raise self._decoder.failure
                break
            events.extend(self._handshake_frame(frame, now))
        return events

    def _not_a_mesh(self, waiting: bytes) -> ProtocolError:
        return strangers.not_a_mesh(waiting, is_calling=not self._is_dialer)

    def _take_preamble(self) -> Optional[bytes]:
        waiting = self._decoder.peek()
        if waiting[: len(frames.MAGIC)] != frames.MAGIC[: len(waiting)]:
            # A person waits for who it is; nobody waits for who calls without saying so.
            if len(waiting) < strangers.ENOUGH_BYTES and (self._is_dialer or strangers.may_become_known(waiting)):
                return None
            if not self._is_dialer and waiting[:4] in strangers.HTTP_VERBS:
                self._queue([_HTTP_ANSWER])
            raise self._not_a_mesh(waiting)
        return self._decoder.take(frames.PREAMBLE_BYTES)

    def _handshake_frame(self, frame: frames.Frame, now: float) -> List[Any]:
        if frame.kind not in PREAUTH_TAGS:
            raise ProtocolError(f"a frame of kind {frame.kind:#x} has no place before authentication")
        message = codec.decode_handshake(frame)
        kind = type(message)
        if kind is Refused and message.reason == LOOKED and self.state is State.PROOF:
            return self._end(LOOKED)
        if kind is Refused:
            return self._fail(_refusal(message))
        if self._is_dialer and kind is Challenge and self.state is State.CHALLENGE:
            self._challenge = bytes(frame.data)
            self.mesh = message.mesh
            self._peer = PeerFacts(message.gpumesh, message.python, "")
            self._send_handshake(Proof(self._proof(auth.DIALER_LABEL)))
            self.state = State.WELCOME
            return []
        if self._is_dialer and kind is Welcome and self.state is State.WELCOME:
            if not auth.proofs_match(message.proof, self._proof(auth.LISTENER_LABEL)):
                return self._fail(
                    AuthenticationError("the coordinator could not prove that it knows the token; check the address"),
                    tell="authentication",
                )
            self.workers = message.workers
            return [self._open(now)]
        if not self._is_dialer and kind is Hello and self.state is State.HELLO:
            return self._on_hello(message, frame)
        if not self._is_dialer and kind is Proof and self.state is State.PROOF:
            problem = self._why_not(message.proof)
            if problem:
                return self._fail(AuthenticationError(problem), tell="authentication")
            self._send_handshake(Welcome(self._proof(auth.LISTENER_LABEL), self.workers))
            return [self._open(now)]
        raise ProtocolError(f"{kind.__name__} has no place in this state of the handshake")

    def _on_hello(self, hello: Hello, frame: frames.Frame) -> List[Any]:
        if hello.role not in ("client", "worker") or len(hello.nonce) != auth.NONCE_BYTES:
            raise ProtocolError(f"Hello has the role {hello.role[:20]!r} and a nonce of {len(hello.nonce)} bytes")
        self.role = hello.role
        self._peer = PeerFacts(hello.gpumesh, hello.python, hello.platform)
        self._hello = bytes(frame.data)
        self._challenge = self._send_handshake(Challenge(self._nonce, self.mesh, self._facts.gpumesh, self._facts.python))
        self.state = State.PROOF
        return []

    def _why_not(self, proof: bytes) -> str:
        """Empty: the dialer has proved one of the secrets, which goes on as ours, and may be here with it in its role."""
        grants = ""
        for secret, grant in self._tokens:  # All of them, whichever it is: how long it takes says nothing.
            if auth.proofs_match(proof, auth.make_proof(auth.DIALER_LABEL, secret, self._hello, self._challenge, self.binding)):
                self._token, grants = secret, grant
        if not grants:
            self.has_failed_proof = True
            return NOT_KNOWN
        if grants != auth.FULL and self.role != "worker":
            return NOT_A_CLIENT
        self.grant = grants
        return ""

    def _open(self, now: float) -> Established:
        self.state = State.OPEN
        self._decoder.limit = CONTROL_FRAME_BYTES + BULK_MESSAGE_BYTES + CHUNK_BYTES
        self._decoder.chunk_target = self._chunk_target
        self._deadline = now + HEARTBEAT_SECONDS
        self._token, self._tokens = "", ()
        return Established(self.role, self.mesh, self.workers, self._peer)

    def _proof(self, label: bytes) -> bytes:
        return auth.make_proof(label, self._token, self._hello, self._challenge, self.binding)

    def _send_handshake(self, message: Any) -> bytes:
        tag, body, _ = self._encoder.encode(message)
        self._queue(frames.encode_frame(tag, body))
        return body

    # --- sending

    def send(self, message: Any) -> None:
        """Queue a message; call `data_to_send` afterwards, once for many. Ignored once closed.

        Raises:
            ProtocolError: It cannot be put on the wire (not plain data, or one item over the limit).
        """
        if self.state is _CLOSED:
            return
        assert self.state is _OPEN, f"{type(message).__name__} sent in state {self.state.name}"
        tag, body, buffers = self._encoder.encode(message)
        if tag == _OBJECT_AT:
            self._fetches.discard(message.number)
        if len(body) > BULK_MESSAGE_BYTES:
            lighter = _with_large_payloads_beside(message)
            if lighter is message and len(body) <= CONTROL_FRAME_BYTES:
                self._put(type(message), tag, body, buffers)
                return
            for part in self._small_enough(lighter):
                self._put(type(message), *part)
        elif not buffers and not self._bulk:
            frame = _HEADER(len(body), tag, 0, 0) + body  # As `encode_frame` does: this is most of what is ever sent.
            self._control.append(frame)
            self.bytes_waiting += len(frame)
        else:
            self._put(type(message), tag, body, buffers)

    def _small_enough(self, message: Any) -> List[Tuple[int, bytes, List[Any]]]:
        """A large batch encoded in as many frames as it needs; nothing is queued before all of it fits."""
        encoded = self._encoder.encode(message)
        if len(encoded[1]) <= CONTROL_FRAME_BYTES:
            return [encoded]
        return [part for half in _halves(message) for part in self._small_enough(half)]

    def _put(self, kind: Type[Any], tag: int, body: bytes, buffers: List[Any]) -> None:
        raw = 0
        for buffer in buffers:
            raw += buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
        if (
            raw > BULK_MESSAGE_BYTES
            or (self._definitions_in_bulk and kind in _AFTER_DEFINITIONS)
            or (self._bulk and kind in _LETTING_GO)
        ):
            self._queue_bulk(tag, body, buffers, is_definition=kind in _DEFINITIONS)
        else:
            self._queue(frames.encode_frame(tag, body, buffers))

    def _queue(self, parts: List[Any]) -> None:
        self._control.extend(parts)
        for part in parts:
            self.bytes_waiting += len(part)

    def _queue_bulk(self, tag: int, body: bytes, buffers: List[Any], *, is_definition: bool) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        total = sum(len(view) for view in views)
        if total > TRANSFER_BYTES:
            raise ProtocolError(f"a value of {total} bytes is over the limit of {TRANSFER_BYTES} bytes")
        self.bulk_bytes_waiting += sum(len(view) for view in views)
        self._bulk.append(_Transfer(self._next_transfer, tag, body, views, is_definition=is_definition))
        self._next_transfer = (self._next_transfer + 1) % OBJECT_TRANSFER
        self._definitions_in_bulk += is_definition

    def data_to_send(self, *, bulk: bool = True) -> List[Any]:
        """Buffers to write now, in order: all of the control lane and, with `bulk`, at most one chunk."""
        parts, self._control = self._control, []
        self.bytes_waiting = 0
        if bulk and (self._bulk or self._ready):
            parts.extend(self._next_chunk_of_any())
        return parts

    def _next_chunk_of_any(self) -> List[Any]:
        """Messages and objects by turns, each object by turns: neither waits behind gigabytes of the other."""
        if not self._bulk or (self._ready and self._is_turn_of_objects):
            self._is_turn_of_objects = False
            return self._next_object_chunk()
        self._is_turn_of_objects = True
        return self._next_chunk()

    def _next_object_chunk(self) -> List[Any]:
        sent = self._ready.popleft()
        offset = sent.offset
        size = min(OBJECT_CHUNK_BYTES, sent.credit, sent.total - offset)
        parts = frames.encode_chunk(sent.number, 0, offset, sent.total, sent.take(size))
        if sent.offset == sent.total:
            self._fetches.discard(sent.number)
            tag, body, _ = self._encoder.encode(ObjectSent(sent.number))
            parts.extend(frames.encode_frame(tag, body))
        elif sent.credit > 0:
            self._ready.append(sent)
        return parts

    def _next_chunk(self) -> List[Any]:
        transfer = self._bulk[0]
        if transfer.index == len(transfer.buffers):
            self._bulk.popleft()
            self._definitions_in_bulk -= transfer.is_definition
            if not transfer.buffers:
                return frames.encode_frame(transfer.tag, transfer.body)
            return [frames.encode_transferred(transfer.tag, transfer.number, transfer.body, len(transfer.buffers))]
        buffer = transfer.buffers[transfer.index]
        data = buffer[transfer.offset : transfer.offset + CHUNK_BYTES]
        parts = frames.encode_chunk(transfer.number, transfer.index, transfer.offset, len(buffer), [data] if len(data) else [])
        transfer.offset += len(data)
        self.bulk_bytes_waiting -= len(data)
        if transfer.offset == len(buffer):
            transfer.index += 1
            transfer.offset = 0
            if transfer.index == len(transfer.buffers):
                parts.extend(self._next_chunk())
        return parts

    def close(self, reason: str) -> None:
        """Say goodbye; write `data_to_send(bulk=False)` once more, then close the socket. No event follows."""
        if self.state is State.OPEN:
            self.send(Goodbye(reason))
        self._shut()

    def refuse(self, reason: str, text: str) -> None:
        """Tell the peer why it is not wanted; otherwise as `close`."""
        if self.state is not State.CLOSED:
            self._send_handshake(Refused(reason, text[:1000]))
        self._shut()

    # --- time

    def next_deadline(self) -> Optional[float]:
        """Monotonic time at which `on_time` must be called; None for never: once closed, or a trusted connection."""
        return None if self.state is State.CLOSED or self._deadline == _NEVER else self._deadline

    def on_time(self, now: float) -> List[Any]:
        """Handle what is due: heartbeats (then there is data to send), silence, a handshake that takes too long."""
        if self.state is State.CLOSED or now < self._deadline:
            return []
        if self.state is not State.OPEN:
            waiting = self._decoder.peek() if self.state is State.PREAMBLE else b""
            if waiting and not frames.PREAMBLE.startswith(waiting[: len(frames.PREAMBLE)]):
                return self._fail(self._not_a_mesh(waiting))
            return self._fail(
                ProtocolError(f"no mesh handshake within {HANDSHAKE_SECONDS:g} s; is it a gpumesh coordinator?"),
                tell="protocol",
            )
        if now - self._deadline > HEARTBEAT_SECONDS:
            self._last_received = now  # We were stopped ourselves: the peer's signs of life may wait unread in the socket.
        if now - self._last_received >= SILENCE_SECONDS and not self.is_patient:
            return self._fail(MeshUnavailableError(f"no sign of life for {SILENCE_SECONDS:g} s"))
        self._ping_number += 1
        self.send(Ping(self._ping_number))
        self._deadline = now + HEARTBEAT_SECONDS
        if not self.is_patient:
            self._deadline = min(self._deadline, self._last_received + SILENCE_SECONDS)
        return []

    def renew_numbers(self) -> None:
        """Make the times anew, at an idle moment after a burst: see `client.channel`'s trimming of memory."""
        self._last_received += 0.0
        self._deadline += 0.0
        self._silent_seconds += 0.0

    # --- transfers

    def _chunk_target(self, transfer: int, index: int, offset: int, total: int, size: int) -> memoryview:
        if transfer & OBJECT_TRANSFER:
            return self._object_target(transfer, index, offset, total, size)
        buffers = self._incoming.get(transfer)
        if buffers is None:
            if len(self._incoming) >= MAX_OPEN_TRANSFERS:
                raise ProtocolError(f"the peer began more than {MAX_OPEN_TRANSFERS} transfers without ending one")
            buffers = self._incoming[transfer] = {}
        buffer = buffers.get(index)
        if buffer is None:
            if total > TRANSFER_BYTES - self._incoming_bytes or index >= frames.MAX_BUFFERS:
                raise ProtocolError(f"the peer announced a value of {total} bytes; {TRANSFER_BYTES} are allowed")
            # Zeroing the whole of a large value would hold up everything else for seconds, for a peer that may never send it.
            ahead = min(total, UNFILLED_BYTES - self._unfilled_bytes)
            buffer = buffers[index] = _Incoming(bytearray(max(ahead, 0)), total)
            self._incoming_bytes += total
            self._unfilled_bytes += len(buffer.data)
        end = offset + size
        if offset != buffer.filled or total != buffer.total or end > total or (size == 0 and total > 0):
            raise ProtocolError("chunks of a transfer do not follow one another")
        missing = end - len(buffer.data)
        if missing > 0:
            try:
                buffer.data += memoryview(_ZEROS)[:missing]
            except MemoryError:
                raise ProtocolError(f"no memory for a value of {total} bytes") from None
            self._unfilled_bytes += missing
        self._unfilled_bytes -= size
        buffer.filled = end
        return memoryview(buffer.data)[offset:end]

    def _take_transfer(self, transfer: int, count: int) -> List[Any]:
        buffers = self._incoming.pop(transfer, {})
        if sorted(buffers) != list(range(count)) or any(buffer.filled != buffer.total for buffer in buffers.values()):
            raise ProtocolError("a transfer ended before all of its chunks had come")
        self._incoming_bytes -= sum(buffer.total for buffer in buffers.values())
        return [buffers[index].data for index in range(count)]

    def _drop_transfer(self, frame: frames.Frame) -> None:
        """Forget the buffers of a message that nobody here understands."""
        if frame.flags & frames.TRANSFERRED and len(frame.data) >= frames.TRANSFER_ID.size:
            for buffer in self._incoming.pop(frames.TRANSFER_ID.unpack_from(frame.data)[0], {}).values():
                self._incoming_bytes -= buffer.total
                self._unfilled_bytes -= len(buffer.data) - buffer.filled

    # --- objects

    def send_object(self, number: int, views: List[Any], window: int) -> None:
        """Answer the FetchObject `number` with the bytes of `views`, one after the other, in chunks as far as its credit goes.

        The memory must stay as it is until ObjectDelivered, CancelFetch or the end of the connection. Does nothing when the
        receiver has changed its mind meanwhile: CancelFetch has said so, or Closed.
        """
        if number not in self._fetches or number in self._outgoing:
            return
        sent = _Outgoing(number, deque(view for view in (memoryview(view).cast("B") for view in views) if len(view)), window)
        self._outgoing[number] = sent
        if window > 0 or not sent.total:
            self._ready.append(sent)

    def stop_sending(self, number: int) -> None:
        """Send no more of this object: it is gone. Say so by an ObjectAt with its error."""
        sent = self._outgoing.pop(number, None)
        if sent is not None:
            sent.views.clear()
            if sent in self._ready:
                self._ready.remove(sent)

    def receive_into(self, number: int, target: Any, window: int = FETCH_WINDOW_BYTES) -> None:
        """Make `target` ready for an object of exactly its size; then send FetchObject(number, its id, window).

        `target` is held, and may be written to, until ObjectSent or ObjectAt comes for `number`, or `forget_transfer`.

        Args:
            number: Not in use, with OBJECT_TRANSFER set.
            target: Writable and contiguous.
            window: Bytes that may be under way; the receiver's side of FetchObject.window.
        """
        assert number & OBJECT_TRANSFER, hex(number)
        assert number not in self._targets, f"transfer {number:#x} is under way"
        if self.state is not State.CLOSED:
            self._targets[number] = _Target(memoryview(target).cast("B"), window)

    def forget_transfer(self, number: int) -> None:
        """Give an object up; then send CancelFetch. What still comes of it is dropped, and no event follows.

        On a connection whose bytes another thread receives, a read under way at this moment may still end in the target.
        """
        target = self._targets.get(number)
        if target is not None and target.view is not None:
            target.view = None
            self._decoder.divert(number, self._waste)

    def _on_fetch(self, fetch: FetchObject) -> List[Any]:
        if not fetch.number & OBJECT_TRANSFER or fetch.number >> 32 or fetch.number in self._fetches:
            raise ProtocolError(f"the peer fetches an object as transfer {fetch.number:#x}, which is taken or out of range")
        self._fetches.add(fetch.number)
        return [fetch]

    def _on_cancel(self, cancel: CancelFetch) -> List[Any]:
        self.stop_sending(cancel.number)
        if cancel.number in self._fetches:
            self._fetches.discard(cancel.number)
            self.send(ObjectSent(cancel.number))
        return [cancel]

    def _on_credit(self, credit: TransferCredit) -> List[Any]:
        sent = self._outgoing.get(credit.number)
        if sent is None:
            return []
        sent.credited += credit.nbytes
        if sent.credited == sent.total == sent.offset and credit.number not in self._fetches:
            del self._outgoing[credit.number]
            return [ObjectDelivered(credit.number)]
        if credit.nbytes <= 0 or sent.credited >= sent.total:
            raise ProtocolError("the peer confirms more of an object than it was sent")
        if sent.credit <= 0 < sent.credit + credit.nbytes and sent.offset < sent.total:
            self._ready.append(sent)
        sent.credit += credit.nbytes
        return []

    def _on_sent(self, message: ObjectSent) -> List[Any]:
        target = self._targets.pop(message.number, None)
        if target is None or not self._forget_rest(message.number, target):
            return []  # Cancelled, or answered a second time.
        if not target.is_begun or target.filled != target.total:
            raise ProtocolError(f"the peer sent {target.filled} of {target.total} bytes of an object and said that was all")
        self.send(TransferCredit(message.number, target.total - target.credited))
        return [message]

    def _forget_rest(self, number: int, target: _Target) -> bool:
        """Let go of a target; whether anybody still wanted it."""
        if target.view is not None:
            target.view = None
            return True
        if all(other.view is not None for other in self._targets.values()):
            self._scratch = bytearray()
        return False

    def _object_target(self, number: int, index: int, offset: int, total: int, size: int) -> memoryview:
        target = self._targets.get(number)
        if target is None or (target.is_begun and target.filled == target.total):
            raise ProtocolError("the peer sent a chunk of an object that it was not asked for")
        if target.total != total:
            raise ProtocolError(f"the peer sent an object of {total} bytes where {target.total} were expected")
        end = offset + size
        if index or offset != target.filled or end > total or (size == 0 and total > 0):
            raise ProtocolError("chunks of a transfer do not follow one another")
        target.is_begun = True
        target.filled = end
        if target.view is None:
            return self._waste(size)
        if target.limit < total:
            self._give_credit(number, target, offset)
        return target.view[offset:end]

    def _give_credit(self, number: int, target: _Target, offset: int) -> None:
        """Let the sender go on. The first window's worth waits for ObjectSent: then the sender may reuse its memory."""
        now = self._last_received
        if offset == 0:
            target.window = max(target.window, self._window_bytes)
            target.round_start = now
        elif target.edges and offset == target.edges[0][0]:
            target.quickest_seconds = min(target.quickest_seconds, now - target.edges.popleft()[1])
            target.stalled_seconds += self._silent_seconds
        if target.filled - target.round_offset >= 2 * target.window and now - target.round_start >= ROUND_SECONDS:
            is_long = target.quickest_seconds > STALL_SECONDS
            if is_long and target.stalled_seconds > STALL_FRACTION * (now - target.round_start):
                target.window = max(target.window, min(2 * target.window, MAX_WINDOW_BYTES))
                self._window_bytes = max(self._window_bytes, target.window)
            target.stalled_seconds, target.quickest_seconds = 0.0, _NEVER
            target.round_start, target.round_offset = now, target.filled
        window = target.window
        if window > SHORT_WINDOW_BYTES and len(self._targets) > 1:
            window = max(window // sum(other.is_begun for other in self._targets.values()), SHORT_WINDOW_BYTES)
        limit = target.filled + window
        if limit - target.limit < max(window // 2, 1):
            return
        limit = min(limit, target.total)
        self.send(TransferCredit(number, limit - target.limit))
        target.credited += limit - target.limit
        target.edges.append((target.limit, now))
        target.limit = limit

    def _waste(self, size: int) -> memoryview:
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        return memoryview(self._scratch)[:size]

    # --- ends

    def _fail(self, error: MeshError, tell: str = "") -> List[Any]:
        if tell and self.state is not State.PREAMBLE:
            self._send_handshake(Refused(tell, str(error)[:1000]))
        self._shut()
        self.error = error
        return [Closed(error, str(error))]

    def _end(self, reason: str) -> List[Any]:
        self._shut()
        return [Closed(None, reason)]

    def _shut(self) -> None:
        self.state = State.CLOSED
        self._bulk.clear()
        self.bulk_bytes_waiting = 0
        self._incoming.clear()
        self._fetches.clear()
        for sent in self._outgoing.values():
            sent.views.clear()
        self._outgoing.clear()
        self._ready.clear()
        for target in self._targets.values():
            target.view = None  # The error's traceback may hold the target.
        self._targets.clear()
        self._scratch = bytearray()
        self._decoder = frames.FrameDecoder()  # The old one may hold a large value half received.
        self._token, self._tokens = "", ()


def _refusal(message: Refused) -> MeshError:
    # Anyone can send this, and it ends up in logs and terminals.
    text = clean(message.text, SAID_CHARACTERS)
    if message.reason == "authentication":
        return AuthenticationError(text)
    if message.reason == "version":
        return VersionMismatchError(text)
    if message.reason in UNAVAILABLE:
        unavailable = MeshUnavailableError(text)
        unavailable.refusal = message.reason
        return unavailable
    return ProtocolError(f"the peer refused the connection: {text}")


def _with_large_payloads_beside(message: Any) -> Any:
    """The same message with its large plain payloads as buffers, so that they can travel in chunks."""
    kind = type(message)
    if kind is DefineFunction:
        return message._replace(body=_beside(message.body)) if _is_large(message.body) else message
    if kind is DefineCode:
        return message._replace(archive=_beside(message.archive)) if _is_large(message.archive) else message
    if kind is SubmitTasks:
        if any(map(_is_large, message.payloads)):
            return message._replace(payloads=[_beside(payload) for payload in message.payloads])
    elif kind in _PAYLOAD_PLACES:
        field, place = _PAYLOAD_PLACES[kind]
        items = getattr(message, field)
        if any(_is_large(item[place]) for item in items):
            return message._replace(**{field: [(*i[:place], _beside(i[place]), *i[place + 1 :]) for i in items]})
    return message


def _is_large(payload: Any) -> bool:
    if isinstance(payload, tuple):  # A Bundle of many small values; none of them is large.
        return len(payload) > 1 and len(payload[1]) > 1 and payload_bytes(payload) >= INLINE_BUFFER_BYTES
    return type(payload) is bytes and len(payload) >= INLINE_BUFFER_BYTES


def _beside(payload: Any) -> Any:
    if not _is_large(payload):
        return payload
    if isinstance(payload, tuple):
        return (payload[0], tuple((place, _buffer(value)) for place, value in payload[1]), *payload[2:])
    return OutOfBand([payload])


def _buffer(value: Any) -> Any:
    return OutOfBand([value]) if type(value) is bytes and len(value) >= BESIDE_BYTES else value


def _halves(message: Any) -> List[Any]:
    """A batch that is too large for one frame, as two."""
    kind = type(message)
    field = _LISTS.get(kind, "")
    items = getattr(message, field, ())
    if len(items) > 1:
        middle = len(items) // 2
        return [message._replace(**{field: items[:middle]}), message._replace(**{field: items[middle:]})]
    if kind is SubmitTasks and len(message.task_ids) > 1:
        middle = len(message.task_ids) // 2
        return [
            message._replace(task_ids=message.task_ids[:middle], payloads=message.payloads[:middle]),
            message._replace(task_ids=message.task_ids[middle:], payloads=message.payloads[middle:]),
        ]
    raise ProtocolError(
        f"one item of {kind.__name__} is over the {CONTROL_FRAME_BYTES} bytes of a frame; its large parts must be buffers"
    )
