"""A file that comes into a directory of ours below the root has a temporary name meanwhile.

All is reached through one descriptor, so nothing outside can be named. A file is written as
`.incoming-<token>`, and gets its name when it is on stable storage and was read from there. That
goes on behind the writing, so that a large file is not waited for at its end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import threading
import time

from ntt_backup.blobdir.open import FILE
from ntt_backup.blobdir.partial import lock_file
from ntt_backup.blobdir.staging import write_all
from ntt_backup.receiver.open_blob import forget

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
INCOMING = ".incoming-"
_STALE_SECONDS = 3600
# So many bytes are written before those behind them are synced and summed.
_STEP = 32 << 20


class Incoming:
    """A file that is being received, under a temporary name. Methods raise OSError."""

    def __init__(self, directory: int) -> None:
        self.name = INCOMING + os.urandom(4).hex()
        self._fd = os.open(self.name, _NEW, 0o600, dir_fd=directory)
        # The area opens its directory anew for the next file.
        self._directory = os.dup(directory)
        with contextlib.suppress(OSError):  # Some network file systems have no locks.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._digest = hashlib.sha256()
        self._written = 0
        self._summed = 0
        self._behind: threading.Thread | None = None
        self._problem: OSError | None = None
        self.stopped = False

    def write(self, data: memoryview) -> None:
        write_all(self._fd, memoryview(data))
        self._written += len(data)
        thread = self._behind
        if self._written - self._summed >= _STEP and (thread is None or not thread.is_alive()):
            self._raise()
            self._behind = threading.Thread(target=self._follow, daemon=True)
            self._behind.start()

    def sync(self) -> tuple[int, bytes]:
        """Makes all of it durable, with this moment as its time of arrival.

        Returns:
            The size in bytes, and the SHA-256 of what is on the disk. Ends early when `stopped` is
            set.
        """
        self._wait()
        # A client could write today and ask for the name next week. A few file systems keep no
        # times: no client chooses on which one the receiver works.
        with contextlib.suppress(OSError):
            os.utime(self._fd)
        self._follow()
        self._raise()
        return self._summed, self._digest.digest()

    def remove(self) -> None:
        """Closes the file, and removes it where it has got no name."""
        self.stopped = True
        self._wait()
        with contextlib.suppress(OSError):
            os.unlink(self.name, dir_fd=self._directory)
        os.close(self._directory)
        os.close(self._fd)

    def _follow(self) -> None:
        """Syncs what is written, and sums it from the disk. The system tells once of an error."""
        end = self._written
        try:
            os.fsync(self._fd)
            forget(self._fd)
            while not self.stopped and self._summed < end:
                data = os.pread(self._fd, min(1 << 20, end - self._summed), self._summed)
                if not data:
                    break
                self._digest.update(data)
                self._summed += len(data)
        except OSError as problem:
            self._problem = self._problem or problem

    def _wait(self) -> None:
        if self._behind is not None:
            self._behind.join()

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem


def remove_if_stale(directory: int, name: str) -> None:
    """Removes a file that was not changed for an hour, unless it is locked: its session lives, and
    may have nothing to write for hours.
    """
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if status.st_mtime >= time.time() - _STALE_SECONDS:
        return
    with contextlib.ExitStack() as after:
        with contextlib.suppress(OSError):  # Where there are no locks, its age decides.
            lock = lock_file(directory, name, create=False)
            if lock is None:
                return
            after.callback(os.close, lock)
        os.unlink(name, dir_fd=directory)


def open_file(directory: int, name: str) -> int:
    """Returns a descriptor for the caller to close. Raises OSError, also for what is no file."""
    with contextlib.ExitStack() as otherwise:
        fd = os.open(name, FILE, dir_fd=directory)
        otherwise.callback(os.close, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
        otherwise.pop_all()
    return fd
