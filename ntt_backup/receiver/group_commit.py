"""From a committed batch to its receipt: written, synced, named, synced, answered.

A sync covers all that was done before it began. So one sync serves every batch at once: those that
are written get their names when it ends, those that are named their receipts; in steady state that
is one sync a batch, while the next ones are received. A failed sync does not say whose pages were
lost, so it fails every batch without a receipt.
"""

from __future__ import annotations

from collections.abc import Callable

from ntt_backup.receiver.publish import Places
from ntt_backup.receiver.staged_batch import StagedBatch
from ntt_backup.receiver.sync_thread import Barrier
from ntt_backup.receiver.workspace import words
from ntt_backup.wire.framing import MAX_BLOBS
from ntt_backup.wire.write_messages import (
    FAILED,
    MAX_UNSETTLED,
    REFUSED,
    SETTLED,
    Exceptional,
    Receipt,
)


class Settling:
    """Batches between COMMIT and RECEIPT.

    hash: what was checked, for the receipts. answer: takes a receipt. on_failure: told when a sync
    has failed, because the batch that is being received is concerned too.
    """

    def __init__(
        self,
        barrier: Barrier,
        places: Places,
        stage: int,
        hash: int,
        answer: Callable[[Receipt], None],
        on_failure: Callable[[OSError], None],
    ) -> None:
        self._barrier = barrier
        self._places = places
        self._stage = stage
        self._hash = hash
        self._answer = answer
        self._on_failure = on_failure
        self._written: list[StagedBatch] = []
        self._named: list[StagedBatch] = []
        self._covered_written = 0
        self._covered_named = 0
        self._directories: set[str] = set()

    @property
    def unsettled(self) -> int:
        return len(self._written) + len(self._named)

    @property
    def full(self) -> bool:
        """Whether as much is unsettled as may be: no more may come in."""
        waiting = self._written + self._named
        return len(waiting) >= MAX_UNSETTLED or sum(each.blobs for each in waiting) >= MAX_BLOBS

    def commit(self, batch: StagedBatch) -> None:
        """All of the batch is in the stage and right; its receipt follows."""
        self._written.append(batch)

    def advance(self) -> None:
        """Take the end of a sync, and begin the next one where there is something to sync."""
        ended, problem = self._barrier.result() if self._barrier.busy else (False, None)
        if ended and problem is not None:
            self._fail_all(problem)
        elif ended:
            for batch in self._named[: self._covered_named]:
                self._settle(batch)
            del self._named[: self._covered_named]
            self._name(self._covered_written)
        if self._barrier.busy or not self.unsettled:
            return
        if self._barrier.by_file:
            self._name(len(self._written))  # Each file was synced before it was closed.
            if not self._named:
                return
        self._covered_written = len(self._written)
        self._covered_named = len(self._named)
        self._barrier.start(self._directories)
        self._directories = set()

    def fail(self, batch: StagedBatch, problem: OSError) -> None:
        """Nothing of the batch counts: leave nothing of it behind, and say why."""
        batch.discard(self._stage, keep_partials=False)
        why = Exceptional(0, REFUSED, words(problem))
        self._answer(Receipt(batch.number, FAILED, self._hash, 0, [why]))

    def _name(self, count: int) -> None:
        batches = self._written[:count]
        del self._written[:count]
        for batch in batches:
            try:
                self._directories |= self._places.place(batch)
            except OSError as problem:
                self.fail(batch, problem)
            else:
                self._named.append(batch)

    def _settle(self, batch: StagedBatch) -> None:
        stored = batch.blobs - len(batch.exceptions)
        self._answer(Receipt(batch.number, SETTLED, self._hash, stored, batch.exceptions))

    def _fail_all(self, problem: OSError) -> None:
        failed = self._named + self._written
        self._named, self._written, self._directories = [], [], set()
        for batch in failed:
            self.fail(batch, problem)
        self._on_failure(problem)
