"""A set names files that are taken together; a walk finds them, in the order of a manifest.

Directories are entered by their descriptors. What the set names is found as its operator would find
it, so a symlink on the way there, and at its end, is followed; below that none is. Other file
systems are entered. A directory is listed as a whole; memory holds the names of those on the way
down, and no others.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple

from ntt_backup.blobdir.descriptors import FILE, open_untouched
from ntt_backup.config import CatalogConfig
from ntt_backup.config.sections import SnapshotSettings
from ntt_backup.errors import ConfigError, SourceError
from ntt_backup.snapshot.format.entry import MAX_PARTS, MAX_PATH
from ntt_backup.snapshot.names import require_set
from ntt_backup.snapshot.patterns import matcher

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# A tree of what the set names, by component; None: all that lies there is taken.
_Named = dict[str, "_Named | None"]

Problem = Callable[[str, str], object]
_DEFAULTS = SnapshotSettings.model_fields


@dataclass(frozen=True, slots=True)
class SnapshotSet:
    """Says which files a version has.

    Attributes:
        paths: Absolute paths without `..`. All files below them are taken, too.
        exclude: The patterns of excluded files, see `patterns.matcher`.
        block_size: The bytes of a block; 0 to choose them by the size of each file.
        full_every: The age that a chain may reach.
    """

    name: str
    paths: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    block_size: int = 0
    full_every: timedelta = timedelta(seconds=_DEFAULTS["full_every"].default)

    def require_something(self) -> None:
        """Raises SourceError where none of the paths is there."""
        reasons = []
        for path in self.paths:
            try:
                os.stat(path)  # noqa: PTH116
            except OSError as error:
                reasons.append(f"{path}: {error.strerror}")
            else:
                return
        raise SourceError(
            f"no path of the snapshot set {self.name} exists",
            detail=reasons[0],
            hint="mount its disk, or correct its paths",
        )


def find_set(
    settings: CatalogConfig, name: str, paths: Sequence[str] = (), exclude: Sequence[str] = ()
) -> SnapshotSet:
    """Returns the set of a name from the settings, or else the set that the arguments describe.

    Raises:
        ConfigError: Neither or both define the set, or a name or path is invalid.
    """
    require_set(name)
    found = settings.snapshots.get(name)
    if found is not None and (paths or exclude):
        raise ConfigError(
            f"the paths of {name} are set in [snapshots.{name}] of the configuration",
            hint="give no paths, or name another set",
        )
    if found is not None:
        return of_settings(name, found)
    if not paths:
        raise ConfigError(
            f"no set {name} is in the configuration, and no paths are given",
            hint=f"add [snapshots.{name}] with paths = [...], or name the paths:"
            f" ntt-backup-remote snapshot take {name} PATH...",
        )
    if "" in paths:
        raise ConfigError("a path is empty", hint="is a variable of the shell not set?")
    absolute = tuple(os.path.join(os.getcwd(), one) for one in paths)  # noqa: PTH109
    if any(".." in one.split("/") for one in absolute):
        raise ConfigError("a path with .. may mean two directories", hint="write it without ..")
    return SnapshotSet(name, absolute, tuple(exclude))


def without(set: SnapshotSet, directories: Iterable[Path]) -> SnapshotSet:
    """Returns a set that leaves out what lies in directories, unless it names them."""
    literal = (re.sub(r"([*?[])", r"[\1]", str(one.resolve())) for one in directories)
    return replace(set, exclude=(*set.exclude, *literal))


def of_settings(name: str, settings: SnapshotSettings) -> SnapshotSet:
    """Returns the set of a table `[snapshots.NAME]`."""
    return SnapshotSet(
        name,
        tuple(map(str, settings.paths)),
        settings.exclude,
        settings.block_size or 0,
        timedelta(seconds=settings.full_every),
    )


class WalkedFile(NamedTuple):
    """Describes a file and its directory.

    Attributes:
        path: The path as in a manifest.
        directory: The descriptor of the directory, which is open until the next file is requested.
        name: The name of the file in that directory.
        follow: Whether the set names the file, so that it may be a symlink to what was found.
    """

    path: str
    status: os.stat_result
    directory: int
    name: str
    follow: bool

    def open(self) -> int:
        """Returns a descriptor, for the caller to close. Raises OSError."""
        flags = FILE & ~os.O_NOFOLLOW if self.follow else FILE
        return open_untouched(self.name, flags, self.directory)


def walk(
    paths: Sequence[str], exclude: Sequence[str], problem: Problem
) -> Generator[WalkedFile, None, None]:
    """Yields what lies at paths and below, and the directories that lead there.

    problem(path, why) is told of what cannot be read, and of what the set names and is not there.
    What is gone since its directory was listed is left out.
    """
    excluded = matcher(exclude)
    levels = [_Level("", os.open("/", _DIRECTORY), _named(paths))]
    try:
        while levels:
            level = levels[-1]
            if not level.names:
                os.close(levels.pop().fd)
                continue
            name = level.names.pop()
            path = level.prefix + name
            # What is named is stronger than a pattern.
            named = level.named is not None
            if not named and excluded is not None and excluded(path):
                continue
            below = level.named[name] if level.named is not None else None
            try:
                status = os.stat(name, dir_fd=level.fd, follow_symlinks=named)
                if below is not None and not stat.S_ISDIR(status.st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            except OSError as error:
                if named or not isinstance(error, FileNotFoundError):
                    problem(path, error.strerror or str(error))
                continue
            if len(levels) > MAX_PARTS:
                problem(path, f"it lies below more than {MAX_PARTS:,} directories")
                continue
            if len(path) > MAX_PATH:
                problem(path, f"its path has more than {MAX_PATH:,} characters")
                continue
            found = WalkedFile(path, status, level.fd, name, named)
            if not stat.S_ISDIR(status.st_mode):
                yield found
                continue
            try:
                flags = _DIRECTORY if named else _DIRECTORY | os.O_NOFOLLOW
                fd = open_untouched(name, flags, level.fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                problem(path, error.strerror or str(error))
                yield found
                continue
            try:
                yield found
                levels.append(_Level(f"{path}/", fd, below))
            except BaseException as error:
                os.close(fd)
                if not isinstance(error, OSError):
                    raise
                problem(path, error.strerror or str(error))
    finally:
        for level in levels:
            os.close(level.fd)


class _Level:
    """Holds a directory on the way down.

    Attributes:
        names: The names that are still to be visited, the next one last.
    """

    def __init__(self, prefix: str, fd: int, named: _Named | None) -> None:
        self.prefix = prefix
        self.fd = fd
        self.named = named
        # A file that is made anew while its directory is listed may be listed twice.
        self.names = list(set(os.listdir(fd)) if named is None else named)
        # A path is sorted by its bytes, and a slash comes before all other bytes.
        plain = all(map(str.isascii, self.names))
        self.names.sort(key=None if plain else os.fsencode, reverse=True)


def _named(paths: Sequence[str]) -> _Named | None:
    root: _Named | None = {}
    # Shorter ones first: what lies below one of them is in it anyway.
    for path in sorted(paths, key=len):
        *parents, last = [part for part in path.split("/") if part not in ("", ".")] or [""]
        if not last:
            return None
        level = root
        for parent in parents:
            level = level.setdefault(parent, {}) if level is not None else None
        if level is not None:
            level[last] = None
    return root
