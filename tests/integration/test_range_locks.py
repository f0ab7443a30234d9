"""Claims on a real database: every blob once, no range twice, nothing lost with a connection."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import ANY

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog import range_locks
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.ledger import Ledger, requeue
from ntt_backup.catalog.range_locks import (
    Claims,
    claim_order,
    holders,
    lock_class,
    prefix_ranges,
    range_name,
)
from ntt_backup.catalog.schema import init_db
from ntt_backup.catalog.selection import first_pending
from ntt_backup.catalog.stats import pending_estimate
from ntt_backup.errors import CatalogUnavailable
from ntt_backup.model import Blob, Failure, Reason
from tests.helpers.postgres import session
from tests.integration.catalogs import (
    FORMS,
    INDEX,
    LIVE,
    LIVE_COLUMNS,
    MALFORMED,
    add,
    add_hashes,
    allow_null,
)

EVERYWHERE = range(256)


def add_prefixed(conn: Connection, prefix: str, count: int) -> None:
    """Blobs that all lie in one range, evenly."""
    conn.execute(
        "insert into blobs (blobid, size)"
        " select %s || substr(encode(sha256((n + 10000)::text::bytea), 'hex'), 3), n"
        " from generate_series(1, %s) as n",
        [prefix, count],
    )


def ids(taken: list[tuple[Blob, int]]) -> list[str]:
    return [blob.blobid for blob, _ in taken]


def entries_read(conn: Connection) -> int:
    """How many index entries have been read in this database until now."""
    conn.execute("select pg_stat_force_next_flush()")
    (row,) = conn.execute("select sum(idx_tup_read)::bigint from pg_stat_user_indexes").fetchall()
    return int(row[0])


@pytest.fixture
def other(catalog_url: str) -> Iterator[Connection]:
    with session(catalog_url, "other") as conn:
        yield conn


def test_taking_goes_on_where_it_stopped_in_order(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy the machine is, no reading takes too long.
    monkeypatch.setattr(range_locks, "_READ_MS", 60_000)
    expected = [f"{prefix:02x}{n:02x}" for prefix in (3, 4, 200) for n in range(25)]
    add(catalog, *expected)
    claims = Claims(catalog, "remote", EVERYWHERE)
    assert not claims.searching

    taken = [claims.take(10) for _ in range(9)]

    assert [len(batch) for batch in taken] == [10] * 7 + [5, 0]
    found = [(blob.blobid, index) for batch in taken for blob, index in batch]
    assert found == [(one, int(one[:2], 16)) for one in expected]
    assert claims.exhausted() == {3, 4, 200}


def test_a_claim_reads_no_more_than_it_needs(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the statistics are of a time when next to nothing was pending."""
    monkeypatch.setattr(range_locks, "_LOOK_MS", 60_000)
    add_hashes(catalog, 50_000)
    catalog.execute("update blobs set remote_copied = true")
    catalog.execute("analyze blobs")
    catalog.execute("update blobs set remote_copied = null")
    claims = Claims(catalog, "remote", EVERYWHERE)
    before = entries_read(catalog)

    assert len(claims.take(1000)) == 1000

    assert entries_read(catalog) - before < 5000


def test_a_range_is_not_walked_from_its_beginning_again(catalog: Connection) -> None:
    add_prefixed(catalog, "ab", 200)
    claims = Claims(catalog, "remote", EVERYWHERE)
    before = entries_read(catalog)

    assert [len(claims.take(10)) for _ in range(20)] == [10] * 20

    assert entries_read(catalog) - before < 1000


def test_a_range_with_much_in_it_is_shared(catalog: Connection, other: Connection) -> None:
    add_prefixed(catalog, "ab", 1000)
    add(catalog, "0a", "cd")
    mine = Claims(catalog, "remote", EVERYWHERE)
    theirs = Claims(other, "remote", EVERYWHERE)

    first = ids(mine.take(100))
    second = ids(theirs.take(100))

    assert first[0] == "0a"
    assert second[0] == "cd"
    assert len(first) == len(second) == 100
    assert set(first).isdisjoint(second)
    names = [range_name(one.index) for one in holders(catalog, "remote")]
    assert len(set(names)) == len(names) >= 4
    assert {name for name in names if len(name) == 2} == {"0a", "cd"}
    assert all(name.startswith("ab") for name in names if len(name) == 3)


def test_claims_go_on_in_a_table_that_is_altered_meanwhile(
    catalog: Connection, other: Connection
) -> None:
    add_hashes(catalog, 1000)
    Ledger(other, "remote")  # From then on plans are kept.
    claims = Claims(other, "remote", EVERYWHERE)
    taken = [ids(claims.take(100)) for _ in range(7)]

    catalog.execute("alter table blobs alter blobid type varchar(64)")

    taken += [ids(claims.take(100)) for _ in range(4)]
    assert [len(some) for some in taken] == [100] * 10 + [0]


def test_a_range_with_less_than_a_batch_is_held_as_a_whole(catalog: Connection) -> None:
    for prefix in ("ab", "cd", "ef"):
        add_prefixed(catalog, prefix, 390)
    claims = Claims(catalog, "remote", EVERYWHERE)

    assert [len(claims.take(500)) for _ in range(3)] == [500, 500, 170]

    names = [range_name(one.index) for one in holders(catalog, "remote")]
    assert names == ["ab", "cd", "ef"]


@pytest.mark.parametrize("prefix", ["00", "ab"])
def test_a_range_that_is_held_in_parts_is_nobodys_as_a_whole(
    catalog: Connection, other: Connection, prefix: str
) -> None:
    """Until its last part is given back, whoever took it."""
    add_prefixed(catalog, prefix, 1000)
    mine, theirs = (Claims(conn, "remote", EVERYWHERE) for conn in (catalog, other))
    assert len(mine.take(100)) == len(theirs.take(100)) == 100
    third = f"select pg_try_advisory_lock(%s, {int(prefix, 16)})"

    for claims, conn in ((mine, other), (theirs, catalog)):
        assert conn.execute(third, [lock_class("remote")]).fetchall() == [(False,)]
        claims.release([one.index for one in holders(catalog, "remote")])

    assert holders(catalog, "remote") == []
    assert catalog.execute(third, [lock_class("remote")]).fetchall() == [(True,)]


@pytest.fixture
def crawling(catalog: Connection, monkeypatch: pytest.MonkeyPatch) -> Claims:
    """Claims whose every statement is out of time behind its first slice."""
    monkeypatch.setattr(range_locks, "_SEARCH_SECONDS", 0.001)
    monkeypatch.setattr(range_locks, "_LOOK_MS", 0)
    monkeypatch.setattr(range_locks, "_LOOK_AGAIN_MS", 0)
    monkeypatch.setattr(range_locks, "_READ_MS", 0)
    return Claims(catalog, "remote", EVERYWHERE)


def test_dead_entries_that_nobody_may_clean_up_keep_no_claim_waiting(
    catalog: Connection, other: Connection, crawling: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run finds them that begins after another one, while a dump is under way."""
    add_hashes(catalog, 50_000)
    other.execute("begin isolation level repeatable read")
    other.execute("select 1 from blobs limit 1")
    catalog.execute("update blobs set remote_copied = true where substr(blobid, 1, 2) < 'c0'")
    catalog.execute("update blobs set remote_copied = true where substr(blobid, 3, 1) < '4'")
    really, walked = crawling._run, list[int]()

    def counted(name: str, values: dict[str, Any]) -> list[tuple[object, ...]]:
        before = entries_read(catalog)
        try:
            return really(name, values)
        finally:
            walked.append(entries_read(catalog) - before)

    monkeypatch.setattr(crawling, "_run", counted)

    while not (taken := crawling.take(100)):
        assert crawling.searching

    assert 0 < len(taken) <= 100
    assert max(walked) < 1000
    assert sum(walked) < 20_000


def take_to_the_end(claims: Claims) -> tuple[list[str], int]:
    """All that it gives, and in how many calls."""
    taken: list[str] = []
    calls = 0
    while (some := ids(claims.take(100))) or claims.searching:
        taken += some
        calls += 1
    return taken, calls


def test_a_search_among_dead_rows_has_pauses_and_finds_what_is_there(
    catalog: Connection, crawling: Claims
) -> None:
    add(catalog, "80a", "ffa")

    taken, calls = take_to_the_end(crawling)

    assert taken == ["80a", "ffa"]
    assert calls > 10


def test_what_is_under_way_is_not_claimed_again_as_part_of_its_range(
    catalog: Connection, crawling: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range that looks thin is held as a whole; its end, where much is inserted, in parts."""
    monkeypatch.setattr(range_locks, "rows_about", lambda _: 10_000_000)
    add(catalog, "ab5a", "ab5b")
    claims = Claims(catalog, "remote", [171])
    while not (taken := ids(claims.take(2))):
        assert claims.searching
    add_prefixed(catalog, "abf", 1000)
    for name in ("_LOOK_MS", "_LOOK_AGAIN_MS"):
        monkeypatch.setattr(range_locks, name, 60_000)

    taken += take_to_the_end(claims)[0]

    assert {len(range_name(index)) for index in claims.exhausted()} == {2, 3}
    assert len(taken) == len(set(taken)) == 1002


def test_a_search_among_dead_rows_in_parts_of_others_has_pauses(
    catalog: Connection, catalog_url: str, crawling: Claims
) -> None:
    with session(catalog_url, "first") as first, session(catalog_url, "second") as second:
        for conn, prefix in ((first, "ab"), (second, "cd")):
            add_prefixed(catalog, prefix, 1000)
            theirs = Claims(conn, "remote", [int(prefix, 16)])
            while not theirs.take(100):
                assert theirs.searching
        free = [f"{prefix}{last}" for prefix in ("ab", "cd") for last in "ef"]

        taken, calls = take_to_the_end(crawling)

        assert {one[:3] for one in taken} >= set(free)
        assert len(taken) == len(set(taken))
        assert calls > 10


def test_the_question_for_anything_pending_has_pauses_among_dead_rows(
    catalog: Connection, other: Connection, crawling: Claims
) -> None:
    add(catalog, "ffa")
    Claims(other, "remote", EVERYWHERE).take(10)

    answers = []
    for _ in range(2):
        answers.append([crawling.any_pending()])
        while answers[-1][-1] is None:
            answers[-1].append(crawling.any_pending())
        Ledger(catalog, "remote").record([Blob("ffa")], [])

    assert [some[-1] for some in answers] == [True, False]
    assert all(len(some) > 10 for some in answers)


def test_blobs_of_earlier_ranges_do_not_starve_later_ones(catalog: Connection) -> None:
    add(catalog, "00a", "10a", "20a")
    claims = Claims(catalog, "remote", EVERYWHERE)
    seen = []

    for _ in range(3):
        seen += ids(claims.take(1))
        add(catalog, f"00b{len(seen)}")
        claims.release(range(256))

    assert seen == ["00a", "10a", "20a"]


def test_nothing_is_left_only_where_a_whole_round_has_given_nothing(catalog: Connection) -> None:
    add(catalog, "03aa", "c8aa")
    claims = Claims(catalog, "remote", EVERYWHERE)
    taken = [ids(claims.take(1))]
    add(catalog, "01aa")  # Where the search has been already.

    taken += [ids(claims.take(1)) for _ in range(3)]

    assert taken == [["03aa"], ["c8aa"], ["01aa"], []]


def test_a_repeated_blobid_is_handed_out_once(database: Connection) -> None:
    database.execute("create table blobs (blobid text)")
    init_db(database, "remote")
    add(database, "0a", "0a", "0b", "0b", "0b", "0c", "1a", "1a")
    claims = Claims(database, "remote", EVERYWHERE)

    taken = [ids(claims.take(2)) for _ in range(5)]

    assert [blobid for batch in taken for blobid in batch] == ["0a", "0b", "0c", "1a"]
    Ledger(database, "remote").record([Blob(one) for batch in taken for one in batch], [])
    assert claims.any_pending() is False


def test_a_held_range_is_nobody_elses_until_it_is_released(
    catalog: Connection, other: Connection
) -> None:
    add(catalog, "0a1", "0a2", "1a")
    mine = Claims(catalog, "remote", EVERYWHERE)
    theirs = Claims(other, "remote", EVERYWHERE)

    assert ids(mine.take(1)) == ["0a1"]
    assert ids(theirs.take(10)) == ["1a"]
    assert ids(theirs.take(10)) == []
    assert ids(mine.take(10)) == ["0a2"]
    mine.release({10, 99})
    mine.release({10})
    assert ids(theirs.take(10)) == ["0a1", "0a2"]
    theirs.release(theirs.exhausted())
    assert holders(catalog, "remote") == []


def test_a_range_claimed_again_starts_at_its_beginning(catalog: Connection) -> None:
    add(catalog, "0a5", "0a6")
    claims = Claims(catalog, "remote", EVERYWHERE)
    assert ids(claims.take(1)) == ["0a5"]
    add(catalog, "0a1")
    assert ids(claims.take(9)) == ["0a6"]
    Ledger(catalog, "remote").record([Blob("0a5"), Blob("0a6")], [])

    claims.release([10])

    assert ids(claims.take(9)) == ["0a1"]


def test_locks_vanish_with_the_connection(catalog: Connection, catalog_url: str) -> None:
    add(catalog, "0a")
    with session(catalog_url, "victim") as conn:
        claims = Claims(conn, "remote", EVERYWHERE)
        claims.take(1)
        assert Claims(catalog, "remote", EVERYWHERE).take(1) == []

        catalog.execute("select pg_terminate_backend(%s, 10000)", [conn.info.backend_pid])

        with pytest.raises(CatalogUnavailable):
            claims.take(1)
    assert ids(Claims(catalog, "remote", EVERYWHERE).take(1)) == ["0a"]


def test_holders_are_seen_by_any_role(
    catalog: Connection, other: Connection, catalog_url: str, role: Callable[[], str]
) -> None:
    add(catalog, "0a", "80")
    Claims(other, "remote", EVERYWHERE).take(10)

    (first, second) = holders(catalog, "remote")
    with session(make_conninfo(catalog_url, user=role()), "stranger") as stranger:
        (seen, _) = holders(stranger, "remote")

    assert (first.index, second.index) == (10, 128)
    assert first.application_name == seen.application_name == "other"
    assert first.pid == seen.pid == other.info.backend_pid


def test_any_pending_knows_what_others_hold_and_nothing_else(
    catalog: Connection, other: Connection
) -> None:
    claims = Claims(catalog, "remote", EVERYWHERE)
    assert claims.any_pending() is False
    allow_null(catalog)
    add(catalog, None, "0a", "0b")
    Claims(other, "remote", EVERYWHERE).take(10)
    assert claims.take(10) == []
    assert claims.any_pending() is True

    Ledger(catalog, "remote").record([Blob("0a")], [Failure("0b", Reason.MISSING)])

    assert claims.any_pending() is False


@pytest.mark.parametrize(
    ("workers", "prefix"),
    [
        (7, ""),
        pytest.param(3, "00", marks=pytest.mark.long),
        pytest.param(7, "ff", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("milliseconds", [10, pytest.param(0, marks=pytest.mark.long)])
def test_claimers_cover_everything_once_and_share_no_range(
    catalog: Connection,
    catalog_url: str,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    prefix: str,
    milliseconds: int,
) -> None:
    """Nor a part of a range, where nearly all lies in one; also if every statement is cut short."""
    monkeypatch.setattr(range_locks, "_LOOK_MS", milliseconds)
    monkeypatch.setattr(range_locks, "_LOOK_AGAIN_MS", milliseconds)
    monkeypatch.setattr(range_locks, "_READ_MS", milliseconds)
    add_hashes(catalog, 400 if prefix else 1500)
    if prefix:
        add_prefixed(catalog, prefix + "0", 225)
        add_prefixed(catalog, prefix, 3000)
    allow_null(catalog)
    add(catalog, *MALFORMED, None, None)
    guard = threading.Lock()
    held: dict[int, int] = {}
    taken: Counter[str] = Counter()
    problems: list[str] = []

    def work(number: int) -> None:
        with session(catalog_url, f"worker {number}") as conn:
            claims = Claims(conn, "remote", claim_order(number, workers))
            with session(catalog_url, "ledger") as ledger_conn:
                ledger = Ledger(ledger_conn, "remote")
                while (batch := claims.take(37)) or claims.searching:
                    with guard:
                        for blob, index in batch:
                            taken[blob.blobid] += 1
                            if held.setdefault(index, number) != number:
                                problems.append(f"{index} is held by {held[index]} and {number}")
                    ledger.record([blob for blob, _ in batch], [])
                    done = claims.exhausted()
                    with guard:
                        for index in done:
                            held.pop(index, None)
                    claims.release(done)

    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(work, range(workers)))

    assert problems == []
    assert set(taken.values()) == {1}
    there = catalog.execute("select count(blobid) from blobs").fetchall()
    assert [(len(taken),)] == there
    claims = Claims(catalog, "remote", EVERYWHERE)
    while (pending := claims.any_pending()) is None:
        pass
    assert not pending


@pytest.fixture
def large(database: Connection, request: pytest.FixtureRequest) -> Connection:
    """100,000 blobs in a live table with an index of the given form, one in 20 of them pending."""
    for text in (LIVE, LIVE_COLUMNS):
        database.execute(sql.SQL(text))
    database.execute(
        "insert into blobs (blobid, remote_copied)"
        " select encode(sha256(n::text::bytea), 'hex'), nullif(n % 20 > 0, false)"
        " from generate_series(1, 100000) as n"
    )
    database.execute(sql.SQL(INDEX + FORMS[request.param]))
    init_db(database, "remote")
    database.execute("vacuum analyze blobs")
    return database


@pytest.mark.parametrize("large", FORMS, indirect=True)
def test_no_query_of_the_loop_reads_more_than_the_partial_index(large: Connection) -> None:
    last = prefix_ranges()[-1]
    Ledger(large, "remote")  # From then on plans are kept.

    def claim_everything(order: Sequence[int]) -> None:
        claims = Claims(large, "remote", order)
        while claims.take(100):
            pass
        claims.release(range(256))

    for call in (
        lambda: claim_everything(EVERYWHERE),
        lambda: claim_everything([last.index]),
        lambda: Claims(large, "remote", EVERYWHERE).any_pending(),
        lambda: pending_estimate(large, "remote", 60_000),
        lambda: first_pending(large, "remote", 10_000, 60_000),
    ):
        tempt_to_read_the_table(large)
        before = scans(large)

        call()

        assert scans(large) == {**before, "idx_blobs_remote_pending": ANY}
        assert scans(large)["idx_blobs_remote_pending"] > before["idx_blobs_remote_pending"]

    tempt_to_read_the_table(large)
    before = scans(large)
    requeue(large, "remote")
    assert scans(large)["blobs"] == before["blobs"]


def tempt_to_read_the_table(conn: Connection) -> None:
    """Make every index look bad, as it does to a planner that guesses millions of rows."""
    conn.execute("reset all")
    conn.execute("set random_page_cost = 10000")


def scans(conn: Connection) -> dict[str, int]:
    """How often the table (`blobs`) and each of its indexes were scanned so far."""
    conn.execute("select pg_stat_force_next_flush()")
    rows = conn.execute(
        "select relname, seq_scan from pg_stat_user_tables where relname = 'blobs'"
        " union all select indexrelname, idx_scan from pg_stat_user_indexes where relname = 'blobs'"
    )
    return {str(name): int(count) for name, count in rows}
