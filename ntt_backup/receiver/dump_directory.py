"""The directory `pgdump/` below the root: dumps of the catalog, their records, and one on its way.

All is reached through one descriptor and by names of one form, so nothing outside can be named. A
dump is written as `.incoming-<token>` and gets its name when it is on stable storage. The record,
JSON that lies beside it, goes first: a record without its dump is told from a good one, a dump
without a record is not.

A client may be hostile, and have seen to it that the newest dumps are worthless. So which dumps it
cannot remove is decided by when they came in, which no client can choose (see `_irreplaceable`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ntt_backup.blobdir.open import FILE, closing, open_below
from ntt_backup.blobdir.staging import write_all
from ntt_backup.blobdir.syscalls import rename_new
from ntt_backup.receiver.open_blob import forget
from ntt_backup.wire.dump_messages import MAX_DUMPS, MAX_RECORD, is_name, read_record

PGDUMP = "pgdump"

_RECORD = ".json"
_INCOMING = ".incoming-"
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_STALE_SECONDS = 3600
_DAY_SECONDS = 86400
# Of each catalog stay so many of the newest dumps, and the first of each of so many days.
_NEWEST = 2
_DAYS = 7


class Found(NamedTuple):
    """A dump with its record. size: None where there is only the record. arrived: last change."""

    name: str
    size: int | None
    arrived: float
    record: bytes


class DumpDirectory:
    """Lists, adds and removes dumps. root: the descriptor of the directory above. Methods raise
    OSError, and Misplaced where `pgdump/` is a symlink, no directory, or on another file system.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._fd = -1
        self._made = False

    def found(self) -> Iterator[Found]:
        """Yields the dumps that have a record; none where the directory is missing."""
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._open())):
                if name.endswith(_RECORD) and is_name(name[: -len(_RECORD)]):
                    with contextlib.suppress(OSError):
                        yield self._found(name[: -len(_RECORD)])

    def open(self, name: str) -> int:
        """Returns a descriptor for the caller to close."""
        with contextlib.ExitStack() as otherwise:
            fd = os.open(name, FILE, dir_fd=self._open())
            otherwise.callback(os.close, fd)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
            otherwise.pop_all()
        return fd

    def begin(self) -> Incoming:
        """Returns a new dump, without a name. Removes old dumps without a name: their sessions were
        killed, since a dump that still grows was changed lately.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir(PGDUMP, 0o700, dir_fd=self._root)
            self._made = True
        self._let_go()  # Another session may have removed, as its own, the one that is open.
        directory = self._open()
        for name in os.listdir(directory):
            if name.startswith(_INCOMING):
                with contextlib.suppress(OSError):
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    if status.st_mtime < time.time() - _STALE_SECONDS:
                        os.unlink(name, dir_fd=directory)
        return Incoming(directory)

    def name(self, incoming: Incoming, name: str, record: bytes) -> None:
        """Gives a synced dump its name, which is durable when this returns."""
        directory = self._open()
        if sum(1 for _ in self.found()) >= MAX_DUMPS:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), PGDUMP)
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=directory, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        with closing(os.open(incoming.name + _RECORD, _NEW, 0o600, dir_fd=directory)) as fd:
            write_all(fd, memoryview(record + b"\n"))
            os.fsync(fd)
        for end in (_RECORD, ""):
            old, new = f"{incoming.name}{end}".encode(), f"{name}{end}".encode()
            rename_new(directory, old, directory, new)
        os.fsync(directory)
        os.fsync(self._root)  # The directory itself may be new.

    def remove(self, names: Iterable[str], any_of_them: bool) -> int:
        """Removes dumps with their records, and returns how many. A dump without a record stays.

        any_of_them: also those that are `_irreplaceable`.
        """
        found = list(self.found())
        stay = set() if any_of_them else _irreplaceable(found)
        removed = {one.name for one in found}.intersection(names) - stay
        for name in removed:
            for end in ("", _RECORD):
                with contextlib.suppress(FileNotFoundError):  # Another session may remove it, too.
                    os.unlink(name + end, dir_fd=self._fd)
        return len(removed)

    def close(self) -> None:
        """Closes the directory, and removes it if it was made for nothing."""
        self._let_go()
        if self._made:
            with contextlib.suppress(OSError):
                os.rmdir(PGDUMP, dir_fd=self._root)

    def _let_go(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _open(self) -> int:
        """Returns the directory, which is kept open."""
        if self._fd < 0:
            self._fd = open_below(self._root, PGDUMP, os.fstat(self._root).st_dev)
        return self._fd

    def _found(self, name: str) -> Found:
        with closing(self.open(name + _RECORD)) as fd:
            record = os.read(fd, MAX_RECORD + 1).rstrip(b"\n")
        size, arrived = None, 0.0
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                size, arrived = status.st_size, status.st_mtime
        return Found(name, size, arrived, record if len(record) <= MAX_RECORD else b"")


class Incoming:
    """A dump that is being received, under a temporary name. Methods raise OSError."""

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self.name = _INCOMING + os.urandom(4).hex()
        self._fd = os.open(self.name, _NEW, 0o600, dir_fd=directory)
        self.stopped = False

    def write(self, data: memoryview) -> None:
        write_all(self._fd, memoryview(data))

    def sync(self) -> tuple[int, bytes]:
        """Makes all of it durable; returns its size and the SHA-256 of what is on the disk. Ends
        early when `stopped` is set.
        """
        os.fsync(self._fd)
        forget(self._fd)
        digest, size = hashlib.sha256(), 0
        while not self.stopped and (data := os.pread(self._fd, 1 << 20, size)):
            digest.update(data)
            size += len(data)
        return size, digest.digest()

    def remove(self) -> None:
        """Closes the dump, and removes it where it has got no name."""
        for name in (self.name, self.name + _RECORD):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._directory)
        os.close(self._fd)


def _irreplaceable(found: Iterable[Found]) -> set[str]:
    """Returns the dumps that a client without `replace` cannot remove: of each catalog the newest
    whole ones, and the first one of each of the last days that have one.

    So the dump that was the newest yesterday cannot be removed today, whatever came after it.
    Records that cannot be read belong to somebody else.
    """
    stay = set()
    catalogs: dict[str, list[tuple[float, str]]] = {}
    for one in found:
        record = read_record(one.record)
        if not record:
            stay.add(one.name)
        elif one.size is not None and record.get("bytes") == one.size:
            catalog = repr([record.get("target"), record.get("database")])
            catalogs.setdefault(catalog, []).append((one.arrived, one.name))
    for whole in map(sorted, catalogs.values()):
        first: dict[float, str] = {}
        for arrived, name in whole:
            first.setdefault(arrived // _DAY_SECONDS, name)
        stay.update([*first.values()][-_DAYS:], (name for _, name in whole[-_NEWEST:]))
    return stay
