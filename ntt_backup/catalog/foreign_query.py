"""A query of another database, usually that of an application, lists the files of the store.

The role there needs only the right to read. The session is read-only and creates nothing, each
statement has a time limit, and a superuser is refused, since the query would execute whatever code
others have put into the tables. The rows are copied into the catalog as they arrive.

Paths are bytes. A text is sent in the encoding of that database, since the application has written
these bytes; a path may also be a bytea.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import psycopg
from psycopg import sql

from ntt_backup.catalog.connection import Connection, configure, connect, translated
from ntt_backup.catalog.statements import fragment, pasted, statement
from ntt_backup.config.sections import CatalogFromSettings
from ntt_backup.errors import (
    CatalogError,
    CatalogRefused,
    CatalogUnavailable,
    ConfigError,
    FileListUnavailable,
)
from ntt_backup.model import MOST_PATH_BYTES

# The most rows of one step, and the longest time for one.
STEP_ROWS: Final = 250_000
_STEP_MS: Final = 1_800_000
# The bytes of rows that are passed on at once.
_BLOCK: Final = 64 * 1024
_WAIT_FOR_LOCKS_MS: Final = 10_000
_COLUMNS: Final = ("path", "size", "checksum", "key")
# So much of a value is taken, which is more than what a path or a checksum may have.
_MOST: Final = {"path": sql.Literal(MOST_PATH_BYTES + 1), "checksum": sql.Literal(1000)}
_HINTS: Final = {
    "22023": "correct catalog.from.role, or create that role and grant it to the one that logs in",
    "25006": "let the query only read: its sessions are read-only, also in functions that it calls",
    "57014": "let an index give the rows in the order of the column key, or make the query simpler",
}
_TEXT: Final = frozenset({"text", "varchar", "bpchar", "name", "citext"})
_NUMBERS: Final = frozenset({"int2", "int4", "int8", "numeric"})


@contextmanager
def open_query(wanted: CatalogFromSettings, application: str) -> Iterator[OpenQuery]:
    """Opens a session. Raises CatalogError, and ConfigError for settings that cannot be used."""
    with _of_the_other():
        conn = connect(wanted.url, application, no_tables=True)
    with conn:
        if conn.privileged:
            raise ConfigError(
                "catalog.from.url logs in as a role that has rights beyond that database",
                detail=str(conn.info.user),
                hint="make a role that may only read: create role ntt_reader login; grant select on"
                " the tables of the query to it",
            )
        with _of_the_other(), translated("prepare the query"):
            configure(conn, "default_transaction_read_only", "on")
            configure(conn, "statement_timeout", _STEP_MS)
            configure(conn, "lock_timeout", _WAIT_FOR_LOCKS_MS)
            configure(conn, "search_path", conn.search_path)
            if wanted.role is not None:
                conn.rows("set_role", role=sql.Identifier(wanted.role))
            if wanted.channel is not None:
                conn.rows("listen_to", channel=sql.Identifier(wanted.channel))
            described = conn.execute(statement("describe_query", query=sql.SQL(wanted.query)))
            oids = {one.name: one.type_code for one in described.description or ()}
            types = {one: conn.rows("type_name", {"oid": oid})[0][0] for one, oid in oids.items()}
        if wrong := _wrong(types):
            raise CatalogRefused(
                f"the query of catalog.from {wrong}",
                detail=f"it has {', '.join(f'{name} {kind}' for name, kind in types.items())}",
                hint="its columns are path (text or bytea), and if they are known size (a number),"
                " checksum (text or bytea) and key, which grows from row to row",
            )
        yield OpenQuery(conn, wanted.query, types)


@dataclass(frozen=True, slots=True)
class OpenQuery:
    """A session with a query. Methods raise CatalogError."""

    conn: Connection
    text: str
    types: Mapping[str, str]

    @property
    def definition(self) -> str:
        """A hash of the query: if it changes, all passes begin anew."""
        return sha256(f"{self.text}\0{self.types.get('key')}".encode()).hexdigest()

    @property
    def keyed(self) -> bool:
        """Whether the rows have keys."""
        return "key" in self.types

    def lacks_keys(self) -> bool:
        """Returns whether a row has no key: only the first step of a pass could give it."""
        with _of_the_other(), translated("run the query"):
            return bool(self.conn.rows("any_without_key", query=sql.SQL(self.text))[0][0])

    def sum_of_rows(self, *others: object) -> str | None:
        """Returns a hash of all rows, in any order; None where they have keys.

        The next call of `rows_from` gives the same rows, whatever is changed meanwhile.

        Args:
            others: What else the hash is of.
        """
        if self.keyed:
            return None
        with _of_the_other(), translated("run the query"):
            self.conn.rows("begin_snapshot")
            found = self.conn.rows("sum_of_rows", query=sql.SQL(self.text))
        return sha256(repr((found, others)).encode()).hexdigest()

    def rows_from(self, key: str | None) -> Iterator[bytes]:
        """Yields the next rows as blocks of a binary COPY.

        Args:
            key: The key of the last row so far; None for the first rows. Rows with this key come
                again, since others may have the same.
        """
        query = statement(
            "copy_from_query", rows=self._rows(STEP_ROWS if self.keyed else None, key)
        )
        with _of_the_other(), translated("run the query"), self.conn.cursor().copy(query) as copy:
            block = bytearray()
            for row in copy:
                block += row
                if len(block) > _BLOCK:
                    yield bytes(block)
                    block.clear()
            yield bytes(block)
        if not self.keyed:  # What follows may take long.
            with _of_the_other(), translated("run the query"):
                self.conn.rows("end_snapshot")

    def first_path(self, seconds: float) -> bytes | None:
        """Returns the path of the first row of a pass; None if there is no row, or it has no path.

        Args:
            seconds: The longest time for that.

        Raises:
            TimeoutError: The query takes longer.
        """
        with _of_the_other(), translated("run the query"):
            configure(self.conn, "statement_timeout", int(seconds * 1000))
            try:
                rows = self.conn.execute(pasted("first_row", self._rows(1))).fetchall()
            except psycopg.errors.QueryCanceled as error:
                raise TimeoutError from error
        return bytes(rows[0][0]) if rows and rows[0][0] is not None else None

    def _rows(self, most: int | None, key: str | None = None) -> sql.Composed:
        """Returns the SQL of the first rows, or of those from a key on. most: None for all."""
        parts = {name: self._column(name) for name in _COLUMNS}
        empty = sql.SQL("")
        return fragment(
            "rows_of_query",
            query=sql.SQL(self.text),
            order=sql.SQL("order by given.key") if self.keyed else empty,
            past=sql.SQL("where given.key >= {}").format(sql.Literal(key)) if key else empty,
            limit=sql.SQL(f"limit {most}") if most else empty,
            **parts,
        )

    def wait(self, seconds: float) -> bool:
        """Waits for a notification. Returns whether one came within the seconds."""
        with _of_the_other(), translated("wait for notifications"):
            return bool(list(self.conn.notifies(timeout=seconds, stop_after=1)))

    def _column(self, name: str) -> sql.Composable:
        kind, column = self.types.get(name), sql.Identifier("given", name)
        if kind is None:
            return fragment("unknown", type=sql.SQL("int8" if name == "size" else "text"))
        if name == "size":
            return fragment("number_of", column=column)
        if name == "key":  # It is compared as a value of its own type, and so in its own form.
            return fragment("text_of", column=column)
        if name == "path":
            found = column if kind == "bytea" else fragment("bytes_of", column=column)
        else:
            found = fragment("hex_of" if kind == "bytea" else "text_of", column=column)
        return fragment("first_of", column=found, most=_MOST[name])


def _wrong(types: Mapping[str, str]) -> str:
    """Returns what is wrong with the columns of a query, as the end of a sentence; or ""."""
    if "path" not in types:
        return "has no column path"
    if unknown := sorted(types.keys() - set(_COLUMNS)):
        return f"has a column that nobody asked for, {unknown[0]}"
    for name, kind in types.items():
        wanted = {"size": _NUMBERS, "path": _TEXT | {"bytea"}, "checksum": _TEXT | {"bytea"}}
        if name in wanted and kind not in wanted[name]:
            return f"has a column {name} of type {kind}"
    return ""


@contextmanager
def _of_the_other() -> Iterator[None]:
    """Makes errors name the database of the query instead of the catalog."""
    try:
        yield
    except ConfigError as error:
        message = error.message.replace("catalog.url (NTT_DB_URL)", "catalog.from.url")
        raise ConfigError(message, detail=error.detail, hint=error.hint) from error
    except CatalogError as error:
        message = error.message.replace("the catalog ", "the database of catalog.from ")
        cause = error.__cause__
        state = cause.sqlstate if isinstance(cause, psycopg.Error) else None
        hint = error.hint.replace("catalog.url (NTT_DB_URL)", "catalog.from.url")
        hint = _HINTS.get(state or "", hint)
        if "init-db" in hint:
            hint = "correct the query of catalog.from, or grant its role what it reads"
        away = isinstance(error, CatalogUnavailable)
        kind = FileListUnavailable if away else CatalogRefused
        raise kind(message, detail=error.detail, hint=hint) from error
