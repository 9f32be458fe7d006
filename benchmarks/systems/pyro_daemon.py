"""Pyro5: objects behind a daemon in a process of its own, which the driver calls directly, with one hop fewer than the others. It has no tasks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Iterable, Iterator, List, Optional, Sequence

import Pyro5.api

from benchmarks.functions import Performer
from benchmarks.systems import Timed, time_calls


class Pyro:
    """A proxy's method for one call; many go as one batch, as it has no calls that go on by themselves."""

    def open(self, *, object_bytes: Optional[int] = None) -> None:
        self._daemon = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._daemon.stdout is not None
        self._uri = self._daemon.stdout.readline().strip()

    def close(self) -> None:
        self._daemon.communicate("\n")

    def create_actors(self, count: int) -> List[Any]:
        if count != 1:
            raise NotImplementedError("a daemon has the objects that it has")
        return [Pyro5.api.Proxy(self._uri)]

    def end_actors(self, actors: List[Any]) -> None:
        for actor in actors:
            actor._pyroRelease()

    def timed_calls(self, actor: Any, method: str, items: Iterable[Any], *, seconds: float) -> Timed:
        return time_calls(getattr(actor, method), items, seconds=seconds)

    def call_all(self, actor: Any, method: str, items: Sequence[Any]) -> List[Any]:
        batch = Pyro5.api.BatchProxy(actor)
        call = getattr(batch, method)
        for item in items:
            call(item)
        return list(batch())

    def call_each(self, actors: Sequence[Any], method: str, item: Any) -> List[Any]:
        return [getattr(actor, method)(item) for actor in actors]

    def stream_of_actor(self, actor: Any, count: int) -> Iterator[int]:
        raise NotImplementedError("it asks for each item in a call of its own")


def _serve() -> None:
    import threading

    daemon = Pyro5.api.Daemon(host="127.0.0.1")
    print(daemon.register(Pyro5.api.expose(Performer)()), flush=True)
    threading.Thread(target=lambda: (sys.stdin.readline(), daemon.shutdown()), daemon=True).start()
    daemon.requestLoop()


SYSTEM = Pyro

if __name__ == "__main__":
    _serve()
