"""In the target directory of a restore, every name that is seen is complete and right.

Content goes into scratch space below the target; once it hashes to its name and a sync has covered
the whole batch, each file is published as `aa/bb/<blobid>`, or replaces a wrong one. A large
blob is kept there until it is whole: the next call hashes what it finds and resumes after it. No
link below the target is followed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from blake3 import blake3

from ntt_backup.blobdir.open import BlobDirectory, NotAFile, closing
from ntt_backup.blobdir.publish import Publisher
from ntt_backup.blobdir.staging import write_all
from ntt_backup.client.verdicts import hash_mismatch, remote_failure
from ntt_backup.errors import DestinationError
from ntt_backup.model import Failure
from ntt_backup.restore.target_dir import RestoreTarget, destination
from ntt_backup.wire import read_messages, write_messages
from ntt_backup.wire.write_messages import PRESENT, REFUSED, RESUMABLE

_CHUNK: Final = 1 << 20
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class _Large:
    """A blob that comes in pieces: its file, and the hash of what has come of it."""

    digest: bytes
    fd: int
    directory: int
    hasher: blake3
    size: int
    resumed: bool = False


class Found(IntEnum):
    """What the target has under a blob's name: nothing that is right, the blob since before the
    restore began, or since then.
    """

    NOT_RIGHT = 0
    BEFORE = 1
    RESTORED = 2


class TargetWriter:
    """Writes and publishes the files of one thread; a `read_session.ContentSink`. on_bytes is told
    the length of content as it comes. Raises DestinationError, OSError.
    """

    def __init__(self, target: RestoreTarget, name: str, on_bytes: Callable[[int], None]) -> None:
        self._target = target
        self._stage = target.stage(name)
        self._blobs = BlobDirectory(target.fd, target.device)
        self._on_bytes = on_bytes
        self._buffer = memoryview(bytearray(_CHUNK))
        # Each file is called by the blobid. The other part is its directory.
        self._staged: list[tuple[bytes, int]] = []
        self._large: _Large | None = None
        self._again: list[bytes] = []
        self._parts: set[bytes] = set()
        self.failures: list[Failure] = []

    # --- what the target has ----------------------------------------------------------------------

    def find(self, digest: bytes, size: int | None, *, trust_size: bool) -> Found:
        """Returns whether the target has this blob. size: the remote's, None for unknown.
        trust_size: takes a file of that size for right without reading it.
        """
        try:
            fd, status = self._blobs.open_blob(digest.hex())
            with closing(fd):
                if trust_size and size is not None:
                    right = status.st_size == size
                else:
                    right = self._hash(fd).digest() == digest
        except (OSError, NotAFile):
            return Found.NOT_RIGHT
        if not right:
            return Found.NOT_RIGHT
        return Found.RESTORED if status.st_ctime_ns > self._target.began_ns else Found.BEFORE

    def has_part(self, digest: bytes) -> bool:
        """Returns whether an earlier attempt has left a part of this blob, which no other thread
        goes on with.
        """
        if not self._takes_part(digest):
            return False
        try:
            os.stat(digest.hex(), dir_fd=self._target.partial, follow_symlinks=False)
        except OSError:
            return False
        return True

    def resume(self, digest: bytes, alive: Callable[[], None] = lambda: None) -> int:
        """Returns how many bytes of a large blob an earlier attempt has left, to resume after. None
        are where the disk cannot read them any more. alive is called now and then while they are
        hashed, and may raise.
        """
        self._abandon()
        fd = os.open(digest.hex(), os.O_RDWR | os.O_NOFOLLOW, dir_fd=self._target.partial)
        try:
            hasher = self._hash(fd, alive)
        except OSError:
            os.close(fd)
            os.unlink(digest.hex(), dir_fd=self._target.partial)
            return 0
        except BaseException:
            os.close(fd)
            raise
        size = os.lseek(fd, 0, os.SEEK_CUR)
        self._large = _Large(digest, fd, self._target.partial, hasher, size, resumed=True)
        return size

    def _hash(self, fd: int, alive: Callable[[], None] = lambda: None) -> blake3:
        hasher = blake3()
        while count := os.readv(fd, [self._buffer]):
            hasher.update(self._buffer[:count])
            alive()
        return hasher

    # --- what comes -------------------------------------------------------------------------------

    def whole(self, digest: bytes, content: memoryview) -> None:
        self._on_bytes(len(content))
        found = blake3(content).digest()
        if found != digest:
            self.not_given(digest, read_messages.WRONG, hash_mismatch(len(content), found))
            return
        with closing(_new(digest, self._stage)) as fd:
            write_all(fd, content)
        self._staged.append((digest, self._stage))

    def begin(self, large: write_messages.Large) -> None:
        resumed = self._large
        if resumed is not None and (resumed.digest, resumed.size) == (large.digest, large.offset):
            return
        if resumed is not None and resumed.digest == large.digest:
            os.unlink(large.digest.hex(), dir_fd=resumed.directory)  # The remote has less of it.
        self._abandon()
        kept = large.size > RESUMABLE and self._takes_part(large.digest)
        directory = self._target.partial if kept else self._stage
        fd = _new(large.digest, directory)
        self._large = _Large(large.digest, fd, directory, blake3(), 0, resumed=large.offset > 0)

    def piece(self, data: memoryview) -> None:
        self._on_bytes(len(data))
        large = self._large
        if large is not None:
            large.hasher.update(data)
            large.size += len(data)
            write_all(large.fd, data)

    def end(self, problem: str) -> None:
        large, self._large = self._large, None
        if large is None:
            return
        with closing(large.fd):
            if not problem and large.directory != self._stage:
                self._target.sync_large(large.fd)
        if problem:
            self.not_given(large.digest, read_messages.UNREADABLE, problem)
        elif (found := large.hasher.digest()) != large.digest:
            os.unlink(large.digest.hex(), dir_fd=large.directory)
            if large.resumed:
                self._again.append(large.digest)  # The part of an earlier attempt may be wrong.
            else:
                self.not_given(large.digest, read_messages.WRONG, hash_mismatch(large.size, found))
        else:
            self._staged.append((large.digest, large.directory))

    def not_given(self, digest: bytes, verdict: int, text: str) -> None:
        self.failures.append(remote_failure(digest.hex(), verdict, text))

    # --- publishing -------------------------------------------------------------------------------

    def publish(self) -> int:
        """Publishes all that is whole; returns how many blobs the target did not have before."""
        staged, self._staged = sorted(self._staged), []
        if not staged:
            self._leave_parts()
            return 0
        self._target.sync(self._stage)
        publisher = Publisher(self._target.fd, self._target.device, may_replace=True)
        try:
            with self._target.turn:
                new = sum(self._publish(publisher, *one) for one in staged)
        finally:
            publisher.close()
        self._leave_parts()
        return new

    def _publish(self, publisher: Publisher, digest: bytes, directory: int) -> bool:
        name = digest.hex()
        path = self._target.root / digest[:1].hex() / digest[1:2].hex()
        with destination(path):
            taken = publisher.publish(digest, directory, name.encode())
            if taken is not None and taken[0] == REFUSED:
                raise DestinationError(
                    f"cannot restore into {path}",
                    detail=f"{name}: {taken[1]}",
                    hint="remove it, and call it again",
                )
            present = taken is not None and taken[0] == PRESENT
            if present:
                os.unlink(name, dir_fd=directory)
            return not present

    def again(self) -> list[bytes]:
        """Returns the blobs that must be asked for once more, from their beginning."""
        again, self._again = self._again, []
        return again

    def forget(self) -> None:
        """Forgets what was asked for on a connection that was lost. Large blobs can be resumed."""
        self._abandon()
        self.failures.clear()
        for digest, directory in self._staged:
            if directory == self._stage:
                os.unlink(digest.hex(), dir_fd=directory)
        self._staged.clear()

    def close(self) -> None:
        self._abandon()
        self._leave_parts()
        self._blobs.close()
        os.close(self._stage)

    def _takes_part(self, digest: bytes) -> bool:
        """Returns whether the part of a large blob is this thread's, until it is published."""
        ours = self._target.parts.setdefault(digest, self) is self
        if ours:
            self._parts.add(digest)
        return ours

    def _leave_parts(self) -> None:
        """Leaves to all threads what this one took, but for the blob that comes now."""
        kept = {self._large.digest} if self._large is not None else set()
        for digest in self._parts - kept:
            del self._target.parts[digest]
        self._parts &= kept

    def _abandon(self) -> None:
        large, self._large = self._large, None
        if large is not None:
            os.close(large.fd)


def _new(digest: bytes, directory: int) -> int:
    """Returns a descriptor of an empty file for a blob."""
    return os.open(digest.hex(), _NEW, 0o644, dir_fd=directory)
