"""A version of a snapshot as a mount shows it: the tree of its manifest, and the content of files.

The manifest's lines are in a file, in their order, and only the place of each is in memory: eight
bytes an entry. A path is found by halving; the entries of a directory stand right behind the
directory. Super blocks are fetched when they are read, and the last of them are kept.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import IO, Final

from ntt_backup.filestore.contract import FileMissing, FileStore, Range, StoredFileDamaged
from ntt_backup.snapshot.format.entry import (
    HARD_LINK,
    MAX_LINE,
    Entry,
    Extent,
    order,
    parse,
    path_of,
)
from ntt_backup.snapshot.format.manifest import Header, ManifestReader
from ntt_backup.snapshot.format.super_blocks import read_super_block
from ntt_backup.snapshot.names import SnapshotDamaged

# A line that is longer is of a file with many extents: only what is before them is read.
_SHORT: Final = 1 << 12
_FILE_WITHOUT_EXTENTS: Final = re.compile(rb'\["(?:[^"\\]|\\.)*","f",(?:-?\d+,){7}')
_KEYS_KEPT: Final = 1 << 15
_MAX_NAME: Final = 255
_NO_NAMES: Final = ("", ".", "..")
_KEPT_BYTES: Final = 64 << 20
_AHEAD: Final = 8
_AHEAD_BYTES: Final = 4 << 20

_start = attrgetter("start")
_Key = tuple[int, int, int]


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


class SuperBlockCache:
    """Reads files of a version. It may be used by several threads at once.

    open_store is called again after a failure. At most 64 MiB of content are
    held; where a file is read on, up to eight more super blocks of it are fetched ahead.
    """

    def __init__(self, header: Header, open_store: Callable[[], FileStore]) -> None:
        self._header = header
        self._open_store = open_store
        self._store: FileStore | None = None
        self._kept: OrderedDict[_Key, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        # A store may have children that end with the thread that made them; FUSE's threads
        # come and go.
        self._thread = ThreadPoolExecutor(1)

    def read(self, entry: Entry, start: int, length: int, *, ahead: bool) -> bytes:
        """Returns these bytes of a file, fewer at its end. ahead: what is behind will be wanted.

        Raises SnapshotDamaged, FileMissing, and what a store raises.
        """
        end = min(start + length, entry.size)
        found = bytearray(max(end - start, 0))
        first = max(bisect_right(entry.extents, start, key=_start) - 1, 0)
        for number in range(first, len(entry.extents)):
            extent = entry.extents[number]
            begin, stop = max(start, extent.start), min(end, extent.start + extent.length)
            if extent.start >= end:
                break
            if begin < stop:
                more = islice(entry.extents, number + 1, None) if ahead else ()
                content = self._content(extent, more)
                at = extent.skip + begin - extent.start
                part = content[at : at + stop - begin]
                if len(part) != stop - begin:
                    raise SnapshotDamaged(f"{entry.path} leads behind the end of a super block")
                found[begin - start : stop - start] = part
        return bytes(found)

    def _content(self, extent: Extent, more: Iterable[Extent]) -> bytes:
        key = _key(extent)
        with self._lock:
            if key not in self._kept:
                self._thread.submit(self._fetch, [extent, *self._ahead_of(extent, more)]).result()
            self._kept.move_to_end(key)
            return self._kept[key]

    def _ahead_of(self, extent: Extent, more: Iterable[Extent]) -> list[Extent]:
        """Returns an extent of each super block to be fetched with that one."""
        chosen: dict[_Key, Extent] = {}
        room = _AHEAD_BYTES
        for one in more:
            if _key(one) in (_key(extent), *chosen) or _key(one) in self._kept:
                continue
            room -= one.stored
            if room < 0:
                break
            chosen[_key(one)] = one
            if len(chosen) == _AHEAD:
                break
        return list(chosen.values())

    def _fetch(self, wanted: list[Extent]) -> None:
        """Keeps these super blocks, the first of them last."""
        try:
            if self._store is None:
                self._store = self._open_store()
            found = list(self._store.read(map(self._range, wanted)))
            for extent, data in zip(reversed(wanted), reversed(found), strict=True):
                self._keep(_key(extent), read_super_block(data))
        except BaseException as error:
            self._disconnect()
            if wanted[1:] and isinstance(error, StoredFileDamaged | FileMissing):
                self._fetch(wanted[:1])  # What is ahead may be all that is damaged.
                return
            raise

    def _keep(self, key: _Key, content: bytes) -> None:
        self._bytes += len(content)
        self._kept[key] = content
        while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1])

    def _range(self, extent: Extent) -> Range:
        name = self._header.pack(extent.version, extent.pack)
        return Range(name, extent.offset, extent.stored)

    def close(self) -> None:
        """Ends the connection, and the thread that reads ahead."""
        self._thread.shutdown(cancel_futures=True)
        self._disconnect()

    def _disconnect(self) -> None:
        """Ends the connection; the next read makes a new one."""
        store, self._store = self._store, None
        if store is not None:
            store.close()


class OpenFile:
    """A file of a version that is being read."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._next = 0

    def read(self, content: SuperBlockCache, start: int, length: int) -> bytes:
        """Returns these bytes of the file. Raises what `content` raises."""
        found = content.read(self._entry, start, length, ahead=start == self._next)
        self._next = start + length
        return found


def _key(extent: Extent) -> _Key:
    return extent.version, extent.pack, extent.offset
