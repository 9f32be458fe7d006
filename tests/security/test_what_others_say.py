"""What a machine that was only lent says of itself reaches logs, events and tables as plain text on one line, and not without end."""

from __future__ import annotations

import logging
from typing import Any, Dict, Iterator, List

import pytest

from gpumesh.cli import devices as devices_view
from gpumesh.cli import job_views
from gpumesh.cli import workers as workers_view
from gpumesh.config import FACTS_CHARACTERS, FACTS_ITEMS
from gpumesh.model.resources import DeviceFacts, WorkerFacts
from gpumesh.network.address import parse_address
from gpumesh.protocol import messages as msg
from gpumesh.protocol.auth import worker_token
from gpumesh.protocol.connection import Closed
from gpumesh.runtime.embedded import CoordinatorHandle, start_coordinator
from tests.support.mesh_peer import MeshPeer

TOKEN = "the full token of the mesh"
LENT = worker_token(TOKEN)
EVIL = "x\nINFO forged line\r\x1b[2J\x1b]0;title\x07\u202e"
CLIENT = 7


@pytest.fixture(scope="module")
def coordinator() -> Iterator[CoordinatorHandle]:
    with start_coordinator(0, TOKEN) as running:
        yield running


def lent(coordinator: CoordinatorHandle, name: str) -> MeshPeer:
    return MeshPeer(parse_address(coordinator.url).port, LENT, worker=name)


def asked(coordinator: CoordinatorHandle, what: str) -> List[Dict[str, Any]]:
    with MeshPeer(parse_address(coordinator.url).port, TOKEN, client=CLIENT) as client:
        client.send(msg.Query(1, what, {}))
        value: List[Dict[str, Any]] = client.expect(msg.Answer).value
        return value


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from texts(pair)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from texts(each)


def evil_facts() -> WorkerFacts:
    card = DeviceFacts("cuda", 0, EVIL, 10, 1.0, uuid=EVIL, problem=EVIL, capability=EVIL, rates=((EVIL, 1.0),))
    return WorkerFacts(
        hostname=EVIL, devices=(card,), tags=((EVIL, EVIL),), python=EVIL, platform=EVIL, gpumesh=EVIL, problem=EVIL,
        versions=((EVIL, EVIL),), installing=((EVIL,),),
    )  # fmt: skip


def test_what_it_calls_itself_is_printable(coordinator: CoordinatorHandle, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gpumesh"), lent(coordinator, "w1") as worker, lent(coordinator, "w2") as other:
        worker.send(msg.WorkerChanged(evil_facts()), msg.WorkerDraining(EVIL))
        other.send(msg.Goodbye(EVIL))
        worker.quiet()
        rows = asked(coordinator, "workers")
        events = asked(coordinator, "events")

    (row,) = [each for each in rows if each["id"] == "w1"]
    assert row["hostname"].startswith("x INFO forged line")
    for text in texts([row, events, [record.getMessage() for record in caplog.records]]):
        assert text.isprintable(), repr(text)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert said.count("forged line") == 2, said  # Both are told, each on its own line.


@pytest.mark.parametrize(
    "facts",
    [
        WorkerFacts(hostname="w", tags=(("a", "b"),) * (FACTS_ITEMS + 1)),
        WorkerFacts(hostname="w", versions=(("a", "b"),) * (FACTS_ITEMS + 1)),
        WorkerFacts(hostname="w", installing=(("a",) * (FACTS_ITEMS + 1),)),
        WorkerFacts(hostname="w", devices=tuple(DeviceFacts("cuda", i, "x", 1, 1.0) for i in range(FACTS_ITEMS + 1))),
    ],
    ids=["tags", "versions", "installing", "devices"],
)
def test_it_has_no_thousands_of_things(coordinator: CoordinatorHandle, facts: WorkerFacts) -> None:
    with lent(coordinator, "w3") as worker:
        worker.send(msg.WorkerChanged(facts))
        assert f"more than {FACTS_ITEMS}" in worker.expect(Closed).reason


def test_megabytes_of_a_name_are_not_kept_nor_logged(coordinator: CoordinatorHandle, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gpumesh"), lent(coordinator, "w4") as worker:
        worker.send(msg.WorkerChanged(WorkerFacts(hostname="h" * 5_000_000, problem="p" * 5_000_000)))
        worker.quiet()
        (row,) = [each for each in asked(coordinator, "workers") if each["id"] == "w4"]
        worker.send(msg.WorkerChanged(("h",) * 5_000_00))

    assert len(row["hostname"]) == len(row["problem"]) == FACTS_CHARACTERS
    assert max(len(record.getMessage()) for record in caplog.records) < 2 * FACTS_CHARACTERS + 100


@pytest.mark.parametrize(("task_id", "attempt", "status"), [({}, 1, 0), (1, {}, 0), (1, 1, {}), ((), (), ())])
def test_results_that_are_none_are_not_heard(
    coordinator: CoordinatorHandle, caplog: pytest.LogCaptureFixture, task_id: Any, attempt: Any, status: Any
) -> None:
    with lent(coordinator, "w5") as worker:
        worker.send(msg.TasksFinished([(task_id, attempt, status, b"x", 0.1)]), msg.OpenStore())
        assert worker.expect(msg.StoreOffer)  # It was heard behind them.
    assert not [record for record in caplog.records if record.exc_info], caplog.text


@pytest.mark.parametrize("name", ["[/foo]", "[red]host", ":bomb: [link=http://x]"])
def test_brackets_in_a_name_are_no_markup(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    workers_view._print_table([{"id": "w", "hostname": name, "problem": name}], "mesh")
    shown = capsys.readouterr().out
    assert shown.count(name[:6]) == 2, shown
    row: Dict[str, Any] = {"hostname": name, "worker": "w", "kind": "cuda", "index": 0, "name": name, "memory": 1, "free": 1,
                           "score": 1.0, "is_measured": True, "problem": "", "system_index": 0}  # fmt: skip
    devices_view._print_table([row])
    assert name[:6] in capsys.readouterr().out


def test_an_error_in_a_table_of_tasks_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    task = {"id": 0, "status": "failed", "attempts": 1, "error": "first\n\x1b[31msecond\x1b[0m \x1b[2J\rthird", "hostname": "w"}
    job = {"id": "1", "name": "sweep", "state": "failed", "counts": {"failed": 1}, "tasks": [task]}
    job_views.print_job(job, everything=True)
    shown = capsys.readouterr().out
    assert "second" in shown
    assert not [letter for letter in shown if not letter.isprintable() and letter != "\n"], repr(shown)
