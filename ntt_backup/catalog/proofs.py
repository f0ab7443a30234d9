"""Which copies are proved: a mark of another program is a testimony, and proves nothing.

A table may have columns for a target that another program has marked, and dates of its checks. From
the first contact with a target on, whoever sets a date is believed; an earlier date, and none, is
no proof. Rows that we mark have the date of their receipt.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from psycopg import errors

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.history import CheckRun
from ntt_backup.catalog.pending import columns, quick_rows, rows_about
from ntt_backup.format import many

_MILLISECONDS: Final = 400
# What compares the marks with the target.
_COMPARE: Final = ("reconcile", "verify")
RECONCILE: Final = "`ntt-backup-remote reconcile`, then `ntt-backup-remote verify`"
_FEW: Final = 300_000  # Rows that are counted in that time.
_SAMPLE: Final = 20_000  # Rows, as they lie in a few hundred pages of the table.
_UNTOLD: Final = (
    errors.UndefinedTable,
    errors.InsufficientPrivilege,
    errors.ReadOnlySqlTransaction,
)


@dataclass(frozen=True, slots=True)
class Contact:
    """The first contact with a target.

    Attributes:
        met_at: When the marks of the target were met; None if that could not be noted.
        marked: The number of rows that were marked as copied then, by another program.
    """

    met_at: datetime | None
    marked: int

    def warning(self, checks: Sequence[CheckRun]) -> str:
        """Returns what to do about the marks of another program; "" where nothing is left.

        checks: The last checks of the target.
        """
        if not self.marked or any(
            one.command in _COMPARE and (self.met_at is None or one.ended_at >= self.met_at)
            for one in checks
        ):
            return ""
        return f"{many(self.marked, 'row is', 'rows are')} marked by another program"


@dataclass(frozen=True, slots=True)
class Unproved:
    """The copied blobs that nobody has checked since the first contact with the target.

    Attributes:
        blobs: The number of blobs.
        estimated: Whether that is estimated by a sample.
        foreign: The number of rows that another program had marked before the first contact.
        met_at: When the first contact was; None if that is not noted.
    """

    blobs: int
    estimated: bool
    foreign: int
    met_at: datetime | None


def first_contact(conn: Connection, target: str, *, exact: bool = False) -> Contact:
    """Returns the first contact with a target, which is noted where this is the first.

    A target with a history of ours was met when that begins, and its marks are taken for ours.

    Args:
        conn: The session.
        target: The name of the target.
        exact: Whether the marked rows are counted, however long that takes.

    Raises:
        CatalogError: The catalog cannot be read.
    """
    with translated("tell its first contact with the target"):
        with suppress(*_UNTOLD), conn.transaction():
            for row in conn.rows("contact", {"target": target}):
                return Contact(*row)
        try:
            with conn.transaction():
                ((since,),) = conn.rows("first_run", {"target": target})
        except _UNTOLD:
            return Contact(None, 0)
        marked = 0
        if since is None:
            # All that is marked now was marked by others.
            marked, _ = _count(conn, target, "infinity", exact=exact)
        with suppress(*_UNTOLD), conn.transaction():
            values = {"target": target, "met_at": since, "marked": marked}
            conn.rows("note_contact", values)
            return Contact(*conn.rows("contact", {"target": target})[0])
    return Contact(since, marked)


def unproved(conn: Connection, target: str, contact: Contact, *, exact: bool = False) -> Unproved:
    """Counts the copied blobs of a target that are not proved; estimates them in a large table."""
    with translated("count what was never checked"):
        blobs, estimated = _count(conn, target, contact.met_at, exact=exact)
    return Unproved(blobs, estimated, contact.marked, contact.met_at)


def _count(
    conn: Connection, target: str, met_at: datetime | str | None, *, exact: bool
) -> tuple[int, bool]:
    """Returns how many copied blobs are not proved, and whether that is an estimate."""
    parts, values, about = columns(target), {"met_at": met_at}, rows_about(conn)
    if exact:
        return int(conn.rows("unproved", values, **parts)[0][0]), False
    if about <= _FEW and (rows := quick_rows(conn, _MILLISECONDS, "unproved", values, **parts)):
        return int(rows[0][0]), False
    sample = {**values, "percent": 100 * _SAMPLE / max(about, _SAMPLE)}
    rows = quick_rows(conn, _MILLISECONDS, "unproved_sample", sample, **parts)
    seen, found = rows[0] if rows else (0, 0)
    return int(found * about / seen) if seen else 0, True
