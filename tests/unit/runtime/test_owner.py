"""A worker's watch over its owner's rules, on a real loop and a real file; and the order in which they are obeyed."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
import time
from pathlib import Path
from typing import Any, Awaitable, Callable, List, Tuple

import pytest

from gpumesh.devices import activity
from gpumesh.model.resources import DeviceFacts, WorkerFacts
from gpumesh.runtime import owner
from gpumesh.runtime.owner import Obedience, OwnerWatch
from gpumesh.runtime.owner_file import save_rules
from gpumesh.runtime.standing import Standing
from gpumesh.scheduler.ownership import EVERYTHING, GPUS, MACHINE, Amount, CardPause, Offer, Pause, Rules

PAUSED = Rules(pauses=((MACHINE, Pause(reason="mine")),))
CARDS = tuple(DeviceFacts("cuda", number, "card", 10**10, 50.0, uuid=f"GPU-{number}") for number in range(2))
FACTS = WorkerFacts(hostname="den", slots=4, cores=4, devices=CARDS)


class Watched:
    """A file of rules, and the offers that a watch over it has told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offers: List[Offer] = []
        self.watch = OwnerWatch(str(path), self.offers.append)

    async def told(self, count: int) -> Offer:
        """The newest offer, once there are so many."""
        deadline = asyncio.get_running_loop().time() + 20
        while len(self.offers) < count:
            assert asyncio.get_running_loop().time() < deadline, self.offers
            await asyncio.sleep(0.005)
        assert len(self.offers) == count
        return self.offers[-1]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Watched], Awaitable[None]]], None]:
    """Runs a test on a loop, with a watch that looks often."""
    monkeypatch.setattr(owner, "LOOK_SECONDS", 0.01)

    def run(test: Callable[[Watched], Awaitable[None]]) -> None:
        async def main() -> None:
            watched = Watched(tmp_path / "owner.json")
            try:
                await test(watched)
            finally:
                watched.watch.stop()

        asyncio.run(main())

    return run


def test_rules_that_are_there_are_known_before_the_worker_joins(run: Any) -> None:
    async def test(watched: Watched) -> None:
        save_rules(str(watched.path), PAUSED)

        await watched.watch.start()

        assert watched.offers == [Offer("paused by its owner (mine)")]

    run(test)


def test_rules_come_change_and_go_while_it_works(run: Any) -> None:
    async def test(watched: Watched) -> None:
        await watched.watch.start()
        assert watched.offers == []

        save_rules(str(watched.path), PAUSED)
        assert (await watched.told(1)).problem == "paused by its owner (mine)"
        save_rules(str(watched.path), Rules(slots=Amount(2.0)))
        assert await watched.told(2) == Offer(slots=Amount(2.0))
        watched.path.write_text("{", encoding="utf-8")
        assert "cannot be read" in (await watched.told(3)).problem
        watched.path.unlink()
        assert await watched.told(4) == EVERYTHING

    run(test)


def test_a_file_that_is_written_again_with_the_same_rules_tells_nothing(run: Any) -> None:
    async def test(watched: Watched) -> None:
        save_rules(str(watched.path), PAUSED)
        await watched.watch.start()

        save_rules(str(watched.path), PAUSED)
        save_rules(str(watched.path), PAUSED._replace(slots=Amount(1.0)))

        assert (await watched.told(2)).slots == Amount(1.0)

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="says who is in a container")
def test_idleness_that_nobody_can_tell_keeps_the_machine(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("container", "test")

    async def test(watched: Watched) -> None:
        save_rules(str(watched.path), Rules(idle_minutes=5))

        await watched.watch.start()

        assert watched.offers[0].problem.startswith("lent by its owner only when idle for 5 min, but inside a container")

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="terminals tell of input by their access times")
def test_a_machine_is_lent_while_nobody_touches_it(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    terminal = os.ttyname(follower)
    monkeypatch.setattr(owner, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(activity, "CONTAINER_MARKS", ())
    monkeypatch.delenv("container", raising=False)
    monkeypatch.setattr(activity, "_has_display", lambda: False)
    monkeypatch.setattr(activity, "_has_logind", lambda: False)
    monkeypatch.setattr(activity, "TERMINALS", (terminal,))
    os.utime(terminal, (time.time() - 3600, time.time()))

    async def test(watched: Watched) -> None:
        save_rules(str(watched.path), Rules(idle_minutes=30))
        await watched.watch.start()
        assert watched.offers == []

        os.write(leader, b"ls\n")
        os.read(follower, 10)

        assert await watched.told(1) == Offer("in use by its owner, lent when idle for 30 min")
        os.utime(terminal, (time.time() - 1801, time.time()))
        assert await watched.told(2) == EVERYTHING

    try:
        run(test)
    finally:
        os.close(leader)
        os.close(follower)


def test_a_program_is_looked_for_before_the_worker_joins(run: Any) -> None:
    async def test(watched: Watched) -> None:
        save_rules(str(watched.path), Rules(exclusive=("no-such-program",)))

        await watched.watch.start()

        assert watched.offers == []
        assert watched.watch._seen == {"programs": ()}

    run(test)


def test_after_its_end_it_tells_nothing(run: Any) -> None:
    async def test(watched: Watched) -> None:
        await watched.watch.start()
        watched.watch.stop()

        save_rules(str(watched.path), PAUSED)
        await asyncio.sleep(0.1)

        assert watched.offers == []

    run(test)


# --- obeying


class Witness:
    """A pool, and tasks that wait for inputs, that write down what is asked of them; and what the mesh is told."""

    def __init__(self) -> None:
        self.slots = 4
        self.calls: List[Tuple[Any, ...]] = []
        self.standing = Standing(FACTS, lambda facts: self.calls.append(("told", facts.problem, facts.slots)))
        self.obedience = Obedience(self.standing, self, lambda: self)  # type: ignore[arg-type]

    def hand_back(self, *, running: bool, cards: Any = None) -> None:
        self.calls.append(("hand back", running, None if cards is None else sorted(cards)))

    def accept(self, cards: Any = None) -> None:
        self.calls.append(("accept", None if cards is None else sorted(cards)))

    def allow(self, slots: int) -> None:
        self.calls.append(("allow", slots))

    def withhold(self, *, everything: bool, cards: Any) -> None:
        self.calls.append(("inputs", everything, sorted(cards)))

    def change(self, offer: Offer) -> List[Tuple[Any, ...]]:
        """What follows from an offer, in order."""
        self.calls.clear()
        self.obedience.change_offer(offer)
        return list(self.calls)


def test_the_mesh_hears_of_a_pause_before_the_work_comes_back_and_of_its_end_after() -> None:
    witness = Witness()

    assert witness.change(Offer("paused")) == [("told", "paused", 4), ("hand back", False, None), ("inputs", True, [])]
    assert witness.change(EVERYTHING) == [("accept", None), ("told", "", 4), ("inputs", False, [])]


def test_an_owner_in_a_hurry_is_heard_also_when_it_is_paused_already() -> None:
    witness = Witness()
    witness.change(Offer("paused"))

    assert witness.change(Offer("paused", ends_running=True)) == [("hand back", True, None), ("inputs", True, [])]
    assert witness.change(Offer("paused for long", ends_running=True)) == [("told", "paused for long", 4), ("inputs", True, [])]


def test_cards_come_and_go_one_by_one() -> None:
    witness = Witness()

    first = Offer(cards=(CardPause("GPU-00", "paused", True), CardPause("0", "paused", False)))
    assert witness.change(first)[-2:] == [("hand back", False, ["GPU-0"]), ("inputs", False, ["GPU-0"])]
    both = Offer(cards=(CardPause(GPUS, "paused", True),))
    assert witness.change(both)[-2:] == [("hand back", True, ["GPU-0", "GPU-1"]), ("inputs", False, ["GPU-0", "GPU-1"])]
    second = Offer(cards=(CardPause("1", "paused", True),))
    assert witness.change(second)[0] == ("accept", ["GPU-0"])
    assert witness.change(EVERYTHING)[0] == ("accept", ["GPU-1"])


def test_fewer_slots_are_told_before_and_more_after_the_pool_knows() -> None:
    witness = Witness()

    assert witness.change(Offer(slots=Amount(0.5, is_share=True)))[:2] == [("told", "", 2), ("allow", 2)]
    assert witness.change(EVERYTHING)[:2] == [("allow", 4), ("told", "", 4)]
