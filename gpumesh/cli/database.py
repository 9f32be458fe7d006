"""Jobs as a coordinator's database holds them, read without a coordinator; nothing is written to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List

if TYPE_CHECKING:
    from gpumesh.journal.base import JobRecord


def read_jobs(path: str) -> List[Dict[str, Any]]:
    """The jobs in a database, newest first, as `mesh.jobs` shows them; what runs at this moment is not on disk and counts as pending.

    Raises:
        JournalError: There is none, it is no database of gpumesh, it is damaged, or a newer version has written it.
    """
    from gpumesh.journal.sqlite import open_reader

    reader = open_reader(path)
    try:
        return [_view(job) for job in reversed(reader.jobs())]
    finally:
        reader.close()


def _view(job: JobRecord) -> Dict[str, Any]:
    from gpumesh.runtime.event_log import time_of_day

    counts = {"pending": 0, "running": 0, "done": 0, "failed": 0, "cancelled": 0, **job.counts}
    return {
        "id": job.id,
        "name": job.name,
        "script": job.script,
        "state": job.status,
        "finished": bool(job.finished),
        "counts": counts,
        "total": job.tasks,
        "submitted": time_of_day(job.submitted),
        "ended": time_of_day(job.finished) if job.finished else "",
    }
