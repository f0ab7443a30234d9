"""The source store: inspected before a batch is sent, and never changed.

The obvious way is to let the sender open each file, and to fail the blobs for which that does not
work. It cannot tell one lost blob from a disk that is not mounted, and would mark millions failed
in an hour. So the store is asked for a sign of life before a blob is blamed: where nothing of a
batch could be read, some other blob must be readable, or the store as a whole counts as away. That
is a `SourceError`, and no blob fails. The root is opened by path anew for every batch, as `tar`
does it: a disk that came back is seen, and an idle daemon keeps no disk busy.

 Not for several threads at once.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from blake3 import blake3

from ntt_backup.blobdir.walk import Stray, StrayKind, Tree, concerns_store, is_prefix, unusable
from ntt_backup.errors import SourceError
from ntt_backup.format import many
from ntt_backup.model import Blob, Failure, Reason, is_blobid, relative_path

READ_SIZE = 1024**2
SAMPLED_PREFIXES = 32
SAMPLED_BLOBS = 8

# Device, inode, size and time of modification: what tells one state of a file from another. Not the
# time of change: that moves when another program makes a hard link to a blob.
Stamp = tuple[int, int, int, int]

# A blob that fails for one of these does not prove that the store is there and ours to read.
_NO_SIGN_OF_LIFE = {Reason.MISSING, Reason.UNREADABLE, Reason.NOT_A_FILE}


@dataclass(frozen=True, slots=True)
class Inspection:
    """A batch's blobs, each in one of two lists, in order. Ready ones carry their true size.

    stamps: the state in which each ready one was seen.
    """

    ready: list[Blob]
    failed: list[Failure]
    stamps: list[Stamp]


class Store:
    """The directory that holds `aa/bb/<blobid>`. It need not be there yet when this is made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._buffer = memoryview(bytearray(READ_SIZE))

    def tree(self) -> Tree:
        """The root as the path leads to it now. Raises SourceError where there is none to open."""
        return Tree(self.root)

    def probe(self) -> str:
        """A few words on what is there. Raises SourceError where no blob could be read."""
        with self.tree() as tree:
            return _sign_of_life(tree)

    def measure(self, blobs: Sequence[Blob]) -> list[Blob]:
        """The same blobs in the same order, with the sizes that the catalog does not know.

        Never raises: where none can be found out the size stays None, and `inspect` says why.
        """
        if all(blob.size is not None for blob in blobs):
            return list(blobs)
        try:
            with self.tree() as tree:
                return [blob if blob.size is not None else _measured(tree, blob) for blob in blobs]
        except SourceError:
            return list(blobs)

    def inspect(self, blobs: Sequence[Blob], *, verify: bool) -> Inspection:
        """Which blobs can be sent. verify: also hash their content (constant memory).

        Raises SourceError when the store is to blame; then nothing is known about any blob.
        """
        ready: list[Blob] = []
        failed: list[Failure] = []
        stamps: list[Stamp] = []
        with self.tree() as tree:
            for blob in blobs:
                outcome = self.examine(tree, blob, verify=verify)
                if isinstance(outcome, Failure):
                    failed.append(outcome)
                else:
                    ready.append(outcome[0])
                    stamps.append(outcome[1])
            self.require_life(tree, failed, nothing_ready=not ready)
        return Inspection(ready, failed, stamps)

    def altered(self, inspection: Inspection) -> list[Blob]:
        """The ready blobs that are no longer as they were inspected: rewritten, replaced or gone.

        What another program read in between is what was inspected, where this is empty. Raises
        SourceError.
        """
        seen = zip(inspection.ready, inspection.stamps, strict=True)
        with self.tree() as tree:
            return [blob for blob, stamp in seen if _stamp_at(tree, blob) != stamp]

    def examine(self, tree: Tree, blob: Blob, *, verify: bool) -> tuple[Blob, Stamp] | Failure:
        """One blob: with its true size and the state it is in, or what is wrong with it."""
        blobid = blob.blobid
        if not is_blobid(blobid):
            return Failure(blobid, Reason.BAD_BLOBID, "not 64 lowercase hex digits")
        try:
            fd = tree.open(relative_path(blobid))
        except OSError as error:
            return self.failure(tree, blob, error)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                detail = f"{relative_path(blobid)} is {_kind(status.st_mode)}"
                return Failure(blobid, Reason.NOT_A_FILE, detail)
            if blob.size is not None and blob.size != status.st_size:
                detail = f"{status.st_size} bytes in the store, {blob.size} expected"
                return Failure(blobid, Reason.WRONG_SIZE, detail)
            if not verify:
                return Blob(blobid, status.st_size), _stamp(status)
            digest, size = self._hash(fd)
        except OSError as error:
            return self.failure(tree, blob, error)
        finally:
            os.close(fd)
        if digest != blobid:
            return Failure(blobid, Reason.CORRUPT_SOURCE, f"its content hashes to {digest}")
        return Blob(blobid, size), _stamp(status)

    def _hash(self, fd: int) -> tuple[str, int]:
        """BLAKE3 and length in bytes. No mmap: a file cut short meanwhile would be a SIGBUS."""
        hasher = blake3()
        size = 0
        while count := os.readv(fd, [self._buffer]):
            hasher.update(self._buffer[:count])
            size += count
        return hasher.hexdigest(), size

    def failure(self, tree: Tree, blob: Blob, error: OSError) -> Failure:
        """What an error says about one blob, unless it says something about the store."""
        if concerns_store(error):
            raise unusable(tree.root, error) from error
        said = error.strerror or str(error)
        path = str(error.filename or relative_path(blob.blobid))
        if error.errno == errno.ENOENT:
            return Failure(blob.blobid, Reason.MISSING, f"{path}: {said}")
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            # ENOTDIR is also said for a link where a directory is wanted, ENXIO for a socket.
            detail = f"{path} is {_kind_at(tree, path)}"
            return Failure(blob.blobid, Reason.NOT_A_FILE, detail)
        return Failure(blob.blobid, Reason.UNREADABLE, f"{path}: {said}")

    def require_life(self, tree: Tree, failed: Sequence[Failure], *, nothing_ready: bool) -> None:
        """Raise SourceError if these failures may be the store's own: none of a batch could be read
        and nothing else can, or another disk lies at the root by now.

        Where one blob was read through the same tree, its disk was there: that is a sign of life.
        """
        reasons = {failure.reason for failure in failed} - {Reason.BAD_BLOBID}
        if not nothing_ready or not reasons or not reasons <= _NO_SIGN_OF_LIFE:
            return
        with self.tree() as now:
            _sign_of_life(now)
            if now.identity != tree.identity:
                raise SourceError(
                    f"the store {self.root} was replaced while it was read",
                    hint="a disk was mounted or unmounted there: start again when it is in place",
                )


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _stamp_at(tree: Tree, blob: Blob) -> Stamp | None:
    try:
        return _stamp(tree.lstat(relative_path(blob.blobid)))
    except OSError:
        return None


def _measured(tree: Tree, blob: Blob) -> Blob:
    try:
        status = tree.lstat(relative_path(blob.blobid)) if is_blobid(blob.blobid) else None
    except OSError:
        return blob
    return Blob(blob.blobid, status.st_size) if status and stat.S_ISREG(status.st_mode) else blob


def _sign_of_life(tree: Tree) -> str:
    """Finds a blob that can be read, or at least nothing that is refused; says what was seen.

    Looks at no more than SAMPLED_BLOBS in each of SAMPLED_PREFIXES directories.
    """
    prefixes, strays = tree.subdirectories("")
    seen = many(len(prefixes), "prefix directory", "prefix directories")
    refused = ""
    for prefix in prefixes[:: len(prefixes) // SAMPLED_PREFIXES + 1]:
        for entry in islice(_entries(tree, prefix), SAMPLED_BLOBS):
            said = entry.detail if isinstance(entry, Stray) else _refusal(tree, entry)
            if not said:
                return seen
            refused = said
    linked = [one for one in strays if one.kind is StrayKind.SYMLINK and is_prefix(one.path)]
    if linked and not prefixes:
        refused = "its prefix directories are symbolic links, which are not followed"
    if refused:
        raise SourceError(
            f"nothing in the store {tree.root} can be read",
            detail=refused,
            hint=f"let uid {os.geteuid()} read it; put prefixes on other disks by bind mounts",
        )
    if not prefixes:
        raise SourceError(
            f"the store {tree.root} is empty",
            detail="no directory there has two hex digits for a name",
            hint="mount its disk, or mend source.root; for a store that is really new make its 00/",
        )
    return seen


def _entries(tree: Tree, prefix: str) -> Iterator[str | Stray]:
    """The blobids below "aa", and whatever could not be read there."""
    directories, strays = tree.subdirectories(prefix)
    yield from (stray for stray in strays if stray.kind is StrayKind.UNREADABLE)
    for directory in directories:
        for entry in tree.entries(directory):
            if isinstance(entry, str) or entry.kind is StrayKind.UNREADABLE:
                yield entry


def _refusal(tree: Tree, blobid: str) -> str:
    """Why a blob cannot be read, or nothing."""
    try:
        fd = tree.open(relative_path(blobid))
        try:
            os.read(fd, 1)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _kind_at(tree: Tree, path: str) -> str:
    try:
        return _kind(tree.lstat(path).st_mode)
    except OSError:
        return "gone by now"


def _kind(mode: int) -> str:
    """What a mode's file type is called."""
    kinds = {
        stat.S_IFREG: "a regular file",
        stat.S_IFDIR: "a directory",
        stat.S_IFLNK: "a symbolic link, which is not followed",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
    }
    return kinds.get(stat.S_IFMT(mode), "of an unknown kind")
