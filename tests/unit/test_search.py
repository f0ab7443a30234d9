"""Searches among dead entries: everything is looked into once, what is alive soon."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ntt_backup.catalog.pending import Stretch
from ntt_backup.catalog.range_locks import (
    Search,
    cut,
    interval,
    parts,
    prefix_ranges,
    rest_of,
    within,
)
from ntt_backup.model import BlobRange

BLOBIDS = sorted(f"{random.Random(n).getrandbits(256):064x}" for n in range(20_000))
ROWS = 16 * len(BLOBIDS)  # So that a first slice has four of them.
TEXTS = st.text("0123456789abcdefg~ A_", max_size=20)


def holds(one: Stretch, blobid: str) -> bool:
    return one.lo <= blobid and (one.hi is None or blobid < one.hi) and blobid != one.past


@given(
    st.lists(TEXTS, min_size=1, max_size=4, unique=True).map(sorted),
    st.booleans(),
    st.integers(0, 10**9),
    st.integers(1, 300),
    TEXTS,
)
def test_slices_hold_every_blobid_of_their_stretches_once(
    bounds: list[str], endless: bool, rows: int, most: int, blobid: str
) -> None:
    last = [Stretch(9, bounds[-1], None)] if endless else []
    some = [
        *(Stretch(n, *two) for n, two in enumerate(pairwise(bounds))),
        *last,
    ]
    if not some:
        return

    slices = cut(some, rows, most)

    rest = rest_of(some, slices, len(slices))
    assert 1 <= len(slices) <= most
    mine = sum(holds(one, blobid) for one in some)
    assert sum(holds(one, blobid) for one in [*(piece for _, piece in slices), *rest]) == mine


@pytest.mark.parametrize("index", [0, 171, 255])
def test_what_is_begun_goes_on_behind_its_last_blobid(index: int) -> None:
    own = interval(index)
    one = Stretch(index, own.lo, own.hi)
    past = f"{index:02x}8" + "1" * 61
    slices = cut([one], 10**8, 50)

    left = rest_of([one], slices, 3, past)

    assert left == [Stretch(index, past, own.hi, past)]
    assert [piece.past for _, piece in cut(left, 10**8, 3)] == [past, None, None]
    pieces = within(left[0], parts(index))
    assert [piece.index for piece in pieces] == [piece.index for piece in parts(index)][8:]
    assert pieces[0] == Stretch(parts(index)[8].index, past, parts(index)[8].hi, past)


def entries_of(one: Stretch) -> list[str]:
    end = len(BLOBIDS) if one.hi is None else bisect_left(BLOBIDS, one.hi)
    return BLOBIDS[bisect_left(BLOBIDS, one.lo) : end]


class Catalog:
    """Entries of an index, from the first one on, alive or dead. A look ends after so many."""

    def __init__(self, alive: set[str], patience: int, first: str = "") -> None:
        self.alive = alive
        self.patience = patience
        self.first = first
        self.looks = 0
        self.longest = 0
        self.met: list[str] = []

    def look(self, search: Search, wanted: int) -> list[Stretch]:
        slices = search.slices()
        counts: list[int] = []
        met = 0
        for _, piece in slices:
            if counts and met > self.patience:
                break
            entries = [one for one in entries_of(piece) if one >= self.first]
            met += len(entries)
            self.met += entries
            counts.append(sum(one in self.alive for one in entries))
        self.looks += 1
        self.longest = max(self.longest, met)
        return list(search.looked(slices, counts, wanted).stretches)


def whole(catalog: Catalog, wanted: int = 1) -> list[str]:
    """What a search to its end finds, each stretch read to its end."""
    search = Search(prefix_ranges(), ROWS)
    found: list[str] = []
    while search:
        for one in catalog.look(search, wanted):
            found += entries_of(one)
    return found


@settings(max_examples=8, deadline=None)
@given(st.sets(st.integers(0, 255)), st.integers(1, 1000), st.integers(20, 500))
@example({16 * digit + end for digit in range(16) for end in (7, 15)}, 1, 10)  # Of both halves.
def test_a_search_finds_all_there_is_and_hands_nothing_out_twice(
    prefixes: set[int], wanted: int, patience: int
) -> None:
    alive = {one for one in BLOBIDS if int(one[1:3], 16) in prefixes}
    found = whole(Catalog(alive, patience), wanted)

    assert alive <= set(found)
    assert len(found) == len(set(found))


def test_a_search_looks_at_nothing_twice() -> None:
    catalog = Catalog(set(), patience=10)

    whole(catalog)

    assert sorted(catalog.met) == BLOBIDS


def test_no_look_is_long_where_dead_entries_lie_behind_a_gap() -> None:
    catalog = Catalog(set(), patience=10, first="4")
    search = Search([BlobRange(0, "", None)], ROWS)

    while search:
        catalog.look(search, 1)

    assert catalog.longest < 100


@pytest.mark.parametrize(
    "alive",
    [
        pytest.param({one for one in BLOBIDS if one >= "f0"}, id="only the last ranges"),
        pytest.param({one for one in BLOBIDS if one[2] > "1"}, id="behind all beginnings"),
        pytest.param({one for one in BLOBIDS if one[:2] > "80" and one[2] > "6"}, id="both"),
    ],
)
def test_what_is_alive_is_found_after_few_looks(alive: set[str]) -> None:
    catalog = Catalog(alive, patience=1)
    search = Search(prefix_ranges(), ROWS)

    while not catalog.look(search, 100):
        pass

    assert catalog.looks <= 2 * 256


@pytest.mark.parametrize(
    ("stretch", "found"),
    [
        # It begins and ends with a range: nothing of the next one, and `past` is kept.
        (Stretch(0, "10", "20", "10"), [Stretch(1, "10", "20", "10")]),
        (
            Stretch(0, "10", "30", "1000ab"),
            [Stretch(1, "10", "20", "1000ab"), Stretch(2, "20", "30")],
        ),
        # It lies within one, or reaches over a bound.
        (Stretch(0, "12", "18"), [Stretch(1, "12", "18")]),
        (Stretch(0, "12", "28", "12"), [Stretch(1, "12", "20", "12"), Stretch(2, "20", "28")]),
        (Stretch(0, "28", None), [Stretch(2, "28", "30"), Stretch(3, "30", None)]),
        (Stretch(0, "30", "30"), []),
        (Stretch(0, "12", "2000"), [Stretch(1, "12", "2000")]),
    ],
)
def test_what_a_stretch_has_of_each_range(stretch: Stretch, found: list[Stretch]) -> None:
    ranges = [BlobRange(1, "10", "20"), BlobRange(2, "20", "30"), BlobRange(3, "30", None)]

    assert within(stretch, ranges) == found


def test_a_stretch_between_ids_that_are_no_hex_has_all_of_each_range() -> None:
    ranges = [BlobRange(1, "10", "20"), BlobRange(2, "20", None)]
    whole = [Stretch(1, "10", "20"), Stretch(2, "20", None)]

    assert within(Stretch(0, "10", "x"), ranges) == whole
    assert within(Stretch(0, "x", "20"), ranges) == whole


# --- how wide, how many, and in which order -------------------------------------------------------

WHOLE = interval(171)
RANGE = 16**10
# So that a first slice is a sixteenth of a range.
SIXTEENTHS = 64 * 256 * 16


def places(slices: Sequence[tuple[int, Stretch]]) -> list[float]:
    """Where slices of one range end, in sixteenths of it."""
    found = []
    for _, piece in slices:
        digits = (piece.hi or "g")[:12].ljust(12, "0")
        found.append((int(digits, 16) - int(WHOLE.lo.ljust(12, "0"), 16)) * 16 / RANGE)
    return found


@pytest.mark.parametrize(
    ("rows", "most", "widest", "ends"),
    [
        (SIXTEENTHS, 99, 8, [1, 3, 7, 15, 16]),
        (SIXTEENTHS, 99, 2, [1, 3, 5, 7, 9, 11, 13, 15, 16]),
        (SIXTEENTHS, 99, 1, [*range(1, 17)]),
        (SIXTEENTHS, 3, 8, [1, 3, 7]),
        (SIXTEENTHS, 5, 8, [1, 3, 7, 15, 16]),
        (64 * 256, 99, 8, [16]),
        (1, 99, 8, [16]),
        (0, 99, 8, [16]),
        (64 * 16**12, 2, 8, [16 / RANGE, 48 / RANGE]),
        (65 * 16**12, 1, 8, [16 / RANGE]),
    ],
)
def test_each_slice_is_twice_as_wide_as_the_one_before(
    rows: int, most: int, widest: int, ends: list[float]
) -> None:
    one = Stretch(WHOLE.index, WHOLE.lo, WHOLE.hi)
    slices = cut([one], rows, most, widest)
    assert places(slices) == ends
    # A second stretch comes where there is room.
    more = cut([one, one], rows, most, widest)
    assert len(more) == min(2 * len(slices), most) if most == 99 else most
    assert [nth for nth, _ in more] == [0] * len(slices) + [1] * (len(more) - len(slices))


@pytest.mark.parametrize(("wanted", "stretches"), [(1, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_no_more_stretches_are_found_than_are_wanted(wanted: int, stretches: int) -> None:
    search = Search(prefix_ranges(), 1)
    found = search.looked(search.slices(), [0, 5, 0, 4, 6, 0], wanted)
    assert [one.index for one in found.stretches] == [1, 3, 4][:stretches]
    assert found.much == [5, 4, 6][stretches - 1]
    assert search.slices()[0][1].index == [2, 4, 5][stretches - 1]


def test_a_look_is_wider_each_time_until_one_takes_too_long() -> None:
    search = Search([BlobRange(300, "", None)], 64 * 16**6)
    found = []
    for share in (1, 1, 1, 1, 0.5, 1):
        slices = search.slices()
        (_, before), (_, last) = slices[-2:]
        width = int(last.hi or "0", 16) - int(before.hi or "0", 16)
        found.append((len(slices), width // 16**6))
        search.looked(slices, [0] * int(len(slices) * share), 1)
    widths = (8, 16, 32, 64, 64, 8)
    assert found == [(width * width // 2, width) for width in widths]


@pytest.mark.parametrize(
    ("lo", "upper"), [("ab", "ab8"), ("ab7", "abb8"), ("ab8", ""), ("abc", ""), ("abx", "")]
)
def test_the_upper_half_comes_next_as_long_as_less_lies_below(lo: str, upper: str) -> None:
    search = Search([interval(172)])
    search.put_off(Stretch(171, lo, "ac"))
    found: list[Stretch] = []
    while search:
        slices = search.slices()
        found += [piece for _, piece in slices]
        search.looked(slices, [0] * len(slices), 1)
        assert search.again == (len(found) > 1 + bool(upper))
    whole = [(one.index, one.lo.rstrip("0"), (one.hi or "").rstrip("0")) for one in found]
    rest = (171, lo, upper or "ac")
    assert whole == [*[(171, upper, "ac")] * bool(upper), (172, "ac", "ad"), rest]


def test_what_is_put_first_comes_before_all_others() -> None:
    search = Search([interval(5), interval(6)], ROWS)
    search.put_first(within(Stretch(171, "ab", "ac"), parts(171)[:4]))
    found = [piece.index for _, piece in search.slices()]
    assert list(dict.fromkeys(found)) == [*(one.index for one in parts(171)[:4]), 5, 6]


@pytest.mark.parametrize("ends", [("x", None), ("a", "x"), ("x", "xy")])
def test_what_is_no_hex_is_looked_into_as_a_whole(ends: tuple[str, str | None]) -> None:
    search = Search([BlobRange(255, *ends)], ROWS)
    assert search.slices() == [(0, Stretch(255, *ends))]
    search.put_off(Stretch(254, *ends))
    assert search.slices() == [(0, Stretch(255, *ends))]
