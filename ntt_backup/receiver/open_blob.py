"""What lies below `by-hash`, opened by the digest of its name and by nothing else.

A path that is put together and opened in one go follows whatever link stands on it. Here a
directory `aa/bb` is reached through no symlink and on the file system of `by-hash`, a file in it is
opened without following one, without waiting for a FIFO's writer, and must be a regular file. The
directory is kept open for the next blob: names are asked for in order. Not for several threads at
once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from binascii import hexlify

from ntt_backup.blobdir.syscalls import kind_of, open_beneath
from ntt_backup.receiver.workspace import Ground, words
from ntt_backup.wire.read_messages import MISSING, UNREADABLE, WRONG

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO)


class Trouble(Exception):
    """A blob that cannot be read, or is none. verdict and text are what the client is told."""

    def __init__(self, verdict: int, text: str) -> None:
        super().__init__(text)
        self.verdict = verdict
        self.text = text


class Stock:
    """The blobs of one session's ground."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._path = ""
        self._fd = -1

    def open(self, digest: bytes) -> tuple[int, int]:
        """(a descriptor for the caller to close, its size). Raises Trouble."""
        name = hexlify(digest)
        try:
            fd = os.open(name, _READ, dir_fd=self._directory(name[:2] + b"/" + name[2:4]))
        except OSError as problem:
            raise trouble(problem) from None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise Trouble(WRONG, f"it is {kind_of(status.st_mode)}")
        return fd, status.st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._path, self._fd = "", -1

    def _directory(self, path: bytes) -> int:
        wanted = path.decode("ascii")
        if wanted != self._path:
            self.close()
            self._fd = open_beneath(self._ground.by_hash, wanted, self._ground.device)
            self._path = wanted
        return self._fd


def trouble(problem: OSError) -> Trouble:
    """What an error of the system says about one blob."""
    if problem.errno == errno.ENOENT:
        return Trouble(MISSING, "it is not there")
    if problem.errno in _NOT_A_FILE:
        return Trouble(WRONG, "a symlink or a socket is in its place")
    return Trouble(UNREADABLE, words(problem))


def forget(fd: int) -> None:
    """Have what is read next come from the disk, and what was read not stay in memory.

    A blob that was written or read lately is in the page cache: hashing it there would prove the
    memory, not the disk, and reading all of a large backup would drive everything else out.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
