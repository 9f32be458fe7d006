"""Whatever is put, passed, unpickled and dropped, in whatever order: the coordinator's count of this process is right after each exchange."""

from __future__ import annotations

import copy
import pickle
from typing import Any, Dict, List, Optional

from hypothesis import given
from hypothesis import strategies as st

from gpumesh.serialization.refs import ObjectRef, RefTable, use_space

OIDS = st.integers(1, 4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), OIDS),  # Granted with the PutObject, or with a Stored result.
        st.tuples(st.just("unpickle"), OIDS),
        st.tuples(st.just("copy"), st.integers(0, 30)),
        st.tuples(st.just("drop"), st.integers(0, 30)),
        st.tuples(st.just("grant"), OIDS),  # A result that was dropped before anyone looked.
        st.tuples(st.just("exchange"), st.just(0)),
        st.tuples(st.just("lose"), st.just(0)),
    ),
    max_size=60,
)


class Space:
    def __init__(self) -> None:
        self.is_woken = False
        self.table = RefTable(self._wake)
        self.held: Dict[int, int] = {}  # What the coordinator counts.

    def _wake(self) -> None:
        self.is_woken = True

    def put(self, value: Any) -> ObjectRef:
        raise AssertionError(value)

    def get(self, refs: Any, timeout: Optional[float] = None) -> Any:
        raise AssertionError(refs)

    def delete(self, oids: List[int]) -> None:
        raise AssertionError(oids)

    def exchange(self) -> None:
        self.is_woken = False
        for oid in self.table.take_holds():
            self.held[oid] = self.held.get(oid, 0) + 1
        for oid, count in self.table.take_releases():
            self.held[oid] -= count
            assert self.held[oid] == 0, "given back in part, or more than there was"
            del self.held[oid]


@given(STEPS)
def test_the_count_is_right_after_each_exchange(steps: Any) -> None:
    space = Space()
    alive: List[ObjectRef] = []
    for what, number in steps:
        if what == "put":
            space.held[number] = space.held.get(number, 0) + 1
            alive.append(ObjectRef(number, 10, space, granted=1))
        elif what == "unpickle":
            data = pickle.dumps(ObjectRef(number, 10))
            with use_space(space):
                alive.append(pickle.loads(data))
        elif what == "copy" and alive:
            alive.append(copy.copy(alive[number % len(alive)]))
        elif what == "drop" and alive:
            ref = alive.pop(number % len(alive))
            del ref
            assert space.is_woken
        elif what == "grant":
            space.held[number] = space.held.get(number, 0) + 1
            space.table.granted(number)
        elif what == "exchange":
            space.exchange()
            assert set(space.held) == {ref.oid for ref in alive}
            assert not space.table
        elif what == "lose":
            space.held.clear()
            space.table.renew()
    assert set(space.table.counts()) == {ref.oid for ref in alive}
    alive.clear()
    space.exchange()
    assert space.held == {}
    assert not space.table
    assert space.table.counts() == {}
