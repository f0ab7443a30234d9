"""A dump may be one of a series: a whole one is all segments, an increment what differs from it.

The file is one frame of zstd after the other, a frame for each segment of the text. Each frame is
preceded by a skippable one, which says what the segment is made of. So `zstd -dc` makes of a whole
dump what pg_dump wrote. In an increment a frame has a dictionary: the segments of the whole dump
that lie where the new one does. docs/series-format.md is the contract.

An increment refers to a whole dump, never to another increment, and from its beginning to its end:
both are read in one pass, and a lost increment harms no other dump.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final
from zlib import crc32

import zstandard

# Magic number of a skippable frame and its length; then the checksum of the segment's last line,
# the first segment of the whole dump and how many, the bytes of the frame and of the segment.
_HEAD: Final = struct.Struct("<7I")
_START: Final = [0x184D2A5D, _HEAD.size - 8]
# Bytes of a segment, on average and at most.
_SIZE: Final = 1 << 20
MOST: Final = 4 * _SIZE
# Of random hex digits level 1 makes less than higher ones do.
_LEVEL: Final = 1
# So many segments of the whole dump may be one dictionary.
_NEAR: Final = 4
_WINDOW_LOG_MIN: Final = 10
_HASH_LOG_MAX: Final = 22
_RAW: Final = zstandard.DICT_TYPE_RAWCONTENT


class SeriesDamaged(Exception):
    """What should be a dump of a series is none, or does not fit the whole dump."""


class Cutter:
    """Cuts a text into segments by its content, so an insertion moves no other cut.

    A segment ends after a line whose checksum is low enough. The limit goes by the length of the
    line, so that segments have about the same size whatever the lines are. The same text is cut in
    the same places, however it comes.

    Args:
        size: The bytes of a segment, on average.
        most: The bytes of any segment, at most.
    """

    def __init__(self, size: int = _SIZE, most: int = MOST) -> None:
        self._scale = (1 << 32) // size
        self._least = size // 16
        self._most = most
        self._begun: list[bytes] = []
        self._size = 0
        self._rest = b""

    def add(self, data: bytes) -> Iterator[bytes]:
        """Yields the segments that end within data."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield from self._take(line + b"\n")
        while len(self._rest) > self._most:
            yield from self._take(self._rest[: self._most])
            self._rest = self._rest[self._most :]

    def end(self) -> Iterator[bytes]:
        """Yields the rest."""
        yield from self._take(self._rest)
        if self._size:
            yield self._segment()

    def _take(self, line: bytes) -> Iterator[bytes]:
        if self._size and self._size + len(line) > self._most:
            yield self._segment()
        # A line that is too long is several.
        while len(line) > self._most:
            yield line[: self._most]
            line = line[self._most :]
        self._begun.append(line)
        self._size += len(line)
        if self._size >= self._least and crc32(line) < self._scale * len(line):
            yield self._segment()

    def _segment(self) -> bytes:
        whole = b"".join(self._begun)
        self._begun, self._size = [], 0
        return whole


class KeptBase:
    """The whole dump that increments refer to, as it is kept on this machine.

    Args:
        path: of the file, whose name is that of the dump.
        size: of the dump in bytes.
        step: of the next increment on this dump.

    Raises:
        OSError: There is no such file.
        ValueError: The file is not the dump.

    Attributes:
        marks: Of each segment the checksum of its last line.
    """

    def __init__(self, path: Path, size: int, step: int) -> None:
        self.name, self.step = path.name, step
        self._file = path.open("rb")
        self.marks: list[int] = []
        # Of each segment: where its frame begins, the bytes of the frame and of the segment.
        self._places: list[tuple[int, int, int]] = []
        at, fd = 0, self._file.fileno()
        while len(head := os.pread(fd, _HEAD.size, at)) == _HEAD.size:
            *start, mark, _, _, stored, text = _HEAD.unpack(head)
            if start != _START:
                break
            self.marks.append(mark)
            self._places.append((at + _HEAD.size, stored, text))
            at += _HEAD.size + stored
        if not at == size == os.fstat(fd).st_size:
            self.close()
            raise ValueError("it is not what was sent")

    def text(self, first: int, count: int) -> bytes | None:
        """Returns some segments, joined; None where they are damaged."""
        with suppress(OSError, SeriesDamaged):
            return b"".join(map(self._segment, self._places[first : first + count]))
        return None

    def _segment(self, place: tuple[int, int, int]) -> bytes:
        at, stored, size = place
        return _decompress(os.pread(self._file.fileno(), stored, at), b"", size)

    def close(self) -> None:
        self._file.close()


class Writer:
    """Turns the output of pg_dump into a dump of a series.

    Args:
        base: The whole dump that this one is an increment on; None for a whole dump.
        cutter: cuts the text.
    """

    def __init__(self, base: KeptBase | None, cutter: Cutter | None = None) -> None:
        self._base = base
        self._cutter = cutter or Cutter()
        self._places: dict[int, list[int]] = {}
        for number, mark in enumerate(base.marks if base is not None else ()):
            self._places.setdefault(mark, []).append(number)
        self._at = 0
        self._far = -1

    def add(self, data: bytes) -> bytes:
        """Returns what is to be sent now; may be nothing."""
        return b"".join(map(self._put, self._cutter.add(data)))

    def end(self) -> bytes:
        """Returns the rest."""
        return b"".join(map(self._put, self._cutter.end()))

    def _put(self, text: bytes) -> bytes:
        mark = crc32(text[text.rfind(b"\n", 0, -1) + 1 :])
        old: bytes | None = None
        if self._base is not None:
            first, count = self._beside(mark, len(self._base.marks))
            old = self._base.text(first, count)
        if old is None:
            first = count = 0
        frame = _compress(text, old or b"")
        return _HEAD.pack(*_START, mark, first, count, len(frame), len(text)) + frame

    def _beside(self, mark: int, known: int) -> tuple[int, int]:
        """Returns the segments of the whole dump that are at the place of a new segment.

        A segment and its counterpart in the whole dump mostly end in the same line. A counterpart
        that is far ahead is accepted only where the counterpart of the last new segment was near
        that place, too: a single line may have moved.

        Returns:
            The number of the first segment, and the count of segments.
        """
        places, first = self._places.get(mark, []), self._at
        turn = bisect_left(places, first)
        found = places[turn] if turn < len(places) else -1
        near = found < first + _NEAR or 0 < found - self._far <= _NEAR
        self._far = found
        if found < 0 or not near:
            first = min(first, max(0, known - 1))
            return first, min(_NEAR, known - first)
        self._at = found + 1
        return max(first, found + 1 - _NEAR), min(_NEAR, found + 1 - first)


def replay(pieces: Iterable[bytes], base: Iterable[bytes] = ()) -> Iterator[bytes]:
    """Yields the segments of a dump, in their order.

    Args:
        pieces: The content of the dump's file.
        base: The segments of the whole dump that it refers to.

    Raises:
        SeriesDamaged: The file is no dump of a series, or does not fit the whole dump.
    """
    window: deque[bytes] = deque()
    begin, rest, stream = 0, iter(base), _Stream(pieces)
    while head := stream.take(_HEAD.size):
        *start, _, first, count, stored, size = _HEAD.unpack(head)
        if start != _START or count > _NEAR or size > MOST or stored > 2 * MOST:
            raise SeriesDamaged("it is no dump of a series")
        if count and first < begin:
            raise SeriesDamaged("it goes back in the whole dump")
        while count and begin + len(window) < first + count:
            if (segment := next(rest, None)) is None:
                raise SeriesDamaged("the whole dump has fewer segments")
            window.append(segment)
            if begin < first:
                window.popleft()
                begin += 1
        while count and begin < first:
            window.popleft()
            begin += 1
        yield _decompress(stream.take(stored), b"".join(islice(window, count)), size)


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


def _compress(text: bytes, old: bytes) -> bytes:
    """Returns a frame of a segment, with old as its dictionary."""
    if not old:
        return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(text)
    # In a table much smaller than the text, later lines hide the earlier ones.
    log = max(_WINDOW_LOG_MIN, (len(old) + len(text)).bit_length())
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, window_log=log, hash_log=min(_HASH_LOG_MAX, log), write_checksum=True
    )
    known = zstandard.ZstdCompressionDict(old, dict_type=_RAW)
    return zstandard.ZstdCompressor(dict_data=known, compression_params=parameters).compress(text)


def _decompress(frame: bytes, old: bytes, size: int) -> bytes:
    """Returns the segment in a frame, whose dictionary is old. Raises SeriesDamaged."""
    try:
        if zstandard.frame_content_size(frame) != size:
            raise SeriesDamaged("a segment has another length")
        known = zstandard.ZstdCompressionDict(old, dict_type=_RAW) if old else None
        return zstandard.ZstdDecompressor(dict_data=known).decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise SeriesDamaged(str(error)) from error
