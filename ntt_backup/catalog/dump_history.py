"""What a dump needs to know of its database, and the history of dumps for `status`.

"Has anything changed since the last dump?" cannot be asked of PostgreSQL directly. The position of
its log moves by itself, and so do transaction numbers. The counters of rows inserted, updated and
deleted do not: together with what says that they were reset, they are a fingerprint, and where it
differs something may have changed. Our own tables are left out, or noting a run would be a change;
and so are the rows of `blobs` that we have marked, which each marking statement counts in
`ntt_backup.marks` with its own commit: after a restore, a mark that the dump lacks only has a blob
looked for on the remote again, or checked again. No table is read for this but that small one.

It must be taken before the dump, so that what happens meanwhile counts for the next one. A session
tells the server its counts with a delay of some seconds, and ours at once: beside working workers
the two do not match, which costs a dump and no more. What is overlooked is seen the next time, or
when the dump has reached `dump.max_age`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from psycopg import sql

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.privileges import named
from ntt_backup.catalog.queries import shown, statement
from ntt_backup.errors import ConfigError, DumpFailed

_READ_ALL: Final = 140_000  # The first version that has the role pg_read_all_data.
_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """The database to be dumped. server_version: 160004 for 16.4, which is what server says.

    fingerprint: "" where the server counts nothing.
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
    """The database as it is at this moment."""
    with translated(conn, "tell about itself"):
        return DatabaseState(*conn.execute(statement("database_state")).fetchall()[0])


def require_readable(conn: Connection) -> None:
    """Raise DumpFailed, with the SQL that mends it, where pg_dump may not read all there is."""
    with translated(conn, "tell what of it may be read"):
        found = _undumpable(conn, None)
    if not found:
        return
    user = sql.Identifier(conn.info.user)
    kinds = {kind for kind, *_ in found}
    mends = []
    if "unreadable" in kinds and conn.info.server_version >= _READ_ALL:
        mends.append(shown("mend_read_all", user=user))
    elif "unreadable" in kinds:
        theirs = sorted({schema for kind, _, schema, _ in found if kind == "unreadable"})
        schemas = sql.SQL(", ").join(map(sql.Identifier, theirs))
        mends.append(shown("mend_read_schemas", schemas=schemas, user=user))
    if "policy" in kinds:
        mends.append(shown("mend_row_security", user=user))
    if "large object" in kinds:
        mends.append(shown("mend_large_objects", role=sql.Literal(conn.info.user)))
    names = [quoted for _, quoted, *_ in found]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise DumpFailed(
        f"{conn.info.user} may not read all that pg_dump dumps",
        detail=", ".join(names[:_NAMED]) + more,
        hint="as a superuser: " + " ".join(" ".join(mends).split()),
    )


def unreadable(conn: Connection, role: str | None = None) -> list[tuple[str, str]]:
    """What pg_dump reads and the role may not: schema and name of each table and sequence."""
    found = _undumpable(conn, role)
    return [(schema, name) for kind, _, schema, name in found if kind == "unreadable"]


def _undumpable(conn: Connection, role: str | None) -> list[tuple[str, str, str, str]]:
    """Kind, quoted name, schema and name of what pg_dump would stumble over, run by the role."""
    return conn.execute(statement("undumpable", role=named(role))).fetchall()


def require_empty(conn: Connection) -> None:
    """Raise ConfigError where anybody keeps anything in the database."""
    with translated(conn, "list its tables"):
        found = conn.execute(statement("first_relation")).fetchone()
    if found is not None:
        raise ConfigError(
            f"the database {conn.info.dbname} is not empty",
            detail=f"it has {found[0]}",
            hint="createdb a new one for this, and dropdb it afterwards",
        )


def note(
    conn: Connection,
    target: str,
    started_at: datetime,
    *,
    name: str,
    bytes: int,
    sha256: str,
    error: str,
) -> None:
    """Note a dump that was made or has failed."""
    values = {
        "target": target,
        "started_at": started_at,
        "name": name,
        "bytes": bytes,
        "sha256": sha256,
        "error": error,
    }
    with translated(conn, "note the dump"):
        conn.execute(statement("note_dump"), values)


def last_dumps(conn: Connection, target: str) -> list[DumpRun]:
    """The target's latest good dump, and its latest failed one where that came after it."""
    with translated(conn, "read the history of dumps"):
        rows = conn.execute(statement("last_dumps"), {"target": target}).fetchall()
    return [DumpRun(*row) for row in rows]


def ever_made(conn: Connection, target: str) -> bool:
    """Whether the target ever got a good dump."""
    return any(one.name for one in last_dumps(conn, target))
