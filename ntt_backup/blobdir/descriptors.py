"""Files are opened, locked, synced, renamed and removed by descriptor, and no symlink is followed.

A path that is opened in one go leads wherever a symlink on it points: whoever can write one could
have any file of this machine read. So each level is opened from the descriptor of the one above.

Python lacks two system calls, syncfs and renameat2. They are called through ctypes, because nothing
may be compiled on the remote. A kernel, libc or file system without one of them is remembered, and
a slower way of the same meaning is taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import Any

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO or a device that stands where a blob should must not wait.
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
NOATIME = getattr(os, "O_NOATIME", 0)

_RENAME_NOREPLACE = 1
# A kernel without the call; a container's filter that does not know it; a file system without it.
_LACKING = (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP)
# What a file system without locks says to flock.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_ALIVE_EVERY = 256
# The name of a directory that is being removed begins with this.
_TAKEN = "-"


class Misplaced(Exception):
    """A directory of ours is a symlink, no directory at all, or on another file system."""


# --- open


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


def open_file(directory: int, name: str) -> int:
    """Returns a descriptor for the caller to close. Raises OSError, also for what is no file."""
    with contextlib.ExitStack() as otherwise:
        fd = os.open(name, FILE, dir_fd=directory)
        otherwise.callback(os.close, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
        otherwise.pop_all()
    return fd


# --- read and write


def write_all(fd: int, data: memoryview) -> None:
    """Writes all of data. Raises OSError."""
    while data:
        data = data[os.write(fd, data) :]


def forget(fd: int) -> None:
    """Has the next read come from the disk, and lets no content stay in memory.

    A blob that was written or read lately is in the page cache: hashing it there would prove the
    memory, not the disk, and reading all of a large backup would drive everything else out.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


# --- lock


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


# --- sync and rename


def _function(name: str, *arguments: Any) -> Any:
    function = getattr(_LIBC, name, None)
    if function is not None:
        function.argtypes = arguments
        function.restype = ctypes.c_int
    return function


def _linux() -> tuple[int, ...]:
    """Returns the version of the running Linux kernel, nothing for another system."""
    system = os.uname()
    version = re.match(r"(\d+)\.(\d+)", system.release)
    return tuple(map(int, version.groups())) if version and system.sysname == "Linux" else ()


try:
    _LIBC: Any = ctypes.CDLL(None, use_errno=True)
except OSError:
    _LIBC = None
_SYNCFS = _function("syncfs", ctypes.c_int)
_RENAMEAT2 = _function(
    "renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint
)

# syncfs empties the buffers of one file system. Behind these stands a program, a server or another
# file system with buffers of its own, and only fsync of a file is passed on to it.
_KEEPS_TO_ITSELF = re.compile(
    r"fuse|virtiofs$|cifs$|smb|9p$|vboxsf$|vmhgfs$|prl_fs$|ecryptfs$|shiftfs$"
)

_missing: set[str] = set()


def can_syncfs(device: int, mounts: str = "/proc/self/mountinfo") -> bool:
    """Returns whether syncfs may be called, reaches the disk with this device number, and tells of
    write-back errors, which it does since Linux 5.8.
    """
    return (
        _SYNCFS is not None
        and _linux() >= (5, 8)
        and _SYNCFS(-1) != 0
        and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM)
        and not _KEEPS_TO_ITSELF.match(_file_system(device, mounts))
    )


def _file_system(device: int, mounts: str) -> str:
    """Returns the type of the mounted file system with this device number, or nothing."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(mounts, encoding="utf-8", errors="replace") as table:
            for line in table:
                where, _, what = line.partition(" - ")
                if what and where.split()[2:3] == [number]:
                    return what.split()[0]
    except OSError:
        pass
    return ""


def syncfs(fd: int) -> None:
    """Makes all of fd's file system durable. Raises OSError; runs without the GIL."""
    while _SYNCFS(fd) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def sync_directory(fd: int) -> None:
    """Makes the names in a directory durable. Raises OSError.

    Some file systems have no such call for directories (vboxsf, older SMB and 9p), and say EINVAL.
    There their server alone knows when a name is durable.
    """
    try:
        os.fsync(fd)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise


def rename_new(source: int, old: bytes, target: int, new: bytes) -> None:
    """Renames, never over anything. Raises FileExistsError where the new name is taken."""
    if _RENAMEAT2 is not None and "renameat2" not in _missing:
        if _RENAMEAT2(source, old, target, new, _RENAME_NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
        if number not in _LACKING:
            raise OSError(number, os.strerror(number), new)
        if number != errno.EPERM:  # With EPERM it may be this one directory.
            _missing.add("renameat2")
    try:
        os.link(old, new, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except OSError as problem:
        if problem.errno not in (*_LACKING, errno.EMLINK):
            raise
    else:
        os.unlink(old, dir_fd=source)
        return
    # No links here. Two sessions that race for one name would publish the same content.
    with contextlib.suppress(FileNotFoundError):
        os.stat(new, dir_fd=target, follow_symlinks=False)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
    os.rename(old, new, src_dir_fd=source, dst_dir_fd=target)


# --- remove


def remove_tree(parent: int, name: str, alive: Callable[[], None] = lambda: None) -> None:
    """Removes a tree as far as it can; the next session tries the rest again. alive is called after
    every some files: a staging directory may hold hundreds of thousands.

    A session that is taken for dead may be alive, and publish a directory of its stage while it is
    emptied here. So each gets another name first, by which nobody looks for it.
    """
    with contextlib.suppress(OSError):
        with closing(os.open(name, DIRECTORY, dir_fd=parent)) as fd:
            with os.scandir(fd) as found:
                entries = [(each.name, each.is_dir(follow_symlinks=False)) for each in found]
            for number, (below, is_directory) in enumerate(entries):
                with contextlib.suppress(OSError):
                    if is_directory:
                        os.rename(below, _TAKEN + below, src_dir_fd=fd, dst_dir_fd=fd)
                        remove_tree(fd, _TAKEN + below, alive)
                    else:
                        os.unlink(below, dir_fd=fd)
                if number % _ALIVE_EVERY == 0:
                    alive()
        os.rmdir(name, dir_fd=parent)


def error_line(problem: OSError) -> str:
    """Returns an error of the system in one line: `ENOSPC: No space left on device: name`."""
    number = problem.errno or 0
    name = problem.filename
    about = f": {os.fsdecode(name)}" if isinstance(name, (str, bytes)) else ""
    return f"{errno.errorcode.get(number, number)}: {os.strerror(number)}{about}"
