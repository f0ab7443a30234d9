"""A snapshot set says which files are taken together, by the settings or a command line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from ntt_backup.config import CatalogConfig
from ntt_backup.config.sections import SnapshotSettings
from ntt_backup.errors import ConfigError, SourceError
from ntt_backup.snapshot.names import require_set

_DEFAULTS = SnapshotSettings.model_fields


@dataclass(frozen=True, slots=True)
class SnapshotSet:
    """Says which files a version has. paths: absolute, without `..`; what lies below them is taken,
    too. exclude: patterns, see `patterns.matcher`. block_size: bytes; 0: by the size of each file.
    full_every: how old a chain may get.
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
            f"nothing of the snapshot set {self.name} is there",
            detail=reasons[0],
            hint="mount its disk, or correct its paths",
        )


def find_set(
    settings: CatalogConfig, name: str, paths: Sequence[str] = (), exclude: Sequence[str] = ()
) -> SnapshotSet:
    """Returns the set of the settings that is called so; or the one that arguments describe, where
    the settings have none. Raises ConfigError.
    """
    require_set(name)
    found = settings.snapshots.get(name)
    if found is not None and (paths or exclude):
        raise ConfigError(
            f"the paths of {name} stand under [snapshots.{name}] in the configuration",
            hint="name no paths, or take a set of another name",
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
