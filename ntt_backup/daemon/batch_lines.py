"""Small batches of a run that watches are told together, so that a quiet daemon logs little.

Blobs that other programs insert one by one make batches of one or two blobs, and a line for each of
these batches would be nearly all of the log. So the first small batch of a worker is told at once,
and what follows within a minute is summed up to one line. Larger batches are told one by one.
A line never comes before its commit; it may come a minute after it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from ntt_backup.events import BatchComplete, MarksLost

SMALL_BLOBS: Final = 16
SMALL_BYTES: Final = 1_000_000
TOGETHER_SECONDS: Final = 60.0


class BatchLines:
    """Holds back the events of small batches. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._held: dict[int | None, BatchComplete] = {}
        self._told: dict[int | None, float] = {}

    def take(
        self, event: BatchComplete | MarksLost, now: float
    ) -> Iterator[BatchComplete | MarksLost]:
        """Takes in a batch of a worker, or what became of earlier ones; yields what is to be told
        now.
        """
        worker, held = event.worker, self._held.pop(event.worker, None)
        small = event.blobs <= SMALL_BLOBS and event.bytes <= SMALL_BYTES
        # The key of its pack is told of each.
        if isinstance(event, MarksLost) or event.pack or not small:
            if held is not None:
                yield held
            yield event
            return
        self._held[worker] = event if held is None else _sum(held, event)
        yield from self.due(now, [worker])

    def due(
        self, now: float, workers: Iterable[int | None] | None = None
    ) -> Iterator[BatchComplete]:
        """Yields what was held back for long enough. workers: only of these; None: of all."""
        for worker in list(self._held) if workers is None else workers:
            if now - self._told.get(worker, -TOGETHER_SECONDS) >= TOGETHER_SECONDS:
                self._told[worker] = now
                yield self._held.pop(worker)

    def rest(self) -> Iterator[BatchComplete]:
        """Yields all that was held back, at the end of a run."""
        while self._held:
            yield self._held.pop(next(iter(self._held)))


def _sum(first: BatchComplete, second: BatchComplete) -> BatchComplete:
    """Returns one event for both, with the name of the later batch."""
    bytes_, duration = first.bytes + second.bytes, first.duration_s + second.duration_s
    batches = first.batches + second.batches
    return replace(
        second,
        batches=batches,
        blobs=first.blobs + second.blobs,
        copied=first.copied + second.copied,
        failed=first.failed + second.failed,
        bytes=bytes_,
        wire_bytes=first.wire_bytes + second.wire_bytes,
        duration_s=duration,
        mb_per_s=bytes_ / max(duration, 1e-6) / 1e6,
        attempt=max(first.attempt, second.attempt),
        answer_s=(first.answer_s * first.batches + second.answer_s * second.batches) / batches,
    )
