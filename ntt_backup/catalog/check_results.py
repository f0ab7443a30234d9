"""Which blobs to check, and what came of it: the catalog's side of `verify`.

Oldest check first, as `<target>_last_checked` says. Asking for the next thousand by that order
again and again would read the whole table each time (nothing is indexed by it, and the table is
not ours), so the list is made once, by the server, and read in pages.

A blob that the remote has lost becomes pending again: the next run sends it, and that is all the
mending there is. Why it did is kept in `ntt_backup.failures` until it is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.ledger import require_changed, storable
from ntt_backup.catalog.pending import columns
from ntt_backup.catalog.queries import fragment, statement
from ntt_backup.model import Blob, Failure


class Checks:
    """The blobs to check, in order; total is how many. One at a time for a connection.

    prefix: only blobids that begin so. older_than: seconds since the last check. fraction: a random
    sample of that part. local: what should be in the store, and not what was copied.
    """

    def __init__(
        self,
        conn: Connection,
        target: str,
        *,
        prefix: str = "",
        older_than: float | None = None,
        fraction: float | None = None,
        local: bool = False,
    ) -> None:
        self._conn = conn
        parts = columns(target)
        parts["size"] = fragment("read_size")
        parts["chosen"] = fragment("anything_here" if local else "copied_there", **parts)
        values = {"prefix": prefix, "older_than": older_than, "fraction": fraction}
        with translated(conn, "list the blobs to check"):
            with conn.transaction():
                conn.execute(statement("begin_checks", **parts), values)
            self.total = conn.execute(statement("count_checks")).rowcount
            conn.execute(statement("rewind_checks"))

    def next(self, count: int) -> list[Blob]:
        """The next blobs, none at the end."""
        with translated(self._conn, "list the blobs to check"):
            rows = self._conn.execute(statement("next_checks", count=sql.Literal(count)))
            return [Blob(blobid, size) for blobid, size in rows]


def record_checks(
    conn: Connection, target: str, right: Sequence[str], lost: Sequence[Failure]
) -> int:
    """Note in one transaction what was right, and what is pending again; how many those are.

    Blobs that are gone from the catalog, or not copied any more, are left alone.
    """
    parts = {**columns(target), "counted": fragment("counted")}
    requeued = 0
    with translated(conn, "record a check"), conn.transaction():
        if right:
            conn.execute(statement("mark_checked", **parts), {"blobids": sorted(right)})
        if lost:
            values = {
                "target": target,
                "blobids": [failure.blobid for failure in lost],
                "reasons": [str(failure.reason) for failure in lost],
                "details": [storable(failure.detail) for failure in lost],
            }
            rows = conn.execute(statement("mark_lost", **parts), values).fetchall()
            requeued, unchanged, example = rows[0]
            require_changed(unchanged, example)
    return int(requeued)
