"""Results as a pandas DataFrame. pandas is loaded on first use."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterable, Mapping

from gpumesh.client.futures import MeshFuture
from gpumesh.errors import MeshError


def results_to_dataframe(results: Iterable[Any]) -> Any:
    """One row for each result, in order.

    A dict, a dataclass or a named tuple gives a column for each of its fields, anything else the column `result`. A future also
    gives `worker` and `elapsed`. An exception, as a value or from a future, gives the column `error`. A job gives a row for each task:
    the fields of its payload and of its result (of two with one name the result's), and `task`, `status`, `error`, `worker`, `hostname`
    and `seconds`, unless a field of the payload or result is called so.

    Args:
        results: A ResultStream, futures, or values; waited for. Or the status of a job, as `mesh.wait` returns it.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError(
            "results_to_dataframe needs pandas, which is not installed; pip install 'gpumesh[notebook]'"
        ) from error
    if isinstance(results, Mapping):
        if "tasks" not in results:
            raise TypeError("a dict of results must be the status of a job, with its tasks")
        return pd.DataFrame([_task_row(task) for task in results["tasks"]])
    return pd.DataFrame([_row(result) for result in results])


def _task_row(task: Mapping[str, Any]) -> Dict[str, Any]:
    row = {**_row(task["payload"] or {}), **(_row(task["result"]) if task["result"] is not None else {})}
    row.setdefault("task", task["id"])
    for name in ("status", "error", "worker", "hostname", "seconds"):
        row.setdefault(name, task[name])
    return row


def _row(result: Any) -> Dict[str, Any]:
    if isinstance(result, MeshFuture):
        try:
            error = result.exception()
        except MeshError as cancelled:
            error = cancelled
        row = _row(result.result() if error is None else error)
        row.setdefault("worker", result.worker)
        row.setdefault("elapsed", result.elapsed)
        return row
    if isinstance(result, BaseException):
        return {"error": f"{type(result).__name__}: {result}"}
    if isinstance(result, Mapping):
        return {str(name): value for name, value in result.items()}
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    if isinstance(result, tuple) and hasattr(result, "_asdict"):
        return dict(result._asdict())
    return {"result": result}
