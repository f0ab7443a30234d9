"""The ranges of blobids: what workers claim, and in which order they try.

Pure functions. All hosts that share a catalog must agree on the numbers, since a range's index is
its advisory lock.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise, zip_longest

from ntt_backup.model import BlobRange

RANGES = 256
PARTS = 16
# A range is shared with other workers where at least so many blobs are left behind the next batch.
WORTH_SHARING = 256


@cache
def prefix_ranges() -> tuple[BlobRange, ...]:
    """Cuts the whole space of blobids at the two-digit hex prefixes.

    The first range starts at '' and the last has no end, so that every text, also one that is no
    blobid, lies in exactly one range, whatever the database's collation makes of it.
    """
    bounds = ["", *(f"{index:02x}" for index in range(1, RANGES)), None]
    return tuple(
        BlobRange(index, bounds[index] or "", bounds[index + 1]) for index in range(RANGES)
    )


def parts(index: int) -> tuple[BlobRange, ...]:
    """Cuts a range at the third digit. The indexes of the parts follow on those of all ranges."""
    whole = prefix_ranges()[index]
    cuts = [whole.lo, *(f"{index:02x}{part:x}" for part in range(1, PARTS))]
    ends = [*cuts[1:], whole.hi]
    first = RANGES + PARTS * index
    return tuple(BlobRange(first + part, cuts[part], ends[part]) for part in range(PARTS))


def interval(index: int) -> BlobRange:
    """Returns the range, or the part of one, that has this index."""
    if index < RANGES:
        return prefix_ranges()[index]
    return parts(whole_of(index))[(index - RANGES) % PARTS]


def whole_of(index: int) -> int:
    """Returns the index of the range that this is a part of; its own, where it is no part."""
    return index if index < RANGES else (index - RANGES) // PARTS


def range_name(index: int) -> str:
    """Returns the digits that the blobids of a range, or of a part, begin with."""
    return f"{index:02x}" if index < RANGES else f"{index - RANGES:03x}"


def claim_order(worker: int, workers: int) -> tuple[int, ...]:
    """Returns the order in which a worker, counted from 0, tries the ranges.

    The worker tries its own share first, then the shares of the other workers from their ends. Each
    worker works its share upwards, so what is left lies at the ends. Ranges that are done are tried
    last: they are full of dead rows until vacuum runs, and each has to be looked at.
    """
    starts = [one * RANGES // workers for one in range(workers + 1)]
    shares = [range(start, end) for start, end in pairwise(starts)]
    own, *others = shares[worker:] + shares[:worker]
    rest = (one for tier in zip_longest(*map(reversed, others)) for one in tier)
    return (*own, *(one for one in rest if one is not None))
