"""Ranges of blobids: nothing is left out or taken twice, on any host."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.catalog.range_locks import (
    PARTS,
    RANGES,
    claim_order,
    interval,
    parts,
    prefix_ranges,
    range_name,
    whole_of,
)
from ntt_backup.config.values import parse_prefixes
from ntt_backup.model import BlobRange, Part

HASHES = st.text(alphabet="0123456789abcdef", min_size=64, max_size=64)
WORKERS = [*range(1, 65), 100, 256]


def holds(one: BlobRange, text: str) -> bool:
    """Whether text is in the range, in the order of code points, which is one collation of many."""
    return one.lo <= text and (one.hi is None or text < one.hi)


@given(st.text() | st.text(alphabet="0123456789abcdef", max_size=64))
def test_any_text_lies_in_exactly_one_range(text: str) -> None:
    assert sum(holds(one, text) for one in prefix_ranges()) == 1


@given(st.text(alphabet="0123456789abcdef", min_size=64, max_size=64))
def test_a_blobid_lies_in_the_range_of_its_first_two_digits(blobid: str) -> None:
    (found,) = [one.index for one in prefix_ranges() if holds(one, blobid)]
    assert found == int(blobid[:2], 16)


def test_the_ranges_join_end_to_end_from_the_first_text_to_no_end() -> None:
    ranges = prefix_ranges()
    assert [one.index for one in ranges] == list(range(RANGES))
    assert ranges[0].lo == ""
    assert ranges[-1].hi is None
    assert all(one.hi == following.lo for one, following in itertools.pairwise(ranges))


@given(st.text() | st.text(alphabet="0123456789abcdef", max_size=64))
def test_the_parts_of_a_range_are_the_range(text: str) -> None:
    for whole in prefix_ranges():
        within = [one for one in parts(whole.index) if holds(one, text)]
        assert len(within) == holds(whole, text)


def test_a_part_is_found_by_its_index() -> None:
    for whole in prefix_ranges():
        assert len(parts(whole.index)) == PARTS
        assert [interval(one.index) for one in parts(whole.index)] == list(parts(whole.index))


def test_every_range_and_part_has_an_index_and_a_name_of_its_own() -> None:
    wholes = prefix_ranges()
    pieces = [one for whole in wholes for one in parts(whole.index)]
    everything = [one.index for one in (*wholes, *pieces)]
    assert everything == list(range(RANGES + RANGES * PARTS))
    assert len({range_name(index) for index in everything}) == len(everything)
    assert [whole_of(one.index) for one in wholes] == list(range(RANGES))
    for whole in wholes:
        assert {whole_of(one.index) for one in parts(whole.index)} == {whole.index}
        assert all(
            range_name(one.index)[:2] == range_name(whole.index) for one in parts(whole.index)
        )


@pytest.mark.parametrize("workers", WORKERS)
def test_every_worker_tries_every_range_once(workers: int) -> None:
    for worker in range(workers):
        assert sorted(claim_order(worker, workers)) == list(range(RANGES))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("prefixes", ["a3", "0-7f", "00 3-5 f3 ff"])
def test_workers_of_a_part_try_its_ranges_and_no_other(prefixes: str, workers: int) -> None:
    part = parse_prefixes(prefixes)
    orders = [claim_order(worker, workers, part) for worker in range(workers)]
    assert all(sorted(one) == list(part.prefixes) for one in orders)


@given(st.sets(st.integers(0, 255), min_size=1), st.text() | HASHES)
def test_a_part_is_written_as_it_is_read_and_has_each_text_once(
    numbers: set[int], text: str
) -> None:
    part = Part(tuple(sorted(numbers)))
    assert part.whole or parse_prefixes(str(part)) == part
    spans = [BlobRange(0, lo, hi) for lo, hi in part.spans]
    (index,) = (one.index for one in prefix_ranges() if holds(one, text))
    assert sum(holds(one, text) for one in spans) == (index in numbers)
    if is_blobid(text):
        assert part.has(text) == (index in numbers)


@pytest.mark.parametrize("workers", WORKERS)
def test_workers_start_evenly_spread(workers: int) -> None:
    starts = [claim_order(worker, workers)[0] for worker in range(workers)]
    gaps = [later - earlier for earlier, later in itertools.pairwise([*starts, RANGES])]
    assert max(gaps) - min(gaps) <= 1
    assert min(gaps) >= 1


def test_a_worker_that_is_done_helps_where_the_others_come_to_last() -> None:
    order = claim_order(1, 4)
    assert order[:64] == tuple(range(64, 128))
    assert order[64:70] == (191, 255, 63, 190, 254, 62)
