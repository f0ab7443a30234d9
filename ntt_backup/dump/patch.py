"""A text is written as a patch of another one that has most of its lines.

Lines that the old text has are runs of it; the others are compressed by zstd, with those lines of
the old text before them that no run has: a row that was updated is nearly the same as the row that
it was. So a row that was deleted costs two bytes, and one that was updated a few more.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Final

import zstandard

# Bytes of the runs, and of the lines, as they are compressed.
_HEAD: Final = struct.Struct("<I")
# Of random hex digits level 1 makes less than all up to 15, at 100 MB/s. Level 16 makes a sixth
# less than that, at 4 MB/s.
_LEVEL: Final = 1
_THOROUGH: Final = 16
_HASH_LOGS: Final = (10, 20)
_STEP: Final = 64
_RAW: Final = zstandard.DICT_TYPE_RAWCONTENT


class PatchDamaged(Exception):
    """What should be a patch of a text is none."""


def make(old: bytes, new: bytes, *, thorough: bool = False) -> bytes:
    """Returns the patch that makes new of old. thorough: as small as can be, for a few lines."""
    before, after = old.split(b"\n"), new.split(b"\n")
    runs, rest = _compare(before, after)
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(_varints(runs))
    level = _THOROUGH if thorough else _LEVEL
    lines = _compress(b"\n".join(_leftover(before, runs)), b"\n".join(rest), level)
    return _HEAD.pack(len(packed)) + packed + lines


def apply(old: bytes, patch: bytes, most: int) -> bytes:
    """Returns the text that a patch makes of old. most: bytes that it may have. Raises
    PatchDamaged.
    """
    try:
        (size,) = _HEAD.unpack_from(patch)
        packed, lines = patch[_HEAD.size : _HEAD.size + size], patch[_HEAD.size + size :]
        numbers = _numbers(plain(zstandard.ZstdDecompressor(), packed, 16 * most + 64))
        runs = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
        before = old.split(b"\n")
        known = _dictionary(b"\n".join(_leftover(before, runs)))
        rest = plain(zstandard.ZstdDecompressor(dict_data=known), lines, most).split(b"\n")
    except (struct.error, zstandard.ZstdError, ValueError, IndexError) as error:
        raise PatchDamaged(str(error)) from error
    after: list[bytes] = []
    taken = at = size = 0
    for given, jump, length in runs:
        after += rest[taken : taken + given]
        taken += given
        at += _signed(jump)
        run = before[at : at + length]
        after += run
        at += length
        size += length + sum(map(len, run))
        if size > most + 1:
            raise PatchDamaged("it makes a text that is too long")
    return b"\n".join(after)


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
        runs.append((given, jump * 2 if jump >= 0 else -jump * 2 - 1, length))
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


def _leftover(before: Sequence[bytes], runs: Iterable[Run]) -> list[bytes]:
    """Returns the old lines that no run has."""
    left = bytearray(b"\1") * len(before)
    at = 0
    for _, jump, length in runs:
        at += _signed(jump)
        if not 0 <= at <= at + length <= len(before):
            raise IndexError("a run of lines that are not there")
        left[at : at + length] = bytes(length)
        at += length
    return list(compress(before, left))


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


def _varints(runs: Iterable[Run]) -> bytes:
    out = bytearray()
    for run in runs:
        for number in run:
            while number > 0x7F:
                out.append(number & 0x7F | 0x80)
                number >>= 7
            out.append(number)
    return bytes(out)


def _numbers(data: bytes) -> list[int]:
    numbers, number, shift = [], 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
    return numbers
