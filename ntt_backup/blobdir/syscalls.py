"""Python lacks two system calls, syncfs and renameat2; here they are, each with a substitute.

They are called through ctypes, because nothing may be compiled on the remote. A kernel, libc or
file system without one of them is remembered, and a slower way of the same meaning is taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from typing import Any

_RENAME_NOREPLACE = 1
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A kernel without the call; a container's filter that does not know it; a file system without it.
_LACKING = (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP)


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


def error_line(problem: OSError) -> str:
    """Returns an error of the system in one line: `ENOSPC: No space left on device: name`."""
    number = problem.errno or 0
    name = problem.filename
    about = f": {os.fsdecode(name)}" if isinstance(name, (str, bytes)) else ""
    return f"{errno.errorcode.get(number, number)}: {os.strerror(number)}{about}"
