"""A worker's own store, and a connection that has ended without anybody having said so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterable, List

import pytest

from gpumesh.runtime.worker_store import Copy, OwnStore

OID = (7 << 32) | 1


class Objects:
    """What the store needs of what is around it."""

    limit = 1 << 20

    def __init__(self, link: Any) -> None:
        self.link = link
        self.copy = Copy(OID, 1000)
        self.sought_again: List[Copy] = []

    def copy_of(self, oid: int) -> Copy:
        return self.copy

    def seek_again(self, copies: Iterable[Copy]) -> None:
        self.sought_again.extend(copies)

    def send(self, message: Any) -> None:
        raise AssertionError(f"{message!r} was sent over a connection that has ended")


def test_a_copy_is_not_sought_over_a_connection_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMESH_SPILL_DIR", str(tmp_path))

    async def main() -> None:
        objects = Objects(SimpleNamespace(connection=SimpleNamespace(established=False)))
        store = OwnStore(objects, asyncio.get_running_loop())  # type: ignore[arg-type]
        try:
            store.resolve(objects.copy)
            assert objects.sought_again == [], "it would be sought here again, at once and for ever"

            objects.link = None
            store.disconnected()

            assert objects.sought_again == [objects.copy]
        finally:
            store.close()

    asyncio.run(main())
