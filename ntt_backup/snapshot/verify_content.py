"""Compares the content of a version's files with the sums that were made when it was taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from blake3 import blake3

from ntt_backup.filestore.contract import ReadableStore
from ntt_backup.snapshot.format.block_map import SUM, MapReader, add_zeros, sums
from ntt_backup.snapshot.format.entry import Entry, Extent
from ntt_backup.snapshot.format.manifest import Header
from ntt_backup.snapshot.restore.fetch import Fetcher

_DIFFERS = "its content is not what was taken"


class _File(Protocol):
    """The content of an entry, as it comes."""

    def add(self, start: int, data: memoryview) -> bool:
        """Takes the next content. Returns whether it is right, as far as can be said."""
        ...

    def end(self) -> bool:
        """Returns whether all of it is right, as far as can be said."""
        ...


class ContentCheck:
    """Fetches and compares content of a version.

    map: the bytes of its map; None: what has sums is only compared with the checksums of its super
    blocks. chosen: which extents to look at; a small file is looked at where its first one is.
    """

    def __init__(
        self,
        repository: ReadableStore,
        header: Header,
        map: Iterable[bytes] | None,
        chosen: Callable[[Extent], bool],
    ) -> None:
        self._header = header
        self._fetcher = Fetcher[tuple[Entry, _File]](repository, header)
        self._sums = _Sums(map) if map is not None else None
        self._chosen = chosen
        # `(version, pack, offset)` of the super blocks that are.
        self.bad: set[tuple[int, ...]] = set()

    @property
    def fetched(self) -> int:
        """Bytes that came."""
        return self._fetcher.fetched

    def damaged(self, entries: Iterable[Entry]) -> Iterator[tuple[str, str]]:
        """Yields `(path, what is wrong)`, once a file, and `("", "")` now and then."""
        last = ""
        for (entry, file), pieces, ended in self._fetcher.read(self._items(entries)):
            wrong: list[str] = []
            for start, data, whole in pieces:
                if not whole:
                    name = self._note(entry, start)
                    lost = self._fetcher.lost.get(name)
                    wrong.append(lost or f"{name} is missing or damaged")
                elif not file.add(start, data):
                    self._note(entry, start)
                    wrong.append(_DIFFERS)
            if ended and not wrong and not file.end():
                self.bad |= {one[2:5] for one in entry.extents}
                wrong.append(_DIFFERS)
            if not wrong or entry.path == last:
                yield "", ""
            else:
                last = entry.path
                yield entry.path, wrong[0]

    def _note(self, entry: Entry, start: int) -> str:
        """Notes that the super block of some content is damaged; returns its pack's name."""
        found = next(one for one in entry.extents if one.start == start)
        self.bad.add(found[2:5])
        return self._header.pack(found.version, found.pack)

    def _items(
        self, entries: Iterable[Entry]
    ) -> Iterator[tuple[tuple[Entry, _File], Sequence[Extent]]]:
        before = 0
        key = bytes.fromhex(self._header.key)
        for entry in entries:
            extents: Sequence[Extent] = entry.extents
            if entry.block:
                file: _File = _Blocks(entry, key, self._sums, before)
                extents = [one for one in extents if self._chosen(one)]
            else:
                file = _Whole(entry)
                extents = extents if extents and self._chosen(extents[0]) else []
            before += entry.blocks
            if extents:
                yield (entry, file), extents


class _Sums:
    """The sums of a map, passed once."""

    def __init__(self, data: Iterable[bytes]) -> None:
        self._map = MapReader(data)
        self._at = 0

    def read(self, first: int, count: int) -> bytes:
        """Returns the sums of blocks that come behind all that were asked for before."""
        self._map.skip(first - self._at)
        self._at = first + count
        return self._map.read(count)


class _Whole:
    """A file without sums: all of it is compared at its end."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._digest = blake3()
        self._at = 0

    def add(self, start: int, data: memoryview) -> bool:
        add_zeros(self._digest, start - self._at)
        self._digest.update(data)
        self._at = start + len(data)
        return True

    def end(self) -> bool:
        add_zeros(self._digest, self._entry.size - self._at)
        return self._digest.hexdigest() == self._entry.digest


class _Blocks:
    """A file with sums: whole blocks are compared. before: the sums in the map before its own."""

    def __init__(self, entry: Entry, key: bytes, sums: _Sums | None, before: int) -> None:
        self._entry = entry
        self._key = key
        self._sums = sums
        self._before = before
        self._at = 0
        self._held = bytearray()

    def add(self, start: int, data: memoryview) -> bool:
        block = self._entry.block
        if self._sums is None:
            return True
        if start != self._at + len(self._held):
            # The rest of a block that begins in what was not asked for.
            skip = -start % block
            self._held.clear()
            self._at, data = start + skip, data[skip:]
        self._held += data
        whole = len(self._held)
        if self._at + whole < self._entry.size:
            whole -= whole % block
        found = sums(memoryview(self._held)[:whole], block, self._key)
        wanted = self._sums.read(self._before + self._at // block, len(found) // SUM)
        del self._held[:whole]
        self._at += whole
        return found == wanted

    def end(self) -> bool:
        return True
