"""A store is made of this machine's own files, and two stores are compared.

Real files have the mix of sizes, the empty files and the duplicates of a real store. They are
copied, never linked, so nothing that the demo does can reach the originals. The comparison shares
no code with the backup: it reads every byte of both sides.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Final, Self

from blake3 import blake3

from ntt_backup.blobdir.descriptors import FILE
from ntt_backup.blobdir.layout import relative_path
from ntt_backup.errors import ConfigError, SourceError
from ntt_backup.formatting import many

# Path below the root to the content's hash.
Listing = dict[str, str]

DEFAULT_SOURCES: Final = (Path("/usr/share"), Path("/usr/lib"), Path("/usr/bin"))
_CHUNK: Final = 1 << 20
_MOST_FILES: Final = 200_000
_BYTES_A_BLOB: Final = 100_000
_LEAST_BUDGET: Final = 500_000_000
# What PostgreSQL and the file systems want besides the blobs.
_RESERVE: Final = 200_000_000


@dataclass(slots=True)
class Made:
    """The figures of the store. bytes are those of the blobs; the others count files."""

    blobs: int = 0
    bytes: int = 0
    duplicates: int = 0
    unreadable: int = 0
    too_large: int = 0


def make_store(store: Path, sources: Sequence[Path], blobs: int, *, avoid: Path) -> Made:
    """Copies a random sample of the regular files below sources to `store/aa/bb/<blobid>`.

    It ends at that many different blobs, or when there are no more files. It takes no file below
    avoid, and none that makes the store larger than a demo should be.
    Raises SourceError where there is nothing to read, ConfigError where space runs out.
    """
    made = Made()
    budget = max(blobs * _BYTES_A_BLOB, _LEAST_BUDGET)
    for file in _sample(sources, avoid):
        if made.blobs == blobs:
            break
        try:
            _add(store, file, budget, made)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_space(store, str(error.strerror)) from error
            made.unreadable += 1
    if not made.blobs:
        raise SourceError(
            f"no readable files in {', '.join(map(str, sources))}",
            hint="the demo's store is made of real files: name a directory with some, --from DIR",
        )
    return made


def _sample(sources: Sequence[Path], avoid: Path) -> list[str]:
    """Returns paths in random order, the same as long as the files are the same."""
    share = _MOST_FILES // len(sources)
    found = (islice(_regular_files(source, avoid), share) for source in sources)
    files = sorted(chain.from_iterable(found))
    random.Random(len(files)).shuffle(files)
    return files


def _regular_files(root: Path, avoid: Path) -> Iterator[str]:
    directories = [os.fspath(root)]
    while directories:
        directory = directories.pop()
        if directory == os.fspath(avoid):
            continue
        try:
            entries = list(os.scandir(directory))
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield entry.path


def _add(store: Path, file: str, budget: int, made: Made) -> None:
    fd = os.open(file, FILE)
    with open(fd, "rb", buffering=0) as content:
        size = os.fstat(fd).st_size
        if made.bytes + size > budget:
            made.too_large += 1
            return
        require_space(store, made.bytes + 2 * size)  # all of it is copied to the remote, too
        incoming = store / "incoming"
        hasher = blake3()
        copied = 0
        with incoming.open("wb") as copy:
            # A file that grows all the time would never end.
            while copied < size and (chunk := content.read(min(_CHUNK, size - copied))):
                hasher.update(chunk)
                copy.write(chunk)
                copied += len(chunk)
    blob = store / relative_path(hasher.hexdigest())
    if blob.exists():
        incoming.unlink()
        made.duplicates += 1
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    incoming.rename(blob)
    made.blobs += 1
    made.bytes += copied


def require_space(directory: Path, wanted: int = 0) -> None:
    """Raises ConfigError unless there is room for these bytes and for the demo's servers."""
    free = shutil.disk_usage(directory).free
    if free < wanted + _RESERVE:
        raise _no_space(directory, f"{free / 1e6:.0f} MB are free")


def _no_space(store: Path, detail: str) -> ConfigError:
    return ConfigError(
        f"not enough space for the demo in {store}",
        detail=detail,
        hint="name a directory with more space (--directory), or fewer --blobs",
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Says how two trees differ: paths relative to their roots; same counts equal files."""

    same: int
    missing: list[str]
    extra: list[str]
    different: list[str]

    @property
    def identical(self) -> bool:
        return not (self.missing or self.extra or self.different)

    def __str__(self) -> str:
        if self.identical:
            return f"{many(self.same, 'file')}, byte for byte the same"
        return (
            f"{self.same:,} the same, {len(self.different):,} different,"
            f" {len(self.missing):,} missing, {len(self.extra):,} too many"
        )

    @classmethod
    def of_listings(cls, before: Listing, after: Listing) -> Self:
        """Compares the listings of two trees, or of one tree at two times."""
        both = before.keys() & after.keys()
        different = sorted(name for name in both if before[name] != after[name])
        return cls(
            same=len(both) - len(different),
            missing=sorted(before.keys() - after.keys()),
            extra=sorted(after.keys() - before.keys()),
            different=different,
        )


def list_tree(root: Path) -> Listing:
    """Returns every name below root that is no directory, with a hash of its content."""
    files = (path for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
    return {str(path.relative_to(root)): _digest(path) for path in files}


def compare(source: Path, destination: Path) -> Comparison:
    """Compares names and every byte, both ways."""
    return Comparison.of_listings(list_tree(source), list_tree(destination))


def _digest(path: Path) -> str:
    if not stat.S_ISREG(path.lstat().st_mode):
        return f"no file: {path}"  # So it is like nothing in another tree.
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
