"""Segments that are kept readable when their coordinator is lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, List, Tuple

import pytest

from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle, Stored
from gpumesh.protocol.messages import FetchObject
from gpumesh.runtime import leftovers
from gpumesh.runtime.leftovers import Leftovers, mentions

SIZE = 300_000


class Link:
    """What is sent over it."""

    def __init__(self) -> None:
        self.connection = self
        self.sent: List[Tuple[int, bytes]] = []

    def send_object(self, number: int, views: List[Any], window: int) -> None:
        self.sent.append((number, b"".join(map(bytes, views))))

    def flush_soon(self) -> None:
        pass


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / "s1"
    path.write_bytes(b"\x07" * (SIZE + 96))  # Segments may be larger than what lies in them.
    return path


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_segment_outlives_its_folder_until_somebody_has_it(segment: Path) -> None:
    left, link = Leftovers(), Link()
    before = descriptors()
    left.keep(5, str(segment), SIZE)
    segment.unlink()

    assert 5 in left
    assert not left.is_idle
    left.send(FetchObject(9, 5, 1 << 20), link)
    assert link.sent == [(9, b"\x07" * SIZE)]
    left.keep_only(lambda oid: False)
    assert 5 in left, "it is being sent"
    assert left.delivered(9)
    assert not left.delivered(9)
    left.stored(5)
    assert left.is_idle
    left.keep_only(lambda oid: False)
    assert not left
    assert descriptors() == before


def test_what_is_being_written_can_be_had_when_it_is_written(segment: Path) -> None:
    left = Leftovers()
    before = descriptors()
    left.keep_writing(5, str(segment))
    left.keep_writing(6, str(segment))
    left.keep_writing(7, str(segment.parent / "swept"))
    segment.unlink()

    assert not left.is_written(5, 2 * SIZE), "its writer found no space"
    assert left.is_written(6, SIZE)
    assert not left.is_written(7, SIZE)
    left.close()
    assert descriptors() == before
    assert not left


def test_what_is_gone_cannot_be_kept(segment: Path) -> None:
    left = Leftovers()
    left.keep(5, str(segment.parent / "swept"), SIZE)
    left.keep(6, str(segment), 2 * SIZE)
    left.keep_writing(7, str(segment))
    left.give_up(7)
    left.give_up(8)
    assert not left
    assert left.is_idle


def test_of_very_many_only_so_many_are_mapped(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "MAPS", 3)
    monkeypatch.setattr(leftovers, "ALL_COPIED_BYTES", 2500)
    left = Leftovers()
    before = descriptors()
    for oid in range(5):
        left.keep(oid, str(segment), SIZE)
        left.keep(10 + oid, str(segment), 1000)
    assert [oid for oid in range(20) if oid in left] == [0, 1, 2, 10, 11]
    assert descriptors() <= before + 3
    left.keep_only(lambda oid: oid in (1, 11))
    left.keep(3, str(segment), SIZE)
    left.keep(13, str(segment), 1000)
    assert [oid for oid in range(20) if oid in left] == [1, 3, 11, 13]
    left.close()
    assert descriptors() == before


def test_a_coordinator_that_is_lost_as_well_has_nothing(segment: Path) -> None:
    left, link = Leftovers(), Link()
    left.keep(5, str(segment), SIZE)
    left.send(FetchObject(9, 5, 1 << 20), link)
    left.stored(5)
    left.disconnected()
    assert not left.is_idle
    assert not left.delivered(9)
    left.close()


def test_the_objects_of_results_are_found_their_own_first() -> None:
    ok, value = int(Status.OK), Stored(5, SIZE)
    results = [
        (1, 1, ok, b"small", 0.1),
        (2, 1, ok, value, 0.1),
        (3, 1, ok, Bundle(b"small", (), (7, 8)), 0.1),
        (4, 1, ok, Bundle(Stored(6, SIZE), (), (7,)), 0.1),
        (5, 1, int(Status.CRASHED), {"reason": "died"}, 0.1),
    ]
    assert mentions(results) == [[5], [0, 7, 8], [6, 7]]
