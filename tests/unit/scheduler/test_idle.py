"""The workers with free slots, in the order in which they are asked."""

from __future__ import annotations

from tests.support.scheduler_parts import idle_of, make_worker


def test_the_fastest_slot_comes_first_and_equal_ones_by_name() -> None:
    wide = make_worker("wide", slots=8, score=8.0)
    fast, second, slow = make_worker("fast", score=5.0), make_worker("b", score=2.0), make_worker("a", score=2.0)
    assert list(idle_of(wide, second, fast, slow)) == [fast, slow, second, wide]


def test_who_is_added_twice_is_there_once() -> None:
    worker = make_worker()
    idle = idle_of(worker, worker)
    assert (list(idle), len(idle)) == ([worker], 1)
    idle.discard(worker)
    assert (list(idle), len(idle), worker in idle) == ([], 0, False)


def test_who_is_not_there_can_be_taken_out_without_harm() -> None:
    here, elsewhere = make_worker("here"), make_worker("elsewhere")
    idle = idle_of(here)
    idle.discard(elsewhere)
    assert here in idle
    assert elsewhere not in idle
    assert list(idle) == [here]


def test_who_leaves_is_the_right_one_among_many_of_the_same_speed() -> None:
    workers = [make_worker(f"w{index}") for index in range(5)]
    idle = idle_of(*reversed(workers))
    idle.discard(workers[2])
    assert list(idle) == [workers[0], workers[1], workers[3], workers[4]]


def test_who_is_taken_out_and_put_back_has_the_place_of_its_new_speed() -> None:
    one, other = make_worker("one", score=1.0), make_worker("other", score=2.0)
    idle = idle_of(one, other)
    idle.discard(one)
    one.change(one.facts._replace(score=3.0))
    idle.add(one)
    assert list(idle) == [one, other]
