"""A file that may have changed is read, compared with the last version, and stored.

A file is read as often as it changes meanwhile, three times at most; of what was read before, only
the blocks that changed since are stored again.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fcntl import ioctl
from typing import Final, NamedTuple

from blake3 import blake3

from ntt_backup.snapshot.format.block_map import SUM, add_zeros, differing, read_stretches, sums
from ntt_backup.snapshot.format.entry import (
    FILE,
    MAX_EXTENTS,
    MAX_SUPER_BLOCK,
    MAX_XATTRS,
    Entry,
    Extent,
    times_of,
)
from ntt_backup.snapshot.format.super_blocks import SuperBlockWriter

SMALL: Final = 2 << 20
# The sums of a file's blocks are in memory, and its zeros are hashed: a file that is one hole has
# any size that somebody likes.
_MOST_BLOCKS: Final = 1 << 24
_LARGEST: Final = 64 << 40
# With no more blocks, nor super blocks, a file has no more than MAX_EXTENTS.
_MANY: Final = MAX_EXTENTS // 4
_ATTEMPTS: Final = 3
_PIECE: Final = 1 << 18
# Above the step of the clock that stamps files: a change within the same step is not to be seen.
_STEP_NS: Final = 20_000_000


# FS_IOC_GETFLAGS; and secure deletion, undelete, compress, sync, immutable, append only, no dump,
# no atime, no copy on write.
_GET_FLAGS: Final = 0x80086601
_FLAGS: Final = 0x008000FF


class OldFile(NamedTuple):
    """A file as the last version has it, and the sums of its blocks."""

    entry: Entry
    sums: bytes


@dataclass(slots=True)
class _Reading:
    """Holds the result of one reading of a file.

    Attributes:
        kept: The stretches, as (start, end), where the content is as before.
        new: The extents of all other content.
        ticket: The ticket of the last extent in `new`.
    """

    length: int = 0
    digest: str = ""
    sums: bytes = b""
    kept: list[tuple[int, int]] = field(default_factory=list)
    new: list[Extent] = field(default_factory=list)
    ticket: int = -1

    def keep(self, start: int, end: int) -> None:
        if self.kept and self.kept[-1][1] == start:
            start = self.kept.pop()[0]
        self.kept.append((start, end))


@dataclass(slots=True)
class TakenFile:
    """Holds a file of the new version.

    Attributes:
        ticket: The ticket of the last new extent. `settle` completes the entry once the writer of
            super blocks has settled this ticket.
        changed: Whether the content is not the same as before.
    """

    entry: Entry
    ticket: int
    changed: bool
    _old: list[Extent]
    _readings: list[_Reading]

    @property
    def weight(self) -> int:
        """Returns how many objects it keeps in memory, about."""
        return 1 + len(self._old) + sum(len(one.kept) for one in self._readings)

    def settle(self) -> Entry:
        """Returns the entry with its extents."""
        extents = self._old
        for one in self._readings:
            extents = [*cut(extents, one.kept), *one.new]
            extents.sort()
        self.entry.extents = extents
        return self.entry


def cut(extents: Iterable[Extent], stretches: Sequence[tuple[int, int]]) -> Iterator[Extent]:
    """Yields what extents have within stretches, which are in order as they are."""
    first = 0
    for extent in extents:
        at, last = extent.start, extent.start + extent.length
        while first < len(stretches) and stretches[first][1] <= at:
            first += 1
        one = first
        while one < len(stretches) and stretches[one][0] < last:
            start, end = max(stretches[one][0], at), min(stretches[one][1], last)
            yield extent._replace(start=start, length=end - start, skip=extent.skip + start - at)
            one += 1


@dataclass
class FileReader:
    """Reads files, and stores the content that has changed.

    A block in new files has a size in bytes, or 0: it is chosen by the size of each file. The
    bytes that are read are told as they are counted.
    """

    _writer: SuperBlockWriter
    _key: bytes
    _block: int
    _on_read: Callable[[int], None]

    def __post_init__(self) -> None:
        self._buffer = memoryview(bytearray(max(_PIECE, self._block)))

    def read(
        self, fd: int, path: str, old: OldFile | None
    ) -> tuple[TakenFile, bytes, os.stat_result]:
        """Reads an opened file.

        A file in too many pieces is stored anew as a whole, with larger blocks.

        Returns:
            The file, the sums of its blocks, and its status at the beginning of the last reading.

        Raises:
            OSError: The file cannot be read, or is in too many pieces even so.
        """
        old = old if old is not None and old.entry.kind == FILE else None
        for before, most in ((old, _MOST_BLOCKS), (None, _MANY)):
            new, sums, status = self._read(fd, path, before, most)
            if len(sums) // SUM > _MANY:
                self._writer.flush()
                if len(new.settle().extents) > MAX_EXTENTS:
                    continue
            return new, sums, status
        raise OSError(errno.EFBIG, "it is in too many pieces for a version")

    def _read(
        self, fd: int, path: str, old: OldFile | None, most: int
    ) -> tuple[TakenFile, bytes, os.stat_result]:
        """Reads a file as `read` does, in at most so many blocks unless those stay as large."""
        digest, before = (old.entry.digest, old.sums) if old is not None else ("", b"")
        block = old.entry.block if old is not None else 0
        readings = []
        for attempt in range(1, _ATTEMPTS + 1):
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "it was replaced by something else meanwhile")
            if status.st_size > _LARGEST:
                raise OSError(errno.EFBIG, "it has more than 64 TiB")
            _let_the_clock_pass(status)
            if status.st_size < SMALL:
                one = self._read_small(fd, status.st_size, digest)
                block = 0
            else:
                if block * _MOST_BLOCKS < status.st_size:
                    block, before = self._block_of(status.st_size, most), b""
                self._writer.grow(status.st_size // _MANY)
                one = self._read_blocks(fd, status.st_size, block, before)
            readings.append(one)
            digest, before = one.digest, one.sums
            settled = _state(os.fstat(fd)) == _state(status)
            if settled or attempt == _ATTEMPTS:
                break
        entry = entry_of(path, FILE, status)
        entry.size, entry.digest, entry.block = one.length, one.digest, block
        entry.xattrs = xattrs(fd)
        entry.unsettled = not settled
        changed = old is None or old.entry.digest != one.digest
        extents = old.entry.extents if old is not None else []
        ticket = max(reading.ticket for reading in readings)
        for reading in readings:
            reading.sums = b""
        return TakenFile(entry, ticket, changed, extents, readings), before, status

    def _block_of(self, size: int, most: int) -> int:
        block = self._block
        if not block:
            block = 8 << 10 if size <= 1 << 30 else 16 << 10 if size <= 16 << 30 else 64 << 10
        while block * most < size and block < MAX_SUPER_BLOCK:
            block *= 2
        return block

    def _read_small(self, fd: int, size: int, digest: str) -> _Reading:
        data = b""
        while len(data) < size and (more := os.pread(fd, size - len(data), len(data))):
            data += more
        self._on_read(len(data))
        one = _Reading(len(data), blake3(data).hexdigest())
        if one.digest == digest:
            one.keep(0, len(data))
        elif data.count(0) != len(data):
            one.ticket = self._writer.add(0, data, one.new)
        return one

    def _read_blocks(self, fd: int, size: int, block: int, before: bytes) -> _Reading:
        one, whole, found = _Reading(), blake3(), bytearray()
        if len(self._buffer) < block:
            self._buffer = memoryview(bytearray(block))
        for start, piece in read_stretches(fd, size, block, self._buffer):
            self._on_read(len(piece))
            add_zeros(whole, start - one.length)
            # A hole keeps nothing of what was there before.
            found += bytes((start - one.length) // block * SUM)
            one.length = start
            whole.update(piece)
            new = sums(piece, block, self._key)
            self._compare(one, piece, block, new, before[len(found) : len(found) + len(new)])
            found += new
            one.length += len(piece)
        # Behind the last content is a hole, unless the file has become shorter.
        hole = min(size, os.fstat(fd).st_size) - one.length
        if hole > 0 and one.length % block == 0:
            add_zeros(whole, hole)
            found += bytes(-(-hole // block) * SUM)
            one.length += hole
        one.digest, one.sums = whole.hexdigest(), bytes(found)
        return one

    def _compare(
        self, one: _Reading, piece: memoryview, block: int, new: bytes, old: bytes
    ) -> None:
        """Keeps the blocks of a piece that are as before, and stores the others."""
        at = 0
        for first, end in differing(new, old):
            if at < first:
                one.keep(one.length + at * block, one.length + first * block)
            at = end
            changed = new[first * SUM : end * SUM]
            for begin, stop in differing(changed, bytes(len(changed))):
                start = (first + begin) * block
                data = piece[start : (first + stop) * block]
                one.ticket = self._writer.add(one.length + start, data, one.new)
        if at * SUM < len(new):
            one.keep(one.length + at * block, one.length + len(piece))


def entry_of(path: str, kind: str, status: os.stat_result) -> Entry:
    """Returns the entry of a file, with what `lstat` says."""
    owned = (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
    return Entry(path, kind, *owned, *times_of(status), status.st_ino)


def xattrs(where: int | str) -> dict[str, str]:
    """Returns the extended attributes of a descriptor or an unfollowed path, including its ACLs.

    The result is empty where the file system has no extended attributes.

    Raises:
        OSError: The attributes have more bytes than a manifest has room for.
    """
    follow = isinstance(where, int)
    found = {}
    size = 0
    with suppress(OSError):
        for name in os.listxattr(where, follow_symlinks=follow):
            with suppress(OSError):  # Not for us to see, or gone.
                value = os.getxattr(where, name, follow_symlinks=follow)
                found[name] = b64encode(value).decode("ascii")
                size += len(name) + len(found[name])
            if size > MAX_XATTRS:
                break
    if size > MAX_XATTRS:
        raise OSError(errno.E2BIG, "it has more than 1 MiB of extended attributes")
    return found


def has_chattr_flags(fd: int) -> bool:
    """Returns whether a file has a flag of chattr that somebody has set, such as immutable."""
    flags = array("l", [0])
    try:
        ioctl(fd, _GET_FLAGS, flags)
    except OSError:  # A file system without flags.
        return False
    return bool(flags[0] & _FLAGS)


def _state(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _let_the_clock_pass(status: os.stat_result) -> None:
    """Waits until a change from now on gives the file another time."""
    age = time.time_ns() - status.st_ctime_ns
    if 0 <= age < _STEP_NS:
        time.sleep((_STEP_NS - age) / 1e9)
