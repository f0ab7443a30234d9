"""A file store has the files in one area of a target, whatever kind of target that is.

A file is visible all at once, durable and compared by SHA-256, or not at all; it is never written
again. Names are relative to the area, and have the form that the area allows.

A file store trusts nobody: names are checked before they are used, listings are bounded, and when a
file arrived is said by the target itself, not by whoever sent the file.

Any method may raise RemoteUnreachable (retryable), RemoteDenied (no right) or RemoteCannotStore
(the target is full, something else arrived than was sent, or NameTaken).
"""

from __future__ import annotations

from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple, Protocol, TypeVar

from ntt_backup.errors import BackupError, RemoteCannotStore, RemoteDenied, RemoteError
from ntt_backup.wire.stored_names import require_name

Buffer = bytes | bytearray | memoryview
Hash = Literal["sha256", "blake3"]
T = TypeVar("T")

# Of a file whose target does not say when it arrived.
UNKNOWN_ARRIVAL: Final = datetime(1970, 1, 1, tzinfo=UTC)
# More than 100 MB/s carry in 100 ms.
_MOST_AHEAD: Final = 16 << 20


class FileMissing(Exception):
    """The store has no file of that name."""


class FileUnreadable(RemoteDenied):
    """The target does not give the bytes of one file, where it may give those of others."""


class FileArchived(FileUnreadable):
    """A file lies in an archive class of a bucket: the service must thaw it before it is read."""


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
        checksum: The SHA-256 that the target keeps of the file, see `objects.bucket.ObjectInfo`; ""
            where the target keeps none, or does not say.
        etag: What else tells the content from another one; "" for nothing.
    """

    name: str
    size: int
    arrived: datetime
    refused: str = ""
    sealed: bool = False
    checksum: str = ""
    etag: str = ""


class Range(NamedTuple):
    """Bytes of a file."""

    name: str
    start: int
    length: int


class Sum(NamedTuple):
    """The size in bytes and the SHA-256 of a file."""

    size: int
    sha256: bytes


class Progress(NamedTuple):
    """The progress of the files that are written to a store.

    Attributes:
        sent: The bytes that went to the target, with what is around the files.
        added: The bytes that were added to files.
        unsent: Those of them that are still in memory.
        awaited: The number of answers of the target that are awaited.
        answers: The number of answers that have come.
        all_sent: Whether the target has all that it is to answer.
        throttled: When a limit last held data back, in monotonic seconds.
    """

    sent: int
    added: int
    unsent: int
    awaited: int
    answers: int
    all_sent: bool
    throttled: float


class NewFile(Protocol):
    """A file on its way to a store. It has a name after `publish` or `commit`, and not before."""

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


class CommittedFile(NewFile, Protocol):
    """A file that may get its name while others are sent."""

    def commit(self) -> None:
        """Begins what `finish` and `publish` do, in place of these. The store's `wait` goes on with
        that, and nothing is added any more. A file of the same content that has the name already
        will do.
        """
        ...

    @property
    def settled(self) -> bool:
        """Whether the end of `commit` is known."""
        ...

    def result(self) -> StoredFile:
        """Returns the settled file as it is in the store. Raises NameTaken where another content
        has the name.
        """
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


class SharedStore(ReadableStore, Protocol):
    """The same, for several threads at once: `stat`, `fetch` and `prove`."""

    @property
    def hashes(self) -> bool:
        """Whether the target hashes files where they lie, where it can compute the hash."""
        ...

    def stat(self, name: str) -> StoredFile | None:
        """Returns a file with all that the target says of it; None where there is no such file."""
        ...

    def fetch(self, name: str, start: int, length: int) -> bytes:
        """Returns bytes of a file, fewer only at its end. Raises FileMissing, FileUnreadable."""
        ...

    def prove(self, name: str, by: Hash = "sha256") -> str:
        """Returns the hash of a file, which the target has read where the file lies, in the form of
        `StoredFile.checksum`; "" where the target does not compute this hash. Raises FileMissing,
        FileUnreadable.
        """
        ...


class PackTarget(SharedStore, Protocol):
    """The store of an area with packs: files are sent while others get their names.

    Attributes:
        on_wait: Is called while a method waits for the target, and may raise.
    """

    on_wait: Callable[[], None]

    def write(self, name: str, size: int = 0, *, look: bool = False) -> CommittedFile:
        """Begins a file: at most two at a time, beside those that are committed.

        Args:
            name: The name of the file.
            size: About how many bytes the file will have, where it may be very large.
            look: The file may be in the store already. Then nothing is sent of it, and `commit`
                compares. Else NameTaken is raised, now or when the file is published.
        """
        ...

    def wait(self, timeout: float) -> None:
        """Goes on with the files that are committed; waits up to timeout seconds for an answer."""
        ...

    @property
    def progress(self) -> Progress:
        """The progress of all files that were written."""
        ...

    def remove(self, names: Sequence[str]) -> int:
        """See `FileStore`."""
        ...

    def abort(self) -> None:
        """Ends everything immediately, also within `on_wait`. Never raises."""
        ...


class FileStore(ReadableStore, Protocol):
    """The files in an area, which are added and removed, too."""

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
    so that a long link is never idle: at most `most` of them. take returns the bytes for what `ask`
    returned.
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


def not_what_was_sent(area: Area, name: str, ours: Sum, theirs: str) -> RemoteCannotStore:
    """Returns the error for a file of which the remote has something else, in words."""
    return RemoteCannotStore(
        f"{area.file} on the remote's disk is not what was sent",
        detail=f"{name}: {ours.size} bytes with SHA-256 {ours.sha256.hex()} were sent, and the"
        f" remote has {theirs}",
        hint="look at the remote's memory and disk before anything else, and at its kernel log",
    )


def checksum(digest: bytes) -> str:
    """Returns a SHA-256 in the form of `StoredFile.checksum`."""
    return b64encode(digest).decode()
