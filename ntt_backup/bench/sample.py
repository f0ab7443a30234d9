"""Which blobs a measurement sends: few, and yet of all sizes in the store's own proportions.

A random handful of a store whose sizes span eight powers of ten is either all small blobs or one
film. So the sizes are cut into classes, each gets its share of the count, and within a class blobs
are taken from all of its sizes. A class whose blobs are larger than the whole sample may be is left
out, and that is said.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ntt_backup.model import Blob, total_size
from ntt_backup.planner import cut

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
_LEAST_OF_A_CLASS: Final = 3
_BATCHES_A_WORKER: Final = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """blobs are those that are sent. missing: names of classes that were too large for it."""

    blobs: tuple[Blob, ...]
    missing: tuple[str, ...]

    @property
    def size(self) -> int:
        return total_size(self.blobs)


def class_of(size: int) -> str:
    """The name of the class that a size in bytes is in."""
    return next(name for name, end in CLASSES if end is None or size < end)


def by_class(blobs: Sequence[Blob]) -> dict[str, list[Blob]]:
    """The blobs of each class there is, smallest class first, each from small to large."""
    found: dict[str, list[Blob]] = {name: [] for name, _ in CLASSES}
    for blob in sorted(blobs, key=lambda one: (one.size or 0, one.blobid)):
        found[class_of(blob.size or 0)].append(blob)
    return {name: members for name, members in found.items() if members}


def draw(population: Sequence[Blob], budget: int) -> Sample:
    """At most budget bytes, each class in its proportion; sizes must be known."""
    classes = by_class(population)
    missing = []
    for name in reversed(list(classes)):
        if total_size(classes[name]) // len(classes[name]) * 2 <= budget:
            break
        if len(classes) > 1:
            missing.append(name)
            del classes[name]
    population = [blob for members in classes.values() for blob in members]
    share = min(1.0, budget / max(1, total_size(population)), MOST_BLOBS / len(population))
    chosen = [blob for members in classes.values() for blob in spread(members, share)]
    return Sample(tuple(within(chosen, budget)), tuple(reversed(missing)))


def draw_class(members: Sequence[Blob], budget: int, most: int) -> tuple[Blob, ...]:
    """Of one class alone: at most budget bytes and most blobs; at least one."""
    share = min(1.0, budget / max(1, total_size(members)), most / len(members))
    return tuple(within(spread(members, share), budget))


def spread(members: Sequence[Blob], share: float) -> list[Blob]:
    """About a share of the members, evenly spread over their order; at least one."""
    count = min(len(members), max(1, round(len(members) * share)))
    return [members[(2 * number + 1) * len(members) // (2 * count)] for number in range(count)]


def within(blobs: Sequence[Blob], budget: int) -> list[Blob]:
    """Without as many of the largest as it takes to keep to budget bytes; at least one is left."""
    kept = sorted(blobs, key=lambda one: one.size or 0)
    total = total_size(kept)
    while len(kept) > 1 and total > budget:
        total -= kept.pop().size or 0
    return kept


def batches(
    blobs: Sequence[Blob], max_blobs: int, max_bytes: int, workers: int
) -> list[tuple[Blob, ...]]:
    """As a run would cut them, in the order of their blobids; but enough for every worker to have
    some, where there are enough blobs.
    """
    wanted = workers * _BATCHES_A_WORKER
    max_blobs = min(max_blobs, max(1, -(-len(blobs) // wanted)))
    max_bytes = min(max_bytes, max(1, -(-total_size(blobs) // wanted)))
    left = sorted(blobs, key=lambda one: one.blobid)
    found = []
    while left:
        count = cut(left, max_blobs, max_bytes)
        found.append(tuple(left[:count]))
        left = left[count:]
    return found


def deal(dealt: Sequence[tuple[Blob, ...]], workers: int) -> list[list[tuple[Blob, ...]]]:
    """The batches of each worker: the next largest to whoever has least; nobody without any."""
    hands: list[list[tuple[Blob, ...]]] = [[] for _ in range(workers)]
    held = [0] * workers
    for batch in sorted(dealt, key=lambda one: (-total_size(one), one[0].blobid)):
        least = held.index(min(held))
        hands[least].append(batch)
        held[least] += total_size(batch) + 1
    return [hand for hand in hands if hand]


def counts(blobs: Sequence[Blob]) -> Mapping[str, Mapping[str, int]]:
    """Blobs and bytes of each class."""
    return {
        name: {"blobs": len(members), "bytes": total_size(members)}
        for name, members in by_class(blobs).items()
    }
