"""The table of `gpumesh workers`."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from gpumesh.cli.workers import _print_table
from gpumesh.model.resources import WorkerFacts, facts_as_dict


def view(facts: WorkerFacts) -> Dict[str, Any]:
    return {"id": "w1", "device_name": "a CPU", "alive": True, **facts_as_dict(facts)}


def test_the_table_shows_python_and_what_is_being_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    busy = WorkerFacts("attic", python="3.9", tags=(("room", "lab"),), installing=(("a==1.*", "b"),))
    ill = WorkerFacts("cellar", python="3.13", problem="paused by its owner")

    gone = {**view(WorkerFacts("barn", problem="paused by its owner")), "alive": False, "lost": "the connection was lost"}

    _print_table([view(busy), view(ill), gone], "here:8000")

    rows = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()}
    assert "3.9" in rows["attic"]
    assert "room=lab" in rows["attic"]
    assert "alive, installing a==1.* b" in rows["attic"]
    assert "3.13" in rows["cellar"]
    assert "paused by its owner" in rows["cellar"]
    assert "not alive: the connection was lost" in rows["barn"]
