"""What is decided about dumps without asking: which stay, when one is due, what is whole."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.dump import record
from ntt_backup.dump.chain import restorable
from ntt_backup.dump.job import due
from ntt_backup.dump.record import SERIES, Stored
from ntt_backup.dump.retention import Retention, kept
from tests.unit.sample_records import NOON, RECORD, a_dump

WEEK = 7 * 86400.0

moments = st.datetimes(
    min_value=datetime(2020, 1, 1), max_value=datetime(2030, 1, 1), timezones=st.just(UTC)
)
shelves = st.dictionaries(st.integers(0, 10_000), moments, min_size=1, max_size=60)
rules = st.builds(Retention, st.integers(1, 5), st.integers(0, 10), st.integers(0, 6))


# --- retention ------------------------------------------------------------------------------------


def test_the_last_ones_one_a_day_and_one_a_week_stay() -> None:
    # Four a day, sixty days.
    hours = {n: NOON - timedelta(hours=6 * n) for n in reversed(range(4 * 60))}
    stay = kept(hours, Retention(last=3, daily=7, weekly=4))
    days = {hours[n].date() for n in stay}
    assert {0, 1, 2} <= stay
    assert {NOON.date() - timedelta(days=n) for n in range(7)} <= days
    # 4 March 2026 is a Wednesday: Sundays are the last days of earlier weeks.
    assert {NOON.date() - timedelta(days=n) for n in (3, 10, 17)} <= days
    assert len(stay) == 3 + 6 + 2  # what stays for two reasons counts once
    assert all(hours[n].hour == 18 for n in stay - {0, 1, 2})  # the newest of its day


def test_days_without_a_dump_do_not_count() -> None:
    """Dumps that stopped a year ago are all still there when somebody notices."""
    old = {n: NOON - timedelta(days=365 + n) for n in reversed(range(7))}
    assert kept(old, Retention(last=1, daily=7, weekly=0)) == set(old)


def test_a_clock_that_was_ahead_once_keeps_no_dump_for_ever() -> None:
    ahead = NOON + timedelta(days=3650)
    shelf = {0: NOON, 1: ahead, **{n: NOON + timedelta(days=n) for n in range(2, 20)}}
    assert kept(shelf, Retention(last=2, daily=3, weekly=0)) == {17, 18, 19}


@given(shelves, rules)
def test_the_newest_stays_and_nothing_is_made_up(
    shelf: dict[int, datetime], rule: Retention
) -> None:
    stay = kept(shelf, rule)
    assert stay <= set(shelf)
    assert list(shelf)[-1] in stay
    assert len(stay) <= rule.last + rule.daily + rule.weekly


@given(shelves, rules, moments)
def test_a_newer_dump_removes_at_most_one_for_each_count(
    shelf: dict[int, datetime], rule: Retention, moment: datetime
) -> None:
    newer = max(*shelf.values(), moment) + timedelta(seconds=1)
    before, after = kept(shelf, rule), kept({**shelf, -1: newer}, rule)
    assert -1 in after
    assert after - {-1} <= before
    assert len(before - after) <= 3


# --- when one is due ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "fingerprint", "after", "force", "copied", "why"),
    [
        ([], "5 1 2+3", timedelta(), False, False, "first"),
        ([a_dump()], "5 1 2+3", timedelta(days=6), False, False, ""),
        ([a_dump()], "5 1 2+3", timedelta(days=7), False, False, "old"),
        ([a_dump()], "5 1 2+3", timedelta(days=-8), False, False, "old"),  # a clock that was ahead
        ([a_dump()], "5 1 2+4", timedelta(), False, False, "changed"),
        ([a_dump(fingerprint="")], "", timedelta(), False, False, "changed"),  # nothing is counted
        ([a_dump()], "5 1 2+3", timedelta(), True, False, "asked"),
        ([a_dump(fingerprint="new"), a_dump()], "new", timedelta(), False, False, "changed"),
        ([a_dump()], "5 1 2+3", timedelta(), False, True, "marked"),
        ([a_dump(copied=True)], "5 1 2+3", timedelta(), False, True, ""),
    ],
)
def test_a_dump_is_due_when_it_is_the_first_old_changed_unmarked_or_asked_for(
    known: list[Stored], fingerprint: str, after: timedelta, force: bool, copied: bool, why: str
) -> None:
    assert due(known, fingerprint, NOON + after, WEEK, force=force, copied=copied) == why


# --- names and records ----------------------------------------------------------------------------


def test_dumps_sort_by_number_and_then_by_name() -> None:
    first, ahead, now = a_dump(), a_dump(NOON + timedelta(days=99), number=2), a_dump(number=3)
    unread = replace(ahead, record=None)
    shelf = record.by_age([ahead, unread, now, first])
    assert shelf == [unread, first, ahead, now]


def test_after_the_highest_number_of_all_a_dump_is_still_read_and_the_newest() -> None:
    """A hostile client may have given its own that number."""
    top = a_dump(number=(1 << 53) - 1, format=SERIES, text_sha256="ab")
    number, later = record.next_number([top, a_dump()]), NOON + timedelta(hours=1)
    made = a_dump(later, number=number, format=SERIES, text_sha256="cd", base=top.name)
    assert made.record is not None
    assert record.read(made.record.to_json()) == made.record
    assert record.by_age([made, top]) == [top, made]
    assert restorable([top, made]) == [top, made]


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 3},
        {"bytes": "many"},
        {"sha256": None},
        {"fingerprint": 5},
        {"number": 10**3900},
        {"number": -1},
    ],
)
def test_a_record_that_is_not_understood_is_none(changes: dict[str, object]) -> None:
    assert record.read(json.dumps({**asdict(RECORD), **changes})) is None


@given(st.text() | st.recursive(st.integers() | st.text(), st.lists).map(json.dumps))
def test_no_text_breaks_the_reading_of_records(text: str) -> None:
    assert record.read(text) is None
