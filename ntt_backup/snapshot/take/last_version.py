"""The last version of a set is read beside a walk; this machine has copies of its manifest and map.

The repository has the truth. A copy here saves fetching it, and may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from hashlib import sha256
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from ntt_backup.blobdir.open import closing
from ntt_backup.blobdir.syscalls import DIRECTORY
from ntt_backup.errors import (
    ConfigError,
    DestinationError,
    RemoteCannotStore,
    RemoteDenied,
    SourceError,
    complete,
)
from ntt_backup.snapshot.format.block_map import MapReader
from ntt_backup.snapshot.format.entry import order, parse, path_of
from ntt_backup.snapshot.format.manifest import Header, ManifestReader, Trailer
from ntt_backup.snapshot.repository.contract import FileMissing, Repository, SnapshotDamaged
from ntt_backup.snapshot.repository.names import MANIFEST, MAP, pack_name
from ntt_backup.snapshot.take.changed_file import OldFile
from ntt_backup.snapshot.take.sets import SnapshotSet
from ntt_backup.snapshot.versions import Version, begun_by, content, trailers, versions

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


class Copies:
    """Manifests and maps of a set in a directory of this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def paths(self, version: str) -> tuple[Path, Path]:
        """Returns where the manifest and the map of a version are, or may be written."""
        return self._directory / f"{version}.{MANIFEST}", self._directory / f"{version}.{MAP}"

    def has(self, version: str) -> bool:
        """Returns whether both exist. Whether they are right is seen when they are read."""
        return all(one.exists() for one in self.paths(version))

    def fetch(self, repository: Repository, version: Version) -> None:
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
        "what a snapshot needs on this machine cannot be written",
        detail=str(error),
        hint="make room there, or set XDG_CACHE_HOME or TMPDIR to another directory",
    )


@contextmanager
def open_copies(directory: Path) -> Iterator[Copies]:
    """Yields the copies in a directory; where nothing can be written there, or another take has it,
    those in a temporary one. Raises DestinationError where nothing can be written there either.
    """
    with ExitStack() as stack:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = stack.enter_context(closing(os.open(directory, DIRECTORY)))
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:
                pass  # Of a file system that cannot lock a directory.
            probe = directory / "probe.part"
            probe.touch()
            probe.unlink()
        except OSError:
            try:
                directory = Path(stack.enter_context(TemporaryDirectory(prefix="ntt-snapshot-")))
            except OSError as error:
                raise cannot_keep(error) from error
        yield Copies(directory)


def parents(
    repository: Repository,
    set: SnapshotSet,
    whole: Mapping[str, Version],
    copies: Copies,
    now: datetime,
    full: bool,
    problem: Callable[[str, str], object],
) -> Iterator[LastVersion | None]:
    """Yields what a version may build on: the last version by this machine's copy, by one that is
    fetched, and None. The next one is asked for where one is damaged, or may not be read.
    """
    newest = max(whole, default="")
    if full or not newest:
        yield None
        return
    for fetched in (False, True):
        try:
            if fetched:
                copies.fetch(repository, whole[newest])
            elif not copies.has(newest):
                continue
            last = LastVersion(*copies.paths(newest))
        except (SnapshotDamaged, FileMissing):
            continue
        except (ConfigError, RemoteDenied) as error:  # It is sealed, or the key may only add.
            problem(f"version {newest}", f"it cannot be read back, so this one is full: {error}")
            break
        header = last.header
        if (header.set, header.version) != (set.name, newest):
            continue
        first = whole.get(header.chain[0])
        if first is not None and abs(now - begun_by(repository, first, now)) >= set.full_every:
            break
        if _is_whole(repository, [whole.get(one) for one in header.chain]):
            yield last
    else:
        problem(
            f"version {newest}",
            complete(
                "it is damaged or not whole, so this one is full; see ntt-backup-remote snapshot"
                " verify"
            ),
        )
    yield None


def _is_whole(repository: Repository, chain: Sequence[Version | None]) -> bool:
    """Returns whether the repository has the packs of a chain, as far as can be known: where
    nothing may be read, those that were cut, and the last one, are not missed. The last version's
    packs are for `require_packs`.
    """
    known = [one for one in chain if one is not None and _complete(one)]
    if len(known) < len(chain):
        return False
    try:
        before = known[:-1]
        for version, trailer in zip(before, trailers(repository, before), strict=True):
            require_packs(version, trailer)
    except (SnapshotDamaged, FileMissing, ValueError):
        return False
    except (ConfigError, RemoteDenied):  # It is sealed, or the key may only add.
        pass
    return True


def _complete(version: Version) -> bool:
    """Returns whether no pack is missing between others."""
    packs = [one.name for one in version.files if "/pack-" in one.name]
    return packs == _packs(version.set, version.name, len(packs))


def _packs(set: str, version: str, count: int) -> list[str]:
    return [pack_name(set, version, one) for one in range(1, count + 1)]


def require_packs(version: Version, trailer: Trailer) -> None:
    """Raises SnapshotDamaged where the repository has not the packs that a manifest names."""
    sizes = {one.name: one.size for one in version.files}
    for name, one in zip(
        _packs(version.set, version.name, len(trailer.packs)), trailer.packs, strict=True
    ):
        if sizes.get(name) != one.size:
            raise SnapshotDamaged(f"{name} is not there as it was written")


def require_needed(
    repository: Repository, header: Header, whole: Mapping[str, Version], new: Trailer
) -> None:
    """Checks that the repository has all that a new version needs: another host may have removed
    some of it meanwhile. Raises SnapshotDamaged for the versions before it, which are not what is
    in whole; RemoteCannotStore for its own files.
    """
    there = {one.name: one for one in versions(repository, header.set)}
    for name in header.chain[:-1]:
        if there.get(name) != whole[name]:
            raise SnapshotDamaged(f"{header.set}@{name} was removed meanwhile")
    try:
        nothing = Version(header.set, header.version, ())
        require_packs(there.get(header.version, nothing), new)
    except SnapshotDamaged as error:
        raise RemoteCannotStore(
            "the target has lost a part of the version that was made",
            detail=error.detail,
            hint="did snapshot forget on another host, or a rule of the bucket, remove it? If not,"
            " look at the target's disk; then take a version again",
        ) from error


def require_readable(manifest: Path, *, full: bool) -> None:
    """Raises SnapshotDamaged, or SourceError for a full version, where a restore would refuse a new
    manifest: no version is better than one that takes the place of a good one.
    """
    try:
        deque(ManifestReader(pieces(manifest)).rows(), maxlen=0)
    except SnapshotDamaged as error:
        if not full:
            raise
        raise SourceError(
            "the version that was made could not be restored, and was given up",
            detail=error.detail,
            hint="this is a defect of the program: report it; leave out the file (--exclude)",
        ) from error


def _copied(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a copy. One that is gone, or cannot be read, is a damaged one."""
    try:
        yield from pieces(path)
    except OSError as error:
        raise SnapshotDamaged(f"the copy {path} cannot be read: {error.strerror}") from error


def pieces(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a file."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece
