"""The directory `snapshots/` has `<set>/<version>/<file>` below the root; files never change.

Each level is opened from the one above, without following links and on one file system, and names
have one form, so nothing outside can be named.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ntt_backup.blobdir.open import closing, names_in, open_below, opened_anew
from ntt_backup.blobdir.syscalls import rename_new, sync_directory
from ntt_backup.receiver.incoming import FileDirectory, Incoming, open_file
from ntt_backup.receiver.open_blob import forget
from ntt_backup.wire.dump_messages import arrival_us
from ntt_backup.wire.file_messages import MAX_SETS, MAX_VERSIONS
from ntt_backup.wire.snapshot_names import is_file, is_set, is_version, parts_of

SNAPSHOTS = "snapshots"

_KEPT_OPEN = 16
_TRIES = 20


class FoundFile(NamedTuple):
    """A file of a snapshot. size: in bytes. arrived_us: when the file got its name, in microseconds
    since 1970.
    """

    name: str
    size: int
    arrived_us: int


class SnapshotDirectory(FileDirectory):
    """Lists, adds, reads and removes files of snapshots. root: the descriptor of the directory
    above.
    """

    def __init__(self, root: int) -> None:
        super().__init__(root, SNAPSHOTS)
        self._opened: OrderedDict[str, int] = OrderedDict()

    def found(self, of_set: str, version: str) -> Iterator[FoundFile]:
        """Yields the files in the order of names; "" for those of all sets or versions."""
        with contextlib.suppress(FileNotFoundError):
            top = self.fd()
            for one in _directories(top, is_set, of_set):
                with contextlib.suppress(FileNotFoundError), self._level(top, one) as versions:
                    for each in _directories(versions, is_version, version):
                        # A version that is removed meanwhile hides none of the others.
                        gone = contextlib.suppress(FileNotFoundError)
                        with gone, self._level(versions, each) as files:
                            yield from _files(files, f"{one}/{each}/")

    def open(self, name: str) -> int:
        """Returns a descriptor, which this object closes. The content is read from the disk."""
        fd = self._opened.get(name)
        if fd is not None:
            self._opened.move_to_end(name)
            return fd
        of_set, version, file = parts_of(name)
        with self._level(self.fd(), of_set) as versions, self._level(versions, version) as files:
            fd = open_file(files, file)
        forget(fd)
        if len(self._opened) == _KEPT_OPEN:
            os.close(self._opened.popitem(last=False)[1])
        self._opened[name] = fd
        return fd

    def name(self, incoming: Incoming, name: str) -> None:
        """Gives a synced file its name, which is durable when this returns. Raises
        FileExistsError.
        """
        of_set, version, file = parts_of(name)
        top = self.fd()
        for _ in range(_TRIES):
            # Again where another session that removes files has taken an empty directory away.
            with contextlib.suppress(FileNotFoundError):
                _make(top, of_set, MAX_SETS)
                with self._level(top, of_set) as versions:
                    _make(versions, version, MAX_VERSIONS)
                    with self._level(versions, version) as files:
                        rename_new(top, incoming.name.encode(), files, file.encode())
                        for fd in (files, versions, top, self.root):
                            sync_directory(fd)
                return
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    def remove(self, names: Iterable[str]) -> int:
        """Removes files, each durably before the next one, and directories that are empty then;
        returns how many files.
        """
        self._close_files()
        count = 0
        for name in names:
            of_set, version, file = parts_of(name)
            with contextlib.suppress(FileNotFoundError):
                with self._level(self.fd(), of_set) as versions:
                    with self._level(versions, version) as files:
                        os.unlink(file, dir_fd=files)
                        sync_directory(files)
                    count += 1
                    with contextlib.suppress(OSError):
                        os.rmdir(version, dir_fd=versions)
                with contextlib.suppress(OSError):
                    os.rmdir(of_set, dir_fd=self.fd())
        return count

    def close(self) -> None:
        self._close_files()
        super().close()

    def _close_files(self) -> None:
        while self._opened:
            os.close(self._opened.popitem()[1])

    def _level(self, above: int, name: str) -> contextlib.AbstractContextManager[int]:
        return closing(open_below(above, name, os.fstat(self.root).st_dev))


def _directories(above: int, fits: Callable[[str], bool], wanted: str) -> list[str]:
    """Returns the directories that have such names, in the order of the names below them."""
    with closing(opened_anew(above)) as fd, os.scandir(fd) as found:
        names = [
            entry.name
            for entry in found
            if fits(entry.name)
            and wanted in ("", entry.name)
            and entry.is_dir(follow_symlinks=False)
        ]
    return sorted(names, key="{}/".format)


def _files(directory: int, before: str) -> Iterator[FoundFile]:
    for name in sorted(filter(is_file, names_in(directory))):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield FoundFile(before + name, status.st_size, arrival_us(status.st_mtime_ns))


def _make(above: int, name: str, most: int) -> None:
    """Makes a directory where it is missing, and fewer than most are there."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(name, dir_fd=above, follow_symlinks=False)
        return
    if sum(not one.startswith(".") for one in names_in(above)) >= most:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), name)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=above)
