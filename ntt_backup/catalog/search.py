"""Decides where a search for pending blobs looks next: slice by slice, at dead entries last.

A blob that was marked leaves a dead entry in the index of pending blobs until vacuum comes. The
first walk over a dead entry costs as much as to read its row, and no limit of rows ends it. But
blobids are hashes, so the width of a slice bounds how many entries it has. Slices are narrow, and
the server looks at the clock between them.

Where the time was over and nothing found, the rest of the stretch is put off until all else was
looked into. Before that its upper half is tried once: what is left of a range that somebody began
lies there. Where it has something, the next ranges are looked into from the same place on: they
probably begin with dead entries, too. Where it has nothing, the next stretches were probably sent
as well: so one is skipped, then three, then seven. What was skipped comes after all the others, and
what was put off comes last.

All of it is computed from positions in the space of blobids. What is no hex has no position, and is
not cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from ntt_backup.catalog.pending import Stretch
from ntt_backup.catalog.ranges import RANGES, WORTH_SHARING, interval
from ntt_backup.model import BlobRange

_DIGITS: Final = 12
_SPACE: Final = 16**_DIGITS
_RANGE: Final = _SPACE // RANGES
_HEX: Final = re.compile(rf"[0-9a-f]{{0,{_DIGITS}}}")
_ENTRIES: Final = 64  # of a table without gaps, in the first slice of a stretch
_WIDEST: Final = 64  # times the first: each is twice as wide as the one before, up to this
_NARROW: Final = 8  # where the time was over: then up to this, until looks are quick again
FEWEST_SLICES: Final = 64
_MOST_SLICES: Final = 2048

Slices = Sequence[tuple[int, Stretch]]


class Found(NamedTuple):
    """Stretches that begin with a pending blob. much: about how many blobs the last one has, where
    that is far more than was wanted; else 0.
    """

    stretches: Sequence[Stretch] = ()
    much: int = 0


class Search:
    """The stretches that are still to be looked into. It is true while there are any.

    rows: about how many the table has.
    """

    # About how many blobs each of the first stretches has that need no look.
    _each = 1

    def __init__(self, ranges: Iterable[BlobRange] = (), rows: int = 0) -> None:
        self._left = [Stretch(one.index, one.lo, one.hi) for one in ranges]
        # What was put off, and whether that is looked into now.
        self._later: list[Stretch] = []
        self._again = False
        self._rows = rows
        # How many of the first stretches need no look.
        self._full = 0
        # The slices of the next look, the widest of them, and how many stretches are skipped after
        # the next slow one.
        self._most = RANGES
        self._widest = _NARROW
        self._skipped = 0
        # Where in the next range its first look begins: what lies before is skipped.
        self._from = 0

    def __bool__(self) -> bool:
        return bool(self._left or self._later)

    @property
    def again(self) -> bool:
        """Returns whether the search has come to what took long before: nothing else is left."""
        return self._again

    def slices(self) -> Slices:
        """Returns what to look into next: each slice with the place of its stretch."""
        if not self._left:
            self._left, self._later, self._again = self._later, [], True
        first = self._left[0]
        if first.index < RANGES and (upper := _upper(first, first.index * _RANGE + self._from)):
            self._left[0] = upper
            self._left.append(replace(first, hi=upper.lo))
        return cut(self._left, self._rows, self._most, self._widest)

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
        last = slices[len(counts) - 1]
        if begins:
            return self._found(begins, last, total - wanted, (of_last, counts[-1]))
        done = len(counts)
        left = rest_of(self._left, slices, done)
        over = done < len(slices)
        # Not even the first stretch was looked into as a whole.
        slow = over and len(left) == len(self._left)
        self._from = 0
        self._left = left[1:] if slow else left
        if slow and not self.put_off(left[0]):
            self._left = self._left[self._skipped :] + self._left[: self._skipped]
            self._skipped = 2 * self._skipped + 1
        if over and done < FEWEST_SLICES:
            self._most, self._widest = FEWEST_SLICES, _NARROW
        else:
            self._most = done if over else min(2 * self._most, _MOST_SLICES)
            self._widest = min(2 * self._widest, _WIDEST)
        return Found()

    def put_off(self, stretch: Stretch) -> bool:
        """Has a stretch that took long looked into after all others. Returns whether its upper half
        is the next.
        """
        self.doubt()
        half = _upper_half(stretch)
        if half is None:
            self._later.append(stretch)
        else:
            self._from = _span("", half.lo) % _RANGE
            self._later.append(replace(stretch, hi=half.lo))
            self._left.insert(0, half)
        return half is not None

    def share(self, stretch: Stretch, parts: Iterable[BlobRange], blobs: int) -> None:
        """Makes the parts of a stretch the next ones. It has about so many blobs, and they are
        hashes: so all parts are taken for full, until there is a doubt.
        """
        pieces = within(stretch, parts)
        self._left[:0] = pieces
        self._full, self._each = len(pieces), max(1, blobs // len(pieces))

    def doubt(self) -> None:
        """Has the next stretches looked into: one that was taken for full was not."""
        self._full = 0

    def full(self, wanted: int) -> Found:
        """Returns the next stretches that need no look, as many as have so many blobs, and forgets
        these.
        """
        count = min(self._full, -(-wanted // self._each))
        some, self._left = self._left[:count], self._left[count:]
        self._full -= count
        return Found(some)

    def _found(
        self,
        begins: dict[int, Stretch],
        last: tuple[int, Stretch],
        beyond: int,
        counted: tuple[int, int],
    ) -> Found:
        """Forgets what was found. counted: the blobs of the last stretch, and of the last slice."""
        found = [replace(piece, hi=self._left[nth].hi) for nth, piece in begins.items()]
        *_, end = begins
        much, of_piece = counted
        nth, piece = last
        if nth == end:
            begin, one = begins[end].lo, piece is begins[end]
            # The limit may have ended the last slice's count.
            looked = _span(begin, piece.hi if one else piece.lo)
            sure = much if one else much - of_piece
            more = max(0, sure * _span(begin, self._left[end].hi) // max(looked, 1) - much)
            beyond += more
            much += more
        self._left = self._left[end + 1 :]
        if beyond >= 0:
            self._most = max(self._most // 2, FEWEST_SLICES)
        self._skipped = 0
        return Found(found, much if beyond > WORTH_SHARING else 0)


def cut(stretches: Sequence[Stretch], rows: int, most: int, widest: int = _WIDEST) -> Slices:
    """Returns the first slices of stretches, at least one; each with the place of its stretch.

    widest: how many times as wide as the first a slice may be.
    """
    first = max(1, _SPACE * _ENTRIES // max(rows, _ENTRIES))
    slices: list[tuple[int, Stretch]] = []
    for nth, one in enumerate(stretches):
        if len(slices) >= most:
            break
        lo, end = _position(one.lo), _position(one.hi)
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
    """Returns what is left after the first slices are done with: the last one up to the blobid
    past, or all of it.
    """
    nth, piece = slices[done - 1]
    begun = stretches[nth]
    rest = list(stretches[nth + 1 :])
    if past is not None:
        return [replace(begun, lo=past, past=past), *rest]
    return rest if piece.hi == begun.hi else [Stretch(begun.index, piece.hi or "", begun.hi), *rest]


def within(stretch: Stretch, ranges: Iterable[BlobRange]) -> list[Stretch]:
    """Returns what the stretch has of each of the ranges, which follow each other."""
    lo, hi = _position(stretch.lo), _position(stretch.hi)
    if lo is None or hi is None:
        return [Stretch(one.index, one.lo, one.hi) for one in ranges]
    found = []
    for one in ranges:
        begin, end = _span("", one.lo), _span("", one.hi)
        if begin < hi and end > lo:
            first, last = begin <= lo, end >= hi
            low, past = (stretch.lo, stretch.past) if first else (one.lo, None)
            found.append(Stretch(one.index, low, stretch.hi if last else one.hi, past))
    return found


def _upper_half(stretch: Stretch) -> Stretch | None:
    """Returns the upper half of a stretch; None where as much of its range, or part, lies below."""
    left = _span(stretch.lo, stretch.hi)
    if left <= _span(interval(stretch.index).lo, stretch.lo):
        return None
    return _upper(stretch, _span("", stretch.hi) - left // 2)


def _upper(stretch: Stretch, begin: int) -> Stretch | None:
    """Returns what the stretch has from a place within it on; None where that is not within it."""
    lo, hi = _position(stretch.lo), _position(stretch.hi)
    if lo is None or hi is None or not lo < begin < hi:
        return None
    return Stretch(stretch.index, f"{begin:0{_DIGITS}x}", stretch.hi)


def _span(lo: str | None, hi: str | None) -> int:
    begin, end = _position(lo), _position(hi)
    return 0 if begin is None or end is None else max(0, end - begin)


def _position(blobid: str | None) -> int | None:
    """Returns the place of a blobid in the space, its end for None; None for what is no hex."""
    if blobid is None:
        return _SPACE
    digits = blobid[:_DIGITS]
    return int(digits.ljust(_DIGITS, "0"), 16) if _HEX.fullmatch(digits) else None
