"""The rows of a stranger's dump go into tables that are made here.

Nothing of such a dump is executed: the tables are those of init-db, and of the rows only columns
are taken that these tables have. See `dump.rows_only`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from psycopg import sql

from ntt_backup.catalog.connection import (
    Connection,
    connect,
    refuse_code_of_others,
    translated,
)
from ntt_backup.catalog.queries import statement
from ntt_backup.catalog.schema import init_db

OWN_SCHEMA: Final = "ntt_backup"
BLOBS: Final = "blobs"
# The table that init-db writes itself.
_VERSION: Final = "schema_version"
_AT_ONCE: Final = 1 << 16


class NewTables:
    """New, empty tables, in one transaction. columns: of each, by (schema, name)."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        found = conn.execute(statement("tables_of_ours")).fetchall()
        self.columns = {
            (schema, name): frozenset(columns)
            for schema, name, columns in found
            if name != _VERSION
        }

    def copy(
        self, table: tuple[str, str], columns: Sequence[str], encoding: str, rows: Iterable[bytes]
    ) -> None:
        """Adds rows to a table. rows: each as COPY writes it, with its line feed. Raises
        CatalogError.
        """
        parts = {
            "table": sql.Identifier(*table),
            "columns": sql.SQL(", ").join(map(sql.Identifier, columns)),
            "encoding": sql.Literal(encoding),
        }
        query, held = statement("copy_rows", **parts), bytearray()
        with translated(f"take the rows of {table[1]}"), self._conn.cursor().copy(query) as copy:
            for row in rows:
                held += row
                if len(held) >= _AT_ONCE:
                    copy.write(bytes(held))
                    held.clear()
            copy.write(bytes(held))


@contextmanager
def new_tables(url: str, application: str, targets: Iterable[str]) -> Iterator[NewTables]:
    """Makes the tables of init-db for these targets in an empty database, and yields them within
    one transaction. Where that does not end well, the database is empty again. Raises CatalogError.
    """
    with connect(url, application, no_tables=True) as conn:
        try:
            for target in targets:
                init_db(conn, target)
            refuse_code_of_others(conn)
            with conn.transaction():
                yield NewTables(conn)
        except BaseException:
            _drop(conn)
            raise


def _drop(conn: Connection) -> None:
    """Drops what init-db has made."""
    if conn.closed:
        return
    with translated("drop the new tables"):
        found = conn.execute(statement("tables_of_ours")).fetchall()
        for schema, name, _ in found:
            if schema != OWN_SCHEMA:
                table = sql.Identifier(schema, name)
                conn.execute(statement("drop_table", table=table))
        if any(schema == OWN_SCHEMA for schema, _, _ in found):
            conn.execute(statement("drop_own_schema"))
