"""Restores files of a version: compares what is there, fetches what differs, and writes it.

Files come in the order of the manifest. Hard links, and what directories are given, come last, once
all files are there.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ntt_backup.blobdir.files import closing
from ntt_backup.filestore.contract import ReadableStore
from ntt_backup.format import many, printable
from ntt_backup.process.durable import sync_below
from ntt_backup.snapshot.format.block_map import MapReader
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
from ntt_backup.snapshot.restore.local_file import ComparedFile, FileWriter, Run, compare, within
from ntt_backup.snapshot.restore.tree import (
    OF_ALL,
    DestinationTree,
    Level,
    Refused,
    link,
    make,
    open_old,
    reason,
    split,
)

_STEP_SECONDS: Final = 0.25
# Files that one of several processes restores in a row.
_RUN: Final = 4096
# Packs that could not be read; the files that needed them are told besides.
_LOST_SHOWN: Final = 20
_LEFT_OUT: Final = (
    "{} that this user may not open cannot be made durable on this file system: run `sync` here,"
    " and call it again to compare their content"
)


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
    """What was done since the last step, see `version.Restored`.

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


class VersionRestorer:
    """Restores the chosen files of a version, or one part of several: its number, and theirs.

    The descriptor of the destination, `root`, stays the caller's.
    """

    def __init__(
        self,
        repository: ReadableStore,
        manifest: ManifestReader,
        map: MapReader | None,
        root: int,
        options: RestoreOptions,
        choice: PathChoice | None,
        part: tuple[int, int],
    ) -> None:
        self._manifest = manifest
        self._map = map
        self._options = options
        self._choice = choice
        self._part = part
        self._attributes = Attributes(privileges=options.privileges)
        self._fetcher: Fetcher[_Item] = Fetcher(repository, manifest.header)
        self._seen, self._tree = DestinationTree(root, make=False), DestinationTree(root, make=True)
        self._step = RestoreStep()
        self._fetched = 0
        self._writer: FileWriter | None = None
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
        # A map is read in the order of all entries.
        all_of_it = self._map is not None
        entries = self._manifest.entries(*((0, 1) if all_of_it else self._part))
        for turn, entry in enumerate(entries):
            wanted = (
                (not all_of_it or turn // _RUN % parts == number)
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
                yield item, within(entry.extents, item.runs)

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
                    seen = ComparedFile(True, None)
                    if not taken_for_same:
                        seen = compare(fd, entry, sums, bytes.fromhex(self._manifest.header.key))
                    if not seen.same:
                        return _Item(entry, False, seen.runs)
                    attributes.set(fd, entry)
                    return None
        return _Item(entry, False)

    # --- what is written --------------------------------------------------------------------------

    def _write(
        self, level: Level, name: str, item: _Item, pieces: Sequence[Piece], *, last: bool
    ) -> None:
        entry, free, runs = item
        if entry.kind in (SYMLINK, FIFO):
            make(level, entry, name, self._attributes)
        else:
            if self._writer is None:
                ways = {"in_place": self._options.in_place, "verify": self._options.verify}
                self._writer = FileWriter(level, name, entry, free=free, runs=runs, **ways)
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
