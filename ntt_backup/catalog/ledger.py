"""The ledger writes what is known of blobs: copied, checked, failed and why, registered.

A batch is recorded in one transaction, so that a crash leaves all of it or nothing. The transaction
need not wait for the disk (`synchronous_commit = off`): if the database server crashes, the last
marks may be lost, never reordered or torn, and a lost mark only means that a batch on stable
storage is sent again. Nothing is marked that is not stored, so invariant 1 holds.

Blobids are compared by equality only; the catalog may hold any text, and it is recorded as is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from hashlib import sha256
from typing import Any, Final, NamedTuple

from psycopg import Cursor, errors

from ntt_backup.catalog.connection import WHO_KEEPS_ROWS, Connection, configure, translated
from ntt_backup.catalog.pending import columns, read_parts, walk_indexes
from ntt_backup.catalog.statements import fragment, statement
from ntt_backup.errors import CatalogRefused
from ntt_backup.model import NOT_REQUEUED, OF_CHECKS, Blob, Failure, Reason, StoredPack

_REQUEUE_BATCH: Final = 5000
# Rows that one statement marks. The connection keeps the memory of the longest one.
_AT_ONCE: Final = 4096
_DETAIL_LENGTH: Final = 1000
_PAGE: Final = 1000


class Ledger:
    """Records receipts over a connection, whose settings it changes."""

    def __init__(self, conn: Connection, target: str) -> None:
        self._conn = conn
        self._target = target
        self._parts = {
            **columns(target),
            "largest_size": fragment("largest_size"),
            "counted": fragment("counted"),
        }
        # No statement runs so often: from now on what asks for it is prepared, and nothing else.
        conn.prepare_threshold = sys.maxsize
        with translated("set up the ledger"):
            configure(conn, "synchronous_commit", "off")
            ((self._unique,),) = conn.rows("blobid_unique")

    def record(
        self,
        stored: Sequence[Blob],
        failed: Sequence[Failure],
        packs: Sequence[StoredPack] = (),
        *,
        checked: bool = True,
    ) -> None:
        """Commits the verdicts about a batch, and the packs of the stored blobs, all or none.

        Earlier failures of stored blobs are forgotten; each failure counts as one more attempt.
        Blobs that no longer exist in the catalog are ignored. If CatalogUnavailable is raised, the
        commit may or may not have happened. Recording the same batch again is harmless, except for
        the count of attempts.
        checked: whether the content of stored blobs was compared; else the next check begins there.
        """
        failures = {failure.blobid: failure for failure in failed}
        in_order = sorted(stored, key=lambda blob: blob.blobid)

        def write() -> None:
            ids = (blob.blobid for blob in stored)
            locked = self._lock({*ids, *failures}) if failures else set()
            for start in range(0, len(in_order), _AT_ONCE):
                some = in_order[start : start + _AT_ONCE]
                self._mark_copied({blob.blobid: blob.size for blob in some}, checked)
            if found := [failure for one, failure in failures.items() if one in locked]:
                values = _columns_of(found)
                marked = self._run("mark_failed", blobids=values["blobids"]).fetchall()
                _require_changed(*marked[0])
                self._run("record_failures", **values)
            insert_packs(self._conn, self._target, packs)

        self._conn.in_transaction("record a batch", write)

    def unrecorded(self, blobids: set[str]) -> set[str]:
        """Returns those of the given blobids that are in the catalog and not marked as copied.

        A crash of the server may have lost the last marks. The method raises as `record` does.
        """
        with translated("look for lost marks"):
            left = {blobid for (blobid,) in self._run("unmarked", blobids=list(blobids))}
            return self._lock(left) if left else set()

    def _mark_copied(self, sizes: dict[str, int | None], checked: bool) -> None:
        """Marks all rows but those that are gone.

        Where nothing failed, rows are locked by the update, as a rule in the order of blobids: a
        lock of its own would cost as much again. Should two sessions ever meet in another order,
        one of them is told, and records once more.
        """
        left = self._update_copied(sizes, checked)
        locked = self._lock(left) if left else set()
        # Inserted in between, or kept as it is by its owner: the second update tells.
        again = {one: sizes[one] for one in locked}
        if again and (unmoved := self._update_copied(again, checked)):
            _require_changed(len(unmoved), min(unmoved))

    def _update_copied(self, sizes: dict[str, int | None], checked: bool) -> set[str]:
        """Marks what can be marked, and notes missing sizes; returns the blobids not marked."""
        blobids = list(sizes)
        done = self._run("mark_copied", blobids=blobids, checked=checked)
        ((marked, unsized, listed),) = done.fetchall()
        if listed:
            self._run("forget_failures", blobids=blobids)
        if unsized:
            self._run("record_sizes", blobids=blobids, sizes=list(sizes.values()))
        # Without a unique index, a blobid that stands there twice would make up for one not marked.
        if marked == len(sizes) and self._unique:
            return set()
        return {blobid for (blobid,) in self._run("unmarked", blobids=blobids)}

    def _lock(self, blobids: set[str]) -> set[str]:
        """Returns those of the blobids that are in the catalog; nobody can change them any more."""
        locked = {blobid for (blobid,) in self._run("lock_rows", blobids=list(blobids))}
        if gone := blobids - locked:
            _require_changed(*self._run("unlockable", blobids=list(gone)).fetchall()[0])
        return locked

    def _run(self, name: str, **values: object) -> Cursor[tuple[Any, ...]]:
        query = statement(name, **self._parts)
        # It finds its rows by equality, so one plan serves all batches.
        prepare = name == "mark_copied"
        return self._conn.execute(query, {"target": self._target, **values}, prepare=prepare)


def record_checks(
    conn: Connection, target: str, right: Sequence[str], lost: Sequence[Failure]
) -> int:
    """Records the results of a check in one transaction, and makes lost blobs pending again.

    The next run sends the lost blobs, and the reasons are kept in `ntt_backup.failures` until then.
    Blobs that no longer exist in the catalog, or are no longer marked as copied, are ignored.
    Returns the number of blobs that became pending.
    """
    parts = {**columns(target), "counted": fragment("counted")}

    def write() -> int:
        requeued = 0
        if right:
            conn.rows("mark_checked", {"blobids": sorted(right)}, **parts)
        if lost:
            values = {"target": target, **_columns_of(lost)}
            ((requeued, unchanged, example),) = conn.rows("mark_lost", values, **parts)
            _require_changed(unchanged, example)
        return int(requeued)

    return conn.in_transaction("record a check", write)


def note_unchecked(conn: Connection, target: str, names: Iterable[str]) -> None:
    """Notes what a check could not check, blobids or keys of packs, so that it waits for its turn.

    It is no check, and proves nothing. A catalog may still lack the table.
    """
    tried = sorted(set(names))

    def write() -> None:
        with suppress(errors.UndefinedTable, errors.InsufficientPrivilege), conn.transaction():
            conn.rows("forget_unchecked", {"target": target})
            conn.rows("note_unchecked", {"target": target, "names": tried})

    conn.in_transaction("note what is unchecked", write)


def requeue(
    conn: Connection, target: str, reason: str | None = None, blobids: Sequence[str] | None = None
) -> int:
    """Makes failed blobs pending again, all, those of one reason, or these; returns how many.

    Committed in batches, so no row is locked for long; interrupted, it can be called again. Without
    a reason this includes blobs that some other program marked as failed, and not those that
    `prune` has removed. Why a check made a blob pending stays known.
    """
    requeued = 0
    values: dict[str, Any] = {"target": target, "reason": reason, "limit": _REQUEUE_BATCH}
    values["checks"] = list(OF_CHECKS if reason == Reason.PRUNED else NOT_REQUEUED)
    values["blobids"] = blobids if blobids is None else list(blobids)
    with translated("requeue failed blobs"):
        parts = {**read_parts(conn, target), "counted": fragment("counted")}

    def write(name: str) -> tuple[int, str, int]:
        walk_indexes(conn, local=True)
        ((found, past, changed, unchanged, example),) = conn.rows(name, values, **parts)
        _require_changed(unchanged, example)
        return found, past, changed

    for name in ["requeue_listed", "requeue_unlisted"][: 1 if reason is not None else 2]:
        values["past"] = None
        found = _REQUEUE_BATCH
        while found == _REQUEUE_BATCH:
            one = partial(write, name)
            found, values["past"], changed = conn.in_transaction("requeue failed blobs", one)
            requeued += changed
    return requeued


def _require_changed(unchanged: int, example: str) -> None:
    """Raises CatalogRefused where an update left rows as they were.

    Blobs that cannot be marked would be sent again for ever.
    """
    if unchanged:
        raise CatalogRefused(
            "an update of blobs changes nothing",
            detail=f"{unchanged} of its rows stay as they were, such as {example[:64]!r}",
            hint=WHO_KEEPS_ROWS,
        )


def _columns_of(failures: Sequence[Failure]) -> dict[str, list[str]]:
    return {
        "blobids": [failure.blobid for failure in failures],
        "reasons": [str(failure.reason) for failure in failures],
        "details": [storable(failure.detail) for failure in failures],
    }


def storable(detail: str) -> str:
    """Returns a detail as any database can keep it: no NUL, nothing that its encoding may lack.

    It quotes file names and a remote's words. One odd character must not fail the whole batch.
    """
    return detail[:_DETAIL_LENGTH].replace("\0", "\\0").encode("ascii", "backslashreplace").decode()


# --- the packs of a target ------------------------------------------------------------------------
#
# The ledger knows which packs there are and not where each blob lies: that is the packs' own word.


def insert_packs(conn: Connection, target: str, packs: Sequence[StoredPack]) -> None:
    """Records packs as they are now, in the caller's transaction.

    A pack that is already on the list is recorded anew, as not checked yet.
    """
    for pack in packs:
        conn.rows("insert_pack", {"target": target, **asdict(pack)})


def record_pack(conn: Connection, target: str, pack: StoredPack) -> None:
    """Records a pack as it is now, as not checked yet."""
    conn.in_transaction("record a pack", lambda: insert_packs(conn, target, [pack]))


def forget_packs(
    conn: Connection, target: str, pack_ids: Iterable[str], since: datetime | None = None
) -> None:
    """Removes missing or wrong packs from the list.

    Packs that were recorded anew `since` then stay, as they are other packs; None removes all.
    """
    conn.ask("forget packs", "forget_packs", target=target, pack_ids=list(pack_ids), since=since)


def mark_packs_checked(conn: Connection, target: str, pack_ids: Iterable[str]) -> None:
    """Notes that packs were found right now."""
    ids = list(pack_ids)
    conn.ask("record a check", "mark_packs_checked", target=target, pack_ids=ids)


def iter_packs(conn: Connection, target: str) -> Iterator[StoredPack]:
    """Yields the packs in the order of their keys' bytes, as a target lists them.

    The packs are read in constant memory, with no transaction open in between.
    """
    past, found = "", _PAGE
    while found == _PAGE:
        rows = conn.ask("list packs", "next_packs", target=target, past=past, limit=_PAGE)
        yield from (StoredPack(*row) for row in rows)
        found, past = len(rows), rows[-1][1] if rows else ""


def newest_pack(conn: Connection, target: str) -> tuple[StoredPack, datetime] | None:
    """Returns the pack that was noted last, and when; None where there is none."""
    for *pack, noted_at in conn.ask("tell the newest pack", "newest_pack", target=target):
        return StoredPack(*pack), noted_at
    return None


# --- what a scan has found ------------------------------------------------------------------------


class ScanProgress(NamedTuple):
    """The progress of the scan of a store.

    Attributes:
        directory: The last `aa/bb` that is done; None before the first.
        registered: The number of blobs that were registered since the scan began.
        strays: The number of strays since the scan began.
    """

    directory: str | None
    registered: int
    strays: int
    finished: bool = False


def missing_blobs(conn: Connection, blobids: Sequence[str]) -> tuple[set[str], set[str]]:
    """Returns those of the blobids that the catalog lacks, and those of which it lacks the size."""
    absent: set[str] = set()
    unsized: set[str] = set()
    if not blobids or _all_known(conn, sorted(blobids)):
        return absent, unsized
    for blobid, known in conn.ask("look up blobs", "missing", blobids=list(blobids)):
        (unsized if known else absent).add(blobid)
    return absent, unsized


def _all_known(conn: Connection, blobids: Sequence[str]) -> bool:
    """Returns whether the catalog has these blobids, with their sizes, and no others in between.

    blobids: in the order of bytes.
    """

    def read() -> str:
        walk_indexes(conn, local=True)
        values = {"first": blobids[0], "last": blobids[-1]}
        return str(conn.rows("known_digest", values)[0][0])

    found = conn.in_transaction("look up blobs", read)
    return found == sha256("".join(blobids).encode()).hexdigest()


def register_blobs(conn: Connection, rows: Sequence[Blob]) -> int:
    """Adds the blobs that the catalog lacks, in one transaction; returns how many were added.

    Existing rows are left as they are, also those that another program adds at this moment: COPY,
    several times faster than INSERT, cannot step over them, so it fills a temporary table.
    """

    def write() -> int:
        conn.rows("create_found")
        with conn.cursor().copy(statement("copy_found")) as copy:
            for blob in rows:
                copy.write_row((blob.blobid, blob.size))
        query = statement("register_found", largest_size=fragment("largest_size"))
        return conn.execute(query).rowcount

    return conn.in_transaction("register blobs", write)


def record_sizes(conn: Connection, blobs: Sequence[Blob]) -> int:
    """Notes the sizes of blobs that have none in the catalog, in one transaction.

    Returns:
        The number of rows that have a size now.
    """
    names = [blob.blobid for blob in blobs]
    values = {"blobids": names, "sizes": [blob.size for blob in blobs]}
    parts = {"largest_size": fragment("largest_size"), "counted": fragment("counted")}

    def write() -> int:
        # A run marks the same rows at this moment, in the order of blobids as well.
        conn.rows("lock_rows", {"blobids": names})
        return int(conn.rows("record_sizes", values, **parts)[0][0])

    return conn.in_transaction("record sizes", write)


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
