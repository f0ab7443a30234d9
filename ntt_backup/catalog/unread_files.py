"""Files that go by their paths, and were not read yet, get their blobs when a worker reads them.

A worker that has nothing to send reads registered files for the first time. From then on a file is
a blob like any other, and its place says where it lies. A file that failed is read again after
`requeue`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

from ntt_backup.catalog import ledger
from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.range_locks import lock_class, take_turns
from ntt_backup.catalog.statements import fragment
from ntt_backup.model import BadFile, Blob, ReadFile, Reason

# What is counted at most.
_COUNTED: Final = 100_000
_TRIES: Final = 3
_MOST_NS: Final = (1 << 63) - 1
# No target's name has a slash.
_READING: Final = {"class": lock_class("places/"), "key": 0}
# Of the one transaction that gives numbers to new places.
NUMBERING: Final = {"class": lock_class("places/"), "key": 1}
# Of a blob that `prune` has removed: a run for that target alone may write its columns.
RETURNED: Final = "a file of this content came back; a run for this target sends it again"


class Unread(NamedTuple):
    """A file that was never read.

    Attributes:
        id: The key of its place.
        path: Its path below the root of the store.
        size: Its size in bytes, as its origin says.
        checksum: Its checksum, as its origin says.
    """

    id: int
    path: bytes
    size: int | None
    checksum: str | None


class UnreadFiles:
    """The files that were never read. One session at a time reads some of them.

    Every method raises CatalogError.

    Args:
        conn: The catalog.
        target: The target that the run sends blobs to.
    """

    def __init__(self, conn: Connection, target: str) -> None:
        self._conn, self._target = conn, target
        self._parts = {name: fragment(name) for name in ("unread", "due")}
        # Behind the last place that was handed out: those before it left dead entries in the index.
        self._past = 0

    def turn(self) -> AbstractContextManager[bool]:
        """Takes the turn of reading files, see `take_turns`."""
        return take_turns(self._conn, "reading files", _READING)

    def any_left(self) -> bool:
        """Returns whether a file is to be read now."""
        with translated("look for files to read"):
            return bool(self._conn.rows("any_unread", **self._parts)[0][0])

    def count_young(self) -> int:
        """Counts the files that may still be being written, and are not read yet, up to 100,000."""
        values = {"limit": _COUNTED}
        with translated("count its files"):
            return int(self._conn.rows("count_young", values, **self._parts)[0][0])

    def next(self, limit: int) -> list[Unread]:
        """Returns the next files, at most `limit`; none if there are none to be read now."""
        with translated("look for files to read"):
            for past in dict.fromkeys((self._past, 0)):
                values = {"past": past, "limit": limit}
                rows = self._conn.rows("unread_places", values, **self._parts)
                if rows:
                    return [Unread(*row) for row in rows]
        self._past = 0
        return []

    def record(
        self,
        read: Sequence[tuple[int, ReadFile]],
        bad: Sequence[tuple[int, BadFile]],
        wait_s: float = 0.0,
    ) -> None:
        """Registers the blobs of files, and why others could not be read, in one transaction.

        Args:
            read: The files that were read, each behind the key of its place.
            bad: The files that could not be read, each behind the key of its place.
            wait_s: The seconds until a young one of these is tried again.
        """
        ids = [place for place, _ in read]
        found = [one for _, one in read]
        values = {
            "ids": _array(ids),
            "blobids": _array(one.blob.blobid for one in found),
            "sizes": _array(one.blob.size for one in found),
            "mtimes": _array(bigint(one.mtime_ns) for one in found),
            "modes": _array(one.mode for one in found),
        }
        failed = {
            "ids": [place for place, _ in bad],
            "reasons": [one.reason.value for _, one in bad],
            "details": [ledger.storable(one.detail) for _, one in bad],
            "waits": [wait_s if one.young else None for _, one in bad],
        }

        def write() -> None:
            if found:
                _register(self._conn, self._target, [one.blob for one in found])
                self._conn.rows("record_read", values)
            if bad:
                self._conn.rows("record_unreadable", failed)

        self._conn.in_transaction("register files that were read", write)
        self._past = max([self._past, *ids, *(place for place, _ in bad)])


def _array(values: Iterable[object]) -> str:
    """Returns numbers or blobids as the text of an array, many times faster than psycopg would."""
    return f"{{{','.join(map(str, values))}}}"


def _register(conn: Connection, target: str, blobs: Sequence[Blob]) -> None:
    """Registers the blobs of files, in a transaction that `prune` deletes none of them in."""
    blobids = list({one.blobid for one in blobs})
    if ledger.register_blobs(conn, blobs) == len(blobids):
        return
    for _ in range(_TRIES):
        held = {blobid for (blobid,) in conn.rows("lock_rows", {"blobids": blobids})}
        if len(held) == len(blobids):
            break
        ledger.register_blobs(conn, [one for one in blobs if one.blobid not in held])
    if (target,) in note_returned(conn, blobids):
        send_returned(conn, target)


def note_returned(conn: Connection, blobids: Sequence[str]) -> list[tuple[str]]:
    """Notes which of these blobs, which have a file again, `prune` has removed from which targets.

    Those that are being removed are left to `prune`.

    Returns:
        The targets: a run for each of them calls `send_returned`.
    """
    values = {"blobids": list(blobids), "returned": RETURNED}
    return conn.rows("note_returned", values, known_at=fragment("known_at"))


def send_returned(conn: Connection, target: str) -> None:
    """Makes blobs pending that `prune` has removed from a target, and that have a file again."""
    values = {"target": target, "returned": RETURNED}
    if found := conn.ask("look for files that came back", "returned_blobs", **values):
        ledger.requeue(conn, target, str(Reason.PRUNED), [blobid for (blobid,) in found])


def requeue_files(conn: Connection, reason: str | None = None) -> int:
    """Makes workers read failed files again, all or those of a reason; returns their number.

    A file that was changed since it was read gets a new version.
    """

    def write() -> int:
        conn.rows("number_places", NUMBERING)
        rows = conn.rows("requeue_files", {"reason": reason}, failed=fragment("failed"))
        again = [(origin, path) for origin, path, is_read in rows if is_read]
        values = {"origins": [one for one, _ in again], "paths": [path for _, path in again]}
        conn.rows("register_again", values)
        return len(rows)

    return conn.in_transaction("requeue failed files", write)


def bigint(time_ns: int | None) -> int | None:
    """Returns a time as the catalog can have it: some file systems take any that somebody sets."""
    return None if time_ns is None else max(-_MOST_NS, min(time_ns, _MOST_NS))
