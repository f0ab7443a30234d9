"""The directory `pgdump/` below the root has dumps of the catalog, records, one on its way.

A dump gets its name as `incoming` says. The record, JSON that lies beside it, goes first: a record
without its dump is told from a good one, a dump without a record is not.

A client may be hostile, and have seen to it that the newest dumps are worthless. So which dumps it
cannot remove is decided by when they came in, which no client can choose (see `_irreplaceable`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ntt_backup.blobdir.open import closing, names_in
from ntt_backup.blobdir.staging import write_all
from ntt_backup.blobdir.syscalls import rename_new, sync_directory
from ntt_backup.receiver.incoming import NEW, FileDirectory, Incoming, open_file
from ntt_backup.wire.dump_messages import (
    MAX_DUMPS,
    MAX_RECORD,
    arrival_us,
    is_name,
    read_record,
)

PGDUMP = "pgdump"

_RECORD = ".json"
_DAY_US = 86_400_000_000
# Of each catalog stay so many of the newest dumps, and the first of each of so many days.
_NEWEST = 2
_DAYS = 7


class FoundDump(NamedTuple):
    """A dump with its record. size: in bytes; None where only the record exists. arrived_us: when
    the dump got its name, in microseconds since 1970.
    """

    name: str
    size: int | None
    arrived_us: int
    record: bytes


class DumpDirectory(FileDirectory):
    """Lists, adds and removes dumps. root: the descriptor of the directory above."""

    def __init__(self, root: int) -> None:
        super().__init__(root, PGDUMP)

    def found(self) -> Iterator[FoundDump]:
        """Yields the dumps that have a record; none where the directory is missing."""
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(names_in(self.fd())):
                if name.endswith(_RECORD) and is_name(name[: -len(_RECORD)]):
                    with contextlib.suppress(OSError):
                        yield self._found(name[: -len(_RECORD)])

    def open(self, name: str) -> int:
        """Returns a descriptor for the caller to close."""
        return open_file(self.fd(), name)

    def name(self, incoming: Incoming, name: str, record: bytes) -> None:
        """Gives a synced dump its name, which is durable when this returns."""
        directory = self.fd()
        if sum(1 for _ in self.found()) >= MAX_DUMPS:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), PGDUMP)
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=directory, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        incoming.sync()  # Its time is that of the name: the client chooses how long it waits.
        incoming.names.append(incoming.name + _RECORD)
        with closing(os.open(incoming.names[-1], NEW, 0o600, dir_fd=directory)) as fd:
            write_all(fd, memoryview(record + b"\n"))
            os.fsync(fd)
        for end in (_RECORD, ""):
            old, new = f"{incoming.name}{end}".encode(), f"{name}{end}".encode()
            rename_new(directory, old, directory, new)
        sync_directory(directory)
        sync_directory(self.root)  # The directory itself may be new.

    def remove(self, names: Iterable[str], any_of_them: bool) -> int:
        """Removes dumps with their records, in this order, and returns how many. A dump without a
        record stays.

        any_of_them: also those that are `_irreplaceable`.
        """
        found = list(self.found())
        stay = set() if any_of_them else _irreplaceable(found)
        known = {one.name for one in found} - stay
        removed = [name for name in dict.fromkeys(names) if name in known]
        for name in removed:
            for end in ("", _RECORD):
                with contextlib.suppress(FileNotFoundError):  # Another session may remove it, too.
                    os.unlink(name + end, dir_fd=self.fd())
        return len(removed)

    def _found(self, name: str) -> FoundDump:
        with closing(self.open(name + _RECORD)) as fd:
            record = os.read(fd, MAX_RECORD + 1).rstrip(b"\n")
        size, arrived_us = None, 0
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=self.fd(), follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                size, arrived_us = status.st_size, arrival_us(status.st_mtime_ns)
        return FoundDump(name, size, arrived_us, record if len(record) <= MAX_RECORD else b"")


def _irreplaceable(found: Iterable[FoundDump]) -> set[str]:
    """Returns the dumps that a client without `replace` cannot remove: of each catalog the newest
    whole ones, and the first one of each of the last days that have one; and what those need, as
    the increments of a series do.

    So the dump that was the newest yesterday cannot be removed today, whatever came after it.
    Records that cannot be read belong to somebody else.
    """
    stay = set()
    bases: dict[str, object] = {}
    catalogs: dict[str, list[tuple[int, str]]] = {}
    for one in found:
        record = read_record(one.record)
        bases[one.name] = record.get("base")
        if not record:
            stay.add(one.name)
        elif one.size is not None and record.get("bytes") == one.size:
            catalog = repr([record.get("target"), record.get("database")])
            catalogs.setdefault(catalog, []).append((one.arrived_us, one.name))
    for whole in map(sorted, catalogs.values()):
        first: dict[int, str] = {}
        for arrived_us, name in whole:
            first.setdefault(arrived_us // _DAY_US, name)
        stay.update([*first.values()][-_DAYS:], (name for _, name in whole[-_NEWEST:]))
    needed: list[object] = list(stay)
    while needed:
        base = bases.get(str(needed.pop()))
        if isinstance(base, str) and base in bases and base not in stay:
            stay.add(base)
            needed.append(base)
    return stay
