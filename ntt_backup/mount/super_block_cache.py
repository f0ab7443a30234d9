"""Super blocks of a version are fetched when they are asked for, and the last of them kept."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from operator import attrgetter
from threading import Lock
from typing import Final

from ntt_backup.filestore.contract import FileMissing, FileStore, Range, StoredFileDamaged
from ntt_backup.snapshot.format.entry import Entry, Extent
from ntt_backup.snapshot.format.manifest import Header
from ntt_backup.snapshot.format.super_blocks import read_super_block
from ntt_backup.snapshot.names import SnapshotDamaged

_KEPT_BYTES: Final = 64 << 20
_AHEAD: Final = 8
_AHEAD_BYTES: Final = 4 << 20

_start = attrgetter("start")
_Key = tuple[int, int, int]


class SuperBlockCache:
    """Reads files of a version. It may be used by several threads at once.

    open_store is called again after a failure. At most 64 MiB of content are
    held; where a file is read on, up to eight more super blocks of it are fetched ahead.
    """

    def __init__(self, header: Header, open_store: Callable[[], FileStore]) -> None:
        self._header = header
        self._open_repository = open_store
        self._repository: FileStore | None = None
        self._kept: OrderedDict[_Key, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        # A repository may have children that end with the thread that made them; FUSE's threads
        # come and go.
        self._thread = ThreadPoolExecutor(1)

    def read(self, entry: Entry, start: int, length: int, *, ahead: bool) -> bytes:
        """Returns these bytes of a file, fewer at its end. ahead: what is behind will be wanted.

        Raises SnapshotDamaged, FileMissing, and what a repository raises.
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
            if self._repository is None:
                self._repository = self._open_repository()
            found = list(self._repository.read(map(self._range, wanted)))
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
        repository, self._repository = self._repository, None
        if repository is not None:
            repository.close()


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
