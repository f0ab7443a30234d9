"""The catalog as `scan` sees it: which blobs it lacks, adding them, and how far a scan got.

The store is listed in directories of any size, the catalog asked in thousands at a time. Rows go in
by COPY, which is several times faster than INSERT, through a temporary table, because COPY itself
cannot step over rows that another program inserted meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.queries import fragment, statement
from ntt_backup.model import Blob


@dataclass(frozen=True, slots=True)
class ScanProgress:
    """How far the scan of a store got. root is the store's path.

    directory: the last `aa/bb` that is done with, None before the first. registered and strays
    count since started_at. finished_at is None while the scan is under way or was interrupted.
    """

    root: str
    directory: str | None
    registered: int
    strays: int
    started_at: datetime
    finished_at: datetime | None


def missing(conn: Connection, blobids: Sequence[str]) -> set[str]:
    """Those of the blobids that the catalog lacks."""
    with translated(conn, "look up blobs"):
        rows = conn.execute(statement("missing"), {"blobids": list(blobids)})
        return {blobid for (blobid,) in rows}


def register(conn: Connection, rows: Sequence[Blob]) -> int:
    """Add the blobs that the catalog lacks, in one transaction; returns how many were added.

    Rows that are there already are left as they are, also when another program adds them right now.
    """
    with translated(conn, "register blobs"), conn.transaction():
        conn.execute(statement("create_found"))
        with conn.cursor().copy(statement("copy_found")) as copy:
            for blob in rows:
                copy.write_row((blob.blobid, blob.size))
        query = statement("register_found", largest_size=fragment("largest_size"))
        return conn.execute(query).rowcount


def load_scan(conn: Connection, root: str) -> ScanProgress | None:
    """The progress of the latest scan of this root, finished or not; None if there was none."""
    with translated(conn, "read the scan's progress"):
        row = conn.execute(statement("load_scan"), {"root": root}).fetchone()
    return ScanProgress(*row) if row else None


def begin_scan(conn: Connection, root: str) -> None:
    """Note that a scan of this root starts from the beginning, forgetting an earlier one."""
    with translated(conn, "save the scan's progress"):
        conn.execute(statement("begin_scan"), {"root": root})


def save_scan(
    conn: Connection,
    root: str,
    directory: str | None,
    *,
    registered: int,
    strays: int,
    finished: bool = False,
) -> None:
    """Note how far the scan of this root got; the counts are those since it began."""
    values = {
        "root": root,
        "directory": directory,
        "registered": registered,
        "strays": strays,
        "finished": finished,
    }
    with translated(conn, "save the scan's progress"):
        conn.execute(statement("save_scan"), values)
