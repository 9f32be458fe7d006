"""What a coordinator tells of what has happened: to programs, and to people."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from gpumesh import GPUMesh
from tests.integration.programs import Programs, started_programs
from tests.support.processes import until


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as started:
        yield started


def of_kind(kind: str, events: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def test_joins_pauses_deaths_and_strangers_are_told(programs: Programs, tmp_path: Path) -> None:
    _, url = programs.serve("--no-self-worker", GPUMESH_TOKEN="t")
    port = int(url.rpartition(":")[2])
    following = programs.gpumesh("events", "--follow", GPUMESH_TOKEN="t")
    following.wait_for("started")
    leaver = programs.gpumesh("join", url, "--slots", "1", GPUMESH_TOKEN="t")
    leaver.wait_for("works for")
    following.wait_for("joined")

    with GPUMesh(url, token="t", fallback=False) as mesh:
        (worker,) = (one["id"] for one in mesh.workers())
        assert programs.gpumesh("pause", "--reason", "a call").wait() == 0
        until(lambda: of_kind("paused", mesh.events()), 20.0)
        assert programs.gpumesh("resume").wait() == 0
        until(lambda: of_kind("resumed", mesh.events()), 20.0)
        leaver.interrupt()
        assert leaver.wait() == 0
        until(lambda: of_kind("left", mesh.events()), 5.0, what="left")

        victim = programs.gpumesh("join", url, "--slots", "1", GPUMESH_TOKEN="t")
        victim.wait_for("works for")
        until(lambda: len(of_kind("joined", mesh.events())) == 2, 20.0)
        victim.remember_children()
        os.kill(victim.process.pid, signal.SIGKILL)
        until(lambda: of_kind("died", mesh.events()), 20.0)

        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"\x01\x02\x03\x04 nobody speaks so\r\n")
            until(lambda: of_kind("refused", mesh.events()), 20.0)

        events = mesh.events()
        assert [event["number"] for event in events] == list(range(1, len(events) + 1))
        (joined, joined_too) = of_kind("joined", events)
        assert joined["worker"] == worker
        assert [event["worker"] for event in of_kind("left", events)] == [worker]
        assert "a call" in of_kind("paused", events)[0]["text"]
        assert of_kind("paused", events)[0]["worker"] == of_kind("resumed", events)[0]["worker"] == worker
        (died,) = of_kind("died", events)
        assert died["worker"] == joined_too["worker"] != worker
        assert "127.0.0.1" in of_kind("refused", events)[0]["text"]
        assert all(event["time"].endswith("Z") and "\n" not in event["text"] for event in events)
        assert mesh.events(since=events[-2]["number"]) == events[-1:]
        assert mesh.events(since=events[-1]["number"]) == []

    following.wait_for("refused")
    following.interrupt()
    assert following.wait() == 130
    assert [line.split()[2] for _, line in following.lines] == [event["kind"] for event in events]
    as_json = programs.gpumesh("events", "--json", GPUMESH_TOKEN="t")
    assert as_json.wait() == 0
    assert [json.loads(line) for _, line in as_json.lines][: len(events)] == events


def test_objects_that_go_to_disk_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMESH_OBJECT_MEMORY", "32MB")
    with GPUMesh.local(workers=1) as mesh:
        kept = [mesh.put(bytes(12_000_000)) for _ in range(4)]
        spilled = until(lambda: of_kind("spilled", mesh.events()), 20.0)
        assert "went from the coordinator's memory to its disk" in spilled[0]["text"]
        assert len(kept) == 4


def test_a_retry_says_which_task_where_and_why() -> None:
    with GPUMesh.local(workers=1, slots=1) as mesh:
        from gpumesh import accelerate

        @accelerate(mesh, retries=1)
        def dies() -> None:
            import os

            os._exit(3)

        future = dies.remote()
        assert future.exception(timeout=30) is not None
        (retry,) = of_kind("retry", mesh.events())
        assert retry["task"]
        assert retry["worker"] in {worker["id"] for worker in mesh.workers()}
        assert "(attempt 2)" in retry["text"]
        assert "crashed, exit code 3" in retry["text"]
