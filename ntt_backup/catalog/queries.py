"""Every query by its name: the SQL lies in `sql/*.sql`, this module loads and completes it.

What differs from target to target are names of columns, written `{copied}` and filled in as quoted
identifiers; values are always parameters, `%(limit)s`. Each statement is sent with its name in a
comment, so that pg_stat_activity and the server's log tell which query they show.

The search path of a session is `pg_catalog, pg_temp`. With another schema in the path, whoever may
create a function there could make an overload that fits our arguments better than the server's own
function, and it would run with the rights of our role. So the table `blobs` is always written with
its schema: as `{blobs}`, or as `{blobs_name}` where a function takes the name as a text.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from psycopg import sql
from psycopg.abc import AdaptContext

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


_PARTS = {"blobs": _Blobs(as_text=False), "blobs_name": _Blobs(as_text=True)}


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
