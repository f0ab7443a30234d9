"""Checks that the catalog's table can be used: types, order, keys, privileges, the index.

The table belongs to another program and may have any history. Everything that the queries rely on
is read from the system catalogs before a run, which everybody may read; a refusal names one problem
and the statement that mends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from psycopg import errors, sql

from ntt_backup.catalog import privileges
from ntt_backup.catalog.connection import (
    INIT_DB,
    Connection,
    check_one_table,
    code_of_others,
    search_path,
    translated,
)
from ntt_backup.catalog.pending import bounds, read_indexes
from ntt_backup.catalog.range_locks import prefix_ranges
from ntt_backup.catalog.statements import shown
from ntt_backup.errors import CatalogRefused
from ntt_backup.formatting import many

SCHEMA_VERSION = 1
# What came later, tables, columns and indexes, is needed by those commands alone that use them.
LATER_TABLES = frozenset(
    {
        "checks",
        "checks.prefixes",
        "contacts",
        "directories",
        "failures.known_at",
        "hours",
        "origins",
        "packs",
        "places",
        "places.places_replaced",
        "proofs",
        "runs.prefixes",
        "runs.reason",
        "seen_places",
        "targets",
        "unchecked",
    }
)
OWN_TABLES = LATER_TABLES | {"dumps", "failures", "marks", "runs", "scans", "schema_version"}
PRINT_SQL = (
    "`ntt-backup-remote init-db --print-sql` prints the SQL, a script for each who must run it"
)

_LARGEST_SIZE = 2**63 - 1
_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence"}
_ACCEPTED = {
    "bigint": {"bigint", "integer", "smallint", "numeric"},
    "timestamptz": {"timestamp with time zone", "timestamp without time zone"},
    "boolean": {"boolean"},
}


class Column(NamedTuple):
    """A column of `blobs`. type is the server's word for it, without a length."""

    type: str
    not_null: bool
    collation: sql.Identifier
    deterministic: bool


class Table(NamedTuple):
    """A table `blobs`. kind: as in pg_class. found: the search path of this session leads to it."""

    oid: int
    kind: str
    schema: str
    owner: str
    schema_owner: str
    found: bool
    columns: Mapping[str, Column]


def our_columns(target: str) -> dict[str, str]:
    """Returns the columns that we need besides blobid, and the types we give them."""
    return {
        "size": "bigint",
        f"{target}_copied": "boolean",
        f"{target}_last_checked": "timestamptz",
        f"{target}_copy_failed": "boolean",
    }


def find_table(conn: Connection) -> Table | None:
    """Returns the table of the search path, else the only one. Raises CatalogRefused."""
    tables = conn.rows("find_tables")
    if len(tables) > 1:
        raise CatalogRefused(
            "the search path finds no table blobs, and there are several",
            detail=", ".join(f"{schema}.blobs" for _, _, schema, *_ in tables),
            hint="name the schema: ?options=-c%20search_path%3DSCHEMA in catalog.url",
        )
    if not tables:
        return None
    oid, kind, schema, owner, schema_owner, found = tables[0]
    columns = {
        name: Column(type_name, not_null, sql.Identifier(of or "", collation or ""), same_bytes)
        for name, type_name, not_null, of, collation, same_bytes in conn.rows(
            "table_columns", {"table": oid}
        )
    }
    return Table(oid, kind, schema, owner, schema_owner, found, columns)


def verify_schema(conn: Connection, target: str, command: str = "run") -> list[str]:
    """Checks that all that a command relies on exists, and that this session may use it.

    Returns:
        Warnings, one line each.

    Raises:
        CatalogRefused: There is a problem. The error names the first one and its remedy.
    """
    with translated("show its schema"):
        table = existing_table(conn, target)
        if absent := [name for name in our_columns(target) if name not in table.columns]:
            raise CatalogRefused(f"the table blobs lacks {', '.join(absent)}", hint=INIT_DB)
        unused = LATER_TABLES - privileges.tables(command)
        if not conn.part.whole:
            unused -= {"checks.prefixes", "runs.prefixes"}
        if absent := sorted(OWN_TABLES - unused - own_tables(conn)):
            raise CatalogRefused(f"the schema ntt_backup lacks {', '.join(absent)}", hint=INIT_DB)
        verify_rights(conn, target, command)
        version, _ = own_version(conn)
        if version < SCHEMA_VERSION:
            raise CatalogRefused(
                f"the schema ntt_backup is of the old version {version}", hint=INIT_DB
            )
        check_one_table(conn)
        indexes = read_indexes(conn, target)
        if not any(index.valid and index.form for index in indexes):
            raise CatalogRefused(
                "the table blobs has no usable index of what is pending",
                detail="" if all(index.valid for index in indexes) else "one is unfinished",
                hint=INIT_DB,
            )
        return warnings(conn, table)


def verify_rights(conn: Connection, target: str, command: str) -> None:
    """Raises CatalogRefused for all rights that are lacking, CatalogUnavailable for a standby."""
    with translated("show its privileges"):
        if lacks := privileges.lacking(conn, target, [command]):
            raise CatalogRefused(
                f"{conn.info.user} may not do what `{command}` does",
                detail=f"it lacks {', '.join(map(str, lacks))}",
                hint=PRINT_SQL
                if command in privileges.EVERY_DAY
                else f"let who owns blobs grant that to {conn.info.user}",
            )
        if privileges.writes(command):
            privileges.require_writing(conn)


def existing_table(conn: Connection, target: str) -> Table:
    """Returns the table that the search path finds, checked. Raises CatalogRefused."""
    table = find_table(conn)
    if table is None or not table.found:
        raise CatalogRefused(
            "the catalog has no table blobs", hint=f"{INIT_DB}, or correct catalog.url"
        )
    check_table(conn, table, target)
    return table


def check_table(conn: Connection, table: Table, target: str) -> None:
    """Raises CatalogRefused where the table is of a kind that adding columns cannot mend."""
    if table.kind not in ("r", "p"):
        elsewhere = conn.rows("tables_elsewhere")
        raise CatalogRefused(
            f"blobs is {_KINDS.get(table.kind, 'something else')}, not a table",
            hint=f"the search path must find the table: {search_path(conn, elsewhere[0][0])}"
            if elsewhere
            else "catalog.url (NTT_DB_URL) must name the database that has the table",
        )
    blobid = table.columns.get("blobid")
    if blobid is None:
        raise CatalogRefused("the table blobs has no column blobid", hint="correct catalog.url")
    if blobid.type not in ("text", "character varying"):
        mend = {"bytea": "mend_blobid_bytea", "uuid": "mend_blobid_uuid"}
        raise CatalogRefused(
            f"blobs.blobid is of type {blobid.type}",
            detail="it must be text" + (_form_of_bytea(conn) if blobid.type == "bytea" else ""),
            hint=shown(mend.get(blobid.type, "mend_blobid_other")),
        )
    ranges = bounds(prefix_ranges())
    ascend = conn.rows("bounds_ascend", ranges, collation=blobid.collation)
    if not (ascend[0][0] and blobid.deterministic):
        raise CatalogRefused(
            "the collation of blobs.blobid does not suit hex digits",
            detail="it does not sort 00 to ff in order, or takes different text for equal",
            hint=shown("mend_collation"),
        )
    for name, wanted in our_columns(target).items():
        column = table.columns.get(name)
        if column and column.type not in _ACCEPTED[wanted]:
            raise CatalogRefused(
                f"blobs.{name} is of type {column.type}",
                detail=f"it must be {wanted}",
                hint=shown("mend_column_type", column=sql.Identifier(name), type=sql.SQL(wanted)),
            )


def _form_of_bytea(conn: Connection) -> str:
    """Returns what the binary blobids hold, as the end of a sentence; "" if that is not known."""
    # This session may not be one that reads tables: see `connect`.
    if code_of_others(conn):
        return ""
    try:
        ((count, digits),) = conn.rows("form_of_bytea")
    except errors.InsufficientPrivilege:
        return ""
    if not count:
        return ""
    form = "hex digits in some rows, raw bytes in others"
    if digits in (0, count):
        form = "hex digits in ASCII" if digits else "raw bytes"
    return f"; in the first {many(count, 'row')} it holds {form}, and the SQL is for both"


def own_tables(conn: Connection) -> frozenset[str]:
    """Returns those of our own tables that exist, and their columns as `table.column`."""
    return frozenset(name for (name,) in conn.rows("own_tables"))


def own_version(conn: Connection) -> tuple[int, str]:
    """Returns our schema's version (0: none) and its table's schema. Raises CatalogRefused."""
    rows = conn.rows("schema_version")
    version, blobs_schema = rows[0] if rows else (0, "")
    if version > SCHEMA_VERSION:
        raise CatalogRefused(
            f"the schema ntt_backup is of version {version}, this program knows {SCHEMA_VERSION}",
            hint="upgrade ntt_backup on this host",
        )
    return version, blobs_schema


def warnings(conn: Connection, table: Table) -> list[str]:
    """Returns what works and may deserve a change, a line each, with the SQL where there is one."""
    found = []
    if not conn.rows("blobid_unique")[0][0]:
        found.append(
            f"blobs.blobid has no unique index, marking blobs is slow: {shown('mend_unique')}"
        )
    if not table.columns["blobid"].not_null:
        found.append("blobs.blobid may be NULL; such rows are never sent")
    if conn.rows("row_security")[0][0]:
        user = conn.info.user
        found.append(
            f"row-level security applies to {user}: rows that its policies hide are never sent."
            f" As a superuser: {shown('mend_row_security', user=sql.Identifier(user))}"
        )
    largest = conn.rows("largest_size")[0][0]
    if largest < _LARGEST_SIZE:
        mend = {"column": sql.Identifier("size"), "type": sql.SQL("bigint")}
        found.append(
            f"blobs.size is of type {table.columns['size'].type} and holds no more than {largest};"
            " larger blobs are recorded without their size. This rewrites the table, which nobody"
            f" can read or write meanwhile: {shown('mend_column_type', **mend)}"
        )
    return found
