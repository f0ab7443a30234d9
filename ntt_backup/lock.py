"""One coordinator a host and target: a PID file held with flock(2).

A PID file alone goes stale when its writer is killed, and then needs hands. The kernel's lock ends
with the process, so what a dead coordinator leaves is an unlocked file that means nothing; the PID
in it is only there to be named in the message. The file stays: removing it would let two processes
lock two files of the same name.

The default path lies in /tmp, where others may put things: a symlink in its place is refused, and
so is a file of another user, who could lock it himself and keep us out. Called by `coordinator` and
`preflight`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ntt_backup.errors import ConfigError, LockHeld


@contextmanager
def pid_lock(path: Path) -> Iterator[None]:
    """Hold the lock while the context lasts; the file holds our PID meanwhile, then nothing.

    Raises LockHeld naming the holder's PID, or ConfigError where the file cannot be used.
    """
    fd = _open(path)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise LockHeld(
                f"another coordinator runs here, with PID {holder}",
                detail=f"it holds {path}",
                hint="wait for it or stop it; another --target has a lock of its own",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o644)
    except OSError as error:
        why = "a symlink stands there" if error.errno == errno.ELOOP else error.strerror
        raise ConfigError(
            f"the lock file {path} cannot be opened",
            detail=why or str(error),
            hint="remove what stands there, or set lock.file (NTT_LOCK_FILE) to a path where"
            " this user may write",
        ) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        wrong = "is not a regular file"
    elif found.st_uid not in (os.geteuid(), 0):
        wrong = f"belongs to {_name(found.st_uid)}"
    else:
        return fd
    os.close(fd)
    raise ConfigError(
        f"the lock file {path} {wrong}",
        hint="remove what stands there, or set lock.file (NTT_LOCK_FILE)",
    )


def _name(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"a user with the id {uid}"
