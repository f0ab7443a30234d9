"""A dump may be one of a series: a whole one is all segments, an increment what differs from it.

The file is one frame of zstd after the other, a frame for each segment of the text. Each frame is
preceded by a skippable one, which says what the segment is made of. So `zstd -dc` makes of a whole
dump what pg_dump wrote. In an increment a frame has a dictionary: the segments of the whole dump
that lie where the new one does. docs/series-format.md is the contract.

An increment refers to a whole dump, never to another increment, and from its beginning to its end:
both are read in one pass, and a lost increment harms no other dump.

This machine keeps the last whole dump, so that the next ones can be increments on it. That copy is
a help and nothing more: where it is missing, damaged or not the newest one, the next dump is whole.
It is the file as it was sent, before it was sealed, and only its user may read it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, Literal
from zlib import crc32

import zstandard

from ntt_backup.config import RemoteConfig
from ntt_backup.dump.record import PLAIN, SERIES, Stored
from ntt_backup.dump.toc import DumpDamaged, PieceReader
from ntt_backup.filestore.local_cache import directory_for

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
_NEW: Final = ".new-"
# The next dump is whole where the last increment was larger than one part in so many of the whole
# dump: the table was rewritten, or so many rows have changed since that all increments are large.
_LARGE: Final = 4


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
        with suppress(OSError, DumpDamaged):
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
        DumpDamaged: The file is no dump of a series, or does not fit the whole dump.
    """
    window: deque[bytes] = deque(maxlen=_NEAR)  # The last segments that were read.
    begin, known, rest, stream = 0, 0, iter(base), PieceReader(pieces)
    while not stream.at_end():
        *start, _, first, count, stored, size = _HEAD.unpack(stream.take(_HEAD.size))
        if start != _START or count > _NEAR or size > MOST or stored > 2 * MOST:
            raise DumpDamaged("it is no dump of a series")
        if count and first < begin:
            raise DumpDamaged("its references to the whole dump are not in order")
        while count and known < first + count:
            if (segment := next(rest, None)) is None:
                raise DumpDamaged("the whole dump has fewer segments")
            window.append(segment)
            known += 1
        begin = first if count else begin
        old = list(window)[first - known : first - known + count or None] if count else []
        yield _decompress(stream.take(stored), b"".join(old), size)


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
    """Returns the segment in a frame, whose dictionary is old. Raises DumpDamaged."""
    try:
        if zstandard.frame_content_size(frame) != size:
            raise DumpDamaged("a segment has another length")
        known = zstandard.ZstdCompressionDict(old, dict_type=_RAW) if old else None
        return zstandard.ZstdDecompressor(dict_data=known).decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DumpDamaged(str(error)) from error


# --- the whole dump on this machine, and the form of the next one ---------------------------------


class NewBase:
    """Keeps a whole dump while it is made. No error ends the dump: then nothing is kept."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{_NEW}{os.getpid()}"
        self._file: IO[bytes] | None = None
        with suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in directory.glob(f"{_NEW}*"):
                left.unlink()
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(fd, "wb")

    def add(self, data: bytes) -> None:
        try:
            if self._file is not None:
                self._file.write(data)
        except OSError:
            self.close()

    def keep(self, name: str) -> None:
        """Gives it the name of the dump, and removes the one before."""
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
                self._path.replace(self._path.with_name(name))
                for other in self._path.parent.iterdir():
                    if other.name != name:
                        other.unlink()

    def close(self) -> None:
        """Removes what was not kept. Never raises."""
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()
        with suppress(OSError):
            self._path.unlink()


class Form:
    """Turns the output of pg_dump into the bytes of the dump.

    Args:
        series: the dump is one of a series, else stored as pg_dump compresses it.
        old: the whole dump that this one is an increment on; None where this one is whole.
        new: keeps this dump; None where it is not kept.

    Attributes:
        text_bytes: The size of what pg_dump wrote.
    """

    def __init__(
        self, *, series: bool, old: KeptBase | None = None, new: NewBase | None = None
    ) -> None:
        self._files = [one for one in (old, new) if one is not None]
        self._new = new
        self._writer = Writer(old) if series else None
        self._digest = hashlib.sha256()
        self.format: Literal[1, 3] = SERIES if series else PLAIN
        self.base, self.step = (old.name, old.step) if old is not None else ("", 0)
        self.text_bytes = 0

    @staticmethod
    def of(settings: RemoteConfig, database: str, known: list[Stored], *, whole: bool) -> Form:
        """Returns the form that the settings ask for. known, whole: see `dump.job`."""
        if settings.dump.mode != "series":
            return Form(series=False)
        if not whole and (old := kept_base(settings, database, known)) is not None:
            return Form(series=True, old=old)
        return Form(series=True, new=NewBase(_directory(settings, database)))

    def add(self, data: bytes) -> bytes:
        """Returns the bytes that are to be sent now; may be none."""
        self.text_bytes += len(data)
        self._digest.update(data)
        return data if self._writer is None else self._kept(self._writer.add(data))

    def end(self) -> bytes:
        """Returns the last bytes."""
        return b"" if self._writer is None else self._kept(self._writer.end())

    def _kept(self, made: bytes) -> bytes:
        if self._new is not None:
            self._new.add(made)
        return made

    @property
    def text_sha256(self) -> str:
        """The SHA-256 of what pg_dump wrote."""
        return self._digest.hexdigest()

    def keep(self, name: str) -> None:
        """Keeps a whole dump on this machine, for the next ones."""
        if self._new is not None:
            self._new.keep(name)

    def close(self) -> None:
        """Forgets what was not kept."""
        for one in self._files:
            one.close()


def kept_base(settings: RemoteConfig, database: str, known: list[Stored]) -> KeptBase | None:
    """Returns the whole dump that the next dump can be an increment on.

    Returns:
        The copy of the whole dump on this machine, or None where the next dump has to be whole.
    """
    base, step = base_of(known, settings.dump.full_every)
    with suppress(OSError, ValueError):
        if base is not None:
            path = _directory(settings, database) / base.name
            return KeptBase(path, base.size or 0, step)
    return None


def _directory(settings: RemoteConfig, database: str) -> Path:
    return directory_for("dumps", settings.remote, settings.target, database)


def base_of(known: list[Stored], full_every: int) -> tuple[Stored | None, int]:
    """Returns the whole dump on which the next one can be an increment, and the step of that.

    Args:
        known: the dumps of a database that can be restored, oldest first.
        full_every: of so many dumps one is whole.
    """
    records = [(one, one.record) for one in known if one.record is not None and one.record.series]
    base = next((one for one, record in reversed(records) if not record.base), None)
    if base is None:
        return None, 0
    on = [record for one, record in records if record.base == base.name]
    step = 1 + max((record.step for record in on), default=0)
    large = bool(on) and on[-1].bytes * _LARGE > (base.size or 0)
    return (None, 0) if large or step >= full_every else (base, step)
