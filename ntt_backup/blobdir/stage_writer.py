"""Writes small blobs into the stage so that publishing them takes the fewest system calls.

Most senders give blobs in the order of their digests, and a first backup finds hardly any
directory. So where `by-hash` has no `aa/bb`, one is made in the stage, its blobs are written under
their final names, and one rename publishes all of it, with all of `aa` where that is new, too. The
listing that says so may be out of date: publishing finds out, and moves file by file then.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING

from ntt_backup.blobdir.staged_batch import NewDirectory, NewParent, StagedBatch
from ntt_backup.blobdir.staging import write_all
from ntt_backup.blobdir.syscalls import DIRECTORY
from ntt_backup.wire.framing import DIGEST_BYTES
from ntt_backup.wire.write_messages import MISMATCH

if TYPE_CHECKING:
    from typing import Protocol

    class Hasher(Protocol):
        def digest(self) -> bytes: ...


CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class StageWriter:
    """Writes what will be published in by_hash into stage; both are descriptors.

    new_hasher: of BLAKE3, to check each blob; None where there is none. by_file: syncs each file.
    """

    def __init__(
        self,
        stage: int,
        by_hash: int,
        new_hasher: Callable[[memoryview], Hasher] | None,
        by_file: bool,
    ) -> None:
        self._stage = stage
        self._missing = _MissingDirectories(stage, by_hash)
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
        """Writes the blobs that lie in raw from `at` on; the first has that position in the batch.
        Raises OSError.
        """
        # The inner loop: nothing is looked up twice.
        open_, write, close, stage = os.open, os.write, os.close, self._stage
        new_hasher, by_file = self._new_hasher, self._by_file
        prefix, place = b"", ""
        new: NewDirectory | None = None
        for index, size in enumerate(sizes):
            content = raw[at : at + size]
            at += size
            digest = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            if new_hasher is not None and new_hasher(content).digest() != digest:
                batch.except_for(position + index, MISMATCH, "")
                continue
            if digest[:2] != prefix:
                prefix = digest[:2]
                new = self._new_directory(batch, prefix, position + index)
                if new is not None:
                    place = new.name + "/"
            fd = -1
            if new is not None:
                try:
                    fd = open_(place + digest.hex(), CREATE, 0o644, dir_fd=stage)
                    new.end = position + index + 1
                except FileExistsError:
                    pass  # The same blob twice: the second will be found present.
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

    def _new_directory(
        self, batch: StagedBatch, prefix: bytes, position: int
    ) -> NewDirectory | None:
        """Returns the directory in the stage for blobs of that prefix; None where they go into the
        stage itself. Raises OSError.
        """
        parent: NewParent | None = batch.parents[-1] if batch.parents else None
        if parent is not None and parent.directories[-1].prefix == prefix:
            return parent.directories[-1]
        if not self._missing.take(prefix):
            return None
        if parent is None or parent.prefix != prefix[:1]:
            parent = batch.begin_parent(prefix[:1], position)
            try:
                os.mkdir(parent.name, 0o755, dir_fd=self._stage)
            except OSError as problem:
                if problem.errno != errno.EMLINK:  # As many as this file system has in one.
                    raise
                batch.parents.pop()
                return None
        new = NewDirectory(prefix, f"{parent.name}/{prefix[1:].hex()}", position)
        try:
            os.mkdir(new.name, 0o755, dir_fd=self._stage)
        except FileExistsError:  # Made for blobs before; the listing was read anew since.
            return None
        parent.directories.append(new)
        return new


class _MissingDirectories:
    """The directories `aa/bb` known to be missing: of one `aa`, as most blobs come in order."""

    def __init__(self, stage: int, by_hash: int) -> None:
        self._stage = stage
        self._by_hash = by_hash
        self._above = b""
        self._names: set[str] | None = None

    def take(self, prefix: bytes) -> bool:
        """Returns whether that directory may be made in the stage; then it counts as made."""
        above, name = prefix[:1], prefix[1:].hex()
        if above != self._above:
            self._above = above
            try:
                self._names = self._look(above.hex())
            except OSError:  # Publishing will meet it too, and tell.
                self._names = None
        if self._names is None or name in self._names:
            return False
        self._names.add(name)
        return True

    def _look(self, above: str) -> set[str] | None:
        """Returns the names below; None where a directory that is made in the stage would not
        inherit the same as one that is made below. Raises OSError.
        """
        try:
            fd = os.open(above, DIRECTORY, dir_fd=self._by_hash)
        except FileNotFoundError:
            return set() if _inherited(self._by_hash) == _inherited(self._stage) else None
        try:
            return set(os.listdir(fd)) if _inherited(fd) == _inherited(self._stage) else None
        finally:
            os.close(fd)


def _inherited(fd: int) -> tuple[int | None, bytes]:
    """Returns what a directory passes on to those made in it: its group, and its access list."""
    status = os.fstat(fd)
    group = status.st_gid if status.st_mode & stat.S_ISGID else None
    try:
        acl = os.getxattr(fd, "system.posix_acl_default")
    except (OSError, AttributeError):  # None is set; or this system names them otherwise.
        acl = b""
    return group, acl
