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

No statement is long, however many dead entries the index has: what takes long is put off, and
looked into at last, over as many calls as that takes. A search never looks into the same place
twice. When one has found nothing at all, nothing free is left.

A blob that was marked leaves a dead entry in the index of pending blobs until vacuum comes. The
first walk over a dead entry costs as much as to read its row, and no limit of rows ends it. But
blobids are hashes, so the width of a slice bounds how many entries it has. Slices are narrow, and
the server looks at the clock between them. Where the time was over and nothing found, the rest of
the stretch is put off until all else was looked into. First its upper half is tried once, because a
range is worked upwards and the rest of a begun one lies there. In the end what was put off is
looked into, one stretch after the other.

All of it is computed from positions in the space of blobids. What is no hex has no position, and is
not cut.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, zip_longest
from typing import Any, Final, NamedTuple

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.pending import (
    Stretch,
    bounds,
    read_parts,
    reading,
    rows_about,
    walk_indexes,
)
from ntt_backup.catalog.statements import fragment, statement
from ntt_backup.errors import CatalogError
from ntt_backup.model import ALL_BLOBS, Blob, BlobRange, Part

# All hosts that share a catalog must agree on these, since a range's index is its advisory lock.
RANGES = 256
PARTS = 16
# A range is shared with other workers where at least so many blobs are left behind the next batch.
WORTH_SHARING = 256
# How long a search may take before its caller is asked whether anything else is to be done.
_SEARCH_SECONDS: Final = 0.1
# How long one statement may take that finds nothing: not long while there is anything else to look
# into. Reading rows may be slow for better reasons.
_LOOK_MS: Final = 3
_LOOK_AGAIN_MS: Final = 10
_READ_MS: Final = 50

_DIGITS: Final = 12
_SPACE: Final = 16**_DIGITS
_HEX: Final = re.compile(rf"[0-9a-f]{{0,{_DIGITS}}}")
_ENTRIES: Final = 64  # of a table without gaps, in the first slice of a stretch
_WIDEST: Final = 64  # times the first: each is twice as wide as the one before, up to this
_NARROW: Final = 8  # at first, and where the time was over: then up to this
_FEWEST_SLICES: Final = 64


@cache
def prefix_ranges() -> tuple[BlobRange, ...]:
    """Cuts the whole space of blobids at the two-digit hex prefixes.

    The first range starts at '' and the last has no end, so that every text, also one that is no
    blobid, lies in exactly one range, whatever the database's collation makes of it.
    """
    return _joined(0, ["", *(f"{index:02x}" for index in range(1, RANGES))], None)


def ranges_below(digits: int) -> tuple[tuple[str, BlobRange], ...]:
    """Cuts the whole space of blobids at the prefixes of so many digits, at most two.

    Returns:
        Each prefix with its range, whose index is the place of the prefix.
    """
    ranges, count = prefix_ranges(), 16**digits
    found = []
    for nth in range(count):
        some = ranges[nth * len(ranges) // count : (nth + 1) * len(ranges) // count]
        prefix = range_name(some[0].index)[:digits]
        found.append((prefix, BlobRange(nth, some[0].lo, some[-1].hi)))
    return tuple(found)


def parts(index: int) -> tuple[BlobRange, ...]:
    """Cuts a range at the third digit. The indexes of the parts follow on those of all ranges."""
    whole = prefix_ranges()[index]
    cuts = [whole.lo, *(f"{index:02x}{part:x}" for part in range(1, PARTS))]
    return _joined(RANGES + PARTS * index, cuts, whole.hi)


def _joined(index: int, cuts: Sequence[str], end: str | None) -> tuple[BlobRange, ...]:
    ends = [*cuts[1:], end]
    return tuple(BlobRange(index + nth, cuts[nth], ends[nth]) for nth in range(len(cuts)))


def interval(index: int) -> BlobRange:
    """Returns the range, or the part of one, that has this index."""
    if index < RANGES:
        return prefix_ranges()[index]
    return parts(whole_of(index))[(index - RANGES) % PARTS]


def whole_of(index: int) -> int:
    """Returns the index of the range that this is a part of; its own, where it is no part."""
    return index if index < RANGES else (index - RANGES) // PARTS


def range_name(index: int) -> str:
    """Returns the digits that the blobids of a range, or of a part, begin with."""
    return f"{index:02x}" if index < RANGES else f"{index - RANGES:03x}"


def claim_order(worker: int, workers: int, part: Part = ALL_BLOBS) -> tuple[int, ...]:
    """Returns the order in which a worker, counted from 0, tries the ranges of a part.

    The worker tries its own share first, then the shares of the other workers from their ends. Each
    worker works its share upwards, so what is left lies at the ends. Ranges that are done are tried
    last: they are full of dead rows until vacuum runs, and each has to be looked at.
    """
    ranges = part.prefixes
    starts = [one * len(ranges) // workers for one in range(workers + 1)]
    shares = [ranges[start:end] for start, end in pairwise(starts)]
    own, *others = shares[worker:] + shares[:worker]
    rest = (one for tier in zip_longest(*map(reversed, others)) for one in tier)
    return (*own, *(one for one in rest if one is not None))


def lock_class(name: str) -> int:
    """Returns the first key of our advisory locks: a signed 32-bit hash, the same on every host.

    BLAKE2b of "ntt_backup:" + name, four bytes, big-endian. The second key is the range's index.
    """
    digest = hashlib.blake2b(f"ntt_backup:{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big", signed=True)


@contextmanager
def take_turns(conn: Connection, doing: str, lock: Mapping[str, object]) -> Iterator[bool]:
    """Takes a turn that one session of the catalog has at a time, and gives it back at the end.

    Args:
        conn: The catalog.
        doing: What is done in the turn, for errors.
        lock: The advisory lock that stands for the turn.

    Yields:
        Whether this session has the turn.
    """
    doing = f"take turns in {doing}"
    ((taken,),) = conn.ask(doing, "try_lock", **lock)
    try:
        yield taken
    finally:
        if taken and not conn.closed:
            with suppress(CatalogError):  # A broken session has no turn any more.
                conn.ask(doing, "unlock", **lock)


def wake_workers(conn: Connection) -> None:
    """Wakes the daemons that wait for new blobs."""
    conn.ask("wake the daemons", "wake_workers")


@dataclass(frozen=True, slots=True)
class Holder:
    """A session that holds a range, or a part of one."""

    index: int
    application_name: str
    pid: int


class Claims:
    """The ranges that one connection holds, whose settings it may change.

    order lists range indexes, those to try first in front; no other range is looked into. Every
    method raises CatalogUnavailable when the connection is lost. All claims are lost with it: make
    a new object on a new connection.

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
        """Returns pending blobs, each with the index of its range, at most `limit`.

        The method continues in the open ranges, then claims free ones until `limit` is reached.
        Blobs come in the catalog's order, except those that were put off. Each blob is handed out
        once for a claim. None come if nothing free is left, or if the claims are still `searching`:
        the next call continues.
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

    def reopen(self, indexes: Iterable[int]) -> None:
        """Has ranges that are held read anew: blobs may have been inserted behind what was read.

        Blobs that were handed out and are still pending are handed out once more.
        """
        again = self._held.intersection(indexes).difference(one.index for one in self._open)
        whole = map(interval, sorted(again))
        self._open += [Stretch(one.index, one.lo, one.hi) for one in whole]

    def any_pending(self) -> bool | None:
        """Returns whether the ranges have a pending blob, claimed by any session or not.

        None where that is not known yet: the next call continues the search.
        """
        deadline = time.monotonic() + _SEARCH_SECONDS
        with translated("look for pending blobs"):
            if not self._any:
                ranges = map(interval, sorted(self._order))
                self._any = Search(ranges, rows_about(self._conn))
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
        """Locks and opens free ranges that have pending blobs, together about as many as wanted.

        A range with more than a batch is held in parts. Another session may lock a range after the
        search found the range free; the search then does not find that range again. Returns False
        if there are no such ranges, or if the search is not over.
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

        Blobs are counted until the count exceeds a batch by a number that is worth sharing. held:
        whether to look also into ranges that a session holds.
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
        slices = cut(self._open, self._rows, max(_FEWEST_SLICES, len(self._open)))
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


# --- where a search looks next --------------------------------------------------------------------

Slices = Sequence[tuple[int, Stretch]]


class Found(NamedTuple):
    """Stretches that begin with a pending blob. much: how many blobs were counted in the last."""

    stretches: list[Stretch]
    much: int = 0


class Search:
    """The stretches that are still to be looked into. It is true while there are any.

    Attributes:
        again: Whether the search has come to what took long before: nothing else is left.
    """

    def __init__(self, ranges: Iterable[BlobRange] = (), rows: int = 0) -> None:
        """rows: about how many the table has."""
        self._left = [Stretch(one.index, one.lo, one.hi) for one in ranges]
        self._later: list[Stretch] = []
        self._rows = rows
        self._widest = _NARROW
        self.again = False

    def __bool__(self) -> bool:
        return bool(self._left or self._later)

    def slices(self) -> Slices:
        """Returns what to look into next: each slice with the place of its stretch."""
        if not self._left:
            self._left, self._later, self.again = self._later, [], True
        # The narrower the slices, the fewer: where the time was over, few are looked into.
        most = self._widest // 2 * self._widest
        return cut(self._left, self._rows, most, self._widest)

    def looked(self, slices: Slices, counts: Sequence[int], wanted: int) -> Found:
        """Notes how many blobs each of the first slices has; the others were not looked into.

        Returns no more stretches than it takes to have as many blobs as wanted, and forgets these.
        """
        begins: dict[int, Stretch] = {}
        total = of_last = 0
        for (nth, piece), count in zip(slices, counts, strict=False):
            if count and nth not in begins:
                if total >= wanted:
                    break
                begins[nth], of_last = piece, 0
            total += count
            of_last += count
        if begins:
            found = [replace(piece, hi=self._left[nth].hi) for nth, piece in begins.items()]
            del self._left[: max(begins) + 1]
            return Found(found, of_last)
        over = len(counts) < len(slices)
        left = rest_of(self._left, slices, len(counts))
        # Not even the first stretch was looked into as a whole.
        slow = over and len(left) == len(self._left) and not self.again
        self._left = left[1:] if slow else left
        if slow:
            self.put_off(left[0])
        self._widest = _NARROW if over else min(2 * self._widest, _WIDEST)
        return Found([])

    def put_off(self, stretch: Stretch) -> None:
        """Has a stretch that took long looked into after all others, but its upper half next."""
        if half := _upper_half(stretch):
            self._left.insert(0, half)
            stretch = replace(stretch, hi=half.lo)
        self._later.append(stretch)

    def put_first(self, stretches: Sequence[Stretch]) -> None:
        """Has stretches looked into before all others."""
        self._left[:0] = stretches


def cut(stretches: Sequence[Stretch], rows: int, most: int, widest: int = _WIDEST) -> Slices:
    """Returns the first slices of stretches, at least one; each with the place of its stretch.

    widest: how many times as wide as the first a slice may be.
    """
    first = max(1, _SPACE * _ENTRIES // max(rows, _ENTRIES))
    slices: list[tuple[int, Stretch]] = []
    for nth, one in enumerate(stretches):
        if len(slices) >= most:
            break
        lo, end = position(one.lo), position(one.hi)
        begin, past, width = one.lo, one.past, first
        while lo is not None and end is not None and lo + width < end and len(slices) < most:
            lo += width
            width = min(2 * width, widest * first)
            middle = f"{lo:0{_DIGITS}x}"
            slices.append((nth, Stretch(one.index, begin, middle, past)))
            begin, past = middle, None
        if len(slices) < most:
            slices.append((nth, Stretch(one.index, begin, one.hi, past)))
    return slices


def rest_of(
    stretches: Sequence[Stretch], slices: Slices, done: int, past: str | None = None
) -> list[Stretch]:
    """Returns the stretches that are left after the first slices of them are done.

    done: the number of slices. past: the blobid up to which the last of these is done; None for all
    of it.
    """
    nth, piece = slices[done - 1]
    begun = stretches[nth]
    rest = list(stretches[nth + 1 :])
    if past is not None:
        return [replace(begun, lo=past, past=past), *rest]
    return rest if piece.hi == begun.hi else [Stretch(begun.index, piece.hi or "", begun.hi), *rest]


def within(stretch: Stretch, ranges: Iterable[BlobRange]) -> list[Stretch]:
    """Returns what the stretch has of each of the ranges, which follow each other."""
    lo, hi = position(stretch.lo), position(stretch.hi)
    if lo is None or hi is None:
        return [Stretch(one.index, one.lo, one.hi) for one in ranges]
    found = []
    for one in ranges:
        begin, end = position(one.lo) or 0, position(one.hi) or 0
        if begin < hi and end > lo:
            first, last = begin <= lo, end >= hi
            low, past = (stretch.lo, stretch.past) if first else (one.lo, None)
            found.append(Stretch(one.index, low, stretch.hi if last else one.hi, past))
    return found


def _upper_half(stretch: Stretch) -> Stretch | None:
    """Returns the upper half of a stretch; None where as much of its range, or part, lies below."""
    lo, hi = position(stretch.lo), position(stretch.hi)
    start = position(interval(stretch.index).lo) or 0
    if lo is None or hi is None or hi - lo <= lo - start:
        return None
    return Stretch(stretch.index, f"{(lo + hi + 1) // 2:0{_DIGITS}x}", stretch.hi)


def position(blobid: str | None) -> int | None:
    """Returns the place of a blobid in the space, its end for None; None for what is no hex."""
    if blobid is None:
        return _SPACE
    digits = blobid[:_DIGITS]
    return int(digits.ljust(_DIGITS, "0"), 16) if _HEX.fullmatch(digits) else None
