"""Results as a pandas DataFrame. pandas is loaded on first use."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterable, Mapping

from gpumesh.client.futures import MeshFuture
from gpumesh.errors import MeshError


def results_to_dataframe(results: Iterable[Any]) -> Any:
    """One row for each result, in order.

    A dict, a dataclass or a named tuple gives a column for each of its fields, anything else the column `result`. A future also
    gives `worker` and `elapsed`. An exception, as a value or from a future, gives the column `error`.

    Args:
        results: A ResultStream, futures, or values; waited for.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError(
            "results_to_dataframe needs pandas, which is not installed; pip install 'gpumesh[notebook]'"
        ) from error
    return pd.DataFrame([_row(result) for result in results])


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
