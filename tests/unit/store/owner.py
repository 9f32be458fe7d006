"""A store with its owner's thread, clock and peers, for tests: calls handed over are done when the test waits for something."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from gpumesh.errors import MeshError
from gpumesh.store.container import container_bytes
from gpumesh.store.objects import ObjectStore
from gpumesh.store.segments import Mapping, SegmentWriter

WAIT_SECONDS = 20.0


class Owner:
    """Owns a store in `root`, has one writer for each name, and a clock that only the test moves."""

    def __init__(self, root: Path, *, limit: int, memory: Optional[Path] = None, disk: Optional[Path] = None) -> None:
        self.time = 0.0
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.writers: Dict[str, SegmentWriter] = {}
        self.gone: List[Tuple[str, List[str]]] = []
        self.store = ObjectStore(
            limit=limit,
            root=str(memory or root / "memory"),
            spill_dir=str(disk or root / "disk"),
            call_soon=self.calls.put,
            now=lambda: self.time,
            on_gone=self._on_gone,
        )

    def until(self, is_so: Callable[[], bool]) -> None:
        """Do what was handed over until this is so."""
        while not is_so():
            self.calls.get(timeout=WAIT_SECONDS)()

    def settle(self) -> None:
        """Do what was handed over so far."""
        while not self.calls.empty():
            self.calls.get()()

    def ask(
        self, oid: int, nbytes: int, *, writer: str = "a", is_copy: bool = False
    ) -> List[Tuple[Optional[str], Optional[MeshError]]]:
        """Start to create an object; the answer is appended to the list."""
        answers: List[Tuple[Optional[str], Optional[MeshError]]] = []
        self.store.create(oid, nbytes, writer=writer, then=lambda *answer: answers.append(answer), is_copy=is_copy)
        return answers

    def create(self, oid: int, nbytes: int, *, writer: str = "a", is_copy: bool = False) -> str:
        """Create an object and wait for its segment."""
        answers = self.ask(oid, nbytes, writer=writer, is_copy=is_copy)
        self.until(lambda: bool(answers))
        return given(answers)

    def put(self, oid: int, data: bytes, *, writer: str = "a", is_copy: bool = False) -> str:
        """Create an object of one part, write it as a peer would, and seal it."""
        parts = [data]
        nbytes = container_bytes(parts)
        path = self.create(oid, nbytes, writer=writer, is_copy=is_copy)
        self.writers.setdefault(writer, SegmentWriter()).write(path, nbytes, parts)
        self.store.seal(oid)
        self.store.check()
        return path

    def ask_pin(self, oid: int) -> List[Tuple[Optional[str], Optional[MeshError]]]:
        """Start to pin an object; the answer is appended to the list."""
        answers: List[Tuple[Optional[str], Optional[MeshError]]] = []
        self.store.pin(oid, lambda *answer: answers.append(answer))
        return answers

    def pin(self, oid: int) -> str:
        """Pin an object and wait until it is in memory."""
        answers = self.ask_pin(oid)
        self.until(lambda: bool(answers))
        return given(answers)

    def get(self, oid: int) -> bytes:
        """Read an object as a peer would."""
        path = self.pin(oid)
        mapping = Mapping(path, self.store.nbytes_of(oid))
        data = bytes(mapping.parts[0])
        assert mapping.try_close()
        self.store.unpin(oid)
        self.store.check()
        return data

    def close(self) -> None:
        """End the store and its peers."""
        self.store.close()
        for writer in self.writers.values():
            writer.close()

    def _on_gone(self, writer: str, names: List[str]) -> None:
        self.gone.append((writer, names))
        if writer in self.writers:
            self.writers[writer].forget(names)


def given(answers: List[Tuple[Optional[str], Optional[MeshError]]]) -> str:
    """The path of the one answer, or its error."""
    (answer,) = answers
    path, error = answer
    if error is not None:
        raise error
    assert path is not None
    return path


def files_below(folder: Path) -> List[str]:
    """Names of all files in a folder, at any depth."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def segments_of(owner: Owner) -> List[str]:
    """Names of the segments that exist."""
    return sorted(path.name for path in Path(owner.store.folder.path).iterdir() if path.name.startswith("s"))


def payload(oid: int, size: int) -> bytes:
    """Bytes that no other object has."""
    return (b"%016d" % oid) * (size // 16 + 1)


__all__: List[Any] = ["Owner", "files_below", "given", "payload", "segments_of"]
