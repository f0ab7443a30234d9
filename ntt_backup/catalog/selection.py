"""Selects blobs of the catalog: to send, to check, to compare, to measure. Changes nothing.

No selection holds a transaction open while its rows are worked on, which may take hours and would
keep vacuum from every table.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Final, NamedTuple

from psycopg import sql

from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.pending import (
    Stretch,
    columns,
    in_time,
    read_parts,
    reading,
    rows_about,
    walk_indexes,
)
from ntt_backup.catalog.statements import fragment, statement
from ntt_backup.errors import ConfigError
from ntt_backup.formatting import printable
from ntt_backup.model import Blob, BlobRange, StoredPack

_SAMPLE_POINTS: Final = 64
_SIZES: Final = 1000
_QUERY_SECONDS: Final = 600


class Row(NamedTuple):
    """One row of a comparison. size is None where the catalog does not know it."""

    blobid: str
    size: int | None
    copied: bool
    failed: bool


def any_known(conn: Connection) -> bool:
    """Returns whether the catalog has a row at all, in the session's part."""
    return bool(conn.ask("look for blobs", "any_known"))


def any_copied(conn: Connection, target: str) -> bool:
    """Returns whether any blob was ever copied. Where none was, all of the table is read."""
    with translated("look for copied blobs"):
        return bool(conn.rows("any_copied", **columns(target)))


def any_copied_from(conn: Connection, target: str, point: str) -> str:
    """Returns the first copied blob from a point on, or else the first of all; "" without any."""
    with translated("look for copied blobs"):
        for first in (point, ""):
            for (blobid,) in conn.rows("copied_from", {"first": first}, **columns(target)):
                return str(blobid)
    return ""


def first_pending(
    conn: Connection, target: str, limit: int, milliseconds: int
) -> list[Blob] | None:
    """Returns the first pending blobs of the session's part, in the catalog's order.

    Rows that were copied a while ago may leave millions of dead entries at the front of the index,
    which nobody can remove as long as an old transaction may want the rows. Returns None if the
    search takes longer than so many milliseconds.
    """
    spans = [Stretch(-1, first, end) for first, end in conn.part.spans]
    # A span without any is a row, too.
    values = reading(spans, limit + len(spans), milliseconds)
    with translated("look for pending blobs"), in_time(conn, milliseconds):
        found = conn.rows("pending_blobs", values, **read_parts(conn, target))
        blobs = [Blob(blobid, size) for _, blobid, size in found if blobid is not None]
        # Where nothing was found and time was over, some ranges were not looked into.
        return blobs[:limit] if blobs or found[-1][0] == len(spans) else None
    return None


def rows_in(conn: Connection, target: str, one: BlobRange) -> list[Row]:
    """Returns all rows of the range, in no order, also those whose blobid is malformed.

    The database's collation need not be the order of bytes, so the caller puts them in order.
    """
    values = {"lo": one.lo, "hi": one.hi}
    with translated("list blobs"), conn.transaction():
        walk_indexes(conn, local=True)
        return [Row._make(row) for row in conn.rows("rows_between", values, **columns(target))]


def sample(conn: Connection, target: str, limit: int) -> list[Blob]:
    """Returns about limit blobs, or all where there are fewer; none twice, none that is failed.

    Blobids are hashes, so a walk along the index from any point meets blobs of all ages and sizes:
    a few walks, spread evenly, are a fair sample, and the table is not read.
    """
    prefixes, points = conn.part.prefixes, []
    for number in range(_SAMPLE_POINTS):
        nth, rest = divmod(number * len(prefixes) * 256 // _SAMPLE_POINTS, 256)
        points.append(f"{prefixes[nth]:02x}{rest:02x}")
    values = {"points": points, "limit": -(-limit // _SAMPLE_POINTS)}
    with translated("draw a sample"), conn.transaction():
        walk_indexes(conn, local=True)
        found = dict(conn.rows("sample_from", values, **columns(target)))
    return [Blob(blobid, size) for blobid, size in found.items()]


def estimated_bytes(conn: Connection, target: str) -> float:
    """Returns about how many bytes of content the catalog's blobs have, by a sample."""
    sizes = [blob.size for blob in sample(conn, target, _SIZES) if blob.size is not None]
    return rows_about(conn) * (sum(sizes) / len(sizes) if sizes else 0.0)


def blobids_of(conn: Connection, query: str) -> Iterator[str]:
    """Yields the blobids that a query of the operator gives.

    The query runs once, in a transaction that may only read, and for a bounded time. The server
    keeps its rows, so that no transaction stays open while they are worked on.

    Raises:
        ConfigError: The query gives anything but one column of blobids.
        CatalogError: The server refuses the query.
    """
    with translated("run the query"), conn.transaction():
        conn.rows("query_reads_only")
        conn.rows("limit_query", limit=sql.Literal(f"{_QUERY_SECONDS}s"))
        conn.rows("path_of_query", schema=sql.Identifier(conn.schema or "public"))
        # In this form the server takes one statement, and no second one behind it.
        conn.execute(statement("begin_query", query=sql.SQL(query)), binary=True)
    number = 0
    while True:
        with translated("run the query"):
            rows = conn.rows("next_of_query", count=sql.Literal(_SIZES))
        if not rows:
            return
        for row in rows:
            number += 1
            if len(row) != 1 or not isinstance(row[0], str) or not is_blobid(row[0]):
                raise ConfigError(
                    f"row {number} of the query is no blobid",
                    detail=printable(", ".join(str(value)[:100] for value in row[:3])),
                    hint="the query must give one column of text, each 64 lowercase hex digits",
                )
            yield row[0]


class Choice(NamedTuple):
    """A selection of blobs to check, and of the packs that may hold such blobs.

    prefix: the first digits of the blobids. older_than: the least seconds since the last check.
    fraction: the part of that to check, from 0 to 1, as a random sample; None for all. lo: the
    first blobid; of packs, the least one of the smallest in each. hi: the end; None for no end.
    """

    prefix: str = ""
    older_than: float | None = None
    fraction: float | None = None
    lo: str = ""
    hi: str | None = None


class Checks:
    """The blobs to check, those first that were checked longest ago; total is their number.

    What could not be checked (`ledger.note_unchecked`) has its turn by the time of the last try.

    local: what the store should have, instead of what was copied. least: only
    blobs of at least so many bytes which are not alone in a pack.

    Nothing is indexed by the last check, so the server makes the list once, and it is read in
    pages. A connection has one such list at a time.
    """

    def __init__(
        self,
        conn: Connection,
        target: str,
        choice: Choice,
        *,
        local: bool = False,
        least: int | None = None,
    ) -> None:
        self._conn = conn
        parts = {**columns(target), "largest_size": fragment("largest_size"), "tries": _tries(conn)}
        copied = "copied_blobs" if least is None else "copied_alone"
        chosen = "blobs_of_the_store" if local else copied
        parts["chosen"] = fragment(chosen, **parts)
        values = {"target": target, "least": least, **choice._asdict()}
        with translated("list the blobs to check"):
            with conn.transaction():
                conn.rows("begin_checks", values, **parts)
            self.total = conn.execute(statement("count_checks")).rowcount
            conn.rows("rewind_checks")

    def next(self, count: int) -> list[Blob]:
        """Returns the next blobs; none at the end."""
        with translated("list the blobs to check"):
            rows = self._conn.rows("next_checks", count=sql.Literal(count))
        return [Blob(blobid, size) for blobid, size in rows]


def _tries(conn: Connection) -> sql.Composable:
    """Returns the relation of what could not be checked, as a part of a query."""
    readable = conn.ask("list what was not checked", "may_read_tries")[0][0]
    return fragment("tries" if readable else "no_tries")


class PackChecks:
    """Lists the packs to check, those first that were checked longest ago.

    blobs: the number of blobs in the packs. began: when the list was made.
    """

    def __init__(self, conn: Connection, target: str, choice: Choice) -> None:
        self._conn = conn
        self._past: tuple[object, str] = ("-infinity", "")
        self._chosen = fragment("packs_to_check", tries=_tries(conn))
        with translated("list the packs to check"):
            bound = conn.rows("check_bound", {"older_than": choice.older_than or 0})
            before, self.began = bound[0]
            self._values = {
                "target": target,
                "first": choice.prefix.ljust(64, "0"),
                "last": choice.prefix.ljust(64, "f"),
                "fraction": choice.fraction,
                "lo": choice.lo,
                "hi": choice.hi,
                "seed": secrets.token_hex(4),
                "before": before,
                "began": self.began,
            }
            rows = conn.rows("count_packs_to_check", self._values, chosen=self._chosen)
            self.blobs = int(rows[0][0])

    def next(self, count: int) -> list[StoredPack]:
        """Returns the next packs; none at the end."""
        checked, key = self._past
        values = {**self._values, "past_checked": checked, "past_key": key, "limit": count}
        with translated("list the packs to check"):
            rows = self._conn.rows("next_packs_to_check", values, chosen=self._chosen)
        if rows:
            self._past = (rows[-1][-1] or "-infinity", rows[-1][1])
        return [StoredPack(*row[:-1]) for row in rows]
