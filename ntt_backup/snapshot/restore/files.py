"""Restores files of a version: compares what is there, fetches what differs, and writes it.

Files come in the order of the manifest. Hard links, and what directories are given, come last, once
all files are there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from blake3 import blake3

from ntt_backup.blobdir.descriptors import closing, write_all
from ntt_backup.filestore.contract import ReadableStore
from ntt_backup.formatting import many, printable
from ntt_backup.process.durable import sync_below
from ntt_backup.snapshot.format.block_map import (
    SUM,
    MapReader,
    add_zeros,
    differing,
    read_stretches,
    stretches,
    sums,
)
from ntt_backup.snapshot.format.entry import (
    DIRECTORY,
    FIFO,
    FILE,
    HARD_LINK,
    SYMLINK,
    Entry,
    Extent,
)
from ntt_backup.snapshot.format.manifest import ManifestReader
from ntt_backup.snapshot.patterns import PathChoice
from ntt_backup.snapshot.restore.attributes import Attributes
from ntt_backup.snapshot.restore.fetch import Fetcher, Piece
from ntt_backup.snapshot.restore.tree import (
    OF_ALL,
    Beside,
    DestinationTree,
    Level,
    Refused,
    link,
    make,
    open_old,
    reason,
    split,
)

if TYPE_CHECKING:
    from ntt_backup.name_hash import NewNameHasher

_STEP_SECONDS: Final = 0.25
# Files that one of several processes restores in a row.
_RUN: Final = 4096
# Packs that could not be read; the files that needed them are told besides.
_LOST_SHOWN: Final = 20
_LEFT_OUT: Final = (
    "{} that this user may not open cannot be made durable on this file system: run `sync`"
    " here, and run the command again to compare their content"
)


_PIECE: Final = 1 << 20
_ZEROS: Final = memoryview(bytes(_PIECE))
_FICLONE: Final = 0x40049409
_PUNCH_HOLE_KEEP_SIZE: Final = 3
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

WRONG: Final = "its content is not that of the version"
MISSING: Final = "a super block of it is missing or damaged"

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """How files are restored.

    Attributes:
        delta: Files that are there are hashed, and only what differs is fetched.
        in_place: What differs is written into the files themselves.
        verify: New files are compared with their BLAKE3; what a delta made always is.
        privileges: Files get what others' rights come from, see `Attributes`.
        doubt: No file is taken for right because of its size and time, see `Unfinished`.
    """

    delta: bool = False
    in_place: bool = False
    verify: bool = True
    privileges: bool = True
    doubt: bool = False


@dataclass(slots=True)
class RestoreStep:
    """What was done since the last step, see `version.RestoredVersion`.

    Attributes:
        passed: Bytes of all files that are settled, one way or the other.
        durable: Whether all that was restored is on the disk, where this is the last step.
    """

    files: int = 0
    kept: int = 0
    bytes: int = 0
    fetched: int = 0
    passed: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    durable: bool = True

    def problem(self, path: str, error: OSError | Refused | ValueError) -> None:
        """Adds a file that was not restored. Raises the error where it is about more than that."""
        if isinstance(error, OSError) and error.errno in OF_ALL:
            raise OSError(error.errno, f"{error.strerror}: {printable(path)}") from error
        self.problems.append((path, reason(error)))


class _Item(NamedTuple):
    """A file to be written.

    Attributes:
        entry: The file.
        free: Whether nothing has its name.
        runs: The bytes that differ in the file that is there; None where all of it is written.
    """

    entry: Entry
    free: bool = True
    runs: Sequence[Run] | None = None


@dataclass
class VersionRestorer:
    """Restores the chosen files of a version, or one part of several: its number, and theirs.

    The descriptor of the destination stays the caller's.
    """

    _repository: ReadableStore
    _manifest: ManifestReader
    _map: MapReader | None
    _root: int
    _options: RestoreOptions
    _choice: PathChoice | None
    _part: tuple[int, int]

    def __post_init__(self) -> None:
        self._attributes = Attributes(privileges=self._options.privileges)
        self._fetcher: Fetcher[_Item] = Fetcher(self._repository, self._manifest.header)
        self._seen = DestinationTree(self._root, make=False)
        self._tree = DestinationTree(self._root, make=True)
        self._step = RestoreStep()
        self._fetched = 0
        self._writer: _FileWriter | None = None
        # Of the file that is written.
        self._passed = 0
        # Of the last file of several parts, whose other parts are passed over.
        self._failed: Entry | None = None

    def run(self) -> Iterator[RestoreStep]:
        """Restores all of it, step by step. Raises OSError for what is about more than a file."""
        due = time.monotonic() + _STEP_SECONDS
        try:
            for item, pieces, last in self._fetcher.read(self._items()):
                entry = item.entry
                try:
                    if entry is not self._failed:
                        above, name = split(entry.path)
                        self._write(self._tree.enter(above), name, item, pieces, last=last)
                except (OSError, Refused, ValueError) as error:
                    self._end_writing()
                    self._step.problem(entry.path, error)
                    self._settle(entry)
                    self._failed = entry
                if time.monotonic() > due:
                    yield self._take_step()
                    due = time.monotonic() + _STEP_SECONDS
        finally:
            self._end_writing()
            self._tree.close()
            self._seen.close()
        yield self._take_step()

    def _take_step(self) -> RestoreStep:
        step, self._step = self._step, RestoreStep()
        lost = sorted(self._fetcher.lost.values())
        step.notes = [*sorted(self._attributes.notes), *lost[:_LOST_SHOWN]]
        step.fetched = self._fetcher.fetched - self._fetched
        self._fetched = self._fetcher.fetched
        return step

    # --- what differs -----------------------------------------------------------------------------

    def _items(self) -> Iterator[tuple[_Item, Sequence[Extent]]]:
        """Yields the files that are not there, with the extents of them that are fetched."""
        number, parts = self._part
        for turn, entry in enumerate(self._manifest.entries()):
            wanted = (
                turn // _RUN % parts == number
                and entry.kind not in (DIRECTORY, HARD_LINK)
                and (self._choice is None or self._choice.has(entry.path))
            )
            place = self._find(entry.path) if wanted else None
            sums = b""
            if self._map is not None and entry.block:
                size = place[2].st_size if place is not None and place[2] is not None else 0
                sums = self._map.read(entry.blocks_of(size), entry.blocks)
            if place is None:
                continue
            try:
                item = self._compare(entry, *place, sums)
            except (OSError, Refused, ValueError) as error:
                self._step.problem(entry.path, error)
                continue
            if item is None:
                self._step.kept += 1
                self._step.passed += entry.size
            elif item.runs is None:
                yield item, entry.extents
            else:
                yield item, _within(entry.extents, item.runs)

    def _find(self, path: str) -> tuple[Level, str, os.stat_result | None] | None:
        """Returns a place, and what is there; None where the path leads to no place."""
        try:
            above, name = split(path)
            level = self._seen.enter(above)
            return level, name, level.find(name)
        except (OSError, Refused, ValueError) as error:
            self._step.problem(path, error)
            return None

    def _compare(
        self, entry: Entry, level: Level, name: str, found: os.stat_result | None, sums: bytes
    ) -> _Item | None:
        """Returns how a file is written; None where the file that is there stays."""
        if found is None:
            return _Item(entry)
        kind = stat.S_IFMT(found.st_mode)
        attributes, options = self._attributes, self._options
        if entry.kind == SYMLINK and kind == stat.S_IFLNK:
            if os.readlink(name, dir_fd=level.fd) == entry.target:
                attributes.set_unopened(level.fd, name, entry)
                return None
        elif entry.kind == FIFO and kind == stat.S_IFIFO:
            if attributes.are(entry, found, level.fd, name):
                return None
        elif entry.kind == FILE and kind == stat.S_IFREG:
            right = found.st_size == entry.size
            hashed = options.delta or options.doubt
            taken_for_same = right and found.st_mtime_ns == entry.mtime and not hashed
            if taken_for_same and attributes.are(entry, found, level.fd, name):
                return None
            if right or sums:
                with closing(open_old(level, name)) as fd:
                    same, runs = taken_for_same, None
                    if not same:
                        key = bytes.fromhex(self._manifest.header.key)
                        same, runs = _compare_content(fd, entry, sums, key)
                    if not same:
                        return _Item(entry, False, runs)
                    attributes.set(fd, entry)
                    return None
        return _Item(entry, False)

    # --- what is written --------------------------------------------------------------------------

    def _write(
        self, level: Level, name: str, item: _Item, pieces: Sequence[Piece], *, last: bool
    ) -> None:
        entry = item.entry
        if entry.kind in (SYMLINK, FIFO):
            make(level, entry, name, self._attributes)
        else:
            if self._writer is None:
                self._writer = _FileWriter(level, name, item, self._options)
            written = self._writer.add(pieces)
            self._step.bytes += written
            self._pass(written)
            if not last:
                return
            self._writer.finish(self._attributes)
            self._end_writing()
        self._step.files += 1
        self._settle(entry)

    def _end_writing(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _settle(self, entry: Entry) -> None:
        self._pass(entry.size - self._passed)
        self._passed = 0

    def _pass(self, count: int) -> None:
        self._passed += count
        self._step.passed += count


def finish(
    entries: Iterable[Entry],
    root: int,
    choice: PathChoice | None,
    wrong: Container[str],
    attributes: Attributes,
) -> RestoreStep:
    """Makes the hard links, and then sets the attributes of the directories, both in order.

    A directory gets its attributes once its content is complete. At the end everything is made
    durable, on each file system that has a part of the destination.

    Raises:
        OSError: An error concerns more than one file.
    """
    step = RestoreStep()
    tree, targets = DestinationTree(root, make=True), DestinationTree(root, make=False)
    entered: list[Entry] = []
    # Those that this user may not enter any more: a later link may be one to a file in them.
    closed: list[Entry] = []

    def settle(entry: Entry) -> None:
        try:
            attributes.set(tree.enter(entry.path).fd, entry)
        except (OSError, Refused) as error:
            step.problem(entry.path, error)

    def leave(path: str) -> None:
        """Settles the directories that have nothing more in them."""
        while entered and not path.startswith(f"{entered[-1].path}/"):
            entry = entered.pop()
            if entry.mode & 0o500 != 0o500 and attributes.user:
                closed.append(entry)
            else:
                settle(entry)

    def take(entry: Entry) -> None:
        if entry.kind == DIRECTORY:
            if choice is None or choice.has_directory(entry.path):
                tree.enter(entry.path)
                entered.append(entry)
        elif choice is None or choice.has(entry.path):
            if entry.target in wrong:
                raise Refused("the file that it is a link to was not restored")
            (above, name), (target_above, target) = split(entry.path), split(entry.target)
            made = link(tree.enter(above), name, targets.enter(target_above), target)
            step.files += made
            step.kept += not made

    try:
        for entry in entries:
            leave(entry.path)
            try:
                take(entry)
            except (OSError, Refused, ValueError) as error:
                step.problem(entry.path, error)
        leave("")
        for entry in closed:
            settle(entry)
        if left_out := sum(sync_below(one) for one in (*tree.mounted, root)):
            step.durable = False
            step.notes.append(_LEFT_OUT.format(many(left_out, "entry", "entries")))
    finally:
        tree.close()
        targets.close()
    step.notes += sorted(attributes.notes)
    return step


# --- one file -------------------------------------------------------------------------------------


def _compare_content(
    fd: int, entry: Entry, wanted: bytes, key: bytes
) -> tuple[bool, Sequence[Run] | None]:
    """Compares a file of the destination with the version, and with those sums that are known.

    A file that the disk cannot read counts as different.

    Returns:
        Whether the content is the same; the bytes that differ, or None where they are not known.
    """
    try:
        size, runs = os.fstat(fd).st_size, []
        if wanted:
            found = bytearray()
            buffer = memoryview(bytearray(max(_PIECE, entry.block)))
            end = min(size, entry.size)
            for at, piece in read_stretches(fd, end, entry.block, buffer):
                found += bytes(at // entry.block * SUM - len(found))  # A hole.
                found += sums(piece, entry.block, key)
            found += bytes(max(0, -(-end // entry.block) * SUM - len(found)))
            for first, last in differing(wanted, bytes(found)):
                runs.append((first * entry.block, min(last * entry.block, entry.size)))
            if (known := len(wanted) // SUM * entry.block) < entry.size:
                runs.append((known, entry.size))
            if runs or size != entry.size:
                return False, runs
        # Only the BLAKE3 of the whole proves that nothing differs.
        return size == entry.size and digest_of(fd) == entry.digest, None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False, None


def _within(extents: Iterable[Extent], runs: Sequence[Run]) -> list[Extent]:
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


class _FileWriter:
    """Writes a file in parts, beside any existing file of the same name.

    Where it is known which bytes differ, a copy of the existing file is patched, or that file
    itself in place.

    Raises:
        Refused: The file cannot be made.
        OSError: A system call fails.
    """

    def __init__(self, level: Level, name: str, item: _Item, options: RestoreOptions) -> None:
        self._entry, free, runs = item
        self._verify = options.verify
        self._hasher = blake3() if runs is None else None
        self._at = 0
        self._damaged = False
        self._beside: Beside | None = None
        self._fd = -1
        try:
            if runs is not None:
                old = open_old(level, name, os.O_RDWR if options.in_place else os.O_RDONLY)
                # A file that has another name is not the only one that would change.
                if options.in_place and os.fstat(old).st_nlink == 1:
                    self._fd = old
                else:
                    with closing(old):
                        self._open_beside(level, name, free=False)
                        copy_content(old, self._fd)
                os.ftruncate(self._fd, self._entry.size)
                for start, end in _outside(runs, self._entry.extents):
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
            if start:  # Else the file stands at its beginning.
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
            digest = digest_of(self._fd)
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


def copy_content(old: int, new: int) -> None:
    """Makes a file a copy of another, which shares its blocks where the file system can do that.

    Args:
        old: The descriptor of the other file.
        new: The descriptor of the file, which is empty.

    Raises:
        OSError: A system call fails.
    """
    with suppress(OSError):
        fcntl.ioctl(new, _FICLONE, old)
        return
    size = os.fstat(old).st_size
    os.ftruncate(new, size)
    for at, end in stretches(old, size, 1):
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


def digest_of(fd: int, new: NewNameHasher = blake3) -> str:
    """Returns the hash of a file's content in hex, by default its BLAKE3. Raises OSError."""
    hasher = new()
    end, size = 0, os.fstat(fd).st_size
    for at, piece in read_stretches(fd, size, 1, memoryview(bytearray(_PIECE))):
        add_zeros(hasher, at - end)
        hasher.update(piece)
        end = at + len(piece)
    add_zeros(hasher, size - end)
    return hasher.hexdigest()
