"""A repository has the files of snapshots below `snapshots/` of one target.

A file is visible all at once, durable and compared by SHA-256, or not at all; it is never written
again. Names are those of `names.FileName`, and relative to `snapshots/`.

Any method may raise RemoteUnreachable (retryable), RemoteDenied (no right) or RemoteCannotStore
(full, something else arrived than was sent, or NameTaken).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final, NamedTuple, Protocol

from ntt_backup.errors import RemoteError

Buffer = bytes | bytearray | memoryview
# In errors.
A_FILE: Final = "a file of a snapshot"


class FileMissing(Exception):
    """The repository has no file of that name."""


class SnapshotDamaged(RemoteError):
    """A file of a snapshot is not what was written."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            "a snapshot is damaged",
            detail=detail,
            hint="restore another version (ntt-backup-remote snapshot list), and take a new one"
            " with --full",
        )


class FileDamaged(SnapshotDamaged):
    """Nothing of a file of a snapshot can be read."""


class StoredFile(NamedTuple):
    """A file that a repository has. size in bytes. arrived: when the file got its name, as the
    target itself knows it (UTC); 1970 where the target does not say.
    """

    name: str
    size: int
    arrived: datetime


class Range(NamedTuple):
    """Bytes of a file."""

    name: str
    start: int
    length: int


class NewFile(Protocol):
    """A file on its way to a repository."""

    def add(self, data: Buffer) -> None:
        """Sends the next bytes; it is done with the buffer when it returns."""
        ...

    def finish(self) -> bytes:
        """Gives the file its name, once it is durable and is what was sent. Returns its SHA-256."""
        ...

    def give_up(self) -> None:
        """Forgets what was sent. Never raises."""
        ...


class RepositoryToRead(Protocol):
    """The files of snapshots on one target. It is used by one thread at a time."""

    def list(self, below: str = "") -> Iterator[StoredFile]:
        """Yields the files below `<set>/`, `<set>/<version>/`, or all; those of one set stand
        together, in the order of names.
        """
        ...

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        """Yields the bytes of each range, in order; fewer only at a file's end.

        Several ranges are under way at once, and ranges are taken from the iterable a bounded
        number of bytes ahead. Other methods may be called before it has ended. Raises FileMissing,
        and SnapshotDamaged for the first range that did not come: FileDamaged where none would.
        """
        ...

    def close(self) -> None: ...


class Repository(RepositoryToRead, Protocol):
    """The same, where files are added and removed, too."""

    def write(self, name: str) -> NewFile:
        """Begins a file: one at a time. Raises NameTaken, now or at its end."""
        ...

    def remove(self, names: Sequence[str]) -> int:
        """Removes files in this order; returns how many. One that is gone is no error. Raises
        RemoteDenied where the target is append-only.
        """
        ...
