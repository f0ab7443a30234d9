"""Directories whose files are written once are walked, if no database lists the files.

A directory is listed only if its times differ from those of its last listing: they change when a
file in it is created, renamed or removed. An unchanged directory costs one system call. A change of
a file in place does not change them, so now and then a pass lists all directories.

The times are trusted only once they are older than a minute. Those of many file systems are
coarse, and a second change within the same tick would not show; a network file system also shows
changes late, and has a clock of its own.

A pass takes the known directories in the order of their paths, in steps of one transaction each. A
new directory comes after its parent in this order, so the same pass takes it. Memory holds some
thousand directories, and never the files of one. Symlinks are not followed; other
file systems are entered.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from heapq import heappop, heappush
from pathlib import Path
from typing import Final

from ntt_backup.blobdir.descriptors import closing
from ntt_backup.blobdir.layout import kind_of
from ntt_backup.catalog import origin_passes
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.listed_files import shown_path
from ntt_backup.catalog.origin_passes import (
    KnownDirectory,
    ListedDirectory,
    Pass,
    Registration,
    WalkedEntry,
)
from ntt_backup.config.sections import FilesSettings
from ntt_backup.model import MOST_PATH_BYTES
from ntt_backup.snapshot.patterns import matcher
from ntt_backup.source.paths import MOST_LEVELS
from ntt_backup.source.store import SourceTree, Store

# The most directories of a step, and the number of files behind whose directory a step ends.
STEP_DIRECTORIES: Final = 5000
STEP_FILES: Final = 100_000
# The youngest times of a directory that are trusted.
TRUSTED_NS: Final = 60 * 10**9
# No file of the store, and there on each empty disk.
_OF_THE_DISK: Final = "lost+found"
_TOO_LONG: Final = "its path is too long"
# The most problems that a step reports.
_MOST_TOLD: Final = 1000

Problem = Callable[[str, str], object]


@dataclass(frozen=True, slots=True)
class Walk:
    """A table `[files.NAME]`.

    Attributes:
        name: Its name.
        root: The root of the store.
        settings: Its settings.
    """

    name: str
    root: Path
    settings: FilesSettings

    @property
    def roots(self) -> list[bytes]:
        """The directories, below the root of the store, none of them below another one."""
        wanted = self.settings.paths
        outer = {one for one in wanted if not any(other in one.parents for other in wanted)}
        below = (os.fsencode(one.relative_to(self.root)) for one in outer)
        return sorted(b"" if one == b"." else one for one in below)

    @property
    def definition(self) -> str:
        """A hash of what is walked: if it changes, all directories are listed again."""
        what = [one.hex() for one in self.roots], self.settings.exclude
        return sha256(json.dumps(what).encode()).hexdigest()


def pass_over_directories(
    conn: Connection,
    walk: Walk,
    others: Sequence[str],
    *,
    whole: bool,
    on_step: Callable[[Registration], object],
    problem: Problem,
) -> int:
    """Registers the files in directories.

    Args:
        conn: The connection.
        walk: What is walked.
        others: The other origins that are in use, whose files are theirs.
        whole: Whether all directories are listed, even if that is not due.
        on_step: Receives the counts of each step, once it is committed.
        problem: Receives the path of each directory that cannot be read, and why.

    Returns:
        The number of files that are in none of the directories any more.

    Raises:
        CatalogError: The catalog refuses, or is unreachable.
        SourceError: The root of the store cannot be read.
    """
    wanted = walk.settings
    current = origin_passes.begin_pass(
        conn,
        walk.name,
        walk.definition,
        whole_every=wanted.whole_every,
        whole=whole,
    )

    def write(current: Pass) -> tuple[_Step, Pass, Registration]:
        with Store(walk.root).tree() as tree:
            step = _Step(tree, walk, whole=current.whole)
            past = bytes.fromhex(current.key[1:]) if current.key else None
            known = origin_passes.next_directories(
                conn, walk.name, walk.roots, past, STEP_DIRECTORIES
            )
            blocks = origin_passes.encode_entries(step.entries(known))
            listed = step.listed
            versions = wanted.on_change == "version"
            after, found = origin_passes.register(
                conn, current, blocks, versions=versions, others=others, listed=listed
            )
            step.note_missing_disks()
            # The first directory may be the root of the store itself, whose path is empty.
            key = "/" + step.past.hex() if step.past is not None else current.key
            told = ": ".join(step.problems[-1]) if step.problems else current.problem
            after = replace(after, key=key, problem=told)
            origin_passes.save_pass(conn, after)
            return step, after, found

    more = True
    while more:
        one = partial(write, current)
        step, current, found = conn.in_transaction("register files", one)
        more = step.past is not None
        for path, why in step.problems:
            problem(path, why)
        on_step(replace(found, strays=step.strays, unreadable=step.unreadable))
    return origin_passes.end_pass(conn, replace(current, key=""), walk.roots)


class _Step:
    """Takes some directories in the order of their paths, and lists those that have changed.

    Attributes:
        listed: The directories that were listed as a whole.
        past: The last directory that was looked at; None if there was none left.
        strays: The number of entries that are neither a file nor a directory.
        unreadable: The number of paths that could not be read.
        problems: The first of these, and why.
    """

    def __init__(self, tree: SourceTree, walk: Walk, *, whole: bool) -> None:
        self._tree = tree
        self._roots = set(walk.roots)
        self._whole = whole
        self._excluded = matcher(walk.settings.exclude)
        self._prefix = str(walk.root).strip("/")
        self._files = 0
        self._found: list[KnownDirectory] = []
        self._missed: dict[int, KnownDirectory] = {}
        self.listed: list[ListedDirectory] = []
        self.past: bytes | None = None
        self.strays = self.unreadable = 0
        self.problems: list[tuple[str, str]] = []

    def entries(self, known: Sequence[KnownDirectory]) -> Iterator[WalkedEntry]:
        """Yields the entries of the next directories that have changed, and examines new ones.

        Args:
            known: The next directories that are known, in order.
        """
        waiting = [(one.path, 0, one) for one in known]
        # What comes behind those may be known as well.
        end = known[-1].path if len(known) >= STEP_DIRECTORIES else None
        nth = 0
        # What the directories that were listed in this step have. Another one that is known is gone
        # or left out by now, with all below it.
        found_in: dict[bytes, set[bytes]] = {}
        while waiting and nth < 2 * STEP_DIRECTORIES and self._files < STEP_FILES:
            path, _, one = heappop(waiting)
            if path == self.past:
                continue  # It was known, and was found again.
            self.past = path
            nth += 1
            if path not in found_in.get(path.rpartition(b"/")[0], {path}):
                found_in[path] = set()
                continue
            self._found = []
            yield from self._look_at(nth, one)
            if self.listed and self.listed[-1].nth == nth:
                found_in[path] = {found.path for found in self._found}
            if len(waiting) + len(self._found) > 4 * STEP_DIRECTORIES:
                break
            for found in self._found:
                if end is None or found.path <= end:
                    heappush(waiting, (found.path, 1, found))

    def note_missing_disks(self) -> None:
        """Adds a problem for each directory that had files and is empty now."""
        listed = {one.nth for one in self.listed}
        for nth, one in self._missed.items():
            if nth not in listed:
                self._add_problem(one.path, "it is empty, and had files: its disk is not mounted")

    def _look_at(self, nth: int, one: KnownDirectory) -> Iterator[WalkedEntry]:
        below = os.fsdecode(one.path)
        try:
            status = self._tree.lstat(below) if below else os.fstat(self._tree.fd)
            if not stat.S_ISDIR(status.st_mode):
                if one.path in self._roots:
                    self._add_problem(one.path, f"it is {kind_of(status.st_mode)}")
                return
            times = status.st_mtime_ns, status.st_ctime_ns
            if self._whole or times != (one.mtime_ns, one.ctime_ns):
                yield from self._list(nth, one, below)
        except OSError as error:
            # What is gone its parent has noted, or notes in the next pass.
            gone = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
            if not gone or one.path in self._roots:
                self._add_problem(one.path, self._tree.unreadable(below, error).detail)

    def _list(self, nth: int, one: KnownDirectory, below: str) -> Iterator[WalkedEntry]:
        prefix = f"{below}/" if below else ""
        empty = complete = True
        unreadable = self.unreadable
        with closing(self._tree.open_directory(below)) as fd, os.scandir(fd) as listing:
            before = os.fstat(fd)
            above = os.stat("..", dir_fd=fd)
            for entry in listing:
                empty = empty and entry.name == _OF_THE_DISK
                path = prefix + entry.name
                if self._excluded is not None and self._excluded(f"{self._prefix}/{path}"):
                    continue
                name = os.fsencode(path)
                try:
                    is_directory = entry.is_dir(follow_symlinks=False)
                    is_file = not is_directory and entry.is_file(follow_symlinks=False)
                    status = entry.stat(follow_symlinks=False) if is_file else None
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._add_problem(name, self._tree.unreadable(path, error).detail)
                    complete = False
                    continue
                if is_directory:
                    yield from self._directory(nth, name)
                elif status is None:
                    self.strays += 1
                elif len(name) > MOST_PATH_BYTES:
                    self._add_problem(name, _TOO_LONG)
                else:
                    self._files += 1
                    yield WalkedEntry(name, status.st_size, status.st_mtime_ns)
        if not complete:  # What it has not given may still be there.
            return
        mounted = before.st_dev != above.st_dev
        missed = empty and (one.path in self._roots or (one.mounted and not mounted))
        ages = [time.time_ns() - at for at in (before.st_mtime_ns, before.st_ctime_ns)]
        now = KnownDirectory(one.path, before.st_mtime_ns, before.st_ctime_ns, mounted)
        # The time of change is never set by hand: in the future it is that of another clock.
        young = abs(ages[0]) <= TRUSTED_NS or ages[1] <= TRUSTED_NS
        if young or self.unreadable > unreadable:  # Each pass tells what is wrong there.
            now = now._replace(mtime_ns=None)
        if missed:
            self._missed[nth] = one
        self.listed.append(ListedDirectory(nth, now, missed))

    def _directory(self, parent: int, path: bytes) -> Iterator[WalkedEntry]:
        if len(path) >= MOST_PATH_BYTES or path.count(b"/") >= MOST_LEVELS - 1:
            self._add_problem(path, _TOO_LONG)
            return
        if len(self._found) <= 4 * STEP_DIRECTORIES:
            self._found.append(KnownDirectory(path))
        yield WalkedEntry(path, parent=parent)

    def _add_problem(self, path: bytes, why: str) -> None:
        self.unreadable += 1
        if len(self.problems) < _MOST_TOLD:
            self.problems.append((shown_path(path) or ".", why))
