"""The owner of this machine rules it: a worker watches the file of their rules, and obeys.

    gpumesh pause ──> file ──stat, twice a second──> OwnerWatch ──Offer──> Obedience ──> the mesh is told, the pool gives back
                               idle, programs ───────┘ (only when a rule asks for them)

A file that cannot be read pauses the machine: an owner who has said something about it must not find it busy because of a slip in a
file. No file, no rules: a machine that was joined is lent.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any, Callable, Dict, FrozenSet, Optional, Tuple

if TYPE_CHECKING:
    from gpumesh.runtime.pool import RunnerPool
    from gpumesh.runtime.standing import Standing
    from gpumesh.runtime.worker_inputs import TaskInputs
    from gpumesh.scheduler.ownership import Offer, Ownership

logger = logging.getLogger("gpumesh.worker")

LOOK_SECONDS = 0.5  # Between two looks at the file: obeyed within a second. A look costs 5 us, with rules 20 to 30.
PROGRAMS_SECONDS = 2.0  # Between two looks at the list of processes: 3 ms for 100 of them.
IDLE_SECONDS = 5.0  # Between two looks at who touches the machine: may start up to three small programs.

Signature = Optional[Tuple[int, int, int]]


class OwnerWatch:
    """Looks at the rules and at what they depend on, and tells when what is lent has changed.

    Costs one `stat` per look while there are no rules. What takes longer than that happens on another thread.

    Args:
        on_offer: Called on the loop's thread with each new offer.
    """

    def __init__(self, path: str, on_offer: Callable[[Offer], None]) -> None:
        self._path = path
        self._on_offer = on_offer
        self._loop = asyncio.get_running_loop()
        self._signature: Signature = None
        self._ownership: Optional[Ownership] = None  # Once there was a file.
        self._offer: Optional[Offer] = None
        self._timer: Optional[asyncio.TimerHandle] = None
        self._looking: Optional[asyncio.Future[Dict[str, Any]]] = None
        self._seen: Dict[str, Any] = {}  # Fields of Observations that come from the thread.
        self._programs_at = self._idle_at = 0.0  # When they are due.
        self._is_over = False

    async def start(self) -> None:
        """Have the first offer told before this returns, if there are rules, and go on looking."""
        self._read_if_changed()
        if self._ownership is not None:
            looking = self._start_looking()
            if looking is not None:
                await asyncio.wait([looking])
        self._look()

    def stop(self) -> None:
        """Tell nothing any more."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()  # The thread goes on for a moment; its answer is not to reach a closed loop.

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)
        self._read_if_changed()
        if self._ownership is not None:
            self._start_looking()
            self._judge()

    def _read_if_changed(self) -> None:
        signature = _signature(self._path)
        if signature == self._signature:
            return
        self._signature = signature
        from gpumesh.runtime.owner_file import load_rules
        from gpumesh.scheduler.ownership import Ownership

        if self._ownership is None:
            self._ownership = Ownership()
        rules = load_rules(self._path)
        if rules.trouble:
            logger.error(
                "this machine is paused, for its owner's rules cannot be read: %s; mend or delete the file, or write new rules: "
                "gpumesh limit --clear",
                rules.trouble,
            )
        self._ownership.rules = rules
        self._programs_at = self._idle_at = 0.0

    def _start_looking(self) -> Optional[asyncio.Future[Dict[str, Any]]]:
        """Have the thread look at what the rules depend on and is due."""
        assert self._ownership is not None
        rules, now = self._ownership.rules, self._loop.time()
        if self._looking is not None or self._is_over:
            return self._looking
        programs = rules.exclusive if rules.exclusive and now >= self._programs_at else None
        wants_idle = rules.needs_idle and now >= self._idle_at
        if programs is None and not wants_idle:
            return None
        if programs is not None:
            self._programs_at = now + PROGRAMS_SECONDS
        if wants_idle:
            self._idle_at = now + IDLE_SECONDS
        looking = self._loop.run_in_executor(None, _observe, programs, wants_idle)
        self._looking = looking
        looking.add_done_callback(self._on_seen)
        return looking

    def _on_seen(self, looking: asyncio.Future[Dict[str, Any]]) -> None:
        self._looking = None
        if self._is_over or looking.cancelled():
            return
        self._seen.update(looking.result())
        self._judge()

    def _judge(self) -> None:
        from gpumesh.scheduler.ownership import EVERYTHING

        assert self._ownership is not None
        rules, seen = self._ownership.rules, self._seen
        if (rules.exclusive and "programs" not in seen) or (rules.needs_idle and "idle_problem" not in seen):
            return  # A rule that is new; the thread is looking.
        offer = self._ownership.judge(_observations(self._loop.time(), seen))
        if offer == (self._offer or EVERYTHING):
            return
        self._offer = offer
        self._on_offer(offer)


def _signature(path: str) -> Signature:
    """What changes whenever the file does; None without one."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError:
        return (-1, 0, 0)  # There, as far as anybody can tell, and not to be read.
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def _observe(programs: Optional[Tuple[str, ...]], wants_idle: bool) -> Dict[str, Any]:
    """On a thread: what takes long."""
    from gpumesh.devices import activity

    seen: Dict[str, Any] = {}
    if programs is not None:
        seen["programs"] = activity.running_programs(programs)
    if wants_idle:
        idle = activity.idle_time()
        seen.update(idle_seconds=idle.seconds, idle_problem=idle.problem)
    return seen


def _observations(now: float, seen: Dict[str, Any]) -> Any:
    import time

    from gpumesh.scheduler.ownership import Observations

    wall = time.time()
    local = time.localtime(wall)
    minute = local.tm_hour * 60 + local.tm_min + local.tm_sec / 60
    return Observations(now=now, wall=wall, weekday=local.tm_wday, minute=minute, **seen)


class Obedience:
    """Brings a worker in line with what its owner lends.

    The mesh hears of less before work goes back, or it would send the same work again; and of more only when the pool takes it.
    """

    def __init__(self, standing: Standing, pool: RunnerPool, inputs: Callable[[], Optional[TaskInputs]]) -> None:
        self._standing = standing
        self._pool = pool
        self._inputs = inputs  # Tasks that wait for their inputs; None while there is no such thing.
        self._whole: Optional[bool] = None  # Nothing is lent; whether what runs is ended.
        self._cards: Dict[str, bool] = {}  # The same of cards.
        self._slots = pool.slots

    def change_offer(self, offer: Offer) -> None:
        """The owner lends more or less than before."""
        whole = offer.ends_running if offer.problem else None
        cards = self._standing.withheld_cards(offer)
        slots = self._pool.slots if offer.slots is None else max(1, offer.slots.of(self._pool.slots))
        if whole is None and self._whole is not None:
            self._pool.accept()
        lent = frozenset(self._cards) - frozenset(cards)
        if lent:
            self._pool.accept(lent)
        if slots > self._slots:
            self._pool.allow(slots)
        self._log(offer)
        self._standing.change_offer(offer)
        if slots < self._slots:
            self._pool.allow(slots)
        if whole is not None and whole != self._whole:
            self._pool.hand_back(running=whole)
        for ends_running in (False, True):
            taken = frozenset(key for key, ends in cards.items() if ends is ends_running and self._cards.get(key) is not ends)
            if taken:
                self._pool.hand_back(running=ends_running, cards=taken)
        self._whole, self._cards, self._slots = whole, cards, slots
        inputs = self._inputs()
        if inputs is not None:
            self.apply_to(inputs)

    def apply_to(self, inputs: TaskInputs) -> None:
        """Tasks that wait for their inputs are held to the same."""
        inputs.withhold(everything=self._whole is not None, cards=frozenset(self._cards))

    def _log(self, offer: Offer) -> None:
        before = self._standing.offer
        if offer.problem and (before is None or before.problem != offer.problem):
            logger.info("takes no tasks: %s%s", offer.problem, "; running work is ended" if offer.ends_running else "")
        elif before is not None and before.problem and not offer.problem:
            logger.info("takes tasks again")
        old: FrozenSet[Any] = frozenset(() if before is None else before.cards)
        for pause in offer.cards:
            if pause not in old:
                logger.info("GPU %s takes no tasks: %s", pause.target, pause.problem)
