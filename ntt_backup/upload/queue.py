"""The send queue of a worker has what is claimed and not yet sent.

That is blobs, batches to be sent again, and ranges to be tried again later.

Blobs come from the catalog in one order, and leave in batches cut to count and bytes; a batch that
comes back, whole or in halves, goes first as soon as its wait is over. All of it is worth only as
much as the claim it came from: when the connection to the catalog is lost, it is forgotten, since
another worker may claim the same blobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Final

from ntt_backup.model import Batch, Blob, total_size
from ntt_backup.upload.batching import cut, fitting

# A larger batch is claimed in steps: one that is full by its bytes needs no more of them.
STEP: Final = 4096
# What one worker has claimed, no other one can send, and the size of a blob is not known before. So
# the first claim is small, and the next ones have no more blobs than all before.
FIRST_STEP: Final = 250


@dataclass(frozen=True, slots=True)
class _Delayed:
    batch: Batch
    due: float


class SendQueue:
    """Holds what was claimed last, behind less than one batch from before, and the batches that
    wait. Times are monotonic seconds.

    name: what the names of the batches start with. max_blobs and max_bytes: the limits of the first
    batches, and the lowest. most_blobs and most_bytes: what `fit` may raise them to.
    """

    def __init__(
        self, name: str, max_blobs: int, max_bytes: int, most_blobs: int = 0, most_bytes: int = 0
    ) -> None:
        self._name = name
        self._max_blobs = self._least_blobs = max_blobs
        self._most_blobs = max(max_blobs, most_blobs)
        self._max_bytes = self._least_bytes = max_bytes
        self._most_bytes = max(max_bytes, most_bytes)
        # Blobs, and beside them their ranges: pairs would take a third more memory.
        self._blobs: deque[Blob] = deque()
        self._ranges: deque[int] = deque()
        self._size = 0
        # Of all that was ever added.
        self._seen_blobs = self._seen_bytes = 0
        self._delayed: list[_Delayed] = []
        self._put_off: dict[int, float] = {}
        self._batches = 0

    @property
    def missing(self) -> int:
        """Returns the number of blobs to claim next; 0 where a full batch is here."""
        count, left = len(self._blobs), self._max_bytes - self._size
        if left <= 0:
            return 0
        seen = self._seen_blobs
        fits = 1 + left * seen // max(1, self._seen_bytes)
        step = min(STEP, seen, fits) if seen else FIRST_STEP
        return min(step, max(0, self._max_blobs - count))

    def fit(self, stored: int, size: int, seconds: float) -> None:
        """Sets the limits of the next batches by what the last one took: so many of its blobs, of
        so many bytes, were stored, and the answer came so many seconds after it was begun.
        """
        blobs, fits = fitting(stored, seconds), fitting(size, seconds)
        self._max_blobs = max(self._least_blobs, min(blobs, self._most_blobs))
        self._max_bytes = max(self._least_bytes, min(fits, self._most_bytes))

    @property
    def next_due(self) -> float | None:
        """Returns the time when the next delayed batch or range is due; None for no such one."""
        dues = (one.due for one in self._delayed)
        return min((*dues, *self._put_off.values()), default=None)

    @property
    def delayed_blobs(self) -> int:
        """Returns the number of blobs in delayed batches."""
        return sum(len(one.batch.blobs) for one in self._delayed)

    @property
    def delayed(self) -> tuple[Batch, ...]:
        """Returns the delayed batches."""
        return tuple(one.batch for one in self._delayed)

    def ranges(self, now: float) -> frozenset[int]:
        """Returns the ranges of everything here. Those that were put off until now are let go."""
        self._put_off = {index: due for index, due in self._put_off.items() if due > now}
        delayed = (one.batch.ranges for one in self._delayed)
        return frozenset(self._ranges).union(self._put_off, *delayed)

    def add(self, claimed: Iterable[tuple[Blob, int]]) -> None:
        """Appends blobs, each with its range's index."""
        some = list(claimed)
        self._blobs.extend(blob for blob, _ in some)
        self._ranges.extend(index for _, index in some)
        size = total_size(blob for blob, _ in some)
        self._size += size
        self._seen_blobs += len(some)
        self._seen_bytes += size

    def delay(self, batches: Iterable[Batch], due: float = 0.0) -> None:
        """Takes back batches, to be handed out again from that time on; 0: at once."""
        self._delayed += [_Delayed(batch, due) for batch in batches]

    def put_off(self, ranges: Iterable[int], due: float) -> None:
        """Keeps the ranges until that time, without their blobs: there may be millions of them. Who
        claims the ranges then finds the blobs again.
        """
        self._put_off |= dict.fromkeys(ranges, due)

    def hurry(self) -> None:
        """Lets nothing wait any longer."""
        self.recall()
        self._delayed = [_Delayed(one.batch, 0.0) for one in self._delayed]

    def recall(self) -> None:
        """Puts off no range any longer."""
        self._put_off.clear()

    def pop_due(self, now: float) -> Batch | None:
        """Returns a delayed batch whose time has come."""
        for index, one in enumerate(self._delayed):
            if one.due <= now:
                return self._delayed.pop(index).batch
        return None

    def front(self) -> Iterator[Blob]:
        """Yields the blobs of the batch that `pop_new` gives next."""
        return islice(self._blobs, self._next_count())

    def pop_new(self) -> Batch | None:
        """Returns a batch cut from the front of the claimed blobs; None where there are none."""
        count = self._next_count()
        if count == 0:
            return None
        self._batches += 1
        blobs = (self._blobs.popleft() for _ in range(count))
        batch = Batch(
            f"{self._name}.{self._batches}",
            # In this order the remote makes each new directory once.
            tuple(sorted(blobs, key=attrgetter("blobid"))),
            frozenset(self._ranges.popleft() for _ in range(count)),
        )
        self._size -= batch.size
        return batch

    def _next_count(self) -> int:
        sizes = (blob.expected for blob in self._blobs)
        return cut(sizes, self._max_blobs, self._max_bytes)

    def forget(self) -> None:
        """Forgets everything: it is still pending in the catalog."""
        self._blobs.clear()
        self._ranges.clear()
        self._size = 0
        self._delayed.clear()
        self._put_off.clear()
