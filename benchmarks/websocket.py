"""`python -m benchmarks websocket_latency`: a no-op's round trip through a local HTTPS reverse proxy against the same without."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence

from benchmarks.far import Commands
from benchmarks.figures import percentile
from benchmarks.functions import noop
from gpumesh import GPUMesh, accelerate
from gpumesh.network.address import parse_address
from tests.support.reverse_proxy import ReverseProxy

WARM_CALLS = 300


def main(arguments: Sequence[str]) -> int:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks websocket_latency", description=__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="of each way in each round (default 2000)")
    parser.add_argument("--rounds", type=int, default=5, help="in which the ways take turns (default 5)")
    options = parser.parse_args(arguments)
    print(json.dumps(measure(calls=options.calls, rounds=options.rounds)))
    return 0


def measure(*, calls: int, rounds: int) -> Dict[str, Any]:
    """Medians of p50 in microseconds: client and worker direct, the client through the proxy, and both through it."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder, Commands() as commands:
        direct, token = commands.environment["GPUMESH_URL"], commands.environment["GPUMESH_TOKEN"]
        with ReverseProxy(Path(folder), parse_address(direct).port) as proxy:
            found: Dict[str, List[float]] = {}
            for where, url in (("near", direct), ("far", proxy.url)):
                with commands.worker(url, "--slots", "1", "--score", "1"):
                    for _ in range(rounds):
                        for name, way in (("direct", direct), ("proxy", proxy.url)):
                            found.setdefault(f"{name}_{where}", []).append(_p50(way, token, calls))
    figures = {name: round(statistics.median(values) * 1e6, 1) for name, values in found.items()}
    return {
        "workload": "websocket_latency",
        "direct_p50_us": figures["direct_near"],
        "client_through_proxy_p50_us": figures["proxy_near"],
        "worker_through_proxy_p50_us": figures["direct_far"],
        "both_through_proxy_p50_us": figures["proxy_far"],
        "client_over_direct": round(figures["proxy_near"] / figures["direct_near"], 2),
        "both_over_direct": round(figures["proxy_far"] / figures["direct_near"], 2),
    }


def _p50(url: str, token: str, calls: int) -> float:
    with GPUMesh(url, token=token, fallback=False) as mesh:
        function = accelerate(mesh)(noop)
        for number in range(WARM_CALLS):
            function.remote(number).result()
        seconds = []
        for number in range(calls):
            begin = time.perf_counter()
            function.remote(number).result()
            seconds.append(time.perf_counter() - begin)
    return percentile(seconds, 50)
