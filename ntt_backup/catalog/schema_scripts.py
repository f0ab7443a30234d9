"""What is missing of the catalog, as SQL: one script for each who must run it.

    dba       a superuser, or who owns the database: our schema, and what others own
    owner     who owns `blobs`: its columns, its index, its privileges
    operator  who backs up: what it may do itself; as a rule nothing

They are run in this order, and each may be run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from psycopg import sql

from ntt_backup.format import printable


class Who(StrEnum):
    """Who must run a script."""

    DBA = "dba"
    OWNER = "owner"
    OPERATOR = "operator"


class Part(NamedTuple):
    """One thing that is missing. needed: without it `run` does not work."""

    who: Who
    text: str
    statements: tuple[str, ...]
    needed: bool = True


@dataclass(frozen=True, slots=True)
class Missing:
    """All that is missing, and what the three are called here."""

    parts: Sequence[Part]
    names: Mapping[Who, str]
    database: str

    @property
    def needed(self) -> bool:
        return any(part.needed for part in self.parts)

    def __str__(self) -> str:
        """Who has to do what, in one line."""
        ordered = sorted(self.parts, key=lambda part: list(Who).index(part.who))
        return "; ".join(
            f"{who} ({self.names[who]}): {', '.join(part.text for part in group)}"
            for who, group in groupby(ordered, lambda part: part.who)
        )

    def script(self, only: Who | None = None) -> str:
        """The script of one, or those of all, for psql."""
        return "\n".join(self._script(who) for who in Who if only in (None, who))

    def _script(self, who: Who) -> str:
        parts = [part for part in self.parts if part.who is who]
        # A name may hold a line end, and the rest of it would be a command.
        head = printable(f"-- {who}: {self.names[who]}")
        if not parts:
            return f"{head}: nothing to do\n"
        lines = [f"{head}. For psql; may be run again.", "\\set ON_ERROR_STOP on"]
        lines.append(f"\\connect {sql.Identifier(self.database).as_string(None)}")
        for part in parts:
            lines += ["", printable(f"-- {part.text}"), *part.statements]
        return "\n".join([*lines, ""])
