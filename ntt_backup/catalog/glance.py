"""A glance at a target shows what failed, and how much was proved, besides its figures.

Each takes a part of a second, whatever the size of the catalog; what takes longer is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.failures import FailedBlob
from ntt_backup.catalog.pending import read_parts, rows_about
from ntt_backup.catalog.queries import fragment
from ntt_backup.catalog.stats import quick_rows

_SAMPLE: Final = 20_000  # Rows, as they lie in a few hundred pages of the table.
_MILLISECONDS: Final = 500


@dataclass(frozen=True, slots=True)
class Proved:
    """When copied blobs were last found right on the remote: by a check, or by being copied. Of so
    many blobs, a sample, those that were in the last 7, 30 and 90 days, and those that ever were.
    """

    blobs: int
    week: int
    month: int
    quarter: int
    ever: int


def proved(conn: Connection, target: str) -> Proved | None:
    """Returns what some pages of the table tell, always the same ones; all of a small table. None
    where reading them takes too long.
    """
    with translated("look at when its blobs were checked"):
        parts = read_parts(conn, target)
        values = {"percent": 100 * _SAMPLE / max(rows_about(conn), _SAMPLE)}
        rows = quick_rows(conn, "proved", parts, values, _MILLISECONDS)
    return Proved(*rows[0]) if rows else None


def failure_examples(conn: Connection, target: str, each: int) -> list[FailedBlob]:
    """Returns of each reason the latest failures, so many, of the first ones of a long list; none
    where that takes too long.
    """
    with translated("read its list of failures"):
        parts, values = {"known_at": fragment("known_at")}, {"target": target, "each": each}
        rows = quick_rows(conn, "failure_examples", parts, values, _MILLISECONDS) or []
    return [FailedBlob(*row) for row in rows]
