"""A name below `snapshots/` has one form: `<set>/<version>/<file>`. None leads anywhere else."""

from __future__ import annotations

import re
from datetime import datetime, timezone

STAMP = "%Y%m%dT%H%M%SZ"

_SET = re.compile(r"[a-z0-9][a-z0-9_-]{0,30}")
_VERSION = re.compile(r"(\d{8}T\d{6}Z)-[0-9a-f]{8}", re.ASCII)
_FILE = re.compile(r"pack-\d{5}|map|manifest", re.ASCII)


def is_set(name: str) -> bool:
    """Returns whether name is that of a set, and so harmless in a path."""
    return _SET.fullmatch(name) is not None


def begun(version: str) -> datetime:
    """Returns when a version was begun. Raises ValueError for another name."""
    match = _VERSION.fullmatch(version)
    if match is None:
        raise ValueError(f"{version!r} is not a version")
    return moment_of(match[1])


def moment_of(stamp: str) -> datetime:
    """Returns the time that a name begins with. Raises ValueError for what is none."""
    return datetime.strptime(stamp, STAMP).replace(tzinfo=timezone.utc)


def is_version(name: str) -> bool:
    """Returns whether name is that of a version."""
    try:
        begun(name)
    except ValueError:
        return False
    return True


def is_file(name: str) -> bool:
    """Returns whether name is that of a file within a version."""
    return _FILE.fullmatch(name) is not None


def parts_of(name: str) -> tuple[str, str, str]:
    """Returns set, version and file of a name. Raises ValueError for any other form."""
    parts = name.split("/")
    if len(parts) != 3 or not (is_set(parts[0]) and is_version(parts[1]) and is_file(parts[2])):
        raise ValueError(f"{name!r} is not a file of a snapshot")
    return parts[0], parts[1], parts[2]
