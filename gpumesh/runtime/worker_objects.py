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
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any, Callable, Dict, List, Optional, Union

from gpumesh.model.payloads import Stored
from gpumesh.protocol import messages as msg
from gpumesh.runtime import settings
from gpumesh.runtime.link import PeerLink
from gpumesh.runtime.pool import RunnerPool
from gpumesh.runtime.runner_objects import stored_in
from gpumesh.runtime.worker_inputs import Result, TaskInputs
from gpumesh.runtime.worker_store import Copy, OnFound, OwnStore, SharedStore

logger = logging.getLogger("gpumesh.worker")


class _Account:
    """What one runner has to give back."""

    __slots__ = ("pins", "stale", "grants", "writing")

    def __init__(self) -> None:
        self.pins: Dict[int, int] = {}  # Object -> how often it was told where it is.
        self.stale: Dict[int, int] = {}  # The same, told by a coordinator that was lost since.
        self.grants: Dict[int, int] = {}  # Object -> references that the coordinator counts for it.
        self.writing: Dict[int, int] = {}  # Object that it was given a segment for -> its size.


class WorkerObjects:
    """See the module's promises. Every method runs on the loop's thread.

    Args:
        report: Results of tasks that never reached the pool.
        on_idle: Called when a worker that is leaving may have nothing left to do here.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: RunnerPool,
        *,
        report: Callable[[List[Result]], None],
        on_idle: Callable[[], None],
    ) -> None:
        self.pool = pool
        self.link: Optional[PeerLink] = None
        self.limit = settings.object_memory()
        self.loop = loop
        self._on_idle = on_idle
        self._way: Union[SharedStore, OwnStore, None] = None
        self._own: Optional[OwnStore] = None  # Stays for the next connection.
        self._undecided: List[Callable[[], None]] = []  # What waits for the way to be known.
        self._is_asking = False
        self._copies: Dict[int, Copy] = {}
        self.copy_bytes = 0  # Of all copies that somebody uses or waits for.
        self.has_own_store = False
        self.inputs = TaskInputs(self, report)
        self._accounts: Dict[int, _Account] = {}
        self._results: Dict[int, int] = {}  # Large object put by a runner -> that runner; until it was told as a result.

    # --- the connection

    def connected(self, link: PeerLink) -> None:
        """There is a coordinator; it knows nothing of what was before."""
        self.link = link
        self._ask_way()

    def disconnected(self) -> None:
        """The coordinator is lost, and with it every reference of this worker. The pool has been told to abandon its tasks."""
        self.link = None
        self._is_asking = False
        self.inputs.abandon()
        way, self._way = self._way, None
        if way is not None:
            way.disconnected()
        else:  # It was not known yet. What runners want to write stays asked for.
            for copy in [copy for copy in self._copies.values() if not copy.is_here]:
                self.found(copy, "", None, "lost: the connection to the coordinator was lost")
        self._results.clear()
        for account in self._accounts.values():
            account.grants.clear()

    def close(self) -> None:
        """The worker ends."""
        if self._own is not None:
            self._own.close()

    def send(self, message: Any) -> None:
        """To the coordinator, if there is one."""
        if self.link is not None and self.link.connection.established:
            self.link.send(message)

    def handle(self, kind: Any, message: Any) -> None:
        """A message of the coordinator, or an event of its connection."""
        if kind is msg.StoreOffer:
            self._decide(message)
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

    def lose_copies(self, reason: str) -> None:
        """Nothing of what is here may be used any more: the store behind it is gone."""
        copies, self._copies = self._copies, {}
        self.copy_bytes = 0
        for copy in copies.values():
            for then in copy.waiting:
                then(None, f"lost: {reason}")
        for account in self._accounts.values():
            for oid, count in account.pins.items():
                account.stale[oid] = account.stale.get(oid, 0) + count
            account.pins.clear()
            account.writing.clear()

    def copy_of(self, oid: int) -> Optional[Copy]:
        """The copy that somebody uses or waits for."""
        return self._copies.get(oid)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits here and every result has been handed over."""
        return self.inputs.is_idle and (self._way is None or self._way.is_idle)

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

    # --- runners

    def runner_message(self, runner: int, kind: Any, message: Any) -> None:
        """A runner wants something."""
        account = self._account(runner)
        if kind is msg.CreateSegment:
            account.writing[message.oid] = message.nbytes
            self._with_way(lambda: self._create(runner, message))
        elif kind is msg.PutObject:
            account.grants[message.oid] = account.grants.get(message.oid, 0) + 1
            if not message.segment:
                self.send(message)
            elif account.writing.pop(message.oid, None) is not None and self._way is not None:
                self._results[message.oid] = runner
                self._way.put(message)
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
            written = [oid for oid in message.oids if account.writing.pop(oid, None) is not None]
            for oid in written:
                self._discard(oid)
            others = [oid for oid in message.oids if oid not in written]
            if others:
                self.send(msg.DeleteObjects(others))
        else:
            raise RuntimeError(f"a runner sent {message!r}")

    def _create(self, runner: int, message: msg.CreateSegment) -> None:
        assert self._way is not None
        oid = message.oid

        def then(path: str, error: str) -> None:
            account = self._accounts.get(runner)
            if path and (account is None or oid not in account.writing):
                self._discard(oid)
                return
            if account is not None and not path:
                account.writing.pop(oid, None)
            self.pool.send(runner, msg.SegmentCreated(message.number, path, error))

        self._way.create(runner, oid, message.nbytes, then)

    def _discard(self, oid: int) -> None:
        """What a runner was writing is not wanted."""
        if self._way is not None:
            self._way.discard(oid)

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
        for oid in account.writing:
            self._discard(oid)
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
