"""Claims of ranges by advisory locks, and the pending blobs in them, in order.

Several workers, on several hosts, share one catalog. A claim is a session's advisory lock on a
range: it vanishes with the connection, so none can go stale, and it costs no write. Whoever loses
the connection must stop handing out what it had taken.

    free --take--> open --read to its end--> exhausted --release--> free

A range in which much is left behind the first batch is held in parts, for several workers. Each
part is a lock of its own, beside a shared one on the whole, which keeps off whoever wants all of
it. A session goes on in the parts of its own range, and where nothing whole is free, it helps with
the parts of the others'. All hosts must know of parts: one that does not takes such a range.

At most one range is open at a time. Exhausted ones stay locked while their blobs are under way,
else another worker would send them again. A range that is claimed again starts at its beginning,
since blobs may have been inserted behind the cursor.

A range that was emptied is full of dead rows until vacuum comes, and all of them are walked before
it is known to be empty. So no statement looks into more than one range without a time limit; where
it is reached, ranges are looked into one by one, over as many calls as that takes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psycopg import errors

from ntt_backup.catalog.connection import Connection, configure, translated
from ntt_backup.catalog.pending import Cursor, bounds, read_parts, reading, walk_indexes
from ntt_backup.catalog.queries import statement
from ntt_backup.catalog.ranges import RANGES, WORTH_SHARING, part, parts, prefix_ranges, whole_of
from ntt_backup.model import Blob, BlobRange

# How long a search may take before its caller is asked whether anything else is to be done.
_SEARCH_SECONDS: Final = 0.5


def lock_class(name: str) -> int:
    """Returns the first key of our advisory locks: a signed 32-bit hash, the same on every host.

    BLAKE2b of "ntt_backup:" + name, four bytes, big-endian. The second key is the range's index.
    """
    digest = hashlib.blake2b(f"ntt_backup:{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big", signed=True)


@dataclass(frozen=True, slots=True)
class Holder:
    """A session that holds a range, or a part of one."""

    index: int
    application_name: str
    pid: int


@dataclass(slots=True)
class _Search:
    """The ranges that are still to be looked into. held: also those that somebody holds."""

    left: Sequence[BlobRange] = ()
    held: bool = False
    one_by_one: bool = False


class Claims:
    """The ranges that one connection holds, whose settings it may change.

    order lists range indexes, those to try first in front. Every method raises CatalogUnavailable
    when the connection is lost. All claims are lost with it: make a new object on a new connection.
    """

    def __init__(self, conn: Connection, target: str, order: Sequence[int]) -> None:
        ranges = prefix_ranges()
        self._conn = conn
        self._class = lock_class(target)
        self._ranges = [ranges[index] for index in order]
        self._wholes = _Search()
        self._theirs = _Search()
        self._all = _Search()
        self._held: set[int] = set()
        self._open: Cursor | None = None
        self._ahead: tuple[BlobRange, ...] = ()
        with translated("read its indexes"):
            walk_indexes(conn)
            self._parts = read_parts(conn, target)

    @property
    def searching(self) -> bool:
        """Whether the last `take` ended before it had looked into all free ranges."""
        return bool(self._wholes.left or self._theirs.left)

    def take(self, limit: int) -> list[tuple[Blob, int]]:
        """Returns up to limit pending blobs, each with its range's index; [] when nothing free is
        left, or it is still `searching`: the next call goes on.

        Goes on in the open range, then claims free ranges until limit is reached. Blobs of a range
        come in the catalog's order. Each blob is handed out once for a claim.
        """
        deadline = time.monotonic() + _SEARCH_SECONDS
        with translated("claim blobs"):
            taken: list[tuple[Blob, int]] = []
            while len(taken) < limit:
                wanted = limit - len(taken)
                cursors = [self._open] if self._open else self._claim_any(wanted, deadline)
                if not cursors:
                    break
                taken += self._read(cursors, wanted)
        return taken

    def exhausted(self) -> frozenset[int]:
        """Returns the held ranges that give nothing more: release them with their last blob."""
        return frozenset(self._held - {self._open.range.index} if self._open else self._held)

    def release(self, indexes: Iterable[int]) -> None:
        """Frees the ranges, so that anybody may claim them anew. Those not held are left alone."""
        freed = self._held.intersection(indexes)
        if not freed:
            return
        with translated("release ranges"):
            if wholes := sorted(one for one in freed if one < RANGES):
                self._run("unlock_ranges", {"indexes": wholes})
            if some := sorted(one for one in freed if one >= RANGES):
                self._run("unlock_parts", _of_parts(some))
        self._held -= freed
        if self._open and self._open.range.index in freed:
            self._open = None

    def any_pending(self) -> bool | None:
        """Returns whether the catalog has a pending blob, claimed by anyone or not. None while that
        is not known: the next call goes on.
        """
        deadline = time.monotonic() + _SEARCH_SECONDS
        with translated("look for pending blobs"):
            if not self._all.left:
                self._all = _Search(prefix_ranges(), held=True)
            if self._find(self._all, 1, deadline):
                self._all = _Search()
                return True
        return None if self._all.left else False

    def listen(self) -> None:
        """Makes inserts into the catalog wake `fileno`, where `init-db --notify` was run."""
        with translated("listen for new blobs"):
            self._conn.execute(statement("listen"))

    def fileno(self) -> int:
        """Returns the socket, to wait on: readable on a notification, or when it was lost."""
        with translated("wait for new blobs"):
            return self._conn.fileno()

    def drain_notifications(self) -> bool:
        """Returns whether blobs were inserted since the last call. Never waits.

        Ask before waiting on `fileno` too: a notification may have come in with another answer. A
        lost connection stays readable, and is reported by the second call at the latest.
        """
        with translated("listen for new blobs"):
            return bool(list(self._conn.notifies(timeout=0)))

    def _claim_any(self, limit: int, deadline: float) -> list[Cursor]:
        """Locks what is to be read next: more of the range that we hold in parts, or what is free,
        or parts of what others share; [] when there is none, or the search is not over.
        """
        if self._ahead and (cursors := self._lock_parts(self._look(self._ahead, limit))):
            return cursors
        if not self._theirs.left:
            if cursors := self._claim(limit, deadline):
                return self._share(cursors, limit)
            if self._wholes.left:
                return []
            shared = {index for (index,) in self._run("shared_ranges", {})}
            theirs = [parts(one) for one in self._ranges if one.index in shared]
            self._theirs = _Search([one for some in theirs for one in some])
        if found := self._find(self._theirs, limit, deadline):
            self._theirs = _Search()
        return self._lock_parts(found)

    def _share(self, cursors: list[Cursor], limit: int) -> list[Cursor]:
        """Holds the last of these newly locked ranges in parts, if it has many more blobs than
        limit. No other one can have more.
        """
        *others, last = cursors
        whole = last.range
        enough = {**bounds([whole]), "count": limit + WORTH_SHARING}
        ((much,),) = self._run("any_beyond", enough)
        if not much:
            return cursors
        begun = self._lock_parts(self._look(parts(whole), limit))
        self.release([whole.index])
        return others + begun

    def _lock_parts(self, found: Sequence[int]) -> list[Cursor]:
        """Locks parts of ranges, and notes which are ahead; [] where others have locked all."""
        rows = self._run("lock_parts", _of_parts(found)) if found else []
        got = {index for (index,) in rows}
        self._held |= got
        begun = [part(index) for index in found if index in got]
        self._ahead = ()
        if begun:
            last = begun[-1].index
            whole = prefix_ranges()[whole_of(last)]
            self._ahead = tuple(one for one in parts(whole) if one.index > last)
        return [Cursor(one) for one in begun]

    def _claim(self, limit: int, deadline: float) -> list[Cursor]:
        """Locks free ranges that have pending blobs, about limit of them; [] when there are none,
        or the search is not over.

        What is found free may be taken by another before we lock it; then it is not found again.
        """
        if not self._wholes.left:
            self._wholes = _Search(self._ranges)
        while found := self._find(self._wholes, limit, deadline):
            rows = self._run("lock_ranges", {"indexes": found})
            got = {index for (index,) in rows}
            self._held |= got
            if got:
                return self._begin(got)
        return []

    def _find(self, search: _Search, limit: int, deadline: float) -> list[int]:
        """Continues a search until the deadline; returns the first ranges that it finds, or []."""
        while search.left and time.monotonic() < deadline:
            some = search.left[: 1 if search.one_by_one else None]
            try:
                with self._conn.transaction():
                    if not search.one_by_one:
                        limited = int(_SEARCH_SECONDS * 1000)
                        configure(self._conn, "statement_timeout", limited, local=True)
                    found = self._look(some, limit, held=search.held)
            except errors.QueryCanceled:
                if search.one_by_one:
                    raise
                search.one_by_one = True
            else:
                if found:
                    return found
                search.left = search.left[len(some) :]
        return []

    def _look(self, ranges: Sequence[BlobRange], limit: int, *, held: bool = False) -> list[int]:
        """Returns those that are free, or held too, and have pending blobs; no more than limit
        takes.
        """
        locks = None if held else self._class
        rows = self._run("free_ranges", {**bounds(ranges), "limit": limit, "class": locks})
        return [index for (index,) in rows]

    def _begin(self, indexes: set[int]) -> list[Cursor]:
        """Returns the ranges from their beginnings, in order; the next search starts after the last
        one.
        """
        places = [nth for nth, one in enumerate(self._ranges) if one.index in indexes]
        cursors = [Cursor(self._ranges[nth]) for nth in places]
        after = places[-1] + 1
        self._ranges = self._ranges[after:] + self._ranges[:after]
        self._wholes = _Search()
        return cursors

    def _read(self, cursors: Sequence[Cursor], limit: int) -> list[tuple[Blob, int]]:
        """Reads the locked ranges on, until limit or their end; notes which of them is open then.

        The statement begins after the locks were taken, so it sees what their last holder
        committed.
        """
        rows = self._run("pending_blobs", {**reading(cursors), "limit": limit})
        self._open = None
        if len(rows) == limit:
            index, past, _ = rows[-1]
            ranges = {cursor.range.index: cursor.range for cursor in cursors}
            self._open = Cursor(ranges[index], past)
        # Others may have emptied a range before we locked it, or inserts filled the batch before
        # it.
        if fresh := {cursor.range.index for cursor in cursors if cursor.past is None}:
            self.release(fresh.difference(index for index, _, _ in rows))
        # Without a unique index a blobid may stand there twice, next to each other. It is sent
        # once.
        return list({blobid: (Blob(blobid, size), index) for index, blobid, size in rows}.values())

    def _run(self, name: str, values: dict[str, object]) -> list[tuple[Any, ...]]:
        query = statement(name, **self._parts)
        # Numbers are quicker to read as bytes than as digits.
        return self._conn.execute(query, {"class": self._class, **values}, binary=True).fetchall()


def _of_parts(indexes: Iterable[int]) -> dict[str, object]:
    """Returns the values of a statement that locks or unlocks parts of ranges."""
    some = list(indexes)
    return {"parts": some, "wholes": [whole_of(one) for one in some]}


def holders(conn: Connection, target: str) -> list[Holder]:
    """Returns who holds which range of the target at this moment, by index."""
    with translated("list who holds its ranges"):
        rows = conn.execute(statement("holders"), {"class": lock_class(target)}).fetchall()
    return [Holder(*row) for row in rows]
