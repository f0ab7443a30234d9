"""The steps of `init-db` are written as scripts for psql, one for each who must run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from psycopg import sql

from ntt_backup.catalog.queries import shown
from ntt_backup.format import printable


class Who(StrEnum):
    """Who must run a script."""

    DBA = "dba"
    OWNER = "owner"
    OPERATOR = "operator"


class Step(NamedTuple):
    """One thing that is missing. needed: `run` needs it. unhurried: it may wait for its locks.
    by_hand: `init-db` leaves it out.
    """

    who: Who
    text: str
    statements: tuple[str, ...]
    needed: bool = True
    unhurried: bool = False
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """All steps, and what the three are called."""

    steps: Sequence[Step]
    names: Mapping[Who, str]
    database: str

    @property
    def needed(self) -> bool:
        return any(step.needed for step in self.steps)

    def __str__(self) -> str:
        """Says in one line who has to do what."""
        ordered = sorted(self.steps, key=lambda step: list(Who).index(step.who))
        return "; ".join(
            f"{who} ({self.names[who]}): {', '.join(step.text for step in group)}"
            for who, group in groupby(ordered, lambda step: step.who)
        )

    def script(self, only: Who | None = None) -> str:
        """Returns the script of one, or those of all, for psql."""
        return "\n".join(self._script(who) for who in Who if only in (None, who))

    def _script(self, who: Who) -> str:
        steps = [step for step in self.steps if step.who is who]
        # A name may hold a line end, and the rest of it would be a command.
        head = printable(f"-- {who}: {self.names[who]}")
        if not steps:
            return f"{head}: nothing to do\n"
        lines = [f"{head}. For psql; may be run again.", "\\set ON_ERROR_STOP on"]
        lines.append(f"\\connect {sql.Identifier(self.database).as_string(None)}")
        lines.append(shown("set_search_path"))
        for step in steps:
            lines += ["", printable(f"-- {step.text}")]
            lines.append(shown("unhurried" if step.unhurried else "brief_lock"))
            lines += step.statements
        return "\n".join([*lines, ""])
