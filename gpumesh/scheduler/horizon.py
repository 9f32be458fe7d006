"""The tail rule: who may take one of the last tasks of a function that must not run twice. Changes nothing.

The *horizon* is when all open work is expected to end if everybody does what he does best. A worker takes a task only if it is expected to end
it by then, and if the risk that it does not is small: the mean overshoot, over the lengths seen and what its speed may be, is at most what
its share in the work saves, which for the last task is the time in which all workers together end one. So a slow worker works while there is
plenty to do and stands idle at the end. The fastest may always, and so may whoever would end the task before the others have ended theirs
without him: the fastest may be busy with something long.
"""

from __future__ import annotations

from math import inf
from typing import Dict, Iterable, List, Optional, Tuple

from gpumesh.config import LOOK_AGAIN_MOST_SECONDS, TAIL_NEGLIGIBLE_SECONDS
from gpumesh.scheduler.queues import Group
from gpumesh.scheduler.states import Spec, Worker
from gpumesh.scheduler.throughput import Function

EXACT_SERVERS = 128  # Slots up to which the horizon is found by dealing out tasks; a fluid stands for more.
REFRESH_FRACTION = 1 / 16  # Of the queue, or of the time to its end: so much of it may go before the horizon is found anew.
BISECTIONS = 24
PLENTY = 4.0  # Times its own seconds: with so much left, a worker that may take a task is not asked again for each.
NEARLY_AS_FAST = 1.05  # Workers within so much of the fastest count as fastest: speeds are not known better.


Server = Tuple[Worker, int, float]
"""A worker, how many tasks of the group it runs at once, and the seconds of one."""


class Horizon:
    """When the open work of one spec's group will probably have ended, as seen from one moment."""

    __slots__ = (
        "function",
        "is_known",
        "servers",
        "total",
        "pace",
        "fastest",
        "count",
        "seen_at",
        "ends_at",
        "least",
        "most",
        "expires_at",
        "sure",
        "_free",
        "_others",
    )

    def __init__(
        self, function: Function, servers: List[Server], total: int, pace: float, fastest: float, count: int, seen_at: float
    ) -> None:
        self.function = function
        self.is_known = function.is_known
        self.servers = servers
        self.total = total  # Tasks that they run at once.
        self.pace = pace  # Seconds in which all workers together end one task.
        self.fastest = fastest  # Seconds of a task on the fastest worker.
        self.count = count  # Ready tasks.
        self.seen_at = seen_at
        self.ends_at = seen_at
        self.least = count * (1 - REFRESH_FRACTION)  # Ready tasks between which it counts,
        self.most = count * (1 + REFRESH_FRACTION)
        self.expires_at = seen_at  # and until when.
        self.sure: Dict[Worker, None] = {}  # Who may take tasks as long as this horizon counts.
        self._free: Dict[Worker, List[float]] = {}  # In how many seconds each of its servers is free, as far as asked.
        self._others: Dict[Worker, float] = {}  # When the others would have ended without it, as far as asked.

    def is_stale(self, function: Function, count: int, now: float) -> bool:
        """Whether it should be found anew."""
        return (
            function is not self.function
            or function.is_known is not self.is_known
            or not self.least < count <= self.most
            or now > self.expires_at
        )

    def ends_without(self, worker: Worker, group: Group) -> float:
        """When the others would have ended everything if this worker took nothing more."""
        ends = self._others.get(worker)
        if ends is None:
            ends = self._others[worker] = self.without(worker, group)
        return ends

    def without(self, absent: Optional[Worker], group: Group) -> float:
        """When all of them would have ended everything, but for one."""
        if self.total > EXACT_SERVERS:
            fluid = [
                (seconds / 2 if worker.load >= worker.slots else 0.0, seconds, slots)  # Busy ones are half through.
                for worker, slots, seconds in self.servers
                if worker is not absent
            ]
            return self.seen_at + (_poured(fluid, self.count) if fluid else inf)
        dealt: List[Tuple[float, float]] = []
        for worker, slots, seconds in self.servers:
            if worker is absent:
                continue
            free = self._free.get(worker)
            if free is None:
                free = self._free[worker] = worker.free_in(group, self.seen_at, slots)
            dealt.extend((wait, seconds) for wait in free)
        return self.seen_at + (_dealt(dealt, self.count) if dealt else inf)


def horizon_of(group: Group, spec: Spec, count: int, now: float) -> Horizon:
    """The horizon of `count` ready tasks like those of `spec`.

    With few servers: the earliest time by which they could end `count` tasks of mean length beside what they have. With many: the same,
    tasks being divisible.
    """
    servers: List[Server] = []
    total = 0
    fastest = inf
    rate = 0.0
    for worker in group.workers:
        if worker.is_installing(group):
            continue
        slots = worker.servers(group)
        if not group.workers[worker] and not worker.has_room(group):
            slots = min(slots, len(worker.leases))  # The rest is in the hands of others, nobody knows for how long.
        if not slots:
            continue
        seconds = worker.seconds(spec)
        fastest = min(fastest, seconds)
        rate += slots / seconds
        total += slots
        servers.append((worker, slots, seconds))
    horizon = Horizon(spec.function, servers, total, 1.0 / rate if rate else inf, fastest, count, now)
    horizon.ends_at = horizon.without(None, group)
    horizon.expires_at = now + min(LOOK_AGAIN_MOST_SECONDS, (horizon.ends_at - now) * REFRESH_FRACTION)
    return horizon


def _dealt(servers: List[Tuple[float, float]], count: int) -> float:
    """The least time in which these servers end `count` tasks."""
    low, each = min((free + seconds, seconds) for free, seconds in servers)
    if count <= 1:
        return low
    high = low + each * (count - 1)  # All on the one that is first.
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        done = 0
        for free, seconds in servers:
            if middle > free:
                done += int((middle - free) / seconds)
        if done >= count:
            high = middle
        else:
            low = middle
        if high - low <= 1e-3 * high:
            break
    return high


def _poured(servers: List[Tuple[float, float, int]], count: int) -> float:
    """The same for divisible tasks; those who would not end a single one by then do not take part."""
    part = servers
    ends = 0.0
    for _ in range(4):
        rate = sum(slots / seconds for _, seconds, slots in part)
        debt = sum(slots * free / seconds for free, seconds, slots in part)
        ends = (count + debt) / rate
        rest = [server for server in part if server[0] + server[1] <= ends]
        if not rest or len(rest) == len(part):
            break
        part = rest
    return ends


def may_take(worker: Worker, group: Group, spec: Spec, now: float, *, extra: float = 0.0) -> bool:
    """Whether the tail rule lets this worker take the next task of the group, which is one of `spec`.

    `extra`: seconds by which it would begin later than others, because it has to fetch inputs first.
    """
    if spec.is_repeatable or len(group.workers) == 1:
        return True
    function = spec.function
    horizon = group.horizon
    if horizon is not None and not extra and worker in horizon.sure and not horizon.is_stale(function, group.count, now):
        return True
    seconds = worker.seconds(spec) + extra
    if function.is_known and seconds <= TAIL_NEGLIGIBLE_SECONDS:
        return True
    if horizon is None or horizon.is_stale(function, group.count, now):
        horizon = group.horizon = horizon_of(group, spec, group.count, now)
    if seconds <= horizon.fastest * NEARLY_AS_FAST:
        if not extra:
            horizon.sure[worker] = None
        return True
    left = horizon.ends_at - now
    if seconds * PLENTY <= left and _is_timely(worker, function, seconds, left, horizon.pace):
        if not extra:
            horizon.sure[worker] = None
        return True
    return _is_timely(worker, function, seconds, left, horizon.pace) or (
        horizon.total <= EXACT_SERVERS
        and _is_timely(worker, function, seconds, horizon.ends_without(worker, group) - now, horizon.pace)
    )


def _is_timely(worker: Worker, function: Function, seconds: float, left: float, pace: float) -> bool:
    """Whether a task ends in what is left, and the mean overshoot is at most what the worker's share in the work saves."""
    return seconds <= left and function.risk(worker.id, seconds, left) <= pace * left / seconds


def fastest_first(workers: Iterable[Worker], spec: Spec) -> List[Worker]:
    """In the order in which they are asked whether they want a task."""
    return sorted(workers, key=lambda worker: worker.seconds(spec))
