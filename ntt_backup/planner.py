"""Every decision that needs no database and no network: cutting, splitting.

These are the rules an operator argues about ("why was this batch split?"), so they are pure
functions of plain values: they can be read in one sitting and tested with thousands of generated
cases. The worker and the coordinator act on what is returned here and decide nothing themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ntt_backup.model import Batch, Blob, Failure, Reason

# How many blobs must have been tried before the store is blamed for what cannot be read.
ENOUGH_TRIED = 1000


def is_full(count: int, size: int, blob: Blob, max_blobs: int, max_bytes: int) -> bool:
    """Whether a batch of count blobs and size bytes ends before this blob.

    It holds at most max_blobs, and at most max_bytes of content, except that a single blob larger
    than max_bytes travels alone. Blobs of unknown size count as empty.
    """
    return count == max_blobs or (count > 0 and size + blob.expected > max_bytes)


def cut(blobs: Sequence[Blob], max_blobs: int, max_bytes: int) -> int:
    """How many blobs from the front make the next batch; 0 only for no blobs."""
    size = 0
    for count, blob in enumerate(blobs):
        if is_full(count, size, blob, max_blobs, max_bytes):
            return count
        size += blob.expected
    return len(blobs)


class Waits(Protocol):
    """Says how long to wait before a further attempt; see `client.backoff.Backoff`."""

    def wait(self, attempt: int, random: Callable[[], float], /) -> float: ...


@dataclass(frozen=True, slots=True)
class Retry:
    """Send the same blobs again, after wait_s seconds."""

    batch: Batch
    wait_s: float


@dataclass(frozen=True, slots=True)
class Split:
    """Send the halves, each as a batch of its own. One that is refused is halved again at once."""

    parts: tuple[Batch, Batch]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The bad blob stands alone: it is failed."""

    failure: Failure


Decision = Retry | Split | GiveUp


def after_rejection(
    batch: Batch, detail: str, attempts: int, backoff: Waits, random: Callable[[], float]
) -> Decision:
    """What to do with a batch that the remote (or the local tar) refused for itself.

    It is retried as a whole until it was refused `attempts` times; then it is halved, until a
    single blob is left that keeps failing. The whole has shown that waiting does not help, so
    halves are split again at once if they are refused. Lost links do not count.
    """
    refusals = batch.refusals + 1
    if refusals < attempts:
        again = replace(batch, attempt=batch.attempt + 1, refusals=refusals)
        return Retry(again, backoff.wait(refusals, random))
    if len(batch.blobs) > 1:
        return Split(split(batch, refusals=attempts - 1))
    return GiveUp(Failure(batch.blobs[0].blobid, Reason.REMOTE_REJECTED, detail))


def after_link_loss(batch: Batch, attempts: int) -> tuple[Batch, ...]:
    """What to send once the link is back, for a batch that had no receipt when it broke.

    A broken link is no blob's failure, so nothing is ever given up here. But a link that breaks
    again and again under the same large batch may carry a smaller one: after every `attempts`
    losses it is halved.
    """
    losses = batch.attempt - batch.refusals
    if losses % attempts == 0 and len(batch.blobs) > 1:
        return split(batch, refusals=batch.refusals)
    return (replace(batch, attempt=batch.attempt + 1),)


def split(batch: Batch, refusals: int) -> tuple[Batch, Batch]:
    """The two halves of a batch of at least two blobs; names grow by 'a' and 'b'."""
    middle = len(batch.blobs) // 2
    half = replace(batch, attempt=refusals + 1, refusals=refusals)
    return (
        replace(half, name=batch.name + "a", blobs=batch.blobs[:middle]),
        replace(half, name=batch.name + "b", blobs=batch.blobs[middle:]),
    )


class Suspicion:
    """Whether it is the store that is to blame, and not the blobs: more than max_share of a batch,
    and of the last thousand blobs with it, cannot be read. Of fewer blobs nothing is said.
    """

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._seen: deque[tuple[int, int]] = deque()

    def falls(self, tried: int, unreadable: int) -> bool:
        """Judge a batch, and remember it."""
        self._seen.append((tried, unreadable))
        lately = sum(one for one, _ in self._seen)
        while lately - self._seen[0][0] >= ENOUGH_TRIED:
            lately -= self._seen.popleft()[0]
        bad = sum(one for _, one in self._seen)
        shares = ((unreadable, tried), (bad, lately))
        return lately >= ENOUGH_TRIED and all(some > self._max_share * of for some, of in shares)
