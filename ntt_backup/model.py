"""Blobs, batches, failures and receipts: plain values that are never changed.

The column of blobids may hold other text, since the catalog belongs to another program. So a `Blob`
carries any text; `layout.relative_path` checks it before it becomes a path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from ntt_backup.wire.framing import MAX_BLOB

# The name of the target, unless another one is chosen.
DEFAULT_TARGET: Final = "remote"
_FAILURES_KEPT: Final = 1000
_BLOBIDS: Final = 1 << 256
_PREFIXES: Final = 256


class Reason(StrEnum):
    """The reason of a failure. The values are stored in JSONL and in `ntt_backup.failures`."""

    BAD_BLOBID = "bad-blobid"
    MISSING = "missing"
    UNREADABLE = "unreadable"
    NOT_A_FILE = "not-a-file"
    WRONG_SIZE = "wrong-size"
    CORRUPT_SOURCE = "corrupt-source"
    REMOTE_REJECTED = "remote-rejected"
    # Findings of `verify`. The blob is pending again, not failed.
    REMOTE_MISSING = "remote-missing"
    REMOTE_CORRUPT = "remote-corrupt"
    REMOTE_UNREADABLE = "remote-unreadable"
    # Its files are gone, and `prune` removes the blob from the target.
    PRUNED = "pruned"


# A longer path has no room in an index of PostgreSQL, which takes 2,704 bytes.
MOST_PATH_BYTES: Final = 2560


class FileReason(StrEnum):
    """The reason for which a file that goes by its path has no blob, or not that of today."""

    MISSING = "missing"
    UNREADABLE = "unreadable"
    NOT_A_FILE = "not-a-file"
    WRONG_SIZE = "wrong-size"
    WRONG_CHECKSUM = "wrong-checksum"
    BAD_PATH = "bad-path"
    CHANGED = "changed"


# The reasons for which no blob is failed.
OF_CHECKS: Final = frozenset(
    {Reason.REMOTE_MISSING, Reason.REMOTE_CORRUPT, Reason.REMOTE_UNREADABLE}
)
# The reasons for which no blob becomes pending again unless somebody asks for that one reason.
NOT_REQUEUED: Final = OF_CHECKS | {Reason.PRUNED}
# The reasons that an incomplete store causes. A malformed blobid never had a file.
OF_THE_STORE: Final = frozenset(
    {
        Reason.MISSING,
        Reason.UNREADABLE,
        Reason.NOT_A_FILE,
        Reason.WRONG_SIZE,
        Reason.CORRUPT_SOURCE,
    }
)


@dataclass(slots=True, unsafe_hash=True)
class Blob:
    """A row of the catalog.

    A blob is never changed, which is not enforced: instances of a frozen class take twice as long
    to make, and there is one for each row.

    Attributes:
        blobid: The text in the catalog.
        size: The size in bytes; None if the catalog does not know it.
    """

    blobid: str
    size: int | None = None

    @property
    def expected(self) -> int:
        """The size for sums; 0 for a size that is unknown or impossible.

        The catalog may hold any number. A wrong size is found when the blob is read; until then it
        must not distort sums.
        """
        return self.size if self.size is not None and 0 <= self.size <= MAX_BLOB else 0


class ListedFile(NamedTuple):
    """A file that goes by its path, as the catalog or a places file lists it.

    Attributes:
        blobid: The blob that is its content; None where the file was never read.
        path: Its path.
        size: The size in bytes; None if unknown.
        mtime_ns: The modification time in nanoseconds; None if unknown.
        mode: The permission bits; None if unknown.
        origin: The name of what lists the file; "" for the query.
        gone: Whether its origin does not list it any more.
    """

    blobid: str | None
    path: bytes
    size: int | None
    mtime_ns: int | None
    mode: int | None
    origin: str = ""
    gone: bool = False


class BadFile(NamedTuple):
    """A file that goes by its path, and could not be read.

    young: it may still be being written, so it is read later.
    """

    reason: FileReason
    detail: str
    young: bool = False


class ReadFile(NamedTuple):
    """A file that goes by its path, and was read for the first time.

    Attributes:
        blob: The blob that is its content.
        mtime_ns: The modification time in nanoseconds.
        mode: The permission bits.
    """

    blob: Blob
    mtime_ns: int
    mode: int


@dataclass(frozen=True, slots=True)
class BlobRange:
    """The blobids in [lo, hi) in the order of the catalog.

    Attributes:
        index: The number of the range for its advisory lock, the same on all hosts.
        lo: The first blobid.
        hi: The end; None for no end.
    """

    index: int
    lo: str
    hi: str | None


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several equal parts of the space of blobids, which together are all of it.

    Attributes:
        number: The number of the part, counted from 1.
        count: The number of parts.
    """

    number: int = 1
    count: int = 1

    @property
    def first(self) -> int:
        """The first blobid, as a number."""
        return (self.number - 1) * _BLOBIDS // self.count

    @property
    def end(self) -> int:
        """The number behind the last blobid."""
        return self.number * _BLOBIDS // self.count

    @property
    def lo(self) -> str:
        """The first text; that of the first part is before any text, also one that is no blobid."""
        return "" if self.number == 1 else f"{self.first:064x}"

    @property
    def hi(self) -> str | None:
        """The text behind the last one; None for no end."""
        return None if self.number == self.count else f"{self.end:064x}"

    def has(self, blobid: str) -> bool:
        return self.lo <= blobid and (self.hi is None or blobid < self.hi)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}" if self.count > 1 else ""


WHOLE: Final = Shard()


@dataclass(frozen=True, slots=True)
class Part:
    """The part of the store that a host holds: all blobids that begin with certain digits.

    A text that is no blobid belongs to the part in whose ranges the catalog sorts it.

    Attributes:
        prefixes: The first two digits of these blobids, as numbers, in order.
    """

    prefixes: tuple[int, ...] = tuple(range(_PREFIXES))

    @property
    def whole(self) -> bool:
        """Whether the part is all of the store."""
        return len(self.prefixes) == _PREFIXES

    @property
    def spans(self) -> list[tuple[str, str | None]]:
        """The ranges of texts, neighbours joined: the first text, and the end; None for no end."""
        return [
            (f"{first:02x}" if first else "", f"{last + 1:02x}" if last < _PREFIXES - 1 else None)
            for first, last in self._runs
        ]

    @property
    def words(self) -> list[str]:
        """A line about the part and the rest; none if the part is all of the store."""
        text = f"the blobs of {self} alone (source.prefixes); the rest belongs to other hosts"
        return [] if self.whole else [text]

    def has(self, digits: str) -> bool:
        """Returns whether the part has a blobid. digits: at least its first two."""
        return int(digits[:2], 16) in self.prefixes

    @property
    def _runs(self) -> Iterator[tuple[int, int]]:
        """The first and the last of prefixes that follow each other."""
        known = set(self.prefixes)
        ends = (one for one in self.prefixes if one + 1 not in known)
        return zip((one for one in self.prefixes if one - 1 not in known), ends, strict=True)

    def __str__(self) -> str:
        """Returns the prefixes as the settings have them, such as `00-7f a3`; "" for all."""
        runs = [] if self.whole else self._runs
        return " ".join(
            f"{one:02x}" if one == last else f"{one:02x}-{last:02x}" for one, last in runs
        )


ALL_BLOBS: Final = Part()


@dataclass(frozen=True, slots=True)
class Batch:
    """Blobs that are sent, and retried, as a whole.

    Attributes:
        name: The name, unique within the run.
        blobs: The blobs.
        ranges: The indexes of the claimed ranges of the blobs. They remain locked until the batch
            is settled.
        attempt: The number of this attempt, counted from 1.
        refusals: The attempts that were refused for the sake of the batch. The other attempts were
            lost with the link.
    """

    name: str
    blobs: tuple[Blob, ...]
    ranges: frozenset[int] = frozenset()
    attempt: int = 1
    refusals: int = 0

    @property
    def size(self) -> int:
        """The bytes of content, as far as sizes are known."""
        return total_size(self.blobs)


@dataclass(frozen=True, slots=True)
class Failure:
    """A blob that cannot be sent, and the reason. detail: one line for the operator."""

    blobid: str
    reason: Reason
    detail: str = ""


@dataclass(slots=True)
class Failures:
    """Failures, counted by reason. Only the first thousand are kept."""

    counts: Counter[Reason] = field(default_factory=Counter)
    first: list[Failure] = field(default_factory=list)

    def __len__(self) -> int:
        return self.counts.total()

    def add(self, failure: Failure) -> None:
        self.counts[failure.reason] += 1
        if len(self.first) < _FAILURES_KEPT:
            self.first.append(failure)


@dataclass(frozen=True, slots=True)
class StoredPack:
    """A pack of a target, as the ledger has it.

    Attributes:
        pack_id: 32 hex digits.
        key: The name of the file.
        low: The smallest blobid.
        high: The largest blobid.
        blobs: The number of blobs.
        size: The size of the file in bytes.
        checksum: The SHA-256 that the target told, or an ETag, see `objects.bucket.still`.
    """

    pack_id: str
    key: str
    low: str
    high: str
    blobs: int
    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer for a batch, given once its stored blobs are on stable storage.

    Attributes:
        batch: The batch.
        stored: The stored blobs, with the sizes that were sent.
        failed: The failures of the other blobs.
        wire_bytes: The bytes that were handed to the transport for the batch.
        duration_s: The seconds from the start of the batch to the answer.
        packs: The packs that hold the stored blobs, if the target has packs.
        answer_s: The seconds from the last byte of the batch to the answer.
    """

    batch: Batch
    stored: tuple[Blob, ...]
    failed: tuple[Failure, ...]
    wire_bytes: int
    duration_s: float
    packs: tuple[StoredPack, ...] = ()
    answer_s: float = 0.0

    @property
    def stored_bytes(self) -> int:
        return total_size(self.stored)


def total_size(blobs: Iterable[Blob]) -> int:
    """Returns the bytes of the blobs whose size is known."""
    total = 0
    for blob in blobs:
        size = blob.size
        if size is not None and 0 <= size <= MAX_BLOB:  # As `Blob.expected`, without a call.
            total += size
    return total


@dataclass(frozen=True, slots=True)
class PendingEstimate:
    """The pending blobs.

    Attributes:
        blobs: The number of blobs.
        bytes: The sum of the known sizes.
        unsized: The number of blobs without a known size.
        exact: Whether the blobs were counted. An estimate is correct within a few per cent, or as
            good as the statistics of the planner.
    """

    blobs: int
    bytes: int
    unsized: int
    exact: bool
