"""The directory of objects under anything that peers, tasks and objects can do: it frees exactly what nobody refers to."""

from __future__ import annotations

from typing import Dict, List, Set, Tuple, Union

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpumesh.scheduler.directory import Directory, Entry, aside

PEERS: List[Union[int, str]] = [1, 2, "w1", "w2"]
peers = st.sampled_from(PEERS)


class DirectoryMachine(RuleBasedStateMachine):
    """Keeps its own books in the plainest way: a list of reasons for each object."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.grants: Dict[Tuple[Union[int, str], int], int] = {}
        self.tasks: Dict[int, List[int]] = {}
        self.refs: Dict[int, Set[int]] = {}  # Living objects and what they mention.
        self.copies: Set[Tuple[str, int]] = set()
        self.born = 0
        self.next_task = 0

    def expect(self, freed: List[Entry], deleted: Tuple[int, ...] = ()) -> None:
        """Those freed are those that nobody refers to, by our own books."""
        gone: Set[int] = set(deleted)
        while True:
            living = {oid for oid in self.refs if oid not in gone}
            wanted = {oid for (_, oid), count in self.grants.items() if count}
            wanted |= {oid for oids in self.tasks.values() for oid in oids}
            wanted |= {ref for oid in living for ref in self.refs[oid]}
            more = living - wanted
            if not more:
                break
            gone |= more
        ids = [entry.oid for entry in freed]
        assert len(ids) == len(set(ids))
        assert set(ids) == gone
        for entry in freed:
            assert {(worker, entry.oid) for worker in entry.copies} == {each for each in self.copies if each[1] == entry.oid}
        self.copies = {each for each in self.copies if each[1] not in gone}
        for oid in gone:
            del self.refs[oid]
            self.grants = {key: count for key, count in self.grants.items() if key[1] != oid}
        for mentions in (*self.tasks.values(), *self.refs.values()):
            if isinstance(mentions, set):
                mentions -= gone
            else:
                mentions[:] = [oid for oid in mentions if oid not in gone]

    @rule(peer=peers, data=st.data())
    def put(self, peer: Union[int, str], data: st.DataObject) -> None:
        oid = self.born
        self.born += 1
        refs = data.draw(st.lists(st.integers(0, self.born), max_size=3))
        self.refs[oid] = {ref for ref in refs if ref in self.refs}
        self.grants[peer, oid] = 1
        self.directory.declare(oid, 100, peer=peer, owner=str(peer), refs=refs)

    @precondition(lambda self: self.born)
    @rule(peer=peers, data=st.data(), count=st.integers(1, 2))
    def grant(self, peer: Union[int, str], data: st.DataObject, count: int) -> None:
        oid = data.draw(st.integers(0, self.born - 1))
        assert self.directory.grant(peer, oid, count) == (oid in self.refs)
        if oid in self.refs:
            self.grants[peer, oid] = self.grants.get((peer, oid), 0) + count

    @precondition(lambda self: self.born)
    @rule(peer=peers, data=st.data())
    def release(self, peer: Union[int, str], data: st.DataObject) -> None:
        objects = data.draw(st.lists(st.tuples(st.integers(0, self.born - 1), st.integers(1, 3)), max_size=3))
        for oid, count in objects:
            if (peer, oid) in self.grants:
                self.grants[peer, oid] = max(0, self.grants[peer, oid] - count)
        self.expect(self.directory.release(peer, objects))

    @rule(peer=peers)
    def break_connection(self, peer: Union[int, str]) -> None:
        """Its references count on, until it has said them anew."""
        for key, count in list(self.grants.items()):
            if key[0] == peer:
                del self.grants[key]
                there = (aside(peer), key[1])
                self.grants[there] = self.grants.get(there, 0) + count
        assert set(self.directory.set_aside(peer)) == {oid for worker, oid in self.copies if worker == peer}
        self.copies = {each for each in self.copies if each[0] != peer}

    @rule(peer=peers)
    def said_anew(self, peer: Union[int, str]) -> None:
        self.grants = {key: count for key, count in self.grants.items() if key[0] != aside(peer)}
        self.expect(self.directory.peer_gone(aside(peer)))

    @rule(peer=peers)
    def lose_peer(self, peer: Union[int, str]) -> None:
        self.grants = {key: count for key, count in self.grants.items() if key[0] != peer}
        self.copies = {each for each in self.copies if each[0] != peer}
        self.expect(self.directory.peer_gone(peer))

    @precondition(lambda self: self.born)
    @rule(worker=st.sampled_from(["w1", "w2"]), data=st.data(), is_there=st.booleans())
    def copy_or_drop(self, worker: str, data: st.DataObject, is_there: bool) -> None:
        oid = data.draw(st.integers(0, self.born - 1))
        (self.directory.copied if is_there else self.directory.dropped)(oid, worker)
        self.copies.discard((worker, oid))
        if is_there and oid in self.refs:
            self.copies.add((worker, oid))

    @precondition(lambda self: self.born)
    @rule(data=st.data())
    def start_task(self, data: st.DataObject) -> None:
        oids = data.draw(st.lists(st.integers(0, self.born), min_size=1, max_size=3))
        self.tasks[self.next_task] = [oid for oid in oids if oid in self.refs]
        self.directory.hold_for_task(self.next_task, oids)
        self.next_task += 1

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def end_task(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.tasks)))
        del self.tasks[task_id]
        self.expect(self.directory.task_ended(task_id))

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        oid = data.draw(st.sampled_from(sorted(self.refs)))
        for mentions in self.refs.values():
            mentions.discard(oid)
        self.tasks = {task_id: [other for other in oids if other != oid] for task_id, oids in self.tasks.items()}
        self.grants = {key: count for key, count in self.grants.items() if key[1] != oid}
        self.expect(self.directory.delete(oid), (oid,))

    @invariant()
    def the_tables_agree(self) -> None:
        self.directory.check()
        assert {entry.oid for entry in self.directory} == set(self.refs)
        assert {(worker, entry.oid) for entry in self.directory for worker in entry.copies} == self.copies


DirectoryMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestDirectory = DirectoryMachine.TestCase
