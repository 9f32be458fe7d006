"""Room in shared memory that was asked for before it is needed: who puts values of one size after the other need not wait for each.

One segment, of the size of the last two values, and no larger than SPARE_BYTES. What nobody writes into for longer than SPARE_SECONDS
goes back.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Optional

from gpumesh.config import SPARE_BYTES, SPARE_SECONDS

if TYPE_CHECKING:
    from gpumesh.client.link import MeshLink


class Segment:
    """One that was asked for."""

    __slots__ = ("link", "number", "oid", "nbytes", "reply", "since")

    def __init__(self, link: MeshLink, number: int, oid: int, nbytes: int, reply: Any) -> None:
        self.link = link
        self.number = number  # Of the question.
        self.oid = oid
        self.nbytes = nbytes
        self.reply = reply
        self.since = time.monotonic()


class Spare:
    """The one that lies ready. Whoever changes it holds a lock of the owner's."""

    __slots__ = ("segment", "_last")

    def __init__(self) -> None:
        self.segment: Optional[Segment] = None
        self._last = 0  # Size of the value put last.

    def is_wanted(self, nbytes: int) -> bool:
        """A value of so many bytes is being put: whether another of the same size is to be expected."""
        is_alike, self._last = nbytes == self._last, nbytes
        return is_alike and nbytes <= SPARE_BYTES and self.segment is None

    def take(self) -> Optional[Segment]:
        """What there is; it is the caller's now."""
        segment, self.segment = self.segment, None
        return segment

    def is_stale(self) -> bool:
        """Whether it has lain there for too long."""
        segment = self.segment
        return segment is not None and time.monotonic() - segment.since > SPARE_SECONDS
