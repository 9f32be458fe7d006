"""The books of one worker's cards, kept by the coordinator: what of each is whose, and on which the next task runs. Pure.

A task that needs a GPU runs under a *lease*: these cards, seen by one process that runs one task at a time. Leases that share cards
are told apart by their ordinal. The worker keeps no books; it does what it is told.

    memory of a card
    |-- others --|------------- booked by leases --------------|------ free ------|
     measured      ask + CONTEXT_BYTES, or a share of the rest

Promises:

1. A card that a lease has whole has no other lease, but for those of deeper tasks that came while its own waited for others.
2. What leases ask for on one card, and what others hold of it when the last of them is opened, is together no more than its memory; the
   shares of fractions add up to no more than one card.
3. Cards of one lease are all of one kind, and stand in the order in which the worker lists them: the same cards are the same tuple.
4. Leases on the same tuple of cards have different ordinals, the smallest that are free.
5. What is possible on an empty worker (`capacity`) depends on its facts alone; what others hold only makes it wait.
6. An open lease stays in the books until it is closed, whatever becomes of its cards.
"""

from __future__ import annotations

import math
from typing import Dict, List, Optional, Sequence, Tuple

from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import CardReading, DeviceFacts, Requirement

# What a process costs on a card before its first tensor, beside what its task asks for: 437 MiB were seen with torch
# (pytorch/pytorch#86539). On Apple's cards a process has no context of that size.
CONTEXT_BYTES = 450 * 1024 * 1024
KINDS_WITH_CONTEXT = ("cuda", "rocm")
LEASES_PER_CARD = 48  # Processes on one card: as many clients as NVIDIA's own sharing (MPS, Volta and newer) allows.
# What display and driver hold, up to this fraction of a card, comes off every fraction of it alike: otherwise two halves would never fit.
OTHERS_SHARED_FRACTION = 1 / 8
LIKE_SCORE = 0.9  # Of the best: a card is as good as it. Two cards of one model differ by a few percent from run to run.
PARTS = 1_000_000  # Of a card: fractions are added as whole numbers, which come out even.
CACHED_NEEDS = 1024

Key = Tuple[Tuple[str, ...], int]


class Lease:
    """Cards for one process that runs one task at a time."""

    __slots__ = ("cards", "ordinal", "need", "ask", "part", "is_whole", "is_lent")

    def __init__(self, cards: Tuple[str, ...], ordinal: int, need: Requirement, ask: int, part: int, is_whole: bool) -> None:
        self.cards = cards  # DeviceFacts.key each.
        self.ordinal = ordinal  # Among leases on the same cards.
        self.need = need
        self.ask = ask  # Bytes of each card, without the process's own; 0: what its share of the card comes to.
        self.part = part  # Of PARTS, of the one card; 0 with whole cards and where only memory counts.
        self.is_whole = is_whole  # Nobody else is on these cards.
        self.is_lent = False  # Its task waits for others, and deeper ones may be there meanwhile.

    def __repr__(self) -> str:
        return f"Lease({'+'.join(self.cards)}#{self.ordinal})"


class CardUsage(NamedTuple):
    """How a card is used, for people."""

    key: str
    name: str
    total: int  # Bytes.
    others: int  # Bytes that other programs or the driver hold, as last measured.
    reserved: int  # Bytes booked for leases; all that others do not hold, when one has the card whole.
    leases: Tuple[Lease, ...]
    problem: str


class _Card:
    __slots__ = ("facts", "place", "others", "leases", "bytes", "parts", "context", "is_whole", "is_gone")

    def __init__(self, facts: DeviceFacts, place: int) -> None:
        self.facts = facts
        self.place = place  # In the worker's list.
        self.others = facts.others
        self.leases: Dict[Lease, None] = {}
        self.bytes = 0  # Booked by leases that ask for bytes.
        self.parts = 0  # Of PARTS, booked by fractions.
        self.context = CONTEXT_BYTES if facts.kind in KINDS_WITH_CONTEXT else 0
        self.is_whole = False  # Its one lease has all of it.
        self.is_gone = False  # Not told of any more, and kept for the leases that are on it.

    def share(self, part: int) -> int:
        """Bytes that a fraction comes to."""
        memory = self.facts.memory
        return (memory - min(self.others, int(memory * OTHERS_SHARED_FRACTION))) * part // PARTS

    def is_crowded(self) -> bool:
        """Whether other programs have more of it than a display needs: not the first choice of who does not say how much is enough."""
        return self.others > self.facts.memory * OTHERS_SHARED_FRACTION

    def booked(self) -> int:
        """Bytes of it that leases have, with what their processes cost."""
        booked = self.bytes
        if self.parts:
            booked += sum(max(self.share(lease.part), self.context) for lease in self.leases if lease.part and not lease.ask)
        return booked

    def add(self, lease: Lease) -> None:
        self.leases[lease] = None
        self.parts += lease.part
        self.is_whole = self.is_whole or lease.is_whole
        if lease.ask:
            self.bytes += lease.ask + self.context

    def remove(self, lease: Lease) -> None:
        del self.leases[lease]
        self.parts -= lease.part
        self.is_whole = any(other.is_whole for other in self.leases) if self.leases else False
        if lease.ask:
            self.bytes -= lease.ask + self.context


class _Need:
    """What a requirement comes to on this worker."""

    __slots__ = ("cards", "count", "part", "ask", "capacity", "score")

    def __init__(self, cards: List[_Card], count: int, part: int, ask: int) -> None:
        self.cards = cards  # Those that can ever serve it, the fastest first.
        self.count = count  # Whole cards; 0: one card, shared.
        self.part = part
        self.ask = ask
        self.capacity = 0
        self.score = sum(card.facts.score for card in cards) / len(cards) if cards else 0.0


class Cards:
    """All cards of one worker.

    Args:
        devices: As the worker lists them; what is no GPU is passed over.
        host_memory: Bytes, of which integrated cards take theirs; 0: not known.
    """

    __slots__ = ("_cards", "_host_memory", "_leases", "_open", "_idle", "_needs", "_lent")

    def __init__(self, devices: Sequence[DeviceFacts], host_memory: int = 0) -> None:
        self._cards: Dict[str, _Card] = {}
        self._host_memory = host_memory
        self._leases: Dict[Lease, None] = {}
        self._open: Dict[Key, Lease] = {}
        self._lent: Dict[Lease, int] = {}  # Those whose tasks wait for others, and at what depth.
        self._idle: Dict[Key, None] = {}  # Leases that were: their processes are probably still there.
        self._needs: Dict[Requirement, _Need] = {}
        self.update(devices)

    # --- what is told

    def update(self, devices: Sequence[DeviceFacts]) -> None:
        """The worker tells its devices anew. Leases stay, also on a card that is gone or not offered any more."""
        self._needs = {}
        before = self._cards
        self._cards = {}
        for place, facts in enumerate(devices):
            if facts.kind == "cpu" or facts.key in self._cards:
                continue
            card = before.pop(facts.key, None)
            if card is None:
                card = _Card(facts, place)
            elif card.facts.others != facts.others or card.is_gone:
                card.others = facts.others  # Otherwise what was measured since is newer.
            card.facts = facts
            card.place = place
            card.is_gone = False
            self._cards[facts.key] = card
        for key, card in before.items():
            if card.leases:
                card.facts = card.facts._replace(problem="gone")
                card.is_gone = True
                card.place = len(devices)
                self._cards[key] = card
        for idle in [key for key in self._idle if not all(card in self._cards for card in key[0])]:
            del self._idle[idle]

    def measure(self, readings: Sequence[CardReading]) -> bool:
        """What others hold has been measured. True if what fits may have changed."""
        has_changed = False
        for reading in readings:
            card = self._cards.get(reading.key)
            if card is not None and reading.others >= 0 and reading.others != card.others:
                card.others = int(reading.others)
                has_changed = True
        return has_changed

    # --- what is asked

    @property
    def leases(self) -> Sequence[Lease]:
        """Those that are open, the oldest first."""
        return tuple(self._leases)

    @property
    def lent(self) -> Sequence[Lease]:
        """Those of them whose tasks wait for others."""
        return tuple(self._lent)

    def capacity(self, need: Requirement) -> int:
        """How many tasks that need this can run at once when nothing else does and others hold nothing; 0: never possible."""
        return self._known(need).capacity

    def score(self, need: Requirement) -> float:
        """Mean score of the cards that can serve it; 0.0 if there are none."""
        return self._known(need).score

    def can_open(self, need: Requirement, depth: int = 0) -> bool:
        """Whether `open` would give a lease now."""
        known = self._known(need)
        lifted = self._lift(depth) if self._lent else []
        if known.count > 1:
            can = self._choose_several(known) is not None
        else:
            can = any(self._left(card, known) >= 0 for card in known.cards)
        self._lower(lifted)
        return can

    def usage(self) -> List[CardUsage]:
        """How each card is used, in the worker's order."""
        rows: List[CardUsage] = []
        for card in sorted(self._cards.values(), key=lambda card: card.place):
            facts = card.facts
            reserved = max(0, facts.memory - card.others) if card.is_whole else card.booked()
            rows.append(
                CardUsage(facts.key, facts.name, facts.memory, card.others, reserved, tuple(card.leases), facts.problem)
            )
        return rows

    # --- what is booked

    def lend(self, lease: Lease, depth: int) -> None:
        """The task that has it waits for others, and is inside of `depth` tasks: what is deeper finds the cards as if they were free.

        It keeps its memory there. But the task that it waits for may need that very card, and neither would ever end.
        """
        self._lent[lease] = depth
        lease.is_lent = True

    def take_back(self, lease: Lease) -> None:
        """That task goes on, beside what has come meanwhile."""
        self._lent.pop(lease, None)
        lease.is_lent = False

    def _lift(self, depth: int) -> List[Lease]:
        """Take the leases that are lent to tasks of this depth off their cards, until `_lower`."""
        lifted = [lease for lease, own in self._lent.items() if own < depth]
        for lease in lifted:
            for key in lease.cards:
                self._cards[key].remove(lease)
        return lifted

    def _lower(self, lifted: List[Lease]) -> None:
        for lease in lifted:
            for key in lease.cards:
                self._cards[key].add(lease)

    def open(self, need: Requirement, depth: int = 0) -> Optional[Lease]:
        """Book cards for one task after another of this need; None while there is no room, and if there can never be.

        `depth`: of these tasks, for whom cards of tasks that wait for others may be free.
        The fastest cards come first. Among cards that are about equally fast, those come first whose last process can be used again; then
        the card with the least room that suffices, so that the largest stays whole.
        """
        known = self._known(need)
        lifted = self._lift(depth) if self._lent else []
        if known.count > 1:
            chosen = self._choose_several(known)
        else:
            card = self._choose_one(known)
            chosen = [card] if card is not None else None
        self._lower(lifted)
        if chosen is None:
            return None
        cards = tuple(card.facts.key for card in chosen)
        ordinal = 0
        while (cards, ordinal) in self._open:
            ordinal += 1
        lease = Lease(cards, ordinal, need, known.ask, known.part, known.count > 0)
        for card in chosen:
            card.add(lease)
        self._leases[lease] = None
        self._open[(cards, ordinal)] = lease
        if self._idle.pop((cards, ordinal), self) is self and self._idle:
            # Its process is new, and the worker may end idle ones on the same cards for it: count on none of them.
            for key in [key for key in self._idle if not set(key[0]).isdisjoint(cards)]:
                del self._idle[key]
        return lease

    def reopen(self, need: Requirement, cards: Tuple[str, ...], ordinal: int) -> Optional[Lease]:
        """The lease of a worker that is back and still has something under it; None if the books do not allow that any more."""
        known = self._open.get((cards, ordinal))
        if known is not None:
            return known if known.need == need else None
        wanted = self._known(need)
        chosen = [self._cards[key] for key in cards if key in self._cards]
        if not chosen or len(chosen) != len(cards) or any(card.is_whole or (wanted.count and card.leases) for card in chosen):
            return None
        lease = Lease(cards, ordinal, need, wanted.ask, wanted.part, wanted.count > 0)
        for card in chosen:
            card.add(lease)
        self._leases[lease] = None
        self._open[(cards, ordinal)] = lease
        self._idle.pop((cards, ordinal), None)
        return lease

    def close(self, lease: Lease) -> None:
        """Nothing runs under it any more, and nothing will."""
        self.take_back(lease)
        del self._leases[lease]
        del self._open[(lease.cards, lease.ordinal)]
        for key in lease.cards:
            card = self._cards[key]
            card.remove(lease)
            if card.is_gone and not card.leases:
                del self._cards[key]
        if all(key in self._cards for key in lease.cards):
            self._idle[(lease.cards, lease.ordinal)] = None

    # --- choosing

    def _choose_one(self, need: _Need) -> Optional[_Card]:
        best: Optional[_Card] = None
        best_rank: Tuple[bool, bool, int, int] = (False, False, 0, 0)
        least_score = 0.0
        for card in need.cards:
            if best is not None and card.facts.score < least_score:
                break
            left = self._left(card, need)
            if left < 0:
                continue
            if best is None:
                least_score = card.facts.score * LIKE_SCORE
            rank = (not need.ask and card.is_crowded(), not self._has_idle((card.facts.key,)), left, card.place)
            if best is None or rank < best_rank:
                best, best_rank = card, rank
        return best

    def _choose_several(self, need: _Need) -> Optional[List[_Card]]:
        """The fastest kind that has enough cards free; there those with a process of exactly this set, or the fastest."""
        count = need.count
        sets: List[List[_Card]] = []
        for kind in dict.fromkeys(card.facts.kind for card in need.cards):
            free = [card for card in need.cards if card.facts.kind == kind and self._left(card, need) >= 0]
            if len(free) >= count:
                last = free[count - 1].facts.score * LIKE_SCORE
                free = [card for card in free if card.facts.score >= last]
                sets.append(self._hot_set(free, count) or self._best_set(free, count))
        if not sets:
            return None
        chosen = max(sets, key=lambda cards: min(card.facts.score for card in cards))
        return sorted(chosen, key=lambda card: card.place)

    def _hot_set(self, free: List[_Card], count: int) -> Optional[List[_Card]]:
        by_key = {card.facts.key: card for card in free}
        for cards, ordinal in self._idle:
            if len(cards) == count and not ordinal and all(key in by_key for key in cards):
                return [by_key[key] for key in cards]
        return None

    def _best_set(self, free: List[_Card], count: int) -> List[_Card]:
        """Faster cards first; of those about as fast as the last one taken, those that no idle process of another set is on."""
        least = free[count - 1].facts.score
        sure = [card for card in free if card.facts.score * LIKE_SCORE > least]
        rest = [card for card in free if card.facts.score * LIKE_SCORE <= least]
        rest.sort(key=lambda card: (card.is_crowded(), self._has_idle((card.facts.key,)), card.facts.memory, card.place))
        return sure + rest[: count - len(sure)]

    def _has_idle(self, cards: Tuple[str, ...]) -> bool:
        """Whether the next lease on exactly these cards would probably find its process there."""
        if not self._idle:
            return False
        ordinal = 0
        while (cards, ordinal) in self._open:
            ordinal += 1
        return (cards, ordinal) in self._idle

    def _left(self, card: _Card, need: _Need) -> int:
        """Bytes of a card that would be left beside one more lease; -1 if it does not fit."""
        facts = card.facts
        if card.is_whole or facts.problem or len(card.leases) >= LEASES_PER_CARD:
            return -1
        if (need.count and card.leases) or card.parts + need.part > PARTS:
            return -1
        if not facts.memory:
            return 0  # It is not known; whoever asks for bytes has been turned away.
        ask = need.ask or card.share(need.part)
        free = self._free(card)
        if not card.leases and not (facts.is_integrated and self._host_memory and self._has_integrated_lease()):
            # The only one on a card needs no room for a process of its own beside what it asks for, or nothing would fit a whole card.
            return -1 if max(ask, min(card.context, facts.memory)) > free else free - ask
        cost = ask + card.context if need.ask else max(ask, card.context)
        return free - cost if cost <= free else -1

    def _has_integrated_lease(self) -> bool:
        return any(other.leases for other in self._cards.values() if other.facts.is_integrated)

    def _free(self, card: _Card) -> int:
        free = card.facts.memory - card.others - card.booked()
        if card.facts.is_integrated and self._host_memory:
            shared = [other for other in self._cards.values() if other.facts.is_integrated]
            held = max(other.others for other in shared)
            free = min(free, self._host_memory - held - sum(other.booked() for other in shared))
        return free

    # --- what is possible

    def _known(self, need: Requirement) -> _Need:
        known = self._needs.get(need)
        if known is None:
            if len(self._needs) >= CACHED_NEEDS:
                self._needs = {}
            known = self._needs[need] = self._understand(need)
        return known

    def _understand(self, need: Requirement) -> _Need:
        if not need.needs_gpu:
            return _Need([], 0, 0, 0)
        count = math.ceil(need.gpus) if need.gpus >= 1 else 0
        part = max(1, int(need.gpus * PARTS)) if 0 < need.gpus < 1 else 0
        cards = [card for card in self._cards.values() if _serves(card.facts, need)]
        cards.sort(key=lambda card: (-card.facts.score, card.place))
        known = _Need(cards, count, part, need.gpu_memory)
        known.capacity = self._capacity(known)
        if not known.capacity:
            known.cards = []
        return known

    def _capacity(self, need: _Need) -> int:
        if need.count:
            kinds: Dict[str, int] = {}
            for card in need.cards:
                kinds[card.facts.kind] = kinds.get(card.facts.kind, 0) + 1
            return sum(number // need.count for number in kinds.values())
        total = 0
        integrated = 0
        for card in need.cards:
            facts = card.facts
            count = min(LEASES_PER_CARD, PARTS // need.part if need.part else LEASES_PER_CARD)
            if facts.memory:
                cost = need.ask + card.context if need.ask else max(facts.memory * need.part // PARTS, card.context)
                memory = facts.memory
                if facts.is_integrated and self._host_memory:
                    memory = min(memory, self._host_memory - integrated)
                least = need.ask or facts.memory * need.part // PARTS
                alone = int(least <= memory and not (facts.is_integrated and integrated))
                count = min(count, memory // max(1, cost) or alone)
                if facts.is_integrated:
                    integrated += count * cost
            total += count
        return total


def _serves(facts: DeviceFacts, need: Requirement) -> bool:
    """Whether an empty card could serve a need, or be one of several that do."""
    kind, _, index = need.device.partition(":")
    if kind not in ("", "gpu") and facts.kind != kind:
        return False
    if index and facts.index != int(index):
        return False
    if facts.problem or (need.model and need.model not in facts.name.lower()):
        return False
    if need.gpus > 1 and facts.uuid.startswith("MIG-"):
        return False  # A process sees at most one slice of a card.
    return need.gpu_memory <= facts.memory
