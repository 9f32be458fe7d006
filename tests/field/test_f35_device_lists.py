"""F35: each task sees exactly the cards that it was given, whatever ran before it and in whichever process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Dict, Iterator, List, Set, Tuple

import pytest

from gpumesh import GPUMesh, accelerate
from tests.support.hardware import Machine, card, uuid
from tests.support.processes import until

SLOTS = 2
CARDS = [uuid(number) for number in range(3)]
Seen = Tuple[Tuple[str, ...], int]


@pytest.fixture
def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GPUMesh]:
    """One worker with two slots and three cards."""
    machine = Machine(tmp_path, [card(number) for number in range(3)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, content in machine.environment.items():
        monkeypatch.setenv(name, content)
    with GPUMesh.local(workers=1, slots=SLOTS) as mesh:
        until(lambda: len(mesh.workers()[0]["devices"]) == 4, 30, what="the worker tells of its cards")
        yield mesh


def look(seconds: float = 0.0) -> Seen:
    """The cards that this process may use, and which process it is."""
    time.sleep(seconds)
    return tuple(filter(None, os.environ["CUDA_VISIBLE_DEVICES"].split(","))), os.getpid()


def wait_for(file: str) -> Seen:
    end = time.monotonic() + 60
    while not os.path.exists(file):
        assert time.monotonic() < end
        time.sleep(0.01)
    return look()


def weigh(data: bytes) -> Tuple[Seen, int]:
    return look(), len(data)


def by_process(seen: List[Seen]) -> Dict[int, Set[Tuple[str, ...]]]:
    found: Dict[int, Set[Tuple[str, ...]]] = {}
    for cards, pid in seen:
        found.setdefault(pid, set()).add(cards)
    return found


def test_tasks_with_one_two_and_no_gpus_see_exactly_their_own(mesh: GPUMesh) -> None:
    none, one, two, three = (accelerate(mesh, **({"gpu": gpus} if gpus else {}))(look) for gpus in range(4))

    ones = one.map([(0.2,)] * 9).result(60)
    twos = two.map([()] * 3).result(60)
    nones = none.map([(0.05,)] * 4).result(60)
    threes = three.map([()] * 2).result(60)
    again = one.map([(0.2,)] * 3).result(60)

    assert {cards for cards, _ in ones} == {(key,) for key in CARDS}, "every card has had a task"
    assert all(len(cards) == 2 and len(set(cards)) == 2 for cards, _ in twos)
    assert all(cards == () for cards, _ in nones)
    assert all(cards == tuple(CARDS) for cards, _ in threes)
    assert {cards for cards, _ in again} <= {(key,) for key in CARDS}
    every = [*ones, *twos, *nones, *threes, *again]
    assert all(len(sets) == 1 for sets in by_process(every).values()), "no process has ever seen two sets of cards"


def test_tasks_of_the_same_cards_share_a_process(mesh: GPUMesh) -> None:
    one = accelerate(mesh, gpu=1)(look)
    two = accelerate(mesh, gpu=2)(look)

    first = [one.remote().result(60) for _ in range(5)]
    pairs = [two.remote().result(60) for _ in range(3)]

    assert len({pid for _, pid in first}) == 1
    assert len({pid for _, pid in pairs}) == 1


def test_gpu_tasks_take_no_slot_of_the_others(mesh: GPUMesh) -> None:
    started = time.monotonic()
    busy = accelerate(mesh)(look).map([(1.5,)] * SLOTS)
    gpus = accelerate(mesh, gpu=1)(look).map([(1.5,)] * 3)

    assert len({pid for _, pid in [*busy.result(60), *gpus.result(60)]}) == SLOTS + 3
    assert time.monotonic() - started < 6, "five tasks of 1.5 s at once, in processes of which three had to be started"


def test_fractions_share_a_card_in_processes_of_their_own(mesh: GPUMesh) -> None:
    halves = accelerate(mesh, gpu=0.5)(look).map([(0.5,)] * 12).result(60)

    processes = by_process(halves)
    assert all(len(sets) == 1 for sets in processes.values())
    places: Dict[Tuple[str, ...], int] = {}
    for (cards,) in processes.values():
        places[cards] = places.get(cards, 0) + 1
    assert places == {(key,): 2 for key in CARDS}


def test_tasks_whose_inputs_lie_in_the_store_get_their_cards_beside_full_slots(mesh: GPUMesh, tmp_path: Path) -> None:
    data = bytes(3_000_000)
    word = tmp_path / "go"
    held = accelerate(mesh)(wait_for).map([(str(word),)] * SLOTS)

    ends = [accelerate(mesh, gpu=gpus)(weigh).map([(data,)] * 3).result(60) for gpus in (1, 2)]

    for gpus, seen in zip((1, 2), ends):
        assert all(len(cards) == gpus and size == len(data) for (cards, _), size in seen)
    word.touch()
    assert all(cards == () for cards, _ in held.result(60))
