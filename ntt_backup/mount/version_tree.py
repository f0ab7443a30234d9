"""The manifest of a version makes a tree: it tells what a path is, and what a directory has.

The manifest's lines lie in a file, in their order, and only where each begins is in memory: eight
bytes an entry. A path is found by halving; what is in a directory stands right behind it.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Final

from ntt_backup.snapshot.format.entry import HARD_LINK, MAX_LINE, Entry, order, parse, path_of
from ntt_backup.snapshot.format.manifest import ManifestReader

# A line that is longer is of a file with many extents: only what is before them is read.
_SHORT: Final = 1 << 12
_FILE_WITHOUT_EXTENTS: Final = re.compile(rb'\["(?:[^"\\]|\\.)*","f",(?:-?\d+,){7}')
_KEYS_KEPT: Final = 1 << 15
_MAX_NAME: Final = 255
_NO_NAMES: Final = ("", ".", "..")


def write_lines(manifest: ManifestReader, file: IO[bytes]) -> array[int]:
    """Writes the lines of a manifest to a file; returns where each begins, and where the last one
    ends. Raises SnapshotDamaged.
    """
    starts = array("Q", [0])
    at = 0
    for line in manifest.lines():
        file.write(line)
        at += len(line)
        starts.append(at)
    file.flush()
    return starts


class VersionTree:
    """Entries by path; "" is the directory above all, which is no entry. Paths are without a slash
    at either end. It may be used by several threads at once. Raises OSError, and SnapshotDamaged.
    """

    def __init__(self, file: Path, starts: array[int]) -> None:
        self._file = file.open("rb", buffering=0)
        self._starts = starts
        self._count = len(starts) - 1
        self._key = lru_cache(_KEYS_KEPT)(self._read_key)

    def find(self, path: str, *, whole: bool = False) -> Entry | None:
        """Returns the entry of a path, for a hard link that of its file. Extents and xattrs it has
        for sure only where it is asked for as a whole.
        """
        entry = self._entry(path, whole=whole)
        if entry is not None and entry.kind == HARD_LINK:
            entry = self._entry(entry.target, whole=whole)
        return entry if entry is None or entry.kind != HARD_LINK else None

    def names(self, path: str) -> Iterator[str]:
        """Yields the names in a directory, in order; a name that no file can have is left out."""
        above = order(path) + b"\0" if path else b""
        at = self._position(above)
        while at < self._count and (key := self._key(at)).startswith(above):
            name, _, below = key[len(above) :].partition(b"\0")
            text = name.decode("utf-8", "surrogateescape")
            if not below and text not in _NO_NAMES and len(name) <= _MAX_NAME:
                yield text
            # What is below it comes next, and then a key without the byte 0 behind the name.
            at = self._position(above + name + b"\1", at)

    def _entry(self, path: str, *, whole: bool) -> Entry | None:
        key = order(path)
        at = self._position(key)
        if at == self._count or self._key(at) != key:
            return None
        if not whole and (match := _FILE_WITHOUT_EXTENTS.match(self._line(at, _SHORT))):
            return parse(match[0] + b"{}]")
        return parse(self._line(at))

    def _position(self, key: bytes, begin: int = 0) -> int:
        """Returns the number of the first entry, from begin on, whose key is not below this one."""
        step = 1
        while begin + step < self._count and self._key(begin + step) < key:
            begin += step
            step *= 2
        return bisect_left(
            range(self._count), key, begin, min(begin + step, self._count), key=self._key
        )

    def _read_key(self, at: int) -> bytes:
        line = self._line(at, _SHORT)
        return order(path_of(line if b'","' in line else self._line(at)))

    def _line(self, at: int, most: int = MAX_LINE) -> bytes:
        begin, end = self._starts[at], self._starts[at + 1]
        return os.pread(self._file.fileno(), min(end - begin, most), begin)
