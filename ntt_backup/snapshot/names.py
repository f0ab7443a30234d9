"""Snapshot sets, their versions, and the files that make up a version have these names.

A version is `<set>/<version>/` with `pack-00001` and so on, `map`, and `manifest`, which comes
last: a version without its manifest does not exist. <version> sorts by time. All of it lies below
`snapshots/` of a target.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from ntt_backup.errors import ConfigError, RemoteError
from ntt_backup.filestore.contract import Area, StoredFileDamaged
from ntt_backup.wire import stored_names
from ntt_backup.wire.stored_names import STAMP, begun, is_set, snapshot_parts

MANIFEST: Final = "manifest"
MAP: Final = "map"
MAX_PACKS: Final = 99_999


class SnapshotDamaged(StoredFileDamaged):
    """A file of a snapshot is not what was written."""


class FileName(NamedTuple):
    """A file of a version."""

    set: str
    version: str
    file: str

    def __str__(self) -> str:
        return f"{self.set}/{self.version}/{self.file}"

    @staticmethod
    def read(name: str) -> FileName:
        """Returns the parts of a name. Raises ValueError for any other form."""
        return FileName(*snapshot_parts(name))


SNAPSHOTS: Final = Area(
    name=stored_names.SNAPSHOTS,
    word="snapshot",
    file="a file of a snapshot",
    files="snapshots",
    most=2_000_000,  # 512 TB of packs: a listing that does not end must not fill the memory.
    sealed=lambda name: not stored_names.is_pin(name),
    first=lambda name: name.endswith(f"/{MANIFEST}"),
)


def require_set(name: str) -> None:
    """Raises ConfigError for what cannot be the name of a set."""
    if not is_set(name):
        raise ConfigError(
            f"{name!r} is not the name of a snapshot set",
            hint="it has at most 31 characters of a-z 0-9 _ -, and begins with a-z or 0-9",
        )


def new_version(now: datetime, newest: str = "") -> str:
    """Returns a name for a new version that nobody else has chosen.

    The name sorts after the newest one, whatever the clock says.

    Raises:
        RemoteError: No name can sort after the newest one.
    """
    try:
        time = max(now, begun(newest) + timedelta(seconds=1)) if newest else now
    except OverflowError:
        raise RemoteError(
            f"no version can be newer than {newest}",
            hint="no take made that version: remove its directory below snapshots/ on the target",
        ) from None
    return f"{stamp(time)}-{secrets.token_hex(4)}"


def stamp(moment: datetime) -> str:
    """Returns a time as it stands in the name of a version."""
    return moment.astimezone(UTC).strftime(STAMP)


def pack_name(set: str, version: str, number: int) -> str:
    """Returns the name of a pack; number counts from 1. Raises ValueError for one too many."""
    if not 1 <= number <= MAX_PACKS:
        raise ValueError(f"a version has at most {MAX_PACKS} packs")
    return f"{set}/{version}/pack-{number:05}"
