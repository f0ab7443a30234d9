"""Figures about the catalog: exact where someone asks and waits, estimated where nobody would.

Counting 42 million rows takes minutes on a cold cache. `status --exact` may; a run may not, so
there is an estimate within a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from psycopg import errors

from ntt_backup.catalog.connection import Connection, configure, translated
from ntt_backup.catalog.pending import Cursor, Parts, bounds, read_parts, reading, walk_indexes
from ntt_backup.catalog.queries import statement
from ntt_backup.catalog.ranges import RANGES, prefix_ranges
from ntt_backup.model import Blob, BlobRange

_EVERYTHING = BlobRange(-1, "", None)
_PAGE = 1000
_SAMPLE_STEP = 37  # odd, so that its multiples modulo 256 visit every range once
_SAMPLE_RANGES = 8  # read by one statement
_SAMPLE_BLOBS = 40  # of each range; those of all ranges tell their number within about 1 %
_FEWEST_RANGES = 16


@dataclass(frozen=True, slots=True)
class Totals:
    """The catalog by state. Bytes are of blobs with a known size; unsized are pending without one.

    without_blobid: rows whose blobid is NULL; they are never sent, and are in no other figure.
    failed_by_reason: 'unknown' counts what another program marked as failed. pending_by_reason:
    what is pending because a check did not find it on the remote, or not right. estimated: which
    of these figures were not counted.
    """

    pending: int
    copied: int
    failed: int
    pending_bytes: int
    copied_bytes: int
    failed_bytes: int
    unsized: int
    without_blobid: int
    failed_by_reason: Mapping[str, int]
    pending_by_reason: Mapping[str, int]
    estimated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PendingEstimate:
    """How much is pending: blobs, their known bytes, and unsized ones among them.

    exact: everything was counted. Else the figures are right within a few per cent where the
    database was quick, and as good as its planner's statistics where it was not.
    """

    blobs: int
    bytes: int
    unsized: int
    exact: bool


def status(conn: Connection, target: str) -> Totals:
    """Exact figures, as of one moment. Reads the whole table."""
    with translated(conn, "count its blobs"):
        return count(conn, target)


def count(conn: Connection, target: str, milliseconds: int | None = None) -> Totals:
    """The same; psycopg's QueryCanceled where a query takes longer than so many milliseconds."""
    with conn.transaction():
        conn.execute(statement("one_snapshot"))
        if milliseconds is not None:
            configure(conn, "statement_timeout", milliseconds, local=True)
        parts = read_parts(conn, target)
        totals = conn.execute(statement("totals", **parts)).fetchall()[0]
        reasons: list[dict[str, int]] = [
            dict(conn.execute(statement(name, **parts), {"target": target}).fetchall())
            for name in ("failed_by_reason", "pending_by_reason")
        ]
    figures = (*totals, *reasons)
    return Totals(*figures)


def any_known(conn: Connection) -> bool:
    """Whether the catalog has a row at all. Where it has many, the first that is met tells."""
    with translated(conn, "look for blobs"):
        return conn.execute(statement("any_known")).fetchone() is not None


def any_copied(conn: Connection, target: str) -> bool:
    """Whether anything was ever copied to the target. Reads the table up to the first such row; all
    of it only where there is none.
    """
    with translated(conn, "look for copied blobs"):
        query = statement("any_copied", **read_parts(conn, target))
        return conn.execute(query).fetchone() is not None


def pending_estimate(conn: Connection, target: str, milliseconds: int) -> PendingEstimate:
    """How much is pending, in about so many milliseconds, whatever the size of the table.

    The first half of the time is for an exact count. If that does not suffice, the first blobs of
    each range are read: hashes lie evenly, so how close they lie tells how many follow. If even
    that takes too long, the planner is asked, which reads nothing. A table that is locked raises
    CatalogUnavailable.
    """
    deadline = time.monotonic() + milliseconds / 1000
    with translated(conn, "estimate what is pending"):
        parts = read_parts(conn, target)
        with suppress(errors.QueryCanceled), conn.transaction():
            walk_indexes(conn, local=True)
            _limit(conn, deadline - milliseconds / 2000)
            count, known, unsized = conn.execute(statement("pending_total", **parts)).fetchall()[0]
            return PendingEstimate(count, known, unsized, exact=True)
        return _sampled(conn, parts, deadline) or _planned(conn, parts, milliseconds)


def _sampled(conn: Connection, parts: Parts, deadline: float) -> PendingEstimate | None:
    """Scaled up from the first blobs of as many ranges as time allows; None where those are few."""
    ranges = [prefix_ranges()[nth * _SAMPLE_STEP % RANGES] for nth in range(RANGES)]
    query = statement("pending_starts", **parts)
    read = blobs = found = size = unsized = 0
    with suppress(errors.QueryCanceled), conn.transaction():
        walk_indexes(conn, local=True)
        for start in range(0, RANGES, _SAMPLE_RANGES):
            if time.monotonic() >= deadline:
                break
            some = ranges[start : start + _SAMPLE_RANGES]
            _limit(conn, deadline)
            rows = conn.execute(query, {**bounds(some), "limit": _SAMPLE_BLOBS}).fetchall()
            for one, (count, first, last, known, without_size) in zip(some, rows, strict=True):
                blobs += _followed(one, count, first, last)
                found, size, unsized = found + count, size + known, unsized + without_size
            read += len(some)
    if read < _FEWEST_RANGES:
        return None
    blobs = blobs * RANGES // read
    share = blobs / max(found, 1)
    return PendingEstimate(blobs, int(size * share), int(unsized * share), exact=False)


def _followed(one: BlobRange, count: int, first: str, last: str) -> int:
    """How many blobs a range has, by the first of them, which reach from first to last."""
    start, span = _place(first), _place(last) - _place(first)
    if count < _SAMPLE_BLOBS or span <= 0:
        return count
    end = 1.0 if one.hi is None else _place(one.hi)
    return max(count, int((count - 2) / span * (end - start)))


def _place(blobid: str | None) -> float:
    """Where a blobid lies among all: 0 to 1. What is no hex lies at the end."""
    try:
        return int((blobid or "")[:12].ljust(12, "0"), 16) / 16**12
    except ValueError:
        return 1.0


def _planned(conn: Connection, parts: Parts, milliseconds: int) -> PendingEstimate:
    """What the planner expects. Only a lock can make it wait."""
    with conn.transaction():
        configure(conn, "lock_timeout", max(milliseconds, 1), local=True)
        plan = conn.execute(statement("pending_plan", **parts)).fetchall()[0][0]
        average, unsized = conn.execute(statement("size_statistics")).fetchall()[0]
    blobs = int(plan[0]["Plan"]["Plan Rows"])
    known = int(blobs * (1 - unsized) * average)
    return PendingEstimate(blobs, known, int(blobs * unsized), exact=False)


def _limit(conn: Connection, deadline: float) -> None:
    """Have the next statements of the transaction end by then, each with QueryCanceled."""
    left = int((deadline - time.monotonic()) * 1000)
    configure(conn, "statement_timeout", max(left, 1), local=True)  # 0 would be no limit.


def iter_pending(conn: Connection, target: str) -> Iterator[Blob]:
    """Every pending blob, in the catalog's order, in constant memory.

    Read page by page rather than through a server-side cursor: that would hold a transaction open
    for as long as the reader takes, and keep vacuum from a busy table.
    """
    with translated(conn, "list pending blobs"):
        parts = read_parts(conn, target)
    cursor: Cursor | None = Cursor(_EVERYTHING)
    while cursor:
        with translated(conn, "list pending blobs"), conn.transaction():
            walk_indexes(conn, local=True)
            values = {**reading([cursor]), "limit": _PAGE}
            rows = conn.execute(statement("pending_blobs", **parts), values).fetchall()
        yield from (Blob(blobid, size) for _, blobid, size in rows)
        cursor = Cursor(_EVERYTHING, rows[-1][1]) if len(rows) == _PAGE else None
