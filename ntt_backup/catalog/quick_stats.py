"""The catalog's figures at a glance: within a bounded time, however large the table is.

What can be counted in that time is counted. Else what is pending is estimated, what failed is
counted on our own list, and what is copied comes from the history of runs, where that and the size
of the table fit together.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg import errors

from ntt_backup.catalog.connection import Connection, configure, translated
from ntt_backup.catalog.pending import Parts, read_parts, walk_indexes
from ntt_backup.catalog.queries import statement
from ntt_backup.catalog.stats import Totals, count, pending_estimate
from ntt_backup.model import OF_CHECKS

_MILLISECONDS: Final = 400
_FEW: Final = 300_000  # Rows that are counted as quickly as estimated.
# An estimate and the history of runs are taken to agree where they differ by less of the table.
_TOLERANCE: Final = 0.05


@dataclass(slots=True)
class Reasons:
    """Failed blobs, and those pending since a check, by reason.

    bytes: known ones of the failed. counted: not only noted on our list, which may know of rows
    that are gone; bytes is 0 then.
    """

    failed: dict[str, int] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    counted: bool = True


def glance(conn: Connection, target: str) -> Totals:
    """All figures in about half a second; `estimated` names those that were not counted.

    Of blobs that another program marked as failed it knows where few are still to be copied.
    """
    with translated(conn, "count its blobs"):
        parts = read_parts(conn, target)
        plan = conn.execute(statement("all_rows_plan")).fetchall()[0][0]
        all_rows = int(plan[0]["Plan"]["Plan Rows"])
        if all_rows <= _FEW:
            with suppress(errors.QueryCanceled):
                return count(conn, target, _MILLISECONDS)
    pending = pending_estimate(conn, target, _MILLISECONDS // 2)
    reasons = by_reason(conn, target, few=pending.exact)
    failed = sum(reasons.failed.values())
    with translated(conn, "estimate its blobs"):
        values = {"target": target}
        without_blobid = _quick(conn, "without_blobid", parts, values)
        copied, copied_bytes = conn.execute(statement("copied_by_runs"), values).fetchall()[0]
        all_rows = conn.execute(statement("all_rows")).fetchall()[0][0] or all_rows
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


def by_reason(conn: Connection, target: str, *, few: bool) -> Reasons:
    """Failed blobs, and those pending since a check, as exactly as can be said in a moment.

    few: few blobs are still to be copied, so that all of them may be looked at.
    """
    with translated(conn, "count failed blobs"):
        parts = read_parts(conn, target)
        values = {"target": target, "checks": list(OF_CHECKS)}
        rows = _quick(conn, "uncopied_by_reason", parts, values) if few else None
        if rows is None:
            rows = _quick(conn, "listed_by_reason", parts, values)
        found = Reasons(counted=rows is not None)
        if rows is None:
            rows = conn.execute(statement("noted_by_reason"), values).fetchall()
    for reason, failed, blobs, size in rows:
        (found.failed if failed else found.pending)[reason] = blobs
        found.bytes += size if failed else 0
    return found


def _quick(
    conn: Connection, name: str, parts: Parts, values: Mapping[str, object]
) -> list[tuple[Any, ...]] | None:
    """The rows of a query; None where it takes too long."""
    with suppress(errors.QueryCanceled), conn.transaction():
        walk_indexes(conn, local=True)
        configure(conn, "statement_timeout", _MILLISECONDS // 8, local=True)
        return conn.execute(statement(name, **parts), values).fetchall()
    return None
