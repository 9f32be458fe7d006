"""Which ready tasks go where, when some have large inputs: each to where it is expected to end first, the time for its inputs included. Changes nothing.

A worker looks at the first tasks of a run rather than at the next one only, and takes those first whose inputs it has; but one that was passed over
`OVERTAKEN_MOST` times goes before them. A task whose inputs are at a busy worker stays in the queue if waiting for that one is shorter than bringing
them elsewhere, and no longer than bringing them would have taken: so a wrong guess at most doubles that time.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from gpumesh.model.records import NamedTuple
from gpumesh.scheduler.horizon import may_take
from gpumesh.scheduler.locality import Locality, Needs
from gpumesh.scheduler.placement import LARGE_MESH, Bid, allowance, card_room, room, space
from gpumesh.scheduler.queues import Group, Lane, Run
from gpumesh.scheduler.states import Spec, Worker

WINDOW = 32  # Ready tasks of a run that are looked at: if all are better off elsewhere, one more here gains 1/32 at most.
WIDE_WINDOW = 512  # If there is nothing for a worker among those. A tenth of a millisecond.
RUNS = 8  # Of a lane, when the first ones wait for busy workers.
OVERTAKEN_MOST = 64  # Two windows.
UNKNOWN_SECONDS = 1.0  # Taken for the length on the fastest worker of what was never measured, beside the time for its inputs.
SLOTS_ASKED = 8  # Of a busy worker, for the next one that comes free.

Rooms = List[Tuple[Worker, int]]
"""Who has room for how many tasks of a spec."""


class Choice(NamedTuple):
    """Ready tasks of one run, some for each of these workers.

    Attributes:
        shares: Who gets which; nothing if nobody should get any now.
        passed: Those with large inputs that they overtake.
        kept: Those that stay for the sake of a busy worker.
        is_held: Somebody has room that a ready task could have used.
    """

    lane: Lane
    run: Run
    shares: List[Tuple[Worker, List[int]]]
    passed: List[int]
    kept: List[int]
    is_held: bool


def choose(group: Group, locality: Locality, rooms_of: Callable[[Spec], Rooms], now: float) -> Choice:
    """What to assign next, in the order of the clients' turns; the group has ready tasks."""
    is_held = False
    kept: List[int] = []
    found: Dict[Spec, Rooms] = {}
    for lane in sorted(group.lanes.values(), key=lambda lane: lane.client.served):
        for run in islice(lane.runs, RUNS):
            spec = run.spec
            if spec not in found:
                found[spec] = rooms_of(spec)
            rooms = found[spec]
            if not rooms:
                continue
            total = sum(count for _, count in rooms)
            limit = max(1, total // len(group.lanes))
            if len(rooms) == 1:
                worker = rooms[0][0]
                at_hand = _at_hand(lane, run, limit, worker, locality)
                if at_hand and may_take(worker, group, spec, now):
                    return Choice(lane, run, [(worker, at_hand)], [], kept, is_held)
            match = _Match(group, spec, locality, rooms, now)
            for window in (max(WINDOW, min(limit, len(run.ids))), WIDE_WINDOW):
                ids = [task_id for task_id in islice(run.ids, window) if task_id not in lane.dead]
                shares, passed = match.deal(ids, limit)
                if shares:
                    return Choice(lane, run, shares, passed, kept + match.kept, is_held or match.is_held)
                if window >= len(run.ids):
                    break
            kept.extend(match.kept)
            is_held = True
    return Choice(lane, run, [], [], kept, is_held)


def _at_hand(lane: Lane, run: Run, limit: int, worker: Worker, locality: Locality) -> List[int]:
    """The next tasks, if it is easy: this worker has the large inputs of all of them. Otherwise nothing."""
    ids = list(islice(run.ids, limit))
    seconds: Dict[Needs, float] = {}
    for task_id in ids:
        needs = locality.needs(task_id)
        if needs is None or task_id in lane.dead:
            return []
        if needs not in seconds:
            seconds[needs] = locality.fetch(needs, worker)
            if seconds[needs]:
                return []
    return ids


def room_at(worker: Worker, group: Group, spec: Spec, cap: int, *, is_next_turn: bool) -> Tuple[int, int]:
    """How many tasks of a spec one worker should get, and how many slots' worth of them may be there."""
    width = group.workers[worker]
    if not width:
        allowed = allowance(worker, spec, 1)
        return card_room(worker, group, allowed), allowed
    allowed = min(cap, allowance(worker, spec, worker.slots))
    count = space(worker, group, allowed, width) if is_next_turn else room(worker, group, allowed, width)
    return count, allowed


class _Match:
    """Deals the tasks of one run to workers with room."""

    def __init__(self, group: Group, spec: Spec, locality: Locality, rooms: Sequence[Tuple[Worker, int]], now: float) -> None:
        self.kept: List[int] = []
        self.is_held = False
        self._group = group
        self._spec = spec
        self._locality = locality
        self._now = now
        self._bids: Dict[Worker, Bid] = {}
        self._left: Dict[Worker, int] = {}
        self._wire: Dict[Worker, float] = {}  # Seconds until what has been given to it here has come.
        ends: List[Tuple[float, float, int]] = []
        for index, (worker, _) in enumerate(rooms):
            bid = self._bids[worker] = Bid(worker, spec, group, now)
            ends.append((bid.ends(), -worker.facts.score, index))
        ends.sort()
        self._order = [rooms[index][0] for _, _, index in ends]
        self._left = dict(rooms)
        fastest = min(worker.seconds(spec) for worker in self._order)
        self._unit = 1.0 if spec.function.is_known else UNKNOWN_SECONDS / fastest
        self._most_able = list(group.workers)
        if len(self._most_able) > LARGE_MESH:
            self._most_able = self._order[:LARGE_MESH]
        self._may: Dict[Worker, bool] = {}  # For tasks without large inputs.
        self._waits: Dict[Worker, float] = {}
        self._fetches: Dict[Needs, Dict[Worker, float]] = {}
        self._holders: Dict[Needs, List[Worker]] = {}
        self._near: Dict[Needs, bool] = {}

    def deal(self, ids: Sequence[int], limit: int) -> Tuple[List[Tuple[Worker, List[int]]], List[int]]:
        """At most `limit` of these tasks, to whom each; and those that were passed over."""
        shares: Dict[Worker, List[int]] = {}
        taken: Dict[int, None] = {}
        for task_id in self._in_turn(ids):
            if len(taken) >= limit:
                break
            worker = self._place(task_id)
            if worker is not None:
                shares.setdefault(worker, []).append(task_id)
                taken[task_id] = None
                self._left[worker] -= 1
        passed: List[int] = []
        rest = len(taken)
        for task_id in ids:
            if not rest:
                break
            if task_id in taken:
                rest -= 1
            elif task_id in self._locality:
                passed.append(task_id)
        return list(shares.items()), passed

    def _in_turn(self, ids: Sequence[int]) -> List[int]:
        """Those that were passed over too often, then those whose inputs are where there is room, then the others."""
        locality = self._locality
        first: List[int] = []
        near: List[int] = []
        rest: List[int] = []
        for task_id in ids:
            needs = locality.needs(task_id)
            if needs is None:
                rest.append(task_id)
            elif locality.overtaken(task_id) >= OVERTAKEN_MOST:
                first.append(task_id)
            elif self._is_near(needs):
                near.append(task_id)
            else:
                rest.append(task_id)
        return first + near + rest

    def _is_near(self, needs: Needs) -> bool:
        """Whether somebody with room has these."""
        is_near = self._near.get(needs)
        if is_near is None:
            is_near = self._near[needs] = any(worker in self._left for worker in self._holders_of(needs))
        return is_near

    def _place(self, task_id: int) -> Optional[Worker]:
        """Where this task is expected to end first, if that is one with room who may take it."""
        needs = self._locality.needs(task_id)
        candidates = self._candidates(needs)
        order = sorted((self._ends(worker, needs), index) for index, worker in enumerate(candidates) if self._left[worker] > 0)
        found = next((place for place in order if self._may_take(candidates[place[1]], needs)), None)
        if found is None:
            self.is_held = self.is_held or bool(order)
            return None
        ends, index = found
        best = candidates[index]
        if needs is not None:
            fetch = self._fetch(needs, best)
            if fetch and self._now - self._locality.kept_since(task_id, self._now) < fetch:
                other = self._sooner(needs, ends)
                if other is not None:
                    self._waits[other] = self._wait(other) + other.seconds(self._spec) / max(1, other.servers(self._group))
                    self.kept.append(task_id)
                    self.is_held = True
                    return None
            if fetch:
                self._wire[best] = self._wire.get(best, 0.0) + fetch
                self._fetches[needs][best] = 0.0  # It comes once, for all who need it there.
                self._holders_of(needs).append(best)
        self._bids[best].take(1)
        return best

    def _candidates(self, needs: Optional[Needs]) -> Sequence[Worker]:
        """Whom to compare: everybody with room; of many, those who have it, and those who would end it first without it."""
        if len(self._order) <= LARGE_MESH:
            return self._order
        near = [] if needs is None else [worker for worker in self._holders_of(needs) if worker in self._left]
        free = (worker for worker in self._order if self._left[worker] > 0)
        return near + list(islice(free, LARGE_MESH))

    def _ends(self, worker: Worker, needs: Optional[Needs]) -> float:
        """Seconds from now; what is fetched is fetched while others run."""
        bid = self._bids[worker]
        ends = bid.ends() * self._unit
        fetch = self._fetch(needs, worker) if needs is not None else 0.0
        return max(ends, self._wire.get(worker, 0.0) + fetch + bid.seconds * self._unit) if fetch else ends

    def _fetch(self, needs: Needs, worker: Worker) -> float:
        found = self._fetches.setdefault(needs, {})
        seconds = found.get(worker)
        if seconds is None:
            seconds = found[worker] = self._locality.fetch(needs, worker)
        return seconds

    def _holders_of(self, needs: Needs) -> List[Worker]:
        found = self._holders.get(needs)
        if found is None:
            found = self._holders[needs] = self._locality.holders(needs, self._group.workers)
        return found

    def _sooner(self, needs: Needs, limit: float) -> Optional[Worker]:
        """A busy worker that has the inputs, and where a task would end before `limit`, what it has to wait for included."""
        if not self._spec.function.is_known:
            return None
        best: Optional[Worker] = None
        for worker in self._holders_of(needs):
            bid = self._bids.get(worker)
            if bid is None:
                ends = self._wait(worker) + worker.seconds(self._spec)
            elif not self._left[worker]:
                ends = bid.ends()
            else:
                continue  # It was among those that were compared.
            if ends < limit:
                best, limit = worker, ends
        return best

    def _wait(self, worker: Worker) -> float:
        """Seconds until the next of a worker's slots is free, after what is meant for it already; inf: nobody knows."""
        wait = self._waits.get(worker)
        if wait is None:
            self._waits[worker] = wait = self._first_free(worker)
        return wait

    def _first_free(self, worker: Worker) -> float:
        group = self._group
        count = min(worker.servers(group), SLOTS_ASKED)
        if not count or worker.is_installing(group) or worker.has_room(group) or worker.is_blocked(group):
            return inf  # If it has room, it must not use it.
        if any(not batch.spec.function.is_known for _, batch in worker.running()):
            return inf
        return min(worker.free_in(group, self._now, count))

    def _may_take(self, worker: Worker, needs: Optional[Needs]) -> bool:
        """What the tail rule says. Fastest is who would end this task first if nobody had anything else, the time for its inputs included."""
        if needs is None:
            may = self._may.get(worker)
            if may is None:
                may = self._may[worker] = may_take(worker, self._group, self._spec, self._now)
            return may
        if self._spec.is_repeatable:
            return True
        fetch = self._fetch(needs, worker)
        group = self._group
        able = (*self._holders_of(needs), *self._most_able)
        others = [other for other in able if not other.is_installing(group) and not other.is_blocked(group)]
        if not others:
            return True
        least = min(self._fetch(needs, other) for other in others)
        if may_take(worker, self._group, self._spec, self._now, extra=(fetch - least) / self._unit):
            return True
        total = worker.seconds(self._spec) * self._unit + fetch
        return all(total <= other.seconds(self._spec) * self._unit + self._fetch(needs, other) for other in others)
