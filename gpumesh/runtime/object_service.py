"""The coordinator's objects: the directory of all, the store of this host, and what peers ask of both. Opens no value.

    client, runner ── CreateSegment, write, PutObject ──> store <── LocateObject, map ── client, runner     (same host)
    client, worker ── PutObject ──> here ── FetchObject ──> there ══ chunks ══> store                        (other host)
    client, worker ── FetchObject ──> here ══ chunks ══> there                                               (other host)

Promises:

1. What a peer asks about an object that is still arriving is answered when it is here, or when it is known never to be.
2. A peer that is gone leaves nothing behind: its grants are void, what it was writing is discarded, and a segment that it may
   still map is never used again.
3. An object is announced as stored only when all of its bytes are.
4. A connection that breaks costs no object and no reference: what the peer referred to stays until it has said anew what it refers
   to, or is given up; what was on its way from a worker stays announced until then.
5. What a client that is back refers to and nobody has, a worker of before a restart may still bring: for so long nobody is told that
   it is lost.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple, Union

from gpumesh.config import ABSENT_CLIENT_SECONDS, FETCH_WINDOW_BYTES, INLINE_VALUE_BYTES, MIB, RECOVERY_SECONDS
from gpumesh.model.ids import WorkerId
from gpumesh.model.payloads import Bundle, Later, Stored, mentioned, payload_bytes
from gpumesh.model.payloads import is_payload as is_payload
from gpumesh.model.resources import show_bytes
from gpumesh.protocol import messages as msg
from gpumesh.protocol.connection import OBJECT_TRANSFER, ObjectDelivered
from gpumesh.protocol.object_errors import to_text
from gpumesh.runtime.link import PeerLink
from gpumesh.runtime.loop import Alarm
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.directory import Directory, Entry, ObjectState, PeerKey, aside

if TYPE_CHECKING:
    from gpumesh.store.objects import ObjectStore

logger = logging.getLogger("gpumesh.coordinator")

MAX_OID = 1 << 63
MEASURE_SECONDS = 5.0  # A rate is told at the latest after so long, while more and more is sent.
MEASURED_BYTES = 1 * MIB  # Of less than this, the round trip is most.

OnArrival = Callable[[Optional[str]], None]
"""Told why an object is lost, None when it is here."""


class ObjectPeer:
    """What one connected client or worker has to do with objects."""

    __slots__ = ("key", "link", "name", "pins", "unsealed", "receiving", "incoming", "outgoing", "next_number", "is_gone", "shares",
                 "sending", "sending_since", "sent_bytes")  # fmt: skip

    def __init__(self, key: PeerKey, link: PeerLink, name: str) -> None:
        self.key = key
        self.link = link
        self.name = name  # For people.
        self.pins: Dict[int, int] = {}  # Object -> how often it was told where it is.
        self.unsealed: Dict[int, int] = {}  # Object that it writes into a segment -> its size.
        self.receiving: Dict[int, None] = {}  # Objects that come from it, also those for which room is being made.
        self.incoming: Dict[int, int] = {}  # Fetch number -> object that it sends.
        self.outgoing: Dict[int, int] = {}  # Its fetch number -> object that is sent to it, pinned meanwhile.
        self.next_number = OBJECT_TRANSFER
        self.is_gone = False
        self.shares: Optional[bool] = None  # Whether it maps objects of this host's store; None: it has not used any.
        self.sending: Dict[int, int] = {}  # Fetch number -> size of what is on its way to it.
        self.sending_since = 0.0  # When there began to be some, or when the last measurement ended.
        self.sent_bytes = 0  # Since then.

    def send(self, message: Any) -> None:
        """If it is still there."""
        if not self.is_gone:
            self.link.send(message)


class ObjectService:
    """See the module's promises. Every method runs on the loop's thread.

    Args:
        limit: Bytes of objects in this host's memory.
        spill_dir: Where what is above that goes; None: the system's temporary folder.
        on_freed: Told the workers that have copies of objects that nobody refers to any more.
        on_settled: An object that was arriving is stored or lost.
        on_unneeded: Nobody refers to an object any more.
        tell: Takes what the scheduler should know of who has what.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        limit: int,
        spill_dir: Optional[str],
        on_freed: Callable[[str, List[int]], None],
        on_settled: Callable[[int], None],
        on_unneeded: Callable[[int], None],
        tell: Callable[[ev.ObjectNews], None],
    ) -> None:
        self.directory = Directory()
        # Told of each object that went to disk, or did not.
        self.on_spilled: Optional[Callable[[int, Optional[OSError]], None]] = None
        self._loop = loop
        self._limit = limit
        self._spill_dir = spill_dir
        self._on_freed = on_freed
        self._on_settled = on_settled
        self._on_unneeded = on_unneeded
        self._expected: Dict[int, Dict[PeerKey, int]] = {}  # Object that is not here -> clients that are back and refer to it.
        self._expects_until = (
            loop.time() + ABSENT_CLIENT_SECONDS
        )  # Who is back later has left this coordinator, not one before.
        self._tell = tell
        self._store: Optional[ObjectStore] = None
        self._data: Dict[int, Any] = {}  # Small objects: their payloads.
        self._data_bytes = 0  # Of all of them.
        self._awaited: Dict[int, List[OnArrival]] = {}
        self._peers: Dict[PeerKey, ObjectPeer] = {}
        self._interrupted: Dict[PeerKey, Dict[int, None]] = {}  # Worker that is away -> objects that were coming from it.
        self._returning: Dict[PeerKey, None] = {}  # Clients that have not said yet all that they refer to.
        self._unsealed: Dict[PeerKey, Dict[int, int]] = {}  # Peer that is away -> segments that it may be writing.
        self._alarm = Alarm(loop, self._on_time)
        self._handlers: Dict[type, Callable[[ObjectPeer, Any], str]] = {
            msg.OpenStore: self._on_open,
            msg.CreateSegment: self._on_create,
            msg.PutObject: self._on_put,
            msg.LocateObject: self._on_locate,
            msg.FetchObject: self._on_fetch,
            msg.ObjectSent: self._on_sent,
            msg.ObjectAt: self._on_refused,
            msg.CancelFetch: self._on_delivered,
            ObjectDelivered: self._on_delivered,
            msg.UnpinObjects: self._on_unpin,
            msg.HoldRefs: self._on_hold,
            msg.ReleaseRefs: self._on_release,
            msg.DeleteObjects: self._on_delete,
            msg.FreeObjects: self._on_copies_gone,
        }

    # --- from the coordinator

    def is_mine(self, kind: type) -> bool:
        """Whether messages of this kind are handled here."""
        return kind in self._handlers

    def handle(self, key: PeerKey, link: PeerLink, name: str, message: Any) -> str:
        """Take in a peer's message; what is wrong with it, "" if nothing."""
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = ObjectPeer(key, link, name)
        problem = self._handlers[type(message)](peer, message)
        self._arm()
        return problem

    def task_arrived(self, task_id: int, payload: Any) -> None:
        """A task was submitted whose payload is not plain bytes: it keeps what it mentions alive."""
        oids = mentioned(payload)
        if oids:
            self.directory.hold_for_task(task_id, oids)

    def inputs_of(self, payload: Any, least: int = 0) -> Tuple[ev.Input, ...]:
        """The stored objects that a payload stands for; none if together they have less than `least` bytes.

        What it only refers to may never be fetched, and does not count.
        """
        found: Dict[int, ev.Input] = {}
        total = 0
        for value in _parts_of(payload):
            entry = self.directory.get(value.oid) if type(value) is Stored else None
            if entry is not None and entry.oid not in found:
                found[entry.oid] = (entry.oid, entry.nbytes, tuple(map(WorkerId, entry.copies)))
                total += entry.nbytes
        return tuple(found.values()) if total >= least else ()

    def task_ended(self, task_id: int) -> None:
        """It needs nothing any more."""
        self._free(self.directory.task_ended(task_id))

    def grant_result(self, client: PeerKey, payload: Any) -> None:
        """A result is about to be delivered: its consumer refers to what is in it from this moment."""
        for oid in mentioned(payload):
            self.directory.grant(client, oid)

    def ungrant_result(self, peer: PeerKey, payload: Any) -> None:
        """Take back what `grant_result` gave."""
        self._free(self.directory.release(peer, [(oid, 1) for oid in mentioned(payload)]), recycle=False)

    def take_over(self, worker: PeerKey, payload: Any) -> None:
        """A result has been dealt with: the worker that made it no longer refers to it."""
        stored = payload[0] if isinstance(payload, tuple) else payload
        if type(stored) is Stored:
            self._free(self.directory.release(worker, [(stored.oid, 1)]))

    def inline(self, payload: Any) -> Any:
        """The payload with small objects put in place of their names, as far as they are here."""
        if not self._data or not isinstance(payload, tuple):
            return payload
        inputs = []
        changed = False
        for place, value in payload[1]:
            if type(value) is Stored and value.oid in self._data:
                data = self._data[value.oid]
                value = data[0] if isinstance(data, tuple) else data
                changed = True
            inputs.append((place, value))
        return Bundle(payload[0], tuple(inputs), payload[2]) if changed else payload

    @property
    def has_small(self) -> bool:
        """Whether `inline` may have something to do."""
        return bool(self._data)

    def is_arriving(self, oid: int) -> bool:
        """Whether the object is declared and not here yet."""
        entry = self.directory.get(oid)
        return entry is not None and entry.state is ObjectState.DECLARED

    def why_lost(self, oid: int) -> str:
        """Why there is no such object; "" if there is one, or will be."""
        entry = self.directory.get(oid)
        if entry is None:
            return f"lost: object {oid:#x} is gone: it was deleted, or nobody referred to it any more"
        return entry.reason if entry.state is ObjectState.LOST else ""

    def why_no_value(self, payload: Any) -> str:
        """Why a result's own object is lost; "" if it is not, or if the result has none."""
        stored = payload[0] if isinstance(payload, tuple) else payload
        return self.why_lost(stored.oid) if type(stored) is Stored else ""

    def peer_back(self, key: PeerKey) -> None:
        """A client says anew what it refers to and what it has put, until `peer_renewed`; this coordinator may not know it."""
        self._returning[key] = None

    def peer_away(self, key: PeerKey) -> None:
        """Its connection broke; `peer_renewed` or `peer_gone` follows."""
        peer = self._peers.pop(key, None)
        if peer is not None:
            peer.is_gone = True
            self._abandon(peer, is_away=True)
        copied = self.directory.set_aside(key)
        if copied:
            self._tell(ev.CopiesGone(WorkerId(str(key)), copied))
        self._arm()

    def peer_renewed(self, key: PeerKey) -> None:
        """It is back, and has said what it refers to: what it does not any more may go."""
        self._void(key)
        self._returning.pop(key, None)
        self._free(self.directory.peer_gone(aside(key)), recycle=False)
        self._arm()

    def peer_gone(self, key: PeerKey) -> None:
        """It has left, or is given up."""
        peer = self._peers.pop(key, None)
        if peer is not None:
            peer.is_gone = True
            self._abandon(peer, is_away=False)
        self._void(key)
        self._returning.pop(key, None)
        self._expect_no_more(key, list(self._expected))
        # If it lives and comes back, it may still have maps of what only it referred to, and offer that again.
        self._free([*self.directory.peer_gone(key), *self.directory.peer_gone(aside(key))], recycle=False)
        self._arm()

    def _void(self, key: PeerKey) -> None:
        """What it was in the middle of when its connection broke will not go on."""
        for oid in self._interrupted.pop(key, ()):
            if self.is_arriving(oid) and not any(oid in peer.receiving for peer in self._peers.values()):
                self._settle(oid, f"lost: the worker that made object {oid:#x} left before all of it had come")
        for oid in self._unsealed.pop(key, ()):
            if self._open().contains(oid):
                self._open().discard(oid, recycle=False)

    def views(self) -> List[Dict[str, Any]]:
        """One dict for each object: `id`, `bytes`, `owner`, `state`, `where`, `references`, `copies`, `pins`."""
        places = {} if self._store is None else {row["oid"]: row for row in self._store.describe()}
        rows: List[Dict[str, Any]] = []
        for entry in self.directory:
            place = places.get(entry.oid, {})
            rows.append(
                {
                    "id": f"{entry.oid:016x}",
                    "bytes": entry.nbytes,
                    "owner": entry.owner,
                    "state": entry.state.value,
                    "where": "coordinator" if entry.oid in self._data else place.get("where", ""),
                    "references": entry.references,
                    "copies": list(entry.copies),
                    "pins": place.get("pins", 0),
                    "problem": entry.reason,
                }
            )
        return rows

    def usage(self) -> Dict[str, Any]:
        """What the store of this host holds, and its limit."""
        used = {} if self._store is None else self._store.usage()
        folder = "" if self._store is None else self._store.folder.path
        return {"limit": self._limit, "folder": folder, **used}

    def close(self) -> None:
        """Everything goes."""
        self._alarm.cancel()
        if self._store is not None:
            self._store.close()

    # --- the store

    def _open(self) -> ObjectStore:
        """The store of this host, made at its first use."""
        if self._store is None:
            from gpumesh.store.objects import ObjectStore

            self._store = ObjectStore(
                limit=self._limit,
                spill_dir=self._spill_dir,
                call_soon=self._call_soon,
                now=self._loop.time,
                on_gone=self._segments_gone,
            )
            self._store.set_holders(self._describe)
            self._store.on_spilled = self.on_spilled
        return self._store

    def _call_soon(self, callback: Callable[[], None]) -> None:
        def act() -> None:
            callback()
            self._arm()

        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:
            pass  # The loop has ended, and the store with it.

    def _segments_gone(self, writer: str, names: List[str]) -> None:
        for peer in self._peers.values():
            if str(peer.key) == writer:
                peer.send(msg.SegmentsGone(names))

    def _describe(self, oid: int) -> str:
        entry = self.directory.get(oid)
        return "nobody knows" if entry is None else f"{entry.owner}, {entry.references} references"

    def _arm(self) -> None:
        self._alarm.set(None if self._store is None else self._store.next_deadline())

    def _on_time(self, now: float) -> None:
        if self._store is not None:
            self._store.on_time(now)
            self._arm()

    # --- objects come

    def _on_open(self, peer: ObjectPeer, message: msg.OpenStore) -> str:
        folder = self._open().folder
        peer.send(msg.StoreOffer(folder.probe, folder.secret))
        return ""

    def _on_create(self, peer: ObjectPeer, message: msg.CreateSegment) -> str:
        oid, number = message.oid, message.number
        if not 0 <= oid < MAX_OID or not 0 < message.nbytes < MAX_OID:
            return f"an object of {message.nbytes} bytes with the id {oid}"
        store = self._open()
        if oid in self.directory or store.contains(oid):
            peer.send(msg.SegmentCreated(number, "", "full: an object of this id exists already"))
            return ""
        peer.unsealed[oid] = message.nbytes
        self._shares(peer, True)

        def then(path: Optional[str], error: Optional[Exception]) -> None:
            if peer.is_gone or path is None:
                peer.unsealed.pop(oid, None)
                if path is not None:
                    store.discard(oid)
            peer.send(msg.SegmentCreated(number, path or "", "" if error is None else to_text(error)))

        store.create(oid, message.nbytes, writer=str(peer.key), then=then)
        return ""

    def _on_put(self, peer: ObjectPeer, message: msg.PutObject) -> str:
        oid = message.oid
        least = 0 if message.data is not None else 1  # No container is empty.
        if not 0 <= oid < MAX_OID or not least <= message.nbytes < MAX_OID:
            return f"an object of {message.nbytes} bytes with the id {oid}"
        if oid in self.directory:
            self.directory.grant(peer.key, oid)  # Told a second time, after a reconnect.
            if message.segment == "" and message.data is None:
                self._put_again(peer, message)
            return ""
        if message.data is not None:
            if not is_payload(message.data):
                return f"a {type(message.data).__name__} is no small object"
            if payload_bytes(message.data) > 2 * INLINE_VALUE_BYTES:
                return f"{payload_bytes(message.data)} bytes beside the message PutObject"
            self._declare(peer, message)
            size = payload_bytes(message.data)
            if self._data_bytes + size > self._limit:
                words = (
                    f"small objects already take {show_bytes(self._data_bytes)} of the {show_bytes(self._limit)} for objects"
                )
                self._settle(oid, f"full: {words}; drop references, put them together, or allow more with --object-memory")
            else:
                self._data[oid] = message.data
                self._data_bytes += size
                self._settle(oid, None)
        elif message.segment:
            before = self._unsealed.get(peer.key, {})
            nbytes = peer.unsealed.pop(oid, None) or before.pop(oid, None)
            if nbytes is None and peer.key in self._returning:
                self._declare(peer, message)
                self._settle(
                    oid, "lost: the connection broke when it was put, and its maker was away for too long; put it again"
                )
                return ""
            if nbytes != message.nbytes or not self._open().is_segment_of(oid, message.segment):
                return f"the segment {message.segment[:80]!r} was not made for object {oid:#x}"
            self._declare(peer, message)
            self._open().seal(oid)
            self._settle(oid, None)
        else:
            if self._unsealed.get(peer.key, {}).pop(oid, None) is not None:
                self._open().discard(oid, recycle=False)  # The word that it was written went with the connection before.
            if self._open().contains(oid):
                return f"object {oid:#x} is being written into a segment"
            self._shares(peer, False)
            self._declare(peer, message)
            self._receive(peer, oid, message.nbytes)
        return ""

    def _declare(self, peer: ObjectPeer, message: msg.PutObject) -> None:
        self.directory.declare(message.oid, message.nbytes, peer=peer.key, owner=peer.name, refs=message.refs)
        if self._expected:
            for key, count in self._expected.pop(message.oid, {}).items():
                self.directory.grant(key, message.oid, count)

    def restore(self, oid: int, data: bytes, holder: PeerKey) -> None:
        """A small object whose content is known; `holder` refers to it from now on."""
        if oid in self.directory:
            self.directory.grant(holder, oid)
            return
        self.directory.declare(oid, len(data), peer=holder, owner="", refs=())
        for key, count in self._expected.pop(oid, {}).items():
            self.directory.grant(key, oid, count)
        self._data[oid] = data
        self._data_bytes += len(data)
        self._settle(oid, None)

    def _put_again(self, peer: ObjectPeer, message: msg.PutObject) -> None:
        """Its maker is back with it: it goes on from the beginning, unless all of it is here."""
        oid = message.oid
        entry = self.directory.get(oid)
        assert entry is not None, oid
        self.directory.arrives_again(oid)
        is_coming = any(oid in other.receiving for other in self._peers.values())
        if entry.state is ObjectState.DECLARED and not is_coming:
            self._receive(peer, oid, entry.nbytes)
            return

        def tell(problem: Optional[str]) -> None:
            if problem is None and not peer.is_gone:
                self._copied(peer, oid)
            peer.send(msg.ObjectStored(oid, problem or ""))

        self._when_here(oid, tell)

    def _receive(self, peer: ObjectPeer, oid: int, nbytes: int) -> None:
        """Make room for an object and fetch it from whoever has it."""
        store = self._open()
        peer.receiving[oid] = None

        def then(path: Optional[str], error: Optional[Exception]) -> None:
            if peer.is_gone:
                if path is not None:
                    store.discard(oid)
                return
            if path is None:
                peer.receiving.pop(oid, None)
                self._settle(oid, to_text(error))
                peer.send(msg.ObjectStored(oid, to_text(error)))
            elif not self.is_arriving(oid):
                peer.receiving.pop(oid, None)
                store.discard(oid)
                peer.send(msg.ObjectStored(oid, self.why_lost(oid)))
            else:
                number = peer.next_number
                peer.next_number = OBJECT_TRANSFER | (number + 1)
                peer.incoming[number] = oid
                peer.link.connection.receive_into(number, store.writable_view(oid))
                peer.send(msg.FetchObject(number, oid, FETCH_WINDOW_BYTES))

        store.create(oid, nbytes, writer="", then=then)

    def _on_sent(self, peer: ObjectPeer, message: msg.ObjectSent) -> str:
        oid = peer.incoming.pop(message.number, None)
        if oid is None:
            return f"an object of the unknown number {message.number:#x} has come"
        peer.receiving.pop(oid, None)
        store = self._open()
        store.release_view(oid)
        if oid not in self.directory:
            store.discard(oid)
            peer.send(msg.ObjectStored(oid, self.why_lost(oid)))
            return ""
        store.seal(oid)
        self._copied(peer, oid)
        self._settle(oid, None)
        peer.send(msg.ObjectStored(oid, ""))
        return ""

    def _on_refused(self, peer: ObjectPeer, message: msg.ObjectAt) -> str:
        """The answer to a fetch that there is nothing to fetch."""
        oid = peer.incoming.pop(message.number, None)
        if oid is None:
            return ""
        peer.receiving.pop(oid, None)
        peer.link.connection.forget_transfer(message.number)
        self._open().release_view(oid)
        self._open().discard(oid)
        self._settle(oid, message.error or "lost: its maker no longer has it")
        return ""

    def _settle(self, oid: int, problem: Optional[str]) -> None:
        """An object is here, or will never be: tell whoever waits."""
        if problem is None:
            self.directory.arrived(oid)
        else:
            self.directory.lost(oid, problem)
        for tell in self._awaited.pop(oid, ()):
            tell(problem)
        self._on_settled(oid)

    def _when_here(self, oid: int, tell: OnArrival) -> None:
        entry = self.directory.get(oid)
        if (entry is not None and entry.state is ObjectState.DECLARED) or oid in self._expected:
            self._awaited.setdefault(oid, []).append(tell)
        else:
            tell(self.why_lost(oid) or None)

    # --- objects go

    def _on_locate(self, peer: ObjectPeer, message: msg.LocateObject) -> str:
        oid, number = message.oid, message.number
        self._shares(peer, True)
        self._when_here(oid, lambda problem: self._tell_where(peer, number, oid, problem))
        return ""

    def _tell_where(self, peer: ObjectPeer, number: int, oid: int, problem: Optional[str]) -> None:
        if peer.is_gone:
            return
        if not self._tell_shortly(peer, number, oid, problem):
            entry = self.directory.get(oid)
            assert entry is not None, oid
            nbytes = entry.nbytes

            def then(path: Optional[str], error: Optional[Exception]) -> None:
                if path is not None and peer.is_gone:
                    self._open().unpin(oid)
                elif path is not None:
                    peer.pins[oid] = peer.pins.get(oid, 0) + 1
                    peer.send(msg.ObjectAt(number, oid, path, nbytes, None, ""))
                else:
                    peer.send(msg.ObjectAt(number, oid, "", 0, None, to_text(error)))

            self._open().pin(oid, then)

    def _tell_shortly(self, peer: ObjectPeer, number: int, oid: int, problem: Optional[str]) -> bool:
        """Answer if there is nothing to map and nothing to send."""
        if problem is not None:
            peer.send(msg.ObjectAt(number, oid, "", 0, None, problem))
            return True
        data = self._data.get(oid)
        if data is not None:
            peer.send(msg.ObjectAt(number, oid, "", 0, data, ""))
            return True
        return False

    def _on_fetch(self, peer: ObjectPeer, message: msg.FetchObject) -> str:
        oid, number, window = message.oid, message.number, message.window
        self._shares(peer, False)
        self._when_here(oid, lambda problem: self._send_object(peer, number, oid, window, problem))
        return ""

    def _send_object(self, peer: ObjectPeer, number: int, oid: int, window: int, problem: Optional[str]) -> None:
        if peer.is_gone or self._tell_shortly(peer, number, oid, problem):
            return
        store = self._open()
        peer.outgoing[number] = oid

        def then(path: Optional[str], error: Optional[Exception]) -> None:
            if path is None:
                peer.outgoing.pop(number, None)
                peer.send(msg.ObjectAt(number, oid, "", 0, None, to_text(error)))
            elif peer.is_gone or number not in peer.outgoing:
                store.unpin(oid)
            else:
                self._copied(peer, oid)
                if not peer.sending:
                    peer.sending_since = self._loop.time()
                view = store.view(oid)
                peer.sending[number] = view.nbytes
                peer.link.connection.send_object(number, [view], window)
                peer.link.flush_soon()

        store.pin(oid, then)

    def _on_delivered(self, peer: ObjectPeer, message: Union[ObjectDelivered, msg.CancelFetch]) -> str:
        """The receiver has all of it, or does not want it any more."""
        oid = peer.outgoing.pop(message.number, None)
        if oid is not None and self._store is not None:
            self._store.release_view(oid)
            self._store.unpin(oid)
            self._measure(peer, peer.sending.pop(message.number, 0), is_whole=type(message) is ObjectDelivered)
        return ""

    def _measure(self, peer: ObjectPeer, nbytes: int, *, is_whole: bool) -> None:
        """One object less is on its way to a peer: what went there since it had nothing to wait for shows its rate."""
        if is_whole:
            peer.sent_bytes += nbytes
        now = self._loop.time()
        seconds = now - peer.sending_since
        if not peer.sending or seconds > MEASURE_SECONDS:
            if isinstance(peer.key, str) and peer.sent_bytes >= MEASURED_BYTES:
                self._tell(ev.BytesMoved(WorkerId(peer.key), peer.sent_bytes, seconds))
            peer.sending_since = now
            peer.sent_bytes = 0

    # --- what the scheduler should know

    def _shares(self, peer: ObjectPeer, shares: bool) -> None:
        """Its way to objects shows whether it uses this host's store."""
        if peer.shares is not shares and isinstance(peer.key, str):
            peer.shares = shares
            self._tell(ev.StoreShared(WorkerId(peer.key), shares))

    def _copied(self, peer: ObjectPeer, oid: int) -> None:
        if isinstance(peer.key, str):
            self.directory.copied(oid, peer.key)
            self._tell(ev.CopyMade(WorkerId(peer.key), oid))

    def _on_copies_gone(self, peer: ObjectPeer, message: msg.FreeObjects) -> str:
        if not isinstance(peer.key, str) or any(type(oid) is not int for oid in message.oids):
            return "these are not copies of objects"
        for oid in message.oids:
            self.directory.dropped(oid, peer.key)
        self._tell(ev.CopiesGone(WorkerId(peer.key), message.oids))
        return ""

    def _on_unpin(self, peer: ObjectPeer, message: msg.UnpinObjects) -> str:
        if not _are_counts(message.objects):
            return "these are not objects and counts"
        for oid, count in message.objects:
            held = peer.pins.get(oid, 0)
            count = min(count, held)
            if count <= 0:
                continue
            if held == count:
                del peer.pins[oid]
            else:
                peer.pins[oid] = held - count
            self._open().unpin(oid, count)
        return ""

    # --- references

    def _on_hold(self, peer: ObjectPeer, message: msg.HoldRefs) -> str:
        if any(type(oid) is not int for oid in message.oids):
            return "these are not objects"
        unknown = [oid for oid in message.oids if not self.directory.grant(peer.key, oid)]
        if unknown and peer.key in self._returning and self._loop.time() < self._expects_until:
            for oid in unknown:
                expected = self._expected.setdefault(oid, {})
                expected[peer.key] = expected.get(peer.key, 0) + 1
            self._loop.call_later(RECOVERY_SECONDS, self._expect_no_more, peer.key, unknown)
        if message.is_all:
            self.peer_renewed(peer.key)
        return ""

    def _expect_no_more(self, key: PeerKey, oids: List[int]) -> None:
        """Nobody has come with these, or their client has left."""
        for oid in oids:
            expected = self._expected.get(oid, {})
            if expected.pop(key, None) is not None and not expected:
                del self._expected[oid]
                for tell in self._awaited.pop(oid, ()):
                    tell(self.why_lost(oid))

    def _on_release(self, peer: ObjectPeer, message: msg.ReleaseRefs) -> str:
        if not _are_counts(message.objects):
            return "these are not objects and counts"
        if self._expected:
            self._expect_no_more(peer.key, [oid for oid, _ in message.objects])
        self._free(self.directory.release(peer.key, message.objects))
        return ""

    def _on_delete(self, peer: ObjectPeer, message: msg.DeleteObjects) -> str:
        if any(type(oid) is not int for oid in message.oids):
            return "these are not objects"
        for oid in message.oids:
            if peer.unsealed.pop(oid, None) is not None and self._open().contains(oid):
                self._open().discard(oid)  # It was to be written, and will not be.
            self._free(self.directory.delete(oid))
        return ""

    def _free(self, entries: List[Entry], *, recycle: bool = True) -> None:
        """Nobody refers to these any more. `recycle=False`: somebody lost may still map their segments."""
        copies: Dict[str, List[int]] = {}
        for entry in entries:
            oid = entry.oid
            self._on_unneeded(oid)
            for tell in self._awaited.pop(oid, ()):
                tell(self.why_lost(oid))
            for worker in entry.copies:
                copies.setdefault(worker, []).append(oid)
            data = self._data.pop(oid, None)
            if data is not None:
                self._data_bytes -= payload_bytes(data)
            if data is not None or self._store is None:
                continue
            if self._store.contains(oid) and entry.state is ObjectState.STORED:
                self._store.discard(oid, recycle=recycle)
        for worker, oids in copies.items():
            self._on_freed(worker, oids)

    def _abandon(self, peer: ObjectPeer, *, is_away: bool) -> None:
        """Everything that this peer was in the middle of. `is_away`: a worker may go on with it when it is back."""
        store = self._store
        if store is None:
            return
        for number, oid in peer.incoming.items():
            peer.link.connection.forget_transfer(number)
            store.release_view(oid)
        for oid in peer.receiving:
            if store.contains(oid):
                store.discard(oid)
            if is_away and isinstance(peer.key, str):
                self._interrupted.setdefault(peer.key, {})[oid] = None
            else:
                self._settle(oid, f"lost: {peer.name} left before all of object {oid:#x} had come")
        for oid in peer.outgoing.values():
            store.release_view(oid)
            store.unpin(oid)
        for oid, nbytes in peer.unsealed.items():
            if is_away:
                self._unsealed.setdefault(peer.key, {})[oid] = nbytes
            elif store.contains(oid):
                store.discard(oid, recycle=False)
        for oid, count in peer.pins.items():
            store.unpin(oid, count, recycle=False)
        peer.incoming.clear()
        peer.receiving.clear()
        peer.outgoing.clear()
        peer.sending.clear()
        peer.unsealed.clear()
        peer.pins.clear()


def _are_counts(objects: Any) -> bool:
    return all(
        isinstance(each, tuple) and len(each) == 2 and type(each[0]) is int and type(each[1]) is int and each[1] > 0
        for each in objects
    )


def _parts_of(payload: Any) -> List[Any]:
    return [payload[0], *(value for _, value in payload[1])] if isinstance(payload, tuple) else [payload]


def awaited_tasks(payload: Any) -> Tuple[int, ...]:
    """The tasks whose results a call is waiting for."""
    if not isinstance(payload, tuple):
        return ()
    return tuple(value.task_id for _, value in payload[1] if type(value) is Later)
