"""Large blobs outlive their connection: the bytes that have arrived, and how many are durable.

Such a blob is written to `.ntt-incoming/partial/<hex>`, locked by its session, and the length that
has been synced is noted in `<hex>.mark`. The file's own length would not do: after a crash of this
machine it may cover blocks that never reached the disk. The mark needs no sync: an old mark is a
smaller one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import time

from ntt_backup.blobdir.layout import is_blobid, relative_path
from ntt_backup.blobdir.open import Misplaced, closing, make_directory, open_below

PARTIAL = "partial"

_MARK = ".mark"
_MARK_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KEPT_SECONDS = 7 * 86400
# Less of a blob is not worth a file that every session looks at.
WORTH_KEEPING = 1 << 20
# So many files and marks there are at most; a session looks at no more of them.
_MOST_NAMES = 2000
# What a file system without locks says to flock.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Partial:
    """The partial file of one blob, open and locked."""

    def __init__(self, directory: int, blobid: str, fd: int) -> None:
        self.directory = directory
        self.name = blobid.encode("ascii")
        self.fd = fd
        self._mark = blobid + _MARK

    def durable(self) -> int:
        """Returns how many of its bytes are known to be on the disk."""
        try:
            flags = os.O_RDONLY | _MARK_FLAGS
            with closing(os.open(self._mark, flags, dir_fd=self.directory)) as fd:
                text = os.read(fd, 32)
        except OSError:
            return 0
        noted = int(text) if text.endswith(b"\n") and text[:-1].isdigit() else 0
        return noted if noted <= os.fstat(self.fd).st_size else 0

    def cut(self, length: int) -> None:
        """Cuts the file to that length, where writing goes on."""
        if length == 0:
            self._forget_mark()
        os.ftruncate(self.fd, length)
        os.lseek(self.fd, length, os.SEEK_SET)

    def keep(self, length: int) -> None:
        """Makes the first length bytes durable, and notes that they are. Raises OSError."""
        os.fdatasync(self.fd)
        flags = os.O_WRONLY | os.O_CREAT | _MARK_FLAGS
        with closing(os.open(self._mark, flags, 0o644, dir_fd=self.directory)) as fd:
            # Of one width and written over the last one, so that a kill leaves one or the other.
            os.write(fd, b"%020d\n" % length)

    def remove(self) -> None:
        """Removes the file and its mark."""
        # The name is still this file's: only the holder of its lock moves or removes it.
        with contextlib.suppress(OSError):
            os.unlink(self.name, dir_fd=self.directory)
        self.moved()

    def moved(self) -> None:
        """Forgets the file, which has been published. By now its name may be another session's."""
        self._forget_mark()
        self.close()

    def close(self) -> None:
        """Lets go of the file, and of its lock."""
        os.close(self.fd)
        os.close(self.directory)

    def _forget_mark(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._mark, dir_fd=self.directory)


def open_partial(incoming: int, blobid: str) -> Partial | None:
    """Returns the partial file of a blob; None where another session writes it, there are too many
    partial files, or their directory cannot be used.
    """
    with contextlib.ExitStack() as otherwise, contextlib.suppress(OSError, Misplaced):
        make_directory(incoming, PARTIAL, 0o755)
        directory = open_below(incoming, PARTIAL)
        otherwise.callback(os.close, directory)
        names = os.listdir(directory)
        if len(names) >= _MOST_NAMES and blobid not in names:
            return None
        fd = lock_file(directory, blobid, create=True)
        if fd is not None:
            otherwise.pop_all()
            return Partial(directory, blobid, fd)
    return None


def remove_useless(incoming: int, by_hash: int) -> None:
    """Removes the partial files that nobody can resume, or has resumed for a week. Those in use are
    locked.
    """
    with contextlib.suppress(OSError, Misplaced), closing(open_below(incoming, PARTIAL)) as fd:
        names = set(os.listdir(fd))
        for name in itertools.islice(names, _MOST_NAMES):
            with contextlib.suppress(OSError):
                _remove_if_useless(fd, name, names, by_hash)


def _remove_if_useless(directory: int, name: str, names: set[str], by_hash: int) -> None:
    if name.endswith(_MARK):
        # Without a lock: a mark that is lost costs time, no more.
        if name[: -len(_MARK)] not in names:
            os.unlink(name, dir_fd=directory)
        return
    changed = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime
    resumable = name + _MARK in names and not _is_published(name, by_hash)
    if changed < time.time() - _KEPT_SECONDS or (is_blobid(name) and not resumable):
        lock = lock_file(directory, name, create=False)
        if lock is not None:
            os.unlink(name, dir_fd=directory)
            os.close(lock)
            os.unlink(name + _MARK, dir_fd=directory)


def _is_published(blobid: str, by_hash: int) -> bool:
    try:
        status = os.stat(relative_path(blobid), dir_fd=by_hash, follow_symlinks=False)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode)


def lock_new(fd: int) -> bool:
    """Locks a file that was made new under a random name. Raises OSError.

    Returns:
        Whether no other session holds the lock. Where the file system has no locks, the name alone
        keeps others away, and nobody takes the file for a dead session's while it is young.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as problem:
        if problem.errno not in _NO_LOCKS:
            raise
    return True


def lock_file(directory: int, name: str, create: bool) -> int | None:
    """Returns a regular file, open and locked, that still has this name; None where another session
    holds it or something else has that name. Raises OSError.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for _ in range(20):
        with contextlib.ExitStack() as otherwise:
            fd = os.open(name, flags | (os.O_CREAT if create else 0), 0o644, dir_fd=directory)
            otherwise.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                return None
            # The last holder of the lock may have published the file, or removed it.
            with contextlib.suppress(FileNotFoundError):
                named = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if os.path.samestat(named, found):
                    otherwise.pop_all()
                    return fd
    return None
