"""Figures within a bounded time, on a real database: what is counted, and what else is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import uuid4

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog import connection, stats
from ntt_backup.catalog.connection import Connection, connect
from ntt_backup.catalog.history import start_run, update_run
from ntt_backup.catalog.ledger import Ledger, record_checks
from ntt_backup.catalog.schema import init_db
from ntt_backup.catalog.statements import statement
from ntt_backup.catalog.stats import (
    StoredObjects,
    exact_totals,
    pending_estimate,
    stored_objects,
)
from ntt_backup.model import Blob, Failure, PendingEstimate, Reason
from tests.helpers.postgres import TARGET, session
from tests.integration.catalogs import MALFORMED, add, add_hashes, allow_null, rows


def add_many(catalog: Connection, count: int) -> None:
    """Blobs with hashes; every second one has a size."""
    catalog.execute(
        "insert into blobs (blobid, size)"
        " select md5(n::text) || md5((-n)::text), case when n %% 2 = 0 then 1000 end"
        " from generate_series(1, %s) as n",
        [count],
    )


def test_an_estimate_is_exact_where_time_allows(catalog: Connection) -> None:
    allow_null(catalog)
    add(catalog, "0a", "ff", size=21)
    add(catalog, "77", None)

    estimate = pending_estimate(catalog, TARGET, 60_000)

    assert estimate == PendingEstimate(blobs=3, bytes=42, unsized=1, exact=True)


def no_time_for(names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements of these names end at once, as if their time were over."""
    really = statement

    def slow(name: str, **parts: sql.Composable) -> sql.Composed:
        return (
            sql.Composed([sql.SQL("select pg_sleep(60)")])
            if name in names
            else really(name, **parts)
        )

    monkeypatch.setattr(connection, "statement", slow)


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.long), 200])
def test_an_estimate_goes_by_how_close_the_first_blobs_of_each_range_lie(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Also in the middle of a run, where ranges are done or begun."""
    no_time_for(["pending_total"], monkeypatch)
    add_many(catalog, 20_000)
    catalog.execute("update blobs set remote_copied = true where blobid < %s", [f"{first:02x}8"])
    totals = exact_totals(catalog, TARGET)

    estimate = pending_estimate(catalog, TARGET, 8_000)

    assert not estimate.exact
    assert estimate.blobs == pytest.approx(totals.pending, rel=0.1)
    assert estimate.bytes == pytest.approx(totals.pending_bytes, rel=0.15)
    assert estimate.unsized == pytest.approx(totals.unsized, rel=0.15)


def test_ids_that_are_no_hex_are_estimated_too(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_time_for(["pending_total"], monkeypatch)
    add(catalog, *MALFORMED, *(f"zz{n:03}" for n in range(100)), *(f"{n:03}" for n in range(9)))

    assert 0 < pending_estimate(catalog, TARGET, 8_000).blobs <= 109 + len(MALFORMED)


def test_where_reading_is_slow_the_planner_is_asked_and_the_session_left_as_it_was(
    catalog: Connection, catalog_url: str, role: Callable[[], str]
) -> None:
    """Also for a table that was never analyzed."""
    add_hashes(catalog, 3000)
    reader = role()
    for text in (
        "create policy slow on blobs using (pg_sleep(60) is not null)",
        "alter table blobs enable row level security",
        f"grant select on blobs to {reader}",
    ):
        catalog.execute(text.encode())

    with connect(make_conninfo(catalog_url, user=reader), "test") as conn:
        for analyzed in (False, True):
            if analyzed:
                catalog.execute("analyze blobs")
            estimate = pending_estimate(conn, TARGET, 50)
            assert 300 < estimate.blobs < 30_000
            assert not estimate.exact
        assert rows(conn, "show statement_timeout") == [("0",)]
        assert rows(conn, "show lock_timeout") == [("30s",)]


# --- all figures ----------------------------------------------------------------------------------


def test_totals_are_exact_and_add_up(catalog: Connection) -> None:
    allow_null(catalog)
    add(catalog, None, None, None)
    add(catalog, "p1", "p2", size=10)
    add(catalog, "p3", "c3", "f3")
    add(catalog, "c1", "c2", size=100)
    add(catalog, "f1", size=1000)
    Ledger(catalog, TARGET).record(
        [Blob("c1"), Blob("c2"), Blob("c3")],
        [Failure("f1", Reason.MISSING), Failure("f3", Reason.WRONG_SIZE)],
    )

    totals = exact_totals(catalog, TARGET)

    assert totals == stats.Totals(
        pending=3,
        copied=3,
        failed=2,
        pending_bytes=20,
        copied_bytes=200,
        failed_bytes=1000,
        unsized=1,
        without_blobid=3,
        failed_by_reason={"missing": 1, "wrong-size": 1},
        pending_by_reason={},
    )


def test_totals_are_of_one_moment(
    catalog: Connection, catalog_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(catalog, "a", "b")
    really = statement
    with session(catalog_url) as other:

        def meanwhile(name: str, **parts: sql.Composable) -> sql.Composable:
            if name == "uncopied_by_reason":
                other.execute("update blobs set remote_copy_failed = true")
            return really(name, **parts)

        monkeypatch.setattr(connection, "statement", meanwhile)
        totals = exact_totals(catalog, TARGET)
        assert (totals.failed, totals.failed_by_reason) == (0, {})
        totals = exact_totals(catalog, TARGET)
        assert (totals.failed, totals.failed_by_reason) == (2, {"unknown": 2})


def test_what_a_check_made_pending_is_counted_by_its_reason_until_it_is_copied(
    catalog: Connection,
) -> None:
    add(catalog, "a", "b", "c", "d", "e")
    book = Ledger(catalog, TARGET)
    book.record([Blob(one) for one in "abcd"], [Failure("e", Reason.MISSING)])
    lost = [Failure(one, Reason.REMOTE_MISSING) for one in "ab"]
    record_checks(catalog, TARGET, ["d"], [*lost, Failure("c", Reason.REMOTE_CORRUPT)])

    totals = exact_totals(catalog, TARGET)
    assert totals.pending == 3
    assert totals.pending_by_reason == {"remote-missing": 2, "remote-corrupt": 1}
    assert totals.failed_by_reason == {"missing": 1}
    init_db(catalog, "second")
    assert exact_totals(catalog, "second").pending_by_reason == {}

    book.record([Blob("a"), Blob("c")], [])
    assert exact_totals(catalog, TARGET).pending_by_reason == {"remote-missing": 1}


LARGE = ("totals", "pending_total", "uncopied_by_reason")


def test_a_small_table_is_counted(catalog: Connection) -> None:
    add(catalog, "a", "b", "c", size=5)
    Ledger(catalog, TARGET).record([Blob("a")], [Failure("b", Reason.MISSING)])

    totals = stats.quick_totals(catalog, TARGET)

    assert totals == exact_totals(catalog, TARGET)
    assert totals.estimated == ()


def a_run(catalog: Connection, copied: int, size: int) -> None:
    run_id = uuid4()
    start_run(catalog, run_id, TARGET, host="h", pid=1, strategy="tar", workers=1)
    update_run(catalog, run_id, outcome="done", exit_code=0, copied=copied, failed=0, bytes=size)


@pytest.mark.parametrize("noted", [10_000, 0])
def test_a_large_table_is_estimated_and_its_failures_are_counted(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch, noted: int
) -> None:
    """What is copied comes from the history of runs, or, where that does not fit, from the rest."""
    add_many(catalog, 40_000)
    add(catalog, "f1", "f2", "f3", "lost", "gone", size=7)
    catalog.execute("update blobs set remote_copied = true, size = 1000 where blobid < '4'")
    book = Ledger(catalog, TARGET)
    book.record([Blob("lost")], [Failure(one, Reason.MISSING) for one in ("f1", "f2", "gone")])
    book.record([], [Failure("f3", Reason.UNREADABLE)])
    record_checks(catalog, TARGET, [], [Failure("lost", Reason.REMOTE_MISSING)])
    catalog.execute("delete from blobs where blobid = 'gone'")
    catalog.execute("vacuum analyze blobs")
    exact = exact_totals(catalog, TARGET)
    a_run(catalog, noted, noted * 1000)
    no_time_for(LARGE, monkeypatch)
    monkeypatch.setattr(stats, "_FEW", 0)
    monkeypatch.setattr(stats, "_MILLISECONDS", 6_000)

    totals = stats.quick_totals(catalog, TARGET)

    assert totals.pending == pytest.approx(exact.pending, rel=0.1)
    assert totals.pending_bytes == pytest.approx(exact.pending_bytes, rel=0.15)
    assert totals.copied == pytest.approx(exact.copied, rel=0.3)
    assert (totals.copied == noted) == (noted > 0)
    assert totals.copied_bytes == pytest.approx(exact.copied_bytes, rel=0.3)
    assert totals.failed_by_reason == exact.failed_by_reason == {"missing": 2, "unreadable": 1}
    assert totals.pending_by_reason == exact.pending_by_reason == {"remote-missing": 1}
    assert (totals.failed, totals.failed_bytes) == (3, 21)
    assert totals.estimated == ("copied", "copied_bytes", "pending", "pending_bytes", "unsized")


def test_a_long_list_of_failures_is_counted_without_looking_at_their_rows(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_time_for((*LARGE, "listed_by_reason"), monkeypatch)
    monkeypatch.setattr(stats, "_FEW", 0)
    add_many(catalog, 1000)
    add(catalog, "f1", "f2", "lost", size=10)
    book = Ledger(catalog, TARGET)
    book.record([Blob("lost")], [Failure(one, Reason.MISSING) for one in ("f1", "f2")])
    record_checks(catalog, TARGET, [], [Failure("lost", Reason.REMOTE_CORRUPT)])

    totals = stats.quick_totals(catalog, TARGET)

    assert (totals.failed, totals.failed_by_reason) == (2, {"missing": 2})
    assert totals.pending_by_reason == {"remote-corrupt": 1}
    assert {"failed", "failed_bytes"} < set(totals.estimated)


def test_what_another_program_failed_is_seen_where_little_is_left_to_copy(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_time_for(["totals"], monkeypatch)
    monkeypatch.setattr(stats, "_FEW", 0)
    monkeypatch.setattr(stats, "_MILLISECONDS", 60_000)
    allow_null(catalog)
    add(catalog, "a", "theirs", None, size=10)
    catalog.execute("update blobs set remote_copy_failed = true where blobid = 'theirs'")

    totals = stats.quick_totals(catalog, TARGET)

    assert (totals.pending, totals.failed_by_reason) == (1, {"unknown": 1})
    assert totals.without_blobid == 1
    assert totals.estimated == ("copied", "copied_bytes")


def test_objects_of_a_bucket_that_take_too_long_to_count_are_not_told(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(catalog, "0a", size=99)
    add(catalog, "0b", "0c", size=100)
    catalog.execute("update blobs set remote_copied = true")
    counted = StoredObjects(packs=0, pack_bytes=0, large_blobs=2, large_bytes=200)
    for exact in (True, False):
        assert stored_objects(catalog, TARGET, 100, exact=exact) == counted
    no_time_for(["large_copied"], monkeypatch)
    told = stored_objects(catalog, TARGET, 100, exact=False)
    assert told == StoredObjects(packs=0, pack_bytes=0, large_blobs=None, large_bytes=None)
