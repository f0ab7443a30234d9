"""A dump may be one of a series: a whole one is all segments, an increment what changed in them.

The file is one frame of zstd after the other. Each is preceded by a skippable one, which says what
becomes of it: a segment of its own, or a patch of some segments of the whole dump. Segments that
are the same as there have no frame. So `zstd -dc` makes of a whole dump what pg_dump wrote.

An increment refers to a whole dump, never to another increment, and from its beginning to its end:
both are read in one pass, and a lost increment harms no other dump. docs/series-format.md is the
contract.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol, TypeVar
from zlib import crc32

import zstandard
from blake3 import blake3

from ntt_backup.dump import patch
from ntt_backup.dump.removed import Findable, Removed
from ntt_backup.dump.segments import MOST, Cutter

K = TypeVar("K")

# Magic number of a skippable frame and its length; then the first segment of the whole dump and
# how many, the bytes of the frame that follows, and of the segment.
_HEAD: Final = struct.Struct("<6I")
_WHOLE: Final = 0x184D2A5D
_PATCH: Final = 0x184D2A5E
_REST: Final = 16
# Of random hex digits level 1 makes less than higher ones do.
_LEVEL: Final = 1
# So many segments of the whole dump may go into one patch.
_NEAR: Final = 4
# After so many patches in a row that saved little, one segment in eight is tried.
_VAIN: Final = 4
# Patches are made thoroughly while they are one part in so many of the whole.
_FEW: Final = 50
_NOWHERE: Final = -_NEAR


class SeriesDamaged(Exception):
    """What should be a dump of a series is none, or does not fit the whole dump."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of a dump. digest: its BLAKE3; mark: a checksum of its last line; frame: the
    segment, compressed.
    """

    digest: bytes
    mark: int
    size: int
    frame: bytes


class Base(Protocol):
    """The whole dump that an increment refers to. text is None where it is not what it was."""

    digests: list[bytes]
    marks: list[int]
    sizes: list[int]

    def text(self, number: int) -> bytes | None: ...
    def segment(self, number: int) -> Segment | None: ...


class Known(Protocol):
    """Keeps the segments of a whole dump for the increments on it."""

    def add(self, segment: Segment) -> None: ...


class Writer:
    """Turns the output of pg_dump into a dump of a series.

    Args:
        base: The whole dump that this one is an increment on; None for a whole dump.
        known: Keeps the segments; None where they are not kept.
    """

    def __init__(
        self, base: Base | None, known: Known | None = None, cutter: Cutter | None = None
    ) -> None:
        self._base = base
        self._known = known
        self._cutter = cutter or Cutter()
        self._places = _places(base.digests if base is not None else [])
        self._marks = _places(base.marks if base is not None else [])
        self._at = 0
        self._far = _NOWHERE
        self._run = (0, 0)
        self._vain = 0
        self._removed = Findable()
        # As it is compressed: all of the text so far, and what of it was sent as patches.
        self._whole = self._patched = 0

    def add(self, data: bytes) -> bytes:
        """Returns what is to be sent now; may be nothing."""
        return b"".join(map(self._put, self._cutter.add(data)))

    def end(self) -> bytes:
        """Returns the rest."""
        return b"".join(map(self._put, self._cutter.end())) + self._same(0, 0)

    def _put(self, text: bytes) -> bytes:
        digest = blake3(text).digest()
        same = _next(self._places.get(digest), self._at)
        kept = self._base.segment(same) if self._base is not None and same >= 0 else None
        if kept is not None:
            self._at = same + 1
            self._whole += len(kept.frame)
            return self._same(same, 1)
        mark = crc32(text[text.rfind(b"\n", 0, -1) + 1 :])
        frame = zstandard.ZstdCompressor(level=_LEVEL).compress(text)
        if self._known is not None:
            self._known.add(Segment(digest, mark, len(text), frame))
        self._whole += len(frame)
        first, count = self._beside(mark, len(text))
        if changed := self._patch(first, count, text, len(frame)):
            head = _HEAD.pack(_PATCH, _REST, first, count, len(changed), len(text))
        else:
            head = _HEAD.pack(_WHOLE, _REST, 0, 0, len(frame), len(text))
        return self._same(0, 0) + head + (changed or frame)

    def _same(self, first: int, count: int) -> bytes:
        """Returns the run of segments that are the same, once it ends; another one begins."""
        begun, so_far = self._run
        if count and so_far and begun + so_far == first:
            self._run = (begun, so_far + count)
            return b""
        self._run = (first, count)
        return _HEAD.pack(_WHOLE, _REST, begun, so_far, 0, 0) if so_far else b""

    def _beside(self, mark: int, size: int) -> tuple[int, int]:
        """Returns which segments of the whole dump lie where a new one does: first, and how many.

        Both end in the same line, mostly. One that is far ahead is believed only where the last
        new segment was found there, too: a line may have moved by itself. Where no end is found,
        the new segment begins anywhere in the first one, and may need those behind it, up to a
        little more than its own size.
        """
        if self._base is None:
            return 0, 0
        first, found = self._at, _next(self._marks.get(mark), self._at)
        if found >= first + _NEAR and 0 < found - self._far <= _NEAR:
            first = self._far + 1
        self._far = found if found >= 0 else _NOWHERE
        if first <= found < first + _NEAR:
            self._at = found + 1
            return first, found + 1 - first
        sizes = self._base.sizes[first : first + _NEAR]
        count = min(2, len(sizes))
        while count < len(sizes) and sum(sizes[1:count]) < size + size // 8:
            count += 1
        return first, count

    def _patch(self, first: int, count: int, text: bytes, most: int) -> bytes:
        """Returns a patch that was proved to make text, and is smaller than most; else nothing."""
        # Rows that stand in another order have little beside them: one in eight is tried.
        self._vain += 1
        if self._base is None or (self._vain > _VAIN and self._vain % 8):
            return b""
        texts = (self._base.text(first + n) for n in range(count))
        good = [one for one in texts if one is not None]
        if len(good) < count:
            return b""
        # Where much has changed, thorough patches would take longer than all else.
        thorough = self._patched <= self._whole // _FEW
        old = b"".join(good)
        if not patch.possible(old, text):
            return b""
        made = patch.make(old, text, self._removed, thorough=thorough)
        if len(made) >= most:
            return b""
        proved, removed = patch.apply(old, made, len(text), self._removed)
        if proved != text:
            return b""
        self._removed.add(removed)
        if len(made) < most * 3 // 4:
            self._vain = 0
        self._patched += len(made)
        return made


def replay(pieces: Iterable[bytes], base: Iterable[bytes] = ()) -> Iterator[bytes]:
    """Yields the segments of a dump, in their order.

    Args:
        pieces: The content of the dump's file.
        base: The segments of the whole dump that it refers to.

    Raises:
        SeriesDamaged: The file is no dump of a series, or does not fit the whole dump.
    """
    stream, window, removed = _Stream(pieces), _Window(base), Removed()
    while head := stream.take(_HEAD.size):
        magic, rest, first, count, stored, size = _HEAD.unpack(head)
        patched = magic == _PATCH
        right = rest == _REST and (patched or magic == _WHOLE)
        if not right or size > MOST or stored > 2 * MOST:
            raise SeriesDamaged("it is no dump of a series")
        if not stored:
            yield from (window.of(number, 1) for number in range(first, first + count))
            continue
        frame = stream.take(stored)
        if count > (_NEAR if patched else 0):
            raise SeriesDamaged("it is no dump of a series")
        try:
            if patched:
                old = window.of(first, count)
                text, lines = patch.apply(old, frame, size, removed)
                removed.add(lines)
            else:
                text = patch.plain(zstandard.ZstdDecompressor(), frame, size)
        except (patch.PatchDamaged, zstandard.ZstdError, ValueError) as error:
            raise SeriesDamaged(str(error)) from error
        if len(text) != size:
            raise SeriesDamaged("a segment has another length")
        yield text


class _Stream:
    """Gives pieces in the lengths that are asked for."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._held = bytearray()

    def take(self, size: int) -> bytes:
        """Returns size bytes; nothing at the end. Raises SeriesDamaged where it ends within."""
        while len(self._held) < size and (piece := next(self._pieces, None)) is not None:
            self._held += piece
        if self._held and len(self._held) < size:
            raise SeriesDamaged("its end is missing")
        data = bytes(self._held[:size])
        del self._held[:size]
        return data


class _Window:
    """The segments of the whole dump near those that were asked for last."""

    def __init__(self, base: Iterable[bytes]) -> None:
        self._rest = iter(base)
        self._held: deque[bytes] = deque()
        self._first = 0

    def of(self, first: int, count: int) -> bytes:
        """Returns some segments, joined. Raises SeriesDamaged where first is lower than before, or
        the whole dump lacks a segment.
        """
        if first < self._first:
            raise SeriesDamaged("it goes back in the whole dump")
        while self._first + len(self._held) < first + count:
            if (segment := next(self._rest, None)) is None:
                raise SeriesDamaged("the whole dump has fewer segments")
            self._held.append(segment)
            if self._first < first:
                self._held.popleft()
                self._first += 1
        while self._first < first:
            self._held.popleft()
            self._first += 1
        return b"".join(islice(self._held, count))


def _places(keys: Iterable[K]) -> dict[K, list[int]]:
    places: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places


def _next(places: list[int] | None, least: int) -> int:
    """Returns the first of sorted places that is not below least; -1 where there is none."""
    at = bisect_left(places, least) if places else 0
    return places[at] if places and at < len(places) else -1
