"""A plan says which files of a version the destination lacks, and what of them is fetched."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from ntt_backup.blobdir.open import closing
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
from ntt_backup.snapshot.format.small_files import SmallFiles
from ntt_backup.snapshot.restore.attributes import Attributes
from ntt_backup.snapshot.restore.choice import Choice
from ntt_backup.snapshot.restore.local_file import Found, Run, compare, within
from ntt_backup.snapshot.restore.tree import Level, Refused, Tree, open_old, split

_RUN: Final = 4096


@dataclass(frozen=True, slots=True)
class Options:
    """Says how files are restored. delta: what is there is hashed, and only what differs is
    fetched. in_place: what differs is written into the files themselves. verify: every file is
    compared with its BLAKE3; what a delta made always is. privileges: files get what others' rights
    come from, see `attributes`. doubt: no file is taken for right because of its size and time, see
    `unfinished`.
    """

    delta: bool = False
    in_place: bool = False
    verify: bool = True
    privileges: bool = True
    doubt: bool = False


class Change(NamedTuple):
    """A file that takes the place of another. runs: what differs, None where that is not known."""

    runs: Sequence[Run] | None


_NEW: Final = Change(None)
Item = tuple[Entry | SmallFiles, Change | None]


class Plan:
    """Compares the files of a version, or one part of them of several, with those that are there.
    map: of the version, for a delta. root: a descriptor, which is not closed. on_kept is told of
    files that are right, on_problem of those that cannot be compared.
    """

    def __init__(
        self,
        manifest: ManifestReader,
        map: MapReader | None,
        root: int,
        options: Options,
        choice: Choice | None,
        part: tuple[int, int],
        attributes: Attributes,
        *,
        on_kept: Callable[[Entry], None],
        on_problem: Callable[[str, OSError | Refused | ValueError], None],
    ) -> None:
        self._manifest = manifest
        self._map = map
        self._key = bytes.fromhex(manifest.header.key)
        self._options = options
        self._choice = choice
        self._part = part
        self._attributes = attributes
        self._on_kept = on_kept
        self._on_problem = on_problem
        self._seen = Tree(root, make=False)

    def close(self) -> None:
        """Closes the directories that are open."""
        self._seen.close()

    def items(self) -> Iterator[tuple[Item, Sequence[Extent]]]:
        """Yields the files that are not there, with the extents of them that are fetched."""
        number, parts = self._part
        of_map, turn = self._map, 0
        # A map is read in the order of all entries.
        for row in self._manifest.rows(*((0, 1) if of_map is not None else self._part)):
            mine = of_map is None or turn // _RUN % parts == number
            if isinstance(row, SmallFiles):
                turn += len(row.files)
                if mine:
                    yield from self._small(row)
            else:
                turn += 1
                yield from self._entry(row, mine=mine)

    def _small(self, row: SmallFiles) -> Iterator[tuple[Item, Sequence[Extent]]]:
        choice, files = self._choice, row.files
        if choice is not None:
            files = [file for file in files if choice.has(row.path(file))]
        names: Container[str] = ()
        with suppress(OSError, Refused, ValueError):
            names = self._seen.enter(row.above).names
        if names:
            for file in files:
                if file[0] in names:
                    yield from self._entry(row.entry(file), mine=True)
            files = [file for file in files if file[0] not in names]
        if files:
            row = row._replace(files=files)
            yield (row, None), (row.extent,)

    def _entry(self, entry: Entry, *, mine: bool) -> Iterator[tuple[Item, Sequence[Extent]]]:
        path, of_map = entry.path, self._map
        wanted = (
            mine
            and entry.kind not in (DIRECTORY, HARD_LINK)
            and (self._choice is None or self._choice.has(path))
        )
        place = self._find(path) if wanted else None
        sums = b""
        if of_map is not None and entry.block:
            found = place[2] if place is not None else None
            sums = of_map.read(entry.blocks_of(found.st_size if found else 0), entry.blocks)
        if place is None:
            return
        try:
            change = self._compare(entry, *place, sums)
        except (OSError, Refused, ValueError) as error:
            self._on_problem(path, error)
            return
        if change is None:
            self._on_kept(entry)
        elif change is _NEW:
            yield (entry, None), entry.extents
        elif change.runs is None:
            yield (entry, change), entry.extents
        else:
            yield (entry, change), within(entry.extents, change.runs)

    def _find(self, path: str) -> tuple[Level, str, os.stat_result | None] | None:
        """Returns a place, and what is there; None where it is none."""
        try:
            above, name = split(path)
            level = self._seen.enter(above)
            return level, name, level.find(name)
        except (OSError, Refused, ValueError) as error:
            self._on_problem(path, error)
            return None

    def _compare(
        self, entry: Entry, level: Level, name: str, found: os.stat_result | None, sums: bytes
    ) -> Change | None:
        """Returns how the file that is there is changed; None where it stays."""
        if found is None:
            return _NEW
        kind = stat.S_IFMT(found.st_mode)
        attributes, options = self._attributes, self._options
        hashed = options.delta or options.doubt
        if (entry.kind == SYMLINK and kind == stat.S_IFLNK) or (
            entry.kind == FIFO
            and kind == stat.S_IFIFO
            and attributes.are(entry, found, level.fd, name)
        ):
            if entry.kind == FIFO or os.readlink(name, dir_fd=level.fd) == entry.target:
                attributes.set_unopened(level.fd, name, entry)
                return None
        elif entry.kind == FILE and kind == stat.S_IFREG:
            right = found.st_size == entry.size
            taken_for_same = right and found.st_mtime_ns == entry.mtime and not hashed
            if taken_for_same and attributes.are(entry, found, level.fd, name):
                return None
            if right or sums:
                with closing(open_old(level, name)) as fd:
                    seen = Found(True, None)
                    if not taken_for_same:
                        seen = compare(fd, entry, sums, self._key)
                    if not seen.same:
                        return Change(seen.runs)
                    attributes.set(fd, entry)
                    return None
        return Change(None)
