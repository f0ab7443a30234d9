"""A new version of a set is what is on the disk now, merged with the last version.

The last version has a chain of earlier ones, which must be whole until the end of the take.

A walk and the last manifest have one order. An entry that would begin as it did then is taken over
as it is, and no content is read. Of everything else, what differs is stored. Packs come first, then
the map, then the manifest: before it is there, nothing of the version exists.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from socket import gethostname
from typing import Final

from ntt_backup.blobdir.descriptors import closing as closing_fd
from ntt_backup.config.signing_key import Origin
from ntt_backup.errors import (
    SOME_FAILED,
    ConfigError,
    NameTaken,
    RemoteCannotStore,
    RemoteDenied,
    SourceError,
    complete,
)
from ntt_backup.filestore.contract import FileMissing, FileStore, StoredFileDamaged
from ntt_backup.formatting import many
from ntt_backup.snapshot import names
from ntt_backup.snapshot.format.block_map import MapWriter
from ntt_backup.snapshot.format.entry import DIRECTORY, FIFO, FILE, HARD_LINK, SYMLINK, beginning_of
from ntt_backup.snapshot.format.manifest import (
    Header,
    ManifestReader,
    ManifestTrailer,
    ManifestWriter,
)
from ntt_backup.snapshot.format.super_blocks import SuperBlockWriter
from ntt_backup.snapshot.names import FileName, SnapshotDamaged, new_version, pack_name
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.take.changed_file import (
    FileReader,
    TakenFile,
    entry_of,
    has_chattr_flags,
    xattrs,
)
from ntt_backup.snapshot.take.last_version import Copies, LastVersion, cannot_keep, pieces
from ntt_backup.snapshot.take.walk import SnapshotSet, WalkedFile, walk
from ntt_backup.snapshot.versions import (
    Version,
    begun_by,
    facts,
    newest_name,
    newest_of_host,
    versions,
)
from ntt_backup.wire.stored_names import is_pin

_KINDS: Final = {
    stat.S_IFREG: FILE,
    stat.S_IFDIR: DIRECTORY,
    stat.S_IFLNK: SYMLINK,
    stat.S_IFIFO: FIFO,
}
_UNSETTLED: Final = b'"u":1}]'
# Entries that wait until their content is stored; a large file counts for many.
_WAITING: Final = 10_000
_SHOWN_EVERY: Final = 256
_ODD: Final = "it is damaged, not whole, or not what this host made"
_SEE: Final = "see ntt-backup-remote snapshot verify"


@dataclass(slots=True)
class Taken:
    """Holds the result of a take.

    Attributes:
        files: The number of entries in the version.
        bytes: The bytes of all content, including holes.
        stored: The bytes of packs.
        changed: The number of files with new content.
        unsettled: The number of files that changed during every reading.
        skipped: The number of files that are missing or incomplete in the version.
        unreadable: The number of skipped files that could not be read.
        forgotten: The number of versions past retention that were removed.
    """

    set: str
    version: str = ""
    parent: str = ""
    files: int = 0
    bytes: int = 0
    read: int = 0
    stored: int = 0
    changed: int = 0
    unsettled: int = 0
    skipped: int = 0
    unreadable: int = 0
    forgotten: int = 0
    duration_s: float = 0.0

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if self.unreadable else 0


@dataclass(frozen=True, slots=True)
class Report:
    """Receives the progress and the problems of a take.

    Attributes:
        progress: Is called with files, bytes, read and stored, as in `Taken`, for the files so far.
        problem: Is called with a path and the reason of the problem.
    """

    progress: Callable[[int, int, int, int], object] = lambda *_: None
    problem: Callable[[str, str], object] = lambda *_: None


def take(
    repository: FileStore,
    set: SnapshotSet,
    *,
    copies: Copies,
    origins: Origins,
    now: datetime,
    full: bool = False,
    paranoid: bool = False,
    report: Report = Report(),
) -> Taken:
    """Makes a version of a set.

    Errors of the repository pass through. A `full` version depends on no other version; `paranoid`
    reads files that seem unchanged, too.

    Raises:
        SourceError: None of the paths of the set exists.
        DestinationError: The copies cannot be written.
    """
    began = time.monotonic()
    set.require_something()
    whole = {one.name: one for one in versions(repository, set.name) if one.whole}
    newest = newest_name(repository, [*whole.values()], origins, now)
    try:
        for last in _parents(repository, set, whole, copies, origins, now, full, report.problem):
            version = new_version(now, newest)
            one = _Take(repository, set, copies, origins, last, version, now, report, paranoid)
            try:
                taken = one.run(whole)
            except StoredFileDamaged:
                if last is None:
                    raise
                continue
            taken.duration_s = time.monotonic() - began
            return taken
    except OSError as error:
        raise cannot_keep(error) from error
    raise AssertionError("the last attempt depends on no other version")


@dataclass
class _Take:
    """Makes one attempt to take a version, which builds on the last one, or is full without it."""

    _repository: FileStore
    _set: SnapshotSet
    _copies: Copies
    _origins: Origins
    _last: LastVersion | None
    _version: str
    _now: datetime
    _report: Report
    _paranoid: bool

    def __post_init__(self) -> None:
        before = self._last.header if self._last is not None else None
        self._header = Header(
            self._set.name,
            self._version,
            before.version if before is not None else "",
            (*(before.chain if before is not None else ()), self._version),
            before.key if before is not None else secrets.token_hex(32),
            self._set.paths,
            gethostname(),
            names.stamp(self._now),
            self._origins.target,
        )
        self._taken = Taken(self._set.name, self._version, self._header.parent)
        self._in_file = 0
        # Whether anything was found but directories that the set names, and their parents.
        self._found = False
        # The path of a file with several names, and how many of them are still to come.
        self._links: dict[bytes, tuple[str, int]] = {}
        # What a version does not keep, with how many files have it, and the first of them.
        self._left_out: dict[str, tuple[int, str]] = {}
        self._waiting: deque[tuple[int, TakenFile | bytes]] = deque()
        self._weight = 0

    def run(self, whole: Mapping[str, Version]) -> Taken:
        """Makes the version. The repository has the versions in `whole`, by name."""
        header = self._header
        manifest, map = self._copies.paths(header.version)
        packs = SuperBlockWriter(
            self._repository, header.set, header.version, index=len(header.chain) - 1
        )
        try:
            with manifest.open("wb") as manifest_file, map.open("wb") as map_file:
                self._packs, self._map = packs, MapWriter(map_file.write)
                self._manifest = ManifestWriter(manifest_file.write, header, self._origins.sign)
                key = bytes.fromhex(header.key)
                self._reader = FileReader(packs, key, self._set.block_size, self._on_read)
                with closing(walk(self._set.paths, self._set.exclude, self._lost)) as found:
                    for one in found:
                        self._pass(one)
                for what, (count, first) in self._left_out.items():
                    others = f" (so for {many(count, 'file')} that were read)" if count > 1 else ""
                    self._report.problem(f"/{first}", f"{what}{others}")
                if self._last is not None:
                    trailer = self._last.end()
                    _require_packs(whole[header.parent], trailer)
                    self._require_files(trailer)
                sums = packs.end()
                self._settle()
                self._map.end()
                map_file.close()
                digest = self._upload(names.MAP, map)
                taken = self._taken
                taken.stored = sum(one.size for one in sums)
                new = ManifestTrailer(
                    files=taken.files,
                    bytes=taken.bytes,
                    packs=sums,
                    map_size=map.stat().st_size,
                    map_sha256=digest.hex(),
                    unsettled=taken.unsettled,
                    skipped=taken.skipped,
                )
                seal = self._manifest.end(new)
            _require_readable(manifest, full=self._last is None)
            _require_needed(self._repository, header, whole, new)
            # First: whoever dies between the two has a version that is not there, which is no harm.
            self._origins.keep_made(header.set, header.version, seal.digest)
            try:
                self._upload(names.MANIFEST, manifest)
            except NameTaken:  # Somebody else has the name; the sum that stays is not theirs.
                with suppress(OSError):
                    self._origins.keep_made(header.set, header.version)
                raise
        except BaseException:
            packs.give_up()
            self._copies.drop(header.version)
            raise
        self._copies.keep_only(header.version)
        return taken

    def _require_files(self, before: ManifestTrailer) -> None:
        """Raises SourceError where all files of the last version are gone: that is seldom meant."""
        if not self._found and before.files > self._taken.files:
            raise SourceError(
                f"all files of the snapshot set {self._set.name} are gone",
                detail=f"its directories are empty, and the last version has {before.files:,}",
                hint="mount its disk; or take a version of what is there now, with --full",
            )

    def _pass(self, found: WalkedFile) -> None:
        """Takes a file into the version."""
        path, status = found.path, found.status
        kind = _KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is None:
            self._skip(path, "sockets and devices are not taken")
            return
        self._found = self._found or not found.follow or kind != DIRECTORY
        size = status.st_size if kind == FILE else 0
        target = self._other_name(status) if kind == FILE and status.st_nlink > 1 else ""
        if target:
            kind, size = HARD_LINK, 0
        begin = beginning_of(path, kind, status, size)
        last = self._last
        if last is not None and not last.line.startswith(begin):
            last.pass_before(path)
        if (
            last is not None
            and not target
            and (line := last.line).startswith(begin)
            and not line.endswith(_UNSETTLED)
            and not (self._paranoid and kind == FILE)
        ):
            last.copy(size, self._map.add)
            if kind == FILE:
                self._remember(path, status)
            self._taken.bytes += size
            self._add(line)
        elif kind == FILE:
            self._read(found)
        else:
            self._describe(found, kind, target)

    def _read(self, found: WalkedFile) -> None:
        path, taken = found.path, self._taken
        old = self._last.take(path, found.status.st_size) if self._last is not None else None
        self._in_file = 0
        try:
            fd = found.open()
            try:
                new, sums, status = self._reader.read(fd, path, old)
                if has_chattr_flags(fd):
                    self._leave_out(path, "its flags of chattr are not kept")
            finally:
                os.close(fd)
        except FileNotFoundError:
            self._skip(path, "it is gone since its directory was listed")
            return
        except OSError as error:
            self._lost(path, error.strerror or str(error))
            return
        finally:
            self._in_file = 0
        self._map.add(sums)
        self._remember(path, status)
        taken.bytes += new.entry.size
        taken.changed += new.changed
        if new.entry.unsettled:
            taken.unsettled += 1
            self._report.problem(f"/{path}", "it changed as often as it was read")
        self._add(new)

    def _describe(self, found: WalkedFile, kind: str, target: str) -> None:
        entry = entry_of(found.path, kind, found.status)
        entry.target = target
        try:
            if kind in (SYMLINK, FIFO) and found.status.st_nlink > 1:
                self._leave_out(found.path, "its other names become files of their own")
            if kind == SYMLINK:
                entry.target = os.readlink(found.name, dir_fd=found.directory)
            if kind == DIRECTORY:
                with closing_fd(found.open()) as fd:
                    entry.xattrs = xattrs(fd)
            elif kind != HARD_LINK:
                entry.xattrs = xattrs(f"/proc/self/fd/{found.directory}/{found.name}")
        except FileNotFoundError:
            self._skip(found.path, "it is gone since its directory was listed")
            return
        except OSError as error:
            if kind != DIRECTORY or error.errno == errno.E2BIG:  # The walk tells of the others.
                self._lost(found.path, error.strerror or str(error))
            if kind != DIRECTORY:
                return
        self._add(entry.line())

    def _leave_out(self, path: str, what: str) -> None:
        """Notes that a file has something that no version keeps."""
        count, first = self._left_out.get(what, (0, path))
        self._left_out[what] = count + 1, first

    def _other_name(self, status: os.stat_result) -> str:
        """Returns the path under which a file is in the version already."""
        key = _identity(status)
        path, left = self._links.pop(key, ("", 0))
        if left > 1:
            self._links[key] = path, left - 1
        return path

    def _remember(self, path: str, status: os.stat_result) -> None:
        if status.st_nlink > 1:
            self._links[_identity(status)] = path, status.st_nlink - 1

    def _add(self, one: TakenFile | bytes) -> None:
        """Writes an entry once its content, and that of those before it, is stored."""
        taken = self._taken
        taken.files += 1
        if taken.files % _SHOWN_EVERY == 0:
            self._show()
        if isinstance(one, bytes) and not self._waiting:
            self._manifest.add(one)
            return
        weight = one.weight if isinstance(one, TakenFile) else 1
        self._waiting.append((weight, one))
        self._weight += weight
        if self._weight > _WAITING:
            self._packs.flush()
        self._settle()

    def _settle(self) -> None:
        waiting, settled = self._waiting, self._packs.settled
        while waiting:
            weight, one = waiting[0]
            if isinstance(one, TakenFile):
                if one.ticket >= settled:
                    return
                one = one.settle().line()
            self._manifest.add(one)
            waiting.popleft()
            self._weight -= weight

    def _on_read(self, count: int) -> None:
        self._taken.read += count
        self._in_file += count
        if self._in_file > count:  # Small files are shown by their number.
            self._show()

    def _show(self) -> None:
        taken = self._taken
        bytes_ = taken.bytes + self._in_file
        self._report.progress(taken.files, bytes_, taken.read, self._packs.stored)

    def _lost(self, path: str, why: str) -> None:
        self._taken.unreadable += 1
        self._skip(path, why)

    def _skip(self, path: str, why: str) -> None:
        self._taken.skipped += 1
        self._report.problem(f"/{path}", why)

    def _upload(self, file: str, path: Path) -> bytes:
        """Sends a file of the version; returns its SHA-256."""
        new = self._repository.write(str(FileName(self._set.name, self._header.version, file)))
        try:
            for piece in pieces(path):
                new.add(piece)
            digest = new.finish().sha256
            new.publish()
        except BaseException:
            new.discard()
            raise
        return digest


def _identity(status: os.stat_result) -> bytes:
    """Returns a key that all names of one file have in common at one time.

    A new file may get the inode number of a removed file, but has another ctime, which nobody can
    set.
    """
    return beginning_of(str(status.st_dev), FILE, status, status.st_size)


# --- what a version builds on ---------------------------------------------------------------------


def _parents(
    repository: FileStore,
    set: SnapshotSet,
    whole: Mapping[str, Version],
    copies: Copies,
    origins: Origins,
    now: datetime,
    full: bool,
    problem: Callable[[str, str], object],
) -> Iterator[LastVersion | None]:
    """Yields the versions that a new version may build on, in the order in which they are tried.

    The first is the last version that this host made, from the copy on this machine, then the same
    version from a fetched copy. The last one is None, for a full version. The caller requests the
    next one where a version is damaged or may not be read.

    A version that somebody else may have planted is never a parent. A take believes what its parent
    says of unchanged files, so all later versions would contain that.
    """
    if full or not whole:
        yield None
        return
    newest, why = "", ""
    try:
        found = newest_of_host(repository, [*whole.values()], origins)
        newest = found.name if found is not None else ""
    except (ConfigError, RemoteDenied) as error:  # They are sealed, or the key may only add.
        why = f": {error}"
    named = [one for one in whole if origins.names(set.name, one)]
    if named and named[-1] > newest:
        problem(
            f"version {named[-1]}", complete(f"{_ODD}, so this one does not build on it; {_SEE}")
        )
    elif not newest:
        problem(
            f"set {set.name}",
            complete(
                "no version on the target is known to be of this host, so all files are read, and"
                f" this version is full{why}; a host key (ntt-backup-remote init-db) proves which"
                " ones are"
            ),
        )
    if not newest:
        yield None
        return
    for fetched in (False, True):
        try:
            if fetched:
                copies.fetch(repository, whole[newest])
            last = LastVersion(*copies.paths(newest))
        except (StoredFileDamaged, FileMissing):
            continue
        except (ConfigError, RemoteDenied) as error:  # It is sealed, or the key may only add.
            problem(f"version {newest}", f"it cannot be read back, so this one is full: {error}")
            break
        header = last.header
        is_newest = (header.set, header.version) == (set.name, newest)
        if not is_newest or origins.of_seal(header, last.seal) != Origin.OURS:
            continue
        first = whole.get(header.chain[0])
        if first is not None and abs(now - begun_by(repository, first, now)) >= set.full_every:
            break
        if _is_whole(repository, [whole.get(one) for one in header.chain], last.trailer):
            yield last
    else:
        problem(f"version {newest}", complete(f"{_ODD}, so this one is full; {_SEE}"))
    yield None


def _is_whole(
    repository: FileStore, chain: Sequence[Version | None], last: ManifestTrailer
) -> bool:
    """Returns whether the repository has the packs of a chain, as far as can be known.

    Files that somebody has put beside the packs do not matter. Where nothing may be read, the check
    does not notice a truncated pack or a missing last pack of the versions before the last one,
    whose trailer is `last`.
    """
    known = [one for one in chain if one is not None]
    if len(known) < len(chain) or known[-1].lacks(last, map=False):
        return False
    try:
        return all(
            one.trailer is not None and not one.version.lacks(one.trailer, map=False)
            for one in facts(repository, known[:-1])
        )
    except (ConfigError, RemoteDenied):  # It is sealed, or the key may only add.
        return all(map(_complete, known[:-1]))


def _complete(version: Version) -> bool:
    """Returns whether no pack is missing between others."""
    packs = [one.name for one in version.files if "/pack-" in one.name]
    return packs == [pack_name(version.set, version.name, one + 1) for one in range(len(packs))]


def _require_packs(version: Version, trailer: ManifestTrailer) -> None:
    """Raises SnapshotDamaged where the repository has not the packs that a manifest names."""
    for name in version.lacks(trailer, map=False):
        raise SnapshotDamaged(f"{name} is not there as it was written")


def _require_needed(
    repository: FileStore, header: Header, whole: Mapping[str, Version], new: ManifestTrailer
) -> None:
    """Checks that the repository has all files that a new version needs.

    Another host may have removed some of them meanwhile. `whole` has the whole versions that the
    repository had before, by name.

    Raises:
        SnapshotDamaged: A version before the new one lacks a file that it has in `whole`.
            Additional files are ignored.
        RemoteCannotStore: A file of the new version itself is missing.
    """
    there = {one.name: one for one in versions(repository, header.set)}
    for name in header.chain[:-1]:
        now = there.get(name)
        needed = [one for one in whole[name].files if not is_pin(one.name)]
        if now is None or not {*now.files}.issuperset(needed):
            raise SnapshotDamaged(f"{header.set}@{name} was removed meanwhile")
    try:
        nothing = Version(header.set, header.version, ())
        _require_packs(there.get(header.version, nothing), new)
    except StoredFileDamaged as error:
        raise RemoteCannotStore(
            "the target has lost a part of the version that was made",
            detail=error.detail,
            hint="did snapshot forget on another host, or a rule of the bucket, remove it? If not,"
            " look at the target's disk; then take a version again",
        ) from error


def _require_readable(manifest: Path, *, full: bool) -> None:
    """Checks that a restore would accept a new manifest.

    No version is better than a version that takes the place of a good one.

    Raises:
        SnapshotDamaged: A restore would refuse the manifest of an increment.
        SourceError: A restore would refuse the manifest of a full version.
    """
    try:
        deque(ManifestReader(pieces(manifest)).entries(), maxlen=0)
    except StoredFileDamaged as error:
        if not full:
            raise
        raise SourceError(
            "the version that was made could not be restored, and was given up",
            detail=error.detail,
            hint="this is a defect of the program: report it; leave out the file (--exclude)",
        ) from error
