"""Opens directories and blobs below a directory, by descriptor and without following a symlink.

A path that is opened in one go leads wherever a symlink on it points: whoever can write one could
have any file of this machine read. So each level is opened from the descriptor of the one above.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator

from ntt_backup.blobdir.layout import kind_of, relative_path
from ntt_backup.blobdir.syscalls import DIRECTORY

# O_NONBLOCK: opening a FIFO or a device that stands where a blob should must not wait.
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
NOATIME = getattr(os, "O_NOATIME", 0)


class NotAFile(Exception):
    """A blob's name belongs to something else, of the kind that is said."""


class Misplaced(Exception):
    """A directory of ours is a symlink, no directory at all, or on another file system."""


class BlobDirectory:
    """A directory of blobs, by a descriptor that stays the caller's. Not for several threads.

    Directories below it go by their path, "aa" or "aa/bb"; "" is the directory itself. At most
    `kept` of them stay open. device: the file system on which all of them must lie; None where a
    prefix may be on another disk. Methods raise OSError.
    """

    def __init__(self, fd: int, device: int | None = None, kept: int = 2) -> None:
        self.fd = fd
        self._device = device
        self._kept = kept
        self._opened: OrderedDict[str, int] = OrderedDict()

    def close(self) -> None:
        """Closes the directories that are kept open."""
        while self._opened:
            os.close(self._opened.popitem()[1])

    def directory(self, path: str, make: bool = False) -> int:
        """Returns a descriptor that is kept here. make: makes what is missing."""
        if not path:
            return self.fd
        fd = self._opened.get(path)
        if fd is not None:
            self._opened.move_to_end(path)
            return fd
        parent, _, name = path.rpartition("/")
        above = self.directory(parent, make)
        try:
            try:
                fd = self._open_level(above, name)
            except FileNotFoundError:
                if not make:
                    raise
                make_directory(above, name, 0o755)
                fd = self._open_level(above, name)
        except OSError as error:
            raise self.error_at(path, error) from None
        self._opened[path] = fd
        if len(self._opened) > self._kept:
            os.close(self._opened.popitem(last=False)[1])
        return fd

    def open(self, path: str) -> int:
        """Returns a descriptor of whatever lies at path, for the caller to close.

        The `filename` of its OSError is the part of path that could not be opened.
        """
        parent, _, name = path.rpartition("/")
        directory = self.directory(parent)
        try:
            return open_untouched(name, FILE, directory)
        except OSError as error:
            raise self.error_at(path, error) from None

    def open_blob(self, blobid: str) -> tuple[int, os.stat_result]:
        """Returns a descriptor for the caller to close, and its status. Raises NotAFile, OSError,
        and ValueError for what is no blobid.
        """
        with contextlib.ExitStack() as otherwise:
            fd = self.open(relative_path(blobid))
            otherwise.callback(os.close, fd)
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise NotAFile(f"it is {kind_of(status.st_mode)}")
            otherwise.pop_all()
        return fd, status

    def lstat(self, path: str) -> os.stat_result:
        """Returns the status of what lies at path, without following a link."""
        parent, _, name = path.rpartition("/")
        directory = self.directory(parent)
        try:
            return os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            raise self.error_at(path, error) from None

    def error_at(self, path: str, error: OSError) -> Exception:
        """Returns what is raised for an error at path."""
        error.filename = path
        return error

    def _open_level(self, above: int, name: str) -> int:
        if self._device is None:
            return open_untouched(name, DIRECTORY, above)
        try:
            fd = os.open(name, DIRECTORY, dir_fd=above)
        except NotADirectoryError:
            if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
            raise
        if os.fstat(fd).st_dev != self._device:
            os.close(fd)
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
        return fd


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Closes a descriptor in the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_untouched(path: str, flags: int, directory: int | None = None) -> int:
    """Opens without touching the access time where that is permitted: to the owner, and to root."""
    try:
        return os.open(path, flags | NOATIME, dir_fd=directory)
    except PermissionError as error:
        if error.errno != errno.EPERM:
            raise
    return os.open(path, flags, dir_fd=directory)


def names_in(directory: int) -> list[str]:
    """Returns the names in a directory as they are now. Raises OSError; see `opened_anew`."""
    with closing(opened_anew(directory)) as now:
        return os.listdir(now)


def opened_anew(directory: int) -> int:
    """Returns another descriptor of a directory, for the caller to close, by which it is listed.

    A descriptor that was opened, or has listed, before a name was made may not list that name:
    neither btrfs nor sshfs do.
    """
    return open_untouched(".", DIRECTORY, directory)


def make_directory(parent: int, name: str, mode: int) -> None:
    """Makes a directory where it is missing. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=parent)


def open_below(root: int, name: str, device: int | None = None) -> int:
    """Opens a directory of ours in root. Raises Misplaced, OSError. device: where it must lie."""
    try:
        fd = os.open(name, DIRECTORY, dir_fd=root)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENOTDIR):
            raise Misplaced(f"{name} is a symlink, or no directory") from None
        raise
    if device not in (None, os.fstat(fd).st_dev):
        os.close(fd)
        raise Misplaced(f"{name} is on another file system than the root")
    return fd
