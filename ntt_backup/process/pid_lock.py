"""A PID file with flock(2) allows one process at a time for a target, or for a snapshot set.

A PID file alone becomes stale when its process is killed, and must be removed by hand. The kernel's
lock ends with the process, so a dead coordinator leaves an unlocked file without effect; the PID in
the file is only shown in the error. The file is never removed: otherwise two processes could lock
two files of the same name.

The default path is in /tmp, where other users can create files: a symlink in its place is refused,
and so is a file of another user, who could hold its lock. A file that contains anything but a PID
belongs to another program, and is not changed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ntt_backup.blobdir.descriptors import closing
from ntt_backup.errors import ConfigError, LockHeld

_OURS = re.compile(rb"[0-9]*\n?")
_LONGEST = 32
_ELSEWHERE = "set lock.file (NTT_LOCK_FILE) to"
_ANOTHER_FILE = f"{_ELSEWHERE} a file of its own"
_WRITABLE = f"{_ELSEWHERE} a path where this user may write, or run as the user whose file it is"


@contextmanager
def pid_lock(
    path: Path,
    held: str = "another coordinator runs on this host",
    hint: str = "if it works for another target or catalog, give this one a lock.file of its own"
    " (NTT_LOCK_FILE)",
) -> Iterator[None]:
    """Holds the lock, with our PID in the file, during the context.

    Args:
        path: The file.
        held: The message for a lock that another process holds.
        hint: The remedy besides waiting.

    Raises:
        LockHeld: Another process holds the lock. The message has its PID.
        ConfigError: The file cannot be used.
    """
    with closing(_open(path)) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, _LONGEST, 0).decode("ascii", "replace").strip() or "unknown"
            raise LockHeld(
                f"{held}, with PID {holder}",
                detail=f"it holds {path}",
                hint="; ".join(filter(None, ("wait for it or stop it", hint))),
            ) from None
        if not _OURS.fullmatch(os.pread(fd, _LONGEST, 0)):
            raise ConfigError(f"the lock file {path} holds something else", hint=_ANOTHER_FILE)
        os.ftruncate(fd, 0)
        with suppress(OSError):  # On a full disk the lock is valid without a PID.
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(fd, 0)


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    room = f"free space or inodes in {path.parent}, or {_ANOTHER_FILE}"
    hints = {
        errno.ELOOP: _ANOTHER_FILE,
        errno.EISDIR: _ANOTHER_FILE,
        errno.ENXIO: _ANOTHER_FILE,
        errno.ENOENT: f"create the directory {path.parent} for this user, or {_ANOTHER_FILE}",
        errno.ENOSPC: room,
        errno.EDQUOT: room,
    }
    try:
        fd = os.open(path, flags, 0o644)
    except OSError as error:
        raise ConfigError(
            f"the lock file {path} cannot be opened",
            detail="it is a symlink" if error.errno == errno.ELOOP else error.strerror or "",
            hint=hints.get(error.errno or 0, _WRITABLE),
        ) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        wrong, hint = "is not a regular file", _ANOTHER_FILE
    elif found.st_uid not in (os.geteuid(), 0):
        wrong, hint = f"belongs to the user with the id {found.st_uid}", _WRITABLE
    else:
        return fd
    os.close(fd)
    raise ConfigError(f"the lock file {path} {wrong}", hint=hint)
