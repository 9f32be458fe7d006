"""F72: runners that cannot start: the worker says why, takes no tasks, tries again and recovers; nobody waits without being told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from gpumesh.config import RUNNER_RESTART_DELAYS_SECONDS
from gpumesh.errors import NoSuitableWorkerError
from tests.integration.programs import Programs, started_programs
from tests.support import tasks
from tests.support.client import Client
from tests.support.processes import until

# Python imports this at each start; it ends a process that starts runners as long as the flag is there, and writes down when.
BROKEN = """
import os, time
if os.path.exists({flag!r}):
    with open("/proc/self/cmdline", "rb") as file:
        if b"gpumesh.runtime.spawner" in file.read():
            with open({flag!r} + ".starts", "a") as starts:
                starts.write(f"{{time.monotonic()}}\\n")
            os.write(2, b"ImportError: libcudart.so.12: cannot open shared object file\\n")
            os._exit(1)
"""
REASON = "libcudart.so.12: cannot open shared object file"


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as started:
        yield started


class Breakage:
    """An environment in which no process that starts runners comes up, until it is mended."""

    def __init__(self, folder: Path) -> None:
        self.flag = folder / "broken"
        self.flag.touch()
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(BROKEN.format(flag=str(self.flag)))
        self.environment = {"PYTHONPATH": str(site)}

    def starts(self) -> List[float]:
        """When such processes were started, as `time.monotonic` tells."""
        written = self.flag.with_name("broken.starts")
        lines = written.read_text().splitlines(keepends=True) if written.exists() else []
        return [float(line) for line in lines if line.endswith("\n")]

    def mend(self) -> None:
        self.flag.unlink()


@pytest.fixture
def breakage(tmp_path: Path) -> Breakage:
    return Breakage(tmp_path)


def join(programs: Programs, url: str, **environment: str) -> Any:
    worker = programs.gpumesh("join", url, "--token", "secret", "--slots", "1", "--score", "1", **environment)
    worker.wait_for("works for")
    return worker


def problems(client: Client) -> List[str]:
    return sorted(worker["problem"] for worker in client.workers())


def test_one_of_three_workers_is_ill_and_the_others_do_all_the_work(programs: Programs, breakage: Breakage) -> None:
    _, url = programs.serve("--no-self-worker", "--token", "secret")
    ill = join(programs, url, **breakage.environment)
    join(programs, url)
    join(programs, url)
    with Client(url, "secret") as client:
        until(lambda: len(problems(client)) == 3 and REASON in problems(client)[2], 10, what="a worker with a problem")
        assert problems(client)[:2] == ["", ""]

        futures = [client.remote(tasks.sleep, 0.02) for _ in range(50)]

        assert [future.result(20) for future in futures] == ["slept"] * 50
        (sick,) = [worker for worker in client.workers() if worker["problem"]]
        assert sick["alive"]
        assert sick["done"] == 0
        assert "fail to start" in sick["problem"]
        assert REASON in ill.output

        breakage.mend()

        until(lambda: problems(client) == [""] * 3, 20, what="recovery")
        futures = [client.remote(tasks.sleep, 0.2) for _ in range(9)]
        assert [future.result(20) for future in futures] == ["slept"] * 9
        assert all(worker["done"] for worker in client.workers())


def test_with_no_healthy_worker_the_driver_is_told_why_and_the_task_fails_in_the_end(
    programs: Programs, breakage: Breakage, caplog: pytest.LogCaptureFixture
) -> None:
    _, url = programs.serve("--no-self-worker", "--token", "secret")
    for _ in range(2):
        join(programs, url, **breakage.environment)
    with Client(url, "secret", is_own_mesh=False) as client:
        until(lambda: "".join(problems(client)).count(REASON) == 2, 10, what="two workers with a problem")
        started = time.monotonic()
        hopeless = client.remote(tasks.noop, placement_timeout=3.0)
        patient = client.remote(tasks.noop, "patient", placement_timeout=30.0)

        with pytest.raises(NoSuitableWorkerError, match=REASON) as caught:
            hopeless.result(10)
        assert 2.5 < time.monotonic() - started < 6
        assert "takes no tasks" in str(caught.value)
        warnings = [record for record in caplog.records if REASON in record.getMessage()]
        assert warnings
        assert warnings[0].levelname == "WARNING"

        breakage.mend()
        assert patient.result(20) == "patient"


def test_a_client_that_may_fall_back_says_why_the_mesh_takes_nothing(
    programs: Programs, breakage: Breakage, caplog: pytest.LogCaptureFixture
) -> None:
    from gpumesh.runtime.embedded import EmbeddedMesh

    _, url = programs.serve("--no-self-worker", "--token", "secret")
    join(programs, url, **breakage.environment)
    with Client(url, "secret") as looker:
        until(lambda: REASON in "".join(problems(looker)), 10)
    with Client(url, "secret", is_own_mesh=False, fallback=True, start_local=lambda: EmbeddedMesh(workers=1)) as client:
        assert client.remote(tasks.noop, 7).result(20) == 7
    assert any(REASON in record.getMessage() and "on this machine" in record.getMessage() for record in caplog.records)


def test_starts_are_tried_again_with_growing_pauses(programs: Programs, breakage: Breakage) -> None:
    _, url = programs.serve("--no-self-worker", "--token", "secret")
    join(programs, url, **breakage.environment)

    until(lambda: len(breakage.starts()) >= 3, 20)
    first, second, third = breakage.starts()[:3]

    pause, longer = RUNNER_RESTART_DELAYS_SECONDS[1:3]
    assert second - first >= pause
    assert third - second >= longer > pause


def test_a_serving_machine_says_that_its_own_worker_has_ended_and_starts_it_again(
    programs: Programs, breakage: Breakage
) -> None:
    server, url = programs.serve("--token", "secret", "--slots", "1", "--score", "1", **breakage.environment)
    server.wait_for("own worker has ended .* again in 0.5 s")
    server.wait_for("own worker has ended .* again in 1 s")
    assert REASON in server.output

    breakage.mend()

    with Client(url, "secret") as client:
        assert client.remote(tasks.noop, 3).result(20) == 3
        (worker,) = client.workers()
        os.kill(worker["pid"], signal.SIGKILL)
        server.wait_for("own worker has ended .*")
        assert client.remote(tasks.noop, 4).result(20) == 4
    server.interrupt()
    assert server.wait() == 0


def test_an_embedded_mesh_that_cannot_start_is_an_error_that_says_so(programs: Programs, breakage: Breakage) -> None:
    driver = programs.python("-c", EMBEDDED, **breakage.environment)

    assert driver.wait(10) == 1
    assert REASON in driver.output
    assert "MeshUnavailableError: the mesh in processes of this program's own has ended" in driver.output


EMBEDDED = """
from gpumesh import GPUMesh, accelerate
with GPUMesh.local(workers=1) as mesh:
    accelerate(mesh)(len).remote([1]).result(30)
"""


def test_an_unwritable_folder_for_temporary_files_stops_no_runner(programs: Programs, tmp_path: Path) -> None:
    nowhere: Dict[str, str] = {"TMPDIR": str(tmp_path / "missing" / "folder"), "TEMP": "/proc", "TMP": "/proc"}
    _, url = programs.serve("--no-self-worker", "--token", "secret", **nowhere)
    join(programs, url, **nowhere)

    with Client(url, "secret") as client:
        assert client.remote(os.getpid).result(20) > 0
        assert problems(client) == [""]
