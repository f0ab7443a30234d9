"""Which bytes of a pack are fetched for which blobs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from ntt_backup.pack.format import Entry

# Bytes that nobody wants cost less than one more request for what is behind them.
LARGEST_GAP: Final = 1 << 20
LARGEST_RANGE: Final = 16 << 20
_JOB_BLOBS: Final = 4096
_JOB_BYTES: Final = 2 * LARGEST_RANGE


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes that are fetched at once, and the entries that lie in them, in the order of offsets.

    length is larger than `most` only for a single entry.
    """

    start: int
    length: int
    entries: tuple[Entry, ...]


def jobs(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Cuts entries, put in the order of their offsets, into pieces of work for several threads."""
    job: list[Entry] = []
    size = 0
    for entry in sorted(entries, key=attrgetter("offset")):
        if job and (len(job) == _JOB_BLOBS or size + entry.stored > _JOB_BYTES):
            yield job
            job, size = [], 0
        job.append(entry)
        size += entry.stored
    if job:
        yield job


def merge(
    entries: Iterable[Entry], gap: int = LARGEST_GAP, most: int = LARGEST_RANGE
) -> Iterator[Range]:
    """Yields the ranges that hold these entries, which come in the order of their offsets. gap: at
    most so many bytes that nobody wants are fetched with them; most: bytes of a range.
    """
    near: list[Entry] = []
    start = end = 0
    for entry in entries:
        new_end = max(end, entry.offset + entry.stored)
        far = entry.offset - end > gap or new_end - start > most
        if near and far:
            yield Range(start, end - start, tuple(near))
            near = []
        if not near:
            start, new_end = entry.offset, entry.offset + entry.stored
        near.append(entry)
        end = new_end
    if near:
        yield Range(start, end - start, tuple(near))
