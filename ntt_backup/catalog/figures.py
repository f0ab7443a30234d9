"""Figures about the catalog: exact where someone asks and waits, estimated where nobody would.

Counting 42 million rows takes minutes on a cold cache. `status` may take them; the start of a run
may not, so there is a count of one range, to be added up in small steps, and an estimate within a
time.

Called by `cli` (`status`, `run --dry-run`), `preflight` (space), `runbook` (progress) and `dump`
(whether anything was ever copied).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import errors, sql

from ntt_backup.catalog.db import Connection, configure, translated
from ntt_backup.catalog.pending import Cursor, bounds, read_parts, reading, walk_indexes
from ntt_backup.catalog.queries import statement
from ntt_backup.model import Blob, BlobRange
from ntt_backup.planner import RANGES, prefix_ranges

_EVERYTHING = BlobRange(-1, "", None)
_PAGE = 1000
_SAMPLE_STEP = 37  # odd, so that its multiples modulo 256 visit every range once


@dataclass(frozen=True, slots=True)
class Totals:
    """The catalog by state. Bytes are of blobs with a known size; unsized are pending without one.

    without_blobid: rows whose blobid is NULL; they are never sent, and are in no other figure.
    failed_by_reason: 'unknown' counts what another program marked as failed. pending_by_reason:
    what is pending because a check did not find it on the remote, or not right.
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


@dataclass(frozen=True, slots=True)
class Estimate:
    """How much is pending: blobs, their known bytes, and unsized ones among them.

    exact: everything was read. Else it is scaled up from as many of the 256 ranges as `sampled`
    says.
    """

    blobs: int
    bytes: int
    unsized: int
    sampled: int

    @property
    def exact(self) -> bool:
        return self.sampled == RANGES


def status(conn: Connection, target: str) -> Totals:
    """Exact figures, as of one moment. Reads the whole table."""
    with translated(conn, "count its blobs"), conn.transaction():
        conn.execute(statement("one_snapshot"))
        parts = read_parts(conn, target)
        totals = conn.execute(statement("totals", **parts)).fetchall()[0]
        reasons: list[dict[str, int]] = [
            dict(conn.execute(statement(name, **parts), {"target": target}).fetchall())
            for name in ("failed_by_reason", "pending_by_reason")
        ]
    figures = (*totals, *reasons)
    return Totals(*figures)


def pending_in(conn: Connection, target: str, blob_range: BlobRange) -> int:
    """How many blobs of one range are pending."""
    with translated(conn, "count pending blobs"), conn.transaction():
        walk_indexes(conn, local=True)
        parts = read_parts(conn, target)
        counts = conn.execute(
            statement("pending_in_ranges", **parts), bounds([blob_range])
        ).fetchall()
    return int(counts[0][0])


def any_copied(conn: Connection, target: str) -> bool:
    """Whether anything was ever copied to the target. Reads the table up to the first such row; all
    of it only where there is none.
    """
    with translated(conn, "look for copied blobs"):
        query = statement("any_copied", **read_parts(conn, target))
        return conn.execute(query).fetchone() is not None


def pending_bytes_estimate(conn: Connection, target: str, timeout_ms: int) -> Estimate | None:
    """How much is pending, in about twice timeout_ms; None if not even one range was read by then.

    First an exact count is tried. If that takes longer than timeout_ms, whole ranges are read for
    as long again, spread over the space of blobids: hashes fall evenly, so a few ranges stand for
    all.
    """
    with translated(conn, "estimate what is pending"):
        parts = read_parts(conn, target)
        exact = _within(conn, timeout_ms, statement("pending_total", **parts), {})
        ranges = prefix_ranges()
        if exact is not None:
            return _estimate(exact, len(ranges))
        query = statement("pending_in_ranges", **parts)
        deadline = time.monotonic() + timeout_ms / 1000
        seen: list[tuple[Any, ...]] = []
        for nth in range(1, len(ranges) + 1):
            one = ranges[nth * _SAMPLE_STEP % len(ranges)]
            left = int((deadline - time.monotonic()) * 1000)
            counts = _within(conn, left, query, bounds([one]), walk=True)
            if counts is None:
                break
            seen.append(counts)
    if not seen:
        return None
    sums = [sum(column) * len(ranges) // len(seen) for column in zip(*seen, strict=True)]
    return _estimate(sums, len(seen))


def _estimate(counts: Sequence[int], sampled: int) -> Estimate:
    blobs, size, unsized = counts
    return Estimate(blobs, size, unsized, sampled)


def _within(
    conn: Connection,
    timeout_ms: int,
    query: sql.Composed,
    values: dict[str, object],
    *,
    walk: bool = False,
) -> tuple[Any, ...] | None:
    """The query's one row, or None if it took too long."""
    if timeout_ms <= 0:
        return None  # to the server 0 means no limit
    try:
        with conn.transaction():
            if walk:
                walk_indexes(conn, local=True)
            configure(conn, "statement_timeout", timeout_ms, local=True)
            return conn.execute(query, values).fetchall()[0]
    except errors.QueryCanceled:
        return None


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
