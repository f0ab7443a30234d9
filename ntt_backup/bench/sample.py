"""A measurement sends a sample of blobs: few, of all sizes, in the store's own proportions.

A random handful of a store whose sizes span eight powers of ten is either all small blobs or one
film. So each class of sizes gets its share of the count, and within a class blobs are taken from
all of its sizes. A class whose blobs are too large for the whole sample is left out, and is named.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ntt_backup.model import Blob, total_size
from ntt_backup.upload.batching import cut

CLASSES: Final = (
    ("under 1 KB", 10**3),
    ("1-10 KB", 10**4),
    ("10-100 KB", 10**5),
    ("100 KB-1 MB", 10**6),
    ("1-10 MB", 10**7),
    ("10-100 MB", 10**8),
    ("over 100 MB", None),
)
MOST_BLOBS: Final = 50_000
_BATCHES_A_WORKER: Final = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """The blobs that are sent. missing: names of classes that were too large for it."""

    blobs: tuple[Blob, ...]
    missing: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return total_size(self.blobs)


def by_class(blobs: Sequence[Blob]) -> dict[str, list[Blob]]:
    """Returns the blobs of each class that has any: small classes first, small blobs first."""
    found: dict[str, list[Blob]] = {name: [] for name, _ in CLASSES}
    for blob in sorted(blobs, key=lambda one: (one.expected, one.blobid)):
        name = next(name for name, end in CLASSES if end is None or blob.expected < end)
        found[name].append(blob)
    return {name: members for name, members in found.items() if members}


def draw(population: Sequence[Blob], budget: int, most: int = MOST_BLOBS) -> Sample:
    """Returns a sample of the blobs with each size class in its proportion.

    Args:
        population: The blobs, whose sizes must be known.
        budget: The largest size of the sample, in bytes.
        most: The approximate limit of the number of blobs.
    """
    classes = by_class(population)
    missing = []
    for name in reversed(list(classes)):
        if total_size(classes[name]) // len(classes[name]) * 2 <= budget:
            break
        if len(classes) > 1:
            missing.append(name)
            del classes[name]
    left = [blob for members in classes.values() for blob in members]
    share = min(1.0, budget / max(1, total_size(left)), most / len(left))
    chosen = [blob for members in classes.values() for blob in _spread(members, share)]
    return Sample(_within(chosen, budget), tuple(reversed(missing)))


def _spread(members: Sequence[Blob], share: float) -> list[Blob]:
    """Returns about a share of the members, evenly spread over their order; at least one."""
    count = min(len(members), max(1, round(len(members) * share)))
    return [members[(2 * number + 1) * len(members) // (2 * count)] for number in range(count)]


def _within(blobs: Sequence[Blob], budget: int) -> tuple[Blob, ...]:
    """Leaves out as many of the largest as it takes to keep to the budget; at least one stays."""
    kept = sorted(blobs, key=lambda one: one.expected)
    total = total_size(kept)
    while len(kept) > 1 and total > budget:
        total -= kept.pop().expected
    return tuple(kept)


def batches(
    blobs: Sequence[Blob], max_blobs: int, max_bytes: int, workers: int
) -> list[tuple[Blob, ...]]:
    """Cuts batches as a run does, but small enough for every worker to get some."""
    wanted = workers * _BATCHES_A_WORKER
    max_blobs = min(max_blobs, max(1, -(-len(blobs) // wanted)))
    max_bytes = min(max_bytes, max(1, -(-total_size(blobs) // wanted)))
    left = sorted(blobs, key=lambda one: one.blobid)
    found = []
    while left:
        count = cut((blob.expected for blob in left), max_blobs, max_bytes)
        found.append(tuple(left[:count]))
        left = left[count:]
    return found


def deal(dealt: Sequence[tuple[Blob, ...]], workers: int) -> list[list[tuple[Blob, ...]]]:
    """Returns the batches of each worker that gets any: the next largest to whoever has least."""
    hands: list[list[tuple[Blob, ...]]] = [[] for _ in range(workers)]
    held = [0] * workers
    for batch in sorted(dealt, key=lambda one: (-total_size(one), one[0].blobid)):
        least = held.index(min(held))
        hands[least].append(batch)
        held[least] += total_size(batch) + 1
    return [hand for hand in hands if hand]
