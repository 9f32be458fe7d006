"""Meshes on the local networks, found by multicast DNS (RFC 6762, 6763) on every interface, IPv4 and IPv6; `announcement` says what counts.

    zeroconf's thread ── a name came or went ──> names to resolve ── pool ──> Sightings ── addresses due ── pool ──> probing.probe

zeroconf is imported when a Watcher starts, never with this module.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Set, Union

from gpumesh.config import FIND_AGAIN_SECONDS, FIND_PROBE_SECONDS
from gpumesh.network import probing
from gpumesh.network.address import Address
from gpumesh.network.announcement import SERVICE, Look, Mesh, Sightings, from_txt
from gpumesh.network.interfaces import host_addresses
from gpumesh.network.ranking import rank_of

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf

logger = logging.getLogger(__name__)

_MAX_INTERFACES = 16  # Linux lets one socket be in 20 groups.
_MAX_RESOLVING = 64  # Names at once; more wait until there is room.
_RESOLVE_MILLISECONDS = 1500  # Of a name; most come with all that belongs to them.
_THREADS = 16
_CACHE_NAMES = 4096  # Of zeroconf, which keeps whatever anybody sends; beyond, it starts anew. As many may wait to be resolved.
_TICK_SECONDS = 1.0


def open_zeroconf() -> Zeroconf:
    """On all interfaces that are up.

    Raises:
        OSError: Nothing can be sent or received on any of them.
    """
    from zeroconf import IPVersion, Zeroconf

    logging.getLogger("zeroconf").setLevel(logging.CRITICAL)  # Of what strangers send, and of interfaces that go away.
    chosen: List[Union[str, int]] = []
    has_six = False
    addresses = sorted((each for each in host_addresses() if each.is_up), key=lambda each: rank_of(each.ip, each.kind))
    for each in addresses:
        place: Union[str, int] = each.ip
        if ":" in each.ip:
            if each.ip == "::1":
                continue
            try:
                place = socket.if_nametoindex(each.interface)
            except (OSError, AttributeError):
                continue
            has_six = True
        if place not in chosen and len(chosen) < _MAX_INTERFACES:
            chosen.append(place)
    version = IPVersion.All if has_six else IPVersion.V4Only
    try:
        return Zeroconf(interfaces=chosen or ["127.0.0.1"], ip_version=version)
    except OSError:
        if not has_six:
            raise
        return Zeroconf(
            interfaces=[each for each in chosen if isinstance(each, str)] or ["127.0.0.1"], ip_version=IPVersion.V4Only
        )


class Watcher:
    """Looks for meshes from `start` to `close`; `with` does both. Its methods may be called on any thread.

    Attributes:
        problem: Why nothing can be found; "" if nothing stands in the way.
    """

    def __init__(self, *, again_seconds: float = FIND_AGAIN_SECONDS) -> None:
        self.problem = ""
        self._sightings = Sightings(again_seconds)
        self._changed = threading.Condition()
        self._changes = 0
        self._resolving: Set[str] = set()
        self._unresolved: Dict[str, None] = {}  # Names that wait, in the order of their coming.
        self._is_closed = False
        self._here = host_addresses()
        self._zeroconf: Optional[Zeroconf] = None
        self._browser: Any = None
        self._pool: Optional[ThreadPoolExecutor] = None
        self._ticker: Optional[threading.Thread] = None

    def start(self) -> None:
        """Begin to look; takes about as long as the import of zeroconf."""
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="gpumesh-find")
        self._open()
        self._ticker = threading.Thread(target=self._tick, name="gpumesh-find-tick", daemon=True)
        self._ticker.start()

    def meshes(self) -> List[Mesh]:
        """What is known now; those that can be joined first, in the order of their coming."""
        with self._changed:
            found = self._sightings.meshes()
        return sorted(found, key=lambda mesh: not mesh.is_joinable)

    @property
    def left_out(self) -> int:
        """Announcements for which there was no room."""
        with self._changed:
            return self._sightings.left_out

    def wait(self, timeout: float, until: Optional[Callable[[List[Mesh]], bool]] = None) -> List[Mesh]:
        """The meshes after `timeout` seconds, or as soon as something has changed, or, if given, as soon as `until` of them holds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            seen = self._changes
            while not self._is_closed:
                if self._changes != seen if until is None else until(self.meshes()):
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
        return self.meshes()

    def close(self) -> None:
        """Stop looking. Idempotent; looks that are under way end by themselves."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._shut()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._ticker is not None:
            self._ticker.join(_TICK_SECONDS)

    def __enter__(self) -> Watcher:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- names

    def _open(self) -> None:
        from zeroconf import ServiceBrowser

        self.problem = ""
        try:
            self._zeroconf = open_zeroconf()
            self._browser = ServiceBrowser(self._zeroconf, SERVICE, handlers=[self._on_name])
        except OSError as error:
            self.problem = f"cannot look for meshes on the network ({error.strerror or error}); name the mesh's address instead"

    def _shut(self) -> None:
        with self._changed:
            found, self._zeroconf = self._zeroconf, None
            self._unresolved.clear()
        if found is not None:
            _end_requests(found)
            found.close()

    def _on_name(self, zeroconf: Any, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change.name == "Removed":
            self._note(lambda: self._sightings.gone(name))
            return
        with self._changed:
            if name not in self._resolving and len(self._unresolved) < _CACHE_NAMES:
                self._unresolved[name] = None
                self._resolve_some()

    def _resolve_some(self) -> None:
        """Under the lock. zeroconf tells of a name once, so what finds no room now is kept."""
        zeroconf = self._zeroconf
        if self._is_closed or self._pool is None or zeroconf is None:
            return
        while self._unresolved and len(self._resolving) < _MAX_RESOLVING:
            name = next(iter(self._unresolved))
            del self._unresolved[name]
            self._resolving.add(name)
            self._pool.submit(self._resolve, zeroconf, name)

    def _resolve(self, zeroconf: Any, name: str) -> None:
        from zeroconf import Error, IPVersion

        try:
            is_open = zeroconf is self._zeroconf
            info = zeroconf.get_service_info(SERVICE, name, timeout=_RESOLVE_MILLISECONDS) if is_open else None
            if info is not None:
                hosts = info.parsed_scoped_addresses(IPVersion.All)
                announcement = from_txt(info.properties, hosts, info.port or 0)
                if announcement is not None:
                    self._note(lambda: self._sightings.seen(name, announcement))
        except (Error, OSError, ValueError, RuntimeError, CancelledError) as error:  # Broken on purpose, or closed meanwhile.
            logger.debug("an announcement is of no use: %s", error)
        finally:
            with self._changed:
                self._resolving.discard(name)
                self._resolve_some()
        self._look()

    # --- looks

    def _look(self) -> None:
        with self._changed:
            if self._is_closed or self._pool is None:
                return
            for address in self._sightings.due(time.monotonic()):
                self._pool.submit(self._look_at, address)

    def _look_at(self, address: Address) -> None:
        found = probing.probe(address, FIND_PROBE_SECONDS)
        look = Look(found.kind, found.text, found.mesh, found.certificate)
        self._note(lambda: self._sightings.looked(address, look, time.monotonic()))

    def _note(self, what: Callable[[], object]) -> None:
        with self._changed:
            what()
            self._changes += 1
            self._changed.notify_all()

    def _tick(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _TICK_SECONDS)
                if self._is_closed:
                    return
            self._look()
            zeroconf = self._zeroconf
            is_full = zeroconf is not None and len(zeroconf.cache.cache) > _CACHE_NAMES
            here = host_addresses()
            if is_full or here != self._here:  # Or this machine has come into another network.
                self._here = here
                self._shut()
                self._open()


def _end_requests(zeroconf: Zeroconf) -> None:
    """What asks for a name is given up; zeroconf leaves that to its loop's end, which complains of each in the log."""
    import asyncio

    loop = zeroconf.loop
    if loop is None or not loop.is_running():
        return

    async def end() -> None:
        requests = [task for task in asyncio.all_tasks() if "async_request" in getattr(task.get_coro(), "__qualname__", "")]
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    try:
        asyncio.run_coroutine_threadsafe(end(), loop).result(_TICK_SECONDS)
    except FutureTimeoutError:
        logger.debug("the names that are asked for are left to zeroconf")


def find(seconds: float, *, settle_seconds: Optional[float] = None) -> List[Mesh]:
    """Meshes that are announced on this machine's networks, each once; blocks.

    Args:
        seconds: How long to look.
        settle_seconds: Return so long after the first that can be joined, for others to come; None: look all the time.

    Raises:
        OSError: Nothing can be found on this machine.
    """
    with Watcher() as watcher:
        if watcher.problem:
            raise OSError(watcher.problem)
        deadline = time.monotonic() + seconds
        if settle_seconds is not None:
            watcher.wait(seconds, until=lambda found: any(mesh.is_joinable for mesh in found))
            deadline = min(deadline, time.monotonic() + settle_seconds)
        return watcher.wait(max(0.0, deadline - time.monotonic()), until=lambda found: False)
