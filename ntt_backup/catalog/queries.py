"""Every query by its name: the SQL lies in `sql/*.sql`, this module loads and completes it.

What differs from target to target are names of columns, written `{copied}` and filled in as quoted
identifiers; values are always parameters, `%(limit)s`. Each statement is sent with its name in a
comment, so that pg_stat_activity and the server's log tell which query they show.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from psycopg import sql

_HEADER = re.compile(r"^-- name: (\w+)\n((?:^--.*\n)+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Query:
    """One query as it stands in its file. description is its comment, text its SQL."""

    name: str
    description: str
    text: str


@cache
def load_all() -> dict[str, Query]:
    """Return all queries by their name. Raises ValueError where two have the same."""
    queries: dict[str, Query] = {}
    directory = resources.files(__package__) / "sql"
    for file in sorted(directory.iterdir(), key=lambda one: one.name):
        if file.name.endswith(".sql"):
            for query in parse(file.read_text(encoding="utf-8")):
                if query.name in queries:
                    raise ValueError(f"{file.name} repeats the name {query.name}")
                queries[query.name] = query
    return queries


def parse(text: str) -> list[Query]:
    """Return the queries of one file: `-- name: x`, a comment that describes it, the SQL."""
    _, *parts = _HEADER.split(text)
    return [
        Query(name, " ".join(comment.replace("--", " ").split()), body.strip().removesuffix(";"))
        for name, comment, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]


def statement(name: str, **parts: sql.Composable) -> sql.Composed:
    """Return the named query, ready to be executed, its `{...}` filled with parts."""
    return pasted(name, fragment(name, **parts))


def fragment(name: str, **parts: sql.Composable) -> sql.Composed:
    """Return the named piece of SQL, to be put into another query."""
    return sql.SQL(load_all()[name].text).format(**parts)


def pasted(name: str, query: sql.Composed | str) -> sql.Composed:
    """Return SQL, also a text that was `shown`, ready to be executed under a name."""
    composed = sql.Composed([sql.SQL(query)]) if isinstance(query, str) else query
    return sql.SQL("/* ntt_backup {} */ ").format(sql.SQL(name)) + composed


def shown(name: str, **parts: sql.Composable) -> str:
    """Return the named piece as text that an operator can paste into psql."""
    return fragment(name, **parts).as_string(None) + ";"
