"""Tasks go where their inputs are, on a cable on which bringing them elsewhere takes seconds."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Dict

import pytest

TOKEN = "near-data"
MEGABYTES = 5
RATE = "20mbit"  # 2.5 MB/s: 2 s for such a value.
NAP_SECONDS = 0.2

PROGRAM = """
import json, os, sys, time
import numpy as np
from gpumesh import GPUMesh, accelerate

mesh = GPUMesh(sys.argv[1], token=sys.argv[2], fallback=False)
megabytes, nap_seconds = int(sys.argv[3]), float(sys.argv[4])

@accelerate(mesh)
def meet(array, seconds):
    time.sleep(seconds)
    return array.nbytes

@accelerate(mesh)
def nap(array, seconds):
    time.sleep(seconds)
    return array.nbytes

@accelerate(mesh)
def make(megabytes):
    return np.zeros(megabytes << 17)

@accelerate(mesh)
def add_one(array):
    array += 1
    return array

@accelerate(mesh)
def last(array):
    return float(array[-1])

refs = [mesh.put(np.full(megabytes << 17, float(number))) for number in range(2)]
first = [meet.remote(ref, 1.0) for ref in refs]  # Both at the same time: one on each worker.
[future.result(60) for future in first]
homes = [future.worker for future in first]

again = []
for number in (0, 1, 1, 0, 1, 0):
    future = nap.remote(refs[number], nap_seconds)
    future.result(60)
    again.append(future.worker == homes[number])

started = time.monotonic()
queued = [nap.remote(refs[0], nap_seconds) for _ in range(4)]
[future.result(60) for future in queued]
queued = {"seconds": time.monotonic() - started, "there": [future.worker == homes[0] for future in queued]}

spread = [nap.remote(refs[0], nap_seconds) for _ in range(60)]
[future.result(60) for future in spread]
spread = sorted({future.worker for future in spread}) == sorted(homes)

made = make.remote(megabytes)
once = add_one.remote(made)
twice = add_one.remote(once)
end = last.remote(twice)
value = end.result(60)
chain = [future.worker for future in (made, once, twice, end)]
print(json.dumps({"homes": len(set(homes)), "again": again, "queued": queued, "spread": spread, "value": value, "chain": len(set(chain))}))
mesh.close()
"""


def start_mesh(hosts: Any, tmp_path: Path) -> str:
    """A coordinator on one host and two workers on the other, each with memory of its own; the address."""
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "GPUMESH_TOKEN": TOKEN}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    serve = ["serve", "--host", hosts.one.address, "--port", "0", "--no-self-worker"]
    coordinator = hosts.one.python("-m", "gpumesh", *serve, environment=environment, **pipes)
    url = next(found.group(1) for line in coordinator.stdout for found in [re.search(r"serving at (\S+?),", line)] if found)
    for _ in range(2):
        worker = hosts.two.python(
            "-m", "gpumesh", "join", url, "--slots", "1", "--score", "1", environment=environment, **pipes
        )
        assert any("works for" in line for line in worker.stdout), "the worker has ended"
    return url


@pytest.mark.timeout(200)
def test_tasks_go_to_the_worker_that_has_their_input_and_chains_stay_where_they_are(hosts: Any, tmp_path: Path) -> None:
    url = start_mesh(hosts, tmp_path)
    hosts.slow_down(RATE)
    script = tmp_path / "driver.py"
    script.write_text(PROGRAM)
    driver = hosts.one.python(
        str(script), url, TOKEN, str(MEGABYTES), str(NAP_SECONDS), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = driver.communicate(timeout=150)
    assert driver.returncode == 0, err
    told: Dict[str, Any] = json.loads(out.splitlines()[-1])
    assert told["homes"] == 2
    assert told["again"] == [True] * 6
    assert told["queued"]["there"] == [True] * 4  # 0.8 s there, at least 2 s elsewhere ...
    assert told["spread"] is True  # ... which is nothing beside 12 s.
    assert told["value"] == 2.0
    assert told["chain"] == 1
