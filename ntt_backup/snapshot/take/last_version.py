"""The last version of a set is read beside a walk, by local copies of its manifest and its map.

The repository has the truth. A copy on this machine saves fetching it, and may be deleted at any
time. Beside the copies stands which versions this machine has made, see `snapshot.origins`.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from ntt_backup.blobdir.descriptors import DIRECTORY, closing
from ntt_backup.config.signing_key import SigningKeys
from ntt_backup.errors import DestinationError
from ntt_backup.filestore.contract import FileStore
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
from ntt_backup.snapshot.names import MANIFEST, MAP, SnapshotDamaged
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.take.changed_file import OldFile
from ntt_backup.snapshot.versions import Version, content

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
            raise SnapshotDamaged("the checksum of the map is wrong")
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


class Copies:
    """Keeps manifests and maps of a set in a directory of this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def origins(self, keys: SigningKeys, target: str = "") -> Origins:
        """Returns the origins of versions of the set, as far as this machine knows them."""
        return Origins(keys, lambda _: self._directory, target)

    def paths(self, version: str) -> tuple[Path, Path]:
        """Returns where the manifest and the map of a version are, or may be written."""
        return self._directory / f"{version}.{MANIFEST}", self._directory / f"{version}.{MAP}"

    def fetch(self, repository: FileStore, version: Version) -> None:
        """Copies both from the repository. Raises OSError, FileMissing."""
        self.drop(version.name)
        for path, file in zip(self.paths(version.name), (MANIFEST, MAP), strict=True):
            part = path.with_suffix(".part")
            with part.open("wb") as out:
                if (one := version.file(file)) is not None:
                    out.writelines(content(repository, one))
            part.replace(path)

    def drop(self, version: str) -> None:
        """Removes a version's."""
        for path in self.paths(version):
            with suppress(OSError):
                path.unlink()

    def keep_only(self, version: str) -> None:
        """Removes all but a version's."""
        for path in self._directory.glob("*.*"):
            if path not in self.paths(version):
                with suppress(OSError):
                    path.unlink()


def cannot_keep(error: OSError) -> DestinationError:
    """Returns what is raised where the copies cannot be written."""
    return DestinationError(
        "temporary files of a snapshot cannot be written on this machine",
        detail=str(error),
        hint="free space there, or set XDG_CACHE_HOME or TMPDIR to another directory",
    )


@contextmanager
def open_copies(directory: Path) -> Iterator[Copies]:
    """Yields the copies of manifests and maps in a directory.

    The copies are in a temporary directory where the directory cannot be written or another take
    uses it.

    Raises:
        DestinationError: The temporary directory cannot be written either.
    """
    with ExitStack() as stack:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = stack.enter_context(closing(os.open(directory, DIRECTORY)))
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # Others: a file system that cannot lock a directory.
                if isinstance(error, BlockingIOError):
                    raise
            probe = directory / "probe.part"
            probe.touch()
            probe.unlink()
        except OSError:
            try:
                directory = Path(stack.enter_context(TemporaryDirectory(prefix="ntt-snapshot-")))
            except OSError as error:
                raise cannot_keep(error) from error
        yield Copies(directory)
