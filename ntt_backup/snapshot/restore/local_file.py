"""A file below the destination: compared with what a version has, and written or patched."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from blake3 import blake3

from ntt_backup.blobdir.files import closing, write_all
from ntt_backup.snapshot.format.block_map import SUM, add_zeros, differing, read_stretches, sums
from ntt_backup.snapshot.format.entry import Entry, Extent
from ntt_backup.snapshot.restore.attributes import Attributes
from ntt_backup.snapshot.restore.fetch import Piece
from ntt_backup.snapshot.restore.tree import Beside, Level, Refused, open_old

_PIECE: Final = 1 << 20
_ZEROS: Final = memoryview(bytes(_PIECE))
_FICLONE: Final = 0x40049409
_PUNCH_HOLE_KEEP_SIZE: Final = 3
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

WRONG: Final = "its content is not that of the version"
MISSING: Final = "a super block of it is missing or damaged"

Run = tuple[int, int]


class ComparedFile(NamedTuple):
    """Holds the result of a comparison of a file in the destination with the version.

    Attributes:
        same: Whether the content is that of the version.
        runs: The bytes that differ, as (start, end); None where they are not known.
    """

    same: bool
    runs: Sequence[Run] | None


def compare(fd: int, entry: Entry, wanted: bytes, key: bytes) -> ComparedFile:
    """Compares a file of the destination with the version, and with those sums that are known.

    A file that the disk cannot read counts as different.
    """
    try:
        size = os.fstat(fd).st_size
        if not wanted:
            return ComparedFile(size == entry.size and _digest(fd) == entry.digest, None)
        found = bytearray()
        buffer = memoryview(bytearray(max(_PIECE, entry.block)))
        end = min(size, entry.size)
        for at, piece in read_stretches(fd, end, entry.block, buffer):
            found += bytes(at // entry.block * SUM - len(found))  # A hole.
            found += sums(piece, entry.block, key)
        found += bytes(max(0, -(-end // entry.block) * SUM - len(found)))
        blocks = differing(wanted, bytes(found))
        runs = [(first * entry.block, min(end * entry.block, entry.size)) for first, end in blocks]
        if (known := len(wanted) // SUM * entry.block) < entry.size:
            runs.append((known, entry.size))
        if runs or size != entry.size:
            return ComparedFile(False, runs)
        # Only the BLAKE3 of the whole proves that nothing differs.
        return ComparedFile(True, ()) if _digest(fd) == entry.digest else ComparedFile(False, None)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return ComparedFile(False, None)


def within(extents: Iterable[Extent], runs: Sequence[Run]) -> list[Extent]:
    """Returns the extents that have some of the bytes of runs."""
    chosen = []
    left = iter(runs)
    run = next(left, None)
    for extent in extents:
        while run is not None and run[1] <= extent.start:
            run = next(left, None)
        if run is None:
            break
        if run[0] < extent.start + extent.length:
            chosen.append(extent)
    return chosen


def _outside(runs: Sequence[Run], extents: Sequence[Extent]) -> Iterator[Run]:
    """Yields the bytes of runs that no extent has: they are zeros."""
    at = 0
    for start, end in runs:
        while at < len(extents) and extents[at].start + extents[at].length <= start:
            at += 1
        for extent in extents[at:]:
            if extent.start >= end:
                break
            if start < extent.start:
                yield start, extent.start
            start = max(start, extent.start + extent.length)
        if start < end:
            yield start, end


class FileWriter:
    """Writes a file in parts, beside any existing file of the same name.

    Args:
        runs: The bytes that differ in the existing file, as (start, end): a copy of that file is
            patched. None where the file is written as a whole.
        in_place: Whether the existing file itself is patched instead of a copy.

    Raises:
        Refused: The file cannot be made.
        OSError: A system call fails.
    """

    def __init__(
        self,
        level: Level,
        name: str,
        entry: Entry,
        *,
        free: bool,
        runs: Sequence[Run] | None,
        in_place: bool,
        verify: bool,
    ) -> None:
        self._entry = entry
        self._verify = verify
        self._hasher = blake3() if runs is None else None
        self._at = 0
        self._damaged = False
        self._beside: Beside | None = None
        self._fd = -1
        try:
            if runs is not None:
                old = open_old(level, name, os.O_RDWR if in_place else os.O_RDONLY)
                # A file that has another name is not the only one that would change.
                if in_place and os.fstat(old).st_nlink == 1:
                    self._fd = old
                else:
                    with closing(old):
                        self._open_beside(level, name, free=False)
                        _copy(old, self._fd)
                os.ftruncate(self._fd, entry.size)
                for start, end in _outside(runs, entry.extents):
                    _clear(self._fd, start, end)
            else:
                self._open_beside(level, name, free=free)
        except BaseException:
            self.close()
            raise

    def _open_beside(self, level: Level, name: str, *, free: bool) -> None:
        self._beside = Beside(level, name, free=free)
        self._fd = self._beside.open()

    def close(self) -> None:
        """Removes what is not finished, but for what was changed in place."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._beside is not None:
            self._beside.remove()

    def add(self, pieces: Iterable[Piece]) -> int:
        """Writes content, in the order of the file; returns its bytes."""
        written = 0
        for start, data, whole in pieces:
            if not whole:
                self._damaged = True
            if self._damaged:
                continue
            if self._hasher is not None and self._verify:
                self._hash_zeros(start)
                self._hasher.update(data)
            os.lseek(self._fd, start, os.SEEK_SET)
            write_all(self._fd, data)
            self._at = start + len(data)
            written += len(data)
        return written

    def finish(self, attributes: Attributes) -> None:
        """Compares the whole with the version, and gives it its name."""
        entry = self._entry
        if self._damaged:
            raise Refused(MISSING)
        if self._hasher is not None:
            if self._at < entry.size:
                os.ftruncate(self._fd, entry.size)
            if self._verify:
                self._hash_zeros(entry.size)
                digest = self._hasher.hexdigest()
        else:
            digest = _digest(self._fd)
        if (self._verify or self._hasher is None) and digest != entry.digest:
            in_place = ": it was changed in place, and is left so"
            raise Refused(WRONG + (in_place if self._beside is None else ""))
        if self._beside is None:
            # Where no block is new, xfs has nothing to log, and syncfs does not flush the disk.
            os.fsync(self._fd)
        attributes.set(self._fd, entry)
        if self._beside is not None:
            self._beside.rename()

    def _hash_zeros(self, end: int) -> None:
        assert self._hasher is not None
        add_zeros(self._hasher, end - self._at)
        self._at = end


def _copy(old: int, new: int) -> None:
    """Makes new a copy of old, which shares its blocks where the file system can do that."""
    with suppress(OSError):
        fcntl.ioctl(new, _FICLONE, old)
        return
    size = os.fstat(old).st_size
    os.ftruncate(new, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(old, at, os.SEEK_DATA)
        except OSError:  # ENXIO: behind the last content.
            return
        end = os.lseek(old, at, os.SEEK_HOLE)
        while at < end:
            try:
                count = os.copy_file_range(old, new, end - at, at, at)
            except OSError:
                count = os.pwrite(new, os.pread(old, min(_PIECE, end - at), at), at)
            if not count:
                return
            at += count


def _clear(fd: int, start: int, end: int) -> None:
    """Makes bytes of a file zeros: a hole where the file system has those."""
    if _fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, start, end - start) == 0:
        return
    while start < end:
        start += os.pwrite(fd, _ZEROS[: end - start], start)


def _digest(fd: int) -> str:
    hasher = blake3()
    end, size = 0, os.fstat(fd).st_size
    for at, piece in read_stretches(fd, size, 1, memoryview(bytearray(_PIECE))):
        add_zeros(hasher, at - end)
        hasher.update(piece)
        end = at + len(piece)
    add_zeros(hasher, size - end)
    return hasher.hexdigest()
