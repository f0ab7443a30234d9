"""The named statements of `sql/`, and what is written into them.

In a statement `{blobs}` is the table of blobs, and `{mine}` a condition for the blobs that the
session is about. Both are written when a session executes the statement.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from psycopg import sql
from psycopg.abc import AdaptContext

from ntt_backup.model import ALL_BLOBS, Part

_HEADER = re.compile(r"^-- name: (\w+)\n(?:^--.*\n)+", re.MULTILINE)


class _Blobs(sql.Composable):
    """Writes the table `blobs` of the session that executes the query, with its schema.

    Without a session, in SQL that people read, the name stands without a schema.
    """

    def __init__(self, *, as_text: bool) -> None:
        super().__init__(as_text)

    def as_bytes(self, context: AdaptContext | None = None) -> bytes:
        schema = getattr(context and context.connection, "schema", None)
        name = sql.Identifier(*filter(None, [schema]), "blobs")
        if self._obj:
            return sql.Literal(name.as_string(context)).as_bytes(context)
        return name.as_bytes(context)


class _OfPart(sql.Composable):
    """Writes SQL that a function makes of the part of the session that executes the query."""

    def as_bytes(self, context: AdaptContext | None = None) -> bytes:
        text: str = self._obj(getattr(context and context.connection, "part", ALL_BLOBS))
        return text.encode()


def _mine(column: str) -> _OfPart:
    """Returns the condition that a column is in the part of the session."""

    def write(part: Part) -> str:
        if part.whole:
            return "true"
        bounds = ((f"{column} >= '{lo}'", hi and f"{column} < '{hi}'") for lo, hi in part.spans)
        return f"({' or '.join(' and '.join(filter(None, some)) for some in bounds)})"

    return _OfPart(write)


def _noted(text: str) -> _OfPart:
    """Returns SQL about the column `prefixes` of our tables; "" where a session has no part.

    A catalog may still lack the column, so no other session names it.
    """
    return _OfPart(lambda part: "" if part.whole else text.format(part))


_PARTS = {
    "blobs": _Blobs(as_text=False),
    "blobs_name": _Blobs(as_text=True),
    "mine": _mine("blobs.blobid"),
    "mine_listed": _mine("f.blobid"),
    "mine_packed": _mine('low collate "C"'),
    "and_of_part": _noted("and coalesce(to_jsonb(r) ->> 'prefixes', '') = '{}'"),
    "prefixes": _noted(", prefixes"),
    "its_prefixes": _noted(", '{}'"),
}


@cache
def load_all() -> dict[str, str]:
    """Returns the SQL of all queries by name. In a file each follows `-- name: x` and a comment."""
    queries = {}
    for file in (resources.files(__package__) / "sql").iterdir():
        if file.name.endswith(".sql"):
            _, *parts = _HEADER.split(file.read_text(encoding="utf-8"))
            for name, body in zip(parts[::2], parts[1::2], strict=True):
                queries[name] = body.strip().removesuffix(";")
    return queries


def statement(name: str, **parts: sql.Composable) -> sql.Composed:
    """Returns the named query, ready to be executed, its `{...}` filled with parts."""
    return pasted(name, fragment(name, **parts))


def fragment(name: str, **parts: sql.Composable) -> sql.Composed:
    """Returns the named piece of SQL, to be put into another query."""
    return sql.SQL(load_all()[name]).format(**_PARTS, **parts)


def pasted(name: str, query: sql.Composed | str) -> sql.Composed:
    """Returns SQL, also a text that was `shown`, ready to be executed under a name."""
    composed = sql.Composed([sql.SQL(query)]) if isinstance(query, str) else query
    return sql.SQL("/* ntt_backup {} */ ").format(sql.SQL(name)) + composed


def shown(name: str, **parts: sql.Composable) -> str:
    """Returns the named piece as text that an operator can paste into psql."""
    return fragment(name, **parts).as_string(None) + ";"
