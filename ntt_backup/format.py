"""Words for people: events, sizes and durations as they read on a terminal or in a mail.

Much of it was said by others: a remote on stderr, a file name, whatever stood in the catalog. So
every sentence made here is printable: one line stays one line, no escape sequence gets through.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import humanize

from ntt_backup.errors import complete

_SHORT_S: Final = 9.95
_MEGA: Final = 10**6
_OUTAGES: Final = {
    "remote": ("remote is away", "remote is back"),
    "catalog": ("catalog is away", "catalog is back"),
    "source": ("store is away", "store is back"),
    "preflight": ("cannot begin yet", "can begin"),
}
_DUMP_REASONS: Final = {
    "first": "there is none yet",
    "changed": "it may have changed since the last time",
    "old": "the last one is old",
    "asked": "as asked",
}
_WARNINGS: Final = frozenset(
    {
        "blob_failed",
        "blobs_failed",
        "batch_retry",
        "batch_split",
        "outage",
        "still_failed",
        "worker_restart",
        "warning",
    }
)
_ERRORS: Final = frozenset({"error", "dump_failed"})


def level_of(event: str) -> str:
    """The level an event is logged with."""
    if event in _ERRORS:
        return "error"
    return "warning" if event in _WARNINGS else "info"


def describe(event: Mapping[str, Any]) -> str | None:
    """One printable line for an event, None for those that say nothing to a person.

    event holds the fields of the JSONL line; its name is under `event`.
    """
    match event["event"]:
        case "run_start":
            text = (
                f"{many(event['workers'], 'worker')}, strategy {event['strategy']},"
                f" target {event['target']}: {event['source']} to {event['remote']}"
            )
        case "progress":
            text = _progress(event)
        case "batch_retry":
            text = (
                f"batch {event['batch']} again in {duration(event['wait_s'])}"
                f" (attempt {event['attempt']}): {event['reason']}"
            )
        case "batch_split":
            text = (
                f"batch {event['batch']} split ({many(event['blobs'], 'blob')}): {event['reason']}"
            )
        case "outage":
            reason = _reason(event["reason"], event.get("detail", ""))
            text = f"{_OUTAGES[event['what']][0]}, again in {duration(event['wait_s'])}: {reason}"
        case "outage_end":
            text = f"{_OUTAGES[event['what']][1]} after {duration(event['duration_s'])}"
        case "blob_failed":
            text = f"failed, {event['reason']}: {event['blobid']} {event['detail']}"
        case "blobs_failed":
            reasons = ", ".join(f"{n:,} {why}" for why, n in sorted(event["reasons"].items()))
            status = complete("ntt-backup-remote status")
            text = f"{many(event['count'], 'blob')} more failed: {reasons}; `{status}` counts them"
        case "worker_restart":
            died = f"worker {event['worker']} died (status {event['status']})"
            text = _reason(f"{died}, a new one in {duration(event['wait_s'])}", event["detail"])
        case "stopping":
            text = "stopping after what is in flight; a second signal stops at once"
        case "warning":
            text = f"warning: {event['reason']}"
        case "dump_start":
            text = f"dumping the catalog ({_DUMP_REASONS[event['reason']]})"
        case "dump_skipped":
            text = f"nobody but us has changed the catalog since {event['name']}"
        case "dump_complete":
            text = (
                f"dumped the catalog: {event['name']}, {size(event['bytes'])} in"
                f" {duration(event['duration_s'])}; {event['kept']} kept,"
                f" {event['pruned']} removed"
            )
        case "dump_failed":
            text = f"the catalog is not dumped: {_reason(event['message'], event['detail'])}"
            if event["hint"]:
                text += f"; {event['hint']}"
        case "still_failed":
            said = complete(
                "`ntt-backup-remote status` says why, `ntt-backup-remote requeue` has them tried"
                " again"
            )
            text = f"{many(event['blobs'], 'blob is', 'blobs are')} still failed: {said}"
        case "error":
            text = f"error: {_reason(event['message'], event['detail'])}"
            if event["hint"]:
                text += f"; {event['hint']}"
        case "run_stop":
            text = _run_stop(event)
        case _:
            return None
    return printable(text)


def _reason(message: str, detail: str) -> str:
    return f"{message}: {detail}" if detail else message


def _progress(event: Mapping[str, Any]) -> str:
    pending, eta_s = event["pending"], event["eta_s"]
    about = "about " if event["estimated"] else ""
    parts = [
        f"{event['copied']:,} copied",
        f"{event['failed']:,} failed",
        "pending not counted yet" if pending is None else f"{about}{pending:,} pending",
        size(event["bytes"]),
        f"{event['mb_per_s']:.1f} MB/s",
        f"{event['blobs_per_s']:,.0f} files/s",
    ]
    if pending and eta_s is not None:
        parts.append(f"about {duration(eta_s)} left")
    return ", ".join(parts)


def _run_stop(event: Mapping[str, Any]) -> str:
    rate = event["bytes"] / _MEGA / max(event["duration_s"], 1e-3)
    # Only the line that says what is wrong begins with "error:".
    outcome = "ended early" if event["outcome"] == "error" else event["outcome"].replace("_", " ")
    return (
        f"{outcome}: {event['copied']:,} copied,"
        f" {event['failed']:,} failed, {size(event['bytes'])} in {duration(event['duration_s'])}"
        f" ({rate:.1f} MB/s), exit code {event['exit_code']}"
    )


def printable(text: str) -> str:
    """text as one line that a terminal only prints: control characters show as escapes.

    Line ends become `; ` (what a remote said on stderr has several lines). Invisible and
    direction-changing characters are escaped too.
    """
    line = "; ".join(part.rstrip() for part in text.splitlines() if part.strip())
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in line
    )


def size(count: int) -> str:
    """Bytes for people: `212.3 MB`, with MB = 10^6 bytes."""
    return humanize.naturalsize(count, format="%.1f")


def duration(seconds: float) -> str:
    """Seconds for people, in at most two units: `0.4 s`, `34 s`, `12 min 4 s`, `3 h 12 min`."""
    if seconds < _SHORT_S:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest} s"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"


def moment(when: datetime) -> str:
    """A point in time for people: `2026-03-04 06:06 CET`, in the zone of whoever asks."""
    return f"{when.astimezone():%Y-%m-%d %H:%M %Z}"


def about(count: int) -> int:
    """A number that was estimated, without the digits that say nothing: the first three stay."""
    unit: int = 10 ** max(len(str(count)) - 3, 0)
    return (count + unit // 2) // unit * unit


def many(count: int, noun: str, plural: str = "") -> str:
    """So many of something: 1 blob, 2 blobs; plural where an s does not make it."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
