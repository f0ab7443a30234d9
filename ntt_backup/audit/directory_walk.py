"""Directories whose files are written once are walked, if no database lists the files.

A directory is listed only if its times differ from those of its last listing: they change when a
file in it is created, renamed or removed. An unchanged directory costs one system call. A change of
a file in place does not change them, so now and then a pass lists all directories.

The times are trusted only once they are older than a minute. Those of many file systems are
coarse, and a second change within the same tick would not show; a network file system also shows
changes late, and has a clock of its own. Until then, the catalog has a sum of what the entries were
when they were listed: a pass examines them, and lists the directory if it has another sum.

A pass takes the known directories in the order of their paths, in steps of one transaction each. A
new directory comes after its parent in this order, so the same pass takes it. Memory holds some
thousand directories, and never the files of one. Symlinks are not followed; other
file systems are entered.

A directory of very many files is divided into parts, ranges of the names in it. If its times have
changed, all of its names and inode numbers are read. Each part has a sum of hashes of these, since
file systems list in any order. Only parts with another sum than at their last listing are listed,
several in a step. A file that takes the name and the inode number of a deleted one leaves the sum
as it is: only a pass that lists everything finds it. The catalog has a part as a directory whose
path is that of the divided one, a NUL, and the first name, with the sum as its time. The name at
which a part begins is chosen by its own hash, so that new files move no other part.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from bisect import bisect, bisect_left
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b, sha256
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from typing import Final
from zlib import crc32

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
# A directory of more files is divided.
MOST_UNDIVIDED: Final = 100_000
# One name in so many begins a part, and the most parts that are listed together: 2 million files.
PART_NAMES: Final = 4096
STEP_PARTS: Final = 512
# No name is before the first of these, and none behind the second.
_FIRST_NAME: Final = b"\1"
_LAST_NAME: Final = b"\xff" * 256
# The bits of a sum that the catalog can have as a number, and the bytes of one.
_SUM: Final = (1 << 63) - 1
_SUM_BYTES: Final = 7
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
) -> None:
    """Registers the files in directories.

    Args:
        conn: The connection.
        walk: What is walked.
        others: The other origins that are in use, whose files are theirs.
        whole: Whether all directories are listed, even if that is not due.
        on_step: Receives the counts of each step, once it is committed.
        problem: Receives the path of each directory that cannot be read, and why.

    Raises:
        CatalogError: The catalog refuses, or is unreachable.
        SourceError: The root of the store cannot be read.
    """
    wanted = walk.settings
    current = origin_passes.begin_pass(
        conn, walk.name, walk.definition, whole_every=wanted.whole_every, whole=whole
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
    gone = origin_passes.end_pass(conn, replace(current, key=""), walk.roots)
    on_step(Registration(gone=gone))


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
        # The directories and parts with problems, and those whose listings lack entries.
        self._unwell: set[int] = set()
        self._incomplete: set[int] = set()
        self.listed: list[ListedDirectory] = []
        self.past: bytes | None = None
        self.strays = self.unreadable = 0
        self.problems: list[tuple[str, str]] = []

    def entries(self, known: Sequence[KnownDirectory]) -> Iterator[WalkedEntry]:
        """Yields the entries of the next directories that have changed, and examines new ones.

        Args:
            known: The next directories that are known, in order.
        """
        if known and b"\0" in known[0].path:
            yield from self._list_parts(known)
            return
        full = len(known) >= STEP_DIRECTORIES
        if full and b"\0" in known[-1].path:  # The parts of a directory are taken with it.
            known = known[: bisect_left(known, (known[-1].path.partition(b"\0")[0],))] or known
        waiting = [(one.path, 0, one) for one in known]
        # What comes behind those may be known as well.
        end = known[-1].path if full else None
        nth = 0
        # What the directories that were listed in this step have. Another one that is known is gone
        # or left out by now, with all below it.
        found_in: dict[bytes, set[bytes]] = {}
        while waiting and nth < 2 * STEP_DIRECTORIES and self._files < STEP_FILES:
            path, _, one = heappop(waiting)
            if path == self.past:
                continue  # It was known, and was found again.
            if b"\0" in path:
                break
            self.past = path
            nth += 1
            if path not in found_in.get(path.rpartition(b"/")[0], {path}):
                found_in[path] = set()
                continue
            self._found = []
            yield from self._look_at(nth, one, known)
            if self.listed and self.listed[-1].nth == nth:
                if self.listed[-1].within is not None:
                    break  # The next step begins with its parts.
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

    def _look_at(
        self, nth: int, one: KnownDirectory, known: Sequence[KnownDirectory]
    ) -> Iterator[WalkedEntry]:
        below = os.fsdecode(one.path)
        try:
            status = self._tree.lstat(below) if below else os.fstat(self._tree.fd)
            if not stat.S_ISDIR(status.st_mode):
                if one.path in self._roots:
                    self._add_problem(one.path, f"it is {kind_of(status.st_mode)}")
                return
            times = status.st_mtime_ns, status.st_ctime_ns
            if not self._whole and times == (one.mtime_ns, one.ctime_ns):
                return
            parts = _parts_of(one.path, known)
            if not parts and self._is_as_listed(nth, one):
                return
            if parts and (yield from self._divide(nth, one, parts)):
                return
            if not (yield from self._list(nth, one)):
                yield from self._divide(nth, one, parts)
        except OSError as error:
            self._note_error(one.path, error)

    def _note_error(self, path: bytes, error: OSError) -> None:
        # What is gone its parent has noted, or notes in the next pass.
        gone = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
        if not gone or path in self._roots:
            self._add_problem(path, self._tree.unreadable(os.fsdecode(path), error).detail)

    def _is_as_listed(self, nth: int, one: KnownDirectory) -> bool:
        """Returns whether a directory that was young is as it was when it was listed."""
        if self._whole or one.mtime_ns is not None or one.ctime_ns is None:
            return False
        with self._open(one.path) as (fd, listing):
            now = _state(fd, one.path)
            seen = blake2b(digest_size=_SUM_BYTES)
            for entry in islice(listing, MOST_UNDIVIDED + 1):
                seen.update(_look_of(entry))
                self._files += 1
        if (_number(seen.digest()), now.mounted) != (one.ctime_ns, one.mounted):
            return False
        if now.mtime_ns is not None:  # Its times are noted, and none of its files is compared.
            self.listed.append(ListedDirectory(-nth, now, within=(one.path, one.path)))
        return True

    def _list(self, nth: int, one: KnownDirectory) -> Generator[WalkedEntry, None, bool]:
        """Yields the entries of a directory. Returns False if it has to be divided."""
        inside, empty, files = _inside(one.path), True, self._files
        seen = blake2b(digest_size=_SUM_BYTES)
        with self._open(one.path) as (fd, listing):
            now = _state(fd, one.path)
            for entry in listing:
                empty = empty and entry.name == _OF_THE_DISK
                yield from self._examine((nth,), inside + os.fsencode(entry.name), entry)
                if now.mtime_ns is None:
                    seen.update(_look_of(entry))
                if self._files - files > MOST_UNDIVIDED:
                    return False
        if nth in self._incomplete:  # What it has not given may still be there.
            return True
        missed = empty and (one.path in self._roots or (one.mounted and not now.mounted))
        if nth in self._unwell:  # Each pass tells what is wrong there.
            now = now._replace(mtime_ns=None, ctime_ns=None)
        elif now.mtime_ns is None:
            now = now._replace(ctime_ns=_number(seen.digest()))
        if missed:
            self._missed[nth] = one
        self.listed.append(ListedDirectory(nth, now, missed))
        return True

    def _divide(
        self, nth: int, one: KnownDirectory, parts: Sequence[KnownDirectory]
    ) -> Generator[WalkedEntry, None, bool]:
        """Yields the parts of a directory, of which those that have changed are listed next.

        Returns False if it has become so small that it is not divided any more.
        """
        of_parts = one.path + b"\0", one.path + b"\1"
        starts = [_name_of(part) for part in parts] or [_FIRST_NAME]
        sums, found, count = [0] * len(starts), {_FIRST_NAME}, 0
        with self._open(one.path) as (fd, listing):
            now = _state(fd, one.path)
            for entry in listing:
                count += 1
                name = os.fsencode(entry.name)
                if not crc32(name) % PART_NAMES and len(one.path + name) < MOST_PATH_BYTES:
                    found.add(name)
                sums[bisect(starts, name) - 1] += _hash_of(name, entry)
        if count < MOST_UNDIVIDED // 2:
            self.listed.append(ListedDirectory(-nth, KnownDirectory(of_parts[0]), within=of_parts))
            return False
        ends = [*starts[1:], _LAST_NAME]
        same = {
            (part.path, end)
            for part, end, total in zip(parts, ends, sums, strict=False)
            if part.mtime_ns == total & _SUM and not self._whole
        }
        starts = sorted(found)
        for start, end in zip(starts, [*starts[1:], _LAST_NAME], strict=True):
            path = of_parts[0] + start
            yield WalkedEntry(path, parent=nth, again=(path, end) not in same)
        self.listed.append(ListedDirectory(nth, now, within=of_parts))
        return True

    def _list_parts(self, known: Sequence[KnownDirectory]) -> Iterator[WalkedEntry]:
        """Yields the entries of the next parts of a directory that are to be listed."""
        path = known[0].path.partition(b"\0")[0]
        parts = _parts_of(path, known)
        starts = [_name_of(part) for part in parts]
        # Where the last part of a full list ends is not known yet.
        ends = [*starts[1:], *[_LAST_NAME] * (len(parts) < STEP_DIRECTORIES)]
        rows = list(zip(starts, ends, parts, strict=False))
        wanted = [row for row in rows if row[2].mtime_ns is None][:STEP_PARTS]
        self.past = (wanted if len(wanted) == STEP_PARTS else rows)[-1][2].path
        if not wanted:
            return
        starts = [start for start, _, _ in wanted]
        sums = [0] * (len(wanted) + 1)
        # What is below a directory may be in a later part than the directory itself: "a-" is before
        # "a/", and a part may begin between them.
        above = {start[:length] for start in starts for length in range(1, len(start))}
        inside, empty = _inside(path), True

        def number(name: bytes) -> int:
            nth = bisect(starts, name)
            return nth if nth and name < wanted[nth - 1][1] else 0

        try:
            with self._open(path) as (_, listing):
                for entry in listing:
                    empty = empty and entry.name == _OF_THE_DISK
                    name = os.fsencode(entry.name)
                    nth = number(name)
                    if nth or name in above:
                        sums[nth] += _hash_of(name, entry)
                        nths = {nth, number(name + b"/")} - {0} if name in above else (nth,)
                        yield from self._examine(nths, inside + name, entry)
        except OSError as error:
            return self._note_error(path, error)
        if empty:  # Its disk may not be mounted: the next pass lists the directory.
            return
        for nth, (start, end, part) in enumerate(wanted, 1):
            if nth not in self._incomplete:
                total = None if nth in self._unwell else sums[nth] & _SUM
                now = KnownDirectory(part.path, total)
                self.listed.append(ListedDirectory(nth, now, within=(inside + start, inside + end)))

    @contextmanager
    def _open(self, path: bytes) -> Iterator[tuple[int, Iterator[os.DirEntry[str]]]]:
        with closing(self._tree.open_directory(os.fsdecode(path))) as fd, os.scandir(fd) as listing:
            yield fd, listing

    def _examine(
        self, nths: Collection[int], path: bytes, entry: os.DirEntry[str]
    ) -> Iterator[WalkedEntry]:
        """Yields an entry, unless it is left out.

        Args:
            nths: The numbers of the directory or parts that have it.
            path: Its path below the root of the store.
            entry: The entry.
        """
        if self._excluded and self._excluded(f"{self._prefix}/{os.fsdecode(path)}"):
            return
        try:
            is_directory = entry.is_dir(follow_symlinks=False)
            is_file = not is_directory and entry.is_file(follow_symlinks=False)
            status = entry.stat(follow_symlinks=False) if is_file else None
        except FileNotFoundError:
            return
        except OSError as error:
            self._add_problem(path, self._tree.unreadable(os.fsdecode(path), error).detail)
            self._incomplete.update(nths)
            return
        levels = path.count(b"/") + 2 if is_directory else 0
        if len(path) + is_directory > MOST_PATH_BYTES or levels > MOST_LEVELS:
            self._add_problem(path, _TOO_LONG)
            self._unwell.update(nths)
        elif is_directory:
            if len(self._found) <= 4 * STEP_DIRECTORIES:
                self._found.append(KnownDirectory(path))
            for nth in nths:
                yield WalkedEntry(path, parent=nth)
        elif status is None:
            self.strays += 1
        else:
            self._files += 1
            yield WalkedEntry(path, status.st_size, status.st_mtime_ns)

    def _add_problem(self, path: bytes, why: str) -> None:
        self.unreadable += 1
        if len(self.problems) < _MOST_TOLD:
            self.problems.append((shown_path(path) or ".", why))


def _state(fd: int, path: bytes) -> KnownDirectory:
    """Returns what an open directory is now, without times that are not trusted."""
    status = os.fstat(fd)
    mounted = status.st_dev != os.stat("..", dir_fd=fd).st_dev
    ages = [time.time_ns() - at for at in (status.st_mtime_ns, status.st_ctime_ns)]
    # The time of change is never set by hand: in the future it is that of another clock.
    young = abs(ages[0]) <= TRUSTED_NS or ages[1] <= TRUSTED_NS
    return KnownDirectory(path, None if young else status.st_mtime_ns, status.st_ctime_ns, mounted)


def _look_of(entry: os.DirEntry[str]) -> bytes:
    """Returns how an entry looks; nothing if it is gone or cannot be examined."""
    look = f"/{entry.name}\0{entry.inode()}"
    try:
        if not entry.is_dir(follow_symlinks=False):
            one = entry.stat(follow_symlinks=False)
            look += f" {one.st_size} {one.st_mtime_ns} {one.st_ctime_ns}"
    except OSError:
        return b""
    return look.encode(errors="surrogateescape")


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "big")


def _inside(path: bytes) -> bytes:
    """Returns what the paths in a directory begin with."""
    return path + b"/" if path else b""


def _hash_of(name: bytes, entry: os.DirEntry[str]) -> int:
    """Returns a hash of the name and inode number of an entry."""
    return _number(blake2b(b"%d/%s" % (entry.inode(), name), digest_size=8).digest())


def _name_of(part: KnownDirectory) -> bytes:
    """Returns the name at which a part begins."""
    return part.path.partition(b"\0")[2]


def _parts_of(path: bytes, known: Sequence[KnownDirectory]) -> Sequence[KnownDirectory]:
    """Returns those of the known directories that are parts of a directory."""
    return known[bisect_left(known, (path + b"\0",)) : bisect_left(known, (path + b"\1",))]
