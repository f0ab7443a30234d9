"""Which copies are proved: a mark of another program is a testimony, and proves nothing.

A table may have columns for a target that another program has marked, and dates of its checks. From
the first contact with a target on, whoever sets a date is believed; an earlier date, and none, is
no proof. Rows that we mark have the date of their receipt.

Counting blobs by the number of their proved copies reads each row: totals by target do not say
which blobs lack two copies. An index of the dates would make each mark dearer, and a table that
marks keep would be wrong once another program changes a row. So a count of a large table reads all
of it, and is kept with its time; a run that watches renews it (`policy.every`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from psycopg import errors, sql

from ntt_backup.catalog.connection import Connection, configure, translated
from ntt_backup.catalog.history import CheckRun
from ntt_backup.catalog.pending import columns, quick_rows, rows_about
from ntt_backup.catalog.statements import fragment
from ntt_backup.formatting import many

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
    parts, about = columns(target), rows_about(conn)
    # The first contact is with all marks.
    values = {"met_at": met_at, "all": met_at == "infinity"}
    if exact:
        return int(conn.rows("unproved", values, **parts)[0][0]), False
    if about <= _FEW and (rows := quick_rows(conn, _MILLISECONDS, "unproved", values, **parts)):
        return int(rows[0][0]), False
    sample = {**values, "percent": 100 * _SAMPLE / max(about, _SAMPLE)}
    rows = quick_rows(conn, _MILLISECONDS, "unproved_sample", sample, **parts)
    seen, found = rows[0] if rows else (0, 0)
    return int(found * about / seen) if seen else 0, True


# --- what the policy asks for ---------------------------------------------------------------------

COPY_STATES: Final = ("none", "unproved", "old", "proved")
NO_COPY: Final = 0
_PROVED: Final = len(COPY_STATES) - 1
_QUICK_ROWS: Final = 500_000
_QUICK_MILLISECONDS: Final = 1200
_A_DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Kind:
    """Blobs whose copies are in the same states.

    Attributes:
        blobs: The number of blobs.
        states: The state of the copy on each target, as an index of `COPY_STATES`.
        first: The smallest blobid of these blobs.
    """

    blobs: int
    states: tuple[int, ...]
    first: str

    @property
    def proved(self) -> int:
        """Returns the number of proved copies of each of these blobs."""
        return self.states.count(_PROVED)


@dataclass(frozen=True, slots=True)
class ProofCount:
    """All blobs by the states of their copies, at one moment.

    Attributes:
        targets: The names of the targets.
        proved_s: The seconds for which a proof is good.
        counted_at: The moment.
        kinds: The blobs, the most first.
    """

    targets: tuple[str, ...]
    proved_s: float
    counted_at: datetime
    kinds: tuple[Kind, ...]

    @property
    def blobs(self) -> int:
        """Returns the number of all blobs."""
        return sum(one.blobs for one in self.kinds)

    def short(self, copies: int) -> list[Kind]:
        """Returns the blobs that have fewer proved copies."""
        return [one for one in self.kinds if one.proved < copies]

    def broken(self, copies: int, contact: Contact | None) -> bool:
        """Returns whether blobs have fewer proved copies that no copying alone will give them.

        The proofs of marks that were met within a day take their time.

        Args:
            copies: The number of proved copies that each blob has to have.
            contact: The first contact with a target; None if that is not known.
        """
        met_at = contact.met_at if contact is not None else None
        if met_at is not None and self.counted_at - met_at < _A_DAY:
            return False
        return any(NO_COPY not in one.states for one in self.short(copies))

    def by_proofs(self) -> list[int]:
        """Returns the numbers of blobs with 0, 1, 2 ... proved copies."""
        counts = [0] * (len(self.targets) + 1)
        for one in self.kinds:
            counts[one.proved] += one.blobs
        return counts

    def of_target(self, target: str) -> dict[str, int]:
        """Returns the number of copies on a target by state."""
        at, counts = self.targets.index(target), dict.fromkeys(COPY_STATES, 0)
        for one in self.kinds:
            counts[COPY_STATES[one.states[at]]] += one.blobs
        return counts


def count_proofs(
    conn: Connection,
    targets: Sequence[str],
    proved_s: float,
    *,
    renew: bool = False,
    old_s: float = math.inf,
) -> ProofCount:
    """Returns the blobs by the states of their copies.

    A small table is counted. For a large one that means to read all of it, so the last count is
    returned, if there is one.

    Args:
        conn: The session.
        targets: The names of all targets.
        proved_s: The seconds for which a proof is good.
        renew: Whether all is counted now, however long that takes.
        old_s: The age in seconds of a last count that is renewed.

    Raises:
        CatalogError: The catalog cannot be read.
    """
    found = None
    with translated("count proved copies"):
        if not renew and rows_about(conn) <= _QUICK_ROWS:
            with suppress(errors.QueryCanceled):
                found = _count_now(conn, targets, proved_s, _QUICK_MILLISECONDS)
    if found is None:
        kept = None if renew else kept_count(conn, targets, proved_s)
        if kept is not None and (datetime.now(UTC) - kept.counted_at).total_seconds() < old_s:
            return kept
    with translated("count proved copies"):
        found = found or _count_now(conn, targets, proved_s, 0)
        values = {
            **_about(conn, targets, proved_s),
            "counted_at": found.counted_at,
            "kinds": [_encoded(one.states) for one in found.kinds],
            "blobs": [one.blobs for one in found.kinds],
            "firsts": [one.first for one in found.kinds],
        }
        with suppress(*_UNTOLD), conn.transaction():
            conn.rows("keep_counts", values)
    return found


def kept_count(conn: Connection, targets: Sequence[str], proved_s: float) -> ProofCount | None:
    """Returns the last count; None where there is none."""
    rows: list[tuple[Any, ...]] = []
    with translated("read the count of proved copies"), suppress(*_UNTOLD), conn.transaction():
        rows = conn.rows("kept_counts", _about(conn, targets, proved_s))
    if not rows:
        return None
    kinds = [Kind(blobs, _decoded(kind, len(targets)), first) for _, kind, blobs, first in rows]
    return _result(targets, proved_s, rows[0][0], kinds)


def _about(conn: Connection, targets: Sequence[str], proved_s: float) -> dict[str, Any]:
    """Returns the key of the counts. Each part of the blobs is counted by itself."""
    return {"targets": f"{','.join(targets)} {conn.part}".rstrip(), "proved_s": proved_s}


def _count_now(
    conn: Connection, targets: Sequence[str], proved_s: float, milliseconds: int
) -> ProofCount:
    """Counts all blobs; QueryCanceled where that takes longer. milliseconds: 0 for no limit."""
    columns_of_blobs = {name for (name,) in conn.rows("columns_of_blobs")}
    # Of a target that init-db has not met no copy is known.
    present = [
        target
        for target in targets
        if {f"{target}_copied", f"{target}_last_checked"} <= columns_of_blobs
    ]
    contacts = {target: first_contact(conn, target).met_at for target in present}
    with conn.transaction():
        configure(conn, "statement_timeout", milliseconds, local=True)
        ((now,),) = conn.rows("time_of_count")
        states: list[sql.Composable] = []
        for target in present:
            since = now - timedelta(seconds=proved_s)
            met_at = contacts[target] or datetime.min.replace(tzinfo=UTC)
            limits = {"since": max(since, met_at), "met_at": met_at, "ahead": now + _A_DAY}
            values = {name: sql.Literal(limit) for name, limit in limits.items()}
            states.append(fragment("state_of_copy", **columns(target), **values))
        numbers = ", ".join(str(3 + at) for at in range(2 * len(states)))
        rows = conn.rows(
            "count_proofs", states=sql.SQL(", ").join(states), columns=sql.SQL(numbers)
        )
    found = []
    for blobs, first, *bits in rows:
        known = {one: 2 * bits[2 * at] + bits[2 * at + 1] for at, one in enumerate(present)}
        found.append(Kind(blobs, tuple(known.get(one, NO_COPY) for one in targets), first))
    return _result(targets, proved_s, now, found)


def _result(
    targets: Sequence[str], proved_s: float, now: datetime, kinds: Iterable[Kind]
) -> ProofCount:
    ordered = sorted(kinds, key=lambda one: (-one.blobs, one.states))
    return ProofCount(tuple(targets), proved_s, now, tuple(ordered))


def _decoded(kind: int, targets: int) -> tuple[int, ...]:
    return tuple(kind >> 2 * at & 3 for at in range(targets))


def _encoded(states: Sequence[int]) -> int:
    return sum(state << 2 * at for at, state in enumerate(states))
