"""The predicate "pending" of one target, in the form that lets PostgreSQL use the partial index.

A partial index serves only queries that repeat its predicate in the same form (see
sql/pending.sql), and the index of a live table is not ours to choose. So every query is written in
the form of the index that exists. Where none fits, `verify_schema` refuses, `init_db` builds one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from psycopg import errors, sql

from ntt_backup.catalog.connection import Connection, configure
from ntt_backup.catalog.statements import fragment
from ntt_backup.model import BlobRange

Parts = Mapping[str, sql.Composable]

_OWN_FORM = "uncopied_is_false"
_FORMS = {
    frozenset({"c IS FALSE", "c IS NULL"}): _OWN_FORM,
    frozenset({"c = false", "c IS NULL"}): "uncopied_equals_false",
    frozenset({"c IS NOT TRUE"}): "uncopied_is_not_true",
    frozenset({"NOT c", "c IS NULL"}): "uncopied_negated",
}


class Index(NamedTuple):
    """An index of `blobs`. valid: it may be used. form: the pending form it serves, or None."""

    name: str
    valid: bool
    form: str | None


def index_names(target: str) -> tuple[str, str]:
    """Returns the name of our index, and the name for it where an unfit index has the first."""
    return f"idx_blobs_{target}_pending", f"idx_blobs_{target}_pending_ntt"


def read_indexes(conn: Connection, target: str, table: int | None = None) -> list[Index]:
    """Returns all indexes of the table (None: the one that the search path finds), ours first."""
    names = index_names(target)
    indexes = [
        Index(name, valid, form_of(predicate, target) if ordered and predicate else None)
        for name, predicate, valid, ordered in conn.rows("indexes", {"table": table})
    ]
    return sorted(indexes, key=lambda index: (index.name not in names, index.name))


def form_of(predicate: str, target: str) -> str | None:
    """Returns the form of a predicate that the server prints; None for another predicate.

    A closed list, since a form that is close but not the same would leave pending blobs out.
    """
    column = f"{target}_copied"
    terms = (term.strip(" ()") for term in predicate.split(" OR "))
    return _FORMS.get(frozenset(re.sub(rf"\b{column}\b", "c", term) for term in terms))


def columns(target: str) -> dict[str, sql.Composable]:
    """Returns the target's columns, and `size`, as parts of a query."""
    return {
        "size": fragment("read_size"),
        "copied": sql.Identifier(f"{target}_copied"),
        "last_checked": sql.Identifier(f"{target}_last_checked"),
        "copy_failed": sql.Identifier(f"{target}_copy_failed"),
    }


def read_parts(conn: Connection, target: str) -> dict[str, sql.Composable]:
    """Returns `columns`, `uncopied` and `pending` as parts of a query."""
    usable = (index.form for index in read_indexes(conn, target) if index.valid and index.form)
    parts = columns(target)
    parts["uncopied"] = fragment(next(usable, _OWN_FORM), **parts)
    parts["pending"] = fragment("pending", **parts)
    return parts


def rows_about(conn: Connection, table: int | None = None) -> int:
    """Returns about how many rows the table has; None: the one that the search path finds."""
    return int(conn.rows("rows_about", {"table": table})[0][0])


def walk_indexes(conn: Connection, *, local: bool = False) -> None:
    """Has PostgreSQL walk indexes in this session; with local in this transaction.

    Where bounds come out of a list, it can only guess how much lies between them: for a range
    without an end, a third of the table. To find a thousand blobs it would then read and sort
    millions.
    """
    conn.rows("walk_indexes", {"local": local})


@contextmanager
def in_time(conn: Connection, milliseconds: int) -> Iterator[None]:
    """Makes a transaction whose statements walk indexes; one that takes longer ends the block."""
    with suppress(errors.QueryCanceled), conn.transaction():
        walk_indexes(conn, local=True)
        # 0 would be no limit.
        configure(conn, "statement_timeout", max(milliseconds, 1), local=True)
        yield


def quick_rows(
    conn: Connection,
    milliseconds: int,
    name: str,
    values: Mapping[str, object] | None = None,
    /,
    **parts: sql.Composable,
) -> list[tuple[Any, ...]] | None:
    """Returns the rows of a query; None where it is not `in_time`."""
    with in_time(conn, milliseconds):
        return conn.rows(name, values, **parts)
    return None


@dataclass(slots=True)
class Stretch:
    """The blobids in [lo, hi) of a range, or without `past`, which is lo. index: the range's."""

    index: int
    lo: str
    hi: str | None
    past: str | None = None


def bounds(some: Sequence[BlobRange | Stretch]) -> dict[str, object]:
    """Returns the values of a query that looks into ranges, or stretches of them."""
    return {
        "indexes": [one.index for one in some],
        "los": [one.lo for one in some],
        "his": [one.hi for one in some],
    }


def reading(some: Sequence[Stretch], limit: int, milliseconds: int) -> dict[str, object]:
    """Returns the values of `pending_blobs`."""
    pasts = [one.past for one in some]
    return {**bounds(some), "pasts": pasts, "limit": limit, "milliseconds": milliseconds}
