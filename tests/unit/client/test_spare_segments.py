"""Room in shared memory that a client asks for ahead."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from gpumesh.client import spare_segments
from gpumesh.client.session import Session
from gpumesh.errors import ObjectStoreFullError
from gpumesh.protocol.messages import CreateSegment, PutObject, ReleaseRefs
from tests.unit.client.fake_mesh import FakeMesh
from tests.unit.client.fake_session import until

np = pytest.importorskip("numpy")

ARRAY = np.arange(100_000)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[FakeMesh]:
    with FakeMesh(folder=tmp_path) as fake:
        yield fake


@pytest.fixture
def session(mesh: FakeMesh) -> Iterator[Session]:
    made = Session(url=mesh.url, token="secret", fallback=False, start_local=lambda: None, reconnect_timeout=10)  # type: ignore[arg-type, return-value]
    yield made
    made.close()


def asked(mesh: FakeMesh) -> List[int]:
    return [each.oid for each in mesh.received if type(each) is CreateSegment]


def put(mesh: FakeMesh) -> List[int]:
    return [each.oid for each in mesh.received if type(each) is PutObject and each.segment]


def released(mesh: FakeMesh) -> List[int]:
    return [oid for each in mesh.received if type(each) is ReleaseRefs for oid, _ in each.objects]


def test_the_third_value_of_a_size_finds_room_that_was_asked_for_ahead(session: Session, mesh: FakeMesh) -> None:
    space = session.objects()
    refs: List[Any] = []
    for count in range(1, 6):
        refs.append(space.put(ARRAY + count))
        expected = count if count == 1 else count + 1
        mesh.until(lambda count=count, expected=expected: (len(put(mesh)), len(asked(mesh))) == (count, expected))  # type: ignore[misc]
    assert put(mesh) == asked(mesh)[:-1], "in the order in which they were asked for"
    assert [ref.oid for ref in refs] == put(mesh)
    assert [space.get(ref)[0] for ref in refs] == [1, 2, 3, 4, 5]


def test_what_does_not_fit_goes_back(session: Session, mesh: FakeMesh) -> None:
    space = session.objects()
    kept = [space.put(ARRAY), space.put(ARRAY), space.put(np.arange(200_000))]
    mesh.until(lambda: len(asked(mesh)) == 4)
    spare = asked(mesh)[2]
    mesh.until(lambda: released(mesh) == [spare])
    assert spare in put(mesh)
    assert space.get(kept[2])[-1] == 199_999


def test_large_values_are_not_expected(session: Session, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_segments, "SPARE_BYTES", 100_000)
    space = session.objects()
    kept = [space.put(ARRAY) for _ in range(4)]
    mesh.until(lambda: len(put(mesh)) == len(kept))
    assert len(asked(mesh)) == len(kept)


def test_what_nobody_needs_goes_back(session: Session, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_segments, "SPARE_SECONDS", 0.0)
    space = session.objects()
    kept = [space.put(ARRAY), space.put(ARRAY)]
    mesh.until(lambda: len(asked(mesh)) == len(kept) + 1)
    time.sleep(0.001)  # Older than that.
    session.query("workers")  # Anything that wakes the thread which looks after such things.
    mesh.until(lambda: released(mesh) == asked(mesh)[-1:])


def test_a_full_store_is_said_where_the_value_is_put(session: Session, mesh: FakeMesh) -> None:
    space = session.objects()
    kept = [space.put(ARRAY)]
    mesh.full = "no room"
    with pytest.raises(ObjectStoreFullError, match="no room"):
        space.put(ARRAY)
    mesh.full = ""
    kept.append(space.put(ARRAY))
    mesh.full = "no room"
    mesh.until(lambda: len(put(mesh)) == len(kept))


def test_a_spare_goes_with_its_connection(session: Session, mesh: FakeMesh) -> None:
    space = session.objects()
    kept = [space.put(ARRAY), space.put(ARRAY)]
    mesh.until(lambda: len(asked(mesh)) == len(kept) + 1)
    spare = asked(mesh)[-1]
    link = space.channel.link
    mesh.drop()
    assert until(lambda: space.channel.link is not link)
    kept.append(space.put(ARRAY + 7))
    assert space.get(kept[-1])[0] == 7
    assert spare not in put(mesh)
