"""Gives files that are restored their owners, modes, extended attributes and times.

What this user may not set is left out, and said once for all files. A file that could not be given
its owner loses the bits by which others would run it as its owner.
"""

from __future__ import annotations

import binascii
import os
from base64 import b64decode
from contextlib import suppress

from ntt_backup.snapshot.format.entry import Entry
from ntt_backup.snapshot.format.small_files import SmallFiles

_AS_OWNER = 0o6000
_CAPABILITY = "security.capability"
_LISTS = ("system.posix_acl_access", "system.posix_acl_default")


class Attributes:
    """notes: what could not be set anywhere, in words."""

    def __init__(self) -> None:
        self.user, self.group = os.geteuid(), os.getegid()
        self._groups = {self.group, *os.getgroups()}
        self.notes: set[str] = set()

    def come_by_themselves(self, files: SmallFiles) -> bool:
        """Returns whether new files have all of them but their times, in a directory that passes
        nothing on.
        """
        return (files.uid, files.gid) == (self.user, self.group) and files.mode < 0o1000

    def set(self, fd: int, entry: Entry) -> None:
        """Sets all of them, of a file or of a directory. Raises OSError."""
        status = os.fstat(fd)
        owned = self._own(fd, entry, status)
        for name in _LISTS:  # Passed on by the directory.
            if name not in entry.xattrs:
                with suppress(OSError):
                    os.removexattr(fd, name)
        if entry.xattrs:
            if self.user and status.st_mode & 0o600 != 0o600:  # Else it may not set them.
                os.fchmod(fd, status.st_mode & 0o777 | 0o600)
            self._extend(fd, entry, owned=owned)
        os.fchmod(fd, entry.mode if owned else entry.mode & ~_AS_OWNER)
        os.utime(fd, ns=(entry.mtime, entry.mtime))

    def set_unopened(self, directory: int, name: str, entry: Entry) -> None:
        """Sets all of them but the mode, of what is not opened: a symlink, or a FIFO."""
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        path = f"/proc/self/fd/{directory}/{name}"
        owned = self._own(path, entry, status)
        if entry.xattrs:
            self._extend(path, entry, owned=owned)
        os.utime(name, ns=(entry.mtime, entry.mtime), dir_fd=directory, follow_symlinks=False)

    def are(self, entry: Entry, status: os.stat_result) -> bool:
        """Returns whether a file has its owner, mode and time already, as far as they can be set.
        Its extended attributes are not looked at.
        """
        owned = (status.st_uid, status.st_gid) == (entry.uid, entry.gid)
        mode = entry.mode if owned else entry.mode & ~_AS_OWNER
        return (
            status.st_mode & 0o7777 == mode
            and status.st_mtime_ns == entry.mtime
            and (owned or not self._may_own(entry))
        )

    def _may_own(self, entry: Entry) -> bool:
        return self.user == 0 or (entry.uid == self.user and entry.gid in self._groups)

    def _own(self, file: int | str, entry: Entry, status: os.stat_result) -> bool:
        if (status.st_uid, status.st_gid) == (entry.uid, entry.gid):
            return True
        if self._may_own(entry):
            with suppress(OSError):
                os.chown(file, entry.uid, entry.gid, **_untouched(file))
                return True
        self.notes.add("owners are not set where they are others: this user may not")
        return False

    def _extend(self, file: int | str, entry: Entry, *, owned: bool) -> None:
        for name, value in entry.xattrs.items():
            if name == _CAPABILITY and not owned:
                continue
            try:
                os.setxattr(file, name, b64decode(value, validate=True), **_untouched(file))
            except (OSError, binascii.Error, ValueError) as error:
                why = getattr(error, "strerror", None) or str(error)
                self.notes.add(f"some extended attributes are not set: {name[:60]}: {why}")


def _untouched(file: int | str) -> dict[str, bool]:
    return {} if isinstance(file, int) else {"follow_symlinks": False}
