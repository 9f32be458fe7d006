"""The books of one worker's cards under any order of opening, closing, measuring and changing."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpumesh.model.resources import CardReading, DeviceFacts, Requirement, WorkerFacts, lacks
from gpumesh.scheduler.cards import CONTEXT_BYTES, PARTS, Cards, Lease

GB = 10**9
CPU = DeviceFacts("cpu", 0, "AMD Ryzen", 64 * GB, 0.5)

devices = st.builds(
    lambda kind, index, name, memory, score, problem, others: DeviceFacts(
        kind,
        index,
        name,
        memory,
        score,
        uuid=f"GPU-{index}" if kind == "cuda" else "",
        problem=problem,
        others=min(others, memory),
    ),
    st.sampled_from(["cuda", "cuda", "cuda", "rocm", "mps"]),
    st.integers(0, 5),
    st.sampled_from(["NVIDIA A100", "RTX 3080"]),
    st.sampled_from([0, GB // 10, 8 * GB, 24 * GB, 80 * GB]),
    st.sampled_from([50.0, 98.0, 100.0]),
    st.sampled_from(["", "", "", "paused"]),
    st.sampled_from([0, 0, GB // 2, 7 * GB, 24 * GB]),
)
worker_devices = st.lists(devices, max_size=5, unique_by=lambda facts: facts.key).map(lambda cards: [CPU, *cards])
needs = st.builds(
    lambda device, model, gpus, gpu_memory: Requirement(device=device, model=model, gpus=gpus, gpu_memory=gpu_memory),
    st.sampled_from(["", "gpu", "gpu", "cuda", "cuda:1", "rocm", "mps", "cpu"]),
    st.sampled_from(["", "", "a100"]),
    st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0]),
    st.sampled_from([0, 0, GB, 8 * GB, 10 * GB, 24 * GB]),
)


class CardsMachine(RuleBasedStateMachine):
    """Keeps simple books of its own beside the real ones."""

    @initialize(first=worker_devices)
    def begin(self, first: List[DeviceFacts]) -> None:
        self.devices = {facts.key: facts for facts in first if facts.kind != "cpu"}
        self.others = {key: facts.others for key, facts in self.devices.items()}
        self.cards = Cards(first)
        self.open: List[Lease] = []

    def on(self, key: str) -> List[Lease]:
        return [lease for lease in self.open if key in lease.cards]

    @rule(need=needs)
    def open_one(self, need: Requirement) -> None:
        could = self.cards.can_open(need)
        lease = self.cards.open(need)
        assert (lease is not None) == could
        if lease is None:
            return
        assert self.cards.capacity(need) > 0
        facts = [self.devices[key] for key in lease.cards]
        assert all(not card.problem and need.model in card.name.lower() for card in facts)
        assert len({card.kind for card in facts}) == 1
        assert need.device in ("", "gpu", facts[0].kind, f"{facts[0].kind}:{facts[0].index}")
        assert len(lease.cards) == len(set(lease.cards)) == max(1, -(-need.gpus // 1))
        order = list(self.devices)
        assert [order.index(key) for key in lease.cards] == sorted(order.index(key) for key in lease.cards)
        used = {other.ordinal for other in self.open if other.cards == lease.cards}
        assert lease.ordinal == min(set(range(len(used) + 1)) - used)
        for key in lease.cards:
            beside = self.on(key)
            assert not any(other.is_whole for other in beside)
            assert not (beside and need.gpus >= 1)
            assert lease.part + sum(other.part for other in beside) <= PARTS
            asked = lease.ask + sum(other.ask for other in beside)
            assert asked <= max(0, self.devices[key].memory - self.others[key]) or not asked
            if beside and lease.ask:
                contexts = CONTEXT_BYTES if self.devices[key].kind != "mps" else 0
                assert asked + contexts <= self.devices[key].memory - self.others[key]
        self.open.append(lease)

    @rule(data=st.data())
    def close_one(self, data: Any) -> None:
        if self.open:
            lease = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            self.cards.close(lease)

    @rule(data=st.data(), others=st.sampled_from([-1, 0, GB // 2, 7 * GB, 24 * GB]))
    def measure_one(self, data: Any, others: int) -> None:
        key = data.draw(st.sampled_from([*self.devices, "unknown"]))
        before = self.others.get(key, 0)
        has_changed = self.cards.measure([CardReading(key, others)])
        if others >= 0 and key in self.others:
            self.others[key] = others
        assert has_changed == (self.others.get(key, 0) != before)

    @rule(later=worker_devices)
    def tell_others(self, later: List[DeviceFacts]) -> None:
        self.cards.update(later)
        before = self.devices
        self.devices = {facts.key: facts for facts in later if facts.kind != "cpu"}
        for key, facts in self.devices.items():
            if key not in before or before[key].others != facts.others:
                self.others[key] = facts.others

    @rule(data=st.data())
    def pause_one(self, data: Any) -> None:
        if self.devices:
            key = data.draw(st.sampled_from(sorted(self.devices)))
            facts = self.devices[key]
            self.devices[key] = facts._replace(problem="" if facts.problem else "paused by its owner")
            self.cards.update([CPU, *self.devices.values()])

    @rule(need=needs)
    def what_never_fits_is_what_the_facts_lack(self, need: Requirement) -> None:
        facts = WorkerFacts(cores=64, memory=64 * GB, devices=(CPU, *self.devices.values()))
        kinds = {card.kind for card in self.devices.values()}
        if need.gpus <= 1 or len(kinds) == 1:
            assert (self.cards.capacity(need) > 0) == (need.needs_gpu and not lacks(facts, need))

    @invariant()
    def all_that_is_open_is_in_the_books(self) -> None:
        if not hasattr(self, "open"):
            return
        assert list(self.cards.leases) == self.open
        rows: Dict[str, Any] = {row.key: row for row in self.cards.usage()}
        assert set(rows) == {*self.devices, *(key for lease in self.open for key in lease.cards)}
        for key, row in rows.items():
            assert list(row.leases) == self.on(key)
            assert row.reserved >= sum(lease.ask for lease in row.leases if not lease.is_whole)
            assert row.others == self.others[key]

    def teardown(self) -> None:
        if not hasattr(self, "open"):
            return
        while self.open:
            self.cards.close(self.open.pop())
        assert all(row.reserved == 0 and not row.leases for row in self.cards.usage())


TestCards = CardsMachine.TestCase
TestCards.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(
    some=worker_devices,
    need=needs,
    before=st.lists(needs, max_size=6),
    integrated=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_the_capacity_is_how_many_can_be_opened(
    some: List[DeviceFacts], need: Requirement, before: List[Requirement], integrated: bool
) -> None:
    empty = [facts._replace(others=0) for facts in some]
    if integrated and len(empty) > 1:
        empty[1] = empty[1]._replace(is_integrated=True, memory=min(empty[1].memory, 16 * GB))
    cards = Cards(empty, 16 * GB if integrated else 0)
    for lease in [cards.open(other) for other in before]:
        if lease is not None:
            cards.close(lease)

    opened: List[Lease] = []
    lease: Optional[Lease] = cards.open(need)
    while lease is not None:
        opened.append(lease)
        lease = cards.open(need)

    assert len(opened) == cards.capacity(need)
    assert not cards.can_open(need)
