"""Who may stand at the door of a coordinator, without a socket: arrivals and time in, whom to let go out.

Promises:

1. Never more than `limit` strangers at once, and a bounded number of addresses remembered, whatever comes.
2. When the place is full, one goes for each that comes: of the address that has most strangers the oldest that has said nothing; if all of
   those have spoken, anybody who has said nothing for CROWDED_SECONDS; else the oldest of that address. Many connections from one place
   keep nobody else out. Each has CROWDED_SILENT_SECONDS, and if it has spoken CROWDED_SECONDS, for which others wait outside, so that a
   whole mesh can come back at once.
3. An address from which more than FAILED_PROOFS wrong tokens came within FAILED_PROOFS_SECONDS is refused at the door, each time twice as
   long as before, at most FAILED_PROOFS_MAX_SECONDS; from this machine itself at most FAILED_PROOFS_LOCAL_SECONDS: its own worker calls
   from the same address.
4. The same reason of the same address is worth a line once in REFUSALS_LOGGED_SECONDS, and all reasons of it REFUSALS_LOGGED lines; the
   next line says how many there were meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Dict, Hashable, List, Optional, Tuple

from gpumesh.config import (
    CROWDED_SECONDS,
    CROWDED_SILENT_SECONDS,
    FAILED_PROOFS,
    FAILED_PROOFS_LOCAL_SECONDS,
    FAILED_PROOFS_MAX_SECONDS,
    FAILED_PROOFS_SECONDS,
    KNOWN_STRANGERS,
    PENDING_HANDSHAKES,
    REFUSALS_LOGGED,
    REFUSALS_LOGGED_SECONDS,
)


class _Stranger:
    """Somebody whose handshake is not over."""

    __slots__ = ("address", "since", "has_spoken")

    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.since = now
        self.has_spoken = False


class _Record:
    """What an address has done."""

    __slots__ = ("failures", "since", "shut_until", "penalty_seconds")

    def __init__(self, now: float) -> None:
        self.failures = 0  # Since `since`.
        self.since = now
        self.shut_until = 0.0
        self.penalty_seconds = 1.0  # The next time.


class Admission:
    """See the module's promises. Strangers are named by any hashable key; addresses are texts as `network_of` makes them."""

    def __init__(self, limit: int = PENDING_HANDSHAKES) -> None:
        self.limit = limit
        self.refused = 0  # Strangers, since the start.
        self._strangers: OrderedDict[Hashable, _Stranger] = OrderedDict()  # Oldest first.
        self._counts: Dict[str, int] = {}  # Address -> its strangers; never 0.
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._said: OrderedDict[Tuple[str, str], Tuple[float, int]] = (
            OrderedDict()
        )  # (address, reason) -> last line, how many since.
        self._lines: OrderedDict[str, Tuple[float, int, int]] = OrderedDict()  # Address -> since when, lines, how many more.

    def __len__(self) -> int:
        return len(self._strangers)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._strangers

    def is_shut(self, address: str, now: float) -> float:
        """For how many seconds this address is refused; 0: it may come in."""
        record = self._records.get(address)
        return max(0.0, record.shut_until - now) if record is not None else 0.0

    def crowded_for(self, now: float) -> float:
        """For how many seconds nobody should be taken in, unless somebody leaves; 0: there is a place, or one can be made."""
        if len(self._strangers) < self.limit:
            return 0.0
        stranger = self._strangers[self._choose(now)]
        return max(0.0, stranger.since + (CROWDED_SECONDS if stranger.has_spoken else CROWDED_SILENT_SECONDS) - now)

    def arrive(self, key: Hashable, address: str, now: float) -> List[Hashable]:
        """A stranger comes in; those that have to go for it have left."""
        assert key not in self._strangers, key
        gone: List[Hashable] = []
        while len(self._strangers) >= self.limit:
            gone.append(self._choose(now))
            self.leave(gone[-1])
        self._strangers[key] = _Stranger(address, now)
        self._counts[address] = self._counts.get(address, 0) + 1
        return gone

    def _choose(self, now: float) -> Hashable:
        """Who goes next."""
        most = max(self._counts.values())
        crowd = [key for key, each in self._strangers.items() if self._counts[each.address] == most]
        silent = [key for key, each in self._strangers.items() if not each.has_spoken]
        for key in crowd:
            if not self._strangers[key].has_spoken:
                return key
        for key in silent:
            if now - self._strangers[key].since >= CROWDED_SECONDS:
                return key
        return crowd[0]

    def speaks(self, key: Hashable) -> None:
        """A stranger has sent something."""
        stranger = self._strangers.get(key)
        if stranger is not None:
            stranger.has_spoken = True

    def advances(self, key: Hashable, now: float) -> None:
        """A stranger has got through TLS: it has its moment from now on."""
        stranger = self._strangers.get(key)
        if stranger is not None:
            stranger.since = now

    def leave(self, key: Hashable) -> bool:
        """It is no stranger any more; whether it was one."""
        stranger = self._strangers.pop(key, None)
        if stranger is None:
            return False
        left = self._counts[stranger.address] - 1
        if left:
            self._counts[stranger.address] = left
        else:
            del self._counts[stranger.address]
        return True

    def proof_failed(self, address: str, now: float, *, is_local: bool) -> None:
        """Somebody from this address did not know the token."""
        record = self._records.pop(address, None)
        if record is None or now - max(record.since, record.shut_until) > FAILED_PROOFS_MAX_SECONDS:
            record = _Record(now)
        self._records[address] = record
        if len(self._records) > KNOWN_STRANGERS:
            self._records.popitem(last=False)
        if now - record.since > FAILED_PROOFS_SECONDS:
            record.since, record.failures = now, 0
        record.failures += 1
        if record.failures <= FAILED_PROOFS:
            return
        longest = FAILED_PROOFS_LOCAL_SECONDS if is_local else FAILED_PROOFS_MAX_SECONDS
        record.shut_until = now + min(record.penalty_seconds, longest)
        record.penalty_seconds = min(2 * record.penalty_seconds, FAILED_PROOFS_MAX_SECONDS)
        record.since, record.failures = record.shut_until, FAILED_PROOFS - 1  # One try more than none when it is over.

    def line(self, address: str, reason: str, now: float) -> Optional[str]:
        """What to add to the log line about this refusal ("" or how many were not told); None: say nothing, it was said before."""
        self.refused += 1
        return self._line(address, reason, now)

    def own_trouble(self, what: str, now: float) -> bool:
        """Nobody can be taken in for a reason of this machine's, and nobody is refused by that; whether it is worth a line."""
        return self._line("", what, now) is not None

    def _line(self, address: str, reason: str, now: float) -> Optional[str]:
        key = (address, reason)
        said = self._said.pop(key, None)
        if said is not None and now - said[0] < REFUSALS_LOGGED_SECONDS:
            self._said[key] = (said[0], said[1] + 1)
            return None
        since, lines, more = self._lines.pop(address, (now, 0, 0))
        if now - since >= REFUSALS_LOGGED_SECONDS:
            since, lines = now, 0
        if lines >= REFUSALS_LOGGED:
            self._lines[address] = (since, lines, more + 1)
            return None
        self._lines[address] = (since, lines + 1, 0)
        self._said[key] = (now, 0)
        for table in (self._said, self._lines):
            if len(table) > KNOWN_STRANGERS:
                table.popitem(last=False)
        if said is not None and said[1]:
            return f" ({said[1]} more of this since)"
        return f" ({more} more of other kinds from there since)" if more else ""


def network_of(host: str) -> str:
    """Under which name an IP address is counted: IPv4 as it is, IPv6 by its first 64 bits, of which one household has one."""
    text = host.partition("%")[0]
    if ":" not in text or "." in text:
        return text
    head, gap, tail = text.partition("::")
    groups = [part for part in head.split(":") if part]
    if gap:
        rest = [part for part in tail.split(":") if part]
        groups += ["0"] * (8 - len(groups) - len(rest)) + rest
    return ":".join(part.lstrip("0") or "0" for part in groups[:4]) + "::/64"
