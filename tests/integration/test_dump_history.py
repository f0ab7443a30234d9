"""The last dumps, and what counts as a change since then: all but our own marks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from ntt_backup.catalog import history, ledger
from ntt_backup.catalog.connection import Connection, connect
from ntt_backup.catalog.ledger import Ledger, record_checks
from ntt_backup.errors import CatalogRefused, ConfigError
from ntt_backup.model import Blob, Failure, Reason
from tests.helpers.waiting import wait_until

TARGET = "remote"
NOW = datetime.now(UTC)


def counted(url: str) -> str:
    """The fingerprint, once the sessions of a moment ago are gone: at its end each has its rows
    counted.
    """

    def alone() -> bool:
        query = "select count(*) from pg_stat_activity where datname = current_database()"
        return conn.execute(query).fetchall() == [(1,)]

    with psycopg.connect(url, autocommit=True) as conn:
        wait_until(alone, "the end of all other sessions")
    with connect(url, "test") as own:
        return history.database_state(own).fingerprint


def execute(url: str, query: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(query.encode())


def stored(url: str) -> None:
    with connect(url, "test") as conn:
        Ledger(conn, TARGET).record([Blob("a", 1), Blob("b", None), Blob("nowhere", 1)], [])


def failed(url: str) -> None:
    with connect(url, "test") as conn:
        failures = [Failure("b", Reason.MISSING, ""), Failure("nowhere", Reason.MISSING, "")]
        Ledger(conn, TARGET).record([Blob("a", 1)], failures)


def requeued(url: str) -> None:
    failed(url)
    execute(url, "delete from ntt_backup.failures where blobid = 'b'")
    with connect(url, "test") as conn:
        Ledger(conn, TARGET).record([], [Failure("c", Reason.MISSING, "")])
        assert ledger.requeue(conn, TARGET) == 2


def checked(url: str) -> None:
    stored(url)
    with connect(url, "test") as conn:
        assert record_checks(conn, TARGET, ["a"], [Failure("b", Reason.REMOTE_MISSING, "")]) == 1


def staged(url: str) -> None:
    """As a pass over a query does, which may find nothing new."""
    with psycopg.connect(url, autocommit=True) as conn:
        for name in ("kept", "dropped"):
            conn.execute(
                f"create temporary table {name} (id serial, path text check (path <> ''))".encode()
            )
            conn.execute(f"create index on {name} (path)".encode())
        conn.execute("drop table dropped")


def filled(url: str) -> str:
    values = ", ".join(f"('{name}')" for name in "abcd")
    execute(url, f"insert into blobs (blobid) values {values}")
    return counted(url)


@pytest.mark.parametrize("work", [stored, failed, requeued, checked, staged])
def test_our_own_marks_and_temporary_tables_are_no_change(
    catalog_url: str, work: Callable[[str], None]
) -> None:
    before = filled(catalog_url)
    work(catalog_url)
    assert counted(catalog_url) == before


@pytest.mark.parametrize(
    "change",
    [
        "insert into blobs (blobid) values ('e')",
        "delete from blobs where blobid = 'd'",
        "update blobs set size = 5 where blobid = 'd'",
        "update blobs set remote_copied = false where blobid = 'a'",
        "truncate blobs",
        "create table of_others (name text)",
        "alter table blobs add column of_others text",
        "create function of_others() returns int language sql as 'select 1'",
        "create domain of_others as text",
        "alter table blobs alter column size set statistics 500",
        "alter table blobs alter column size set default 5",
        "create index on blobs (size)",
        "comment on table blobs is 'of others'",
    ],
)
def test_what_others_change_is_one(catalog_url: str, change: str) -> None:
    before = filled(catalog_url)
    stored(catalog_url)
    execute(catalog_url, change)
    stored(catalog_url)
    assert counted(catalog_url) != before


def test_counters_that_began_anew_are_a_change(catalog_url: str) -> None:
    before = filled(catalog_url)
    execute(catalog_url, "select pg_stat_reset()")
    assert counted(catalog_url) != before


def test_marks_that_were_rolled_back_cost_a_dump_and_hide_nothing(catalog_url: str) -> None:
    """The server counts them all the same, and we do not."""
    before = filled(catalog_url)
    execute(
        catalog_url,
        "create function ntt_backup.keep() returns trigger language plpgsql"
        " as 'begin return old; end';"
        "create trigger keep before update on blobs for each row"
        " when (new.blobid = 'b') execute function ntt_backup.keep()",
    )
    with_trigger = counted(catalog_url)
    assert with_trigger != before
    with pytest.raises(CatalogRefused):
        stored(catalog_url)
    assert counted(catalog_url) != with_trigger


def test_what_happens_in_another_database_is_no_change(
    catalog_url: str, role: Callable[[], str]
) -> None:
    before = filled(catalog_url)
    role()
    assert counted(catalog_url) == before


def note(conn: Connection, started_at: datetime, *, name: str = "", error: str = "") -> None:
    history.record_dump(conn, "remote", started_at, name=name, bytes=0, sha256="", error=error)


def test_a_database_is_empty_where_nobody_keeps_anything_in_it(database: Connection) -> None:
    history.require_empty(database)
    database.execute("create table other (n int)")
    with pytest.raises(ConfigError, match="is not empty") as caught:
        history.require_empty(database)
    assert "other" in caught.value.detail


def test_a_clock_that_was_ahead_once_hides_nothing(catalog: Connection) -> None:
    note(catalog, NOW + timedelta(days=90), name="ahead.dump")
    note(catalog, NOW, error="the remote is full")
    assert [one.name or one.error for one in history.last_dumps(catalog, "remote")] == [
        "ahead.dump",
        "the remote is full",
    ]
    note(catalog, NOW + timedelta(days=1), name="right.dump")
    assert [one.name for one in history.last_dumps(catalog, "remote")] == ["right.dump"]
