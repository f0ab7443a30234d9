"""The versions of a set lie in a repository: it tells which there are, and their manifests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Final, NamedTuple

from ntt_backup.errors import ConfigError, RemoteDenied, RemoteUnreachable
from ntt_backup.snapshot.format.manifest import (
    END_BYTES,
    Header,
    ManifestReader,
    Trailer,
    tail_size,
    trailer_of,
)
from ntt_backup.snapshot.repository.contract import (
    FileMissing,
    Range,
    RepositoryToRead,
    SnapshotDamaged,
    StoredFile,
)
from ntt_backup.snapshot.repository.names import MANIFEST, FileName, require_set
from ntt_backup.wire.snapshot_names import begun

_PIECE: Final = 1 << 20
# Enough for a header and a trailer, as a rule.
_END: Final = 16 << 10
_TRAILER: Final = 4 << 10
_LARGEST_TAIL: Final = 16 << 20


class Version(NamedTuple):
    """A version in a repository. files: all that it has, in the order of names. whole: whether it
    has its manifest, and so exists.
    """

    set: str
    name: str
    files: tuple[StoredFile, ...]

    def __str__(self) -> str:
        return f"{self.set}@{self.name}"

    @property
    def whole(self) -> bool:
        return self.manifest is not None

    @property
    def manifest(self) -> StoredFile | None:
        """Returns the file with which a version exists."""
        return self.file(MANIFEST)

    def file(self, file: str) -> StoredFile | None:
        """Returns one of its files by the last part of the name."""
        name = str(FileName(self.set, self.name, file))
        return next((one for one in self.files if one.name == name), None)

    @property
    def size(self) -> int:
        """Bytes in the repository."""
        return sum(one.size for one in self.files)


def versions(repository: RepositoryToRead, below: str = "") -> list[Version]:
    """Returns the versions of a set, or of all, the oldest of each set first; those that were never
    finished, too.
    """
    found: dict[tuple[str, str], list[StoredFile]] = {}
    for one in repository.list(f"{below}/" if below else ""):
        name = FileName.read(one.name)
        found.setdefault((name.set, name.version), []).append(one)
    return [Version(*key, tuple(files)) for key, files in sorted(found.items())]


def choose(repository: RepositoryToRead, wanted: str) -> Version:
    """Returns the version that `SET`, the newest, or `SET@VERSION` means; the first letters of a
    version are enough. Raises ConfigError where there is none, or more than one.
    """
    name, _, begin = wanted.partition("@")
    require_set(name)
    whole = [one for one in versions(repository, name) if one.whole]
    fitting = [one for one in whole if one.name.startswith(begin)]
    if not fitting or (begin and len(fitting) > 1):
        raise ConfigError(
            f"{len(fitting) or 'no'} versions of {name} fit {wanted!r}"
            if whole
            else f"{name} has no version",
            hint=f"see ntt-backup-remote snapshot list {name}",
        )
    return fitting[-1]


def content(repository: RepositoryToRead, file: StoredFile) -> Iterator[bytes]:
    """Yields a file's bytes. Raises FileMissing."""
    starts = range(0, file.size, _PIECE)
    return repository.read(Range(file.name, at, min(_PIECE, file.size - at)) for at in starts)


def open_manifest(repository: RepositoryToRead, version: Version) -> ManifestReader:
    """Returns the manifest of a whole version. Raises SnapshotDamaged."""
    assert version.manifest is not None
    reader = ManifestReader(content(repository, version.manifest))
    require_own(reader.header, version)
    return reader


class Facts(NamedTuple):
    """Holds what a manifest says first and last; neither, and a problem, where it is damaged."""

    version: Version
    header: Header | None
    trailer: Trailer | None
    problem: str = ""


def facts(repository: RepositoryToRead, versions: Iterable[Version]) -> Iterator[Facts]:
    """Yields what the manifests of whole versions say, unproven, since of large ones only the ends
    are read.
    """
    whole = [(one, one.manifest) for one in versions if one.manifest is not None]
    pieces = repository.read(one for _, file in whole for one in _ends(file))
    try:
        for version, file in whole:
            ends = [next(pieces) for _ in _ends(file)]
            try:
                yield Facts(
                    version, _header(repository, version, ends), _trailer(repository, file, ends)
                )
            except SnapshotDamaged as error:
                yield Facts(version, None, None, error.detail)
    except FileMissing as error:
        raise RemoteUnreachable(
            "a version was removed meanwhile", detail=str(error), hint="say it again"
        ) from error


def last_begun(repository: RepositoryToRead, set: str, now: datetime) -> datetime | None:
    """Returns when the newest version of a set was begun; None where there is none."""
    whole = [one for one in versions(repository, set) if one.whole]
    return begun_by(repository, whole[-1], now) if whole else None


def begun_by(repository: RepositoryToRead, version: Version, now: datetime) -> datetime:
    """Returns when a whole version was begun. Where its name is ahead of now, its manifest tells,
    if that may be read.
    """
    named = begun(version.name)
    if named > now:
        with suppress(ConfigError, RemoteDenied):
            header = next(facts(repository, [version])).header
            return header.begun if header is not None else named
    return named


def trailers(repository: RepositoryToRead, versions: Iterable[Version]) -> Iterator[Trailer]:
    """Yields what the manifests of whole versions say last, unproven, of which little is fetched.
    Raises SnapshotDamaged, FileMissing.
    """
    files = [one.manifest for one in versions if one.manifest is not None and one.manifest.size]
    starts = [max(0, file.size - _TRAILER) for file in files]
    pieces = repository.read(
        Range(file.name, start, file.size - start)
        for file, start in zip(files, starts, strict=True)
    )
    for file, piece in zip(files, pieces, strict=True):
        yield _trailer(repository, file, [piece])


def _ends(file: StoredFile) -> list[Range]:
    if file.size > 2 * _END:
        return [Range(file.name, 0, _END), Range(file.name, file.size - _END, _END)]
    return [Range(file.name, 0, file.size)] if file.size else []


def _header(repository: RepositoryToRead, version: Version, ends: list[bytes]) -> Header:
    try:
        header = ManifestReader(ends[:1]).header
    except SnapshotDamaged:
        return open_manifest(repository, version).header
    require_own(header, version)
    return header


def require_own(header: Header, version: Version) -> None:
    """Raises SnapshotDamaged for the header of another version."""
    if (header.set, header.version) != (version.set, version.name):
        raise SnapshotDamaged(f"the manifest of {version} is that of another version")


def _trailer(repository: RepositoryToRead, file: StoredFile, ends: list[bytes]) -> Trailer:
    end = b"".join(ends[-1:])
    size = tail_size(end[-END_BYTES:])
    if len(end) < size <= min(file.size, _LARGEST_TAIL):
        end = next(repository.read([Range(file.name, file.size - size, size)]))
    return trailer_of(end[-size:])
