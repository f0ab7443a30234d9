"""A new version builds on a chain of earlier ones, which must be whole until its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from ntt_backup.config.host_key import Origin
from ntt_backup.errors import ConfigError, RemoteCannotStore, RemoteDenied, SourceError, complete
from ntt_backup.filestore.contract import FileMissing, FileStore, StoredFileDamaged
from ntt_backup.snapshot.format.manifest import Header, ManifestReader, ManifestTrailer
from ntt_backup.snapshot.names import SnapshotDamaged, pack_name
from ntt_backup.snapshot.origins import Origins
from ntt_backup.snapshot.take.last_version import Copies, LastVersion, pieces
from ntt_backup.snapshot.take.walk import SnapshotSet
from ntt_backup.snapshot.versions import Version, begun_by, facts, newest_of_host, versions

_ODD: Final = "it is damaged, not whole, or not what this host made"
_SEE: Final = "see ntt-backup-remote snapshot verify"


def parents(
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
        found = newest_of_host(repository, [whole[one] for one in sorted(whole)], origins)
        newest = found.name if found is not None else ""
    except (ConfigError, RemoteDenied) as error:  # They are sealed, or the key may only add.
        why = f": {error}"
    named = [one for one in sorted(whole) if origins.names(set.name, one)]
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
            elif not copies.has(newest):
                continue
            last = LastVersion(*copies.paths(newest))
        except (StoredFileDamaged, FileMissing):
            continue
        except (ConfigError, RemoteDenied) as error:  # It is sealed, or the key may only add.
            problem(f"version {newest}", f"it cannot be read back, so this one is full: {error}")
            break
        header = last.header
        if (header.set, header.version) != (set.name, newest):
            continue
        if origins.of_seal(header, last.seal) != Origin.OURS:
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


def require_packs(version: Version, trailer: ManifestTrailer) -> None:
    """Raises SnapshotDamaged where the repository has not the packs that a manifest names."""
    for name in version.lacks(trailer, map=False):
        raise SnapshotDamaged(f"{name} is not there as it was written")


def require_needed(
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
        if now is None or not {*now.files}.issuperset(whole[name].files):
            raise SnapshotDamaged(f"{header.set}@{name} was removed meanwhile")
    try:
        nothing = Version(header.set, header.version, ())
        require_packs(there.get(header.version, nothing), new)
    except StoredFileDamaged as error:
        raise RemoteCannotStore(
            "the target has lost a part of the version that was made",
            detail=error.detail,
            hint="did snapshot forget on another host, or a rule of the bucket, remove it? If not,"
            " look at the target's disk; then take a version again",
        ) from error


def require_readable(manifest: Path, *, full: bool) -> None:
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
