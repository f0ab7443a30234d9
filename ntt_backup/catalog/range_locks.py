"""Claims of ranges by advisory locks, and the pending blobs in them, in order.

Several workers, on several hosts, share one catalog. A claim is a session's advisory lock on a
range: it vanishes with the connection, so none can go stale, and it costs no write. Whoever loses
the connection must stop handing out what it had taken.

    free --take--> open --read to its end--> exhausted --release--> free

A range in which much is left behind the first batch is held in parts, for several workers. Each
part is a lock of its own. Whoever holds a part also holds a shared lock on the range, so nobody can
lock the range as a whole. Where nothing whole is free, a session helps with parts of ranges that
others hold. All hosts must know of parts: one that does not takes such a range.

A range that gives nothing more stays locked while its blobs are under way, else another worker
would send them again. A range that is claimed again is read from its beginning, since blobs may
have been inserted behind what was read.

No statement is long, however many dead entries the index has (see `search`): what takes long is put
off, and looked into at last, over as many calls as that takes. A search never looks into the same
place twice. When one has found nothing at all, nothing free is left.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.pending import (
    Stretch,
    bounds,
    read_parts,
    reading,
    rows_about,
    walk_indexes,
)
from ntt_backup.catalog.queries import fragment, statement
from ntt_backup.catalog.ranges import (
    RANGES,
    WORTH_SHARING,
    interval,
    parts,
    prefix_ranges,
    whole_of,
)
from ntt_backup.catalog.search import FEWEST_SLICES, Found, Search, cut, rest_of, within
from ntt_backup.model import Blob

# How long a search may take before its caller is asked whether anything else is to be done.
_SEARCH_SECONDS: Final = 0.1
# How long one statement may take that finds nothing: not long while there is anything else to look
# into. Reading rows may be slow for better reasons.
_LOOK_MS: Final = 3
_LOOK_AGAIN_MS: Final = 10
_READ_MS: Final = 50


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


class Claims:
    """The ranges that one connection holds, whose settings it may change.

    order lists range indexes, those to try first in front. Every method raises CatalogUnavailable
    when the connection is lost. All claims are lost with it: make a new object on a new connection.

    Attributes:
        searching: Whether the last `take` ended before it had looked into all free ranges.
    """

    # Of a round of searches: about how many rows the table has, and whether anything was read.
    _rows = 0
    _found = False
    searching = False

    def __init__(self, conn: Connection, target: str, order: Sequence[int]) -> None:
        self._conn = conn
        self._class = lock_class(target)
        self._order = order
        self._held: set[int] = set()
        self._open: list[Stretch] = []
        with translated("read its indexes"):
            walk_indexes(conn)
            self._parts = read_parts(conn, target)
        self._parts["taken"] = fragment("taken")
        self._searches = self._rounds()
        self._search = self._any = Search()

    def take(self, limit: int) -> list[tuple[Blob, int]]:
        """Returns pending blobs, each with the index of its range.

        The method continues in the open ranges, then claims free ones until `limit` is reached.
        Blobs come in the catalog's order, except those that were put off. Each blob is handed out
        once for a claim.

        Args:
            limit: The maximum number of blobs.

        Returns:
            The blobs; none if nothing free is left, or if the claims are still `searching`: the
            next call continues.
        """
        taken: list[tuple[Blob, int]] = []
        with translated("claim blobs"):
            while len(taken) < limit and (self._open or self._claim(limit - len(taken), limit)):
                taken += self._read(limit - len(taken))
        return taken

    def exhausted(self) -> frozenset[int]:
        """Returns the held ranges that give nothing more: release them with their last blob."""
        return frozenset(self._held.difference(one.index for one in self._open))

    def release(self, indexes: Iterable[int]) -> None:
        """Frees the ranges, so that anybody may claim them anew. Those not held are left alone."""
        freed = self._held.intersection(indexes)
        if not freed:
            return
        with translated("release ranges"):
            self._run("unlock_ranges", _with_wholes(freed))
        self._held -= freed
        self._open = [one for one in self._open if one.index not in freed]

    def any_pending(self) -> bool | None:
        """Returns whether the catalog has a pending blob, claimed by any session or not.

        Returns:
            None while the answer is not known: the next call continues the search.
        """
        deadline = time.monotonic() + _SEARCH_SECONDS
        with translated("look for pending blobs"):
            self._any = self._any or Search(prefix_ranges(), rows_about(self._conn))
            if self._find(self._any, 1, 1, deadline, held=True).stretches:
                self._any = Search()
                return True
        return None if self._any else False

    def listen(self) -> None:
        """Makes inserts into the catalog wake `fileno`, where `init-db --notify` was run."""
        self._conn.ask("listen for new blobs", "listen")

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

    def _rounds(self) -> Iterator[Search]:
        """Yields searches of all ranges, then of the parts of shared ranges, round by round.

        The rounds end with a round that has given nothing. Ranges and parts that this session holds
        are left out.
        """
        self._found = True
        while self._found:
            self._found = False
            self._conn.rows("plan_anew")
            self._rows = rows_about(self._conn)
            held = {whole_of(one) for one in self._held}
            yield Search([interval(one) for one in self._order if one not in held], self._rows)
            shared = {index for (index,) in self._run("shared_ranges", {})}
            shared -= self._held  # What we hold as a whole is under way: no part is free.
            theirs = [one for index in self._order if index in shared for one in parts(index)]
            yield Search([one for one in theirs if one.index not in self._held], self._rows)

    def _claim(self, wanted: int, batch: int) -> bool:
        """Locks and opens free ranges that have pending blobs.

        A range with more than a batch is held in parts. Another session may lock a range after the
        search found the range free; the search then does not find that range again.

        Args:
            wanted: About how many blobs the ranges should have together.
            batch: The number of blobs in a batch.

        Returns:
            False if there are no such ranges, or if the search is not over.
        """
        deadline = time.monotonic() + _SEARCH_SECONDS
        self.searching = True
        while not self._open and time.monotonic() < deadline:
            if not self._search:
                search = next(self._searches, None)
                if search is None:
                    self._searches = self._rounds()
                    self.searching = False
                    break
                self._search = search
            found, much = self._find(self._search, wanted, batch, deadline)
            if found and found[-1].index < RANGES and much >= WORTH_SHARING:
                last = found.pop()
                if found:
                    # Its blobs may not all be counted: a look that begins with it tells.
                    self._search.put_first([last])
                elif much >= batch + WORTH_SHARING:
                    self._search.put_first(within(last, parts(last.index)))
                else:
                    found = [last]
            if found:
                free = {one.index for one in found} - self._held
                locked = self._run("lock_ranges", _with_wholes(free))
                self._held.update(index for (index,) in locked)
                self._open = [one for one in found if one.index in self._held]
        return bool(self._open)

    def _find(
        self, search: Search, wanted: int, batch: int, deadline: float, *, held: bool = False
    ) -> Found:
        """Continues a search until the deadline, and returns the stretches that are found first.

        Blobs are counted until the count exceeds a batch by a number that is worth sharing.

        Args:
            search: The search.
            wanted: About how many blobs the stretches should have together.
            batch: The number of blobs in a batch.
            deadline: The deadline in monotonic seconds.
            held: Whether to look also into ranges that a session holds.
        """
        while search and time.monotonic() < deadline:
            slices = search.slices()
            values = {
                **bounds([piece for _, piece in slices]),
                "class": None if held else self._class,
                "limit": batch + WORTH_SHARING + len(slices),  # A slice without any counts as one.
                "milliseconds": _LOOK_AGAIN_MS if search.again else _LOOK_MS,
            }
            counts = [count for _, count in self._run("free_slices", values)]
            found = search.looked(slices, counts, wanted)
            if found.stretches:
                return found
        return Found([])

    def _read(self, limit: int) -> list[tuple[Blob, int]]:
        """Reads the open ranges on, until limit, their end, or one that takes long for nothing.

        The statement begins after the locks were taken, so it sees what their last holder
        committed.
        """
        slices = cut(self._open, self._rows, max(FEWEST_SLICES, len(self._open)))
        rows = self._run("pending_blobs", reading([piece for _, piece in slices], limit, _READ_MS))
        done, last, _ = rows[-1]
        left = rest_of(self._open, slices, done, last if len(rows) == limit else None)
        # Without a unique index a blobid may stand there twice, next to each other. It is sent
        # once.
        taken = {
            blobid: (Blob(blobid, size), slices[nth - 1][1].index)
            for nth, blobid, size in rows
            if blobid is not None
        }
        if not taken and done < len(slices) and len(left) == len(self._open):
            self._search.put_off(left.pop(0))
        self._open = left
        self._found = self._found or bool(taken)
        return list(taken.values())

    def _run(self, name: str, values: dict[str, object]) -> list[tuple[Any, ...]]:
        query = statement(name, **self._parts)
        values = {"class": self._class, **values}
        # Numbers are quicker to read as bytes than as digits. Where the session may prepare, its
        # plans are kept for a round of searches: they hold no bound of a range.
        return self._conn.execute(query, values, binary=True, prepare=True).fetchall()


def _with_wholes(indexes: Iterable[int]) -> dict[str, object]:
    """Returns the values of a statement that locks or unlocks ranges, and parts of ranges."""
    some = sorted(indexes)
    return {"indexes": some, "wholes": [whole_of(one) for one in some]}


def holders(conn: Connection, target: str) -> list[Holder]:
    """Returns who holds which range of the target at this moment, by index."""
    values = {"class": lock_class(target)}
    return [Holder(*row) for row in conn.ask("list who holds its ranges", "holders", **values)]
