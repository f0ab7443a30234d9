"""The catalog's side of `scan`: which blobs it lacks, adding them, and how far a scan got."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.queries import fragment, statement
from ntt_backup.model import Blob


class ScanProgress(NamedTuple):
    """How far the scan of a store got. directory: the last `aa/bb` that is done with, None before
    the first. registered and strays count since it began.
    """

    directory: str | None
    registered: int
    strays: int
    finished: bool = False


def missing(conn: Connection, blobids: Sequence[str]) -> set[str]:
    """Returns those of the blobids that the catalog lacks."""
    found = conn.ask("look up blobs", "missing", blobids=list(blobids))
    return {blobid for (blobid,) in found}


def register(conn: Connection, rows: Sequence[Blob]) -> int:
    """Adds the blobs that the catalog lacks, in one transaction; returns how many were added.

    Existing rows are left as they are, also those that another program adds at this moment: COPY,
    several times faster than INSERT, cannot step over them, so it fills a temporary table.
    """
    with translated("register blobs"), conn.transaction():
        conn.rows("create_found")
        with conn.cursor().copy(statement("copy_found")) as copy:
            for blob in rows:
                copy.write_row((blob.blobid, blob.size))
        query = statement("register_found", largest_size=fragment("largest_size"))
        return conn.execute(query).rowcount


def load_scan(conn: Connection, root: str) -> ScanProgress | None:
    """Returns the progress of the latest scan of this root, finished or not, or None."""
    rows = conn.ask("read the scan's progress", "load_scan", root=root)
    return ScanProgress(*rows[0]) if rows else None


def begin_scan(conn: Connection, root: str) -> None:
    """Records that a scan of this root starts from the beginning, forgetting an earlier one."""
    conn.ask("save the scan's progress", "begin_scan", root=root)


def save_scan(conn: Connection, root: str, progress: ScanProgress) -> None:
    """Records how far the scan of this root got."""
    conn.ask("save the scan's progress", "save_scan", root=root, **progress._asdict())
