"""Where restored blobs land: a directory in which every name that is seen is complete and right.

Writing in place would show half a file under a good name whenever the power or the link fails. So
content goes into scratch space below the destination under short names; once it hashes to its name
and a sync has covered the whole batch, each file is renamed into `aa/bb/`. What stands there by
then is either what was right before, or is replaced in that one step.

A large blob is kept by its name in `.ntt-restore/partial` until it is whole, also when the program
is killed: what is there of it is hashed and built upon by the next call. Everything is done
relative to descriptors of directories, and no link below the destination is followed.

A `Place` is the destination, locked; each thread has a `Landing` of its own.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from ntt_backup.blobdir.syscalls import can_syncfs, open_beneath, syncfs
from ntt_backup.client.read_session import failure_there, mismatch_there
from ntt_backup.errors import DestinationError, LockHeld
from ntt_backup.model import Failure
from ntt_backup.receiver.large_blob import write_all
from ntt_backup.wire import read_messages, write_messages
from ntt_backup.wire.write_messages import RESUMABLE

SCRATCH: Final = ".ntt-restore"

_CHUNK: Final = 1 << 20
_WORTH_MENDING: Final = 1 << 20
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Place:
    """The destination, made if only its last part is missing, and locked against a second restore.

    Raises DestinationError, LockHeld.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        with destination(root):
            self._made = not root.is_dir()
            if self._made:
                root.mkdir(0o755)
            self.fd = os.open(root, _DIRECTORY)
            self.device = os.fstat(self.fd).st_dev
            with suppress(FileExistsError):
                os.mkdir(SCRATCH, 0o700, dir_fd=self.fd)
            self._scratch = os.open(SCRATCH, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.fd)
            try:
                fcntl.flock(self._scratch, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockHeld(f"another restore into {root} is at work") from None
            with suppress(FileExistsError):
                os.mkdir("partial", 0o700, dir_fd=self._scratch)
            self.partial = os.open("partial", _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._scratch)
            for name in os.listdir(self._scratch):
                if name != "partial":
                    shutil.rmtree(name, dir_fd=self._scratch)

    def stage(self, name: str) -> int:
        """An empty directory for one thread's files."""
        with destination(self.root):
            os.mkdir(name, 0o700, dir_fd=self._scratch)
            return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._scratch)

    def sync(self) -> None:
        """Make all that was written and named durable."""
        with destination(self.root):
            if can_syncfs(os.fstat(self.fd).st_dev):
                syncfs(self.fd)
            else:
                os.sync()

    def close(self) -> None:
        """Leave nothing but names that are right, and what of large blobs is worth keeping."""
        with suppress(OSError):
            for name in os.listdir(self._scratch):
                if name != "partial":
                    shutil.rmtree(name, ignore_errors=True, dir_fd=self._scratch)
            os.rmdir("partial", dir_fd=self._scratch)
            os.rmdir(SCRATCH, dir_fd=self.fd)
            if self._made:
                self.root.rmdir()  # Where nothing came, it is empty.
        for fd in (self.partial, self._scratch, self.fd):
            os.close(fd)


@dataclass(slots=True)
class _Large:
    """A blob that comes in pieces: its file, and the hash of what is there of it."""

    digest: bytes
    fd: int
    directory: int
    name: str
    hasher: blake3
    size: int
    resumed: bool = False


class Landing:
    """One thread's files on their way; see `strategy.reading.Taker`. Raises DestinationError.

    on_bytes is told of content as it comes.
    """

    def __init__(self, place: Place, name: str, on_bytes: Callable[[int], None]) -> None:
        self._place = place
        self._stage = place.stage(name)
        self._on_bytes = on_bytes
        self._buffer = memoryview(bytearray(_CHUNK))
        self._staged: list[tuple[bytes, int, str]] = []
        self._number = 0
        self._large: _Large | None = None
        self._resumed: _Large | None = None
        self._again: list[bytes] = []
        self.failures: list[Failure] = []

    # --- what is there already --------------------------------------------------------------------

    def is_right(self, digest: bytes, size: int | None, *, trust_size: bool) -> bool:
        """Whether the destination has this blob. size: what the remote has, None for unknown.
        trust_size: a file of that size is right, whatever its content is.
        """
        name = digest.hex()
        try:
            directory = open_beneath(self._place.fd, f"{name[:2]}/{name[2:4]}", self._place.device)
        except OSError:
            return False
        try:
            fd = os.open(name, _READ, dir_fd=directory)
        except OSError:
            return False
        finally:
            os.close(directory)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return False
            if trust_size and size is not None:
                return status.st_size == size
            return self._hash(fd).digest() == digest
        except OSError:
            return False
        finally:
            os.close(fd)

    def has_base(self, digest: bytes) -> bool:
        """Whether a file that is worth mending stands in this blob's place."""
        try:
            with self.base(digest) as fd:
                return os.fstat(fd).st_size >= _WORTH_MENDING
        except (OSError, DestinationError):
            return False

    @contextmanager
    def base(self, digest: bytes) -> Iterator[int]:
        """A descriptor of the file in this blob's place."""
        name = digest.hex()
        with destination(self._place.root / name[:2] / name[2:4]):
            directory = open_beneath(self._place.fd, f"{name[:2]}/{name[2:4]}", self._place.device)
            try:
                fd = os.open(name, _READ, dir_fd=directory)
            finally:
                os.close(directory)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise DestinationError(f"{name} is no file any more")
            yield fd
        finally:
            os.close(fd)

    def has_part(self, digest: bytes) -> bool:
        """Whether an earlier attempt has left a part of this blob."""
        try:
            os.stat(digest.hex(), dir_fd=self._place.partial, follow_symlinks=False)
        except OSError:
            return False
        return True

    def resume(self, digest: bytes) -> int:
        """How many bytes of a large blob an earlier attempt has left; it is gone on from there."""
        with destination(self._place.root):
            fd = os.open(digest.hex(), os.O_RDWR | os.O_NOFOLLOW, dir_fd=self._place.partial)
            hasher = self._hash(fd)
            size = os.lseek(fd, 0, os.SEEK_CUR)
        self._forget_resumed()
        name = digest.hex()
        self._resumed = _Large(digest, fd, self._place.partial, name, hasher, size, resumed=True)
        return size

    def _hash(self, fd: int) -> blake3:
        hasher = blake3()
        while count := os.readv(fd, [self._buffer]):
            hasher.update(self._buffer[:count])
        return hasher

    # --- what comes -------------------------------------------------------------------------------

    def whole(self, digest: bytes, content: memoryview) -> None:
        self._on_bytes(len(content))
        found = blake3(content).digest()
        if found != digest:
            self.not_given(digest, read_messages.WRONG, mismatch_there(len(content), found))
            return
        name = self._next_name()
        with destination(self._place.root):
            fd = os.open(name, _WRITE | os.O_EXCL, 0o644, dir_fd=self._stage)
            try:
                write_all(fd, content)
            finally:
                os.close(fd)
        self._staged.append((digest, self._stage, name))

    def begin(self, large: write_messages.Large) -> None:
        self._abandon()
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            if resumed.digest == large.digest and resumed.size == large.offset:
                self._large = resumed
                return
            os.close(resumed.fd)
        lasting = large.size > RESUMABLE
        directory = self._place.partial if lasting else self._stage
        name = large.digest.hex() if lasting else self._next_name()
        with destination(self._place.root):
            fd = os.open(name, _WRITE | os.O_TRUNC, 0o644, dir_fd=directory)
        self._large = _Large(
            large.digest, fd, directory, name, blake3(), 0, resumed=large.offset > 0
        )

    def piece(self, data: memoryview) -> None:
        self._on_bytes(len(data))
        self.add(data)

    def add(self, data: memoryview) -> None:
        """A piece that need not be fetched."""
        large = self._large
        if large is not None:
            large.hasher.update(data)
            large.size += len(data)
            with destination(self._place.root):
                write_all(large.fd, data)

    def end(self, problem: str) -> None:
        large, self._large = self._large, None
        if large is None:
            return
        os.close(large.fd)
        if problem:
            self.not_given(large.digest, read_messages.UNREADABLE, problem)
        elif (found := large.hasher.digest()) != large.digest:
            with destination(self._place.root):
                os.unlink(large.name, dir_fd=large.directory)
            if large.resumed:
                self._again.append(large.digest)  # The part that was here may be what is wrong.
            else:
                self.not_given(large.digest, read_messages.WRONG, mismatch_there(large.size, found))
        else:
            self._staged.append((large.digest, large.directory, large.name))

    def not_given(self, digest: bytes, verdict: int, text: str) -> None:
        self.failures.append(failure_there(digest.hex(), verdict, text))

    def _next_name(self) -> str:
        self._number += 1
        return str(self._number)

    # --- giving names -----------------------------------------------------------------------------

    def settle(self) -> int:
        """Give everything that is whole its name; how many blobs that were."""
        staged, self._staged = sorted(self._staged), []
        if not staged:
            return 0
        self._place.sync()
        opened, at = -1, ""
        try:
            for digest, directory, name in staged:
                blobid = digest.hex()
                wanted = f"{blobid[:2]}/{blobid[2:4]}"
                with destination(self._place.root / wanted):
                    if wanted != at:
                        if opened >= 0:
                            os.close(opened)
                        opened, at = self._directory(wanted), wanted
                    os.rename(name, blobid, src_dir_fd=directory, dst_dir_fd=opened)
        finally:
            if opened >= 0:
                os.close(opened)
        return len(staged)

    def again(self) -> list[bytes]:
        """What must be asked for once more, from its beginning."""
        again, self._again = self._again, []
        return again

    def forget(self) -> None:
        """The connection is gone, and what was asked for is asked for again. What is there of large
        blobs stays for `resume`.
        """
        self._abandon()
        self._forget_resumed()
        self.failures.clear()
        for _, directory, name in self._staged:
            if directory == self._stage:
                with destination(self._place.root):
                    os.unlink(name, dir_fd=directory)
        self._staged.clear()

    def close(self) -> None:
        self._abandon()
        self._forget_resumed()
        os.close(self._stage)

    def _directory(self, path: str) -> int:
        place = self._place
        try:
            return open_beneath(place.fd, path, place.device)
        except FileNotFoundError:
            for part in (path[:2], path):
                with suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=place.fd)
            return open_beneath(place.fd, path, place.device)

    def _abandon(self) -> None:
        large, self._large = self._large, None
        if large is not None:
            os.close(large.fd)

    def _forget_resumed(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            os.close(resumed.fd)


@contextmanager
def destination(path: Path) -> Iterator[None]:
    """Raise DestinationError for what the system says about the destination."""
    try:
        yield
    except OSError as error:
        hints = {
            errno.ENOSPC: "free space there, and call it again: what is there is not fetched again",
            errno.EDQUOT: "raise the quota there, and call it again",
            errno.EROFS: "remount it for writing, or name another directory",
            errno.EACCES: "let this user write there, or name another directory",
            errno.ENOENT: "make the directory that shall hold it",
            errno.EXDEV: "mount one file system at the destination itself, not below it",
            errno.ELOOP: "links below the destination are not followed: remove it",
        }
        raise DestinationError(
            f"cannot restore into {path}",
            detail=error.strerror or str(error),
            hint=hints.get(error.errno or 0, "look at what stands there, and at its disk"),
        ) from error
