"""Workloads that compare what is said inside TLS with the same said plainly, by turns, both over TCP on loopback."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Callable, Dict, Iterator, List

from benchmarks.far import NO_SHARED_MEMORY, Commands
from benchmarks.figures import Metrics, percentile
from benchmarks.functions import new_array, noop
from benchmarks.objects import GIGABYTE, check
from benchmarks.secured_bare import ENDS, BareCopy, openssl_speed
from benchmarks.secured_link import LinkCopy
from benchmarks.systems import System

PLAIN, SECURED = "plain", "tls"
SCHEMES = {PLAIN: "http", SECURED: "https"}  # On loopback https:// asks for TLS, too.
ROUNDS = 20  # Of each way, by turns.
BULK_SECONDS = 40.0  # No further round is begun then.
LEAST_ROUNDS = 3


def tls_latency(system: System, calls: int) -> Metrics:
    """Round trips of a no-op: client and worker both plain, both inside TLS."""
    seconds: Dict[str, List[float]] = {PLAIN: [], SECURED: []}
    with contextlib.ExitStack() as ends:
        ways = {way: ends.enter_context(_mesh(way)) for way in seconds}
        functions = {way: _caller(mesh) for way, mesh in ways.items()}
        for function in functions.values():
            for _ in range(100):
                function(None)
        for _ in range(ROUNDS):
            for way, function in functions.items():
                for _ in range(max(1, calls // ROUNDS)):
                    before = time.perf_counter()
                    function(None)
                    seconds[way].append(time.perf_counter() - before)
    metrics = {f"{way}_p50_us": percentile(found, 50) * 1e6 for way, found in seconds.items()}
    metrics.update({f"{way}_p99_us": percentile(found, 99) * 1e6 for way, found in seconds.items()})
    metrics["tls_over_plain"] = metrics["tls_p50_us"] / metrics["plain_p50_us"]
    return metrics


def tls_bulk(system: System, megabytes: int) -> Metrics:
    """A client and a coordinator that is another host's: the same memory again over their connection, then new arrays as objects.

    In turns with that connection, two processes that do nothing but Python's blocking `ssl` say what it gives at most.
    """
    array = new_array(megabytes)
    seconds: Dict[str, List[float]] = {}
    with contextlib.ExitStack() as ends:
        links: Dict[str, Any] = {f"{way}_link": ends.enter_context(LinkCopy(SCHEMES[way], megabytes)) for way in SCHEMES}
        bare = {f"bare_{kind}": ends.enter_context(BareCopy(kind, megabytes)) for kind in ENDS}
        for _ in range(ROUNDS):
            for way, link in {**links, **bare}.items():
                seconds.setdefault(f"{way}_to", []).append(link.send())
                seconds.setdefault(f"{way}_from", []).append(link.receive())
        speed = openssl_speed(next(iter(bare.values())).cipher)
    with contextlib.ExitStack() as ends:
        ways = {way: ends.enter_context(_mesh(way)) for way in (PLAIN, SECURED)}
        end = time.perf_counter() + BULK_SECONDS
        for mark in range(ROUNDS):
            if mark > LEAST_ROUNDS and time.perf_counter() > end:
                break
            array[0] = array[-1] = mark
            for way, mesh in ways.items():
                before = time.perf_counter()
                ref = mesh.put(array)
                between = time.perf_counter()
                value = mesh.get(ref)
                check(float(value[-1]), mark)
                seconds.setdefault(f"{way}_put", []).append(between - before)
                seconds.setdefault(f"{way}_get", []).append(time.perf_counter() - between)
                del ref, value
    metrics = {f"{way}_gb_s": array.nbytes / percentile(found[1:], 50) / GIGABYTE for way, found in seconds.items()}
    metrics.update(over_bare(metrics))
    if speed is not None:
        metrics["openssl_gb_s"] = speed / GIGABYTE
    return metrics


def over_bare(metrics: Metrics) -> Metrics:
    """The better kind of bare `ssl` in each direction, and the mesh's connection over it."""
    found: Metrics = {}
    for end in ("to", "from"):
        best = max(metrics[f"bare_{kind}_{end}_gb_s"] for kind in ENDS)
        found.update({f"bare_{end}_gb_s": best, f"tls_over_bare_{end}": metrics[f"tls_link_{end}_gb_s"] / best})
    return found


@contextlib.contextmanager
def _mesh(way: str) -> Iterator[Any]:
    """A client that shares no memory with the coordinator of a mesh of one worker."""
    from gpumesh import GPUMesh

    with contextlib.ExitStack() as ends:
        commands = ends.enter_context(Commands())
        environment = commands.environment
        url, token = environment["GPUMESH_URL"], environment["GPUMESH_TOKEN"]
        url = url.replace("http://", f"{SCHEMES[way]}://")
        ends.enter_context(commands.worker(url, "--slots", "1", "--score", "1"))
        os.environ[NO_SHARED_MEMORY] = "1"
        try:
            mesh = ends.enter_context(GPUMesh(url, token=token, fallback=False))
            mesh.get(mesh.put(bytes(1_000_000)))  # From here on it is known that no memory is shared.
        finally:
            os.environ.pop(NO_SHARED_MEMORY, None)
        yield mesh


def _caller(mesh: Any) -> Callable[[Any], Any]:
    from gpumesh import accelerate

    remote = accelerate(mesh)(noop).remote
    return lambda item: remote(item).result()
