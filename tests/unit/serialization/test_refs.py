"""ObjectRefs and the table that counts them: what is asked for, what is given back, and when."""

from __future__ import annotations

import _thread
import copy
import gc
import os
import pickle
import threading
from typing import Any, List

import pytest

from gpumesh.errors import MeshError
from gpumesh.serialization import refs
from gpumesh.serialization.refs import ObjectRef, RefTable, collecting, current_space, set_process_space, use_space
from gpumesh.serialization.values import dumps, loads


class FakeSpace:
    """Counts, and remembers what was deleted."""

    def __init__(self) -> None:
        self.wakes = 0
        self.table = RefTable(self._wake)
        self.deleted: List[int] = []

    def _wake(self) -> None:
        self.wakes += 1

    def put(self, value: Any) -> ObjectRef:
        raise AssertionError(value)

    def get(self, wanted: Any, timeout: Any = None) -> Any:
        raise AssertionError(wanted)

    def delete(self, oids: List[int]) -> None:
        self.deleted.extend(oids)


@pytest.fixture
def space() -> FakeSpace:
    return FakeSpace()


def test_a_put_is_released_when_its_last_reference_is_gone(space: FakeSpace) -> None:
    ref = ObjectRef(5, 100, space, granted=1)
    other = copy.copy(ref)

    del ref
    assert space.table.take_releases() == []
    del other

    assert space.table.take_holds() == []
    assert space.table.take_releases() == [(5, 1)]
    assert space.table.take_releases() == []
    assert not space.table


def test_all_grants_are_given_back_at_once(space: FakeSpace) -> None:
    ref = ObjectRef(5, 100, space, granted=1)
    space.table.granted(5)
    space.table.granted(5, 2)
    del ref
    assert space.table.take_releases() == [(5, 4)]


def test_a_grant_for_what_is_gone_is_given_back(space: FakeSpace) -> None:
    space.table.granted(5)
    assert space.table.take_releases() == [(5, 1)]


def test_a_reference_that_came_inside_a_value_is_held(space: FakeSpace) -> None:
    with use_space(space):
        ref = pickle.loads(pickle.dumps(ObjectRef(7, 100)))

    assert ref.space is space
    assert space.table.take_holds() == [7]
    assert space.table.take_holds() == []
    del ref
    assert space.table.take_releases() == [(7, 1)]


def test_one_that_is_gone_before_anybody_asks_costs_nothing(space: FakeSpace) -> None:
    ObjectRef(7, 100, space)
    assert (space.table.take_holds(), space.table.take_releases()) == ([], [])


def test_one_that_comes_back_before_the_release_is_sent_keeps_its_grant(space: FakeSpace) -> None:
    ref = ObjectRef(7, 100, space, granted=1)
    del ref
    ref = ObjectRef(7, 100, space)
    assert (space.table.take_holds(), space.table.take_releases()) == ([], [])
    assert ref.oid == 7


def test_one_that_comes_back_after_the_release_is_held_anew(space: FakeSpace) -> None:
    ObjectRef(7, 100, space, granted=1)
    assert space.table.take_releases() == [(7, 1)]
    ref = ObjectRef(7, 100, space)
    assert space.table.take_holds() == [7]
    assert ref.oid == 7


def test_a_new_coordinator_is_asked_for_everything_that_lives(space: FakeSpace) -> None:
    kept = ObjectRef(1, 100, space, granted=3)
    ObjectRef(2, 100, space, granted=1)
    space.table.renew()
    assert space.table.take_holds() == [1]
    assert space.table.take_releases() == []
    del kept
    assert space.table.take_releases() == [(1, 1)]


def test_the_first_drop_wakes_and_no_other_until_somebody_has_looked(space: FakeSpace) -> None:
    found = [ObjectRef(number, 100, space, granted=1) for number in range(10)]
    found.clear()
    assert space.wakes == 1
    assert len(space.table.take_releases()) == 10
    ObjectRef(1, 100, space)
    assert space.wakes == 2


def test_threads_count_right(space: FakeSpace) -> None:
    kept = ObjectRef(1, 100, space, granted=1)
    released: List[Any] = []

    def churn() -> None:
        for number in range(500):
            copies = [copy.deepcopy(kept) for _ in range(3)]
            ObjectRef(2 + number % 3, 100, space)
            del copies

    def look() -> None:
        while not is_over.is_set():
            space.table.take_holds()
            released.extend(space.table.take_releases())

    is_over = threading.Event()
    threads = [threading.Thread(target=churn) for _ in range(4)]
    looker = threading.Thread(target=look)
    looker.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    looker.join()

    space.table.take_holds()
    released.extend(space.table.take_releases())
    assert space.table.counts() == {1: 1}
    assert not [oid for oid, _ in released if oid == 1]


def test_cycles_are_counted_when_the_collector_finds_them(space: FakeSpace) -> None:
    cycle: List[Any] = [ObjectRef(1, 100, space, granted=1)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert space.table.take_releases() == [(1, 1)]


# --- values with references inside


def test_what_is_pickled_is_collected_once(space: FakeSpace) -> None:
    first, second = ObjectRef(1, 100, space), ObjectRef(2, 100, space)
    with collecting() as outer:
        with collecting() as collected:
            payload = dumps({"a": [first, second], "b": first})
        dumps(second)

    assert list(collected) == [1, 2]
    assert list(outer) == [2]
    with use_space(space):
        found = loads(payload)
    assert found == {"a": [first, second], "b": first}
    assert found["a"][0] is found["b"]
    assert space.table.counts() == {1: 2, 2: 2}


def test_references_inside_code_that_travels_by_value_are_collected(space: FakeSpace) -> None:
    ref = ObjectRef(1, 100, space)
    with collecting() as collected:
        dumps(lambda: ref)
    assert list(collected) == [1]


def test_nothing_is_collected_elsewhere(space: FakeSpace) -> None:
    ref = ObjectRef(1, 100, space)
    with collecting() as collected:
        thread = threading.Thread(target=dumps, args=([ref],))
        thread.start()
        thread.join()
    pickle.dumps(ref)
    assert collected == {}


def test_spaces_nest_and_belong_to_a_thread(space: FakeSpace) -> None:
    inner, process = FakeSpace(), FakeSpace()
    seen: List[Any] = []
    with use_space(space):
        with use_space(inner):
            seen.append(current_space())
            thread = threading.Thread(target=lambda: seen.append(current_space()))
            thread.start()
            thread.join()
        seen.append(current_space())
    set_process_space(process)
    try:
        seen.append(current_space())
    finally:
        set_process_space(None)
    assert seen == [inner, None, space, process]


# --- one reference


def test_equality_hash_and_words(space: FakeSpace) -> None:
    ref = ObjectRef(0x1A2B3C4D_00000011, 1234, space)
    assert ref == ObjectRef(0x1A2B3C4D_00000011, 0)
    assert ref != ObjectRef(2, 1234)
    assert len({ref, copy.copy(ref), ObjectRef(2, 1)}) == 2
    assert repr(ref) == "ObjectRef(1a2b3c4d00000011, 1234 bytes)"
    assert ref.nbytes == 1234
    assert ref != 7


def test_delete_goes_to_where_it_counts(space: FakeSpace) -> None:
    ObjectRef(3, 1, space).delete()
    stranger = ObjectRef(4, 1)
    with use_space(space):
        stranger.delete()
    assert space.deleted == [3, 4]
    with pytest.raises(MeshError, match="make one first"):
        stranger.delete()


def test_a_stranger_counts_once_it_is_bound(space: FakeSpace) -> None:
    ref = pickle.loads(pickle.dumps(ObjectRef(3, 1, space)))
    assert ref.space is None
    ref.bind(space)
    ref.bind(FakeSpace())
    assert ref.space is space
    assert space.table.take_holds() == [3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_gives_nothing_back_that_is_its_parents(space: FakeSpace) -> None:
    ref = ObjectRef(3, 1, space, granted=1)
    child = os.fork()
    if child == 0:
        is_foreign = space.table.is_foreign
        del ref
        os._exit(0 if is_foreign and not space.table.take_releases() and space.wakes == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not space.table.is_foreign
    del ref
    assert space.table.take_releases() == [(3, 1)]


def test_from_the_first_reference_on_they_are_looked_for(space: FakeSpace) -> None:
    assert ObjectRef(1, 1).nbytes == 1
    assert refs.are_used


def test_ctrl_c_while_a_reference_goes_is_raised_after_that(capsys: pytest.CaptureFixture[str]) -> None:
    """Python lets no exception out of `__del__`: without care the first Ctrl-C of a busy client would be printed and forgotten."""
    wakes: List[int] = []

    def wake() -> None:
        wakes.append(1)
        if len(wakes) == 1:
            _thread.interrupt_main()

    space = FakeSpace()
    space.table = RefTable(wake)
    ref = ObjectRef(5, 100, space, granted=1)
    with pytest.raises(KeyboardInterrupt):
        del ref
        threading.Event().wait(10)

    assert len(wakes) == 2
    assert space.table.take_releases() == [(5, 1)]
    assert not capsys.readouterr().err
