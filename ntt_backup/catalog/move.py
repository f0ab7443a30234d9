"""A catalog moves to another database, of any version of PostgreSQL.

init-db makes the tables there, and their rows are copied and counted in one transaction. So the
other database has all of them or none, and this one keeps what it has, whenever the move is killed.
Meanwhile nobody can write here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from psycopg import sql

from ntt_backup.catalog import history
from ntt_backup.catalog.connection import Connection, connect, describe, translated
from ntt_backup.catalog.restore_role import BLOBS, new_tables
from ntt_backup.catalog.statements import statement
from ntt_backup.errors import CatalogRefused, ConfigError, LockHeld

_TARGET = re.compile(r"([a-z][a-z0-9_]{0,30})_copied", re.ASCII)
_VERSION = ("ntt_backup", "schema_version")
_CONTACTS = ("ntt_backup", "contacts")


def move(url: str, to: str, application: str) -> dict[str, int]:
    """Copies the catalog of a database into another one; returns the rows of each table.

    Raises:
        CatalogError: One of them refuses, or does not answer.
        ConfigError: The other one is not empty, or the tables have columns of other programs.
        LockHeld: A program of ours uses the catalog.
    """
    _require_room(to, application)
    with connect(url, application) as here, translated("copy its rows"), here.transaction():
        for (session,) in here.rows("our_sessions"):
            raise LockHeld(
                f"{session} uses the catalog", hint="stop it, and call this again: nothing is moved"
            )
        columns = {(one, name): names for one, name, names in here.rows("tables_of_ours")}
        columns.pop(_VERSION, None)
        blobs = next((names for (_, name), names in columns.items() if name == BLOBS), ())
        if not blobs:
            raise CatalogRefused(
                f"{here.info.user} does not own the table blobs", hint="call it as its owner"
            )
        targets = [found[1] for found in map(_TARGET.fullmatch, blobs) if found]
        for table in columns:
            here.rows("lock_against_writing", table=sql.Identifier(*table))
        with new_tables(to, application, targets) as new:
            new.columns[_CONTACTS] = frozenset(columns.get(_CONTACTS, ()))
            new.conn.rows("clear_contacts")
            counts = {}
            for table, names in columns.items():
                # The path there leads to a schema of any name.
                at = next((one for one in new.columns if one[1] == table[1]), table)
                if lost := set(names) - new.columns.get(at, frozenset()):
                    raise ConfigError(
                        f"{table[1]} has columns of other programs: {', '.join(sorted(lost))}",
                        hint="move the whole database by pg_dump and pg_restore, and set"
                        " catalog.url; nothing is moved",
                    )
                encoding = here.info.parameter_status("server_encoding") or "UTF8"
                new.copy(at, names, encoding, _rows(here, table, names, encoding))
                counts[table[1]] = _count(here, table)
                if _count(new.conn, at) != counts[table[1]]:
                    raise CatalogRefused(
                        f"{describe(to)} has not taken all rows of {table[1]}",
                        hint="look at the triggers there; nothing is moved",
                    )
            return counts


def _require_room(to: str, application: str) -> None:
    """Raises ConfigError where anything is in the database but empty tables of ours."""
    with connect(to, application, no_tables=True) as there, translated("look at its tables"):
        found = there.rows("tables_of_ours")
        ours = [(schema, name) for schema, name, _ in found if (schema, name) != _VERSION]
        if not ours:
            history.require_empty(there)
        for table in ours:
            if table != _CONTACTS and _count(there, table):
                raise ConfigError(
                    f"{describe(to)} has rows in {table[1]}",
                    hint="name an empty database. If an earlier move was interrupted after its"
                    " copy, set catalog.url by hand, or make the database anew",
                )


def _count(conn: Connection, table: tuple[str, str]) -> int:
    return int(conn.rows("count_rows", table=sql.Identifier(*table))[0][0])


def _rows(
    conn: Connection, table: tuple[str, str], names: Iterable[str], encoding: str
) -> Iterable[bytes]:
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    parts = {"table": sql.Identifier(*table), "columns": columns, "encoding": sql.Literal(encoding)}
    with conn.cursor().copy(statement("copy_out", **parts)) as copy:
        yield from map(bytes, copy)
