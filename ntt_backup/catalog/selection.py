"""The catalog's rows by range, for comparing them with what lies on disks.

The obvious way, one query `order by blobid`, puts them in the order of the database's collation,
which need not be that of bytes, and holds a transaction open for as long as the comparing takes.
So the rows of one range are read at once, and put in order by whoever compares.
"""

from __future__ import annotations

from typing import NamedTuple

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.pending import columns, walk_indexes
from ntt_backup.catalog.queries import fragment, statement
from ntt_backup.model import BlobRange


class Row(NamedTuple):
    """One row as far as it is compared; size is None where the catalog does not know it."""

    blobid: str
    size: int | None
    copied: bool
    failed: bool


def rows_in(conn: Connection, target: str, one: BlobRange) -> list[Row]:
    """All rows of the range, in no order, also those whose blobid is none."""
    query = statement("rows_between", **columns(target), size=fragment("read_size"))
    with translated(conn, "list blobs"), conn.transaction():
        walk_indexes(conn, local=True)
        return [Row(*row) for row in conn.execute(query, {"lo": one.lo, "hi": one.hi})]
