"""A text is written as a patch of another one that has most of its lines.

Lines that the old text has are runs of it; the others are compressed by zstd, with those lines of
the old text before them that no run has: a row that was updated is nearly the same as the row that
it was. So a row that was deleted costs two bytes, and one that was updated a few more; also where
it moved, as long as an earlier patch of the same dump removed it: the patch names such lines.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, compress
from typing import Final

import zstandard

from ntt_backup.dump.removed import Findable, Removed
from ntt_backup.dump.segments import MOST

# The old text of a patch has at most so many bytes, and either text fewer than so many lines: a
# line takes Python fifty bytes, and a few kilobytes of a hostile patch make millions of them.
_OLD_BYTES: Final = 2 * MOST
LINES: Final = 1 << 18
# A patch has four numbers a line at most, in nine bytes each at most.
_NUMBERS: Final = 4 * LINES + 4
_NUMBER_BYTES: Final = 9
# Bytes of the numbers, as they are compressed: removed lines, and runs. Then come the new lines.
_HEAD: Final = struct.Struct("<I")
# Of random hex digits level 1 makes less than all up to 15, at 100 MB/s. Level 16 makes a sixth
# less than level 1, at 4 MB/s. Known lines take it as long as new ones, so it is taken where the
# known ones are at most so many times as long, and so many bytes more.
_LEVEL: Final = 1
_THOROUGH: Final = 16
_TIMES: Final = 8
_BESIDE: Final = 1 << 16
_HASH_LOGS: Final = (10, 22)
_STEP: Final = 64
_MOST_BITS: Final = 56
_RAW: Final = zstandard.DICT_TYPE_RAWCONTENT


class PatchDamaged(Exception):
    """What should be a patch of a text is none."""


def make(old: bytes, new: bytes, removed: Findable, *, thorough: bool = False) -> bytes:
    """Returns the patch that makes new of old. thorough: a smaller one, which takes longer."""
    before, after = old.split(b"\n"), new.split(b"\n")
    runs, rest = _compare(before, after)
    like = removed.like(rest)
    jumps = (number - last for number, last in zip(like, [0, *like], strict=False))
    numbers = [len(like), *map(_unsigned, jumps), *chain.from_iterable(runs)]
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(_varints(numbers))
    known = b"\n".join([*_left(before, runs)[0], *removed.lines(like)])
    lines = b"\n".join(rest)
    worth = thorough and len(known) <= _TIMES * len(lines) + _BESIDE
    packed_lines = _compress(known, lines, _THOROUGH if worth else _LEVEL)
    return _HEAD.pack(len(packed)) + packed + packed_lines


def possible(old: bytes, new: bytes) -> bool:
    """Returns whether a patch may be made of these texts: other ones would take too much memory."""
    return len(old) <= _OLD_BYTES and max(old.count(b"\n"), new.count(b"\n")) < LINES


def apply(old: bytes, patch: bytes, most: int, removed: Removed) -> tuple[bytes, list[bytes]]:
    """Returns the text that a patch makes of an old one, and the lines of the old text that the
    patch removes.

    Args:
        old: the old text.
        patch: what `make` returned, or anything else.
        most: the bytes that the new text may have.
        removed: the lines that earlier patches of the same dump removed.

    Raises:
        PatchDamaged: The patch is none, does not fit the old text, or would take too much memory.
    """
    try:
        (size,) = _HEAD.unpack_from(patch)
        packed, lines = patch[_HEAD.size : _HEAD.size + size], patch[_HEAD.size + size :]
        if not possible(old, b""):
            raise ValueError("its old text is too long")
        zstd = zstandard.ZstdDecompressor()
        numbers = _numbers(plain(zstd, packed, _NUMBERS * _NUMBER_BYTES))
        count = numbers.pop(0)
        like = accumulate(map(_signed, numbers[:count]))
        named = removed.lines(like)
        runs = _Runs(numbers[count:])
        runs.require_few(most)
        before = old.split(b"\n")
        left, between = _left(before, runs)
        known = _dictionary(b"\n".join([*left, *named]))
        rest = plain(zstandard.ZstdDecompressor(dict_data=known), lines, most)
        if not possible(b"", rest):
            raise ValueError("it has too many lines")
    except (struct.error, zstandard.ZstdError, ValueError, IndexError) as error:
        raise PatchDamaged(str(error)) from error
    given_lines = rest.split(b"\n")
    after: list[bytes] = []
    taken = at = size = 0
    for given, jump, length in runs:
        after += given_lines[taken : taken + given]
        taken += given
        at += _signed(jump)
        run = before[at : at + length]
        after += run
        at += length
        size += length + sum(map(len, run))
        if size > most + 1:
            raise PatchDamaged("it makes a text that is too long")
    return b"\n".join(after), between


Run = tuple[int, int, int]


def _compare(before: Sequence[bytes], after: Sequence[bytes]) -> tuple[list[Run], list[bytes]]:
    """Returns the runs of old lines, and the lines that are in none. A run is how many of the new
    lines come before it, how far from the end of the last run it begins, and its length.
    """
    places = {line: place for place, line in enumerate(before)}
    runs: list[Run] = []
    rest: list[bytes] = []
    given = at = number = 0
    while number < len(after):
        line = after[number]
        place = at if before[at : at + 1] == [line] else places.get(line, -1)
        if place < 0:
            rest.append(line)
            given += 1
            number += 1
            continue
        length = _common(before, place, after, number)
        jump = place - at
        runs.append((given, _unsigned(jump), length))
        at, number, given = place + length, number + length, 0
    runs.append((given, 0, 0))
    return runs, rest


def _common(before: Sequence[bytes], place: int, after: Sequence[bytes], number: int) -> int:
    """Returns how many lines are the same from two places on."""
    length, step = 0, _STEP
    while step:
        ours = before[place + length : place + length + step]
        if len(ours) == step and ours == after[number + length : number + length + step]:
            length += step
        else:
            step //= 4
    return length


class _Runs:
    """The runs of a patch, in three numbers each: as tuples they would take ten times the memory.
    To iterate over them raises ValueError where they are no threes.
    """

    def __init__(self, numbers: array[int]) -> None:
        self._parts = [numbers[part::3] for part in range(3)]

    def __iter__(self) -> Iterator[Run]:
        return zip(*self._parts, strict=True)

    def require_few(self, most: int) -> None:
        """Raises ValueError where they cannot be those of a text of so many bytes: a few bytes of a
        patch may ask for as much work as hours hold. Every run but the last has a line.
        """
        if len(self._parts[0]) > most + 2:
            raise ValueError("it has more runs than its text has bytes")
        if sum(self._parts[2]) > min(most + 1, LINES):
            raise ValueError("its runs have more lines than its text has bytes, or may have")


def _left(before: Sequence[bytes], runs: Iterable[Run]) -> tuple[list[bytes], list[bytes]]:
    """Returns the old lines that no run has, and those of them that are removed: these lie between
    runs of two lines or more. The next segment may be made of those that lie outside.
    """
    left = bytearray(b"\1") * len(before)
    at, begin, end = 0, len(before), 0
    for _, jump, length in runs:
        at += _signed(jump)
        if not 0 <= at <= at + length <= len(before):
            raise IndexError("a run of lines that are not there")
        left[at : at + length] = bytes(length)
        if length > 1:
            begin, end = min(begin, at), max(end, at + length)
        at += length
    between = compress(before[begin:end], left[begin:end])
    return list(compress(before, left)), list(between)


def _compress(known: bytes, data: bytes, level: int) -> bytes:
    # In a table much smaller than the text, later lines hide the earlier ones.
    low, high = _HASH_LOGS
    log = min(high, max(low, (len(known) + len(data)).bit_length()))
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, window_log=log + 1, hash_log=log, chain_log=log
    )
    return zstandard.ZstdCompressor(
        dict_data=_dictionary(known), compression_params=parameters
    ).compress(data)


def _dictionary(known: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(known, dict_type=_RAW)


def plain(zstd: zstandard.ZstdDecompressor, data: bytes, most: int) -> bytes:
    """Returns the content of a frame. Raises ValueError where it is longer than most."""
    if zstandard.frame_content_size(data) > most:
        raise ValueError("it has too much in it")
    return zstd.decompress(data)


def _signed(number: int) -> int:
    return -(number + 1 >> 1) if number & 1 else number >> 1


def _unsigned(number: int) -> int:
    return number * 2 if number >= 0 else -number * 2 - 1


def _varints(numbers: Iterable[int]) -> bytes:
    out = bytearray()
    for number in numbers:
        while number > 0x7F:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)


def _numbers(data: bytes) -> array[int]:
    numbers, number, shift = array("q"), 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if len(numbers) == _NUMBERS:
                raise ValueError("it has too many numbers")
            numbers.append(number)
            number = shift = 0
        elif shift > _MOST_BITS:
            raise ValueError("a number is too long")
    return numbers
