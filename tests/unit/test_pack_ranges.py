"""Which bytes of a pack are fetched: all that is wanted, in few requests, none too large."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.pack.format import Entry
from ntt_backup.pack.reader import LARGEST_GAP, LARGEST_RANGE, jobs, merge


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    """Blobs of a pack, of which a few are wanted; also such as only a hostile pack has."""
    found = []
    offset = 0
    sizes = st.one_of(st.integers(0, 20_000), st.integers(0, 2 * LARGEST_RANGE))
    gaps = st.one_of(st.just(0), st.integers(0, 3 * LARGEST_GAP), st.integers(-5000, 0))
    for number in range(draw(st.integers(0, 30))):
        offset = max(0, offset + draw(gaps))
        size = draw(sizes)
        found.append(Entry(number.to_bytes(32, "big"), offset, size, size, 0))
        offset += size
    return draw(st.permutations(found))


@given(entries())
def test_jobs_and_ranges_hold_every_entry_once(wanted: list[Entry]) -> None:
    cut = list(jobs(wanted))
    assert sorted(entry for job in cut for entry in job) == sorted(wanted)
    assert [entry.offset for job in cut for entry in job] == sorted(one.offset for one in wanted)
    for job in cut:
        ranges = list(merge(job))
        assert [entry for one in ranges for entry in one.entries] == job
        for one in ranges:
            assert one.length <= LARGEST_RANGE or len(one.entries) == 1
            for entry in one.entries:
                assert one.start <= entry.offset
                assert entry.offset + entry.stored <= one.start + one.length


@given(entries())
def test_neighbours_are_fetched_at_once_and_what_is_far_is_not(wanted: list[Entry]) -> None:
    ranges = list(merge(sorted(wanted, key=lambda entry: entry.offset)))
    for one, other in pairwise(ranges):
        end = max(entry.offset + entry.stored for entry in other.entries)
        near = other.entries[0].offset - (one.start + one.length) <= LARGEST_GAP
        first = other.entries[0]
        both = max(one.start + one.length, first.offset + first.stored) - one.start
        assert not near or both > LARGEST_RANGE
        assert end <= other.start + other.length
    for one in ranges:
        covered = one.start
        for entry in one.entries:
            assert entry.offset - covered <= LARGEST_GAP
            covered = max(covered, entry.offset + entry.stored)
