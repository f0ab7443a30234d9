"""Gives files that are restored their owners, modes, extended attributes and times.

What this user may not set is left out, and said once for all files. A file that could not be given
its owner loses the bits by which others would run it as its owner. What the version lacks is
removed: a capability that somebody has planted on a file would outlive the restore otherwise.
"""

from __future__ import annotations

import binascii
import os
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress

from ntt_backup.formatting import printable
from ntt_backup.snapshot.format.entry import Entry

_AS_OWNER = 0o6000
_CAPABILITY = "security.capability"
_LISTS = ("system.posix_acl_access", "system.posix_acl_default")
_HARMLESS = ("user.", *_LISTS)
# Others belong to the system, such as the labels of SELinux, or to a file system.
_REMOVED = ("user.", _CAPABILITY, *_LISTS)


class Attributes:
    """Sets attributes of files.

    Args:
        privileges: Whether files get owners, bits of set-user-id and set-group-id, capabilities and
            other attributes that rights come from.

    Attributes:
        notes: What could not be set anywhere, in words.
    """

    def __init__(self, *, privileges: bool = True) -> None:
        self.user, self.group = os.geteuid(), os.getegid()
        self._privileges = privileges
        self._groups = {self.group, *os.getgroups()}
        self.notes: set[str] = set()

    def set(self, fd: int, entry: Entry) -> None:
        """Sets all of them, of a file or of a directory. Raises OSError."""
        status = os.fstat(fd)
        owned = self._own(fd, entry, status)
        self._remove(fd, entry)
        wanted = self._wanted(entry, owned=owned)
        if wanted:
            os.fchmod(fd, status.st_mode & 0o777 | 0o600)  # Else a user may not set them.
            self._extend(fd, wanted)
        os.fchmod(fd, self._mode(entry, owned=owned))
        os.utime(fd, ns=(entry.mtime, entry.mtime))

    def set_unopened(self, directory: int, name: str, entry: Entry) -> None:
        """Sets all of them but the mode, of what is not opened: a symlink, or a FIFO."""
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        path = f"/proc/self/fd/{directory}/{name}"
        owned = self._own(path, entry, status)
        self._remove(path, entry)
        self._extend(path, self._wanted(entry, owned=owned))
        os.utime(name, ns=(entry.mtime, entry.mtime), dir_fd=directory, follow_symlinks=False)

    def are(self, entry: Entry, status: os.stat_result, directory: int, name: str) -> bool:
        """Returns whether a file, known by its directory, has all attributes that can be set."""
        owned = (status.st_uid, status.st_gid) == (entry.uid, entry.gid)
        return (
            status.st_mode & 0o7777 == self._mode(entry, owned=owned)
            and status.st_mtime_ns == entry.mtime
            and (owned or not self._may_own(entry))
            and self._are_extended(f"/proc/self/fd/{directory}/{name}", entry, owned=owned)
        )

    def _may_own(self, entry: Entry) -> bool:
        if not self._privileges:
            return False
        return self.user == 0 or (entry.uid == self.user and entry.gid in self._groups)

    def _own(self, file: int | str, entry: Entry, status: os.stat_result) -> bool:
        if (status.st_uid, status.st_gid) == (entry.uid, entry.gid):
            return True
        if self._may_own(entry):
            with suppress(OSError):
                os.chown(file, entry.uid, entry.gid, **_untouched(file))
                return True
        if self._privileges:
            self.notes.add("owners are not set where they are others: this user may not")
        return False

    def _mode(self, entry: Entry, *, owned: bool) -> int:
        return entry.mode if owned and self._privileges else entry.mode & ~_AS_OWNER

    def _wanted(self, entry: Entry, *, owned: bool) -> dict[str, str]:
        """Returns the extended attributes of the version that are set."""
        return {
            name: value
            for name, value in entry.xattrs.items()
            if (self._privileges or name.startswith(_HARMLESS)) and (owned or name != _CAPABILITY)
        }

    def _are_extended(self, path: str, entry: Entry, *, owned: bool) -> bool:
        with suppress(OSError, ValueError):
            return not any(self._foreign(path, entry)) and all(
                os.getxattr(path, name, follow_symlinks=False) == b64decode(value)
                for name, value in self._wanted(entry, owned=owned).items()
            )
        return False

    def _foreign(self, file: int | str, entry: Entry) -> Iterator[str]:
        """Yields the extended attributes that a file has and the version lacks."""
        kept = entry.xattrs if self._privileges else self._wanted(entry, owned=False)
        with suppress(OSError):  # A file system that has none.
            for name in os.listxattr(file, **_untouched(file)):
                if name.startswith(_REMOVED) and name not in kept:
                    yield name

    def _remove(self, file: int | str, entry: Entry) -> None:
        for name in self._foreign(file, entry):
            try:
                os.removexattr(file, name, **_untouched(file))
            except OSError as error:
                self.notes.add(
                    "some extended attributes that the version lacks are still there:"
                    f" {printable(name[:60])}: {error.strerror}"
                )

    def _extend(self, file: int | str, wanted: dict[str, str]) -> None:
        for name, value in wanted.items():
            try:
                os.setxattr(file, name, b64decode(value, validate=True), **_untouched(file))
            except (OSError, binascii.Error, ValueError) as error:
                why = getattr(error, "strerror", None) or str(error)
                self.notes.add(
                    f"some extended attributes are not set: {printable(name[:60])}: {why}"
                )


def _untouched(file: int | str) -> dict[str, bool]:
    return {} if isinstance(file, int) else {"follow_symlinks": False}
