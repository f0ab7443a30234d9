"""The history of dumps, and whether the database has changed since the last one.

The server's counters of rows inserted, updated and deleted are a fingerprint: where it differs,
something may have changed. Our own tables are left out, and so are the rows of `blobs` that we have
marked, which each marking statement counts in `ntt_backup.marks` with its own commit: after a
restore, a mark that the dump lacks only has a blob sent or checked again.

The fingerprint must be taken before the dump, so that later changes count for the next one. A
session tells the server its counts with a delay of some seconds, and ours at once: beside working
workers the two do not match, which costs a dump and no more. What is overlooked is seen the next
time, or when the dump has reached `dump.max_age`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.queries import statement
from ntt_backup.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """The database to be dumped. server_version: 160004 where server says 16.4. fingerprint: ""
    where the server counts nothing.
    """

    database: str
    server: str
    server_version: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class DumpRun:
    """A dump that was made, or tried: then name is "", and error says why."""

    started_at: datetime
    ended_at: datetime
    name: str
    bytes: int
    sha256: str
    error: str


def database_state(conn: Connection) -> DatabaseState:
    """Returns the database as it is at this moment."""
    with translated("tell about itself"):
        return DatabaseState(*conn.execute(statement("database_state")).fetchall()[0])


def require_empty(conn: Connection) -> None:
    """Raises ConfigError where anybody keeps anything in the database."""
    with translated("list its tables"):
        found = conn.execute(statement("first_relation")).fetchone()
    if found is not None:
        raise ConfigError(
            f"the database {conn.info.dbname} is not empty",
            detail=f"it has {found[0]}",
            hint="createdb a new one for this, and dropdb it afterwards",
        )


def record_dump(
    conn: Connection,
    target: str,
    started_at: datetime,
    *,
    name: str,
    bytes: int,
    sha256: str,
    error: str,
) -> None:
    """Records a dump that was made or has failed."""
    result = {"name": name, "bytes": bytes, "sha256": sha256, "error": error}
    with translated("note the dump"):
        values = {"target": target, "started_at": started_at, **result}
        conn.execute(statement("record_dump"), values)


def last_dumps(conn: Connection, target: str) -> list[DumpRun]:
    """Returns the target's latest good dump, and its latest failed one where that came later."""
    with translated("read the history of dumps"):
        rows = conn.execute(statement("last_dumps"), {"target": target}).fetchall()
    return [DumpRun(*row) for row in rows]


def recent_dumps(conn: Connection, target: str, limit: int) -> list[DumpRun]:
    """Returns the target's last dumps, made or failed, the newest first."""
    with translated("read the history of dumps"):
        values = {"target": target, "limit": limit}
        rows = conn.execute(statement("recent_dumps"), values).fetchall()
    return [DumpRun(*row) for row in rows]


def noted_dumps(conn: Connection, target: str, limit: int) -> frozenset[tuple[str, str]]:
    """Returns name and SHA-256 of the good ones among the target's last dumps."""
    last = recent_dumps(conn, target, limit)
    return frozenset((one.name, one.sha256) for one in last if not one.error)


def ever_made(conn: Connection, target: str) -> bool:
    """Returns whether the target ever got a good dump."""
    return any(one.name for one in last_dumps(conn, target))
