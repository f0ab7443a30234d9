"""A catalog moves to another database, of any version of PostgreSQL.

init-db makes the tables there, and their rows are copied and counted in one transaction. So the
other database has all of them or none, and this one keeps what it has, whenever the move is killed.
Meanwhile nobody can write here. A move that finds all rows there already was killed after its copy.
"""

from __future__ import annotations

import hashlib
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
        ConfigError: The other one is this one, or has other rows, or the tables have columns of
            other programs.
        LockHeld: A program of ours uses the catalog.
    """
    with connect(to, application, no_tables=True) as there, translated("look at its tables"):
        database, filled = (there.server, there.info.dbname), _has_rows(there)
    with connect(url, application) as here, translated("copy its rows"), here.transaction():
        if here.server.system and database == (here.server, here.info.dbname):
            raise ConfigError(f"{describe(to)} is the catalog itself", hint="name another database")
        for (session,) in here.rows("our_sessions"):
            raise LockHeld(
                f"{session} uses the catalog",
                hint="stop it, and call this again: nothing was moved",
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
        here.rows("write_plainly")
        encoding = here.info.parameter_status("server_encoding") or "UTF8"
        counts = {table[1]: _count(here, table) for table in columns}
        if filled:
            with connect(to, application) as there, there.transaction():
                there.rows("write_plainly")
                places = {name: (schema, name) for schema, name, _ in there.rows("tables_of_ours")}
                for table, names in columns.items():
                    at = places.get(table[1], table)
                    if _sum(here, table, names, encoding) != _sum(there, at, names, encoding):
                        raise ConfigError(
                            f"{describe(to)} has other rows in {table[1]}",
                            hint="name an empty database, or make this one anew",
                        )
            return counts
        with new_tables(to, application, targets) as new:
            new.columns[_CONTACTS] = frozenset(columns.get(_CONTACTS, ()))
            new.conn.rows("clear_contacts")
            for table, names in columns.items():
                # The path there leads to a schema of any name.
                at = next((one for one in new.columns if one[1] == table[1]), table)
                if lost := set(names) - new.columns.get(at, frozenset()):
                    raise ConfigError(
                        f"{table[1]} has columns of other programs: {', '.join(sorted(lost))}",
                        hint="move the whole database by pg_dump and pg_restore, and set"
                        " catalog.url; nothing was moved",
                    )
                new.copy(at, names, encoding, _rows(here, table, names, encoding))
                if _count(new.conn, at) != counts[table[1]]:
                    raise CatalogRefused(
                        f"{describe(to)} has not taken all rows of {table[1]}",
                        hint="check the triggers there; nothing was moved",
                    )
        return counts


def _has_rows(there: Connection) -> bool:
    """Returns whether tables of ours there have rows. Raises ConfigError where others' tables are.

    What init-db has noted of targets does not count.
    """
    ours = [(schema, name) for schema, name, _ in there.rows("tables_of_ours")]
    if not set(ours) - {_VERSION}:
        history.require_empty(there)
    return any(_count(there, table) for table in ours if table not in (_VERSION, _CONTACTS))


def _sum(conn: Connection, table: tuple[str, str], names: Iterable[str], encoding: str) -> int:
    """Returns the sum of the hashes of all rows, which are in no order."""
    rows = _rows(conn, table, names, encoding)
    return sum(int.from_bytes(hashlib.sha256(row).digest()) for row in rows)


def _count(conn: Connection, table: tuple[str, str]) -> int:
    return int(conn.rows("count_rows", table=sql.Identifier(*table))[0][0])


def _rows(
    conn: Connection, table: tuple[str, str], names: Iterable[str], encoding: str
) -> Iterable[bytes]:
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    parts = {"table": sql.Identifier(*table), "columns": columns, "encoding": sql.Literal(encoding)}
    with conn.cursor().copy(statement("copy_out", **parts)) as copy:
        yield from map(bytes, copy)
