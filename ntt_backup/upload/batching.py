"""These decisions are made on batches: where one ends, whether it is sent again, split, given up.

These are the rules that an operator asks about ("why was this batch split?"). They are pure
functions of plain values; whoever calls them decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from ntt_backup.client.backoff import Backoff
from ntt_backup.model import Batch, Failure, Reason

# A batch that grows takes about so long: it is sent again where the link is lost.
_BATCH_SECONDS: Final = 0.5


def fitting(stored: int, seconds: float) -> int:
    """Returns how many blobs, or bytes, fit into the time of a batch, where so many take so many
    seconds.
    """
    return int(stored * _BATCH_SECONDS / max(seconds, 1e-3))


def cut(sizes: Iterable[int], max_blobs: int, max_bytes: int) -> int:
    """Returns how many blobs from the front make the next batch; 0 only for no blobs.

    Args:
        sizes: The sizes of the blobs in bytes; 0 for an unknown size.
        max_blobs: The most blobs in a batch.
        max_bytes: The most bytes of content in a batch, except that a single larger blob travels
            alone.
    """
    total = count = 0
    for size in islice(sizes, max_blobs):
        total += size
        if total > max_bytes and count:
            break
        count += 1
    return count


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
    batch: Batch, detail: str, attempts: int, backoff: Backoff, random: Callable[[], float]
) -> Decision:
    """Returns what to do with a batch that the remote (or the local tar) refused for itself.

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
    """Returns what to send once the link is back, for a batch that had no receipt when it broke.

    A broken link is no blob's failure, so nothing is ever given up here. But a link that breaks
    again and again under the same large batch may carry a smaller one: after every `attempts`
    losses it is halved.
    """
    losses = batch.attempt - batch.refusals
    if losses % attempts == 0 and len(batch.blobs) > 1:
        return split(batch, refusals=batch.refusals)
    return (replace(batch, attempt=batch.attempt + 1),)


def split(batch: Batch, refusals: int) -> tuple[Batch, Batch]:
    """Returns the two halves of a batch of at least two blobs; names grow by 'a' and 'b'."""
    middle = len(batch.blobs) // 2
    half = replace(batch, attempt=refusals + 1, refusals=refusals)
    return (
        replace(half, name=batch.name + "a", blobs=batch.blobs[:middle]),
        replace(half, name=batch.name + "b", blobs=batch.blobs[middle:]),
    )
