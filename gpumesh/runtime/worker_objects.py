"""The objects of one worker: what its tasks and its runners use is brought here, and kept as long as somebody uses it.

    task's input, runner's get ──acquire──> (asked for once) ──found──> in use ──last user lets go──> unpinned
    runner ── CreateSegment, PutObject, ... ──> an account for each ──> coordinator's store, or our own

Two ways behind one interface, chosen at the first need of a connection: a worker that can read the coordinator's probe shares
its store, and forwards what runners ask; any other keeps a store of its own, fetches each input once, and hands over results.

Promises:

1. An object is located, or fetched, once however many tasks and runners want it meanwhile; it stays where it is until the last
   of them has let go.
2. What a runner had is given back when it is gone: what it was writing is discarded, its mappings count no more, its
   references are released.
3. A coordinator that is lost takes nothing along that runners have made here and that a kept result or a reference of theirs needs:
   the same or another one is told of it again (`connected`) and fetches what it lacks. What was asked for is asked again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple, Union

from gpumesh.config import MIB
from gpumesh.model.payloads import Stored, mentioned, payload_bytes
from gpumesh.protocol import messages as msg
from gpumesh.protocol.connection import ObjectDelivered
from gpumesh.runtime import settings
from gpumesh.runtime.leftovers import Leftovers, mentions
from gpumesh.runtime.link import PeerLink
from gpumesh.runtime.pool import RunnerPool
from gpumesh.runtime.runner_objects import stored_in
from gpumesh.runtime.worker_inputs import Result, TaskInputs
from gpumesh.runtime.worker_store import Copy, OnFound, OwnStore, SharedStore

logger = logging.getLogger("gpumesh.worker")

SMALL_BYTES_KEPT = 16 * MIB  # Of small objects that runners have put, so that they can be put again; the oldest are not, then.
SEGMENTS_KNOWN = 64  # Of each runner, the newest: that many maps it may keep.

_Store = Union[SharedStore, OwnStore]


class _Account:
    """What one runner has to give back."""

    __slots__ = ("pins", "stale", "grants", "writing", "segments")

    def __init__(self) -> None:
        self.pins: Dict[int, int] = {}  # Object -> how often it was told where it is.
        self.stale: Dict[int, int] = {}  # The same, told by a coordinator that was lost since.
        self.grants: Dict[int, int] = {}  # Object -> references that the coordinator counts for it.
        self.writing: Dict[int, Optional[Tuple[_Store, str]]] = {}  # Object that it wants to write -> the segment, once given.
        self.segments: OrderedDict[str, None] = OrderedDict()  # Names of those in the coordinator's store.


_FOR_OWN = frozenset((msg.FetchObject, ObjectDelivered, msg.CancelFetch, msg.ObjectStored, msg.FreeObjects, msg.ObjectSent))


class WorkerObjects:
    """See the module's promises. Every method runs on the loop's thread.

    Args:
        report: Results of tasks that never reached the pool.
        on_idle: Called when a worker that is leaving may have nothing left to do here.
        kept: The results that are kept until they have arrived.
        streamed: Values of generators that are kept until they have been taken.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: RunnerPool,
        *,
        report: Callable[[List[Result]], None],
        on_idle: Callable[[], None],
        kept: Callable[[], Iterable[Result]],
        streamed: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self.pool = pool
        self.link: Optional[PeerLink] = None
        self.limit = settings.object_memory()
        self.loop = loop
        self._on_idle = on_idle
        self._kept = kept
        self._streamed = streamed
        self._way: Optional[_Store] = None
        self._own: Optional[OwnStore] = None  # Stays for the next connection.
        self._undecided: List[Callable[[], None]] = []  # What waits for the way to be known.
        self._is_asking = False
        self._copies: Dict[int, Copy] = {}
        self.copy_bytes = 0  # Of all copies that somebody uses or waits for.
        self.has_own_store = False
        self.inputs = TaskInputs(self, report)
        self._accounts: Dict[int, _Account] = {}
        self._results: Dict[int, int] = {}  # Large object put by a runner -> that runner; until it was told as a result.
        # Objects put by runners, the oldest first, as they were put; and the file, of those in the coordinator's store.
        self._made: Dict[int, Tuple[msg.PutObject, str]] = {}
        self._made_limit = 64
        self._small_bytes = 0  # Of the small ones among them.
        self._leftovers = Leftovers()
        self._unwanted: List[int] = []  # To be deleted, when there is a coordinator again.

    # --- the connection

    def began(self, link: PeerLink) -> None:
        """The first need of objects on a connection."""
        self.link = link
        self._ask_way()

    def connected(self, link: PeerLink) -> List[Tuple[int, int]]:
        """There is a coordinator again, the same or another: say what is here. Follow this up with the kept results.

        Returns:
            (object, grants) to be released when those have been sent.
        """
        self.link = link
        self._prune()
        counts: Dict[int, int] = {}
        for account in self._accounts.values():
            for oid, count in account.grants.items():
                counts[oid] = counts.get(oid, 0) + count
        passing: Dict[int, int] = {}
        for own, *others in mentions(self._kept()):
            if own:
                counts[own] = counts.get(own, 0) + 1  # Which goes with its result.
            for oid in others:
                counts[oid] = counts.get(oid, 0) + 1
                passing[oid] = passing.get(oid, 0) + 1
        for payload in self._streamed():
            for oid in mentioned(payload):
                counts[oid] = counts.get(oid, 0) + 1
        for oid, (message, _) in list(self._made.items()):
            if counts.get(oid) and self._offer(message):
                counts[oid] -= 1
        held = [oid for oid, count in counts.items() for _ in range(count)]
        if held:
            self.send(msg.HoldRefs(held))
        self.send(msg.HoldRefs([], True))
        unwanted, self._unwanted = self._unwanted, []
        if unwanted:
            self.send(msg.DeleteObjects(unwanted))
        self._ask_way()
        return list(passing.items())

    def _offer(self, message: msg.PutObject) -> bool:
        """Tell the coordinator of an object that is here; whether it is."""
        oid = message.oid
        if message.data is not None:
            self.send(message)
        elif self._own is not None and self._own.has(oid):
            self._own.offer(message)
        elif oid in self._leftovers:
            self.send(message._replace(segment=""))
        else:
            return False
        return True

    def disconnected(self) -> None:
        """The coordinator is lost."""
        self.link = None
        self._is_asking = False
        self._prune()
        self.inputs.abandon()
        way, self._way = self._way, None
        if isinstance(way, SharedStore):
            self._keep_what_was_made(way)
            way.disconnected()
        if self._own is not None:
            self._own.disconnected()
        self._leftovers.disconnected()

    def _keep_what_was_made(self, way: SharedStore) -> None:
        for oid, (message, path) in self._made.items():
            if path:
                self._leftovers.keep(oid, path, message.nbytes)
        for runner, account in self._accounts.items():
            for oid, given in account.writing.items():
                if given is not None and given[0] is way:
                    self._leftovers.keep_writing(oid, given[1])
            if account.segments:
                self.tell_writers(list(account.segments), runner)
                account.segments.clear()

    def close(self) -> None:
        """The worker ends."""
        self._leftovers.close()
        if self._own is not None:
            self._own.close()

    # --- what runners have made

    def is_made_here(self, oid: int) -> bool:
        """Whether a runner of this worker has made it, and it is needed here."""
        return oid in self._made

    def _note_made(self, message: msg.PutObject, path: str) -> None:
        self._made[message.oid] = (message, path)
        if message.data is not None:
            self._small_bytes += payload_bytes(message.data)
        if len(self._made) > self._made_limit or self._small_bytes > SMALL_BYTES_KEPT:
            self._prune()

    @property
    def has_leftovers(self) -> bool:
        """Whether `forgotten` has something to do."""
        return bool(self._leftovers)

    def forgotten(self) -> None:
        """Some results are not kept any more."""
        self._prune()

    def _prune(self) -> None:
        """Forget what nobody would want to have put again."""
        needed: Set[int] = {oid for found in mentions(self._kept()) for oid in found}  # Only asked for membership.
        for payload in self._streamed():
            needed.update(mentioned(payload))
        for account in self._accounts.values():
            needed.update(account.grants)
        self._made = {oid: made for oid, made in self._made.items() if oid in needed}
        small = [(oid, payload_bytes(made[0].data)) for oid, made in self._made.items() if made[0].data is not None]
        self._small_bytes = sum(nbytes for _, nbytes in small)
        for oid, nbytes in small:
            if self._small_bytes <= SMALL_BYTES_KEPT // 2:
                break
            del self._made[oid]
            self._small_bytes -= nbytes
        self._made_limit = 64 + 2 * len(self._made)
        self._leftovers.keep_only(needed.__contains__)

    def send(self, message: Any) -> None:
        """To the coordinator, if there is one."""
        if self.link is not None and self.link.connection.established:
            self.link.send(message)

    def handle(self, kind: Any, message: Any) -> None:
        """A message of the coordinator, or an event of its connection."""
        if kind is msg.StoreOffer:
            self._decide(message)
        elif kind is msg.FetchObject and message.oid in self._leftovers:
            self._leftovers.send(message, self.link)
        elif kind is msg.FetchObject and self._own is None:
            self.send(msg.ObjectAt(message.number, message.oid, "", 0, None, "lost: the worker that made it no longer has it"))
        elif (kind is ObjectDelivered or kind is msg.CancelFetch) and self._leftovers.delivered(message.number):
            pass
        elif kind is msg.ObjectStored and message.oid in self._leftovers:
            self._leftovers.stored(message.oid)
            self.may_be_idle()
        elif self._own is not None and kind in _FOR_OWN:
            self._own.handle(kind, message)
        elif self._way is not None:
            self._way.handle(kind, message)

    def _with_way(self, act: Callable[[], None]) -> None:
        """Do it once it is known whether the coordinator's memory is this host's."""
        if self._way is not None:
            act()
            return
        self._undecided.append(act)
        self._ask_way()

    def _ask_way(self) -> None:
        if self._is_asking or self.link is None or not self._undecided:
            return
        self._is_asking = True
        if os.environ.get("GPUMESH_NO_SHARED_MEMORY", "") not in ("", "0"):
            self._decide(None)
        else:
            self.send(msg.OpenStore())

    def _decide(self, offer: Optional[msg.StoreOffer]) -> None:
        if self._way is not None or not self._is_asking:
            return
        self._is_asking = False
        if offer is not None and _shares_host(offer):
            self._way = SharedStore(self)
        else:
            if self._own is None:
                self._own = OwnStore(self, self.loop)
            self._way = self._own
        self.has_own_store = self._way is self._own
        logger.debug("objects: %s", type(self._way).__name__)
        undecided, self._undecided = self._undecided, []
        for act in undecided:
            act()

    # --- objects that are used here

    def acquire(self, oid: int, nbytes: int, then: OnFound) -> None:
        """Have an object here; who is told where has to `release` it once."""
        copy = self._copies.get(oid)
        if copy is not None and copy.is_here:
            copy.users += 1
            then(copy, "")
            return
        if copy is not None:
            copy.waiting.append(then)
            return
        copy = self._copies[oid] = Copy(oid, nbytes)
        self.copy_bytes += nbytes
        copy.waiting.append(then)
        wanted = copy
        self._with_way(lambda: self._resolve(wanted))

    def _resolve(self, copy: Copy) -> None:
        assert self._way is not None
        if self._copies.get(copy.oid) is copy:  # Otherwise it was given up meanwhile.
            self._way.resolve(copy)

    def found(self, copy: Copy, path: str, data: Any, error: str, nbytes: int = 0) -> None:
        """An object is here, or is not to be had. A path is pinned until the last user has let go."""
        waiting, copy.waiting = copy.waiting, []
        if error:
            self._forget(copy)
            for then in waiting:
                then(None, error)
            return
        if nbytes:
            self.copy_bytes += nbytes - copy.nbytes
            copy.nbytes = nbytes
        copy.path, copy.data, copy.is_here, copy.store = path, data, True, self._way
        copy.users += len(waiting)
        for then in waiting:
            then(copy, "")

    def release(self, oid: int, count: int = 1) -> None:
        """So many users have let go."""
        copy = self._copies.get(oid)
        if copy is None or not copy.is_here or not count:
            return  # Of a connection that is over.
        copy.users -= count
        if copy.users <= 0:
            self._forget(copy)
            if copy.path and copy.store is not None:
                copy.store.let_go(copy)

    def _forget(self, copy: Copy) -> None:
        if self._copies.get(copy.oid) is copy:
            del self._copies[copy.oid]
            self.copy_bytes -= copy.nbytes

    def lose_copies(self) -> None:
        """Nothing of what is here may be used any more: the store behind it is gone. What was sought is sought in the next."""
        self._copies = {oid: copy for oid, copy in self._copies.items() if not copy.is_here}
        self.copy_bytes = sum(copy.nbytes for copy in self._copies.values())
        self.seek_again(self._copies.values())
        self.inputs.lose()
        for account in self._accounts.values():
            for oid, count in account.pins.items():
                account.stale[oid] = account.stale.get(oid, 0) + count
            account.pins.clear()

    def seek_again(self, copies: Iterable[Copy]) -> None:
        """These were not found because the connection broke."""
        for copy in copies:
            self._with_way(lambda copy=copy: self._resolve(copy))  # type: ignore[misc]

    def copy_of(self, oid: int) -> Optional[Copy]:
        """The copy that somebody uses or waits for."""
        return self._copies.get(oid)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits here and every result has been handed over."""
        return self.inputs.is_idle and self._leftovers.is_idle and (self._own is None or self._own.is_idle)

    def may_be_idle(self) -> None:
        """Something that a leaving worker waits for is done."""
        if self.inputs.is_draining:
            self._on_idle()

    # --- the pool

    def feeding(self, runner: int, task_id: int, payload: Any) -> None:
        """A task goes to this runner next: tell it where the inputs are, once for each mention."""
        account = self._account(runner)
        for oid in stored_in(payload):
            copy = self._copies.get(oid)
            if copy is None or not copy.path:
                continue  # Abandoned: nobody will hear of this task.
            copy.users += 1
            account.pins[oid] = account.pins.get(oid, 0) + 1
            self.pool.send(runner, msg.ObjectAt(0, oid, copy.path, copy.nbytes, None, ""))

    def reported(self, results: List[Result]) -> None:
        """These ends of tasks were told: the coordinator lets go of the objects in them for the runners that made them."""
        if not self._results:
            return
        for result in results:
            oid = _result_oid(result[3])
            runner = self._results.pop(oid, None) if oid else None
            if runner is not None:
                self._take_grants(runner, oid, 1)

    def unreported(self, results: Any) -> None:
        """A runner told these: what was not passed on is nobody's."""
        if not self._results:
            return
        for result in results:
            oid = _result_oid(result[3])
            runner = self._results.pop(oid, None) if oid else None
            if runner is not None and self._take_grants(runner, oid, 1):
                self.send(msg.ReleaseRefs([(oid, 1)]))

    # --- values of generators

    def keep_item(self, runner: int, payload: Any) -> None:
        """A runner's generator has made a value that refers to objects: from now on they are held here, not by the runner."""
        own = _result_oid(payload)
        others = mentioned(payload)
        if own:
            others.remove(own)
            self._results.pop(own, None)
            self._take_grants(runner, own, 1)
        if others:
            self.send(msg.HoldRefs(others))

    def drop_items(self, payloads: Iterable[Any]) -> None:
        """Such values are not kept any more."""
        counts: Dict[int, int] = {}
        for payload in payloads:
            for oid in mentioned(payload):
                counts[oid] = counts.get(oid, 0) + 1
        self.send(msg.ReleaseRefs(list(counts.items())))
        if self._leftovers:
            self._prune()

    # --- runners

    def runner_message(self, runner: int, kind: Any, message: Any) -> None:
        """A runner wants something."""
        account = self._account(runner)
        if kind is msg.CreateSegment:
            account.writing[message.oid] = None
            self.create(runner, message.oid, message.nbytes, self._on_created(runner, message))
        elif kind is msg.PutObject:
            account.grants[message.oid] = account.grants.get(message.oid, 0) + 1
            self._put(runner, account, message)
        elif kind is msg.LocateObject:
            self.acquire(message.oid, message.nbytes, self._on_located(runner, message.number))
        elif kind is msg.UnpinObjects:
            for oid, count in message.objects:
                count -= _take(account.stale, oid, count)
                self.release(oid, _take(account.pins, oid, count))
        elif kind is msg.HoldRefs:
            for oid in message.oids:
                account.grants[oid] = account.grants.get(oid, 0) + 1
            self.send(message)
        elif kind is msg.ReleaseRefs:
            self._release_refs(runner, message.objects)
        elif kind is msg.DeleteObjects:
            written = [oid for oid in message.oids if oid in account.writing]
            for oid in written:
                self._discard(oid, account.writing.pop(oid))
            others = [oid for oid in message.oids if oid not in written]
            if others and self.link is not None:
                self.send(msg.DeleteObjects(others))
            else:
                self._unwanted.extend(others)
        else:
            raise RuntimeError(f"a runner sent {message!r}")

    def create(self, runner: int, oid: int, nbytes: int, then: Callable[[str, str], None]) -> None:
        """Get a segment for a runner, once there is a store."""

        def ask() -> None:
            assert self._way is not None
            account = self._accounts.get(runner)
            if account is not None and oid in account.writing:
                self._way.create(runner, oid, nbytes, then)

        self._with_way(ask)

    def _on_created(self, runner: int, message: msg.CreateSegment) -> Callable[[str, str], None]:
        oid = message.oid

        def then(path: str, error: str) -> None:
            account = self._accounts.get(runner)
            way = self._way
            assert way is not None, oid
            if path and (account is None or oid not in account.writing):
                way.discard(oid)
                return
            if account is not None and not path:
                account.writing.pop(oid, None)
            elif account is not None:
                account.writing[oid] = (way, path)
                if way is not self._own:
                    _remember(account.segments, os.path.basename(path))
            self.pool.send(runner, msg.SegmentCreated(message.number, path, error))

        return then

    def _put(self, runner: int, account: _Account, message: msg.PutObject) -> None:
        oid = message.oid
        if not message.segment:
            self._note_made(message, "")
            self.send(message)
            return
        given = account.writing.pop(oid, None)
        if given is None:
            return
        way, path = given
        self._results[oid] = runner
        if way is self._own:
            self._note_made(message, "")
            way.put(message)
        elif way is self._way:
            self._note_made(message, path)
            way.put(message)
        elif self._leftovers.is_written(oid, message.nbytes):  # For a coordinator that was lost meanwhile.
            self._note_made(message, "")
            self.send(message._replace(segment=""))

    def _discard(self, oid: int, given: Optional[Tuple[_Store, str]]) -> None:
        """What a runner was writing is not wanted."""
        if given is None:
            return  # It was not given a segment yet, and will not be.
        if given[0] is self._own or given[0] is self._way:
            given[0].discard(oid)
        else:
            self._leftovers.give_up(oid)

    def _on_located(self, runner: int, number: int) -> OnFound:
        def then(copy: Optional[Copy], error: str) -> None:
            if copy is None:
                self.pool.send(runner, msg.ObjectAt(number, 0, "", 0, None, error))
            elif not copy.path:
                self.pool.send(runner, msg.ObjectAt(number, copy.oid, "", 0, copy.data, ""))
                self.release(copy.oid)
            elif self.pool.send(runner, msg.ObjectAt(number, copy.oid, copy.path, copy.nbytes, None, "")):
                pins = self._account(runner).pins
                pins[copy.oid] = pins.get(copy.oid, 0) + 1
            else:
                self.release(copy.oid)

        return then

    def _release_refs(self, runner: int, objects: Any) -> None:
        released = [(oid, self._take_grants(runner, oid, count)) for oid, count in objects]
        released = [(oid, count) for oid, count in released if count]
        if released:
            self.send(msg.ReleaseRefs(released))

    def _take_grants(self, runner: int, oid: int, count: int) -> int:
        """Strike grants from a runner's account; how many there were."""
        account = self._accounts.get(runner)
        if account is None:
            return 0
        taken = _take(account.grants, oid, count)
        if oid not in account.grants:
            self._results.pop(oid, None)
        return taken

    def runner_gone(self, runner: int) -> None:
        """Give back what it had."""
        account = self._accounts.pop(runner, None)
        if account is None:
            return
        for oid, given in account.writing.items():
            self._discard(oid, given)
        for oid, count in account.pins.items():
            self.release(oid, count)
        for oid in account.grants:
            self._results.pop(oid, None)
        if account.grants:
            self.send(msg.ReleaseRefs(list(account.grants.items())))

    def _account(self, runner: int) -> _Account:
        account = self._accounts.get(runner)
        if account is None:
            account = self._accounts[runner] = _Account()
        return account

    def tell_writers(self, names: List[str], runner: Optional[int] = None) -> None:
        """Segments are gone: their writers let go of them."""
        for each in list(self._accounts) if runner is None else [runner]:
            self.pool.send(each, msg.SegmentsGone(names))


def _remember(names: OrderedDict[str, None], name: str) -> None:
    names[name] = None
    names.move_to_end(name)
    while len(names) > SEGMENTS_KNOWN:
        names.popitem(last=False)


def _take(counts: Dict[int, int], oid: int, count: int) -> int:
    """Strike up to `count` of an object from a table; how many there were."""
    held = counts.get(oid, 0)
    if held > count >= 0:
        counts[oid] = held - count
        return count
    counts.pop(oid, None)
    return held


def _result_oid(payload: Any) -> int:
    """The object that is the value of a result; 0 if it is none."""
    while isinstance(payload, tuple):
        payload = payload[0]
    return payload.oid if type(payload) is Stored else 0


def _shares_host(offer: msg.StoreOffer) -> bool:
    from gpumesh.store.segments import shares_host

    return shares_host(offer.probe, offer.secret)
