"""The ledger, the figures, the runs and the registry, on a real database."""

from __future__ import annotations

import threading
from collections.abc import Callable
from uuid import UUID, uuid4

import pytest
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog import ledger, selection, stats
from ntt_backup.catalog.connection import Connection, connect
from ntt_backup.catalog.history import end_run, last_run, start_run, update_run
from ntt_backup.catalog.ledger import Ledger, record_checks, requeue
from ntt_backup.catalog.scan_state import begin_scan, load_scan, missing, register, save_scan
from ntt_backup.catalog.schema import init_db
from ntt_backup.catalog.selection import iter_pending
from ntt_backup.catalog.stats import exact_totals
from ntt_backup.errors import CatalogRefused
from ntt_backup.model import Blob, Failure, Reason
from tests.integration.test_range_locks import MALFORMED, add, add_hashes, allow_null

TARGET = "remote"


def rows(conn: Connection, query: str) -> list[tuple[object, ...]]:
    return conn.execute(query.encode()).fetchall()


def state(conn: Connection) -> dict[str, tuple[object, ...]]:
    """blobid -> copied, whether checked, failed, size."""
    found = rows(
        conn,
        "select blobid, remote_copied, remote_last_checked is not null, remote_copy_failed, size"
        " from blobs",
    )
    return {str(blobid): tuple(rest) for blobid, *rest in found}


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


@pytest.mark.parametrize(
    ("kind", "largest"),
    [
        ("smallint", 2**15 - 1),
        ("integer", 2**31 - 1),
        ("numeric(5)", 99_999),
        ("numeric(7, 2)", 99_999),
        ("bigint", 2**63 - 1),
        ("numeric", 2**63 - 1),
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
    register(database, [Blob("found", largest), Blob("found larger", larger)])

    left = largest if larger == largest else None
    assert {blobid: (copied, size) for blobid, (copied, *_, size) in state(database).items()} == {
        "largest": (True, largest),
        "larger": (True, left),
        "found": (None, largest),
        "found larger": (None, left),
    }


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


def test_blobs_deleted_meanwhile_leave_no_trace(catalog: Connection) -> None:
    add(catalog, "here")

    Ledger(catalog, TARGET).record(
        [Blob("gone", 1), Blob("here", 1)], [Failure("gone too", Reason.MISSING)]
    )

    assert set(state(catalog)) == {"here"}
    assert rows(catalog, "select * from ntt_backup.failures") == []


def test_blobs_deleted_while_recording_waits_for_them_are_no_error(
    catalog: Connection, catalog_url: str
) -> None:
    add(catalog, "going", "staying", "bad going")
    with connect(catalog_url, "owner") as owner, connect(catalog_url, "worker") as worker:
        owner.execute("begin")
        owner.execute("delete from blobs where blobid like '%going'")
        errors: list[Exception] = []

        def record() -> None:
            try:
                Ledger(worker, TARGET).record(
                    [Blob("going", 1), Blob("staying", 1)], [Failure("bad going", Reason.MISSING)]
                )
            except CatalogRefused as error:
                errors.append(error)

        thread = threading.Thread(target=record)
        thread.start()
        while not rows(catalog, "select 1 from pg_locks where not granted"):
            pass
        owner.execute("commit")
        thread.join()

    assert errors == []
    assert state(catalog) == {"staying": (True, True, False, 1)}
    assert rows(catalog, "select * from ntt_backup.failures") == []


def stubborn(conn: Connection, body: str) -> None:
    """A trigger of the table's owner, before each update of the blobid 'stubborn'."""
    for text in (
        f"create function stubborn() returns trigger language plpgsql as $$begin {body} end$$",
        "create trigger stubborn before update on blobs for each row"
        " when (new.blobid = 'stubborn') execute function stubborn()",
    ):
        conn.execute(text.encode())


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

    with connect(make_conninfo(catalog_url, user=name), "test") as conn:
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


def test_nothing_to_record(catalog: Connection) -> None:
    Ledger(catalog, TARGET).record([], [])


def test_commits_do_not_wait_for_the_disk(catalog: Connection) -> None:
    assert rows(catalog, "show synchronous_commit") == [("on",)]

    Ledger(catalog, TARGET)

    assert rows(catalog, "show synchronous_commit") == [("off",)]


@pytest.mark.parametrize("failing", [True, False])
def test_recording_the_same_blobs_in_any_order_never_deadlocks(
    catalog: Connection, catalog_url: str, failing: bool
) -> None:
    names = [f"{n:03}" for n in range(300)]
    add(catalog, *names)
    start = threading.Barrier(2)
    errors: list[Exception] = []

    def work(order: list[str]) -> None:
        with connect(catalog_url, "test") as conn:
            book = Ledger(conn, TARGET)
            start.wait()
            try:
                for _ in range(20):
                    book.record(
                        [Blob(one, 1) for one in order[::2]],
                        [Failure(one, Reason.MISSING) for one in order[1::2] if failing],
                    )
            except Exception as error:
                errors.append(error)
                raise

    threads = [threading.Thread(target=work, args=[order]) for order in (names, names[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []


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
    assert (totals.pending, totals.failed, totals.copied) == (21, 0, 1)
    assert rows(catalog, "select count(*), max(target) from ntt_backup.failures") == [(7, "second")]
    assert exact_totals(catalog, "second").failed == 7


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


def test_an_empty_catalog_has_figures_too(catalog: Connection) -> None:
    totals = exact_totals(catalog, TARGET)

    assert (totals.pending, totals.pending_bytes, totals.failed_by_reason) == (0, 0, {})
    assert list(iter_pending(catalog, TARGET)) == []


def test_pending_blobs_are_listed_page_by_page(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_PAGE", 7)
    allow_null(catalog)
    add_hashes(catalog, 70)
    add(catalog, *MALFORMED, None, "stored", size=3)
    Ledger(catalog, TARGET).record([Blob("stored")], [])

    listed = list(iter_pending(catalog, TARGET))

    expected = rows(
        catalog,
        "select blobid, size from blobs where blobid is not null and remote_copied is not true"
        " order by blobid",
    )
    assert [(blob.blobid, blob.size) for blob in listed] == expected


def test_a_listing_that_is_not_read_on_holds_no_transaction(
    catalog: Connection, catalog_url: str
) -> None:
    add_hashes(catalog, 10)
    with connect(catalog_url, "reader") as conn:
        next(iter_pending(conn, TARGET))

        assert rows(
            catalog, "select state from pg_stat_activity where application_name = 'reader'"
        ) == [("idle",)]


def test_runs_are_remembered(catalog: Connection) -> None:
    assert last_run(catalog, TARGET) is None
    first, second = uuid4(), uuid4()
    start(catalog, first)
    end_run(catalog, first, outcome="done", exit_code=7, copied=5, failed=1, bytes=2**40)

    run = last_run(catalog, TARGET)
    assert run is not None
    assert (run.run_id, run.outcome, run.exit_code) == (first, "done", 7)
    assert (run.copied, run.failed, run.bytes) == (5, 1, 2**40)
    assert run.ended_at is not None

    start(catalog, second)
    update_run(catalog, second, copied=3, failed=0, bytes=30)

    run = last_run(catalog, TARGET)
    assert run is not None
    assert (run.run_id, run.copied, run.ended_at, run.outcome) == (second, 3, None, None)
    assert run.updated_at > run.started_at
    assert (run.host, run.pid, run.strategy, run.workers) == ("here", 42, "tar", 4)
    assert last_run(catalog, "other") is None


def test_a_note_that_arrives_late_takes_nothing_back(catalog: Connection) -> None:
    """A statement that was given up, because a lock held it, is still carried out afterwards."""
    run_id = uuid4()
    start(catalog, run_id)
    update_run(catalog, run_id, copied=7, failed=2, bytes=70)
    update_run(catalog, run_id, copied=5, failed=1, bytes=50)

    run = last_run(catalog, TARGET)
    assert run is not None
    assert (run.copied, run.failed, run.bytes) == (7, 2, 70)

    end_run(catalog, run_id, outcome="done", exit_code=0, copied=9, failed=3, bytes=90)
    ended = last_run(catalog, TARGET)
    update_run(catalog, run_id, copied=7, failed=2, bytes=70)

    assert last_run(catalog, TARGET) == ended


def start(conn: Connection, run_id: UUID) -> None:
    start_run(conn, run_id, target=TARGET, host="here", pid=42, strategy="tar", workers=4)


def test_registering_adds_what_is_missing_and_leaves_the_rest(catalog: Connection) -> None:
    add(catalog, "known", size=1)
    odd = ["tab\tand\\N", "line\nbreak", ""]
    found = [Blob("known", 2), Blob("new", 3), Blob("new", 3), *(Blob(one) for one in odd)]

    assert missing(catalog, [blob.blobid for blob in found]) == {"new", *odd}
    assert register(catalog, found) == 4

    assert missing(catalog, [blob.blobid for blob in found]) == set()
    assert register(catalog, found) == 0
    assert register(catalog, []) == 0
    assert state(catalog)["known"] == (None, False, None, 1)
    assert state(catalog)["new"] == (None, False, None, 3)


def test_registering_while_another_program_inserts(catalog: Connection, catalog_url: str) -> None:
    results: list[int] = []
    with connect(catalog_url, "other") as other, connect(catalog_url, "scan") as scan:
        other.execute("begin")
        add(other, "both")
        thread = threading.Thread(
            target=lambda: results.append(register(scan, [Blob("both", 1), Blob("ours", 1)]))
        )
        thread.start()
        while not rows(catalog, "select 1 from pg_locks where not granted"):
            pass
        other.execute("commit")
        thread.join()

    assert results == [1]
    assert set(state(catalog)) == {"both", "ours"}


def test_registering_without_a_unique_index_repeats_nothing(database: Connection) -> None:
    database.execute("create table blobs (blobid text)")
    init_db(database, TARGET)

    assert register(database, [Blob("a", 1)]) == 1
    assert register(database, [Blob("a", 1), Blob("b", 1), Blob("b", 2)]) == 1


def test_a_foreign_column_that_needs_a_value_is_named(catalog: Connection) -> None:
    catalog.execute("alter table blobs add n_hardlinks int not null")

    with pytest.raises(CatalogRefused, match="not-null") as caught:
        register(catalog, [Blob("a", 1)])

    assert "n_hardlinks" in caught.value.hint


def test_the_progress_of_a_scan(catalog: Connection) -> None:
    assert load_scan(catalog, "/store") is None
    begin_scan(catalog, "/store")
    begin_scan(catalog, "/other")

    save_scan(catalog, "/store", "ab/cd", registered=10, strays=2)

    progress = load_scan(catalog, "/store")
    assert progress is not None
    assert (progress.directory, progress.registered, progress.strays) == ("ab/cd", 10, 2)
    assert progress.finished_at is None

    save_scan(catalog, "/store", "ff/ff", registered=11, strays=2, finished=True)
    finished = load_scan(catalog, "/store")
    assert finished is not None
    assert finished.finished_at is not None

    begin_scan(catalog, "/store")
    again = load_scan(catalog, "/store")
    assert again is not None
    assert (again.directory, again.registered, again.finished_at) == (None, 0, None)
    assert again.started_at > finished.started_at
