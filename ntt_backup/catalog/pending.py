"""How "pending" is said for one target, so that PostgreSQL uses the index that is there.

A partial index serves only queries that repeat its predicate in the same form (see
sql/pending.sql), and the index of a live table is not ours to choose. So the catalog is asked for
its indexes, and every query is written in the form of the one found. Where none fits, queries are
correct and slow, `verify_schema` refuses, and `init_db` builds one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psycopg import sql

from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.queries import fragment, statement
from ntt_backup.model import BlobRange

Parts = Mapping[str, sql.Composable]

_OWN_FORM = "uncopied_is_false"
_FORMS = {
    frozenset({"c IS FALSE", "c IS NULL"}): _OWN_FORM,
    frozenset({"c = false", "c IS NULL"}): "uncopied_equals_false",
    frozenset({"c IS NOT TRUE"}): "uncopied_is_not_true",
    frozenset({"NOT c", "c IS NULL"}): "uncopied_negated",
}


@dataclass(frozen=True, slots=True)
class Index:
    """An index of `blobs`. valid: it may be used. form: the pending form it serves, or None."""

    name: str
    valid: bool
    form: str | None


def index_names(target: str) -> tuple[str, str]:
    """What our index is called, and what it is called where that name is taken by an unfit one."""
    return f"idx_blobs_{target}_pending", f"idx_blobs_{target}_pending_ntt"


def read_indexes(conn: Connection, target: str, table: int | None = None) -> list[Index]:
    """All indexes of the table (by its oid, or as the search path finds it), ours by name first."""
    names = index_names(target)
    indexes = [
        Index(name, valid, form_of(predicate, target) if ordered and predicate else None)
        for name, predicate, valid, ordered in conn.execute(statement("indexes"), {"table": table})
    ]
    return sorted(indexes, key=lambda index: (index.name not in names, index.name))


def form_of(predicate: str, target: str) -> str | None:
    """The pending form that the predicate is written in, as the server prints it; None for another.

    A closed list, since a form that is close but not the same would leave pending blobs out.
    """
    column = f"{target}_copied"
    terms = (term.strip(" ()") for term in predicate.split(" OR "))
    return _FORMS.get(frozenset(re.sub(rf"\b{column}\b", "c", term) for term in terms))


def columns(target: str) -> dict[str, sql.Composable]:
    """The target's columns as parts of a query."""
    return {
        "copied": sql.Identifier(f"{target}_copied"),
        "last_checked": sql.Identifier(f"{target}_last_checked"),
        "copy_failed": sql.Identifier(f"{target}_copy_failed"),
    }


def read_parts(conn: Connection, target: str) -> dict[str, sql.Composable]:
    """Columns and predicates (`uncopied`, `pending`) of the target, and `size`, as parts of a
    query.
    """
    usable = (index.form for index in read_indexes(conn, target) if index.valid and index.form)
    parts = columns(target)
    parts["uncopied"] = fragment(next(usable, _OWN_FORM), **parts)
    parts["pending"] = fragment("pending", **parts)
    parts["size"] = fragment("read_size")
    return parts


def walk_indexes(conn: Connection, *, local: bool = False) -> None:
    """Have PostgreSQL walk indexes in this session; with local in this transaction.

    Where bounds come out of a list, it can only guess how much lies between them: for a range
    without an end, a third of the table. To find a thousand blobs it would then read and sort
    millions.
    """
    conn.execute(statement("walk_indexes"), {"local": local})


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where reading a range goes on: after the blobid `past`, or at its beginning for None."""

    range: BlobRange
    past: str | None = None


def bounds(ranges: Sequence[BlobRange]) -> dict[str, object]:
    """The values of a query that looks into ranges."""
    return {
        "indexes": [one.index for one in ranges],
        "los": [one.lo for one in ranges],
        "his": [one.hi for one in ranges],
    }


def reading(cursors: Sequence[Cursor]) -> dict[str, object]:
    """The values of a query that reads ranges on from their cursors."""
    return {
        **bounds([cursor.range for cursor in cursors]),
        "los": [c.range.lo if c.past is None else c.past for c in cursors],
        "pasts": [cursor.past for cursor in cursors],
    }
