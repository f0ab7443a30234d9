"""The outcome of a batch decides about the batch: recorded, sent again, halved, or given up.

A receipt waits to be recorded, without the failures for which the store is suspected, and without
those of files that may still be being written: these are tried again until they are old enough. A
batch that failed for itself, or was lost with the link, goes back to the `SendQueue`, and an event
says why. An error of the remote as a whole, or of the store, is raised for the loop. The rules for
batches are those of `batching`.

Blobs that cannot be read are judged: either they are bad, or their store is not whole. A disk that
is not mounted, or a wrong root, looks like thousands of missing blobs. Once most of the blobs that
are tried cannot be read, the store is suspect, and from then on no blob is failed for the store's
sake. The first batch that made the store suspect is its sample: the suspicion ends when most of the
sample can be read.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ntt_backup import events
from ntt_backup.client.backoff import Backoff, Outages
from ntt_backup.config import RunSettings
from ntt_backup.errors import BackupError, BatchRejected, SourceError, StoreSuspect
from ntt_backup.formatting import many
from ntt_backup.model import OF_THE_STORE, Batch, Blob, Failure, Reason, Receipt
from ntt_backup.process.messages import Answered
from ntt_backup.source.store import Store
from ntt_backup.upload.batching import GiveUp, Retry, after_link_loss, after_rejection
from ntt_backup.upload.event_pipe import EventPipe
from ntt_backup.upload.queue import SendQueue
from ntt_backup.upload.strategies.session import Outcome

# Of a suspect store one batch is tried again with backoff, and the rest after so many of its caps.
_PUT_OFF_CAPS: Final = 10
# The waits for blobs that may still be being written, and the most of them to keep in memory.
_LEAST_YOUNG_SECONDS: Final = 2.0
_MOST_YOUNG_SECONDS: Final = 120.0
_MOST_YOUNG: Final = 10_000
# How many blobs must have been tried before the store is blamed for what cannot be read.
ENOUGH_TRIED = 1000


class Outcomes:
    """Takes in outcomes. receipts: those to be recorded, oldest first. watch: a suspect store is
    waited for.
    """

    def __init__(
        self,
        run: RunSettings,
        backoff: Backoff,
        store: Store,
        queue: SendQueue,
        outages: Outages,
        pipe: EventPipe,
        *,
        watch: bool,
    ) -> None:
        self._run = run
        self._backoff = backoff
        self._store = store
        self._queue = queue
        self._outages = outages
        self._pipe = pipe
        self._watch = watch
        self._judgement = Judge(run.max_failed_share)
        # When a blob was first found missing; of a few, as many as are kept in memory.
        self._missing_since: dict[str, float] = {}
        self.receipts: deque[Receipt] = deque()

    def accept(self, outcomes: Iterable[Outcome], *, connected: bool) -> None:
        """Takes in every outcome, and only then raises an error of the remote as a whole: no answer
        is lost because of another one. connected: their session has not ended.
        """
        troubles: list[BackupError] = []
        suspect: StoreSuspect | None = None
        answered = False
        for outcome in outcomes:
            answered = True
            if isinstance(outcome, Receipt):
                suspect = self._judge(outcome) or suspect
            elif isinstance(outcome.error, BatchRejected):
                self.rejected(outcome.batch, outcome.error)
            else:
                troubles.append(outcome.error)
                if outcome.error.retryable:
                    self.resend([outcome.batch], 0.0, outcome.error)
        if troubles:
            raise min(troubles, key=lambda error: error.retryable)
        if answered and connected and not self._outages.back("remote"):
            self._pipe.emit(Answered(what="remote", settled=True))
        if suspect is not None:
            raise suspect

    def rejected(self, batch: Batch, error: BatchRejected) -> None:
        """Handles a batch that failed for itself: sends it again, or its halves, or fails a bad
        blob.
        """
        decision = after_rejection(
            batch, str(error), self._run.attempts, self._backoff, random.random
        )
        if isinstance(decision, Retry):
            self._later([decision.batch], decision.wait_s, error)
        elif isinstance(decision, GiveUp):
            self._judge(Receipt(batch, (), (decision.failure,), 0, 0.0))
        else:
            count = len(batch.blobs)
            self._pipe.emit(events.BatchSplit(batch=batch.name, blobs=count, reason=str(error)))
            self._queue.delay(decision.parts)

    def resend(self, lost: Iterable[Batch], wait_s: float, error: BackupError) -> None:
        """Sends batches again that have no receipt, through no fault of theirs."""
        for batch in lost:
            self._later(after_link_loss(batch, self._run.attempts), wait_s, error)

    def forget(self) -> None:
        """Forgets what was claimed: none of it will come again by itself. Receipts stay."""
        self._queue.forget()
        self._judgement.forget()
        self._missing_since.clear()

    def _judge(self, receipt: Receipt) -> StoreSuspect | None:
        """Keeps a receipt, without the failures for which the store is suspected: their blobs are
        tried again later.
        """
        verdict, now = self._judgement.judge(self._without_young(receipt)), time.monotonic()
        if verdict.receipt.stored or verdict.receipt.failed:
            self.receipts.append(verdict.receipt)
        if verdict.cleared:
            self._queue.recall()
            self._outages.back("suspect")
        if verdict.unread is None or self._pipe.stopping:
            return None
        if verdict.error is None:
            due = now + _PUT_OFF_CAPS * self._run.backoff_cap
            self._queue.put_off(verdict.unread.ranges, due)
        elif not self._watch:
            return verdict.error
        else:
            due = now + self._outages.away("suspect", verdict.error)
            self._queue.delay([verdict.unread], due)
        return None

    def _without_young(self, receipt: Receipt) -> Receipt:
        """Returns a receipt without the failures of blobs that may still be being written. These
        are tried again once they are twice as old; where many wait, later.
        """
        batch, ages = receipt.batch, self._ages(receipt)
        if not ages:
            return receipt
        waiting = self._queue.delayed_blobs + len(ages)
        # The more wait, the rarer they are looked at: that is all that a worker would do.
        share = _MOST_YOUNG_SECONDS * waiting / _MOST_YOUNG
        wait_s = min(max(_LEAST_YOUNG_SECONDS, min(ages.values()), share), _MOST_YOUNG_SECONDS)
        due = time.monotonic() + wait_s
        if waiting > _MOST_YOUNG:
            self._queue.put_off(batch.ranges, due)
        else:
            # A size that was measured while the file was written is none.
            young = tuple(Blob(blob.blobid) for blob in batch.blobs if blob.blobid in ages)
            self._queue.delay([replace(batch, blobs=young)], due)
        first = next(one for one in receipt.failed if one.blobid in ages)
        self._pipe.emit(
            events.BlobsYoung(
                blobs=len(ages), wait_s=wait_s, blobid=first.blobid, reason=first.reason.value
            )
        )
        failed = tuple(one for one in receipt.failed if one.blobid not in ages)
        others = tuple(blob for blob in batch.blobs if blob.blobid not in ages)
        return replace(receipt, batch=replace(batch, blobs=others), failed=failed)

    def _ages(self, receipt: Receipt) -> dict[str, float]:
        """Returns the failed blobs that may still be being written, each with its age in seconds.

        Others are written into the directory of a missing blob again and again. So it is at least
        as old as it has been missing here.
        """
        try:
            ages = self._store.ages_of_young(receipt.failed)
        except SourceError:  # The next batch tells. Of these blobs nothing is known.
            return {one.blobid: 0.0 for one in receipt.failed if one.reason in OF_THE_STORE}
        since, now = self._missing_since, time.monotonic()
        for one in receipt.failed:
            if one.reason is not Reason.MISSING or one.blobid not in ages:
                continue
            missing_s = now - since.get(one.blobid, now)
            if missing_s < self._store.grace:
                ages[one.blobid] = max(ages[one.blobid], missing_s)
                if len(since) < _MOST_YOUNG:
                    since.setdefault(one.blobid, now)
            else:
                del ages[one.blobid]
        for blob in receipt.batch.blobs if since else ():
            if blob.blobid not in ages:
                since.pop(blob.blobid, None)
        return ages

    def _later(self, batches: Sequence[Batch], wait_s: float, error: BackupError) -> None:
        self._queue.delay(batches, time.monotonic() + wait_s)
        for batch in batches:
            self._pipe.emit(
                events.BatchRetry(
                    batch=batch.name,
                    blobs=len(batch.blobs),
                    attempt=batch.attempt,
                    reason=str(error),
                    wait_s=wait_s,
                    cause=events.RETRY_CAUSES.get(type(error), "link"),
                )
            )


# --- the judgement on the store -------------------------------------------------------------------


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
        hint="none of these is marked as failed: mount what is missing or correct source.root;"
        f" `ntt-backup-remote requeue --reason {ours[0].reason}` takes back what was marked"
        " before; where they are really gone, run.max_failed_share = 1 has them marked",
    )
