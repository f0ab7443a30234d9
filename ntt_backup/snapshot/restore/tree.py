"""Writes a tree of files below a directory, whatever the paths say that it is given.

A directory is entered level by level, from the descriptor of the one above, and never through a
symlink. A name is one component that cannot lead elsewhere. A new file is made where its name is
free, and nowhere else; one that takes the place of another is made beside it, and renamed. So
neither `..`, nor a symlink that an earlier entry or an earlier restore has made, nor two names that
the file system takes for one, lead out of the directory or over another file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from ntt_backup.blobdir.descriptors import DIRECTORY, closing, names_in
from ntt_backup.blobdir.layout import kind_of
from ntt_backup.snapshot.format.entry import SYMLINK, Entry
from ntt_backup.snapshot.restore.attributes import Attributes

NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_BESIDE: Final = ".ntt-restore-"
# See `version.Unfinished`.
MARKER: Final = ".ntt-restore-unfinished"
_NO_NAMES: Final = frozenset(("", ".", ".."))
_LONGEST_NAME: Final = 255
# These are about the disk, or this process; every other error is about the one file.
OF_ALL: Final = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
)


# System calls of Landlock, which have the same numbers on every architecture but alpha.
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_VERSION: Final = 1
_PATH_BENEATH: Final = 1
_NO_NEW_PRIVS: Final = 38
# struct landlock_ruleset_attr, landlock_path_beneath_attr.
_RULESET: Final = struct.Struct("=Q")
_BENEATH: Final = struct.Struct("=Qi")
# What of LANDLOCK_ACCESS_FS_* changes something: writing, removing, making; since version 2 moving
# between directories, since version 3 truncating.
_WRITE_FILE: Final = 1 << 1
_CHANGES: Final = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_SINCE: Final = {2: 1 << 13, 3: 1 << 14}

# What ssh and others open to write; nothing is kept there.
_OF_PROGRAMS: Final = ("/dev/null", "/dev/tty")

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """A file that is not made, for the reason that is said."""


@dataclass(slots=True)
class Level:
    """A directory below the root, whose descriptor is -1 where the directory does not exist."""

    path: str
    fd: int
    _names: set[str] | None = None

    @property
    def names(self) -> set[str]:
        """Returns the names that the directory had at the first call of this property.

        The names are spelled as they are stored, even where the file system ignores case.
        """
        if self._names is None:
            self._names = set(names_in(self.fd))
        return self._names

    def find(self, name: str) -> os.stat_result | None:
        """Returns the status of what has this name, without following it."""
        if name not in self.names:
            return None
        with suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        return None


class DestinationTree:
    """Opens the directories below a root, whose descriptor the caller closes.

    The directories on the path to the last entered one are open. Missing ones are made on request,
    with a mode: by default accessible to this user alone.

    Attributes:
        mounted: For each other file system, the first of its directories that was entered, as a
            descriptor, which `close` closes.
    """

    def __init__(self, root: int, *, make: bool, mode: int = 0o700) -> None:
        self._make = make
        self._mode = mode
        self._devices = {os.fstat(root).st_dev}
        self.mounted: list[int] = []
        self._levels = [Level("", root)]

    def close(self) -> None:
        """Leaves all directories but the root."""
        while len(self._levels) > 1:
            self._leave()
        for fd in self.mounted:
            os.close(fd)

    def enter(self, path: str) -> Level:
        """Returns a directory, which is open until one is entered that is not below it.

        Raises:
            Refused: Something else than a directory is in the place of the directory.
            OSError: The directory cannot be made or opened.
        """
        while (above := (level := self._levels[-1]).path) not in ("", path):
            if path.startswith(f"{above}/"):
                break
            self._leave()
        if path != level.path:
            for name in path.removeprefix(f"{level.path}/" if level.path else "").split("/"):
                level = self._below(level, checked(name))
                self._levels.append(level)
        return level

    def is_spelled(self, name: str) -> bool:
        """Returns whether an entry of the last entered directory is stored as its path spells it.

        A file system that ignores case, or has short names, finds an entry by other paths, too.
        """
        below = [level.path.rpartition("/")[2] for level in self._levels[1:]]
        return all(map(_is_stored, self._levels, [*below, name]))

    def _leave(self) -> None:
        fd = self._levels.pop().fd
        if fd >= 0:
            os.close(fd)

    def _below(self, above: Level, name: str) -> Level:
        path = f"{above.path}/{name}" if above.path else name
        if above.fd < 0:
            return Level(path, -1, set())
        new = False
        if self._make:
            with suppress(FileExistsError):
                os.mkdir(name, self._mode, dir_fd=above.fd)
                new = True
        try:
            if not new:
                _let_in(above.fd, name, DIRECTORY, 0o700)
            fd = os.open(name, DIRECTORY, dir_fd=above.fd)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                raise
            if self._make:
                found = kind_of(os.stat(name, dir_fd=above.fd, follow_symlinks=False).st_mode)
                raise Refused(f"{found} stands where {path} should be") from None
            return Level(path, -1, set())
        if (device := os.fstat(fd).st_dev) not in self._devices:
            self.mounted.append(os.dup(fd))
            self._devices.add(device)
        return Level(path, fd, set() if new else None)


def _is_stored(level: Level, name: str) -> bool:
    """Returns whether a directory has an entry of exactly this name, where it finds one by it."""
    # A listing takes long. It is needed for names that file systems have in several forms: beyond
    # ASCII, and where FAT cuts their end, or shortens others to them.
    if name.isascii() and "~" not in name and name[-1] not in ". ":
        if (other := name.swapcase()) == name:
            return True
        # Whether both are the same file does not show: FUSE may number a file by its name.
        try:
            os.stat(other, dir_fd=level.fd, follow_symlinks=False)
        except FileNotFoundError:
            return True
    return name in level.names


def split(path: str) -> tuple[str, str]:
    """Returns the directory, for `enter`, and the name in it. Raises Refused."""
    above, _, name = path.rpartition("/")
    if name in _NO_NAMES or path[0] == "/":
        raise Refused("its path is not a path below the directory")
    if path == MARKER:
        raise Refused("this name is reserved for the restore")
    return above, name


def checked(name: str) -> str:
    """Returns a name that is one component of a path. Raises Refused for any other."""
    if name in _NO_NAMES or "/" in name or "\0" in name:
        raise Refused("its path is not a path below the directory")
    if len(os.fsencode(name)) > _LONGEST_NAME:
        raise Refused("its name is too long")
    return name


def open_old(level: Level, name: str, flags: int = os.O_RDONLY) -> int:
    """Opens an existing file, also a file of this user whose mode forbids that.

    Raises:
        Refused: The entry is not a regular file.
        OSError: The file cannot be opened.
    """
    try:
        fd = os.open(name, flags | _OLD, dir_fd=level.fd)
    except PermissionError:
        _let_in(level.fd, name, _OLD, 0o600)
        fd = os.open(name, flags | _OLD, dir_fd=level.fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Refused("it is no file any more")
    return fd


def make(level: Level, entry: Entry, name: str, attributes: Attributes) -> None:
    """Makes a symlink or a FIFO in the place of whatever has the name."""
    with Beside(level, name, free=level.find(name) is None) as beside:
        try:
            if entry.kind == SYMLINK:
                os.symlink(entry.target, beside.name, dir_fd=level.fd)
            else:
                os.mkfifo(beside.name, entry.mode & 0o777, dir_fd=level.fd)
        except OSError as error:
            if error.errno == errno.EIO:  # exfat by FUSE has no FIFOs, and says so.
                raise Refused(os.strerror(errno.EIO)) from error
            raise
        beside.made = True
        attributes.set_unopened(level.fd, beside.name, entry)
        beside.rename()


class Beside:
    """Holds the name of an incomplete entry of a directory.

    That name is the wanted name where the wanted name is free. Otherwise it is another name, and
    `rename` replaces the existing entry. At the end an entry that was not renamed is removed.

    Attributes:
        made: Whether an entry with the name was made and is not renamed yet.
    """

    def __init__(self, level: Level, name: str, *, free: bool) -> None:
        self._level = level
        self._wanted = self.name = name
        self.made = False
        if not free:
            found = level.find(name)
            if found is not None and stat.S_ISDIR(found.st_mode):
                raise Refused("a directory stands in its place")
            token = blake2b(os.fsencode(name), digest_size=8).hexdigest()
            self.name = f"{_BESIDE}{token}"
            with suppress(FileNotFoundError):  # Of a restore that was killed.
                os.unlink(self.name, dir_fd=level.fd)

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Removes what was not renamed."""
        if self.made:
            with suppress(OSError):
                os.unlink(self.name, dir_fd=self._level.fd)

    def open(self) -> int:
        """Returns a new file, for this user alone."""
        fd = os.open(self.name, NEW, 0o600, dir_fd=self._level.fd)
        self.made = True
        return fd

    def rename(self) -> None:
        """Gives it the name that was wanted."""
        if self.name != self._wanted:
            fd = self._level.fd
            os.rename(self.name, self._wanted, src_dir_fd=fd, dst_dir_fd=fd)
        self.made = False


def link(level: Level, name: str, target: Level, target_name: str) -> bool:
    """Makes a hard link, by whatever has the name; returns whether it was missing."""
    found = target.find(target_name) if target.fd >= 0 else None
    if found is None or stat.S_ISDIR(found.st_mode):
        raise Refused("the file that it is a link to is missing")
    old = level.find(name)
    if old is not None and os.path.samestat(old, found):
        return False
    with Beside(level, name, free=old is None) as beside:
        os.link(
            target_name,
            beside.name,
            src_dir_fd=target.fd,
            dst_dir_fd=level.fd,
            follow_symlinks=False,
        )
        beside.made = True
        beside.rename()
    return True


def reason(error: OSError | Refused | ValueError) -> str:
    """Returns in words why a file was not made."""
    if isinstance(error, FileExistsError):
        return "a file of this name is there already, maybe one that differs in case only"
    return getattr(error, "strerror", None) or str(error)


def _let_in(above: int, name: str, flags: int, rights: int) -> None:
    """Lets this user into a directory or a file of its own that an earlier restore has closed."""
    if os.geteuid() == 0:
        return
    with closing(os.open(name, flags | os.O_PATH, dir_fd=above)) as fd:
        status = os.fstat(fd)
        if status.st_mode & rights != rights and status.st_uid == os.geteuid():
            Path(f"/proc/self/fd/{fd}").chmod(stat.S_IMODE(status.st_mode) | rights)


def confine(directories: Sequence[str | os.PathLike[str]]) -> bool:
    """Lets this thread, and all that it starts from then on, write below some directories only.

    It is a second wall: whatever a manifest says, and whatever mistake is made with it, the kernel
    permits no write elsewhere. It needs Linux 5.13 with Landlock.

    Returns:
        Whether writing is confined now. What is open already can still be written.
    """
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    handled = _CHANGES | sum(bit for since, bit in _SINCE.items() if version >= since)
    attributes = _RULESET.pack(handled)
    size = ctypes.c_size_t(len(attributes))
    ruleset = _libc.syscall(_CREATE_RULESET, attributes, size, 0)
    if ruleset < 0:
        return False
    with ExitStack() as stack:
        stack.callback(os.close, ruleset)
        for path in (*directories, *_OF_PROGRAMS):
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            stack.callback(os.close, fd)
            rule = _BENEATH.pack(_WRITE_FILE if path in _OF_PROGRAMS else handled, fd)
            if _libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0):
                return False
        if _libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0:
            return True
        # Without the right to do so, only a process that gains no rights may.
        _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
        return int(_libc.syscall(_RESTRICT_SELF, ruleset, 0)) == 0
