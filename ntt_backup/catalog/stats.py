"""Figures about the catalog: exact ones in any time, or estimates within a bounded time.

Counting 42 million rows takes minutes on a cold cache. What cannot be counted within the time is
estimated: what is pending by the first blobs of each range, what is copied by the history of runs
and the size of the table. What failed is counted in our own list. Figures that can neither be
counted nor estimated in a part of a second are left out. All are about the session's part of the
blobs (`Connection.part`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg import errors

from ntt_backup.catalog.connection import Connection, configure, translated
from ntt_backup.catalog.failures import FailedBlob
from ntt_backup.catalog.pending import (
    Parts,
    bounds,
    quick_rows,
    read_parts,
    rows_about,
    walk_indexes,
)
from ntt_backup.catalog.range_locks import RANGES, position, prefix_ranges
from ntt_backup.catalog.statements import fragment
from ntt_backup.model import OF_CHECKS, BlobRange, PendingEstimate

_MILLISECONDS: Final = 400  # For all figures of `quick_totals`.
_ONE_QUERY: Final = _MILLISECONDS // 8
_GLANCE: Final = 500  # Milliseconds for `proved`, and for `failure_examples`.
_PROVED_SAMPLE: Final = 20_000  # Rows, as they lie in a few hundred pages of the table.
_FEW: Final = 300_000  # Rows that are counted as quickly as estimated.
# An estimate and the history of runs are taken to agree where they differ by less of the table.
_TOLERANCE: Final = 0.05
_SAMPLE_STEP: Final = 37  # Odd, so that its multiples modulo 256 visit every range once.
_SAMPLE_RANGES: Final = 8  # Read by one statement.
_SAMPLE_BLOBS: Final = 40  # Of each range; those of all ranges tell their number within about 1 %.
_FEWEST_RANGES: Final = 16


@dataclass(frozen=True, slots=True)
class Totals:
    """The numbers of blobs in the catalog by state, and the bytes of those with a known size.

    Attributes:
        unsized: The number of pending blobs without a known size.
        without_blobid: The number of rows that are never sent, and are in no other figure.
        failed_by_reason: The failed blobs by reason; 'unknown' for blobs that another program has
            marked.
        pending_by_reason: The blobs that a check has made pending, by reason: missing or wrong.
        estimated: The names of the figures that were not counted.
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
class StoredObjects:
    """The files of a target with packs: packs, and blobs that are files of their own.

    Attributes:
        packs: The number of packs.
        pack_bytes: The bytes of the packs.
        large_blobs: The number of blobs that are files of their own; None if counting takes too
            long.
        large_bytes: The bytes of these blobs; None if counting takes too long.
    """

    packs: int
    pack_bytes: int
    large_blobs: int | None
    large_bytes: int | None


@dataclass(slots=True)
class Reasons:
    """The failed blobs and their known bytes, and those pending since a check, by reason.

    counted: whether the rows were counted. Otherwise our list was, which has no bytes, and may have
    blobs that no longer exist in the catalog.
    """

    failed: dict[str, int] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    counted: bool = True


def exact_totals(conn: Connection, target: str) -> Totals:
    """Counts everything, as of one moment. Reads the whole table."""
    with translated("count its blobs"):
        return _count(conn, target, milliseconds=0)


def quick_totals(conn: Connection, target: str) -> Totals:
    """Returns all figures in half a second.

    Blobs that another program has marked as failed are counted only if few blobs are still to be
    copied.
    """
    with translated("count its blobs"):
        parts = read_parts(conn, target)
        all_rows = _expected_rows(conn, "all_rows_plan", parts)
        if all_rows <= _FEW:
            with suppress(errors.QueryCanceled):
                return _count(conn, target, _MILLISECONDS)
    pending = pending_estimate(conn, target, _MILLISECONDS // 2)
    reasons = quick_reasons(conn, target, few=pending.exact)
    failed = sum(reasons.failed.values())
    with translated("estimate its blobs"):
        values = {"target": target}
        without_blobid = quick_rows(conn, _ONE_QUERY, "without_blobid")
        copied, copied_bytes = conn.rows("copied_by_runs", values)[0]
        all_rows = (conn.rows("all_rows")[0][0] or all_rows) * len(conn.part.prefixes) // RANGES
    average = (copied_bytes + pending.bytes) / max(copied + pending.blobs - pending.unsized, 1)
    rest = all_rows - pending.blobs - failed
    if abs(rest - copied) > all_rows * _TOLERANCE:
        copied = max(rest, 0)
        copied_bytes = int(copied * average)
    estimated = ["copied", "copied_bytes"]
    if not pending.exact:
        estimated += ["pending", "pending_bytes", "unsized"]
    if not reasons.counted:
        estimated += ["failed", "failed_bytes", "failed_by_reason", "pending_by_reason"]
    if without_blobid is None:
        estimated.append("without_blobid")
    return Totals(
        pending=pending.blobs,
        copied=copied,
        failed=failed,
        pending_bytes=pending.bytes,
        copied_bytes=copied_bytes,
        failed_bytes=reasons.bytes if reasons.counted else int(failed * average),
        unsized=pending.unsized,
        without_blobid=without_blobid[0][0] if without_blobid else 0,
        failed_by_reason=reasons.failed,
        pending_by_reason=reasons.pending,
        estimated=tuple(sorted(estimated)),
    )


def stored_objects(conn: Connection, target: str, least: int, *, exact: bool) -> StoredObjects:
    """Returns the files of a target with packs, by the ledger.

    least: the size in bytes from which a blob is a file of its own. exact: count these however long
    that takes.
    """
    values = {"target": target, "least": least}
    with translated("count the packs of a target"):
        parts = read_parts(conn, target)
        packs = conn.rows("stored_packs", values)[0]
        if exact:
            large = conn.rows("large_copied", values, **parts)
        else:
            large = quick_rows(conn, _ONE_QUERY, "large_copied", values, **parts) or [(None, None)]
    return StoredObjects(*packs, *large[0])


def quick_reasons(conn: Connection, target: str, *, few: bool) -> Reasons:
    """Counts the failed blobs, and those pending since a check, as exactly as a moment allows.

    few: whether few blobs are to be copied, so that all of them may be read.
    """
    with translated("count failed blobs"):
        parts = read_parts(conn, target)
        values = {"target": target, "checks": list(OF_CHECKS)}
        for name in ("uncopied_by_reason", "listed_by_reason") if few else ("listed_by_reason",):
            if (rows := quick_rows(conn, _ONE_QUERY, name, values, **parts)) is not None:
                return _reasons(rows)
        return _reasons(conn.rows("noted_by_reason", values), counted=False)


def still_failed(conn: Connection, target: str) -> int:
    """Counts the failed blobs that nobody has marked as known, as exactly as a moment allows."""
    with translated("count failed blobs"):
        parts, values = read_parts(conn, target), {"target": target}
        with suppress(errors.UndefinedColumn):
            if rows := quick_rows(conn, 2 * _MILLISECONDS, "unknown_failed", values, **parts):
                return int(rows[0][0])
    return sum(quick_reasons(conn, target, few=False).failed.values())


def pending_estimate(conn: Connection, target: str, milliseconds: int) -> PendingEstimate:
    """Returns how much is pending, in about so many milliseconds, whatever the size of the table.

    The first half of the time is for an exact count. If that does not suffice, the first blobs of
    each range are read: hashes lie evenly, so how close they lie tells how many follow. If even
    that takes too long, the planner is asked, which reads nothing. A table that is locked raises
    CatalogUnavailable.
    """
    deadline = time.monotonic() + milliseconds / 1000
    with translated("estimate what is pending"):
        parts = read_parts(conn, target)
        if counted := quick_rows(conn, milliseconds // 2, "pending_total", **parts):
            blobs, known, unsized = counted[0]
            return PendingEstimate(blobs, known, unsized, exact=True)
        return _sampled(conn, parts, deadline) or _planned(conn, parts, milliseconds)


def _count(conn: Connection, target: str, milliseconds: int) -> Totals:
    """Counts everything; QueryCanceled where that takes longer. milliseconds: 0 for no limit."""
    with conn.transaction():
        conn.rows("one_snapshot")
        if milliseconds:
            configure(conn, "statement_timeout", milliseconds, local=True)
        parts = read_parts(conn, target)
        totals = conn.rows("totals", **parts)[0]
        reasons = _reasons(conn.rows("uncopied_by_reason", {"target": target}, **parts))
    figures = (*totals, reasons.failed, reasons.pending)
    return Totals(*figures)


def _reasons(rows: Iterable[tuple[Any, ...]], *, counted: bool = True) -> Reasons:
    found = Reasons(counted=counted)
    for reason, failed, blobs, size in rows:
        (found.failed if failed else found.pending)[reason] = blobs
        found.bytes += size if failed else 0
    return found


def _sampled(conn: Connection, parts: Parts, deadline: float) -> PendingEstimate | None:
    """Scales up from the first blobs of as many ranges as time allows; None where those are few."""
    spread = (nth * _SAMPLE_STEP % RANGES for nth in range(RANGES))
    ranges = [prefix_ranges()[nth] for nth in spread if nth in conn.part.prefixes]
    read = blobs = found = size = unsized = 0
    with suppress(errors.QueryCanceled), conn.transaction():
        walk_indexes(conn, local=True)
        for start in range(0, len(ranges), _SAMPLE_RANGES):
            if time.monotonic() >= deadline:
                break
            some = ranges[start : start + _SAMPLE_RANGES]
            left = max(int((deadline - time.monotonic()) * 1000), 1)  # 0 would be no limit.
            configure(conn, "statement_timeout", left, local=True)
            values = {**bounds(some), "limit": _SAMPLE_BLOBS}
            rows = conn.rows("pending_starts", values, **parts)
            for one, (count, first, last, known, without_size) in zip(some, rows, strict=True):
                blobs += _followed(one, count, first, last)
                found, size, unsized = found + count, size + known, unsized + without_size
            read += len(some)
    if read < min(_FEWEST_RANGES, len(ranges)):
        return None
    blobs = blobs * len(ranges) // read
    share = blobs / max(found, 1)
    return PendingEstimate(blobs, int(size * share), int(unsized * share), exact=False)


def _followed(one: BlobRange, count: int, first: str, last: str) -> int:
    """Returns about how many blobs a range has, whose first ones reach from first to last."""
    start, stop, end = position(first), position(last), position(one.hi)
    if count < _SAMPLE_BLOBS or start is None or stop is None or end is None or stop <= start:
        return count
    return max(count, int((count - 2) / (stop - start) * (end - start)))


def _planned(conn: Connection, parts: Parts, milliseconds: int) -> PendingEstimate:
    """Returns what the planner expects. Only a lock can make it wait."""
    with conn.transaction():
        configure(conn, "lock_timeout", max(milliseconds, 1), local=True)
        blobs = _expected_rows(conn, "pending_plan", parts)
        average, unsized = conn.rows("size_statistics")[0]
    known = int(blobs * (1 - unsized) * average)
    return PendingEstimate(blobs, known, int(blobs * unsized), exact=False)


def _expected_rows(conn: Connection, name: str, parts: Parts) -> int:
    return int(conn.rows(name, **parts)[0][0][0]["Plan"]["Plan Rows"])


# --- a glance -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proved:
    """How many copied blobs of a sample were found right, by a check or by being copied, and when.

    blobs: all of the sample. week, month, quarter: in the last 7, 30 and 90 days.
    """

    blobs: int
    week: int
    month: int
    quarter: int
    ever: int


def proved(conn: Connection, target: str) -> Proved | None:
    """Returns when a sample of the copied blobs was last found right; None if that takes too long.

    The sample is of some pages of the table, always the same ones, or of all of a small table.
    """
    with translated("look at when its blobs were checked"):
        values = {"percent": 100 * _PROVED_SAMPLE / max(rows_about(conn), _PROVED_SAMPLE)}
        rows = quick_rows(conn, _GLANCE, "proved", values, **read_parts(conn, target))
    return Proved(*rows[0]) if rows else None


def failure_examples(conn: Connection, target: str, each: int) -> list[FailedBlob]:
    """Returns the latest failures of each reason, at most `each`; none if that takes too long.

    Only the first failures of a long list are read.
    """
    with translated("read its list of failures"):
        parts, values = {"known_at": fragment("known_at")}, {"target": target, "each": each}
        rows = quick_rows(conn, _GLANCE, "failure_examples", values, **parts) or []
    return [FailedBlob(*row) for row in rows]
