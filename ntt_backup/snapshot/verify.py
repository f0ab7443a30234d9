"""Checks versions of a set: that all of their files are there, and that content is what was taken.

Each manifest is read whole and proved by its own sum. The files that it lists, and those of other
versions that its entries lie in, are looked up by size. Content is fetched on request, all or the
super blocks of a random part, and compared with the sums that were made when it was taken.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, NamedTuple
from zlib import crc32

from blake3 import blake3

from ntt_backup.config.signing_key import Origin
from ntt_backup.errors import SOME_FAILED, ConfigError, RemoteUnreachable
from ntt_backup.filestore.contract import FileMissing, ReadableStore, StoredFileDamaged
from ntt_backup.snapshot.format.block_map import SUM, MapReader, add_zeros, sums
from ntt_backup.snapshot.format.entry import Entry, Extent
from ntt_backup.snapshot.format.manifest import Header, ManifestReader, ManifestTrailer
from ntt_backup.snapshot.names import (
    MANIFEST,
    MAP,
    FileName,
    SnapshotDamaged,
    pack_name,
    require_set,
)
from ntt_backup.snapshot.origins import NOBODY, Origins
from ntt_backup.snapshot.restore.fetch import Fetcher
from ntt_backup.snapshot.versions import Version, choose, content, facts, open_manifest, versions

_KEPT: Final = 1000
_DIFFERS: Final = "its content is not what was taken"
_MOMENT: Final = re.compile(r"\d{8}(T\d{0,6}Z?[0-9a-f]{0,8})?")


class Damage(NamedTuple):
    """Describes a missing or wrong part of a version.

    One of `file` and `path` is "".

    Attributes:
        file: The file of the target.
        path: The path in the set.
    """

    version: str
    file: str
    path: str
    detail: str


@dataclass
class VersionFindings:
    """Holds the findings of a check.

    Attributes:
        entries: The number of entries in the checked versions.
        files: The number of files that were looked up on the target.
        bytes: The bytes of content that were fetched.
        damaged: The versions that cannot be restored as a whole.
        wrong: The reasons, the first thousand of `wrong_total`.
        foreign: The versions that this host did not make, as far as is known.
    """

    versions: int = 0
    entries: int = 0
    files: int = 0
    bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    wrong: list[Damage] = field(default_factory=list)
    wrong_total: int = 0
    unfinished: int = 0
    foreign: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if self.damaged else 0

    def add(self, version: Version, detail: str, *, file: str = "", path: str = "") -> None:
        """Notes that a version is damaged, and why."""
        if str(version) not in self.damaged:
            self.damaged.append(str(version))
        self.wrong_total += 1
        if len(self.wrong) < _KEPT:
            self.wrong.append(Damage(str(version), file, path, detail))


def verify(
    repository: ReadableStore,
    which: str = "",
    share: float = 0.0,
    since: str = "",
    *,
    on_progress: Callable[[VersionFindings], object] = lambda _: None,
    origins: Origins = NOBODY,
) -> VersionFindings:
    """Checks versions in a repository: `SET`, `SET@VERSION`, or "" for all.

    A share of the content is compared, 0 to 1. Versions before `since`, a day or the beginning of a
    name, are left out. Content of a version that others need is looked at with that version, and so
    once; with all that need it where only one version is asked for.

    Raises:
        ConfigError: There is none to check.
    """
    name, _, one = which.partition("@")
    if name:
        require_set(name)
    known = versions(repository, name)
    wanted = [one for one in known if one.whole]
    if one or not wanted:
        wanted = [choose(repository, which, origins)] if name else []
    begin = since.replace("-", "").replace(":", "")
    if begin and not _MOMENT.fullmatch(begin):
        raise ConfigError(f"{since!r} is neither a day nor a version", hint="such as 2026-03-31")
    found = VersionFindings(unfinished=sum(not one.whole for one in known))
    by_name = {(one.set, one.name): one for one in known}
    check = _Check(repository, by_name, found, share, on_progress, origins)
    for version in wanted:
        if version.name.replace("-", "") >= begin:
            check.check(version, alone=bool(one))
    found.duration_s = time.monotonic() - check.began
    return found


@dataclass
class _Check:
    _repository: ReadableStore
    _known: Mapping[tuple[str, str], Version]
    _found: VersionFindings
    _share: float
    _on_progress: Callable[[VersionFindings], object]
    _origins: Origins

    def __post_init__(self) -> None:
        self._salt = random.randbytes(8)
        # Of each version, the packs that are there; and super blocks in them that are damaged.
        self._packs: dict[tuple[str, str], Collection[int]] = {}
        self._bad: set[tuple[str, str, int, int]] = set()
        self.began = time.monotonic()

    def check(self, version: Version, *, alone: bool) -> None:
        """Checks a version. One among others that is removed meanwhile does not count."""
        found = self._found
        damaged, wrong, total = len(found.damaged), len(found.wrong), found.wrong_total
        found.versions += 1
        try:
            self._look_into(version, alone=alone)
            gone = found.wrong_total > total and not alone and self._is_gone(version)
        except RemoteUnreachable:  # `facts` says so of a version that is gone.
            gone = not alone and self._is_gone(version)
            if not gone:
                raise
        if gone:
            found.versions -= 1
            del found.damaged[damaged:], found.wrong[wrong:]
            found.wrong_total = total

    def _is_gone(self, version: Version) -> bool:
        left = versions(self._repository, version.set)
        return not any(one.whole and one.name == version.name for one in left)

    def _look_into(self, version: Version, *, alone: bool) -> None:
        try:
            said = next(facts(self._repository, [version]))
            if said.trailer is None:
                raise SnapshotDamaged(said.problem)
            self._look_up(version, said.trailer)
            reader = open_manifest(self._repository, version)
            entries = self._entries(version, reader)
            if self._share:
                map = self._proved_map(version, said.trailer)
                self._compare(version, reader.header, map, entries, alone=alone)
            else:
                for _ in entries:
                    pass
            if reader.trailer != said.trailer:
                raise SnapshotDamaged("its end says something else than its content")
            assert reader.seal is not None
            origin = self._origins.of_seal(reader.header, reader.seal)
            if origin == Origin.FORGED:
                raise SnapshotDamaged(f"{origin.why}: {origin.text}")
            if origin != Origin.OURS:
                self._found.foreign.append(str(version))
        except (StoredFileDamaged, FileMissing) as error:
            detail = error.detail if isinstance(error, StoredFileDamaged) else "it is missing"
            self._found.add(
                version, detail, file=str(FileName(version.set, version.name, MANIFEST))
            )
        self._show()

    def _entries(self, version: Version, reader: ManifestReader) -> Iterator[Entry]:
        """Yields the entries. Content that is known to be lost is noted."""
        header, found = reader.header, self._found
        lost_packs = set()
        for entry in reader.entries():
            found.entries += 1
            if not found.entries % 1024:
                self._show()
            lost = {one[2:4] for one in entry.extents if self._is_lost(header, one)}
            if lost:
                found.add(version, "content of it is lost", path=entry.path)
                lost_packs |= lost
            yield entry
        for index, number in sorted(lost_packs):
            if header.chain[index] != version.name:
                name = header.pack(index, number)
                found.add(version, "it is needed, and missing or damaged", file=name)

    def _is_lost(self, header: Header, extent: Extent) -> bool:
        name = header.chain[extent.version]
        return (
            extent.pack not in self._good(header.set, name)
            or (header.set, name, extent.pack, extent.offset) in self._bad
        )

    def _good(self, set_name: str, name: str) -> Collection[int]:
        """Returns the numbers of a version's packs that are in the repository.

        A pack must have the size that the manifest names. Where the manifest is damaged, any size
        is accepted.
        """
        key = (set_name, name)
        if key not in self._packs:
            version = self._known.get(key, Version(*key, ()))
            names = {one.name for one in version.files}
            numbers = range(1, len(names) + 1)
            self._packs[key] = {one for one in numbers if pack_name(*key, one) in names}
            for known in facts(self._repository, [version]):
                if known.trailer is not None:
                    self._know_packs(version, known.trailer)
        return self._packs[key]

    def _know_packs(self, version: Version, trailer: ManifestTrailer) -> dict[str, int]:
        """Notes the packs that are there as the trailer says; returns what the version lacks."""
        key, lacks = (version.set, version.name), version.lacks(trailer)
        numbers = range(1, len(trailer.packs) + 1)
        self._packs[key] = {one for one in numbers if pack_name(*key, one) not in lacks}
        return lacks

    def _look_up(self, version: Version, trailer: ManifestTrailer) -> None:
        """Compares what is there of a version with what its trailer says."""
        there = {one.name: one.size for one in version.files}
        for name, size in self._know_packs(version, trailer).items():
            has = f"it has {there[name]} bytes, not {size}" if name in there else "it is missing"
            self._found.add(version, has, file=name)
        self._found.files += len(trailer.packs) + 2  # Its map and its manifest, too.

    def _proved_map(self, version: Version, trailer: ManifestTrailer) -> Iterable[bytes] | None:
        """Returns the bytes of a version's map, if it is what was written."""
        file = version.file(MAP)
        if file is None or file.size != trailer.map_size:
            return None  # That was said when sizes were looked up.
        digest = sha256()
        for piece in content(self._repository, file):
            digest.update(piece)
        if digest.hexdigest() == trailer.map_sha256:
            return content(self._repository, file)
        self._found.add(version, "its content was altered", file=file.name)
        return None

    def _compare(
        self,
        version: Version,
        header: Header,
        map: Iterable[bytes] | None,
        entries: Iterable[Entry],
        *,
        alone: bool,
    ) -> None:
        """Fetches content of a version, and compares the content with sums.

        A file without sums is compared if its first extent is chosen. Without a map, content that
        has sums is only compared with the checksums of its super blocks. Content of the versions
        that the version needs is compared only if the version was asked for alone.
        """
        own, threshold = len(header.chain) - 1, int(self._share * 2**32)
        key, sums = bytes.fromhex(header.key), MapReader(map) if map is not None else None
        fetcher = Fetcher[_Content](self._repository, header)

        def chosen(extent: Extent) -> bool:
            return (
                (alone or extent.version == own)
                and crc32(repr(extent[2:5]).encode(), crc32(self._salt)) < threshold
                and not self._is_lost(header, extent)
            )

        def files() -> Iterator[tuple[_Content, Sequence[Extent]]]:
            before = 0
            for entry in entries:
                extents = entry.extents if entry.block else entry.extents[:1]
                extents = [one for one in extents if chosen(one)]
                if extents:
                    every = extents if entry.block else entry.extents
                    yield _Content(entry, key, sums, before), every
                before += entry.blocks

        # Super blocks, by version, pack and offset.
        bad: set[tuple[int, int, int]] = set()
        before, last = self._found.bytes, ""
        for file, pieces, ended in fetcher.read(files()):
            entry, wrong = file.entry, ""
            for start, data, whole in pieces:
                if whole and file.add(start, data):
                    continue
                extent = next(one for one in entry.extents if one.start == start)
                bad.add(extent[2:5])
                name = header.pack(extent.version, extent.pack)
                lost = fetcher.lost.get(name) or f"{name} is missing or damaged"
                wrong = wrong or (_DIFFERS if whole else lost)
            if ended and not wrong and not file.end():
                bad |= {one[2:5] for one in entry.extents}
                wrong = _DIFFERS
            self._found.bytes = before + fetcher.fetched
            if wrong and entry.path != last:
                last = entry.path
                self._found.add(version, wrong, path=entry.path)
            self._show()
        # Not before: whether content is lost is asked while entries are read ahead.
        self._bad |= {(version.set, header.chain[one], pack, at) for one, pack, at in bad}

    def _show(self) -> None:
        self._found.duration_s = time.monotonic() - self.began
        self._on_progress(self._found)


@dataclass
class _Content:
    """Checks the content of a file as the content arrives.

    Whole blocks are compared with their sums in the map, of which `before` come before those of the
    file. The content of a file without sums is compared with the digest of the file at its end.
    """

    entry: Entry
    _key: bytes
    _map: MapReader | None
    _before: int

    def __post_init__(self) -> None:
        self._at = 0
        self._held = bytearray()
        self._digest = blake3()

    def add(self, start: int, data: memoryview) -> bool:
        """Takes the next content. Returns whether it is right, as far as can be said."""
        block = self.entry.block
        if not block:
            add_zeros(self._digest, start - self._at)
            self._digest.update(data)
            self._at = start + len(data)
            return True
        if self._map is None:
            return True
        if start != self._at + len(self._held):
            # The rest of a block that begins in what was not asked for.
            skip = -start % block
            self._held.clear()
            self._at, data = start + skip, data[skip:]
        self._held += data
        whole = len(self._held)
        if self._at + whole < self.entry.size:
            whole -= whole % block
        found = sums(memoryview(self._held)[:whole], block, self._key)
        self._map.skip(self._before + self._at // block - self._map.passed)
        wanted = self._map.read(len(found) // SUM)
        del self._held[:whole]
        self._at += whole
        return found == wanted

    def end(self) -> bool:
        """Returns whether all of the file is right, as far as can be said."""
        if self.entry.block:
            return True
        add_zeros(self._digest, self.entry.size - self._at)
        return self._digest.hexdigest() == self.entry.digest
