"""What is there of a catalog, read from the system catalogs alone, which everybody may read.

Unlike `shape`, which speaks for one session and its search path, this works for a table that the
session may not look at yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from psycopg import sql

from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.pending import index_names, read_indexes
from ntt_backup.catalog.queries import fragment, shown, statement
from ntt_backup.catalog.schema_check import wanted_columns
from ntt_backup.errors import CatalogRefused
from ntt_backup.format import duration, many

# Rows a second, as 42 million took 210 s beside others who wrote.
_ROWS_PER_SECOND: Final = 200_000
_LONG_SECONDS: Final = 5


class Surroundings(NamedTuple):
    """Database and schemas. own_owner: None where our schema is not there. new_schema: where a new
    table would be, and whether this session may make it there. user: who acts in this session.
    """

    database: str
    database_owner: str
    own_owner: str | None
    version_readable: bool
    new_schema: str
    may_create_table: bool
    user: str


class Place(NamedTuple):
    """A table `blobs`. found: the search path of this session leads to it."""

    oid: int
    schema: str
    owner: str
    partitioned: bool
    schema_owner: str
    found: bool

    @property
    def name(self) -> sql.Identifier:
        return sql.Identifier(self.schema, "blobs")


def surroundings(conn: Connection) -> Surroundings:
    """The database that this session is in."""
    return Surroundings(*conn.execute(statement("surroundings")).fetchall()[0])


def find_table(conn: Connection) -> Place | None:
    """The table that the search path finds, else the only one that it might be meant to find.

    Raises CatalogRefused where it finds none and there are several.
    """
    places = [Place(*row) for row in conn.execute(statement("find_tables"))]
    if len(places) > 1:
        raise CatalogRefused(
            "the search path finds no table blobs, and there are several",
            detail=", ".join(f"{place.schema}.blobs" for place in places),
            hint="say which, for example as ?options=-c%20search_path%3DSCHEMA in catalog.url",
        )
    return places[0] if places else None


def rows_and_time(conn: Connection, table: int) -> str:
    """How large the table is, and how long an index takes on it; "" where that is soon over."""
    rows = conn.execute(statement("rows_about"), {"table": table}).fetchall()[0][0]
    seconds = rows / _ROWS_PER_SECOND
    if seconds < _LONG_SECONDS:
        return ""
    return f"about {many(rows, 'row')}, which takes about {duration(seconds)}"


def add_columns(target: str, there: Sequence[str]) -> tuple[list[str], sql.Composed] | None:
    """The columns that are absent, and what adds them to the table; None where all are there."""
    wanted = wanted_columns(target)
    absent = [name for name in wanted if name not in there]
    if not absent:
        return None
    changes = [
        fragment("add_column", column=sql.Identifier(name), type=sql.SQL(wanted[name]))
        for name in absent
    ]
    if "created_at" in absent:
        changes.append(fragment("default_created_at"))
    return absent, sql.SQL(", ").join(changes)


def choose_index(conn: Connection, target: str, table: int) -> tuple[str, list[str]] | None:
    """The name for a new index of what is pending, and unfinished ones that are in its way; None
    where a usable index is there. Others' indexes are used as they are.

    Raises CatalogRefused where both names are taken.
    """
    indexes = read_indexes(conn, target, table)
    if any(index.valid and index.form for index in indexes):
        return None
    taken = {index.name for index in indexes if index.valid}
    free = [name for name in index_names(target) if name not in taken]
    if not free:
        spare = sql.Identifier(index_names(target)[1])
        raise CatalogRefused(
            "the names of our index are taken by indexes that do not serve us",
            detail=", ".join(index_names(target)),
            hint=f"rename one, or drop it: {shown('drop_index', index=spare)}",
        )
    return free[0], [index.name for index in indexes if index.name in free]


class TriggerState(NamedTuple):
    """there: inserts wake the daemon. function: what the trigger calls is there. may_add: this
    session may make the trigger, once the function is there.
    """

    there: bool
    function: bool
    may_add: bool


def trigger_state(conn: Connection, table: int) -> TriggerState:
    """What there is of the trigger that wakes a watching daemon."""
    rows = conn.execute(statement("trigger_state"), {"table": table}).fetchall()
    return TriggerState(*rows[0])
