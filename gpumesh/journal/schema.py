"""The tables of the database and their history: each version is a step from the one before. Opens nothing.

A database carries its version in `PRAGMA user_version` and whose it is in `PRAGMA application_id`. A change of the tables is a new
function at the end of STEPS; one that was released is never edited. All missing steps run in one transaction: a database has the
old tables or the new ones.

What has not happened has no row. A job knows its rows (`first_row ... first_row + tasks - 1`), the payloads lie in packs of many, and
only a task that started or ended has a row in `states`; `rest` of its job says what all others are. So a job of ten thousand tasks is accepted,
and cancelled, with some dozen statements.
"""

from __future__ import annotations

import secrets
import sqlite3
from typing import Callable, List

APPLICATION_ID = 0x676D_6A6C  # "gmjl".

ARRIVING, ACCEPTED, DROPPED = 0, 1, 2
"""Stages of a job: its parts are coming, it is a job, it is being deleted. Only an accepted one is ever shown."""

STARTED = "started"
"""In `states`: pending, and may be running."""


def _jobs(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID")
    connection.execute(
        "INSERT INTO meta VALUES ('mesh_id', ?), ('generation', 0), ('next_row', 1)",
        (secrets.token_hex(8),),
    )
    connection.execute(
        "CREATE TABLE jobs ("
        " first_row INTEGER PRIMARY KEY,"
        " tasks INTEGER NOT NULL,"
        " id TEXT NOT NULL UNIQUE,"
        " name TEXT NOT NULL,"
        " script TEXT NOT NULL,"
        " code BLOB NOT NULL,"  # Digest; x'': none.
        " options BLOB NOT NULL,"
        " stage INTEGER NOT NULL,"
        " status TEXT NOT NULL,"
        " submitted REAL NOT NULL,"  # Seconds since the epoch, as all times here.
        " finished REAL NOT NULL DEFAULT 0,"  # 0: not.
        " rest TEXT NOT NULL DEFAULT 'pending',"
        " rest_since REAL NOT NULL DEFAULT 0,"
        " counts TEXT NOT NULL DEFAULT '')"  # Tasks by status as JSON, once it has finished.
    )
    connection.execute("CREATE INDEX unfinished ON jobs (first_row) WHERE finished = 0")
    connection.execute("CREATE INDEX not_accepted ON jobs (first_row) WHERE stage <> 1")
    connection.execute(
        "CREATE TABLE payloads ("  # Packs of some tasks with consecutive rows.
        " first_row INTEGER PRIMARY KEY,"
        " tasks INTEGER NOT NULL,"
        " variants BLOB NOT NULL,"
        " data BLOB NOT NULL)"
    )
    connection.execute(
        "CREATE TABLE states ("
        " row INTEGER PRIMARY KEY,"
        " status TEXT NOT NULL,"
        " attempts INTEGER NOT NULL DEFAULT 0,"
        " worker TEXT NOT NULL DEFAULT '',"
        " seconds REAL NOT NULL DEFAULT 0,"
        " ended REAL NOT NULL DEFAULT 0,"
        " error TEXT NOT NULL DEFAULT '',"
        " history TEXT NOT NULL DEFAULT '',"
        " result BLOB)"
    )
    connection.execute("CREATE INDEX started ON states (row) WHERE status = 'started'")
    connection.execute("CREATE TABLE code (digest BLOB PRIMARY KEY, used REAL NOT NULL, archive BLOB NOT NULL)")


def _logs_and_events(connection: sqlite3.Connection) -> None:
    connection.execute(
        "CREATE TABLE logs ("
        " number INTEGER PRIMARY KEY AUTOINCREMENT,"  # Never given again: who follows them remembers the last.
        " row INTEGER NOT NULL,"
        " start INTEGER NOT NULL,"  # Bytes of the task before these.
        " attempt INTEGER NOT NULL,"
        " stream INTEGER NOT NULL,"
        " data BLOB NOT NULL)"
    )
    connection.execute("CREATE INDEX log_of_task ON logs (row, start)")
    connection.execute(
        "CREATE TABLE events ("
        " number INTEGER PRIMARY KEY,"
        " time TEXT NOT NULL,"
        " kind TEXT NOT NULL,"
        " text TEXT NOT NULL,"
        " details TEXT NOT NULL)"
    )
    connection.execute("CREATE TABLE workers (id TEXT PRIMARY KEY, name TEXT NOT NULL, joined REAL NOT NULL) WITHOUT ROWID")


Step = Callable[[sqlite3.Connection], None]

STEPS: List[Step] = [_jobs, _logs_and_events]
"""`STEPS[n]` leads from version n to version n + 1; version 0 is an empty file."""

VERSION = len(STEPS)


def version_of(connection: sqlite3.Connection) -> int:
    """The version of an open database."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection) -> int:
    """Bring the tables up to date, within the transaction that the caller has begun and will commit.

    Returns:
        The version that they had.
    """
    before = version_of(connection)
    for step in STEPS[before:]:
        step(connection)
    if before != VERSION:
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    return before
