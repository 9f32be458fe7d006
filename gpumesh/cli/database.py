"""Jobs as a coordinator's database holds them, read without a coordinator; nothing is written to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping

if TYPE_CHECKING:
    from gpumesh.journal.base import TaskRecord


def read_jobs(path: str) -> List[Dict[str, Any]]:
    """The jobs in a database, newest first, as `mesh.jobs` shows them; what runs at this moment is not on disk and counts as pending.

    Raises:
        JournalError: There is none, it is no database of gpumesh, it is damaged, or a newer version has written it.
    """
    from gpumesh.journal.sqlite import open_reader
    from gpumesh.runtime.job_views import record_view

    reader = open_reader(path)
    try:
        return [record_view(job) for job in reversed(reader.jobs())]
    finally:
        reader.close()


def read_job(path: str, named: str) -> Dict[str, Any]:
    """One job with its tasks, as `mesh.status` shows it.

    Args:
        named: Its id, or an unmistakable beginning of it.

    Raises:
        JournalError: As `read_jobs`.
        UnknownJobError: It is not there.
    """
    from gpumesh.errors import UnknownJobError
    from gpumesh.journal.sqlite import open_reader
    from gpumesh.model.jobs import typed_job_id
    from gpumesh.runtime.job_views import record_view

    reader = open_reader(path)
    try:
        try:
            record = reader.job(typed_job_id(named))
        except ValueError as error:
            raise UnknownJobError(str(error)) from None
        if record is None:
            raise UnknownJobError(f"there is no job {named!r} in {path}; `gpumesh jobs --db {path}` lists those there are")
        tasks = reader.tasks(record.id, payloads=True)
    finally:
        reader.close()
    return {**record_view(record), "tasks": [_task(task, record.first_row) for task in tasks]}


def _task(record: TaskRecord, first_row: int) -> Dict[str, Any]:
    from gpumesh.runtime.job_views import task_view

    view = task_view(record, first_row)
    return {**view, "payload": _loaded(view, "payload"), "result": _loaded(view, "result")}


def _loaded(view: Mapping[str, Any], key: str) -> Any:
    import json

    from gpumesh.runtime.job_views import plain

    return None if view[key] is None else json.loads(plain(view[key]))
