"""Lines that an increment removed stay known for a while: a row that moved is nearly one of them.

Both sides keep the same lines by the same rule, so that a number is enough to name one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from zlib import crc32

from ntt_backup.dump.segments import MOST

# Bytes that are kept, and what each line counts beside its own: what Python needs for it.
KEPT: Final = 32 << 20
_BESIDE: Final = 64
# pg_dump writes the length of a row before its first column, so the end of a column is looked at.
_TELLING: Final = 16


class Removed:
    """The last of the lines that were removed, numbered from the first one. size: the bytes that
    they take.
    """

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._first = 0
        self.size = 0

    def add(self, lines: Sequence[bytes]) -> list[bytes]:
        """Keeps lines; returns the oldest ones, which are forgotten, where there are too many."""
        self._lines += lines
        self.size += sum(map(len, lines)) + _BESIDE * len(lines)
        past = 0
        while self.size > KEPT:
            self.size -= len(self._lines[past]) + _BESIDE
            past += 1
        forgotten = self._lines[:past]
        del self._lines[:past]
        self._first += past
        return forgotten

    def lines(self, numbers: Iterable[int]) -> list[bytes]:
        """Returns the lines of these numbers. Raises IndexError for one that is not known, and
        ValueError where they are too much.
        """
        found, size = [], 0
        for number in numbers:
            if number < self._first:
                raise IndexError("a removed line that is not known")
            found.append(self._lines[number - self._first])
            size += len(found[-1])
            if size > MOST:
                raise ValueError("it needs too many removed lines")
        return found


class Findable(Removed):
    """Finds removed lines by what tells a row from others: its longest column, mostly."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}

    def add(self, lines: Sequence[bytes]) -> list[bytes]:
        begin = self._first + len(self._lines)
        self._numbers.update((_key(line), begin + n) for n, line in enumerate(lines))
        forgotten = super().add(lines)
        for key in map(_key, forgotten):
            if self._numbers.get(key, self._first) < self._first:
                del self._numbers[key]
        return forgotten

    def like(self, lines: Iterable[bytes]) -> list[int]:
        """Returns the numbers of removed lines of which some of these may be new versions."""
        found, size = [], 0
        for line in lines:
            number = self._numbers.get(_key(line), -1)
            if number >= self._first:
                size += len(self._lines[number - self._first])
                if size > MOST:
                    break
                found.append(number)
        return found


def _key(line: bytes) -> int:
    return crc32(max(line.split(b"\t"), key=len)[-_TELLING:])
