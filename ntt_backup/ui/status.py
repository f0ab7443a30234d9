"""What `status` and `run --dry-run` print: text for people, and the same as JSON.

Pure, apart from printing: fed with what the catalog answered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from rich import box
from rich.table import Table
from rich.text import Text

from ntt_backup.audit.scan import ScanResult
from ntt_backup.catalog.dump_history import DumpRun
from ntt_backup.catalog.history import Run
from ntt_backup.catalog.range_locks import Holder
from ntt_backup.catalog.stats import PendingEstimate, Totals
from ntt_backup.config import Settings
from ntt_backup.errors import complete
from ntt_backup.format import about, duration, many, moment, printable, size
from ntt_backup.planner import range_name


def status_json(
    target: str,
    totals: Totals,
    last: Run | None,
    dumps: Sequence[DumpRun],
    holders: Sequence[Holder],
) -> dict[str, Any]:
    """The status as plain JSON values; bytes are integers, times RFC 3339."""
    return {
        "target": target,
        **asdict(totals),
        "last_run": None if last is None else {k: _plain(v) for k, v in asdict(last).items()},
        "dumps": [{k: _plain(v) for k, v in asdict(one).items()} for one in dumps],
        "ranges": [
            {"range": range_name(one.index), "holder": one.application_name, "pid": one.pid}
            for one in holders
        ],
    }


def _plain(value: object) -> object:
    return str(value) if isinstance(value, UUID) else _moment(value)


def _moment(value: object) -> object:
    """Times in UTC, as in the log."""
    if not isinstance(value, datetime):
        return value
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


def status_table(
    target: str,
    totals: Totals,
    last: Run | None,
    dumps: Sequence[DumpRun],
    holders: Sequence[Holder],
) -> Table:
    """The status for a terminal."""
    guessed = totals.estimated
    rows = [
        (
            "pending",
            _amount(totals.pending, totals.pending_bytes, estimated="pending" in guessed),
        ),
        *_reasons(totals.pending_by_reason),
        ("copied", _amount(totals.copied, totals.copied_bytes, estimated="copied" in guessed)),
        ("failed", _amount(totals.failed, totals.failed_bytes, estimated="failed" in guessed)),
        *_reasons(totals.failed_by_reason),
    ]
    if totals.unsized:
        guess = "unsized" in guessed
        unsized = about(totals.unsized) if guess else totals.unsized
        said = many(unsized, "pending blob has", "pending blobs have")
        rows.append(("", f"{'about ' * guess}{said} no size in the catalog yet"))
    if guessed:
        exact = complete("ntt-backup-remote status --exact")
        rows.append(("", f"figures with `about` are estimated; `{exact}` counts them"))
    if totals.without_blobid:
        without = many(totals.without_blobid, "row has", "rows have")
        rows.append(("", f"{without} no blobid: never sent"))
    rows.append(("last run", "none" if last is None else _run(last)))
    if not any(one.name for one in dumps):
        rows.append(("last dump", "none"))
    for one in dumps:
        rows.append(("last dump", _dump(one)))
    for who, ranges in _by_holder(holders).items():
        rows.append(("at work", f"{who}: {_ranges(ranges)}"))
    table = Table(title=f"target {target}", box=box.SIMPLE, show_header=False, title_justify="left")
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for name, text in rows:
        # As Text: what others wrote into the catalog is neither markup nor control sequences.
        table.add_row(name, Text(printable(text)))
    return table


def _amount(blobs: int, bytes_: int, *, estimated: bool = False) -> str:
    if estimated:
        return f"about {_amount(about(blobs), bytes_)}"
    return f"{many(blobs, 'blob')}, {size(bytes_)}"


def _reasons(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    return [("", f"{count:,} {reason}") for reason, count in sorted(counts.items())]


def _run(run: Run) -> str:
    began = f"{moment(run.started_at)} on {run.host}"
    did = f"{run.copied:,} copied, {run.failed:,} failed, {size(run.bytes)}"
    if run.ended_at is None:
        age = max(0.0, (run.read_at - run.updated_at).total_seconds())
        return f"{began}, PID {run.pid}: no end yet; as of {duration(age)} ago {did}"
    return f"{began}: {run.outcome} (exit code {run.exit_code}), {did}"


def _dump(one: DumpRun) -> str:
    began = moment(one.started_at)
    if one.error:
        return f"{began}: FAILED, {one.error}"
    return f"{began}: {one.name}, {size(one.bytes)}"


def _by_holder(holders: Sequence[Holder]) -> Mapping[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for one in holders:
        grouped.setdefault(f"{one.application_name} (PID {one.pid})", []).append(one.index)
    return grouped


def _ranges(indexes: Sequence[int]) -> str:
    names = [range_name(index) for index in indexes[:16]]
    more = f" and {len(indexes) - 16} more" if len(indexes) > 16 else ""
    return "ranges " + " ".join(names) + more


def plan_lines(settings: Settings, pending: PendingEstimate) -> list[str]:
    """What a run would send, for a terminal."""
    run = settings.run
    limit = f", at most {size(run.bwlimit)}/s" if run.bwlimit else ""
    least = max(pending.blobs / run.batch_size, pending.bytes / run.batch_bytes)
    batches = many(math.ceil(least), "batch", "batches")
    return [
        f"would send {_amount(pending.blobs, pending.bytes, estimated=not pending.exact)}"
        + (f" ({pending.unsized:,} of unknown size)" if pending.unsized else ""),
        f"from {settings.source.root} to {settings.remote.host}:{settings.remote.path}/by-hash",
        f"in about {batches} of at most {many(run.batch_size, 'blob')} and {size(run.batch_bytes)}",
        f"by {many(run.workers, 'worker')}, strategy {run.strategy}{limit}",
    ]


def scan_lines(result: ScanResult) -> list[str]:
    """What a scan found, for a terminal."""
    resumed = f", going on after {result.resumed_from}" if result.resumed_from else ""
    lines = [
        f"registered {_amount(result.registered, result.bytes)}; {result.known:,} known before",
        f"looked at {many(result.directories, 'directory', 'directories')} in"
        f" {duration(result.duration_s)}{resumed}",
    ]
    for kind, count in sorted(result.strays.items()):
        lines.append(f"left aside {many(count, 'stray')}: {kind.value}")
    return lines
