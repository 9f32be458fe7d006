"""What the runners of a worker have made in the store of a coordinator that is lost: mapped, so that another can have it. No books.

A segment stays readable for whoever has it open, also when its folder is swept; nobody writes into one whose object only a lost
worker referred to (object_service).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any, Callable, Dict, Iterable, List

from gpumesh.config import KIB, MIB
from gpumesh.protocol import messages as msg

COPIED_BYTES = 256 * KIB  # An object of this size is copied: a map costs a descriptor.
ALL_COPIED_BYTES = 64 * MIB
MAPS = 256  # A quarter of the descriptors that a process usually may have; what is beyond is lost.


class Leftovers:
    """Objects by number: of those that are being written the open file, of the others their bytes."""

    def __init__(self) -> None:
        self._writing: Dict[int, int] = {}  # Object -> descriptor.
        self._maps: Dict[int, Any] = {}  # A map each, or a copy of what is small.
        self._mapped = 0  # How many are maps.
        self._copied_bytes = 0
        self._views: Dict[int, memoryview] = {}  # Fetch number -> what is being sent.
        self._unconfirmed: Dict[int, None] = {}  # Those that no coordinator has.

    def __contains__(self, oid: int) -> bool:
        return oid in self._maps

    def __bool__(self) -> bool:
        return bool(self._maps or self._writing)

    @property
    def is_idle(self) -> bool:
        """Whether the coordinator has all of it."""
        return not self._unconfirmed

    def keep_writing(self, oid: int, path: str) -> None:
        """A runner is writing this object."""
        try:
            self._writing[oid] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            pass  # The folder has been swept.

    def is_written(self, oid: int, nbytes: int) -> bool:
        """The runner is done with it; whether it can be had."""
        descriptor = self._writing.pop(oid, None)
        if descriptor is None:
            return False
        try:
            self._map(oid, descriptor, nbytes)
        finally:
            os.close(descriptor)
        return oid in self._maps

    def keep(self, oid: int, path: str, nbytes: int) -> None:
        """This object has been written."""
        if oid in self._maps:
            return
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            self._map(oid, descriptor, nbytes)
        finally:
            os.close(descriptor)

    def _map(self, oid: int, descriptor: int, nbytes: int) -> None:
        try:
            if not nbytes or os.fstat(descriptor).st_size < nbytes:
                return
            if nbytes <= COPIED_BYTES and self._copied_bytes + nbytes <= ALL_COPIED_BYTES:
                self._maps[oid] = os.pread(descriptor, nbytes, 0)
                self._copied_bytes += nbytes
            elif self._mapped < MAPS:
                self._maps[oid] = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_READ)
                self._mapped += 1
            else:
                return
            self._unconfirmed[oid] = None
        except OSError:
            pass  # Out of maps or of descriptors: then it is lost.

    def give_up(self, oid: int) -> None:
        """It will not be written."""
        descriptor = self._writing.pop(oid, None)
        if descriptor is not None:
            os.close(descriptor)

    # --- to the coordinator that is there now

    def send(self, fetch: msg.FetchObject, link: Any) -> None:
        """It fetches one of them."""
        view = self._views[fetch.number] = memoryview(self._maps[fetch.oid])
        link.connection.send_object(fetch.number, [view], fetch.window)
        link.flush_soon()

    def delivered(self, number: int) -> bool:
        """It has all of it, or does not want it any more; False if this number is none of ours."""
        view = self._views.pop(number, None)
        if view is not None:
            view.release()
        return view is not None

    def stored(self, oid: int) -> None:
        """It has it for good."""
        self._unconfirmed.pop(oid, None)

    def disconnected(self) -> None:
        """It is lost as well."""
        for view in self._views.values():
            view.release()
        self._views.clear()
        self._unconfirmed.update(dict.fromkeys(self._maps))

    def keep_only(self, is_needed: Callable[[int], bool]) -> None:
        """Let go of the others, apart from what is being sent."""
        busy = {id(view.obj) for view in self._views.values()}
        for oid in [oid for oid, kept in self._maps.items() if not is_needed(oid) and id(kept) not in busy]:
            kept = self._maps.pop(oid)
            if type(kept) is bytes:
                self._copied_bytes -= len(kept)
            else:
                self._mapped -= 1
                with contextlib.suppress(BufferError):  # The last chunk is on its way still; it goes with that.
                    kept.close()
            self._unconfirmed.pop(oid, None)

    def close(self) -> None:
        """The worker ends."""
        self.disconnected()
        for oid in list(self._writing):
            self.give_up(oid)
        self.keep_only(lambda oid: False)


def mentions(results: Iterable[Any]) -> List[List[int]]:
    """Of each result that is a value: the objects that it refers to, its own first (0 if it has none)."""
    from gpumesh.model.outcomes import Status
    from gpumesh.model.payloads import Stored, mentioned

    found: List[List[int]] = []
    for _, _, status, payload, _ in results:
        if status != Status.OK or type(payload) is bytes:
            continue
        value = payload[0] if isinstance(payload, tuple) else payload
        own = value.oid if type(value) is Stored else 0
        others = mentioned(payload)
        if own:
            others.remove(own)
        if own or others:
            found.append([own, *others])
    return found
