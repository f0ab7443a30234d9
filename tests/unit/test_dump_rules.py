"""What is decided about dumps without asking: which stay, when one is due, what is whole."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.config.signing_key import SigningKey, SigningKeys
from ntt_backup.dump import pg_programs, record, retention
from ntt_backup.dump.job import due
from ntt_backup.dump.pg_programs import Programs
from ntt_backup.dump.record import SERIES, Stored
from ntt_backup.dump.restore import nobody_vouches
from ntt_backup.dump.retention import Retention, kept, newest_before, replayed
from ntt_backup.dump.store import restorable
from ntt_backup.errors import DumpFailed, DumpImpossible
from tests.helpers.waiting import PATIENCE
from tests.unit.sample_records import NOON, RECORD, a_dump

WEEK = 7 * 86400.0

moments = st.datetimes(
    min_value=datetime(2020, 1, 1), max_value=datetime(2030, 1, 1), timezones=st.just(UTC)
)
shelves = st.dictionaries(st.integers(0, 10_000), moments, min_size=1, max_size=60)
rules = st.builds(Retention, st.integers(1, 5), *(st.integers(0, most) for most in (10, 6, 5, 4)))


def test_what_comes_after_something_newer_was_put_back() -> None:
    first, second, third = (NOON + timedelta(hours=n) for n in range(3))
    there = [("b", first, 2), ("a", second, 1), ("c", second, 3), ("d", third, 2), ("e", third, 4)]
    assert replayed(there) == {"a": "b", "d": "c"}
    assert replayed(reversed(there)) == {"a": "b", "d": "c"}
    assert replayed([]) == {}


# --- who made it ----------------------------------------------------------------------------------


def test_why_no_dump_comes_back_is_said_of_what_was_asked_for() -> None:
    keys = SigningKeys([SigningKey.of(bytes(32))], Path("host.key"))
    name = a_dump().name
    strangers = [a_dump(), a_dump(number=2, signature=f"{keys.name}:{'0' * 64}")]
    told = nobody_vouches("remote", keys, strangers, None, trust_target=False)
    assert told.message == "no dump on the remote is known to be of this host"
    assert told.detail.startswith("2 dumps of target remote; no key in host.key has signed")
    told = nobody_vouches("remote", keys, strangers[:1], name, trust_target=False)
    assert told.message == f"the dump {name} is not of this host"
    assert "no key of this host has signed it" in told.detail
    told = nobody_vouches("remote", keys, strangers[1:], name, trust_target=False)
    assert told.message == f"the dump {name} is FORGED"
    for each in (None, name):
        told = nobody_vouches("remote", keys, strangers[1:], each, trust_target=each is None)
        assert ("call it with --trust-target" in told.hint) == (each is not None)
    # Those that are forged do not come back by --trust-target alone.
    told = nobody_vouches("remote", keys, strangers[1:], None, trust_target=True)
    assert told.message == "all dumps on the remote are FORGED"
    assert "--dump NAME" in told.hint


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


def test_one_a_month_and_one_a_year_stay() -> None:
    days = {n: NOON - timedelta(days=n) for n in reversed(range(3 * 365))}
    stay = kept(days, Retention(last=1, daily=0, weekly=0, monthly=3, yearly=2))
    # The newest one of each.
    assert [str(days[n].date()) for n in sorted(stay)] == [
        "2026-03-04",
        "2026-02-28",
        "2026-01-31",
        "2025-12-31",
    ]


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
    assert len(stay) <= rule.last + rule.daily + rule.weekly + rule.monthly + rule.yearly


@given(shelves, rules, moments)
def test_a_newer_dump_removes_at_most_one_for_each_count(
    shelf: dict[int, datetime], rule: Retention, moment: datetime
) -> None:
    newer = max(*shelf.values(), moment) + timedelta(seconds=1)
    before, after = kept(shelf, rule), kept({**shelf, -1: newer}, rule)
    assert -1 in after
    assert after - {-1} <= before
    assert len(before - after) <= 5


# --- and what counts for it -----------------------------------------------------------------------

KEYS = SigningKeys([SigningKey.of(bytes(32))], Path("host.key"))
NO_KEYS = SigningKeys((), Path("host.key"), "there is none")


def arrived(days: float, *, late: timedelta = timedelta(), **changes: object) -> Stored:
    """A dump that was begun so many days before noon, and arrived late."""
    begun = NOON - timedelta(days=days)
    return replace(a_dump(begun, **changes), arrived=begun + late)


def test_only_dumps_of_this_host_count_by_its_key_or_by_its_ledger() -> None:
    unsigned = a_dump()
    assert unsigned.record is not None
    signed = replace(unsigned, record=unsigned.record.signed(unsigned.name, KEYS))
    moved = replace(signed, name=record.name_of(NOON, "00000000"))
    nothing = replace(unsigned, record=None)
    found = [unsigned, signed, moved, nothing]
    ledger = {(unsigned.name, unsigned.record.sha256)}
    assert retention.of_host(found, KEYS, ()) == [signed]
    assert retention.of_host(found, NO_KEYS, ()) == []
    # A record of another content under the name of one that was noted.
    assert retention.of_host([a_dump(sha256="cd" * 32)], NO_KEYS, ledger) == []
    assert retention.of_host([unsigned, moved, nothing], NO_KEYS, ledger) == [unsigned]


def test_only_signed_dumps_come_back_unasked_and_all_where_there_is_no_key() -> None:
    ours, other = signed(2, 1), arrived(0.1, number=2)
    assert retention.signed([ours, other], KEYS) == [ours]
    assert retention.signed([ours, other], NO_KEYS) == [ours, other]


@pytest.mark.parametrize(
    ("late", "duration", "odd"),
    [
        (timedelta(hours=23), 1.0, False),
        (timedelta(hours=-23), 1.0, False),
        (timedelta(days=1), 0.0, False),
        (timedelta(days=-1), 0.0, False),
        (timedelta(days=1, microseconds=1), 0.0, True),
        (timedelta(days=-1, microseconds=-1), 0.0, True),
        (timedelta(hours=25), 1.0, True),
        (timedelta(hours=-25), 1.0, True),
        # It takes as long over a slow link, but not for ever.
        (timedelta(days=3), 2.5 * 86400, False),
        (timedelta(days=9), 99 * 86400, True),
        (timedelta(days=9), 1e300, True),
        (timedelta(days=2), -1e300, True),
    ],
)
def test_a_dump_whose_clock_and_arrival_differ_by_more_than_a_day_is_odd(
    late: timedelta, duration: float, odd: bool
) -> None:
    assert bool(retention.doubts([arrived(0, late=late, duration_s=duration)], KEYS)) is odd


@pytest.mark.parametrize("sign", [1, -1])
def test_dumps_with_made_up_times_take_no_place_and_stay(sign: int) -> None:
    rule = Retention(last=2, daily=3, weekly=0)
    good = [arrived(days, number=9 - int(days)) for days in (5, 4, 3, 2, 1)]
    before = retention.staying(good, "new", NOON, rule, KEYS)
    # Twenty that came within an hour, of as many days in the past, or in the future.
    made_up = [
        arrived(days + 0.5, late=timedelta(days=days), number=99 + abs(days))
        for days in range(2 * sign, 22 * sign, sign)
    ]
    after = retention.staying([*made_up, *good], "new", NOON, rule, KEYS)
    assert before <= after
    assert {one.name for one in made_up} <= after
    assert after - before == {one.name for one in made_up}


def test_the_newest_that_was_there_before_the_first_odd_one_stays() -> None:
    rule = Retention(last=1, daily=0, weekly=0)
    good = [arrived(days) for days in (9, 8, 2, 1)]
    odd = arrived(30, late=timedelta(days=25))
    stay = retention.staying([*good, odd], "new", NOON, rule, KEYS)
    assert stay == {"new", odd.name, good[1].name}
    # Who plants another one later makes nothing stay.
    later = arrived(29, late=timedelta(days=27.5))
    stay = retention.staying([*good, odd, later], "new", NOON, rule, KEYS)
    assert stay == {"new", odd.name, later.name, good[1].name}


def test_what_came_at_the_same_moment_was_there_before() -> None:
    there = {"a": NOON, "b": NOON, "c": NOON + timedelta(seconds=1)}
    assert newest_before(NOON, there) == "b"
    assert newest_before(NOON - timedelta(seconds=1), there) == ""


def signed(hours: float, number: int, **changes: Any) -> Stored:
    """A dump of this host that was begun so many hours before noon."""
    one = arrived(hours / 24, number=number, **changes)
    assert one.record is not None
    return replace(one, record=one.record.signed(one.name, KEYS))


@pytest.mark.parametrize(
    ("keys", "forged"),
    [(KEYS, False), (NO_KEYS, False), (NO_KEYS, True)],
    ids=["key", "no key", "no key, and another number"],
)
def test_expired_dumps_that_are_put_back_take_no_place_and_stay(
    keys: SigningKeys, forged: bool
) -> None:
    """Their records are genuine, and garbage of the right size is behind them. Without a key, only
    name and content are known from the catalog, and the record may say any number.
    """
    rule = Retention(last=3, daily=2, weekly=0)
    make = signed if keys == KEYS else lambda hours, number: arrived(hours / 24, number=number)
    dumps = [make(10 - n, n) for n in range(1, 9)]
    good, now = dumps[-3:], NOON - timedelta(minutes=10)
    back = [replace(one, arrived=now + timedelta(minutes=n)) for n, one in enumerate(dumps[:-3])]
    if forged:
        back = [replace(one, record=replace(RECORD, number=99 + n)) for n, one in enumerate(back)]
    before = retention.staying(good, "new", NOON, rule, keys)
    after = retention.staying([*back, *good], "new", NOON, rule, keys)
    assert after == {*before, good[-1].name, *(one.name for one in back)}
    assert retention.doubts([*back, *good], keys) == {
        one.name: f"it has arrived after {good[-1].name}, a newer one" for one in back
    }
    # A dump that comes then, above all their numbers, counts.
    new = make(0, 999)
    assert new.name not in retention.doubts([*back, *good, new], keys)


def test_of_two_dumps_of_one_second_neither_was_put_back_in_any_order() -> None:
    first, second = (
        replace(a_dump(NOON), name=record.name_of(NOON, token), arrived=NOON + timedelta(seconds=n))
        for n, token in enumerate(("bbbbbbbb", "aaaaaaaa"))
    )
    assert retention.doubts([first, second], NO_KEYS) == {}


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2**15)), max_size=15), rules)
def test_whatever_is_put_back_between_dumps_the_good_ones_stay_as_they_would(
    steps: list[tuple[int, int]], rule: Retention
) -> None:
    """Each step is a dump some hours later; then any of those that expired may be put back."""
    now = NOON - timedelta(days=365)
    alone: dict[str, Stored] = {}
    beside: dict[str, Stored] = {}
    made: list[Stored] = []
    for number, (hours, chosen) in enumerate(steps, 1):
        now += timedelta(hours=hours)
        new = signed((NOON - now) / timedelta(hours=1), number)
        made.append(new)
        for there in (alone, beside):
            stay = retention.staying([*there.values()], new.name, now, rule, KEYS)
            for name in there.keys() - stay:
                del there[name]
            there[new.name] = new
        for bit, one in enumerate(made):
            if chosen >> bit & 1 and one.name not in beside:
                beside[one.name] = replace(one, arrived=now + timedelta(minutes=chosen % 2))
        assert {name for name, one in beside.items() if one in made} >= alone.keys()


@pytest.mark.parametrize(
    "changes",
    [{"size": 7}, {"refused": "is not sealed"}, {"base": "20200101T000000Z-00000000.dump"}],
    ids=["another size", "refused", "its base is missing"],
)
def test_a_dump_that_cannot_be_read_stays_as_long_as_a_good_one_and_shrinks_nothing(
    changes: dict[str, Any],
) -> None:
    rule = Retention(last=2, daily=0, weekly=0)
    dumps = [signed(9 - n, n) for n in range(1, 6)]
    bad = signed(4, 5, **changes) if "base" in changes else replace(dumps[-1], **changes)
    stay = retention.staying([*dumps[:-1], bad], "new", NOON, rule, KEYS)
    assert stay == {"new", bad.name, dumps[-2].name}
    # Its time comes as that of others.
    later = [signed(2, 6), signed(1, 7)]
    assert bad.name not in retention.staying([*dumps[:-1], bad, *later], "new", NOON, rule, KEYS)


def test_of_a_record_alone_nothing_stays() -> None:
    rule = Retention(last=9, daily=0, weekly=0)
    dumps = [signed(3, 1), replace(signed(2, 2), size=None)]
    assert retention.staying(dumps, "new", NOON, rule, KEYS) == {"new", dumps[0].name}


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
        ([a_dump(fingerprint="")], "5 1 2+3", timedelta(), False, False, "changed"),
        ([replace(a_dump(), record=None)], "5 1 2+3", timedelta(), False, False, "changed"),
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


def test_a_new_dump_is_the_next_of_all_and_a_catalog_has_its_own() -> None:
    unread = replace(a_dump(), record=None)
    assert [record.next_number(some) for some in ([], [unread], [a_dump(number=7)])] == [1, 1, 8]
    ours = [a_dump(), a_dump(number=2)]
    others = [a_dump(target="usb"), a_dump(database="other"), unread]
    assert record.of_catalog([*others, *ours], "remote", "copyjob") == ours


def test_the_text_of_a_dump_is_what_pg_dump_wrote() -> None:
    assert a_dump().text == (1000, "ab" * 32)
    assert a_dump(format=SERIES, text_bytes=5, text_sha256="cd").text == (5, "cd")
    assert replace(a_dump(), record=None).text == (0, "")


def test_a_record_is_a_line_in_the_order_of_its_names() -> None:
    """Also one that another version has signed, with its fields in another order."""
    line = RECORD.to_json()
    assert line == json.dumps(json.loads(line), sort_keys=True)
    assert [*json.loads(line)] == sorted(
        asdict(RECORD).keys() - {"step", "excluded", "places_bytes", "places_sha256"}
    )
    # The first records had none of these, and are signed without them.
    stepped = replace(RECORD, step=1, excluded=("logs.*",), places_bytes=1, places_sha256="ef")
    assert record.read(stepped.to_json()) == stepped
    assert record.read(line) == RECORD


def test_the_first_records_had_no_number() -> None:
    values = asdict(replace(RECORD, number=0))
    del values["number"]
    assert record.read(json.dumps(values)) == replace(RECORD, number=0)


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
        {"format": 2},
        {"format": 4},
        {"bytes": "many"},
        {"sha256": None},
        {"fingerprint": 5},
        {"number": 10**3900},
        {"number": -1},
        {"step": -1},
        {"duration_s": float("nan")},
        {"duration_s": float("inf")},
    ],
)
def test_a_record_that_is_not_understood_is_none(changes: dict[str, object]) -> None:
    assert record.read(json.dumps({**asdict(RECORD), **changes})) is None


@given(st.text() | st.recursive(st.integers() | st.text(), st.lists).map(json.dumps))
def test_no_text_breaks_the_reading_of_records(text: str) -> None:
    assert record.read(text) is None


# --- with what it is made -------------------------------------------------------------------------


@pytest.mark.parametrize(("server", "fits"), [(160_004, 16), (170_000, 17), (179_999, 17)])
def test_a_pg_dump_that_is_not_older_than_the_server_is_found(
    monkeypatch: pytest.MonkeyPatch, server: int, fits: int
) -> None:
    programs = {
        major: Programs(Path(f"/{major}/pg_dump"), Path(f"/{major}/pg_restore"), f"{major}.1")
        for major in (15, 16, 17)
    }
    monkeypatch.setattr(pg_programs, "_all", lambda *_: list(programs.items()))
    assert pg_programs.find(None, server) is programs[fits]
    with pytest.raises(DumpImpossible, match="older than the server") as caught:
        pg_programs.find(None, 180_000)
    assert "the server has 18" in caught.value.detail


def test_the_pg_restore_that_fits_is_neither_too_old_for_the_dump_nor_much_newer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = [
        (major, Programs(Path(f"/{major}"), Path(str(major)), f"{major}.1"))
        for major in (13, 15, 16, 18)
    ]
    monkeypatch.setattr(pg_programs, "_all", lambda *_: programs)
    for server, made_by, fits in (
        (16, None, 16),
        (16, 16, 16),
        (16, 17, 18),
        (16, 19, 18),
        (14, 13, 15),
        (17, None, 18),
        (19, 13, 18),
        (13, 15, 15),
    ):
        for minor in (0, 9_999):
            found = pg_programs.find_restore(None, server * 10_000 + minor, made_by)
            assert found == Path(str(fits)), (server, made_by)
    for text, major in (("16.4", 16), ("18beta1", 18), ("", None), ("x", None), ("٣", None)):
        assert pg_programs.major_of(text) == major


def script(directory: Path, name: str, text: str) -> Path:
    """Makes a program of the shell."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_programs_are_known_by_what_they_say(tmp_path: Path) -> None:
    def nothing_is_found() -> bool:
        with pytest.raises(DumpImpossible, match="not installed in") as caught:
            pg_programs.find(tmp_path, 160_004)
        return "postgresql-client-16," in caught.value.hint

    assert nothing_is_found()
    pg_dump = script(tmp_path, "pg_dump", 'echo "pg_dump (PostgreSQL) 16.4 (Debian 1)"')
    assert nothing_is_found()
    pg_restore = script(tmp_path, "pg_restore", "exit 1")
    assert pg_programs.find(tmp_path, 160_004) == Programs(pg_dump, pg_restore, "16.4")
    for other in ("echo pg_dump 16.4", "exit 1"):
        script(tmp_path, "pg_dump", other)
        assert nothing_is_found()


def test_programs_are_looked_for_on_the_path_and_where_debian_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("16", "9", "17", "17x"):
        (tmp_path / name / "bin").mkdir(parents=True)
    monkeypatch.setattr(pg_programs, "_DEBIAN", tmp_path)
    packaged = [tmp_path / name / "bin" for name in ("9", "16", "17")]
    for place, first in (("/opt/pg/pg_dump", [Path("/opt/pg")]), (None, [])):
        monkeypatch.setattr("shutil.which", lambda _, place=place: place)
        assert pg_programs._places()[: len(first) + 3] == [*first, *packaged]


def test_pg_dump_has_nothing_to_read_and_its_password_is_no_argument(tmp_path: Path) -> None:
    said = script(tmp_path, "pg_dump", 'cat; echo "$@" "$PGPASSWORD" "$LC_ALL"')
    url = "postgresql://ntt:secret@db/copyjob"
    child = pg_programs.start_pg_dump(said, url, "test", "--compress=0")
    try:
        *options, password, locale = child.output(PATIENCE).decode().split()
    finally:
        child.kill()
    assert {"--format=custom", "--no-password", "--compress=0"} < set(options)
    assert (password, locale) == ("secret", "C")
    assert "secret" not in " ".join(options)


def test_what_pg_restore_reads_of_a_head_is_returned_or_why_it_cannot(tmp_path: Path) -> None:
    head = bytes(range(256)) * 1000
    assert pg_programs.read_head(script(tmp_path, "pg_restore", "cat"), head) == head
    other = script(tmp_path, "other", 'echo "unsupported $1" >&2; exit 3')
    with pytest.raises(DumpFailed, match="pg_restore cannot read the dump") as caught:
        pg_programs.read_head(other, head, "--list")
    assert caught.value.detail == "unsupported --list"


@pytest.mark.parametrize(
    ("status", "said", "detail", "hint"),
    [
        (1, "", "status 1", ""),
        (None, "\n \n", "it did not end in time", ""),
        (1, "one\n\ntwo\n", "one; two", ""),
        (1, "permission denied for table x", "permission denied for", "init-db --print-sql dba"),
        (1, "canceling due to lock timeout", "canceling", "see pg_locks"),
        (1, "timeout", "timeout", ""),
        (1, "x" * 501 + "!", "x" * 499 + "!", ""),
    ],
)
def test_why_pg_dump_failed_is_told(status: int | None, said: str, detail: str, hint: str) -> None:
    failed = pg_programs.pg_dump_failed(status, said)
    assert failed.detail.startswith(detail)
    assert (hint in failed.hint) == (bool(hint) == bool(failed.hint))


@pytest.mark.parametrize(
    ("version", "says", "option"),
    [
        ("17.2", 'connection to server at "/nonexistent" failed', ("--compress=zstd",)),
        ("16.4", "this build does not support compression with ZSTD", ()),
        ("15.7", 'connection to server at "/nonexistent" failed', ()),
    ],
)
def test_a_dump_is_compressed_by_zstd_where_pg_dump_has_that(
    tmp_path: Path, version: str, says: str, option: tuple[str, ...]
) -> None:
    pg_dump = script(tmp_path, "pg_dump", f'echo "pg_dump: error: {says}" >&2; exit 1')
    programs = Programs(pg_dump, tmp_path / "pg_restore", version)
    assert pg_programs.best_compression(programs) == option
