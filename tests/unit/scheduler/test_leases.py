"""Which process a card task of one worker gets, and which idle ones make way: exact lists of actions."""

from __future__ import annotations

import itertools
from typing import Any, Dict, FrozenSet, List, Optional

import pytest

from gpumesh.config import CANCEL_GRACE_SECONDS, RUNNER_RESTART_DELAYS_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import DeviceFacts, Requirement
from gpumesh.scheduler.leases import LEASE_IDLE_SECONDS, GuestAdmitted, LeaseHealth, Leases
from gpumesh.scheduler.local import (
    FailEnvironment,
    Feed,
    Grant,
    Inspect,
    Interrupt,
    Kill,
    Kind,
    Report,
    Revoke,
    StartRunner,
    Waits,
)

GB = 10**9
ONE, TWO, HALF, SMALL, LARGE, PACKAGED, TIMED = range(7)  # Specs.
NEEDS = {
    ONE: Requirement("gpu", gpus=1.0),
    TWO: Requirement("gpu", gpus=2.0),
    HALF: Requirement("gpu", gpus=0.5),
    SMALL: Requirement("gpu", gpu_memory=8 * GB),
    LARGE: Requirement("gpu", gpu_memory=18 * GB),
    PACKAGED: Requirement("gpu", gpus=1.0),
    TIMED: Requirement("gpu", gpus=1.0),
}
A, B = ("GPU-a",), ("GPU-b",)
BOTH = A + B
CPU = DeviceFacts("cpu", 0, "AMD Ryzen", 64 * GB, 0.5)
CARDS = [DeviceFacts("cuda", place, "RTX", 24 * GB, 100.0, uuid=key) for place, (key,) in enumerate((A, B))]


class LeasesUnderTest:
    """Leases whose processes come up, end their tasks and die at a word. Tasks are numbered from 1; runners from 10."""

    def __init__(self) -> None:
        self.leases = Leases(threads=4, numbers=itertools.count(10))
        self.leases.on_devices([CPU, *CARDS])
        self.now = 100.0
        for spec, need in NEEDS.items():
            kind = Kind(4, 1 if spec == PACKAGED else 0)
            self.leases.on_spec(spec, timeout=5.0 if spec == TIMED else 0.0, kind=kind, need=need)
        self.fed: Dict[int, List[int]] = {}

    def at(self, now: float) -> LeasesUnderTest:
        self.now = 100.0 + now
        return self

    def arrive(self, cards: Any, spec: int, *tasks: int, ordinal: int = 0) -> List[Any]:
        return self._note(self.leases.on_arrived(cards, ordinal, spec, [(task, 1, b"") for task in tasks], self.now))

    def ready(self, runner: int) -> List[Any]:
        return self._note(self.leases.on_ready(runner, self.now))

    def finish(self, runner: int, seconds: float = 1.0) -> List[Any]:
        """All that a runner has been fed."""
        results = [(task, 1, int(Status.OK), b"", seconds) for task in self.fed.pop(runner)]
        actions = self._note(self.leases.on_results(runner, results, self.now))
        assert actions[0] == Report(results)
        return actions[1:]

    def wait(self, runner: int, task: int, *, waits: bool = True) -> List[Any]:
        return self._note(self.leases.on_waits(runner, task, self.now, waits=waits))

    def down(self, runner: int, started: int = 0, finished: int = 0, **details: Any) -> List[Any]:
        self.fed.pop(runner, None)
        return self._note(self.leases.on_runner_down(runner, started, finished, details, self.now))

    def on_time(self) -> List[Any]:
        return self._note(self.leases.on_time(self.now))

    def run(self, cards: Any, spec: int, task: int, *, ordinal: int = 0) -> int:
        """Start a process with one task, and let that end."""
        (start,) = self.arrive(cards, spec, task, ordinal=ordinal)
        assert start == StartRunner(start.runner, 4, 0, cards)
        assert self.ready(start.runner) == [feed(start.runner, spec, task)]
        assert self.finish(start.runner) == []
        runner: int = start.runner
        return runner

    def _note(self, actions: List[Any]) -> List[Any]:
        for action in actions:
            if isinstance(action, Feed):
                self.fed.setdefault(action.runner, []).extend(task for task, _ in action.tasks)
        return actions


def feed(runner: int, spec: int, *tasks: int) -> Feed:
    return Feed(runner, spec, [(task, 1) for task in tasks])


def not_run(*tasks: int) -> Report:
    return Report([(task, 1, int(Status.NOT_RUN), {}, 0.0) for task in tasks])


@pytest.fixture
def worker() -> LeasesUnderTest:
    return LeasesUnderTest()


# --- guests


def test_a_guest_is_let_in_at_once_where_there_is_room(worker: LeasesUnderTest) -> None:
    worker.run(A, HALF, 1)
    admitted = worker.leases.admit(99, A, NEEDS[HALF])
    assert [type(action) for action in admitted] == [GuestAdmitted]
    assert worker.leases.admit(98, B, NEEDS[ONE]) == [GuestAdmitted(98)]


def test_idle_processes_make_way_for_a_guest(worker: LeasesUnderTest) -> None:
    idle = worker.run(A, ONE, 1)
    elsewhere = worker.run(B, ONE, 2)
    asked = worker.leases.admit(99, A, NEEDS[ONE])
    assert [(type(action), *action) for action in asked] == [(Kill, idle)]
    gone = worker.down(idle, 1, 1)
    assert [(type(action), *action) for action in gone] == [(GuestAdmitted, 99)]
    assert worker.arrive(B, ONE, 3) == [feed(elsewhere, ONE, 3)]


def test_a_guest_has_its_share_until_it_leaves_and_is_never_asked_to(worker: LeasesUnderTest) -> None:
    assert worker.leases.admit(99, A, NEEDS[HALF]) == [GuestAdmitted(99)]
    idle = worker.run(A, HALF, 1)
    (kill, start) = worker.arrive(A, HALF, 2, ordinal=1)
    assert (type(kill), *kill) == (Kill, idle), "two halves are taken"
    worker.ready(start.runner)
    worker.down(idle, 1, 1)
    worker.finish(start.runner)
    worker.leases.leave(99)
    (start,) = worker.arrive(A, HALF, 3)
    assert isinstance(start, StartRunner)


# --- tasks that wait for others


def test_a_task_that_waits_keeps_its_process_and_what_is_deeper_gets_another(worker: LeasesUnderTest) -> None:
    worker.arrive(A, ONE, 1)
    worker.ready(10)
    worker.arrive(A, ONE, 2)

    assert worker.wait(10, 1) == [Waits(1, 1, True), not_run(2)]
    assert worker.arrive(A, ONE, 3) == [not_run(3)]  # It was on its way.
    assert worker.arrive(A, ONE, 4, ordinal=1) == [StartRunner(11, 4, 0, A)]
    assert worker.ready(11) == [feed(11, ONE, 4)]
    assert [task.task_id for task in worker.leases.waiting()] == [1]

    assert worker.wait(10, 1, waits=False) == [Waits(1, 1, False), Grant(10, 1)]
    assert worker.finish(11) == []
    assert worker.finish(10) == []


def test_what_was_fed_behind_a_task_that_waits_goes_back(worker: LeasesUnderTest) -> None:
    worker.arrive(A, ONE, 1)
    worker.ready(10)
    worker.finish(10, 0.001)
    worker.arrive(A, ONE, 2, 3)
    assert worker.fed[10] == [2, 3]

    assert worker.wait(10, 2) == [Revoke(10, 3), Waits(2, 1, True)]
    assert worker.at(1.0).on_time() == [Inspect(10)]
    assert worker.leases.on_progress(10, 2, 1, 1, 100.0, worker.now) == [not_run(3)]


# --- processes


def test_a_process_is_started_for_the_first_task_and_used_again(worker: LeasesUnderTest) -> None:
    assert worker.arrive(A, ONE, 1) == [StartRunner(10, 4, 0, A)]
    assert worker.ready(10) == [feed(10, ONE, 1)]
    assert worker.finish(10) == []

    assert worker.arrive(A, ONE, 2) == [feed(10, ONE, 2)]
    assert 10 in worker.leases
    assert worker.leases.cards_of(10) == A


def test_other_cards_are_another_process(worker: LeasesUnderTest) -> None:
    assert worker.arrive(A, ONE, 1) == [StartRunner(10, 4, 0, A)]

    assert worker.arrive(B, ONE, 2) == [StartRunner(11, 4, 0, B)]
    assert worker.ready(11) == [feed(11, ONE, 2)]
    assert worker.ready(10) == [feed(10, ONE, 1)]


def test_the_same_cards_under_another_ordinal_are_another_process(worker: LeasesUnderTest) -> None:
    assert worker.arrive(A, HALF, 1) == [StartRunner(10, 4, 0, A)]

    assert worker.arrive(A, HALF, 2, ordinal=1) == [StartRunner(11, 4, 0, A)]


def test_tasks_of_one_lease_run_one_after_another(worker: LeasesUnderTest) -> None:
    worker.arrive(A, ONE, 1, 2)
    assert worker.ready(10) == [feed(10, ONE, 1)]

    assert worker.arrive(A, ONE, 3) == []

    assert worker.finish(10) == [feed(10, ONE, 2)]
    assert worker.finish(10) == [feed(10, ONE, 3)]


def test_short_tasks_are_fed_ahead(worker: LeasesUnderTest) -> None:
    worker.arrive(A, ONE, 1)
    worker.ready(10)
    assert worker.finish(10, seconds=0.0) == []

    assert worker.arrive(A, ONE, 2, 3, 4) == [feed(10, ONE, 2, 3, 4)]


def test_an_idle_process_is_ended_after_a_while(worker: LeasesUnderTest) -> None:
    worker.at(0.0).run(A, ONE, 1)
    assert worker.leases.next_deadline() == 100.0 + LEASE_IDLE_SECONDS
    assert worker.at(LEASE_IDLE_SECONDS - 1).on_time() == []

    assert worker.at(LEASE_IDLE_SECONDS).on_time() == [Kill(10)]

    assert worker.down(10) == []
    assert worker.leases.next_deadline() is None
    assert worker.arrive(A, ONE, 2) == [StartRunner(11, 4, 0, A)]


def test_a_task_that_comes_while_its_process_is_being_ended_gets_the_next_one(worker: LeasesUnderTest) -> None:
    worker.run(A, ONE, 1)
    assert worker.at(LEASE_IDLE_SECONDS).on_time() == [Kill(10)]

    assert worker.arrive(A, ONE, 2) == []

    assert worker.down(10) == [StartRunner(11, 4, 0, A)]
    assert worker.ready(11) == [feed(11, ONE, 2)]


def test_a_process_that_dies_idle_is_not_started_again_before_the_next_task(worker: LeasesUnderTest) -> None:
    worker.run(A, ONE, 1)

    assert worker.down(10) == []
    assert worker.arrive(A, ONE, 2) == [StartRunner(11, 4, 0, A)]


def test_only_the_task_that_ran_is_crashed_when_its_process_dies(worker: LeasesUnderTest) -> None:
    worker.arrive(A, ONE, 1, 2)
    worker.ready(10)

    report, start = worker.down(10, 1, 0, exit=-9)

    assert [result[:3] for result in report.results] == [(1, 1, Status.CRASHED)]
    assert start == StartRunner(11, 4, 0, A)
    assert worker.ready(11) == [feed(11, ONE, 2)]


def test_a_process_of_another_environment_takes_the_place_of_the_first(worker: LeasesUnderTest) -> None:
    worker.run(A, ONE, 1)

    assert worker.arrive(A, PACKAGED, 2) == [Kill(10)]
    assert worker.down(10) == [StartRunner(11, 4, 1, A)]
    assert worker.ready(11) == [feed(11, PACKAGED, 2)]


# --- making way


def test_a_task_that_has_the_whole_card_waits_until_idle_processes_on_it_are_gone(worker: LeasesUnderTest) -> None:
    worker.run(A, ONE, 1)

    assert worker.arrive(BOTH, TWO, 2) == [Kill(10), StartRunner(11, 4, 0, BOTH)]
    assert worker.ready(11) == []
    assert worker.down(10) == [feed(11, TWO, 2)]


def test_a_process_on_other_cards_stays(worker: LeasesUnderTest) -> None:
    worker.run(A, ONE, 1)

    assert worker.arrive(B, ONE, 2) == [StartRunner(11, 4, 0, B)]
    assert worker.ready(11) == [feed(11, ONE, 2)]


def test_two_halves_of_a_card_keep_their_processes_while_they_take_turns(worker: LeasesUnderTest) -> None:
    worker.run(A, HALF, 1)
    worker.run(A, HALF, 2, ordinal=1)

    for number in range(3, 9):
        assert worker.arrive(A, HALF, number, ordinal=number % 2) == [feed(10 + number % 2, HALF, number)]
        assert worker.finish(10 + number % 2) == []


def test_processes_stay_as_long_as_what_they_were_given_leaves_room(worker: LeasesUnderTest) -> None:
    worker.run(A, SMALL, 1)
    worker.run(A, SMALL, 2, ordinal=1)

    assert worker.arrive(A, SMALL, 3, ordinal=2) == [Kill(10), StartRunner(12, 4, 0, A)], "a third 8 GB beside two contexts"
    assert worker.down(10) == []
    assert worker.ready(12) == [feed(12, SMALL, 3)]


def test_those_that_have_been_idle_for_longest_make_way_first(worker: LeasesUnderTest) -> None:
    worker.at(0.0).run(A, SMALL, 1)
    worker.at(1.0).run(A, SMALL, 2, ordinal=1)
    worker.at(2.0).arrive(A, SMALL, 3)
    worker.at(3.0).finish(10)

    assert worker.at(4.0).arrive(A, SMALL, 4, ordinal=2) == [Kill(11), StartRunner(12, 4, 0, A)]


def test_a_process_that_may_hold_more_than_its_next_task_is_given_is_replaced(worker: LeasesUnderTest) -> None:
    worker.run(A, LARGE, 1)

    assert worker.arrive(A, SMALL, 2) == [Kill(10)]
    assert worker.down(10) == [StartRunner(11, 4, 0, A)]
    assert worker.ready(11) == [feed(11, SMALL, 2)]


def test_a_process_that_says_it_holds_little_is_used_again_for_a_smaller_task(worker: LeasesUnderTest) -> None:
    worker.arrive(A, ONE, 1)
    worker.ready(10)
    worker.leases.on_kept(10, 2 * GB)
    worker.finish(10)

    assert worker.arrive(A, SMALL, 2) == [feed(10, SMALL, 2)]


def test_what_a_process_says_it_holds_counts_and_not_what_it_was_given(worker: LeasesUnderTest) -> None:
    for ordinal, task in ((0, 1), (1, 2)):
        worker.arrive(A, LARGE, task, ordinal=ordinal)
        worker.ready(10 + ordinal)
        worker.leases.on_kept(10 + ordinal, GB)
        worker.finish(10 + ordinal)

    assert worker.arrive(A, LARGE, 3, ordinal=2) == [StartRunner(12, 4, 0, A)]


def test_the_context_of_a_process_comes_on_top_of_what_it_says(worker: LeasesUnderTest) -> None:
    worker.arrive(A, SMALL, 1)
    worker.ready(10)
    worker.leases.on_kept(10, int(5.2 * GB))
    worker.finish(10)

    assert worker.arrive(A, LARGE, 2, ordinal=1) == [Kill(10), StartRunner(11, 4, 0, A)], "5.2 + 18 GB, and a context each"


def test_a_process_that_does_not_say_any_more_counts_with_all_it_was_given(worker: LeasesUnderTest) -> None:
    worker.arrive(A, SMALL, 1)
    worker.ready(10)
    worker.leases.on_kept(10, 0)
    worker.finish(10)
    worker.arrive(A, LARGE, 2)
    worker.leases.on_kept(10, -1)
    worker.finish(10)

    assert worker.arrive(A, SMALL, 3, ordinal=1) == [Kill(10), StartRunner(11, 4, 0, A)]


def test_who_comes_beside_a_process_that_is_being_replaced_waits_until_it_is_gone(worker: LeasesUnderTest) -> None:
    worker.run(A, LARGE, 1)
    assert worker.arrive(A, SMALL, 2) == [Kill(10)]

    assert worker.arrive(A, SMALL, 3, ordinal=1) == [StartRunner(11, 4, 0, A)]
    assert worker.ready(11) == []
    assert worker.down(10) == [StartRunner(12, 4, 0, A), feed(11, SMALL, 3)]


def test_a_task_that_asks_for_more_than_its_process_had_ends_idle_ones_beside_it(worker: LeasesUnderTest) -> None:
    worker.run(A, SMALL, 1)
    worker.run(A, SMALL, 2, ordinal=1)

    assert worker.arrive(A, LARGE, 3) == [Kill(11)]
    assert worker.down(11) == [feed(10, LARGE, 3)]


def test_a_busy_process_is_never_ended_for_another(worker: LeasesUnderTest) -> None:
    worker.arrive(A, ONE, 1)
    worker.ready(10)

    assert worker.arrive(A, ONE, 2, ordinal=1) == [StartRunner(11, 4, 0, A)]
    assert worker.ready(11) == [feed(11, ONE, 2)]


def test_a_task_waits_also_for_a_process_that_was_being_ended_before(worker: LeasesUnderTest) -> None:
    worker.run(A, ONE, 1)
    assert worker.at(LEASE_IDLE_SECONDS).on_time() == [Kill(10)]

    assert worker.arrive(BOTH, TWO, 2) == [StartRunner(11, 4, 0, BOTH)]

    assert worker.ready(11) == []
    assert worker.down(10) == [feed(11, TWO, 2)]


def test_the_next_process_counts_for_what_waits_for_it(worker: LeasesUnderTest) -> None:
    worker.arrive(A, LARGE, 1, 2)
    worker.ready(10)
    worker.down(10, 1, 0)
    worker.ready(11)
    worker.finish(11)

    assert worker.arrive(A, SMALL, 3, ordinal=1) == [Kill(11), StartRunner(12, 4, 0, A)]


def test_what_others_hold_of_a_card_leaves_less_room_for_idle_processes(worker: LeasesUnderTest) -> None:
    worker.leases.on_devices([CPU, CARDS[0]._replace(others=8 * GB), CARDS[1]])
    worker.run(A, SMALL, 1)

    assert worker.arrive(A, SMALL, 2, ordinal=1) == [Kill(10), StartRunner(11, 4, 0, A)]


def test_of_a_card_of_unknown_memory_fractions_are_compared(worker: LeasesUnderTest) -> None:
    worker.leases.on_devices([CPU, CARDS[0]._replace(memory=0)])
    worker.run(A, HALF, 1)
    worker.run(A, HALF, 2, ordinal=1)

    assert worker.arrive(A, ONE, 3) == [Kill(11)]


def test_a_task_taken_back_while_it_waits_leaves_the_lease_in_order(worker: LeasesUnderTest) -> None:
    worker.run(A, ONE, 1)
    worker.arrive(BOTH, TWO, 2)

    assert worker.leases.on_recalled([(2, 1)], kill=False, now=worker.now) == [not_run(2)]
    assert worker.ready(11) == []
    assert worker.down(10) == []
    assert worker.arrive(BOTH, TWO, 3) == [feed(11, TWO, 3)]


# --- from outside


def test_a_recalled_task_that_runs_is_interrupted_and_then_killed(worker: LeasesUnderTest) -> None:
    worker.arrive(A, ONE, 1)
    worker.ready(10)
    assert worker.leases.on_recalled([(1, 1)], kill=True, now=worker.now) == []

    assert worker.on_time() == [Inspect(10)]
    assert worker.leases.on_progress(10, 1, 0, 0, worker.now, worker.now) == [Interrupt(10, 1)]
    assert worker.at(CANCEL_GRACE_SECONDS).on_time() == [Inspect(10)]
    assert worker.leases.on_progress(10, 1, 0, 0, 100.0, worker.now) == [Kill(10)]
    (report,) = worker.down(10, 1, 0)
    assert report.results[0][:3] == (1, 1, Status.CANCELLED)


def test_a_task_that_runs_too_long_is_interrupted(worker: LeasesUnderTest) -> None:
    worker.arrive(A, TIMED, 1)
    worker.ready(10)
    assert worker.leases.next_deadline() == 105.0

    assert worker.at(5.0).on_time() == [Inspect(10)]
    assert worker.leases.on_progress(10, 1, 0, 0, 100.0, worker.now) == [Interrupt(10, 1)]


def test_draining_gives_back_what_waits_and_takes_nothing_new(worker: LeasesUnderTest) -> None:
    worker.arrive(A, ONE, 1, 2)
    worker.ready(10)

    assert worker.leases.drain(worker.now) == [not_run(2)]
    assert worker.arrive(A, ONE, 3) == [not_run(3)]
    assert worker.arrive(B, ONE, 4) == [not_run(4)]
    assert not worker.leases.is_idle
    assert worker.finish(10) == []
    assert worker.leases.is_idle


@pytest.mark.parametrize("cards", [None, frozenset(A)])
def test_the_owner_gets_a_card_back_with_all_its_memory(worker: LeasesUnderTest, cards: Optional[FrozenSet[str]]) -> None:
    worker.run(A, ONE, 1)

    assert worker.leases.hand_back(cards, running=False, now=worker.now) == [Kill(10)]
    assert worker.down(10) == []
    assert worker.arrive(A, ONE, 2) == [not_run(2)]
    assert worker.arrive(BOTH, TWO, 3) == [not_run(3)]

    worker.leases.accept(cards)
    assert worker.arrive(A, ONE, 4) == [StartRunner(11, 4, 0, A)]


def test_other_cards_go_on_when_the_owner_wants_one_back(worker: LeasesUnderTest) -> None:
    worker.run(B, ONE, 1)

    assert worker.leases.hand_back(frozenset(A), running=True, now=worker.now) == []
    assert worker.arrive(B, ONE, 2) == [feed(10, ONE, 2)]


def test_what_runs_for_the_owners_sake_ends_as_handed_back_and_its_process_with_it(worker: LeasesUnderTest) -> None:
    worker.arrive(A, ONE, 1, 2)
    worker.ready(10)

    assert worker.leases.hand_back(frozenset(A), running=True, now=worker.now, grace_seconds=0.5) == [not_run(2)]
    assert worker.on_time() == [Inspect(10)]
    assert worker.leases.on_progress(10, 1, 0, 0, 100.0, worker.now) == [Interrupt(10, 1)]
    report, kill = worker.leases.on_results(10, [(1, 1, int(Status.CANCELLED), {}, 0.1)], worker.now)

    assert report.results[0][:3] == (1, 1, Status.HANDED_BACK)
    assert kill == Kill(10)


def test_a_running_task_may_end_by_itself_and_then_its_process_makes_way_for_the_owner(worker: LeasesUnderTest) -> None:
    worker.arrive(A, ONE, 1)
    worker.ready(10)
    assert worker.leases.hand_back(None, running=False, now=worker.now) == []

    assert worker.finish(10) == [Kill(10)]


def test_a_card_asked_back_by_name_stays_so_until_it_is_named(worker: LeasesUnderTest) -> None:
    worker.leases.hand_back(frozenset(A), running=False, now=worker.now)
    worker.leases.hand_back(None, running=False, now=worker.now)
    worker.leases.accept(None)

    assert worker.arrive(A, ONE, 1) == [not_run(1)]
    assert worker.arrive(B, ONE, 2) == [StartRunner(10, 4, 0, B)]


# --- trouble


def test_one_failed_start_is_no_trouble_and_the_second_is_told(worker: LeasesUnderTest) -> None:
    worker.arrive(A, ONE, 1)
    assert worker.down(10, stderr="no memory") == []
    assert worker.leases.next_deadline() == 100.0 + RUNNER_RESTART_DELAYS_SECONDS[1]
    assert worker.at(0.5).on_time() == [StartRunner(11, 4, 0, A)]

    assert worker.down(11, stderr="no memory") == [LeaseHealth("its runner processes fail to start: no memory")]
    assert worker.at(1.5).on_time() == [StartRunner(12, 4, 0, A)]
    assert worker.ready(12) == [LeaseHealth(""), feed(12, ONE, 1)]


def test_trouble_of_one_lease_is_told_until_no_lease_has_any(worker: LeasesUnderTest) -> None:
    for cards, first in ((A, 10), (B, 11)):
        worker.arrive(cards, ONE, first)
    for runner in (10, 11):
        worker.down(runner, stderr="no memory")
    assert worker.at(0.5).on_time() == [StartRunner(12, 4, 0, A), StartRunner(13, 4, 0, B)]
    for runner in (12, 13):
        worker.down(runner, stderr="no memory")
    assert worker.at(1.5).on_time() == [StartRunner(14, 4, 0, A), StartRunner(15, 4, 0, B)]

    assert worker.ready(14)[0] == LeaseHealth("its runner processes fail to start: no memory")
    assert worker.ready(15)[0] == LeaseHealth("")


def test_an_environment_that_does_not_start_fails_its_own_tasks(worker: LeasesUnderTest) -> None:
    worker.arrive(A, PACKAGED, 1)
    worker.down(10, stderr="broken")
    worker.at(0.5).on_time()

    (failed,) = worker.down(11, stderr="broken")

    assert failed == FailEnvironment(1, [(1, 1)], {"stderr": "broken"})
    assert worker.leases.is_idle
    assert worker.arrive(A, ONE, 2) == [StartRunner(12, 4, 0, A)]
