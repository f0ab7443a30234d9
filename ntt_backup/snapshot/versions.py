"""The versions of a set lie in a repository: which there are, who made them, how two differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

from ntt_backup.config.signing_key import Origin
from ntt_backup.dump.retention import LEEWAY, could_begin
from ntt_backup.errors import ConfigError, RemoteDenied, RemoteUnreachable
from ntt_backup.filestore.contract import (
    FileMissing,
    Range,
    ReadableStore,
    StoredFile,
    StoredFileDamaged,
)
from ntt_backup.snapshot.format.entry import DIRECTORY, Entry, order
from ntt_backup.snapshot.format.manifest import (
    END_BYTES,
    Header,
    ManifestReader,
    ManifestTrailer,
    ending_of,
    tail_size,
)
from ntt_backup.snapshot.names import (
    MANIFEST,
    MAP,
    FileName,
    SnapshotDamaged,
    pack_name,
    require_set,
)
from ntt_backup.snapshot.origins import NOBODY, Origins
from ntt_backup.wire.stored_names import begun, is_pin

_PIECE: Final = 1 << 20
# Files of this year are of a target that does not say when they arrived.
_UNTOLD: Final = 1970
# Enough for a header and a trailer, as a rule.
_END: Final = 16 << 10
# Versions that are passed over, by name.
_TOLD: Final = 10
# Versions of others, newer than all of this host, that are looked at.
_MOST_FOREIGN: Final = 500


class Version(NamedTuple):
    """Describes a version in a repository.

    A version exists once its manifest is in the repository: it is whole then.

    Attributes:
        files: All files of the version, in the order of their names.
    """

    set: str
    name: str
    files: tuple[StoredFile, ...]

    def __str__(self) -> str:
        return f"{self.set}@{self.name}"

    @property
    def path(self) -> str:
        """Returns the directory of the version in the repository."""
        return f"{self.set}/{self.name}"

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
    def pins(self) -> list[str]:
        """Returns the names of its pins, see `filestore.pins`."""
        return [one.name for one in self.files if is_pin(one.name)]

    @property
    def size(self) -> int:
        """Bytes in the repository."""
        return sum(one.size for one in self.files)

    def lacks(self, trailer: ManifestTrailer, *, map: bool = True) -> dict[str, int]:
        """Returns the files that are missing or have another size, each with the size in bytes.

        No restore needs the map of a version.
        """
        packs = enumerate(trailer.packs, 1)
        sizes = {pack_name(self.set, self.name, number): one.size for number, one in packs}
        if map:
            sizes[str(FileName(self.set, self.name, MAP))] = trailer.map_size
        there = {one.name: one.size for one in self.files}
        return {name: size for name, size in sizes.items() if there.get(name) != size}

    @property
    def arrived(self) -> datetime:
        """Returns the time, by the target's clock, at which the last file of the version arrived.

        The name of the version tells the time where the target does not.
        """
        last = self.manifest or max(self.files, key=lambda one: one.arrived)
        return last.arrived if last.arrived.year > _UNTOLD else begun(self.name)

    def could_begin(self, at: datetime) -> bool:
        """Returns whether the version may have been begun at a time by when its files arrived."""
        first = min(one.arrived for one in self.files)
        return first.year == _UNTOLD or could_begin(at, first, self.arrived)


def versions(repository: ReadableStore, below: str = "") -> list[Version]:
    """Returns the versions of a set or of all sets, the oldest version of each set first.

    Versions that were never finished are returned, too.
    """
    found: dict[tuple[str, str], list[StoredFile]] = {}
    for one in repository.list(f"{below}/" if below else ""):
        name = FileName.read(one.name)
        found.setdefault((name.set, name.version), []).append(one)
    return [Version(*key, tuple(files)) for key, files in sorted(found.items())]


def choose(
    repository: ReadableStore,
    wanted: str,
    origins: Origins = NOBODY,
    tell: Callable[[str], object] = lambda _: None,
) -> Version:
    """Returns the version that `SET` or `SET@VERSION` means. The first letters are enough.

    `SET` means the newest version of this host, or the version that arrived last where none is
    known to be of this host. `tell` receives a text on each newer version that is passed over.

    Raises:
        ConfigError: No version or more than one fits.
    """
    name, _, begin = wanted.partition("@")
    require_set(name)
    whole = [one for one in versions(repository, name) if one.whole]
    fitting = [one for one in whole if one.name.startswith(begin)]
    if not fitting or (begin and len(fitting) > 1):
        raise ConfigError(
            f"{len(fitting) or 'no'} versions of {name} match {wanted!r}"
            if whole
            else f"{name} has no version",
            hint=f"see ntt-backup-remote snapshot list {name}",
        )
    if begin:
        return fitting[0]
    ours = newest_of_host(repository, whole, origins)
    chosen = ours or _last_arrived(repository, whole)
    newer = [one for one in whole if one.name > chosen.name]
    with suppress(ConfigError, RemoteDenied):  # They may not be read, so nothing is known of them.
        for known in facts(repository, newer[: -_TOLD - 1 : -1], origins):
            if known.problem:
                tell(f"{known.version} is passed over, since it is damaged: {known.problem}")
            elif ours is not None:
                text, why = known.origin.text, known.origin.why
                tell(f"{known.version} is passed over, since it is {text}: {why}")
        if len(newer) > _TOLD:
            tell(f"{len(newer) - _TOLD:,} more are passed over: see snapshot list {name}")
    return chosen


def newest_of_host(
    repository: ReadableStore, whole: Sequence[Version], origins: Origins
) -> Version | None:
    """Returns the newest that this host made of all whole versions of a set; None if none is known.

    The name alone proves the origin only where manifests may not be read: somebody else may have
    been first to upload a manifest under a name that this host once gave.

    Raises:
        ConfigError: Versions are sealed, and none is known by its name.
        RemoteDenied: Versions may not be read, and none is known by its name.
    """
    named = [one for one in whole if origins.names(one.set, one.name)]
    signed = whole[-_MOST_FOREIGN:] if origins.signed else []
    for version in sorted({*named, *signed}, reverse=True):
        try:
            if _is_ours(repository, version, origins):
                return version
        except (ConfigError, RemoteDenied):
            if left := [one for one in named if one.name <= version.name]:
                return left[-1]
            raise
    return None


def names_of_host(repository: ReadableStore, set: str, origins: Origins) -> list[str]:
    """Returns the names of whole versions that tell which is the newest version of this host.

    These are all versions that are known by their names, and the newest version that this host
    signed. A version that others may have planted is not among them, even under a name that this
    host once gave.

    Where manifests may not be read, all names are returned: the origin of a version is unknown
    then, and an existing version must not be reported as missing.
    """
    whole = {one.name: one for one in versions(repository, set) if one.whole}
    found = [name for name in whole if origins.names(set, name)]
    try:
        while found and not _is_ours(repository, whole[found[-1]], origins):
            found.pop()
        if (newest := newest_of_host(repository, list(whole.values()), origins)) is not None:
            found.append(newest.name)
    except (ConfigError, RemoteDenied):
        return list(whole)
    return found


def _is_ours(repository: ReadableStore, version: Version, origins: Origins) -> bool:
    return next(facts(repository, [version], origins)).origin == Origin.OURS


def _last_arrived(repository: ReadableStore, whole: Sequence[Version]) -> Version:
    """Returns the version that arrived last, of those that have a manifest if there is one."""
    by_arrival = sorted(whole, key=lambda one: one.arrived)
    for one in by_arrival[: -_MOST_FOREIGN - 1 : -1]:
        if next(facts(repository, [one])).header is not None:
            return one
    return by_arrival[-1]


def newest_name(
    repository: ReadableStore, whole: Sequence[Version], origins: Origins, now: datetime
) -> str:
    """Returns the name after which the name of a new version must sort; "" where there is none.

    A name that is ahead of the clock counts only where the version arrived at that time, or where
    this host made the version. Anybody may write any other such name.
    """
    for version in whole[::-1]:
        with suppress(ConfigError, RemoteDenied):
            if (
                begun(version.name) <= now
                or origins.names(version.set, version.name)
                or abs(version.arrived - begun(version.name)) <= LEEWAY
                or (origins.signed and _is_ours(repository, version, origins))
            ):
                return version.name
    return ""


def content(repository: ReadableStore, file: StoredFile) -> Iterator[bytes]:
    """Yields a file's bytes. Raises FileMissing."""
    starts = range(0, file.size, _PIECE)
    return repository.read(Range(file.name, at, min(_PIECE, file.size - at)) for at in starts)


def open_manifest(repository: ReadableStore, version: Version) -> ManifestReader:
    """Returns the manifest of a whole version. Raises SnapshotDamaged."""
    assert version.manifest is not None
    reader = ManifestReader(content(repository, version.manifest))
    require_own(reader.header, version)
    return reader


class VersionFacts(NamedTuple):
    """Holds the header and the trailer of a manifest.

    Both are None, and `problem` is set, where the manifest is damaged or is not a manifest.
    """

    version: Version
    header: Header | None
    trailer: ManifestTrailer | None
    problem: str = ""
    origin: Origin = Origin.UNKNOWN


def facts(
    repository: ReadableStore, versions: Iterable[Version], origins: Origins = NOBODY
) -> Iterator[VersionFacts]:
    """Yields the header and the trailer in the manifest of each whole version.

    Only the two ends of a large manifest are read, so the manifest is not proved. But a version of
    this host has the header and the trailer that this host made.
    """
    whole = [(one, one.manifest) for one in versions if one.manifest is not None]
    rest = iter(whole)
    try:
        # A reader ends with its first error: the versions behind a damaged one need a new one.
        while whole := list(rest):
            rest = iter(whole)
            pieces = repository.read(one for _, file in whole for one in _ends(file))
            for version, file in rest:
                try:
                    ends = [next(pieces) for _ in _ends(file)]
                except StoredFileDamaged as error:
                    yield VersionFacts(version, None, None, error.detail)
                    break
                try:
                    yield _facts(repository, version, ends, origins)
                except StoredFileDamaged as error:
                    yield VersionFacts(version, None, None, error.detail)
    except FileMissing as error:
        raise RemoteUnreachable(
            "a version was removed meanwhile", detail=str(error), hint="run the command again"
        ) from error


def last_begun(
    repository: ReadableStore, set: str, now: datetime, origins: Origins
) -> datetime | None:
    """Returns when the newest version of this host was begun; None where none is known."""
    whole = [one for one in versions(repository, set) if one.whole]
    with suppress(ConfigError, RemoteDenied):  # Nothing is known of them then.
        if (newest := newest_of_host(repository, whole, origins)) is not None:
            return begun_by(repository, newest, now)
    return None


def begun_by(repository: ReadableStore, version: Version, now: datetime) -> datetime:
    """Returns the time at which a whole version was begun.

    The name of the version tells that time. Where the name is ahead of `now`, the manifest tells
    it, if the manifest may be read.
    """
    named = begun(version.name)
    if named > now:
        with suppress(ConfigError, RemoteDenied):
            header = next(facts(repository, [version])).header
            return header.begun if header is not None else named
    return named


def _ends(file: StoredFile) -> list[Range]:
    if file.size > 2 * _END:
        return [Range(file.name, 0, _END), Range(file.name, file.size - _END, _END)]
    return [Range(file.name, 0, file.size)] if file.size else []


def _facts(
    repository: ReadableStore, version: Version, ends: list[bytes], origins: Origins
) -> VersionFacts:
    assert version.manifest is not None
    try:
        reader = ManifestReader(ends[:1])
        require_own(reader.header, version)
    except StoredFileDamaged:  # Or it is longer than what was read of it.
        reader = open_manifest(repository, version)
    trailer, seal = ending_of(_tail(repository, version.manifest, ends), reader.header_sum)
    origin = origins.of_seal(reader.header, seal)
    return VersionFacts(version, reader.header, trailer, origin=origin)


def require_own(header: Header, version: Version) -> None:
    """Raises SnapshotDamaged for the header of another version."""
    if (header.set, header.version) != (version.set, version.name):
        raise SnapshotDamaged(f"the manifest of {version} is that of another version")


def _tail(repository: ReadableStore, file: StoredFile, ends: list[bytes]) -> bytes:
    """Returns the last bytes of a manifest, as `ending_of` needs them."""
    end = b"".join(ends[-1:])
    size = tail_size(end[-END_BYTES:])
    if len(end) < size <= file.size:
        end = next(repository.read([Range(file.name, file.size - size, size)]))
    return end[-size:]


class Kind(StrEnum):
    """Says how an entry differs."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    # Its content is the same, its mode, owner, time or attributes are not.
    ATTRIBUTES = "attributes"


class EntryDifference(NamedTuple):
    """An entry that differs. old or new is None where there is none."""

    kind: Kind
    old: Entry | None
    new: Entry | None

    @property
    def entry(self) -> Entry:
        """Returns the new entry; the old one of what was removed."""
        one = self.new or self.old
        assert one is not None
        return one


def differences(old: ManifestReader, new: ManifestReader) -> Iterator[EntryDifference]:
    """Yields the entries that differ, in the order of paths. At the end both manifests are proved.

    Raises:
        SnapshotDamaged: A manifest is damaged.
    """

    def keyed(manifest: ManifestReader, side: int) -> Iterator[tuple[bytes, int, Entry]]:
        return ((order(one.path), side, one) for one in manifest.entries())

    both = merge(keyed(old, 0), keyed(new, 1), key=itemgetter(0))
    for _, found in groupby(both, key=itemgetter(0)):
        sides = {side: entry for _, side, entry in found}
        before, after = sides.get(0), sides.get(1)
        if before is None:
            kind = Kind.ADDED
        elif after is None:
            kind = Kind.REMOVED
        elif _content(before) != _content(after):
            kind = Kind.CHANGED
        elif _attributes(before) != _attributes(after):
            kind = Kind.ATTRIBUTES
        else:
            continue
        yield EntryDifference(kind, before, after)


def _content(one: Entry) -> tuple[object, ...]:
    return one.kind, one.size, one.digest, one.target


def _attributes(one: Entry) -> Entry:
    # Of a directory, the time says no more than that something in it is new or gone.
    time = 0 if one.kind == DIRECTORY else one.mtime
    return replace(one, mtime=time, ctime=0, inode=0, block=0, extents=[], unsettled=False)
