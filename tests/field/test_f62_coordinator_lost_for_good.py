"""F62: the coordinator is killed for good; every pending future gets an error within the stated time, whatever the driver waits in."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.cli.main import main
from gpumesh.client.waiting import as_completed
from gpumesh.errors import MeshUnavailableError
from gpumesh.protocol import connection as protocol
from tests.support import tasks
from tests.support.client import Client
from tests.support.processes import free_port, until

RECONNECT_SECONDS = 0.5
SERVE = """
import sys
from gpumesh.runtime.serving import run_coordinator
run_coordinator("127.0.0.1", int(sys.argv[1]), "secret", self_worker=True, slots=1, score=1.0, on_ready=lambda url: print(url, flush=True))
"""


class Mesh:
    """A coordinator with a worker, as a program of its own that can be killed or frozen."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen([sys.executable, "-c", SERVE, str(self.port)], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def lose(self, how: str) -> None:
        self.process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    running = Mesh()
    yield running
    running.close()


@pytest.fixture
def quick_to_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed after 0.8 s instead of 30."""
    monkeypatch.setattr(protocol, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(protocol, "SILENCE_SECONDS", 0.8)


def in_result(futures: List[Any]) -> List[BaseException]:
    errors: List[BaseException] = []
    for future in futures:
        with pytest.raises(MeshUnavailableError) as caught:
            future.result(30)
        errors.append(caught.value)
    return errors


def in_as_completed(futures: List[Any]) -> List[BaseException]:
    return [future.exception() for future in as_completed(futures, timeout=30)]


def in_standard_as_completed(futures: List[Any]) -> List[BaseException]:
    from concurrent.futures import as_completed as standard

    return [future.exception() for future in standard(futures, timeout=30)]


def in_callbacks(futures: List[Future[Any]]) -> List[BaseException]:
    ended: List[BaseException] = []
    for future in futures:
        future.add_done_callback(lambda one: ended.append(one.exception()))
    until(lambda: len(ended) == len(futures), 30)
    return ended


def in_await(futures: List[Any]) -> List[BaseException]:
    import asyncio

    async def main() -> List[Any]:
        async def one(future: Any) -> Any:
            return await future

        return await asyncio.gather(*[one(future) for future in futures], return_exceptions=True)

    return asyncio.run(main())


WAYS = [in_result, in_as_completed, in_standard_as_completed, in_callbacks, in_await]


@pytest.mark.parametrize(
    ("wait", "how"),
    [(wait, "killed") for wait in WAYS] + [(in_result, "frozen"), (in_as_completed, "frozen"), (in_await, "frozen")],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
@pytest.mark.usefixtures("quick_to_notice")
def test_every_pending_future_fails_in_time(
    mesh: Mesh, wait: Callable[[List[Any]], List[BaseException]], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gpumesh")
    with Client(mesh.url, "secret", reconnect_timeout=RECONNECT_SECONDS) as client:
        assert client.remote(tasks.noop, 1).result(20) == 1
        futures = [client.remote(tasks.sleep, 1000) for _ in range(10)]
        threading.Timer(0.1, mesh.lose, [how]).start()
        started = time.monotonic()

        errors = wait(futures)

        silence = protocol.SILENCE_SECONDS if how == "frozen" else 0
        assert time.monotonic() - started < 0.1 + silence + RECONNECT_SECONDS + 1.5
    assert len(errors) == 10
    for error in errors:
        assert type(error) is MeshUnavailableError
        assert str(mesh.port) in str(error)
        assert "gpumesh serve" in str(error)
    said = [record.getMessage() for record in caplog.records]
    assert any("lost the coordinator" in text and "retrying for 0.5 s" in text for text in said), said


@pytest.mark.parametrize("how", ["killed", "frozen"])
@pytest.mark.usefixtures("quick_to_notice")
def test_a_map_raises_and_each_of_its_futures_has_the_error(mesh: Mesh, how: str) -> None:
    with GPUMesh(mesh.url, token="secret", reconnect_timeout=RECONNECT_SECONDS, fallback=False) as client:
        sleep = accelerate(client)(tasks.sleep)
        assert list(sleep.map([0.0])) == ["slept"]
        stream = sleep.map([1000] * 10)
        threading.Timer(0.1, mesh.lose, [how]).start()
        started = time.monotonic()

        with pytest.raises(MeshUnavailableError, match="gpumesh serve"):
            list(stream)

        assert time.monotonic() - started < 0.1 + protocol.SILENCE_SECONDS + RECONNECT_SECONDS + 1.5
        errors = [future.exception(1) for future in stream.futures]
        assert [type(error) for error in errors] == [MeshUnavailableError] * 10


def test_what_is_submitted_after_the_loss_fails_too(mesh: Mesh) -> None:
    with Client(mesh.url, "secret", reconnect_timeout=0.5) as client:
        assert client.remote(tasks.noop, 1).result(20) == 1
        waiting = client.remote(tasks.sleep, 1000)
        mesh.lose("killed")
        late = client.remote(tasks.noop, 2)  # While the coordinator is looked for, or already after.
        for future in (waiting, late):
            with pytest.raises(MeshUnavailableError):
                future.result(10)

        with pytest.raises(MeshUnavailableError, match="nothing listens"):
            client.remote(tasks.noop, 3)


def test_a_driver_script_ends_with_an_error_instead_of_waiting(mesh: Mesh) -> None:
    script = (
        "import sys\n"
        "from tests.support import tasks\n"
        "from tests.support.client import Client\n"
        "client = Client(sys.argv[1], 'secret', reconnect_timeout=0.5)\n"
        "future = client.remote(tasks.sleep, 1000)\n"
        "client.session.query('workers')\n"
        "print('submitted', flush=True)\n"
        "future.result()\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script, mesh.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "submitted\n"
    mesh.lose("killed")

    _, errors = driver.communicate(timeout=20)

    assert driver.returncode == 1
    assert "lost the coordinator" in errors
    assert "MeshUnavailableError" in errors


@pytest.mark.parametrize("how", ["killed", "frozen"])
@pytest.mark.usefixtures("quick_to_notice")
def test_submit_wait_ends_with_1_and_says_where_the_job_is(
    mesh: Mesh, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "script"
    folder.mkdir()
    mark = tmp_path / "mark"
    (folder / "sleep.py").write_text(f"import pathlib, time\npathlib.Path({str(mark)!r}).touch()\ntime.sleep(1000)\n")
    lost_at: List[float] = []

    def lose() -> None:
        until(mark.exists, 30)
        lost_at.append(time.monotonic())
        mesh.lose(how)

    losing = threading.Thread(target=lose)
    losing.start()
    command = ["submit", str(folder / "sleep.py"), "--wait", "--url", mesh.url, "--token", "secret"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--reconnect-timeout", str(RECONNECT_SECONDS)])

    losing.join()
    assert ended.value.code == 1
    assert time.monotonic() - lost_at[0] < protocol.SILENCE_SECONDS + RECONNECT_SECONDS + 1.5
    printed = capsys.readouterr()
    job = printed.out.strip()
    assert f"gpumesh status {job} --wait" in printed.err.splitlines()[-1]


@pytest.mark.parametrize("command", ["status", "jobs", "events"])
@pytest.mark.usefixtures("quick_to_notice")
def test_a_command_ends_with_1_and_one_line(command: str, mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    mesh.lose("killed")
    mesh.process.wait()

    with pytest.raises(SystemExit) as ended:
        main([command, "--url", mesh.url, "--token", "secret"])

    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines() == [
        f"gpumesh: nothing listens at 127.0.0.1:{mesh.port}; start a coordinator there with `gpumesh serve`, or check the port"
    ]
