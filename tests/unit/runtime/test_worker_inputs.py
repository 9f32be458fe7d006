"""Tasks that wait for their inputs while the machine's owner takes it, or a card of it, back."""

from __future__ import annotations

import asyncio
from typing import Any, Callable, Dict, List, Tuple

from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Stored
from gpumesh.runtime.worker_inputs import TaskInputs

RED, BLUE, NONE = ("GPU-red",), ("GPU-blue",), ()


CALLS = 7  # A spec of calls.


class Actors:
    """An actor that expects whatever is called."""

    def __init__(self) -> None:
        self.lost: List[int] = []

    def knows(self, spec: int) -> bool:
        return spec == CALLS

    def callee(self, spec: int) -> int:
        return 99

    def inputs_lost(self, spec: int, task_id: int, attempt: int) -> None:
        self.lost.append(task_id)

    def abandon(self, *, has_store: bool) -> None:
        assert has_store


class Worker:
    """A pool with two slots and a store whose objects come when the test says so."""

    def __init__(self) -> None:
        self.slots = 2
        self.pool = self
        self.actors = Actors()
        self.loop = asyncio.get_running_loop()
        self.copy_bytes = 0
        self.has_own_store = False
        self.asked: Dict[int, Callable[[Any, str], None]] = {}
        self.released: List[int] = []
        self.ran: List[int] = []
        self.reported: List[Tuple[int, int]] = []
        self.inputs = TaskInputs(self, self._report)  # type: ignore[arg-type]

    def _report(self, results: List[Any]) -> None:
        self.reported.extend((result[0], result[2]) for result in results)

    def run(self, spec: int, tasks: Any, **where: Any) -> None:
        """The pool has it."""
        self.ran.extend(task[0] for task in tasks)

    def expect(self, spec: int, tasks: Any, **where: Any) -> Any:
        """The actor keeps their places."""
        return tasks

    def call(self, task: int) -> None:
        """A call whose only input is an object with its own number."""
        self.inputs.run(CALLS, [(task, 1, Stored(task, 10**9))])

    def copy_of(self, oid: int) -> None:
        """None is here before it was asked for."""

    def acquire(self, oid: int, nbytes: int, then: Callable[[Any, str], None]) -> None:
        """The store is asked."""
        self.asked[oid] = then

    def release(self, oid: int) -> None:
        """A task needs it no more."""
        self.released.append(oid)

    def arrive(self, task: int, cards: Tuple[str, ...]) -> None:
        """A task whose only input is an object with its own number."""
        self.inputs.run(0, [(task, 1, Stored(task, 10**9))], cards)

    def bring(self, oid: int) -> None:
        """The object is here."""
        self.asked[oid](type("Copy", (), {"path": "there"})(), "")

    def back(self) -> List[Tuple[int, int]]:
        """What was reported since."""
        reported, self.reported = self.reported, []
        return reported


def on_a_loop(test: Callable[[Worker], None]) -> None:
    async def main() -> None:
        test(Worker())

    asyncio.run(main())


NOT_RUN = int(Status.NOT_RUN)


def test_tasks_for_a_card_that_is_taken_back_go_back_and_the_others_stay() -> None:
    def test(worker: Worker) -> None:
        for task, cards in enumerate((NONE, RED, RED, BLUE), start=1):
            worker.arrive(task, cards)
        assert sorted(worker.asked) == [1, 2, 4], "one lease brings in one task's inputs at a time"

        worker.inputs.withhold(everything=False, cards=frozenset(RED))

        assert sorted(worker.back()) == [(2, NOT_RUN), (3, NOT_RUN)]
        worker.bring(2)
        assert worker.released == [2], "what comes too late is let go"
        worker.arrive(5, RED)
        assert worker.back() == [(5, NOT_RUN)]
        worker.bring(1)
        worker.bring(4)
        assert worker.ran == [1, 4]
        worker.inputs.withhold(everything=False, cards=frozenset())
        worker.arrive(6, RED)
        worker.bring(6)
        assert worker.ran == [1, 4, 6]
        assert worker.back() == []

    on_a_loop(test)


def test_everything_goes_back_and_is_taken_again_when_the_machine_is() -> None:
    def test(worker: Worker) -> None:
        for task in range(1, 5):
            worker.arrive(task, NONE)
        worker.bring(1)

        worker.inputs.withhold(everything=True, cards=frozenset())

        assert sorted(worker.back()) == [(2, NOT_RUN), (3, NOT_RUN), (4, NOT_RUN)]
        assert worker.inputs.is_idle
        worker.arrive(5, BLUE)
        assert worker.back() == [(5, NOT_RUN)]
        worker.inputs.withhold(everything=False, cards=frozenset())
        worker.arrive(6, NONE)
        worker.bring(6)
        assert worker.ran == [1, 6]

    on_a_loop(test)


def test_a_draining_worker_takes_nothing_when_its_owner_lends_it_again() -> None:
    def test(worker: Worker) -> None:
        worker.inputs.drain()
        worker.inputs.withhold(everything=False, cards=frozenset())

        worker.arrive(1, NONE)

        assert worker.back() == [(1, NOT_RUN)]

    on_a_loop(test)


def test_inputs_of_calls_come_one_call_after_the_other() -> None:
    async def main() -> None:
        worker = Worker()
        for task in (1, 2, 3):
            worker.call(task)
        worker.inputs.run(CALLS, [(4, 1, b"plain")])
        assert sorted(worker.asked) == [1], "those of a later one could keep the memory that those of this one need"
        assert worker.ran == [4], "the actor knows its place"
        worker.bring(1)
        await asyncio.sleep(0)  # It goes on in the next turn of the loop.
        assert sorted(worker.asked) == [1, 2]
        worker.bring(2)
        assert worker.ran == [4, 1, 2]

    asyncio.run(main())


def test_calls_that_an_actor_has_given_up_are_dropped_without_a_word() -> None:
    async def main() -> None:
        worker = Worker()
        for task in (1, 2, 3):
            worker.call(task)
        worker.inputs.forget([(1, 1), (3, 1)])
        await asyncio.sleep(0)
        assert worker.back() == []
        worker.bring(1)
        assert worker.released == [1], "what comes too late is let go"
        worker.bring(2)
        assert worker.ran == [2]
        assert worker.inputs.is_idle

    asyncio.run(main())


def test_what_is_taken_back_from_tasks_actors_give_up_by_themselves() -> None:
    def test(worker: Worker) -> None:
        worker.call(1)
        worker.inputs.withhold(everything=True, cards=frozenset())
        worker.inputs.drain()
        assert worker.back() == []
        assert not worker.inputs.is_idle

    on_a_loop(test)


def test_an_actor_hears_of_calls_that_do_not_come() -> None:
    def test(worker: Worker) -> None:
        for task in (1, 2, 3):
            worker.call(task)
        assert worker.inputs.recall([(2, 1), (5, 1)], kill=True) == [(5, 1)]
        assert worker.back() == [(2, int(Status.CANCELLED))]
        worker.asked[1](None, "lost: it is gone")
        assert worker.back() == [(1, int(Status.RAISED))]
        assert worker.actors.lost == [2, 1]

    on_a_loop(test)
