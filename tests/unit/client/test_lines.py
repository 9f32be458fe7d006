"""The order of calls of one actor, without a connection."""

from __future__ import annotations

from typing import Any, Dict, List, Set, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumesh.client.lanes import Lane, SpecHandle
from gpumesh.client.lines import Lines, parts_of, that_keep_order
from gpumesh.model.payloads import Bundle, Later
from gpumesh.model.tasks import TaskSpec


def lane(number: int, actor: int, calls: List[int]) -> Lane:
    made = Lane(None, SpecHandle(number, TaskSpec(b"d" * 16, f"m{number}", actor=actor), None, None))  # type: ignore[arg-type]
    made.ids = list(calls)
    made.payloads = [b"%d" % call for call in calls]
    return made


def taken(lanes: List[Lane]) -> List[List[Tuple[int, List[int]]]]:
    return [[(part[0].handle.number, part[1]) for part in parts] for parts in parts_of(lanes)]


def test_the_lane_of_one_method_leaves_as_it_is() -> None:
    lanes = [lane(1, 7, [1, 2, 3])]
    assert taken(lanes) == [[(1, [1, 2, 3])]]
    assert lanes[0].ids == [] == lanes[0].payloads


def test_lanes_of_tasks_leave_one_by_one() -> None:
    assert taken([lane(1, 0, [1, 4]), lane(2, 0, [2, 3])]) == [[(1, [1, 4])], [(2, [2, 3])]]


def test_calls_of_two_methods_of_one_actor_leave_in_the_order_in_which_they_were_made() -> None:
    assert taken([lane(1, 7, [1, 2, 5]), lane(2, 7, [3, 4, 6])]) == [[(1, [1, 2]), (2, [3, 4]), (1, [5]), (2, [6])]]


def test_calls_of_different_actors_do_not_mix() -> None:
    assert taken([lane(1, 7, [1, 4]), lane(2, 8, [2, 3]), lane(3, 0, [5])]) == [[(1, [1, 4])], [(2, [2, 3])], [(3, [5])]]


def test_payloads_stay_with_their_calls() -> None:
    for parts in parts_of([lane(1, 7, [1, 4]), lane(2, 7, [2, 3])]):
        for _, ids, payloads in parts:
            assert payloads == [b"%d" % call for call in ids]


LATE = Bundle(b"", ((0, Later(9)),))
OTHER = Bundle(b"", ((0, b"here"),), (7,))


@pytest.mark.parametrize(
    ("payloads", "portions"),
    [
        ([b"", b""], [[0, 1]]),
        ([b"", LATE], [[0, 1]]),
        ([LATE, LATE], [[0, 1]]),
        ([LATE, b""], [[0], [1]]),
        ([LATE, OTHER, LATE, LATE, b"", b""], [[0], [1, 2, 3], [4, 5]]),
    ],
)
def test_no_message_has_a_call_behind_one_that_waits_for_a_result(payloads: List[Any], portions: List[List[int]]) -> None:
    found = list(that_keep_order(list(range(len(payloads))), payloads))
    assert [ids for ids, _ in found] == portions
    assert [payload for _, those in found for payload in those] == payloads


def test_whoever_is_made_later_waits_behind_one_that_cannot_go() -> None:
    lines = Lines()
    assert lines.may_go(7, 1)
    lines.enter(7, 2)
    assert not lines.may_go(7, 3)
    assert lines.may_go(8, 4), "another actor has nothing to do with it"
    assert lines.may_go(7, 2), "it is its own turn"
    assert lines.next_of(7) is None, "the first is not waiting for its turn, but for something else"
    lines.leave(2)
    assert lines.next_of(7) == 3
    assert lines.next_of(7) is None, "said once"
    lines.leave(3)
    assert not lines
    assert 3 not in lines


def test_one_that_comes_back_goes_first() -> None:
    lines = Lines()
    lines.enter(7, 5)
    assert not lines.may_go(7, 6)
    lines.enter(7, 2)
    lines.enter(7, 5)
    assert sorted(lines) == [2, 5, 6]
    lines.leave(2)
    assert lines.next_of(7) is None
    lines.leave(5)
    assert lines.next_of(7) == 6


def test_one_that_ends_in_the_middle_of_a_line_leaves_it() -> None:
    lines = Lines()
    lines.enter(7, 1)
    assert not lines.may_go(7, 2)
    assert not lines.may_go(7, 3)
    lines.leave(2)
    lines.leave(1)
    assert lines.next_of(7) == 3
    lines.leave(9)  # Nobody knows it.
    assert lines.actor_of(3) == 7
    assert lines.actor_of(9) == 0
    lines.clear()
    assert not lines


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), min_size=1, max_size=30), st.randoms())
def test_calls_leave_in_order_whichever_of_them_are_held_up(made: List[Tuple[int, bool, bool]], random: Any) -> None:
    """Each call is of some actor, may be held up when it is made, and may end while it waits."""
    lines = Lines()
    held: Set[int] = set()
    left: Dict[int, List[int]] = {1: [], 2: [], 3: []}
    ended: Set[int] = set()
    actor_of = {call: actor for call, (actor, _, _) in enumerate(made)}

    def try_to_go(call: int) -> None:
        actor = actor_of[call]
        if not lines.may_go(actor, call):
            return
        if call in held:
            lines.enter(actor, call)
            return
        left[actor].append(call)
        lines.leave(call)
        go_on(actor)

    def go_on(actor: int) -> None:
        following = lines.next_of(actor)
        if following is not None:
            try_to_go(following)

    for call, (_, is_held, _) in enumerate(made):
        if is_held:
            held.add(call)
        try_to_go(call)
    waiting = [call for call in actor_of if call in lines]
    random.shuffle(waiting)
    for call in waiting:
        if call not in lines:
            continue
        if made[call][2]:
            ended.add(call)
            lines.leave(call)
            go_on(actor_of[call])
        elif call in held:
            held.discard(call)
            try_to_go(call)
    for actor, calls in left.items():
        assert calls == [call for call in actor_of if actor_of[call] == actor and call not in ended]
    assert not lines
