"""`run.bwlimit`: what holds at which time of the week, by the clock on the wall."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntt_backup.config.bandwidth_timetable import Timetable, describe_limit, parse_timetable

MONDAY = datetime(2026, 3, 2)
NAMES = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str, day: int, time: str) -> int | None:
    hour, minute = map(int, time.split(":"))
    return parse_timetable(text).at(MONDAY + timedelta(days=day, hours=hour, minutes=minute))


@pytest.mark.parametrize("text", [8_000_000, "8MB", "8 MB/s", "8000000"])
def test_a_rate_alone_holds_always(text: object) -> None:
    table = parse_timetable(text)
    assert table.at(MONDAY) == table.at(MONDAY + timedelta(days=6, hours=23)) == 8_000_000
    assert table.next(MONDAY) is None
    assert str(table) == str(text)


OFFICE = "mon-fri 08:00 4MB/s, mon-fri 19:00 off, sat-sun off"


@pytest.mark.parametrize(
    ("text", "day", "time", "rate"),
    [
        ("08:00 4MB/s, 19:00 off", 0, "07:59", None),
        ("08:00 4MB/s, 19:00 off", 0, "08:00", 4_000_000),
        ("08:00 4MB/s, 19:00 off", 6, "18:59", 4_000_000),
        ("08:00 4MB/s, 19:00 off", 6, "19:00", None),
        ("08:00 4 MB/s,19:00 1MiB", 0, "00:00", 1024**2),
        (OFFICE, 0, "00:00", None),
        (OFFICE, 4, "12:00", 4_000_000),
        (OFFICE, 5, "12:00", None),
        # Days with a plan of their own have nothing of the daily one.
        ("08:00 4MB, 19:00 8MB, sun 12:00 off", 6, "09:00", 8_000_000),
        ("08:00 4MB, 19:00 8MB, sun 12:00 off", 6, "20:00", None),
        ("08:00 4MB, 19:00 8MB, sun 12:00 off", 0, "01:00", None),
        ("08:00 4MB, 19:00 8MB, sat-sun off", 5, "00:00", None),
        ("fri-mon 1MB, tue-thu 2MB", 6, "00:00", 1_000_000),
        ("fri-mon 1MB, tue-thu 2MB", 1, "00:00", 2_000_000),
        # As users of rclone write it.
        ("08:00,512kB 12:00,10MB 23:00,off", 2, "13:00", 10_000_000),
        ("Mon-00:00,512kB Fri-23:59,10MB Sat-10:00,1MB Sun-20:00,off", 3, "13:00", 512_000),
        ("Mon-00:00,512kB Fri-23:59,10MB Sat-10:00,1MB Sun-20:00,off", 5, "09:59", 10_000_000),
    ],
)
def test_the_last_rate_before_a_time_holds(
    text: str, day: int, time: str, rate: int | None
) -> None:
    assert at(text, day, time) == rate


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "08:00",
        "08:00 4MB, 19:00",
        "4MB 19:00 off",
        "24:00 4MB, 19:00 off",
        "08:00 4MB, 08:00 off",
        "mon 08:00 4MB, mon-fri 08:00 off",
        "noday 08:00 4MB",
        "08:00 19:00 off",
        "08:00 1B, 19:00 off",
        "08:00 4MB/s 19:00",
        "mon",
        1023,
        True,
        None,
        ["08:00 4MB"],
    ],
)
def test_what_is_no_timetable_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"rate|size|time|range"):
        parse_timetable(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4MB", "at most 4.0 MB/s"),
        ("08:00 4MB, 19:00 off", "no limit until 08:00, then at most 4.0 MB/s"),
        (OFFICE, "no limit until Mon 08:00, then at most 4.0 MB/s"),
        ("08:00 off, 19:00 off", "no limit"),
    ],
)
def test_what_holds_and_what_comes_next_is_told(text: str, said: str) -> None:
    assert describe_limit(parse_timetable(text), MONDAY) == said


tables = st.dictionaries(
    st.tuples(st.integers(0, 6), st.integers(0, 23), st.integers(0, 59)),
    st.one_of(st.none(), st.integers(1024, 10**9)),
    min_size=1,
    max_size=12,
).map(
    lambda changes: parse_timetable(
        ", ".join(
            f"{NAMES[day]} {hour:02}:{minute:02} {'off' if rate is None else rate}"
            for (day, hour, minute), rate in changes.items()
        )
    )
)


@settings(max_examples=25)
@given(tables, st.integers(0, 7 * 24 * 60 - 1))
def test_a_rate_holds_until_the_next_one_and_every_week_is_the_same(
    table: Timetable, minute: int
) -> None:
    when = MONDAY + timedelta(minutes=minute)
    assert table.at(when) == table.at(when + timedelta(days=7))
    step = when
    while table.at(step) == table.at(when) and step < when + timedelta(days=8):
        step += timedelta(minutes=1)
    following = table.next(when)
    if following is None:
        assert step == when + timedelta(days=8)
    else:
        text, rate = following
        assert f"{step:%a %H:%M}".endswith(text)
        assert rate == table.at(step) != table.at(when)


@given(st.integers(0, 2 * 366 * 24 * 60), st.integers(0, 23), st.integers(0, 23))
def test_the_clock_on_the_wall_decides_also_where_it_is_changed(
    minute: int, begin: int, end: int
) -> None:
    table = parse_timetable(f"{begin}:00 1MB, {end}:00 off" if begin != end else "1MB")
    local = (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute)).astimezone(BERLIN)
    inside = begin <= local.hour < end if begin < end else not end <= local.hour < begin
    assert table.at(local) == (1_000_000 if inside or begin == end else None)
