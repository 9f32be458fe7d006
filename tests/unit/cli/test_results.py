"""A job's results as JSON, CSV and Parquet."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

from gpumesh.cli import results

HAS_ENGINE = any(importlib.util.find_spec(name) is not None for name in ("pyarrow", "fastparquet"))


def task(number: int, status: str = "done", **fields: Any) -> Dict[str, Any]:
    usual: Dict[str, Any] = {"payload": {}, "result": None, "error": None, "worker": "w1", "hostname": "attic", "seconds": 0.5}
    return {"id": number, "status": status, "attempts": [{"worker": "w1"}], **usual, **fields}


TASKS: List[Dict[str, Any]] = [
    task(0, payload={"lr": 0.1, "deep": True}, result={"accuracy": 0.9, "best": [1, 2]}),
    task(1, payload={"lr": 1, "name": 'a,"b"'}, result={"accuracy": None, "seen": 7}),
    task(2, "failed", payload={"lr": 0.3}, error="it broke\nbadly", attempts=[{}, {}]),
    task(3, "pending", payload={}, worker="", hostname="", attempts=[], seconds=0.0),
    task(4, payload={"lr": 2}, result=5),
]


def test_json_holds_each_task_as_it_is() -> None:
    found = json.loads(results.as_json(TASKS))

    assert found[0] == TASKS[0]
    assert [one["id"] for one in found] == [0, 1, 2, 3, 4]


def test_csv_has_a_column_for_every_key_and_a_row_for_every_task() -> None:
    rows = list(csv.DictReader(io.StringIO(results.as_csv(TASKS), newline="")))

    assert list(rows[0]) == [
        "task",
        "status",
        "payload.lr",
        "payload.deep",
        "payload.name",
        "result.accuracy",
        "result.best",
        "result.seen",
        "result",
        "error",
        "worker",
        "hostname",
        "attempts",
        "seconds",
    ]
    assert [row["payload.lr"] for row in rows] == ["0.1", "1", "0.3", "", "2"]
    assert [row["payload.deep"] for row in rows] == ["true", "", "", "", ""]
    assert rows[0]["result.best"] == "[1, 2]"
    assert rows[1]["payload.name"] == 'a,"b"'
    assert rows[2]["error"] == "it broke\nbadly"
    assert [row["attempts"] for row in rows] == ["1", "1", "2", "0", "1"]
    assert rows[4]["result"] == "5"


def test_a_job_without_tasks_is_an_empty_table() -> None:
    assert results.as_csv([]) == ""
    assert json.loads(results.as_json([])) == []


@pytest.mark.parametrize(
    ("wanted", "output", "format_name"),
    [
        (None, None, "json"),
        (None, "a.csv", "csv"),
        (None, "a.PARQUET", "parquet"),
        (None, "a.txt", "json"),
        ("csv", "a.json", "csv"),
    ],
)
def test_the_format_is_the_one_asked_for_or_that_of_the_file_name(wanted: Any, output: Any, format_name: str) -> None:
    assert results.format_of(wanted, output) == format_name


def test_a_format_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="there is no format 'xml'; there are json, csv, parquet"):
        results.format_of("xml", None)


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("old")
    with pytest.raises(TypeError):
        results.write_results([task(0, payload={"x": object()}, result=[object()])], "csv", str(path))
    assert path.read_text() == "old"

    results.write_results(TASKS, "csv", str(path))

    assert path.read_text() == results.as_csv(TASKS)
    assert [file.name for file in tmp_path.iterdir()] == ["results.csv"]


def test_a_folder_and_a_place_that_does_not_exist_are_errors(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder"):
        results.write_results(TASKS, "json", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        results.write_results(TASKS, "json", str(tmp_path / "no" / "where.json"))


@pytest.mark.skipif(not HAS_ENGINE, reason="neither pyarrow nor fastparquet is installed")
def test_parquet_keeps_kinds_and_writes_mixtures_as_json(tmp_path: Path) -> None:
    import pandas as pd

    path = str(tmp_path / "a.parquet")
    mixed = [*TASKS, task(5, payload={"lr": 2**70}, result={"best": "x", "seen": 2**53 + 1})]

    results.write_results(mixed, "parquet", path)

    frame = pd.read_parquet(path)
    assert list(frame.columns) == list(results.rows_of(mixed)[0])
    assert list(frame["task"]) == [0, 1, 2, 3, 4, 5]
    assert frame["payload.lr"][5] == str(2**70)
    assert frame["result.best"][0] == "[1, 2]"
    assert frame["result.best"][5] == '"x"'
    assert frame["result.seen"][5] == 2**53 + 1
    assert frame["result.accuracy"][0] == 0.9
    assert frame["payload.deep"][0]
    assert frame["error"][2] == "it broke\nbadly"


@pytest.mark.parametrize("missing", ["pandas", "pyarrow"])
def test_parquet_without_what_it_needs_says_what_to_install(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {"pandas": ("pandas",), "pyarrow": ("pyarrow", "fastparquet")}[missing]:
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ImportError, match=rf"pip install .*{missing}.*--format csv") as told:
        results.write_results(TASKS, "parquet", str(tmp_path / "a.parquet"))

    assert "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == []
