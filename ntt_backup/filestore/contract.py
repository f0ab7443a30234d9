"""A file store has the files in one area of a target, whatever kind of target that is.

A file is visible all at once, durable and compared by SHA-256, or not at all; it is never written
again. Names are relative to the area, and have the form that the area allows.

A file store trusts nobody: names are checked before they are used, listings are bounded, and when a
file arrived is said by the target itself, not by whoever sent the file.

Any method may raise RemoteUnreachable (retryable), RemoteDenied (no right) or RemoteCannotStore
(the target is full, something else arrived than was sent, or NameTaken).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, Protocol, TypeVar

from ntt_backup.errors import BackupError, RemoteDenied, RemoteError
from ntt_backup.wire.stored_names import require_name

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

# Of a file whose target does not say when it arrived.
UNKNOWN_ARRIVAL: Final = datetime(1970, 1, 1, tzinfo=UTC)
# More than 100 MB/s carry in 100 ms.
_MOST_AHEAD: Final = 16 << 20


class FileMissing(Exception):
    """The store has no file of that name."""


class FileUnreadable(RemoteDenied):
    """The target does not give the bytes of one file, where it may give those of others."""


class StoredFileDamaged(RemoteError):
    """A file is not what was written, or cannot be opened. `detail` names the file."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            "a stored file is damaged",
            detail=detail,
            hint="use an older one: `ntt-backup-remote snapshot list` and `ntt-backup-remote dumps`"
            " list them; then make a new one, with --full",
        )


class WholeFileDamaged(StoredFileDamaged):
    """Nothing of a file can be read."""


class Area(NamedTuple):
    """A directory of a target, or a prefix of a bucket, that has files of one purpose.

    Attributes:
        name: Of the directory below the root, see `wire.stored_names`.
        word: Of the receiver's `--allow`.
        file: The noun for one of its files in messages.
        files: The noun for all of them.
        most: The number of files that a target may list.
        replace: Whether `--allow` must list replace before any file may be removed.
        by_shell: Whether the files may lie on a remote without Python.
        denied: The error for a forced command that does not allow the area.
        instead: What else the operator may do then, as it goes on behind a hint.
        sealed: Returns whether a file is sealed where there are recipients, by its name.
        first: Returns whether a file tells, by its name, whether the identities are the right ones.
    """

    name: str
    word: str
    file: str
    files: str
    most: int
    replace: bool = True
    by_shell: bool = False
    denied: type[BackupError] = RemoteDenied
    instead: str = ""
    sealed: Callable[[str], bool] = lambda name: True
    first: Callable[[str], bool] = lambda name: True

    def require_name(self, name: str) -> str:
        """Returns a name of a file in the area. Raises ValueError for any other text."""
        return require_name(self.name, name)


class StoredFile(NamedTuple):
    """A file in a store.

    Attributes:
        name: In the area.
        size: In bytes, before it was sealed.
        arrived: When the file got its name, as the target itself knows it (UTC).
        refused: Why the file must not be read, in words that follow its name; "" where it may be.
        sealed: Whether the file is sealed.
    """

    name: str
    size: int
    arrived: datetime
    refused: str = ""
    sealed: bool = False


class Range(NamedTuple):
    """Bytes of a file."""

    name: str
    start: int
    length: int


class Sum(NamedTuple):
    """The size in bytes and the SHA-256 of a file."""

    size: int
    sha256: bytes


class NewFile(Protocol):
    """A file on its way to a store. It has a name after `publish`, and not before."""

    def add(self, data: Buffer) -> None:
        """Sends the next bytes; the buffer may be changed when this returns."""
        ...

    def poll(self) -> None:
        """Raises what has gone wrong meanwhile, for a caller that has nothing to send for long."""
        ...

    def finish(self) -> Sum:
        """Returns the sum of the file, once all of it is on the target. What lies there is compared
        with it, now or in `publish`: RemoteCannotStore is raised where something else arrived.
        """
        ...

    def publish(self) -> None:
        """Gives a finished file its name, which is durable when this returns. Raises NameTaken."""
        ...

    def discard(self) -> None:
        """Forgets what was sent, unless the file is published. Never raises."""
        ...


class ReadableStore(Protocol):
    """The files in an area, for reading. It is used by one thread at a time."""

    def list(self, below: str = "") -> Iterator[StoredFile]:
        """Yields files; those of one directory stand together, in the order of names.

        Args:
            below: "" for all files; a directory with a slash at its end for the files below that
                directory; the name of a file for that file alone. The cost of the last does not
                grow with the number of files in the store.
        """
        ...

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        """Yields the bytes of each range, in order; fewer only at the end of a file.

        Several ranges are under way at once, and ranges are taken from the iterable a bounded
        number of bytes ahead. Other methods may be called before it has ended. Raises FileMissing,
        FileUnreadable, and StoredFileDamaged for the first range that did not come:
        WholeFileDamaged where no other range of the file would.
        """
        ...

    def close(self) -> None: ...


class FileStore(ReadableStore, Protocol):
    """The same, where files are added and removed, too."""

    @property
    def placed(self) -> bool:
        """Whether the target has a place for blobs: `by-hash`, or the marker of a bucket."""
        ...

    def write(self, name: str) -> NewFile:
        """Begins a file: at most two at a time. Raises NameTaken, now or when it is published."""
        ...

    def try_out(self) -> None:
        """Checks that a file could be stored; nothing of the trial is left after `close`."""
        ...

    def remove(self, names: Sequence[str]) -> int:
        """Removes files in this order; returns how many. A file that does not exist is ignored.
        The target may keep files that it protects. Raises RemoteDenied where it is append-only.
        """
        ...


def ask_ahead(
    ranges: Iterable[Range], most: int, ask: Callable[[Range], T], take: Callable[[T], bytes]
) -> Iterator[bytes]:
    """Yields the bytes of each range, in order; later ranges are asked for before they are wanted,
    so that a long link is never idle.

    Args:
        ranges: What is read.
        most: The number of ranges that are asked for and not answered.
        ask: Asks for a range.
        take: Returns the bytes for what `ask` returned.
    """
    asked: deque[tuple[int, T]] = deque()
    ahead = 0
    for one in ranges:
        while asked and (len(asked) == most or ahead + one.length > _MOST_AHEAD):
            length, answer = asked.popleft()
            ahead -= length
            yield take(answer)
        asked.append((one.length, ask(one)))
        ahead += one.length
    while asked:
        yield take(asked.popleft()[1])
