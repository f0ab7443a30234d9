"""The last version of a set is read beside a walk, from this machine's copies."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Final

from ntt_backup.config.host_key import Origin
from ntt_backup.snapshot.format.block_map import MapReader
from ntt_backup.snapshot.format.entry import order, parse, path_of
from ntt_backup.snapshot.format.manifest import (
    END_BYTES,
    ManifestReader,
    Trailer,
    ending_of,
    tail_size,
)
from ntt_backup.snapshot.names import SnapshotDamaged
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.take.changed_file import OldFile

_PIECE: Final = 1 << 18
# So many sums are copied at a time.
_SUMS: Final = 1 << 16
_BLOCK: Final = re.compile(rb'"bs":([1-9]\d*)')


class LastVersion:
    """The entries and sums of a version, each passed once. Every method may raise SnapshotDamaged.

    line: of the next entry; None behind the last one.
    """

    def __init__(self, manifest: Path, map: Path) -> None:
        self._digest = sha256()
        self._map_bytes = self._hashed(map)
        self._map = MapReader(self._map_bytes)
        self._manifest = ManifestReader(_copied(manifest))
        self.header = self._manifest.header
        # The order is that of the walk: what is out of it is not found, and read again.
        self._lines = chain.from_iterable(self._manifest.batches())
        self.line = next(self._lines, None)

    def copy(self, size: int, add: Callable[[bytes], None]) -> None:
        """Passes the next entry, of a file that has not changed, and hands on its sums."""
        blocks = self._blocks(size)
        for at in range(0, blocks, _SUMS):
            add(self._map.read(min(_SUMS, blocks - at)))
        self.line = next(self._lines, None)

    def pass_before(self, path: str) -> None:
        """Passes the entries before a path."""
        key = order(path)
        while self.line is not None and order(path_of(self.line)) < key:
            self._map.skip(parse(self.line).blocks)
            self.line = next(self._lines, None)

    def take(self, path: str, size: int) -> OldFile | None:
        """Passes the next entry if it is that of path, and returns it. size: bytes of the file now,
        beyond which no sums are wanted.
        """
        if self.line is None or path_of(self.line) != path:
            return None
        entry = parse(self.line)
        self.line = next(self._lines, None)
        return OldFile(entry, self._map.read(entry.blocks_of(size), entry.blocks))

    def end(self) -> Trailer:
        """Passes all that is left; returns the trailer. Only now is it known that all was right."""
        while self.line is not None:
            self.line = next(self._lines, None)
        for _ in self._map_bytes:
            pass
        trailer = self._manifest.trailer
        if trailer is None or self._digest.hexdigest() != trailer.map_sha256:
            raise SnapshotDamaged("a map is not what was written")
        return trailer

    def _blocks(self, size: int) -> int:
        # Within a text a quote is escaped, so this is no part of one.
        found = _BLOCK.search(self.line or b"")
        return -(-size // int(found[1])) if found is not None else 0

    def _hashed(self, map: Path) -> Iterator[bytes]:
        for piece in _copied(map):
            self._digest.update(piece)
            yield piece


def ending(manifest: Path, origins: Origins) -> tuple[Trailer, Origin]:
    """Returns the trailer of a manifest, and who made it, by its header and its seal:
    `LastVersion.end` proves that what stands between them fits. Raises SnapshotDamaged.
    """
    reader = ManifestReader(_copied(manifest))
    try:
        with manifest.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - END_BYTES))
            file.seek(max(0, size - tail_size(file.read())))
            trailer, seal = ending_of(file.read(), reader.header_sum)
    except OSError as error:
        raise _unreadable(manifest, error) from error
    return trailer, origins.of_seal(reader.header, seal)


def _copied(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a copy. One that is gone, or cannot be read, is a damaged one."""
    try:
        yield from pieces(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> SnapshotDamaged:
    return SnapshotDamaged(f"the copy {path} cannot be read: {error.strerror}")


def pieces(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a file."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece
