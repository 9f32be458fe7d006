"""With MESH_TEST_PROXY=1, every connection to a coordinator of the tests goes by WebSocket through a reverse proxy, in every process.

    MESH_TEST_PROXY=1 python -m pytest tests/integration/test_api_local.py ...

Addresses stay what they are for the tests; what is dialed for one of a coordinator's is the proxy's. Coordinators without a certificate get
one, as those of `gpumesh serve` have. Nothing else is changed, and whoever is no coordinator is dialed as ever.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, Optional, Sequence

SWITCH = "MESH_TEST_PROXY"
_WHERE = "MESH_TEST_PROXY_AT"  # Port of the proxy, folder in which coordinators say on which ports they are.
ROOT = Path(__file__).resolve().parent.parent.parent


def is_wanted() -> bool:
    """Whether somebody has set the switch."""
    return os.environ.get(SWITCH, "") not in ("", "0")


def through_a_proxy(folder: Path) -> Iterator[None]:
    """A proxy, and all of this process and its children through it."""
    from tests.support.reverse_proxy import ReverseProxy

    ports = folder / "ports"
    ports.mkdir()
    with ReverseProxy(folder, 0) as proxy:
        os.environ[_WHERE] = f"{proxy.port}:{ports}"
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parent / "proxied"), str(ROOT), *before.split(os.pathsep)]
        )
        install()
        try:
            yield
        finally:
            os.environ["PYTHONPATH"] = before
            del os.environ[_WHERE]


def install() -> None:
    """Change what dials and what listens in this process, now and when it is imported."""
    if _WHERE not in os.environ:
        return
    sys.meta_path.insert(0, _Finder())
    for name, change in _CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])


def _note(port: int) -> None:
    """A coordinator is on this port."""
    Path(os.environ[_WHERE].partition(":")[2], str(port)).touch()


def _redirected(address: Any) -> Any:
    proxy, _, folder = os.environ[_WHERE].partition(":")
    if address.host != "127.0.0.1" or address.way or not Path(folder, str(address.port)).exists():
        return address
    return address._replace(host=f"127.1.{address.port >> 8}.{address.port & 255}", port=int(proxy), way="https")


def _change_coordinator(module: ModuleType) -> None:
    cls: Any = module.Coordinator  # type: ignore[attr-defined]
    make, start = cls.__init__, cls.start

    def make_with_identity(self: Any, **options: Any) -> None:
        from gpumesh.network.certificates import load_or_make_identity

        if options.get("identity") is None:
            options["identity"] = load_or_make_identity()
        make(self, **options)

    async def start_and_note(self: Any, listener: socket.socket) -> None:
        _note(listener.getsockname()[1])
        await start(self, listener)

    cls.__init__, cls.start = make_with_identity, start_and_note


def _change_embedded(module: ModuleType) -> None:
    cls: Any = module._Processes  # type: ignore[attr-defined]
    fork = cls.fork

    def fork_and_note(self: Any, key: str, request: Dict[str, Any], fds: Sequence[int]) -> None:
        if request["role"] == "coordinator":
            with socket.socket(fileno=os.dup(fds[0])) as listener:
                _note(listener.getsockname()[1])
        fork(self, key, request, fds)

    cls.fork = fork_and_note


def _change_link(module: ModuleType) -> None:
    dial = module.dial  # type: ignore[attr-defined]

    def dial_through(address: Any, **options: Any) -> Any:
        return dial(_redirected(address), **options)

    for other in list(sys.modules.values()):
        if getattr(other, "dial", None) is dial:
            other.dial = dial_through  # type: ignore[attr-defined]


def _change_dialing(module: ModuleType) -> None:
    cls: Any = module.Dialer  # type: ignore[attr-defined]
    dial = cls.dial

    async def dial_through(self: Any, make: Any) -> None:
        self.address = _redirected(self.address)
        await dial(self, make)

    cls.dial = dial_through


_CHANGES: Dict[str, Callable[[ModuleType], None]] = {
    "gpumesh.runtime.coordinator": _change_coordinator,
    "gpumesh.runtime.embedded": _change_embedded,
    "gpumesh.client.link": _change_link,
    "gpumesh.runtime.dialing": _change_dialing,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what is to be changed, as everybody would, and changes it when it has been loaded."""

    def find_spec(self, name: str, path: Any, target: Optional[ModuleType] = None) -> Optional[importlib.machinery.ModuleSpec]:
        if name not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            _CHANGES[name](module)

        loader.exec_module = load_and_change
        return spec
