"""What a worker tells the mesh of itself: the machine as it is, and what stands in the way at the moment. One place puts them together.

    the machine (detected, measured) ──┐
    its owner's offer ─────────────────┼──> told
    the pool: problem, installing ─────┘

Nothing of what stands in the way is ever written into the machine's own facts, so none of it outlives its cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Optional, Tuple

from gpumesh.model.resources import CardReading, WorkerFacts

if TYPE_CHECKING:
    from gpumesh.scheduler.ownership import Offer


class Standing:
    """Keeps the parts, and tells when what they make together has changed.

    Args:
        tell: Called with the new facts after each change that others can see.
    """

    __slots__ = ("machine", "told", "offer", "_problem", "_installing", "_tell")

    def __init__(self, machine: WorkerFacts, tell: Callable[[WorkerFacts], None]) -> None:
        self.machine = machine  # All slots, all memory, as if its owner lent everything and everything worked.
        self.told = machine
        self.offer: Optional[Offer] = None  # None: its owner has no rules.
        self._problem = ""
        self._installing: Tuple[Tuple[str, ...], ...] = ()
        self._tell = tell

    def change_machine(self, **changes: Any) -> None:
        """Something of the machine's own facts is new: `devices`, `score`, `versions`, ..."""
        self.machine = self.machine._replace(**changes)
        self._renew()

    def change_cpu_score(self, score: float, rates: Tuple[Tuple[str, float], ...]) -> None:
        """The CPU has been measured."""
        devices = tuple(
            device._replace(score=score, rates=rates) if device.kind == "cpu" else device for device in self.machine.devices
        )
        self.change_machine(score=score, devices=devices)

    def change_pool(self, *, problem: Optional[str] = None, installing: Optional[Tuple[Tuple[str, ...], ...]] = None) -> None:
        """Whether the pool can run tasks, and what it has to install first; None: as before."""
        self._problem = self._problem if problem is None else problem
        self._installing = self._installing if installing is None else installing
        self._renew()

    def change_offer(self, offer: Offer) -> None:
        """The machine's owner lends more or less than before."""
        self.offer = offer
        self._renew()

    def withheld_cards(self, offer: Offer) -> Dict[str, bool]:
        """Keys of this machine's cards that an owner keeps with this offer; whether what runs there is to be ended."""
        if not offer.cards:
            return {}
        from gpumesh.scheduler.ownership import withheld_cards

        return withheld_cards(self.machine, offer)

    def as_lent(self, readings: Iterable[CardReading]) -> Tuple[CardReading, ...]:
        """Readings of cards, in terms of the memory that is lent of each: what others hold of the rest takes nothing away."""
        if self.offer is None or not self.offer.gpu_memory:
            return tuple(readings)
        from gpumesh.scheduler.ownership import offered_reading

        devices = {device.key: device for device in self.machine.devices}
        return tuple(
            offered_reading(reading, devices[reading.key], self.offer) if reading.key in devices else reading
            for reading in readings
        )

    def _renew(self) -> None:
        facts = self.machine
        if self._problem or self._installing:
            problem = "; ".join(filter(None, [facts.problem, self._problem]))
            facts = facts._replace(problem=problem, installing=self._installing)
        if self.offer is not None:
            from gpumesh.scheduler.ownership import offered

            facts = offered(facts, self.offer)
        if facts != self.told:
            self.told = facts
            self._tell(facts)
