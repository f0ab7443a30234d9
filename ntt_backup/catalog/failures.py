"""The catalog tells what failed, and what it knows of one blob."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from heapq import merge
from itertools import groupby
from typing import Final

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.pending import columns, quick_rows, read_parts, walk_indexes
from ntt_backup.catalog.statements import fragment
from ntt_backup.errors import ConfigError
from ntt_backup.model import NOT_REQUEUED, OF_THE_STORE, Reason

# The reason of what another program has marked as failed.
UNKNOWN: Final = "unknown"

_PAGE: Final = 2000
_PATIENCE_MS: Final = 5000
_DIGITS: Final = 64
_SHOWN: Final = 5
_PREFIX: Final = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class FailedBlob:
    """A failed blob. Only the name is known of one that another program has marked as failed.

    known_at: when somebody marked the failure as known.
    """

    blobid: str
    reason: str = UNKNOWN
    detail: str = ""
    attempts: int | None = None
    first_at: datetime | None = None
    last_at: datetime | None = None
    known_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The state of a blob in the ledger of a target.

    failure: also of a pending blob that a check has found missing or wrong.
    """

    target: str
    size: int | None
    copied: bool
    failed: bool
    last_checked: datetime | None
    failure: FailedBlob | None


def iter_failed(
    conn: Connection,
    target: str,
    *,
    reason: str | None = None,
    since: float | None = None,
    on_cut: Callable[[], None] = lambda: None,
) -> Iterator[FailedBlob]:
    """Yields the failed blobs in constant memory, with no transaction open in between.

    The blobs of our list come first, in the order of their names, then the blobs that another
    program has marked. Finding the latter reads all pending rows. Unless the latter are selected by
    their reason, the search ends after some seconds, and `on_cut` is called.

    reason: of which to yield blobs alone; None for all. since: to yield those alone that failed in
    the last so many seconds; None for all.
    """
    with translated("list failed blobs"):
        parts = {**read_parts(conn, target), "known_at": fragment("known_at")}
    values = {"target": target, "reason": reason, "since": since, "limit": _PAGE}
    queries = ["next_failed"] if reason != UNKNOWN else []
    if since is None and reason in (None, UNKNOWN):
        queries.append("next_failed_unlisted")
    for name in queries:
        bounded = name == "next_failed_unlisted" and reason is None
        past, found = None, _PAGE
        while found == _PAGE:
            page: Mapping[str, object] = {**values, "past": past}
            with translated("list failed blobs"):
                if bounded:
                    rows = quick_rows(conn, _PATIENCE_MS, name, page, **parts)
                else:
                    with conn.transaction():
                        walk_indexes(conn, local=True)
                        rows = conn.rows(name, page, **parts)
            if rows is None:
                on_cut()
                return
            yield from (FailedBlob(*row) for row in rows)
            found, past = len(rows), rows[-1][0] if rows else None


def targets_of(conn: Connection) -> list[str]:
    """Returns the targets that the catalog has columns for."""
    return [target for (target,) in conn.ask("list the targets", "targets")]


def iter_damaged(conn: Connection) -> Iterator[str]:
    """Yields the blobs that failed for any target for the sake of the store, each once, in order.

    What another program has marked as failed is not among them.
    """
    lists = (
        (one.blobid for one in iter_failed(conn, target, reason=reason))
        for target in targets_of(conn)
        for reason in sorted(OF_THE_STORE)
    )
    return (blobid for blobid, _ in groupby(merge(*lists)))


def acknowledge(conn: Connection, target: str, reason: str | None = None) -> int:
    """Notes that the failures of now are known, all or those of one reason; returns how many."""
    values = {"target": target, "reason": reason, "checks": list(NOT_REQUEUED)}
    return int(conn.ask("note that failures are known", "acknowledge", **values)[0][0])


def failed_for(
    conn: Connection, target: str, reason: Reason, blobids: Sequence[str]
) -> frozenset[str]:
    """Returns those of the given blobids that are on our list of failures for a reason.

    The list also has pending blobs, which a check has found missing or wrong.
    """
    values = {"target": target, "reason": str(reason), "blobids": list(blobids)}
    found = conn.ask("look for failures", "failed_for", **values)
    return frozenset(blobid for (blobid,) in found)


def find_blob(conn: Connection, name: str) -> str:
    """Returns the blobid that is, or begins with, a name. Raises ConfigError if not one does."""
    values = {
        "name": name,
        "low": name.ljust(_DIGITS, "0"),
        "high": name.ljust(_DIGITS, "f"),
        # What is no prefix can only be the whole name of a row.
        "limit": _SHOWN + 1 if _PREFIX.fullmatch(name) else 0,
    }
    found: list[str] = []
    # What no text of the database can be is nobody's name.
    with suppress(UnicodeEncodeError):
        found = sorted(one for (one,) in conn.ask("look for a blob", "blobs_named", **values))
    if name in found:
        return name
    if not found:
        raise ConfigError(
            f"the catalog has no blob {name[:_DIGITS]!r}",
            hint="give a blobid, or its first digits; `ntt-backup-remote failed` lists what failed",
        )
    if len(found) > 1:
        more = ", ..." if len(found) > _SHOWN else ""
        raise ConfigError(
            f"several blobs begin with {name}",
            detail=", ".join(found[:_SHOWN]) + more,
            hint="give more digits",
        )
    return found[0]


def is_mine(conn: Connection, blobid: str) -> bool:
    """Returns whether a blob of the catalog is in the session's part, also a malformed one."""
    return any(mine for (mine,) in conn.ask("tell whose a blob is", "is_mine", blobid=blobid))


def ledger_of(conn: Connection, blobid: str) -> list[LedgerEntry]:
    """Returns what the ledger of each target says of a blob of the catalog."""
    entries = []
    with translated("tell about a blob"):
        for target in targets_of(conn):
            parts = {**columns(target), "known_at": fragment("known_at")}
            values = {"target": target, "blobid": blobid}
            for row in conn.rows("blob_at_target", values, **parts):
                size, copied, failed, checked, reason, *why = row
                failure = FailedBlob(blobid) if failed else None
                if reason is not None:
                    failure = FailedBlob(blobid, reason, *why)
                entries.append(LedgerEntry(target, size, copied, failed, checked, failure))
    return entries
