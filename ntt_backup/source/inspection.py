"""The source store: inspected before a batch is sent, and never changed.

A blob that cannot be read may be lost, or its disk not be mounted; to fail it in the second case
would mark millions failed in an hour. So where nothing of a batch could be read, some other blob
must be readable, or the store as a whole counts as away: a `SourceError`, and no blob fails. The
root is opened by path anew for every batch: a disk that came back is seen, and an idle daemon keeps
no disk busy.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from ntt_backup.blobdir.layout import is_blobid, kind_of, relative_path
from ntt_backup.blobdir.open import NotAFile
from ntt_backup.errors import SourceError
from ntt_backup.model import Blob, Failure, Reason
from ntt_backup.source.tree import SourceTree

READ_SIZE = 1024**2

# Device, inode, size and time of modification: they tell one state of a file from another. Not the
# time of change: that moves when another program makes a hard link to a blob.
Stamp = tuple[int, int, int, int]

# A blob that fails for one of these does not prove that the store can be read.
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
    """The directory that holds `aa/bb/<blobid>`; it need not exist yet. Not for several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._buffer = memoryview(bytearray(READ_SIZE))

    def tree(self) -> SourceTree:
        """Opens the root as the path leads to it now. Raises SourceError."""
        return SourceTree(self.root)

    def probe(self) -> str:
        """Returns a few words on the store. Raises SourceError where no blob could be read."""
        with self.tree() as tree:
            return tree.sign_of_life()

    def measure(self, blobs: Sequence[Blob]) -> list[Blob]:
        """Returns the same blobs with the sizes that the catalog does not know.

        It never raises: where none can be found out the size stays None, and `inspect` says why.
        """
        if all(blob.size is not None for blob in blobs):
            return list(blobs)
        try:
            with self.tree() as tree:
                return [_measured(tree, blob) for blob in blobs]
        except SourceError:
            return list(blobs)

    def inspect(self, blobs: Sequence[Blob], *, verify: bool) -> Inspection:
        """Returns which blobs can be sent. verify: also hashes their content (constant memory).

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
        """Returns the ready blobs that were rewritten, replaced or removed since their inspection.

        Where there are none, another program that read them meanwhile has read what was inspected.
        Raises SourceError.
        """
        seen = zip(inspection.ready, inspection.stamps, strict=True)
        with self.tree() as tree:
            return [blob for blob, stamp in seen if _stamp_at(tree, blob) != stamp]

    def examine(
        self, tree: SourceTree, blob: Blob, *, verify: bool
    ) -> tuple[Blob, Stamp] | Failure:
        """Returns one blob with its true size and its state, or what is wrong with it."""
        blobid = blob.blobid
        if not is_blobid(blobid):
            return Failure(blobid, Reason.BAD_BLOBID, "not 64 lowercase hex digits")
        try:
            fd, status = tree.open_blob(blobid)
        except NotAFile:
            return _not_a_file(tree, blob, relative_path(blobid))
        except OSError as error:
            return self.failure(tree, blob, error)
        try:
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
        """Returns BLAKE3 and length. No mmap: a file cut short meanwhile would be a SIGBUS."""
        hasher = blake3()
        size = 0
        while count := os.readv(fd, [self._buffer]):
            hasher.update(self._buffer[:count])
            size += count
        return hasher.hexdigest(), size

    def failure(self, tree: SourceTree, blob: Blob, error: OSError) -> Failure:
        """Returns what an error says about one blob. Raises SourceError for the store's own."""
        tree.blame(error)
        said = error.strerror or str(error)
        path = str(error.filename or relative_path(blob.blobid))
        if error.errno == errno.ENOENT:
            return Failure(blob.blobid, Reason.MISSING, f"{path}: {said}")
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            # ENOTDIR is also said for a link where a directory is wanted, ENXIO for a socket.
            return _not_a_file(tree, blob, path)
        return Failure(blob.blobid, Reason.UNREADABLE, f"{path}: {said}")

    def require_life(
        self, tree: SourceTree, failed: Sequence[Failure], *, nothing_ready: bool
    ) -> None:
        """Raises SourceError if these failures may be the store's own: none of a batch could be
        read and nothing else can, or another disk lies at the root by now.

        A blob that was read through the same tree is a sign of life.
        """
        reasons = {failure.reason for failure in failed} - {Reason.BAD_BLOBID}
        if not nothing_ready or not reasons or not reasons <= _NO_SIGN_OF_LIFE:
            return
        with self.tree() as now:
            now.sign_of_life()
            if now.identity != tree.identity:
                raise SourceError(
                    f"the store {self.root} was replaced while it was read",
                    hint="a disk was mounted or unmounted there: start again when it is in place",
                )


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _stamp_at(tree: SourceTree, blob: Blob) -> Stamp | None:
    try:
        return _stamp(tree.lstat(relative_path(blob.blobid)))
    except OSError:
        return None


def _measured(tree: SourceTree, blob: Blob) -> Blob:
    if blob.size is not None:
        return blob
    try:
        status = tree.lstat(relative_path(blob.blobid))
    except (OSError, ValueError):
        return blob
    return Blob(blob.blobid, status.st_size) if stat.S_ISREG(status.st_mode) else blob


def _not_a_file(tree: SourceTree, blob: Blob, path: str) -> Failure:
    try:
        mode = tree.lstat(path).st_mode
        kind = kind_of(mode) + (", which is not followed" if stat.S_ISLNK(mode) else "")
    except OSError:
        kind = "gone by now"
    return Failure(blob.blobid, Reason.NOT_A_FILE, f"{path} is {kind}")
