"""The last version of a set is read beside a walk, by local copies of its manifest and its map."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Final

from ntt_backup.snapshot.format.block_map import MapReader
from ntt_backup.snapshot.format.entry import order, parse, path_of
from ntt_backup.snapshot.format.manifest import (
    END_BYTES,
    ManifestReader,
    ManifestTrailer,
    Seal,
    ending_of,
    tail_size,
)
from ntt_backup.snapshot.names import SnapshotDamaged
from ntt_backup.snapshot.take.changed_file import OldFile

_PIECE: Final = 1 << 18
# So many sums are copied at a time.
_SUMS: Final = 1 << 16
_BLOCK: Final = re.compile(rb'"bs":([1-9]\d*)')


class LastVersion:
    """The entries and sums of a version, each passed once. Every method may raise SnapshotDamaged.

    Attributes:
        header: The header of the manifest.
        trailer: The trailer, which only `end` proves.
        seal: The seal: with the header, it tells who made the version.
        line: The line of the next entry; empty behind the last one.
    """

    def __init__(self, manifest: Path, map: Path) -> None:
        self._digest = sha256()
        self._map_bytes = self._hashed(map)
        self._map = MapReader(self._map_bytes)
        self._manifest = ManifestReader(_copied(manifest))
        self.header = self._manifest.header
        self.trailer, self.seal = _ending(manifest, self._manifest.header_sum)
        # The order is that of the walk: what is out of it is not found, and read again.
        self._lines = chain.from_iterable(self._manifest.batches())
        self.line = next(self._lines, b"")

    def copy(self, size: int, add: Callable[[bytes], None]) -> None:
        """Passes the next entry, of a file that has not changed, and hands on its sums."""
        blocks = self._blocks(size)
        for at in range(0, blocks, _SUMS):
            add(self._map.read(min(_SUMS, blocks - at)))
        self.line = next(self._lines, b"")

    def pass_before(self, path: str) -> None:
        """Passes the entries before a path."""
        key = order(path)
        while self.line and order(path_of(self.line)) < key:
            self._map.skip(parse(self.line).blocks)
            self.line = next(self._lines, b"")

    def take(self, path: str, size: int) -> OldFile | None:
        """Passes the next entry if it has the path, and returns it with the sums up to a size."""
        if not self.line or path_of(self.line) != path:
            return None
        entry = parse(self.line)
        self.line = next(self._lines, b"")
        return OldFile(entry, self._map.read(entry.blocks_of(size), entry.blocks))

    def end(self) -> ManifestTrailer:
        """Passes all that is left; returns the trailer. Only now is it known that all was right."""
        for _ in chain(self._lines, self._map_bytes):
            pass
        trailer = self._manifest.trailer
        if trailer is None or self._digest.hexdigest() != trailer.map_sha256:
            raise SnapshotDamaged("a map is not what was written")
        return trailer

    def _blocks(self, size: int) -> int:
        # Within a text a quote is escaped, so this is no part of one.
        found = _BLOCK.search(self.line)
        return -(-size // int(found[1])) if found is not None else 0

    def _hashed(self, map: Path) -> Iterator[bytes]:
        for piece in _copied(map):
            self._digest.update(piece)
            yield piece


def _ending(manifest: Path, header_sum: bytes) -> tuple[ManifestTrailer, Seal]:
    with _readable(manifest), manifest.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - END_BYTES))
        file.seek(max(0, size - tail_size(file.read())))
        return ending_of(file.read(), header_sum)


def _copied(path: Path) -> Iterator[bytes]:
    with _readable(path):
        yield from pieces(path)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Takes a copy that is gone, or cannot be read, for a damaged one."""
    try:
        yield
    except OSError as error:
        raise SnapshotDamaged(f"the copy {path} cannot be read: {error.strerror}") from error


def pieces(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a file."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece
