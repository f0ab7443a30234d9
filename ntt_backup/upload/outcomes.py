"""What becomes of a batch is decided by its outcome: recorded, sent again, halved, or given up.

A receipt waits to be recorded, without the failures for which the store is suspected. A batch that
failed for itself, or was lost with the link, goes back to the `SendQueue`, and an event says why.
An error of the remote as a whole, or of the store, is raised for the loop. The rules are those of
`batching` and `suspicion`.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from ntt_backup import events
from ntt_backup.client.backoff import Backoff
from ntt_backup.config import RunSettings
from ntt_backup.errors import BackupError, BatchRejected, StoreSuspect
from ntt_backup.model import Batch, Receipt
from ntt_backup.process.messages import Answered
from ntt_backup.upload.batching import GiveUp, Retry, after_link_loss, after_rejection
from ntt_backup.upload.event_pipe import EventPipe
from ntt_backup.upload.outages import Outages
from ntt_backup.upload.queue import SendQueue
from ntt_backup.upload.strategies.session import Outcome
from ntt_backup.upload.suspicion import Judge

# Of a suspect store one batch is tried again with backoff, and the rest after so many of its caps.
_PUT_OFF_CAPS: Final = 10


class Outcomes:
    """Takes in outcomes. receipts: those to be recorded, oldest first. watch: a suspect store is
    waited for.
    """

    def __init__(
        self,
        run: RunSettings,
        backoff: Backoff,
        queue: SendQueue,
        outages: Outages,
        pipe: EventPipe,
        *,
        watch: bool,
    ) -> None:
        self._run = run
        self._backoff = backoff
        self._queue = queue
        self._outages = outages
        self._pipe = pipe
        self._watch = watch
        self._judgement = Judge(run.max_failed_share)
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

    def _judge(self, receipt: Receipt) -> StoreSuspect | None:
        """Keeps a receipt, without the failures for which the store is suspected: their blobs are
        tried again later.
        """
        verdict, now = self._judgement.judge(receipt), time.monotonic()
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
