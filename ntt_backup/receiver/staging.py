"""Writing small blobs into the stage, so that naming them later takes the fewest system calls.

Most blobs are a few kilobytes, and there are millions of them, so what happens once a blob is one
open, one write and one close, from a view of the buffer that the frame was read into.

A file a blob in the stage, renamed one by one, costs as much again when names are given: a rename
each, and a directory to be made. But blobs come in the order of their digests, and a first backup
finds hardly any of the directories there. So where `by-hash` has no `aa/bb`, one is made in the
stage, its blobs are written under their final names, and `place` moves all of it with one rename.
Whether it is there is looked up by a listing that may be out of date: `place` finds out, and moves
file by file then.
"""

from __future__ import annotations

import errno
import os
import stat
from binascii import hexlify
from typing import TYPE_CHECKING

from ntt_backup.blobdir.syscalls import DIRECTORY
from ntt_backup.receiver.large_blob import write_all
from ntt_backup.receiver.staged_batch import NewDirectory, StagedBatch
from ntt_backup.receiver.workspace import Ground
from ntt_backup.wire.framing import DIGEST_BYTES
from ntt_backup.wire.write_messages import MISMATCH

if TYPE_CHECKING:
    from ntt_backup.receiver.hashing import NewHasher

CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Stowage:
    """new_hasher: of BLAKE3, where there is one, to check each blob. by_file: sync each of them."""

    def __init__(self, ground: Ground, new_hasher: NewHasher | None, by_file: bool) -> None:
        self._stage = ground.stage
        self._vacancies = _Vacancies(ground)
        self._new_hasher = new_hasher
        self._by_file = by_file

    def put(
        self,
        batch: StagedBatch,
        position: int,
        raw: memoryview,
        digests: bytes,
        sizes: tuple[int, ...],
        at: int,
    ) -> None:
        """Write the blobs that lie in raw from `at` on; the first has that position in the batch.
        Raises OSError.
        """
        # The inner loop: a blob is three system calls, and nothing is looked up twice.
        open_, write, close, stage = os.open, os.write, os.close, self._stage
        new_hasher, by_file = self._new_hasher, self._by_file
        prefix, directory = b"", -1
        new: NewDirectory | None = None
        try:
            for index, size in enumerate(sizes):
                digest = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
                content = raw[at : at + size]
                at += size
                if new_hasher is not None and new_hasher(content).digest() != digest:
                    batch.except_for(position + index, MISMATCH, "")
                    continue
                if digest[:2] != prefix:
                    prefix = digest[:2]
                    if directory >= 0:
                        close(directory)
                        directory = -1
                    new = self._new_directory(batch, prefix, position + index)
                    if new is not None:
                        directory = open_(new.name, DIRECTORY, dir_fd=stage)
                fd = -1
                if new is not None:
                    try:
                        fd = open_(hexlify(digest), CREATE, 0o644, dir_fd=directory)
                        new.end = position + index + 1
                    except FileExistsError:
                        pass  # The same blob twice: the second is found to be there when placed.
                if fd < 0:
                    fd = open_(batch.lay(position + index), CREATE, 0o644, dir_fd=stage)
                try:
                    if size:
                        written = write(fd, content)
                        if written != size:
                            write_all(fd, content[written:])
                    if by_file:
                        os.fsync(fd)
                finally:
                    close(fd)
        finally:
            if directory >= 0:
                close(directory)

    def _new_directory(
        self, batch: StagedBatch, prefix: bytes, position: int
    ) -> NewDirectory | None:
        """The directory in the stage where blobs of that prefix go; None where they go into the
        stage itself. Raises OSError.
        """
        if batch.directories and batch.directories[-1].prefix == prefix:
            return batch.directories[-1]
        if not self._vacancies.take(prefix):
            return None
        new = batch.begin_directory(prefix, position)
        try:
            os.mkdir(new.name, 0o755, dir_fd=self._stage)
        except OSError as problem:
            if problem.errno != errno.EMLINK:  # As many as this file system has in one directory.
                raise
            batch.directories.pop()
            return None
        return new


class _Vacancies:
    """Which directories `aa/bb` are nowhere yet, as far as is known: of one `aa` at a time, since
    blobs come in order.
    """

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._above = b""
        self._names: set[str] | None = None

    def take(self, prefix: bytes) -> bool:
        """Whether that directory may be made in the stage. It counts as made from then on."""
        above, name = prefix[:1], prefix[1:].hex()
        if above != self._above:
            self._above = above
            try:
                self._names = self._look(above.hex())
            except OSError:  # `place` will meet it too, and tell.
                self._names = None
        if self._names is None or name in self._names:
            return False
        self._names.add(name)
        return True

    def _look(self, above: str) -> set[str] | None:
        """What there is below; None where a directory that is made there would inherit what one
        that is made in the stage does not. Raises OSError.
        """
        try:
            fd = os.open(above, DIRECTORY, dir_fd=self._ground.by_hash)
        except FileNotFoundError:
            found = set()
            alike = _legacy(self._ground.by_hash) == _legacy(self._ground.stage)
        else:
            try:
                found = set(os.listdir(fd))
                alike = _legacy(fd) == _legacy(self._ground.stage)
            finally:
                os.close(fd)
        return found if alike else None


def _legacy(fd: int) -> tuple[int | None, bytes]:
    """What a new directory takes over from the one it is made in: its group, and its ACL."""
    status = os.fstat(fd)
    group = status.st_gid if status.st_mode & stat.S_ISGID else None
    try:
        acl = os.getxattr(fd, "system.posix_acl_default")
    except (OSError, AttributeError):  # None is set; or this system names them otherwise.
        acl = b""
    return group, acl
