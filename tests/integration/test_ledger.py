"""The ledger on a real database: what was copied or failed is recorded whole, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog import connection, ledger
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.ledger import (
    Ledger,
    record_checks,
    record_sizes,
    register_blobs,
    requeue,
)
from ntt_backup.catalog.schema import init_db
from ntt_backup.catalog.stats import exact_totals
from ntt_backup.errors import CatalogRefused, CatalogUnavailable
from ntt_backup.model import Blob, Failure, Reason
from tests.helpers.postgres import TARGET, session
from tests.integration.catalogs import MALFORMED, add, losing, rows, state, stubborn


def test_a_receipt_is_recorded(catalog: Connection) -> None:
    add(catalog, "stored", "bad", "untouched")
    add(catalog, "sized", size=5)

    Ledger(catalog, TARGET).record(
        [Blob("stored", 3), Blob("sized", 99)], [Failure("bad", Reason.CORRUPT_SOURCE, "differs")]
    )

    assert state(catalog) == {
        "stored": (True, True, False, 3),
        "sized": (True, True, False, 5),
        "bad": (None, False, True, None),
        "untouched": (None, False, None, None),
    }
    assert rows(
        catalog, "select target, blobid, reason, detail, attempts from ntt_backup.failures"
    ) == [(TARGET, "bad", "corrupt-source", "differs", 1)]


def test_of_blobs_that_were_recorded_those_without_a_mark_are_found(catalog: Connection) -> None:
    """A row that its owner has removed meanwhile is no lost mark."""
    add(catalog, "marked", "lost")
    made = Ledger(catalog, TARGET)
    made.record([Blob("marked", 3)], [])
    assert made.unrecorded({"marked", "lost", "removed"}) == {"lost"}
    assert made.unrecorded({"marked"}) == set()


def test_nothing_but_the_batch_is_marked_and_all_of_it_in_whatever_state(
    catalog: Connection,
) -> None:
    """Others insert between the blobs of a batch, mark some of it, and put blobs into the way."""
    before, between, behind = "0a1", "0a3", "0a5"
    batch = ["0a2", "0a4", "0a41", "0b", "ff", 'a "quote\\', "null"]
    add(catalog, before, between, behind, *batch)
    catalog.execute("update blobs set remote_copied = true, size = 8 where blobid = '0b'")
    catalog.execute("update blobs set remote_copied = false where blobid = '0a4'")

    for _ in range(2):
        Ledger(catalog, TARGET).record([Blob(one, nth) for nth, one in enumerate(batch)], [])

        marked = {one: (True, True, False, nth) for nth, one in enumerate(batch)}
        assert state(catalog) == {
            **dict.fromkeys((before, between, behind), (None, False, None, None)),
            **marked,
            "0b": (True, True, False, 8),
        }


def test_the_key_of_a_table_that_init_db_made_has_room_for_all_marks(catalog: Connection) -> None:
    names = [f"{number:064x}" for number in range(3000)]
    register_blobs(catalog, [Blob(one, 1) for one in names])
    size = "select pg_relation_size('blobs_pkey')"
    before = rows(catalog, size)
    book = Ledger(catalog, TARGET)

    for start in range(0, len(names), 1000):
        book.record([Blob(one, 1) for one in names[start : start + 1000]], [])

    assert rows(catalog, size) == before


@pytest.mark.parametrize(
    ("kind", "largest"),
    [
        ("integer", 2**31 - 1),
        ("numeric(7, 2)", 99_999),
        ("bigint", 2**63 - 1),
    ],
)
def test_a_size_that_the_column_cannot_hold_is_left_out(
    database: Connection, kind: str, largest: int
) -> None:
    database.execute(f"create table blobs (blobid text primary key, size {kind})".encode())
    init_db(database, TARGET)
    add(database, "largest", "larger")
    larger = min(largest + 1, 2**63 - 1)

    Ledger(database, TARGET).record([Blob("largest", largest), Blob("larger", larger)], [])
    register_blobs(database, [Blob("found", largest), Blob("found larger", larger)])

    left = largest if larger == largest else None
    assert {blobid: (copied, size) for blobid, (copied, *_, size) in state(database).items()} == {
        "largest": (True, largest),
        "larger": (True, left),
        "found": (None, largest),
        "found larger": (None, left),
    }


def test_a_failure_that_is_told_late_leaves_alone_what_another_has_copied(
    catalog: Connection,
) -> None:
    """As after an outage of the catalog, in which the claim went to another host."""
    add(catalog, "0a", "0b")
    Ledger(catalog, TARGET).record([Blob("0a", 1)], [])

    late = [Failure(one, Reason.UNREADABLE) for one in ("0a", "0b")]
    Ledger(catalog, TARGET).record([], late)

    assert state(catalog) == {"0a": (True, True, False, 1), "0b": (None, False, True, None)}
    assert rows(catalog, "select blobid from ntt_backup.failures") == [("0b",)]


def test_a_failure_counts_its_attempts_until_it_is_stored(catalog: Connection) -> None:
    add(catalog, "bad")
    book = Ledger(catalog, TARGET)

    book.record([], [Failure("bad", Reason.MISSING, "first")])
    book.record([], [Failure("bad", Reason.UNREADABLE, "second"), Failure("bad", Reason.MISSING)])

    assert rows(
        catalog, "select reason, attempts, first_at < last_at from ntt_backup.failures"
    ) == [("missing", 2, True)]
    book.record([Blob("bad", 1)], [])
    assert rows(catalog, "select * from ntt_backup.failures") == []
    assert state(catalog)["bad"] == (True, True, False, 1)


def test_odd_blobids_and_details_are_recorded_as_they_are(catalog: Connection) -> None:
    add(catalog, *MALFORMED)
    book = Ledger(catalog, TARGET)
    detail = "nul \0, lone surrogate \udcff, é, " + "long " * 1000

    book.record([], [Failure(one, Reason.BAD_BLOBID, detail) for one in MALFORMED])

    failures = rows(catalog, "select blobid, detail from ntt_backup.failures")
    assert {blobid for blobid, _ in failures} == set(MALFORMED)
    assert all(str(text).startswith("nul \\0, lone surrogate \\udcff") for _, text in failures)
    assert all(len(str(text)) < 1100 for _, text in failures)
    book.record([Blob(one, 1) for one in MALFORMED], [])
    assert exact_totals(catalog, TARGET).copied == len(MALFORMED)


def test_blobs_deleted_while_recording_waits_for_them_are_no_error(
    catalog: Connection, catalog_url: str
) -> None:
    add(catalog, "going", "staying", "bad going")
    with (
        session(catalog_url, "owner") as owner,
        session(catalog_url, "worker") as worker,
        ThreadPoolExecutor(1) as threads,
    ):
        owner.execute("begin")
        owner.execute("delete from blobs where blobid like '%going'")
        recorded = threads.submit(
            Ledger(worker, TARGET).record,
            [Blob("gone", 1), Blob("going", 1), Blob("staying", 1)],
            [Failure("bad going", Reason.MISSING), Failure("bad gone", Reason.MISSING)],
        )
        while not rows(catalog, "select 1 from pg_locks where not granted"):
            pass
        owner.execute("commit")
        recorded.result()

    assert state(catalog) == {"staying": (True, True, False, 1)}
    assert rows(catalog, "select * from ntt_backup.failures") == []


@pytest.mark.parametrize(
    "body",
    [
        "return null;",
        "new.remote_copied := old.remote_copied;"
        " new.remote_copy_failed := old.remote_copy_failed; return new;",
    ],
)
@pytest.mark.parametrize("verdict", ["stored", "failed"])
def test_a_trigger_that_undoes_the_update_is_noticed(
    catalog: Connection, body: str, verdict: str
) -> None:
    add(catalog, "other", "stubborn")
    stubborn(catalog, body)
    blobids = ["gone", "other", "stubborn"]
    before = state(catalog)

    with pytest.raises(CatalogRefused, match="an update of blobs changes nothing") as caught:
        Ledger(catalog, TARGET).record(
            [Blob(one, 1) for one in blobids if verdict == "stored"],
            [Failure(one, Reason.MISSING) for one in blobids if verdict == "failed"],
        )

    assert caught.value.detail == "1 of its rows stay as they were, such as 'stubborn'"
    assert "triggers" in caught.value.hint
    assert state(catalog) == before
    assert rows(catalog, "select * from ntt_backup.failures") == []


def test_a_blobid_that_stands_there_twice_hides_no_row_that_stays_as_it_was(
    database: Connection,
) -> None:
    database.execute("create table blobs (blobid text, size bigint)")
    init_db(database, TARGET)
    add(database, "twice", "twice", "stubborn")
    stubborn(database, "return null;")

    with pytest.raises(CatalogRefused, match="an update of blobs changes nothing"):
        Ledger(database, TARGET).record([Blob("twice", 1), Blob("stubborn", 1)], [])


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        ("using (blobid <> 'stubborn')", "an update of blobs changes nothing"),
        ("using (true) with check (blobid <> 'stubborn')", "row-level security"),
    ],
)
def test_a_policy_that_forbids_the_update_is_noticed(
    catalog: Connection, catalog_url: str, role: Callable[[], str], policy: str, problem: str
) -> None:
    add(catalog, "other", "stubborn")
    name = role()
    for text in (
        f"grant select, update on blobs to {name}",
        f"grant usage on schema ntt_backup to {name}",
        f"grant select, insert, update, delete on all tables in schema ntt_backup to {name}",
        "alter table blobs enable row level security",
        "create policy seen on blobs for select using (true)",
        f"create policy written on blobs for update {policy}",
    ):
        catalog.execute(text.encode())

    with session(make_conninfo(catalog_url, user=name), "test") as conn:
        book = Ledger(conn, TARGET)
        with pytest.raises(CatalogRefused, match=problem) as caught:
            book.record([Blob("other", 1), Blob("stubborn", 1)], [])
        book.record([Blob("other", 1)], [])

    assert "policies of blobs" in caught.value.hint
    assert state(catalog) == {
        "other": (True, True, False, 1),
        "stubborn": (None, False, None, None),
    }


@pytest.mark.parametrize("listed", [True, False])
def test_requeueing_what_keeps_its_state_is_noticed(catalog: Connection, listed: bool) -> None:
    add(catalog, "stubborn", "other")
    Ledger(catalog, TARGET).record(
        [], [Failure(one, Reason.MISSING) for one in ("stubborn", "other")]
    )
    if not listed:
        catalog.execute("delete from ntt_backup.failures")
    stubborn(catalog, "return null;")

    with pytest.raises(CatalogRefused, match="an update of blobs changes nothing"):
        requeue(catalog, TARGET)

    assert exact_totals(catalog, TARGET).failed == 2


def test_a_batch_is_recorded_whole_or_not_at_all(catalog: Connection) -> None:
    add(catalog, "stored", "bad")
    book = Ledger(catalog, TARGET)
    catalog.execute("alter table ntt_backup.failures add check (detail <> 'refuse')")

    with pytest.raises(CatalogRefused):
        book.record([Blob("stored", 1)], [Failure("bad", Reason.MISSING, "refuse")])

    assert set(state(catalog).values()) == {(None, False, None, None)}


def test_commits_do_not_wait_for_the_disk(catalog: Connection) -> None:
    assert rows(catalog, "show synchronous_commit") == [("on",)]

    Ledger(catalog, TARGET)

    assert rows(catalog, "show synchronous_commit") == [("off",)]


@pytest.mark.parametrize("failing", [True, False])
def test_two_sessions_record_the_same_blobs_in_any_order(
    catalog: Connection, catalog_url: str, failing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_AT_ONCE", 50)
    names = [f"{n:03}" for n in range(300)]
    add(catalog, *names)
    start = threading.Barrier(2)

    def work(order: list[str]) -> None:
        with session(catalog_url, "test") as conn:
            book = Ledger(conn, TARGET)
            start.wait()
            stored, failed = (order[::2], order[1::2]) if failing else (order, [])
            for _ in range(20):
                # Only what failed is locked in one order; else one loses a deadlock at times.
                book.record(
                    [Blob(one, 1) for one in stored],
                    [Failure(one, Reason.MISSING) for one in failed],
                )

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, (names, names[::-1])))
    totals = exact_totals(catalog, TARGET)
    assert totals.copied + totals.failed == len(names)
    assert failing or not totals.failed


@pytest.mark.parametrize("sqlstate", ["40P01", "40001"])
def test_what_loses_to_another_transaction_is_written_again(
    catalog: Connection, sqlstate: str
) -> None:
    add(catalog, "a", "b", "c")
    losing(catalog, "blobs", sqlstate)
    turns = "select last_value from public.turns"
    writes: list[Callable[[], object]] = [
        lambda: Ledger(catalog, TARGET).record([Blob("a", 1)], [Failure("b", Reason.MISSING)]),
        lambda: requeue(catalog, TARGET),
        lambda: record_checks(catalog, TARGET, [], [Failure("a", Reason.REMOTE_MISSING)]),
        lambda: register_blobs(catalog, [Blob("d", 4)]),
        lambda: record_sizes(catalog, [Blob("c", 3)]),
    ]
    for write in writes:
        catalog.execute("alter sequence public.turns restart")
        write()
        assert rows(catalog, turns) >= [(2,)]

    found = {
        blobid: (copied, failed, size)
        for blobid, (copied, _, failed, size) in state(catalog).items()
    }
    assert found == {
        "a": (False, False, 1),
        "b": (None, False, None),
        "c": (None, None, 3),
        "d": (None, None, 4),
    }


def test_what_loses_each_time_is_an_outage(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_TRIES", (0.0, 0.0))
    losing(catalog, "blobs", "40P01", turns=9)
    with pytest.raises(CatalogUnavailable, match="not available to register blobs") as caught:
        register_blobs(catalog, [Blob("a", 1)])
    assert "other programs write the same rows" in caught.value.hint
    assert state(catalog) == {}


def test_requeue_by_reason_and_all(catalog: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_REQUEUE_BATCH", 3)
    init_db(catalog, "second")
    lost = [f"m{n}" for n in range(7)]
    broken = [f"u{n}" for n in range(6)]
    foreign = ["", *(f"x{n}" for n in range(7))]
    add(catalog, *lost, *broken, *foreign, "pending", "stored")
    book = Ledger(catalog, TARGET)
    book.record(
        [Blob("stored", 1)],
        [Failure(one, Reason.MISSING) for one in lost]
        + [Failure(one, Reason.UNREADABLE) for one in broken],
    )
    Ledger(catalog, "second").record([], [Failure(one, Reason.MISSING) for one in lost])
    catalog.execute("update blobs set remote_copy_failed = true where blobid = any(%s)", [foreign])
    checked = Failure("stored", Reason.REMOTE_CORRUPT)
    assert record_checks(catalog, TARGET, ["stored"], []) == 0
    assert record_checks(catalog, TARGET, [], [checked]) == 1
    assert exact_totals(catalog, TARGET).failed_by_reason == {
        "unknown": 8,
        "missing": 7,
        "unreadable": 6,
    }

    assert requeue(catalog, TARGET, "missing") == 7
    assert requeue(catalog, TARGET, "missing") == 0
    assert exact_totals(catalog, TARGET).failed_by_reason == {"unknown": 8, "unreadable": 6}

    catalog.execute("delete from blobs where blobid = 'u0'")
    assert requeue(catalog, TARGET) == 5 + 8
    assert requeue(catalog, TARGET) == 0

    totals = exact_totals(catalog, TARGET)
    assert (totals.pending, totals.failed, totals.copied) == (22, 0, 0)
    # Pending all the while, and not to be taken for right because the remote has it.
    assert totals.pending_by_reason == {"remote-corrupt": 1}
    left = rows(catalog, "select target, count(*) from ntt_backup.failures group by 1 order by 1")
    assert left == [("remote", 1), ("second", 7)]
    assert exact_totals(catalog, "second").failed == 7
