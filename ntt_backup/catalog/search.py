"""Decides where a search for pending blobs looks next: slice by slice, at dead entries last.

A blob that was marked leaves a dead entry in the index of pending blobs until vacuum comes. The
first walk over a dead entry costs as much as to read its row, and no limit of rows ends it. But
blobids are hashes, so the width of a slice bounds how many entries it has. Slices are narrow, and
the server looks at the clock between them.

Where the time was over and nothing found, the rest of the stretch is put off until all else was
looked into. First its upper half is tried once, because a range is worked upwards and the rest of
a begun one lies there. In the end what was put off is looked into, one stretch after the other.

All of it is computed from positions in the space of blobids. What is no hex has no position, and is
not cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from ntt_backup.catalog.pending import Stretch
from ntt_backup.catalog.ranges import interval
from ntt_backup.model import BlobRange

_DIGITS: Final = 12
_SPACE: Final = 16**_DIGITS
_HEX: Final = re.compile(rf"[0-9a-f]{{0,{_DIGITS}}}")
_ENTRIES: Final = 64  # of a table without gaps, in the first slice of a stretch
_WIDEST: Final = 64  # times the first: each is twice as wide as the one before, up to this
_NARROW: Final = 8  # at first, and where the time was over: then up to this
_SLICES: Final = 32  # of a look, times the widest
FEWEST_SLICES: Final = 64

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
        return cut(self._left, self._rows, _SLICES * self._widest, self._widest)

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
    """Returns the stretches that are left after the first slices are done.

    Args:
        stretches: The stretches that were cut.
        slices: The slices of these stretches.
        done: The number of slices that are done.
        past: The blobid up to which the last of these is done; None for all of it.
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
        begin, end = _position(one.lo) or 0, _position(one.hi) or 0
        if begin < hi and end > lo:
            first, last = begin <= lo, end >= hi
            low, past = (stretch.lo, stretch.past) if first else (one.lo, None)
            found.append(Stretch(one.index, low, stretch.hi if last else one.hi, past))
    return found


def _upper_half(stretch: Stretch) -> Stretch | None:
    """Returns the upper half of a stretch; None where as much of its range, or part, lies below."""
    lo, hi = _position(stretch.lo), _position(stretch.hi)
    start = _position(interval(stretch.index).lo) or 0
    if lo is None or hi is None or hi - lo <= lo - start:
        return None
    return Stretch(stretch.index, f"{(lo + hi + 1) // 2:0{_DIGITS}x}", stretch.hi)


def _position(blobid: str | None) -> int | None:
    """Returns the place of a blobid in the space, its end for None; None for what is no hex."""
    if blobid is None:
        return _SPACE
    digits = blobid[:_DIGITS]
    return int(digits.ljust(_DIGITS, "0"), 16) if _HEX.fullmatch(digits) else None
