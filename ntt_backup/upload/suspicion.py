"""Blobs that cannot be read are judged: either they are bad, or their store is not whole.

A disk that is not mounted, or a wrong root, looks like thousands of missing blobs. Once most of
what is tried cannot be read, the store is suspect, and from then on no blob is failed for what the
store may have done to it. The first batch that made the store suspect is its sample: the suspicion
ends when most of the sample can be read.

Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from ntt_backup.errors import StoreSuspect
from ntt_backup.format import many
from ntt_backup.model import OF_THE_STORE, Batch, Failure, Receipt

# How many blobs must have been tried before the store is blamed for what cannot be read.
ENOUGH_TRIED = 1000


class Suspicion:
    """Says whether it is the store that is to blame, and not the blobs: more than max_share of a
    batch, and of the last thousand blobs with it, cannot be read. Of fewer blobs nothing is said.
    """

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._seen: deque[tuple[int, int]] = deque()

    def falls(self, tried: int, unreadable: int) -> bool:
        """Judges a batch, and remembers it."""
        self._seen.append((tried, unreadable))
        lately = sum(one for one, _ in self._seen)
        while lately - self._seen[0][0] >= ENOUGH_TRIED:
            lately -= self._seen.popleft()[0]
        bad = sum(one for _, one in self._seen)
        shares = ((unreadable, tried), (bad, lately))
        return lately >= ENOUGH_TRIED and all(some > self._max_share * of for some, of in shares)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement on one receipt. receipt: what is to be recorded. unread: the blobs that are to
    be tried again later. error: why the store is suspect, where these blobs are the sample.
    cleared: the store is no longer suspect.
    """

    receipt: Receipt
    unread: Batch | None = None
    error: StoreSuspect | None = None
    cleared: bool = False


class Judge:
    """Judges the receipts of one worker, one after the other."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._suspicion = Suspicion(max_share)
        self._suspect = False
        self._sample: frozenset[str] = frozenset()

    def judge(self, receipt: Receipt) -> Verdict:
        """Says what of a receipt counts, and what is rather the store's fault."""
        batch, was_suspect = receipt.batch, self._suspect
        ours = [one for one in receipt.failed if one.reason in OF_THE_STORE]
        falls = self._suspicion.falls(len(batch.blobs), len(ours))
        sampled = not self._sample.isdisjoint(blob.blobid for blob in batch.blobs)
        elsewhere = bool(self._sample) and not sampled
        readable = len(ours) <= self._max_share * len(batch.blobs)
        self._suspect = falls or (was_suspect and (elsewhere or not readable))
        cleared = was_suspect and not self._suspect
        if not ours or not (was_suspect or falls):
            return Verdict(receipt, cleared=cleared)
        unread = {one.blobid for one in ours}
        others = tuple(one for one in receipt.failed if one.blobid not in unread)
        again = tuple(blob for blob in batch.blobs if blob.blobid in unread)
        verdict = Verdict(
            replace(receipt, failed=others),
            replace(batch, blobs=again, attempt=batch.attempt + 1),
            cleared=cleared,
        )
        if cleared or elsewhere:
            return verdict
        self._sample = frozenset(unread)
        return replace(verdict, error=_suspect(batch, ours))

    def forget(self) -> None:
        """Takes any batch as the sample: that one will not come again, since its claim is gone."""
        self._sample = frozenset()


def _suspect(batch: Batch, ours: list[Failure]) -> StoreSuspect:
    return StoreSuspect(
        "most of the store cannot be read",
        detail=f"{len(ours):,} of {many(len(batch.blobs), 'blob')} of a batch, and most of"
        f" those before it; {ours[0].reason}: {ours[0].detail}",
        hint="none of these is marked as failed: mount what is missing or mend source.root;"
        f" `ntt-backup-remote requeue --reason {ours[0].reason}` takes back what was marked"
        " before; where they are really gone, run.max_failed_share = 1 has them marked",
    )
