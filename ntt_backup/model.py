"""The nouns of the system are plain, never changed, and imported by everyone.

The catalog may hold other things than a blobid in that column (it belongs to another program), so a
`Blob` carries whatever text it finds; `layout.relative_path` checks it before it becomes a path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from ntt_backup.wire.framing import MAX_BLOB

# The name of the remote to work with, where there are several.
DEFAULT_TARGET: Final = "remote"
_FAILURES_KEPT: Final = 1000


class Reason(StrEnum):
    """Says why a single blob was failed. The words stand in JSONL and in `ntt_backup.failures`."""

    BAD_BLOBID = "bad-blobid"
    MISSING = "missing"
    UNREADABLE = "unreadable"
    NOT_A_FILE = "not-a-file"
    WRONG_SIZE = "wrong-size"
    CORRUPT_SOURCE = "corrupt-source"
    REMOTE_REJECTED = "remote-rejected"
    # What a check of the remote found; see `verify`. The blob is pending again, not failed.
    REMOTE_MISSING = "remote-missing"
    REMOTE_CORRUPT = "remote-corrupt"
    REMOTE_UNREADABLE = "remote-unreadable"


# No blob is failed for these.
OF_CHECKS: Final = frozenset(
    {Reason.REMOTE_MISSING, Reason.REMOTE_CORRUPT, Reason.REMOTE_UNREADABLE}
)
# What a store that is not whole does to its blobs; those that are no blobid never had a file.
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
    """One row of the catalog on its way. size is in bytes, None while the catalog does not
    know it.

    Nobody changes one. That is not enforced, since a frozen class takes twice as long to make one,
    and one is made for each row.
    """

    blobid: str
    size: int | None = None

    @property
    def expected(self) -> int:
        """Returns the size to reckon with: 0 for a size that is not known, or that no blob can
        have.

        The catalog may hold any number there. One is found wrong when the blob is read; until then
        it may not spoil a sum over its neighbours.
        """
        return self.size if self.size is not None and 0 <= self.size <= MAX_BLOB else 0


@dataclass(frozen=True, slots=True)
class BlobRange:
    """The blobids in [lo, hi) in the catalog's own order; hi None means no upper end.

    index names the range for its advisory lock; it is the same on every host.
    """

    index: int
    lo: str
    hi: str | None


@dataclass(frozen=True, slots=True)
class Batch:
    """Blobs that travel, and are retried, as a whole.

    attempt counts the sendings from 1, refusals those that were refused for the batch itself; the
    others were lost with the link, which is no fault of the batch.

    ranges are the indexes of the claimed ranges the blobs came from; they stay locked until the
    batch is settled.
    """

    name: str
    blobs: tuple[Blob, ...]
    ranges: frozenset[int] = frozenset()
    attempt: int = 1
    refusals: int = 0

    @property
    def size(self) -> int:
        """Bytes of content, as far as sizes are known."""
        return total_size(self.blobs)


@dataclass(frozen=True, slots=True)
class Failure:
    """One blob that cannot be sent, and why. detail is one line for the operator."""

    blobid: str
    reason: Reason
    detail: str = ""


@dataclass(slots=True)
class Failures:
    """Failures, counted by reason. Only the first thousand are kept themselves."""

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
    """A pack in a bucket. checksum: the SHA-256 that the server keeps, or its ETag, see
    `objects.bucket.still`.

    pack_id has 32 hex digits; low and high are its smallest and largest blobid; size is in bytes.
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
    """The answer for a batch: one verdict a blob, given once what is stored is on stable storage.

    stored carries the sizes that were sent, in bytes. wire_bytes is what was handed to the
    transport for this batch. duration_s runs from the batch's start to the answer, answer_s from
    its last byte. packs: those that hold the stored blobs, where the target is a bucket.
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
        if size is not None and 0 <= size <= MAX_BLOB:  # As `Blob.expected`, which is a call each.
            total += size
    return total


@dataclass(frozen=True, slots=True)
class PendingEstimate:
    """Says how much is pending: blobs, their known bytes, and unsized ones. exact: it was counted;
    else it is right within a few per cent, or as good as the planner's statistics.
    """

    blobs: int
    bytes: int
    unsized: int
    exact: bool
