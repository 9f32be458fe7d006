"""The brain of one worker's actors: order, the window, wishes, time limits, ends, what a lost coordinator leaves."""

from __future__ import annotations

from itertools import count
from typing import Any, Dict, List, Optional, Tuple

import pytest

from gpumesh.config import (
    ACTOR_CLOSE_SECONDS,
    ACTOR_WINDOW_CALLS,
    CANCEL_GRACE_SECONDS,
    REVOKE_SETTLE_SECONDS,
    RUNNER_START_SECONDS,
)
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.local import (
    OWN_ENVIRONMENT,
    AskResults,
    FailEnvironment,
    Feed,
    Inspect,
    Interrupt,
    Kill,
    Kind,
    Report,
    StartRunner,
)
from gpumesh.scheduler.local_actor_looks import BLOCKED_SECONDS, LOOK_SECONDS
from gpumesh.scheduler.local_actor_parts import (
    Alive,
    CallFacts,
    CancelSent,
    CreationFacts,
    Drop,
    EndProcess,
    SlotsTaken,
)
from gpumesh.scheduler.local_actor_tables import START_TRIES
from gpumesh.scheduler.local_actors import LocalActors

OK = int(Status.OK)
RAISED = int(Status.RAISED)
NOT_RUN = int(Status.NOT_RUN)
CANCELLED = int(Status.CANCELLED)
TIMED_OUT = int(Status.TIMED_OUT)
CRASHED = int(Status.CRASHED)
HANDED_BACK = int(Status.HANDED_BACK)

ACTOR = 7
CREATION, CALL, OTHER, SHORT, WIDE, PACKED = range(6)
DEATH = {"exit": -9, "stderr": "oh no"}


class Actions(List[Any]):
    """Equal only if their types are, too: actions are tuples, and Kill(1) == Inspect(1)."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and [(type(one), one) for one in self] == [(type(one), one) for one in other]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return Actions(found) if isinstance(place, slice) else found


class TypedActors(LocalActors):
    """What it wants is told as Actions."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith(("on_", "drain", "hand_back", "abandon")):
            return found
        return lambda *args, **options: Actions(found(*args, **options) or [])


class ActorsUnderTest:
    """One worker; time stands still unless a test moves it."""

    def __init__(self) -> None:
        self.local = TypedActors(numbers=count(1))
        self.now = 100.0
        self.local.on_creation_spec(CREATION, CreationFacts(Kind(2, OWN_ENVIRONMENT)))
        self.local.on_creation_spec(WIDE, CreationFacts(Kind(2, OWN_ENVIRONMENT), slots=3))
        self.local.on_creation_spec(PACKED, CreationFacts(Kind(2, 1)))
        self.local.on_call_spec(CALL, CallFacts(ACTOR))
        self.local.on_call_spec(OTHER, CallFacts(ACTOR))
        self.local.on_call_spec(SHORT, CallFacts(ACTOR, timeout=2.0))
        self.runner = 0

    def create(self, spec: int = CREATION, **options: Any) -> List[Any]:
        options = {"cards": (), "ordinal": 0, "is_here": True, **options}
        actions = self.local.on_created(spec, ACTOR, 1, now=self.now, **options)
        self.runner = next((action.runner for action in actions if type(action) is StartRunner), self.runner)
        return actions

    def live(self, spec: int = CREATION, *, side_by_side: bool = False, **options: Any) -> ActorsUnderTest:
        """An actor that waits for calls."""
        self.create(spec, **options)
        assert self.local.on_ready(self.runner, self.now) == [Feed(self.runner, spec, [(ACTOR, 1)])]
        assert self.alive(side_by_side=side_by_side) == [Alive(ACTOR, 1)]
        return self

    def alive(self, *, side_by_side: bool = False) -> List[Any]:
        return self.local.on_alive(self.runner, self.now, is_side_by_side=side_by_side)

    def call(self, *tasks: int, spec: int = CALL, here: bool = True) -> List[Any]:
        return self.local.on_called(spec, [(task, 1, b"") for task in tasks], is_here=here, now=self.now)

    def ended(self, *results: Tuple[int, int], value: Any = b"v") -> List[Any]:
        return self.local.on_results(self.runner, [(task, 1, status, value, 0.5) for task, status in results], self.now)

    def recall(self, task: int, *, kill: bool = True, force: bool = False) -> List[Any]:
        return self.local.on_recalled([(task, 1)], kill=kill, now=self.now, force=force)

    def page(self, started: int, finished: int, *, sent: Optional[int] = None, since: float = 100.0) -> List[Any]:
        """What the page says when the brain wants to know, at the time when it wants to. Looks for results that are held up come to nothing."""
        begun = self.now
        while True:
            due = self.local.next_deadline()
            assert due is not None, "nobody wants to know"
            self.now = max(self.now, due)
            assert self.local.on_time(self.now) == [Inspect(self.runner)]
            told = finished if sent is None else sent
            actions = self.local.on_progress(self.runner, started, finished, told, since, self.now)
            due = self.local.next_deadline()
            if actions or due is None or due > begun + 0.02:
                return actions

    def later(self, seconds: float) -> List[Any]:
        self.now += seconds
        return self.local.on_time(self.now)

    def down(self, started: int = 1, finished: int = 1, details: Optional[Dict[str, Any]] = None) -> List[Any]:
        return self.local.on_runner_down(self.runner, started, finished, dict(details or DEATH), self.now)

    def feed(self, *tasks: int, spec: int = CALL) -> Feed:
        return Feed(self.runner, spec, [(task, 1) for task in tasks])


@pytest.fixture
def worker() -> ActorsUnderTest:
    return ActorsUnderTest()


def told(actions: List[Any]) -> List[Tuple[int, int]]:
    """Task and status of every end that is told, in order."""
    return [(result[0], result[2]) for action in actions if type(action) is Report for result in action.results]


def dropped(actions: List[Any]) -> List[int]:
    return [key[0] for action in actions if type(action) is Drop for key in action.tasks]


# --- beginning


def test_its_process_is_started_at_once_and_constructs_it_when_it_is_up(worker: ActorsUnderTest) -> None:
    assert worker.create() == [StartRunner(1, 2, OWN_ENVIRONMENT, ())]
    assert worker.local.on_ready(1, worker.now) == [Feed(1, CREATION, [(ACTOR, 1)])]
    assert worker.alive() == [Alive(ACTOR, 1)]
    assert not worker.local.is_idle
    assert worker.local.alive() == [(ACTOR, 1)]


def test_it_sees_its_cards_and_is_constructed_when_there_is_room_on_them(worker: ActorsUnderTest) -> None:
    assert worker.create(cards=("gpu-a",)) == [StartRunner(1, 2, OWN_ENVIRONMENT, ("gpu-a",))]
    assert worker.local.on_ready(1, worker.now) == []
    assert worker.local.on_admitted(1, worker.now) == [Feed(1, CREATION, [(ACTOR, 1)])]


def test_a_constructor_waits_for_its_inputs(worker: ActorsUnderTest) -> None:
    worker.create(is_here=False)
    assert worker.local.on_ready(1, worker.now) == []
    assert worker.local.on_inputs(CREATION, ACTOR, 1, worker.now) == [Feed(1, CREATION, [(ACTOR, 1)])]


def test_a_constructor_whose_inputs_are_lost_has_been_told_of_elsewhere(worker: ActorsUnderTest) -> None:
    worker.create(is_here=False)
    worker.call(10)
    actions = worker.local.on_inputs_lost(CREATION, ACTOR, 1, worker.now)
    assert actions == [Drop([(10, 1)]), Kill(1)]
    assert told(worker.down()) == []
    assert worker.local.is_idle


def test_slots_are_taken_for_life(worker: ActorsUnderTest) -> None:
    assert SlotsTaken(3) in worker.create(WIDE)
    worker.local.on_ready(worker.runner, worker.now)
    assert SlotsTaken(0) in worker.down()


def test_a_process_that_does_not_come_up_is_started_again_later(worker: ActorsUnderTest) -> None:
    worker.create()
    for _ in range(START_TRIES - 1):
        assert worker.down(0, 0) == []
        due = worker.local.next_deadline()
        assert due is not None
        worker.now = due
        [start] = worker.local.on_time(due)
        assert type(start) is StartRunner
        worker.runner = start.runner
    actions = worker.down(0, 0)
    assert actions == [Report([(ACTOR, 1, CRASHED, DEATH, 0.0)]), Drop([(ACTOR, 1)])]


def test_a_process_that_hangs_at_its_start_is_killed(worker: ActorsUnderTest) -> None:
    worker.create()
    assert worker.local.next_deadline() == 100.0 + RUNNER_START_SECONDS
    assert worker.later(RUNNER_START_SECONDS) == [Kill(1)]


def test_an_environment_that_does_not_start_fails_the_creation(worker: ActorsUnderTest) -> None:
    worker.create(PACKED)
    assert worker.down(0, 0) == []
    [start] = worker.later(1.0)
    worker.runner = start.runner
    assert worker.down(0, 0) == [FailEnvironment(1, [(ACTOR, 1)], DEATH), Drop([(ACTOR, 1)])]


def test_the_same_creation_twice_is_one_actor(worker: ActorsUnderTest) -> None:
    worker.create()
    assert worker.create() == []


def test_a_later_life_ends_the_one_before(worker: ActorsUnderTest) -> None:
    worker.live()
    actions = worker.local.on_created(CREATION, ACTOR, 2, cards=(), ordinal=0, is_here=True, now=worker.now)
    assert actions == [Kill(1), StartRunner(2, 2, OWN_ENVIRONMENT, ())]
    assert told(worker.down()) == [(ACTOR, CANCELLED)]
    assert not worker.local.is_idle
    assert worker.local.held() == [(CREATION, (), 0, [(ACTOR, 2)])]


# --- calls


def test_calls_wait_until_the_constructor_has_returned(worker: ActorsUnderTest) -> None:
    worker.create()
    assert worker.call(10, 11) == []
    worker.local.on_ready(1, worker.now)
    assert worker.call(12) == []
    assert worker.alive() == [Alive(ACTOR, 1), worker.feed(10, 11, 12)]


def test_calls_go_on_at_once_and_keep_their_order_across_specs(worker: ActorsUnderTest) -> None:
    worker.live()
    assert worker.call(10) == [worker.feed(10)]
    assert worker.call(11, spec=OTHER) == [worker.feed(11, spec=OTHER)]
    assert worker.call(12, here=False) == []
    assert worker.call(13, spec=OTHER) == []
    assert worker.call(14) == []
    assert worker.local.on_inputs(CALL, 12, 1, worker.now) == [worker.feed(12), worker.feed(13, spec=OTHER), worker.feed(14)]


def test_a_call_whose_inputs_are_lost_does_not_hold_up_those_behind_it(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, here=False)
    worker.call(11)
    assert worker.local.on_inputs_lost(CALL, 10, 1, worker.now) == [worker.feed(11)]


def test_no_more_calls_than_the_window_are_without_a_result(worker: ActorsUnderTest) -> None:
    worker.live()
    tasks = list(range(10, 10 + ACTOR_WINDOW_CALLS + 3))
    assert worker.call(*tasks) == [worker.feed(*tasks[:ACTOR_WINDOW_CALLS])]
    assert worker.ended((10, OK), (11, OK)) == [
        Report([(10, 1, OK, b"v", 0.5), (11, 1, OK, b"v", 0.5)]),
        worker.feed(*tasks[ACTOR_WINDOW_CALLS : ACTOR_WINDOW_CALLS + 2]),
    ]


def test_results_come_in_any_order(worker: ActorsUnderTest) -> None:
    worker.live(side_by_side=True)
    worker.call(10, 11, 12)
    assert told(worker.ended((12, OK), (10, RAISED))) == [(12, OK), (10, RAISED)]
    assert told(worker.ended((11, OK))) == [(11, OK)]


def test_calls_of_an_actor_that_is_not_here_are_dropped_without_a_word(worker: ActorsUnderTest) -> None:
    assert worker.call(10) == [Drop([(10, 1)])]
    worker.live()
    worker.down()
    assert worker.call(11, 12) == [Drop([(11, 1), (12, 1)])]
    assert worker.local.on_inputs(CALL, 13, 1, worker.now) == [Drop([(13, 1)])]


# --- its end


def test_the_death_of_its_process_is_the_end_of_the_creation_alone(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, 11)
    worker.call(12, here=False)
    actions = worker.down(2, 1)
    assert told(actions) == [(ACTOR, CRASHED)]
    assert actions[-2] == Report([(ACTOR, 1, CRASHED, DEATH, 0.0)])
    assert sorted(dropped(actions)) == [ACTOR, 10, 11, 12]
    assert worker.local.is_idle
    assert worker.local.next_deadline() is None


def test_a_constructor_that_raises_ends_it_when_its_process_is_gone(worker: ActorsUnderTest) -> None:
    worker.create()
    worker.local.on_ready(1, worker.now)
    worker.call(10)
    assert worker.ended((ACTOR, RAISED), value=b"exception") == [Drop([(10, 1)]), Kill(1)]
    actions = worker.down()
    assert actions == [Report([(ACTOR, 1, RAISED, b"exception", 0.5)]), Drop([(ACTOR, 1)])]


def test_an_actor_that_ends_itself_tells_the_results_before_that(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, 11, 12)
    assert worker.ended((10, OK), (11, OK), (ACTOR, OK)) == [
        Report([(10, 1, OK, b"v", 0.5), (11, 1, OK, b"v", 0.5)]),
        Kill(1),
    ]
    actions = worker.down(3, 3)
    assert told(actions) == [(ACTOR, OK)]
    assert sorted(dropped(actions)) == [ACTOR, 12]


def test_an_actor_that_is_killed_may_close_itself(worker: ActorsUnderTest) -> None:
    worker.live()
    assert worker.recall(ACTOR) == [EndProcess(1)]
    assert worker.page(1, 1) == []
    assert worker.local.next_deadline() == 100.0 + ACTOR_CLOSE_SECONDS
    assert told(worker.ended((ACTOR, CANCELLED))) == []
    assert told(worker.down()) == [(ACTOR, CANCELLED)]


def test_one_that_takes_too_long_to_close_is_killed(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.recall(ACTOR)
    worker.page(1, 1)
    assert worker.later(ACTOR_CLOSE_SECONDS) == [Kill(1)]
    assert told(worker.down()) == [(ACTOR, CANCELLED)]


def test_what_runs_in_an_actor_that_is_killed_is_interrupted_and_not_told(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, 11)
    worker.call(12, here=False)
    assert worker.recall(ACTOR) == [Drop([(12, 1)]), EndProcess(1)]
    assert worker.page(2, 1) == [Interrupt(1, 2)]
    actions = worker.ended((10, CANCELLED), (11, CANCELLED), (ACTOR, CANCELLED))
    assert told(actions) == []
    assert sorted(dropped(actions)) == [10, 11]
    assert told(worker.down()) == [(ACTOR, CANCELLED)]


def test_results_that_were_finished_before_it_was_killed_count(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, 11)
    worker.recall(ACTOR)
    assert told(worker.ended((10, OK), (11, CANCELLED))) == [(10, OK)]


def test_with_force_it_is_killed_at_once(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10)
    assert worker.recall(ACTOR, force=True) == [Kill(1)]
    assert told(worker.down(2, 1)) == [(ACTOR, CANCELLED)]


def test_force_comes_after_the_gentler_wish(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.recall(ACTOR)
    assert worker.recall(ACTOR, force=True) == [Kill(1)]


def test_a_constructor_that_runs_is_interrupted(worker: ActorsUnderTest) -> None:
    worker.create()
    worker.local.on_ready(1, worker.now)
    assert worker.recall(ACTOR) == [EndProcess(1)]
    assert worker.page(1, 0) == [Interrupt(1, 1)]
    assert worker.later(ACTOR_CLOSE_SECONDS) == [Kill(1)]
    assert told(worker.down(1, 0)) == [(ACTOR, CANCELLED)]


def test_one_that_has_not_begun_ends_at_once(worker: ActorsUnderTest) -> None:
    worker.create()
    assert worker.recall(ACTOR) == [Kill(1)]
    assert told(worker.down(0, 0)) == [(ACTOR, CANCELLED)]


def test_one_whose_process_is_not_even_started_again_ends_at_once(worker: ActorsUnderTest) -> None:
    worker.create()
    worker.down(0, 0)
    assert told(worker.recall(ACTOR)) == [(ACTOR, CANCELLED)]
    assert worker.local.is_idle
    assert worker.local.next_deadline() is None


def test_a_creation_that_is_only_asked_back_goes_back_if_it_has_not_begun(worker: ActorsUnderTest) -> None:
    worker.create()
    assert worker.recall(ACTOR, kill=False) == [Kill(1)]
    assert told(worker.down(0, 0)) == [(ACTOR, NOT_RUN)]
    worker.live()
    assert worker.recall(ACTOR, kill=False) == []


# --- calls that are not wanted


def test_a_call_that_waits_is_dropped_where_it_is(worker: ActorsUnderTest) -> None:
    worker.create()
    worker.call(10, 11)
    assert told(worker.recall(10)) == [(10, CANCELLED)]
    assert told(worker.recall(11, kill=False)) == [(11, NOT_RUN)]
    assert worker.recall(12) == []


def test_dropping_the_call_that_lacks_its_inputs_lets_the_others_go(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, here=False)
    worker.call(11)
    assert worker.recall(10) == [worker.feed(11), Report([(10, 1, CANCELLED, {}, 0.0)])]


def test_a_call_that_was_sent_and_has_not_started_ends_before_the_one_that_runs(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, 11, 12)
    assert worker.recall(11) == [CancelSent(1, [11], CANCELLED)]
    assert told(worker.page(2, 1)) == [(11, CANCELLED)]
    assert told(worker.ended((10, OK), (11, CANCELLED), (12, OK))) == [(10, OK), (12, OK)]
    assert worker.call(13) == [worker.feed(13)]
    assert told(worker.ended((13, OK))) == [(13, OK)]


def test_a_call_that_runs_is_interrupted(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, 11)
    worker.recall(10)
    assert worker.page(2, 1) == [Interrupt(1, 2)]
    actions = worker.ended((10, CANCELLED))
    assert actions == [Report([(10, 1, CANCELLED, {"reason": "cancelled while it ran"}, 0.5)])]
    assert told(worker.ended((11, OK))) == [(11, OK)]
    assert worker.later(CANCEL_GRACE_SECONDS) == [Inspect(1)], "its actor is not killed for it any more"


def test_one_that_does_not_heed_the_interrupt_takes_its_actor_along(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, 11)
    worker.recall(10)
    worker.page(2, 1)
    assert worker.page(2, 1) == [Kill(1)]
    assert worker.now >= 100.0 + CANCEL_GRACE_SECONDS
    actions = worker.down(2, 1)
    assert told(actions) == [(10, CANCELLED), (ACTOR, CRASHED)]
    assert "did not end" in actions[-2].results[-1][3]["reason"]


def test_with_force_a_call_that_runs_takes_its_actor_along_at_once(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10)
    worker.recall(10, force=True)
    assert worker.page(2, 1) == [Kill(1)]
    assert told(worker.down(2, 1)) == [(10, CANCELLED), (ACTOR, CRASHED)]


def test_force_comes_after_the_gentler_wish_for_calls_too(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10)
    worker.recall(10)
    worker.page(2, 1)
    worker.recall(10, force=True)
    now = worker.now
    assert worker.page(2, 1) == [Kill(1)]
    assert worker.now == now, "at once"


def test_a_call_that_ends_before_the_interrupt_ends_as_it_did(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, 11)
    worker.recall(10)
    assert told(worker.ended((10, OK))) == [(10, OK)]
    assert worker.page(3, 2) == []
    assert told(worker.ended((11, OK))) == [(11, OK)]


def test_side_by_side_the_process_ends_the_call(worker: ActorsUnderTest) -> None:
    worker.live(side_by_side=True)
    worker.call(10, 11)
    assert worker.recall(10) == [CancelSent(1, [10], CANCELLED)]
    assert told(worker.ended((10, CANCELLED))) == [(10, CANCELLED)]
    assert worker.later(CANCEL_GRACE_SECONDS) == []


def test_side_by_side_a_call_that_does_not_end_is_given_up_and_its_actor_lives(worker: ActorsUnderTest) -> None:
    worker.live(side_by_side=True)
    worker.call(10, 11)
    worker.recall(10)
    assert worker.later(BLOCKED_SECONDS) == [Interrupt(1, 2)], "its loop may be blocked"
    assert told(worker.later(CANCEL_GRACE_SECONDS)) == [(10, CANCELLED)]
    assert told(worker.ended((10, OK), (11, OK))) == [(11, OK)], "it is told once"
    assert worker.local.next_deadline() is None


def test_side_by_side_force_gives_a_call_up_at_once(worker: ActorsUnderTest) -> None:
    worker.live(side_by_side=True)
    worker.call(10)
    worker.recall(10, force=True)
    assert told(worker.later(REVOKE_SETTLE_SECONDS)) == [(10, CANCELLED)]


# --- time limits


def test_a_time_limit_counts_from_the_start_in_the_process(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, 11, spec=SHORT)
    assert worker.page(2, 1) == [], "a first look, whether results are held up"
    assert worker.local.next_deadline() == 102.0
    assert worker.page(2, 1, since=101.5) == []
    assert worker.local.next_deadline() == pytest.approx(103.5)
    assert worker.page(2, 1, since=101.5) == [Interrupt(1, 2)]
    actions = worker.ended((10, OK))
    assert told(actions) == [(10, TIMED_OUT)], "half of a value must not pass for the whole"
    assert "timeout of 2 s" in actions[0].results[0][3]["reason"]
    assert worker.page(3, 2, since=103.5) == []
    assert worker.local.next_deadline() == pytest.approx(105.5)


def test_after_its_time_a_call_that_goes_on_takes_its_actor_along(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, spec=SHORT)
    assert worker.page(2, 1) == [Interrupt(1, 2)]
    assert worker.page(2, 1) == [Kill(1)]
    actions = worker.down(2, 1)
    assert told(actions) == [(10, TIMED_OUT), (ACTOR, CRASHED)]


def test_the_interrupt_comes_too_late_for_a_call_that_has_just_ended(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, 11, spec=SHORT)
    worker.page(2, 1)
    assert worker.page(2, 1) == [Interrupt(1, 2)]
    assert worker.page(3, 2, since=102.0) == [], "its result is on the way"
    assert told(worker.ended((10, CANCELLED))) == [(10, TIMED_OUT)]
    assert told(worker.ended((11, OK))) == [(11, OK)]


def test_side_by_side_the_process_watches_time_limits(worker: ActorsUnderTest) -> None:
    worker.live(side_by_side=True)
    worker.call(10, spec=SHORT)
    assert worker.local.next_deadline() is None
    assert told(worker.ended((10, TIMED_OUT))) == [(10, TIMED_OUT)]


def test_a_result_that_waits_behind_a_long_call_is_asked_for(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, 11)
    assert worker.page(3, 2, sent=1, since=100.0) == [AskResults(1)]
    worker.ended((10, OK))
    assert worker.local.next_deadline() is None, "the one that is left holds nothing up"


# --- the worker leaves, or its owner wants it back


@pytest.mark.parametrize("ends", ["drain", "hand back", "hand back its card"])
def test_it_ends_after_the_call_that_runs(worker: ActorsUnderTest, ends: str) -> None:
    worker.create(cards=("gpu-a",))
    worker.local.on_admitted(1, worker.now)
    worker.local.on_ready(1, worker.now)
    worker.alive()
    worker.call(10, 11)
    worker.call(12, here=False)
    if ends == "drain":
        actions = worker.local.drain(worker.now)
    else:
        cards = frozenset(("gpu-a",)) if ends == "hand back its card" else None
        actions = worker.local.hand_back(cards, running=False, now=worker.now)
    assert actions == [Drop([(12, 1)]), EndProcess(1)]
    assert worker.page(2, 1) == []
    assert worker.page(2, 1) == [], "however long that takes"
    assert worker.now >= 100.0 + LOOK_SECONDS
    assert told(worker.ended((10, OK), (11, CANCELLED), (ACTOR, CANCELLED))) == [(10, OK)]
    assert told(worker.down(2, 2)) == [(ACTOR, HANDED_BACK)]
    again = worker.create(cards=("gpu-a",))
    assert told(again) == [(ACTOR, NOT_RUN)]
    assert dropped(again) == [ACTOR]
    worker.local.accept(frozenset(("gpu-a",)) if ends == "hand back its card" else None)
    assert bool(told(worker.create(cards=("gpu-a",)))) is (ends == "drain")


def test_one_that_takes_too_long_to_close_after_its_last_call_is_killed(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10)
    worker.local.drain(worker.now)
    worker.page(2, 1)
    worker.ended((10, OK))
    assert worker.page(2, 2) == []
    assert worker.later(ACTOR_CLOSE_SECONDS) == [Kill(1)]


def test_side_by_side_it_ends_after_all_that_it_was_sent(worker: ActorsUnderTest) -> None:
    worker.live(side_by_side=True)
    worker.call(10, 11)
    assert worker.local.drain(worker.now) == []
    worker.later(LOOK_SECONDS)
    assert told(worker.ended((11, OK))) == [(11, OK)]
    actions = worker.ended((10, OK))
    assert told(actions) == [(10, OK)]
    assert actions[1:] == [EndProcess(1)]
    assert worker.later(ACTOR_CLOSE_SECONDS) == [Kill(1)]
    assert told(worker.down()) == [(ACTOR, HANDED_BACK)]


def test_calls_are_still_limited_and_cancelled_while_it_ends_gently(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, 11, spec=SHORT)
    worker.local.drain(worker.now)
    worker.page(2, 1)
    assert worker.recall(10) == [CancelSent(1, [10], CANCELLED)]
    assert worker.page(2, 1) == [Interrupt(1, 2)]
    assert told(worker.ended((10, CANCELLED))) == [(10, CANCELLED)]
    assert worker.later(CANCEL_GRACE_SECONDS) == [Inspect(1)], "it is not killed for the call that has ended"


def test_an_owner_in_a_hurry_interrupts_what_runs(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10)
    assert worker.local.hand_back(None, running=True, now=worker.now, grace_seconds=0.5) == [EndProcess(1)]
    assert worker.page(2, 1) == [Interrupt(1, 2)]
    assert worker.later(0.5) == [Kill(1)]
    assert told(worker.down(2, 1)) == [(ACTOR, HANDED_BACK)]


@pytest.mark.parametrize("side_by_side", [False, True])
def test_an_owner_who_gets_impatient_is_heard(worker: ActorsUnderTest, side_by_side: bool) -> None:
    worker.live(side_by_side=side_by_side)
    worker.call(10)
    worker.local.drain(worker.now)
    actions = worker.local.hand_back(None, running=True, now=worker.now, grace_seconds=0.5)
    assert actions == ([EndProcess(1)] if side_by_side else [])
    if not side_by_side:
        assert worker.page(2, 1) == [Interrupt(1, 2)]
    assert worker.later(0.5) == [Kill(1)]


def test_one_that_has_not_begun_is_given_back_as_such(worker: ActorsUnderTest) -> None:
    worker.create()
    worker.call(10)
    assert worker.local.drain(worker.now) == [Drop([(10, 1)]), Kill(1)]
    assert told(worker.down(0, 0)) == [(ACTOR, NOT_RUN)]


def test_other_cards_are_left_alone(worker: ActorsUnderTest) -> None:
    worker.live()
    assert worker.local.hand_back(frozenset(("gpu-b",)), running=True, now=worker.now) == []


def test_a_constructor_that_fails_meanwhile_has_failed(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.local.drain(worker.now)
    worker.ended((ACTOR, OK))
    assert told(worker.down()) == [(ACTOR, OK)], "it has ended itself"


def test_a_constructor_that_was_interrupted_has_not_failed(worker: ActorsUnderTest) -> None:
    worker.create()
    worker.local.on_ready(1, worker.now)
    worker.local.hand_back(None, running=True, now=worker.now)
    worker.page(1, 0)
    worker.ended((ACTOR, RAISED))
    assert told(worker.down()) == [(ACTOR, HANDED_BACK)]


# --- the coordinator is lost


def test_what_is_here_can_be_told_to_the_next_coordinator(worker: ActorsUnderTest) -> None:
    worker.create(cards=("gpu-a",), ordinal=2)
    worker.local.on_admitted(1, worker.now)
    worker.local.on_ready(1, worker.now)
    worker.alive()
    worker.call(10)
    worker.call(11, 12, spec=OTHER)
    worker.call(13, here=False)
    worker.ended((11, OK))
    assert worker.local.held() == [
        (CREATION, ("gpu-a",), 2, [(ACTOR, 1)]),
        (CALL, (), 0, [(10, 1)]),
        (OTHER, (), 0, [(12, 1)]),
        (CALL, (), 0, [(13, 1)]),
    ]


def test_calls_without_their_inputs_are_forgotten_with_all_behind_them(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10)
    worker.call(11, here=False)
    worker.call(12)
    assert worker.local.abandon(frozenset(), worker.now) == [Drop([(11, 1), (12, 1)])]
    assert worker.local.held() == [(CREATION, (), 0, [(ACTOR, 1)]), (CALL, (), 0, [(10, 1)])]


def test_calls_whose_inputs_are_lost_are_forgotten_unless_they_were_sent(worker: ActorsUnderTest) -> None:
    worker.create()
    worker.local.on_ready(1, worker.now)
    worker.call(10, 11, 12)
    lost = frozenset(((11, 1),))
    assert worker.local.abandon(lost, worker.now) == [Drop([(11, 1), (12, 1)])]
    assert worker.alive() == [Alive(ACTOR, 1), worker.feed(10)]
    assert worker.local.abandon(frozenset(((10, 1),)), worker.now) == []


def test_an_actor_that_cannot_begin_is_forgotten(worker: ActorsUnderTest) -> None:
    worker.create(is_here=False)
    worker.call(10)
    assert worker.local.abandon(frozenset(), worker.now) == [Drop([(10, 1)]), Kill(1)]
    assert worker.local.held() == []
    assert told(worker.down(0, 0)) == []


# --- output


def test_output_belongs_to_the_call_that_runs_or_else_to_the_actor(worker: ActorsUnderTest) -> None:
    worker.live()
    worker.call(10, 11)
    assert [worker.local.task_at(1, number) for number in (0, 1, 2, 3, 4)] == [ACTOR, ACTOR, 10, 11, ACTOR]
    assert worker.local.task_at(99, 1) == 0
    assert 1 in worker.local
    assert 99 not in worker.local


def test_side_by_side_output_is_the_actors(worker: ActorsUnderTest) -> None:
    worker.live(side_by_side=True)
    worker.call(10)
    assert worker.local.task_at(1, 2) == ACTOR
