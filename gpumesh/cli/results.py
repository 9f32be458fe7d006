"""A job's tasks as JSON, CSV or Parquet. Needs no mesh; pandas only for Parquet."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

FORMATS = ("json", "csv", "parquet")
_KEPT = ("id", "status", "payload", "result", "error", "worker", "hostname", "attempts", "seconds")
_LAST = ("error", "worker", "hostname", "attempts", "seconds")


def format_of(wanted: Optional[str], output: Optional[str]) -> str:
    """The format asked for, else the one that the output's name ends in, else JSON.

    Raises:
        ValueError: There is no such format.
    """
    if wanted is None:
        ending = os.path.splitext(output or "")[1][1:].lower()
        return ending if ending in FORMATS else "json"
    if wanted not in FORMATS:
        raise ValueError(f"there is no format {wanted!r}; there are {', '.join(FORMATS)}")
    return wanted


def as_json(tasks: Sequence[Mapping[str, Any]]) -> str:
    """A list with an object for each task: `id`, `status`, `payload`, `result`, `error`, `worker`, `attempts`, `seconds`."""
    import json

    return json.dumps([{key: task[key] for key in _KEPT if key in task} for task in tasks], indent=2, default=str) + "\n"


def rows_of(tasks: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """One flat row for each task, all with the same columns in the same order.

    `task` and `status`, then `payload.KEY` for each key of any payload, then `result.KEY` for each key of any result that is an object and
    `result` for those that are not, then `error`, `worker`, `hostname`, `attempts` (how many) and `seconds`. What a task lacks is None.
    """
    rows: List[Dict[str, Any]] = []
    inputs: Dict[str, None] = {}
    outputs: Dict[str, None] = {}
    for task in tasks:
        row: Dict[str, Any] = {"task": task["id"], "status": task["status"]}
        given = {f"payload.{key}": value for key, value in (task.get("payload") or {}).items()}
        result = task.get("result")
        gained = {f"result.{key}": value for key, value in result.items()} if isinstance(result, dict) else {}
        if result is not None and not isinstance(result, dict):
            gained = {"result": result}
        inputs.update(dict.fromkeys(given))
        outputs.update(dict.fromkeys(gained))
        row.update(given)
        row.update(gained)
        row.update({key: task.get(key) for key in _LAST})
        attempts = row["attempts"]
        row["attempts"] = attempts if isinstance(attempts, int) else len(attempts or ())
        rows.append(row)
    columns = ("task", "status", *inputs, *outputs, *_LAST)
    return [{column: row.get(column) for column in columns} for row in rows]


def as_csv(tasks: Sequence[Mapping[str, Any]]) -> str:
    """The rows with a header; lists and objects inside are JSON, booleans `true` and `false`, what is missing is empty."""
    import csv
    import io

    rows = rows_of(tasks)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if rows:
        writer.writerow(rows[0])
    writer.writerows([[_cell(value) for value in row.values()] for row in rows])
    return text.getvalue()


def write_parquet(tasks: Sequence[Mapping[str, Any]], path: str) -> None:
    """The rows as a Parquet file. Lists, objects, and all values of a column that holds more than one kind of value are JSON text.

    Whole numbers stay whole where some are missing.

    Raises:
        ImportError: pandas, or what it writes Parquet with, is not installed.
        OSError: The file cannot be written.
    """
    try:
        import pandas as pd
    except ImportError:
        raise ImportError(
            "Parquet needs pandas, which is not installed; pip install pandas pyarrow, or use --format csv"
        ) from None
    rows = rows_of(tasks)
    columns = {}
    for column in rows[0] if rows else ():
        values, kind = _alike([row[column] for row in rows])
        columns[column] = pd.array(values, dtype=kind) if kind else values
    frame = pd.DataFrame(columns)
    try:
        frame.to_parquet(path, index=False)
    except ImportError:
        raise ImportError(
            "pandas writes Parquet with pyarrow or fastparquet, and neither is installed; pip install pyarrow, or use --format csv"
        ) from None


def write_results(tasks: Sequence[Mapping[str, Any]], format_name: str, path: str) -> None:
    """Write a file all at once: an older one of that name stays as it is until the new one is whole.

    Raises:
        ImportError: See `write_parquet`.
        OSError: It cannot be written.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    part = f"{path}.{os.getpid()}.part"
    try:
        if format_name == "parquet":
            write_parquet(tasks, part)
        else:
            with open(part, "w", encoding="utf-8", newline="") as file:
                file.write(as_csv(tasks) if format_name == "csv" else as_json(tasks))
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.unlink(part)


def _cell(value: Any) -> Any:
    import json

    if value is None:
        return ""
    if isinstance(value, (dict, list, bool)):
        return json.dumps(value)
    return value


_DTYPES = {"whole": "Int64", "flag": "boolean"}  # Those of pandas that know of missing values.


def _alike(values: List[Any]) -> Tuple[List[Any], str]:
    """A column that Parquet takes, of one kind or all JSON text; and its type where pandas would not find the right one."""
    import json

    kinds = {_kind_of(value) for value in values if value is not None}
    if kinds == {"whole", "number"}:
        return [None if value is None else float(value) for value in values], ""
    if len(kinds) <= 1 and "nested" not in kinds:
        return values, _DTYPES.get("".join(kinds), "")
    return [None if value is None else json.dumps(value) for value in values], ""


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int):
        return "whole" if -(2**63) <= value < 2**63 else "nested"
    return "number" if isinstance(value, float) else "text" if isinstance(value, str) else "nested"
