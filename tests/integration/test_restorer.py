"""The role that restores a dump can do nothing beyond the new database, and leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from ntt_backup.catalog.connection import connect
from ntt_backup.catalog.restorer import restorer
from ntt_backup.errors import CatalogRefused, DumpFailed
from tests.postgres import Postgres

ROLES = "select rolname from pg_roles order by 1"
OWNERS = """
    select datdba::regrole::text, (select nspowner::regrole::text from pg_namespace
    where nspname = 'public') from pg_database where datname = current_database()
"""


@pytest.fixture
def state(database_url: str) -> Iterator[list[object]]:
    """The roles of the server and the owners of the database, which must be the same afterwards."""

    def look() -> list[object]:
        with psycopg.connect(database_url) as conn:
            return [*conn.execute(ROLES).fetchall(), *conn.execute(OWNERS).fetchall()]

    before = look()
    yield before
    assert look() == before


@pytest.mark.parametrize(
    "evil",
    [
        "set role postgres",
        "set session authorization postgres",
        "copy (select 1) to program 'true'",
        "copy (select 1) to '/dev/shm/x'",
        "select pg_read_file('/etc/passwd')",
        "create role another superuser",
        "alter role postgres set work_mem = '1MB'",
        "alter system set work_mem = '1MB'",
        "create database another",
        "alter database postgres set work_mem = '1MB'",
        "grant pg_execute_server_program to current_user",
        "alter role current_user superuser",
        "create event trigger e on ddl_command_start execute function f()",
    ],
)
def test_what_restores_can_do_nothing_else(
    database_url: str, state: list[object], evil: str
) -> None:
    with (
        restorer(database_url, "test", allow_superuser=False) as who,
        psycopg.connect(who.url, autocommit=True) as conn,
    ):
        conn.execute("create function f() returns event_trigger language plpgsql as 'begin end'")
        for back in ("reset role", "reset session authorization", "set role none"):
            conn.execute(back.encode())
        with pytest.raises(psycopg.Error):
            conn.execute(evil.encode())


def test_all_that_was_made_belongs_to_the_user_afterwards(
    database_url: str, state: list[object]
) -> None:
    with restorer(database_url, "test", allow_superuser=False) as who:
        with psycopg.connect(who.url, autocommit=True) as conn:
            conn.execute("create schema s")
            conn.execute("create table s.t (a int)")
            conn.execute("select lo_create(4711)")
            conn.execute("comment on schema public is 'ours'")
            conn.execute("alter default privileges grant select on tables to public")
        # It still has a transaction, and locks.
        left = psycopg.connect(who.url)
        left.execute("lock table s.t")
    with psycopg.connect(database_url) as conn:
        owners = "select tableowner::text from pg_tables where tablename = 't'"
        assert conn.execute(owners.encode()).fetchall() == [("postgres",)]
        of_object = b"select lomowner::regrole::text from pg_largeobject_metadata"
        assert conn.execute(of_object).fetchall() == [("postgres",)]
    with pytest.raises(psycopg.Error):
        left.execute("select 1")


def test_a_role_that_cannot_log_in_is_dropped_and_said(
    database_url: str, state: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = CatalogRefused("no", detail="no pg_hba.conf entry")

    def refuse(url: str, application: str, **options: bool) -> object:
        if "ntt_restore_" in url:
            raise refused
        return connect(url, application, **options)

    monkeypatch.setattr("ntt_backup.catalog.restorer.connect", refuse)
    with (
        pytest.raises(DumpFailed, match="no lesser role can log in") as caught,
        restorer(database_url, "test", allow_superuser=False),
    ):
        raise AssertionError
    assert "no pg_hba.conf entry" in caught.value.detail
    assert "--allow-superuser" in caught.value.hint


def test_whoever_may_restore_by_himself_makes_no_role(
    postgres: Postgres, database_url: str, state: list[object]
) -> None:
    with restorer(database_url, "test", allow_superuser=True) as who:
        assert who.url == database_url
        with psycopg.connect(database_url) as conn:
            assert [one for one in conn.execute(ROLES) if one[0].startswith("ntt_restore_")] == []
