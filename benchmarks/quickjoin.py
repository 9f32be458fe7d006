"""From `gpumesh serve` that is up to the first result of `gpumesh quickjoin` on another host, which knows no address."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.figures import Metrics, percentile
from benchmarks.functions import echo
from benchmarks.systems import System
from tests.support.hosts import Hosts, why_not
from tests.support.lan import TOKEN, Lan

POLL_SECONDS = 0.005
LIMIT_SECONDS = 60.0


def quickjoin(system: System, count: int) -> Metrics:
    """Network namespaces with one network between them; each time a host that has never measured itself. Medians.

    Raises:
        RuntimeError: There are no such hosts on this machine.
    """
    if why_not():
        raise RuntimeError(why_not())
    found, joined, first = [], [], []
    for _ in range(count):
        with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
            hosts = Hosts(2, memory="1g")
            try:
                taken = _once(Lan(hosts, Path(folder)))
            finally:
                hosts.close()
        found.append(taken["found"])
        joined.append(taken["joined"])
        first.append(taken["first"])
    return {
        "found_s": percentile(found, 50),
        "joined_s": percentile(joined, 50),
        "first_result_s": percentile(first, 50),
        "first_result_most_s": max(first),
    }


def _once(lan: Lan) -> Metrics:
    from gpumesh import GPUMesh, accelerate

    one, two = lan.hosts
    lan.serve(one)
    with one.inside(), GPUMesh("http://127.0.0.1:8000", token=TOKEN, fallback=False) as mesh:
        mesh.devices()  # Connected.
        call = accelerate(mesh)(echo)
        started = time.monotonic()
        worker = lan.command(two, "quickjoin", "--token", TOKEN)
        while not mesh.workers():
            if time.monotonic() - started > LIMIT_SECONDS:
                raise RuntimeError(f"nobody has joined:\n{worker.output}")
            time.sleep(POLL_SECONDS)
        if call.remote({"first": 1}).result(LIMIT_SECONDS) != {"first": 1}:
            raise RuntimeError("another result came")
        first = time.monotonic() - started
    worker.wait_for("works for")
    at = {word: seconds for seconds, line in worker.lines for word in ("found", "works for") if word in line}
    return {"found": at["found"], "joined": at["works for"], "first": first}
