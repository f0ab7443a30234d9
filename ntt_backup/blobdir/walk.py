"""A store's directories, reached by descriptors and without following a link.

The obvious way is to join paths and let the kernel walk them. It follows whatever symbolic link
stands on the way, hangs on opening a FIFO, changes access times, and walks the whole path again for
each of many millions of files. A `Tree` opens the root once and goes down by `openat`, one level at
a time. Only the root itself may be a link. `aa` and `bb` may not: whoever can write a link there
could have any file of this machine sent. A prefix on another disk is a bind mount.

Constant memory: the subdirectories of one `aa` are the most that is held at once.
"""

from __future__ import annotations

import errno
import os
import re
from collections import OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from ntt_backup.errors import SourceError
from ntt_backup.model import is_blobid

CACHED_DIRECTORIES = 128

_PREFIX = re.compile(r"[0-9a-f]{2}")
# O_NONBLOCK: opening a FIFO or a device that stands where a blob should must not wait.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_DIRECTORY = _FILE | os.O_DIRECTORY
# What the kernel says when a file system is away: about the store, never about one blob.
_AWAY = {
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ECONNABORTED,
    errno.ESHUTDOWN,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENODEV,
}
# What it says when this process or this machine has run dry.
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class StrayKind(StrEnum):
    """Why a directory entry is no blob. Operators read the words."""

    NOT_A_BLOBID = "not-a-blobid"
    WRONG_DIRECTORY = "wrong-directory"
    SYMLINK = "symlink"
    NOT_A_FILE = "not-a-file"
    UNREADABLE = "unreadable"


def is_prefix(name: str) -> bool:
    """Whether a directory of a store may have that name."""
    return _PREFIX.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Stray:
    """An entry that is no blob. path is relative to the root; what is not UTF-8 shows as \\xNN."""

    path: str
    kind: StrayKind
    detail: str = ""


class Tree:
    """One opened root. Directories go by their path below it: "" (the root), "aa", "aa/bb".

    At most CACHED_DIRECTORIES descriptors are kept. Every method may raise SourceError: when the
    file system as a whole is away, or this process has no descriptors or memory left.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: OrderedDict[str, int] = OrderedDict()
        try:
            self._fd = _open(str(root), _DIRECTORY & ~os.O_NOFOLLOW, None)
        except OSError as error:
            raise unusable(root, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for fd in (*self._open.values(), self._fd):
            os.close(fd)
        self._open.clear()

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the root: whether a path still leads to it."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def open(self, path: str) -> int:
        """A descriptor of whatever lies at path, for the caller to close.

        Raises OSError whose `filename` is the part of path that gave it.
        """
        return self._below(path, _FILE)

    def lstat(self, path: str) -> os.stat_result:
        """What lies at path, a link itself and not where it leads. Raises OSError."""
        parent, _, name = path.rpartition("/")
        directory = self._directory(parent)
        try:
            return os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            raise self._about(path, error) from None

    def subdirectories(self, parent: str) -> tuple[list[str], list[Stray]]:
        """The directories with two-digit names in "" or "aa", sorted, and of everything else there
        one of each kind, one with such a name where there is one.
        """
        found: list[str] = []
        strays: dict[StrayKind, Stray] = {}
        for entry in self._level(parent):
            if isinstance(entry, Stray):
                if entry.kind not in strays or is_prefix(entry.path.rpartition("/")[2]):
                    strays[entry.kind] = entry
            else:
                found.append(entry)
        return sorted(found), list(strays.values())

    def directories(self, after: str | None = None) -> Iterator[str | Stray]:
        """Every "aa/bb" that sorts after the given one, in order, and the strays met on the way.

        A walk that goes on meets those of the root, and of the `aa` where it goes on, again.
        """
        prefixes = yield from _strays_first(self._level(""))
        for prefix in prefixes:
            if after is None or prefix >= after[:2]:
                directories = yield from _strays_first(self._level(prefix))
                yield from (name for name in directories if after is None or name > after)

    def entries(self, directory: str) -> Iterator[str | Stray]:
        """The blobids in "aa/bb" in no order, and the strays among them, streamed."""
        prefix = directory.replace("/", "")
        try:
            with os.scandir(self._directory(directory)) as listing:
                for entry in listing:
                    if not is_blobid(entry.name) or not entry.is_file(follow_symlinks=False):
                        yield _stray(directory, entry)
                    elif not entry.name.startswith(prefix):
                        yield Stray(f"{directory}/{entry.name}", StrayKind.WRONG_DIRECTORY)
                    else:
                        yield entry.name
        except OSError as error:
            yield self._unreadable(directory, error)

    def _level(self, parent: str) -> Iterator[str | Stray]:
        """The directories with two-digit names in "" or "aa" in no order, and the strays among
        them, streamed.
        """
        try:
            with os.scandir(self._directory(parent)) as listing:
                for entry in listing:
                    if _PREFIX.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                        yield f"{parent}/{entry.name}" if parent else entry.name
                    else:
                        yield _stray(parent, entry)
        except OSError as error:
            yield self._unreadable(parent, error)

    def _directory(self, name: str) -> int:
        """A descriptor that the tree keeps."""
        if not name:
            return self._fd
        fd = self._open.get(name)
        if fd is not None:
            self._open.move_to_end(name)
            return fd
        fd = self._open[name] = self._below(name, _DIRECTORY)
        if len(self._open) > CACHED_DIRECTORIES:
            os.close(self._open.popitem(last=False)[1])
        return fd

    def _below(self, path: str, flags: int) -> int:
        parent, _, name = path.rpartition("/")
        directory = self._directory(parent)
        try:
            return _open(name, flags, directory)
        except OSError as error:
            raise self._about(path, error) from None

    def _about(self, path: str, error: OSError) -> Exception:
        """The same error with the path below the root, or the store's, if it is about that."""
        if concerns_store(error):
            return unusable(self.root, error)
        error.filename = path
        return error

    def _unreadable(self, path: str, error: OSError) -> Stray:
        """The stray for a directory that cannot be read. For the root, that is the store."""
        if not path or concerns_store(error):
            raise unusable(self.root, error) from error
        return Stray(path, StrayKind.UNREADABLE, error.strerror or str(error))


def _strays_first(level: Iterator[str | Stray]) -> Generator[Stray, None, list[str]]:
    """The strays as they come; at the end what is none, sorted."""
    found: list[str] = []
    for entry in level:
        if isinstance(entry, Stray):
            yield entry
        else:
            found.append(entry)
    return sorted(found)


def concerns_store(error: OSError) -> bool:
    """Whether an error says that the file system or this process is in trouble, not one entry."""
    return error.errno in _AWAY or error.errno in _EXHAUSTED


def unusable(root: Path, error: OSError) -> SourceError:
    """What a failing store says, and what to do about it."""
    hints = {
        errno.ENOENT: "mend source.root, or mount the disk that holds it",
        errno.ENOTDIR: "source.root is the directory that holds aa/bb/<blobid>",
        errno.EACCES: f"let uid {os.geteuid()} read it, or run as a user that can",
        errno.EMFILE: "raise the limit on open files (LimitNOFILE= in the unit, or ulimit -n)",
        errno.ENFILE: "raise the machine's limit on open files (sysctl fs.file-max)",
        errno.ENOMEM: "the machine has no memory left: use fewer workers, or end other programs",
    }
    return SourceError(
        f"cannot read the store {root}",
        detail=error.strerror or str(error),
        hint=hints.get(error.errno or 0, "look at its disk or mount, then start again"),
    )


def _open(path: str, flags: int, directory: int | None) -> int:
    """Opens without touching the access time where that is permitted: to the owner, and to root."""
    try:
        return os.open(path, flags | os.O_NOATIME, dir_fd=directory)
    except PermissionError as error:
        if error.errno != errno.EPERM:
            raise
    return os.open(path, flags, dir_fd=directory)


def _stray(parent: str, entry: os.DirEntry[str]) -> Stray:
    path = f"{parent}/{entry.name}" if parent else entry.name
    printable = os.fsencode(path).decode("utf-8", "backslashreplace")
    if entry.is_symlink():
        return Stray(printable, StrayKind.SYMLINK)
    if not entry.is_file(follow_symlinks=False):
        return Stray(printable, StrayKind.NOT_A_FILE)
    if is_blobid(entry.name):
        return Stray(printable, StrayKind.WRONG_DIRECTORY)
    return Stray(printable, StrayKind.NOT_A_BLOBID)
