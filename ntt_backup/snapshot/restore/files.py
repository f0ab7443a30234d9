"""Restores the files of a version, or of a part of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

from ntt_backup.blobdir.staging import write_all
from ntt_backup.filestore.contract import ReadableStore
from ntt_backup.format import printable
from ntt_backup.snapshot.format.block_map import MapReader
from ntt_backup.snapshot.format.entry import FIFO, SYMLINK, Entry
from ntt_backup.snapshot.format.manifest import ManifestReader
from ntt_backup.snapshot.format.small_files import SmallFiles
from ntt_backup.snapshot.restore.attributes import Attributes
from ntt_backup.snapshot.restore.choice import Choice
from ntt_backup.snapshot.restore.fetch import Fetcher, Piece
from ntt_backup.snapshot.restore.local_file import MISSING, WRONG, FileWriter
from ntt_backup.snapshot.restore.plan import Change, Item, Options, Plan
from ntt_backup.snapshot.restore.tree import (
    NEW,
    OF_ALL,
    Level,
    Refused,
    Tree,
    make,
    reason,
    split,
)

_STEP_SECONDS: Final = 0.25
# Packs that could not be read; the files that needed them are told besides.
_LOST_SHOWN: Final = 20


@dataclass(slots=True)
class Step:
    """Holds what was done since the last one, see `version.Restored`. passed: bytes of all files
    that are settled, one way or the other. durable: whether all that was restored is on the disk,
    where this is the last step.
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


class Restorer:
    """Restores the files of a version, or one part of them of several. map: of the version, for a
    delta. root: a descriptor, which is not closed.
    """

    def __init__(
        self,
        repository: ReadableStore,
        manifest: ManifestReader,
        map: MapReader | None,
        root: int,
        options: Options,
        choice: Choice | None,
        part: tuple[int, int],
    ) -> None:
        self._options = options
        self._attributes = Attributes(privileges=options.privileges)
        self._fetcher: Fetcher[Item] = Fetcher(repository, manifest.header)
        self._tree = Tree(root, make=True)
        self._plan = Plan(
            manifest,
            map,
            root,
            options,
            choice,
            part,
            self._attributes,
            on_kept=self._keep,
            on_problem=lambda path, error: self._step.problem(path, error),
        )
        self._step = Step()
        self._fetched = 0
        self._writer: FileWriter | None = None
        # Of the file that is written.
        self._passed = 0
        # Of the last file of several parts, whose other parts are passed over.
        self._failed: Entry | None = None

    def run(self) -> Iterator[Step]:
        """Restores all of it, step by step. Raises OSError for what is about more than a file."""
        due = time.monotonic() + _STEP_SECONDS
        try:
            for (row, change), pieces, last in self._fetcher.read(self._plan.items()):
                if isinstance(row, SmallFiles):
                    self._write_small(row, pieces[0][1])
                else:
                    self._write_entry((row, change), pieces, last=last)
                if time.monotonic() > due:
                    yield self._take_step()
                    due = time.monotonic() + _STEP_SECONDS
        finally:
            if self._writer is not None:
                self._writer.close()
            self._tree.close()
            self._plan.close()
        yield self._take_step()

    def _take_step(self) -> Step:
        step, self._step = self._step, Step()
        lost = sorted(self._fetcher.lost.values())
        step.notes = [*sorted(self._attributes.notes), *lost[:_LOST_SHOWN]]
        step.fetched = self._fetcher.fetched - self._fetched
        self._fetched = self._fetcher.fetched
        return step

    def _keep(self, entry: Entry) -> None:
        self._step.kept += 1
        self._step.passed += entry.size

    def _write_small(self, row: SmallFiles, content: memoryview) -> None:
        """Writes new files. content: of all of them, shorter where it is damaged."""
        above, mode, _, _, _, files = row
        try:
            level = self._tree.enter(above)
        except (OSError, Refused, ValueError) as error:
            for file in files:
                self._step.problem(row.path(file), error)
            self._step.passed += sum(file[1] for file in files)
            return
        first = files[0][2]
        if not (level.plain and self._attributes.come_by_themselves(row)):
            for file in files:
                entry, at = row.entry(file), file[2] - first
                data = content[at : at + file[1]]
                self._write_entry((entry, None), [(0, data, len(data) == file[1])], last=True)
            return
        step, verify, directory = self._step, self._options.verify, level.fd
        open_, write, utime = os.open, os.write, os.utime
        # Files that are still open: descriptors that follow each other are closed at once.
        ranges: list[tuple[int, int]] = []
        begin = end = -1
        made = length = 0
        try:
            for name, size, skip, mtime, digest in files:
                try:
                    data = content[skip - first : skip - first + size]
                    if len(data) != size:
                        raise Refused(MISSING)
                    if verify and blake3(data).hexdigest() != digest:
                        raise Refused(WRONG)
                    fd = open_(name, NEW, mode, dir_fd=directory)
                    if fd != end:
                        if end > 0:
                            ranges.append((begin, end))
                        begin = fd
                    end = fd + 1
                    if (written := write(fd, data)) != size:
                        write_all(fd, data[written:])
                    utime(fd, ns=(mtime, mtime))
                    made += 1
                    length += size
                except (OSError, Refused, ValueError) as error:
                    step.problem(f"{above}/{name}" if above else name, error)
                    step.passed += size
        finally:
            step.files += made
            step.bytes += length
            step.passed += length
            if end > 0:  # An empty range at 0 would close all that there is.
                ranges.append((begin, end))
            for one in ranges:
                os.closerange(*one)

    def _write_entry(
        self, item: tuple[Entry, Change | None], pieces: Sequence[Piece], *, last: bool
    ) -> None:
        entry = item[0]
        try:
            above, name = split(entry.path)
            self._write(self._tree.enter(above), name, item, pieces, last=last)
        except (OSError, Refused, ValueError) as error:
            self._give_up(entry, error, last=last)

    def _write(
        self,
        level: Level,
        name: str,
        item: tuple[Entry, Change | None],
        pieces: Sequence[Piece],
        *,
        last: bool,
    ) -> None:
        """Writes whatever needs more than a small new file."""
        entry, change = item
        if entry is self._failed:
            return
        if entry.kind == SYMLINK:
            make(level, entry, name, self._attributes, lambda new: _symlink(level, new, entry))
        elif entry.kind == FIFO:
            make(level, entry, name, self._attributes, lambda new: _fifo(level, new, entry))
        else:
            if self._writer is None:
                self._writer = FileWriter(
                    level,
                    name,
                    entry,
                    free=change is None,
                    runs=change.runs if change is not None else None,
                    in_place=self._options.in_place,
                    verify=self._options.verify,
                )
            written = self._writer.add(pieces)
            self._step.bytes += written
            self._pass(written)
            if not last:
                return
            self._writer.finish(self._attributes)
            self._writer.close()
            self._writer = None
        self._step.files += 1
        self._pass(entry.size - self._passed)
        self._passed = 0

    def _pass(self, count: int) -> None:
        self._passed += count
        self._step.passed += count

    def _give_up(self, entry: Entry, error: OSError | Refused | ValueError, *, last: bool) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if entry is not self._failed:
            self._step.problem(entry.path, error)
            self._pass(entry.size - self._passed)
            self._passed = 0
        self._failed = None if last else entry


def _symlink(level: Level, name: str, entry: Entry) -> None:
    os.symlink(entry.target, name, dir_fd=level.fd)


def _fifo(level: Level, name: str, entry: Entry) -> None:
    os.mkfifo(name, entry.mode & 0o777, dir_fd=level.fd)
